"""Search for answers by their votes, and train on the one that a second model agrees with (rStar).

Each of a prompt's `n` rounds of Monte Carlo tree search walks from the question to a full answer with
the five actions of rStar (2408.06195): the next step (A1), all remaining steps (A2), the next
sub-question with its answer (A3), the same sub-question again (A4), and the question in other words
(A5). No verifier guides the search. An answer by A2 is the most frequent one of `votes` completions,
and its share is the reward that is backed up. The rows name their sub-questions, one per line, in the
privileged field `parts`, and the other words in `rephrased`.

As in the released code (zhentingqi/rStar), a second model completes each answer from `masks` of its
beginnings and agrees if half of the completions end at the same answer. The search returns the agreed
answer with the highest sum of confidence (its share of the rewards) and survival (the share of its
answers that agreed). Two answers are equal if the task's verifier accepts the first as the reference
for the second.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal, Optional

import torch
from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.errors import CapabilityError
from practicum.ports import SamplingClient, Task, Teacher
from practicum.ports.gate import ask_reward
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey, sample_to_lengths
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.source import Form, OtherWriter, SourceConfig, SourceParts
from practicum.rollouts.tree import STEP_ENDS, compute_uct, find_step_ends
from practicum.types import Metrics, Prompt, Rollout, Sample, SampleRequest, StopReason

NOTE, VOTES, PATH = "agreement", "votes", "actions"
"""Notes of a rollout: whether the second model agrees (`yes` or `no`), its votes, and its actions."""

ACTIONS: Mapping[str, tuple[str, ...]] = {
    "question": ("step", "rest", "part", "rephrase"),
    "rephrase": ("step", "rest", "part"),
    "step": ("step", "rest"),
    "part": ("step", "rest", "part", "again"),
    "again": ("step", "rest", "part"),
}
"""The actions after each action: `step` A1, `rest` A2, `part` A3, `again` A4, `rephrase` A5."""

BEGINNINGS = (0.2, 0.5)
"""The shortest and the longest share of an answer that the second model continues."""

Same = Callable[[str, str], bool]


class Config(SourceConfig):
    """The answer that a search by votes finds and a second model agrees with (rStar 2408.06195).

    Each of `n` rounds adds an answer of at most `depth` actions to the tree of a prompt, with `breadth`
    next steps after each node. Only the returned answer has a loss.
    """

    type: Literal["mutual"] = "mutual"
    form: ClassVar[Form] = "answers"
    agree: Literal["teacher", "reference"] = "reference"
    step: Literal["line", "paragraph", "word"] = "line"
    votes: int = Field(default=8, ge=1)
    breadth: int = Field(default=3, ge=1)
    depth: int = Field(default=5, ge=1)
    exploration: float = Field(default=2.0, ge=0)
    masks: int = Field(default=4, ge=1)

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the model that has to agree."""
        return (self.agree,)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the answers of all rounds; only the returned answer of a prompt has a loss."""
        writers = parts.writers
        assert writers.task is not None
        model = writers.reference if self.agree == "reference" else writers.teacher
        assert model is not None, "the recipe is refused without it"
        return MutualSearch(self, parts.sampler, writers.task, writers.student, model).collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the agreed share, mean votes and actions per answer, and the returned mean reward."""
        searched = [rollout for rollout in rollouts if PATH in rollout.notes]
        if not searched:
            return {}
        counts = Counter(action for rollout in searched for action in rollout.notes[PATH].split())
        agreed = sum(rollout.notes[NOTE] == "yes" for rollout in searched)
        votes = sum(float(rollout.notes[VOTES]) for rollout in searched)
        returned = [rollout.reward for rollout in searched if rollout.loss_mask.any()]
        rewards = [reward for reward in returned if reward is not None]
        metrics = {"search_agreed": agreed, "search_votes": votes} | {
            f"search_{action}": counts[action] for action in ("step", "part", "again", "rephrase")
        }
        metrics = {name: total / len(searched) for name, total in metrics.items()}
        return metrics | ({"search_agreed_reward": sum(rewards) / len(rewards)} if rewards else {})


@dataclass(slots=True, eq=False)
class ActionNode:
    """The question and the beginning of an answer after some actions; `votes` if it is an answer.

    `untried` are the actions that have no child yet, in random order. `parts` are the sub-questions
    that remain, and `part` is the last one with an answer.
    """

    name: str
    action: str
    prompt: Prompt
    start: Tokens
    parts: tuple[str, ...]
    part: Prompt | None = None
    parent: Optional["ActionNode"] = None
    untried: list[str] = field(default_factory=list)
    children: "list[ActionNode]" = field(default_factory=list)
    stop_reason: StopReason = "stop"
    votes: float | None = None
    visits: int = 0
    total: float = 0.0

    @property
    def path(self) -> "list[ActionNode]":
        """Return the nodes from the question to this one."""
        return [*([] if self.parent is None else self.parent.path), self]

    def compute_bound(self, exploration: float) -> float:
        """Return the upper confidence bound of the mean votes; every child has a visit."""
        assert self.parent is not None
        mean = self.total / self.visits
        return compute_uct(mean, self.parent.visits, self.visits, exploration)


