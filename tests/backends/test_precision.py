"""A student with `dtype: bfloat16`: which tensors are rounded, which are not, and how often.

The dtypes do not depend on the device, so the results on a CPU also hold on a CUDA device.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from practicum.backends.local import decode_batch
from practicum.backends.local.adapters import add_adapters
from practicum.backends.local.decode_batch import SlotDecodeBatch
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.rounding import round_linear_maps
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.models.config import Lora
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.types import Datum, SampleRequest, SamplingParams, ScoreRequest

from .tiny import ARCHITECTURES, VOCABULARY, data_for, rollouts, tiny

PRODUCTS = ("mm", "addmm", "bmm", "linear", "mkldnn_linear")
NORMALISERS = ("softmax", "log_softmax")
REQUESTS = [SampleRequest((3, 5, 7), 1), SampleRequest((4, 6), 2), SampleRequest((9,) * 5, 3)]
PARAMS = SamplingParams(max_new_tokens=12)


@dataclass
class Operations(TorchDispatchMode):
    """Records the dtypes of the operands of every operation, and the entries that were cast."""

    dtypes: Counter[tuple[str, tuple[torch.dtype, ...]]] = field(default_factory=Counter)
    cast_shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        floats = tuple(t.dtype for t in tensors if t.dtype.is_floating_point)
        self.dtypes[name, floats] += 1
        is_cast = name == "_to_copy" and floats and result.dtype not in floats
        if is_cast and result.dtype.is_floating_point:
            self.cast_shapes[tuple(result.shape)] += 1
        return result

    def list_dtypes(self, names: tuple[str, ...]) -> set[torch.dtype]:
        """Return the dtypes of all operands of these operations."""
        return {
            dtype for (name, floats), _ in self.dtypes.items() if name in names for dtype in floats
        }


def build_student(architecture: str = "qwen3", *, adapters: bool = False) -> LanguageModel:
    """Return a student with trained float32 weights and products in bfloat16; with adapters, over a base in bfloat16."""
    student = replace(tiny(architecture), autocast=True)
    if adapters:
        student.model.to(torch.bfloat16)
        student.model.requires_grad_(False)
        add_adapters(student.model, Lora(rank=4), 0, [0, 1])
        for name, weight in student.model.named_parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.1)
    else:
        student.model.requires_grad_(True)
    return student


@contextmanager
def without_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let autocast round every weight at every use."""

    def round_nothing(language_model: LanguageModel) -> Mapping[str, Tensor]:
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(decode_batch, "round_linear_maps", round_nothing)
        yield


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_that_are_rounded_once_sample_the_bits_of_weights_that_are_rounded_each_time(
    architecture: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
):
    sampler = LocalSampler(build_student(architecture, adapters=adapters), batch_size=2)
    samples = sampler.sample(REQUESTS, PARAMS)
    with without_copies(monkeypatch):
        expected = sampler.sample(REQUESTS, PARAMS)
    for mine, theirs in zip(samples, expected, strict=True):
        assert mine.tokens.equal(theirs.tokens)
        assert mine.policy_logprobs.equal(theirs.policy_logprobs)


def test_a_decode_step_casts_no_weight():
    student = build_student()
    sampler = LocalSampler(student, batch_size=3)
    batch = sampler.open_decode_batch([request.prompt_tokens for request in REQUESTS], 3, 12)
    batch.admit(3)
    tokens = torch.tensor([3, 4, 5])
    with Operations() as operations:
        batch.advance(tokens, [0, 1, 2])
        batch.logits()
    weights = {tuple(weight.shape) for weight in student.model.parameters() if weight.dim() > 1}
    turned = {shape[::-1] for shape in weights}
    # The head's rows are widened block by block where no kernel returns float32; a CUDA device has one.
    head = tuple(student.head().rows.shape)
    assert set(operations.cast_shapes) & (weights | turned) <= {head}
    assert operations.list_dtypes(("mm", "linear")) <= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_and_values_are_stored_in_bfloat16(architecture: str):
    """Also where a norm of float32 weights makes the keys (Qwen3, Gemma 3)."""
    batch = LocalSampler(build_student(architecture)).open_decode_batch([(3, 4, 5)], 1, 4)
    assert isinstance(batch, SlotDecodeBatch)
    batch.admit(1)
    stores = batch._program._stores.values()  # type: ignore[attr-defined]
    assert {store.dtype for stored in stores for store in stored} == {torch.bfloat16}


