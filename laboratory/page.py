"""The pages of `docs/evidence`: each claim with the paper's number, ours, its interval and a verdict."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from laboratory.judging import Judgement, judge_claim
from laboratory.results import TEACHER, Results, name_before
from laboratory.study import (
    Claim,
    LoadedReproduction,
    get_arms,
    is_map,
    list_measures,
    list_start_measures,
)
from practicum.statistics import holm, t_interval

COST = "spent/flops"

OLD = "old design"
"""The verdict on results of a design that has changed since."""

LEVEL = 0.05
"""The p value below which a difference counts after Holm's correction."""


def render_claims(
    studies: Sequence[LoadedReproduction],
    stored: Mapping[str, Results],
    repeated: Mapping[str, Results],
) -> str:
    """Return a table of the claims of all stored studies, with their verdicts and the p value of the deciding test.

    A sentence counts the verdicts that are the same in `repeated`, results with other seeds. Results of an old design
    decide nothing and are not counted.
    """
    judged = [
        (study, claim, *judge_current(study, claim, stored[study.name]))
        for study in studies
        if study.name in stored
        for claim in study.spec.claims
    ]
    # Every difference on the pages is one more chance of a false one.
    all_p = [judgement.p for *_, judgements in judged for judgement in judgements]
    adjusted = iter(holm([p for p in all_p if p is not None]))
    rows, survivors, differences = [], 0, 0
    for study, claim, verdict, judgements in judged:
        by_test = [None if judgement.p is None else next(adjusted) for judgement in judgements]
        tested = [p for p in by_test if p is not None]
        survivors, differences = (
            survivors + sum(p < LEVEL for p in tested),
            differences + len(tested),
        )
        link = f"[{study.name}](evidence/{name_page(study)})"
        p = "" if not by_test or by_test[0] is None else f"{by_test[0]:.2g}"
        rows.append([claim.claim, link, f"**{verdict}**", p])
    sentence = (
        f"Of {differences} differences, ratios and rises on these pages, {survivors} have p < {LEVEL} after Holm's "
        "correction for their number. The last column is the corrected p of the deciding test; a study's page cites the papers.\n\n"
    )
    sentence += _describe_repeats(judged, repeated)
    return sentence + _render_table(["claim", "study", "verdict", "p (Holm)"], rows)


def _describe_repeats(
    judged: Sequence[tuple[LoadedReproduction, Claim, str, list[Judgement]]],
    repeated: Mapping[str, Results],
) -> str:
    """Return how many verdicts are the same with other seeds; empty if no study was repeated."""
    pairs = [
        (study.name, verdict, judge_current(study, claim, repeated[study.name])[0])
        for study, claim, verdict, _ in judged
        if study.name in repeated
    ]
    current = [pair for pair in pairs if OLD not in pair]
    if not current:
        return ""
    same = sum(first == second for _, first, second in current)
    names = ", ".join(dict.fromkeys(name for name, *_ in current))
    return (
        f"Run again with other seeds, {names}: {same} of {len(current)} verdicts are the same.\n\n"
    )


def judge_current(
    study: LoadedReproduction, claim: Claim, results: Results
) -> tuple[str, list[Judgement]]:
    """Return the verdict and the judgements of a claim; no verdict on results of another design."""
    if results.design != study.digest_design(results.form):
        return OLD, []
    return judge_claim(claim, results)


def name_page(study: LoadedReproduction) -> str:
    """Return the name of a study's file."""
    return f"{study.name.replace('_', '-')}.md"


def _cite(claim: Claim) -> str:
    return claim.paper if claim.paper.startswith("http") else f"arXiv:{claim.paper}"


def join_judgements(texts: Sequence[str]) -> str:
    """Join the judgements of a claim; one at equal FLOPs follows that at equal steps, without its arms.

    Accuracy, the usual measure, is not named.
    """
    at = " at equal FLOPs"
    labels = {text.partition(": ")[0] for text in texts}
    parts = []
    for text in texts:
        label = text.partition(": ")[0]
        if label.endswith(at) and label.removesuffix(at) in labels:
            continue
        parts.append(text)
        prefix = f"{label}{at}: "
        parts += [cost.removeprefix(label).strip() for cost in texts if cost.startswith(prefix)]
    return "; ".join(parts).replace(", accuracy:", ":")


def render_study(
    study: LoadedReproduction, results: Results, repeated: Results | None = None
) -> str:
    """Return a study's page: its plot, its arms, and the verdict on each claim with its numbers.

    The verdicts and numbers of `repeated`, results with other seeds, follow those of `results`.
    """
    lines = [
        f"# {study.name.replace('_', ' ').capitalize()}\n",
        f"{study.spec.question}\n",
        f"![{study.name}](../img/evidence/{study.name}.svg)\n",
        _render_arms(study, results),
        "",
    ]
    for claim in study.spec.claims:
        verdict, judgements = judge_current(study, claim, results)
        why = ""
        if claim.why:
            how = f"shown by {claim.shown_by}" if claim.shown_by else "an explanation, not tested"
            why = f" Why: {claim.why} ({how})."
        numbers = join_judgements([judgement.text for judgement in judgements]) or (
            "the recipe or the arms have changed since these runs, which decide nothing"
        )
        lines.append(
            f"- {claim.claim}: **{verdict}**. Here: {numbers}.{_repeat_claim(study, claim, repeated)} "
            f"Paper: {claim.theirs} ({_cite(claim)}).{why}"
        )
    if study.spec.remarks:
        lines.append(f"\n{study.spec.remarks}")
    if is_map(study):
        lines.append(
            "\nHeld-out accuracy by learning rate, mean over seeds, with the alarms raised:\n\n"
            + _render_map(study, results)
        )
    elif results.tried:
        by = "" if study.spec.aim == "accuracy" else f", by {study.spec.aim.replace('_', ' ')}"
        lines.append(f"\nLearning rates tried{by}: {_format_tried(results, study.spec.aim)}.")
    if results.failed:
        # What a user should do about a failed run is no result.
        reasons = [reason.partition(";")[0] for reason in results.failed]
        lines.append(f"\nRuns that failed: {'; '.join(reasons)}.")
    lines.append("\n" + _describe_runs(results))
    if repeated is not None:
        lines.append(f"\nAgain: {_describe_runs(repeated)}")
    return "\n".join(lines) + "\n"


