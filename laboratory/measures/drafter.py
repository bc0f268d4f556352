"""Runs every arm as `runs` does, then lets each student draft for its teacher in speculative decoding.

The student writes `gamma` tokens, the teacher reads them in one call, keeps a beginning of them and adds one token of its own
(arXiv 2211.17192); what is written is distributed as the teacher's own answers. Read for every run:

- `acceptance`: the share of the tokens looked at that are kept; what was drafted after a rejected one is not looked at.
- `tokens_per_call`: tokens written for each call of the teacher, at most `gamma + 1`.
- `expected_acceptance`: the mean of 1 - TVD over the tokens of answers that the teacher wrote by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import LoadedReproduction, ReproductionScale
from practicum.core.randomness import seed_of
from practicum.errors import RecipeError
from practicum.functional.speculative import expected_acceptance, verify
from practicum.functional.truncation import sampling_logprobs
from practicum.objective import Full, read_tokens
from practicum.ports import Environment, SamplingClient, Teacher
from practicum.rollouts import RolloutBatch, sample_teacher_rollouts
from practicum.run_dir import read_json, write_json
from practicum.runs import open_run, restored
from practicum.runs.assembly import RunComponents
from practicum.runs.console import Console
from practicum.training.evaluation import EvaluationSettings
from practicum.types import SampleRequest, SamplingParams, ScoreRequest, TeacherSignal


class Config(BaseModel):
    """How many tokens are drafted for each call of the teacher."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["drafter"] = "drafter"
    gamma: int = Field(default=4, ge=1)


def measure(
    config: Config,
    study: LoadedReproduction,
    form: ReproductionScale,
    home: Path,
    at_once: int,
    console: Console,
) -> Results:
    """Run all arms, and draft with what they left; the sweep can aim at what is read of that."""
    return measure_with(
        lambda folder: drafting(folder, config.gamma), study, form, home, at_once, console
    )


def drafting(folder: Path, gamma: int) -> dict[str, float]:
    """How well the student of a finished run drafts for its teacher on the held-out prompts; measured once."""
    known = folder / f"drafter-{gamma}.json"
    if not known.is_file():
        write_json(known, _measured(folder, gamma))
    return read_json(known)


@torch.no_grad()
def _measured(folder: Path, gamma: int) -> dict[str, float]:
    home, recipe = open_run(folder)
    built = restored(home, recipe)
    if built.evaluation is None or isinstance(built.parts.task, Environment):
        raise RecipeError(
            "measure drafter: drafts are made for held-out prompts with one answer each; take another task"
        )
    drafter, settings = built.parts.sampler, built.evaluation
    target = _target(built.parts.teacher, settings)
    texts = _begun(built, settings)
    spent = speculate(drafter, target, texts, settings.sampling, gamma)
    return {
        "acceptance": spent.kept / spent.examined,
        "tokens_per_call": spent.written / spent.calls,
        "expected_acceptance": _expected(built, drafter, settings),
    }


def _target(teacher: Teacher, settings: EvaluationSettings) -> SamplingClient:
    """The one model behind the teacher; RecipeError where there is none, or not its whole distribution."""
    voices = [teacher.voice(prompt) for prompt in settings.prompts]
    clients = {
        id(voice.client): voice.client
        for voice in voices
        if voice is not None and voice.accepts_tokens
    }
    if len(clients) != 1 or None in voices or "full" not in teacher.capabilities.signals:
        raise RecipeError(
            "measure drafter: drafts are for one model with its whole distribution; write teacher: {type: model}"
        )
    return next(iter(clients.values()))


@dataclass(frozen=True, slots=True)
class DraftText:
    """An answer on its way: the prompt as drafter and target read it, its seed, and what is written so far."""

    drafter_prompt: tuple[int, ...]
    target_prompt: tuple[int, ...]
    seed: int
    tokens: list[int] = field(default_factory=list)

    def stream(self, what: str) -> int:
        """The seed of what is drawn next."""
        return seed_of(self.seed, what, len(self.tokens))


@dataclass(slots=True)
class Spent:
    """What speculative decoding took: drafted tokens looked at and kept, tokens written, calls of the target for a text."""

    examined: int = 0
    kept: int = 0
    written: int = 0
    calls: int = 0


