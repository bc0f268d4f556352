"""Tree search over the steps of answers, as a source of rollouts.

In each round every prompt of the step gets one more answer. The search selects a step, the student
continues from it to the end, the verifier's reward is backed up, and the new steps become nodes.
An answer consists of exactly the sampled tokens; tokens shared with an earlier answer were sampled
only once.

An answer depends on (seed, step, prompt, node, number) and on the earlier answers in its tree,
never on other prompts. Answers from the root have the seeds of the source `student`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.core.waits import show_wait
from practicum.errors import CapabilityError, DataError
from practicum.ports import SamplingClient, Task
from practicum.ports.gate import ask_reward, count_valid_steps
from practicum.ports.scoring import Scorer
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey, sample_to_lengths
from practicum.rollouts.sampling import RolloutSampler, compute_key_seed
from practicum.rollouts.source import Form, SourceConfig, SourceParts
from practicum.rollouts.tree import (
    SearchTree,
    StepNode,
    back_up,
    find_step_ends,
    list_steps,
)
from practicum.types import FAILURES, Metrics, Rollout, Sample, SampleRequest

log = logging.getLogger(__name__)


class Config(SourceConfig):
    """The student's `n` answers grow a tree; each continues from a promising step (2501.04519).

    `step` sets where a step ends: at a line, paragraph or word. The search continues from any of
    the first `depth` steps: `breadth` times from the same step, then from the child with the largest
    mean reward plus `exploration * sqrt(ln N(parent) / N(child))` (UCT). With `scorer`, the scorer's
    value of a step counts as one additional visit (2501.04519). With `reward=scorer` no verifier is
    asked: the scorer's value of an answer's last step is backed up instead of a reward, as when the
    released code (microsoft/rStar) solves test problems. An answer that is cut off or has an invalid
    step then has no value. With `keep`, at most this many answers per prompt have a loss: the best by
    the number that is backed up, then by the mean value of their steps.
    """

    type: Literal["search"] = "search"
    form: ClassVar[Form] = "answers"
    guide_example: ClassVar[str] = "process"
    step: Literal["line", "paragraph", "word"] = "line"
    breadth: int = Field(default=3, ge=1)
    depth: int = Field(default=16, ge=0)
    exploration: float = Field(default=1.4, ge=0)
    keep: int | None = Field(default=None, ge=1)
    scorer: str | None = None
    reward: Literal["verifier", "scorer"] = "verifier"

    @model_validator(mode="after")
    def _check_reward(self) -> "Config":
        if self.reward == "scorer" and self.scorer is None:
            raise ValueError("search(reward=scorer) backs up a scorer's values; set scorer=NAME")
        return self

    @property
    def guide(self) -> str | None:
        """Return the scorer."""
        return self.scorer

    def explain_no_evaluation(self) -> str | None:
        """Return why the search chooses no answer to held-out prompts; None if it chooses one."""
        if self.reward == "verifier":
            return "backs up the verifier's rewards; set reward=scorer and scorer=NAME"
        return None if self.keep == 1 else "returns several answers; set keep=1"

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the answers of a tree search."""
        writers = parts.writers
        assert writers.task is not None
        scorer = None if self.scorer is None else writers.scorers[self.scorer]
        search = StepSearch(self, parts.sampler, writers.task, writers.student, scorer)
        return search.collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the size, depth and values of the trees."""
        return measure_search(rollouts)


@dataclass(frozen=True, slots=True)
class StepSearch:
    """Runs the search: samples the student, rewards answers, and scores steps with `scorer` if set."""

    source: Config
    sampler: RolloutSampler
    task: Task
    student: SamplingClient
    scorer: Scorer | None = None

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key; keys of the same prompt must be consecutive."""
        count = self.sampler.batch.n
        prompts = self.sampler.render_prompts(keys[::count])
        trees = [
            _PromptTree.plant(self.source, keys[start : start + count], prompt)
            for start, prompt in zip(range(0, len(keys), count), prompts, strict=True)
        ]
        with show_wait("search: rounds", count) as wait:
            for round_number in range(count):
                self._run_round(trees, round_number)
                wait.advance()
        if self.source.reward == "verifier":
            self._report_undecided([rollout for tree in trees for rollout in tree.rollouts])
        return [rollout for tree in trees for rollout in tree.finish(self.source)]

    def _run_round(self, trees: "Sequence[_PromptTree]", number: int) -> None:
        """Add one answer to each tree: select, sample, reward, back up."""
        starts = [tree.tree.select() for tree in trees]
        samples = self._sample(trees, starts)
        rollouts = self.sampler.build_rollouts(
            [tree.keys[number] for tree in trees],
            [tree.prompt_tokens for tree in trees],
            [
                _join_steps(start, sample, self.sampler.batch.policy_version)
                for start, sample in zip(starts, samples, strict=True)
            ],
            "student",
        )
        for tree, start, sample, rollout in zip(trees, starts, samples, rollouts, strict=True):
            tree.add(start, *self._list_valid_steps(start, sample, rollout), self._reward(rollout))
        if self.scorer is not None:
            self._score_steps(trees, self.scorer)
        for tree in trees:
            tree.back_up(self.source.reward)

    def _score_steps(self, trees: "Sequence[_PromptTree]", scorer: Scorer) -> None:
        """Set the scorer's values of the new nodes of the round."""
        rollouts = [replace(tree.rollouts[-1], steps=list_steps(tree.leaves[-1])) for tree in trees]
        for tree, judgement in zip(trees, scorer.score(rollouts), strict=True):
            path = tree.leaves[-1].path
            if judgement.tokens is None and path:
                raise CapabilityError(
                    f"rollout.source: search(scorer={self.source.scorer}) needs one number per step, "
                    "and this scorer returns one per answer; use {type: process}"
                )
            for node, end in zip(path, accumulate(len(node.step) for node in path), strict=True):
                if node.score is None and judgement.tokens is not None:
                    node.score = judgement.tokens[end - 1].item()

    def _sample(
        self, trees: "Sequence[_PromptTree]", starts: Sequence[StepNode]
    ) -> Sequence[Sample]:
        """Sample the rest of an answer after each start, in one call per remaining length."""
        prefixes = [[token for node in start.path for token in _tokens(node)] for start in starts]
        rooms = [self.sampler.params.max_new_tokens - len(prefix) for prefix in prefixes]
        requests = [
            SampleRequest((*tree.prompt_tokens, *prefix), self._compute_seed(tree, start))
            for tree, start, prefix in zip(trees, starts, prefixes, strict=True)
        ]
        clients = [self.student for _ in requests]
        return sample_to_lengths(clients, requests, rooms, self.sampler.params)

    def _compute_seed(self, tree: "_PromptTree", start: StepNode) -> int:
        batch, key = self.sampler.batch, tree.keys[0]
        if start is tree.tree.root:
            key = replace(key, number=key.number + start.answers)
            return compute_key_seed(batch, batch.stream, key)
        return seed_of(batch.seed, "search", batch.step, key.prompt.id, start.name, start.answers)

    def _list_valid_steps(
        self, start: StepNode, sample: Sample, rollout: Rollout
    ) -> tuple[list[Tokens], bool]:
        """Return the new valid steps, and whether the answer is valid to its end."""
        tokens, decode_token = sample.tokens.tolist(), self.sampler.renderer.decode_token
        answer = Tokens.from_sample(sample, "student", self.sampler.batch.policy_version)
        steps = split_steps(answer, find_step_ends(tokens, decode_token, self.source.step))
        if sample.stop_reason in FAILURES:
            return [], False
        decode = self.sampler.renderer.decode
        texts = [decode(_tokens(node)) for node in start.path]
        texts += [decode(step.ids.tolist()) for step in steps]
        valid = count_valid_steps(self.task, rollout.prompt, texts)
        if valid is None:
            return steps, True
        count = valid - len(start.path)
        return steps[: max(count, 0)], count >= len(steps)

    def _reward(self, rollout: Rollout) -> Rollout:
        if self.source.reward == "scorer" or rollout.stop_reason in FAILURES:
            return rollout
        return ask_reward(self.task, rollout)

    @staticmethod
    def _report_undecided(rollouts: Sequence[Rollout]) -> None:
        undecided = sum(rollout.reward is None for rollout in rollouts)
        if undecided == len(rollouts):
            raise DataError(
                f"rollout.source: search backs up the verifier's rewards, and all {undecided} "
                "answers have no reward; add reference answers to the rows or a verifier to the "
                "task, or set source: student"
            )
        if undecided:
            log.warning("search: %d of %d answers have no reward", undecided, len(rollouts))


