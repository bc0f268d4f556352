"""The usual task: prompts with an answer each, and a function that compares a reply with it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator

from practicum.grading.verifiers import compare_exactly
from practicum.ports import Task
from practicum.types import Prompt, Rollout


@dataclass(frozen=True)
class PromptSet(Task):
    """Prompts to train on and held-out prompts.

    `verify(reply, answer)` returns the reward of a reply, 0 to 1. `grade(reply, prompt)`, if there
    is one, takes its place: it knows the whole prompt, and also grades prompts without an answer.
    `explain(reply, answer)` says in words what the verifier thinks of a reply. All three read the
    text after the model's thoughts; with `reads_thoughts`, `grade` reads the thoughts too.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    verify: Callable[[str, str], float] = compare_exactly
    grade: Callable[[str, Prompt], float | None] | None = None
    explain: Callable[[str, str], str] | None = None
    reads_thoughts: bool = False

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on."""
        return self.train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out prompts."""
        return self.heldout

    def reward(self, rollout: Rollout) -> float | None:
        """Return the verifier's reward of the text, or None if it compares with a missing answer."""
        if self.grade is not None:
            reply = rollout.text if self.reads_thoughts else rollout.answer
            return self.grade(reply, rollout.prompt)
        answer = rollout.prompt.answer
        return None if answer is None else self.verify(rollout.answer, answer)

    def feedback(self, rollout: Rollout) -> str | None:
        """Return the verifier's words about the text, if it has any and there is an answer."""
        answer = rollout.prompt.answer
        if self.explain is None or answer is None:
            return None
        return self.explain(rollout.answer, answer)


def keep_answer(rollout: Rollout) -> Rollout:
    """Return the rollout with only its last turn if that turn is an answer, else an empty one."""
    last = rollout.turns[-1] if rollout.turns else None
    if last is None:
        return rollout
    answers = last.role == "assistant" and not last.calls
    return replace(rollout, text=last.text if answers else "", turns=())


def leave_out_calls(rollout: Rollout) -> Rollout:
    """Return the rollout without the turns that call tools and without the tools' results."""
    turns = tuple(turn for turn in rollout.turns if turn.role != "tool" and not turn.calls)
    replies = [turn.text.replace("\n", " ") for turn in turns if turn.role == "assistant"]
    return replace(rollout, text="\n".join(replies), turns=turns)


def _check_tags(tags: tuple[str, str]) -> tuple[str, str]:
    """Return the tags; raise ValueError if one of them contains another."""
    before, after = tags
    if before in after or after in before:
        raise ValueError(
            f"set two tags that do not contain each other, as [<answer>, </answer>], not {tags}"
        )
    return tags


Tags = Annotated[tuple[str, str], AfterValidator(_check_tags)]
"""The texts before and after an answer, such as `<answer>` and `</answer>`."""


def find_tagged(text: str, tags: Tags) -> list[str]:
    """Return what stands between two tags, in order."""
    before, after = map(re.escape, tags)
    return re.findall(f"{before}(.*?){after}", text, re.DOTALL)


def count_tagged(rollout: Rollout, tags: Tags | None) -> int | None:
    """Return how often the student's turns state an answer between tags; None without tags.

    0 also where a tag lacks its other, as in the code of rStar2-Agent (2508.20722).
    """
    if tags is None:
        return None
    text = "\n".join(rollout.replies)
    count = len(find_tagged(text, tags))
    return count if all(text.count(tag) == count for tag in tags) else 0
