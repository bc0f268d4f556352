"""Read and write protobuf messages, with tensors as little-endian bytes.

The message classes come from the tinker package. They are read from its folder without importing
the package, which would start its whole client.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.errors import RecipeError, suggest_install
from practicum.server.refusals import HttpRefusal
from practicum.types import Sample

PROTOBUF = "application/x-protobuf"
MAX_ENTRIES = 2**26
"""The most entries of one dense tensor of a request."""

EMPTY = -99999.0
"""The log-probability of an empty cell of a top-k table."""


@cache
def load_messages() -> ModuleType:
    """Return the message classes; raise RecipeError if the tinker package is missing."""
    package = importlib.util.find_spec("tinker")
    if package is None or not package.submodule_search_locations:
        raise RecipeError(f"serve needs the package tinker; {suggest_install('server')}")
    # Cached above: protobuf refuses to register the same messages twice in a process.
    path = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("practicum.server._messages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class TrainDatum:
    """One text of a forward_backward request with the tensors of its loss."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """A forward_backward request."""

    model_id: str
    seq_id: int
    loss: str
    parameters: Mapping[str, float | str]
    forward_only: bool
    data: Sequence[TrainDatum]


def read_train_request(body: bytes) -> TrainRequest:
    """Parse a forward_backward request; raise `HttpRefusal` with 400 for other bytes."""
    from google.protobuf.message import DecodeError

    message = load_messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HttpRefusal(400, "the body is not a ForwardBackwardRequest") from error
    # Newer clients also send texts as parameters, in a separate field.
    parameters = {
        name: setting.text if setting.HasField("text") else setting.number
        for name, setting in message.loss_fn_config_v2.items()
    }
    return TrainRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        parameters=parameters or dict(message.loss_fn_config),
        forward_only=message.forward_only,
        data=[_read_datum(datum, number) for number, datum in enumerate(message.data)],
    )


def _read_datum(message: Any, number: int) -> TrainDatum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise HttpRefusal(
                400, f"datum {number}: images and audio are not read here; send encoded text"
            )
        where = f"datum {number}: model_input"
        tokens += _read_array(chunk.encoded_text.tokens, "<i4", where).tolist()
    inputs = {
        name: _read_tensor(tensor, f"datum {number}: {name}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return TrainDatum(tuple(tokens), inputs)


def _read_tensor(message: Any, where: str) -> Tensor:
    names = load_messages()
    dtypes = {names.DTYPE_FLOAT32: "<f4", names.DTYPE_INT64: "<i8", names.DTYPE_INT32: "<i4"}
    dtype = dtypes.get(message.dtype)
    if dtype is None:
        raise HttpRefusal(400, f"{where}: tensors are float32, int64 or int32")
    shape = tuple(message.shape)
    if not message.HasField("sparse_csr"):
        values = _read_array(message.dense, dtype, where)
        return _reshape(values, shape or (len(values),), where)
    csr = message.sparse_csr
    values = _read_array(csr.values, dtype, where)
    crow = _read_array(csr.crow_indices, "<i8", where)
    columns = _read_array(csr.col_indices, "<i8", where)
    return expand_csr(values, crow, columns, shape, 0, where)


def _read_array(buffer: bytes, dtype: str, where: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(buffer) % size:
        raise HttpRefusal(
            400, f"{where}: {len(buffer)} bytes are no whole number of entries of {size}"
        )
    return np.frombuffer(buffer, dtype)


def _reshape(values: np.ndarray, shape: Sequence[int], where: str) -> Tensor:
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise HttpRefusal(400, f"{where}: {values.size} values do not have the shape {list(shape)}")
    # Copied, because the array is a read-only view of the request's bytes.
    return torch.from_numpy(values.copy()).reshape(tuple(shape))


def expand_csr(
    values: np.ndarray,
    crow: np.ndarray,
    columns: np.ndarray,
    shape: Sequence[int],
    pad: int,
    where: str,
) -> Tensor:
    """Return a sparse matrix as a dense one, `pad` in its empty cells."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_ENTRIES:
        raise HttpRefusal(
            400,
            f"{where}: a sparse tensor has two sizes, of at most {MAX_ENTRIES} entries together",
        )
    counts = np.diff(crow)
    fits = (
        len(crow) == shape[0] + 1
        and not crow[0]
        and bool((counts >= 0).all())
        and crow[-1] == len(columns) == len(values)
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not fits:
        raise HttpRefusal(
            400, f"{where}: the sparse indices do not belong to a matrix of shape {list(shape)}"
        )
    dense = np.full(tuple(shape), pad, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return torch.from_numpy(dense)


@dataclass(frozen=True, slots=True)
class TopKTable:
    """The top k, or k drawn, tokens at each of N positions; rows of -1 are empty."""

    ids: Int[Tensor, "N k"]
    logprobs: Float[Tensor, "N k"]


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """The indices of a sparse matrix by rows (CSR)."""

    crow: Sequence[int]
    columns: Sequence[int]
    shape: Sequence[int]


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """The parts of an answer to a sampling request, None if a part was not requested."""

    samples: Sequence[Sample]
    sample_topk: Sequence[TopKTable] | None = None
    prompt_logprobs: Float[Tensor, " N"] | None = None
    prompt_topk: TopKTable | None = None
    targets: Tensor | None = None
    sparse: SparseLayout | None = None
    drawn: TopKTable | None = None


def encode_samples(answer: SampleAnswer, *, greedy: bool) -> bytes:
    """Return the answer as bytes.

    Log-probabilities are those under the sampling distribution; for greedy samples, the model's
    own.
    """
    message = load_messages().SampleResponse()
    for number, sample in enumerate(answer.samples):
        sequence = message.sequences.add()
        sequence.stop_reason = int(sample.stop_reason == "length")
        sequence.tokens = _encode(sample.tokens, torch.int32)
        logprobs = sample.policy_logprobs if greedy else sample.sampling_logprobs
        sequence.logprobs = _encode(logprobs, torch.float32)
        if answer.sample_topk is not None:
            _write_topk(sequence.topk_sampled_logprobs, answer.sample_topk[number])
    if answer.prompt_logprobs is not None:
        message.prompt_logprobs = _encode(answer.prompt_logprobs, torch.float32)
    if answer.prompt_topk is not None:
        _write_topk(message.topk_prompt_logprobs, answer.prompt_topk)
    if answer.targets is not None:
        _write_tensor(message.target_prompt_logprobs, answer.targets, torch.float32, answer.sparse)
    if answer.drawn is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, answer.drawn.ids, torch.int32)
        _write_tensor(message.prompt_alt_tokens.logprobs, answer.drawn.logprobs, torch.float32)
    return message.SerializeToString()


def encode_training(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput from the [N] or [N, K] log-probabilities of each text.

    Neighbours with the same K share a record.
    """
    message = load_messages().ForwardBackwardOutput()
    message.loss_fn_output_type = "ArrayRecord"
    for trailing, run in groupby(logprobs, key=lambda tensor: tuple(tensor.shape[1:])):
        tensors = list(run)
        record = message.loss_fn_outputs.add()
        record.type_tag = "ArrayRecord"
        record.num_datums = len(tensors)
        batched = record.fields["logprobs"]
        batched.dtype = load_messages().DTYPE_FLOAT32
        batched.trailing_shape.extend(trailing)
        batched.data = b"".join(_encode(tensor, torch.float32) for tensor in tensors)
        offsets = np.cumsum([0, *(4 * tensor.numel() for tensor in tensors)])
        batched.offsets = offsets.astype("<i8").tobytes()
    for name, number in metrics.items():
        message.metrics[name] = number
    return message.SerializeToString()


def _write_topk(message: Any, table: TopKTable) -> None:
    empty = table.ids < 0
    message.token_ids = _encode(table.ids.masked_fill(empty, 0), torch.int32)
    message.logprobs = _encode(table.logprobs.masked_fill(empty, EMPTY), torch.float32)
    message.length, message.k = table.ids.shape


def _write_tensor(
    message: Any, tensor: Tensor, dtype: torch.dtype, sparse: SparseLayout | None = None
) -> None:
    names = load_messages()
    message.dtype = names.DTYPE_FLOAT32 if dtype == torch.float32 else names.DTYPE_INT32
    message.shape.extend(tensor.shape if sparse is None else sparse.shape)
    if sparse is None:
        message.dense = _encode(tensor, dtype)
        return
    message.sparse_csr.values = _encode(tensor, dtype)
    message.sparse_csr.crow_indices = np.asarray(sparse.crow, dtype="<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(sparse.columns, dtype="<i8").tobytes()


def _encode(tensor: Tensor, dtype: torch.dtype) -> bytes:
    return tensor.detach().to("cpu", dtype).contiguous().numpy().tobytes()
