"""The evaluation with a search: which answer it chooses, what it may read, and where its numbers are."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from toy import make_model, rows, toy_recipe, toy_run

import practicum
from practicum.core.plugins import list_plugins, load_plugin
from practicum.core.randomness import seed_of
from practicum.errors import CapabilityError, RecipeError
from practicum.methods.rstar.search import Config as Search
from practicum.ports import SamplingClient, Task
from practicum.ports.scoring import Scorer
from practicum.rollouts import (
    SOURCES,
    HeldoutSearch,
    RolloutWriters,
    SourceChoice,
    add_rewards,
    collect_rollouts,
)
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.statistics.heldout import Evaluation
from practicum.training.evaluation import (
    EvaluationSettings,
    answer_heldout,
    evaluate_search,
)
from practicum.types import Judgement, Rollout, Sample, SampleRequest, SamplingParams

LIMIT = 8
CHOOSES = "search(step=word, breadth=2, exploration=0.7, keep=1, scorer=steps, reward=scorer)"

CHANGES: dict[str, Any] = {
    "rollout": {"source": "search(step=word, breadth=2)", "n": 5, "max_new_tokens": LIMIT},
    "objective": {"signal": "score(group_mean)"},
    "optimizer": {"learning_rate": 0.0003},
    "teacher": {"type": "none"},
    "scorers": {"steps": {"type": "process", "step": "word", "learning_rate": 0.01}},
    "evaluation": {"prompts": 8, "every": 2, "search": {"source": CHOOSES, "n": 5}},
}


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spaced")
    make_model(folder / "student", seed=1, alphabet="abcd ")
    return folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that reverses some strings, so that answers differ in their rewards."""
    folder = tmp_path_factory.mktemp("taught")
    make_model(folder / "student", seed=1, alphabet="abcd ", pretrain=120)
    return folder


@pytest.fixture(scope="module")
def built(spaced: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(spaced, CHANGES), tmp_path_factory.mktemp("models"))


