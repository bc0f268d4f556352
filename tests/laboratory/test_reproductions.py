"""The packaged reproductions: every arm is a recipe, every test names an arm; and one of them runs."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from typer.testing import CliRunner

from laboratory import (
    list_reproductions,
    load_reproduction,
    read_results,
    render_study,
    reproduce,
)
from laboratory.__main__ import app
from laboratory.measures.runs import find_wider_rates, rank_rates
from laboratory.study import Reproduction, resolve_stage_models, shift_seeds
from practicum.errors import PracticumError, RecipeError
from practicum.objective import VERIFIER
from practicum.objective.signals.unlikely import Config as Unlikely
from practicum.recipe import build_control, parse_recipe
from practicum.runs.stages import parse_pipeline

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", list_reproductions())
def test_every_arm_is_a_recipe_in_both_forms(name):
    study = load_reproduction(name)
    for arm in study.spec.arms:
        for scale in (study.spec.quick, study.spec.full):
            data = resolve_stage_models(study.build_recipe(arm, scale), lambda model: "made")
            recipe = parse_recipe({**data, "name": arm}, f"{name}, arm {arm}")
            assert recipe.train.steps == scale.set.get("train", {}).get("steps", recipe.train.steps)
            if study.spec.measure.type == "pipelines":
                whole = parse_pipeline(
                    {**study.build_pipeline(arm, scale), "name": arm}, f"{name}, arm {arm}"
                )
                assert len(whole.stages) == len(study.recipe["stages"]) - len(
                    study.spec.arms[arm].without
                )


@pytest.mark.parametrize("name", list_reproductions())
def test_a_teacher_beside_a_reward_stands_beside_the_reward_alone(name):
    study = load_reproduction(name)
    recipes = {}
    for arm in study.spec.arms:
        data = resolve_stage_models(study.build_recipe(arm, study.spec.full), lambda model: "made")
        recipes[arm] = parse_recipe({**data, "name": arm}, f"{name}, arm {arm}")
    alone = [arm for arm, recipe in recipes.items() if learns_from_the_verifier_alone(recipe)]
    joined = [arm for arm, recipe in recipes.items() if build_control(recipe) is not None]
    assert alone or not joined, joined
    # The control without any teacher signal can also be added by one key, wherever it exists.
    taught = [recipe for recipe in recipes.values() if recipe.teacher.type != "none"]
    free = [build_control(recipe, Unlikely(threshold=0.1, advantage=-1)) for recipe in taught]
    assert free and all(recipe is not None and recipe.teacher.type == "none" for recipe in free)


def learns_from_the_verifier_alone(recipe):
    return recipe.teacher.type == "none" and all(
        term.learns_from_reward and term.scorer == VERIFIER for term in recipe.objective.losses
    )


SMALL = {
    "question": "Is more better?",
    "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2, "seed": 1}},
    "teacher": {
        "type": "model",
        "model": {"hidden_size": 16, "layers": 1, "heads": 2, "seed": 2, "pretrain": {"steps": 5}},
    },
    "task": {
        "type": "reverse",
        "seed": 0,
        "shortest": 1,
        "longest": 2,
        "alphabet": "abcd",
        "train_size": 8,
        "heldout_size": 8,
    },
    "rollout": {"max_new_tokens": 4},
    "train": {"steps": 2, "prompts_per_step": 4, "threads": 1},
    "evaluation": {"prompts": 8, "samples": 2, "temperature": 1.0},
    "learning_rates": [0.001, 0.01],
    "arms": {
        "reverse": {"about": "one", "set": {}},
        "forward": {
            "about": "two",
            "set": {"objective": {"divergence": "forward_kl"}},
            "learning_rates": [0.001],
        },
        "free": {
            "about": "no teacher",
            "control": "teacher=free(0.5, -1)",
            "learning_rates": [0.001],
        },
    },
    "full": {"seeds": 1},
    "claims": [
        {
            "claim": "one is better",
            "paper": "2306.13649",
            "theirs": "1",
            "tests": [
                {"better": "reverse", "than": "forward"},
                {"reaches": "forward", "measure": "pass@2", "least": 0.1},
            ],
        }
    ],
}


def test_a_reproduction_runs_resumes_and_is_written_down(tmp_path):
    """Check that a robustness claim draws the sweep as a map, and that a warning claim reads the doctor's report."""
    file = tmp_path / "small.yaml"
    asked = [*SMALL["claims"][0]["tests"], {"robust": "reverse"}, {"warned": "forward"}]
    claims = [{**SMALL["claims"][0], "tests": asked}]
    file.write_text(yaml.safe_dump({**SMALL, "claims": claims}))
    found = reproduce(file, full=True, out=tmp_path / "out")
    results = read_results(found.folder / "results.json")
    assert results == found.results
    assert sorted(results.readings["reverse"]["accuracy"]) == [0]
    assert {row["arm"] for row in results.tried} == {"reverse"}
    rates = [row["learning_rate"] for row in results.tried]
    assert rates == sorted(rates) and {0.001, 0.01} <= set(rates)
    assert [row["chosen"] for row in results.tried].count(True) == 1
    assert all(isinstance(row["alarms"], list) for row in results.tried)
    assert set(results.chosen) == {"reverse"}, "an arm with one learning rate is not swept"
    assert {"pass@1", "pass@2", "distinct", "length", "spent/flops"} <= results.readings[
        "forward"
    ].keys()
    free = next((found.folder / "runs").glob("free/*/recipe.json"))
    assert "unlikely" in free.read_text() and results.readings["free"]["accuracy"]
    drawn = (found.folder / "plot.svg").read_text()
    assert "<svg" in drawn and drawn.count("<rect") == len(rates) and "reverse at 0.01: " in drawn
    page = render_study(found.study, results)
    assert (
        f"| arm | {' | '.join(f'{rate:g}' for rate in rates)} |" in page
        and "the doctor, before forward: " in page
    )
    assert results.doctor["forward"]["verdict"] == "INCONCLUSIVE", "four prompts say little"
    with pytest.raises(
        RecipeError, match="already holds this reproduction; resume it with --resume"
    ):
        reproduce(file, full=True, out=tmp_path / "out")
    again = reproduce(file, full=True, out=tmp_path / "out", resume=True)
    assert again.results.readings == results.readings


