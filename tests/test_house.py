"""The measures of the source stay within their bounds."""

from benchmarks.house import measure_house


def test_each_measure_is_within_its_bound() -> None:
    for measure in measure_house():
        assert measure.holds, (
            f"{measure.name}: {measure.value:g}, and the bound is {measure.bound:g}"
        )
