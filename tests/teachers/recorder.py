"""A teacher that records its requests, and rollouts to ask about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherRequest,
)
from practicum.types import Datum, Message, Prompt, Rollout, Sample, SamplingParams, TeacherSignal


@dataclass
class Recorder(Teacher):
    """Answers every token with the same log-probability, and stores the rollouts, signals and states it received."""

    logprob: float = -1.0
    silent_about: frozenset[str] = frozenset()
    writes: bool = True
    asked: list[list[Rollout]] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    capabilities = Capabilities(signals=frozenset({"sampled", "topk", "full"}))

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        self.asked.append(list(rollouts))
        self.signals.append(signal)
        return [
            TeacherSignal()
            if rollout.prompt.id in self.silent_about
            else TeacherSignal(logprobs=torch.full((len(rollout.tokens),), self.logprob))
            for rollout in rollouts
        ]

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        if not self.writes:
            return None
        self.prompts += [request.prompt for request in requests]
        own = torch.tensor([self.logprob])
        return [Sample(torch.tensor([request.seed]), own, own, "stop") for request in requests]

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        self.prompts.append(prompt)
        return None

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        self.steps.append(step)

    def save_state(self) -> dict[str, Tensor]:
        return self.state

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.state = dict(tensors)


def prompt(name: str, **fields: Any) -> Prompt:
    return Prompt(name, (Message("user", f"{name}?"),), **fields)


def rollout(of: Prompt, *, sample: int = 0, reward: float | None = None, text: str = "") -> Rollout:
    return Rollout(
        prompt=of,
        prompt_tokens=(1,),
        tokens=torch.tensor([2, 3]),
        loss_mask=torch.tensor([True, True]),
        sampling_logprobs=torch.zeros(2),
        policy_logprobs=torch.zeros(2),
        policy_version=0,
        stop_reason="stop",
        text=text or f"{of.id} {sample}",
        sample=sample,
        reward=reward,
    )
