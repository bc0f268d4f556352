"""Cut an answer at its first rejected step and regenerate the rest (OVD 2601.21968).

Another model or the student writes the rest. The answer keeps its tokens up to the first rejected
step, and its authors record the writer of the remaining tokens. An answer depends on (seed, step,
prompt, number) and on the judge's verdicts about it, never on other answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from practicum.errors import CapabilityError
from practicum.ports import PromptedClient, SamplingClient, Teacher, TeacherRequest
from practicum.ports.scoring import Scorer
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey, call_by_group
from practicum.rollouts.sampling import RolloutSampler, compute_key_seed
from practicum.rollouts.source import Form, OtherWriter, SourceConfig, SourceParts
from practicum.types import FAILURES, Metrics, Rollout, Sample, SampleRequest

NOTE = "replaced"
"""The note with the writer that regenerated the answer's end; `no` if the answer was accepted."""

REFUSED = "refused"
"""The value of the note if the writer failed to regenerate a rejected answer."""


class Config(SourceConfig):
    """The student answers; `writer` rewrites what the recipe's `scorer` rejects (OVD 2601.21968).

    The tokens before the first rejected step are kept; a rejected answer without steps is replaced
    completely. Each new end is judged again, and an answer is rewritten at most `tries` times.
    """

    type: Literal["replace"] = "replace"
    form: ClassVar[Form] = "answers"
    guide_rejects: ClassVar[bool] = True
    guide_example: ClassVar[str] = "judge, min_grade: 5, teacher: ..."
    scorer: str
    writer: Literal["teacher", "reference", "student"] = "teacher"
    tries: int = Field(default=1, ge=1)

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the model that rewrites, if it is not the student."""
        return () if self.writer == "student" else (self.writer,)

    @property
    def guide(self) -> str | None:
        """Return the scorer."""
        return self.scorer

    def count_teacher_answers(self, n: int) -> float:
        """Return the maximum number of the teacher's answers."""
        return n * self.tries if self.writer == "teacher" else 0

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the student's answers, with their rejected parts regenerated."""
        writers = parts.writers
        scorer = writers.scorers[self.scorer]
        if not scorer.rejects:
            raise CapabilityError(
                f"rollout.source: replace(scorer={self.scorer}): this scorer rejects no answers; "
                "use a scorer that rejects, such as {type: judge, min_grade: 5, ...}"
            )
        models = {"teacher": writers.teacher, "reference": writers.reference}
        return StepReplacer(
            self, parts.sampler, scorer, writers.student, models.get(self.writer)
        ).collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of regenerated answers and the share of failed regenerations.

        Empty if no source replaces answers.
        """
        noted = [rollout.notes[NOTE] for rollout in rollouts if NOTE in rollout.notes]
        if not noted:
            return {}
        refused = sum(note == REFUSED for note in noted)
        again = len(noted) - refused - noted.count("no")
        return {"replaced": again / len(noted), "replaced_refused": refused / len(noted)}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected answer: its row, its key, the answer, and the number of tokens to keep.

    `client` continues from the kept tokens. Without a client the writer answers the prompt from the
    beginning, and no token is kept.
    """

    row: int
    key: RolloutKey
    rollout: Rollout
    cut: int
    client: PromptedClient | None