@dataclass(slots=True)
class _PromptTree:
    """The tree of one prompt, with its current rollouts, and the last node and value of each."""

    tree: SearchTree
    keys: Sequence[RolloutKey]
    prompt_tokens: tuple[int, ...]
    rollouts: list[Rollout] = field(default_factory=list)
    leaves: list[StepNode] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    @classmethod
    def plant(
        cls, source: Config, keys: Sequence[RolloutKey], prompt_tokens: tuple[int, ...]
    ) -> "_PromptTree":
        """Return an empty tree for a prompt; the number of its first key names the root."""
        # A prompt that occurs twice in a step has two trees.
        root = StepNode(str(keys[0].number), Tokens.empty())
        tree = SearchTree(root, source.breadth, source.depth, source.exploration)
        return cls(tree, keys, prompt_tokens)

    def add(
        self, start: StepNode, steps: Sequence[Tokens], is_whole: bool, rollout: Rollout
    ) -> None:
        """Add an answer below a node."""
        self.rollouts.append(rollout)
        self.leaves.append(self.tree.grow(start, steps, is_whole=is_whole))

    def back_up(self, reward: Literal["verifier", "scorer"]) -> None:
        """Back up the value of the newest answer if it has one."""
        rollout, leaf = self.rollouts[-1], self.leaves[-1]
        outcome = rollout.reward
        if reward == "scorer":
            length = sum(len(node.step) for node in leaf.path)
            is_complete = rollout.stop_reason == "stop" and length == len(rollout.tokens)
            outcome = leaf.score if is_complete else None
        if outcome is not None:
            back_up(leaf, outcome)
        self.values.append(outcome)

    def finish(self, source: Config) -> list[Rollout]:
        """Return the rollouts with the values of their steps; dropped rollouts have no loss."""
        paths = [list_steps(leaf) for leaf in self.leaves]
        if source.reward == "scorer":
            # A process model may not learn from its own scores as if they were rewards.
            paths = [tuple(replace(step, reward=None) for step in steps) for steps in paths]
        pairs = zip(self.rollouts, paths, strict=True)
        rollouts = [replace(rollout, steps=steps) for rollout, steps in pairs]
        return rollouts if source.keep is None else keep_best(rollouts, self.values, source.keep)


