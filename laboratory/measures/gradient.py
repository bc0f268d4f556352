"""How much of a step's gradient is signal: its mean over many batches at the same student, against how much batches differ."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from laboratory.measures.runs import ModelOf, arm_file, models_of
from laboratory.results import Results
from laboratory.study import LoadedReproduction, ReproductionScale
from practicum.core.notes import hide_notes
from practicum.recipe import Recipe, load_recipe
from practicum.run_dir import read_json, write_json
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.runs.console import Console
from practicum.training.loop import generate_rollouts, score_rollouts


class Config(BaseModel):
    """How many batches there are of every arm; a batch is what a step of its recipe learns from."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["gradient"] = "gradient"
    batches: int = Field(default=24, ge=2)
    quick_batches: int = Field(default=8, ge=2)


@dataclass(slots=True)
class Moments:
    """The sum of some gradients, and of their squared norms."""

    count: int = 0
    total: Tensor | None = None
    squares: float = 0.0

    def add(self, gradient: Tensor) -> None:
        """Count one more, [P]."""
        self.count += 1
        self.total = gradient.clone() if self.total is None else self.total.add_(gradient)
        self.squares += gradient.double().square().sum().item()

    @property
    def mean(self) -> Tensor:
        """Their mean, [P]."""
        assert self.total is not None
        return self.total / self.count

    def signal_to_noise(self) -> float:
        """The squared norm of the mean over the trace of the covariance, both without bias; 0 where no signal is left."""
        norm = self.mean.double().square().sum().item()
        noise = (self.squares - self.count * norm) / (self.count - 1)
        return max(norm - noise / self.count, 0.0) / noise if noise > 0 else float("inf")


def measure(
    config: Config,
    study: LoadedReproduction,
    form: ReproductionScale,
    home: Path,
    at_once: int,
    console: Console,
) -> Results:
    """The signal-to-noise ratio of each arm, and the cosine of its mean gradient with that of the first arm on the same models."""
    torch.set_num_threads(1)
    model_of = models_of(study, home, console)
    batches = config.batches if form is study.spec.full else config.quick_batches
    console.begin(form.seeds, 1)
    readings: dict[str, dict[str, dict[int, float]]] = {
        arm: {"signal_to_noise": {}, "cosine": {}} for arm in study.spec.arms
    }
    for seed in range(form.seeds):
        known = home / "gradients" / f"seed-{seed}.json"
        if not known.is_file():
            known.parent.mkdir(exist_ok=True)
            write_json(known, _of_seed(study, form, seed, batches, model_of, home, console))
        for arm, values in read_json(known).items():
            for name, value in values.items():
                readings[arm][name][seed] = value
        console.step(seed + 1, {}, None)
    return Results(name=study.name, form="", seeds=list(range(form.seeds)), readings=readings)


def _of_seed(
    study: LoadedReproduction,
    form: ReproductionScale,
    seed: int,
    batches: int,
    model_of: ModelOf,
    home: Path,
    console: Console,
) -> dict[str, dict[str, float]]:
    """The numbers of every arm; all arms on the same models see the same completions."""
    means: dict[str, Tensor] = {}
    found = {}
    for arm in study.spec.arms:
        recipe = load_recipe(
            arm_file(study, arm, form, None, model_of, home), [f"seed={seed}", "train.threads=1"]
        )
        moments = gradients(recipe, batches, home)
        ground = recipe.model_dump_json(include={"student", "teacher", "task", "rollout"})
        reference = means.setdefault(ground, moments.mean)
        ratio = moments.signal_to_noise()
        cosine = torch.cosine_similarity(moments.mean.double(), reference.double(), dim=0).item()
        console.event(f"{arm}, seed {seed}: signal to noise {ratio:.3g}, cosine {cosine:.3f}")
        found[arm] = {"signal_to_noise": ratio, "cosine": cosine}
    return found


def gradients(recipe: Recipe, batches: int, home: Path) -> Moments:
    """The moments of the gradients of the first `batches` steps, none of which is taken."""
    moments = Moments()
    with hide_notes(), closing(assemble_run(recipe, home / "models")) as built:
        for step in range(1, batches + 1):
            moments.add(_gradient(built, step))
    return moments


def _gradient(built: RunComponents, step: int) -> Tensor:
    """The gradient of one step, [P], over everything that is trained."""
    parts, settings = built.parts, built.settings
    now = settings.plan(step)
    data = score_rollouts(
        generate_rollouts(step, now, parts, settings, parts.sampler, version=0),
        now.objective,
        parts,
    )
    built.trainer.forward_backward(data, now.objective, seed=step)
    return torch.cat([_taken(parameter).flatten() for parameter in built.weights.values()])


def _taken(parameter: Tensor) -> Tensor:
    gradient = (
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    )
    parameter.grad = None
    return gradient
