"""Requirements for every scorer, tested for each file in the folder of scorers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_recipe

from practicum.core.plugins import list_plugins, load_plugin
from practicum.ports.scoring import (
    Scorer,
    ScorerSettings,
)
from practicum.runs.assembly import assemble_run
from practicum.training.judging import add_judgements, judge_with
from practicum.types import Judgement, Message, Metrics, Prompt, Rollout, SearchStep

LEARNED = {"learning_rate": 0.01}

# One set of settings or more for each file; a scorer without an entry here fails the first test.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "discriminator": [LEARNED, {**LEARNED, "warmup_steps": 1}],
    "process": [{**LEARNED, "step": "word"}],
    "judge": [{"teacher": {"type": "grading_teacher:Plugin"}}],
    "length": [{"limit": 1, "penalty": 0.25}],
    "likelihood": [{"teacher": {"type": "self", "weights": "frozen"}}],
    "outcome": [{**LEARNED, "share": 0.5}],
    "value": [
        LEARNED,
        {**LEARNED, "gamma": 0.9, "gae_lambda": 0.7, "updates": 2},
        {**LEARNED, "body": "student"},
    ],
}
CASES = [
    (name, settings) for name in list_plugins("scorers") for settings in SETTINGS.get(name, [])
]

Assemble = Callable[[], Scorer]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1])]))
def assemble(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> Assemble:
    """Return a function that builds the same scorer at each call."""
    name, settings = request.param
    # A discriminator needs the teacher's answers; all scorers accept them.
    changes = {"rollout.source": "join(teacher)", "rollout.n": 2}
    recipe = toy_recipe(models, {**changes, "scorers": {"judge": {"type": name, **settings}}})

    def build() -> Scorer:
        components = assemble_run(recipe, tmp_path)
        request.addfinalizer(components.close)
        return components.parts.scorers["judge"]

    return build


def write_rollouts() -> list[Rollout]:
    """Return answers of ragged lengths to eight prompts: two of the student and one of the teacher each."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for number in range(8):
        prompt = Prompt(f"p{number}", (Message("user", "ab"),), answer="ba")
        for sample in range(3):
            length = int(torch.randint(1, 5, (1,), generator=generator))
            tokens = torch.randint(0, 6, (length,), generator=generator)
            zeros = torch.zeros(length)
            mask = torch.ones(length, dtype=torch.bool)
            mask[0] = length == 1
            reward = None if number == 7 else float((number + sample) % 2)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    prompt_tokens=(1, 2, 3 + number % 2),
                    tokens=tokens,
                    loss_mask=mask,
                    sampling_logprobs=zeros,
                    policy_logprobs=zeros,
                    policy_version=0,
                    stop_reason="stop",
                    text=f"{number}{sample}",
                    sample=sample,
                    reward=reward,
                    source="teacher" if sample == 2 else "student",
                    steps=(SearchStep(f"0.{sample}", length, 1, reward, reward),),
                )
            )
    return rollouts


def judge(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Rollout]:
    return list(add_judgements(rollouts, {"judge": scorer}, {}))


def learn(scorer: Scorer, rollouts: Sequence[Rollout]) -> Metrics:
    """Train the scorer as a step does, after judging the rollouts."""
    judged = judge(scorer, rollouts)
    scorer.add_gradient(judged)
    return scorer.fit(judged)


def assert_same(one: Sequence[Judgement], other: Sequence[Judgement], tolerance: float) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.value == (
            None if theirs.value is None else pytest.approx(theirs.value, abs=tolerance)
        )
        assert (mine.tokens is None) == (theirs.tokens is None)
        if mine.tokens is not None and theirs.tokens is not None:
            torch.testing.assert_close(mine.tokens, theirs.tokens, rtol=0, atol=tolerance)


def test_every_scorer_on_disk_is_under_contract() -> None:
    assert sorted(SETTINGS) == list_plugins("scorers")


@pytest.mark.parametrize("name", list_plugins("scorers"))
def test_its_settings_say_when_it_is_asked(name: str) -> None:
    config = load_plugin("scorers", name).Config.model_validate({"type": name, **SETTINGS[name][0]})
    assert isinstance(config, ScorerSettings)
    assert config.type == name
    assert isinstance(config.follows_student, bool)
    assert ScorerSettings().follows_student, "unless the settings say otherwise"


def test_it_judges_each_rollout_in_order_whatever_is_beside_it(assemble: Assemble) -> None:
    scorer, rollouts = assemble(), write_rollouts()
    assert isinstance(scorer, Scorer)
    for _ in range(2):
        learn(scorer, rollouts)
    whole = judge_with("judge", scorer, rollouts)
    assert len({judgement.value for judgement in whole}) > 3
    assert_same([judge_with("judge", scorer, [rollout])[0] for rollout in rollouts], whole, 1e-5)
    assert_same(judge_with("judge", scorer, rollouts[::-1])[::-1], whole, 1e-5)
    assert judge_with("judge", scorer, []) == []


def test_it_changes_by_learning_alone_and_its_state_is_all_of_it(assemble: Assemble) -> None:
    scorer, twin, rollouts = assemble(), assemble(), write_rollouts()
    first = scorer.score(rollouts)
    assert_same(scorer.score(rollouts), first, 0.0)
    learn(scorer, rollouts)
    state = {name: tensor.clone() for name, tensor in scorer.save_state().items()}
    twin.load_state(state)
    for _ in range(2):
        assert_same(scorer.score(rollouts), twin.score(rollouts), 0.0)
        mine, theirs = (learn(one, rollouts) for one in (scorer, twin))
        assert mine == theirs and all(isinstance(number, float) for number in mine.values())
    assert scorer.save_state().keys() == twin.save_state().keys()
    for name, tensor in scorer.save_state().items():
        assert tensor.equal(twin.save_state()[name]), name


def test_it_says_nothing_false_of_what_it_cannot_learn_from(assemble: Assemble) -> None:
    scorer = assemble()
    unrewarded = [
        replace(rollout, reward=None, source="student", steps=()) for rollout in write_rollouts()
    ]
    before = {name: tensor.clone() for name, tensor in scorer.save_state().items()}
    metrics = learn(scorer, unrewarded)
    if before:
        assert metrics.get("fitted", metrics.get("pairs")) == 0.0, "counted, not dropped silently"
    after = scorer.save_state()
    assert all(tensor.equal(after[name]) for name, tensor in before.items() if name != "steps")
