"""Runs with scorers: the reward that is learned from, and the same bytes after a resume, ahead of updates, on a cluster."""

from pathlib import Path
from typing import Any

import pytest
from learned_scorers import stop_and_resume
from toy import assert_same_run, curve, forked, rows, toy_data, toy_recipe, toy_run

from practicum.errors import RecipeError, VocabularyError
from practicum.recipe import parse_recipe

LEARNED = {"learning_rate": 0.003}
CHANGES: dict[str, Any] = {
    "rollout": {"n": 3, "max_new_tokens": 5, "source": "join(teacher)"},
    "objective": {
        "losses": [
            {"signal": "score(group_mean, among=source)", "source": "student", "scorer": "judge"},
            {"signal": "score(none)", "scorer": "critic", "coefficient": 0.5},
        ]
    },
    "scorers": {
        "judge": {"type": "discriminator", "warmup_steps": 1, **LEARNED},
        "orm": {"type": "outcome", "share": 0.5, **LEARNED},
        "critic": {"type": "value", "reward": "judge", **LEARNED},
    },
    "train.steps": 4,
    "train.prompts_per_step": 4,
}


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_resumed_run_has_the_same_bytes(models: Path, tmp_path: Path, lag: int) -> None:
    changes = {**CHANGES, "rollout.max_staleness": lag}
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert_same_run(whole, stop_and_resume(models, tmp_path / "parts", changes))
    saved = {path.name for path in (whole / "checkpoints" / "step-4").glob("scorer-*")}
    assert saved == {f"scorer-{name}.safetensors" for name in ("judge", "orm", "critic")}
    assert curve(whole, "scorer-judge/undecided") == [1.0, 0.0, 0.0, 0.0]
    # Asked at its own step: an answer that is a lag old is judged by the newest scorer.
    judged = [row for row in rows(whole / "rollouts.jsonl") if row["step"] == 4]
    assert "Scorers above the verifier" in (whole / "report.html").read_text(encoding="utf-8")
    assert all(row["judgements"].keys() == {"judge", "orm", "critic"} for row in judged)


@pytest.mark.long
@pytest.mark.parametrize("lag", [0, 1])
def test_a_killed_run_goes_on_with_the_same_bytes(models: Path, tmp_path: Path, lag: int) -> None:
    """Kill the run after a step that has trained its scorers, before its checkpoint is written."""
    changes = {**CHANGES, "rollout.max_staleness": lag, "train.checkpoint_every": 1}
    whole, out = toy_run(models, tmp_path / "whole", changes).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    assert_same_run(whole, toy_run(models, out, changes, resume=True).folder)


@pytest.mark.long
def test_a_clip_acts_over_parts_and_epochs_and_a_kill_between_them_changes_no_byte(
    models: Path, tmp_path: Path
) -> None:
    """Two parts in two epochs are four updates per step; the kill comes after the second of step 3."""
    clipped = [
        {**term, "correction": "ratio_clip(0.02, 0.02)"} for term in CHANGES["objective"]["losses"]
    ]
    changes = {
        **CHANGES,
        "objective": {"losses": clipped},
        "train.checkpoint_every": 1,
        "train.epochs": 2,
    }
    parts = {**changes, "train.updates_per_step": 2}
    whole = toy_run(models, tmp_path / "whole", parts).folder
    metrics = rows(whole / "metrics.jsonl")
    assert max(row.get("clipped_0", 0.0) for row in metrics) > 0
    once = toy_run(models, tmp_path / "once", {**changes, "train.epochs": 1})
    assert not any(row.get("clipped_0") for row in rows(once.folder / "metrics.jsonl"))
    out = tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, parts), {"PRACTICUM_FAULT": "mini_batch:10"}) == 137
    assert len(rows(out / "toy" / "metrics.jsonl")) == 2
    assert_same_run(whole, toy_run(models, out, parts, resume=True).folder)


def test_a_term_learns_from_its_own_scorer_alone(models: Path, tmp_path: Path) -> None:
    only = {**CHANGES, "objective": CHANGES["objective"]["losses"][0], "train.steps": 2}
    folder = toy_run(models, tmp_path, only).folder
    metrics = rows(folder / "metrics.jsonl")
    # In the warm-up the judge gives no grades, so nothing is learned, for any reward of the verifier.
    assert metrics[0]["empty_updates"] == 1.0 and metrics[0]["grad_norm"] == 0.0
    assert metrics[1]["empty_updates"] == 0.0 and metrics[1]["grad_norm"] > 0.0
    weights = [row for row in rows(folder / "rollouts.jsonl") if row["step"] == 2]
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for row in weights:
        if row["source"] == "student":
            pair = (row["judgements"]["judge"], row["weight"][0])
            by_prompt.setdefault(row["prompt"], []).append(pair)
    tokens = sum(len(row["tokens"]) for row in weights)
    for pairs in by_prompt.values():
        mean = sum(score for score, _ in pairs) / len(pairs)
        for score, weight in pairs:
            assert weight == pytest.approx(-(score - mean) / tokens, abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"objective": {"signal": "score", "scorer": "judge"}},
            r"no scorer is named 'judge'; set verifier, or add it to scorers: \{judge: ",
        ),
        ({"scorers": {"verifier": {"type": "outcome"}}}, r"the name of the task's own reward"),
        ({"scorers": {"a/b": {"type": "outcome"}}}, r"scorers\.a/b"),
        ({"scorers": {"orm": {"type": "outcom"}}}, r"no scorer named 'outcom'; .*outcome"),
    ],
)
def test_a_recipe_with_an_impossible_scorer_is_refused(
    models: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(RecipeError, match=line):
        parse_recipe(toy_data(models, changes), "toy")


def test_a_critic_of_a_later_scorer_is_refused(models: Path, tmp_path: Path) -> None:
    scorers = {"critic": {"type": "value", "reward": "orm"}, "orm": {"type": "outcome"}}
    with pytest.raises(
        RecipeError, match=r"no scorer 'orm' is listed before this one; set verifier$"
    ):
        toy_run(models, tmp_path, {"scorers": scorers})


def test_a_body_with_other_tokens_is_refused(models: Path, tmp_path: Path) -> None:
    from toy import make_model

    other = make_model(tmp_path / "other", alphabet="abcdxyz")
    changes = {"scorers": {"orm": {"type": "outcome", "model": {"model": str(other)}}}}
    with pytest.raises(
        VocabularyError, match=r"scorers\.orm\.model: .* other tokens .* leave model"
    ):
        toy_run(models, tmp_path, changes)


@pytest.mark.parametrize("source", ["student", "join(reference)"])
def test_a_discriminator_without_answers_of_the_teacher_is_refused(
    models: Path, source: str
) -> None:
    changes = CHANGES | {"rollout": {**CHANGES["rollout"], "source": source}}
    changes |= {"reference": {"type": "self"}}
    with pytest.raises(
        RecipeError,
        match=r"scorers\.judge: it learns to prefer .* set rollout.source: join\(teac",
    ):
        toy_recipe(models, changes)
