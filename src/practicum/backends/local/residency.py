"""Place the weights of a scoring model between calls: on the device, in CPU memory or on disk.

A model that is not resident is loaded for each call and freed afterwards. Its results remain:
hidden states, and a head that is loaded again when they are read. An adapter that shares its base
is merged into new weights for each call; they are bitwise equal to the weights of the merged model.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from practicum.backends.local.adapter_folders import merge_adapter
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, check_finite, read_model
from practicum.backends.local.prepared import LayoutStore, prepack_head, scores_with_layout
from practicum.backends.local.quantising import quantise
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import ModelError
from practicum.functional.head import Head
from practicum.models.config import ScorerConfig
from practicum.models.digests import ModelRecord
from practicum.models.sources import find_folder, is_adapter_folder
from practicum.objective import EVERY_SIGNAL, Signal
from practicum.ports import Capabilities, DecodeBatch, MixedRequest, SamplingClient, TokenRule
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal


def build_scorer(
    loaded: LoadedModel,
    config: ScorerConfig,
    batch_size: int,
    chunk_tokens: int,
    record: ModelRecord | None = None,
) -> SamplingClient:
    """Return a client for a loaded model; `config.residency` places its weights.

    The caller must drop its reference to `loaded`: only a resident model may stay in memory. Files
    that are read from disk again are first compared with `record`.
    """
    model, device = loaded.language_model, loaded.language_model.device
    # Use the same products for every residency, so that it does not change a bit.
    prepare_head = prepack_head if scores_with_layout(model) else _keep_head

    def open_sampler(language_model: LanguageModel) -> LocalSampler:
        sampler = LocalSampler(language_model, {}, batch_size, chunk_tokens)
        return replace(sampler, layout=LayoutStore())

    if config.residency == "swap":
        on_cpu = replace(model, model=model.model.to("cpu"))  # type: ignore[arg-type]
        return OffloadedSampler(
            lambda: open_sampler(clone_to(device, on_cpu)),
            OffloadedHead(
                on_cpu.vocab_size, lambda: prepare_head(_copy_head(on_cpu.head(), device))
            ),
        )
    if config.residency == "disk":
        packs, size = model.max_packed_tokens, model.vocab_size
        read = partial(_read_again, loaded.source, config, size, device, packs, record)
        complete = partial(
            replace,
            no_sampling_reason=model.no_sampling_reason,
            pictures=model.pictures,
            tokenizer=model.tokenizer,
            decoding=model.decoding,
        )
        head = _open_head_on_disk(loaded, prepare_head, record)
        return OffloadedSampler(lambda: open_sampler(complete(read())), head)
    if config.residency == "shared" and is_adapter_folder(loaded.source):
        return _build_shared(model, loaded.source, open_sampler, prepare_head, record)
    # With other settings, a model is built for each call over weights that are shared.
    return replace(open_sampler(model).freeze(), layout=LayoutStore(owns_weights=True))


def _build_shared(
    base: LanguageModel,
    folder: str,
    open_sampler: Callable[[LanguageModel], LocalSampler],
    prepare_head: Callable[[Head], Head],
    record: ModelRecord | None,
) -> "OffloadedSampler":
    """Return a client that merges an adapter into a copy of its base for each call."""

    def merge() -> LanguageModel:
        _check_files(record)
        return replace(base, model=merge_adapter(clone_to(base.device, base).model, folder).eval())

    merged = merge()
    # Refuse an unusable adapter at the start instead of at the first answer.
    check_finite(merged.model, folder)
    keeps_head = merged.head().weight.data_ptr() == base.head().weight.data_ptr()
    del merged
    head = OffloadedHead(
        base.vocab_size, lambda: prepare_head((base if keeps_head else merge()).head())
    )
    return OffloadedSampler(lambda: open_sampler(merge()), head)


def _check_files(record: ModelRecord | None) -> None:
    """Raise ModelError if the files of a model were replaced since its first load."""
    if record is not None:
        record.check(thorough=False)


def _read_again(
    source: str,
    config: ScorerConfig,
    vocab_size: int,
    device: torch.device,
    packs: int,
    record: ModelRecord | None,
) -> LanguageModel:
    """Read a model from its folder, with the bits that its settings ask for."""
    _check_files(record)
    language_model = read_model(source, config, vocab_size, device, packs)
    quantise(language_model, config, source)
    return language_model


class OffloadedHead:
    """A head that loads its weights when hidden states are read; see `practicum.types.HeadLike`."""

    def __init__(self, vocab_size: int, fetch: Callable[[], Head]) -> None:
        self.vocab_size = vocab_size
        self._fetch = fetch
        self._head_in_memory: Head | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """The identity of this object, whether its weights are loaded or not."""
        return id(self), self.vocab_size

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities of all tokens; loads the weights if needed."""
        return self._fetched().logprobs(hidden)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits; loads the weights if needed."""
        return self._fetched().logits(hidden, room)

    def _fetched(self) -> Head:
        if self._head_in_memory is None:
            self._head_in_memory = self._fetch()
        return self._head_in_memory

    def release(self) -> None:
        """Free the weights until they are needed again."""
        self._head_in_memory = None


class OffloadedSampler(SamplingClient):
    """A `practicum.ports.SamplingClient` over a model that is loaded for each call."""

    def __init__(self, fetch: Callable[[], LocalSampler], head: OffloadedHead) -> None:
        self._fetch = fetch
        self._head = head

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return EVERY_SIGNAL

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion a request, in order."""
        return self._fetch().sample(requests, params) if requests else []

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score the requests; the signals' head loads its weights when they are read."""
        signals = self._fetch().score(requests, signal) if requests else []
        # The model's own head would keep its weights in memory.
        return [s if s.head is None else replace(s, head=self._head) for s in signals]

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: SamplingClient,
        rule: TokenRule,
        params: SamplingParams,
    ) -> list[Sample]:
        """Sample one completion a request from this model and the teacher together."""
        if not requests:
            return []
        return self._fetch().sample_mixed(requests, teacher, rule, params)

    def open_decode_batch(
        self, prompts: Sequence[tuple[int, ...]], max_rows: int, max_new_tokens: int
    ) -> DecodeBatch:
        """Start decoding the prompts; the model stays loaded as long as the decode batch lives."""
        return self._fetch().open_decode_batch(prompts, max_rows, max_new_tokens)


