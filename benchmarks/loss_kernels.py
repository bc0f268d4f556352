"""Run one contender of the loss per process: the same inputs, then one pass, its gradients or its memory on demand.

Only torch and the contender's own library are imported, so that another environment can run it.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import clear_peak, read_memory
from benchmarks.peers import serve

WIDTHS, CHUNK = (256, 512), 128
OURS = ("reverse_kl", "forward_kl", "jsd", "tvd", "sampled", "compiled")
"""Divergences in torch, only the sampled token, and reverse KL by the compiled program."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Hidden states of both sides, both heads and the sampled tokens; the student's head has its gradient at hand."""

    student: Tensor
    teacher: Tensor
    student_weight: torch.nn.Parameter
    teacher_weight: Tensor
    ids: Tensor


Kernel = Callable[[Inputs], tuple[Tensor, Tensor]]
"""The mean over tokens and the gradient of the hidden states; the head's gradient is added to its `grad`."""


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of tokens and of the vocabulary, and the widths of student and teacher."""

    tokens: int
    vocabulary: int
    student: int = WIDTHS[0]
    teacher: int = WIDTHS[1]


def make_inputs(
    size: Size, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Inputs:
    """Random ones; two distributions of some nats that differ."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size.vocabulary, size.student, generator=generator) * (
        1.28 / size.student**0.5
    )
    teacher_weight = torch.randn(size.vocabulary, size.teacher, generator=generator) * (
        1.13 / size.teacher**0.5
    )
    made = Inputs(
        torch.randn(size.tokens, size.student, generator=generator).to(device, dtype),
        torch.randn(size.tokens, size.teacher, generator=generator).to(device, dtype),
        torch.nn.Parameter(weight.to(device, dtype)),
        teacher_weight.to(device, dtype),
        torch.randint(size.vocabulary, (size.tokens,), generator=generator).to(device),
    )
    made.student_weight.grad = torch.zeros_like(made.student_weight)
    return made


def run_products(inputs: Inputs, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Run only the four matrix products: the lower bound of the time."""
    weight = inputs.student_weight.detach()
    assert inputs.student_weight.grad is not None
    pulled = torch.empty_like(inputs.student)
    logits = torch.empty(chunk, len(weight), dtype=weight.dtype, device=weight.device)
    teacher_logits = torch.empty_like(logits)
    for start in range(0, len(inputs.ids), chunk):
        part = slice(start, min(start + chunk, len(inputs.ids)))
        count = part.stop - part.start
        torch.mm(inputs.student[part], weight.T, out=logits[:count])
        torch.mm(inputs.teacher[part], inputs.teacher_weight.T, out=teacher_logits[:count])
        torch.mm(logits[:count], weight, out=pulled[part])
        inputs.student_weight.grad.addmm_(logits[:count].T, inputs.student[part])
    return torch.zeros(()), pulled


def run_naive(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Whole [T, V] matrices and autograd."""
    hidden = inputs.student.detach().requires_grad_()
    logprobs = torch.log_softmax(hidden @ inputs.student_weight.T, dim=-1)
    with torch.no_grad():
        teacher = torch.log_softmax(inputs.teacher @ inputs.teacher_weight.T, dim=-1)
    value = (logprobs.exp() * (logprobs - teacher)).sum(dim=-1).mean()
    value.backward()
    assert hidden.grad is not None
    return value.detach(), hidden.grad


def build_ours(name: str, chunk: int = CHUNK) -> Kernel:
    """This library's step by one of `OURS`."""
    from practicum import functional as F
    from practicum.backends.local.native import NativeReverseKL, load_library
    from practicum.backends.local.prepared import prepack_head
    from practicum.functional.chunked import BufferPool
    from practicum.functional.head import Head
    from practicum.losses import TokenBatch, build_chunk, compile_objective, compute_coefficients
    from practicum.objective import Objective
    from practicum.types import TeacherSignal

    library = load_library() if name == "compiled" else None
    objective = Objective.model_validate(
        {"compiled": {}, "sampled": {"signal": "sampled"}}.get(name, {"divergence": name})
    )
    tiles = BufferPool(None if library is None else NativeReverseKL(library))

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        rows, weight = None, inputs.student_weight
        if (
            weight.dtype != inputs.student.dtype
        ):  # trained weights are float32, their products are not
            rows = weight.detach().to(inputs.student.dtype)
        # The heads are packed again after every update.
        student_head = prepack_head(Head(weight, len(weight), operand=rows))
        teacher_head = Head(inputs.teacher_weight, len(inputs.teacher_weight))
        count = len(inputs.ids)
        zeros = torch.zeros(count)
        batch = TokenBatch(
            tokens=inputs.ids.cpu(),
            rows=torch.zeros(count, dtype=torch.long),
            positions=torch.arange(count),
            sampling_logprobs=zeros,
            policy_logprobs=zeros,
            aggregate=torch.full((count,), 1 / count),
            authors=torch.zeros(count, dtype=torch.uint8),
            draws=torch.zeros(count, 0),
            rewards={"verifier": (None,)},
            groups=("",),
            texts=("",),
            sources=("student",),
            first=(0,),
        )
        total, gradients = torch.zeros(()), []
        for part in F.chunks(count, chunk):
            scores = TeacherSignal(hidden=inputs.teacher[part], head=teacher_head)
            if name == "sampled":
                sampled_logprobs = F.gather_logprobs(
                    teacher_head.logprobs(inputs.teacher[part]), inputs.ids[part]
                )
                scores = TeacherSignal(logprobs=sampled_logprobs)
            tokens = batch[part].to(inputs.ids.device)
            side = build_chunk(
                student_head,
                inputs.student[part],
                (scores, TeacherSignal()),
                tokens,
                compile_objective(objective),
                tiles,
            )
            share = compute_coefficients(objective.losses[0], side.values[0], tokens)
            total = total + (share * side.values[0].loss_value).sum().item()
            gradients.append(side.backward([share]))
        return total, torch.cat(gradients)

    return run


def build_trl() -> Kernel:
    """The kernel of TRL's DistillationTrainer."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # type: ignore[import-not-found]

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        hidden = inputs.student.detach().requires_grad_()
        values, _ = ChunkedDivergenceFunction.apply(
            hidden, inputs.student_weight, None, inputs.teacher, inputs.teacher_weight, None, 1.0
        )
        values.mean().backward()
        assert hidden.grad is not None
        return values.detach().mean(), hidden.grad

    return run


def build_liger() -> Kernel:
    """Liger's fused linear loss, not compiled, without the hard loss."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # type: ignore[import-not-found]

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=False
    )

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        hidden = inputs.student.detach().requires_grad_()
        value = loss(
            hidden, inputs.student_weight, inputs.teacher, inputs.teacher_weight, inputs.ids
        )
        value.backward()
        assert hidden.grad is not None
        return value.detach(), hidden.grad

    return run


