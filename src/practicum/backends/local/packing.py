"""Run many texts through a model's body as one row, each shared prefix computed once.

Completions of one prompt share the prompt, and prompts share their common start, so the texts form
a tree of segments. Every segment attends to itself and to the segments above it. Nothing is padded:
texts of unequal lengths cost their tokens and no more, and the gradient is that of the single
texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from practicum.backends.local.attention import NAME, attend
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.varlen import VarlenSegments, can_attend_varlen
from practicum.core import abandon
from practicum.costs.segments import Segment, count_fitting_texts, split_into_segments
from practicum.types import ScoreRequest

MAX_PADDING_RATIO = 1.25
"""The largest ratio of padded entries to tokens in one group of segments; only attention pads."""

MAX_MASK_ENTRIES = 2**23
"""The most entries of the attention mask of one group of segments."""


def compute_hidden_states(
    language_model: LanguageModel, texts: Sequence[ScoreRequest]
) -> Float[Tensor, "T D"]:
    """Return the hidden states that predict each text's `tokens`, concatenated."""
    longest = max(len(text.prompt_tokens) + len(text.tokens) for text in texts)
    if longest > language_model.max_packed_tokens:
        return _compute_padded(language_model, texts)
    return PackedBatch(texts, language_model.device).compute_hidden_states(language_model)


def split_by_tokens(
    texts: Sequence[ScoreRequest], limit: int, max_packed_tokens: int
) -> Iterator[slice]:
    """Yield slices of `texts`, in order, that cost at most `limit` tokens each or hold one text."""
    start = 0
    while start < len(texts):
        stop = start + count_fitting_texts(texts[start:], limit, max_packed_tokens)
        yield slice(start, stop)
        start = stop


def iterate_hidden_states(
    language_model: LanguageModel, texts: Sequence[ScoreRequest], limit: int
) -> Iterator[Float[Tensor, "T D"]]:
    """Yield the hidden states that predict each text's `tokens`, computed `limit` tokens at a time.

    Raises `practicum.core.abandon.Cancelled` between passes if this thread's work is cancelled.
    """
    for part in split_by_tokens(texts, limit, language_model.max_packed_tokens):
        abandon.check()
        states = compute_hidden_states(language_model, texts[part])
        yield from states.split([len(text.tokens) for text in texts[part]])


@torch.no_grad()
def enable_packing(
    language_model: LanguageModel, max_packed_tokens: int | None = None
) -> LanguageModel:
    """Return the model with packed attention installed and its `max_packed_tokens` set.

    `max_packed_tokens` is measured unless it is given. A model cannot pack if its attention is not
    exchangeable or if anything else in it mixes tokens. A layer with a sliding window packs texts
    that fit in the window.
    """
    model = language_model.model
    implementation = model.config.get_text_config()._attn_implementation
    if max_packed_tokens == 0 or implementation not in ("sdpa", NAME):
        return language_model
    model.set_attn_implementation(NAME)
    # transformers ignores the request for models whose attention cannot be exchanged.
    if model.config.get_text_config()._attn_implementation != NAME:
        return language_model
    longest = max_packed_tokens or _find_max_packed_length(language_model)
    return replace(language_model, max_packed_tokens=longest)


def _find_max_packed_length(language_model: LanguageModel) -> int:
    """Return the longest text, in tokens, that may be packed; 0 if packing changes short texts.

    Compares packed and unpacked hidden states of three short texts.
    """
    # Unequal lengths: a layer that ignores the layout or mixes neighbours in the row then differs.
    texts = [
        _wrap_ids(prompt, tokens, language_model.vocab_size)
        for prompt, tokens in (((1, 2), (1, 2, 1)), ((3, 1, 2, 3), (2, 3)), ((1, 3), (2,)))
    ]
    batch = PackedBatch(texts, language_model.device)
    try:
        packed = batch.compute_hidden_states(language_model)
    except Exception:
        # A model's own code may raise anything if it does not pass the layout on: pad its texts.
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
    `positions` [T]; `output_positions` are the row positions whose hidden states predict the texts'
    tokens. With `keep_kv`, `kv_by_layer` collects every layer's keys and values, and
    `locate_tokens` tells where each text's are.
    """

    def __init__(
        self, texts: Sequence[ScoreRequest], device: torch.device, *, keep_kv: bool = False
    ) -> None:
        self._segments, self._last_segments = split_into_segments(texts)
        # Neighbours in this order need the same attention call (with or without ancestors) and
        # almost the same padding, so `_group_segments` can batch them: one call per segment would
        # cost more than the padding it saves. The order decides only where a token sits in the row;
        # which tokens it attends to comes from the tree, so results do not depend on it.
        order = sorted(range(len(self._segments)), key=self._build_sort_key)
        self._rows: dict[int, range] = {}
        ids: list[int] = []
        positions: list[int] = []
        for number in order:
            segment = self._segments[number]
            self._rows[number] = range(len(ids), len(ids) + len(segment.tokens))
            ids.extend(segment.tokens)
            positions.extend(range(segment.start, segment.start + len(segment.tokens)))
        self.ids = torch.tensor(ids, device=device)
        self.positions = torch.tensor(positions, device=device)
        # The hidden state before a token predicts it, so the first one is the prompt's last token.
        outputs: list[int] = []
        for text, path in zip(texts, self.locate_tokens(), strict=True):
            if text.tokens:
                outputs.extend(path[len(text.prompt_tokens) - 1 :])
        self.output_positions = torch.tensor(outputs, dtype=torch.long, device=device)
        self.kv_by_layer: dict[int, tuple[Tensor, Tensor]] | None = {} if keep_kv else None
        self._order, self._places = order, positions

    @cached_property
    def segments(self) -> VarlenSegments:
        """The segments as a flash kernel takes them."""
        return VarlenSegments.build(
            [self._collect_path(number) for number in self._order],
            [self._rows[number] for number in self._order],
            self.ids.device,
        )

    @cached_property
    def _groups(self) -> "list[_Group]":
        """The segments in groups that attend in one call, with masks where they have ancestors."""
        return [
            _Group.build(
                [self._collect_path(number) for number in group],
                [self._rows[number] for number in group],
                self._places,
                self.ids.device,
            )
            for group in _group_segments(self._segments, self._order)
        ]

    def compute_hidden_states(self, language_model: LanguageModel) -> Float[Tensor, "T D"]:
        """Return the hidden states that predict each text's tokens, concatenated."""
        hidden = language_model.forward_packed(self.ids, self.positions, self)
        return hidden[self.output_positions]

    def locate_tokens(self) -> list[list[int]]:
        """Return the row positions of each text's tokens, in reading order."""
        return [self._collect_path(number) for number in self._last_segments]

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
        if can_attend_varlen(queries, values, dropout):
            return self.segments.attend(queries, keys, values, scale)
        outputs = [group.attend(queries, keys, values, scale, dropout) for group in self._groups]
        return torch.cat(outputs)

    def _build_sort_key(self, number: int) -> tuple[bool, int, int]:
        segment = self._segments[number]
        return segment.parent is not None, len(segment.tokens), segment.start

    def _collect_path(self, number: int | None) -> list[int]:
        """Return the row positions of a segment's tokens, after those of its ancestors."""
        path: list[int] = []
        while number is not None:
            path = [*self._rows[number], *path]
            number = self._segments[number].parent
        return path


