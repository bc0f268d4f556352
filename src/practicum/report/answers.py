"""The completions of a run: pass@k, calibration, lengths, diversity, and texts side by side."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from practicum.report.charts import (
    Point,
    Ranged,
    render_bar_chart,
    render_diagonal_chart,
    render_figure,
    render_ranged_chart,
)
from practicum.report.markup import (
    Section,
    escape_text,
    format_count,
    format_number,
    format_percent,
    render_note,
    render_panels,
    render_pictures,
    render_table,
)
from practicum.report.run_data import Row, RunData, find_pictures
from practicum.report.verdict import group_rewards
from practicum.statistics import (
    calibration_error,
    distinct_ngrams,
    group_pairs,
    is_degenerate,
    longest_run,
    mean_of,
    mean_score,
    pass_at_k,
    repeated_share,
    similarity,
    unique_share,
)
from practicum.statistics.heldout import GradedCompletion, compute_confidences, has_several_answers

BINS = 10

MAX_OPEN, MAX_SHOWN = 12, 200
"""The number of held-out completions shown at first, and the largest number shown."""

MAX_GROUPS = 200
"""The number of groups of training rollouts for the diversity measures, at each end of the run."""

MAX_COMPARED_GROUPS, MAX_COMPARED, MAX_COMPARED_TOKENS = 50, 4, 200
"""Likeness compares all pairs of a group, so it looks at fewer groups, completions and tokens."""

Column = tuple[str, str, Row]
"""A model's name, the role that gives its colour, and its evaluation."""


def build_evaluation_section(run: RunData) -> Section | None:
    """Build the section with held-out numbers, pass@k and calibration."""
    evaluations = [
        ("before", "before", run.before),
        ("after", "student", run.after),
        ("teacher", "teacher", run.teacher),
    ]
    columns = [
        (name, role, evaluation) for name, role, evaluation in evaluations if evaluation is not None
    ]
    if not columns:
        return None
    body = render_panels(
        {
            "Before, after, teacher": _render_comparison(run, columns),
            "Domains": _render_domains(columns),
            "pass@k": _render_pass_at_k(columns, run.seed),
            "Calibration": _render_calibration(columns),
        }
    )
    about = "the same prompts before and after"
    return Section("evaluation", "Evaluation", "Held-out evaluation", about, body)


def _render_comparison(run: RunData, columns: Sequence[Column]) -> str:
    """Render the numbers of the evaluations side by side, from the summary if there is one."""
    evaluations = {name: evaluation for name, _, evaluation in columns}
    for name in ("before", "after", "teacher"):
        if run.summary and run.summary[name]:
            evaluations[name] = run.summary[name]
    names = [name for name in ("before", "after", "teacher") if name in evaluations]
    lines = {
        "accuracy": "accuracy",
        "reverse_kl": "reverse KL, nats per token",
        "reverse_kl_estimate": "reverse KL (estimate), nats per token",
        "student_entropy": "entropy, nats per token",
        "student_entropy_estimate": "entropy (estimate), nats per token",
        "length": "tokens per answer",
        "truncated": "cut off",
    }
    body = [
        [label, *(_render_cell(key, evaluations[name][key]) for name in names)]
        for key, label in lines.items()
        if not key.endswith("_estimate") or evaluations[names[0]][key] is not None
    ]
    # A summary counts its prompts and completions; an evaluation lists them.
    first = evaluations[names[0]]
    prompts = first.get("prompts") or len({answer["prompt"] for answer in first["answers"]})
    completions = first.get("completions") or len(first["answers"])
    head = ["", *names]
    table = render_table(head, body, numbers=range(1, len(head)), label="held-out evaluation")
    estimated = "Estimates are on answers sampled at temperature 1, with their standard error."
    return table + render_note(
        f"{format_count(prompts)} prompts, {format_count(completions)} answers. "
        "Reverse KL and entropy are on the student's own answers of that time. "
        + (estimated if first["reverse_kl_estimate"] is not None else "")
    )


def _render_cell(key: str, value: Any) -> str:
    if key == "truncated" and value is not None:
        return format_percent(value)
    return format_number(value)


def _render_domains(columns: Sequence[Column]) -> str:
    accuracies = [evaluation["by_domain"] for _, _, evaluation in columns]
    names = dict.fromkeys(domain for by_domain in accuracies for domain in by_domain)
    if not names:
        return ""
    body = [
        [escape_text(name), *(format_number(by_domain.get(name)) for by_domain in accuracies)]
        for name in names
    ]
    head = ["domain", *(name for name, _, _ in columns)]
    return render_table(head, body, numbers=range(1, len(head)), label="accuracy by domain")


