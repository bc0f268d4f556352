"""`docs/evidence.md`: every claim with the paper's number, ours and its interval, and a verdict, from stored results alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from laboratory.judging import judge_claim
from laboratory.results import TEACHER, Results, before
from laboratory.study import (
    Claim,
    LoadedReproduction,
    arms_of,
    is_map,
    measures_of,
    starts_of,
)
from practicum.statistics import t_interval

COST = "spent/flops"


def evidence_page(studies: Sequence[LoadedReproduction], stored: Mapping[str, Results]) -> str:
    """The generated part of the page: a table of all claims, and a section for each reproduction that has results."""
    there = [study for study in studies if study.name in stored]
    rows = [
        _claim_row(claim, study, stored[study.name])
        for study in there
        for claim in study.spec.claims
    ]
    table = _table(
        ["what is claimed", "the paper", "here, with its 95 % interval over seeds", "verdict"], rows
    )
    return "\n".join([table, *(_section(study, stored[study.name]) for study in there)])


def _claim_row(claim: Claim, study: LoadedReproduction, results: Results) -> list[str]:
    verdict, judgements = judge_claim(claim, results)
    ours = "<br>".join(judgement.shown for judgement in judgements)
    return [
        f"{claim.claim} ([{study.name}](#{study.name.replace('_', '-')}))",
        _paper(claim),
        ours,
        f"**{verdict}**",
    ]


def _paper(claim: Claim) -> str:
    source = claim.paper if claim.paper.startswith("http") else f"arXiv:{claim.paper}"
    return f"{claim.theirs} ({source})"


def _section(study: LoadedReproduction, results: Results) -> str:
    seeds = f"{len(results.seeds)} seed{'' if len(results.seeds) == 1 else 's'}"
    flag = " --full" if results.form == "full" else ""
    lines = [
        f"\n## {study.name.replace('_', ' ')}\n",
        f"{study.spec.question}\n",
        f"![{study.spec.question}](img/evidence/{study.name}.svg)\n",
        _arms(study, results),
        "",
    ]
    for claim in study.spec.claims:
        verdict, judgements = judge_claim(claim, results)
        why = ""
        if claim.why:
            how = f"shown by {claim.shown_by}" if claim.shown_by else "an explanation, not tested"
            why = f" Why: {claim.why} ({how})."
        numbers = "; ".join(judgement.shown for judgement in judgements)
        lines.append(f"- {claim.claim}: **{verdict}**. {numbers}.{why}")
    if study.spec.remarks:
        lines.append(f"\n{study.spec.remarks}")
    if is_map(study):
        lines.append(
            f"\nHeld-out accuracy by learning rate, one seed each, and the monitors that spoke:\n\n{_map(study, results)}"
        )
    elif results.tried:
        by = "" if study.spec.aim == "accuracy" else f", by {study.spec.aim.replace('_', ' ')}"
        tried = _tried(results, study.spec.aim)
        lines.append(
            f"\nLearning rates tried, each with one seed that does not count again{by}: {tried}."
        )
    if results.failed:
        lines.append(f"\nRuns that failed: {'; '.join(results.failed)}.")
    minutes = results.seconds / 60
    lines.append(
        f"\n`python -m laboratory {study.name}{flag}`: {seeds}, {minutes:.0f} minutes on two cores beside other work."
    )
    return "\n".join(lines)


def _arms(study: LoadedReproduction, results: Results) -> str:
    """One row an arm with every measure that a claim speaks of, and what it cost; and one of the teacher where a claim names it."""
    wanted = [*measures_of(study.spec), *map(before, starts_of(study.spec))]
    known = {name for mine in results.readings.values() for name in mine}
    measures = [name for name in wanted if name in known and name != COST]
    alarms = any(spoke for by_seed in results.alarms.values() for spoke in by_seed.values())
    rows = _rows_of(study, results)

    def values(arm: str, measure: str) -> list[float]:
        return list(results.readings.get(arm, {}).get(measure, {}).values())

    columns = [("arm", [f"`{name}`: {about}" for name, about in rows])]
    for measure in measures:
        head = measure.removeprefix(before("")).replace("_", " ") + _when(measure)
        columns.append((head, [_mean(values(name, measure)) for name, _ in rows]))
    if COST in known:
        columns.append(("FLOPs", [_number(values(name, COST)) for name, _ in rows]))
    if results.chosen:
        columns.append(("learning rate", [_rate(results, name) for name, _ in rows]))
    if alarms:
        columns.append(("monitors that spoke", [_alarms(results, name) for name, _ in rows]))
    heads, cells = zip(*columns, strict=True)
    return _table(heads, list(zip(*cells, strict=True)))


def _rate(results: Results, arm: str) -> str:
    rate = results.chosen.get(arm, {}).get("learning_rate")
    return "" if rate is None else f"{rate:g}"


def _alarms(results: Results, arm: str) -> str:
    """The monitors that spoke in some run of an arm."""
    return ", ".join(
        sorted({monitor for found in results.alarms.get(arm, {}).values() for monitor in found})
    )


def _map(study: LoadedReproduction, results: Results) -> str:
    """One row an arm, one column a learning rate."""
    rates = sorted({row["learning_rate"] for row in results.tried})
    found = {(row["arm"], row["learning_rate"]): row for row in results.tried}
    rows = [
        [f"`{arm}`", *(_cell(found.get((arm, rate))) for rate in rates)] for arm in study.spec.arms
    ]
    return _table(["arm", *(f"{rate:g}" for rate in rates)], rows)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    score = "failed" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
    return f"{score} ({', '.join(row['alarms'])})" if row.get("alarms") else score


def _rows_of(study: LoadedReproduction, results: Results) -> list[tuple[str, str]]:
    """The arms with what each is, and the teacher where a claim names it and an arm evaluated it."""
    named = any(TEACHER in arms_of(test) for test in study.spec.tests)
    teacher = [(TEACHER, "its own answers")] if named and TEACHER in results.readings else []
    return [*((name, arm.about) for name, arm in study.spec.arms.items()), *teacher]


def _when(measure: str) -> str:
    return ", before" if measure.startswith(before("")) else ""


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = t_interval(values)
    mean = sum(values) / len(values)
    return f"{mean:.3f}" if found is None else f"{mean:.3f} ± {found.high - found.mean:.3f}"


def _number(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2e}" if values else ""


def _tried(results: Results, aim: str) -> str:
    groups: dict[str, list[str]] = {}
    for row in results.tried:
        score = "failed" if row[aim] is None else f"{row[aim]:.2f}"
        mark = "**" if row["chosen"] else ""
        groups.setdefault(row["arm"], []).append(f"{mark}{row['learning_rate']:g}: {score}{mark}")
    return "; ".join(f"`{arm}` {', '.join(tried)}" for arm, tried in groups.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]
    )
