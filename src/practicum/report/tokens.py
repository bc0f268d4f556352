"""The divergence by position, by kind of token, by token, and by correctness of the completion.

All numbers come from the sample of rollouts that the page reads, and from the tokens that the run
trained on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.report.charts import Ranged, render_figure, render_ranged_chart
from practicum.report.markup import (
    Section,
    escape_text,
    format_count,
    format_number,
    format_percent,
    render_bar,
    render_note,
    render_panels,
    render_table,
)
from practicum.report.run_data import Row, RunData
from practicum.statistics import (
    Interval,
    auroc,
    cluster_bootstrap,
    concentration,
    participation_ratio,
)

MAX_TOKENS = 20
"""The number of tokens in the table of tokens with the highest divergence."""

COMPARED_SHARE = 0.2
"""The share of the steps at either end of the run that are compared: a fifth."""

KINDS = ("special", "newline", "space", "digit", "punctuation", "word start", "word piece", "other")
"""The kinds of tokens, by their text."""


def identify_kind(text: str, control: bool) -> str:
    """Return the kind of a token: `special` for control tokens, otherwise decided by its text."""
    bare = text.strip()
    if control:
        return "special"
    if not bare:
        return "newline" if "\n" in text else "space"
    if bare.isdigit():
        return "digit"
    if any(letter.isalpha() for letter in bare):
        return "word start" if text[0].isspace() else "word piece"
    is_punctuation = bare.isprintable() and not any(letter.isalnum() for letter in bare)
    return "punctuation" if is_punctuation else "other"


@dataclass(frozen=True)
class TokenTable:
    """The supervised tokens of the sampled rollouts as columns, one entry per token.

    `value` is the divergence in nats, or the sampled log-ratio (student minus teacher) if no
    divergence is recorded, in which case the table is not `exact`. `row` is the index of a token's
    rollout in `rows`, `position` its place in the completion, `token` its id.
    """

    rows: Sequence[Row]
    row: Int[Tensor, " T"]
    position: Int[Tensor, " T"]
    token: Int[Tensor, " T"]
    value: Float[Tensor, " T"]
    exact: bool

    def __len__(self) -> int:
        return len(self.value)

    @cached_property
    def step(self) -> Int[Tensor, " T"]:
        """The step of each token."""
        return torch.tensor([row["step"] for row in self.rows], dtype=torch.long)[self.row]

    @cached_property
    def group(self) -> Int[Tensor, " T"]:
        """The index of each token's prompt: intervals resample prompts."""
        prompts = [row["prompt"] for row in self.rows]
        indices = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        return torch.tensor([indices[prompt] for prompt in prompts], dtype=torch.long)[self.row]

    def select(self, mask: Bool[Tensor, " T"]) -> "TokenTable":
        """Return the tokens that a mask selects."""
        row, position = self.row[mask], self.position[mask]
        return TokenTable(self.rows, row, position, self.token[mask], self.value[mask], self.exact)

    def estimate_mean(self, seed: int) -> Interval | None:
        """Estimate the mean value by bootstrap over prompts; None without tokens."""
        if not len(self):
            return None
        # Tokens of one prompt depend on each other, so an interval over tokens would be too narrow.
        order = self.group.argsort(stable=True)
        sizes = torch.bincount(self.group[order])
        return cluster_bootstrap(self.value[order].split(sizes[sizes > 0].tolist()), seed)


def build_token_table(rows: Sequence[Row]) -> TokenTable:
    """Build the table of supervised tokens with a known value."""
    is_exact = any(value is not None for row in rows for value in row.get("divergence", ()))
    columns: list[Tensor] = []
    for index, row in enumerate(rows):
        if is_exact:
            values = _read_column(row["divergence"])
        else:
            values = _subtract_logprobs(row["policy_logprobs"], row["teacher_logprobs"])
        is_known = torch.tensor(row["loss_mask"], dtype=torch.bool) & ~values.isnan()
        positions = is_known.nonzero()[:, 0]
        ids = torch.tensor(row["tokens"], dtype=torch.long)[positions]
        # One float64 table represents indices and ids exactly, so a single concatenation is enough.
        indices = torch.full_like(positions, index)
        columns.append(torch.stack([indices, positions, ids, values[positions]]))
    table = torch.cat(columns, dim=1) if columns else torch.zeros(4, 0, dtype=torch.float64)
    return TokenTable(rows, table[0].long(), table[1].long(), table[2].long(), table[3], is_exact)


