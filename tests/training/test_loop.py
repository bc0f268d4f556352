"""Each objective on each signal teaches: the student comes nearer to its teacher on the states it visits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import in_check, make_model, rows, toy_recipe, toy_run

from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import NumericError, TeacherError
from practicum.objective import Objective, Signal
from practicum.ports import AdamParams, Capabilities, Teacher
from practicum.ports.scoring import Scorer
from practicum.rollouts import select_prompts
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.training.asynchronous import open_step_runner
from practicum.training.loop import StepComponents, StepSettings, assemble, train
from practicum.types import (
    Datum,
    ForwardResult,
    Judgement,
    Message,
    Metrics,
    Prompt,
    Rollout,
    StepResult,
    TeacherSignal,
)

LONG = {"train.steps": 24, "train.prompts_per_step": 16, "train.checkpoint_every": None}

# The share of the held-out reverse KL that may remain after 24 steps; exact gradients halve it and more, gradients from one
# sampled token per state are noisier and reduce it less. The toy vocabulary has 11 tokens.
HALVED, LOWER = 0.5, 0.8
OBJECTIVES: dict[str, tuple[dict[str, Any], float]] = {
    "reverse_kl": ({"signal": "full", "divergence": "reverse_kl"}, HALVED),
    "jsd": ({"signal": "full", "divergence": "jsd(0.3)"}, HALVED),
    "skew_reverse_kl": ({"signal": "full", "divergence": "skew_reverse_kl(0.1)"}, HALVED),
    "topk_bucket": ({"signal": "topk(8)"}, HALVED),
    "topk_renorm": ({"signal": "topk(8, tail=renorm)"}, HALVED),
    "topk_sampled": ({"signal": "topk(8, tail=sampled)"}, HALVED),
    "sampled": ({"signal": "sampled", "estimator": "score_function"}, LOWER),
    "sampled_to_the_end": ({"signal": "sampled", "estimator": "score_function(gamma=1)"}, LOWER),
    "k2_surrogate": ({"signal": "sampled", "estimator": "k2_surrogate"}, LOWER),
    "two_terms": (
        {
            "losses": [
                {"signal": "full", "divergence": "reverse_kl", "coefficient": 0.5},
                {"signal": "full", "divergence": "forward_kl", "coefficient": 0.5},
            ]
        },
        HALVED,
    ),
}


@pytest.mark.parametrize(
    "name", in_check(OBJECTIVES, "reverse_kl", suite=("topk_bucket", "sampled", "two_terms"))
)
def test_the_objective_brings_the_student_nearer_to_its_teacher(
    models: Path, tmp_path: Path, name: str
) -> None:
    objective, left = OBJECTIVES[name]
    summary = toy_run(
        models, tmp_path, {**LONG, "objective": objective, "evaluation.prompts": 8}
    ).summary
    assert summary["after"]["reverse_kl"] < left * summary["before"]["reverse_kl"]
    assert summary["skipped_updates"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [{"student.lora": {"rank": 8, "alpha": 16}}, {"student.trainable_layers": 1}]
)
def test_part_of_the_weights_can_learn_too(
    models: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    beginner = make_model(
        tmp_path / "beginner", seed=1, pretrain=30
    )  # frozen random embeddings could not learn
    changes = {"student.model": str(beginner), "optimizer.learning_rate": 0.003, **how}
    changes |= {"evaluation.prompts": 8, "evaluation.samples": 4, "evaluation.temperature": 1.0}
    summary = toy_run(models, tmp_path, {**LONG, **changes}).summary
    assert summary["after"]["reverse_kl"] < 0.9 * summary["before"]["reverse_kl"]


def test_a_student_that_is_its_teacher_learns_nothing(models: Path, tmp_path: Path) -> None:
    changes = {"student.model": str(models / "teacher"), "train.steps": 1}
    (row,) = rows(toy_run(models, tmp_path, changes).folder / "metrics.jsonl")
    assert abs(row["reverse_kl"]) < 1e-6 and row["grad_norm"] < 1e-5


def test_a_prompt_comes_once_an_epoch_and_the_order_is_a_function_of_seed_and_step() -> None:
    prompts = [Prompt(str(number), (Message("user", "a"),)) for number in range(10)]
    epoch = [prompt.id for step in range(1, 6) for prompt in select_prompts(prompts, 0, step, 2)]
    assert sorted(epoch, key=int) == [str(number) for number in range(10)]
    assert [prompt.id for prompt in select_prompts(prompts, 0, 4, 2)] == epoch[6:8]
    assert epoch != [
        prompt.id for step in range(6, 11) for prompt in select_prompts(prompts, 0, step, 2)
    ]


def test_more_prompts_a_step_than_there_are_start_the_next_epoch() -> None:
    prompts = [Prompt(str(number), (Message("user", "a"),)) for number in range(3)]
    taken = [prompt.id for prompt in select_prompts(prompts, 0, 1, 7)]
    assert len(taken) == 7 and {"0", "1", "2"} == set(taken[:3]) == set(taken[3:6])


def test_the_loop_stops_when_too_many_updates_were_skipped(models: Path, tmp_path: Path) -> None:
    results = train(1, 10, *skipping(models, tmp_path, every=1))
    assert [next(results).step for _ in range(3)] == [1, 2, 3], (
        "the rows of skipped steps are handed out first"
    )
    with pytest.raises(
        NumericError, match=r"skipped 3 times in 20 steps \(steps \[1, 2, 3\]\).*learning_rate"
    ):
        next(results)


def test_a_scorer_whose_updates_are_skipped_stops_the_loop_as_the_student_does(
    models: Path, tmp_path: Path
) -> None:
    parts, settings = skipping(models, tmp_path, every=100)
    parts = replace(parts, scorers={"judge": SkippingScorer()})
    results = train(1, 10, parts, settings)
    assert [next(results).metrics["scorer-judge/skipped"] for _ in range(3)] == [1.0] * 3
    with pytest.raises(
        NumericError,
        match=r"the update of scorers.judge was skipped 3 times .* lower scorers.judge.learning_rate",
    ):
        next(results)


class SkippingScorer(Scorer):
    """A scorer that learns nothing, since its gradient is never finite."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [Judgement(None) for _ in rollouts]

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        return {"skipped": 1.0}