Requests = list[tuple[Prompt, Tokens, int]]
"""The question, the beginning of an answer and the seed of some samples."""


@dataclass(frozen=True, slots=True)
class MutualSearch:
    """Searches with the student, and lets `model` decide which answer each search returns."""

    source: Config
    sampler: RolloutSampler
    task: Task
    student: SamplingClient
    model: Teacher

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key; keys of the same prompt must be consecutive."""
        count = self.sampler.batch.n
        groups = [keys[start : start + count] for start in range(0, len(keys), count)]
        roots = [self._plant(group[0]) for group in groups]
        sames = [self._build_comparison(root.prompt) for root in roots]
        ends: list[list[ActionNode]] = [[] for _ in roots]
        for _ in range(count):
            walks = [self._walk(root, same) for root, same in zip(roots, sames, strict=True)]
            for nodes, node in zip(ends, self._run(walks), strict=True):
                nodes.append(node)
        rollouts = [self._build(*pair) for pair in zip(groups, ends, strict=True)]
        agreed = self._ask_model(rollouts, sames)
        return [
            rollout
            for group, texts, same in zip(rollouts, agreed, sames, strict=True)
            for rollout in mark_returned(group, texts, same)
        ]

    def _plant(self, key: RolloutKey) -> ActionNode:
        """Return the root of a prompt's tree; the number of its first key tells two trees apart."""
        parts = key.prompt.privileged.get("parts", "")
        root = ActionNode(
            str(key.number), "question", key.prompt, Tokens.empty(), tuple(parts.splitlines())
        )
        return self._add_actions(root)

    def _add_actions(self, node: ActionNode) -> ActionNode:
        """Add the actions after a node in random order; the last one of a path ends the answer."""
        actions = [
            action
            for action in ACTIONS[node.action]
            for _ in range(self.source.breadth if action == "step" else 1)
            if not (action == "part" and not node.parts)
            and not (action == "rephrase" and not node.prompt.privileged.get("rephrased"))
        ]
        if len(node.path) >= self.source.depth:
            actions = ["rest"]
        random.Random(self._seed(node, "actions")).shuffle(actions)
        node.untried = actions
        return node

    def _seed(self, node: ActionNode, *name: int | str) -> int:
        batch = self.sampler.batch
        return seed_of(batch.seed, "mutual", batch.step, node.path[0].prompt.id, node.name, *name)

    def _build_comparison(self, prompt: Prompt) -> Same:
        """Return whether the verifier accepts a text with another text as the reference answer."""
        verdicts: dict[tuple[str, str], bool] = {}

        def compare(reference: str, text: str) -> bool:
            pair = reference, text
            if pair not in verdicts:
                rollout = Rollout.from_text(replace(prompt, answer=reference), text)
                verdicts[pair] = (ask_reward(self.task, rollout).reward or 0.0) >= 1.0
            return verdicts[pair]

        return compare

    def _walk(
        self, node: ActionNode, same: Same
    ) -> Generator[Requests, Sequence[Sample], ActionNode]:
        """Go to an answer by new actions, or by UCT after all actions; back up its votes.

        Yields the samples that the walk needs, and receives them.
        """
        while node.votes is None:
            if node.untried:
                node = yield from self._act(node, node.untried.pop(), same)
            else:
                node = max(
                    node.children, key=lambda child: child.compute_bound(self.source.exploration)
                )
        for member in node.path:
            member.visits += 1
            member.total += node.votes
        return node

    def _act(
        self, node: ActionNode, action: str, same: Same
    ) -> Generator[Requests, Sequence[Sample], ActionNode]:
        """Return the child of a node that an action leads to."""
        name = f"{node.name}.{len(node.children)}"
        child = replace(
            node,
            name=name,
            action=action,
            parent=node,
            untried=[],
            children=[],
            visits=0,
            total=0.0,
        )
        node.children.append(child)
        if action == "rephrase":
            child.prompt = _ask(node.prompt, node.prompt.privileged["rephrased"])
        elif action == "step":
            (sample,) = yield [(node.prompt, node.start, self._seed(child, 0))]
            decode = self.sampler.renderer.decode_token
            ends = find_step_ends(sample.tokens.tolist(), decode, self.source.step)
            if len(ends) < 2:
                # The step would end the answer: it needs votes.
                child.action = action = "rest"
            else:
                step = self._to_tokens(node, sample).cut(0, ends[0])
                child.start = node.start + step
        if action in ("part", "again"):
            start = node.start if action == "part" or node.parent is None else node.parent.start
            if action == "part":
                child.part, child.parts = _ask(node.prompt, node.parts[0]), node.parts[1:]
            assert child.part is not None
            sample, _ = yield from self._vote(child, child.part, start, same)
            child.start = start + self._write_steps(start, sample)
        if action == "rest":
            sample, child.votes = yield from self._vote(child, node.prompt, node.start, same)
            child.start = node.start + self._to_tokens(node, sample)
            child.stop_reason = sample.stop_reason
            return child
        return self._add_actions(child)

    def _vote(
        self, child: ActionNode, prompt: Prompt, start: Tokens, same: Same
    ) -> Generator[Requests, Sequence[Sample], tuple[Sample, float]]:
        """Return the first of the most frequent completions, and its share of the votes."""
        seeds = [self._seed(child, "vote", vote) for vote in range(self.source.votes)]
        samples = yield [(prompt, start, seed) for seed in seeds]
        beginning = start.ids.tolist()
        texts = self.sampler.renderer.decode_all(
            [beginning + sample.tokens.tolist() for sample in samples]
        )
        groups = group_equal(texts, same)
        best = max(groups, key=len, default=[])
        return samples[best[0] if best else 0], len(best) / len(samples)

    def _to_tokens(self, node: ActionNode, sample: Sample) -> Tokens:
        """Return a sample's tokens; without log-probabilities if another question was asked."""
        version = self.sampler.batch.policy_version
        if node.prompt is node.path[0].prompt:
            return Tokens.from_sample(sample, "student", version)
        return Tokens.from_text(sample.tokens.tolist(), "student", version, in_loss=True)

    def _write_steps(self, start: Tokens, sample: Sample) -> Tokens:
        """Return the answer to a sub-question as complete steps of the answer to the question."""
        renderer, end = self.sampler.renderer, STEP_ENDS[self.source.step]
        text = renderer.decode(sample.tokens.tolist()).strip(end)
        ids = renderer.encode(text + end) if text else []
        ids = ids[: max(self.sampler.params.max_new_tokens - len(start) - 1, 0)]
        version = self.sampler.batch.policy_version
        return Tokens.from_text(ids, "student", version, in_loss=True)

    def _run(
        self, walks: Sequence[Generator[Requests, Sequence[Sample], ActionNode]]
    ) -> list[ActionNode]:
        """Run the walks of all prompts in step with each other, with one call for their samples."""
        ends: dict[int, ActionNode] = {}
        replies: dict[int, Sequence[Sample] | None] = dict.fromkeys(range(len(walks)))
        while replies:
            batches: dict[int, Requests] = {}
            for place, reply in replies.items():
                try:
                    batches[place] = (
                        next(walks[place]) if reply is None else walks[place].send(reply)
                    )
                except StopIteration as end:
                    ends[place] = end.value
            samples = self._sample([request for part in batches.values() for request in part])
            limits = [0]
            for part in batches.values():
                limits.append(limits[-1] + len(part))
            replies = {
                place: samples[first:last]
                for place, (first, last) in zip(batches, pairwise(limits), strict=True)
            }
        return [ends[place] for place in range(len(walks))]

    def _sample(self, requests: Requests) -> list[Sample]:
        prompts = self.sampler.render_prompts([RolloutKey(prompt, 0) for prompt, _, _ in requests])
        return sample_to_lengths(
            [self.student for _ in requests],
            [
                SampleRequest((*prompt, *start.ids.tolist()), seed)
                for prompt, (_, start, seed) in zip(prompts, requests, strict=True)
            ],
            [self.sampler.params.max_new_tokens - len(start) for _, start, _ in requests],
            self.sampler.params,
        )

    def _build(self, keys: Sequence[RolloutKey], ends: Sequence[ActionNode]) -> list[Rollout]:
        """Return the answers of a tree as rollouts with notes of their votes and actions."""
        prompts = self.sampler.render_prompts(keys)
        samples = [node.start.to_sample(node.stop_reason) for node in ends]
        rollouts = self.sampler.build_rollouts(keys, prompts, samples, "student")
        return [
            replace(
                rollout,
                notes={
                    VOTES: f"{node.votes:.6g}",
                    PATH: " ".join(member.action for member in node.path[1:]),
                },
            )
            for rollout, node in zip(rollouts, ends, strict=True)
        ]

    def _ask_model(
        self, groups: Sequence[Sequence[Rollout]], sames: Sequence[Same]
    ) -> list[dict[str, bool]]:
        """Return for each distinct answer of each tree whether the second model agrees."""
        candidates = [
            (place, rollout)
            for place, rollouts in enumerate(groups)
            for rollout in {rollout.text: rollout for rollout in reversed(rollouts)}.values()
            if sames[place](rollout.text, rollout.text)
        ]
        beginnings = [
            (place, rollout, rollout.tokens[: math.ceil(len(rollout.tokens) * share)].tolist())
            for place, rollout in candidates
            for share in torch.linspace(*BEGINNINGS, self.source.masks).tolist()
        ]
        counts: Counter[tuple[int, str]] = Counter()
        texts = self._complete([(rollout, beginning) for _, rollout, beginning in beginnings])
        for (place, rollout, _), text in zip(beginnings, texts, strict=True):
            counts[place, rollout.text] += sames[place](rollout.text, text)
        agreed: list[dict[str, bool]] = [{} for _ in groups]
        for place, rollout in candidates:
            enough = 2 * counts[place, rollout.text] >= self.source.masks
            agreed[place][rollout.text] = enough
        return agreed

    def _complete(self, beginnings: Sequence[tuple[Rollout, list[int]]]) -> list[str]:
        """Return the texts of beginnings with the second model's completions."""
        bound = [self.model.bind_prompt(rollout.prompt) for rollout, _ in beginnings]
        ready = [client for client in bound if client is not None and client.accepts_tokens]
        if len(ready) < len(bound):
            raise CapabilityError(
                f"rollout.source: mutual(agree={self.source.agree}) lets the {self.source.agree} "
                "complete answers from the middle, and it cannot continue from tokens; use a model "
                "that can, such as {type: model, model: ...}"
            )
        requests = [
            SampleRequest(
                (*prompted.prompt_tokens, *beginning),
                seed_of(
                    *(self.sampler.batch.seed, self.source.agree, self.sampler.batch.step),
                    *(rollout.prompt.id, rollout.sample, len(beginning), place % self.source.masks),
                ),
            )
            for place, (prompted, (rollout, beginning)) in enumerate(
                zip(ready, beginnings, strict=True)
            )
        ]
        rooms = [self.sampler.params.max_new_tokens - len(beginning) for _, beginning in beginnings]
        clients = [prompted.client for prompted in ready]
        samples = sample_to_lengths(clients, requests, rooms, self.sampler.params)
        return self.sampler.renderer.decode_all(
            [
                beginning + sample.tokens.tolist()
                for (_, beginning), sample in zip(beginnings, samples, strict=True)
            ]
        )


