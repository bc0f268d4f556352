"""The map of `dual_space` learns the same with a sharded student as with a student in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.backends._sharded.building import build_sharded_trainer, put_in_shards
from practicum.backends._sharded.parts import load_parts, save_parts
from practicum.backends._sharded.sharding import gather_tensor
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.projections import TO_STUDENT
from practicum.backends.local.trainer import LocalTrainer
from practicum.objective import Objective
from practicum.ports import AdamParams
from practicum.types import Datum, TeacherSignal
from tests.backends.rank_forks import run_ranks
from tests.backends.tiny import data_for, rollouts, tiny

OBJECTIVE = Objective.model_validate({"signal": "dual_space(2)", "divergence": "forward_kl"})
BESIDE = Objective.model_validate(
    {"losses": [{"signal": "dual_space(2)"}, {"signal": "text", "divergence": "ce"}]}
)
LIMITS = TrainerLimits(micro_batch_tokens=12, chunk_tokens=3)


def data() -> list[Datum]:
    """Return data with a silent teacher in the first row, and a teacher of another architecture in all other rows."""
    first, *others = data_for(tiny("gemma3", 1), rollouts())
    return [replace(first, signal=TeacherSignal()), *others]


def learn(trainer: LocalTrainer, datums: list[Datum], seed: int) -> dict[str, float]:
    """Take one step of two batches with accumulated gradients."""
    result = trainer.forward_backward(datums, OBJECTIVE, seed)
    trainer.forward_backward(datums[:2], OBJECTIVE, seed)
    return result.metrics | trainer.optim_step(AdamParams(1e-2, max_grad_norm=1.0))


def read(trainer: LocalTrainer) -> dict[str, dict[str, torch.Tensor]]:
    return {
        stem: {name: gather_tensor(tensor).clone() for name, tensor in tensors.items()}
        for stem, tensors in trainer.save_state().items()
    }


def start(nodes: int = 1) -> LocalTrainer:
    return build_sharded_trainer(put_in_shards(tiny(), nodes), LIMITS)[0]


def work_of(folder: Path, nodes: int = 1) -> Any:
    def work(rank: int) -> dict[str, Any]:
        trainer = start(nodes)
        metrics = [learn(trainer, data(), seed) for seed in range(2)]
        save_parts(trainer, folder)
        again = start(nodes)
        load_parts(again, folder, moments=True)
        silent = [replace(datum, signal=TeacherSignal()) for datum in data()]
        before = read(trainer)["student"]
        for one in (trainer, again):
            # Without a teacher signal, the map stays: AdamW's momentum does not move it.
            assert one.forward_backward(silent, BESIDE, 2).metrics["supervised"] > 0
            one.optim_step(AdamParams(1e-2, max_grad_norm=1.0))
        after = read(trainer)["student"]
        assert [name for name in before if after[name].equal(before[name])] == [TO_STUDENT]
        metrics += [learn(trainer, data(), 3)]
        assert learn(again, data(), 3) == metrics[-1]
        return {"metrics": metrics, "state": read(trainer), "resumed": read(again)}

    return work


def check(folder: Path, count: int, nodes: int = 1) -> None:
    """Check that ranks learn the same as one process, and resume from their checkpoint to the same bytes."""
    folder.mkdir(exist_ok=True)
    answers = run_ranks(folder / "ranks", count, work_of(folder, nodes))
    single = LocalTrainer(tiny(), LIMITS)
    metrics = [learn(single, data(), seed) for seed in range(2)]
    silent = [replace(datum, signal=TeacherSignal()) for datum in data()]
    single.forward_backward(silent, BESIDE, 2)
    single.optim_step(AdamParams(1e-2, max_grad_norm=1.0))
    metrics += [learn(single, data(), 3)]
    for answer in answers:
        for mine, theirs in zip(metrics, answer["metrics"], strict=True):
            assert theirs == {k: pytest.approx(v, rel=1e-6, abs=1e-7) for k, v in mine.items()}
        for stem, tensors in single.save_state().items():
            assert answer["state"][stem].keys() == tensors.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(
                    answer["state"][stem][name], tensor, rtol=1e-4, atol=1e-4
                )
                assert answer["state"][stem][name].equal(answers[0]["state"][stem][name]), name
                assert answer["resumed"][stem][name].equal(answer["state"][stem][name]), name
    first = LocalTrainer(tiny(), LIMITS)
    learn(first, data(), 0)
    moved = single.save_state()["student"][TO_STUDENT] - first.save_state()["student"][TO_STUDENT]
    assert moved.any()


def test_two_ranks_teach_the_maps_as_one_process_does(tmp_path: Path) -> None:
    check(tmp_path, 2)


@pytest.mark.slow
def test_shards_that_two_nodes_repeat_share_the_maps(tmp_path: Path) -> None:
    check(tmp_path, 4, nodes=2)
