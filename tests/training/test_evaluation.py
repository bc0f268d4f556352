"""Evaluation: the same numbers every time, with intervals that are valid at both ends."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import make_model, toy_recipe, toy_run

from practicum.losses import compare_signals
from practicum.losses.passes import build_score_requests
from practicum.objective import Full, Signal
from practicum.ports import Capabilities, Teacher
from practicum.report.tables import build_comparison
from practicum.rollouts import sample_rollouts
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.statistics import bootstrap, wilson
from practicum.statistics.heldout import (
    Evaluation,
    GradedCompletion,
    compare_accuracy,
    compare_overconfidence,
    compute_confidences,
)
from practicum.training.evaluation import (
    answer_heldout,
    evaluate,
    evaluate_teacher,
    examine_answers,
    show_notes_of,
)
from practicum.types import HeadLike, Rollout, TeacherSignal


def built(models: Path, folder: Path, **changes: object) -> RunComponents:
    return assemble_run(toy_recipe(models, {"evaluation.prompts": 8, **changes}), folder)


def measured(parts: RunComponents) -> Evaluation:
    assert parts.evaluation is not None
    client, renderer = parts.parts.sampler, parts.parts.renderer
    return evaluate(client, renderer, parts.parts.task, parts.parts.teacher, parts.evaluation)


class CountingHead:
    """A head that records the number of tokens of each product."""

    def __init__(self, head: HeadLike, rows: list[int]) -> None:
        self.head, self.rows = head, rows
        self.vocab_size, self.key, self.logits = head.vocab_size, head.key, head.logits
        self.release = head.release

    def logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return self.head.logprobs(hidden)


@dataclass
class CountedTeacher:
    """A teacher that gives no signal for every fourth rollout, and no signal for one token of each remaining rollout."""

    inner: Teacher
    rows: list[int] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        signals = self.inner.score(rollouts, signal)
        counted = CountingHead(signals[0].heads[0], self.rows)
        unknown = [torch.arange(len(rollout.tokens)) == 1 for rollout in rollouts]
        return [
            replace(answer, head=counted, unknown=marks) if number % 4 else TeacherSignal()
            for number, (answer, marks) in enumerate(zip(signals, unknown, strict=True))
        ]


def test_answers_are_compared_together_as_they_are_one_by_one(models: Path, tmp_path: Path) -> None:
    run = built(models, tmp_path)
    assert run.evaluation is not None
    client, renderer, settings = run.parts.sampler, run.parts.renderer, run.evaluation
    teacher = CountedTeacher(run.parts.teacher)
    together = evaluate(client, renderer, run.parts.task, teacher, settings)  # type: ignore[arg-type]
    rows, teacher.rows[:] = list(teacher.rows), []
    rollouts = sample_rollouts(settings.batch, client, renderer, settings.sampling, None)
    student = client.score(build_score_requests(rollouts), Full())
    divergences, entropies = [], []
    for rollout, *pair in zip(rollouts, student, teacher.score(rollouts, Full()), strict=True):
        measures = ("reverse_kl", "student_entropy")
        compared = compare_signals((pair[0], pair[1]), rollout.tokens, 256, measures)
        entropies.append(compared.student_entropy)
        if compared.reverse_kl is not None:
            divergences.append(compared.reverse_kl[~pair[1].unknown])
    assert together.reverse_kl == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-5)
    assert together.student_entropy == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    known = [len(rollout.tokens) for number, rollout in enumerate(rollouts) if number % 4]
    assert rows[0] == sum(known), "the head reads the tokens of all answers in one product"


@given(st.integers(1, 200).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_an_interval_of_a_share_holds_it_and_stays_a_share(case: tuple[int, int]) -> None:
    successes, count = case
    interval = wilson(float(successes), count)
    assert (
        0 <= interval.low <= interval.mean + 1e-12 and interval.mean - 1e-12 <= interval.high <= 1
    )
    assert interval.low < interval.high, (
        "a few answers are never certain, not even when all are right"
    )


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
    assert compare_accuracy(before, before, 0) is not None
    unchanged = compare_accuracy(before, before, 0)
    assert unchanged is not None and unchanged.mean == 0.0
    assert unchanged.low < 0.0 < unchanged.high, "a few equal pairs do not rule out a change"


@pytest.mark.long
def test_a_teacher_that_knows_answers_itself(models: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "expert", seed=2, hidden_size=64, layers=2, pretrain=120)
    parts = built(models, tmp_path, **{"teacher.model": str(tmp_path / "expert")})
    assert parts.evaluation is not None
    found = evaluate_teacher(
        parts.parts.teacher, parts.parts.renderer, parts.parts.task, parts.evaluation
    )
    mine = measured(parts)
    assert found is not None and found.accuracy is not None and mine.accuracy is not None
    assert found.accuracy.mean > mine.accuracy.mean + 0.3


def test_an_evaluation_reads_back_from_json(models: Path, tmp_path: Path) -> None:
    found = measured(
        built(models, tmp_path, **{"evaluation.samples": 2, "evaluation.temperature": 1.0})
    )
    assert Evaluation.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert found.summarize()["prompts"] == 8 and found.summarize()["completions"] == 16


def said(
    prompt: str, text: str, right: bool | None, chance: float = 1.0, tokens: int = 2
) -> GradedCompletion:
    """Return an answer with a whole text of probability `chance`."""
    return GradedCompletion(
        prompt,
        prompt,
        None,
        text,
        None if right is None else float(right),
        tokens,
        math.log(chance) / tokens,
    )


def test_one_answer_is_as_sure_as_its_text_was_likely() -> None:
    answers = [
        said("p", "x", True, 0.25),
        said("q", "y", False, 0.5, tokens=10),
        said("r", "z", None),
    ]
    assert compute_confidences(answers) == {
        "p": (pytest.approx(0.25), 1.0),
        "q": (pytest.approx(0.5), 0.0),
    }
    assert compute_confidences([GradedCompletion("p", "p", None, "", 1.0)]) == {}, (
        "nothing is known of an empty answer"
    )


def test_several_answers_are_as_sure_as_they_agree() -> None:
    answers = [
        said("p", "x", True),
        said("p", " x", True),
        said("p", "y", False),
        said("q", "u", False),
        said("q", "v", True),
    ]
    assert compute_confidences(answers) == {"p": (2 / 3, 1.0), "q": (0.5, 0.0)}


def test_calibration_is_confidence_less_what_was_right(models: Path, tmp_path: Path) -> None:
    found = measured(
        built(models, tmp_path, **{"evaluation.samples": 4, "evaluation.temperature": 1.0})
    )
    pairs = list(compute_confidences(found.answers).values())
    assert found.calibration is not None
    assert found.calibration.confidence == pytest.approx(sum(sure for sure, _ in pairs) / 8)
    over = found.calibration.overconfidence
    assert (
        over.mean == pytest.approx(sum(sure - right for sure, right in pairs) / 8)
        and over.low < over.mean < over.high
    )
    assert abs(over.mean) <= found.calibration.error + 1e-12, "bins can only add to it"
    assert found.summarize()["calibration"]["overconfidence"]["mean"] == over.mean


def test_growing_surer_is_paired_by_prompt(models: Path, tmp_path: Path) -> None:
    before = measured(built(models, tmp_path))
    answers = [said(one.prompt, one.text, False, 1.0) for one in before.answers]
    after = replace(before, answers=answers)
    grown = compare_overconfidence(before, after, 0)
    assert grown is not None and before.calibration is not None
    assert (
        grown.mean == pytest.approx(1.0 - before.calibration.overconfidence.mean) and grown.low > 0
    )
    assert (
        compare_overconfidence(
            before, replace(before, answers=[replace(a, reward=None) for a in answers]), 0
        )
        is None
    )


def test_held_out_prompts_are_no_training_prompts(models: Path, tmp_path: Path) -> None:
    parts = built(models, tmp_path)
    assert parts.evaluation is not None
    assert not {prompt.id for prompt in parts.evaluation.prompts} & {
        prompt.id for prompt in parts.parts.prompts
    }


def test_a_run_without_held_out_prompts_has_a_summary_and_a_report(
    models: Path, tmp_path: Path
) -> None:
    result = toy_run(models, tmp_path, {"evaluation.prompts": 0, "train.steps": 1})
    assert result.summary["before"] is result.summary["after"] is result.summary["gain"] is None
    assert (result.folder / "report.html").is_file()


def test_domains_are_measured_apart_and_make_up_the_whole(models: Path, tmp_path: Path) -> None:
    task = {
        "type": "skills",
        "skills": ["reverse", "copy"],
        "alphabet": "abcd",
        "train_size": 4,
        "longest": 3,
    }
    found = measured(
        built(models, tmp_path, task=task, **{"student.model": str(models / "teacher")})
    )
    assert found.accuracy is not None and list(found.by_domain) == ["reverse", "copy"]
    assert sum(interval.mean for interval in found.by_domain.values()) / 2 == pytest.approx(
        found.accuracy.mean
    )
    assert Evaluation.from_json(json.loads(json.dumps(asdict(found)))) == found
    printed = {row[0]: row[1:] for row in build_comparison(found, found, None)}
    assert printed["accuracy, copy"] == [str(found.by_domain["copy"])] * 2 + [""]
    many = replace(found, by_domain={str(number): found.by_domain["copy"] for number in range(9)})
    assert not any("accuracy, " in row[0] for row in build_comparison(many, many, None))
    assert measured(built(models, tmp_path)).by_domain == {}, "prompts without a domain"


def test_held_out_answers_get_notes_so_a_teacher_that_shows_one_is_compared(models, tmp_path):
    """Check that a note about a held-out answer is shown like a fixed text, to the last digit."""
    shows = {"type": "privileged", "teacher": {"type": "model", "model": str(models / "teacher")}}
    noted, fixed, bare = (
        built(models, tmp_path / name, **changes)
        for name, changes in {
            "noted": {
                "teacher": {**shows, "reference": "{hint}"},
                "notes": {"hint": {"type": "filled", "correct": "ab", "incorrect": "ab"}},
            },
            "fixed": {"teacher": {**shows, "reference": "ab"}},
            "bare": {
                "teacher": {**shows, "reference": "{hint}"},
                "notes": {"hint": {"type": "filled", "correct": "ab"}},
            },
        }.items()
    )
    results = []
    for it in (noted, fixed, bare):
        parts, settings = it.parts, it.evaluation
        assert settings is not None
        answers = answer_heldout(parts.sampler, parts.renderer, parts.task, settings, parts.notes)
        found = examine_answers(
            answers, parts.sampler, parts.renderer, parts.task, parts.teacher, settings, parts.notes
        )
        told = show_notes_of(settings, answers, parts.notes) or settings
        results.append((found, evaluate_teacher(parts.teacher, parts.renderer, parts.task, told)))
    (with_notes, teacher), (with_text, same_teacher), (lacking, silent) = results
    assert with_notes.reverse_kl == with_text.reverse_kl is not None
    assert teacher is not None and teacher == same_teacher
    # Wrong answers have no such note: they are not compared, and the teacher has no context for some answers.
    assert silent is None and lacking.reverse_kl != with_notes.reverse_kl


def test_a_run_evaluates_the_teacher_that_shows_a_note(models, tmp_path):
    changes = {
        "evaluation.prompts": 4,
        "train.steps": 1,
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "live"},
            "reference": "{share}",
        },
        "notes": {"share": {"type": "filled", "correct": "a", "incorrect": "b"}},
    }
    folder = toy_run(models, tmp_path, changes).folder
    before = json.loads((folder / "before.json").read_text())
    assert before["student"]["reverse_kl"] > 0 and before["teacher"]["accuracy"] is not None


def test_notes_that_no_teacher_shows_cost_nothing_on_held_out_answers(models, tmp_path):
    writes = {"type": "written", "template": "{attempt}", "max_new_tokens": 4}
    shows = {"type": "privileged", "teacher": {"type": "self", "weights": "live"}}
    costs = {}
    for name, notes, reference in (
        ("none", {}, "a"),
        ("hidden", {"hint": writes}, "a"),
        ("shown", {"hint": writes}, "{hint}"),
    ):
        changes = {
            "evaluation": {"prompts": 4, "teacher": False},
            "train.steps": 1,
            "teacher": {**shows, "reference": reference},
            "notes": notes,
        }
        folder = toy_run(models, tmp_path / name, changes).folder
        costs[name] = json.loads((folder / "before.json").read_text())["cost"]
    assert costs["hidden"] == costs["none"]
    sampled = {name: cost["cost/sampled_tokens"] for name, cost in costs.items()}
    assert sampled["shown"] > sampled["hidden"]