def test_more_seeds_are_added_to_recorded_ones(tmp_path):
    file, arms = tmp_path / "small.yaml", {**SMALL["arms"]}
    free = arms.pop("free")

    def run_seeds(count, out, **options):
        file.write_text(yaml.safe_dump({**SMALL, "arms": arms, "full": {"seeds": count}}))
        return reproduce(file, full=True, out=tmp_path / out, **options)

    first = run_seeds(1, "both").folder / "results.json"
    recorded = shutil.copy(first, tmp_path / "recorded.json")
    both = run_seeds(2, "both", resume=True).results
    added = run_seeds(2, "added", onto=recorded)
    assert not list(added.folder.glob("runs/*/seed-0")) and not (added.folder / "sweep").exists()
    timed = {"spent/seconds"}
    for arm, measures in both.readings.items():
        assert {name: values for name, values in measures.items() if name not in timed} == {
            name: values
            for name, values in added.results.readings[arm].items()
            if name not in timed
        }
    assert added.results.seeds == both.seeds == [0, 1]
    assert (added.results.tried, added.results.chosen) == (both.tried, both.chosen)
    assert added.results.alarms == both.alarms and added.results.versions == both.versions
    with pytest.raises(RecipeError, match=r"has the seeds \[0\], and the reproduction needs 1"):
        run_seeds(1, "again", onto=recorded)
    arms["forward"] = {**arms["forward"], "set": {"objective": {"divergence": "jsd(0.5)"}}}
    with pytest.raises(RecipeError, match="the arms of small have changed since"):
        run_seeds(2, "changed", onto=recorded)
    arms["free"] = free
    with pytest.raises(RecipeError, match="not the full form of small with the same arms"):
        run_seeds(2, "other", onto=recorded)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_study_is_run_again_with_other_seeds(tmp_path, drawn):
    file = tmp_path / "small.yaml"
    arms = {name: SMALL["arms"][name] for name in ("reverse", "forward")}

    def run_from(first_seed, out, count=1, **options):
        scale = {"full": {"seeds": count}, "draw_by_seed": drawn}
        file.write_text(yaml.safe_dump({**SMALL, "arms": arms, **scale}))
        return reproduce(file, full=True, out=tmp_path / out, first_seed=first_seed, **options)

    first, again = run_from(0, "out"), run_from(100, "out")
    assert again.folder.name == "small-full-from-100" and again.results.seeds == [100]
    assert not set(again.folder.glob("**/seed-0")) and set(again.folder.glob("**/seed-100"))
    assert set(again.folder.glob("**/seed-1100")), "the sweep has another seed, too"
    curves = [found.results.curves["reverse"] for found in (first, again)]
    assert [list(by_seed) for by_seed in curves] == [[0], [100]]
    assert run_from(100, "out", resume=True).results.readings == again.results.readings
    recorded = again.folder / "results.json"
    assert run_from(100, "more", count=2, onto=recorded).results.seeds == [100, 101]
    with pytest.raises(RecipeError, match=r"has the seeds \[100\].*counted from 0"):
        run_from(0, "others", count=2, onto=recorded)