@pytest.mark.parametrize("adapters", [False, True])
def test_an_update_multiplies_in_bfloat16_normalises_in_float32_and_learns_in_float32(
    adapters: bool,
):
    student = build_student(adapters=adapters)
    teacher = replace(tiny(seed=1), autocast=True)
    teacher.model.to(torch.bfloat16)
    data = data_for(teacher)
    assert {datum.signal.hidden.dtype for datum in data} == {torch.bfloat16}
    trainer = LocalTrainer(student, TrainerLimits(chunk_tokens=7))
    with Operations() as operations:
        result = trainer.forward_backward(data, Objective(), 0)
        gradients = {weight.grad.dtype for weight in student.trainable_parameters().values()}
        trainer.optim_step(AdamParams(learning_rate=1e-3))
    assert result.metrics["fused"] == 1.0
    assert gradients == {torch.float32}
    assert operations.list_dtypes(NORMALISERS) == {torch.float32}
    state = trainer.save_state()
    assert {tensor.dtype for group in state.values() for tensor in group.values()} == {
        torch.float32
    }
    by_product = {key: count for key, count in operations.dtypes.items() if key[0] in PRODUCTS}
    # Float32 operands are the widened blocks of the head's rows: a CUDA device has no such blocks.
    body = sum(
        count for (_, floats), count in by_product.items() if set(floats) == {torch.bfloat16}
    )
    assert body > 0
    assert all(len(set(floats)) == 1 for _, floats in by_product)


def test_scores_and_updates_read_the_same_logits():
    """Check that the policy's log-probabilities of sampling, scoring and learning differ by rounding only."""
    student = build_student()
    sampler = LocalSampler(student, batch_size=2)
    samples = sampler.sample(REQUESTS, PARAMS)
    requests = [
        ScoreRequest(request.prompt_tokens, tuple(sample.tokens.tolist()))
        for request, sample in zip(REQUESTS, samples, strict=True)
    ]
    for sample, signal in zip(samples, sampler.score(requests, Full()), strict=True):
        assert signal.head is not None and isinstance(signal.hidden, Tensor)
        logprobs = signal.head.logprobs(signal.hidden).gather(-1, sample.tokens[:, None])[:, 0]
        assert (logprobs - sample.policy_logprobs).abs().max() < 0.3
        assert (logprobs - sample.policy_logprobs).abs().mean() < 0.05


def test_only_linear_maps_of_float32_are_rounded():
    student = build_student("llama")
    names = set(round_linear_maps(student))
    assert names == {
        name
        for name, weight in student.model.named_parameters()
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name
    }
    assert round_linear_maps(replace(student, autocast=False)) == {}
    student.model.to(torch.bfloat16)
    assert round_linear_maps(student) == {}


def test_a_bfloat16_student_learns_what_a_float32_one_does():
    """Compare the gradient of the whole step for rounded operands with exact ones."""
    exact, rounded = tiny("qwen3"), build_student("qwen3")
    exact.model.requires_grad_(True)
    data: list[Datum] = data_for(tiny(seed=1), rollouts())
    found = []
    for student in (exact, rounded):
        LocalTrainer(student).forward_backward(data, Objective(), 0)
        found.append(
            torch.cat([weight.grad.flatten() for weight in student.trainable_parameters().values()])
        )
    # Nearly all of it comes from the body: without rounding in the head the difference is 0.098, with it 0.099.
    assert (found[0] - found[1]).norm() < 0.12 * found[0].norm()
    assert rounded.head().operand is not None and len(rounded.head().rows) == VOCABULARY
