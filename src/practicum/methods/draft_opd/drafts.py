"""The target's text, and replays of the drafter's errors (Draft-OPD, arXiv 2605.29343).

The target writes the text together with the drafter, so the text has the target's distribution and
no state of it is the drafter's own. A replay begins where a draft was rejected, and follows the
drafter's remaining drafts; the target scores these states too (bingyang-lei/Draft-OPD,
verl/verl/models/transformers/eagle3_student.py).
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from practicum.errors import CapabilityError
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.drafts import is_replay
from practicum.rollouts.sampling import compute_key_seed
from practicum.rollouts.source import Form, SourceConfig, SourceParts
from practicum.types import DraftRound, Metrics, Rollout


class Config(SourceConfig):
    """The target's text, with up to `errors` replays of rejected drafts per text (2605.29343).

    The author of the text is the teacher, and the author of the replays is the student. A replay
    has a loss after its rejected draft: the text itself has the states up to it.
    """

    type: Literal["drafts"] = "drafts"
    form: ClassVar[Form] = "answers"
    errors: int = Field(default=4, ge=0)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the texts, then the replays; CapabilityError if the student is no drafter."""
        texts = parts.sample_student(keys)
        if not any(text.rounds for text in texts) and any(len(text.tokens) > 1 for text in texts):
            raise CapabilityError(
                "rollout.source: drafts replays the errors of a drafter, and the student is none; "
                "set student.drafter, or source: student"
            )
        # The number distinguishes the rollouts of a prompt.
        numbers = Counter(key.prompt.id for key in keys)
        replays = []
        for key, text in zip(keys, texts, strict=True):
            draw = random.Random(compute_key_seed(parts.sampler.batch, "drafts", key))
            errors = find_errors(text)
            for part in draw.sample(errors, min(self.errors, len(errors))):
                replays.append(replace(_replay(text, part), sample=numbers[key.prompt.id]))
                numbers[key.prompt.id] += 1
        return [*(replace(text, source="teacher") for text in texts), *replays]

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of the supervised tokens that are in replays."""
        total = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
        replays = filter(is_replay, rollouts)
        count = sum(int(rollout.loss_mask.sum()) for rollout in replays)
        return {"drafts/replay_share": count / total if total else 0.0}


def find_errors(text: Rollout) -> list[DraftRound]:
    """Return the rounds in which a draft was rejected and further drafts followed it.

    In a round that the end of the text cut off, all examined drafts were accepted.
    """
    return [
        part
        for part in text.rounds
        if part.accepted + 1 < len(part.drafts) and part.start + part.accepted < len(text.tokens)
    ]


def _replay(text: Rollout, part: DraftRound) -> Rollout:
    """Return the text up to a round, and all of its drafts; the loss begins after the rejected one."""
    tokens = torch.cat([text.tokens[: part.start], torch.tensor(part.drafts)])
    count = len(tokens)
    return replace(
        text,
        tokens=tokens,
        loss_mask=torch.arange(count) > part.start + part.accepted,
        sampling_logprobs=torch.zeros(count),
        policy_logprobs=torch.full((count,), torch.nan),
        stop_reason="length",
        text="",
        states=None,
        rounds=(part,),
    )
