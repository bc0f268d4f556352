"""Define the tiny runs of `benchmarks digests`: every packaged recipe at toy size, and the parts that no recipe has."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.service import serve_models
from practicum.ports import Task
from practicum.recipe import find_recipe, list_recipe_names, read_recipe
from practicum.runs import assembly
from practicum.types import Prompt, Rollout
from tests.stub_server import Stub, table

Reward = Callable[[Any, Rollout], float | None]

STUDENT = {
    "architecture": "llama",
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "seed": 1,
    "pretrain": {"steps": 10},
}
TEACHER = STUDENT | {"hidden_size": 48, "seed": 2, "pretrain": {"steps": 20}}
BASE: dict[str, Any] = {
    "student": {"model": STUDENT},
    "teacher": {"type": "model", "model": TEACHER},
    "task": {
        "type": "reverse",
        "alphabet": "abcd",
        "shortest": 2,
        "longest": 3,
        "train_size": 48,
        "heldout_size": 8,
    },
    "rollout": {"n": 2, "max_new_tokens": 6},
    "objective": {"signal": "full", "divergence": "reverse_kl"},
    "optimizer": {"learning_rate": 0.003},
    "train": {"steps": 4, "prompts_per_step": 8, "checkpoint_every": 2, "threads": 1},
    "evaluation": {"prompts": 8, "max_new_tokens": 6},
}
TURNS = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "candidates": {
        "objective": {"signal": "topk(6)", "divergence": "jsd(0.3)"},
        "train": BASE["train"] | {"updates_per_step": 2},
    },
    "self": {
        "teacher": {"type": "self", "weights": "ema"},
        "objective": {"signal": "full", "divergence": "forward_kl"},
    },
    "privileged": {
        "teacher": {"type": "privileged", "teacher": {"type": "self"}, "question": "{answer}"}
    },
    "pool": {
        "teacher": {
            "type": "pool",
            "teachers": {
                "a": {"type": "model", "model": TEACHER},
                "b": {"type": "model", "model": TEACHER | {"seed": 3}},
            },
        }
    },
    "conversation": {
        "student": {
            "model": {
                "architecture": "llama",
                "hidden_size": 24,
                "layers": 2,
                "heads": 2,
                "seed": 1,
            },
            "template": TURNS,
        },
        "teacher": {"type": "expert"},
        "task": {"type": "walker"},
        "rollout": {"n": 1, "max_new_tokens": 80},
        "train": BASE["train"] | {"steps": 3},
        "evaluation": {"prompts": 8, "temperature": 1.0},
    },
    "ahead": {
        "rollout": BASE["rollout"] | {"max_staleness": 1},
        "objective": {"signal": "sampled", "correction": "ratio_truncate(2)"},
    },
    "adapters": {
        "student": {"model": STUDENT, "lora": {"rank": 4}},
        "objective": {
            "signal": "sampled",
            "estimator": "score_function(gamma=1, baseline=group_mean)",
        },
    },
    "resumed": {
        "reference": {"type": "model", "model": TEACHER},
        "objective": {
            "losses": [
                {"signal": "full"},
                {"signal": "sampled", "against": "reference", "coefficient": 0.1},
            ]
        },
    },
    "segments": {
        "rollout": {"n": 2, "max_new_tokens": 6, "segment_tokens": 2},
        "objective": {"signal": "sampled", "correction": "ratio_truncate(2)"},
    },
    "handover": {"rollout": {"n": 2, "max_new_tokens": 6, "source": "handover(1.0, 0.5)"}},
    "unlikely": {"objective": {"signal": "unlikely(0.3)"}},
    "spoken": {
        "objective": {"signal": "sampled", "estimator": "score_function(gamma=1)"},
    },
    "cached": {
        "teacher": {"type": "cached", "teacher": {"type": "model", "model": TEACHER}},
        "objective": {"signal": "topk(3, support=teacher)"},
    },
    "cache": {
        "rollout": {"n": 2, "max_new_tokens": 6, "source": "cache(RUNS/spoken/rollouts.jsonl)"},
        "objective": {"signal": "sampled"},
    },
    "scripted": {
        "teacher": {"type": "scripted", "tape": "RUNS/spoken/rollouts.jsonl"},
        "objective": {"signal": "sampled", "estimator": "score_function(gamma=1)"},
        "evaluation": {"prompts": 0},
    },
    "openai_api": {
        "teacher": {"type": "openai_api", "url": "http://localhost:SERVER"},
        "objective": {"signal": "topk(4, support=teacher)"},
    },
    "chat_api": {
        "teacher": {"type": "chat_api", "url": "http://localhost:SERVER", "model": "m"},
        "objective": {"signal": "text", "divergence": "ce"},
        "rollout": {"source": "teacher", "max_new_tokens": 5},
        "evaluation": {"prompts": 8, "max_new_tokens": 6, "teacher": False},
    },
    "function": {
        "rollout": {"n": 2, "source": "function(benchmarks.digest_runs:write_reply)"},
        "objective": {"signal": "sampled"},
    },
    "tinker": {
        "teacher": {"type": "tinker", "url": "http://localhost:SERVICE", "model": "teacher"},
        "objective": {"signal": "sampled"},
    },
    "traces": {
        "student": {"model": "RUNS/plain/models/student"},
        "teacher": {"type": "model", "model": "RUNS/plain/models/teacher"},
        "task": {"type": "traces", "path": "TRACES"},
        "rollout": {"n": 1, "max_new_tokens": 16, "source": "traces(TRACES)"},
        "train": BASE["train"] | {"prompts_per_step": 2},
        "evaluation": {"prompts": 0},
    },
    "served": {
        "task": {"type": "served", "task": BASE["task"]},
        "rollout": {"source": "served(TRAFFIC)", "max_new_tokens": 6},
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "live"},
            "reference": "{next}",
        },
        "notes": {"next": {"type": "next_state"}},
        "train": BASE["train"] | {"prompts_per_step": 2},
    },
}
"""For each run, the sections that replace the sections of `BASE`.

