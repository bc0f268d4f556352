"""A recipe's starting values come from the table row that its student fits, and from nowhere else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from practicum.models.starting_values import CAREFUL, SETTINGS
from practicum.recipe import fill_setting, parse_recipe
from practicum.recipe.settings import choose_setting

SMALL = SETTINGS[2]
"""The row of the packaged 135M model."""

SCRATCH = {"hidden_size": 8, "layers": 1, "heads": 2}


def choose(**student: Any) -> Any:
    choice = choose_setting({"student": student})
    assert choice is not None
    return choice


def test_rows_go_from_small_to_large_and_rates_from_high_to_low() -> None:
    """Check that a larger model never has a higher rate for all weights, and adapters have a higher one."""
    assert SETTINGS[0].parameters is None and SETTINGS[-1].parameters == math.inf
    sizes = [row.parameters for row in SETTINGS[1:]]
    assert sizes == sorted(sizes, key=lambda size: size or 0.0)
    rates = [row.learning_rate for row in SETTINGS]
    assert rates == sorted(rates, reverse=True)
    assert all(row.adapter_learning_rate > row.learning_rate for row in SETTINGS)
    assert all(row.source and row.adapter_source for row in SETTINGS)


def test_a_student_has_the_first_row_that_it_fits() -> None:
    assert choose(model=SCRATCH).setting.parameters is None
    rows = [choose(model=f"org/model-{size}").setting for size in ("0.1B", "0.5B", "4B", "70B")]
    assert len(set(rows)) == 4 and rows[-1] is CAREFUL
    for row in SETTINGS[1:-1]:
        assert row.parameters is not None
        assert choose(model=f"org/m-{row.parameters / 1e6:g}M").setting is row
    assert choose(model="org/nameless").setting is CAREFUL, "an unknown size has the lowest rates"


def test_adapters_and_a_cpu_have_values_of_their_own() -> None:
    row = SMALL
    everything, adapters = choose(model="a/b-135m"), choose(model="a/b-135m", lora={"rank": 4})
    assert everything.list_values()["optimizer.learning_rate"] == row.learning_rate
    assert adapters.list_values()["optimizer.learning_rate"] == row.adapter_learning_rate
    assert adapters.list_values()["student.lora.alpha"] == row.alpha
    on_cpu, on_gpu = choose(model="a/b-135m", device="cpu"), choose(model="a/b-135m", device="cuda")
    assert on_cpu.list_values()["rollout.max_new_tokens"] == row.cpu_max_new_tokens
    assert on_gpu.list_values()["rollout.max_new_tokens"] == row.max_new_tokens


def test_what_a_recipe_sets_stays_and_its_own_rate_has_no_other_warm_up() -> None:
    data = {"student": {"model": "a/b-135m", "lora": {"rank": 4}}, "train": {"steps": 3}}
    filled = fill_setting(data)
    assert filled["train"] == {"steps": 3, "prompts_per_step": SMALL.prompts_per_step}
    assert filled["student"]["lora"] == {
        "rank": 4,
        "alpha": 4 * SMALL.alpha / SMALL.rank,
    }
    assert filled["optimizer"]["warmup_steps"] == SMALL.warmup_steps
    with_rate = fill_setting({**data, "optimizer": {"learning_rate": 1.0}})
    assert with_rate["optimizer"] == {"learning_rate": 1.0}
    at_service = fill_setting({**data, "backend": {"type": "tinker", "url": "http://a"}})
    assert at_service["student"]["lora"]["alpha"] == 32.0, "a service scales all ranks in one way"
    assert "optimizer" not in data, "the data given is not changed"
    assert fill_setting(filled) == filled


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"student": None},
        {"student": {"model": 3}},
        {"student": {"model": "a/b-1B", "lora": 3}, "train": 5, "optimizer": []},
    ],
)
def test_what_is_no_recipe_is_left_to_the_validation(data: dict[str, Any]) -> None:
    filled = fill_setting(data)
    assert {key: filled.get(key) for key in data} == data


def test_a_recipe_without_numbers_is_complete(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    recipe = parse_recipe(
        {
            "student": "org/model-0.5B",
            "teacher": "org/model-8B",
            "task": {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")},
        },
        "mine",
    )
    row = choose(model="org/model-0.5B").setting
    assert recipe.optimizer.learning_rate == row.learning_rate
    assert recipe.train.steps == row.steps


def test_the_student_of_a_run_has_the_size_of_what_it_began_with(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"a": torch.zeros(2, 3)}, weights / "model.safetensors")
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text(json.dumps({"recipe": {"student": {"model": str(weights)}}}))
    assert "6e-06 million" in choose(model=str(run)).size
    stage = tmp_path / "pipeline" / "stages" / "01-first"
    stage.mkdir(parents=True)
    (stage / "recipe.json").write_text((run / "recipe.json").read_text())
    assert "6e-06 million" in choose(model=str(tmp_path / "pipeline")).size
    (run / "recipe.json").write_text("{")
    assert choose(model=str(run)).size == "its size is unknown"
