"""The pictures or sounds that a multimodal model reads: its processor, and the tensors of a batch.

A renderer writes a picture's placeholders as ids beyond the vocabulary that identify its file. When
the model reads a prompt, its own placeholder and the picture's tensors take their places.
"""

import inspect
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.utils.hub import cached_file

from practicum.backends.local.newest import NewestEntries
from practicum.errors import ModelError
from practicum.pictures import AUDIO, IMAGE, PictureReader, is_picture, load_picture
from practicum.sounds import RATE
from practicum.text.tokenizers import UNREADABLE, shorten_error

FAMILIES = {
    "gemma3": "Gemma3Processor",
    "idefics3": "Idefics3Processor",
    "internvl": "InternVLProcessor",
    "llava": "LlavaProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    # SmolVLM's own processor needs a package for videos; for pictures both write the same.
    "smolvlm": "Idefics3Processor",
}
"""The processor of each type of model that reads pictures. Each has a test."""

SOUND_FAMILIES = {
    "audioflamingo3": "AudioFlamingo3Processor",
    "qwen2_audio": "Qwen2AudioProcessor",
}
"""The same for sounds."""

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

MOST_BYTES = 1 << 28
"""The bytes of the newest pictures' tensors that are kept; others are computed again."""

MOST_TEXT = 1 << 30
"""The bytes of the newest paths and `data:` URLs of pictures that are kept; a run's frames may be many."""

_PLACEHOLDER_KEY = re.compile(r"(image|video|vision|boi|eoi|audio)\w*_(id|index)")

_NOT_MEDIA = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


_IMAGES = NewestEntries[int, str](MOST_TEXT)
"""The pictures that renderers of this process have read, by their ids: several models may read one text."""


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """A picture as a model reads it: the tokens in its place, and the tensors that belong to them.

    `count` is the number of placeholders among the tokens, which the picture's states replace.
    """

    tokens: tuple[int, ...]
    count: int
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Pictures:
    """Reads pictures or sounds with a model's processor; as a `practicum.pictures.PictureReader` does.

    `image_id` is the placeholder in the model's vocabulary, `banned_ids` are all tokens of media,
    which are never sampled, and `source` is the model's folder or hub name. `hears` is True if the
    model reads sounds, and no pictures.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        image_id: int,
        banned_ids: frozenset[int],
        source: str,
        hears: bool,
    ) -> None:
        self.banned_ids = banned_ids
        self._hears = hears
        self._processor: Any = processor
        self._source = source
        self._image_id = image_id
        self._tokens = NewestEntries[str, tuple[int, ...]](MOST_TEXT)
        self._newest = NewestEntries[int, Media](MOST_BYTES)

    def open_reader(self) -> PictureReader:
        """Return the reader for a renderer."""
        return PictureReader(self.place, self.read, self.find, self.mark)

    @property
    def mark(self) -> str:
        """The text that marks a medium in a message, if the model reads such media."""
        return AUDIO if self._hears else IMAGE

    @property
    def place(self) -> str:
        """The text that the chat template writes for a picture."""
        return self._processor.audio_token if self._hears else self._processor.image_token

    def read(self, image: str) -> tuple[int, ...]:
        """Return the tokens in a picture's place, and remember the picture for the model."""
        tokens = self._tokens.get(image)
        if tokens is None:
            tokens = self._process(image)[1].tokens
            self._tokens.put(image, tokens, len(image) + 8 * len(tokens))
        _IMAGES.put(next(filter(is_picture, tokens)), image, len(image))
        return tokens

    def find(self, number: int) -> str | None:
        """Return the picture of an id; None if no renderer of this process has read it."""
        return _IMAGES.get(number)

    def _process(self, image: str) -> tuple[int, Media]:
        """Return a picture's id and media, from one call of the processor."""
        number, medium = load_picture(image)
        files: dict[str, Any] = {"images": [medium]}
        if self._hears:
            files = {"audio": [medium], "sampling_rate": RATE}
            self._check_length(len(medium))
        output = self._processor(
            **files, text=[self.place], add_special_tokens=False, return_tensors="pt"
        )
        ids = output["input_ids"][0].tolist()
        tokens = tuple(number if token == self._image_id else token for token in ids)
        tensors = {name: tensor for name, tensor in output.items() if name not in _NOT_MEDIA}
        media = Media(tokens, tokens.count(number), tensors)
        self._newest.put(number, media, media.nbytes)
        return number, media

    def _check_length(self, samples: int) -> None:
        longest = self._processor.feature_extractor.n_samples
        if samples > longest:
            raise ModelError(
                f"{self._source} reads sounds of at most {longest / RATE:g} seconds, and one has "
                f"{samples / RATE:.2f}; cut it"
            )

    def _load(self, number: int) -> Media:
        """Return a picture's media by its id; ModelError if its file changed."""
        media = self._newest.get(number)
        if media is not None:
            return media
        image = _IMAGES.get(number)
        if image is None:
            raise ModelError(
                "a text shows a picture of an environment that is not kept; sample it again"
            )
        again, media = self._process(image)
        if again != number:
            raise ModelError(f"picture {image[:60]!r} changed during the run; restore the file")
        return media

    def _list_media(self, ids: Int[Tensor, "B L"]) -> Iterator[Media]:
        """Yield the media of each row's pictures, in order."""
        for row in ids.tolist():
            numbers = list(filter(is_picture, row))
            while numbers:
                media = self._load(numbers[0])
                part, numbers = numbers[: media.count], numbers[media.count :]
                if part != part[:1] * media.count:
                    raise ModelError(
                        f"{self._source}: a prompt for another model has other places for a picture, which "
                        f"has {media.count} tokens here; take a model with the same processor"
                    )
                yield media

    def collect(
        self, body: torch.nn.Module, ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B M"]
    ) -> dict[str, Tensor]:
        """Return a body's arguments for a batch with pictures; empty for a batch without any."""
        media = list(self._list_media(ids))
        if not media:
            return {}
        tensors = {
            name: _join([picture.tensors for picture in media], name) for name in media[0].tensors
        }
        arguments = {name: tensor.to(ids.device) for name, tensor in tensors.items()}
        marks = is_picture(ids)
        arguments["input_ids"] = plain = ids.masked_fill(marks, self._image_id)
        if "token_type_ids" in inspect.signature(body.forward).parameters:
            # Gemma's tokens of one picture see each other.
            arguments["token_type_ids"] = marks.long()
        if "image_grid_thw" in tensors:
            # Qwen's positions have three axes, and fewer of them than there are tokens.
            finder: Any = body
            arguments["position_ids"], _ = finder.get_rope_index(
                plain,
                mm_token_type_ids=marks.int(),
                image_grid_thw=arguments["image_grid_thw"],
                attention_mask=mask,
            )
        return arguments