def _read_column(values: Sequence[float | None]) -> Float[Tensor, " T"]:
    return torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float64
    )


def _subtract_logprobs(
    logprobs: Sequence[float | None], reference: Sequence[float | None]
) -> Float[Tensor, " T"]:
    return _read_column(logprobs) - _read_column(reference)


def build_tokens_section(run: RunData) -> Section | None:
    """Build the panels about the location of the divergence; None before the first rollout."""
    tokens = build_token_table(run.rollouts)
    if not len(tokens):
        return None
    low, high = int(tokens.step.min()), int(tokens.step.max())
    reach = max(int((high - low + 1) * COMPARED_SHARE), 1)
    first = tokens.select(tokens.step < low + reach)
    last = tokens.select(tokens.step > high - reach)
    body = _render_sample_note(run, tokens) + render_panels(
        {
            "By place in the answer": _render_positions(tokens, first, last, run.seed),
            "By kind of token": _render_kinds(tokens, first, last, run),
            "By correctness": _render_correctness(tokens, run),
            "Tokens with the highest divergence": _render_expensive_tokens(tokens, run),
        }
    )
    title = f"{'Divergence' if tokens.exact else 'Log-ratio'} by token"
    about = "sampled training rollouts, supervised tokens"
    return Section("tokens", "Divergence", title, about, body)


def _render_sample_note(run: RunData, tokens: TokenTable) -> str:
    meaning = "log p(student) - log p(teacher) of the sampled token"
    if tokens.exact:
        meaning = "the divergence of the loss's first term"
    half, part = concentration(tokens.value), participation_ratio(tokens.value.clamp(min=0))
    facts = "" if half is None else f" Half of it lies on {format_percent(half)} of the tokens"
    facts += "" if half is None or part is None else f" (participation ratio {part:.2f})."
    return render_note(
        f"{format_count(len(run.rollouts))} of {format_count(run.rollouts_total)} rollouts, "
        f"{format_count(len(tokens))} tokens; the value is {meaning}, "
        f"in nats.{facts} Intervals are 95 %, by bootstrap over prompts."
    )


def _split_positions(count: int) -> list[tuple[int, int]]:
    """Split positions into 0, 1, 2-3, 4-7 and so on, or one by one if there are at most eight."""
    if count <= 8:
        return [(position, position + 1) for position in range(count)]
    edges = [0, 1]
    while edges[-1] < count:
        edges.append(edges[-1] * 2)
    return list(pairwise(edges))


def _render_positions(tokens: TokenTable, first: TokenTable, last: TokenTable, seed: int) -> str:
    spans = _split_positions(int(tokens.position.max()) + 1)
    names = [str(low + 1) if high == low + 1 else f"{low + 1}-{high}" for low, high in spans]

    def estimate_means(table: TokenTable) -> list[Ranged]:
        means = []
        for index, (low, high) in enumerate(spans):
            is_inside = (table.position >= low) & (table.position < high)
            mean = table.select(is_inside).estimate_mean(seed)
            if mean is not None:
                means.append((index, mean))
        return means

    groups = [
        ("first fifth of the steps", "before", estimate_means(first)),
        ("last fifth", "student", estimate_means(last)),
    ]
    chart = render_ranged_chart("mean by place in the answer, nats per token", groups, names)
    return render_figure(chart, groups)


def _find_kinds(tokens: TokenTable, run: RunData) -> Int[Tensor, " T"]:
    """Return the index of each token's kind in `KINDS`."""
    # There are few token ids and many tokens: each id is looked up and classified once.
    ids, inverse = tokens.token.unique(return_inverse=True)
    entries = [run.vocabulary.get(token, (f"<{token}>", False)) for token in ids.tolist()]
    kinds = [KINDS.index(identify_kind(text, control)) for text, control in entries]
    return torch.tensor(kinds, dtype=torch.long)[inverse]