def speculate(
    drafter: SamplingClient,
    target: SamplingClient,
    texts: Sequence[DraftText],
    params: SamplingParams,
    gamma: int,
) -> Spent:
    """Write all texts to their end, distributed as the target's own; both models' distributions are as `params` cut them."""
    spent = Spent()
    alive = list(texts)
    while alive:
        drafts = _drafts(drafter, alive, params, gamma)
        pairs = list(zip(alive, drafts, strict=True))
        mine = drafter.score(
            [_request(text.drafter_prompt, text, draft) for text, draft in pairs], Full()
        )
        theirs = target.score(
            [_request(text.target_prompt, text, draft) for text, draft in pairs], Full()
        )
        going = []
        for text, draft, own, other in zip(alive, drafts, mine, theirs, strict=True):
            new, kept = _round(
                text, draft, _logprobs(own, params)[:-1], _logprobs(other, params), params
            )
            text.tokens.extend(new)
            spent.examined += min(kept + 1, len(draft))
            spent.kept += kept
            spent.written += len(new)
            spent.calls += 1
            if not _ended(text.tokens, params):
                going.append(text)
        alive = going
    return spent


def _drafts(
    drafter: SamplingClient, texts: Sequence[DraftText], params: SamplingParams, gamma: int
) -> list[tuple[int, ...]]:
    """The next tokens of each text as the drafter would write them, no more than there is room for."""
    requests = [
        SampleRequest((*text.drafter_prompt, *text.tokens), text.stream("draft")) for text in texts
    ]
    samples = drafter.sample(requests, replace(params, max_new_tokens=gamma))
    return [
        tuple(sample.tokens.tolist()[: params.max_new_tokens - len(text.tokens)])
        for text, sample in zip(texts, samples, strict=True)
    ]


def _request(prompt: tuple[int, ...], text: DraftText, draft: Sequence[int]) -> ScoreRequest:
    """What is said before each drafted token and after the last; the token at its end stands for any."""
    return ScoreRequest((*prompt, *text.tokens), (*draft, draft[-1]))


def _round(
    text: DraftText,
    draft: Sequence[int],
    mine: Float[Tensor, "G V"],
    theirs: Float[Tensor, "G1 V"],
    params: SamplingParams,
) -> tuple[list[int], int]:
    """What a round writes, and how many of the drafted tokens it keeps."""
    stream = torch.Generator().manual_seed(text.stream("verify"))
    uniforms = torch.rand(len(draft), generator=stream, dtype=torch.float64)
    kept, after = verify(mine, theirs, torch.tensor(draft), uniforms)
    new = list(draft[:kept])
    if not _ended([*text.tokens, *new], params):
        new.append(int(torch.multinomial(after.exp(), 1, generator=stream)))
    return new, kept


def _ended(tokens: Sequence[int], params: SamplingParams) -> bool:
    return bool(tokens) and (len(tokens) == params.max_new_tokens or params.stops(tokens))


def _logprobs(signal: TeacherSignal, params: SamplingParams) -> Float[Tensor, "T V"]:
    """The distributions that tokens are drawn from."""
    full = read_tokens(signal, slice(None)).full
    assert full is not None, "the whole distribution was asked for"
    return sampling_logprobs(full.cpu(), params)


def _begun(built: RunComponents, settings: EvaluationSettings) -> list[DraftText]:
    """The held-out prompts, each as often as it is answered in the evaluation."""
    texts = []
    for prompt in settings.prompts:
        voice = built.parts.teacher.voice(prompt)
        assert voice is not None, "the teacher has a voice for every prompt"
        own = built.parts.renderer.render(prompt.messages)
        seeds = [
            seed_of(settings.seed, "drafter", prompt.id, number)
            for number in range(settings.samples)
        ]
        texts += [DraftText(own, voice.prompt_tokens, seed) for seed in seeds]
    return texts


def _expected(built: RunComponents, drafter: SamplingClient, settings: EvaluationSettings) -> float:
    """The mean of 1 - TVD over the tokens of the teacher's own answers."""
    batch = RolloutBatch(
        settings.prompts, settings.samples, settings.seed, step=1, stream="evaluation"
    )
    teacher, params = built.parts.teacher, settings.sampling
    rollouts = sample_teacher_rollouts(batch, teacher, built.parts.renderer, params)
    assert rollouts is not None, "a teacher with a voice can answer"
    asked = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    pairs = zip(drafter.score(asked, Full()), teacher.score(rollouts, Full()), strict=True)
    found = [
        expected_acceptance(_logprobs(own, params), _logprobs(other, params))
        for own, other in pairs
    ]
    return torch.cat(found).double().mean().item()
