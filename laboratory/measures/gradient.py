"""Measure the signal-to-noise ratio of the gradient over many batches at the same student."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from laboratory.measures.runs import FindModel, prepare_models, write_arm
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.core.notes import hide_notes
from practicum.recipe import Recipe, load_recipe
from practicum.run_dir import read_json, write_json
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.studies.compare.arms import split_words
from practicum.training.loop import generate_rollouts, score_rollouts
from practicum.types import FrozenConfig


class Config(FrozenConfig):
    """The number of batches per arm; a batch is the data of one step of its recipe."""

    type: Literal["gradient"] = "gradient"
    batches: int = Field(default=24, ge=2)
    quick_batches: int = Field(default=8, ge=2)


@dataclass(slots=True)
class Moments:
    """The sum of gradients, and of their squared norms."""

    count: int = 0
    total: Tensor | None = None
    squares: float = 0.0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, [P]."""
        self.count += 1
        self.total = gradient.clone() if self.total is None else self.total.add_(gradient)
        self.squares += gradient.double().square().sum().item()

    @property
    def mean(self) -> Tensor:
        """The mean gradient, [P]."""
        assert self.total is not None
        return self.total / self.count

    def compute_ratio(self) -> float:
        """Return the squared norm of the mean divided by the trace of the covariance, unbiased.

        The ratio is 0 if noise explains the whole mean.
        """
        norm = self.mean.double().square().sum().item()
        noise = (self.squares - self.count * norm) / (self.count - 1)
        # The expected squared norm of a mean of N gradients contains noise / N.
        return max(norm - noise / self.count, 0.0) / noise if noise > 0 else float("inf")


def measure(config: Config, job: ReproductionJob) -> Results:
    """Measure each arm's signal-to-noise ratio, and the cosine between mean gradients.

    The cosine is with the first arm that has the same student, task and rollouts.
    """
    torch.set_num_threads(1)
    study, console = job.study, job.console
    find_model = prepare_models(job)
    batches = config.batches if job.scale is study.spec.full else config.quick_batches
    console.begin(len(job.seeds), 1)
    readings: dict[str, dict[str, dict[int, float]]] = {
        arm: {"signal_to_noise": {}, "cosine": {}} for arm in study.spec.arms
    }
    for number, seed in enumerate(job.seeds, start=1):
        path = job.folder / "gradients" / f"seed-{seed}.json"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            write_json(path, _measure_seed(job, seed, batches, find_model))
        for arm, numbers in read_json(path).items():
            for name, number in numbers.items():
                readings[arm][name][seed] = number
        console.step(number, {}, None)
    return Results(name=study.name, form="", seeds=job.seeds, readings=readings)


def _measure_seed(
    job: ReproductionJob, seed: int, batches: int, find_model: FindModel
) -> dict[str, dict[str, float]]:
    """Return the readings of every arm."""
    means: dict[str, Tensor] = {}
    readings = {}
    for arm in job.study.spec.arms:
        path, *control = split_words(write_arm(job, arm, None, find_model))
        recipe = load_recipe(path, [*control, f"seed={seed}", "train.threads=1"])
        moments = sum_gradients(recipe, batches, job.folder)
        setting = recipe.model_dump_json(include={"student", "task", "rollout"})
        reference = means.setdefault(setting, moments.mean)
        ratio = moments.compute_ratio()
        cosine = torch.cosine_similarity(moments.mean.double(), reference.double(), dim=0).item()
        job.console.event(f"{arm}, seed {seed}: signal to noise {ratio:.3g}, cosine {cosine:.3f}")
        readings[arm] = {"signal_to_noise": ratio, "cosine": cosine}
    return readings


def sum_gradients(recipe: Recipe, batches: int, folder: Path) -> Moments:
    """Return the moments of the gradients of the first `batches` steps, without updates."""
    moments = Moments()
    with hide_notes(), closing(assemble_run(recipe, folder / "models")) as built:
        for step in range(1, batches + 1):
            moments.add(_compute_gradient(built, step))
    return moments


def _compute_gradient(built: RunComponents, step: int) -> Tensor:
    """Return the gradient of one step, [P], over all trainable parameters."""
    parts, settings = built.parts, built.settings
    plan = settings.plan(step)
    data = score_rollouts(
        generate_rollouts(step, plan, parts, settings, parts.sampler, version=0),
        plan.objective,
        parts,
    )
    built.student.trainer.forward_backward(data, plan.objective, seed=step)
    gradients = []
    for parameter in built.weights.values():
        # Without an optimizer step nothing clears the gradient: the next step would add to it.
        gradient, parameter.grad = parameter.grad, None
        gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
    return torch.cat([gradient.detach().flatten() for gradient in gradients])
