"""Run many texts through a model's body as one row, and compute each shared prefix once.

Completions of one prompt share the prompt, and prompts share their common start, so the texts form
a tree of segments. Every segment attends to itself and to the segments above it. Nothing is padded:
texts of unequal lengths cost only their tokens, and the gradient is the same as for separate texts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from practicum.backends.local.attention import NAME, PrefixStates, attend
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.native import open_attention
from practicum.backends.local.native.layer import use_native_layers
from practicum.backends.local.native.packed import NativeSegments
from practicum.backends.local.text_states import skip_lower_layers
from practicum.backends.local.varlen import VarlenSegments, can_attend_varlen
from practicum.core import abandon
from practicum.costs.segments import Segment, split_by_tokens, split_into_segments
from practicum.functional.chunked import chunks
from practicum.types import ScoreRequest

MAX_PADDING_RATIO = 1.25
"""The largest ratio of padded entries to tokens in a group of segments; only attention pads."""

QUERY_ROWS = 256
"""The maximum number of queries in one attention call with a mask, which has a row per query."""


def compute_hidden_states(
    language_model: LanguageModel, texts: Sequence[ScoreRequest]
) -> Float[Tensor, "T D"]:
    """Return the hidden states that predict each text's `tokens`, concatenated."""
    longest = max(len(text.prompt_tokens) + len(text.tokens) for text in texts)
    language_model.check_length(longest)
    if longest > language_model.max_packed_tokens:
        return _compute_padded(language_model, texts)
    batch = PackedBatch(texts, language_model.device)
    with skip_lower_layers(language_model, texts, batch.locate_tokens):
        return batch.compute_hidden_states(language_model)


def iterate_hidden_states(
    language_model: LanguageModel,
    texts: Sequence[ScoreRequest],
    limit: int,
    compute: Callable[[LanguageModel, Sequence[ScoreRequest]], Tensor] = compute_hidden_states,
) -> Iterator[Float[Tensor, "T D"]]:
    """Yield the hidden states that predict each text's `tokens`, computed `limit` tokens at a time.

    `compute` returns the states of one pass. Raises
    `practicum.core.abandon.Cancelled` between passes if this thread's work is cancelled.
    """
    for part in split_by_tokens(texts, limit, language_model.max_packed_tokens):
        abandon.check()
        states = compute(language_model, texts[part])
        yield from states.split([len(text.tokens) for text in texts[part]])


@torch.no_grad()
def enable_packing(
    language_model: LanguageModel, max_packed_tokens: int | None = None
) -> LanguageModel:
    """Return the model with packed attention installed and its `max_packed_tokens` set.

    `max_packed_tokens` is measured unless it is given. A model cannot pack if its attention cannot
    be replaced or if any other part mixes tokens. A layer with a sliding window packs texts that
    fit in the window.
    """
    model = language_model.model
    implementation = model.config.get_text_config()._attn_implementation
    if max_packed_tokens == 0 or implementation not in ("sdpa", NAME):
        return language_model
    model.set_attn_implementation(NAME)
    # transformers ignores the setting for models with an attention that cannot be replaced.
    if model.config.get_text_config()._attn_implementation != NAME:
        return language_model
    longest = max_packed_tokens or find_max_packed_length(language_model)
    return replace(language_model, max_packed_tokens=longest)


def disable_packing(language_model: LanguageModel) -> LanguageModel:
    """Return the model with torch's attention, which reads one text per row."""
    if language_model.max_packed_tokens:
        language_model.model.set_attn_implementation("sdpa")
    return replace(language_model, max_packed_tokens=0)


def find_max_packed_length(language_model: LanguageModel) -> int:
    """Return the longest text, in tokens, that may be packed; 0 if packing changes short texts.

    Compares packed and unpacked hidden states of three short texts.
    """
    if language_model.row_limit is not None:
        return 0
    # Use unequal lengths, so that a layer that ignores the layout or mixes neighbours in the row
    # gives a different result.
    texts = [
        _wrap_ids(prompt, tokens, language_model.vocab_size)
        for prompt, tokens in (((1, 2), (1, 2, 1)), ((3, 1, 2, 3), (2, 3)), ((1, 3), (2,)))
    ]
    batch = PackedBatch(texts, language_model.device)
    try:
        packed = batch.compute_hidden_states(language_model)
    except Exception:
        # A model's own code may raise any error if it does not pass the layout on; such a model
        # uses padding.
        return 0
    alone = torch.cat([_compute_padded(language_model, [text]) for text in texts])
    scale = alone.abs().max().clamp_min(torch.finfo(alone.dtype).tiny)
    error = (packed - alone).abs().max() / scale
    if not error < (1e-4 if language_model.is_exact else 0.1):
        return 0
    window = language_model.window
    return language_model.context_length if window is None else window


