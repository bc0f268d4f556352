"""A note that a model writes from a template: a hint, a critique, a lesson, or a run's experience.

The writer is the student, the recipe's teacher or reference, or any other teacher that writes. A
text depends on (seed, step, prompt, number) and on the text that the template shows. Model output
is data: it is truncated, and control tokens in it stay text.

With `unit: run` there is one text, the experience. For each answer, the writer reads the
experience and the answer, and rewrites the experience (OEL 2603.16856).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.core.randomness import compute_seeds
from practicum.errors import CapabilityError
from practicum.losses.passes import build_score_requests
from practicum.losses.signal_reader import select_top_tokens
from practicum.objective import TopK
from practicum.ports import (
    Capabilities,
    SamplingClient,
    Task,
    Teacher,
    TeacherConfig,
    TeacherRequest,
)
from practicum.ports.gate import ask_reward
from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.rollouts.annotating import set_note
from practicum.rollouts.fields import (
    classify_outcome,
    list_prompt_fields,
    list_rollout_fields,
)
from practicum.statistics import group_pairs
from practicum.text import Renderer
from practicum.text.placeholders import fill_placeholders, list_placeholders
from practicum.types import (
    FAILURES,
    Datum,
    Message,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
)


class Config(NoteConfig):
    """The request, the writer, and the selection of answers to write about."""

    type: Literal["written"] = "written"
    template: str | tuple[str, ...] = Field(
        min_length=1,
        description="the request, or a list: the first template with no missing field is used. "
        "Placeholders: all placeholders of a privileged teacher, earlier notes, {transcript} (the "
        "conversation), {attempts} (all answers to the prompt), and with `unit: run` the note's "
        "name (its current text)",
    )
    author: Literal["student", "teacher", "reference"] = Field(
        default="student", description="the writer; the student writes with its newest weights"
    )
    writer: Plugin("teachers", TeacherConfig) | None = Field(  # type: ignore[valid-type]
        default=None, description="a separate writer: any teacher that writes"
    )
    filter: Literal["all", "correct", "incorrect"] = Field(
        default="all", description="answers to write about, by the verifier's reward"
    )
    unit: Literal["answer", "prompt", "run"] = Field(
        default="answer",
        description="one text per answer, one per prompt, or one per run, which every answer "
        "updates",
    )
    max_new_tokens: int = Field(
        default=64,
        ge=1,
        description="maximum length of a text in tokens; with `right` also of the teacher's answer",
    )
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    drafts: int = Field(default=1, ge=1, description="drafts to write; one becomes the note")
    choose: Literal["longest", "overlap", "right"] = Field(
        default="longest",
        description="selection among drafts: the longest; `overlap`: the draft that makes the "
        "teacher's most likely tokens agree best with the student's (OpenClaw-RL 2603.10165), ties "
        "to the shortest; `right`: the longest draft with which the teacher answers correctly, or no "
        "note",
    )
    top_tokens: int = Field(
        default=4, ge=1, description="with `overlap`, most likely tokens to compare per position"
    )
    shortest: int = Field(default=1, ge=0, description="minimum characters; discard shorter texts")
    characters: int = Field(
        default=2000, ge=1, description="maximum characters per field; longer fields are truncated"
    )

    @property
    def templates(self) -> tuple[str, ...]:
        """The texts under `template`, in order."""
        return (self.template,) if isinstance(self.template, str) else self.template

    @property
    def role(self) -> str:
        """The writer's role; `writer` if the note configures a separate writer."""
        return self.author if self.writer is None else "writer"

    @property
    def question(self) -> TopK:
        """The top-k signal that drafts are compared by."""
        return TopK(k=self.top_tokens, support="teacher")

    def find_problems(
        self, name: str, notes: Sequence[str], models: Mapping[str, Capabilities]
    ) -> list[str]:
        """Return one line per problem: an unusable template, reader or writer."""
        problems = []
        fields = list_placeholders(" ".join(self.templates))
        later = notes[list(notes).index(name) + 1 :]
        problems += [
            f"notes.{name}.template: {{{field}}} is made later; move that note before this one"
            for field in dict.fromkeys(fields)
            if field in later
        ]
        if (name in fields) != (self.unit == "run"):
            problems.append(
                f"notes.{name}.template: {{{name}}} is the note's current text; use it if and only "
                "if the note has unit: run"
            )
        if self.choose == "overlap":
            refusal = self.question.explain_refusal(models["teacher"])
            if refusal:
                problems.append(
                    f"notes.{name}.choose: overlap compares with the teacher, which {refusal}; set "
                    "choose: longest, or use another teacher"
                )
        if self.choose == "right" and not models["teacher"].writes:
            problems.append(
                f"notes.{name}.choose: right asks the teacher for answers, which writes nothing; "
                "set choose: longest, or use another teacher"
            )
        can = self._find_capabilities(models)
        where = f"notes.{name}.{'author' if self.writer is None else 'writer'}"
        if self.role != "student" and can is None:
            problems.append(
                f"{where}: the recipe has no {self.author}; set author: student, or add a writer"
            )
        elif can is not None and not can.writes:
            problems.append(
                f"{where}: this {self.role} writes nothing; set author: student, or use a writer "
                "such as {type: model, model: ...} or {type: chat_api, ...}"
            )
        return problems

    def follows_student(self, models: Mapping[str, Capabilities]) -> bool:
        """Return True if the writer or reader follows the student, or the note reads earlier steps."""
        capabilities = [self._find_capabilities(models)]
        capabilities += [models["teacher"]] if self.choose != "longest" else []
        follows = any(can is None or can.follows_student for can in capabilities)
        return follows or self.unit == "run"

    def _find_capabilities(self, models: Mapping[str, Capabilities]) -> Capabilities | None:
        """Return the writer's capabilities; None for the student, or without a writer."""
        return models.get(self.author) if self.writer is None else self.writer.capabilities()


