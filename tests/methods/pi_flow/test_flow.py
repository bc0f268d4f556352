"""A flow in the loop: its loss is the gap of velocities at its own states, and its runs have the same bytes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import assert_same_run, curve, forked, rows

from practicum.errors import DataError, PracticumError
from practicum.methods.pi_flow.mixture import Config as Mixture
from practicum.methods.pi_flow.mixture import MixtureTask
from practicum.methods.pi_flow.network import FlowInterval, FlowNetwork, FlowShape
from practicum.methods.pi_flow.policies import (
    Gaussians,
    compute_velocity,
    predict_by_mixture,
    weigh,
)
from practicum.methods.pi_flow.student import FlowClient, FlowTrainer
from practicum.methods.pi_flow.values import build_renderer, list_times, read_trajectories
from practicum.methods.pi_flow.velocity import Config as Velocity
from practicum.methods.pi_flow.velocity import TrainedNetwork, VelocityTeacher
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.recipe import parse_recipe
from practicum.rollouts import RolloutBatch, sample_rollouts
from practicum.runs import run
from practicum.types import Datum, SampleRequest, SamplingParams

OBJECTIVE = Objective.model_validate({"losses": [{"signal": "full", "divergence": "mse"}]})
SHAPE = FlowShape("gmflow", 8, steps=2, substeps=3)
RECIPE: dict[str, Any] = {
    "student": {"model": {"hidden_size": 16, "layers": 1, "seed": 1}},
    "backend": {"type": "flow", "steps": 2, "substeps": 2, "components": 3},
    "teacher": {"type": "velocity", "refine": 2},
    "task": {"type": "mixture", "train_size": 32, "heldout_size": 8},
    "rollout": {"max_new_tokens": 8},
    "objective": {"signal": "full", "divergence": "mse"},
    "optimizer": {"learning_rate": 0.01},
    "train": {"steps": 5, "prompts_per_step": 4, "checkpoint_every": 2, "threads": 1},
    "name": "flow",
}


class ExactNetwork(FlowNetwork):
    """A network that knows the end points' distribution at every state; a shift makes it differ."""

    def __init__(self, shape: FlowShape, mixture: Gaussians) -> None:
        super().__init__(shape, 2, 8, 1, 0)
        self._mixture = mixture
        self.shift = torch.nn.Parameter(torch.zeros(2))

    def open_interval(self, state: torch.Tensor, time: torch.Tensor) -> FlowInterval:
        posterior = self._mixture.multiply(*weigh(state, time))
        return FlowInterval(state, time, replace(posterior, means=posterior.means + self.shift))


@pytest.fixture
def task() -> MixtureTask:
    return MixtureTask(Mixture(train_size=64, heldout_size=16), 3)


def build_data(network: FlowNetwork, task: MixtureTask, count: int = 8) -> list[Datum]:
    """Return trajectories of a network with the exact velocities at their states."""
    renderer = build_renderer()
    teacher = VelocityTeacher(task, renderer, Velocity())
    batch = RolloutBatch(task.train_prompts()[:count], 1, 0, 1)
    params = SamplingParams(network.shape.substates * network.dimension)
    rollouts = sample_rollouts(batch, FlowClient(network), renderer, params)
    pairs = zip(rollouts, teacher.score(rollouts, Full()), strict=True)
    return [Datum(*pair) for pair in pairs]


def read_gaps(network: FlowNetwork, task: MixtureTask, data: Sequence[Datum]) -> torch.Tensor:
    """Return the gaps of velocities at fixed states, without the loop's loss."""
    rollouts = [datum.rollout for datum in data]
    prompts, texts = (
        [row.prompt_tokens for row in rollouts],
        [row.tokens.tolist() for row in rollouts],
    )
    states = read_trajectories(prompts, texts, network.dimension)[:, :-1]
    times = list_times(network.shape.substates)
    exact = compute_velocity(predict_by_mixture(task.mixture, states, times), states, times)
    return network.read_velocities(states) - exact


@pytest.mark.parametrize("policy", ["dx", "gmflow"])
def test_the_loss_is_the_mean_squared_gap_of_velocities_at_detached_states(
    policy: Any, task: MixtureTask
) -> None:
    network = FlowNetwork(replace(SHAPE, policy=policy), 2, 16, 2, seed=5)
    data = build_data(network, task)
    metrics = FlowTrainer(network).forward_backward(data, OBJECTIVE, 0).metrics
    found = {name: weight.grad.clone() for name, weight in network.named_parameters()}  # type: ignore[union-attr]
    network.zero_grad()
    # The states are constants here, so an equal gradient has no path through the trajectory.
    expected = read_gaps(network, task, data).square().mean()
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-3)
    assert metrics["sampler_mismatch"] < 1e-4
    for name, weight in network.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=2e-3, atol=2e-4)


def test_the_loss_is_zero_at_the_exact_velocity_and_descent_finds_it(task: MixtureTask) -> None:
    network = ExactNetwork(SHAPE, task.mixture)
    trainer = FlowTrainer(network)
    data = build_data(network, task)
    assert trainer.forward_backward(data, OBJECTIVE, 0).metrics["loss"] < 1e-6
    assert network.shift.grad is not None and network.shift.grad.abs().max() < 1e-3
    trainer.optim_step(AdamParams(0.0))
    with torch.no_grad():
        network.shift.copy_(torch.tensor([0.7, -0.4]))
    for rate in (0.1, 0.03, 0.01):
        for _ in range(12):
            # Each step learns on the states that the shifted policy visits.
            trainer.forward_backward(build_data(network, task), OBJECTIVE, 0)
            trainer.optim_step(AdamParams(rate))
    assert network.shift.abs().max() < 0.05
    assert read_gaps(network, task, build_data(network, task)).abs().max() < 0.1


