"""The most used pair: a student with Qwen2.5's tokens under a teacher with Qwen3's, and the reverse."""

import json
from pathlib import Path
from typing import Any

import pytest
from qwen_pair import MORE, build_tokenizer, pair_recipe, write_pair
from toy import in_check, rows

from practicum.recipe import parse_recipe
from practicum.runs import run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def train(pair: Path, out: Path, **sections: Any) -> list[dict[str, Any]]:
    run(parse_recipe(pair_recipe(pair, **sections), "pair"), out=out)
    metrics = rows(out / "pair" / "metrics.jsonl")
    assert len(metrics) == sections.get("train", {}).get("steps", 3)
    assert all(row["grad_norm"] > 0 and not row.get("nonfinite") for row in metrics)
    return metrics


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"objective": {"signal": "topk(8)", "divergence": "jsd(0.5)"}},
        {"objective": {"signal": "topk(8, teacher)", "divergence": "forward_kl"}},
        {"objective": {"signal": "sampled"}},
        {"objective": {"signal": "mc(4)"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("lora", in_check([None, {"rank": 2}], None), ids=["full", "lora"])
def test_the_pair_trains(pair: Path, tmp_path: Path, sections: dict[str, Any], lora: Any) -> None:
    student = {"model": str(pair / "student"), **({"lora": lora} if lora else {})}
    metrics = train(pair, tmp_path / "run", student=student, **sections)
    size = len(build_tokenizer("student"))
    for row in rows(tmp_path / "run" / "pair" / "rollouts.jsonl"):
        assert max(row["tokens"]) < size
    for row in metrics:
        # The student has no token that the teacher lacks.
        assert row["tokens_outside"] == 0.0
        if sections.get("objective", {}).get("signal") != "sampled":
            assert row["student_mass_outside"] == 0.0
            assert 0 < row["teacher_mass_outside"] < 1


def test_the_student_learns(pair: Path, tmp_path: Path) -> None:
    steps = {"steps": 30, "prompts_per_step": 8, "threads": 1}
    optimizer = {"learning_rate": 0.03}
    metrics = train(pair, tmp_path / "run", train=steps, optimizer=optimizer)
    assert metrics[-1]["reverse_kl"] < 0.6 * metrics[0]["reverse_kl"]


def test_a_larger_student_learns_from_a_smaller_teacher(pair: Path, tmp_path: Path) -> None:
    metrics = train(
        pair,
        tmp_path / "run",
        student={"model": str(pair / "teacher")},
        teacher={"type": "model", "model": str(pair / "student")},
        rollout={"n": 2, "max_new_tokens": 24},
    )
    assert all(row["teacher_mass_outside"] == 0.0 for row in metrics)
    assert all(row["student_mass_outside"] > 0 for row in metrics)
    outside = [
        sum(token >= len(build_tokenizer("student")) for token in row["tokens"])
        for row in rows(tmp_path / "run" / "pair" / "rollouts.jsonl")
    ]
    assert sum(outside) > 0
    assert sum(row["tokens_outside"] for row in metrics) > 0


@pytest.mark.parametrize(
    "source", in_check(["teacher", "token_mix(0.5)", "prefix(3)", "mix(0.5, teacher)"], "teacher")
)
def test_the_teacher_writes_the_students_tokens_alone(
    pair: Path, tmp_path: Path, source: str
) -> None:
    train(pair, tmp_path / "run", rollout={"n": 1, "max_new_tokens": 16, "source": source})
    size = len(build_tokenizer("student"))
    for row in rows(tmp_path / "run" / "pair" / "rollouts.jsonl"):
        assert max(row["tokens"]) < size
        assert not any(token in row["text"] for token in MORE)


@pytest.mark.parametrize(
    "kind",
    in_check(["cached", "privileged", "pool", "sum", "route", "reference"], "cached", "pool"),
)
def test_teachers_around_the_teacher_keep_its_vocabulary(
    pair: Path, tmp_path: Path, kind: str
) -> None:
    larger = {"type": "model", "model": str(pair / "teacher"), "thinking": False}
    same = {"type": "model", "model": str(pair / "student")}
    wrapped: dict[str, dict[str, Any]] = {
        "cached": {"type": "cached", "teacher": larger},
        "privileged": {"type": "privileged", "teacher": larger, "system": "Think."},
        # The geometric mean with a model that lacks all of these tokens would have no mass on them.
        "pool": {
            "type": "pool",
            "kind": "arithmetic",
            "teachers": {"large": larger, "same": same},
        },
        "sum": {"type": "pool", "kind": "sum", "teachers": {"large": larger, "same": same}},
        "route": {"type": "route", "teachers": {"large": larger}, "default": "large"},
        "reference": same,
    }
    sections: dict[str, Any] = {"teacher": wrapped[kind]}
    if kind == "reference":
        sections |= {
            "reference": larger,
            "objective": {"losses": [{}, {"against": "reference", "coefficient": 0.5}]},
        }
    metrics = train(pair, tmp_path / "run", **sections)
    if kind != "reference":
        assert all(row["teacher_mass_outside"] > 0 for row in metrics)


def test_the_teacher_is_evaluated_and_the_run_says_at_the_start_how_the_tokens_differ(
    pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="practicum")
    evaluation = {"prompts": 4, "samples": 1, "teacher": True}
    heldout = {
        "type": "jsonl",
        "path": str(pair / "data.jsonl"),
        "heldout": 4,
        "verifier": "number",
    }
    train(pair, tmp_path / "run", evaluation=evaluation, task=heldout)
    assert (
        sum("the teacher has 4 tokens that the student lacks" in line for line in caplog.messages)
        == 1
    )
    after = json.loads((tmp_path / "run" / "pair" / "after.json").read_text())
    assert after
