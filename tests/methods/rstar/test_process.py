"""The process preference model: which steps it compares, what it learns, and the search that it guides."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import curve, make_model, toy_data, toy_recipe, toy_run

from practicum.errors import CapabilityError, ModelError, RecipeError
from practicum.judging.learned import find_state
from practicum.methods.rstar.process import find_step_pairs, pair_extremes
from practicum.methods.rstar.search import Config as Search
from practicum.methods.rstar.search import StepSearch
from practicum.models.tensors import read_tensors
from practicum.ports.scoring import Scorer
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutBatch, list_all_keys
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.tree import StepNode, back_up, list_steps
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.runs.pipeline import run as run_pipeline
from practicum.runs.stages import parse_pipeline
from practicum.types import (
    Judgement,
    Message,
    Prompt,
    Rollout,
    SamplingParams,
    ScoreRequest,
    SearchStep,
)

LETTERS = "abcd "
BREADTH = 4


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spaced")
    make_model(folder / "student", seed=1, alphabet=LETTERS)
    return folder


CHANGES: dict[str, Any] = {
    "rollout": {
        "source": "search(step=word, breadth=2, scorer=steps)",
        "n": 5,
        "max_new_tokens": 8,
    },
    "objective": {"signal": "score(group_mean)"},
    "teacher": {"type": "none"},
    "scorers": {"steps": {"type": "process", "step": "word", "learning_rate": 0.01}},
}


@pytest.fixture
def built(spaced: Path, tmp_path: Path) -> RunComponents:
    return assemble_run(toy_recipe(spaced, CHANGES), tmp_path)


def answer(sample: int, tokens: Sequence[int], *steps: SearchStep) -> Rollout:
    count = len(tokens)
    return Rollout(
        Prompt("p", (Message("user", "ab"),)),
        (7, 8),
        torch.tensor(tokens),
        torch.ones(count, dtype=torch.bool),
        torch.zeros(count),
        torch.zeros(count),
        0,
        "stop",
        "",
        sample=sample,
        steps=steps,
    )


def write_tree() -> list[Rollout]:
    """Return the answers of a tree: a root with four children, the first with two children.

    One child's value is unknown. The values that guided the search order the steps in reverse.
    """
    first = SearchStep("0.0", 2, 2, 0.9, 0.25)
    return [
        answer(0, [1, 2, 3], first, SearchStep("0.0.0", 1, 1, 0.1, 0.5)),
        answer(1, [1, 2, 4, 5], first, SearchStep("0.0.1", 2, 1, 0.8, 0.0)),
        answer(2, [3, 3], SearchStep("0.1", 2, 1, 0.2, 0.75)),
        answer(3, [2, 2, 2], SearchStep("0.2", 3, 1, 0.5, 0.5)),
        answer(4, [5, 1], SearchStep("0.3", 2, 0, 1.0)),
    ]


Texts = list[list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""The tokens of the better and the worse text of each pair, in groups."""


def read(rollouts: Sequence[Rollout]) -> Texts:
    return [
        [(best.prompt_tokens[2:], worst.prompt_tokens[2:]) for best, worst in group]
        for group in find_step_pairs(rollouts)
    ]


def test_the_two_best_are_compared_with_the_two_worst() -> None:
    siblings, below, answers = read(write_tree())
    assert siblings == [((3, 3), (1, 2)), ((3, 3), (2, 2, 2)), ((2, 2, 2), (1, 2))]
    assert below == [((1, 2, 3), (1, 2, 4, 5))]
    # The means over the steps of the first two answers are 0.375 and 0.125.
    first, second = (1, 2, 3), (1, 2, 4, 5)
    assert answers == [((3, 3), second), ((3, 3), first), ((2, 2, 2), second)]
    assert read(write_tree()[2:3]) == []