def _group_segments(segments: Sequence[Segment], order: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of `order` that attend in one call: alike in length and in having ancestors."""
    group: list[int] = []
    tokens = 0
    for number in order:
        segment = segments[number]
        length, reach = len(segment.tokens), segment.start + len(segment.tokens)
        if group:
            is_same_kind = (segment.parent is None) == (segments[group[0]].parent is None)
            # The order goes by length, so the newest segment is the longest and sets the padding.
            area = length * (len(group) + 1)
            is_too_large = segment.parent is not None and area * reach > MAX_MASK_ENTRIES
            if not is_same_kind or is_too_large or area > MAX_PADDING_RATIO * (tokens + length):
                yield group
                group, tokens = [], 0
        group.append(number)
        tokens += length
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Group:
    """B neighbouring segments of the row that attend in one call.

    `queries` [B, L] and `real` (not padding) index the segments' tokens; both are None if the
    segments are equally long, because then they are a plain view of the row. `keys` [B, M] and
    `mask` describe the tokens that they see; both are None for segments without ancestors, which
    attend causally to themselves.
    """

    row: slice
    count: int
    queries: Int[Tensor, "B L"] | None
    real: Bool[Tensor, "B L"] | None
    keys: Int[Tensor, "B M"] | None
    mask: Float[Tensor, "B 1 L M"] | None

    @classmethod
    def build(
        cls,
        paths: Sequence[list[int]],
        rows: Sequence[range],
        positions: Sequence[int],
        device: torch.device,
    ) -> "_Group":
        """Build the group from its segments' row positions; `paths` include their ancestors."""
        row = slice(rows[0].start, rows[-1].stop)
        queries, real = _pad_indices(rows)
        keys = mask = None
        if any(len(path) > len(tokens) for path, tokens in zip(paths, rows, strict=True)):
            keys, is_key = _pad_indices(paths)
            at = torch.tensor(positions)
            visible = is_key[:, None, :] & (at[keys][:, None, :] <= at[queries][:, :, None])
            mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None].to(device)
            keys = keys.to(device)
        # By the lengths and not by `real`: weightless models run this over tensors without numbers.
        if len({len(tokens) for tokens in rows}) == 1:
            return cls(row, len(rows), None, None, keys, mask)
        return cls(row, len(rows), queries.to(device), real.to(device), keys, mask)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention output of the group's tokens, [T, H, e], from those of the row."""
        segment_queries = self._select_segments(queries)
        if self.keys is None:
            keys, values = self._select_segments(keys), self._select_segments(values)
            output = attend(
                segment_queries, keys, values, None, scale, dropout=dropout, causal=True
            )
        else:
            assert self.mask is not None
            keys, values = (heads[self.keys].transpose(1, 2) for heads in (keys, values))
            mask = self.mask.to(queries.dtype)
            output = attend(segment_queries, keys, values, mask, scale, dropout=dropout)
        output = output.transpose(1, 2)
        return output.flatten(0, 1) if self.real is None else output[self.real]

    def _select_segments(self, heads: Float[Tensor, "T H d"]) -> Float[Tensor, "B H L d"]:
        """Return the rows of the group's segments, padded to the longest."""
        if self.queries is None:
            return heads[self.row].unflatten(0, (self.count, -1)).transpose(1, 2)
        return heads[self.queries].transpose(1, 2)


def _pad_indices(rows: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return rows as a matrix, each padded with its last index, and the mask of real ones."""
    width = max(map(len, rows))
    index = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])
    return index, torch.arange(width)[None] < torch.tensor([[len(row)] for row in rows])


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
    """Return the padded token ids and the mask of the real ones; padding has id 0."""
    ids = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    masks = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(ids).to(device), pad(masks).to(device)
