"""Turn the configuration of a verl distillation run into a recipe.

The keys follow verl's `main_ppo` with `distillation.enabled` (docs/algo/opd.md there, August
2026). The file is a whole configuration, the part that someone changed, Hydra's `overrides.yaml`,
or the script that starts verl. If the file lacks a key of `TAKEN` or of the functions below, verl's
own default is used. Every other key is reported, so that no user believes it was used.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from practicum.errors import RecipeError, suggest_install
from practicum.recipe.launch_script import read_launch_script
from practicum.recipe.yaml_files import StrictLoader, parse_value
from practicum.rows import count_rows

STUDENT = "actor_rollout_ref"
ACTOR = f"{STUDENT}.actor"
LOSS = "distillation.distillation_loss"

_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?([\w.]+)\s*(?:,\s*([^{}]*))?\}")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass(frozen=True, slots=True)
class VerlConfig:
    """The leaves of a configuration by their paths, and the paths that were taken so far."""

    leaves: Mapping[str, Any]
    taken: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default where it is not there, null or `???`."""
        self.taken.add(key)
        return self._resolve(self.leaves.get(key), default)

    def take_number(self, key: str, default: Any = None) -> Any:
        """Return the positive number of a key, or the default; RecipeError if it is none."""
        setting = self.take(key, default)
        is_number = isinstance(setting, int | float) and not isinstance(setting, bool)
        if setting != default and not (is_number and 0 < setting < float("inf")):
            raise RecipeError(f"{key}: {str(setting)[:60]!r} is not a positive number")
        return setting

    def _resolve(self, leaf: Any, default: Any, depth: int = 0) -> Any:
        """Follow a reference such as `${oc.select:data.max_prompt_length,512}` to its value."""
        reference = _REFERENCE.fullmatch(leaf) if isinstance(leaf, str) else None
        if reference is not None and depth < 8:
            fallback = None if reference[2] is None else parse_value(reference[2])
            leaf = self._resolve(self.leaves.get(reference[1], fallback), fallback, depth + 1)
        if isinstance(leaf, str) and _NUMBER.fullmatch(leaf):
            return float(leaf)  # YAML takes 1e-6 for a text, and verl's reader for a number
        is_missing = leaf is None or leaf == "???" or (isinstance(leaf, str) and "${" in leaf)
        return default if is_missing else leaf

    def list_left(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys that have a value and were not taken."""
        for key, leaf in self.leaves.items():
            is_plumbing = key.rpartition(".")[2] == "_target_" or key.startswith("defaults")
            if key not in self.taken and leaf not in (None, {}, []) and not is_plumbing:
                yield key, leaf


def _keep(setting: Any) -> Any:
    return setting


def _keep_positive(setting: Any) -> Any:
    """Return a number above 0; verl writes -1 for no limit."""
    return setting if isinstance(setting, int | float) and setting > 0 else None


def _write_name(setting: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(setting)).strip("-.")[:80] or "run"


@dataclass(frozen=True, slots=True)
class Taken:
    """A key of verl with its default there, its place in a recipe, and the conversion."""

    key: str
    default: Any
    place: str
    convert: Callable[[Any], Any] = _keep


TAKEN = (
    Taken("trainer.experiment_name", None, "name", _write_name),
    Taken(f"{STUDENT}.model.path", None, "student.model"),
    Taken(f"{STUDENT}.model.trust_remote_code", None, "student.trust_remote_code"),
    Taken(f"{STUDENT}.model.custom_chat_template", None, "student.template"),
    Taken(f"{STUDENT}.model.lora_rank", 0, "student.lora.rank", _keep_positive),
    Taken(f"{STUDENT}.rollout.n", 1, "rollout.n"),
    Taken("data.max_response_length", 512, "rollout.max_new_tokens"),
    Taken(f"{STUDENT}.rollout.temperature", 1.0, "rollout.temperature"),
    Taken(f"{STUDENT}.rollout.top_p", 1.0, "rollout.top_p"),
    Taken(f"{STUDENT}.rollout.top_k", -1, "rollout.top_k", _keep_positive),
    Taken("data.max_prompt_length", 512, "prompt_tokens"),
    Taken("data.seed", None, "seed"),
    Taken(f"{ACTOR}.optim.lr", 1e-6, "optimizer.learning_rate"),
    Taken(f"{ACTOR}.optim.weight_decay", 0.01, "optimizer.weight_decay"),
    Taken(f"{ACTOR}.optim.betas", None, "optimizer.betas"),
    Taken(f"{ACTOR}.optim.lr_scheduler_type", None, "optimizer.schedule"),
    Taken(f"{ACTOR}.optim.lr_warmup_steps", -1, "optimizer.warmup_steps", _keep_positive),
    Taken(f"{ACTOR}.grad_clip", None, "optimizer.max_grad_norm"),
    Taken("data.train_batch_size", 1024, "train.prompts_per_step"),
    Taken(f"{ACTOR}.ppo_epochs", 1, "train.epochs"),
    Taken("trainer.save_freq", -1, "train.checkpoint_every", _keep_positive),
    Taken("trainer.test_freq", -1, "evaluation.every", _keep_positive),
    Taken(f"{STUDENT}.rollout.val_kwargs.temperature", 0, "evaluation.temperature"),
)
"""The keys with a direct equivalent in a recipe."""

AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
}
LOSSES: dict[tuple[str, bool], dict[str, Any]] = {
    ("k1", True): {"signal": "sampled", "divergence": "reverse_kl", "estimator": "score_function"},
    ("k2", False): {"signal": "sampled", "divergence": "reverse_kl", "estimator": "k2_surrogate"},
    # As a loss, k3 has in expectation the gradient of the forward KL: see docs/estimators.md.
    ("k3", False): {"signal": "sampled", "divergence": "forward_kl", "estimator": "score_function"},
    ("forward_kl_topk", False): {"divergence": "ce", "estimator": "pathwise"},
}
"""The term of each `loss_mode`, with and without `use_policy_gradient`."""
SAME_LOSS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
SCRIPTS = (".sh", ".bash")
ADVANTAGES = {"grpo": "group_normalized", "rloo": "leave_one_out"}


def convert_verl(path: Path, target: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's data for the file `target`, and a line for each thing that is not taken.

    Raises RecipeError if the file is no configuration of a distillation.
    """
    notes: list[str] = []
    config = VerlConfig(dict(_flatten(_read_config(path, notes))))
    if not any(key.startswith("distillation.") for key in config.leaves):
        raise RecipeError(
            f"{path}: no key `distillation`, so this is no configuration of verl's distillation"
        )
    config.take("distillation.enabled")
    recipe: dict[str, Any] = {}
    for entry in TAKEN:
        setting = entry.convert(config.take(entry.key, entry.default))
        if setting is not None:
            _put(recipe, entry.place, setting)
    alpha = config.take(f"{STUDENT}.model.lora_alpha", 16)
    if "lora" in recipe.get("student", {}):
        recipe["student"]["lora"]["alpha"] = alpha
    recipe["teacher"] = _convert_teachers(config)
    recipe["task"] = _convert_data(config, target, notes)
    recipe["objective"] = _convert_loss(config, recipe, notes)
    _convert_steps(config, recipe, notes)
    notes += [f"not taken: {key} = {leaf}" for key, leaf in config.list_left()]
    return recipe, notes


def _read_config(path: Path, notes: list[str]) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in SCRIPTS:
            script = read_launch_script(text, str(path))
            notes += script.notes
            return {key: parse_value(text) for key, text in script.arguments.items()}
        content = yaml.load(text, StrictLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:400]
        raise RecipeError(f"{path}: cannot be read as YAML ({reason})") from error
    if isinstance(content, list) and all(isinstance(entry, str) for entry in content):
        pairs = [entry.lstrip("+").partition("=") for entry in content]
        return {key: parse_value(text) for key, _, text in pairs}
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: neither a mapping nor a list of overrides such as data.n=1")
    return content


def _flatten(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(section, Mapping) or not section:
        yield path, section
        return
    for key, inner in section.items():
        yield from _flatten(inner, f"{path}.{key}" if path else str(key))


def _put(recipe: dict[str, Any], place: str, setting: Any) -> None:
    *sections, key = place.split(".")
    for section in sections:
        recipe = recipe.setdefault(section, {})
    recipe[key] = setting


def _convert_teachers(config: VerlConfig) -> dict[str, Any]:
    """Return the teacher, or a route by domain if there are several.

    Like verl, drop the entry `teacher_model` if there are others.
    """
    prefix = "distillation.teacher_models."
    names = dict.fromkeys(
        key.removeprefix(prefix).partition(".")[0]
        for key in config.leaves
        if key.startswith(prefix)
    )
    if len(names) > 1:
        names.pop("teacher_model", None)
    teachers: dict[str, Any] = {}
    for name in names:
        model = config.take(f"{prefix}{name}.model_path")
        dtype = config.take(f"{prefix}{name}.inference.dtype", "bfloat16")
        key = str(config.take(f"{prefix}{name}.key", name))
        teachers[key] = {"type": "model", "model": model, "dtype": dtype}
    config.take("distillation.teacher_key")
    if len(teachers) > 1:
        return {"type": "route", "by": "domain", "teachers": teachers}
    single = config.take("distillation.teacher_model.model_path")
    return next(iter(teachers.values()), {"type": "model", "model": single})


def _convert_data(config: VerlConfig, target: Path, notes: list[str]) -> dict[str, Any]:
    question = config.take("data.prompt_key", "prompt")
    task: dict[str, Any] = {
        "type": "jsonl",
        "path": _convert_files(config.take("data.train_files"), target),
        "verifier": "math",
    }
    heldout = config.take("data.val_files")
    if heldout is not None:
        task["heldout"] = _convert_files(heldout, target)
    images = config.take("data.image_key", "images")
    if question != "prompt" or images != "images":
        answer = "reward_model.ground_truth"
        task["columns"] = {"prompt": question, "answer": answer, "domain": "data_source"}
        # The column `images` needs no entry, and some files lack it.
        task["columns"] |= {} if images == "images" else {"images": images}
    notes.append(
        "task.verifier: verl chooses the reward by data_source; `math` is written, which needs "
        f"math-verify ({suggest_install('tasks')}); exact, contains and number are others"
    )
    return task


def _convert_files(files: Any, target: Path) -> Any:
    """Return paths as seen from the recipe's folder, where a relative path names a file here."""
    folder = target.resolve().parent
    paths = [
        os.path.relpath(name, folder) if os.path.exists(name) else name
        for name in _list_files(files)
    ]
    return paths[0] if len(paths) == 1 else paths


def _list_files(files: Any) -> list[str]:
    return [str(name) for name in (files if isinstance(files, list) else [files])]


def _convert_loss(config: VerlConfig, recipe: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    mode = str(config.take(f"{LOSS}.loss_mode", "k3"))
    is_policy_gradient = bool(config.take(f"{LOSS}.use_policy_gradient", False))
    name = SAME_LOSS.get(mode, mode)
    term = LOSSES.get((name, is_policy_gradient))
    if term is None:
        notes.append(
            f"objective: loss_mode {mode} with use_policy_gradient {is_policy_gradient} is the "
            "gradient of no divergence here; reverse_kl at the sampled token is written"
        )
        term = LOSSES["k1", True]
    k = config.take(f"{LOSS}.topk", 32)
    if term["divergence"] == "ce":
        term = {"signal": f"topk({k}, support=teacher, tail=drop)", **term}
    low, high = (config.take(f"{LOSS}.clip_ratio_{end}", 0.2) for end in ("low", "high"))
    if is_policy_gradient:
        term = {**term, "correction": f"ratio_clip({low}, {high})"}
        bound = config.take_number(f"{LOSS}.loss_max_clamp")
        term |= {} if bound is None else {"clip": f"advantage({-bound}, {bound})"}
    coefficient = config.take(f"{LOSS}.distillation_loss_coef", 1.0)
    mean = AGGREGATES.get(str(config.take(f"{ACTOR}.loss_agg_mode", "token-mean")))
    if mean is None:
        notes.append(
            "objective.aggregate: this loss_agg_mode has no equivalent here; token_mean is used"
        )
    objective: dict[str, Any] = {"aggregate": mean or "token_mean"}
    if not config.take(f"{LOSS}.use_task_rewards", True):
        return {**term, **objective}
    return {
        "losses": [_convert_reward(config, recipe, notes), {**term, "coefficient": coefficient}],
        **objective,
    }


def _convert_reward(config: VerlConfig, recipe: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the term of the task's reward, for `use_task_rewards`, and give the recipe its critic."""
    low, high = (config.take(f"{ACTOR}.clip_ratio_{end}", 0.2) for end in ("low", "high"))
    correction = f"ratio_clip({low}, {high})"
    estimator = str(config.take("algorithm.adv_estimator", "gae"))
    if estimator == "gae":
        recipe["scorers"] = {"critic": _convert_critic(config, notes)}
        return {"signal": "score(none)", "scorer": "critic", "correction": correction}
    advantage = ADVANTAGES.get(estimator)
    if advantage == "group_normalized":
        normalises = config.take("algorithm.norm_adv_by_std_in_grpo", True)
        advantage = advantage if normalises else "group_mean"
    if advantage is None:
        notes.append(
            f"objective: adv_estimator {estimator} has no equivalent here; group_normalized is used"
        )
    return {"signal": f"score({advantage or 'group_normalized'})", "correction": correction}


def _convert_critic(config: VerlConfig, notes: list[str]) -> dict[str, Any]:
    """Return the critic of verl's estimator `gae`, which normalises advantages over a batch."""
    batch = config.take_number("data.train_batch_size", 1024)
    mini_batch = config.take_number("critic.ppo_mini_batch_size") or config.take_number(
        f"{ACTOR}.ppo_mini_batch_size", 256
    )
    epochs = config.take_number("critic.ppo_epochs") or config.take_number(f"{ACTOR}.ppo_epochs", 1)
    critic: dict[str, Any] = {
        "type": "value",
        "gamma": config.take("algorithm.gamma", 1.0),
        "gae_lambda": config.take("algorithm.lam", 1.0),
        "normalize": True,
        "clip": config.take_number("critic.cliprange_value", 0.5),
        "learning_rate": config.take_number("critic.optim.lr", 1e-5),
        "max_grad_norm": config.take_number("critic.grad_clip", 1.0),
        "updates": max(1, int(batch // mini_batch) * int(epochs)),
    }
    model = config.take("critic.model.path")
    if model is None:
        notes.append(
            "scorers.critic: verl's estimator gae has a critic, and critic.model.path is missing; "
            "it begins as a copy of the student"
        )
    else:
        critic["model"] = {"model": model}
    return critic


def _convert_steps(config: VerlConfig, recipe: dict[str, Any], notes: list[str]) -> None:
    """Set the steps, from the epochs if needed, and the updates per step."""
    train, batch = recipe["train"], config.take_number("data.train_batch_size", 1024)
    mini_batch = config.take_number(f"{ACTOR}.ppo_mini_batch_size", 256)
    if batch % mini_batch == 0 and batch > mini_batch:
        train["updates_per_step"] = batch // mini_batch
    steps, epochs = (
        config.take_number(f"trainer.total_{of}") for of in ("training_steps", "epochs")
    )
    rows = None if steps else _count(config.take("data.train_files"))
    if steps is not None:
        train["steps"] = steps
    elif rows is not None:
        train["steps"] = max(1, rows * (epochs or 1) // batch)
    else:
        notes.append(
            f"train.steps: missing; set rows * {epochs or 1} // {batch}, since the training "
            "files are not here to be counted"
        )
    ratio = config.take_number(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0)
    if ratio and "steps" in train and "warmup_steps" not in recipe["optimizer"]:
        recipe["optimizer"]["warmup_steps"] = int(ratio * train["steps"])


def _count(files: Any) -> int | None:
    """Return the number of rows in all files, or None if a file is missing."""
    paths = [Path(os.path.expanduser(name)) for name in _list_files(files)]
    return sum(map(count_rows, paths)) if all(map(os.path.isfile, paths)) else None
