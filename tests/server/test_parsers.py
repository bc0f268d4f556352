"""For any bytes of a client, a parser returns a value or an error that names the fault."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.server import requests as asked
from practicum.server.refusals import HttpRefusal

pytest.importorskip("google.protobuf")

from practicum.server.wire import load_messages, read_train_request

pytestmark = pytest.mark.long

KINDS = [
    asked.CreateSession,
    asked.CreateModel,
    asked.LoadWeights,
    asked.OptimStep,
    asked.SaveWeights,
    asked.SetLifetime,
    asked.CopyWeights,
    asked.SearchSessions,
    asked.CreateSampler,
    asked.SampleBody,
    asked.Retrieve,
]
NAMES = sorted({name for kind in KINDS for name in kind.model_fields})
NUMBERS = st.integers() | st.floats() | st.sampled_from([-1, 0, 2**31, 2**63 - 1, 2**63, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


def parsed(parse, *body):
    with contextlib.suppress(HttpRefusal):
        return parse(*body)
    return None


@given(kind=st.sampled_from(KINDS), body=st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_json_or_refused(kind, body):
    parsed(asked.read, kind, body)


@given(
    kind=st.sampled_from(KINDS), body=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
)
@settings(max_examples=300, deadline=None)
def test_any_json_is_a_body_or_refused(kind, body):
    import json

    found = parsed(asked.read, kind, json.dumps(body).encode())
    assert found is None or isinstance(found, kind)


@given(stamp=st.text("0123456789-T:.Z+", max_size=32))
@settings(max_examples=200, deadline=None)
def test_any_time_is_one_or_refused(stamp):
    import json

    body = {"cursor": {"last_created_at": stamp, "last_session_id": "x"}}
    parsed(asked.read, asked.SearchSessions, json.dumps(body).encode())


@given(body=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_train_request_or_refused(body):
    parsed(read_train_request, body)


BYTES = st.binary(max_size=48)
SIZES = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 4)


@given(
    tokens=BYTES,
    dense=BYTES,
    sparse=st.none() | st.tuples(BYTES, BYTES, BYTES),
    shape=st.lists(SIZES, max_size=3),
    dtype=st.integers(0, 6),
    name=st.sampled_from(["weights", "target_tokens", "mask", ""]),
)
@settings(max_examples=400, deadline=None)
def test_any_tensors_are_read_or_refused(tokens, dense, sparse, shape, dtype, name):
    request = load_messages().ForwardBackwardRequest(model_id="x", loss_fn="ppo")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    tensor = datum.loss_fn_inputs[name]
    tensor.dtype = dtype
    tensor.shape.extend(shape)
    if sparse is None:
        tensor.dense = dense
    else:
        tensor.sparse_csr.values, tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = (
            sparse
        )
    found = parsed(read_train_request, request.SerializeToString())
    assert found is None or [*found.data[0].inputs] == [name]


def test_whole_numbers_beyond_those_of_a_machine_are_refused():
    with pytest.raises(HttpRefusal, match="seq_id"):
        asked.read(
            asked.OptimStep, b'{"model_id": "x", "adam_params": {}, "seq_id": 9223372036854775808}'
        )


@pytest.mark.parametrize("field", ["data", "shape", "sparse_crow_indices", "sparse_col_indices"])
def test_named_tokens_fit_into_a_tensor_or_are_refused(field):
    import json

    named = {"data": [1], "dtype": "int64", "shape": [1, 1], field: [2**63]}
    body = {"prompt": {"chunks": []}, "sampling_params": {}, "target_prompt_logprobs": named}
    with pytest.raises(
        HttpRefusal,
        match=f"SampleBody: target_prompt_logprobs.{field}.0: Input should be less than",
    ):
        asked.read(asked.SampleBody, json.dumps(body).encode())
