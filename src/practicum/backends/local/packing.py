"""Many texts through a model's body at once, laid end to end, each common beginning read only once.

Completions of one prompt share the prompt, and prompts share what they begin with: the texts form a tree of segments, of
which every one attends to itself and to the segments above it. Nothing is padded, so a batch of unequal lengths costs its
tokens and no more; the gradient is that of the texts read one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.backends.local.attention import NAME, attend
from practicum.backends.local.language_model import LanguageModel
from practicum.costs.segments import Segment, segments_of
from practicum.types import ScoreRequest

MAX_PADDING_RATIO = 1.25
"""How much larger than its tokens the padded area of a group of segments may be, within attention alone."""

MAX_MASK_ENTRIES = 2**23
"""Entries of the mask of one group of segments."""


def hidden_states(
    language_model: LanguageModel, texts: Sequence[ScoreRequest]
) -> Float[Tensor, "T D"]:
    """The hidden states that predict each text's `tokens`, text after text."""
    longest = max(len(text.prompt_tokens) + len(text.tokens) for text in texts)
    if longest > language_model.packs_up_to:
        return _padded_hidden_states(language_model, texts)
    packing = PackedBatch(texts, language_model.device)
    return language_model.forward_packed(packing.ids, packing.positions, packing)[packing.wanted]


@torch.no_grad()
def enable_packing(language_model: LanguageModel, packs_up_to: int | None = None) -> LanguageModel:
    """The same model, its attention exchanged for one that packs where it can be; `packs_up_to` is found by trying if not given.

    A model packs where its attention is a function that can be exchanged and nothing else in it looks past a token. A layer
    with a sliding window packs texts that fit in the window.
    """
    model = language_model.model
    if packs_up_to == 0 or model.config.get_text_config()._attn_implementation not in (
        "sdpa",
        NAME,
    ):
        return language_model
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        return language_model
    return replace(
        language_model, packs_up_to=packs_up_to or _find_max_packed_length(language_model)
    )


def _find_max_packed_length(language_model: LanguageModel) -> int:
    """How long a text may be to be read packed as it is read alone; 0 where short ones already differ."""
    longest = (
        language_model.context_length if language_model.window is None else language_model.window
    )
    trial = [
        ScoreRequest(tuple(range(1, 3)), (1, 2, 1)),
        ScoreRequest((3, 1, 2, 3), (2, 3)),
        ScoreRequest((1, 3), (2,)),
    ]
    texts = [_within(text, language_model.vocab_size) for text in trial]
    packing = PackedBatch(texts, language_model.device)
    try:
        together = language_model.forward_packed(packing.ids, packing.positions, packing)[
            packing.wanted
        ]
    except Exception:  # whatever a model's own code raises where it does not hand the layout on: then texts are padded
        return 0
    alone = torch.cat([_padded_hidden_states(language_model, [text]) for text in texts])
    error = (together - alone).abs().max() / alone.abs().max().clamp_min(
        torch.finfo(alone.dtype).tiny
    )
    return longest if error < (1e-4 if language_model.exact else 0.1) else 0


def _within(text: ScoreRequest, vocab_size: int) -> ScoreRequest:
    prompt, tokens = (
        tuple(token % vocab_size for token in part) for part in (text.prompt_tokens, text.tokens)
    )
    return ScoreRequest(prompt, tokens)


class PackedBatch:
    """The texts as one row of tokens; see `practicum.backends.local.attention.AttentionLayout`.

    `ids` and `positions` are what the body reads, `wanted` where the hidden states are that predict the texts' tokens.
    With `keep`, the keys and values of every layer stay in `kept`, and `places` says where each text's are.
    """

    def __init__(
        self, texts: Sequence[ScoreRequest], device: torch.device, *, keep: bool = False
    ) -> None:
        segments, of_text = segments_of(texts)
        # In this order neighbours need the same attention call and almost the same padding, so `_groups` can batch them; a call
        # for each segment would cost more than the padding does. Results do not depend on the order: it only decides where a
        # token stands in the row, and which tokens it attends to comes from the tree of segments.
        order = sorted(range(len(segments)), key=lambda number: _bucket_key(segments, number))
        first = dict(zip(order, _starts(segments, order), strict=True))
        self._at = [
            range(first[number], first[number] + len(segments[number].tokens))
            for number in range(len(order))
        ]
        self._segments = segments
        self._of_text = of_text
        self.ids = torch.tensor(
            [token for number in order for token in segments[number].tokens], device=device
        )
        positions = [
            segments[number].start + place
            for number in order
            for place in range(len(self._at[number]))
        ]
        self.positions = torch.tensor(positions, device=device)
        self.wanted = torch.tensor(
            [place for text in self._wanted(texts) for place in text], device=device
        ).long()
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = {} if keep else None
        self._groups = [
            _Group.of(
                [self._collect_path_positions(number) for number in group],
                [self._at[number] for number in group],
                positions,
                device,
            )
            for group in _groups(segments, order)
        ]

    def places(self) -> list[list[int]]:
        """Return where the tokens of each text stand in the row, in the order in which they are read."""
        return [self._places(text) for text in range(len(self._of_text))]

    def _places(self, text: int) -> list[int]:
        return self._collect_path_positions(self._of_text[text])

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "T H d"],
        key: Float[Tensor, "T G d"],
        value: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """As `practicum.backends.local.attention.AttentionLayout` says."""
        if self.kept is not None:
            self.kept[layer] = key, value
        return torch.cat(
            [group.attend(query, key, value, scale, dropout) for group in self._groups]
        )

    def _collect_path_positions(self, number: int | None) -> list[int]:
        """Where the tokens of a segment and of all above it stand."""
        if number is None:
            return []
        return [*self._collect_path_positions(self._segments[number].parent), *self._at[number]]

    def _wanted(self, texts: Sequence[ScoreRequest]) -> Iterator[list[int]]:
        for number, text in enumerate(texts):
            if text.tokens:
                yield self._places(number)[len(text.prompt_tokens) - 1 :]


