"""Where the divergence sits: by place, by kind of token, by token, by correctness, and how concentrated it is.

All of it from the sample of rollouts that the page reads. A token counts where the run learned from it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from practicum.report.charts import legend_figure, ranged_chart
from practicum.report.markup import Section, bar, count, note, number, panel, percent, safe, table
from practicum.report.reading import Row, RunData
from practicum.statistics import (
    Interval,
    auroc,
    cluster_bootstrap,
    concentration,
    participation_ratio,
)

SHOWN_TOKENS = 20
PART = 0.2
"""The first and the last fifth of the steps are compared."""

KINDS = ("special", "newline", "space", "digit", "punctuation", "word start", "word piece", "other")
"""Every token is of one of these kinds, by how it reads."""


def kind_of(text: str, control: bool) -> str:
    """The kind of a token: what it reads as decides, and special tokens are special whatever they read as."""
    bare = text.strip()
    if control:
        return "special"
    if not bare:
        return "newline" if "\n" in text else "space"
    if bare.isdigit():
        return "digit"
    if any(letter.isalpha() for letter in bare):
        return "word start" if text[0].isspace() else "word piece"
    return (
        "punctuation"
        if all(not letter.isalnum() for letter in bare) and bare.isprintable()
        else "other"
    )


@dataclass(frozen=True)
class TokenTable:
    """The supervised tokens of the sampled rollouts, one entry a token.

    `value` is the divergence in nats, or the sampled log-ratio (student minus teacher) where no divergence is recorded;
    `exact` says which. `row` leads to the rollout.
    """

    rows: Sequence[Row]
    row: Tensor
    place: Tensor
    token: Tensor
    value: Tensor
    exact: bool

    def __len__(self) -> int:
        return len(self.value)

    @cached_property
    def step(self) -> Tensor:
        """The step of each token."""
        return torch.tensor([row["step"] for row in self.rows], dtype=torch.long)[self.row]

    @cached_property
    def group(self) -> Tensor:
        """The prompt of each token, as a number: prompts are what an interval resamples."""
        names = {
            name: number
            for number, name in enumerate(dict.fromkeys(row["prompt"] for row in self.rows))
        }
        return torch.tensor([names[row["prompt"]] for row in self.rows], dtype=torch.long)[self.row]

    def where(self, chosen: Tensor) -> "TokenTable":
        """The tokens at which `chosen` holds."""
        return TokenTable(
            self.rows,
            self.row[chosen],
            self.place[chosen],
            self.token[chosen],
            self.value[chosen],
            self.exact,
        )

    def mean(self, seed: int) -> Interval | None:
        """The mean value with an interval by bootstrap over prompts; None where there is no token."""
        if not len(self):
            return None
        order = self.group.argsort(stable=True)
        sizes = torch.bincount(self.group[order])
        return cluster_bootstrap(self.value[order].split(sizes[sizes > 0].tolist()), seed)


def tokens_of(rows: Sequence[Row]) -> TokenTable:
    """The supervised tokens with a known value; without any, the lists are empty."""
    exact = any(value is not None for row in rows for value in row.get("divergence", ()))
    columns: list[Tensor] = []
    for number_, row in enumerate(rows):
        values = (
            _column(row["divergence"])
            if exact
            else _column(row["policy_logprobs"]) - _column(row["teacher_logprobs"])
        )
        known = torch.tensor(row["loss_mask"], dtype=torch.bool) & ~values.isnan()
        places = known.nonzero()[:, 0]
        ids = torch.tensor(row["tokens"], dtype=torch.long)[places]
        columns.append(
            torch.stack([torch.full_like(places, number_), places, ids, places]).double()
        )
        columns[-1][3] = values[places]
    whole = torch.cat(columns, dim=1) if columns else torch.zeros(4, 0)
    return TokenTable(
        rows, whole[0].long(), whole[1].long(), whole[2].long(), whole[3].double(), exact
    )


def _column(values: Sequence[float | None]) -> Tensor:
    return torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float64
    )


def tokens_section(run: RunData) -> Section | None:
    """The panels about where the divergence sits; None before the first rollout."""
    tokens = tokens_of(run.rollouts)
    if not len(tokens):
        return None
    first, last = _ends(tokens)
    body = "".join(
        [
            _sample_note(run, tokens),
            '<div class="panels">',
            panel("By place in the answer", _by_place(tokens, first, last, run.seed)),
            panel("By kind of token", _by_kind(tokens, first, last, run)),
            panel("By correctness", _by_correctness(tokens, run)),
            panel("Dearest tokens", _dearest(tokens, run)),
            "</div>",
        ]
    )
    title = "Where the divergence sits" if tokens.exact else "Where the log-ratio sits"
    return Section(
        "tokens",
        "Divergence",
        title,
        "sampled training rollouts, tokens that were learned from",
        body,
    )


def _ends(tokens: TokenTable) -> tuple[TokenTable, TokenTable]:
    """The tokens of the first and of the last fifth of the steps."""
    low, high = int(tokens.step.min()), int(tokens.step.max())
    reach = max(int((high - low + 1) * PART), 1)
    return tokens.where(tokens.step < low + reach), tokens.where(tokens.step > high - reach)


def _sample_note(run: RunData, tokens: TokenTable) -> str:
    what = (
        "the divergence of the loss's first term"
        if tokens.exact
        else "log p(student) - log p(teacher) of the sampled token"
    )
    half, part = concentration(tokens.value), participation_ratio(tokens.value.clamp(min=0))
    facts = "" if half is None else f" Half of it lies on {percent(half)} of the tokens"
    facts += "" if half is None or part is None else f" (participation ratio {part:.2f})."
    return note(
        f"{count(len(run.rollouts))} of {count(run.rollouts_total)} rollouts, {count(len(tokens))} tokens; the value is {what}, "
        f"in nats.{facts} Intervals are 95 %, by bootstrap over prompts."
    )


def _spans(longest: int) -> list[tuple[int, int]]:
    """Places 0, 1, 2-3, 4-7 ...; every place by itself where there are at most eight."""
    if longest <= 8:
        return [(place, place + 1) for place in range(longest)]
    edges = [0, 1]
    while edges[-1] < longest:
        edges.append(edges[-1] * 2)
    return list(pairwise(edges))


def _by_place(tokens: TokenTable, first: TokenTable, last: TokenTable, seed: int) -> str:
    spans = _spans(int(tokens.place.max()) + 1)
    names = [str(low + 1) if high == low + 1 else f"{low + 1}-{high}" for low, high in spans]

    def ranged(some: TokenTable) -> list[tuple[int, Interval]]:
        means = [
            some.where((some.place >= low) & (some.place < high)).mean(seed) for low, high in spans
        ]
        return [(place, mean) for place, mean in enumerate(means) if mean is not None]

    groups = [
        ("first fifth of the steps", "before", ranged(first)),
        ("last fifth", "student", ranged(last)),
    ]
    chart = ranged_chart("mean by place in the answer, nats a token", groups, names)
    return legend_figure(chart, groups)


def _kinds(tokens: TokenTable, run: RunData) -> Tensor:
    """Each token's kind, as its place in `KINDS`."""
    ids, inverse = tokens.token.unique(return_inverse=True)
    known = [run.vocabulary.get(token, (f"<{token}>", False)) for token in ids.tolist()]
    return torch.tensor([KINDS.index(kind_of(*one)) for one in known], dtype=torch.long)[inverse]


