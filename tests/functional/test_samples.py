"""Laws of sample weights, for every entry of the table, and values by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.functional.laws import SAMPLE_WEIGHT_LAWS
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleStatistics

EVERY = pytest.mark.parametrize(
    "weight", list(SAMPLE_WEIGHTS.values()), ids=lambda entry: entry.name
)
COMPLETION = st.tuples(
    st.booleans(),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
    st.sampled_from("xyz"),
    st.floats(0, 5),
    st.floats(0, 5),
    st.floats(0, 5),
)


def statistics(completions):
    kept, rewards, texts, student, teacher, reference = zip(*completions, strict=True)
    return SampleStatistics(
        kept=kept,
        rewards=rewards,
        texts=texts,
        student_nll=student,
        teacher_nll=teacher,
        reference_nll=reference,
    )


@EVERY
@pytest.mark.parametrize("of", ["student", "teacher"])
def test_a_sample_weight_reads_nothing_but_what_it_needs(weight, of):
    parameters = {**weight.defaults, **({"model": of} if "model" in weight.defaults else {})}
    whole = statistics(
        [
            (True, 1.0, "x", 0.5, 2.0, 0.3),
            (False, None, "y", 1.0, 1.0, 0.7),
            (True, 0.0, "x", 2.0, 0.1, 2.0),
        ]
    )
    needed = SampleStatistics(
        kept=whole.kept, **{name: getattr(whole, name) for name in weight.needed(parameters)}
    )
    assert weight.function(needed, **parameters) == weight.function(whole, **parameters)


@EVERY
@given(st.lists(COMPLETION, min_size=1, max_size=6), st.randoms())
def test_one_weight_a_completion_between_0_and_1_whatever_the_order(weight, completions, random):
    values = weight.function(statistics(completions), **weight.defaults)
    assert len(values) == len(completions)
    assert all(0 <= value <= 1 for value in values)
    order = list(range(len(completions)))
    random.shuffle(order)
    shuffled = weight.function(
        statistics([completions[place] for place in order]), **weight.defaults
    )
    assert shuffled == pytest.approx([values[place] for place in order])


@EVERY
@pytest.mark.parametrize("law", SAMPLE_WEIGHT_LAWS, ids=lambda law: law.__name__)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_laws(weight, law, seed, length):
    law(weight, weight.defaults, seed, length)


def test_by_hand():
    given_statistics = SampleStatistics(
        kept=(True, True, False, True), rewards=(1.0, 0.0, None, 0.5), texts=("a", "a ", "b", "c")
    )

    def weights(name, **parameters):
        return SAMPLE_WEIGHTS[name].function(given_statistics, **parameters)

    assert weights("uniform") == [1.0] * 4
    assert weights("pass_rate") == pytest.approx([2 / 9] * 4)
    assert weights("above_mean") == [1.0, 0.0, 0.0, 0.0]
    assert weights("consensus") == [1.0, 1.0, 0.0, 0.0]


def test_where_all_earned_the_same_none_is_above_the_mean():
    for rewards in ([1.0, 1.0], [0.0, 0.0, 0.0], [None, None]):
        given_statistics = SampleStatistics(kept=[True] * len(rewards), rewards=rewards)
        assert SAMPLE_WEIGHTS["above_mean"].function(given_statistics) == [0.0] * len(rewards)


def test_the_completion_that_needs_the_context_most_counts_most():
    given_statistics = SampleStatistics(
        kept=(True, True, False), teacher_nll=(1.0, 1.0, 1.0), reference_nll=(1.0, 2.0, 9.0)
    )
    weights = SAMPLE_WEIGHTS["by_context"].function(given_statistics, temperature=0.5)
    assert weights == pytest.approx([1 / (1 + math.e**2), math.e**2 / (1 + math.e**2), 0.0])
