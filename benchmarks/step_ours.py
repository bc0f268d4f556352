"""Run whole steps of this library on the models and prompts of a workload, in a separate process.

`python -m benchmarks.step_ours JOB`; JOB is a JSON file, see `benchmarks.step`.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from benchmarks.measuring import read_memory
from benchmarks.models import build_trainer as make_trainer
from benchmarks.models import render_words
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.native import load_library
from practicum.backends.local.residency import build_scorer
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Full, Objective
from practicum.ports import (
    AdamParams,
    Task,
)
from practicum.rollouts.sources.student import Config as StudentSource
from practicum.teaching.client import ClientTeacher
from practicum.training.loop import StepComponents, StepPlan, StepSettings, assemble, train_step
from practicum.types import Message, Prompt, Rollout, SamplingParams

KERNELS = frozenset(
    {
        "compiled",  # see `Watched`
        "aten::addmm",
        "aten::addmm_",
        "aten::bmm",
        "aten::mm",
        "aten::_fused_adamw_",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "mkldnn::_linear_pointwise",
    }
)
"""The operations that compute a step: all others only move numbers."""


class Watched:
    """The functions of the compiled program, with every call visible to the profiler."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._functions = functions

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a function by its name."""
        return getattr(self, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function as an attribute."""
        function = getattr(self._functions, name)

        def call(*arguments: Any) -> Any:
            with record_function("compiled"):
                return function(*arguments)

        return call


class Given(Task):
    """A task of given prompts, without rewards."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def train_prompts(self) -> Sequence[Prompt]:
        """All of them."""
        return self._prompts

    def heldout_prompts(self) -> Sequence[Prompt]:
        """None."""
        return []

    def reward(self, rollout: Rollout) -> float | None:
        """Return no reward."""
        return None


class Phases:
    """Processor seconds of the calls of the backend, by phase, innermost first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its seconds counted under the phase."""

        def call_watched(*arguments: Any, **keywords: Any) -> Any:
            start = time.process_time()
            try:
                return call(*arguments, **keywords)
            finally:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start

        return call_watched

    def take(self) -> dict[str, float]:
        """Return the seconds counted so far, and reset the count."""
        counted, self.seconds = self.seconds, {}
        return counted


class Sampling:
    """A sampling client that measures its calls."""

    def __init__(self, client: Any, phases: Phases) -> None:
        self.sample = phases.watch("sample", client.sample)
        self.score = phases.watch("score", client.score)
        self.capabilities = client.capabilities


def main() -> None:
    """Compare the loss on given answers, then train and print the seconds, tokens and phases of each step."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    imports = read_memory("VmRSS")
    student = load_student(StudentConfig(model=job["student"], device="cpu"), seed=0)
    taught = ScorerConfig(model=job["teacher"], device="cpu")
    loaded = load(taught)
    trainer = make_trainer(student.language_model, job["batch"])
    limits = trainer.limits
    teacher = ClientTeacher(
        build_scorer(loaded, taught, limits.sampling_batch, limits.chunk_tokens), loaded.renderer
    )
    loss = _compute_loss(job, trainer, teacher)
    phases = Phases()
    _watch(trainer, teacher, phases)
    prompts = [_build_prompt(number, prompt) for number, prompt in enumerate(job["prompts"])]
    parts = StepComponents(
        trainer, trainer.build_sampling_client(), teacher, Given(prompts), student.renderer, prompts
    )
    plan = StepPlan(
        objective=Objective(),
        n=1,
        sampling=SamplingParams(job["new_tokens"], stop_ids=frozenset(job["stops"])),
        source=StudentSource(),
        adam=AdamParams(job["learning_rate"]),
    )
    settings = StepSettings(job["seed"], len(prompts), lambda step: plan)
    rows = []
    for step in range(1, job["steps"] + 1):
        start = time.process_time()
        result = train_step(step, parts, settings)
        seconds = time.process_time() - start
        rows.append(
            (seconds, sum(len(rollout.tokens) for rollout in result.rollouts), phases.take())
        )
    peak = read_memory("VmHWM")  # without what the profiler keeps
    answer = {
        "seconds": [row[0] for row in rows[1:]],
        "tokens": [row[1] for row in rows[1:]],
        "sample": [row[2]["sample"] for row in rows[1:]],
        "phases": [row[2] for row in rows[1:]],
        "loss": loss,
        "kernels": _measure_kernels(lambda: train_step(job["steps"] + 1, parts, settings)),
        "peak_mib": peak,
        "imports_mib": imports,
    }
    print(json.dumps(answer))


def _watch(trainer: Any, teacher: Any, phases: Phases) -> None:
    """Count the calls through which a step reaches the backend."""
    clients = trainer.build_sampling_client
    trainer.build_sampling_client = lambda: Sampling(clients(), phases)
    trainer.forward_backward = phases.watch("forward_backward", trainer.forward_backward)
    trainer.optim_step = phases.watch("optimizer", trainer.optim_step)
    teacher.score = phases.watch("teacher", teacher.score)


def _measure_kernels(step: Callable[[], object]) -> float:
    """Return the processor seconds that a step spends in products, attention and all else that computes."""
    library = load_library()
    if library is not None:
        object.__setattr__(library, "functions", Watched(library.functions))
    with profile() as profiled:
        wall, processor = time.perf_counter(), time.process_time()
        step()
        busy = (time.process_time() - processor) / (time.perf_counter() - wall)
    # The profiler reads the clock of the wall, which runs on while other programs have the core.
    total = sum(row.self_cpu_time_total for row in profiled.key_averages() if row.key in KERNELS)
    return total / 1e6 * busy


def _build_prompt(number: int, tokens: Sequence[int]) -> Prompt:
    return Prompt(str(number), (Message("user", render_words(tokens)),))


def _compute_loss(job: dict[str, Any], trainer: Any, teacher: ClientTeacher) -> float:
    """The mean over the tokens of the given answers; the gradient is thrown away."""
    rollouts = [
        Rollout(
            prompt=_build_prompt(number, prompt),
            prompt_tokens=tuple(prompt),
            tokens=torch.tensor(answer),
            loss_mask=torch.ones(len(answer), dtype=torch.bool),
            sampling_logprobs=torch.zeros(len(answer)),
            policy_logprobs=torch.zeros(len(answer)),
            policy_version=0,
            stop_reason="length",
            text="",
        )
        for number, (prompt, answer) in enumerate(job["answers"])
    ]
    data = assemble(rollouts, teacher.score(rollouts, Full()))
    result = trainer.forward_backward(data, Objective(), 0)
    for parameter in trainer.language_model.model.parameters():
        parameter.grad = None
    return result.metrics["loss"]


if __name__ == "__main__":
    main()