def build_kernel(name: str) -> Kernel:
    """A contender by its name."""
    if name in OURS:
        return build_ours(name)
    return {
        "products": lambda: run_products,
        "naive": lambda: run_naive,
        "trl": build_trl,
        "liger": build_liger,
    }[name]()


def compute_reference(name: str, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Value and both gradients in float64, from the definition."""
    hidden = inputs.student.detach().double().requires_grad_()
    weight = inputs.student_weight.detach().double().requires_grad_()
    s = torch.log_softmax(hidden @ weight.T, dim=-1)
    t = torch.log_softmax(inputs.teacher.double() @ inputs.teacher_weight.double().T, dim=-1)
    m = torch.logaddexp(s, t) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    at = inputs.ids[:, None]
    values = {
        "forward_kl": lambda: (t.exp() * (t - s)).sum(dim=-1),
        "tvd": lambda: (t.exp() - s.exp()).abs().sum(dim=-1) / 2,
        "jsd": lambda: (t.exp() * (t - m) + s.exp() * (s - m)).sum(dim=-1) / 2,
        "sampled": lambda: ((s - t).detach() * s).gather(-1, at)[:, 0],
    }
    value = values.get(name, lambda: (s.exp() * (s - t)).sum(dim=-1))().mean()
    value.backward()
    assert hidden.grad is not None and weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


def measure_errors(name: str, size: Size, tokens: int = 48, seed: int = 7) -> dict[str, float]:
    """The contender's errors on a slice of fresh inputs, relative to the greatest number of each."""
    few = replace(size, tokens=tokens)
    inputs = make_inputs(few, seed)
    run = build_kernel(name)
    run(make_inputs(few, seed + 1))  # so that what is held between calls is of other inputs
    value, gradient = run(inputs)
    expected = compute_reference(name, inputs)
    assert inputs.student_weight.grad is not None
    actual = (value, gradient, inputs.student_weight.grad)
    return {
        which: float(((a.double() - b).abs().max() / b.abs().max()).item())
        for which, a, b in zip(("value", "hidden", "head"), actual, expected, strict=True)
    }


def measure_peak_growth(name: str, size: Size) -> float:
    """MiB by which the peak grows above the inputs and the gradient that is wanted anyway (Linux)."""
    inputs = make_inputs(size)
    run = build_kernel(name)
    run(
        make_inputs(replace(size, tokens=8, vocabulary=64))
    )  # what the libraries keep for themselves
    clear_peak()
    before = read_memory("VmRSS")
    run(inputs)
    return read_memory("VmHWM") - before


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one contender at one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument(
        "sizes", type=int, nargs=4, help="tokens, vocabulary, widths of student and teacher"
    )
    options = parser.parse_args(arguments)
    size = Size(*options.sizes)
    torch.set_num_threads(1)
    loaded: list[tuple[Kernel, Inputs]] = []

    def respond(question: dict[str, Any]) -> Any:
        if question["do"] == "errors":
            return measure_errors(options.name, size)
        if question["do"] == "memory":
            return measure_peak_growth(options.name, size)
        if not loaded:
            loaded.append((build_kernel(options.name), make_inputs(size)))
        run, inputs = loaded[0]
        start = time.process_time()
        run(inputs)
        return time.process_time() - start

    serve(respond)


if __name__ == "__main__":
    main()
