"""A published method at the size of a toy."""

import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from chat_user import Client, free_port
from toy import make_model, rows

from practicum import runs
from practicum.errors import PracticumError
from practicum.recipe import parse_recipe
from practicum.run_dir import write_json
from practicum.runs import pipeline
from practicum.runs.stages import Pipeline, parse_pipeline

ONLY = ""
"""The name of the only stage of a recipe that is no pipeline."""

SMALL = {
    "train.steps": 24,
    "train.prompts_per_step": 3,
    "train.checkpoint_every": None,
    "train.threads": 1,
    "evaluation.prompts": 0,
    "student.lora": None,
    "student.trainable_layers": None,
}

LENGTHS = {"rollout.n": 3, "rollout.max_new_tokens": 6}
"""For recipes without them."""

PRETRAINING = 120
"""The steps of models from scratch."""

REAL = {"papers/gates": 3, "papers/kepo": 3, "papers/srpo": 3}
"""The steps of recipes that keep their models when their parts are examined: they need right answers or notes."""

STAGE_STEPS = 8
"""The steps of a pipeline's stages."""

SPECIAL = {
    "papers/rpd": {"rollout.max_new_tokens": 40},
    "papers/caopd": {"rollout.max_new_tokens": 24},
    "pipelines/vold": {"evaluation.prompts": 2, "evaluation.every": 4},
    "papers/gad": {"train.steps": 60},
    "papers/llm4teach": {"rollout.max_new_tokens": 60},
    "papers/crisp": {"train.steps": 52},
    "papers/distillm": {"train.steps": 48, "evaluation.prompts": 2, "evaluation.every": 1},
    "served/openclaw-rl": {"train.steps": 8, "rollout.max_new_tokens": 16},
    "teams/mimo_v2": {"train.steps": 24},
}
"""Additional needs of a recipe: a confidence in letters, more turns of a game, a held-out metric or question, more steps."""


class SmallRuns:
    """A recipe or pipeline with a few small steps, and the same with another stage."""

    def __init__(self, name: str, recipe_data: Mapping[str, Any], folder: Path) -> None:
        self.name, self.folder, self.whole = name, folder, recipe_data
        steps = STAGE_STEPS if "stages" in recipe_data else None
        self.steps = SPECIAL.get(name, {}).get("train.steps", REAL.get(name, steps))
        self.models = None if name in REAL else make_two_models(folder)
        if "stages" in recipe_data:
            small = self._shrink_stages(recipe_data)
            self.stages = pipeline.run(small, out=folder, progress=False).folder
        self.traffic = self._record_traffic() if self._is_served(recipe_data) else None

    def read_whole(self, stage: str) -> Any:
        """Return the readings of a stage of the whole pipeline, or of the recipe."""
        if stage == ONLY:
            return self.read(stage, self.whole)
        (folder,) = self.stages.glob(f"stages/[0-9][0-9]-{stage}")
        return _read_stage(folder)

    def read(self, stage: str, recipe_data: Mapping[str, Any]) -> Any:
        """Run one stage of a variant; return its readings, or the error that ended the run."""
        try:
            with TemporaryDirectory(dir=self.folder) as out:
                if stage != ONLY:
                    small = self._shrink_stages(recipe_data)
                    return _read_stage(self._run_stage(small, stage, Path(out)))
                recipe_data = shrink(self.name, recipe_data, self.models, self.steps)
                if self._is_served(recipe_data):
                    recipe_data["rollout"]["source"] = f"served({self.traffic})"
                recipe = parse_recipe(recipe_data, self.name)
                return rows(runs.run(recipe, out=out, progress=False).folder / "metrics.jsonl")
        except PracticumError as error:
            return str(error)

    def _is_served(self, recipe_data: Mapping[str, Any]) -> bool:
        return recipe_data.get("rollout", {}).get("source") == "served"

    def _record_traffic(self) -> Path:
        """Let a user talk to the untrained student, and return the file of the turns."""
        small = shrink(self.name, self.whole, self.models)
        train, port = small["train"], free_port()
        small["task"] = {**small["task"], "port": port, "seconds": 60}
        small["rollout"] = {**small["rollout"], "max_staleness": 0}
        turns = train["steps"] * train["prompts_per_step"]
        small["train"] = {**train, "steps": 1, "prompts_per_step": turns}
        user = Thread(target=_talk, args=(port, turns))
        user.start()
        run = runs.run(parse_recipe(small, self.name), out=self.folder, progress=False)
        user.join()
        return run.folder / "traffic.jsonl"

    def _shrink_stages(self, recipe_data: Mapping[str, Any]) -> Pipeline:
        resolved = parse_pipeline(recipe_data, self.name).resolve()
        stages = [
            {**shrink(self.name, entry, self.models, self.steps), "name": entry["name"]}
            for entry in resolved["stages"]
        ]
        small = shrink(self.name, resolved, self.models, self.steps)
        return parse_pipeline({**small, "stages": stages}, self.name)

    def _run_stage(self, small: Pipeline, name: str, out: Path) -> Path:
        """Run a stage after the earlier stages of the whole pipeline, and return its folder."""
        number = next(stage.number for stage in small.stages if stage.name == name)
        small = replace(small, stages=small.stages[:number])
        folder = out / small.recipe.name
        (folder / "stages").mkdir(parents=True)
        for stage in small.stages[:-1]:
            (finished,) = self.stages.glob(f"stages/[0-9][0-9]-{stage.name}")
            (folder / "stages" / stage.folder).symlink_to(finished)
        (folder / "models").symlink_to(self.stages / "models")
        write_json(folder / "pipeline.json", small.resolve())
        result = pipeline.run(small, out=out, resume=True, progress=False)
        return result.folder / "stages" / small.stages[-1].folder


