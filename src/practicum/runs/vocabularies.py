"""Compare the tokenizers of student and teachers before any weights are loaded."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from practicum.errors import ModelError, VocabularyError
from practicum.models.config import ModelConfig
from practicum.models.files import digest_file
from practicum.models.sources import find_tokenizer, is_gguf
from practicum.ports import walk
from practicum.recipe import Recipe
from practicum.runs.opening import find_origin
from practicum.teachers.model import Config as ModelTeacherConfig
from practicum.teachers.translated import Config as TranslatedConfig
from practicum.text import map_vocabularies

TOKENIZER = "tokenizer.json"


def find_contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each teacher that has a different token than the student under a shared id.

    Models that are not on this machine yet are compared when they are loaded, and a tokenizer that
    cannot be read is refused there.
    """
    if not recipe.backend.checkpoints_here:
        return
    student = find_origin(recipe.student)
    folder = _find_tokenizer_folder(student)
    for place, config in _list_teachers(recipe):
        other_folder = _find_tokenizer_folder(config)
        if folder is None or other_folder is None or _are_same_file(folder, other_folder):
            continue
        # Imported here: transformers takes a second, and most pairs share a file.
        from practicum.text.tokenizers import load_tokenizer

        with suppress(ModelError):
            tokenizers = load_tokenizer(folder, student), load_tokenizer(other_folder, config)
            try:
                map_vocabularies(*tokenizers)
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


def _find_tokenizer_folder(config: ModelConfig) -> str | None:
    """Return the folder of a model's tokenizer, also in the hub's cache; None if it is not here."""
    # A GGUF file is converted first, which takes minutes.
    if not isinstance(config.model, str) or is_gguf(config.model):
        return None
    try:
        source = find_tokenizer(str(Path(config.model).expanduser()))
        if Path(source).is_dir():
            return source
        cached = try_to_load_from_cache(source, TOKENIZER)
    except (HFValidationError, ModelError):
        return None
    return str(Path(cached).parent) if isinstance(cached, str) else None


def _are_same_file(*folders: str) -> bool:
    """Return True if the tokenizers of two folders are the same bytes."""
    paths = [Path(folder) / TOKENIZER for folder in folders]
    return all(path.is_file() for path in paths) and len(set(map(digest_file, paths))) == 1
