"""The binary half of the protocol: protobuf messages in and out, tensors as raw little-endian bytes.

The message classes are those that the tinker package ships. They are read from its folder without importing the package, which
would start its whole client.
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

from practicum.errors import RecipeError
from practicum.server.refusals import HttpRefusal
from practicum.types import Sample

PROTOBUF = "application/x-protobuf"
LARGEST_TENSOR = 2**26
"""Entries of one tensor of a request once it is written out."""

EMPTY = -99999.0
"""The log-probability of an empty cell of a top-k table."""


@cache
def messages() -> ModuleType:
    """The message classes; RecipeError where the tinker package is missing."""
    package = importlib.util.find_spec("tinker")
    if package is None or not package.submodule_search_locations:
        raise RecipeError(
            "serve speaks the messages of the tinker package: pip install 'practicum[server]'"
        )
    path = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("practicum.server._messages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class TrainDatum:
    """One text of a forward_backward request with the tensors that its loss is made of."""

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
    """A forward_backward request from its bytes; `Refused` with 400 where they are not one."""
    from google.protobuf.message import DecodeError

    message = messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HttpRefusal(400, "the body is not a ForwardBackwardRequest") from error
    newer = {
        name: value.text if value.HasField("text") else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    data = [_datum(datum, number) for number, datum in enumerate(message.data)]
    parameters = newer or dict(message.loss_fn_config)
    return TrainRequest(
        message.model_id, message.seq_id, message.loss_fn, parameters, message.forward_only, data
    )


def _datum(message: Any, number: int) -> TrainDatum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise HttpRefusal(
                400, f"datum {number}: images and audio are not read here; send encoded text"
            )
        tokens += _array(
            chunk.encoded_text.tokens, np.dtype("<i4"), f"datum {number}: model_input"
        ).tolist()
    inputs = {
        name: _tensor(tensor, f"datum {number}: {name}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return TrainDatum(tuple(tokens), inputs)


def _tensor(message: Any, where: str) -> Tensor:
    names = messages()
    dtype = {names.DTYPE_FLOAT32: "<f4", names.DTYPE_INT64: "<i8", names.DTYPE_INT32: "<i4"}.get(
        message.dtype
    )
    if dtype is None:
        raise HttpRefusal(400, f"{where}: tensors are float32, int64 or int32")
    shape = tuple(message.shape)
    if not message.HasField("sparse_csr"):
        values = _array(message.dense, np.dtype(dtype), where)
        return _shaped(values, shape or (len(values),), where)
    csr = message.sparse_csr
    values = _array(csr.values, np.dtype(dtype), where)
    crow, columns = (
        _array(part, np.dtype("<i8"), where) for part in (csr.crow_indices, csr.col_indices)
    )
    return dense_of_csr(values, crow, columns, shape, 0, where)


def _array(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise HttpRefusal(
            400, f"{where}: {len(data)} bytes are no whole number of entries of {dtype.itemsize}"
        )
    return np.frombuffer(data, dtype=dtype)


def _shaped(values: np.ndarray, shape: Sequence[int], where: str) -> Tensor:
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise HttpRefusal(400, f"{where}: {values.size} values do not have the shape {list(shape)}")
    return torch.from_numpy(values.copy()).reshape(tuple(shape))


def dense_of_csr(
    values: np.ndarray,
    crow: np.ndarray,
    columns: np.ndarray,
    shape: Sequence[int],
    pad: int,
    where: str,
) -> Tensor:
    """A sparse matrix written out, `pad` where it says nothing."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > LARGEST_TENSOR:
        raise HttpRefusal(
            400,
            f"{where}: a sparse tensor has two sizes, of at most {LARGEST_TENSOR} entries together",
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
    """A table of the k likeliest tokens at each of some places, or of k that were drawn; rows of -1 are empty."""

    ids: Int[Tensor, "N k"]
    logprobs: Float[Tensor, "N k"]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Where the cells of a sparse matrix are."""

    crow: Sequence[int]
    columns: Sequence[int]
    shape: Sequence[int]


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """Everything a sampling request may be answered with, None where it was not asked for."""

    samples: Sequence[Sample]
    sample_topk: Sequence[TopKTable] | None = None
    prompt_logprobs: Float[Tensor, " N"] | None = None
    prompt_topk: TopKTable | None = None
    targets: Tensor | None = None
    sparse: Sparse | None = None
    drawn: TopKTable | None = None


def sample_response(answer: SampleAnswer, *, greedy: bool) -> bytes:
    """The answer as bytes. Log-probabilities are those that were drawn from, of a greedy sample the model's own."""
    message = messages().SampleResponse()
    for number, sample in enumerate(answer.samples):
        sequence = message.sequences.add()
        sequence.stop_reason = int(sample.stop_reason == "length")
        sequence.tokens = _bytes(sample.tokens, torch.int32)
        sequence.logprobs = _bytes(
            sample.policy_logprobs if greedy else sample.sampling_logprobs, torch.float32
        )
        if answer.sample_topk is not None:
            _write_topk(sequence.topk_sampled_logprobs, answer.sample_topk[number])
    if answer.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(answer.prompt_logprobs, torch.float32)
    if answer.prompt_topk is not None:
        _write_topk(message.topk_prompt_logprobs, answer.prompt_topk)
    if answer.targets is not None:
        _write_tensor(message.target_prompt_logprobs, answer.targets, torch.float32, answer.sparse)
    if answer.drawn is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, answer.drawn.ids, torch.int32)
        _write_tensor(message.prompt_alt_tokens.logprobs, answer.drawn.logprobs, torch.float32)
    return message.SerializeToString()


def train_response(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput from each text's [N] or [N, K] log-probabilities; each K goes into records of its own."""
    message = messages().ForwardBackwardOutput()
    message.loss_fn_output_type = "ArrayRecord"
    for trailing, run in groupby(logprobs, key=lambda tensor: tuple(tensor.shape[1:])):
        tensors = list(run)
        record = message.loss_fn_outputs.add()
        record.type_tag = "ArrayRecord"
        record.num_datums = len(tensors)
        batched = record.fields["logprobs"]
        batched.dtype = messages().DTYPE_FLOAT32
        batched.trailing_shape.extend(trailing)
        batched.data = b"".join(_bytes(tensor, torch.float32) for tensor in tensors)
        batched.offsets = (
            np.cumsum([0, *(4 * tensor.numel() for tensor in tensors)]).astype("<i8").tobytes()
        )
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def _write_topk(message: Any, table: TopKTable) -> None:
    empty = table.ids < 0
    message.token_ids = _bytes(table.ids.masked_fill(empty, 0), torch.int32)
    message.logprobs = _bytes(table.logprobs.masked_fill(empty, EMPTY), torch.float32)
    message.length, message.k = table.ids.shape


def _write_tensor(
    message: Any, tensor: Tensor, dtype: torch.dtype, sparse: Sparse | None = None
) -> None:
    message.dtype = messages().DTYPE_FLOAT32 if dtype == torch.float32 else messages().DTYPE_INT32
    message.shape.extend(tensor.shape if sparse is None else sparse.shape)
    if sparse is None:
        message.dense = _bytes(tensor, dtype)
        return
    message.sparse_csr.values = _bytes(tensor, dtype)
    message.sparse_csr.crow_indices = np.asarray(sparse.crow, dtype="<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(sparse.columns, dtype="<i8").tobytes()


def _bytes(tensor: Tensor, dtype: torch.dtype) -> bytes:
    return tensor.detach().to("cpu", dtype).contiguous().numpy().tobytes()