@dataclass(slots=True)
class WrittenNote(Note):
    """A note written by a model, see the module documentation.

    Without a `writer` the student writes. The `reader` chooses among drafts.
    """

    config: Config
    renderer: Renderer
    task: Task
    seed: int
    name: str
    writer: Teacher | None = None
    reader: Teacher | None = None
    experience: str | None = None
    """With `unit: run`, the text after the last finished step."""

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the text for each rollout; None if a field is missing or nothing was written."""
        fields = _list_fields(rollouts)
        subjects = {
            row: rollout
            for row, rollout in enumerate(rollouts)
            if self.config.filter in ("all", classify_outcome(rollout))
        }
        write = self._write_in_turn if self.config.unit == "run" else self._write_at_once
        texts = write(subjects, fields, moment)
        if self.config.unit != "prompt":
            return [texts.get(row) for row in range(len(rollouts))]
        # The text for a prompt is about its first answer; all answers to the prompt share it.
        by_prompt = {rollouts[row].prompt.id: text for row, text in texts.items()}
        return [by_prompt.get(rollout.prompt.id) for rollout in rollouts]

    def _write_at_once(
        self,
        rollouts: Mapping[int, Rollout],
        fields: Sequence[Mapping[str, str]],
        moment: NoteMoment,
    ) -> dict[int, str | None]:
        """Return the texts by rollout row."""
        requests: dict[int, str] = {}
        prompts: set[str] = set()
        for row, rollout in rollouts.items():
            request = self._fill(fields[row])
            repeats = self.config.unit == "prompt" and rollout.prompt.id in prompts
            if request is not None and not repeats:
                requests[row] = request
                prompts.add(rollout.prompt.id)
        subjects = [rollouts[row] for row in requests]
        texts = self._write_drafts(subjects, list(requests.values()), moment)
        return dict(zip(requests, texts, strict=True))

    def _write_in_turn(
        self,
        rollouts: Mapping[int, Rollout],
        fields: Sequence[Mapping[str, str]],
        moment: NoteMoment,
    ) -> dict[int, str | None]:
        """Return the experience after each rollout, each written from the previous experience."""
        experience = self.experience
        texts: dict[int, str | None] = {}
        for row, rollout in rollouts.items():
            # A replayed rollout may carry an outdated text, from the step that sampled it.
            newest = {name: text for name, text in fields[row].items() if name != self.name}
            if experience is not None:
                newest[self.name] = experience
            request = self._fill(newest)
            if request is not None:
                [texts[row]] = self._write_drafts([rollout], [request], moment)
                experience = texts[row] or experience
        return texts

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Keep the newest text if the note has `unit: run`."""
        if self.config.unit == "run":
            texts = [datum.rollout.notes.get(self.name) for datum in data]
            self.experience = next(filter(None, reversed(texts)), self.experience)

    def save_state(self) -> dict[str, Tensor]:
        """Return the experience as bytes, the form in which a checkpoint holds tensors."""
        if self.experience is None:
            return {}
        content = bytearray(self.experience.encode())
        return {"experience": torch.frombuffer(content, dtype=torch.uint8)}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved experience."""
        if "experience" in tensors:
            self.experience = bytes(tensors["experience"].tolist()).decode()

    def _fill(self, fields: Mapping[str, str]) -> str | None:
        """Fill in the first template that has all of its fields; None if every template lacks one."""
        for template in self.config.templates:
            if fields.keys() >= set(list_placeholders(template)):
                limit = self.config.characters
                return fill_placeholders(template, {n: text[:limit] for n, text in fields.items()})
        return None

    def _write_drafts(
        self, subjects: Sequence[Rollout], requests: Sequence[str], moment: NoteMoment
    ) -> list[str | None]:
        """Write drafts about each rollout and return the chosen draft; None if none was written."""
        keys = [
            (self.seed, "note", moment.step, rollout.prompt.id, rollout.sample)
            for rollout in subjects
        ]
        drafts = []
        for draft in range(self.config.drafts if subjects else 0):
            seeds = compute_seeds([(*key, draft) if draft else key for key in keys])
            drafts.append(map(self._read, self._sample(subjects, requests, seeds, moment)))
        by_subject = [list(filter(None, texts)) for texts in zip(*drafts, strict=True)]
        if self.config.choose == "overlap":
            by_subject = self._order_by_overlap(subjects, by_subject, moment.student)
        else:
            by_subject = [sorted(texts, key=len, reverse=True) for texts in by_subject]
        if self.config.choose == "right":
            by_subject = self._keep_right(subjects, by_subject)
        return [next(iter(texts), None) for texts in by_subject]

    def _order_by_overlap(
        self,
        rollouts: Sequence[Rollout],
        drafts: Sequence[Sequence[str]],
        student: SamplingClient,
    ) -> list[list[str]]:
        """Sort each rollout's drafts by how well the reader then agrees with the student, best first.

        At each token of the answer, the reader's most likely tokens, given the draft, are compared
        with the student's most likely tokens. Ties are ordered by length, shortest first.
        """
        ordered = [sorted(dict.fromkeys(texts), key=len) for texts in drafts]
        rows = [row for row, texts in enumerate(ordered) if len(texts) > 1]
        if not rows:
            return ordered
        assert self.reader is not None, "a recipe without a teacher is refused when it is read"
        question = self.config.question
        student_signals = student.score(
            build_score_requests([rollouts[row] for row in rows]), question
        )
        pairs = [(place, text) for place, row in enumerate(rows) for text in ordered[row]]
        signals = self.reader.score(
            [set_note(rollouts[rows[place]], self.name, text) for place, text in pairs], question
        )
        shared = {
            (rows[place], text): _count_shared(
                rollouts[rows[place]],
                select_top_tokens(student_signals[place], question.k),
                select_top_tokens(signal, question.k),
            )
            for (place, text), signal in zip(pairs, signals, strict=True)
        }
        for row in rows:
            ordered[row].sort(key=lambda text, row=row: -shared[row, text])
        return ordered

    def _keep_right(
        self, rollouts: Sequence[Rollout], drafts: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """Keep the drafts of each rollout with which the reader answers the prompt correctly.

        The reader sees a draft in the place of the note, and answers greedily.
        """
        pairs = [(row, text) for row, texts in enumerate(drafts) for text in dict.fromkeys(texts)]
        if not pairs:
            return [[] for _ in rollouts]
        assert self.reader is not None, "a recipe without a teacher is refused when it is read"
        prompts = [rollouts[row].prompt for row, _ in pairs]
        requests = [
            TeacherRequest(
                replace(prompt, privileged={**prompt.privileged, self.name: text}), self.seed
            )
            for prompt, (_, text) in zip(prompts, pairs, strict=True)
        ]
        right: list[list[str]] = [[] for _ in rollouts]
        samples = self._ask(self.reader, requests, temperature=0.0)
        for (row, text), prompt, sample in zip(pairs, prompts, samples, strict=True):
            reply = Rollout.from_text(prompt, self._decode(sample))
            is_failed = sample.stop_reason in FAILURES
            if not is_failed and (ask_reward(self.task, reply).reward or 0.0) >= 1.0:
                right[row].append(text)
        return right

    def _ask(
        self, writer: Teacher, requests: Sequence[TeacherRequest], temperature: float
    ) -> list[Sample]:
        """Sample the requests from a teacher; CapabilityError if it cannot write here."""
        params = SamplingParams(
            self.config.max_new_tokens, temperature, stop_ids=self.renderer.stop_ids
        )
        samples = writer.sample(requests, params)
        if samples is None:
            role = "teacher" if writer is self.reader else self.config.role
            raise CapabilityError(
                f"notes.{self.name}: this {role} cannot write here; "
                "set author: student and choose: longest"
            )
        return samples

    def _sample(
        self,
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        seeds: Sequence[int],
        moment: NoteMoment,
    ) -> list[Sample]:
        """Return the writer's reply to each text."""
        messages = [(Message("user", text),) for text in texts]
        if self.writer is None:
            params = SamplingParams(
                self.config.max_new_tokens, self.config.temperature, stop_ids=self.renderer.stop_ids
            )
            prompts = self.renderer.render_all(messages)
            pairs = zip(prompts, seeds, strict=True)
            return moment.student.sample([SampleRequest(*pair) for pair in pairs], params)
        requests = [
            TeacherRequest(replace(rollout.prompt, messages=turns), seed)
            for rollout, turns, seed in zip(rollouts, messages, seeds, strict=True)
        ]
        return self._ask(self.writer, requests, self.config.temperature)

    def _read(self, sample: Sample) -> str | None:
        """Return the text of a sample; None if it failed or is too short to be a note."""
        text = self._decode(sample)
        is_note = sample.stop_reason not in FAILURES and len(text) >= self.config.shortest
        return text if is_note else None

    def _decode(self, sample: Sample) -> str:
        """Return the text of a sample, without control tokens."""
        if sample.text is not None:
            return sample.text.strip()
        special = self.renderer.special_ids
        tokens = [token for token in sample.tokens.tolist() if token not in special]
        return self.renderer.decode(tokens).strip()