def _render_pass_at_k(columns: Sequence[Column], seed: int) -> str:
    """Render pass@k for k = 1, 2, 4 and so on; nothing if a prompt has a single completion."""
    rewards = [
        (name, role, group_rewards(evaluation).values()) for name, role, evaluation in columns
    ]
    rewards = [(name, role, groups) for name, role, groups in rewards if groups]
    # pass@k needs k completions of every prompt, so the smallest group bounds k for all models.
    most = min((len(group) for _, _, groups in rewards for group in groups), default=0)
    if most < 2:
        return ""
    tries = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < most] + [most]
    curves: list[tuple[str, str, list[Ranged]]] = []
    for name, role, groups in rewards:
        rights = [sum(reward >= 1.0 for reward in group) for group in groups]
        points = []
        for index, k in enumerate(tries):
            chances = [
                pass_at_k(len(group), right, k) for group, right in zip(groups, rights, strict=True)
            ]
            points.append((index, mean_score(chances, seed)))
        curves.append((name, role, points))
    chart = render_ranged_chart(
        "the chance that one of k answers is right", curves, [f"k={k}" for k in tries], top=1.0
    )
    body = [[name, *(str(interval) for _, interval in points)] for name, _, points in curves]
    head = ["", *(f"pass@{k}" for k in tries)]
    table = render_table(head, body, numbers=range(1, len(head)), label="pass at k")
    return render_figure(chart, curves) + table


def _render_calibration(columns: Sequence[Column]) -> str:
    """Render accuracy against confidence, in bins of equally many completions."""
    curves: list[tuple[str, str, list[Point]]] = []
    body = []
    for name, role, evaluation in columns:
        pairs = list(compute_confidences(_read_completions(evaluation)).values())
        if len(pairs) < 2:
            continue
        curves.append((name, role, _group_into_bins(pairs)))
        confidence, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        sure, hits = _compute_mean(confidence), _compute_mean(right)
        error = f"{calibration_error(confidence, right, BINS):.3f}"
        body.append([name, f"{sure:.2f}", f"{hits:.2f}", f"{sure - hits:+.2f}", error])
    if not curves:
        return ""
    chart = render_diagonal_chart("how often an answer is right, by its confidence", curves)
    head = ["", "confidence", "right", "over-confidence", "ECE"]
    first = columns[0][2]
    source = "the probability that the model which wrote the answer gave its whole text"
    if has_several_answers(_read_completions(first)):
        source = (
            "the share of a prompt's answers that agree with its most common answer, "
            "which is then graded right or wrong"
        )
    return (
        render_figure(chart, curves)
        + render_table(head, body, numbers=(1, 2, 3, 4), label="calibration")
        + render_note(
            f"Confidence is {source}. Bins hold equally many answers; the error is biased upwards "
            f"where there are few ({len(group_rewards(first))} prompts here)."
        )
    )


def _read_completions(evaluation: Row) -> list[GradedCompletion]:
    return [GradedCompletion(**answer) for answer in evaluation["answers"]]