def _by_kind(tokens: TokenTable, first: TokenTable, last: TokenTable, run: RunData) -> str:
    if not run.vocabulary:
        return note("This run has no vocabulary.jsonl, so what its tokens read as is not known.")
    kinds, early, late = (_kinds(some, run) for some in (tokens, first, last))
    total = tokens.value.sum().item() or 1.0
    body = []
    for place, name in enumerate(KINDS):
        some = tokens.where(kinds == place)
        mean = some.mean(run.seed)
        if mean is None:
            continue
        share = some.value.sum().item() / total
        body.append(
            [
                name,
                percent(len(some) / len(tokens)),
                percent(share),
                bar(share),
                f"{mean:.3f}",
                f"{_plain(first.where(early == place))} → {_plain(last.where(late == place))}",
            ]
        )
    head = ["kind", "tokens", "of the sum", "", "mean, nats", "first → last"]
    last_fifths = note("First → last: the mean in the first and in the last fifth of the steps.")
    return (
        table(head, body, numbers=(1, 2, 4, 5), label="divergence by kind of token") + last_fifths
    )


def _plain(tokens: TokenTable) -> str:
    return f"{tokens.value.mean().item():.2f}" if len(tokens) else "none"


def _dearest(tokens: TokenTable, run: RunData) -> str:
    ids, inverse = tokens.token.unique(return_inverse=True)
    sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, inverse, tokens.value)
    counts = torch.bincount(inverse, minlength=len(ids))
    total = tokens.value.sum().item() or 1.0
    order = sums.argsort(descending=True, stable=True)[:SHOWN_TOKENS].tolist()
    largest = max((sums[place].item() / total for place in order), default=1.0) or 1.0
    body = [
        [
            f"<code>{token_text(int(ids[place]), run)}</code>",
            count(counts[place].item()),
            percent(sums[place].item() / total),
            bar(sums[place].item() / total / largest),
            f"{(sums[place] / counts[place]).item():.3f}",
        ]
        for place in order
    ]
    return table(
        ["token", "times", "of the sum", "", "mean, nats"],
        body,
        numbers=(1, 2, 4),
        label="dearest tokens",
    )


