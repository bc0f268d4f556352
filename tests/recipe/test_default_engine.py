"""The engine of a recipe that names none: vLLM where a GPU and vLLM are, and nothing elsewhere."""

from importlib.machinery import ModuleSpec

import pytest
import torch

from practicum.backends.ray.config import Config as RayConfig
from practicum.engines.auto import Config as Auto
from practicum.recipe import Recipe, possible
from practicum.recipe.loader import parse_recipe
from practicum.recipe.possible import ENGINE_CORRECTION

RECIPE = {
    "student": {"model": "some/model"},
    "teacher": {"type": "model", "model": "some/teacher"},
    "task": {"type": "jsonl", "path": "rows.jsonl"},
    "objective": {"signal": "sampled", "divergence": "reverse_kl"},
    "rollout": {"max_new_tokens": 8},
    "optimizer": {"learning_rate": 1e-5},
}


@pytest.fixture
def gpu_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(possible, "find_spec", lambda name: ModuleSpec(name, None))


def parse(**sections: object) -> Recipe:
    """Parse the recipe with sections merged over its own."""
    merged = {name: {**RECIPE.get(name, {}), **section} for name, section in sections.items()}
    return parse_recipe({**RECIPE, **merged}, "test")


def test_without_a_gpu_or_vllm_there_is_none():
    recipe = parse()
    assert recipe.rollout.engine is None
    assert recipe.objective.losses[0].correction.name != "ratio_truncate"


@pytest.mark.usefixtures("gpu_with_vllm")
def test_on_a_gpu_with_vllm_it_is_auto_with_the_correction_of_an_engine():
    recipe = parse()
    assert recipe.rollout.engine == Auto()
    named = parse(objective={"correction": ENGINE_CORRECTION}, rollout={"engine": "local"})
    assert recipe.objective.losses[0].correction == named.objective.losses[0].correction
    assert parse(backend={"type": RayConfig().type}).rollout.engine == Auto()


@pytest.mark.usefixtures("gpu_with_vllm")
@pytest.mark.parametrize(
    "sections",
    [
        {"student": {"model": {"architecture": "llama"}}},
        {"student": {"device": "cpu"}},
        {"student": {"quantization": "nf4", "lora": {"rank": 4}}},
        {"student": {"drafter": {"type": "eagle3"}}},
        {"rollout": {"draft": {"drafter": "some/drafter"}}},
        {"rollout": {"source": "token_mix(teacher=0.5)"}},
    ],
    ids=["scratch", "cpu", "quantized", "drafter", "draft", "mixed tokens"],
)
def test_a_recipe_that_no_engine_can_sample_for_keeps_the_local_sampler(sections):
    if "drafter" in sections.get("student", {}):
        sections = {**sections, "objective": {"signal": "full", "divergence": "forward_kl"}}
    assert parse(**sections).rollout.engine is None


@pytest.mark.usefixtures("gpu_with_vllm")
def test_local_is_the_local_sampler_everywhere_without_a_correction():
    recipe = parse(rollout={"engine": "local"})
    assert recipe.rollout.engine is not None and recipe.rollout.engine.type == "local"
    assert recipe.objective.losses[0].correction.name != "ratio_truncate"