def _join(pictures: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Join one tensor of several pictures along the axis that counts pictures."""
    tensors = [tensors[name] for tensors in pictures]
    if "pixel_attention_mask" not in pictures[0]:
        return torch.cat(tensors)
    # Idefics3 counts texts in the first axis, and masks the padding of smaller pictures.
    height, width = (max(tensor.shape[axis] for tensor in tensors) for axis in (-2, -1))
    padded = [
        torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1], 0, height - tensor.shape[-2]))
        for tensor in tensors
    ]
    return torch.cat(padded, dim=1)


def choose_class(family: str) -> Any:
    """Return the class of transformers that loads a type of model, with its head."""
    if family in SOUND_FAMILIES:
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if family in FAMILIES else AutoModelForCausalLM


def refuse_unknown_family(source: str, family: str) -> None:
    """Raise ModelError for a type of model that reads pictures and has no test here."""
    is_text = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not is_text | (family in FAMILIES):
        raise ModelError(
            f"{source}: {family} reads pictures, and is not supported yet; the types that are: "
            f"{', '.join(FAMILIES)}"
        )


def reads_pictures(source: str) -> bool:
    """Return True if a folder or hub name has a model of a known family, and its processor."""
    settings, _ = PretrainedConfig.get_config_dict(source)
    is_known = settings.get("model_type") in FAMILIES | SOUND_FAMILIES
    return is_known and any(_find_file(source, name) for name in PROCESSOR_FILES)


def copy_processor(source: str, folder: Path) -> None:
    """Copy the processor's files of a model that reads pictures into a folder."""
    for name in PROCESSOR_FILES if reads_pictures(source) else ():
        path = _find_file(source, name)
        if path is not None:
            shutil.copyfile(path, folder / name)


def open_pictures(source: str, tokenizer: PreTrainedTokenizerBase) -> Pictures | None:
    """Return the reader of a model's pictures; None for a model that reads none.

    A chat template of the processor replaces the tokenizer's. Raises ModelError if the processor
    cannot be used.
    """
    if not reads_pictures(source):
        return None
    described, _ = PretrainedConfig.get_config_dict(source)
    hears = described["model_type"] in SOUND_FAMILIES
    try:
        settings, _ = ProcessorMixin.get_processor_dict(source)
        template = settings.pop("chat_template", None)
        opener: Any = AutoFeatureExtractor if hears else AutoImageProcessor
        reader = opener.from_pretrained(source)
        processor = build_processor(described["model_type"], reader, tokenizer, settings)
    except (*UNREADABLE, ImportError, AttributeError) as error:
        raise ModelError(
            f"{source}: its processor of pictures or sounds cannot be used ({shorten_error(error)}); copy "
            f"{PROCESSOR_FILES[0]} and {PROCESSOR_FILES[1]} of the model"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    marks = {key: mark for key, mark in described.items() if _PLACEHOLDER_KEY.fullmatch(key)}
    kind = "audio" if hears else "image"
    image_id = int(marks.get(f"{kind}_token_id") or marks[f"{kind}_token_index"])
    banned = frozenset(mark for mark in marks.values() if isinstance(mark, int))
    return Pictures(processor, image_id, banned, source, hears)


class _PicturesOnly(ProcessorMixin):
    """A processor that may lack its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Check a part's class; a part that is missing has none."""
        if argument is not None:
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


def build_processor(
    family: str, reader: Any, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]
) -> ProcessorMixin:
    """Build the processor of a family from its `reader` of pixels or samples and its tokenizer."""
    base: Any = processor_class_from_name((FAMILIES | SOUND_FAMILIES)[family])
    processor: Any = type(base.__name__, (_PicturesOnly, base), {})
    parts = {"image_processor": reader, "feature_extractor": reader, "tokenizer": tokenizer}
    arguments = [parts.get(name) for name in base.get_attributes()]
    return processor.from_args_and_dict(arguments, dict(settings))


def _find_file(source: str, name: str) -> str | None:
    return cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
