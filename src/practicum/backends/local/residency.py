"""Where the weights of a model that only scores are kept between its calls: on its device, in CPU memory, or on disk.

A model that is not resident is fetched for each call and let go after it. What it said stays: hidden states, and a head
that is fetched again when somebody reads them.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, read_model
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import ModelError
from practicum.functional.head import Head
from practicum.models.config import ScorerConfig
from practicum.objective import Signal
from practicum.ports import Capabilities, DecodeBatch, LockstepClient, MixedRequest, SamplingClient
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal


def build_scorer(
    loaded: LoadedModel, config: ScorerConfig, batch_size: int, chunk_tokens: int
) -> SamplingClient:
    """A client over a model just loaded, whose weights stay where `config.residency` says.

    `loaded` must be let go by whoever loaded it, for only a resident model is held on.
    """
    model, device = loaded.language_model, loaded.language_model.device

    def sampler(language_model: LanguageModel) -> LocalSampler:
        return LocalSampler(language_model, {}, batch_size, chunk_tokens)

    if config.residency == "swap":
        kept = replace(model, model=model.model.to("cpu"))  # type: ignore[arg-type]
        return OffloadedSampler(
            lambda: sampler(clone_to(device, kept)),
            OffloadedHead(kept.vocab_size, lambda: _moved(kept.head(), device)),
        )
    if config.residency == "disk":
        read = partial(
            read_model, loaded.source, config, model.vocab_size, device, model.packs_up_to
        )
        completed = partial(replace, unsampled=model.unsampled, tokenizer=model.tokenizer)
        return OffloadedSampler(lambda: sampler(completed(read())), _head_on_disk(loaded))
    return sampler(model)


class OffloadedHead:
    """A head whose weights are elsewhere until hidden states are read; see `practicum.types.HeadLike`."""

    def __init__(self, vocab_size: int, fetch: Callable[[], Head]) -> None:
        self._vocab_size = vocab_size
        self._fetch = fetch
        self._held: Head | None = None

    @property
    def vocab_size(self) -> int:
        """How many tokens it tells apart."""
        return self._vocab_size

    @property
    def key(self) -> tuple[int, ...]:
        """This object, whether its weights are here or not."""
        return id(self), self._vocab_size

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Log-probabilities of the tokens, with the weights fetched if they are not here."""
        return self._fetched().logprobs(hidden)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Their logits."""
        return self._fetched().logits(hidden, room)

    def _fetched(self) -> Head:
        if self._held is None:
            self._held = self._fetch()
        return self._held

    def release(self) -> None:
        """Drop the weights until they are needed again."""
        self._held = None


class OffloadedSampler:
    """Samples and scores with a model that is fetched for each call; see `practicum.ports.SamplingClient`."""

    def __init__(self, fetch: Callable[[], LocalSampler], head: OffloadedHead) -> None:
        self._fetch = fetch
        self._head = head

    @property
    def capabilities(self) -> Capabilities:
        """Everything: the whole distribution is at hand."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), follows_student=False)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One completion a request, in order."""
        return self._fetch().sample(requests, params) if requests else []

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What the model says, with a head that is fetched when it is read."""
        answers = self._fetch().score(requests, signal) if requests else []
        return [
            answer if answer.head is None else replace(answer, head=self._head)
            for answer in answers
        ]

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: LockstepClient,
        share: float,
        params: SamplingParams,
    ) -> list[Sample]:
        """One completion a request, drawn from this model and another at once."""
        return self._fetch().sample_mixed(requests, teacher, share, params) if requests else []

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> DecodeBatch:
        """Read the prompts; the model stays as long as the reading does."""
        return self._fetch().read(prompts, rows, new_tokens)


def clone_to(device: torch.device, language_model: LanguageModel) -> LanguageModel:
    """The same modules over copies of the weights on a device; weights that are already there are shared."""
    model = language_model.model
    moved: dict[int, Tensor] = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    for weight in model.parameters():
        moved[id(weight)] = torch.nn.Parameter(weight.data.to(device), requires_grad=False)
    return replace(language_model, model=copy.deepcopy(model, moved))


def _moved(head: Head, device: torch.device) -> Head:
    bias = None if head.bias is None else head.bias.data.to(device)
    return replace(head, weight=head.weight.data.to(device), bias=bias)


def _head_on_disk(loaded: LoadedModel) -> OffloadedHead:
    """The head as the model's folder holds it; ModelError where it is not to be found there."""
    head, device = loaded.language_model.head(), loaded.language_model.device
    read_weight = _locate_weight(head.weight, loaded)
    read_bias = None if head.bias is None else _locate_weight(head.bias, loaded)
    vocab_size, scale, softcap = head.vocab_size, head.scale, head.softcap

    def fetch() -> Head:
        bias = None if read_bias is None else read_bias().to(device)
        return Head(read_weight().to(device), vocab_size, bias, scale, softcap)

    return OffloadedHead(vocab_size, fetch)


def _locate_weight(weight: Tensor, loaded: LoadedModel) -> Callable[[], Tensor]:
    """How to read the real tokens' rows of a weight from the model's folder; it holds on to nothing of the model."""
    model, rows, dtype = loaded.language_model.model, loaded.language_model.vocab_size, weight.dtype
    names = [
        name for name, other in model.named_parameters(remove_duplicate=False) if other is weight
    ]
    for path in sorted(_folder(loaded.source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            # A file may leave out the prefix that the model's own class puts before its names.
            keys = file.keys()
            stored = [key for key in keys if any(f".{name}".endswith(f".{key}") for name in names)]
        for key in stored:
            read = partial(_rows, path, key, rows, dtype)
            if read().equal(weight.data[:rows].cpu()):
                return read
    raise ModelError(
        f"{loaded.source}: the weights of the head ({', '.join(names)}) are not in the folder as the model uses them, so they "
        "cannot be read alone; write residency: swap or resident"
    )


def _folder(source: str) -> Path:
    """The folder of a model, that of the cache for a hub name that was just loaded."""
    return (
        Path(source)
        if Path(source).is_dir()
        else Path(snapshot_download(source, local_files_only=True))
    )


def _rows(path: Path, key: str, rows: int, dtype: torch.dtype) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_slice(key)[:rows].to(dtype)