def clone_to(device: torch.device, language_model: LanguageModel) -> LanguageModel:
    """Return a copy with its weights on a device; weights that are already there are shared."""
    model = language_model.model
    # deepcopy uses the entries of the memo instead of copies, so only the modules are new.
    moved: dict[int, Tensor] = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    for weight in model.parameters():
        moved[id(weight)] = torch.nn.Parameter(weight.data.to(device), requires_grad=False)
    return replace(language_model, model=copy.deepcopy(model, moved))


def _copy_head(head: Head, device: torch.device) -> Head:
    bias = None if head.bias is None else head.bias.data.to(device)
    return replace(head, weight=head.weight.data.to(device), bias=bias)


def _keep_head(head: Head) -> Head:
    return head


def _open_head_on_disk(
    loaded: LoadedModel, prepare: Callable[[Head], Head], record: ModelRecord | None
) -> OffloadedHead:
    """Return the head stored in the model's folder; it is prepared each time it is loaded.

    Raises ModelError if the folder does not hold the head.
    """
    head, device = loaded.language_model.head(), loaded.language_model.device
    read_weight = _locate_weight(head.weight, loaded)
    read_bias = None if head.bias is None else _locate_weight(head.bias, loaded)
    vocab_size, scale, softcap = head.vocab_size, head.scale, head.softcap

    def fetch() -> Head:
        _check_files(record)
        bias = None if read_bias is None else read_bias().to(device)
        return prepare(Head(read_weight().to(device), vocab_size, bias, scale, softcap))

    return OffloadedHead(vocab_size, fetch)


def _locate_weight(weight: Tensor, loaded: LoadedModel) -> Callable[[], Tensor]:
    """Return a function that reads a weight's rows of real tokens from the model's folder.

    The function holds no reference to the model.
    """
    model, rows, dtype = loaded.language_model.model, loaded.language_model.vocab_size, weight.dtype
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter is weight]
    for path in sorted(find_folder(loaded.source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            # A file may omit the prefix that the model's class adds to its names.
            keys = file.keys()
            stored = [key for key in keys if any(f".{name}".endswith(f".{key}") for name in names)]
        for key in stored:
            read = partial(_read_rows, path, key, rows, dtype)
            if read().equal(weight.data[:rows].cpu()):
                return read
    raise ModelError(
        f"{loaded.source}: the weights of the head ({', '.join(names)}) are not in the folder as "
        "the model uses them, so they cannot be read separately; set residency: swap or resident"
    )


def _read_rows(path: Path, key: str, rows: int, dtype: torch.dtype) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_slice(key)[:rows].to(dtype)
