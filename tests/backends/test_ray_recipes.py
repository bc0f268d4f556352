"""Method recipes with separate writers, judges and anchors give the same run over Ray as in one process."""

from pathlib import Path

import pytest
from chat_user import free_port, served, talk
from toy import HINTED, IN_SEGMENTS, rows, toy_run

from .ray_session import cluster
from .test_ray import assert_close_runs, assert_recipe_is_the_same_over_ray

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
FEW = ["train.prompts_per_step=4", "rollout.max_new_tokens=8"]
SHORT = {
    "papers/bond": [*FEW, "student.model.pretrain.steps=20"],
    "papers/ppo": [*FEW, "student.model.pretrain.steps=20"],
    "papers/dpo": [*FEW, "student.model.pretrain.steps=20"],
    "papers/spin": [*FEW, "student.model.pretrain.steps=20"],
    "papers/orpo-distill": [
        *FEW,
        "student.model.pretrain.steps=20",
        "teacher.model.pretrain.steps=20",
    ],
    # A critic, a teacher's distribution and an entropy in one loss; here the student's body is in another process.
    "papers/llm4teach": [*FEW, "task.turns=2", "scorers.critic.body=own"],
    "papers/gad": [
        *FEW,
        "student.model.pretrain.steps=20",
        "teacher.teacher.model.pretrain.steps=20",
        "scorers.discriminator.warmup_steps=1",
    ],
}
"""Changes that reduce each recipe to seconds."""


def test_notes_over_ray_are_those_of_one_process(models: Path, tmp_path: Path) -> None:
    """The student writes them, a privileged self-teacher shows them."""
    one = toy_run(models, tmp_path / "one", HINTED).folder
    two = toy_run(models, tmp_path / "two", {**HINTED, "backend": CLUSTER}).folder
    assert_close_runs(one, two)
    assert [row.get("notes") for row in rows(one / "rollouts.jsonl")] == [
        row.get("notes") for row in rows(two / "rollouts.jsonl")
    ]


def test_answers_of_which_nothing_is_learned_count_over_ray_as_in_one_process(
    models: Path, tmp_path: Path
) -> None:
    """A teacher that sees a right sibling gives no signal if no sibling is right (SDPO 2601.20802)."""
    changes = {
        "student.model": str(models / "teacher"),
        "teacher": {**HINTED["teacher"], "reference": None, "question": "{question}{sibling}"},
        "rollout": {"n": 3, "max_new_tokens": 5},
        "train.prompts_per_step": 4,
    }
    one = toy_run(models, tmp_path / "one", changes).folder
    two = toy_run(models, tmp_path / "two", {**changes, "backend": CLUSTER}).folder
    assert_close_runs(one, two)
    taught = [
        any(value is not None for value in row["teacher_logprobs"] or [])
        for row in rows(one / "rollouts.jsonl")
    ]
    assert 0 < sum(taught) < len(taught)


def test_users_over_ray_are_answered_and_learned_from_as_by_one_process(
    models: Path, tmp_path: Path
) -> None:
    """The same user sends the same words to both runs in turn; a recorded file gives the same run."""
    folders = {}
    for name, backend in (("one", {}), ("two", {"backend": CLUSTER})):
        changes = {**served(free_port()), **backend}
        folders[name] = talk(models, tmp_path / name, changes, "ab", "cd", "ba", "dd", "a")
    assert_close_runs(folders["one"], folders["two"])
    one, two = (rows(folder / "traffic.jsonl") for folder in folders.values())
    assert [row["text"] for row in one] == [row["text"] for row in two]
    assert [row["finishes"] for row in one] == [row["finishes"] for row in two]
    path = folders["two"] / "traffic.jsonl"
    again = {**served(0), "rollout.source": f"served({path})", "backend": CLUSTER}
    replayed = toy_run(models, tmp_path / "again", again).folder
    for name in ("metrics.jsonl", "rollouts.jsonl", "traffic.jsonl"):
        assert (replayed / name).read_bytes() == (folders["two"] / name).read_bytes(), name


def test_segments_over_ray_give_the_run_of_one_process(models: Path, tmp_path: Path) -> None:
    """Answers continue with newer weights; a resumed run continues with the answers that waited."""
    one = toy_run(models, tmp_path / "one", IN_SEGMENTS).folder
    two = toy_run(models, tmp_path / "two", {**IN_SEGMENTS, "backend": CLUSTER}).folder
    assert_close_runs(one, two)
    assert [row.get("versions") for row in rows(one / "rollouts.jsonl")] == [
        row.get("versions") for row in rows(two / "rollouts.jsonl")
    ]
    assert any(row["tokens_carried"] > 0 for row in rows(two / "metrics.jsonl"))
    resumed = tmp_path / "resumed"
    toy_run(models, resumed, {**IN_SEGMENTS, "backend": CLUSTER, "train.steps": 2})
    again = {**IN_SEGMENTS, "backend": CLUSTER}
    toy_run(models, resumed, again, resume=True, allow_changed=["train.steps"])
    assert_close_runs(one, resumed / "toy")


@pytest.mark.parametrize("name", SHORT)
def test_a_recipe_gives_the_run_of_one_process(tmp_path: Path, name: str) -> None:
    assert_recipe_is_the_same_over_ray(name, SHORT[name], tmp_path)
