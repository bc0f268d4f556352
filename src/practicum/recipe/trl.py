"""Turn a training script of TRL into a recipe.

The fields and their defaults follow TRL 1.16. A field that the script does not set has the
default of its config class. Every field without a place in a recipe is named.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from practicum.core.plugins import list_packaged
from practicum.errors import RecipeError
from practicum.recipe.trl_script import Dataset, TrlScript, read_trl_script
from practicum.rows import count_rows

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "eval_strategy": "no",
    "eval_steps": None,
}
"""The fields of transformers' TrainingArguments that are taken, with their defaults."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "GKDConfig": {
        "learning_rate": 2e-5,
        "temperature": 0.9,
        "lmbda": 0.5,
        "beta": 0.5,
        "max_new_tokens": 128,
        "seq_kd": False,
        "max_length": 1024,
    },
    "GOLDConfig": {
        "learning_rate": 1e-7,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 0,
        "lmbda": 0.5,
        "beta": 0.5,
        "max_completion_length": 128,
        "seq_kd": False,
        "num_generations": 1,
        "use_uld_loss": False,
        "max_length": 1024,
    },
    "DistillationConfig": {
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 1.0,
        "max_completion_length": 512,
    },
    "GRPOConfig": {
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "num_generations": 8,
        "max_completion_length": 512,
        "epsilon": 0.2,
        "epsilon_high": None,
        "num_iterations": 1,
        "scale_rewards": "group",
        "loss_type": "dapo",
    },
}
"""The fields of each config class that are taken, with the defaults of TRL 1.16."""

IGNORED = {
    "output_dir", "logging_steps", "logging_strategy", "run_name", "push_to_hub",
    "hub_model_id", "gradient_checkpointing", "gradient_checkpointing_kwargs", "log_completions",
    "dataset_num_proc", "remove_unused_columns", "overwrite_output_dir", "logging_first_step",
}  # fmt: skip
"""Fields that do not affect training; practicum has its own settings for them."""

AGGREGATES = {"grpo": "seq_mean_token_mean", "dapo": "token_mean", "bnpo": "token_mean"}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


@dataclass(slots=True)
class TrlSettings:
    """The settings of a script over the defaults of its config class, and the fields taken so far."""

    script: TrlScript
    notes: list[str]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str) -> Any:
        """Return a field of the config: the script's, or TRL's default."""
        self.taken.add(name)
        defaults = {**COMMON, **DEFAULTS[self.script.config]}
        return self.script.settings.get(name, defaults.get(name))

    def take_number(self, name: str) -> Any:
        """Return a finite number; RecipeError with the field if the script has something else."""
        setting = self.take(name)
        is_number = isinstance(setting, int | float) and not isinstance(setting, bool)
        if not is_number or not math.isfinite(setting):
            raise RecipeError(f"{self.script.config}.{name}: {str(setting)[:60]!r} is not a number")
        return setting