def _describe_runs(results: Results) -> str:
    """Return the command of the runs, their seeds and time, and the versions."""
    seeds = f"{len(results.seeds)} seed{'' if len(results.seeds) == 1 else 's'}"
    full = " --full" if results.form == "full" else ""
    first = f" --first-seed {results.seeds[0]}" if results.seeds and results.seeds[0] else ""
    versions = ", ".join(
        f"{name} {results.versions[name]}"
        for name in ("commit", "torch", "processor")
        if results.versions.get(name)
    )
    command = f"python -m laboratory {results.name}{full}{first}"
    return f"`{command}`: {seeds}, {results.seconds / 60:.0f} minutes; {versions}."


def _repeat_claim(study: LoadedReproduction, claim: Claim, repeated: Results | None) -> str:
    """Return the verdict on a claim and its numbers with other seeds; empty without them."""
    if repeated is None:
        return ""
    verdict, judgements = judge_current(study, claim, repeated)
    if verdict == OLD:
        return ""
    numbers = join_judgements([judgement.text for judgement in judgements])
    return f" Again: **{verdict}**, {numbers}."


def _render_arms(study: LoadedReproduction, results: Results) -> str:
    """Return a table of the arms, and of the teacher if a claim names it.

    Its columns are the measures of the claims, FLOPs, the learning rate, and alarms.
    """
    measured = {measure for readings in results.readings.values() for measure in readings}
    start_measures = map(name_before, list_start_measures(study.spec))
    measures = [
        measure
        for measure in (*list_measures(study.spec), *start_measures)
        if measure in measured and measure != COST
    ]
    abouts = _list_arms(study, results)

    def get_values(arm: str, measure: str) -> list[float]:
        return list(results.readings.get(arm, {}).get(measure, {}).values())

    columns = [("arm", [f"`{arm}`: {about}" for arm, about in abouts.items()])]
    for measure in measures:
        columns.append(
            (_format_measure(measure), [_format_mean(get_values(arm, measure)) for arm in abouts])
        )
    if COST in measured:
        columns.append(("FLOPs", [_format_flops(get_values(arm, COST)) for arm in abouts]))
    if results.chosen:
        columns.append(("learning rate", [_format_rate(results, arm) for arm in abouts]))
    alarms = [_format_alarms(results, arm) for arm in abouts]
    if any(alarms):
        columns.append(("alarms", alarms))
    heads, cells = zip(*columns, strict=True)
    return _render_table(heads, list(zip(*cells, strict=True)))


def _format_rate(results: Results, arm: str) -> str:
    rate = results.chosen.get(arm, {}).get("learning_rate")
    if rate is None:
        return ""
    tried = [row["learning_rate"] for row in results.tried if row["arm"] == arm]
    edge = (
        "≥" if rate == max(tried, default=None) else "≤" if rate == min(tried, default=None) else ""
    )
    return f"{edge}{rate:g}"


def _format_alarms(results: Results, arm: str) -> str:
    """Return the monitors that raised an alarm in any run of an arm."""
    return ", ".join(sorted(set(chain.from_iterable(results.alarms.get(arm, {}).values()))))


def _render_map(study: LoadedReproduction, results: Results) -> str:
    """Return a table with a row per arm and a column per learning rate."""
    rates = sorted({row["learning_rate"] for row in results.tried})
    by_setting = {(row["arm"], row["learning_rate"]): row for row in results.tried}
    rows = [
        [f"`{arm}`", *(_format_cell(by_setting.get((arm, rate))) for rate in rates)]
        for arm in study.spec.arms
    ]
    return _render_table(["arm", *(f"{rate:g}" for rate in rates)], rows)


def _format_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    score = "failed" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
    return f"{score} ({', '.join(row['alarms'])})" if row.get("alarms") else score


def _list_arms(study: LoadedReproduction, results: Results) -> dict[str, str]:
    """Return the arms with their descriptions, and the teacher if a claim names it."""
    abouts = {name: arm.about for name, arm in study.spec.arms.items()}
    if TEACHER in results.readings and any(TEACHER in get_arms(test) for test in study.spec.tests):
        abouts[TEACHER] = "its own answers"
    return abouts


def _format_measure(measure: str) -> str:
    prefix = name_before("")
    suffix = ", before" if measure.startswith(prefix) else ""
    return measure.removeprefix(prefix).replace("_", " ") + suffix


def _format_mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    interval = t_interval(values)
    mean = sum(values) / len(values)
    form = ".3f" if abs(mean) < 1e5 else ".2e"
    margin = "" if interval is None else f" ± {interval.high - interval.mean:{form}}"
    return f"{mean:{form}}{margin}"


def _format_flops(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2e}" if values else ""


def _format_tried(results: Results, aim: str) -> str:
    groups: dict[str, list[str]] = {}
    for row in results.tried:
        score = "failed" if row[aim] is None else f"{row[aim]:.2f}"
        mark = "**" if row["chosen"] else ""
        groups.setdefault(row["arm"], []).append(f"{mark}{row['learning_rate']:g}: {score}{mark}")
    return "; ".join(f"`{arm}` {', '.join(tried)}" for arm, tried in groups.items())


def _render_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]
    )
