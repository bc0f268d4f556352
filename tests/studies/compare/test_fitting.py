import json
import math
import random
from pathlib import Path

import pytest

from practicum.errors import DataError
from practicum.studies.compare.fitting import LawPoint, fit, read_runs

FLOOR, STUDENT, DATA = 0.08, (0.15, 0.4), (0.2, 0.6)


def error_of(student: float, tokens: float) -> float:
    return (
        FLOOR + STUDENT[0] * (student / 1e6) ** -STUDENT[1] + DATA[0] * (tokens / 1e5) ** -DATA[1]
    )


def law(noise: float = 0.0, repeats: int = 1, teacher: float = 1e7) -> list[LawPoint]:
    draw = random.Random(0)
    return [
        LawPoint(
            "run",
            {
                "N_student": student,
                "N_teacher": teacher,
                "D": tokens,
                "rollouts": tokens / 10,
                "T": 10.0,
            },
            error_of(student, tokens) * math.exp(draw.gauss(0.0, noise)),
        )
        for student in (1e5, 3e5, 1e6, 3e6, 1e7)
        for tokens in (1e4, 3e4, 1e5, 1e6, 1e7)
        for _ in range(repeats)
    ]


def test_a_law_without_noise_is_found_again():
    found = fit(law())
    student, data = found.exponents
    assert (student.quantity, data.quantity) == ("N_student", "D")
    assert student.exponent == pytest.approx(STUDENT[1], rel=0.05)
    assert data.exponent == pytest.approx(DATA[1], rel=0.05)
    assert found.floor == pytest.approx(FLOOR, rel=0.1)
    assert found.typical_miss < 0.01
    assert found.predict({"N_student": 3e7, "D": 3e7}) == pytest.approx(error_of(3e7, 3e7), rel=0.1)


@pytest.mark.long
def test_the_intervals_hold_the_law_under_noise():
    found = fit(law(noise=0.05, repeats=2))
    for exponent, (_, value) in zip(found.exponents, (STUDENT, DATA), strict=True):
        assert exponent.interval.low < value < exponent.interval.high
        assert exponent.is_resolved
    assert found.floor_interval.low < FLOOR < found.floor_interval.high


@pytest.mark.long
def test_what_does_not_vary_has_no_exponent_and_says_why():
    left_out = fit(law()).left_out
    assert left_out["N_teacher"] == "has 1 value, and 3 are needed"
    assert (
        left_out["rollouts"]
        == "was varied together with D, so their exponents are not identifiable"
    )
    assert left_out["T"] == "has 1 value, and 3 are needed"


@pytest.mark.long
def test_an_exponent_of_nothing_but_noise_is_not_resolved():
    draw = random.Random(1)
    runs = [
        LawPoint(
            "run",
            {"N_student": size, "N_teacher": 1e7, "D": 1e5, "rollouts": 1e4, "T": 10.0},
            0.3 * math.exp(draw.gauss(0, 0.1)),
        )
        for size in (1e5, 1e6, 1e7)
        for _ in range(4)
    ]
    (exponent,) = fit(runs).exponents
    assert not exponent.is_resolved


def test_too_few_runs_are_refused_with_the_number_that_is_needed():
    with pytest.raises(
        DataError,
        match="8 runs are too few for an exponent of N_student, D: 5 parameters need at least 10",
    ):
        fit([law()[place] for place in (0, 4, 6, 8, 12, 16, 20, 24)])


def test_runs_in_which_nothing_varies_are_refused():
    with pytest.raises(
        DataError,
        match="nothing to fit from 3 runs: N_student has 1 value, and 3 are needed; N_teacher",
    ):
        fit([law()[0]] * 3)


def test_runs_are_read_from_every_folder_below(tmp_path):
    for number, accuracy in enumerate((0.25, 0.5, None)):
        folder = tmp_path / "deep" / f"run-{number}"
        folder.mkdir(parents=True)
        scaling = {
            "N_student": 1000,
            "N_teacher": {"teacher/a": 2000, "teacher/b": 3000},
            "D": 10.0,
            "rollouts": 2,
            "T": 5.0,
            "result": {"accuracy": accuracy, "reverse_kl": 0.5},
        }
        (folder / "summary.json").write_text(json.dumps({"scaling": scaling}))
    assert [run.error for run in read_runs([tmp_path], "accuracy")] == [0.75, 0.5]
    assert read_runs([tmp_path], "reverse_kl")[0].quantities["N_teacher"] == 5000.0
    with pytest.raises(
        DataError, match=r"no finished run with a held-out accuracy; name folders with summary.json"
    ):
        read_runs([Path(tmp_path / "none")], "accuracy")