def convert_trl(path: Path, target: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's data for the file `target`, and a line for each thing that is not taken.

    The script is parsed and never run. Raises RecipeError if it uses no supported trainer class.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from error
    script = read_trl_script(text, str(path))
    settings = TrlSettings(script, script.notes)
    recipe: dict[str, Any] = {}
    name = Path(str(script.settings.get("output_dir") or path.stem)).name
    recipe["name"] = "".join(
        letter if letter.isalnum() or letter in "._-" else "-" for letter in name
    )
    recipe["student"] = _convert_student(settings)
    recipe["teacher"] = _convert_teacher(settings)
    recipe["task"] = _convert_dataset(settings, target)
    recipe["rollout"] = _convert_rollout(settings)
    recipe["objective"] = _convert_objective(settings, recipe)
    recipe["optimizer"] = _convert_optimizer(settings)
    recipe["train"] = _convert_train(settings, recipe)
    _convert_evaluation(settings, recipe)
    _convert_tracking(settings, recipe)
    recipe["seed"] = settings.take_number("seed")
    notes = script.notes
    notes += [
        f"not taken: {script.config}.{field} = {setting!r}"
        for field, setting in script.settings.items()
        if field not in settings.taken | IGNORED
    ]
    arguments_read = {
        "model",
        "teacher_model",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "peft_config",
    }
    notes += [
        f"not taken: trainer argument {argument} = {str(setting)[:60]!r}"
        for argument, setting in script.trainer.items()
        if argument not in arguments_read | {"reward_funcs"}
    ]
    return recipe, notes


def _convert_student(settings: TrlSettings) -> dict[str, Any]:
    model = settings.script.trainer.get("model")
    if not isinstance(model, str):
        settings.notes.append(
            "student.model: missing, since the script's model is no literal; set it"
        )
        model = "STUDENT"
    student: dict[str, Any] = {"model": model}
    if settings.take("trust_remote_code"):
        student["trust_remote_code"] = True
    lora = settings.script.lora
    if lora is not None:
        student["lora"] = {"rank": lora.get("r", 8), "alpha": lora.get("lora_alpha", 8)}
        keys = {"r", "lora_alpha", "task_type"}
        targets = lora.get("target_modules")
        if isinstance(targets, list | tuple):
            student["lora"]["targets"] = list(targets)
            keys.add("target_modules")
        if isinstance(lora.get("use_rslora"), bool):
            student["lora"]["rslora"] = lora["use_rslora"]
            keys.add("use_rslora")
        settings.notes += [
            f"not taken: LoraConfig.{key} = {setting!r}"
            for key, setting in lora.items()
            if key not in keys
        ]
    return student


def _convert_teacher(settings: TrlSettings) -> dict[str, Any]:
    if settings.script.config == "GRPOConfig":
        return {"type": "none"}
    model = settings.script.trainer.get(
        "teacher_model", settings.take("teacher_model_name_or_path")
    )
    if not isinstance(model, str):
        settings.notes.append(
            "teacher.model: missing, since the script's teacher is no literal; set it"
        )
        model = "TEACHER"
    teacher = {"type": "model", "model": model}
    if settings.script.config == "GOLDConfig" and settings.take("use_uld_loss"):
        settings.notes.append(
            "teacher: TRL compares sorted probabilities across tokenizers (ULD); here `translated` reads "
            "the teacher's text probabilities in the student's tokens"
        )
        return {"type": "translated", "teacher": teacher}
    return teacher


def _convert_dataset(settings: TrlSettings, target: Path) -> dict[str, Any]:
    """Return the task of the script's dataset."""
    dataset = settings.script.trainer.get("train_dataset")
    if not isinstance(dataset, Dataset) or not dataset.positional:
        settings.notes.append(
            "task.path: missing, since the script's dataset is no literal; set it"
        )
        return {"type": "jsonl", "path": "ROWS.jsonl"}
    kind, *more = dataset.positional
    files = dataset.keywords.get("data_files")
    unused = {key: files for key, files in dataset.keywords.items() if key != "data_files"}
    settings.notes += [
        f"not taken: load_dataset({key}={entry!r})"
        for key, entry in unused.items()
        if key != "name"
    ]
    if kind in ("json", "csv", "parquet") and files is not None:
        names = [str(entry) for entry in (files if isinstance(files, list) else [files])]
        paths = [
            os.path.relpath(n, target.resolve().parent) if os.path.exists(n) else n for n in names
        ]
        return {"type": "jsonl", "path": paths[0] if len(paths) == 1 else paths}
    task: dict[str, Any] = {"type": "datasets", "path": kind}
    name = more[0] if more else dataset.keywords.get("name")
    if name is not None:
        task["name"] = name
    if dataset.split not in (None, "train"):
        task["split"] = dataset.split
    heldout = settings.script.trainer.get("eval_dataset")
    if isinstance(heldout, Dataset) and heldout.split and heldout.positional == dataset.positional:
        task["heldout"] = heldout.split
    elif heldout is not None:
        settings.notes.append("task.heldout: the script's eval_dataset is another dataset; set it")
    return task


def _convert_rollout(settings: TrlSettings) -> dict[str, Any]:
    kind = settings.script.config
    limit = "max_new_tokens" if kind == "GKDConfig" else "max_completion_length"
    rollout: dict[str, Any] = {
        "max_new_tokens": settings.take_number(limit),
        "temperature": settings.take_number("temperature"),
    }
    if kind != "GKDConfig":
        rollout |= {
            "top_p": settings.take_number("top_p"),
            "top_k": max(settings.take_number("top_k"), 0),
        }
    if kind in ("GRPOConfig", "GOLDConfig"):
        rollout["n"] = settings.take_number("num_generations")
    if kind in ("GKDConfig", "GOLDConfig"):
        rollout["source"] = _convert_source(settings)
        settings.take("max_length")
        settings.notes.append(
            f"prompt_tokens: TRL cuts prompt and answer together at max_length {settings.take('max_length')}; "
            "here longer prompts are left out"
        )
    return rollout


def _convert_source(settings: TrlSettings) -> str:
    """Return the source for `lmbda` and `seq_kd`: the share of the student, and the writer of the
    remaining answers."""
    share, writer = (
        settings.take_number("lmbda"),
        "teacher" if settings.take("seq_kd") else "dataset",
    )
    if share in (0, 1):
        return writer if share == 0 else "student"
    settings.notes.append(
        "rollout.source: TRL draws for a whole batch whether the student writes it, and practicum for "
        "each answer; the share is the same"
    )
    return f"mix(student={share}, other={writer})"


def _convert_objective(settings: TrlSettings, recipe: dict[str, Any]) -> dict[str, Any]:
    if settings.script.config == "GRPOConfig":
        return _convert_reward(settings, recipe)
    beta = settings.take_number("beta")
    divergence = {0: "forward_kl", 1: "reverse_kl"}.get(beta, f"jsd({beta})")
    temperature = settings.take_number("temperature")
    if settings.script.config != "GKDConfig" and temperature != 1:
        settings.notes.append(
            f"objective: TRL also divides both models' logits by temperature {temperature} in the loss; "
            "here the loss is at temperature 1"
        )
    return {"signal": "full", "divergence": divergence, "estimator": "pathwise"}


def _convert_reward(settings: TrlSettings, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the objective of GRPO: the reward's advantage with clipped ratios, and a KL to the start."""
    scale = settings.take("scale_rewards")
    advantage = "group_mean" if scale in (False, "none") else "group_normalized"
    if scale == "batch":
        settings.notes.append(
            "objective: scale_rewards batch has no equivalent here; group_normalized is used"
        )
    low = settings.take_number("epsilon")
    high = low if settings.take("epsilon_high") is None else settings.take_number("epsilon_high")
    term: dict[str, Any] = {
        "signal": f"score({advantage})",
        "correction": f"ratio_clip({low}, {high})",
    }
    loss = str(settings.take("loss_type"))
    if loss not in AGGREGATES:
        settings.notes.append(
            f"objective.aggregate: loss_type {loss} has no equivalent here; token_mean is used"
        )
    settings.notes.append(_describe_rewards(settings, recipe))
    objective: dict[str, Any] = {"losses": [term], "aggregate": AGGREGATES.get(loss, "token_mean")}
    beta = settings.take_number("beta")
    if beta:
        recipe["reference"] = {"type": "self", "weights": "frozen"}
        anchor = {"signal": "sampled", "against": "reference", "divergence": "reverse_kl"}
        objective["losses"].append({**anchor, "coefficient": beta})
    return objective


def _describe_rewards(settings: TrlSettings, recipe: dict[str, Any]) -> str:
    recipe["task"]["verifier"] = "math"
    rewards = settings.script.trainer.get("reward_funcs")
    named = f"; the script's reward is {rewards!r}" if rewards is not None else ""
    return (
        f"task.verifier: `math` is written, as TRL's accuracy_reward{named}; your own function is "
        "package.module:function with the arguments reply and prompt"
    )


def _convert_optimizer(settings: TrlSettings) -> dict[str, Any]:
    kind = str(settings.take("lr_scheduler_type"))
    if kind not in SCHEDULES:
        settings.notes.append(
            f"optimizer.schedule: lr_scheduler_type {kind} has no equivalent here; linear is used"
        )
    return {
        "learning_rate": settings.take_number("learning_rate"),
        "schedule": SCHEDULES.get(kind, "linear"),
        "betas": [settings.take_number("adam_beta1"), settings.take_number("adam_beta2")],
        "weight_decay": settings.take_number("weight_decay"),
        "max_grad_norm": settings.take_number("max_grad_norm"),
    }


def _convert_train(settings: TrlSettings, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the size of a step and the number of steps, on one device."""
    batch = settings.take_number("per_device_train_batch_size") * settings.take_number(
        "gradient_accumulation_steps"
    )
    # A batch of TRL counts completions.
    prompts = max(1, batch // recipe["rollout"].get("n", 1))
    settings.notes.append(
        f"train.prompts_per_step: {prompts} is the batch of one device; multiply it by the number of devices"
    )
    train: dict[str, Any] = {"prompts_per_step": prompts}
    steps, epochs = settings.take_number("max_steps"), settings.take_number("num_train_epochs")
    rows = _count(settings.script.trainer.get("train_dataset"))
    if steps > 0:
        train["steps"] = steps
    elif rows is not None:
        train["steps"] = max(1, math.ceil(epochs * math.ceil(rows / prompts)))
    else:
        settings.notes.append(
            f"train.steps: missing; set rows * {epochs:g} / {prompts}, since the rows are not here to be counted"
        )
    warmup, ratio = settings.take("warmup_steps") or 0, settings.take("warmup_ratio") or 0
    # Since transformers 5 a warmup_steps below 1 is a share of the steps.
    share = warmup if 0 < warmup < 1 else ratio if not warmup else 0
    if warmup >= 1:
        recipe["optimizer"]["warmup_steps"] = int(warmup)
    elif share and "steps" in train:
        recipe["optimizer"]["warmup_steps"] = math.ceil(share * train["steps"])
    elif share:
        settings.notes.append(f"optimizer.warmup_steps: missing; set {share} times the steps")
    if settings.take("save_strategy") == "steps" and "steps" in train:
        train["checkpoint_every"] = int(settings.take_number("save_steps"))
    settings.taken.add("save_steps")
    if settings.take("save_total_limit") is not None:
        train["keep_checkpoints"] = settings.take_number("save_total_limit")
    if settings.script.config == "GRPOConfig" and settings.take_number("num_iterations") > 1:
        train["epochs"] = settings.take_number("num_iterations")
    return train


def _convert_evaluation(settings: TrlSettings, recipe: dict[str, Any]) -> None:
    every = settings.take("eval_steps")
    if settings.take("eval_strategy") == "steps":
        recipe["evaluation"] = {
            "every": int(every or settings.script.settings.get("logging_steps", 10))
        }
        _convert_best(settings, recipe)


def _convert_tracking(settings: TrlSettings, recipe: dict[str, Any]) -> None:
    """Take the first tracker of `report_to`; a run has one."""
    named = settings.script.settings.get("report_to", "none")
    names = named if isinstance(named, list) else [named]
    trackers = list_packaged("trackers")
    tracker = next((name for name in names if name in trackers), None)
    if tracker is not None:
        recipe["tracking"] = {"type": tracker}
    if set(names) <= {tracker, "none"}:
        settings.taken.add("report_to")


def _convert_best(settings: TrlSettings, recipe: dict[str, Any]) -> None:
    """Take the metric of the best checkpoint; the loss on held-out rows is closeness to the teacher."""
    metric = str(settings.take("metric_for_best_model") or "loss")
    settings.taken.add("greater_is_better")
    if settings.take("load_best_model_at_end") is not True:
        return
    is_loss = metric.removeprefix("eval_") == "loss"
    recipe["train"]["metric_for_best_model"] = "reverse_kl" if is_loss else "accuracy"
    settings.notes.append(
        f"train.metric_for_best_model: for {metric}; the checkpoint is RUN@best, and RUN is the newest"
    )


def _count(dataset: Any) -> int | None:
    """Return the number of rows of a dataset's files, or None if a file is missing."""
    files = dataset.keywords.get("data_files") if isinstance(dataset, Dataset) else None
    paths = [Path(str(entry)) for entry in (files if isinstance(files, list) else [files])]
    return sum(map(count_rows, paths)) if files and all(map(os.path.isfile, paths)) else None
