"""Run every arm as `runs` does, then let each student draft for its teacher (speculative decoding).

The student drafts `gamma` tokens. The teacher scores them in one call, accepts a prefix of them
and adds one of the teacher's tokens (arXiv 2211.17192). The result has the distribution of the teacher's
own completions. The readings of a run:

- `acceptance`: share of the examined tokens that are accepted; tokens after a rejected one are not
  examined.
- `tokens_per_call`: tokens generated per call of the teacher, at most `gamma + 1`.
- `expected_acceptance`: mean of 1 - TVD over the tokens of the teacher's own completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.core.randomness import seed_of
from practicum.errors import RecipeError
from practicum.functional.speculative import expected_acceptance, verify
from practicum.functional.truncation import sampling_logprobs
from practicum.losses import read_tokens
from practicum.objective import Full
from practicum.ports import (
    SamplingClient,
    Teacher,
)
from practicum.rollouts import RolloutBatch, sample_teacher_rollouts
from practicum.run_dir import read_json, write_json
from practicum.runs import open_run, restore_components
from practicum.runs.assembly import RunComponents
from practicum.training.evaluation import EvaluationSettings
from practicum.types import FrozenConfig, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal


class Config(FrozenConfig):
    """The number of tokens drafted per call of the teacher."""

    type: Literal["drafter"] = "drafter"
    gamma: int = Field(default=4, ge=1)


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms and draft with their students; the sweep can aim at the readings."""
    return measure_with(lambda folder: measure_drafting(folder, config.gamma), job)


def measure_drafting(folder: Path, gamma: int) -> dict[str, float]:
    """Return the readings of a finished run on its held-out prompts; they are measured once."""
    path = folder / f"drafter-{gamma}.json"
    if not path.is_file():
        write_json(path, _measure_drafting(folder, gamma))
    return read_json(path)


@torch.no_grad()
def _measure_drafting(folder: Path, gamma: int) -> dict[str, float]:
    built = restore_components(*open_run(folder))
    if built.evaluation is None or built.parts.task.opens_episodes:
        raise RecipeError(
            "measure drafter: drafts are made for held-out prompts with one answer each; "
            "take another task"
        )
    drafter, settings = built.parts.sampler, built.evaluation
    target = _get_target(built.parts.teacher, settings)
    texts = _start_texts(built, settings)
    counts = generate_speculatively(drafter, target, texts, settings.sampling, gamma)
    return {
        "acceptance": counts.accepted / counts.examined,
        "tokens_per_call": counts.generated / counts.calls,
        "expected_acceptance": _compute_expected(built, drafter, settings),
    }


def _get_target(teacher: Teacher, settings: EvaluationSettings) -> SamplingClient:
    """Return the model behind the teacher.

    Raises RecipeError if the teacher is not one model, or does not give its full distribution.
    """
    voices = [teacher.bind_prompt(prompt) for prompt in settings.prompts]
    clients = {
        id(voice.client): voice.client
        for voice in voices
        if voice is not None and voice.accepts_tokens
    }
    if len(clients) != 1 or None in voices or "full" not in teacher.capabilities.signals:
        raise RecipeError(
            "measure drafter: drafts are for one model with its whole distribution; "
            "write teacher: {type: model}"
        )
    return next(iter(clients.values()))


