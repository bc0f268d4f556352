"""The published methods that a teacher and a task allow, and the price of a teacher's answers.

The requirements of a method are read from its packaged recipe: the signals that its terms need, the
writers of its answers, and whether it learns from a reward. A new recipe is therefore listed
without a change here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from practicum.objective import VERIFIER, Capabilities
from practicum.ports import (
    walk,
)
from practicum.recipe import Recipe, find_capability_problems, list_recipe_names, load_recipe
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import format_number
from practicum.types import Prompt

PREFIX = "papers/"

SHOWN_METHODS = 8
"""The number of names per line of methods in a terminal; the page lists all."""

NO_VERIFIER = "learns from a verifier's reward, and this task has no verifier"
NO_WRITER = "learns from the teacher's answers, and this teacher writes no answers"
NO_JUDGE = "asks the teacher to grade in words, and this teacher writes nothing"
NO_ANSWERS = "learns from the task's own answers, and some prompt has no answer"
NO_TURNS = "does not write turn by turn, as this task asks"


@dataclass(frozen=True, slots=True)
class Money:
    """The price of a teacher's answers, estimated from the doctor's answers, and its budget.

    `answers` counts the answers of the whole run. `budget` is None without a limit.
    """

    per_answer: float
    answers: int
    budget: float | None

    def describe(self) -> str:
        """Return the sentence shown on the page."""
        total = self.per_answer * self.answers
        text = (
            f"an answer of the teacher costs about {format_number(self.per_answer)}, and the run "
            f"asks for {self.answers}: about {format_number(total)} in all"
        )
        if self.budget is None:
            return f"{text}; without teacher.budget nothing stops it"
        enough = int(self.budget / self.per_answer) if self.per_answer else self.answers
        if enough >= self.answers:
            return f"{text}, within teacher.budget, {format_number(self.budget)}"
        return (
            f"{text}; teacher.budget, {format_number(self.budget)}, pays for about {enough} of them"
        )


@dataclass(frozen=True, slots=True)
class AllowedMethods:
    """The published methods, grouped by whether the teacher and the task allow them.

    Methods in `without_teacher` send no request to the teacher. `refused` maps each reason to the
    names of the methods that it rules out.
    """

    signals: tuple[str, ...]
    writes: bool
    has_verifier: bool | None
    with_teacher: tuple[str, ...]
    without_teacher: tuple[str, ...]
    refused: Mapping[str, Sequence[str]]
    money: Money | None = None

    def render_lines(self, most: int | None = None) -> list[str]:
        """Return the sentences of the page; a terminal shows at most `most` names per sentence."""
        gives = [*self.signals, *(["text"] if self.writes else [])]
        verifier = {True: "a verifier", False: "no verifier", None: "a task with a verifier"}
        lines = [
            f"the teacher gives {', '.join(gives) or 'nothing'}; with {verifier[self.has_verifier]}, "
            f"{len(self.with_teacher)} of the published methods that ask a teacher can run: "
            f"{_join(self.with_teacher, most)}",
            f"{len(self.without_teacher)} run without one: {_join(self.without_teacher, most)}",
        ]
        lines += [
            f"{len(names)} cannot: each {reason}: {_join(names, most)}"
            for reason, names in self.refused.items()
        ]
        return [*lines, *([self.money.describe()] if self.money else [])]

    def to_json(self) -> dict[str, Any]:
        """Return the methods as JSON data, including the lines of the page."""
        return {
            "signals": list(self.signals),
            "writes": self.writes,
            "has_verifier": self.has_verifier,
            "with_teacher": list(self.with_teacher),
            "without_teacher": list(self.without_teacher),
            "refused": {reason: list(names) for reason, names in self.refused.items()},
            "money": self.money and asdict(self.money),
            "lines": self.render_lines(),
        }


def _join(names: Sequence[str], most: int | None) -> str:
    listed = ", ".join(names[:most]) or "none"
    hidden = 0 if most is None else max(len(names) - most, 0)
    return f"{listed} and {hidden} more" if hidden else listed


@dataclass(frozen=True, slots=True)
class _Needs:
    """The demands of a published method, by its recipe."""

    name: str
    recipe: Recipe

    @property
    def asks_teacher(self) -> bool:
        """True if the teacher scores, writes or judges."""
        is_asked = self.recipe.objective.signal is not None or "teacher" in self._writers
        return is_asked or self._has_judge

    @property
    def _has_judge(self) -> bool:
        return any(config.members() for config in self.recipe.scorers.values())

    @property
    def needs_verifier(self) -> bool:
        readers = {name for name, config in self.recipe.scorers.items() if config.reads_verifier}
        return any(
            term.scorer in {VERIFIER, *readers}
            and (term.learns_from_reward or term.filter != "all")
            for term in self.recipe.objective.losses
        )

    @property
    def _writers(self) -> Sequence[str]:
        return self.recipe.rollout.source.other_writers

    def explain_refusal(
        self,
        capabilities: Capabilities,
        has_verifier: bool | None,
        prompts: Sequence[Prompt],
        is_conversation: bool,
    ) -> str | None:
        """Return the first reason why the method cannot run, or None."""
        for term in self.recipe.objective.losses:
            question = term.signal.question
            if question is None or not term.needs_teacher:
                continue
            if question.type not in capabilities.signals:
                return f"needs the teacher's signal {question.type!r}"
            if find_capability_problems(self.recipe.objective, capabilities, ""):
                return "needs more than the teacher returns: other candidates, more candidates, or raw logits"
        if "teacher" in self._writers and not capabilities.writes:
            return NO_WRITER
        if self._has_judge and not capabilities.writes:
            return NO_JUDGE
        if self.needs_verifier and has_verifier is False:
            return NO_VERIFIER
        if "dataset" in self._writers and not all(map(_has_answer, prompts)):
            return NO_ANSWERS
        source = self.recipe.rollout.source
        if is_conversation and source.explain_form(is_conversation=True):
            return NO_TURNS
        return None


@cache
def _read_needs() -> tuple[_Needs, ...]:
    names = [name for name in list_recipe_names() if name.startswith(PREFIX)]
    published = [_Needs(name.removeprefix(PREFIX), load_recipe(name)) for name in names]
    # Methods that only need a text or a score come first, because short lists are cut after a few
    # names.
    return tuple(sorted(published, key=lambda needs: needs.recipe.objective.signal is not None))


def _has_answer(prompt: Prompt) -> bool:
    return prompt.response is not None or prompt.answer is not None


def find_allowed_methods(
    capabilities: Capabilities,
    has_verifier: bool | None = None,
    prompts: Sequence[Prompt] = (),
    is_conversation: bool = False,
    money: Money | None = None,
) -> AllowedMethods:
    """Sort the published methods by whether a teacher of these capabilities allows them.

    Without a task, the function assumes a verifier.
    """
    refused: dict[str, list[str]] = {}
    runs: list[_Needs] = []
    for needs in _read_needs():
        reason = needs.explain_refusal(capabilities, has_verifier, prompts, is_conversation)
        if reason is None:
            runs.append(needs)
        else:
            refused.setdefault(reason, []).append(needs.name)
    return AllowedMethods(
        tuple(sorted(capabilities.signals)),
        capabilities.writes,
        has_verifier,
        tuple(needs.name for needs in runs if needs.asks_teacher),
        tuple(needs.name for needs in runs if not needs.asks_teacher),
        refused,
        money,
    )


def diagnose_methods(evidence: Evidence) -> AllowedMethods:
    """Return the methods that the teacher and the task of a recipe allow."""
    rewards = [rollout.reward for rollout in evidence.rollouts]
    capabilities = evidence.teacher.capabilities
    if any(config.members() for config in evidence.recipe.scorers.values()):
        # The only teacher of a recipe may be its judge, and a model that judges can write.
        capabilities = replace(capabilities, writes=True)
    return find_allowed_methods(
        capabilities,
        any(reward is not None for reward in rewards),
        evidence.prompts,
        evidence.components.parts.task.converses,
        _estimate_money(evidence),
    )


def _estimate_money(evidence: Evidence) -> Money | None:
    """Return the price of the run's answers, None if the teacher charges nothing."""
    # The student's token counts approximate the server's, which only its bill shows. Without a
    # verifier, the student's answers replace the teacher's.
    answers = evidence.answers or evidence.rollouts
    input_tokens = sum(len(answer.prompt_tokens) for answer in answers) / len(answers)
    output_tokens = sum(len(answer.tokens) for answer in answers) / len(answers)
    prices = {
        config: price
        for _, config in walk(evidence.recipe.teacher)
        if (price := config.estimate_money(input_tokens, output_tokens)) is not None
    }
    if not prices:
        return None
    charged, price = next(iter(prices.items()))
    recipe = evidence.recipe
    per_prompt = recipe.rollout.source.count_teacher_answers(recipe.rollout.n)
    count = round(per_prompt * recipe.train.prompts_per_step * recipe.train.steps)
    return Money(price, count, charged.money_limit)
