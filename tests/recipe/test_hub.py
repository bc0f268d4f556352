"""Recipes of hub models: they parse, their rows are read, and their plans need neither weights nor a network."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import make_model, rows, said, toy_run
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import hub
from practicum.core.packaged import list_recipe_files
from practicum.models.sources import HUB_NAME
from practicum.recipe import load_recipe
from practicum.recipe.yaml_files import read_yaml
from practicum.runs.opening import build_task

RECIPES = hub.list_hub_recipes()
MODELS = hub.read_models()
RECORD = json.loads(hub.RECORD.read_text(encoding="utf-8"))["plans"]
SLOW_PLANS = {"hub/qwen3.5-2b": pytest.mark.slow}
"""Layers of linear attention are planned by a loop over the text: 35 seconds, other recipes 6 to 12."""

TURNS = [{"role": "user", "content": "What is 7 times 2?"}, {"role": "assistant", "content": "14."}]
ROWS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "7 times 2?", "answer": "7*2 = <<7*2=14>>14\n#### 14"},
    "open-r1/DAPO-Math-17k-Processed": {
        "prompt": "7 times 2?",
        "solution": "14",
        "data_source": "math_dapo",
        "source_prompt": TURNS[:1],
        "ability": "MATH",
        "reward_model": {"ground_truth": "14", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "a"},
    },
    "zwhe99/DeepMath-103K": {
        "question": "7 times 2?",
        "final_answer": "14",
        "difficulty": 1.0,
        "topic": "Algebra",
        "r1_solution_1": "14",
        "r1_solution_2": "14",
        "r1_solution_3": "14",
    },
    "trl-lib/chatbot_arena_completions": {"messages": TURNS},
    "sahil2801/CodeAlpaca-20k": {"instruction": "Double x.", "input": "x = 7", "output": "2 * x"},
}
"""A row of each dataset, with the columns of its card."""


def test_the_hub_recipes_and_their_models_belong_together() -> None:
    used = {model for name in RECIPES for model in hub.list_models(load_recipe(name))}
    assert len(RECIPES) == 6 and used == set(MODELS) and set(RECORD) == set(RECIPES)
    assert all(HUB_NAME.fullmatch(model) for model in used)


@pytest.mark.parametrize("name", RECIPES)
def test_a_hub_recipe_states_the_source_of_its_numbers(name: str) -> None:
    file = list_recipe_files()[name]
    content = read_yaml(file)
    assert ", with numbers of " in content["about"] and content["differs"]
    comment = file.read_text(encoding="utf-8").partition("\nabout:")[0]
    assert any(library in comment for library in ("SkyRL", "ms-swift", "Tinker", "TRL", "verl"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    """Within one unit of the last published digit: cards round 1.236 billion to 1.23."""
    model = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(model["config"]))
    with torch.device("meta"):
        weightless = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    weightless.tie_weights()
    count = sum(weight.numel() for weight in weightless.parameters())
    published = model["parameters"]
    if published.endswith("B"):
        digits = len(published.partition(".")[2].removesuffix("B"))
        assert abs(count / 1e9 - float(published[:-1])) < 10.0**-digits
    else:
        assert count == int(published.replace(",", ""))


@pytest.mark.parametrize("name", RECIPES)
def test_student_and_teacher_have_the_same_tokens(name: str) -> None:
    student, teacher = (MODELS[model] for model in hub.list_models(load_recipe(name)))
    assert student["tokens"] == teacher["tokens"]
    for model in (student, teacher):
        text = model["config"].get("text_config", model["config"])
        # One token of text-only Gemma 3 has no row.
        assert model["tokens"] <= text["vocab_size"] + (text["model_type"] == "gemma3_text")


@pytest.mark.parametrize("name", RECIPES)
def test_the_rows_of_a_hub_dataset_are_read(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    path = recipe.model_dump()["task"]["path"]
    for split in ("train", "test"):
        lines = [json.dumps(ROWS[path]).replace("7", f"7{len(split)}{n}") for n in range(200)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    task = build_task(load_recipe(name, [f"task.path={tmp_path}", "task.name=null"]))
    prompt = task.train_prompts()[0]
    assert prompt.question and min(len(task.train_prompts()), len(task.heldout_prompts())) >= 64
    has_reward = path not in ("trl-lib/chatbot_arena_completions", "sahil2801/CodeAlpaca-20k")
    assert (prompt.answer is not None) == has_reward
    assert (prompt.response is not None) or has_reward


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW_PLANS.get(name, pytest.mark.long)) for name in RECIPES]
)
def test_the_recorded_plan_is_the_plan(name: str) -> None:
    with hub.open_recipe(name) as recipe:
        plan = hub.plan_on_gpu(recipe)
    recorded = RECORD[name]
    assert plan.memory.peak == pytest.approx(recorded["peak"], rel=0.01)
    assert plan.memory.largest == recorded["phase"]
    # What a GPU of 80 GB has, nine tenths of it.
    assert plan.memory.peak < 72 * 2**30


@pytest.mark.parametrize("name", RECIPES)
def test_check_asks_no_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", None)
    status, text = said(tmp_path, "check", name)
    assert status == 0 and text.endswith(f"{name}: no mistakes found\n"), text


def pad_rows(model: Path, count: int) -> None:
    """Add rows of large numbers to a model's embedding and head, as padding may have."""
    path = model / "model.safetensors"
    weights = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            padding = 9 * torch.ones(count, weights[name].shape[1])
            weights[name] = torch.cat([weights[name], padding])
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] += count
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("signal", ["topk(4)", "full"])
def test_other_padding_of_the_same_tokens_changes_nothing(signal: str, tmp_path: Path) -> None:
    """Small models of Qwen2.5 have 151,936 rows and large ones 152,064, for the same 151,665 tokens."""
    make_model(tmp_path / "plain/student", seed=1)
    make_model(tmp_path / "plain/teacher", seed=2)
    shutil.copytree(tmp_path / "plain", tmp_path / "padded")
    pad_rows(tmp_path / "padded/student", 5)
    pad_rows(tmp_path / "padded/teacher", 133)
    changes = {"objective": {"signal": signal, "divergence": "forward_kl"}, "train.steps": 2}
    plain, padded = (
        rows(toy_run(tmp_path / kind, tmp_path / f"{kind}-runs", changes).folder / "metrics.jsonl")
        for kind in ("plain", "padded")
    )
    kept = {"loss", "grad_norm", "reward", "length", "entropy"}
    for one, other in zip(plain, padded, strict=True):
        assert {key: one[key] for key in kept & one.keys()} == {
            key: pytest.approx(other[key], rel=1e-5) for key in kept & one.keys()
        }
        assert {"loss", "grad_norm"} <= one.keys()
