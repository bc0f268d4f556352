"""The tree of a search over the steps of an answer, with a value of each step.

As in Monte Carlo tree search, the value of a node is the mean reward of the answers through it, and
a search descends to the child with the largest upper confidence bound (UCT, Kocsis & Szepesvari
2006). The search descends below a node once `breadth` answers have continued from it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional

from practicum.rollouts.answer_tokens import Tokens
from practicum.types import SearchStep

STEP_ENDS = {"line": "\n", "paragraph": "\n\n", "word": " "}
"""The text that ends a step."""


@dataclass(slots=True, eq=False)
class StepNode:
    """The end of one step: the step's sampled tokens, and statistics of the answers through it.

    `answers` counts the answers that continued from here. `visits` counts the rewarded answers
    through the node, and `total` is the sum of their rewards. `score` is a process model's score of
    the step; it counts as one visit.
    """

    name: str
    step: Tokens
    parent: Optional["StepNode"] = None
    children: dict[tuple[int, ...], "StepNode"] = field(default_factory=dict)
    is_end: bool = False
    is_exhausted: bool = False
    answers: int = 0
    visits: int = 0
    total: float = 0.0
    score: float | None = None

    @property
    def weight(self) -> int:
        """Return the number of visits; the score counts as one visit."""
        return self.visits + (self.score is not None)

    @property
    def value(self) -> float | None:
        """Return the mean reward of the answers through the node and the score; None without any."""
        return (self.total + (self.score or 0.0)) / self.weight if self.weight else None

    @property
    def mean_reward(self) -> float | None:
        """Return the mean reward of the answers through the node, without the score."""
        return self.total / self.visits if self.visits else None

    @property
    def path(self) -> "list[StepNode]":
        """Return the nodes from below the root down to this one."""
        return [] if self.parent is None else [*self.parent.path, self]

    def compute_bound(self, exploration: float) -> float:
        """Return the upper confidence bound of the value; infinity if nothing is known yet."""
        value = self.value
        if value is None or self.parent is None:
            return math.inf
        # Answers without a reward can leave a parent with fewer visits than its child's weight.
        return compute_uct(value, max(self.parent.weight, 1), self.weight, exploration)

    def walk(self) -> "Iterator[StepNode]":
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children.values():
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class SearchTree:
    """A search tree and the rule for growing it; `root` represents the prompt."""

    root: StepNode
    breadth: int
    depth: int
    exploration: float

    def select(self) -> StepNode:
        """Return the node to sample the next answer from; the root if the tree is exhausted."""
        node, depth = self.root, 0
        while not node.is_exhausted and not self._takes_answers(node, depth):
            node = max(
                (child for child in node.children.values() if not child.is_exhausted),
                key=lambda child: child.compute_bound(self.exploration),
            )
            depth += 1
        return node

    def grow(self, start: StepNode, steps: Sequence[Tokens], *, is_whole: bool) -> StepNode:
        """Add the steps of an answer below `start`, and return the node of the last one.

        With `is_whole` the answer ends there. An existing step is not added again.
        """
        node = start
        for step in steps:
            node.answers += 1
            key = tuple(step.ids.tolist())
            name = f"{node.name}.{len(node.children)}"
            node = node.children.setdefault(key, StepNode(name, step, node))
        if is_whole and node is not start:
            node.is_end = True
        else:
            node.answers += 1  # An answer with an invalid next step.
        for depth, member in reversed(list(enumerate([self.root, *node.path]))):
            member.is_exhausted = member.is_end or (
                not self._takes_answers(member, depth)
                and all(child.is_exhausted for child in member.children.values())
            )
        return node

    def _takes_answers(self, node: StepNode, depth: int) -> bool:
        return not node.is_end and (depth >= self.depth or node.answers < self.breadth)


def compute_uct(value: float, parent_visits: int, visits: int, exploration: float) -> float:
    """Return the upper confidence bound of a child's value (UCT, Kocsis & Szepesvari 2006)."""
    return value + exploration * math.sqrt(math.log(parent_visits) / visits)


def back_up(node: StepNode, reward: float) -> None:
    """Add the reward of an answer to every node on its path, including the root."""
    current: StepNode | None = node
    while current is not None:
        current.visits += 1
        current.total += reward
        current = current.parent


def list_steps(node: StepNode) -> tuple[SearchStep, ...]:
    """Return the steps from the root to a node with their current values."""
    return tuple(
        SearchStep(member.name, len(member.step), member.visits, member.value, member.mean_reward)
        for member in node.path
    )


def find_step_ends(
    tokens: Sequence[int], decode_token: Callable[[int], str], step: str
) -> list[int]:
    """Return the token positions at which steps end, after the token that completes the separator."""
    ends, text = [], ""
    for count, token in enumerate(tokens, start=1):
        text += decode_token(token)
        if STEP_ENDS[step] in text or count == len(tokens):
            ends.append(count)
            text = ""
    return ends
