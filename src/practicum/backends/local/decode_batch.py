"""Decode texts token by token over a KV cache; see `practicum.ports.DecodeBatch`.

`SlotDecodeBatch` gives every text a slot of a store that is allocated once. A text that ends frees
its slot for the next text immediately, so no slot waits for the longest text, and nothing is
padded. `PaddedDecodeBatch` serves models that cannot be packed (see
`practicum.backends.local.packing.enable_packing`): texts start together, and the batch ends when
its last text ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.decode_step import (
    DecodeJob,
    PromptTokens,
    SlotStep,
    StepProgram,
    TokenTree,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.llama_weights import LlamaWeights
from practicum.backends.local.native import NativeStep, open_native
from practicum.backends.local.native.library import NativeLibrary
from practicum.backends.local.packing import PrefixStates, pad_sequences
from practicum.backends.local.prefill import PromptQueue
from practicum.backends.local.prepared import MIN_DECODE_STEPS, PrepackedModel
from practicum.backends.local.rounding import round_linear_maps
from practicum.backends.local.text_states import StateRecorder
from practicum.costs.segments import FEWEST_SAVED_TOKENS, count_shared_prefix
from practicum.errors import ModelError
from practicum.ports import DecodeBatch


def open_decode_batch(
    language_model: LanguageModel,
    overlay: Mapping[str, Tensor],
    prompts: Sequence[PromptTokens],
    rows: int,
    new_tokens: int,
    texts: CachedTexts | None = None,
    recorder: StateRecorder | None = None,
) -> DecodeBatch:
    """Start decoding the prompts, `rows` at a time, with up to `new_tokens` new tokens each.

    Prompts continue the kept `texts`. If the model can pack texts, new texts are kept too, and
    their states go to the `recorder`. Raises ModelError if the model cannot be sampled from.
    """
    if language_model.no_sampling_reason:
        raise ModelError(f"{language_model.no_sampling_reason}; use another architecture")
    longest = max(map(len, prompts), default=0) + new_tokens
    language_model.check_length(longest)
    limit = language_model.row_limit
    if limit is not None and longest > limit:
        raise ModelError(
            f"{language_model.model.name_or_path}: {type(language_model.model).__name__} scales "
            f"attention by the place in a padded row, so texts of more than {limit} tokens cannot be "
            f"sampled from; a prompt with its answer has {longest}"
        )
    can_pack = longest <= language_model.max_packed_tokens
    can_repay = can_pack and new_tokens >= MIN_DECODE_STEPS
    language_model.model.eval()
    with language_model.weights(overlay):
        native = open_native(language_model) if can_repay else None
        prepacked = PrepackedModel(language_model, new_tokens if native is None else 0)
        rows = min(rows, len(prompts))
        overlay = {**overlay, **round_linear_maps(language_model)}
        job = DecodeJob(language_model, overlay, prepacked, prompts, rows, longest, texts, recorder)
        if not can_pack:
            return PaddedDecodeBatch(job)
        if native is None and job.captured:
            job = replace(job, recorder=None)
        return _open_slots(job, native)


def open_draft_batch(
    language_model: LanguageModel,
    prompts: Sequence[PromptTokens],
    new_tokens: int,
    layers: tuple[int, ...],
    drafts: int,
) -> "SlotDecodeBatch":
    """Start decoding all prompts together; up to `drafts` tokens per text are verified at a time.

    The states after `layers` are kept. Raises ModelError if a text is too long for the model.
    """
    longest = max(map(len, prompts), default=0) + new_tokens
    language_model.check_length(longest)
    if longest > language_model.max_packed_tokens:
        raise ModelError(
            f"{language_model.model.name_or_path}: a prompt with its answer has {longest} tokens, and "
            f"a drafter's target can read {language_model.max_packed_tokens}; lower "
            "rollout.max_new_tokens"
        )
    language_model.model.eval()
    native = open_native(language_model) if new_tokens >= MIN_DECODE_STEPS else None
    prepacked = PrepackedModel(language_model, new_tokens if native is None else 0)
    overlay, rows, room = round_linear_maps(language_model), len(prompts), longest + drafts
    job = DecodeJob(language_model, overlay, prepacked, prompts, rows, room)
    return _open_slots(replace(job, layers=layers, tokens_per_read=1 + drafts), native)


def _open_slots(
    job: DecodeJob, native: tuple[NativeLibrary, LlamaWeights] | None
) -> "SlotDecodeBatch":
    return SlotDecodeBatch(job, SlotStep(job) if native is None else NativeStep(job, *native))


class SlotDecodeBatch:
    """Decodes texts in slots of one KV store; see `practicum.ports.DecodeBatch`.

    Row r is the text in slot r, and the rows have no gaps. `program` reads the tokens.
    """

    supports_refill = True

    def __init__(self, job: DecodeJob, program: StepProgram) -> None:
        self._job = job
        self._program = program
        self._waiting = PromptQueue(job)
        self._texts: list[list[int]] = []
        self._numbers: list[int] = []
        self._hidden: Float[Tensor, "B D"] | None = None
        self._features: list[Float[Tensor, "L F"]] = []

    @torch.no_grad()
    def admit(self, max_rows: int) -> int:
        """Put up to `max_rows` waiting prompts into free slots, prefilling them if needed."""
        free_rows, recorder = self._job.rows - len(self._texts), self._job.recorder
        admitted = min(max_rows, free_rows, len(self._waiting))
        states = [] if self._hidden is None else [self._hidden]
        for _ in range(admitted):
            slot, prompt = len(self._texts), self._waiting.next_prompt
            self._numbers.append(len(self._job.prompts) - len(self._waiting))
            prefilled = self._waiting.pop()
            if recorder is not None:
                recorder.add_prompt(self._numbers[-1], prefilled.last_hidden, prefilled.lower)
            if self._job.layers and prefilled.lower is not None:
                self._features.append(prefilled.lower)
            self._program.store_prompt(slot, prefilled.kv_by_layer, prefilled.indices)
            states.append(prefilled.last_hidden[None])
            self._texts.append(list(prompt))
        if admitted:
            self._hidden = torch.cat(states)
        return admitted

    @torch.no_grad()
    def logits(self) -> Float[Tensor, "B V"]:
        """Return the logits of each row's next token."""
        assert self._hidden is not None, "a text is admitted before it is read on"
        return self._program.logits(self._hidden)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """Append one token to each row in `keep`, and drop all rows that are not in `keep`."""
        self.keep_rows(keep)
        if not keep:
            return
        next_tokens = tokens.to(self._job.device)[list(keep)]
        self._hidden = self._program.read(next_tokens[:, None], list(map(len, self._texts)))[:, 0]
        if self._job.recorder is not None:
            lower = self._program.lower
            lower = None if lower is None else lower[:, 0]
            self._job.recorder.add_step(self._numbers, self._hidden, lower)
        for text, token in zip(self._texts, next_tokens.tolist(), strict=True):
            text.append(token)

    def take_features(self) -> list[Float[Tensor, "L F"]]:
        """Return the states of the admitted prompts after the job's `layers`, and drop them here."""
        features, self._features = self._features, []
        return features

    @torch.no_grad()
    def read_tree(
        self, tokens: Int[Tensor, "B N"], depths: Int[Tensor, " N"], sees: Bool[Tensor, "B N N"]
    ) -> tuple[Float[Tensor, "B N V"], Float[Tensor, "B N F"]]:
        """Read some tokens after each row's text, which does not change.

        Returns the logits of the tokens that follow, and the states after the job's `layers`. See
        `TokenTree` for `depths` and `sees`.
        """
        lengths = list(map(len, self._texts))
        hidden = self._program.read(tokens, lengths, TokenTree(depths, sees))
        assert self._program.lower is not None, "the job has layers"
        logits = self._program.logits(hidden.flatten(0, 1))
        return logits.unflatten(0, tokens.shape), self._program.lower

    def append_path(self, row: int, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """Append some of the tokens that were just read to a row's text: a path of their tree."""
        if list(nodes) != list(range(len(nodes))):
            self._program.move_places(row, len(self._texts[row]), nodes)
        self._texts[row] += [tokens[node] for node in nodes]

    def keep_rows(self, keep: Sequence[int]) -> None:
        """Keep only the rows in `keep`, in that order, without a token to read on from."""
        if self._job.kept is not None:
            self._keep_texts(self._job.kept, set(range(len(self._texts))).difference(keep))
        # A row never moves to a slot that a later row of `keep` still needs: see
        # `sampler.compact_rows`.
        for row, source in enumerate(keep):
            if row != source:
                self._program.move_slot(source, row, len(self._texts[source]))
        self._texts = [self._texts[source] for source in keep]
        self._numbers = [self._numbers[source] for source in keep]
        self._hidden = None

    def _keep_texts(self, store: CachedTexts, rows: Iterable[int]) -> None:
        """Keep the texts of some rows up to the last token that was read."""
        for row in sorted(rows):
            text = tuple(self._texts[row])
            store.keep(PrefixStates(text, self._program.read_slot(row, len(text))))


class PaddedDecodeBatch:
    """Decodes texts that start together, padded on the left; see `practicum.ports.DecodeBatch`."""

    supports_refill = False

    def __init__(self, job: DecodeJob) -> None:
        self._job = job
        self._next = 0
        self._state: _PaddedState | None = None

    @torch.no_grad()
    def admit(self, max_rows: int) -> int:
        """Prefill up to `max_rows` waiting prompts, equal prompts once; no row may be active."""
        prompts = self._job.prompts[self._next : self._next + min(max_rows, self._job.rows)]
        if not prompts:
            return 0
        different = list(dict.fromkeys(prompts))
        with self._job.weights() as model:
            state = _run_prefill(model, different)
        indices = [different.index(prompt) for prompt in prompts]
        self._state = _select(state, torch.tensor(indices, device=self._job.device))
        self._next += len(prompts)
        return len(prompts)

    @torch.no_grad()
    def logits(self) -> Float[Tensor, "B V"]:
        """Return the logits of each row's next token."""
        assert self._state is not None, "a text is admitted before it is read on"
        return self._job.prepacked.head.logits(self._state.last_hidden)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """Append one token to each row in `keep`, and drop all rows that are not in `keep`."""
        assert self._state is not None, "a text is admitted before it is read on"
        tokens = tokens.to(self._job.device)
        if not keep:
            self._state = None
            return
        rows = torch.tensor(keep, device=tokens.device)
        # Selecting copies the whole cache: skip it while every row keeps its place.
        state = (
            self._state if list(keep) == list(range(len(tokens))) else _select(self._state, rows)
        )
        mask = torch.cat([state.mask, state.mask.new_ones(len(keep), 1)], dim=1)
        with self._job.weights() as model:
            hidden, cache = model.extend_body(
                state.cache, tokens[rows][:, None], mask, state.offsets
            )
        self._state = _PaddedState(cache, mask, hidden[:, -1], state.offsets)


@dataclass(slots=True)
class _PaddedState:
    """The KV cache, attention mask, last hidden states and offsets of positions of a padded batch."""

    cache: Cache
    mask: Bool[Tensor, "B M"]
    last_hidden: Float[Tensor, "B D"]
    offsets: Int[Tensor, " B"] | None


def _run_prefill(language_model: LanguageModel, prompts: Sequence[PromptTokens]) -> _PaddedState:
    """Prefill the prompts; compute a long shared prefix once if every layer caches all tokens."""
    caches_all_tokens = language_model.window is None and not language_model.is_recurrent
    # The end of a shared prefix may lie within a picture.
    caches_all_tokens &= language_model.pictures is None
    common = count_shared_prefix(prompts) if caches_all_tokens else 0
    shared = common if common >= FEWEST_SAVED_TOKENS else 0
    ids, mask = pad_sequences(
        [prompt[shared:] for prompt in prompts], side="left", device=language_model.device
    )
    cache = None
    if shared:
        prefix, prefix_mask = pad_sequences(
            [prompts[0][:shared]], side="left", device=language_model.device
        )
        _, cache = language_model.extend_body(None, prefix, prefix_mask)
        # One row was computed: give each prompt a copy of it.
        _select_rows(cache, ids.new_zeros(len(prompts)))
        mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)
    hidden, cache = language_model.extend_body(cache, ids, mask)
    offsets = None if shared else language_model.measure_offsets(ids, mask)
    return _PaddedState(cache, mask, hidden[:, -1], offsets)


def _select(state: _PaddedState, rows: Int[Tensor, " b"]) -> _PaddedState:
    _select_rows(state.cache, rows)
    offsets = None if state.offsets is None else state.offsets[rows]
    return _PaddedState(state.cache, state.mask[rows], state.last_hidden[rows], offsets)


def _select_rows(cache: Cache, rows: Int[Tensor, " b"]) -> None:
    """Make the cache hold the selected rows, in the given order; a row may occur several times."""
    # transformers' beam search does this for every kind of layer: keys and values, convolutions,
    # recurrent states.
    cache.reorder_cache(rows)  # type: ignore[arg-type]