def test_each_seed_can_have_models_and_a_task_of_its_own(tmp_path):
    file = tmp_path / "drawn.yaml"
    arms = {name: SMALL["arms"][name] for name in ("reverse", "forward")}

    def run_seeds(count, out, **options):
        study = {**SMALL, "arms": arms, "full": {"seeds": count}, "draw_by_seed": True}
        file.write_text(yaml.safe_dump(study))
        return reproduce(file, full=True, out=tmp_path / out, **options)

    first = run_seeds(1, "first").folder / "results.json"
    both = run_seeds(2, "both", onto=first)
    assert both.results.seeds == [0, 1] and both.results.tried
    recipes = [
        json.loads((folder / "recipes" / "forward.json").read_text())
        for folder in (first.parent / "draw-0", both.folder / "draw-1")
    ]
    assert [recipe["task"]["seed"] for recipe in recipes] == [0, 1000]
    weights = {
        Path(recipe[side]["model"], "model.safetensors").read_bytes()
        for recipe in recipes
        for side in ("student", "teacher")
    }
    assert len(weights) == 4
    # The sweep has a draw that never counts, and the second seed has no sweep.
    swept = {path.parent.name for path in tmp_path.glob("*/*/draw-*/sweep-1000")}
    assert swept == {"draw-1000"}


@pytest.mark.parametrize("drawn", [False, True])
def test_a_map_has_several_seeds_at_each_rate(tmp_path, drawn):
    claims = [{**SMALL["claims"][0], "tests": [{"robust": "reverse"}]}]
    arms = {name: SMALL["arms"][name] for name in ("reverse", "forward")}
    study = {**SMALL, "arms": arms, "claims": claims}
    study |= {"full": {"seeds": 2}, "draw_by_seed": drawn}
    file = tmp_path / "map.yaml"
    file.write_text(yaml.safe_dump(study))
    tried = reproduce(file, full=True, out=tmp_path / "out").results.tried
    assert len(tried) > 1 and all(row["by_seed"].keys() == {"1000", "1001"} for row in tried)
    assert all(row["accuracy"] == pytest.approx(fmean(row["by_seed"].values())) for row in tried)