def keep_best(
    rollouts: Sequence[Rollout], values: Sequence[float | None], count: int
) -> list[Rollout]:
    """Return a prompt's rollouts, with a loss only for the best `count`.

    Rollouts are ranked by the `values` that were backed up, then by the mean value of their steps.
    """
    ranks = [_rank(*pair) for pair in zip(rollouts, values, strict=True)]
    chosen = set(sorted(range(len(rollouts)), key=ranks.__getitem__, reverse=True)[:count])
    return [rollout if row in chosen else _mask(rollout) for row, rollout in enumerate(rollouts)]


def _rank(rollout: Rollout, value: float | None) -> tuple[float, float, int]:
    values = [step.value for step in rollout.steps if step.value is not None]
    mean = sum(values) / len(values) if values else 0.0
    return float("-inf") if value is None else value, mean, -rollout.sample


def _mask(rollout: Rollout) -> Rollout:
    return replace(rollout, loss_mask=torch.zeros_like(rollout.loss_mask))


def split_steps(answer: Tokens, ends: Sequence[int]) -> list[Tokens]:
    """Split an answer into steps; `ends` are the token counts at which the steps end."""
    return [answer.cut(start, end) for start, end in pairwise((0, *ends))]


def _tokens(node: StepNode) -> list[int]:
    return node.step.ids.tolist()


def _join_steps(start: StepNode, sample: Sample, version: int) -> Sample:
    """Join the steps down to a node and the rest of the answer into one sample."""
    if not start.path:
        return sample
    answer = Tokens.from_sample(sample, "student", version)
    for node in reversed(start.path):
        answer = node.step + answer
    return answer.to_sample(sample.stop_reason)


def measure_search(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the size, depth and values of the search trees; empty if no rollout has steps."""
    searched = [rollout for rollout in rollouts if rollout.steps]
    if not searched:
        return {}
    nodes = {(rollout.prompt.id, step.node): step for rollout in searched for step in rollout.steps}
    ends = [rollout for rollout in searched if _holds(rollout)]
    trees = {(rollout.prompt.id, rollout.steps[0].node.partition(".")[0]) for rollout in searched}
    values = [step.value for step in nodes.values() if step.value is not None]
    tokens = sum(step.tokens for rollout in searched for step in rollout.steps)
    right = {rollout.prompt.id for rollout in searched if (rollout.reward or 0.0) >= 1.0}
    metrics = {
        "search_nodes": len(nodes) / len(trees),
        "search_ends": len({(end.prompt.id, end.steps[-1].node) for end in ends}) / len(nodes),
        "search_depth": sum(len(rollout.steps) for rollout in searched) / len(searched),
        "search_shared": 1 - sum(step.tokens for step in nodes.values()) / tokens,
        "search_solved": len(right) / len({rollout.prompt.id for rollout in searched}),
        "search_broken": 1 - len(ends) / len(searched),
        "search_undecided": sum(rollout.reward is None for rollout in searched) / len(searched),
    }
    if values:
        metrics["search_value"] = sum(values) / len(values)
    return metrics


def _holds(rollout: Rollout) -> bool:
    """Return True if every token belongs to a valid step."""
    return sum(step.tokens for step in rollout.steps) == len(rollout.tokens)