@dataclass(frozen=True, slots=True)
class DraftText:
    """A completion in progress: the prompts of drafter and target, its seed, and its tokens."""

    drafter_prompt: tuple[int, ...]
    target_prompt: tuple[int, ...]
    seed: int
    tokens: list[int] = field(default_factory=list)

    def compute_seed(self, name: str) -> int:
        """Return the seed of the next random numbers; `name` is their use."""
        return seed_of(self.seed, name, len(self.tokens))


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens examined and accepted, tokens generated, and calls of the target per text."""

    examined: int = 0
    accepted: int = 0
    generated: int = 0
    calls: int = 0


def generate_speculatively(
    drafter: SamplingClient,
    target: SamplingClient,
    texts: Sequence[DraftText],
    params: SamplingParams,
    gamma: int,
) -> DraftCounts:
    """Complete all texts with the distribution of the target, both models truncated by `params`."""
    counts = DraftCounts()
    active = list(texts)
    while active:
        drafts = _sample_drafts(drafter, active, params, gamma)
        pairs = list(zip(active, drafts, strict=True))
        drafter_signals = drafter.score(
            [_build_request(text.drafter_prompt, text, draft) for text, draft in pairs], Full()
        )
        target_signals = target.score(
            [_build_request(text.target_prompt, text, draft) for text, draft in pairs], Full()
        )
        for (text, draft), drafter_signal, target_signal in zip(
            pairs, drafter_signals, target_signals, strict=True
        ):
            # The drafter proposes nothing after its last token, so the last row is the target's.
            draft_logprobs = _read_logprobs(drafter_signal, params)[:-1]
            target_logprobs = _read_logprobs(target_signal, params)
            new, accepted = _verify_draft(text, draft, draft_logprobs, target_logprobs, params)
            text.tokens.extend(new)
            counts.examined += min(accepted + 1, len(draft))
            counts.accepted += accepted
            counts.generated += len(new)
            counts.calls += 1
        active = [text for text in active if not _has_ended(text.tokens, params)]
    return counts


def _sample_drafts(
    drafter: SamplingClient, texts: Sequence[DraftText], params: SamplingParams, gamma: int
) -> list[tuple[int, ...]]:
    """Return the next `gamma` tokens of each text, or fewer if fewer fit."""
    requests = [
        SampleRequest((*text.drafter_prompt, *text.tokens), text.compute_seed("draft"))
        for text in texts
    ]
    samples = drafter.sample(requests, replace(params, max_new_tokens=gamma))
    return [
        tuple(sample.tokens.tolist()[: params.max_new_tokens - len(text.tokens)])
        for text, sample in zip(texts, samples, strict=True)
    ]


def _build_request(prompt: tuple[int, ...], text: DraftText, draft: Sequence[int]) -> ScoreRequest:
    # A row is the distribution before a token. The row after the draft needs one more token, and
    # any will do.
    return ScoreRequest((*prompt, *text.tokens), (*draft, draft[-1]))


def _verify_draft(
    text: DraftText,
    draft: Sequence[int],
    draft_logprobs: Float[Tensor, "G V"],
    target_logprobs: Float[Tensor, "G1 V"],
    params: SamplingParams,
) -> tuple[list[int], int]:
    """Return the new tokens of a round, and the number of accepted draft tokens."""
    stream = torch.Generator().manual_seed(text.compute_seed("verify"))
    uniforms = torch.rand(len(draft), generator=stream, dtype=torch.float64)
    accepted, next_logprobs = verify(draft_logprobs, target_logprobs, torch.tensor(draft), uniforms)
    new = list(draft[:accepted])
    if not _has_ended([*text.tokens, *new], params):
        new.append(int(torch.multinomial(next_logprobs.exp(), 1, generator=stream)))
    return new, accepted


def _has_ended(tokens: Sequence[int], params: SamplingParams) -> bool:
    return bool(tokens) and (len(tokens) == params.max_new_tokens or params.should_stop(tokens))


def _read_logprobs(signal: TeacherSignal, params: SamplingParams) -> Float[Tensor, "T V"]:
    """Return the distributions from which tokens are sampled."""
    full = read_tokens(signal, slice(None)).full
    assert full is not None, "the whole distribution was asked for"
    return sampling_logprobs(full.cpu(), params)


def _start_texts(built: RunComponents, settings: EvaluationSettings) -> list[DraftText]:
    """Return an empty text for each sample of the evaluation."""
    texts = []
    for prompt in settings.prompts:
        voice = built.parts.teacher.bind_prompt(prompt)
        assert voice is not None, "the teacher has a voice for every prompt"
        drafter_prompt = built.parts.renderer.render(prompt.messages)
        for index in range(settings.samples):
            seed = seed_of(settings.seed, "drafter", prompt.id, index)
            texts.append(DraftText(drafter_prompt, voice.prompt_tokens, seed))
    return texts


def _compute_expected(
    built: RunComponents, drafter: SamplingClient, settings: EvaluationSettings
) -> float:
    """Return the mean of 1 - TVD over the tokens of the teacher's own completions."""
    batch = RolloutBatch(
        settings.prompts, settings.samples, settings.seed, step=1, stream="evaluation"
    )
    teacher, params = built.parts.teacher, settings.sampling
    rollouts = sample_teacher_rollouts(batch, teacher, built.parts.renderer, params)
    assert rollouts is not None, "a teacher with a voice can answer"
    requests = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    student_signals = drafter.score(requests, Full())
    teacher_signals = teacher.score(rollouts, Full())
    acceptances = [
        expected_acceptance(_read_logprobs(draft, params), _read_logprobs(target, params))
        for draft, target in zip(student_signals, teacher_signals, strict=True)
    ]
    return torch.cat(acceptances).double().mean().item()