def _ask(prompt: Prompt, question: str) -> Prompt:
    """Return the prompt with another question as its last message."""
    *earlier, last = prompt.messages
    return replace(prompt, messages=(*earlier, replace(last, content=question)))


def group_equal(texts: Sequence[str], same: Same) -> list[list[int]]:
    """Return the places of equal answers; a text that does not equal itself has no answer."""
    groups: list[list[int]] = []
    for place, text in enumerate(texts):
        group = next((group for group in groups if same(texts[group[0]], text)), None)
        if group is not None:
            group.append(place)
        elif same(text, text):
            groups.append([place])
    return groups


def find_returned(
    texts: Sequence[str], votes: Sequence[float], agreed: Mapping[str, bool], same: Same
) -> int | None:
    """Return the place of the answer that the search returns, or None without any answer.

    If the second model agrees with none, it is the answer with the highest sum of votes.
    """
    passed = sum(agreed.get(text, False) for text in texts)
    scores: list[tuple[float, int]] = []
    for group in group_equal(texts, same):
        chosen = [place for place in group if agreed[texts[place]]] if passed else group
        if chosen:
            confidence = sum(votes[place] for place in chosen) / (passed or len(texts))
            survival = len(chosen) / len(group) if passed else 0.0
            scores.append((confidence + survival, -chosen[0]))
    return -max(scores)[1] if scores else None


def mark_returned(
    rollouts: Sequence[Rollout], agreed: Mapping[str, bool], same: Same
) -> list[Rollout]:
    """Return a tree's rollouts with a note of the agreement; only the returned answer has a loss.

    Of equal answers the student learns the first to the original question, if any: an answer to the
    question in other words teaches these words.
    """
    texts = [rollout.text for rollout in rollouts]
    votes = [float(rollout.notes[VOTES]) for rollout in rollouts]
    returned = find_returned(texts, votes, agreed, same)
    if returned is not None:
        passes = agreed[texts[returned]]
        returned = next(
            (
                place
                for place, (rollout, text) in enumerate(zip(rollouts, texts, strict=True))
                if same(texts[returned], text)
                and agreed[text] == passes
                and "rephrase" not in rollout.notes[PATH].split()
            ),
            returned,
        )
    return [
        replace(
            rollout,
            notes={**rollout.notes, NOTE: "yes" if agreed.get(rollout.text) else "no"},
            loss_mask=rollout.loss_mask & (place == returned),
        )
        for place, rollout in enumerate(rollouts)
    ]
