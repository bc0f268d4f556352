"""Toy pairs, healthy and broken on purpose, all derived from one small trained model."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy import make_model, toy_recipe

from practicum.losses import read_tokens
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    SamplingClient,
    Teacher,
    TeacherRequest,
)
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.runs.check_outcome import CheckOutcome
from practicum.studies.doctor.diagnosis import Diagnosis, run_checks
from practicum.studies.doctor.evidence import collect_evidence
from practicum.types import (
    Datum,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    TeacherSignal,
)

ALPHABET = "abcd" + "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in "abcd<>/_")
"""Enough letters for the 16 most likely tokens to be informative."""

UNUSED, STOP = 1, 2
"""The ids of `<s>`, which no model writes, and of `</s>`."""

SAMPLES, FEW, ENOUGH = 4, 8, 32
"""Answers per prompt, and numbers of prompts: a few for obvious faults, enough for the gap."""


def make_pairs(folder: Path) -> Path:
    """Write a student that is sometimes right, a more confident teacher, and models with one fault each."""
    make_model(folder / "student", alphabet=ALPHABET, seed=2, pretrain=150, hidden_size=64)
    make_model(folder / "random", alphabet=ALPHABET, seed=3)
    make_model(folder / "other random", alphabet=ALPHABET, seed=4, hidden_size=64)
    make_model(folder / "permuted", alphabet=ALPHABET[::-1], seed=3)
    derived(folder / "student", folder / "teacher", surer(2.0))
    derived(folder / "random", folder / "surer random", surer(1.3))
    derived(folder / "random", folder / "looping", surer(1000.0))
    derived(folder / "teacher", folder / "other stop", _swapped)
    _stops_at(folder / "other stop", "<s>", UNUSED)
    return folder


def derived(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Copy a model folder with other weights."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def surer(factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Multiply all logits by a factor: the same preferences with lower entropy."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * factor

    return change


def _swapped(tensors: dict[str, Tensor]) -> None:
    rows = tensors["model.embed_tokens.weight"].clone()
    rows[[UNUSED, STOP]] = rows[[STOP, UNUSED]]
    tensors["model.embed_tokens.weight"] = rows


def _stops_at(folder: Path, token: str, number: int) -> None:
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", token),
        ("config.json", "eos_token_id", number),
        ("generation_config.json", "eos_token_id", number),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def pair(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    student: str = "student",
    teacher: str = "teacher",
):
    """Return the recipe of two of the models."""
    models = {"student.model": str(folder / student), "teacher.model": str(folder / teacher)}
    return toy_recipe(folder, {**models, "optimizer.learning_rate": 0.001, **(changes or {})})


def diagnosed(
    recipe: Any,
    folder: Path,
    *,
    teacher: Callable[[Teacher], Any] | None = None,
    sampler: Callable[[SamplingClient], Any] | None = None,
    prompts: int = FEW,
) -> Diagnosis:
    """Return the diagnosis of a recipe with a teacher or sampler that is wrapped in a faulty one."""
    built = assemble_run(recipe, folder)
    parts = built.parts
    wrapped = parts.teacher if teacher is None else teacher(parts.teacher)
    drawing = parts.sampler if sampler is None else sampler(parts.sampler)
    assembled: RunComponents = replace(
        built, parts=replace(parts, teacher=wrapped, sampler=drawing)
    )
    return run_checks(collect_evidence(recipe, assembled, prompts, SAMPLES))


def finding(found: Diagnosis, check: str) -> CheckOutcome:
    """Return the finding of one check."""
    return next(result.outcome for result in found.results if result.check.id == check)


class FaultySampler(SamplingClient):
    """Reports log-probabilities that differ from the distribution it sampled from."""

    def __init__(self, inner: SamplingClient, change: Callable[[Tensor], Tensor]) -> None:
        self.inner = inner
        self.change = change

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        samples = self.inner.sample(requests, params)
        return [
            replace(sample, policy_logprobs=self.change(sample.policy_logprobs))
            for sample in samples
        ]

    def score(self, requests: Any, signal: Signal) -> list[TeacherSignal]:
        return self.inner.score(requests, signal)


class Changed(Teacher):
    """A teacher with a signal that is changed after scoring; see `practicum.ports.Teacher`."""

    def __init__(
        self,
        inner: Teacher,
        change: Callable[[Rollout, TeacherSignal], TeacherSignal],
        can: Capabilities | None = None,
    ) -> None:
        self.inner = inner
        self.change = change
        self.can = can or inner.capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self.can

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        answers = self.inner.score(rollouts, signal)
        return [
            self.change(rollout, answer) for rollout, answer in zip(rollouts, answers, strict=True)
        ]

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        return self.inner.sample(requests, params)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        return self.inner.bind_prompt(prompt)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        self.inner.after_step(step, data)

    def save_state(self) -> dict[str, Tensor]:
        return self.inner.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load_state(tensors)


def good_until(position: int) -> Callable[[Teacher], Changed]:
    """Return a teacher that answers with noise from a position on."""

    def change(rollout: Rollout, answer: TeacherSignal) -> TeacherSignal:
        if answer.hidden is None:
            return answer
        hidden = answer.hidden.clone()
        noise = torch.randn(
            hidden.shape, generator=torch.Generator().manual_seed(len(rollout.tokens))
        )
        hidden[position:] = (noise * hidden.std())[position:]
        return replace(answer, hidden=hidden)

    return lambda inner: Changed(inner, change)


def sampled_only(change: Callable[[Rollout, Tensor], Tensor]) -> Callable[[Teacher], Changed]:
    """Return a teacher that gives one log-probability per token, changed by `change`."""

    def narrowed(rollout: Rollout, answer: TeacherSignal) -> TeacherSignal:
        return TeacherSignal(logprobs=change(rollout, _of_tokens(answer, rollout)))

    return lambda inner: Changed(inner, narrowed, Capabilities(signals=frozenset({"sampled"})))


def candidates_only(k: int) -> Callable[[Teacher], Changed]:
    """Return a teacher that gives its k most likely tokens."""

    def narrowed(rollout: Rollout, answer: TeacherSignal) -> TeacherSignal:
        full = read_tokens(answer, slice(None)).full
        if full is None:
            return answer
        top = full.topk(k, dim=-1)
        return TeacherSignal(
            logprobs=_of_tokens(answer, rollout), topk_ids=top.indices, topk_logprobs=top.values
        )

    can = Capabilities(
        signals=frozenset({"sampled", "topk"}), supports=frozenset({"teacher"}), largest_k=k
    )
    return lambda inner: Changed(inner, narrowed, can)


def _of_tokens(answer: TeacherSignal, rollout: Rollout) -> Tensor:
    read = read_tokens(answer, slice(None))
    if read.full is None:
        assert read.logprobs is not None
        return read.logprobs
    return read.full.gather(-1, rollout.tokens[:, None])[:, 0]