def _bucket_key(segments: Sequence[Segment], number: int) -> tuple[bool, int, int]:
    segment = segments[number]
    return segment.parent is not None, len(segment.tokens), segment.start


def _starts(segments: Sequence[Segment], order: Sequence[int]) -> Iterator[int]:
    place = 0
    for number in order:
        yield place
        place += len(segments[number].tokens)


def _groups(segments: Sequence[Segment], order: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours of `order` that attend in one call: alike in length, and all with a segment above them or none."""
    group: list[int] = []
    tokens = 0
    for number in order:
        segment = segments[number]
        length, reach = len(segment.tokens), segment.start + len(segment.tokens)
        if group:
            alike = (segment.parent is None) == (segments[group[0]].parent is None)
            area = length * (len(group) + 1)
            large = segment.parent is not None and area * reach > MAX_MASK_ENTRIES
            if not alike or large or area > MAX_PADDING_RATIO * (tokens + length):
                yield group
                group, tokens = [], 0
        group.append(number)
        tokens += length
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that attend in one call: where their queries are, where the keys they see are, and which real queries.

    `queries` is None where the segments are equally long, and thus a plain view of the row.
    """

    row: slice
    count: int
    queries: Int[Tensor, "B L"] | None
    real: Bool[Tensor, "B L"] | None
    keys: Int[Tensor, "B M"] | None
    mask: Float[Tensor, "B 1 L M"] | None

    @classmethod
    def of(
        cls,
        chains: Sequence[list[int]],
        own: Sequence[range],
        positions: Sequence[int],
        device: torch.device,
    ) -> "_Group":
        """From where the tokens of the segments are, and where those that they see are (themselves included)."""
        row = slice(own[0].start, own[-1].stop)
        equal = len({len(segment) for segment in own}) == 1
        queries, real = _index([list(segment) for segment in own])
        keys = mask = None
        if any(len(chain) > len(segment) for chain, segment in zip(chains, own, strict=True)):
            keys, known = _index(chains)
            at = torch.tensor(positions)
            visible = known[:, None, :] & (at[keys][:, None, :] <= at[queries][:, :, None])
            mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None].to(device)
            keys = keys.to(device)
        if equal:
            return cls(row, len(own), None, None, keys, mask)
        return cls(row, len(own), queries.to(device), real.to(device), keys, mask)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float
    ) -> Tensor:
        queries = self._own(query)
        if self.keys is None:
            attended = attend(
                queries, self._own(key), self._own(value), None, scale, dropout=dropout, causal=True
            )
        else:
            assert self.mask is not None
            keys, values = (part[self.keys].transpose(1, 2) for part in (key, value))
            attended = attend(
                queries, keys, values, self.mask.to(query.dtype), scale, dropout=dropout
            )
        attended = attended.transpose(1, 2)
        return attended.flatten(0, 1) if self.real is None else attended[self.real]

    def _own(self, part: Tensor) -> Tensor:
        """The segments' own rows, [B, H, L, d]."""
        rows = (
            part[self.row].unflatten(0, (self.count, -1))
            if self.queries is None
            else part[self.queries]
        )
        return rows.transpose(1, 2)


def _index(rows: Sequence[list[int]]) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Rows of places as a matrix, filled up at the end with the row's last place, and which entries are real."""
    width = max(map(len, rows))
    index = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
    return index, torch.arange(width)[None] < torch.tensor([[len(row)] for row in rows])


def _padded_hidden_states(
    language_model: LanguageModel, texts: Sequence[ScoreRequest]
) -> Float[Tensor, "T D"]:
    sequences = [(*text.prompt_tokens, *text.tokens) for text in texts]
    ids, mask = pad_sequences(sequences, side="right", device=language_model.device)
    hidden = language_model.body(ids, mask)
    wanted = torch.zeros_like(mask)
    for row, text in enumerate(texts):
        first = len(text.prompt_tokens) - 1
        wanted[row, first : first + len(text.tokens)] = True
    return hidden[wanted]


def pad_sequences(
    sequences: Sequence[Sequence[int]], *, side: str, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Token ids and the mask of the real ones; the padding id is never looked at."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        part = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, part] = torch.tensor(sequence, dtype=torch.long)
        mask[row, part] = True
    return ids.to(device), mask.to(device)