def _wrap_ids(prompt: tuple[int, ...], tokens: tuple[int, ...], vocab_size: int) -> ScoreRequest:
    return ScoreRequest(
        tuple(token % vocab_size for token in prompt), tuple(token % vocab_size for token in tokens)
    )


class PackedBatch:
    """Texts packed into one row of tokens in which shared prefixes appear once.

    Implements `practicum.backends.local.attention.AttentionLayout`. The body reads `ids` [T] and
    `positions` [T]; `output_positions` are the row positions of the hidden states that predict the
    texts' tokens. With `keep_kv`, `kv_by_layer` collects every layer's keys and values, and
    `locate_tokens` returns the positions of each text in them. If the states of the prefix of all
    texts are given, the body does not read the prefix's tokens.
    """

    def __init__(
        self,
        texts: Sequence[ScoreRequest],
        device: torch.device,
        *,
        keep_kv: bool = False,
        prefix: PrefixStates | None = None,
    ) -> None:
        self._segments, self._last_segments = split_into_segments(texts)
        # Neighbours in this order have the same ancestors and almost the same length, so
        # `_group_segments` can batch them: one call per segment would cost more than the padding
        # that it saves. The order only determines the position of a token in the row. The tree
        # determines the tokens that it attends to, so results do not depend on the order.
        order = sorted(range(len(self._segments)), key=self._build_sort_key)
        self._spans: dict[int, range] = {}
        ids: list[int] = []
        positions: list[int] = []
        for number in order:
            segment = self._segments[number]
            self._spans[number] = range(len(ids), len(ids) + len(segment.tokens))
            ids.extend(segment.tokens)
            positions.extend(range(segment.start, segment.start + len(segment.tokens)))
        self._prefix = prefix
        # The root is the first segment of the row, and predicts no token of a text.
        self._skipped = 0 if prefix is None else len(self._segments[0].tokens)
        assert prefix is None or prefix.tokens == self._segments[0].tokens
        self.ids = torch.tensor(ids[self._skipped :], device=device)
        self.positions = torch.tensor(positions[self._skipped :], device=device)
        outputs = [position - self._skipped for position in self._find_outputs(texts)]
        self.output_positions = torch.tensor(outputs, dtype=torch.long, device=device)
        self.kv_by_layer: dict[int, tuple[Tensor, Tensor]] | None = {} if keep_kv else None
        self._order = order
        self._native: NativeSegments | None = None

    @cached_property
    def segments(self) -> VarlenSegments:
        """The segments in the form that a flash kernel takes."""
        return VarlenSegments.build(self._collect_paths(), self.ids.device)

    @cached_property
    def _groups(self) -> "list[_Group]":
        """The segments in groups that attend in one call."""
        return [
            _Group.build([self._spans[number] for number in group], ancestors, self.ids.device)
            for group in _group_segments(self._segments, self._order)
            for ancestors in [self._collect_spans(self._segments[group[0]].parent)]
        ]

    @cached_property
    def _mask(self) -> Tensor | None:
        """The mask of all groups that have ancestors."""
        reaches = [group.reach for group in self._groups if group.ancestors]
        return _build_mask(max(reaches), self.ids.device) if reaches else None

    def compute_hidden_states(self, language_model: LanguageModel) -> Float[Tensor, "T D"]:
        """Return the hidden states that predict each text's tokens, concatenated."""
        library = open_attention(language_model)
        if library is not None:
            self._native = NativeSegments.build(library, self._collect_paths())
        with use_native_layers(library, language_model):
            hidden = language_model.forward_packed(self.ids, self.positions, self)
        return hidden[self.output_positions]

    def locate_tokens(self) -> list[Int[Tensor, " L"]]:
        """Return the row positions of each text's tokens, in reading order."""
        device = self.ids.device
        return [
            torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])
            for spans in map(self._collect_spans, self._last_segments)
        ]

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """Compute one layer's attention, and collect its keys and values if `keep_kv`."""
        if self.kv_by_layer is not None:
            self.kv_by_layer[layer] = keys, values
        if self._prefix is not None:
            # Add unused queries in place of the prefix's queries: a segment's queries and keys then
            # have the same positions.
            kept_keys, kept_values = self._prefix.kv_by_layer[layer]
            queries = torch.cat([queries.new_zeros(self._skipped, *queries.shape[1:]), queries])
            keys, values = torch.cat([kept_keys, keys]), torch.cat([kept_values, values])
        return self._attend_row(queries, keys, values, scale, dropout)[self._skipped :]

    def _attend_row(
        self,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """Compute the attention of all segments of the row, the prefix included."""
        if can_attend_varlen(queries, values, dropout):
            return self.segments.attend(queries, keys, values, scale)
        if self._native is not None and self._native.can_attend(queries, values, dropout):
            return self._native.attend(queries, keys, values, scale)
        mask = None if self._mask is None else self._mask.to(queries.dtype)
        outputs = [
            group.attend(queries, keys, values, mask, scale, dropout) for group in self._groups
        ]
        return torch.cat(outputs)

    def _build_sort_key(self, number: int) -> tuple[int, int, int]:
        segment = self._segments[number]
        parent = -1 if segment.parent is None else segment.parent
        return parent, len(segment.tokens), segment.start

    def _collect_paths(self) -> list[list[range]]:
        """Return the row positions that each segment sees, in the order of the row."""
        return [self._collect_spans(number) for number in self._order]

    def _collect_spans(self, number: int | None) -> list[range]:
        """Return the row positions of a segment and its ancestors, from the text's start."""
        spans: list[range] = []
        while number is not None:
            spans.insert(0, self._spans[number])
            number = self._segments[number].parent
        return spans

    def _find_outputs(self, texts: Sequence[ScoreRequest]) -> list[int]:
        """Return the row positions of the hidden states that predict the texts' tokens."""
        outputs: list[int] = []
        for text, number in zip(texts, self._last_segments, strict=True):
            if not text.tokens:
                continue
            segment, span = self._segments[number], self._spans[number]
            # The hidden state before a token predicts it, so the first output is the prompt's last
            # state.
            first = len(text.prompt_tokens) - 1 - segment.start
            if first < 0:
                assert segment.parent is not None, "a text without ancestors holds its prompt"
                outputs.append(self._spans[segment.parent][-1])
            outputs.extend(span[max(first, 0) :])
        return outputs


def _group_segments(segments: Sequence[Segment], order: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of `order` that attend in one call: similar lengths and the same parent."""
    group: list[int] = []
    tokens = 0
    for number in order:
        segment = segments[number]
        length = len(segment.tokens)
        if group:
            has_other_parent = segment.parent != segments[group[0]].parent
            # Segments are sorted by length, so the newest segment is the longest and sets the
            # padding.
            area = length * (len(group) + 1)
            if has_other_parent or area > MAX_PADDING_RATIO * (tokens + length):
                yield group
                group, tokens = [], 0
        group.append(number)
        tokens += length
    if group:
        yield group


def _build_mask(reach: int, device: torch.device) -> Float[Tensor, "R M"]:
    """Return the mask of `QUERY_ROWS` queries, or fewer, after `reach` keys or fewer.

    Query r sees the first `reach` keys and r + 1 more keys. Every call uses the first rows of this
    mask and some neighbouring columns, so one mask serves all calls. Its size does not depend on
    the number of texts, and is linear in their length.
    """
    rows = min(QUERY_ROWS, reach)
    mask = torch.full((rows, rows), -torch.inf, device=device).triu(diagonal=1)
    return torch.nn.functional.pad(mask, (reach, 0))


@dataclass(frozen=True, slots=True)
class _Group:
    """B neighbouring segments of the row with the same ancestors, which attend in one call.

    `reach` counts the tokens that the longest segment sees, its own included. `padded` [B, L]
    indexes the segments' tokens in the row, and `real` the flat entries of `padded` that are not
    padding. Both are None if the segments are equally long, because then they are a plain view of
    the row. `ancestors` are the parts of the row that every segment sees before itself.
    """

    row: slice
    count: int
    reach: int
    padded: Int[Tensor, "B L"] | None
    real: Int[Tensor, " T"] | None
    ancestors: Sequence[range]

    @classmethod
    def build(
        cls, spans: Sequence[range], ancestors: Sequence[range], device: torch.device
    ) -> "_Group":
        """Build the group from the row parts of its segments and of their ancestors."""
        row = slice(spans[0].start, spans[-1].stop)
        longest = max(map(len, spans))
        reach = longest + sum(map(len, ancestors))
        if len(spans) * longest == row.stop - row.start:
            return cls(row, len(spans), reach, None, None, ancestors)
        starts, lasts = (
            torch.tensor([span[end] for span in spans], device=device)[:, None] for end in (0, -1)
        )
        padded = torch.minimum(starts + torch.arange(longest, device=device), lasts)
        offsets = range(0, len(spans) * longest, longest)
        entries = [
            torch.arange(offset, offset + len(span), device=device)
            for offset, span in zip(offsets, spans, strict=True)
        ]
        return cls(row, len(spans), reach, padded, torch.cat(entries), ancestors)

    def attend(
        self,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        mask: Float[Tensor, "R M"] | None,
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "t H e"]:
        """Return the attention output of the group's tokens, from the tokens of the row."""
        own_queries = self._select_own(queries)
        seen_keys, seen_values = self._select_seen(keys), self._select_seen(values)
        if mask is None or not self.ancestors:
            states = own_queries, seen_keys, seen_values
            output = attend(*states, None, scale, dropout=dropout, causal=True)
        else:
            past = seen_keys.shape[2] - own_queries.shape[2]
            outputs = []
            # Compute block by block: a query row is not multiplied with keys after its block.
            for block in chunks(own_queries.shape[2], QUERY_ROWS):
                reach = slice(0, past + block.stop)
                states = own_queries[:, :, block], seen_keys[:, :, reach], seen_values[:, :, reach]
                steps = _cut_mask(mask, block.stop - block.start, past + block.start)
                outputs.append(attend(*states, steps, scale, dropout=dropout))
            output = torch.cat(outputs, dim=2)
        output = output.transpose(1, 2).flatten(0, 1)
        return output if self.real is None else output[self.real]

    def _select_own(self, heads: Float[Tensor, "T H d"]) -> Float[Tensor, "B H L d"]:
        """Return the rows of the group's segments, padded to the longest."""
        if self.padded is None:
            return heads[self.row].unflatten(0, (self.count, -1)).transpose(1, 2)
        return heads[self.padded].transpose(1, 2)

    def _select_seen(self, heads: Float[Tensor, "T G d"]) -> Float[Tensor, "B G M d"]:
        """Return the rows that the group's segments see: their ancestors' rows and their own."""
        segments = self._select_own(heads)
        if not self.ancestors:
            return segments
        # Use views and one copy instead of a gather by index: the backward pass of a gather adds
        # row by row.
        above = torch.cat([heads[span.start : span.stop] for span in self.ancestors])
        return torch.cat([above.transpose(0, 1).expand(self.count, -1, -1, -1), segments], dim=2)


def _cut_mask(mask: Float[Tensor, "R M"], rows: int, past: int) -> Float[Tensor, "1 1 r m"]:
    """Return the part of the mask for `rows` queries after `past` keys; see `_build_mask`."""
    start = mask.shape[1] - mask.shape[0]
    part = mask[None, None, :rows, start - past : start + rows]
    # GPU kernels need a mask at an aligned address, which a view may not have.
    return part if part.device.type == "cpu" else part.contiguous()


def _compute_padded(
    language_model: LanguageModel, texts: Sequence[ScoreRequest]
) -> Float[Tensor, "T D"]:
    sequences = [(*text.prompt_tokens, *text.tokens) for text in texts]
    ids, mask = pad_sequences(sequences, side="right", device=language_model.device)
    hidden = language_model.body(ids, mask)
    is_output = torch.zeros_like(mask)
    for row, text in enumerate(texts):
        first = len(text.prompt_tokens) - 1
        is_output[row, first : first + len(text.tokens)] = True
    return hidden[is_output]


def pad_sequences(
    sequences: Sequence[Sequence[int]], *, side: str, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return the padded token ids and the mask of the real tokens; padding has id 0."""
    ids = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    masks = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(ids).to(device), pad(masks).to(device)
