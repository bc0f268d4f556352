"""A model fills a template: a hint, a critique, a probe, a lesson, the experience of a whole run.

The writer is the student itself, the recipe's teacher or reference, or any teacher that writes. A
text depends on (seed, step, prompt, number) and on what the template shows. What a model wrote is
data: it is cut to a length, and control tokens in it stay text.

With `unit: run` there is one text, the experience: answer after answer the writer reads it and the
answer, and writes it anew (OEL 2603.16856).
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
from practicum.losses.signal_reader import select_likeliest
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
    find_successes,
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
    """The request, the writer, and the answers that it is about."""

    type: Literal["written"] = "written"
    template: str | tuple[str, ...] = Field(
        min_length=1,
        description="the request; of several the first whose fields are all there. Placeholders are "
        "those of a privileged teacher, earlier notes, {transcript} (the conversation), "
        "{attempts} (all answers to the prompt), and with `unit: run` the note's own name (its text "
        "so far)",
    )
    author: Literal["student", "teacher", "reference"] = Field(
        default="student", description="the writer; the student writes with its newest weights"
    )
    writer: Plugin("teachers", TeacherConfig) | None = Field(  # type: ignore[valid-type]
        default=None, description="another writer: any teacher that writes"
    )
    filter: Literal["all", "correct", "incorrect"] = Field(
        default="all", description="about these answers only, by the verifier's reward"
    )
    unit: Literal["answer", "prompt", "run"] = Field(
        default="answer",
        description="one text for each answer, one for each prompt, or one for the run, which each "
        "answer updates",
    )
    max_new_tokens: int = Field(
        default=64, ge=1, description="longest text in tokens; with `right` the longest answer too"
    )
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    drafts: int = Field(default=1, ge=1, description="texts to write, one of which is the note")
    choose: Literal["longest", "overlap", "right"] = Field(
        default="longest",
        description="of several drafts the longest; with `overlap` the one with which the teacher's "
        "likeliest tokens are most often the student's (OpenClaw-RL 2603.10165), of equal ones the "
        "shortest; with `right` the longest that the teacher answers rightly, and no note if there "
        "is none",
    )
    likeliest: int = Field(
        default=4, ge=1, description="tokens of each of the two at each position, with `overlap`"
    )
    shortest: int = Field(default=1, ge=0, description="a text of fewer characters is no note")
    characters: int = Field(
        default=2000, ge=1, description="longer texts in the template are cut off"
    )

    @property
    def templates(self) -> tuple[str, ...]:
        """The texts under `template`, in order."""
        return (self.template,) if isinstance(self.template, str) else self.template

    @property
    def role(self) -> str:
        """The writer's role, `writer` for one of its own."""
        return self.author if self.writer is None else "writer"

    @property
    def question(self) -> TopK:
        """The likeliest tokens that a model is asked for, to choose by them."""
        return TopK(k=self.likeliest, support="teacher")

    def members(self) -> dict[str, TeacherConfig]:
        """Return the settings of the writer, if it has its own."""
        return {} if self.writer is None else {"writer": self.writer}

    def find_problems(
        self, name: str, notes: Sequence[str], models: Mapping[str, Capabilities]
    ) -> list[str]:
        """Return a line for a writer that is not there or writes nothing, and for a later note."""
        problems = []
        fields = list_placeholders(" ".join(self.templates))
        later = notes[list(notes).index(name) + 1 :]
        problems += [
            f"notes.{name}.template: {{{field}}} is made later; write that note before this one"
            for field in dict.fromkeys(fields)
            if field in later
        ]
        if (name in fields) != (self.unit == "run"):
            problems.append(
                f"notes.{name}.template: {{{name}}} stands for the text so far, which unit: run has "
                "and shows, and no other"
            )
        if self.choose == "overlap":
            refusal = self.question.explain_refusal(models["teacher"])
            if refusal:
                problems.append(
                    f"notes.{name}.choose: overlap compares with the teacher, which {refusal}; write "
                    "choose: longest, or another teacher"
                )
        if self.choose == "right" and not models["teacher"].writes:
            problems.append(
                f"notes.{name}.choose: right asks the teacher for answers, which writes nothing; "
                "write choose: longest, or another teacher"
            )
        can = self._find_capabilities(models)
        where = f"notes.{name}.{'author' if self.writer is None else 'writer'}"
        if self.role != "student" and can is None:
            problems.append(
                f"{where}: there is no {self.author}; write author: student, or a writer"
            )
        elif can is not None and not can.writes:
            problems.append(
                f"{where}: this {self.role} writes nothing; write author: student, or take a writer "
                "such as {type: model, model: ...} or {type: chat_api, ...}"
            )
        return problems

    def follows_student(self, models: Mapping[str, Capabilities]) -> bool:
        """Return True if who writes or chooses is made of the student, or reads earlier steps."""
        capabilities = [self._find_capabilities(models)]
        capabilities += [models["teacher"]] if self.choose != "longest" else []
        follows = any(can is None or can.follows_student for can in capabilities)
        return follows or self.unit == "run"

    def _find_capabilities(self, models: Mapping[str, Capabilities]) -> Capabilities | None:
        """Return what the writer can do; None for the student, or without a writer."""
        return models.get(self.author) if self.writer is None else self.writer.capabilities()


