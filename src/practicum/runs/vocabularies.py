"""Compare the tokenizers of student and teachers before any weights are loaded."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from practicum.errors import ModelError, VocabularyError
from practicum.models.config import ModelConfig
from practicum.models.files import digest_file
from practicum.models.sources import find_tokenizer, is_gguf, locate
from practicum.ports import walk
from practicum.recipe import Recipe
from practicum.runs.opening import find_origin
from practicum.teachers.model import Config as ModelTeacherConfig
from practicum.teachers.translated import Config as TranslatedConfig
from practicum.text import map_vocabularies


def find_contradictions(recipe: Recipe, *, asks_hub: bool) -> Iterator[str]:
    """Yield a line for each teacher that has another token than the student under an id of both.

    Models of the hub are left out unless `asks_hub`. A tokenizer that cannot be read is refused where
    its model is loaded.
    """
    student = find_origin(recipe.student)
    if not (recipe.backend.checkpoints_here and _has_tokenizer(student, asks_hub=asks_hub)):
        return
    # Imported here: transformers takes a second, and most pairs share a file.
    from practicum.text.tokenizers import load_tokenizer

    for place, config in _list_teachers(recipe):
        if not _has_tokenizer(config, asks_hub=asks_hub):
            continue
        with suppress(ModelError):
            folders = [locate(model, needs_weights=False) for model in (student, config)]
            if _hash_tokenizer(folders[0]) == _hash_tokenizer(folders[1]):
                continue
            try:
                map_vocabularies(
                    load_tokenizer(folders[0], student), load_tokenizer(folders[1], config)
                )
            except VocabularyError as error:
                yield f"{place}: {error}"


def _list_teachers(recipe: Recipe) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the place and the settings of each local model that scores the student's own tokens."""
    for role, teacher in (("teacher", recipe.teacher), ("reference", recipe.reference)):
        translated: list[tuple[str, ...]] = []
        for keys, config in walk(teacher) if teacher is not None else ():
            if isinstance(config, TranslatedConfig):
                translated.append(keys)
            is_inside = any(keys[: len(outer)] == outer for outer in translated)
            if isinstance(config, ModelTeacherConfig) and not is_inside:
                yield ".".join((role, *keys)), find_origin(config)


def _has_tokenizer(config: ModelConfig, *, asks_hub: bool) -> bool:
    """Return True if the model is a folder, or a name that may be asked for at the hub."""
    # A GGUF file is converted first, which takes minutes.
    if not isinstance(config.model, str) or is_gguf(config.model):
        return False
    return asks_hub or Path(config.model).expanduser().is_dir()


def _hash_tokenizer(source: str) -> str:
    """Return the digest of a folder's tokenizer, or the name of the source if it has no such file."""
    path = Path(find_tokenizer(source)) / "tokenizer.json"
    return digest_file(path) if path.is_file() else source
