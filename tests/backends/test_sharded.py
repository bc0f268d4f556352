"""A sharded trainer computes the results of a trainer in one process."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.backends._sharded.building import build_sharded_trainer, put_in_shards
from practicum.backends._sharded.fsdp_ranks import deal_passes
from practicum.backends._sharded.sharding import gather_tensor
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.trainer import LocalTrainer
from practicum.losses.passes import count_tokens
from practicum.objective import Objective
from practicum.ports import AdamParams
from practicum.types import AUTHORS, Datum

from .local.test_trainer import OBJECTIVES
from .rank_forks import run_ranks
from .tiny import ARCHITECTURES, data_for, rollout, rollouts, tiny

SEVERAL, ONE = 24, 10_000
"""Tokens of a micro-batch: several uneven ones, or all in one."""


def datums(architecture: str) -> list[Datum]:
    items = [rollout(3 + 5 * s % 11, 4 + 3 * s % 9, s, group=f"g{s // 2}") for s in range(10, 16)]
    return data_for(tiny(architecture, 1), [*items, *rollouts()])


def update(trainer: LocalTrainer, data: list[Datum], spec: dict[str, Any]) -> dict[str, Any]:
    result = trainer.forward_backward(data, Objective(**spec), 0)
    parameters = trainer.language_model.trainable_parameters()
    gradients = {name: gather_tensor(p.grad).clone() for name, p in parameters.items()}
    step = trainer.optim_step(AdamParams(1e-2, max_grad_norm=1.0))
    weights = {name: gather_tensor(p).clone() for name, p in parameters.items()}
    return {
        "metrics": result.metrics,
        "outputs": result.outputs,
        "supervised": result.supervised,
        "gradients": gradients,
        "step": step,
        "weights": weights,
    }


def compare(one: dict[str, Any], other: dict[str, Any]) -> None:
    scale = max(gradient.abs().max() for gradient in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        error = (other["gradients"][name] - gradient).abs().max()
        assert error <= 1e-6 * scale, f"{name}: {error / scale:.2e}"
        moved = (other["weights"][name] - one["weights"][name]).abs().max()
        assert moved <= 1e-4, f"{name}: {moved:.2e}"
    assert one["metrics"].keys() == other["metrics"].keys()
    for name, number in one["metrics"].items():
        assert other["metrics"][name] == pytest.approx(number, rel=1e-6, abs=1e-9), name
    assert one["supervised"] == other["supervised"]
    columns = asdict(other["outputs"]), asdict(one["outputs"])
    torch.testing.assert_close(*columns, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert other["step"] == pytest.approx(one["step"], rel=1e-6)


CASES = [
    (architecture, number, limit)
    for architecture in ARCHITECTURES
    for number in range(len(OBJECTIVES))
    for limit in (SEVERAL, ONE)
]
FEW = [("llama", 0, SEVERAL), ("qwen3", 4, SEVERAL), ("gemma3", 6, ONE), ("llama", 2, ONE)]


def check_cases(
    folder: Path, count: int, cases: list[tuple[str, int, int]], nodes: int = 1
) -> None:
    def work(rank: int) -> list[dict[str, Any]]:
        found = []
        for architecture, number, limit in cases:
            limits = TrainerLimits(micro_batch_tokens=limit, chunk_tokens=7)
            trainer, _ = build_sharded_trainer(put_in_shards(tiny(architecture), nodes), limits)
            found.append(update(trainer, datums(architecture), OBJECTIVES[number]))
        return found

    answers = run_ranks(folder, count, work)
    for place, (architecture, number, limit) in enumerate(cases):
        data = datums(architecture)
        # Other cuts round differently, in one process too.
        share = min(limit, -(-count_tokens(data) // count))
        limits = TrainerLimits(micro_batch_tokens=share, chunk_tokens=7)
        expected = update(LocalTrainer(tiny(architecture), limits), data, OBJECTIVES[number])
        for answer in answers:
            compare(expected, answer[place])


def test_two_ranks_compute_the_gradient_of_one(tmp_path: Path) -> None:
    check_cases(tmp_path, 2, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_objective_and_model_has_the_gradient_of_one_process(
    tmp_path: Path, count: int
) -> None:
    check_cases(tmp_path, count, CASES)


@pytest.mark.slow
def test_shards_that_two_nodes_repeat_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    check_cases(tmp_path, 4, FEW, nodes=2)


@pytest.mark.slow
def test_shards_in_bfloat16_have_the_gradient_of_one_process_but_for_rounding(
    tmp_path: Path,
) -> None:
    def learn(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
        return update(trainer, datums("llama"), {})["gradients"]

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = replace(tiny(), autocast=True)
        return learn(build_sharded_trainer(put_in_shards(model), TrainerLimits(60, 7))[0])

    expected = learn(LocalTrainer(replace(tiny(), autocast=True), TrainerLimits(60, 7)))
    norm = torch.nn.utils.get_total_norm(expected.values())
    for gradients in run_ranks(tmp_path, 2, work):
        errors = [gradients[name] - gradient for name, gradient in expected.items()]
        assert torch.nn.utils.get_total_norm(errors) < 0.1 * norm


GROUPED = [
    {
        "losses": [
            {"signal": "score(best_of_n, among=source)", "source": "student"},
            {"signal": "text", "divergence": "ce", "source": "reference", "samples": "best"},
        ]
    },
    {"signal": "logits(2)", "estimator": "score_function(baseline=group_mean)"},
    {"signal": "logits(3, soft)", "correction": "ratio_clip(0.3, 0.1)"},
]
"""Terms with coefficients that compare the answers of a prompt, or tokens far apart."""


def test_terms_over_answers_and_returns_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    data = [
        replace(item, rollout=replace(item.rollout, source="reference")) if row % 3 == 1 else item
        for row, item in enumerate(datums("llama"))
    ]
    limits = TrainerLimits(SEVERAL, 7)

    def work(rank: int) -> list[dict[str, Any]]:
        return [
            update(build_sharded_trainer(put_in_shards(tiny()), limits)[0], data, choice)
            for choice in GROUPED
        ]

    answers = run_ranks(tmp_path, 2, work)
    for place, choice in enumerate(GROUPED):
        expected = update(LocalTrainer(tiny(), limits), data, choice)
        assert all(answer[place]["metrics"]["supervised"] > 0 for answer in answers)
        for answer in answers:
            compare(expected, answer[place])


def test_an_environments_tokens_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    world = {"signal": "text", "divergence": "ce", "source": "environment"}
    choice = {"losses": [{"estimator": "score_function(1)"}, world]}
    indices = torch.tensor([AUTHORS.index("student"), AUTHORS.index("environment")])
    data = []
    for item in datums("llama"):
        authors = indices[(torch.arange(len(item.rollout.tokens)) % 3 == 1).long()]
        data.append(replace(item, rollout=replace(item.rollout, authors=authors.to(torch.uint8))))
    limits = TrainerLimits(SEVERAL, 7)
    answers = run_ranks(
        tmp_path,
        2,
        lambda rank: update(build_sharded_trainer(put_in_shards(tiny()), limits)[0], data, choice),
    )
    expected = update(LocalTrainer(tiny(), limits), data, choice)
    assert expected["metrics"]["observed_tokens"] > 0
    for answer in answers:
        compare(expected, answer)


def test_passes_are_dealt_to_whoever_has_least() -> None:
    assert deal_passes([5, 9, 1, 4], 2) == [[1, 2], [0, 3]]
    assert deal_passes([3], 3) == [[0], [], []]
    assert deal_passes([], 2) == [[], []]


class OneRankFails:
    """Lets the layers or the loss of rank 1 run out of memory for micro-batches that are too long."""

    def __init__(self, trainer: LocalTrainer, rank: int, tokens: int, where: str) -> None:
        self.failures = 0
        if rank != 1:
            return
        if where == "layer":
            layer = trainer.language_model.model.model.layers[1]  # type: ignore[union-attr, index]
            forward = layer.forward  # type: ignore[union-attr]

            def limited(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
                self.check(hidden.shape[1] > tokens)
                return forward(hidden, *arguments, **named)

            layer.forward = limited  # type: ignore[union-attr, assignment]
        else:
            compute = trainer._differentiate_all

            def differentiate(head: Any, hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
                self.check(len(hidden) > tokens)
                return compute(head, hidden, *arguments)

            trainer._differentiate_all = differentiate  # type: ignore[method-assign]

    def check(self, is_too_long: bool) -> None:
        if is_too_long:
            self.failures += 1
            raise torch.OutOfMemoryError("no memory left for a test")


@pytest.mark.parametrize(("where", "tokens"), [("layer", 30), ("loss", 14)])
def test_memory_that_runs_out_on_one_rank_halves_the_passes_of_all(
    tmp_path: Path, where: str, tokens: int
) -> None:
    def work(rank: int) -> dict[str, Any]:
        trainer, _ = build_sharded_trainer(put_in_shards(tiny()), TrainerLimits(200, 7))
        poor = OneRankFails(trainer, rank, tokens, where)
        answer = update(trainer, datums("llama"), {})
        return answer | {"limits": trainer.limits, "failures": poor.failures}

    first, second = run_ranks(tmp_path, 2, work)
    assert first["failures"] == 0 and second["failures"] > 0
    assert first["limits"] == second["limits"]
    halvings = first["metrics"].pop("halvings")
    assert halvings == second["metrics"].pop("halvings") >= 1
    expected = update(LocalTrainer(tiny(), first["limits"]), datums("llama"), {})
    expected["metrics"].pop("halvings")
    compare(expected, first)
    compare(expected, second)


def test_a_loss_that_is_no_number_on_one_rank_is_reported_by_all(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[dict[str, float], int]:
        trainer, _ = build_sharded_trainer(put_in_shards(tiny()), TrainerLimits(24, 7))
        data = datums("llama")
        signal = data[2].signal
        assert isinstance(signal.hidden, torch.Tensor)
        broken = replace(signal, hidden=signal.hidden * float("nan"))
        data[2] = replace(data[2], signal=broken)
        result = trainer.forward_backward(data, Objective(), 0)
        parameters = trainer.language_model.trainable_parameters().values()
        return result.metrics, sum(p.grad is not None for p in parameters)

    for metrics, gradients in run_ranks(tmp_path, 2, work):
        assert metrics["nonfinite"] == 1.0 and gradients == 0
