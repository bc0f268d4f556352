"""Pairs that are broken on purpose are diagnosed, and a healthy pair passes."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    ENOUGH,
    STOP,
    FaultySampler,
    candidates_only,
    derived,
    diagnosed,
    finding,
    good_until,
    make_pairs,
    pair,
    sampled_only,
    surer,
)
from torch import Tensor
from toy import TASK

from practicum.backends.local import quantising
from practicum.backends.local.backend import LocalBackend
from practicum.models.config import ScorerConfig
from practicum.ports import Model
from practicum.recipe import Recipe, load_recipe
from practicum.runs.overrides import apply_overrides
from practicum.studies.doctor import CHECKS, Diagnosis, doctor
from practicum.studies.doctor.teachability import TEACHER_ACCURACY

pytestmark = pytest.mark.long

ALL = {check.id for check in CHECKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def healthy(folder: Path) -> Diagnosis:
    return diagnosed(pair(folder), folder, prompts=ENOUGH)


def fixed(recipe: Recipe, found: Diagnosis, check: str) -> Recipe:
    """Return the recipe after the fix of one check."""
    fix = finding(found, check).fix
    assert fix, f"{check} offers no fix"
    return apply_overrides(recipe, fix)


def test_a_healthy_pair_may_go(healthy: Diagnosis) -> None:
    assert healthy.verdict.word == "GO" and healthy.verdict.exit_code == 0, healthy.verdict
    assert healthy.changes == [] and {result.check.id for result in healthy.results} == ALL
    assert finding(healthy, "P10").status == finding(healthy, "P11").status == "pass"
    assert "OPD" in healthy.verdict.advice and "RL can follow" in healthy.verdict.advice


def test_every_number_has_its_interval_around_it(healthy: Diagnosis) -> None:
    values = [
        result.outcome.value for result in healthy.results if result.outcome.value is not None
    ]
    assert len(values) > 10 and all(value.low <= value.mean <= value.high for value in values)


def test_a_teacher_that_is_the_student_leaves_no_gap(folder: Path) -> None:
    found = diagnosed(pair(folder, teacher="student"), folder)
    assert found.verdict.word == "NO-GAP"
    assert finding(found, "P5").value.mean == 1.0 and finding(
        found, "P6"
    ).value.mean == pytest.approx(0, abs=1e-6)  # type: ignore[union-attr]


def test_a_verifier_without_a_reward_for_any_answer_is_suspected(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dead_rewards.py").write_text(
        "def verify(reply: str, prompt: object) -> float:\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [
        {"prompt": word, "answer": word[::-1]}
        for word in map("".join, itertools.permutations("abcd", 3))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "type": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "heldout": 0,
        "verifier": "dead_rewards:verify",
        "sandbox": "off",
    }
    found = diagnosed(pair(folder, {"task": task}), folder, prompts=16)
    assert found.verdict.word == "NO-REWARD" and found.verdict.exit_code == 25
    (line,) = found.verdict.because
    assert "check the verifier, which gives no reward to '" in line and "is expected" in line
    assert "by hand" in found.verdict.advice


def test_a_self_teacher_leaves_no_gap(folder: Path) -> None:
    assert diagnosed(pair(folder, {"teacher": {"type": "self"}}), folder).verdict.word == "NO-GAP"


def test_a_permuted_vocabulary_is_a_broken_setup(folder: Path) -> None:
    recipe = pair(folder, teacher="permuted")
    found = doctor(recipe)
    assert found.verdict.word == "BROKEN-SETUP" and "permuted" in finding(found, "P1").sentence
    assert all(result.outcome.status == "not applicable" for result in found.results[1:])
    assert {result.check.id for result in found.results} == ALL
    assert apply_overrides(recipe, finding(found, "P1").fix).teacher.type == "translated"


def test_another_stop_token_is_a_broken_setup_and_no_more_as_one_event(folder: Path) -> None:
    recipe = pair(folder, teacher="other stop")
    found = diagnosed(recipe, folder)
    assert found.verdict.word == "BROKEN-SETUP" and found.verdict.because[0].startswith("P2")
    assert "<s>" in finding(found, "P2").sentence and finding(found, "P2").fix == (
        'student.stop=["<s>"]',
    )
    again = diagnosed(fixed(recipe, found, "P2"), folder, prompts=ENOUGH)
    assert again.verdict.word == "GO" and finding(again, "P2").status == "warn"
    assert finding(again, "P11").status == "pass", (
        "the end of an answer is one event for every number"
    )


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (
            {
                "teacher.template": "{% for m in messages %}{{ m['content'] }}{% endfor %}<assistant>"
            },
            "teacher.template=null",
        ),
        (
            {
                "student.template": "{% for m in messages %}{{ m['content'] }}{% endfor %}<assistant>"
            },
            "student.template=null",
        ),
        ({"student.thinking": True, "teacher.thinking": False}, "teacher.thinking=true"),
        ({"teacher.system": "ab"}, "teacher.system=null"),
    ],
)
def test_another_template_is_named_with_its_fix(
    folder: Path, changes: Mapping[str, Any], fix: str
) -> None:
    recipe = pair(folder, changes)
    found = diagnosed(recipe, folder)
    assert finding(found, "P3").status in ("warn", "fail") and fix in found.changes
    again = diagnosed(fixed(recipe, found, "P3"), folder)
    assert finding(again, "P3").status == "pass"


def test_a_teacher_at_odds_about_special_tokens_alone_has_them_left_out(
    folder: Path, tmp_path: Path
) -> None:
    def seldom_stops(tensors: dict[str, Tensor]) -> None:
        rows = tensors["model.embed_tokens.weight"].clone()
        rows[STOP] *= 0.2
        tensors["model.embed_tokens.weight"] = rows

    derived(folder / "student", tmp_path / "teacher", seldom_stops)
    recipe = pair(folder, teacher=str(tmp_path / "teacher"))
    found = diagnosed(recipe, folder)
    assert finding(found, "P3").fix == ("weights=not_special",)
    (term,) = fixed(recipe, found, "P3").objective.losses
    assert term.weights.name == "not_special"


def test_a_template_inside_another_teacher_is_found(folder: Path) -> None:
    model = {"type": "model", "model": str(folder / "teacher"), "thinking": True}
    found = diagnosed(
        pair(folder, {"teacher": {"type": "privileged", "system": "ab", "teacher": model}}), folder
    )
    assert finding(found, "P3").fix == ("teacher.teacher.thinking=null",)


@pytest.mark.parametrize(
    "change",
    [lambda logprobs: logprobs.roll(1), lambda logprobs: 0.3 * logprobs],
    ids=["shifted", "another temperature"],
)
def test_a_sampler_whose_log_probabilities_are_off_is_a_broken_setup(
    folder: Path, change: Any
) -> None:
    found = diagnosed(pair(folder), folder, sampler=lambda client: FaultySampler(client, change))
    assert found.verdict.word == "BROKEN-SETUP" and found.verdict.because[0].startswith("P4")
    assert (
        finding(found, "P4").value.mean > 1.05 and "the student's" in finding(found, "P4").sentence
    )  # type: ignore[union-attr]


def test_a_teacher_whose_scores_are_shifted_is_a_broken_setup(folder: Path) -> None:
    found = diagnosed(
        pair(folder), folder, teacher=sampled_only(lambda rollout, logprobs: logprobs.roll(1))
    )
    assert found.verdict.word == "BROKEN-SETUP" and "the teacher's" in finding(found, "P4").sentence


def test_a_teacher_that_answers_nonsense_is_a_broken_setup(folder: Path) -> None:
    found = diagnosed(
        pair(folder), folder, teacher=sampled_only(lambda rollout, logprobs: logprobs * torch.nan)
    )
    assert found.verdict.word == "BROKEN-SETUP" and "NaN" in finding(found, "P4").sentence
    assert finding(found, "P6").status == "not applicable"


def test_a_random_teacher_is_no_go(folder: Path) -> None:
    found = diagnosed(pair(folder, teacher="random"), folder, prompts=ENOUGH)
    assert found.verdict.word == "NO-GO" and found.verdict.exit_code == 21
    assert finding(found, "P10").value.high < 0  # type: ignore[union-attr]
    # Also a teacher without one right answer is worse than this student.
    details = finding(found, "P10").details
    assert finding(found, "P10").status == "fail" and details[TEACHER_ACCURACY] == 0.0


def test_a_teacher_that_prefers_wrong_answers_is_no_go(folder: Path) -> None:
    against = sampled_only(lambda rollout, logprobs: logprobs - 3.0 * (rollout.reward or 0.0))
    found = diagnosed(pair(folder), folder, teacher=against, prompts=ENOUGH)
    assert [line[:3] for line in found.verdict.because] == ["P11"] and found.verdict.word == "NO-GO"


def test_a_student_that_knows_nothing_begins_with_the_teachers_answers(folder: Path) -> None:
    recipe = pair(folder, student="random")
    found = diagnosed(recipe, folder)
    assert found.verdict.word == "COLD-START-FIRST" and "SFT" in found.verdict.advice
    supervised = fixed(recipe, found, "P6")
    assert (
        supervised.rollout.source.type == "teacher"
        and supervised.objective.losses[0].signal.name == "text"
    )


def test_a_teacher_that_is_lost_late_asks_for_a_cap(folder: Path) -> None:
    recipe = pair(folder, {"rollout.max_new_tokens": 64}, student="random", teacher="surer random")
    found = diagnosed(recipe, folder, teacher=good_until(32))
    assert finding(found, "P7").status == "warn"
    cap = fixed(recipe, found, "P7").objective.losses[0].weights.arguments["length"]
    assert cap == 32, "bins double, so the next ones begin at 16 and 64"


def test_a_student_that_loops_is_found_out(folder: Path) -> None:
    recipe = pair(folder, {"rollout.max_new_tokens": 32}, student="looping")
    found = diagnosed(recipe, folder)
    assert finding(found, "P8").status == "fail" and fixed(recipe, found, "P8").rollout.top_p == 0.9
    assert (
        finding(found, "P9").status == "warn"
        and fixed(recipe, found, "P9").rollout.max_new_tokens == 64
    ), "the teacher's answers have room, so the student can learn to end"


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_half_precision_alone_raises_no_alarm(folder: Path, side: str) -> None:
    found = diagnosed(pair(folder, {f"{side}.dtype": "bfloat16"}), folder, prompts=ENOUGH)
    assert found.verdict.word == "GO", found.verdict
    same = diagnosed(pair(folder, {f"{side}.dtype": "bfloat16"}, teacher="student"), folder)
    assert same.verdict.word == "NO-GAP", "rounding is no gap"


@pytest.mark.parametrize(
    ("temperature", "status"), [(0.2, "fail"), (0.5, "warn"), (2.0, "warn"), (3.0, "fail")]
)
def test_a_strange_temperature_is_named(folder: Path, temperature: float, status: str) -> None:
    recipe = pair(folder, {"rollout.temperature": temperature})
    found = diagnosed(recipe, folder)
    assert (
        finding(found, "P19").status == status
        and fixed(recipe, found, "P19").rollout.temperature == 1.0
    )
    assert finding(found, "P4").status == "pass", (
        "the log-probabilities of the model itself are compared"
    )


def test_a_learning_rate_that_is_a_hundred_times_too_large_is_named(folder: Path) -> None:
    recipe = pair(folder, {"optimizer.learning_rate": 0.1})
    found = diagnosed(recipe, folder)
    assert (
        finding(found, "P19").status == "fail"
        and "learning rate 0.1 is 100 times the rate of the table" in finding(found, "P19").sentence
    )
    again = fixed(recipe, found, "P19")
    assert (
        again.optimizer.learning_rate == 0.001
        and finding(diagnosed(again, folder), "P19").status == "pass"
    )


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_a_learning_rate_that_moves_nothing_is_named(folder: Path, lora: Any) -> None:
    recipe = pair(folder, {"optimizer.learning_rate": 1e-7, "student.lora": lora})
    found = diagnosed(recipe, folder)
    assert finding(found, "P19").status == "fail" and found.verdict.exit_code
    again = fixed(recipe, found, "P19")
    assert finding(diagnosed(again, folder), "P19").status == "pass"


def test_steps_that_move_nothing_together_are_named_without_a_table(folder: Path) -> None:
    scratch = {"architecture": "llama", "hidden_size": 32, "layers": 1, "heads": 2}
    recipe = pair(folder, {"student.model": scratch, "optimizer.learning_rate": 1e-6})
    found = finding(diagnosed(recipe, folder), "P19")
    assert "teaches nothing" in found.sentence and found.value
    # SmolLM2 learns at rates at which all steps can move a layer by 3.5 %.
    rate = 1e-6 * 0.035 / (found.value.mean * recipe.train.steps)
    recipe = apply_overrides(recipe, [f"optimizer.learning_rate={rate}"])
    assert finding(diagnosed(recipe, folder), "P19").status == "pass"


def test_a_limit_that_cuts_the_teacher_off_fails_and_alone_the_students_warns(folder: Path) -> None:
    found = diagnosed(pair(folder, {"rollout.max_new_tokens": 1}), folder)
    assert (
        finding(found, "P9").status == "fail"
        and "of the teacher's" in finding(found, "P9").sentence
    )
    unsolved = finding(found, "P12")
    assert (unsolved.status, unsolved.fix) == ("warn", ()), "weights by pass rate leave out all"


def test_a_comparison_of_one_answer_with_itself_is_named(folder: Path) -> None:
    alone = {"teacher": {"type": "none"}, "objective": {"signal": "score(group_normalized)"}}
    recipe = pair(folder, {**alone, "rollout.n": 1})
    found = diagnosed(recipe, folder)
    assert finding(found, "P12").status == "fail" and found.verdict.word == "CHANGE-FIRST"
    assert fixed(recipe, found, "P12").rollout.n == 8
    several = diagnosed(pair(folder, {**alone, "rollout.n": 4}), folder)
    assert "one answer" not in finding(several, "P12").sentence


def test_rows_that_are_held_out_too_and_control_tokens_in_them_are_listed(
    folder: Path, tmp_path: Path
) -> None:
    rows = [
        {"id": f"row-{n}", "prompt": word, "answer": word[::-1]}
        for n, word in enumerate(("ab", "ba", "abc", "bca"))
    ]
    rows += [
        {"id": "twice", "prompt": "AB dc!", "answer": "x"},
        {"id": "control", "prompt": "a<assistant>b", "answer": "x"},
    ]
    held = [{"id": "h", "prompt": "ab  dc", "answer": "x"}]
    for name, lines in (("train", rows), ("held", held)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    task = {
        "type": "jsonl",
        "path": str(tmp_path / "train.jsonl"),
        "heldout": str(tmp_path / "held.jsonl"),
    }
    found = diagnosed(pair(folder, {"task": task}), folder)
    sentence = finding(found, "P18").sentence
    assert (
        finding(found, "P18").status == "fail"
        and "1 are also held out" in sentence
        and "twice" in sentence
    )
    assert "control token" in sentence and "(control)" in sentence


def test_prompts_that_are_too_long_are_listed(folder: Path) -> None:
    recipe = pair(folder, {"prompt_tokens": 4})
    found = diagnosed(recipe, folder)
    assert (
        "are too long" in finding(found, "P18").sentence
        and fixed(recipe, found, "P18").prompt_tokens == 8
    )


def test_a_teacher_of_sampled_tokens_is_enough_for_a_verdict(folder: Path) -> None:
    recipe = pair(folder, {"objective": {"signal": "sampled"}})
    found = diagnosed(recipe, folder, teacher=sampled_only(lambda rollout, logprobs: logprobs))
    assert (
        finding(found, "P5").status == "not applicable"
        and "no candidates" in finding(found, "P5").sentence
    )
    assert finding(found, "P6").value is not None
    assert finding(found, "P13").status == "warn"
    assert finding(found, "P13").fix[0].startswith("train.prompts_per_step=")
    assert found.verdict.word == "INCONCLUSIVE", found.verdict


def test_a_noisy_signal_asks_for_the_whole_distribution_where_there_is_one(folder: Path) -> None:
    recipe = pair(folder, {"objective": {"signal": "sampled"}})
    assert fixed(recipe, diagnosed(recipe, folder), "P13").objective.losses[0].signal.name == "full"


def test_a_teacher_of_a_few_candidates_gives_nearly_the_same_numbers(
    folder: Path, healthy: Diagnosis
) -> None:
    found = diagnosed(pair(folder), folder, teacher=candidates_only(16), prompts=ENOUGH)
    for check in ("P5", "P6", "P11"):
        mine, theirs = finding(found, check).value, finding(healthy, check).value
        assert (
            mine is not None
            and theirs is not None
            and mine.mean == pytest.approx(theirs.mean, rel=0.05)
        ), check


def test_nobody_teaching_is_said_and_leaves_rl(folder: Path) -> None:
    changes = {"teacher": {"type": "none"}, "objective": {"signal": "score"}, "rollout.n": 4}
    found = diagnosed(pair(folder, changes), folder)
    assert found.verdict.word == "GO" and found.verdict.advice.startswith("RL")
    for check in ("P2", "P5", "P6", "P7", "P10", "P11", "P13"):
        assert finding(found, check).status == "not applicable", check
    assert "no teacher" in finding(found, "P6").sentence


@pytest.mark.parametrize(
    "teacher",
    [
        {
            "type": "pool",
            "teachers": {"a": {"type": "model", "model": "teacher"}, "b": {"type": "self"}},
        },
        {"type": "privileged", "system": "ab", "teacher": {"type": "self"}},
        {"type": "privileged", "question": "{attempt}", "teacher": {"type": "self"}},
        {
            "type": "route",
            "key": "outcome",
            "teachers": {"correct": {"type": "self"}},
            "default": "correct",
        },
        {"type": "cached", "teacher": {"type": "model", "model": "teacher"}},
    ],
    ids=["pool", "privileged", "shown the attempt", "route", "cached"],
)
def test_teachers_of_every_kind_are_examined(folder: Path, teacher: dict[str, Any]) -> None:
    found = diagnosed(pair(folder, {"teacher": _located(teacher, folder)}), folder)
    assert finding(found, "P6").value is not None and finding(found, "P4").status == "pass"
    silent = teacher["type"] in ("pool", "route") or teacher.get("question")
    assert (finding(found, "P10").sentence == "the teacher writes no answers") == bool(
        silent and finding(found, "P10").status == "not applicable"
    )


def _located(teacher: Any, folder: Path) -> Any:
    if not isinstance(teacher, dict):
        return teacher
    located = {key: _located(value, folder) for key, value in teacher.items()}
    return {**located, "model": str(folder / located["model"])} if "model" in located else located


def test_prompts_without_answers_say_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": word}) + "\n" for word in ("ab", "cd", "abc", "d"))
    )
    task = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "heldout": 1}
    found = diagnosed(pair(folder, {"task": task}), folder)
    for check in ("P10", "P11", "P12"):
        assert "no verifier" in finding(found, check).sentence
    assert "was not measured" in found.verdict.advice


def test_too_few_answers_are_inconclusive_and_say_how_many_it_takes(folder: Path) -> None:
    derived(folder / "student", folder / "hardly surer", surer(1.1))
    found = diagnosed(pair(folder, teacher="hardly surer"), folder)
    gap = finding(found, "P10")
    assert (
        gap.status == "inconclusive"
        and gap.rollouts_needed is not None
        and gap.rollouts_needed > 100
    )
    assert found.verdict.word == "INCONCLUSIVE" and str(gap.rollouts_needed) in found.verdict.advice


def test_equal_answers_on_a_few_prompts_are_no_certainty(folder: Path) -> None:
    """Both are always wrong: the bootstrap has no width, and the truth may still differ."""
    found = diagnosed(pair(folder, student="random", teacher="other random"), folder)
    gap = finding(found, "P10").value
    assert (
        gap is not None
        and gap.mean == 0
        and gap.high > 0.2
        and finding(found, "P10").status == "inconclusive"
    )


def test_the_same_seed_gives_the_same_diagnosis(folder: Path, tmp_path: Path) -> None:
    recipe = pair(folder, {"task": {**TASK, "train_size": 8}})
    for name in ("one", "other"):
        doctor(recipe, prompts=4, samples=2, out=tmp_path / name / "doctor.json")
    assert (tmp_path / "one" / "doctor.json").read_bytes() == (
        tmp_path / "other" / "doctor.json"
    ).read_bytes()
    assert (tmp_path / "one" / "doctor.html").read_bytes() == (
        tmp_path / "other" / "doctor.html"
    ).read_bytes()


def test_a_fix_is_an_override_of_the_recipes_file(folder: Path, tmp_path: Path) -> None:
    """The words after `write` are valid after `practicum run RECIPE`."""
    models = {
        "student": {"model": str(folder / "random")},
        "teacher": {"type": "model", "model": str(folder / "teacher")},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(
        json.dumps(
            {**models, "task": TASK, "rollout": {"max_new_tokens": 5}, "train": {"steps": 2}}
        )
    )
    found = doctor(path, prompts=8)
    for result in found.results:
        if result.outcome.fix:
            assert load_recipe(path, result.outcome.fix) != load_recipe(path)
    load_recipe(path, found.changes)


def test_a_teacher_with_fewer_bits_is_priced_in_nats_and_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = pair(folder, {"teacher.quantization": "nvfp4"})
    loads: list[str | None] = []
    load_scorer = LocalBackend.load_scorer

    def load(backend: LocalBackend, config: ScorerConfig, name: str) -> Model:
        loads.append(config.quantization)
        return load_scorer(backend, config, name)

    monkeypatch.setattr(LocalBackend, "load_scorer", load)
    cost = finding(diagnosed(recipe, folder), "P21")
    assert loads == ["nvfp4", None], "the run's rounded teacher, and once the teacher with all bits"
    assert cost.value is not None and 0 < cost.value.mean < 0.1
    assert "teacher in nvfp4" in cost.sentence and "nats per token" in cost.sentence
    # Simulated bits take as many bytes as before.
    assert cost.details["teacher, MiB"] == cost.details["teacher with all bits, MiB"]


@pytest.mark.parametrize("path", ["teacher", "teacher.teacher"])
def test_a_teacher_that_rounding_ruins_is_named_with_a_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setitem(quantising.ROUNDERS, "nvfp4", torch.zeros_like)
    recipe = pair(folder)
    inner = {**recipe.teacher.model_dump(), "quantization": "nvfp4"}
    teacher = {
        "teacher": inner,
        "teacher.teacher": {"type": "privileged", "teacher": inner, "system": "Think."},
    }[path]
    recipe = pair(folder, {"teacher": teacher})
    found = diagnosed(recipe, folder)
    assert finding(found, "P21").status == "fail"
    assert finding(found, "P21").fix == (f"{path}.quantization=null",)