def test_a_skipped_update_now_and_then_does_not_stop_the_loop(models: Path, tmp_path: Path) -> None:
    assert [result.step for result in train(1, 45, *skipping(models, tmp_path, every=10))] == list(
        range(1, 46)
    )


BAD_SIGNALS = {
    "too few": ([], "answered 0 of 1 rollouts"),
    "wrong length": ([TeacherSignal(logprobs=torch.zeros(2))], "cover 2 tokens instead of 3"),
    "not a number": ([TeacherSignal(logprobs=torch.full((3,), torch.nan))], "hold NaN"),
    "above zero": ([TeacherSignal(logprobs=torch.ones(3))], "above 0"),
    "hidden not a number": (
        [TeacherSignal(hidden=torch.full((3, 4), torch.nan))],
        "hidden.*hold NaN",
    ),
}


@pytest.mark.parametrize("name", BAD_SIGNALS)
def test_a_signal_that_cannot_be_right_is_refused_with_its_rollout(name: str) -> None:
    signals, text = BAD_SIGNALS[name]
    with pytest.raises(TeacherError, match=text):
        assemble([a_rollout()], signals)


def test_rounding_above_zero_is_no_mistake() -> None:
    assert len(assemble([a_rollout()], [TeacherSignal(logprobs=torch.full((3,), 1e-5))])) == 1