class Liking(Scorer):
    """Scores each beginning of an answer with a number that depends on all of its tokens."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        judgements = []
        for rollout in rollouts:
            tokens = rollout.tokens.tolist()
            scores = [like(tokens[: end + 1]) for end in range(len(tokens))]
            judgements.append(Judgement(scores[-1], torch.tensor(scores, dtype=torch.float64)))
        return judgements


def like(tokens: Sequence[int]) -> float:
    return seed_of(3, "like", *tokens) / 2**63


def prepare(
    built: RunComponents, source: str = CHOOSES, *, n: int = 5, temperature: float = 1.0
) -> tuple[RolloutWriters, EvaluationSettings]:
    parts = built.parts
    writers = replace(parts.build_writers(parts.sampler), scorers={"steps": Liking()})
    assert built.evaluation is not None
    choice = TypeAdapter(SourceChoice).validate_python(source)
    sampling = replace(built.evaluation.sampling, temperature=temperature)
    search = HeldoutSearch(source=choice, n=n, temperature=temperature)
    return writers, replace(built.evaluation, sampling=sampling, search=search)


def choose(writers: RolloutWriters, settings: EvaluationSettings) -> Evaluation:
    searched = evaluate_search(writers, settings)
    assert searched is not None
    return searched


def answer_plainly(
    built: RunComponents, settings: EvaluationSettings, samples: int
) -> list[Rollout]:
    parts = built.parts
    plain = replace(settings, samples=samples)
    return answer_heldout(parts.sampler, parts.renderer, parts.task, plain)


# Laws.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_answer_of_a_search_is_the_plain_answer(
    built: RunComponents, temperature: float
) -> None:
    writers, settings = prepare(built, n=1, temperature=temperature)
    plain = answer_plainly(built, settings, 1)
    searched = choose(writers, settings)
    assert [answer.text for answer in searched.answers] == [rollout.text for rollout in plain]
    assert [answer.reward for answer in searched.answers] == [rollout.reward for rollout in plain]
    logprobs = [rollout.policy_logprobs.double().mean().item() for rollout in plain]
    assert [answer.logprob for answer in searched.answers] == logprobs


def test_without_branches_it_is_the_plain_answer_with_the_highest_score(
    built: RunComponents,
) -> None:
    source = CHOOSES.replace("breadth=2", "depth=0")
    writers, settings = prepare(built, source, n=24)
    plain = answer_plainly(built, settings, 24)
    expected = []
    for start in range(0, len(plain), 24):
        group = plain[start : start + 24]
        ended = [rollout for rollout in group if rollout.stop_reason == "stop"]
        expected.append(max(ended, key=lambda rollout: like(rollout.tokens.tolist())).text)
    searched = [answer.text for answer in choose(writers, settings).answers]
    assert searched == expected
    assert searched != [rollout.text for rollout in plain[::24]]


class Words(SamplingClient):
    """Writes two words of two letters and a stop token, each letter a or b; or continues them."""

    def __init__(self, letters: Sequence[int], space: int, stop: int) -> None:
        self.wholes = [
            (*first, space, *second, stop)
            for first in itertools.product(letters, repeat=2)
            for second in itertools.product(letters, repeat=2)
        ]

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        samples = []
        for request in requests:
            done = LIMIT - params.max_new_tokens
            start = request.prompt_tokens[len(request.prompt_tokens) - done :] if done else ()
            wholes = [whole for whole in self.wholes if whole[:done] == start]
            tokens = torch.tensor(wholes[request.seed % len(wholes)][done:])
            samples.append(
                Sample(tokens, torch.zeros(len(tokens)), torch.zeros(len(tokens)), "stop")
            )
        return samples


def test_in_a_whole_tree_it_is_the_best_of_all_answers(built: RunComponents) -> None:
    encode, stops = built.parts.renderer.encode, built.parts.renderer.stop_ids
    client = Words([*encode("a"), *encode("b")], encode(" ")[0], min(stops))
    source = CHOOSES.replace("breadth=2", "breadth=30")
    writers, settings = prepare(built, source, n=400)
    writers = replace(writers, student=client)
    best = max(client.wholes, key=like)
    expected = built.parts.renderer.decode(list(best))
    assert {answer.text for answer in choose(writers, settings).answers} == {expected}


def test_a_step_has_its_score_and_the_final_scores_of_the_answers_through_it(
    built: RunComponents,
) -> None:
    writers, settings = prepare(built, CHOOSES.replace("keep=1, ", ""), n=8)
    assert settings.search is not None
    batch = replace(settings.batch, n=8)
    rollouts = collect_rollouts(batch, settings.search.source, writers, settings.sampling)
    scores: dict[tuple[str, str], dict[str, float]] = {}
    finals: dict[tuple[str, str], list[float]] = {}
    for rollout in rollouts:
        assert rollout.reward is None, "the verifier is not asked"
        tokens, end = rollout.tokens.tolist(), 0
        for step in rollout.steps:
            end += step.tokens
            key = rollout.prompt.id, step.node
            scores.setdefault(key, {})[step.node] = like(tokens[:end])
            if rollout.stop_reason == "stop":
                finals.setdefault(key, []).append(like(tokens))
    assert {rollout.stop_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        for step in rollout.steps:
            key = rollout.prompt.id, step.node
            through = finals.get(key, [])
            assert step.visits == len(through) and step.reward is None
            total = scores[key][step.node] + sum(through)
            assert step.value == pytest.approx(total / (1 + len(through)), abs=1e-12)


# What it may read.


@dataclass
class Witness(Task):
    """Stores the reference answers that a verifier sees, in order."""

    inner: Task
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def train_prompts(self) -> Sequence[Any]:
        return self.inner.train_prompts()

    def heldout_prompts(self) -> Sequence[Any]:
        return self.inner.heldout_prompts()

    def reward(self, rollout: Rollout) -> float | None:
        self.asked.append((rollout.text, rollout.prompt.answer))
        return self.inner.reward(rollout)


def test_other_reference_answers_change_the_grades_and_not_the_answers(
    built: RunComponents,
) -> None:
    writers, settings = prepare(built, n=12)
    assert settings.search is not None
    first = [answer.text for answer in choose(writers, settings).answers]
    every = TypeAdapter(SourceChoice).validate_python(CHOOSES.replace("keep=1, ", ""))
    batch = replace(settings.batch, n=12)
    pool = collect_rollouts(batch, every, writers, settings.sampling)
    alternatives = [
        next(
            rollout.text
            for rollout in pool
            if rollout.prompt.id == prompt.id and rollout.text.strip() not in ("", text.strip())
        )
        for prompt, text in zip(settings.prompts, first, strict=True)
    ]
    for references, score in ((first, 1.0), (alternatives, 0.0)):
        prompts = [
            replace(prompt, answer=text.strip(), response=text, privileged={"hint": text})
            for prompt, text in zip(settings.prompts, references, strict=True)
        ]
        searched = choose(writers, replace(settings, prompts=prompts))
        assert [answer.text for answer in searched.answers] == first
        assert searched.scores == [score] * len(prompts)


def test_the_verifier_is_asked_once_per_prompt_about_the_chosen_answer(
    built: RunComponents,
) -> None:
    writers, settings = prepare(built)
    task = Witness(built.parts.task)
    searched = choose(replace(writers, task=task), settings)
    expected = [
        (answer.text, prompt.answer)
        for prompt, answer in zip(settings.prompts, searched.answers, strict=True)
    ]
    assert task.asked == expected


def test_the_source_and_the_scorer_see_no_fields_of_the_rows(built: RunComponents) -> None:
    writers, settings = prepare(built)
    prompts = [replace(prompt, privileged={"hint": "b"}) for prompt in settings.prompts]
    seen: list[tuple[Any, ...]] = []

    class Watching(Liking):
        def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
            for prompt in (rollout.prompt for rollout in rollouts):
                seen.append((prompt.answer, prompt.response, prompt.reasoning, prompt.privileged))
            return super().score(rollouts)

    choose(replace(writers, scorers={"steps": Watching()}), replace(settings, prompts=prompts))
    assert seen and all(fields == (None, None, None, {}) for fields in seen)


def test_a_search_by_scores_leaves_the_reward_to_the_verifier(built: RunComponents) -> None:
    writers, settings = prepare(built, CHOOSES.replace("keep=1, ", ""))
    assert settings.search is not None
    rollouts = collect_rollouts(settings.batch, settings.search.source, writers, settings.sampling)
    rewarded = add_rewards(rollouts, built.parts.task)
    assert {rollout.reward for rollout in rewarded} <= {0.0, 1.0}


def test_no_source_but_a_search_by_scores_answers_held_out_prompts() -> None:
    for name in list_plugins(SOURCES):
        config = load_plugin(SOURCES, name).Config
        assert config.explain_no_evaluation(config.model_construct()) is not None, name
    assert Search(scorer="steps", reward="scorer", keep=1).explain_no_evaluation() is None


JUDGE = {
    "type": "judge",
    "teacher": {"type": "self", "weights": "frozen"},
    "template": "{answer} {reference}",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluation.search.source": "dataset"},
            "evaluation.search.source: dataset may read the rows' answers or the verifier, or "
            "returns several answers; set search(scorer=NAME, reward=scorer, keep=1)",
        ),
        ({"evaluation.search.source": "teacher"}, "search.source: teacher may read the rows' ans"),
        (
            {"evaluation.search.source": "search(keep=1)"},
            "search backs up the verifier's rewards; set reward=scorer and scorer=NAME",
        ),
        (
            {"evaluation.search.source": CHOOSES.replace("keep=1", "keep=2")},
            "search returns several answers; set keep=1",
        ),
        (
            {"evaluation.search.source": "search(keep=1, reward=scorer)"},
            "search(reward=scorer) backs up a scorer's values; set scorer=NAME",
        ),
        (
            {"scorers": {}},
            "evaluation.search.source: no scorer is named 'steps'; add it to scorers: {steps: "
            "{type: process}}, or leave evaluation.search out",
        ),
        (
            {"scorers": {"steps": JUDGE}},
            "scorer 'steps' reads the rows' answers, which an evaluation may not; take {reference} "
            "out of scorers.steps.template, or use {type: process}",
        ),
    ],
)
def test_a_search_that_could_read_the_answers_is_refused_in_one_line(
    spaced: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        toy_recipe(spaced, {**CHANGES, **changes})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_conversation_is_not_searched_in_an_evaluation(spaced: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(
        spaced, {**CHANGES, "task": {"type": "walker"}, "rollout": {"source": "student"}}
    )
    with pytest.raises(CapabilityError, match="searches single answers, and this task answers eve"):
        assemble_run(recipe, tmp_path)


# Whole runs.


def test_a_run_has_both_accuracies_and_resumes_with_the_same_bytes(
    taught: Path, tmp_path: Path
) -> None:
    result = toy_run(taught, tmp_path / "whole", CHANGES)
    whole = result.folder
    toy_run(taught, tmp_path / "cut", {**CHANGES, "train.steps": 2})
    cut = toy_run(
        taught, tmp_path / "cut", CHANGES, resume=True, allow_changed=["train.steps"]
    ).folder
    for name in ("before.json", "after.json", "summary.json"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name
    searched = result.summary["search"]
    assert searched["before"]["prompts"] == searched["after"]["completions"] == 8
    saved = json.loads((whole / "after.json").read_text())
    chosen, plain = (sum(saved[who]["scores"]) / 8 for who in ("search", "student"))
    assert searched["gain"]["mean"] == pytest.approx(chosen - plain, abs=1e-12)
    reading = rows(whole / "metrics.jsonl")[-1]["heldout_search_accuracy"]
    assert reading == searched["after"]["accuracy"]["mean"]
    measured = practicum.evaluate(whole, progress=False)
    assert measured["search"] == searched["after"]


def test_without_a_search_a_run_has_no_such_number(taught: Path, tmp_path: Path) -> None:
    result = toy_run(taught, tmp_path, {**CHANGES, "evaluation": {"prompts": 4}, "train.steps": 1})
    assert "search" not in result.summary
    assert "search" not in json.loads((result.folder / "before.json").read_text())


def test_a_search_by_scores_needs_a_scorer() -> None:
    with pytest.raises(ValidationError, match="set scorer=NAME"):
        Search(reward="scorer")