def _read_stage(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step, and the rollouts with the notes that a later stage reads."""
    return [row for name in ("metrics.jsonl", "rollouts.jsonl") for row in rows(folder / name)]


def _talk(port: int, turns: int) -> None:
    """Ask questions and reply to the answers: two turns with a reply per conversation."""
    for factor in range(2, 2 + turns // 2):
        right = f"No, it is {factor * 7}."
        Client(port).converse(f"What is {factor} times 7?", right, "Thanks, that is right.")


def make_two_models(folder: Path) -> tuple[Path, Path]:
    """Write two models with enough characters for every recipe's prompts."""
    first, second = (
        make_model(folder / f"model-{seed}", alphabet=string.printable, seed=seed)
        for seed in (1, 2)
    )
    return first, second


def shrink(
    name: str,
    recipe_data: Mapping[str, Any],
    models: tuple[Path, Path] | None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Return a recipe with a few small steps and no monitors.

    Models from scratch are hardly trained. `models` take the place of other models: one of the
    student, one of all others; without them, models stay. Lengths and flows in the recipe stay.
    """
    small = dict(recipe_data)
    if models is not None and small.get("backend", {}).get("type") != "flow":
        small = {key: _replace_models(key, section, models) for key, section in small.items()}
    needs = SPECIAL.get(name, {}) | ({} if steps is None else {"train.steps": steps})
    for key, value in {**LENGTHS, **SMALL, **needs}.items():
        section, field = key.split(".")
        if key in needs or key in SMALL or field not in small.get(section, {}):
            small[section] = {**small.get(section, {}), field: value}
    return {**small, "monitors": "off", "name": "small"}


def _replace_models(section: str, data: Any, models: tuple[Path, Path]) -> Any:
    if isinstance(data, list):
        return [_replace_models(section, entry, models) for entry in data]
    if not isinstance(data, Mapping):
        return data
    replaced = {key: _replace_models(section, entry, models) for key, entry in data.items()}
    if isinstance(model := data.get("model"), Mapping):
        question = model.get("pretrain", {}).get("question")
        pretrain = {"steps": PRETRAINING, "question": question}
        # An earlier stage's student stays.
        replaced["model"] = model if "stage" in model else {**model, "pretrain": pretrain}
    elif data.get("model") is not None:
        replaced["model"] = str(models[section != "student"])
    return replaced