def _count_shared(
    rollout: Rollout, student_ids: Int[Tensor, "T K"], reader_ids: Int[Tensor, "t k"]
) -> int:
    """Count the tokens that are among the most likely tokens of both models, over all positions.

    Only positions with a loss count. The count is 0 if a model returned no signal.
    """
    if len(student_ids) != len(reader_ids):
        return 0
    is_shared = (student_ids[:, :, None] == reader_ids[:, None, :]).any(dim=-1)
    return int(is_shared[rollout.loss_mask.cpu()].sum())


def _list_fields(rollouts: Sequence[Rollout]) -> list[dict[str, str]]:
    """Return the placeholder texts by name, for each rollout."""
    groups = group_pairs((rollout.prompt.id, rollout) for rollout in rollouts)
    return [
        {
            **_describe(rollout, groups[rollout.prompt.id]),
            **list_prompt_fields(rollout.prompt),
            **fields,
        }
        for rollout, fields in zip(rollouts, list_rollout_fields(rollouts), strict=True)
    ]


def _describe(rollout: Rollout, group: Sequence[Rollout]) -> dict[str, str]:
    """Return the fields that only a writer needs: the transcript and the group's answers."""
    turns = [(turn.role, turn.text) for turn in rollout.turns] or [("assistant", rollout.text)]
    prompt_turns = [(turn.role, turn.content) for turn in rollout.prompt.messages]
    return {
        "transcript": "\n".join(
            f"{role}: {text.strip()}" for role, text in [*prompt_turns, *turns]
        ),
        "attempts": "\n".join(
            f"{classify_outcome(member)}: {member.text.strip()}" for member in group
        ),
    }


def build(config: Config, context: NoteContext) -> Note:
    """Build the writer, unless it is the student or one of the recipe's models."""
    writer = context.models.get(config.author)
    if config.writer is not None:
        assert context.build_teacher is not None, "only a dry test builds no teachers"
        writer = context.build_teacher(config.writer)
    reader = context.models.get("teacher")
    return WrittenNote(
        config, context.renderer, context.task, context.seed, context.name, writer, reader
    )