def a_rollout() -> Rollout:
    return Rollout(
        prompt=Prompt("p", (Message("user", "ab"),)),
        prompt_tokens=(3, 4),
        tokens=torch.tensor([7, 8, 2]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        sampling_logprobs=torch.zeros(3),
        policy_logprobs=torch.zeros(3),
        policy_version=0,
        stop_reason="stop",
        text="ab",
    )


class RecordingTrainer(LocalTrainer):
    """A trainer that records its data and the weights at that time."""

    def __init__(self, trainer: LocalTrainer) -> None:
        super().__init__(trainer.language_model, trainer.limits)
        self.calls: list[tuple[list[Datum], int]] = []

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        self.calls.append((list(data), seed))
        return super().forward_backward(data, objective, seed)


def one_step(
    models: Path, folder: Path, changes: dict[str, Any]
) -> tuple[RecordingTrainer, RunComponents, StepResult]:
    recipe = toy_recipe(models, {"train.prompts_per_step": 4, "rollout.n": 2, **changes})
    built = assemble_run(recipe, folder)
    trainer = RecordingTrainer(built.trainer)
    (result,) = train(1, 1, replace(built.parts, student=trainer), built.settings)
    return trainer, built, result


def test_epochs_learn_from_the_same_data_again(models: Path, tmp_path: Path) -> None:
    """Check that two epochs of two updates equal four manual updates, each with a separate seed."""
    trainer, built, result = one_step(
        models, tmp_path, {"train.updates_per_step": 2, "train.epochs": 2}
    )
    parts = [data for data, _ in trainer.calls]
    assert len(parts) == 4 and parts[0] == parts[2] and parts[1] == parts[3]
    assert len({seed for _, seed in trainer.calls}) == 4
    again = assemble_run(toy_recipe(models), tmp_path)
    plan, metrics, outputs = built.settings.plan(1), [], []
    for data, seed in trainer.calls:
        done = again.trainer.forward_backward(data, plan.objective, seed)
        metrics.append(done.metrics | again.trainer.optim_step(plan.adam))
        outputs.append(done.outputs)
    weights = built.student.weights
    assert weights is not None and again.student.weights is not None
    assert all(value.equal(again.student.weights[name]) for name, value in weights.items())
    assert result.metrics["reverse_kl"] == pytest.approx(
        sum(row["reverse_kl"] for row in metrics) / 4
    )
    assert result.metrics["tokens"] == metrics[0]["tokens"] + metrics[1]["tokens"], (
        "the data of one epoch"
    )
    expected = torch.cat([part.logprobs for part in outputs[:2]])
    assert result.outputs.logprobs.equal(expected), "of the states that the student visited"


def test_one_epoch_is_the_default(models: Path, tmp_path: Path) -> None:
    plain, _, result = one_step(models, tmp_path, {})
    once, _, same = one_step(models, tmp_path, {"train.epochs": 1})
    assert [seed for _, seed in plain.calls] == [seed for _, seed in once.calls]
    assert result.metrics["loss"] == same.metrics["loss"]


CLIPPED = {
    "signal": "sampled",
    "estimator": "score_function",
    "correction": "ratio_clip(0.0001, 0.0001)",
}


def test_a_clip_acts_from_the_second_epoch_on(models: Path, tmp_path: Path) -> None:
    """In the first epoch every ratio is 1, so nothing is clipped; the second one leaves out tokens that have moved."""
    plain = {**CLIPPED, "correction": "ratio"}
    weights = {}
    for name, objective, epochs in (
        ("one", CLIPPED, 1),
        ("plain", plain, 1),
        ("two", CLIPPED, 2),
        ("free", plain, 2),
    ):
        changes = {
            "objective": objective,
            "train.epochs": epochs,
            "optimizer.learning_rate": 0.01,
            "rollout.n": 4,
        }
        _, built, _ = one_step(models, tmp_path, changes)
        assert built.student.weights is not None
        weights[name] = torch.cat(
            [value.detach().flatten() for value in built.student.weights.values()]
        )
    assert weights["one"].equal(weights["plain"])
    assert not weights["two"].equal(weights["free"])


def test_the_share_of_clipped_tokens_is_measured_in_every_update(
    models: Path, tmp_path: Path
) -> None:
    objective = {**CLIPPED, "correction": "ratio_clip(0.02, 0.005)"}
    changes = {
        "objective": objective,
        "train.updates_per_step": 2,
        "train.epochs": 2,
        "optimizer.learning_rate": 0.01,
        "rollout.n": 4,
    }
    trainer, built, result = one_step(models, tmp_path, changes)
    again = assemble_run(toy_recipe(models), tmp_path)
    plan, shares = built.settings.plan(1), []
    for data, seed in trainer.calls:
        done = again.trainer.forward_backward(data, plan.objective, seed)
        again.trainer.optim_step(plan.adam)
        sampled = torch.cat([datum.rollout.sampling_logprobs for datum in data])
        ratio = (done.outputs.logprobs - sampled).exp()
        up = done.outputs.teacher_logprobs > done.outputs.logprobs
        # The loss mask excludes no token here.
        shares.append(float(torch.where(up, ratio > 1.005, ratio < 0.98).float().mean()))
        assert done.metrics["clipped"] == pytest.approx(shares[-1])
    # Right after sampling every ratio is 1; the second update uses other answers after one step.
    assert shares[0] == 0.0 and min(shares[1:]) > 0.05
    assert result.metrics["clipped"] == pytest.approx(sum(shares) / 4)


class LearningTeacher(Teacher):
    """Records its events."""

    capabilities = Capabilities(signals=frozenset({"sampled"}))

    def __init__(self) -> None:
        self.told: list[tuple[int, list[Datum]]] = []

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        return [
            TeacherSignal(logprobs=torch.full((len(rollout.tokens),), -1.0)) for rollout in rollouts
        ]

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        self.told.append((step, list(data)))


@pytest.mark.parametrize("lag", [0, 1])
def test_what_learns_beside_the_student_gets_the_data_of_the_step(
    models: Path, tmp_path: Path, lag: int
) -> None:
    recipe = toy_recipe(models, {"objective": {"signal": "sampled"}, "rollout.max_staleness": lag})
    built = assemble_run(recipe, tmp_path)
    teacher = LearningTeacher()
    parts = replace(built.parts, teacher=teacher)
    with open_step_runner(parts, built.settings, 3, lag, ["teacher"]) as ahead:
        results = list(train(1, 3, parts, built.settings, ahead.step))
    assert [step for step, _ in teacher.told] == [1, 2, 3]
    for result, (_, data) in zip(results, teacher.told, strict=True):
        assert [datum.rollout for datum in data] == result.rollouts
        assert all(datum.signal.logprobs is not None for datum in data)


class SkippingTrainer(LocalTrainer):
    """A trainer that skips every n-th update."""

    def __init__(self, trainer: LocalTrainer, every: int) -> None:
        super().__init__(trainer.language_model, trainer.limits)
        self.every = every
        self.steps = 0

    def optim_step(self, params: AdamParams) -> Metrics:
        self.steps += 1
        return {**super().optim_step(params), "skipped": float(self.steps % self.every == 0)}


def skipping(models: Path, folder: Path, every: int) -> tuple[StepComponents, StepSettings]:
    """Return the parts of a loop with a trainer that skips updates."""
    recipe = toy_recipe(models, {"train.prompts_per_step": 1, "rollout.max_new_tokens": 2})
    built = assemble_run(recipe, folder)
    return replace(built.parts, student=SkippingTrainer(built.trainer, every)), built.settings
