"""The house in numbers stays within its bounds; what does not hold yet may only come nearer."""

from benchmarks.house import measure_house

NOT_YET = {
    "lines of code": 34_403,
    "lines of the longest file": 569,
    "names that point and do not say": 992,
    "docstrings that open with a question's word": 503,
    "classes with another class's name": 17,
    "modules with the name of two others": 10,
    "functions that begin with a verb, %": 40.8,
    "comment lines of 1,000": 3.5,
    "rooms": 25,
    "levels": 13,
}
"""Where each measure stands that is not within its bound, so that no change leads away from it."""


def test_each_measure_is_within_its_bound_or_no_farther_than_it_was() -> None:
    for measure in measure_house():
        bound = NOT_YET.get(measure.name, measure.bound)
        within = measure.value >= bound if measure.at_least else measure.value <= bound
        assert within, f"{measure.name}: {measure.value:g}, and the bound is {bound:g}"
        reached = measure.name in NOT_YET and measure.holds
        assert not reached, f"{measure.name}: it holds; take it out of NOT_YET"