def search_everything(seed: int) -> list[Rollout]:
    """Return all answers of three steps of a or b, or their first two, with random rewards of 0 or 1."""
    draw, paths = random.Random(seed), [*product((0, 1), repeat=2), *product((0, 1), repeat=3)]
    leaves = [path for path in paths if len(path) == 3 or draw.random() < 0.3]
    leaves = [path for path in leaves if path[:2] == path or path[:2] not in leaves]
    rewards = {path: float(draw.random() < 0.5) for path in leaves}
    rollouts = []
    for number, path in enumerate(draw.sample(leaves, len(leaves))):
        steps = []
        for end in range(1, len(path) + 1):
            below = [rewards[leaf] for leaf in leaves if leaf[:end] == path[:end]]
            name = ".".join(map(str, (0, *path[:end])))
            reward = sum(below) / len(below)
            steps.append(SearchStep(name, 1, len(below), draw.random(), reward))
        rollouts.append(replace(answer(number, path, *steps), reward=rewards[path]))
    return rollouts


def list_ordered_pairs(rollouts: Sequence[Rollout]) -> Texts:
    """Return all pairs by the definition: count how many candidates stand above and below each."""
    places: dict[tuple[int, ...], tuple[float, float, str]] = {}
    ends: dict[tuple[int, ...], tuple[float, float, str]] = {}
    for rollout in rollouts:
        path, qs = tuple(rollout.tokens.tolist()), [step.reward or 0.0 for step in rollout.steps]
        assert rollout.reward == qs[-1]
        for end, q in enumerate(qs, start=1):
            places.setdefault(path[:end], (q, q, str(path[: end - 1])))
        ends[path] = (qs[-1], sum(qs) / len(qs), "answers")
    groups: dict[str, Texts] = {}
    for table in (places, ends):
        for name in {group for _, _, group in table.values()}:
            rows = [(text, q, rank) for text, (q, rank, group) in table.items() if group == name]
            right = [row for row in rows if row[1] > 0]
            wrong = [row for row in rows if row[1] < 1]
            pairs = [
                (a[0], b[0])
                for i, a in enumerate(right)
                for j, b in enumerate(wrong)
                if sum(c[2] > a[2] or (c[2] == a[2] and k < i) for k, c in enumerate(right)) < 2
                and sum(c[2] < b[2] or (c[2] == b[2] and k < j) for k, c in enumerate(wrong)) < 2
                and a[1] > b[1]
            ]
            groups[name] = [pairs] if pairs else []
    return [pairs for group in groups.values() for pairs in group]


def test_in_whole_trees_the_pairs_are_the_ones_of_the_definition() -> None:
    counts = Counter[int]()
    for seed in range(60):
        rollouts = search_everything(seed)
        groups = read(rollouts)
        assert sorted(map(sorted, groups)) == sorted(map(sorted, list_ordered_pairs(rollouts)))
        rewards = {tuple(rollout.tokens.tolist()): rollout.reward for rollout in rollouts}
        across = [pair for group in groups for pair in group if pair[0][:-1] != pair[1][:-1]]
        assert all(rewards[best] == 1.0 and rewards[worst] == 0.0 for best, worst in across)
        counts[len(across)] += 1
        # The values that guided the search are random, and other ones give the same pairs.
        blind = [
            replace(row, steps=tuple(replace(step, value=None) for step in row.steps))
            for row in rollouts
        ]
        assert read(blind) == groups
    assert set(counts) >= {0, 2, 4}


def test_an_answer_that_is_cut_off_or_breaks_is_in_no_pair_of_answers() -> None:
    right, wrong = SearchStep("0.0", 2, 1, 1.0, 1.0), SearchStep("0.1.0", 1, 1, 0.0, 0.0)
    before = SearchStep("0.1", 1, 2, 0.0, 1.0)
    whole = [answer(0, [1, 2], right), answer(1, [3, 4], before, wrong)]
    assert read(whole) == [[((1, 2), (3, 4))]]
    assert read([whole[0], replace(whole[1], stop_reason="length")]) == []
    assert read([whole[0], answer(1, [3, 4, 5], before, wrong)]) == []


def test_a_wrong_answer_is_never_the_better_one_however_high_its_steps() -> None:
    texts = [ScoreRequest((place,), (0,)) for place in range(4)]
    ranks = [(0.0, 0.6), (1.0, 0.4), (1.0, 0.45), (0.0, 0.5)]
    first, low, high, last = texts
    rows = [(*rank, text) for rank, text in zip(ranks, texts, strict=True)]
    assert pair_extremes(rows) == [(high, last), (high, first), (low, last), (low, first)]


