"""Learned scorers: they learn to recognise writers, right answers and expected rewards; and the prompts they learn from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learned_scorers import GENERATOR, build_scorer, write_answer

from practicum.scorers.value import compute_distance, read_text
from practicum.training.judging import add_judgements


def test_an_outcome_model_learns_from_its_own_prompts_what_is_right_elsewhere(
    models: Path, tmp_path: Path
) -> None:
    GENERATOR.manual_seed(1)
    scorer = build_scorer(models, tmp_path, type="outcome", share=0.5, warmup_steps=2)
    for step in range(25):
        answers = [
            write_answer(number, 4 + number % 2, "student", float(number % 2))
            for number in range(24)
        ]
        judged = list(add_judgements(answers, {"judge": scorer}, {}))
        values = [rollout.judgements["judge"].value for rollout in judged]
        assert (set(values) == {None}) == (step < 2)
        fitted = scorer.fit(judged)["fitted"]
        if step >= 2:
            assert fitted == values.count(None), "it learns from the prompts that it does not judge"
    pairs = [(value, rollout.reward) for value, rollout in zip(values, judged, strict=True)]
    assert 6 <= values.count(None) <= 18
    for value, reward in pairs:
        assert value is None or abs(value - float(reward or 0.0)) < 0.2


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.7), (1.0, 1.0), (0.8, 0.0)])
def test_a_critic_gives_the_advantages_of_its_values(
    models: Path, tmp_path: Path, gamma: float, gae_lambda: float
) -> None:
    """1506.02438, equation 16, token by token; tokens of other writers are no steps."""
    GENERATOR.manual_seed(2)
    scorer = build_scorer(models, tmp_path, type="value", gamma=gamma, gae_lambda=gae_lambda)
    answers = [
        write_answer(number, number % 4, "student", float(number % 2)) for number in range(8)
    ]
    mask = torch.tensor([True, False, True])
    answers[3] = replace(answers[3], loss_mask=mask)
    for _ in range(3):
        scorer.fit(answers)
    (judgement,) = scorer.score([answers[3]])
    values = {
        place: scorer._model.predict([read_text(answers[3])])[0][place].item()  # type: ignore[attr-defined]
        for place in (0, 2)
    }
    last = 1.0 - values[2]
    first = gamma * values[2] - values[0] + gamma * gae_lambda * last
    assert judgement.tokens is not None
    assert judgement.tokens.tolist() == pytest.approx([first, 0.0, last], abs=1e-6)
    assert judgement.value == pytest.approx(values[0], abs=1e-6)


def test_normalized_advantages_are_those_of_all_tokens_centred_over_their_spread(
    models: Path, tmp_path: Path
) -> None:
    """Check against LLM4Teach's code; an answer without a reward and tokens of other writers have no part in it."""
    rows = {}
    for normalize in (False, True):
        GENERATOR.manual_seed(4)
        scorer = build_scorer(models, tmp_path, type="value", normalize=normalize)
        answers = [
            write_answer(number, number % 4, "student", float(number > 4)) for number in range(8)
        ]
        answers[1] = write_answer(1, 1, "student", None)
        answers[3] = replace(answers[3], loss_mask=torch.tensor([True, False, True]))
        for _ in range(3):
            scorer.fit(answers)
        judgements = scorer.score(answers)
        assert judgements[1].value is None and judgements[1].tokens is None
        assert judgements[3].tokens is not None and judgements[3].tokens[1] == 0
        own = [
            judged.tokens[answer.loss_mask]
            for judged, answer in zip(judgements, answers, strict=True)
            if judged.tokens is not None
        ]
        rows[normalize] = torch.cat(own)
    plain = rows[False]
    expected = (plain - plain.mean()) / plain.std()
    torch.testing.assert_close(rows[True], expected, rtol=1e-4, atol=1e-5)
    assert scorer.score(answers[1:2])[0].tokens is None, "a step without a reward has no spread"


def test_a_clip_stops_a_value_that_nears_its_return_and_no_other() -> None:
    """PPO's code: every way that a value can move, by the slope of its distance."""
    before, clip = torch.zeros(1), 0.2
    for value in (-0.9, -0.3, -0.1, 0.1, 0.3, 0.9):
        for returned in (-1.0, -0.25, 0.15, 0.6, 2.0):
            number, aim = torch.tensor([value], requires_grad=True), torch.tensor([returned])
            limited = compute_distance(number, before, aim, clip)
            plain = compute_distance(number, before, aim, None)
            (slope,) = torch.autograd.grad(limited, number)
            bounded = min(max(value, -clip), clip)
            is_stopped = abs(value) > clip and abs(bounded - returned) > abs(value - returned)
            assert slope.item() == (0.0 if is_stopped else pytest.approx(value - returned))
            assert limited >= plain, "it never rewards what the plain distance does not"


def test_a_clip_keeps_a_critic_near_its_values_of_before(models: Path, tmp_path: Path) -> None:
    moved = {}
    for clip in (None, 0.05):
        GENERATOR.manual_seed(5)
        # A small rate: momentum moves a value on for ten updates after its slope has ended.
        scorer = build_scorer(
            models, tmp_path, type="value", clip=clip, updates=100, learning_rate=0.0005
        )
        answers = [write_answer(number, 4, "student", 1.0) for number in range(4)]
        metrics = scorer.fit(answers)
        judgements = scorer.score(answers)
        moved[clip] = max(judged.value or 0.0 for judged in judgements)
        # GAE's lambda is 0.95 and the first values are 0: the returns are its powers.
        unclipped = (0.95**4 + 0.95**2 + 1) / 6
        assert metrics["loss"] == pytest.approx(unclipped), "the first update knows no clip"
    assert moved[None] > 0.9
    assert 0.05 < moved[0.05] < 0.25
