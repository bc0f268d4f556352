"""Recipes of methods give the same run over Ray as in one process."""

from pathlib import Path

import pytest
from toy import rows, toy_run

from tests.backends.ray_session import cluster
from tests.backends.test_ray import assert_close_runs, assert_recipe_is_the_same_over_ray
from tests.methods.caopd.stated import STATED
from tests.methods.skill_sd.hinted import HINTED

assert cluster
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.usefixtures("cluster"),
    # Ray's own threads and sockets are closed by Ray later.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CLUSTER = {"type": "ray", "trainers": 2}
TINY = "{hidden_size: 32, layers: 1, heads: 2, tokenizer: bytes}"
FEW = ["train.prompts_per_step=4", "rollout.max_new_tokens=8"]
SHORT = {
    "papers/ketchup": [
        *FEW,
        "student.model.pretrain.steps=20",
        "teacher.model.pretrain.steps=20",
    ],
    "papers/ovd": [*FEW, f"student.model={TINY}", "student.trainable_layers=1"],
    # Fewer steps of pretraining leave no answer that both models agree on.
    "papers/rstar": [
        "train.prompts_per_step=8",
        "student.model.pretrain.steps=150",
        "reference.model.pretrain.steps=150",
    ],
}
"""Changes that reduce each recipe to seconds."""


def test_a_memory_of_notes_over_ray_is_that_of_one_process(models: Path, tmp_path: Path) -> None:
    """The student writes notes, a privileged self-teacher shows them, and a memory keeps them."""
    one = toy_run(models, tmp_path / "one", HINTED).folder
    two = toy_run(models, tmp_path / "two", {**HINTED, "backend": CLUSTER}).folder
    assert_close_runs(one, two)
    assert [row.get("notes") for row in rows(one / "rollouts.jsonl")] == [
        row.get("notes") for row in rows(two / "rollouts.jsonl")
    ]


def test_restated_answers_over_ray_are_those_of_one_process(models: Path, tmp_path: Path) -> None:
    """A note replaces the confidence that an answer states (CaOPD 2604.16830)."""
    one = toy_run(models, tmp_path / "one", STATED).folder
    assert_close_runs(one, toy_run(models, tmp_path / "two", {**STATED, "backend": CLUSTER}).folder)


@pytest.mark.parametrize("name", SHORT)
def test_a_recipe_gives_the_run_of_one_process(tmp_path: Path, name: str) -> None:
    assert_recipe_is_the_same_over_ray(name, SHORT[name], tmp_path)
