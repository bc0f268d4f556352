"""Full-vocabulary reverse KL with its gradient: our chunked step against whole [T, V] matrices, time and peak memory.

    python -m benchmarks.logit_side [--tokens 512 2048] [--vocabulary 49152]

Both work on the same hidden states, with a student head that learns. Times are interleaved in one process; memory is the
growth of the peak resident set in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measuring import report, spread
from practicum import functional as F
from practicum.functional.chunked import Tiles
from practicum.objective import Objective, TokenBatch, open_chunk, token_side
from practicum.types import Head, TeacherSignal

STUDENT, TEACHER, CHUNK, REPEATS = 576, 576, 128, 5


def main() -> None:
    """Report one line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument(
        "--memory", choices=["chunked", "naive", "products"], help="internal: measure one variant's memory and stop"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(json.dumps(_peak_growth(VARIANTS[options.memory], options.tokens[0], options.vocabulary)))
        return
    for tokens in options.tokens:
        times = _times(tokens, options.vocabulary)
        memory = {name: _memory(name, tokens, options.vocabulary) for name in VARIANTS}
        matrix = tokens * options.vocabulary * 4 / 2**20
        report(
            "logit_side",
            tokens=tokens,
            vocabulary=options.vocabulary,
            widths=[STUDENT, TEACHER],
            chunk=CHUNK,
            seconds={name: spread(values) for name, values in times.items()},
            of_naive=spread([a / b for a, b in zip(times["chunked"], times["naive"], strict=True)]),
            of_products=spread([a / b for a, b in zip(times["chunked"], times["products"], strict=True)]),
            peak_mib={name: round(value, 1) for name, value in memory.items()},
            peak_in_matrices={name: round(value / matrix, 3) for name, value in memory.items()},
            memory_ratio=round(memory["chunked"] / memory["naive"], 4),
        )


def _inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(tokens, STUDENT, generator=generator)
    teacher = torch.randn(tokens, TEACHER, generator=generator)
    student_weight = torch.nn.Parameter(torch.randn(vocabulary, STUDENT, generator=generator) * 0.05)
    teacher_weight = torch.randn(vocabulary, TEACHER, generator=generator) * 0.05
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    student_weight.grad = torch.zeros_like(student_weight)
    return student, teacher, student_weight, teacher_weight, ids


def _chunked(student: Tensor, teacher: Tensor, student_weight: Tensor, teacher_weight: Tensor, ids: Tensor) -> None:
    objective = Objective()
    mine, theirs = Head(student_weight, len(student_weight)), Head(teacher_weight, len(teacher_weight))
    count = len(ids)
    zeros, rows = torch.zeros(count), torch.zeros(count, dtype=torch.long)
    batch = TokenBatch(
        tokens=ids,
        rows=rows,
        positions=torch.arange(count),
        sampling_logprobs=zeros,
        policy_logprobs=zeros,
        aggregate=torch.full((count,), 1 / count),
        draws=torch.zeros(count, 0),
        rewards=(None,),
        groups=("",),
        texts=("",),
        sources=("student",),
        first=(0,),
    )
    tiles = Tiles()
    for part in F.chunks(count, CHUNK):
        said = (TeacherSignal(hidden=teacher[part], head=theirs), TeacherSignal())
        side = open_chunk(mine, student[part], said, batch[part], objective, tiles)
        side.backward([token_side(objective.losses[0], side.values[0], batch[part])])


def _products(student: Tensor, teacher: Tensor, student_weight: Tensor, teacher_weight: Tensor, ids: Tensor) -> None:
    """The four matrix products alone: the floor of the time."""
    assert student_weight.grad is not None
    for part in F.chunks(len(ids), CHUNK):
        logits = student[part] @ student_weight.detach().T
        _ = teacher[part] @ teacher_weight.T
        _ = logits @ student_weight.detach()
        student_weight.grad.addmm_(logits.T, student[part])


def _naive(student: Tensor, teacher: Tensor, student_weight: Tensor, teacher_weight: Tensor, ids: Tensor) -> None:
    hidden = student.detach().requires_grad_()
    logprobs = torch.log_softmax(hidden @ student_weight.T, dim=-1)
    with torch.no_grad():
        teacher_logprobs = torch.log_softmax(teacher @ teacher_weight.T, dim=-1)
    (logprobs.exp() * (logprobs - teacher_logprobs)).sum(dim=-1).mean().backward()


VARIANTS = {"chunked": _chunked, "naive": _naive, "products": _products}


def _times(tokens: int, vocabulary: int) -> dict[str, list[float]]:
    inputs = _inputs(tokens, vocabulary)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(REPEATS + 1):
        for name, variant in VARIANTS.items():
            start = time.process_time()
            variant(*inputs)
            if repeat:
                times[name].append(time.process_time() - start)
    return times


def _memory(name: str, tokens: int, vocabulary: int) -> float:
    command = [sys.executable, "-m", "benchmarks.logit_side", "--memory", name]
    command += ["--tokens", str(tokens), "--vocabulary", str(vocabulary)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def _peak_growth(variant, tokens: int, vocabulary: int) -> float:
    """MiB by which the peak resident set grows above the inputs and the gradient that is wanted anyway (Linux)."""
    inputs = _inputs(tokens, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    variant(*inputs)
    return _peak() - before


def _peak() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    main()
