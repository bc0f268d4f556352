"""Tree search: values compared with enumeration, limits, and the data it stores for each sampled token."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import make_model, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError, DataError, RecipeError
from practicum.methods.rstar.search import Config as Search
from practicum.methods.rstar.search import measure_search, split_steps
from practicum.objective import Sampled
from practicum.ports import (
    Task,
    Teacher,
)
from practicum.rollouts import (
    RolloutArchive,
    RolloutBatch,
    RolloutRow,
    RolloutWriters,
    SourceChoice,
    collect_rollouts,
)
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.tree import SearchTree, StepNode, back_up, find_step_ends, list_steps
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import (
    Message,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    ScoreRequest,
)

LETTERS = "abcd "
LIMIT = 9


def step_of(*tokens: int) -> Tokens:
    return Tokens.from_text(tokens, "student", 0, in_loss=True)


def plant(breadth: int, depth: int, exploration: float) -> SearchTree:
    return SearchTree(StepNode("0", step_of()), breadth, depth, exploration)


# The tree.


def enumerate_values(
    reward: Callable[[tuple[int, ...]], float], width: int, height: int
) -> dict[tuple[int, ...], float]:
    """Compute the mean reward of all leaves below each path of a complete tree."""
    values = {}
    for depth in range(height + 1):
        for path in itertools.product(range(width), repeat=depth):
            leaves = itertools.product(range(width), repeat=height - depth)
            values[path] = sum(reward(path + leaf) for leaf in leaves) / width ** (height - depth)
    return values


def reward_leaf(path: tuple[int, ...]) -> float:
    """Compute a reward that differs between any two subtrees."""
    return math.sin(1.7 * sum((place + 2) ** 2 * step for place, step in enumerate(path)))


@pytest.mark.parametrize("exploration", [0.0, 0.7, 50.0])
@pytest.mark.parametrize(("width", "height"), [(2, 3), (3, 2)])
def test_the_values_of_a_whole_tree_are_those_of_enumeration(
    width: int, height: int, exploration: float
) -> None:
    tree = plant(width, 9, exploration)
    for _ in range(width**height):
        node = tree.select()
        path = [int(part) for part in node.name.split(".")[1:]]
        # The remaining answers go to children that have not been visited.
        taken = len(node.children)
        rest = [taken, *[0] * (height - len(path) - 1)]
        leaf = tree.grow(node, [step_of(child) for child in rest], is_whole=True)
        back_up(leaf, reward_leaf((*path, *rest)))
    assert tree.root.is_exhausted and tree.select() is tree.root
    expected = enumerate_values(reward_leaf, width, height)
    found = {tuple(map(int, node.name.split(".")[1:])): node for node in tree.root.walk()}
    assert found.keys() == expected.keys()
    for path, node in found.items():
        assert node.value == pytest.approx(expected[path], abs=1e-12)
        assert node.visits == width ** (height - len(path))


def test_without_exploration_the_search_goes_to_the_best_child() -> None:
    tree = plant(breadth=2, depth=9, exploration=0.0)
    good = tree.grow(tree.root, [step_of(0)], is_whole=False)
    back_up(good, 0.6)
    back_up(tree.grow(tree.root, [step_of(1)], is_whole=False), 0.5)
    for _ in range(3):
        assert tree.select().name.startswith("0.0")
        back_up(tree.grow(tree.select(), [step_of(5)], is_whole=False), 0.6)
    # A bound that rewards rarely visited children selects child 0.1.
    eager = replace(tree, exploration=3.0)
    assert eager.select().name.startswith("0.1")
    assert eager.select().parent is tree.root


def test_a_bound_is_the_published_formula() -> None:
    tree = plant(breadth=3, depth=9, exploration=0.0)
    rewards = [1.0, 0.0, 1.0, 1.0]
    leaves = [tree.grow(tree.root, [step_of(label)], is_whole=False) for label in (0, 1, 0, 2)]
    for leaf, reward in zip(leaves, rewards, strict=True):
        back_up(leaf, reward)
    assert leaves[0] is leaves[2] and leaves[0].visits == 2
    assert leaves[1].compute_bound(0.4) == 0.0 + 0.4 * math.sqrt(math.log(4) / 1)
    assert leaves[0].compute_bound(0.4) == 1.0 + 0.4 * math.sqrt(math.log(4) / 2)


def test_below_the_depth_the_tree_does_not_branch() -> None:
    tree = plant(breadth=1, depth=1, exploration=0.0)
    for label in range(6):
        node = tree.select()
        assert len(node.path) == (label > 0)
        back_up(tree.grow(node, [step_of(label), step_of(9)], is_whole=True), 1.0)
    assert [len(child.children) for child in tree.root.children.values()] == [6]


def test_a_score_counts_as_one_visit() -> None:
    tree = plant(breadth=2, depth=9, exploration=0.0)
    for label, score in ((0, 0.2), (1, 0.9)):
        tree.grow(tree.root, [step_of(label)], is_whole=False).score = score
    assert [node.value for node in tree.root.children.values()] == [0.2, 0.9]
    assert tree.select().name == "0.1"
    back_up(tree.select(), 0.0)
    assert list_steps(next(reversed(tree.root.children.values())))[0].value == pytest.approx(0.45)


# The search.


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spaced")
    make_model(folder / "student", seed=1, alphabet=LETTERS)
    make_model(folder / "teacher", seed=2, alphabet=LETTERS)
    return folder


@pytest.fixture(scope="module")
def built(spaced: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    recipe = toy_recipe(spaced, {"reference": {"type": "self", "weights": "frozen"}})
    return assemble_run(recipe, tmp_path_factory.mktemp("models"))


@dataclass
class LetterTask(Task):
    """Rewards an answer with the share of `a` among its letters, unless configured to return no reward."""

    silent: str = ""
    asked: list[str] = field(default_factory=list)

    def train_prompts(self) -> Sequence[Prompt]:
        return []

    def heldout_prompts(self) -> Sequence[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float | None:
        self.asked.append(rollout.text)
        if self.silent and self.silent in rollout.text:
            return None
        return rollout.text.count("a") / max(len(rollout.text), 1)


class Checking(LetterTask):
    """The same task, in which no step may contain a `d`."""

    def count_valid_steps(self, prompt: Prompt, steps: Sequence[str]) -> int:
        return len(list(itertools.takewhile(lambda step: "d" not in step, steps)))


def search(
    built: RunComponents,
    source: str,
    task: Any = None,
    *,
    n: int = 6,
    seed: int = 0,
    prompts: Sequence[Prompt] | None = None,
    teacher: Teacher | None = None,
) -> list[Rollout]:
    chosen = built.parts.prompts[:3] if prompts is None else prompts
    writers = RolloutWriters(
        built.trainer.build_sampling_client(),
        teacher or built.parts.teacher,
        built.parts.renderer,
        RolloutArchive(),
        reference=built.parts.reference,
        task=task or LetterTask(),
    )
    params = SamplingParams(LIMIT, stop_ids=built.parts.renderer.stop_ids)
    choice = TypeAdapter(SourceChoice).validate_python(source)
    return collect_rollouts(RolloutBatch(chosen, n, seed, 3), choice, writers, params)


def describe(rollout: Rollout) -> dict[str, Any]:
    """Return everything that a journal stores about a rollout, except the notes of the search."""
    return {**RolloutRow.of(3, rollout).to_json(), "steps": None}


@pytest.mark.parametrize(("source", "n"), [("search(step=word)", 1), ("search(word, depth=0)", 4)])
def test_a_search_that_does_not_branch_is_the_student_bit_for_bit(
    built: RunComponents, source: str, n: int
) -> None:
    prompts = [*built.parts.prompts[:3], built.parts.prompts[1]]
    searched = search(built, source, n=n, prompts=prompts)
    plain = search(built, "student", n=n, prompts=prompts)
    assert list(map(describe, searched)) == list(map(describe, plain))


def test_a_search_branches_and_keeps_every_sampled_token(built: RunComponents) -> None:
    rollouts = search(built, "search(step=word, breadth=2, depth=2, exploration=0.5)", n=8)
    assert measure_search(rollouts)["search_shared"] > 0.05
    scores = built.trainer.build_sampling_client().score(
        [requested(rollout) for rollout in rollouts], Sampled()
    )
    for rollout, score in zip(rollouts, scores, strict=True):
        logprobs = score.logprobs if score.logprobs is not None else read_logprobs(rollout, score)
        torch.testing.assert_close(rollout.policy_logprobs, logprobs, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(rollout.sampling_logprobs, logprobs, rtol=1e-5, atol=2e-5)
        assert rollout.loss_mask.all() and rollout.source == "student"
        assert sum(step.tokens for step in rollout.steps) == len(rollout.tokens) <= LIMIT
        assert rollout.text == built.parts.renderer.decode(rollout.tokens.tolist())


def requested(rollout: Rollout) -> ScoreRequest:
    return ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist()))


def read_logprobs(rollout: Rollout, score: Any) -> torch.Tensor:
    logprobs = score.head.logprobs(score.states)
    return logprobs.gather(-1, rollout.tokens[:, None])[:, 0]


def test_values_are_the_means_over_the_answers_through_each_step(built: RunComponents) -> None:
    rollouts = search(built, "search(step=word, breadth=2, depth=3)", n=10)
    rewards: dict[tuple[str, str], list[float]] = {}
    for rollout in rollouts:
        assert rollout.reward is not None
        for step in rollout.steps:
            rewards.setdefault((rollout.prompt.id, step.node), []).append(rollout.reward)
    for rollout in rollouts:
        for step in rollout.steps:
            through = rewards[rollout.prompt.id, step.node]
            assert step.visits == len(through)
            assert step.value == pytest.approx(sum(through) / len(through), abs=1e-12)


def test_a_tree_does_not_depend_on_the_other_prompts_of_its_step(built: RunComponents) -> None:
    prompts = built.parts.prompts[:4]
    together = search(built, "search(step=word, breadth=2)", prompts=prompts)
    apart = [
        rollout
        for prompt in prompts
        for rollout in search(built, "search(step=word, breadth=2)", prompts=[prompt])
    ]
    for one, other in zip(together, apart, strict=True):
        assert one.tokens.equal(other.tokens) and one.steps == other.steps
    assert [one.steps for one in search(built, "search(step=word)", seed=1)] != [
        one.steps for one in search(built, "search(step=word)", seed=2)
    ]


def test_a_step_that_does_not_hold_is_never_gone_on_from(built: RunComponents) -> None:
    rollouts = search(built, "search(step=word, breadth=2)", Checking(), n=8)
    metrics = measure_search(rollouts)
    assert 0 < metrics["search_broken"] < 1
    for rollout in rollouts:
        kept = rollout.tokens[: sum(step.tokens for step in rollout.steps)].tolist()
        assert "d" not in built.parts.renderer.decode(kept)
        whole = len(kept) == len(rollout.tokens)
        assert whole == ("d" not in rollout.text)


def test_answers_without_a_reward_are_counted_and_change_no_value(
    built: RunComponents, notes: list[str]
) -> None:
    rollouts = search(built, "search(step=word, breadth=2)", LetterTask(silent="d"))
    undecided = [rollout for rollout in rollouts if rollout.reward is None]
    assert measure_search(rollouts)["search_undecided"] == len(undecided) / len(rollouts) > 0
    assert f"search: {len(undecided)} of {len(rollouts)} answers have no reward" in notes[0]
    with pytest.raises(
        DataError, match=r"all 6 answers have no reward; add reference answers to the rows"
    ):
        search(built, "search", Silent(), n=2)


class Silent(LetterTask):
    """A task without a verifier."""

    def reward(self, rollout: Rollout) -> float | None:
        return None


def test_only_the_best_of_a_prompt_are_trained_on(built: RunComponents) -> None:
    rollouts = search(built, "search(step=word, keep=2)", n=7)
    for start in range(0, len(rollouts), 7):
        tree = rollouts[start : start + 7]
        kept = [rollout for rollout in tree if rollout.loss_mask.all()]
        rest = [rollout for rollout in tree if not rollout.loss_mask.any()]
        assert len(kept) == 2 and len(rest) == 5
        assert min(rollout.reward or 0 for rollout in kept) >= max(
            rollout.reward or 0 for rollout in rest
        )


# Steps of tokens.


def test_a_step_ends_with_the_token_that_completes_its_end() -> None:
    texts = {1: "x", 2: "\n", 3: "y\n\nz", 4: "\n\n", 5: " "}
    sample = Sample(
        torch.tensor([1, 2, 1, 3, 5, 2, 2, 4, 1]),
        torch.arange(9.0),
        -torch.arange(9.0),
        "length",
    )

    def split(step: str) -> list[list[int]]:
        answer = Tokens.from_sample(sample, "student", 0)
        parts = split_steps(answer, find_step_ends(sample.tokens.tolist(), texts.__getitem__, step))
        assert torch.cat([part.sampling_logprobs for part in parts]).equal(torch.arange(9.0))
        assert all(part.sampling_logprobs.equal(-part.policy_logprobs) for part in parts)
        return [part.ids.tolist() for part in parts]

    assert split("line") == [[1, 2], [1, 3], [5, 2], [2], [4], [1]]
    assert split("paragraph") == [[1, 2, 1, 3], [5, 2, 2], [4], [1]]
    assert split("word") == [[1, 2, 1, 3, 5], [2, 2, 4, 1]]
    assert find_step_ends([], texts.__getitem__, "line") == []


# Whole runs.

RUN = {
    "rollout": {"source": "search(step=word, breadth=2, keep=2)", "n": 4, "max_new_tokens": LIMIT},
    "objective": {"signal": "score(group_mean)"},
    "teacher": {"type": "none"},
}


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_is_resumed_as_if_it_had_not_stopped(
    spaced: Path, tmp_path: Path, staleness: int
) -> None:
    changes = {**RUN, "rollout": {**RUN["rollout"], "max_staleness": staleness}}
    whole = toy_run(spaced, tmp_path / "whole", changes).folder
    toy_run(spaced, tmp_path / "cut", {**changes, "train.steps": 2})
    cut = toy_run(
        spaced, tmp_path / "cut", changes, resume=True, allow_changed=["train.steps"]
    ).folder
    assert (whole / "rollouts.jsonl").read_bytes() == (cut / "rollouts.jsonl").read_bytes()
    recorded = [
        RolloutRow.model_validate({**row}) for row in map(strip, rows(whole / "rollouts.jsonl"))
    ]
    prompts = {row.prompt: Prompt(row.prompt, (Message("user", row.prompt),)) for row in recorded}
    for row in recorded:
        assert row.steps and RolloutRow.of(row.step, row.to_rollout(prompts[row.prompt])) == row
    metrics = rows(whole / "metrics.jsonl")
    assert all(0 <= row["search_value"] <= 1 and row["search_nodes"] > 1 for row in metrics)


def strip(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a rollout without the columns of its update."""
    return {name: row[name] for name in RolloutRow.model_fields if name in row}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"source": "search(step=comma)"}}, "'line', 'paragraph' or 'word'"),
    ],
)
def test_what_cannot_search_is_refused_in_one_line(
    spaced: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        toy_recipe(spaced, changes)
    assert message in str(refused.value)


def test_a_conversation_is_not_searched(spaced: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(spaced, {"task": {"type": "walker"}, "rollout": {"source": "search"}})
    with pytest.raises(CapabilityError, match=r"search\(.*does not write turn by turn"):
        assemble_run(recipe, tmp_path)


def test_a_search_is_read_back_as_it_was_written() -> None:
    source = Search(step="paragraph", breadth=4, exploration=0.5, keep=1)
    read = TypeAdapter(SourceChoice).validate_python(source.model_dump())
    assert read == source