@dataclass(frozen=True, slots=True)
class StepReplacer:
    """Samples the student and regenerates rejected parts, with a `writer` other than the student if set."""

    source: Config
    sampler: RolloutSampler
    scorer: Scorer
    student: SamplingClient
    writer: Teacher | None = None

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key; rejected parts are regenerated up to `tries` times."""
        rollouts = self.sampler.sample_student(keys, self.student)
        rollouts = [replace(rollout, notes={NOTE: "no"}) for rollout in rollouts]
        rows = list(range(len(keys)))
        for number in range(self.source.tries):
            cuts = self.scorer.count_accepted([rollouts[row] for row in rows])
            rejections = [
                self._reject(row, keys[row], rollouts[row], cut)
                for row, cut in zip(rows, cuts, strict=True)
                if cut is not None
            ]
            if not rejections:
                break
            for rejection, sample in zip(rejections, self._write(rejections, number), strict=True):
                rollouts[rejection.row] = self._rebuild(rejection, sample)
            rows = [rejection.row for rejection in rejections]
        return rollouts

    def _reject(self, row: int, key: RolloutKey, rollout: Rollout, cut: int) -> Rejection:
        """Return a rejection with the client that continues from the accepted tokens."""
        if self.source.writer == "student":
            client = PromptedClient(self.student, rollout.prompt_tokens)
            return Rejection(row, key, rollout, cut, client)
        assert self.writer is not None, "a recipe without this writer is refused when it is read"
        client = self.writer.bind_prompt(key.prompt) if cut else None
        # A writer that answers messages cannot continue from the middle of an answer.
        if client is None or not client.accepts_tokens:
            return Rejection(row, key, rollout, 0, None)
        return Rejection(row, key, rollout, cut, client)

    def _write(self, rejections: Sequence[Rejection], number: int) -> list[Sample]:
        """Sample a new end for each rejected answer, in try `number`."""
        stream = f"replace-{number}"
        seeds = [
            compute_key_seed(self.sampler.batch, stream, rejection.key) for rejection in rejections
        ]
        rooms = [self.sampler.params.max_new_tokens - rejection.cut for rejection in rejections]

        def sample(rows: list[int]) -> Sequence[Sample]:
            prompted = rejections[rows[0]].client
            if prompted is None:
                keys = [rejections[row].key for row in rows]
                return self._write_full_answers(keys, [seeds[row] for row in rows])
            params = replace(self.sampler.params, max_new_tokens=rooms[rows[0]])
            return prompted.client.sample([request(row) for row in rows], params)

        def request(row: int) -> SampleRequest:
            rejection = rejections[row]
            assert rejection.client is not None, (
                "rows without a client are sampled in a separate call"
            )
            accepted = rejection.rollout.tokens[: rejection.cut].tolist()
            return SampleRequest((*rejection.client.prompt_tokens, *accepted), seeds[row])

        groups = [
            (None, 0) if rejection.client is None else (id(rejection.client.client), room)
            for rejection, room in zip(rejections, rooms, strict=True)
        ]
        return call_by_group(groups, sample)

    def _write_full_answers(self, keys: Sequence[RolloutKey], seeds: Sequence[int]) -> list[Sample]:
        """Return complete answers of the writer."""
        assert self.writer is not None, "the student continues from its own tokens"
        requests = [TeacherRequest(key.prompt, seed) for key, seed in zip(keys, seeds, strict=True)]
        samples = self.writer.sample(requests, self.sampler.params)
        if samples is None:
            who = "the reference" if self.source.writer == "reference" else "this teacher"
            raise CapabilityError(self.source.explain_no_generation(who))
        return samples

    def _rebuild(self, rejection: Rejection, end: Sample) -> Rollout:
        """Return the answer with its new end; if the writer failed, the old answer with a note."""
        rollout, by = rejection.rollout, self.source.writer
        if end.stop_reason in FAILURES:
            return replace(rollout, notes={NOTE: REFUSED})
        version = self.sampler.batch.policy_version
        accepted = Tokens.from_rollout(rollout).cut(0, rejection.cut)
        answer = accepted + Tokens.from_sample(end, by, version)
        (rebuilt,) = self.sampler.build_rollouts(
            [rejection.key],
            [rollout.prompt_tokens],
            [answer.to_sample(end.stop_reason)],
            "student",
        )
        # An answer with two authors counts as the student's, which visited the states it comes from.
        source = by if answer.is_by(by).all() else "student"
        return replace(answer.put_into(rebuilt, source), notes={NOTE: by})