@dataclass(slots=True)
class WrittenNote(Note):
    """See the module; without a `writer` the student writes. The `reader` chooses among drafts."""

    config: Config
    renderer: Renderer
    task: Task
    seed: int
    name: str
    writer: Teacher | None = None
    reader: Teacher | None = None
    experience: str | None = None
    """For `unit: run` the text after the steps so far."""

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the text of each rollout; None where it lacks a field, or nothing was written."""
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
        # A text for a prompt is about its first answer, and all of the prompt's answers have it.
        by_prompt = {rollouts[row].prompt.id: text for row, text in texts.items()}
        return [by_prompt.get(rollout.prompt.id) for rollout in rollouts]

    def _write_at_once(
        self,
        rollouts: Mapping[int, Rollout],
        fields: Sequence[Mapping[str, str]],
        moment: NoteMoment,
    ) -> dict[int, str | None]:
        """Return the texts by the row of the rollout that each is about."""
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
        """Return the experience after each rollout, written from that before it."""
        experience = self.experience
        texts: dict[int, str | None] = {}
        for row, rollout in rollouts.items():
            # A replayed rollout may bring the text of its own step, which is not the newest.
            newest = {name: text for name, text in fields[row].items() if name != self.name}
            if experience is not None:
                newest[self.name] = experience
            request = self._fill(newest)
            if request is not None:
                [texts[row]] = self._write_drafts([rollout], [request], moment)
                experience = texts[row] or experience
        return texts

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Keep the newest text, if it is of the whole run."""
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
        """Go on from a saved experience."""
        if "experience" in tensors:
            self.experience = bytes(tensors["experience"].tolist()).decode()

    def _fill(self, fields: Mapping[str, str]) -> str | None:
        """Return the first template whose fields are all there, filled in; None if there is none."""
        for template in self.config.templates:
            if fields.keys() >= set(list_placeholders(template)):
                limit = self.config.characters
                return fill_placeholders(template, {n: text[:limit] for n, text in fields.items()})
        return None

    def _write_drafts(
        self, subjects: Sequence[Rollout], requests: Sequence[str], moment: NoteMoment
    ) -> list[str | None]:
        """Return the draft that is kept of a text about each rollout; None where none was written."""
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
        """Return each rollout's drafts, first the one after which the reader agrees most with the student.

        At each token of the answer, the reader's likeliest tokens after a draft are compared with
        the student's own. Drafts that agree equally are ordered by length, the shortest first.
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
                select_likeliest(student_signals[place], question.k),
                select_likeliest(signal, question.k),
            )
            for (place, text), signal in zip(pairs, signals, strict=True)
        }
        for row in rows:
            ordered[row].sort(key=lambda text, row=row: -shared[row, text])
        return ordered

    def _keep_right(
        self, rollouts: Sequence[Rollout], drafts: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """Return those of each rollout's drafts with which the reader answers its prompt rightly.

        The reader sees a draft as it sees the note, and answers greedily.
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
        """Return what a teacher writes; CapabilityError if it cannot write here."""
        params = SamplingParams(
            self.config.max_new_tokens, temperature, stop_ids=self.renderer.stop_ids
        )
        samples = writer.sample(requests, params)
        if samples is None:
            role = "teacher" if writer is self.reader else self.config.role
            raise CapabilityError(
                f"notes.{self.name}: this {role} cannot write here; "
                "write author: student and choose: longest"
            )
        return samples

    def _sample(
        self,
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        seeds: Sequence[int],
        moment: NoteMoment,
    ) -> list[Sample]:
        """Return what the writer writes to each text."""
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
        """Return the words of a sample; None if it failed or is too short to be a note."""
        text = self._decode(sample)
        is_note = sample.stop_reason not in FAILURES and len(text) >= self.config.shortest
        return text if is_note else None

    def _decode(self, sample: Sample) -> str:
        """Return the words of a sample, without control tokens."""
        if sample.text is not None:
            return sample.text.strip()
        special = self.renderer.special_ids
        tokens = [token for token in sample.tokens.tolist() if token not in special]
        return self.renderer.decode(tokens).strip()


def _count_shared(
    rollout: Rollout, student_ids: Int[Tensor, "T K"], reader_ids: Int[Tensor, "t k"]
) -> int:
    """Return how many tokens two models have in common among their likeliest, over all positions.

    Only the positions with a loss count. A model that said nothing shares nothing.
    """
    if len(student_ids) != len(reader_ids):
        return 0
    is_shared = (student_ids[:, :, None] == reader_ids[:, None, :]).any(dim=-1)
    return int(is_shared[rollout.loss_mask.cpu()].sum())


def _list_fields(rollouts: Sequence[Rollout]) -> list[dict[str, str]]:
    """Return the texts of the placeholders by their names, for each rollout."""
    successes = find_successes(rollouts)
    groups = group_pairs((rollout.prompt.id, rollout) for rollout in rollouts)
    return [
        {
            **_describe(rollout, groups[rollout.prompt.id]),
            **list_prompt_fields(rollout.prompt),
            **list_rollout_fields(rollout, successes),
        }
        for rollout in rollouts
    ]


def _describe(rollout: Rollout, group: Sequence[Rollout]) -> dict[str, str]:
    """Return the texts that only a writer needs: the transcript, and the group's answers."""
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
