"""The data types cross processes unchanged."""

import pickle

from practicum.types import SamplingParams


def test_sampling_parameters_are_data() -> None:
    params = SamplingParams(8, 0.7, 0.9, 5, frozenset({2}), ("\n\n", "Q:"))
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
