"""Continue a failed answer after the teacher's token at the place where the models differ most.

The rule is TISD's (arXiv 2609.30878) as released (taeckyung/TISD, `_build_tisd_batch` in
verl/trainer/ppo/ray_trainer.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from practicum import functional as F
from practicum.errors import CapabilityError
from practicum.losses import read_tokens
from practicum.losses.passes import build_score_requests
from practicum.objective import Full
from practicum.ports.gate import ask_reward
from practicum.ports.notes import NoteMoment
from practicum.rollouts.annotating import add_notes, set_note
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey, call_by_group
from practicum.rollouts.fields import classify_outcome
from practicum.rollouts.sampling import compute_key_seed
from practicum.rollouts.source import Form, SourceConfig, SourceParts
from practicum.types import FAILURES, Metrics, Rollout, Sample, SampleRequest, TeacherSignal

NOTE = "branched"
"""The note with the place of the teacher's token; `no` if the answer was kept."""


class Config(SourceConfig):
    """A failed answer is cut where the teacher differs most, and continues after its token (TISD).

    The place has the largest KL(S || T), and the token is the teacher's most likely one. The student
    writes the rest, with its own prompt (2609.30878). The answer keeps its reward and its notes, so
    the teacher's context stays the same. Answers without a teacher's signal are kept, as are correct
    ones.
    """

    type: Literal["branch"] = "branch"
    form: ClassVar[Form] = "answers"

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return one answer for each key; failed answers have a new end."""
        writers = parts.writers
        assert writers.task is not None
        for who, client in (("teacher", writers.teacher), ("student", writers.student)):
            if "full" not in client.capabilities.signals:
                raise CapabilityError(
                    f"rollout.source: branch compares full distributions, which the {who} does not "
                    "give; use local models, or set source: student"
                )
        answers = [
            set_note(ask_reward(writers.task, answer), NOTE, "no")
            for answer in parts.sample_student(keys)
        ]
        # A context can show other answers to the prompt, so the teacher reads all of them.
        moment = NoteMoment(parts.sampler.batch.step, writers.student)
        answers = add_notes(answers, writers.notes, moment)
        signals = zip(
            writers.student.score(build_score_requests(answers, reuse=True), Full()),
            writers.teacher.score(answers, Full()),
            strict=True,
        )
        branches = [
            find_branch(row, answer, student, teacher)
            for row, (answer, (student, teacher)) in enumerate(zip(answers, signals, strict=True))
            if classify_outcome(answer) == "incorrect" and not teacher.is_empty
        ]
        for branch, end in zip(branches, _write_ends(branches, keys, parts), strict=True):
            if end.stop_reason not in FAILURES:
                answers[branch.row] = _rebuild(branch, end, keys[branch.row], parts)
        return answers

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of answers with a new end; empty if no source branches."""
        marks = [rollout.notes[NOTE] for rollout in rollouts if NOTE in rollout.notes]
        return {"branched": 1 - marks.count("no") / len(marks)} if marks else {}


@dataclass(frozen=True, slots=True)
class Branch:
    """A failed answer, its row, and its tokens up to the teacher's token."""

    row: int
    answer: Rollout
    start: Tokens


@torch.no_grad()
def find_branch(
    row: int, answer: Rollout, student_signal: TeacherSignal, teacher_signal: TeacherSignal
) -> Branch:
    """Return the answer up to the place of the largest divergence, and the teacher's token there."""
    student, teacher = (
        read_tokens(signal, slice(None)).full for signal in (student_signal, teacher_signal)
    )
    assert student is not None and teacher is not None, "full distributions were asked for"
    place = int(F.reverse_kl(student, teacher).argmax())
    token = int(teacher[place].argmax())
    forced = Tokens.from_text([token], "teacher", answer.policy_version, in_loss=True)
    # The ratio of the policies is about the student, as at its own tokens.
    logprob = student[place, token].float().cpu()[None]
    forced = replace(forced, sampling_logprobs=logprob, policy_logprobs=logprob)
    return Branch(row, answer, Tokens.from_rollout(answer).cut(0, place) + forced)


def _write_ends(
    branches: Sequence[Branch], keys: Sequence[RolloutKey], parts: SourceParts
) -> list[Sample]:
    """Return the student's end of each answer; it is empty if the teacher's token is the last."""
    sampler = parts.sampler
    rooms = [
        -1
        if sampler.params.should_stop(branch.start.ids.tolist())
        else sampler.params.max_new_tokens - len(branch.start)
        for branch in branches
    ]

    def write(rows: list[int]) -> Sequence[Sample]:
        room = rooms[rows[0]]
        if room < 1:
            return [Tokens.empty().to_sample("length" if room == 0 else "stop") for _ in rows]
        requests = [
            SampleRequest(
                (*branch.answer.prompt_tokens, *branch.start.ids.tolist()),
                compute_key_seed(sampler.batch, NOTE, keys[branch.row]),
            )
            for branch in (branches[row] for row in rows)
        ]
        return parts.writers.student.sample(requests, replace(sampler.params, max_new_tokens=room))

    return call_by_group(rooms, write)


def _rebuild(branch: Branch, end: Sample, key: RolloutKey, parts: SourceParts) -> Rollout:
    """Return the answer with its new end, and with its old reward and notes."""
    version, answer = parts.sampler.batch.policy_version, branch.answer
    tokens = branch.start + Tokens.from_sample(end, "student", version)
    (rebuilt,) = parts.sampler.build_rollouts(
        [key], [answer.prompt_tokens], [tokens.to_sample(end.stop_reason)], "student"
    )
    rebuilt = replace(rebuilt, reward=answer.reward, notes=answer.notes, rejected=answer.rejected)
    return set_note(tokens.put_into(rebuilt, "student"), NOTE, str(len(branch.start) - 1))
