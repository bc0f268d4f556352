"""Measure a GPU part by part; each part returns its figures.

Seconds are wall-clock seconds between two synchronisations of the device, after a warm-up round. Memory is the peak of
the part above the memory before it.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu_models import SHAPES, build_model
from benchmarks.loss_kernels import (
    Inputs,
    Kernel,
    Size,
    build_ours,
    build_trl,
    compute_reference,
    make_inputs,
    run_products,
)
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.backends.local.trial import choose_decoding, find_graph
from practicum.functional.head import Head
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.types import (
    Datum,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

Figures = dict[str, float]
TOLERANCE = 2e-2
"""The error of a gradient from bfloat16 operands, of its greatest number."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The device of a run and how often a part is repeated."""

    device: str
    rounds: int = 3

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        """Return the median seconds of some work after a warm-up round, and its peak GiB.

        The memory is counted from before the warm-up, which allocates buffers that later rounds use again.
        """
        before = self.begin()
        work()
        seconds = []
        for _ in range(self.rounds):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds), self.measure_peak(before)

    def begin(self) -> int:
        """Begin to watch the device's memory, and return the bytes that are there."""
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def measure_peak(self, before: int) -> float:
        """Peak GiB above the memory before; 0 on a CPU, which does not count it."""
        return (
            (torch.cuda.max_memory_allocated() - before) / 2**30 if self.device == "cuda" else 0.0
        )

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure_ceilings(bench: Bench, size: int) -> Figures:
    """Products of bfloat16 with float32 sums in TFLOP/s, and copies in GB/s: what the bounds are computed from."""
    square = torch.randn(size, size, device=bench.device).bfloat16()
    products, _ = bench.time(lambda: square @ square)
    numbers = torch.zeros(size * size * 8, device=bench.device)
    copies, _ = bench.time(numbers.clone)
    return {
        "bfloat16_tflops": 2 * size**3 / products / 1e12,
        "copy_gb": 2 * numbers.nbytes / copies / 1e9,
    }


def measure_loss(bench: Bench, size: Size, chunk: int) -> Figures:
    """Compare reverse KL and its gradients with its four matrix products, and with TRL's kernel if installed."""
    contenders: dict[str, Kernel] = {
        "loss": build_ours("reverse_kl", chunk),
        "products": lambda inputs: run_products(inputs, chunk),
    }
    try:
        contenders["trl"] = build_trl()
    except ImportError:
        print("trl is not installed here, so it is left out: pip install -e '.[peers]'")
    small = Size(64, size.vocabulary, size.student, size.teacher)
    errors = {
        name: _measure_error(bench, name, run, small)
        for name, run in contenders.items()
        if name != "products"
    }
    if errors["loss"] > TOLERANCE:
        raise ArithmeticError(
            f"the loss's gradient differs from that in float64 by {errors['loss']:.2g}"
        )
    inputs = make_inputs(size, 0, bench.device, torch.bfloat16)
    learning = learn_in_float32(inputs)
    figures = {f"{name}_error": error for name, error in errors.items()}
    for name, run in contenders.items():
        examined = learning if name == "loss" else inputs
        seconds, peak = bench.time(lambda run=run, examined=examined: run(examined))
        figures |= {f"{name}_ms": 1000 * seconds, f"{name}_gib": peak}
    figures["of_products"] = figures["loss_ms"] / figures["products_ms"]
    return figures


def learn_in_float32(inputs: Inputs) -> Inputs:
    """Return the inputs with the student's head in float32, as this library trains it."""
    weight = torch.nn.Parameter(inputs.student_weight.detach().float())
    weight.grad = torch.zeros_like(weight)
    return replace(inputs, student_weight=weight)


def _measure_error(bench: Bench, name: str, run: Kernel, size: Size) -> float:
    """The error of the hidden states' gradient, relative to its greatest number."""
    inputs = make_inputs(size, 7, bench.device, torch.bfloat16)
    _, gradient = run(learn_in_float32(inputs) if name == "loss" else inputs)
    expected = compute_reference("reverse_kl", inputs)[1]
    return float(((gradient.double() - expected).abs().max() / expected.abs().max()).item())


