"""Evaluation: the same numbers every time, with intervals that are honest at the ends."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import make_model, toy_recipe, toy_run

from practicum.assembly import Assembled, assemble_run
from practicum.evaluation import Evaluation, evaluate, evaluate_teacher, gain
from practicum.statistics import bootstrap, wilson


def built(models: Path, folder: Path, **changes: object) -> Assembled:
    return assemble_run(toy_recipe(models, {"evaluation.prompts": 8, **changes}), folder, None, lambda text: None)


def measured(parts: Assembled) -> Evaluation:
    assert parts.evaluation is not None
    client, renderer = parts.parts.student.sampling_client(), parts.parts.renderer
    return evaluate(client, renderer, parts.parts.task, parts.parts.teacher, parts.evaluation)


@given(st.integers(1, 200).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_an_interval_of_a_share_holds_it_and_stays_a_share(case: tuple[int, int]) -> None:
    successes, count = case
    interval = wilson(float(successes), count)
    assert 0 <= interval.low <= interval.mean + 1e-12 and interval.mean - 1e-12 <= interval.high <= 1
    assert interval.low < interval.high, "a few answers are never certain, not even when all are right"


def test_the_interval_of_a_share_is_wilsons() -> None:
    interval = wilson(8.0, 10)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.4902, 0.9433)


def test_a_bootstrap_holds_the_mean_and_repeats() -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    interval = bootstrap(values, 3)
    assert interval.low <= interval.mean <= interval.high and interval.mean == pytest.approx(0.5)
    assert bootstrap(values, 3) == interval


def test_evaluating_twice_gives_the_same(models: Path, tmp_path: Path) -> None:
    parts = built(models, tmp_path)
    assert asdict(measured(parts)) == asdict(measured(parts))


def test_a_student_that_is_its_teacher_is_at_no_distance(models: Path, tmp_path: Path) -> None:
    same = measured(built(models, tmp_path, **{"student.model": str(models / "teacher")}))
    assert same.reverse_kl == pytest.approx(0, abs=1e-6)
    assert measured(built(models, tmp_path)).reverse_kl > 0.1  # type: ignore[operator]


def test_a_gain_is_paired_by_prompt(models: Path, tmp_path: Path) -> None:
    before = measured(built(models, tmp_path))
    assert gain(before, before, 0) is not None
    assert asdict(gain(before, before, 0)) == {"mean": 0.0, "low": 0.0, "high": 0.0}  # type: ignore[arg-type]


def test_a_teacher_that_knows_answers_itself(models: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "expert", seed=2, hidden_size=64, layers=2, pretrain=120)
    parts = built(models, tmp_path, **{"teacher.model": str(tmp_path / "expert")})
    assert parts.evaluation is not None
    found = evaluate_teacher(parts.parts.teacher, parts.parts.renderer, parts.parts.task, parts.evaluation)
    mine = measured(parts)
    assert found is not None and found.accuracy is not None and mine.accuracy is not None
    assert found.accuracy.mean > mine.accuracy.mean + 0.3


def test_an_evaluation_reads_back_from_json(models: Path, tmp_path: Path) -> None:
    found = measured(built(models, tmp_path, **{"evaluation.samples": 2, "evaluation.temperature": 1.0}))
    assert Evaluation.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert found.summary()["prompts"] == 8 and found.summary()["completions"] == 16


def test_held_out_prompts_are_no_training_prompts(models: Path, tmp_path: Path) -> None:
    parts = built(models, tmp_path)
    assert parts.evaluation is not None
    assert not {prompt.id for prompt in parts.evaluation.prompts} & {prompt.id for prompt in parts.parts.prompts}


def test_a_run_without_held_out_prompts_has_a_summary_and_a_report(models: Path, tmp_path: Path) -> None:
    result = toy_run(models, tmp_path, {"evaluation.prompts": 0, "train.steps": 1})
    assert result.summary["before"] is result.summary["after"] is result.summary["gain"] is None
    assert (result.folder / "report.html").is_file()


def test_domains_are_measured_apart_and_make_up_the_whole(models: Path, tmp_path: Path) -> None:
    task = {"type": "skills", "skills": ["reverse", "copy"], "alphabet": "abcd", "train_size": 4, "longest": 3}
    found = measured(built(models, tmp_path, task=task, **{"student.model": str(models / "teacher")}))
    assert found.accuracy is not None and list(found.by_domain) == ["reverse", "copy"]
    assert sum(interval.mean for interval in found.by_domain.values()) / 2 == pytest.approx(found.accuracy.mean)
    assert Evaluation.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert measured(built(models, tmp_path)).by_domain == {}, "prompts without a domain"