def test_a_tree_without_a_right_answer_has_no_pair_whatever_a_scorer_says() -> None:
    root = StepNode("0", Tokens.empty())
    for place, score in enumerate((0.9, 0.1, 0.5)):
        step = Tokens.from_text([place], "student", 0, in_loss=True)
        node = StepNode(f"0.{place}", step, root, score=score)
        for _ in range(place + 1):
            back_up(node, 0.0)
        root.children[place,] = node
    rollouts = [
        answer(place, [place], *list_steps(node))
        for place, node in enumerate(root.children.values())
    ]
    assert len({rollout.steps[0].value for rollout in rollouts}) == 3
    assert find_step_pairs(rollouts) == []
    right = list(root.children.values())[1]
    back_up(right, 1.0)
    rollouts[1] = answer(1, [1], *list_steps(right))
    for group in find_step_pairs(rollouts):
        assert {best.prompt_tokens[-1] for best, _ in group} == {1}
        assert {worst.prompt_tokens[-1] for _, worst in group} == {0, 2}


def test_its_loss_is_the_pairwise_one_and_it_learns_the_order(built: RunComponents) -> None:
    scorer, rollouts = built.parts.scorers["steps"], write_tree()
    metrics = [scorer.fit(rollouts) for _ in range(12)]
    assert metrics[0]["pairs"] == 7.0 and metrics[0]["accuracy"] == 0.5
    assert metrics[0]["loss"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-6)
    assert metrics[-1]["accuracy"] == 1.0 and metrics[-1]["loss"] < 0.3

    scores = [judgement.tokens for judgement in scorer.score(rollouts)]
    logits = [torch.logit(row) for row in scores if row is not None]
    shared, (first, second, third, fourth) = logits[0][1], [row[-1] for row in logits[:4]]
    groups = [
        torch.stack([third - shared, third - fourth, fourth - shared]),
        torch.stack([third - second, third - first, fourth - second]),
        torch.stack([first - second]),
    ]
    # Each group has the same weight, and its pairs share it.
    losses = [torch.log(1 + torch.exp(-margins)).mean().item() for margins in groups]
    assert scorer.fit(rollouts)["loss"] == pytest.approx(sum(losses) / 3, abs=1e-5)


def test_a_judgement_has_one_score_a_step(built: RunComponents) -> None:
    scorer, rollouts = built.parts.scorers["steps"], write_tree()
    for _ in range(3):
        scorer.fit(rollouts)
    shared, other = (judgement.tokens for judgement in scorer.score(rollouts[:2]))
    assert shared is not None and other is not None
    assert shared[0] == shared[1] and shared[1] != shared[2]
    assert other[2] == other[3]
    torch.testing.assert_close(shared[:2], other[:2], rtol=0, atol=1e-6)
    # Without a search the steps are found in the text; the last step's score is the answer's.
    space = built.parts.renderer.encode(" ")[0]
    (plain,) = scorer.score([answer(0, [1, space, 2, 3])])
    assert plain.tokens is not None and plain.value == pytest.approx(plain.tokens[-1].item())
    assert plain.tokens[0] == plain.tokens[1] != plain.tokens[2] == plain.tokens[3]
    (broken,) = scorer.score([replace(answer(0, [1, 2, 3]), steps=(SearchStep("0.0", 1, 1, 1.0),))])
    assert broken.tokens is not None and broken.tokens[0] != broken.tokens[1] == broken.tokens[2]


class Favourite(Scorer):
    """Prefers one node of each prompt's tree."""

    def __init__(self, liked: dict[str, str], *, per_token: bool = True) -> None:
        self.liked = liked
        self.per_token = per_token

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        judgements = []
        for rollout in rollouts:
            likes = float(rollout.steps[0].node == self.liked.get(rollout.prompt.id))
            tokens = torch.full((len(rollout.tokens),), likes)
            judgements.append(Judgement(likes, tokens if self.per_token else None))
        return judgements


