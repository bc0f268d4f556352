"""The output of the command line for an evaluation."""

import pytest

from practicum.cli._output import print_summary


def test_the_names_of_verifiers_and_domains_stay_as_they_were_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    summary = {
        "student_entropy": 1.5,
        "accuracy[my_rewards:close]": interval,
        "by_domain": {"long_division": interval},
        "calibration": {"mean_confidence": 0.5},
    }
    print_summary(summary, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "student entropy             1.5",
        "accuracy[my_rewards:close]  0.500 [0.250, 0.750]",
        "by domain",
        "  long_division             0.500 [0.250, 0.750]",
        "calibration",
        "  mean confidence           0.5",
    ]