def token_text(token: int, run: RunData) -> str:
    """A token as HTML, its spaces visible; its number where the folder does not say what it reads as."""
    known = run.vocabulary.get(token)
    return f"&lt;{token}&gt;" if known is None else safe(known[0]).replace(" ", "␣")


def _by_correctness(tokens: TokenTable, run: RunData) -> str:
    if all(row.get("reward") is None for row in tokens.rows):
        return ""
    rewards = torch.tensor(
        [math.nan if row.get("reward") is None else row["reward"] for row in tokens.rows]
    )
    columns = [("right", rewards >= 1.0), ("wrong", rewards < 1.0)]
    lines: list[tuple[str, Callable[[Tensor], str]]] = [
        ("rollouts", lambda chosen: count(int(chosen.sum()))),
        (
            "mean value, nats",
            lambda chosen: _with_interval(tokens.where(chosen[tokens.row]).mean(run.seed)),
        ),
        (
            "tokens an answer",
            lambda chosen: _average(
                [len(tokens.rows[place]["tokens"]) for place in _places(chosen)]
            ),
        ),
        (
            "student entropy",
            lambda chosen: _average(_entropies(tokens.rows, chosen, "student_entropy")),
        ),
        (
            "teacher entropy",
            lambda chosen: _average(_entropies(tokens.rows, chosen, "teacher_entropy")),
        ),
        ("cut off", lambda chosen: _cut(tokens.rows, chosen)),
    ]
    body = [[name, *(show(chosen) for _, chosen in columns)] for name, show in lines]
    whole = table(
        ["", *(name for name, _ in columns)], body, numbers=(1, 2), label="by correctness"
    )
    return whole + _preference(tokens, rewards)


def _preference(tokens: TokenTable, rewards: Tensor) -> str:
    """Whether the teacher likes right answers better than wrong ones, relative to the student."""
    scores, hits = [], []
    for place, row in enumerate(tokens.rows):
        gap = _column(row["teacher_logprobs"]) - _column(row["policy_logprobs"])
        gap = gap[~gap.isnan()]
        if len(gap) and not math.isnan(rewards[place].item()):
            scores.append(gap.mean().item())
            hits.append(bool(rewards[place] >= 1.0))
    area = auroc(scores, hits)
    if area is None:
        return ""
    return note(
        f"The teacher's mean log-ratio tells right from wrong with an area under the curve of {area} "
        "(0.5: not at all; rollouts counted as independent)."
    )


def _with_interval(mean: Interval | None) -> str:
    return "" if mean is None else f"{mean:.3f}"


def _places(chosen: Tensor) -> list[int]:
    return chosen.nonzero()[:, 0].tolist()


def _entropies(rows: Sequence[Row], chosen: Tensor, name: str) -> list[float]:
    return [
        value
        for place in _places(chosen)
        for value in rows[place].get(name) or ()
        if value is not None
    ]


def _average(values: Sequence[float | int]) -> str:
    return number(sum(values) / len(values)) if values else ""


def _cut(rows: Sequence[Row], chosen: Tensor) -> str:
    places = _places(chosen)
    return (
        percent(sum(rows[place]["stop_reason"] == "length" for place in places) / len(places))
        if places
        else ""
    )