def test_the_seeds_of_a_recipe_are_shifted_where_models_and_tasks_are():
    recipe = {
        "seed": 3,
        "task": {"type": "reverse", "seed": 1},
        "teacher": {"type": "pool", "teachers": {"a": {"model": {"seed": 2, "layers": 1}}}},
        "student": {"model": "folder"},
        "reference": {"model": {"stage": "cold_start"}},
    }
    shifted = shift_seeds(recipe, 2)
    assert shifted["seed"] == 3 and shifted["task"]["seed"] == 2001
    assert shifted["teacher"]["teachers"]["a"]["model"] == {"seed": 2002, "layers": 1}
    assert shifted["student"] == recipe["student"] and shifted["reference"] == recipe["reference"]
    assert shift_seeds(recipe, 0) == recipe


def test_runs_that_failed_are_told_of_by_an_exit_code(tmp_path):
    file = tmp_path / "broken.yaml"
    nowhere = {"about": "two", "set": {"teacher": {"model": str(tmp_path / "nothing")}}}
    claims = [{**SMALL["claims"][0], "tests": [{"better": "reverse", "than": "broken"}]}]
    arms = {"reverse": SMALL["arms"]["reverse"], "broken": nowhere}
    file.write_text(yaml.safe_dump({**SMALL, "arms": arms, "claims": claims}))
    done = CliRunner().invoke(app, [str(file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert (
        "failed runs: 1; the verdicts do not include them; retry them with --resume" in done.output
    )
    failed = read_results(tmp_path / "out" / "broken-quick" / "results.json").failed
    assert len(failed) == 1 and failed[0].startswith("broken, seed 0: failed: ")


def test_a_gradient_is_measured_without_training(tmp_path):
    file = tmp_path / "gradient.yaml"
    sampled = {
        "about": "two",
        "set": {"objective": {"signal": "sampled", "estimator": "score_function"}},
    }
    data = {
        **SMALL,
        "measure": {"type": "gradient", "quick_batches": 3},
        "arms": {"full": {"about": "one", "set": {}}, "sampled": sampled},
        "claims": [
            {
                "claim": "less noise",
                "paper": "2306.08543",
                "theirs": "1",
                "tests": [
                    {"ratio": "full", "over": "sampled", "measure": "signal_to_noise", "least": 3}
                ],
            }
        ],
    }
    file.write_text(yaml.safe_dump(data))
    found = reproduce(file, out=tmp_path / "out").results
    assert found.readings["full"]["cosine"][0] == pytest.approx(1.0)
    assert found.readings["sampled"]["cosine"][0] < 0.999
    assert reproduce(file, out=tmp_path / "out", resume=True).results.readings == found.readings


def test_a_sweep_chooses_by_what_is_aimed_at():
    swept = {"one": (0.001, 0.01, 0.1)}
    scores = {
        "one-lr0.001": {0: {"accuracy": 0.25, "reverse_kl": 0.3}, 1: {"accuracy": 0.75}},
        "one-lr0.01": {0: {"accuracy": 0.4, "reverse_kl": 0.1}},
    }

    def chosen(**aim):
        rows = rank_rates(
            scores, {}, swept, Reproduction(question="?", arms={}, claims=SMALL["claims"], **aim)
        )
        return next(row for row in rows if row["chosen"])

    assert chosen() == {
        "arm": "one",
        "learning_rate": 0.001,
        "accuracy": 0.5,
        "by_seed": {"0": 0.25, "1": 0.75},
        "chosen": True,
        "alarms": [],
    }
    assert chosen(aim="reverse_kl")["learning_rate"] == 0.001
    failed = scores | {"one-lr0.01": {0: {"accuracy": 0.9}}}
    spec = Reproduction(question="?", arms={}, claims=SMALL["claims"])
    row = next(row for row in rank_rates(failed, {}, swept, spec) if row["chosen"])
    assert row["learning_rate"] == 0.001, "at 0.01 one of two seeds failed"
    low = {
        "arm": "one",
        "learning_rate": 0.01,
        "accuracy": 0.4,
        "reverse_kl": 0.1,
        "by_seed": {"0": 0.4},
        "chosen": True,
        "alarms": [],
    }
    assert chosen(aim="reverse_kl", aim_at="lowest") == low
    with pytest.raises(
        PracticumError, match="no learning rate of arm 'one' finished a run with 'acceptance'"
    ):
        chosen(aim="acceptance")


@pytest.mark.parametrize(
    ("scores", "wider"),
    [
        ([0.1, 0.5, 0.3], None),
        ([0.1, 0.3, 0.5], [0.09, 0.27]),
        ([0.5, 0.3, 0.1], [0.0004, 8e-05]),
        ([0.5, 0.5, 0.5], None),
        ([None, 0.5, 0.5], None),
        ([None, None, 0.2], [0.09, 0.27]),
    ],
)
def test_a_sweep_goes_on_beyond_an_edge_that_is_best(scores, wider):
    rates = (0.002, 0.01, 0.03)
    spec = Reproduction(question="?", arms={}, claims=SMALL["claims"])
    by_rate = {
        f"one-lr{rate:g}": {} if score is None else {0: {"accuracy": score}}
        for rate, score in zip(rates, scores, strict=True)
    }
    rows = rank_rates(by_rate, {}, {"one": rates}, spec)
    assert find_wider_rates(rows, spec) == ({} if wider is None else {"one": wider})


STAGES = [
    {
        "name": "first",
        "rollout": {"source": "teacher"},
        "objective": {"signal": "text", "divergence": "ce"},
    },
    {
        "name": "second",
        "monitors": {"M31": {"action": "finish", "change": 1.0, "level": -1.0, "persistence": 1}},
    },
]


def test_whole_pipelines_are_compared_with_stages_left_out(tmp_path):
    file = tmp_path / "small.yaml"
    test = {"better": "whole", "than": "without_first"}
    data = {
        **{key: value for key, value in SMALL.items() if key != "learning_rates"},
        "measure": {"type": "pipelines"},
        "evaluation": {"prompts": 8, "every": 1},
        "train": {"steps": 3, "prompts_per_step": 4, "threads": 1},
        "stages": STAGES,
        "arms": {
            "whole": {"about": "both"},
            "without_first": {
                "about": "one, two steps longer",
                "without": ["first"],
                "stages": {
                    "second": {"monitors": {"M31": {"action": "off"}}, "train": {"steps": 2}}
                },
            },
        },
        "claims": [{**SMALL["claims"][0], "tests": [test, {**test, "at": "equal_flops"}]}],
    }
    file.write_text(yaml.safe_dump(data))
    found = reproduce(file, out=tmp_path / "out")
    results = read_results(found.folder / "results.json")
    whole, one = (
        {name: by_seed[0] for name, by_seed in results.readings[arm].items()}
        for arm in found.study.spec.arms
    )
    assert (whole["steps/first"], whole["steps/second"], one["steps/second"]) == (3, 1, 2), (
        "the monitor ends the second"
    )
    assert "steps/first" not in one and {"after/second", "reverse_kl", "length"} <= one.keys()
    assert (
        whole["spent/steps"] == 4
        and whole["spent/flops"] == whole["flops/first"] + whole["flops/second"]
    )
    curve = results.curves["whole"][0]
    assert [moment.spent.get("steps", 0) for moment in curve] == [0, 1, 2, 3, 4]
    assert (curve[3].accuracy, curve[-1].accuracy) == (whole["after/first"], whole["accuracy"])
    assert curve[-1].spent["flops"] == whole["spent/flops"] and results.alarms["whole"][0] == [
        "M31"
    ]
    assert (
        0 in results.readings["teacher"]["accuracy"]
        and "<svg" in (found.folder / "plot.svg").read_text()
    )
    assert len(list((found.folder / "models").glob("scratch-*"))) == 2, (
        "all arms share their models"
    )
    seconds = {
        path: path.stat().st_mtime_ns for path in found.folder.glob("runs/*/seed-0/report.html")
    }
    again = reproduce(file, out=tmp_path / "out", resume=True)
    assert again.results.readings == results.readings and len(seconds) == 2
    assert {path: path.stat().st_mtime_ns for path in seconds} == seconds, (
        "what is finished is not run again"
    )
    # Stages in common are computed once, with the bytes that they would have in their own pipeline.
    data["arms"] = {
        "without_second": {"about": "one", "without": ["second"]},
        "whole": {"about": "both"},
    }
    data["claims"] = [
        {**SMALL["claims"][0], "tests": [{"better": "whole", "than": "without_second"}]}
    ]
    file.write_text(yaml.safe_dump(data))
    shared = reproduce(file, out=tmp_path / "shared")
    log = (shared.folder / "runs/whole/seed-0.log").read_text()
    assert "stage 1 of 2: first" in log and "finished" in log
    for stage in ("stages/01-first", "stages/02-second"):
        files = [
            folder / "runs/whole/seed-0" / stage / "rollouts.jsonl"
            for folder in (shared.folder, found.folder)
        ]
        assert files[0].read_bytes() == files[1].read_bytes()
    data["arms"]["without_second"]["without"] = ["frist"]
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(
        RecipeError,
        match=r"arms.without_second: no stage named 'frist'; did you mean 'first'",
    ):
        load_reproduction(file)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(
        RecipeError,
        match="no reproduction 'tabel': not a file and not one of the laboratory; did you mean 'table'",
    ):
        load_reproduction("tabel")
    file = tmp_path / "broken.yaml"
    claims = [{**SMALL["claims"][0], "tests": [{"better": "revers", "than": "forward"}]}]
    file.write_text(yaml.safe_dump({**SMALL, "claims": claims}))
    with pytest.raises(
        RecipeError, match=r"claims\[0\]: no arm named 'revers'; did you mean 'reverse'"
    ):
        load_reproduction(file)
    file.write_text(yaml.safe_dump({**SMALL, "quick": {"seed": 1}}))
    with pytest.raises(
        RecipeError, match=r"broken.yaml: quick.seed: no such key; did you mean 'seeds'"
    ):
        load_reproduction(file)


def test_they_are_listed_with_their_question_and_papers():
    listed = CliRunner().invoke(app, ["--json"])
    assert listed.exit_code == 0
    rows = json.loads(listed.output)["rows"]
    assert [name for name, _, _ in rows] == list_reproductions()
    assert all(question.endswith("?") and papers for _, question, papers in rows)


def test_what_a_domain_lost_and_won_back_stands_beside_the_teacher(tmp_path):
    """Check that a task with domains also has its initial accuracy per domain, and a page shows the teacher's for such a claim."""
    tests = [
        {"better": "teacher", "than": "forward", "measure": "accuracy/sort", "at": "start"},
        {"rises": "forward", "measure": "accuracy/copy", "by": -0.1},
    ]
    data = {
        **SMALL,
        "task": {
            "type": "skills",
            "skills": ["copy", "sort"],
            "alphabet": "abc",
            "train_size": 4,
            "heldout_size": 4,
        },
        "arms": {name: SMALL["arms"][name] for name in ("reverse", "forward")},
        "quick": {"seeds": 1, "sweep": False, "set": {"evaluation": {"samples": 1}}},
        "claims": [{"claim": "it falls", "paper": "2306.13649", "theirs": "1", "tests": tests}],
    }
    file = tmp_path / "domains.yaml"
    file.write_text(yaml.safe_dump(data))
    results = reproduce(file, out=tmp_path / "out").results
    read = results.readings["forward"]
    assert {
        "accuracy/sort",
        "accuracy/copy",
        "before/accuracy/sort",
        "before/accuracy/copy",
    } <= read.keys()
    assert results.readings["teacher"].keys() == {"accuracy", "accuracy/sort", "accuracy/copy"}
    page = render_study(load_reproduction(file), results)
    assert (
        "| arm | accuracy | accuracy/sort | accuracy/copy | accuracy/sort, before | accuracy/copy, before | FLOPs |"
        in page
    )
    assert "| `teacher`: its own answers |" in page