@pytest.mark.parametrize("policy", ["dx", "gmflow"])
def test_a_network_learns_in_the_loop_and_its_teacher_is_right(policy: str, tmp_path: Path) -> None:
    changes = {
        "backend": {"type": "flow", "policy": policy, "steps": 2, "substeps": 4},
        "rollout": {"max_new_tokens": 16},
        "train": {**RECIPE["train"], "steps": 30, "prompts_per_step": 16},
    }
    result = run(parse_recipe({**RECIPE, **changes}, "flow"), out=tmp_path)
    losses = curve(result.folder, "loss")
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert result.summary["teacher"]["accuracy"]["mean"] > 0.9


@pytest.mark.parametrize("source", ["student", "teacher"])
def test_the_same_seed_has_the_same_bytes_after_a_kill(source: str, tmp_path: Path) -> None:
    recipe = parse_recipe({**RECIPE, "rollout": {"max_new_tokens": 8, "source": source}}, "flow")
    whole = run(recipe, out=tmp_path / "whole").folder
    out = tmp_path / "killed"
    assert forked(lambda: run(recipe, out=out), {"PRACTICUM_FAULT": "update:4"}) == 137
    assert_same_run(whole, run(recipe, out=out, resume=True).folder)
    texts = [row["text"].split() for row in rows(whole / "rollouts.jsonl")]
    assert all(len(words) == 8 and all(abs(float(word)) <= 4 for word in words) for words in texts)


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"rollout": {"max_new_tokens": 6}}, "set rollout.max_new_tokens: 8"),
    "steps": ({"backend": {"type": "flow", "steps": 0}}, "greater than or equal to 1"),
    "temperature": (
        {"rollout": {"max_new_tokens": 8, "temperature": 0.5}},
        "leave out temperature",
    ),
    "teacher": (
        {"teacher": {"type": "model", "model": {"seed": 2}}},
        "set teacher: {type: velocity}",
    ),
    "self": ({"teacher": {"type": "self"}}, "set teacher: {type: velocity}"),
    "task": (
        {"task": {"type": "reverse", "alphabet": "ab", "train_size": 2, "heldout_size": 1}},
        "set task: {type: mixture}",
    ),
    "student": (
        {"backend": {"type": "local"}, "student": {"model": {"hidden_size": 16, "heads": 2}}},
        "set backend: {type: flow}",
    ),
    "signal": (
        {"objective": {"signal": "sampled"}},
        "set objective: {signal: full, divergence: mse}",
    ),
    "heads": ({"student": {"model": {"heads": 2}}}, "no heads; remove it"),
    "lora": ({"student": {**RECIPE["student"], "lora": {"rank": 2}}}, "no lora; remove it"),
    "folder": ({"student": {"model": "somewhere"}}, "makes its network from scratch"),
    "source": (
        {"rollout": {"max_new_tokens": 8, "source": "token_mix(0.5)"}},
        "set source: student",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_cannot_work_is_one_line(name: str, tmp_path: Path) -> None:
    changes, words = PROBLEMS[name]
    with pytest.raises(PracticumError, match=r"^[^\n]+$") as caught:
        run(parse_recipe({**RECIPE, **changes}, "flow"), out=tmp_path, progress=False)
    assert words in str(caught.value)


def test_a_trajectory_of_another_dimension_is_refused(task: MixtureTask) -> None:
    network = FlowNetwork(SHAPE, 3, 8, 1, 0)
    prompt = build_renderer().render(task.train_prompts()[0].messages)
    with pytest.raises(DataError, match=r"2 values.* for a flow in 3 dimensions"):
        FlowClient(network).sample([SampleRequest(prompt, 0)], SamplingParams(18))
    state = torch.tensor([*prompt, *prompt])
    with pytest.raises(DataError, match="same number of substates"):
        read_trajectories([prompt, prompt], [state.tolist(), state[:3].tolist()], 2)


def test_a_trained_network_approaches_the_exact_velocity(task: MixtureTask) -> None:
    data = build_data(ExactNetwork(SHAPE, task.mixture), task, 32)
    rollouts = [datum.rollout for datum in data]

    def read_means(network: TrainedNetwork | None) -> torch.Tensor:
        teacher = VelocityTeacher(task, build_renderer(), Velocity(network=network))
        hidden = [signal.hidden for signal in teacher.score(rollouts, Full())]
        return torch.stack([rows for rows in hidden if rows is not None])

    exact = read_means(None)
    few, many = (
        (read_means(TrainedNetwork(steps=steps)) - exact).square().mean() for steps in (20, 1000)
    )
    assert many < few / 5
    assert read_means(TrainedNetwork(steps=20)).equal(read_means(TrainedNetwork(steps=20)))


def test_a_network_teaches_a_run(tmp_path: Path) -> None:
    teacher = {"type": "velocity", "network": {"steps": 30, "hidden_size": 16}}
    recipe = parse_recipe({**RECIPE, "teacher": teacher}, "flow")
    first, again = (run(recipe, out=tmp_path / name).folder for name in ("first", "again"))
    assert_same_run(first, again)
