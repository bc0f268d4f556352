"""The measures of the source stay within their bounds, and the page shows their current values."""

from benchmarks.house import find_outdated, measure_house


def test_each_measure_is_within_its_bound() -> None:
    for measure in measure_house():
        assert measure.holds, (
            f"{measure.name}: {measure.value:g}, and the bound is {measure.bound:g}"
        )


def test_the_recorded_table_is_up_to_date() -> None:
    assert not find_outdated(), "write it again: python -m benchmarks house --record"