def _render_kinds(tokens: TokenTable, first: TokenTable, last: TokenTable, run: RunData) -> str:
    if not run.vocabulary:
        return render_note(
            "This run has no vocabulary.jsonl, so the texts of its tokens are not known."
        )
    kinds, early, late = (_find_kinds(table, run) for table in (tokens, first, last))
    total = tokens.value.sum().item() or 1.0
    body = []
    for index, name in enumerate(KINDS):
        group = tokens.select(kinds == index)
        mean = group.estimate_mean(run.seed)
        if mean is None:
            continue
        part, share = len(group) / len(tokens), group.value.sum().item() / total
        ends = (first.select(early == index), last.select(late == index))
        change = " → ".join(f"{end.value.mean():.2f}" if len(end) else "none" for end in ends)
        shares = [format_percent(part), format_percent(share), render_bar(share)]
        body.append([name, *shares, f"{mean:.3f}", change])
    head = ["kind", "tokens", "of the sum", "", "mean, nats", "first → last"]
    note = render_note("First → last: the mean in the first and in the last fifth of the steps.")
    label = "divergence by kind of token"
    return render_table(head, body, numbers=(1, 2, 4, 5), label=label) + note


def _render_expensive_tokens(tokens: TokenTable, run: RunData) -> str:
    ids, inverse = tokens.token.unique(return_inverse=True)
    sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, inverse, tokens.value)
    counts = torch.bincount(inverse, minlength=len(ids))
    total = tokens.value.sum().item() or 1.0
    # A stable order keeps the page the same where two tokens cost the same.
    order = sums.argsort(descending=True, stable=True)[:MAX_TOKENS].tolist()
    # Bars are drawn against the largest share: of the whole sum, all would be short.
    largest = max((sums[index].item() / total for index in order), default=1.0) or 1.0
    body = []
    for index in order:
        token = f"<code>{_render_token(int(ids[index]), run)}</code>"
        share, mean = sums[index].item() / total, (sums[index] / counts[index]).item()
        shares = [format_percent(share), render_bar(share / largest)]
        body.append([token, format_count(counts[index].item()), *shares, f"{mean:.3f}"])
    head = ["token", "times", "of the sum", "", "mean, nats"]
    return render_table(head, body, numbers=(1, 2, 4), label="dearest tokens")


def _render_token(token: int, run: RunData) -> str:
    """Render a token with visible spaces, or its id if the vocabulary lacks it."""
    if token not in run.vocabulary:
        return f"&lt;{token}&gt;"
    return escape_text(run.vocabulary[token][0]).replace(" ", "␣")


def _render_correctness(tokens: TokenTable, run: RunData) -> str:
    if all(row.get("reward") is None for row in tokens.rows):
        return ""
    rewards = _read_column([row.get("reward") for row in tokens.rows])
    masks = {"right": rewards >= 1.0, "wrong": rewards < 1.0}
    columns = []
    for mask in masks.values():
        rows = [tokens.rows[index] for index in mask.nonzero()[:, 0].tolist()]
        mean = tokens.select(mask[tokens.row]).estimate_mean(run.seed)
        cut = sum(row["stop_reason"] == "length" for row in rows)
        column = {
            "rollouts": format_count(len(rows)),
            "mean value, nats": "" if mean is None else f"{mean:.3f}",
            "tokens an answer": _format_mean([len(row["tokens"]) for row in rows]),
            "student entropy": _format_entropy(rows, "student_entropy"),
            "teacher entropy": _format_entropy(rows, "teacher_entropy"),
            "cut off": format_percent(cut / len(rows)) if rows else "",
        }
        columns.append(column)
    body = [[name, *(column[name] for column in columns)] for name in columns[0]]
    table = render_table(["", *masks], body, numbers=(1, 2), label="by correctness")
    return table + _render_preference(tokens, rewards)


def _render_preference(tokens: TokenTable, rewards: Float[Tensor, " R"]) -> str:
    """Render how well the teacher's log-ratio to the student separates right from wrong
    completions."""
    scores, hits = [], []
    for row, reward in zip(tokens.rows, rewards.tolist(), strict=True):
        gap = _subtract_logprobs(row["teacher_logprobs"], row["policy_logprobs"])
        gap = gap[~gap.isnan()]
        if len(gap) and not math.isnan(reward):
            scores.append(gap.mean().item())
            hits.append(reward >= 1.0)
    area = auroc(scores, hits)
    if area is None:
        return ""
    return render_note(
        "The teacher's mean log-ratio separates right from wrong answers with an area under the curve of "
        f"{area} (0.5: not at all; rollouts counted as independent)."
    )


def _format_entropy(rows: Sequence[Row], name: str) -> str:
    columns = [row.get(name) or () for row in rows]
    return _format_mean([value for column in columns for value in column if value is not None])


def _format_mean(values: Sequence[float | int]) -> str:
    return format_number(sum(values) / len(values)) if values else ""