RUNS stands for the folder of the runs; `open_inputs` has more such names.
"""

STARTS_FROM = {"cache": "spoken", "scripted": "spoken", "tinker": "plain", "traces": "plain"}
"""For a run that reads rows or models of another run, the name of that run."""

UNSHORTENED = (
    "served/openclaw-rl",
    *(name for name in list_recipe_names() if name.startswith("hub/")),
)
"""Recipes that wait for users, or download their models."""


SIZES = {"hidden_size": 32, "layers": 2, "heads": 2}
PRETRAINING = 40
"""The most supervised steps before a run."""

SMALL: dict[str, dict[str, Any]] = {
    "train": {"steps": 2, "prompts_per_step": 4, "checkpoint_every": 1, "threads": 1},
    "evaluation": {
        "prompts": 4,
        "samples": 1,
        "teacher": False,
        "every": None,
        "max_new_tokens": 8,
    },
}
EVALUATED = ("papers/distillm",)
"""The recipes with a number that follows a held-out metric."""

LONGEST_ANSWER = 8
LONGER = {"papers/caopd": 24, "papers/pi-flow": 32}
"""The longest answer of recipes that need more tokens to say anything."""

TRACES = Path("tests/rollouts/verifiers_traces.jsonl")
"""Two traces that the library verifiers wrote."""

VOCABULARY = 11
"""The tokens of the server's model, as many as the student's."""


def shrink(name: str) -> dict[str, Any]:
    """Return the data of a packaged recipe or pipeline with small models and two short steps."""
    recipe = deepcopy(dict(read_recipe(find_recipe(name))))
    stages = recipe.get("stages", [])
    for index, section in enumerate([recipe, *stages]):
        is_whole = index == 0 or "train" in section
        for key, small in SMALL.items():
            if is_whole or key in section:
                section[key] = {**section.get(key, {}), **small}
        rollout = section.get("rollout")
        if index == 0 or rollout is not None:
            section["rollout"] = rollout = dict(rollout or {})
            rollout["n"] = _bound(rollout.get("n", 2), 4)
            longest = LONGER.get(name, LONGEST_ANSWER)
            rollout["max_new_tokens"] = _bound(rollout.get("max_new_tokens", longest), longest)
        if section.get("student", {}).get("trainable_layers"):
            section["student"] = {**section["student"], "trainable_layers": 1}
        section.pop("tracking", None)
    if name in EVALUATED:
        recipe["evaluation"]["every"] = 1
    if recipe.get("backend", {}).get("type") == "flow":
        # All of its trajectories have the same length.
        recipe["evaluation"]["max_new_tokens"] = recipe["rollout"]["max_new_tokens"]
        return {"name": name.replace("/", "-"), **recipe}
    return {"name": name.replace("/", "-"), **_shrink_models(recipe, "student")}


def _bound(value: Any, limit: int) -> Any:
    """Return a number of a recipe within a limit; a schedule becomes the limit."""
    return min(value, limit) if isinstance(value, int) else limit


def _shrink_models(section: Any, role: str) -> Any:
    """Return a section with every model in it small and from scratch; `role` is the section it is in."""
    if isinstance(section, list):
        return [_shrink_models(entry, role) for entry in section]
    if not isinstance(section, Mapping):
        return section
    return {
        key: _shrink_model(value, role)
        if key == "model"
        else _shrink_models(value, key if key in SECTIONS else role)
        for key, value in section.items()
    }


SECTIONS = ("student", "teacher", "reference", "scorers", "notes")


def _shrink_model(model: Any, role: str) -> Any:
    if isinstance(model, str):
        # Models with a name read any text.
        return (STUDENT if role == "student" else TEACHER) | {"tokenizer": "bytes"}
    if "stage" in model:
        return model
    steps = model.get("pretrain", {}).get("steps", 0)
    pretraining = {**model.get("pretrain", {}), "steps": min(steps, PRETRAINING)}
    return {**model, **SIZES, "pretrain": pretraining}


@contextmanager
def reward_more() -> Iterator[None]:
    """Let about half of the wrong answers have a reward of 1 in the block, chosen by their texts.

    Models of this size answer almost nothing right, so recipes that only learn from rewards would
    have no update. Every verifier is asked all the same.
    """
    build = assembly.build_task
    patched: set[type] = set()
    with ExitStack() as patches:

        def build_generous_task(*arguments: Any) -> Task:
            task = build(*arguments)
            kind = type(task)
            # Hundreds of recipes share a kind of task, and each patch around another is a call deeper.
            if kind not in patched:
                patched.add(kind)
                patches.enter_context(patch.object(kind, "reward", _reward_more(kind.reward)))
            return task

        patches.enter_context(patch.object(assembly, "build_task", build_generous_task))
        yield


def _reward_more(reward: Reward) -> Reward:
    def compute_reward(task: Any, rollout: Rollout) -> float | None:
        number = reward(task, rollout)
        if number is None or number != 0:
            return number
        words = f"{rollout.prompt.id} {rollout.text}".encode(errors="surrogatepass")
        return float(hashlib.sha256(words).digest()[0] % 2)

    return compute_reward


@contextmanager
def open_inputs(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yield the texts that stand for files and the ports of servers of a run, and stop the servers afterwards."""
    words = json.dumps(RUNS.get(name, {}))
    inputs = {"RUNS": str(folder), "TRACES": str(TRACES), "TRAFFIC": str(folder / "traffic.jsonl")}
    with ExitStack() as servers:
        if "TRAFFIC" in words:
            rows = map(json.dumps, build_traffic(16))
            Path(inputs["TRAFFIC"]).write_text("".join(f"{row}\n" for row in rows))
        if "SERVER" in words:
            stub = servers.enter_context(Stub(model=table(VOCABULARY), context=None))
            inputs["SERVER"] = str(stub.port)
        if "SERVICE" in words:
            place = folder / "service"
            place.mkdir()
            models = [f"teacher={folder / 'plain' / 'models' / 'teacher'}"]
            http, _ = servers.enter_context(serve_models(place, models))
            inputs["SERVICE"] = str(http.base_url.port)
        yield inputs


def write_reply(prompt: Prompt, seed: int) -> str:
    """Return a text for a prompt: the source of a run."""
    return "abcd"[seed % 4] + prompt.id[:1]


def build_traffic(count: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of conversations of two turns, as a served student writes them."""
    for number in range(count):
        messages = [{"role": "user", "content": "abcd"[number % 4]}]
        is_second = number % 2 == 1
        if is_second:
            messages = [
                *messages,
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "c"},
            ]
        yield {
            "messages": messages,
            "finishes": number - 1 if is_second else None,
            "text": "a",
            "stop_reason": "stop",
            "policy_version": 0,
            "prompt_tokens": [4, 5 + number % 4],
            "tokens": [5, 6 + number % 3, 2],
            "sampling_logprobs": [-1.5, -1.25, -0.5],
            "policy_logprobs": [-1.5, -1.25, -0.5],
        }


def fill_in(data: Any, inputs: Mapping[str, str]) -> Any:
    """Return the data of a run with its inputs in the places of their names."""
    text = json.dumps(data)
    for name, value in inputs.items():
        text = text.replace(name, value)
    return json.loads(text)
