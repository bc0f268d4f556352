"""The documented failures, provoked in toy runs: the monitor for each raises an alarm, and the remedy helps."""

import pytest

from benchmarks.failures import FAILURES, FailedRun, provoke

FAST = ("no numbers",)


@pytest.mark.long
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(failure, id=name, marks=[] if name in FAST else [pytest.mark.slow])
        for name, failure in FAILURES.items()
    ],
)
def test_a_failure_is_caught_and_its_remedy_helps(failure: FailedRun):
    outcome = provoke(failure)
    assert failure.monitor in outcome.spoke
    assert outcome.has_helped(failure.less), (
        f"{failure.outcome}: {outcome.broken} with the failure, {outcome.mended} with the remedy"
    )
