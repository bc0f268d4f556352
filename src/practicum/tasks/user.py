"""Any task with a user who replies: a wrong answer is corrected, and the student tries again.

After the first answer the user may ask more questions, such as a teacher's probes (2603.19266). The
bonus rewards a student that is right before and after them. Otherwise only the last answer is
rewarded. The reply to the last answer is not a turn: the note of the kind `next_state` shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.plugins import Plugin, build_part
from practicum.errors import DataError
from practicum.ports import (
    Episode,
    Observation,
    Task,
    TaskConfig,
    TaskContext,
)
from practicum.text.placeholders import fill_placeholders, list_placeholders
from practicum.types import Message, Prompt, Rollout

FIELDS = ("question", "answer", "attempt", "feedback")
"""The placeholders of a reply; a question may show the prompt's privileged fields as well."""


class Config(TaskConfig):
    """The inner task, the number of answers, and the user's words."""

    type: Literal["user"] = "user"
    task: Plugin("tasks", TaskConfig) = Field(description="the task that gets a user")  # type: ignore[valid-type]
    tries: int = Field(default=1, ge=1, description="answers, until one is right")
    right: str = Field(default="Thanks, that is right.", description="the reply to a right answer")
    wrong: str = Field(
        default="No, that is not right. {feedback}",
        description="the reply to a wrong answer, with {question}, {answer} (the right one), "
        "{attempt} and {feedback} (of the inner task)",
    )

    asks: tuple[str, ...] = Field(
        default=(),
        description="questions after the first answer, each a turn, with {question}, {attempt} and "
        "the privileged fields of the row; one with a missing field is left out",
    )
    lines: bool = Field(
        default=False, description="with `asks`: each line of a question is a separate turn"
    )
    bonus: float = Field(
        default=0.0,
        ge=0,
        description="with `asks`: weight of being right at first and at last, added to the reward of "
        "the last answer; the sum is at most 1",
    )

    @model_validator(mode="after")
    def _check_replies(self) -> "Config":
        for text in (self.right, self.wrong):
            unknown = [name for name in list_placeholders(text) if name not in FIELDS]
            if unknown:
                raise ValueError(f"no field {{{unknown[0]}}}; it can have {', '.join(FIELDS)}")
        return self


@dataclass(frozen=True, slots=True)
class UserTask(Task):
    """A task with a user."""

    config: Config
    task: Task

    @property
    def letters(self) -> str:
        """The letters of the inner task and of the replies."""
        texts = (self.config.right, self.config.wrong, *self.config.asks)
        return "".join(sorted(set(self.task.letters).union(*texts)))

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the inner task's training prompts."""
        return self.task.train_prompts()

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the inner task's held-out prompts."""
        return self.task.heldout_prompts()

    def reward(self, rollout: Rollout) -> float | None:
        """Return the inner task's reward of the last answer, with the first answer's bonus."""
        first, last = (self.task.reward(_keep_reply(rollout, place)) for place in (0, -1))
        bonus = self.config.bonus
        if last is None or first is None or not bonus:
            return last
        return (last + bonus * min(first, last)) / (1 + bonus)

    def feedback(self, rollout: Rollout) -> str | None:
        """Return the inner task's feedback on the last answer."""
        return self.task.feedback(_keep_reply(rollout, -1))

    def open(self, prompt: Prompt, seed: int) -> "UserEpisode":
        """Wait for the first answer."""
        return UserEpisode(self, prompt)

    def reply(self, prompt: Prompt, attempt: str) -> tuple[str, bool]:
        """Return the user's words about an answer, and whether it is right."""
        rollout = Rollout.from_text(prompt, attempt)
        is_right = (self.task.reward(rollout) or 0.0) >= 1.0
        fields = {
            "question": prompt.question,
            "answer": prompt.answer or "",
            "attempt": attempt.strip(),
            "feedback": self.task.feedback(rollout) or "",
        }
        text = self.config.right if is_right else self.config.wrong
        return fill_placeholders(text, fields).strip(), is_right

    def list_questions(self, prompt: Prompt, attempt: str) -> list[str]:
        """Return the questions after the first answer."""
        fields = {**prompt.privileged, "question": prompt.question, "attempt": attempt.strip()}
        questions = [
            fill_placeholders(text, fields)
            for text in self.config.asks
            if fields.keys() >= set(list_placeholders(text))
        ]
        if not self.config.lines:
            return questions
        return [line for text in questions for line in text.splitlines() if line.strip()]


@dataclass(slots=True)
class UserEpisode(Episode):
    """A conversation with the user; see `practicum.ports.Episode`."""

    task: UserTask
    prompt: Prompt
    answers: int = 0
    questions: list[str] | None = None

    def step(self, turn: str) -> Observation:
        """Ask or reply; the last reply is a note, because the student never reads it."""
        if self.questions is None:
            self.questions = self.task.list_questions(self.prompt, turn)
        if self.questions:
            return Observation(Message("user", self.questions.pop(0)))
        self.answers += 1
        # Nothing is drawn: the same answer gets the same reply for every seed.
        text, is_right = self.task.reply(self.prompt, turn)
        if is_right or self.answers == self.task.config.tries:
            return Observation(None, notes={"next_state": text})
        return Observation(Message("user", text))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _keep_reply(rollout: Rollout, place: int) -> Rollout:
    """Return a conversation's rollout with only one of the student's turns as text."""
    return replace(rollout, text=rollout.replies[place], turns=())


def build(config: Config, context: TaskContext) -> Task:
    """Build the inner task; DataError if it already replies to answers."""
    task = build_part("tasks", Task, config.task, context)
    if task.converses:
        raise DataError(
            f"task.task: {config.task.type!r} already replies to its answers; use it without the "
            "user, or choose a task with single answers"
        )
    return UserTask(config, task)