def _group_into_bins(pairs: Sequence[Point]) -> list[Point]:
    """Return the mean confidence and the share of right completions of each bin."""
    ordered = sorted(pairs)
    # A bin of fewer than five completions is too noisy.
    bins = min(BINS, max(len(ordered) // 5, 1))
    edges = [len(ordered) * index // bins for index in range(bins + 1)]
    parts = [ordered[low:high] for low, high in pairwise(edges) if high > low]
    return [
        (_compute_mean([pair[0] for pair in part]), _compute_mean([pair[1] for pair in part]))
        for part in parts
    ]


def build_lengths_section(run: RunData) -> Section | None:
    """Build the section on lengths, ends and diversity of rollouts, at both ends of the run."""
    if not run.rollouts:
        return None
    steps = [row["step"] for row in run.rollouts]
    reach = max((steps[-1] - steps[0] + 1) // 5, 1)
    ends = {
        "first fifth": [row for row in run.rollouts if row["step"] < steps[0] + reach],
        "last fifth": [row for row in run.rollouts if row["step"] > steps[-1] - reach],
    }
    lengths, diversity = _render_lengths(ends), _render_diversity(ends)
    body = render_panels({"Lengths": lengths, "Repetition and diversity": diversity})
    about = "sampled training rollouts, first and last fifth of the steps"
    return Section("lengths", "Lengths", "Length and diversity", about, body)


def _render_lengths(ends: Mapping[str, Sequence[Row]]) -> str:
    lengths = {name: sorted(len(row["tokens"]) for row in rows) for name, rows in ends.items()}
    longest = max(values[-1] for values in lengths.values())
    # There are twelve bars at most; the two negations round the width up.
    width = max(-(-longest // 12), 1)
    edges = list(range(1, longest + width, width))
    names = [str(low) if width == 1 else f"{low}-{low + width - 1}" for low in edges]
    groups, body = [], []
    for (name, rows), role in zip(ends.items(), ("before", "student"), strict=True):
        values = lengths[name]
        shares = [
            sum(low <= value < low + width for value in values) / len(values) for low in edges
        ]
        groups.append((name, role, shares))
        median, high = (str(values[round(share * (len(values) - 1))]) for share in (0.5, 0.95))
        cut = sum(row["stop_reason"] == "length" for row in rows) / len(rows)
        mean = f"{_compute_mean(values):.1f}"
        body.append([name, mean, median, high, str(values[-1]), format_percent(cut)])
    chart = render_bar_chart("share of rollouts by length in tokens", groups, names)
    head = ["", "mean", "median", "95 %", "longest", "cut off"]
    table = render_table(head, body, numbers=range(1, len(head)), label="lengths")
    return render_figure(chart, groups, "<span>share of rollouts by tokens</span>") + table


def _render_diversity(ends: Mapping[str, Sequence[Row]]) -> str:
    columns = [_measure_diversity(rows) for rows in ends.values()]
    names = list(dict.fromkeys(name for column in columns for name in column))
    body = [[name, *(column.get(name, "") for column in columns)] for name in names]
    note = (
        "Diversity is within the answers to one prompt of one step, cut to one length; "
        "degenerate is the loop test of 2604.08527."
    )
    if not any("different answers of a prompt" in column for column in columns):
        note += " With one answer per prompt, the differences between answers to one prompt are unknown."
    table = render_table(["", *ends], body, numbers=(1, 2), label="repetition and diversity")
    return table + render_note(note)


def _measure_diversity(rows: Sequence[Row]) -> dict[str, str]:
    """Return repetition within completions, and diversity among the completions of a prompt, as text."""
    texts = [row["text"] for row in rows]
    repeated = [repeated_share(row["tokens"]) for row in rows]
    lines = {
        "repeated 3-grams": format_percent(_compute_mean(repeated)),
        "longest loop, tokens": str(max(longest_run(row["tokens"]) for row in rows)),
        "degenerate answers": format_percent(_compute_mean(list(map(is_degenerate, texts)))),
        "empty answers": format_percent(_compute_mean([not text.strip() for text in texts])),
    }
    by_prompt = group_pairs(((row["step"], row["prompt"]), row) for row in rows)
    groups = [group for group in by_prompt.values() if len(group) > 1][:MAX_GROUPS]
    if not groups:
        return lines
    answers = [[row["text"].strip() for row in group] for group in groups]
    tokens = [[row["tokens"] for row in group] for group in groups]
    compared = [
        [completion[:MAX_COMPARED_TOKENS] for completion in group[:MAX_COMPARED]]
        for group in tokens[:MAX_COMPARED_GROUPS]
    ]
    means = {"different answers of a prompt": mean_of(map(unique_share, answers))}
    for n in (1, 2, 3):
        means[f"distinct {n}-grams"] = mean_of([distinct_ngrams(group, n) for group in tokens])
    means["similarity of two answers"] = mean_of(map(similarity, compared))
    return lines | {name: format_percent(mean) for name, mean in means.items() if mean is not None}


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def build_answers_section(run: RunData) -> Section | None:
    """Build the section with the completions before and after training of each held-out prompt."""
    samples = [] if run.summary is None else run.summary["samples"]
    if not samples:
        return None
    rows = [
        [
            render_pictures(find_pictures(sample.get("pictures", ()), run))
            + escape_text(sample["prompt"]),
            escape_text(sample["answer"] or ""),
            _render_completion(sample["before"], sample["reward_before"]),
            _render_completion(sample["after"], sample["reward_after"]),
        ]
        for sample in samples[:MAX_SHOWN]
    ]
    head = ["prompt", "expected", "before", "after"]
    table = render_table(head, rows, label="answers before and after", max_open=MAX_OPEN)
    if len(samples) > MAX_SHOWN:
        table += render_note(
            f"The first {MAX_SHOWN} of {format_count(len(samples))} are here; "
            "all of them are in summary.json."
        )
    about, body = _describe_changes(samples), f'<div class="answers">{table}</div>'
    return Section("answers", "Answers", "Answers, before and after", about, body)


def _describe_changes(samples: Sequence[Row]) -> str:
    """Count the completions that became or stayed right or wrong, or how many rewards changed."""
    graded = [
        sample
        for sample in samples
        if sample["reward_before"] is not None and sample["reward_after"] is not None
    ]
    if not graded:
        return ""
    rewards = [(sample["reward_before"], sample["reward_after"]) for sample in graded]
    if any(reward not in (0.0, 1.0) for pair in rewards for reward in pair):
        rises = sum(after > before for before, after in rewards)
        falls = sum(after < before for before, after in rewards)
        same = len(rewards) - rises - falls
        return f"{rises} got a higher reward, {falls} a lower one, {same} the same"
    moves = [(before == 1.0, after == 1.0) for before, after in rewards]
    return (
        f"{moves.count((False, True))} became right, {moves.count((True, False))} became wrong, "
        f"{moves.count((True, True))} stayed right, {moves.count((False, False))} stayed wrong"
    )


def _render_completion(text: str, reward: float | None) -> str:
    kinds = {0.0: "wrong", 1.0: "right"}
    if reward is None or reward in kinds:
        kind = "" if reward is None else f' class="{kinds[reward]}"'
        return f"<span{kind}>{escape_text(text)}</span>"
    return (
        f'<span>{escape_text(text)}</span> <span class="note">reward {format_number(reward)}</span>'
    )
