"""The answers of a run: how many tries it takes, whether confidence is earned, how long and how varied they are."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from practicum.report.charts import Point, bar_chart, diagonal_chart, legend_figure, ranged_chart
from practicum.report.markup import Section, count, note, number, panel, percent, safe, table
from practicum.report.reading import Row, RunData
from practicum.statistics import (
    Interval,
    bootstrap,
    calibration_error,
    distinct_ngrams,
    group_pairs,
    is_degenerate,
    longest_run,
    pass_at_k,
    repeated_share,
    similarity,
    unique_share,
)
from practicum.training.evaluation import GradedCompletion, agreeing, confidences

BINS = 10
FIRST_SHOWN, MOST_SHOWN = 12, 200
"""So many held-out answers are shown side by side at once, and so many at all."""

MOST_COMPARED = 200
"""So many groups of training rollouts are compared within, at each end of the run."""

Column = tuple[str, str, Row]
"""Who answered, in which colour, and the evaluation."""


def evaluation_section(run: RunData) -> Section | None:
    """Held-out numbers, pass@k and calibration."""
    columns = _columns(run)
    if not columns:
        return None
    body = "".join(
        [
            '<div class="panels">',
            panel("Before, after, teacher", _comparison(run)),
            panel("Domains", _domains(columns)),
            panel("pass@k", _pass_at_k(columns, run.seed)),
            panel("Calibration", _calibration(columns)),
            "</div>",
        ]
    )
    return Section(
        "evaluation", "Evaluation", "Held-out evaluation", "the same prompts before and after", body
    )


def _columns(run: RunData) -> list[Column]:
    known = [
        ("before", "before", run.before),
        ("after", "student", run.after),
        ("teacher", "teacher", run.teacher),
    ]
    return [(name, role, evaluation) for name, role, evaluation in known if evaluation is not None]


def _comparison(run: RunData) -> str:
    """The numbers of the evaluations side by side, from the summary where there is one."""
    whole = {name: evaluation for name, _, evaluation in _columns(run)}
    whole |= {
        name: run.summary[name]
        for name in ("before", "after", "teacher")
        if run.summary and run.summary[name]
    }
    names = [name for name in ("before", "after", "teacher") if name in whole]
    lines = {
        "accuracy": "accuracy",
        "reverse_kl": "reverse KL, nats a token",
        "student_entropy": "entropy, nats a token",
        "length": "tokens an answer",
        "truncated": "cut off",
    }
    body = [
        [label, *(_cell(key, whole[name][key]) for name in names)] for key, label in lines.items()
    ]
    first = whole[names[0]]
    prompts = first.get("prompts") or len({answer["prompt"] for answer in first["answers"]})
    answers = first.get("completions") or len(first["answers"])
    return table(
        ["", *names], body, numbers=range(1, len(names) + 1), label="held-out evaluation"
    ) + note(
        f"{count(prompts)} prompts, {count(answers)} answers. Reverse KL and entropy are on the student's own answers of that time."
    )


def _cell(key: str, value: Any) -> str:
    return percent(value) if key == "truncated" and value is not None else number(value)


def _domains(columns: Sequence[Column]) -> str:
    names = list(
        dict.fromkeys(domain for _, _, evaluation in columns for domain in evaluation["by_domain"])
    )
    if not names:
        return ""
    body = [
        [safe(name), *(number(evaluation["by_domain"].get(name)) for _, _, evaluation in columns)]
        for name in names
    ]
    head = ["domain", *(who for who, _, _ in columns)]
    return table(head, body, numbers=range(1, len(head)), label="accuracy by domain")


def _by_prompt(evaluation: Row) -> list[list[Row]]:
    """The graded answers of each prompt."""
    graded = (answer for answer in evaluation["answers"] if answer["reward"] is not None)
    return list(group_pairs((answer["prompt"], answer) for answer in graded).values())


def _pass_at_k(columns: Sequence[Column], seed: int) -> str:
    """pass@k for k = 1, 2, 4 ..., with intervals over prompts; nothing for one answer a prompt."""
    grouped = [(name, role, _by_prompt(evaluation)) for name, role, evaluation in columns]
    grouped = [(name, role, groups) for name, role, groups in grouped if groups]
    most = min((len(group) for _, _, groups in grouped for group in groups), default=0)
    if most < 2:
        return ""
    tries = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < most] + [most]

    def chance(groups: Sequence[Sequence[Row]], k: int) -> Interval:
        chances = [
            pass_at_k(len(group), sum(one["reward"] >= 1.0 for one in group), k) for group in groups
        ]
        return bootstrap(torch.tensor(chances, dtype=torch.float64), seed)

    drawn = [
        (name, role, [(place, chance(groups, k)) for place, k in enumerate(tries)])
        for name, role, groups in grouped
    ]
    chart = ranged_chart(
        "the chance that one of k answers is right", drawn, [f"k={k}" for k in tries], top=1.0
    )
    body = [[name, *(str(interval) for _, interval in values)] for name, _, values in drawn]
    numbers = table(
        ["", *(f"pass@{k}" for k in tries)],
        body,
        numbers=range(1, len(tries) + 1),
        label="pass at k",
    )
    return legend_figure(chart, drawn) + numbers


def _calibration(columns: Sequence[Column]) -> str:
    """How often an answer is right against how sure it was, in bins of equally many."""
    drawn: list[tuple[str, str, list[Point]]] = []
    body = []
    several = agreeing(_answered(columns[0][2]))
    for name, role, evaluation in columns:
        pairs = list(confidences(_answered(evaluation)).values())
        if len(pairs) < 2:
            continue
        sure, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        mean_sure, mean_right = sum(sure) / len(sure), sum(right) / len(right)
        drawn.append((name, role, _binned(pairs)))
        error = calibration_error(sure, right, BINS)
        body.append(
            [
                name,
                f"{mean_sure:.2f}",
                f"{mean_right:.2f}",
                f"{mean_sure - mean_right:+.2f}",
                f"{error:.3f}",
            ]
        )
    if not drawn:
        return ""
    chart = diagonal_chart("how often an answer is right, by how sure it was", drawn)
    head = ["", "confidence", "right", "over-confidence", "ECE"]
    sure_of = (
        "the share of a prompt's answers that say the same as the commonest one, which is then right or wrong"
        if several
        else "the probability that the model which wrote the answer gave its whole text"
    )
    return (
        legend_figure(chart, drawn)
        + table(head, body, numbers=(1, 2, 3, 4), label="calibration")
        + note(
            f"Confidence is {sure_of}. Bins hold equally many answers; the error is biased upwards where there are few "
            f"({len(_by_prompt(columns[0][2]))} prompts here)."
        )
    )


def _answered(evaluation: Row) -> list[GradedCompletion]:
    return [GradedCompletion(**answer) for answer in evaluation["answers"]]


def _binned(pairs: Sequence[Point]) -> list[Point]:
    """The mean confidence and the share of right answers of each bin."""
    ordered = sorted(pairs)
    bins = min(BINS, max(len(ordered) // 5, 1))
    edges = [len(ordered) * place // bins for place in range(bins + 1)]
    parts = [ordered[low:high] for low, high in pairwise(edges) if high > low]
    return [
        (sum(sure for sure, _ in part) / len(part), sum(right for _, right in part) / len(part))
        for part in parts
    ]


def lengths_section(run: RunData) -> Section | None:
    """How long the training rollouts were, how they ended, and how much they differ, at the two ends of the run."""
    if not run.rollouts:
        return None
    steps = [row["step"] for row in run.rollouts]
    reach = max((steps[-1] - steps[0] + 1) // 5, 1)
    ends = {
        "first fifth": [row for row in run.rollouts if row["step"] < steps[0] + reach],
        "last fifth": [row for row in run.rollouts if row["step"] > steps[-1] - reach],
    }
    body = f'<div class="panels">{panel("Lengths", _lengths(ends))}{panel("Repetition and diversity", _variety(ends))}</div>'
    return Section(
        "lengths",
        "Lengths",
        "Length and diversity",
        "sampled training rollouts, first and last fifth of the steps",
        body,
    )


def _lengths(ends: Mapping[str, Sequence[Row]]) -> str:
    lengths = {name: [len(row["tokens"]) for row in rows] for name, rows in ends.items()}
    longest = max(max(values) for values in lengths.values())
    width = max(-(-longest // 12), 1)
    edges = list(range(1, longest + width, width))
    names = [str(low) if width == 1 else f"{low}-{low + width - 1}" for low in edges]
    groups = []
    for (name, values), role in zip(lengths.items(), ("before", "student"), strict=True):
        shares = [
            sum(low <= value < low + width for value in values) / len(values) for low in edges
        ]
        groups.append((name, role, shares))
    chart = bar_chart("share of rollouts by length in tokens", groups, names)
    return legend_figure(chart, groups, "<span>share of rollouts by tokens</span>") + _length_table(
        ends
    )


def _length_table(ends: Mapping[str, Sequence[Row]]) -> str:
    body = []
    for name, rows in ends.items():
        ordered = sorted(len(row["tokens"]) for row in rows)
        cut = sum(row["stop_reason"] == "length" for row in rows) / len(rows)
        quantiles = [ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.95)]
        body.append(
            [
                name,
                f"{sum(ordered) / len(ordered):.1f}",
                *map(str, quantiles),
                str(ordered[-1]),
                percent(cut),
            ]
        )
    return table(
        ["", "mean", "median", "95 %", "longest", "cut off"],
        body,
        numbers=(1, 2, 3, 4, 5),
        label="lengths",
    )


def _variety(ends: Mapping[str, Sequence[Row]]) -> str:
    columns = [_variety_of(rows) for rows in ends.values()]
    names = list(dict.fromkeys(name for column in columns for name in column))
    body = [[name, *(column.get(name, "") for column in columns)] for name in names]
    several = any("different answers of a prompt" in column for column in columns)
    why = (
        ""
        if several
        else " One answer a prompt: nothing is said of how the answers to one prompt differ."
    )
    return table(["", *ends], body, numbers=(1, 2), label="repetition and diversity") + note(
        "Diversity is within the answers to one prompt of one step, cut to one length; degenerate is the loop test of 2604.08527."
        + why
    )


def _variety_of(rows: Sequence[Row]) -> dict[str, str]:
    whole = {
        "3-grams said before in the answer": percent(
            _mean([repeated_share(row["tokens"]) for row in rows])
        ),
        "longest loop, tokens": str(max(longest_run(row["tokens"]) for row in rows)),
        "degenerate answers": percent(_mean([float(is_degenerate(row["text"])) for row in rows])),
        "empty answers": percent(_mean([float(not row["text"].strip()) for row in rows])),
    }
    groups = group_pairs(((row["step"], row["prompt"]), row) for row in rows)
    several = [group for group in groups.values() if len(group) > 1][:MOST_COMPARED]
    if not several:
        return whole
    whole["different answers of a prompt"] = percent(
        _mean([unique_share([row["text"].strip() for row in group]) for group in several])
    )
    for n in (1, 2, 3):
        known = [distinct_ngrams([row["tokens"] for row in group], n) for group in several]
        values = [value for value in known if value is not None]
        if values:
            whole[f"distinct {n}-grams"] = percent(_mean(values))
    likeness = [similarity([row["tokens"][:200] for row in group[:4]]) for group in several[:50]]
    values = [value for value in likeness if value is not None]
    return whole | ({"likeness of two answers": percent(_mean(values))} if values else {})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def answers_section(run: RunData) -> Section | None:
    """Each held-out prompt with both answers."""
    samples = [] if run.summary is None else run.summary["samples"]
    if not samples:
        return None
    body = [
        [
            safe(sample["prompt"]),
            safe(sample["answer"] or ""),
            f"<span{_mark(sample['reward_before'])}>{safe(sample['before'])}</span>",
            f"<span{_mark(sample['reward_after'])}>{safe(sample['after'])}</span>",
        ]
        for sample in samples[:MOST_SHOWN]
    ]
    head = ["prompt", "expected", "before", "after"]
    whole = table(head, body, label="answers before and after", first=FIRST_SHOWN)
    if len(samples) > MOST_SHOWN:
        whole += note(
            f"The first {MOST_SHOWN} of {count(len(samples))} are here; all of them are in summary.json."
        )
    whole = f'<div class="answers">{whole}</div>'
    return Section("answers", "Answers", "Answers, before and after", _turned(samples), whole)


def _turned(samples: Sequence[Row]) -> str:
    graded = [
        sample
        for sample in samples
        if sample["reward_before"] is not None and sample["reward_after"] is not None
    ]
    if not graded:
        return ""
    moved = [(sample["reward_before"] >= 1.0, sample["reward_after"] >= 1.0) for sample in graded]
    return (
        f"{moved.count((False, True))} became right, {moved.count((True, False))} became wrong, "
        f"{moved.count((True, True))} stayed right, {moved.count((False, False))} stayed wrong"
    )


def _mark(reward: float | None) -> str:
    return "" if reward is None else f' class="{"right" if reward >= 1.0 else "wrong"}"'
