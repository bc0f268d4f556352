"""The doctor and the monitors tell broken setups from healthy ones: the labels, the recorded goals, one pair from end to end."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import setups, verdict_tables, verdicts
from benchmarks.verdict_tables import Row
from practicum.statistics import auroc, wilson


def _row(fault: str = "", gain: float | None = 0.4, **changes: Any) -> dict[str, Any]:
    row = {
        "models": "toy",
        "number": 0,
        "fault": fault,
        "name": fault or "healthy",
        "measures": False,
    }
    row |= {"gain": gain, "verdict": "GO", "exit_code": 0, "checks": {}, "alarms": {}}
    return row | changes


@pytest.mark.parametrize(
    ("twin", "row", "expected"),
    [
        (0.4, _row("rate", 0.1), True),
        (0.4, _row("rate", 0.25), None),
        (0.4, _row("rate", None), True),
        (0.4, _row("leak", 0.4, measures=True), True),
        (0.04, _row("rate", 0.0), None),
        (0.0, _row("rate", -0.2), True),
    ],
)
def test_a_fault_counts_if_it_is_in_the_measurement_or_does_harm(
    twin: float, row: Row, expected: bool | None
) -> None:
    labelled = {r["name"]: broken for r, broken in verdict_tables.mark_rows([_row(gain=twin), row])}
    assert labelled == {"healthy": False} | ({} if expected is None else {row["name"]: expected})


def test_a_verdict_against_the_run_outweighs_any_number_of_warnings() -> None:
    warned = _row(checks={f"P{number}": ["warn", None] for number in range(1, 22)})
    assert verdict_tables.rate_suspicion(warned) < verdict_tables.rate_suspicion(_row(exit_code=24))


def _recorded(models: str) -> list[tuple[Row, bool]]:
    rows = [row for row in verdict_tables.read_rows() if verdict_tables.is_report(row)]
    return [pair for pair in verdict_tables.mark_rows(rows) if pair[0]["models"] == models]


@pytest.mark.parametrize("models", ["toy", "smollm2"])
def test_the_recorded_verdicts_reach_their_goals(models: str) -> None:
    """AUROC of .85, four of five broken setups stopped, at most a tenth of the healthy ones."""
    labelled = _recorded(models)
    suspicions = [verdict_tables.rate_suspicion(row) for row, _ in labelled]
    area = auroc(suspicions, [broken for _, broken in labelled])
    assert area is not None and area.mean >= 0.85
    stopped = {
        kind: [row["exit_code"] != 0 for row, broken in labelled if broken == kind]
        for kind in (True, False)
    }
    assert wilson(sum(stopped[True]), len(stopped[True])).mean >= 0.8
    assert wilson(sum(stopped[False]), len(stopped[False])).mean <= 0.1


@pytest.mark.parametrize("rule", setups.RULES)
def test_no_word_is_trained_on_and_held_out(rule: str) -> None:
    rows = setups.write_words(rule, 3, 5, random.Random(rule).randrange(1000))
    questions = {part: {row["prompt"] for row in content} for part, content in rows.items()}
    assert not questions["train"] & questions["heldout"]
    assert [len(part) for part in rows.values()] == [setups.TRAINING_ROWS, setups.HELDOUT_ROWS]


@pytest.mark.long
def test_a_pair_is_examined_run_and_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setups, "STUDENT_STEPS", dict.fromkeys(setups.RULES, 8))
    monkeypatch.setattr(setups, "TEACHER_STEPS", (10,))
    monkeypatch.setattr(setups, "STEPS", 2)
    healthy = verdicts.play_setup(tmp_path, 3, "", None)
    broken = verdicts.play_setup(tmp_path, 3, "verifier rejects", None)
    assert healthy["verdict"] and healthy["gain"] is not None and healthy["alarms"] == {}
    assert broken["measures"] and broken["exit_code"] in (24, 25)
    again = verdicts.play_setup(tmp_path, 3, "", "doctor")
    assert again == {key: healthy[key] for key in again}
    assert verdicts.play_setup(tmp_path, 3, "", "monitors") == {
        "name": healthy["name"],
        "alarms": {},
    }
