"""Losses between two real vocabularies in whole runs: no loss refers to unknown ids, and runs resume and shard."""

import math
from pathlib import Path
from typing import Any

import pytest
from backends.ray_session import cluster  # noqa: F401
from toy import curve, make_model, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError, RecipeError
from practicum.recipe import parse_recipe

LOSSES = {
    "alm": {"signal": "chunks(100)", "divergence": "forward_kl"},
    "dpca": {"signal": "sampled(surprise)"},
    "uld": {"signal": "sorted(align=index)"},
    "gold": {"signal": "sorted(matched=true)", "divergence": "jsd(0.5)"},
    "x-token": {"signal": "projected(0.1)", "divergence": "forward_kl"},
    "full": {"signal": "full"},
    "dskd-v2": {"signal": "dual_space(2)", "divergence": "forward_kl"},
    "simct": {"signal": "span_token(joined=true)"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a student that reads characters, and teachers that read pairs of them and bytes."""
    folder = tmp_path_factory.mktemp("vocabularies")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, tokenizer="pairs", pretrain=10)
    make_model(folder / "bytes", seed=3, tokenizer="bytes", pretrain=10)
    return folder


def translated(folder: Path, **more: Any) -> dict[str, Any]:
    inner = {"type": "model", "model": str(folder)}
    return {"type": "translated", "teacher": inner, "credit": "span", **more}


def changes(pair: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "teacher": translated(pair / "teacher"),
        "objective": LOSSES[name],
        "train.steps": 2,
        "train.checkpoint_every": 1,
        **more,
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name == "alm" else name for name in LOSSES],
)
def test_a_run_between_two_vocabularies_moves_the_student_and_resumes(
    pair: Path, tmp_path: Path, name: str
) -> None:
    whole = toy_run(pair, tmp_path / "whole", changes(pair, name)).folder
    assert all(math.isfinite(norm) and norm > 0 for norm in curve(whole, "grad_norm"))
    first = changes(pair, name, **{"train.steps": 1})
    half = toy_run(pair, tmp_path / "half", first).folder
    toy_run(
        pair, tmp_path / "half", changes(pair, name), resume=True, allow_changed=["train.steps"]
    )
    assert rows(half / "rollouts.jsonl") == rows(whole / "rollouts.jsonl")
    assert rows(half / "metrics.jsonl")[1] == rows(whole / "metrics.jsonl")[1]


@pytest.mark.parametrize("name", ["simct", "alm", "gold", "x-token"])
def test_where_spans_are_read_together_the_cuts_of_a_batch_change_only_rounding(
    pair: Path, tmp_path: Path, name: str
) -> None:
    curves = []
    for number, size in enumerate((1, 64)):
        more = {"train.steps": 1, "backend.chunk_tokens": size}
        folder = toy_run(pair, tmp_path / str(number), changes(pair, name, **more)).folder
        curves.append([curve(folder, metric)[0] for metric in ("loss", "grad_norm")])
        # Of two characters that the teacher reads as one, the first represents both.
        assert 0 < curve(folder, "tokens_outside")[0] < 1
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_the_students_own_vocabulary_changes_no_bit_of_the_new_losses(
    models: Path, tmp_path: Path
) -> None:
    plain = {"type": "model", "model": str(models / "teacher")}
    for name in ("alm", "gold", "x-token"):
        curves = []
        for teacher in (plain, translated(models / "teacher")):
            more = {"teacher": teacher, "objective": LOSSES[name], "train.steps": 1}
            folder = toy_run(models, tmp_path / f"{name} {teacher['type']}", more).folder
            curves.append([curve(folder, metric) for metric in ("loss", "grad_norm")])
        assert curves[0] == curves[1]


def test_what_only_the_teacher_sees_is_in_its_own_template(pair: Path, tmp_path: Path) -> None:
    """Check that a context inside or outside of the translation gives the same run, and no context another run."""
    plain = translated(pair / "teacher")
    context = {"type": "privileged", "reference": "{answer}"}
    inside = plain | {"teacher": context | {"teacher": plain["teacher"]}}
    curves = []
    for number, teacher in enumerate((inside, context | {"teacher": plain}, plain)):
        more = {"teacher": teacher, "objective": {"signal": "sampled"}, "train.steps": 1}
        folder = toy_run(pair, tmp_path / str(number), more).folder
        curves.append(curve(folder, "reverse_kl") + curve(folder, "grad_norm"))
    assert curves[0] == curves[1] != curves[2]


@pytest.mark.parametrize("kind", ["geometric", "sum", "arithmetic"])
def test_several_teachers_of_several_vocabularies_teach_together(
    pair: Path, tmp_path: Path, kind: str
) -> None:
    teachers = {name: translated(pair / name) for name in ("teacher", "bytes")}
    pool = {"type": "pool", "kind": kind, "teachers": teachers}
    objective = {"signal": "full" if kind == "arithmetic" else "sampled"}
    more = {"teacher": pool, "objective": objective, "train.steps": 1}
    folder = toy_run(pair, tmp_path, more).folder
    assert all(math.isfinite(norm) and norm > 0 for norm in curve(folder, "grad_norm"))
    # If one of the two has no token for the text, the pool is silent.
    assert all(0 <= share < 1 for share in curve(folder, "tokens_outside"))


def test_what_spans_cannot_tell_is_refused_when_the_recipe_is_read(pair: Path) -> None:
    other = translated(pair / "teacher")
    arithmetic = {"type": "pool", "kind": "arithmetic", "teachers": {"a": other, "b": other}}
    for teacher, objective, reason in (
        (
            other,
            {"signal": "sampled", "divergence": "density_power"},
            "'density_power' is not a function of it; set",
        ),
        (
            arithmetic,
            {"signal": "sampled"},
            "cannot give signal 'sampled'; it can give: full, topk",
        ),
    ):
        with pytest.raises((RecipeError, CapabilityError), match=reason):
            toy_recipe(pair, {"teacher": teacher, "objective": objective})
    served = {"type": "openai_api", "url": "http://localhost:1/v1", "model": "m", "tokenizer": "t"}
    spoken = {"type": "pool", "kind": "arithmetic", "teachers": {"a": translated(pair)}}
    spoken["teachers"]["a"]["teacher"] = served
    with pytest.raises(RecipeError, match="or use members that give whole distributions"):
        parse_recipe(
            {"student": {"model": "s"}, "teacher": spoken, "task": {"type": "reverse"}}, "r"
        )


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_two_trainers_of_a_cluster_give_the_run_of_one_process(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one = toy_run(pair, tmp_path / "one", changes(pair, name)).folder
    if name == "dskd-v2":
        # Its maps are trained too, so their part of a checkpoint is tested.
        monkeypatch.setenv("PRACTICUM_FAULT", "rank-1.differentiated:2")
    backend = {"type": "ray", "trainers": 2, "restarts": 1}
    two = toy_run(pair, tmp_path / "two", changes(pair, name, backend=backend)).folder
    for mine, theirs in zip(rows(one / "metrics.jsonl"), rows(two / "metrics.jsonl"), strict=True):
        assert theirs == {
            key: pytest.approx(number, rel=1e-6, abs=1e-6) for key, number in mine.items()
        }
