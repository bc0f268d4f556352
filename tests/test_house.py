"""The house in numbers stays within its bounds; what does not hold yet may only come nearer."""

import pytest

from benchmarks.house import Measure, measures

NOT_YET = {
    "names that point and do not say, of 1,000 assigned": 70.3,
    "docstrings that open with a question's word, %": 14.5,
    "functions that begin with a verb, %": 40.7,
    "comment lines of 1,000": 3.5,
    "lines of the longest file": 569,
    "rooms": 25,
    "levels": 13,
}
"""Where each measure stands that is not within its bound, so that no change leads away from it."""


@pytest.mark.parametrize("measure", measures(), ids=lambda measure: measure.name)
def test_a_measure_is_within_its_bound_or_no_farther_than_it_was(measure: Measure) -> None:
    least = measure.at_least
    bound = NOT_YET.get(measure.name, measure.bound)
    assert measure.value >= bound if least else measure.value <= bound, (
        f"{measure.value:g}, and it was {bound:g}"
    )
    assert measure.name not in NOT_YET or not measure.holds, "it holds: take it out of NOT_YET"