def measure_decoding(
    bench: Bench, name: str, sizes: tuple[int, int, int], way: str, ceilings: Mapping[str, float]
) -> Figures:
    """Return tokens per second of completions that decode together, as a share of the bandwidth limit as well.

    They decode by the captured graph or by torch's modules. Sizes are rows, tokens of a prompt and new tokens.
    """
    rows, prompt, new = sizes
    shape, model = SHAPES[name], build_model(name, bench.device)
    if way == "graph":
        model = replace(model, decoding=find_graph(model))
        print(f"decodes by: {model.decoding}")
    sampler = LocalSampler(model, batch_size=rows)
    requests = [
        SampleRequest(draw_tokens(prompt, row, shape.vocabulary), row) for row in range(rows)
    ]
    seconds, peak = bench.time(lambda: sampler.sample(requests, SamplingParams(new)))
    weights = 2 * (shape.body + shape.head)
    read = weights + shape.count_kv_bytes(rows * (prompt + new // 2))
    bound = rows / (read / (ceilings["copy_gb"] * 1e9))
    speed = rows * new / seconds
    return {
        "tokens_per_second": speed,
        "of_bandwidth": speed / bound,
        "ms_a_step": 1000 * seconds / new,
        "peak_gib": peak,
    }


def measure_scoring(
    bench: Bench, name: str, texts: int, tokens: int, ceilings: Mapping[str, float]
) -> Figures:
    """Return tokens per second of a teacher's hidden states, and the share of the limit of its products."""
    shape = SHAPES[name]
    teacher = LocalSampler(build_model(name, bench.device))
    requests = [
        ScoreRequest(draw[:1], draw[1:])
        for draw in (draw_tokens(tokens, text, shape.vocabulary) for text in range(texts))
    ]
    seconds, peak = bench.time(lambda: teacher.score(requests, Full()))
    operations = texts * (2 * shape.body * tokens + _count_attention(name, tokens))
    return {
        "tokens_per_second": texts * tokens / seconds,
        "of_products": operations / seconds / (ceilings["bfloat16_tflops"] * 1e12),
        "peak_gib": peak,
    }


def _count_attention(name: str, tokens: int) -> int:
    """Operations of causal attention over a text: half of its two square products."""
    shape = SHAPES[name]
    return 2 * shape.layers * shape.heads * shape.head_width * tokens**2


def measure_update(bench: Bench, name: str, teacher: str, tokens: int) -> Figures:
    """Return learned tokens per second of one text: forward, loss over the full vocabulary, backward, AdamW.

    The teacher's hidden states are given. Memory counts the student with its gradients and moments and the teacher's head.
    """
    before = bench.begin()
    student = build_model(name, bench.device, learns=True)
    shape = SHAPES[teacher]
    head = Head(_draw_matrix(shape.vocabulary, shape.width, bench.device), shape.vocabulary)
    text = draw_tokens(tokens + 1, 0, shape.vocabulary)
    states = _draw_matrix(tokens, shape.width, bench.device)
    rollout = build_rollout("0", text[:1], torch.tensor(text[1:]))
    data = [Datum(rollout, TeacherSignal(hidden=states, head=head))]
    trainer = LocalTrainer(student)
    seconds, _ = bench.time(lambda: run_update(trainer, data))
    return {"tokens_per_second": tokens / seconds, "peak_gib": bench.measure_peak(before)}


def _draw_matrix(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5


def run_update(trainer: LocalTrainer, data: list[Datum]) -> None:
    """Take one step of reverse KL over the data."""
    result = trainer.forward_backward(data, Objective(), 0)
    if result.metrics.get("nonfinite"):
        raise ArithmeticError("the loss is not finite")
    trainer.optim_step(AdamParams(learning_rate=1e-6))


def measure_step(
    bench: Bench, pair: tuple[str, str], rows: int, prompt: int, new: int, *, lora: bool = False
) -> Figures:
    """A whole step: answers of the student, the teacher's hidden states, reverse KL, AdamW; by phase."""
    before = bench.begin()
    student = build_model(pair[0], bench.device, learns=True, lora=lora)
    student = replace(student, decoding=choose_decoding(student, "auto"))
    teacher = LocalSampler(build_model(pair[1], bench.device))
    trainer = LocalTrainer(student, replace(build_limits(student.device), sampling_batch=rows))
    phases = {"sample": 0.0, "score": 0.0, "update": 0.0}
    figures = _run_steps(bench, student, teacher, trainer, phases, (rows, prompt, new))
    return {**figures, "peak_gib": bench.measure_peak(before)}


def _run_steps(
    bench: Bench,
    student: LanguageModel,
    teacher: LocalSampler,
    trainer: LocalTrainer,
    phases: dict[str, float],
    sizes: tuple[int, int, int],
) -> Figures:
    """Take one warm-up step, then the measured steps."""
    rows, prompt, new = sizes
    prompts = [draw_tokens(prompt, row, student.vocab_size) for row in range(rows)]
    tokens = 0
    for number in range(bench.rounds + 1):
        marks = [time.perf_counter()]
        requests = [SampleRequest(text, number * rows + row) for row, text in enumerate(prompts)]
        samples = trainer.build_sampling_client().sample(requests, SamplingParams(new))
        bench.synchronize()
        marks.append(time.perf_counter())
        data = build_data(teacher, prompts, samples)
        bench.synchronize()
        marks.append(time.perf_counter())
        run_update(trainer, data)
        bench.synchronize()
        marks.append(time.perf_counter())
        if number:
            tokens += sum(len(sample.tokens) for sample in samples)
            for place, phase in enumerate(phases):
                phases[phase] += marks[place + 1] - marks[place]
    total = sum(phases.values())
    return {
        "tokens_per_second": tokens / total,
        "seconds": total / bench.rounds,
        **{f"{phase}_share": seconds / total for phase, seconds in phases.items()},
    }


def build_data(
    teacher: LocalSampler, prompts: list[tuple[int, ...]], samples: list[Sample]
) -> list[Datum]:
    """Return the answers with the teacher's hidden states."""
    pairs = list(zip(prompts, samples, strict=True))
    requests = [ScoreRequest(text, tuple(sample.tokens.tolist())) for text, sample in pairs]
    signals = teacher.score(requests, Full())
    rollouts = [
        build_rollout(str(number), text, sample.tokens)
        for number, (text, sample) in enumerate(pairs)
    ]
    return [Datum(rollout, signal) for rollout, signal in zip(rollouts, signals, strict=True)]


def build_rollout(name: str, prompt: tuple[int, ...], tokens: torch.Tensor) -> Rollout:
    """Return an answer with all tokens trained."""
    zeros = torch.zeros(len(tokens))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    return Rollout(Prompt(name, ()), prompt, tokens, mask, zeros, zeros, 0, "length", "")


def draw_tokens(count: int, seed: int, vocabulary: int) -> tuple[int, ...]:
    """Draw random tokens without padding."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())