def collect(built: RunComponents, scorer: Scorer | None) -> list[Rollout]:
    parts = built.parts
    batch = RolloutBatch(parts.prompts[:4], 12, 0, 1)
    params = SamplingParams(8, stop_ids=parts.renderer.stop_ids)
    search = StepSearch(
        Search(step="word", breadth=BREADTH, exploration=0.0, scorer="steps"),
        RolloutSampler(batch, parts.renderer, params, None),
        parts.task,
        built.trainer.build_sampling_client(),
        scorer,
    )
    return search.collect(list_all_keys(batch))


def test_the_search_goes_on_from_what_the_scorer_likes(built: RunComponents) -> None:
    # A random student answers nothing right, so all rewards are 0 and only the scores decide.
    unguided = collect(built, None)
    assert all(rollout.reward == 0.0 for rollout in unguided)
    liked = {
        rollout.prompt.id: rollout.steps[0].node
        for rollout in unguided
        if rollout.sample < BREADTH and len(rollout.steps) > 1
    }
    guided = collect(built, Favourite(liked))
    chosen, plain = (
        {
            rollout.prompt.id: rollout.steps[0].node
            for rollout in rollouts
            if rollout.sample == BREADTH and rollout.prompt.id in liked
        }
        for rollouts in (guided, unguided)
    )
    assert chosen == liked != plain
    for rollout in guided:
        first = rollout.steps[0]
        score = float(first.node == liked.get(rollout.prompt.id))
        assert first.value == pytest.approx(score / (first.visits + 1))


def test_a_scorer_of_whole_answers_cannot_guide(built: RunComponents) -> None:
    with pytest.raises(
        CapabilityError, match="needs one number per step, and this scorer returns one per an"
    ):
        collect(built, Favourite({}, per_token=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scorers": {}}, "search(scorer=steps): no scorer is named 'steps'; add it to scorers"),
        (
            {"rollout": {**CHANGES["rollout"], "max_staleness": 1}},
            "guides the search; set max_st",
        ),
    ],
)
def test_what_cannot_guide_is_refused(spaced: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        toy_recipe(spaced, {**CHANGES, **changes})
    assert message in str(refused.value)


def test_a_guided_run_is_resumed_with_the_same_bytes(spaced: Path, tmp_path: Path) -> None:
    whole = toy_run(spaced, tmp_path / "whole", CHANGES).folder
    assert max(curve(whole, "scorer-steps/undecided")) == 0.0
    toy_run(spaced, tmp_path / "cut", {**CHANGES, "train.steps": 2})
    cut = toy_run(
        spaced, tmp_path / "cut", CHANGES, resume=True, allow_changed=["train.steps"]
    ).folder
    assert (whole / "rollouts.jsonl").read_bytes() == (cut / "rollouts.jsonl").read_bytes()
    state = "checkpoints/step-4/scorer-steps.safetensors"
    assert (whole / state).read_bytes() == (cut / state).read_bytes()


def test_a_stage_goes_on_from_the_scorer_of_another(spaced: Path, tmp_path: Path) -> None:
    data = {**toy_data(spaced, CHANGES), "name": "rounds"}
    data["train"] = {**data["train"], "steps": 2}
    first = dict(data["scorers"]["steps"])
    again = {"steps": {**first, "begin": {"model": {"stage": "one"}}}}
    data["stages"] = [{"name": "one"}, {"name": "two", "scorers": again}]
    pipeline = parse_pipeline(data, "rounds")
    assert pipeline.resolve()["stages"][1]["scorers"]["steps"]["begin"] == {
        "model": {"stage": "one"}
    }
    folder = Path(run_pipeline(pipeline, out=tmp_path).folder)
    states = [
        read_tensors(find_state(str(stage / "model"), "steps"))
        for stage in sorted((folder / "stages").iterdir())
    ]
    assert [int(state["steps"]) for state in states] == [2, 4]
    with pytest.raises(ModelError, match=r"holds no state of a scorer 'other'; set a stage"):
        find_state(str(folder / "stages" / "01-one" / "model"), "other")
    data["stages"][1]["scorers"]["steps"]["begin"]["model"]["stage"] = "three"
    with pytest.raises(RecipeError, match=r"scorers.steps.begin.model: no stage named 'three'"):
        parse_pipeline(data, "rounds")
