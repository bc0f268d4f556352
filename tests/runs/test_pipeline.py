"""Pipelines: stages are recipes, each starts at its `start`, and a stopped pipeline resumes to the same bytes."""

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from report_pages import HOSTILE, Elements
from safetensors.torch import load_file
from toy import (
    TASK,
    RecordingConsole,
    assert_same_run,
    curve,
    exit_status,
    forked,
    interrupt_twice,
    lines,
    rows,
    said,
    start_fork,
    wait_in_first_step,
    when,
)

from practicum.errors import PracticumError, RecipeError
from practicum.models.config import ScratchConfig
from practicum.recipe import Recipe, load_recipe
from practicum.report.pipeline import write_pipeline_report
from practicum.run_dir import read_json
from practicum.runs import RunResult, open_run, open_student
from practicum.runs.naming import choose_name
from practicum.runs.pipeline import run
from practicum.runs.stages import Pipeline, load_pipeline_or_recipe, parse_pipeline

pytestmark = pytest.mark.long

NO_MODELS = Path("models")
MODEL = Path("model", "model.safetensors")


def toy_data(models: Path, *stages: Mapping[str, Any], **shared: Any) -> dict[str, Any]:
    """Return the data of a pipeline with stages that take a second each."""
    return {
        "name": "toy",
        "student": {"model": str(models / "student")},
        "teacher": {"type": "model", "model": str(models / "teacher")},
        "task": dict(TASK),
        "rollout": {"max_new_tokens": 5},
        "optimizer": {"learning_rate": 0.003},
        "train": {"steps": 2, "prompts_per_step": 4, "checkpoint_every": 1, "threads": 1},
        "evaluation": {"prompts": 4},
        **shared,
        "stages": [dict(stage) for stage in stages],
    }


PRIVILEGED = {"type": "privileged", "system": "ab", "teacher": {"type": "self"}}

THREE: tuple[dict[str, Any], ...] = (
    {"name": "sft", "slot": "cold_start"},
    {
        "name": "expert",
        "start": "base",
        "teacher": {"model": {"stage": "sft"}},
        "optimizer": {"learning_rate": 0.01},
    },
    {"name": "merge", "start": "sft", "teacher": PRIVILEGED},
)


def toy(models: Path, *stages: Mapping[str, Any], **shared: Any) -> Pipeline:
    return parse_pipeline(toy_data(models, *stages, **shared), "toy")


def toy_run(
    pipeline: Pipeline,
    out: Path,
    *,
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: RecordingConsole | None = None,
) -> RunResult:
    return run(pipeline, out=out, resume=resume, allow_changed=allow_changed, console=console)


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """Write a pipeline as a file; JSON is YAML."""
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def problems(*stages: Mapping[str, Any], **shared: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_pipeline(toy_data(NO_MODELS, *stages, **shared), "my.yaml")
    assert all(
        "\n" not in problem and problem.startswith("my.yaml: ") for problem in caught.value.problems
    )
    return [problem.removeprefix("my.yaml: ") for problem in caught.value.problems]


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished pipeline of three stages; tests only read it."""
    return toy_run(toy(models, *THREE), tmp_path_factory.mktemp("pipelines")).folder


class TestReading:
    def test_a_stage_has_the_shared_sections_under_its_own(self) -> None:
        found = toy(NO_MODELS, *THREE).build_recipes()
        assert [recipe.name for recipe in found.values()] == ["01-sft", "02-expert", "03-merge"]
        assert [recipe.optimizer.learning_rate for recipe in found.values()] == [0.003, 0.01, 0.003]
        assert all(
            recipe.rollout.max_new_tokens == 5 and recipe.task.longest == 3
            for recipe in found.values()
        )
        assert found["sft"].slot == "cold_start" and found["expert"].slot is None

    def test_a_list_a_scalar_and_another_type_replace(self) -> None:
        losses = {"losses": [{"divergence": "jsd(0.3)"}, {"divergence": "forward_kl"}]}
        one = {
            "name": "a",
            "task": {"type": "reasoning_gym", "generator": "products"},
            "teacher": "self",
        }
        other = {
            "name": "b",
            "objective": {"losses": [{"divergence": "tvd"}]},
            "task": {"shortest": 3},
        }
        found = toy(NO_MODELS, one, other, objective=losses).build_recipes()
        assert [len(recipe.objective.losses) for recipe in found.values()] == [2, 1]
        assert found["a"].task.type == "reasoning_gym" and found["a"].teacher.type == "self"
        assert found["b"].task.longest == 3 and found["b"].task.shortest == 3

    def test_students_and_teachers_are_those_of_the_stages_named(self) -> None:
        scratch = {"type": "model", "model": {"hidden_size": 8, "heads": 2}}
        route = {
            "type": "privileged",
            "system": "x",
            "teacher": {"type": "model", "model": {"stage": "base"}},
        }
        last = {"name": "last", "teacher": route, "student": {"lora": {"rank": 2}}}
        found = toy(NO_MODELS, *THREE, last, teacher=scratch).build_recipes()
        starts = [recipe.student.model for recipe in found.values()]
        assert starts == ["stage:base", "stage:base", "stage:sft", "stage:merge"]
        assert found["expert"].teacher.model == "stage:sft", (
            "a stage's model replaces a model from scratch"
        )
        assert found["last"].teacher.teacher.model == "stage:base"
        assert found["last"].student.lora is not None and found["sft"].student.lora is None

    def test_what_is_resolved_reads_back_as_itself(self) -> None:
        merged = {"name": "merged", "start": {"merge": ["sft", "expert"], "method": "ties"}}
        data = json.loads(json.dumps(toy(NO_MODELS, *THREE, merged).resolve()))
        assert parse_pipeline(data, "again").resolve() == data
        for shared in ({}, {"seed": 3, "claim": "c", "paper": "2505.09388"}):
            pipeline = toy(NO_MODELS, *THREE, **shared)
            data = json.loads(json.dumps(pipeline.resolve()))
            assert parse_pipeline(data, "again").resolve() == data
            assert parse_pipeline(data, "again").build_recipes() == pipeline.build_recipes()
            assert data["stages"][1]["teacher"]["model"] == {"stage": "sft"}

    def test_a_stage_may_start_from_another_model(self) -> None:
        larger = {"hidden_size": 16, "heads": 2}
        pipeline = toy(
            NO_MODELS,
            {"name": "small"},
            {"name": "large", "start": {"model": larger}, "teacher": {"model": {"stage": "small"}}},
            {"name": "later"},
            {"name": "mixed", "start": {"merge": ["large", "later"]}},
            {"name": "again", "start": "small"},
            {"name": "named", "start": {"model": "some/model"}},
        )
        models = [recipe.student.model for recipe in pipeline.build_recipes().values()]
        assert isinstance(models[1], ScratchConfig) and models[1].hidden_size == 16
        assert models[2] == "stage:large" and models[5] == "some/model"
        # The size of each stage's models, for the plan and the comparison of tokens.
        first = [recipe.student.model for recipe in pipeline.build_first_recipes().values()]
        base = pipeline.recipe.student.model
        assert first == [base, models[1], models[1], models[1], base, "some/model"]
        data = json.loads(json.dumps(pipeline.resolve()))
        assert parse_pipeline(data, "again").resolve() == data
        assert [stage.origin for stage in pipeline.stages][1] == "a new model"

    @pytest.mark.parametrize("place", [0, 1])
    def test_a_resolved_stage_keeps_the_folder_of_its_own_task(self, place: int) -> None:
        stages: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}]
        stages[place] |= {"task": {**TASK, "longest": 4}, "base_dir": "other"}
        pipeline = toy(NO_MODELS, *stages, base_dir="shared")
        data = json.loads(json.dumps(pipeline.resolve()))
        again = parse_pipeline(data, "again")
        assert again.resolve() == data and again.build_recipes() == pipeline.build_recipes()
        assert again.recipe.base_dir == pipeline.recipe.base_dir == "shared"

    def test_a_task_of_each_stage_need_not_be_shared(self) -> None:
        data = toy_data(
            NO_MODELS, {"name": "a", "task": TASK}, {"name": "b", "task": {**TASK, "longest": 4}}
        )
        del data["task"]
        found = parse_pipeline(data, "x")
        assert "task" not in found.resolve() and found.recipe.task.longest == 3
        assert parse_pipeline(found.resolve(), "again").build_recipes() == found.build_recipes()


class TestMistakes:
    def test_every_mistake_of_every_stage_is_reported_at_once(self) -> None:
        found = problems(
            {"name": "sft", "objective": {"divergence": "revers_kl"}, "trian": {"steps": 1}},
            {"name": "rl", "train": {"steps": 0}, "start": "later"},
            {"name": "later", "teacher": {"model": {"stage": "rll"}}},
            optimizer={"learning_rate": "fast"},
            studnet=1,
        )
        text = "\n".join(found)
        assert "stages[0] (sft).trian: no such key; did you mean 'train'" in text
        assert re.search(
            r"^stages\[0\] \(sft\)\.objective.*did you mean 'reverse_kl'", text, re.MULTILINE
        )
        assert "stages[1] (rl).train.steps: " in text
        assert (
            "stages[1] (rl).start: 'later' is a later stage; name an earlier one: base, sft" in text
        )
        assert "stages[2] (later).teacher.model: no stage named 'rll'; did you mean 'rl'" in text
        assert sum(line.startswith("optimizer.learning_rate: ") for line in found) == 1, (
            "once for all stages"
        )
        assert (
            sum(line.startswith("studnet: no such key; did you mean 'student'") for line in found)
            == 1
        )
        assert len(found) == 7, found

    @pytest.mark.parametrize(
        ("stage", "text"),
        [
            ({"name": "a b"}, r"stages\[1\] \(a b\)\.name: 'a b' cannot name a stage"),
            ({"name": "../x"}, r"\.name: '\.\./x' cannot name a stage"),
            ({"name": "base"}, r"\.name: 'base' cannot name a stage"),
            ({"name": 3}, r"\.name: 3 cannot name a stage"),
            ({}, r"\.name: None cannot name a stage"),
            ({"name": "one"}, r"\.name: an earlier stage already has the name 'one'"),
            ({"name": "x", "start": "x"}, r"\(x\)\.start: 'x' is this stage itself; name an earlier one: base, one"),
            ({"name": "x", "start": {"merge": ["one", "two"]}}, r"\(x\)\.start\.merge: no stage named 'two'; known: base, one"),
            ({"name": "x", "start": {"merge": ["one"]}}, r"\(x\)\.start\.merge: tuple should have at least 2 items"),
            ({"name": "x", "start": {"merge": ["one", "base"], "by": 1}}, r"\(x\)\.start\.by: no such key"),
            ({"name": "x", "start": {"merge": ["one", "base"], "scale": 1}}, r"\(x\)\.start: method mean has no scale; remove it"),
            ({"name": "x", "start": {"model": {"stage": "one"}}}, r"\(x\)\.start\.model\S*: no such key"),
            ({"name": "x", "start": {"model": {"hiden": 1}}}, r"\(x\)\.start\.model\S*: no such key; did you mean"),
            ({"name": "x", "start": {"model": "m", "base": "one"}}, r"\(x\)\.start\.base: no such key"),
            ({"name": "x", "start": "oen"}, r"\(x\)\.start: no stage named 'oen'; did you mean 'one'"),
            ({"name": "x", "student": {"model": "m"}}, r"\(x\)\.student\.model: `start` selects the student of a stage"),
            ({"name": "x", "teacher": {"model": {"stage": "x"}}}, r"\(x\)\.teacher\.model: 'x' is this stage itself"),
            (
                {"name": "x", "teacher": {**PRIVILEGED, "teacher": {"type": "model", "model": {"stage": "y"}}}},
                r"\(x\)\.teacher\.teacher\.model: no stage named 'y'",
            ),
            (
                {"name": "x", "rollout": {"source": {"type": "cache", "run": {"model": {"stage": "y"}}}}},
                r"\(x\)\.rollout\.source\.run\.model: no stage named 'y'",
            ),
            (
                {"name": "x", "rollout": {"source": {"type": "cache", "run": {"model": {"stage": "base"}}}}},
                r"\(x\)\.rollout\.source\.run\.model: 'base' has no run; name an earlier stage: one",
            ),
            ({"name": "x", "teacher": {"model": {"stage": "one", "seed": 1}}}, r"written \{stage: NAME\} and nothing more"),
            ({"name": "x", "slot": 3}, r"stages\[1\] \(x\)\.slot: "),
            ({"name": "x", "train": None}, r"stages\[1\] \(x\)\.train: "),
        ],
    )  # fmt: skip
    def test_a_mistake_names_its_stage_and_field(self, stage: dict[str, Any], text: str) -> None:
        (found,) = problems({"name": "one"}, stage)
        assert re.search(text, found), found

    @pytest.mark.parametrize(
        "stages", [[], None, "sft", {"name": "sft"}, ["sft"], [{"name": "a"}, 3]]
    )
    def test_stages_are_a_list_of_mappings(self, stages: Any) -> None:
        with pytest.raises(
            RecipeError, match="x: stages: must be a list of stages, each a mapping with a `name`"
        ):
            parse_pipeline({**toy_data(NO_MODELS), "stages": stages}, "x")

    def test_what_a_pipeline_starts_from_is_no_stage(self) -> None:
        (found,) = problems({"name": "one"}, student={"model": {"stage": "one"}})
        assert found.startswith("student.model: a pipeline cannot start from the student")

    def test_what_is_missing_or_wrong_in_what_is_shared_is_said_once(self) -> None:
        data = toy_data(NO_MODELS, *THREE, about=3)
        data["train"]["steps"] = 0
        del data["student"]
        with pytest.raises(RecipeError) as caught:
            parse_pipeline(data, "x")
        fields = sorted(line.split(": ")[1] for line in caught.value.problems)
        assert fields == ["about", "student", "train.steps"]

    def test_a_pipeline_is_no_recipe_and_says_so(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", toy_data(NO_MODELS, *THREE))
        with pytest.raises(
            RecipeError,
            match=r"p\.yaml: a pipeline, since it has stages; run it with practicum\.run",
        ):
            load_recipe(path)


class TestOverrides:
    def overridden(self, tmp_path: Path, *overrides: str, **shared: Any) -> Pipeline:
        path = write(tmp_path / "mine.yaml", toy_data(NO_MODELS, *THREE, **shared))
        found = load_pipeline_or_recipe(path, overrides)
        assert isinstance(found, Pipeline)
        return found

    def test_one_goes_to_every_stage_or_to_the_stage_it_names(self, tmp_path: Path) -> None:
        found = self.overridden(tmp_path, "train.steps=7", "stages.expert.train.steps=9", "seed=5")
        assert [recipe.train.steps for recipe in found.build_recipes().values()] == [7, 9, 7]
        assert {recipe.seed for recipe in found.build_recipes().values()} == {
            5
        } and found.recipe.seed == 5
        found = self.overridden(tmp_path, "stages.merge.start=base", "stages.merge.teacher=self")
        assert (
            found.stages[2].start == "base"
            and found.build_recipes()["merge"].teacher.type == "self"
        )

    def test_the_model_and_the_words_are_the_pipelines(self, tmp_path: Path) -> None:
        found = self.overridden(tmp_path, "student.model=elsewhere", "name=mine", "about=mine")
        assert found.recipe.student.model == "elsewhere" and found.recipe.name == "mine"
        assert (
            found.build_recipes()["sft"].student.model == "stage:base"
            and found.build_recipes()["sft"].about == ""
        )
        scratch = self.overridden(
            tmp_path, "student.model.layers=1", student={"model": {"layers": 3}}
        )
        assert scratch.recipe.student.model.layers == 1  # type: ignore[union-attr]

    def test_a_stage_keeps_the_rest_of_a_shared_list(self, tmp_path: Path) -> None:
        objective = {"losses": [{"divergence": "jsd(0.3)"}, {"divergence": "tvd"}]}
        found = self.overridden(
            tmp_path, "stages.sft.objective.losses.1.coefficient=2", objective=objective
        )
        terms = {name: recipe.objective.losses for name, recipe in found.build_recipes().items()}
        assert [term.coefficient for term in terms["sft"]] == [1, 2] and terms["merge"][
            1
        ].coefficient == 1

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("stages.exprt.train.steps=1", "no stage named 'exprt'; did you mean 'expert'"),
            (
                "stages.expert=1",
                r"names no key of a stage; use for example stages\.sft\.train\.steps=4",
            ),
            ("stages=1", "names no key of a stage"),
            ("train.steps", r"use for example train\.steps=4"),
            (
                "stages.sft.train.stepz=1",
                r"stages\[0\] \(sft\)\.train\.stepz: no such key; did you mean 'steps'",
            ),
            ("train.stepz=1", r"mine\.yaml: train\.stepz: no such key; did you mean 'steps'"),
            (
                "stages.sft.student.model=x",
                r"stages\[0\] \(sft\)\.student\.model: `start` selects",
            ),
        ],
    )
    def test_one_that_cannot_be_says_why(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(RecipeError, match=message) as caught:
            self.overridden(tmp_path, text)
        assert len(caught.value.problems) == 1

    def test_relative_model_folders_start_at_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        other = {"name": "other", "teacher": {"model": "m"}}
        path = write(
            tmp_path / "p.yaml", toy_data(NO_MODELS, *THREE, other, student={"model": "m"})
        )
        found = load_pipeline_or_recipe(path)
        assert isinstance(found, Pipeline) and found.recipe.student.model == str(tmp_path / "m")
        assert found.build_recipes()["other"].teacher.model == str(tmp_path / "m")

    def test_a_pipeline_may_extend_another(self, tmp_path: Path) -> None:
        (tmp_path / "inner").mkdir()
        write(tmp_path / "inner" / "p.yaml", toy_data(NO_MODELS, *THREE, name="first"))
        path = write(
            tmp_path / "mine.yaml",
            {"extends": "inner/p.yaml", "train": {"steps": 9}, "name": "mine"},
        )
        found = load_pipeline_or_recipe(path, ["stages.sft.coefficient=linear(1, 0)"])
        assert isinstance(found, Pipeline) and found.recipe.name == "mine"
        assert [recipe.train.steps for recipe in found.build_recipes().values()] == [9, 9, 9]
        assert (
            found.build_recipes()["sft"].schedules and not found.build_recipes()["merge"].schedules
        )
        assert parse_pipeline(found.resolve(), "again").build_recipes() == found.build_recipes()

    def test_a_file_without_stages_is_a_recipe(self) -> None:
        assert isinstance(load_pipeline_or_recipe("smoke/toy", ["train.steps=3"]), Recipe)


class TestRunning:
    def test_the_folder_has_a_run_and_a_model_for_each_stage(self, finished: Path) -> None:
        assert {path.name for path in finished.iterdir()} == {
            "pipeline.json", "summary.json", "report.html", "run.lock", "stages",
        }  # fmt: skip
        assert sorted(path.name for path in (finished / "stages").iterdir()) == [
            "01-sft",
            "02-expert",
            "03-merge",
        ]
        for folder in (finished / "stages").iterdir():
            _, student = open_student(folder)
            assert open_run(folder)[1].name == folder.name and (folder / "report.html").is_file()
            model = load_file(folder / "model" / "model.safetensors")
            assert student.weights is not None
            assert all(
                model[name].equal(value.data)
                for name, value in student.weights.items()
                if name in model
            )

    def test_each_stage_starts_where_it_says(self, models: Path, finished: Path) -> None:
        sources = {
            folder.name: read_json(folder / "recipe.json")["recipe"]["student"]["model"]
            for folder in (finished / "stages").iterdir()
        }
        sft = str(finished / "stages" / "01-sft" / "model")
        assert sources == {
            "01-sft": str(models / "student"),
            "02-expert": str(models / "student"),
            "03-merge": sft,
        }
        evaluations = {
            name: read_json(finished / "stages" / name / "summary.json") for name in sources
        }
        assert (
            evaluations["01-sft"]["after"]["length"] == evaluations["03-merge"]["before"]["length"]
        )
        assert (
            evaluations["01-sft"]["before"]["length"]
            == evaluations["02-expert"]["before"]["length"]
        )
        before = [
            read_json(finished / "stages" / name / "before.json")
            for name in ("01-sft", "02-expert")
        ]
        texts = [
            [answer["text"] for answer in evaluation["student"]["answers"]] for evaluation in before
        ]
        assert texts[0] == texts[1]

    def test_the_summary_has_every_stage_and_the_accuracy_after_each(self, finished: Path) -> None:
        summary = read_json(finished / "summary.json")
        assert [(stage["name"], stage["start"], stage["steps"]) for stage in summary["stages"]] == [
            ("sft", "base", 2),
            ("expert", "base", 2),
            ("merge", "sft", 2),
        ]
        assert [row["stage"] for row in summary["accuracy"]] == ["base", "sft", "expert", "merge"]
        assert summary["accuracy"][1]["all"] == summary["stages"][0]["after"]["accuracy"]
        assert "samples" not in summary["stages"][0]

    def test_a_student_from_scratch_is_made_once_and_is_the_same_for_every_stage(
        self, tmp_path: Path
    ) -> None:
        scratch = {"hidden_size": 16, "layers": 1, "heads": 2, "seed": 4}
        task = {
            "type": "skills",
            "skills": ["copy", "sort"],
            "alphabet": "abc",
            "longest": 3,
            "train_size": 8,
        }
        stages = [
            {"name": "one", "task": {"train": ["copy"]}},
            {"name": "two", "start": "base", "task": {"train": ["sort"]}},
            {"name": "three", "start": "one", "teacher": {"model": {"stage": "two"}}},
        ]
        teacher = {"type": "model", "model": {**scratch, "seed": 5}}
        shared = {
            "student": {"model": scratch},
            "task": task,
            "teacher": teacher,
            "evaluation": {"prompts": 8},
        }
        result = toy_run(toy(NO_MODELS, *stages, **shared), tmp_path)
        made = list((result.folder / "models").glob("scratch-*/model.safetensors"))
        assert len(made) == 2, "the student and the teacher, though two stages have them"
        before = [stage["before"] for stage in result.summary["stages"]]
        assert before[0]["student_entropy"] == before[1]["student_entropy"]
        assert result.summary["domains"] == ["copy", "sort"]
        assert set(result.summary["accuracy"][2]["by_domain"]) == {"copy", "sort"}, (
            "untrained skills are measured too"
        )
        page = (result.folder / "report.html").read_text()
        assert "<th>copy</th>" in page and "sort after two: " in page

    def test_a_stage_learns_from_the_stored_answers_and_scores_of_another(
        self, models: Path, tmp_path: Path
    ) -> None:
        stored = {"model": {"stage": "collect"}}
        objective = {"signal": "sampled", "estimator": "score_function"}
        pipeline = toy(
            models,
            {"name": "collect", "objective": objective},
            {
                "name": "offline",
                "start": "base",
                "teacher": {"type": "scripted", "run": stored},
                "rollout": {"source": {"type": "cache", "run": stored}},
                "objective": objective,
            },
        )
        data = json.loads(json.dumps(pipeline.resolve()))
        assert data["stages"][1]["rollout"]["source"]["run"] == stored
        assert parse_pipeline(data, "again").build_recipes() == pipeline.build_recipes()
        result = toy_run(pipeline, tmp_path)
        answers = [
            {(row["prompt"], *row["tokens"], *row["teacher_logprobs"]) for row in rows(file)}
            for file in sorted(result.folder.glob("stages/*/rollouts.jsonl"))
        ]
        assert answers[0] >= answers[1] != set()
        assert result.summary["stages"][1]["after"]["reverse_kl"] is None, "no teacher was asked"

    def test_adapters_are_merged_and_begin_anew(self, models: Path, tmp_path: Path) -> None:
        student = {"model": str(models / "student"), "lora": {"rank": 2}}
        folder = toy_run(
            toy(models, {"name": "a"}, {"name": "b"}, student=student), tmp_path
        ).folder
        model = load_file(folder / "stages" / "01-a" / "model" / "model.safetensors")
        assert not [name for name in model if "lora" in name]
        _, merged = open_student(folder / "stages" / "02-b")
        assert merged.weights is not None and any("lora" in name for name in merged.weights)
        after = read_json(folder / "stages" / "01-a" / "summary.json")["after"]
        before = read_json(folder / "stages" / "02-b" / "summary.json")["before"]
        assert after["student_entropy"] == pytest.approx(before["student_entropy"], rel=1e-4)

    def test_the_console_says_which_stage_it_is(self, models: Path, tmp_path: Path) -> None:
        console = RecordingConsole()
        toy_run(toy(models, *THREE), tmp_path, console=console)
        headings = [text for text in console.events if text.startswith("stage ")]
        assert headings == [
            "stage 1 of 3: sft (cold start)",
            "stage 2 of 3: expert",
            "stage 3 of 3: merge",
        ]

    def test_a_stage_starts_from_the_merged_students_of_others(
        self, models: Path, tmp_path: Path
    ) -> None:
        experts = [
            {"name": "one", "start": "base", "task": {"seed": 1}},
            {"name": "two", "start": "base", "task": {"seed": 2}},
        ]
        start = {"merge": ["one", "two"], "method": "task_arithmetic", "scale": 0.5}
        pipeline = toy(models, *experts, {"name": "joined", "start": start})
        result = toy_run(pipeline, tmp_path)
        (merged,) = (result.folder / "models").glob("merge-*")
        stages = result.folder / "stages"
        one, two = (load_file(stages / name / MODEL) for name in ("01-one", "02-two"))
        for name, weight in load_file(merged / "model.safetensors").items():
            torch.testing.assert_close(weight, (one[name] + two[name]) / 2)
        assert open_run(stages / "03-joined")[1].student.model == str(merged)
        assert [row["stage"] for row in result.summary["accuracy"]] == [
            "base", "one", "two", "start of joined", "joined",
        ]  # fmt: skip
        assert result.summary["stages"][2]["start"] == "task_arithmetic of one, two"
        page = (result.folder / "report.html").read_text(encoding="utf-8")
        assert "task_arithmetic of one, two" in page and "start of joined" in page


class TestStopping:
    @pytest.mark.parametrize(
        "faults",
        [
            ["update:2", "score:1"],
            ["stage.done:1", "update:1"],
            ["stage.exported:3"],
            *(
                pytest.param(faults, marks=pytest.mark.slow)
                for faults in (
                    ["rollout:1"],
                    ["save.after_rename:2"],
                    ["stage.exported:1", "stage.exported:1"],
                    ["save.before_rename:3", "stage.done:2"],
                )
            ),
        ],
        ids=str,
    )
    def test_killed_anywhere_the_resumed_pipeline_is_the_same(
        self, models: Path, finished: Path, tmp_path: Path, faults: list[str]
    ) -> None:
        pipeline = toy(models, *THREE)
        for number, fault in enumerate(faults):
            resume = (tmp_path / "toy" / "pipeline.json").is_file()
            assert resume == bool(number)
            run = partial(toy_run, pipeline, tmp_path, resume=resume)
            assert forked(run, {"PRACTICUM_FAULT": fault}) == 137
        self.assert_same(finished, toy_run(pipeline, tmp_path, resume=True).folder)

    def assert_same(self, one: Path, other: Path) -> None:
        for folder in (one / "stages").iterdir():
            assert_same_run(folder, other / "stages" / folder.name)
            mine, theirs = (
                load_file(home / "stages" / folder.name / MODEL) for home in (one, other)
            )
            assert all(value.equal(theirs[name]) for name, value in mine.items())
        for name in ("summary.json", "pipeline.json", "report.html"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        assert not [
            path.name
            for path in other.rglob("*")
            if ".tmp" in path.name or path.name.startswith("trash-")
        ]

    def test_half_an_export_is_thrown_away(
        self, models: Path, finished: Path, tmp_path: Path
    ) -> None:
        pipeline = toy(models, *THREE)
        assert (
            forked(lambda: toy_run(pipeline, tmp_path), {"PRACTICUM_FAULT": "stage.done:1"}) == 137
        )
        half = tmp_path / "toy" / "stages" / "01-sft" / "model.tmp-abc" / "model"
        half.mkdir(parents=True)
        self.assert_same(finished, toy_run(pipeline, tmp_path, resume=True).folder)

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_stops_it_after_the_step_and_names_the_stage(
        self, models: Path, tmp_path: Path, number: int, code: int
    ) -> None:
        slow = {
            "name": "slow",
            "slot": "inside_rl",
            "train": {"steps": 400, "checkpoint_every": None},
        }
        pipeline = toy(models, {"name": "sft"}, slow)
        output, metrics = (
            tmp_path / "output",
            tmp_path / "toy" / "stages" / "02-slow" / "metrics.jsonl",
        )
        pid = start_fork(lambda: toy_run(pipeline, tmp_path), output=output)
        when(lambda: lines(metrics) >= 2)
        os.kill(pid, number)
        assert exit_status(os.waitpid(pid, 0)[1]) == code
        name = signal.Signals(number).name
        assert f"stage 2 of 2: slow (inside rl): stopped by {name} after step" in output.read_text()
        assert "resume=True" in output.read_text() and len(rows(metrics)) < 400

    def test_a_signal_while_a_stage_ends_keeps_the_next_from_beginning(
        self, models: Path, tmp_path: Path
    ) -> None:
        class Signalling(RecordingConsole):
            def event(self, text: str) -> None:
                super().event(text)
                if "after training" in text:
                    os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(
            PracticumError,
            match=r"stage 1 of 2: a: stopped by SIGTERM after its last step.*resume=True",
        ) as e:
            toy_run(toy(models, {"name": "a"}, {"name": "b"}), tmp_path, console=Signalling())
        assert e.value.exit_code == 143 and not (tmp_path / "toy" / "stages" / "02-b").exists()
        assert (tmp_path / "toy" / "stages" / "01-a" / "model").is_dir()

    def test_a_finished_pipeline_says_so_and_changes_nothing(
        self, models: Path, finished: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(finished, tmp_path / "toy")
        stamps = {
            p: p.stat().st_mtime_ns for p in (tmp_path / "toy").rglob("*") if p.name != "run.lock"
        }
        console = RecordingConsole()
        result = toy_run(toy(models, *THREE), tmp_path, resume=True, console=console)
        assert any("nothing to do" in text for text in console.events)
        assert result.summary == read_json(finished / "summary.json")
        assert {path: path.stat().st_mtime_ns for path in stamps} == stamps

    def test_a_stage_that_was_saved_does_not_change_and_one_to_come_may(
        self, models: Path, tmp_path: Path
    ) -> None:
        assert (
            forked(lambda: toy_run(toy(models, *THREE), tmp_path), {"PRACTICUM_FAULT": "update:4"})
            == 137
        )
        sft, expert, merge = THREE
        changed = toy(models, sft, {**expert, "optimizer": {"learning_rate": 0.5}}, merge)
        with pytest.raises(RecipeError, match="the recipe changed since it began") as caught:
            toy_run(changed, tmp_path, resume=True)
        assert caught.value.problems[1:] == [
            "stages[1] (expert).optimizer.learning_rate: 0.01 in the run, 0.5 now",
            "or resume the run with the change: "
            'allow_changed=["stages.expert.optimizer.learning_rate"]',
        ]
        finished = toy(models, {**sft, "optimizer": {"learning_rate": 0.5}}, expert, merge)
        with pytest.raises(
            RecipeError, match=r"stages\[0\] \(sft\)\.optimizer\.learning_rate: 0\.003 in the run"
        ):
            toy_run(finished, tmp_path, resume=True, allow_changed=["optimizer"])
        with pytest.raises(
            RecipeError,
            match=r"stages\.exprt\.seed.*: no stage named 'exprt'; did you mean",
        ):
            toy_run(changed, tmp_path, resume=True, allow_changed=["stages.exprt.seed"])
        for other in (
            toy(models, sft),
            toy(models, merge | {"start": "base"}, sft | {"name": "x"}),
        ):
            with pytest.raises(RecipeError, match=r"stages\[\d\] \(\w+\)\."):
                toy_run(other, tmp_path, resume=True)
        other = {"name": "other", "start": "sft", "train": {"steps": 1}}
        to_come = toy(models, sft, {**expert, "optimizer": {"learning_rate": 0.5}}, other)
        allowed = ["stages.expert.optimizer.learning_rate"]
        summary = toy_run(to_come, tmp_path, resume=True, allow_changed=allowed).summary
        assert curve(tmp_path / "toy" / "stages" / "02-expert", "learning_rate") == [0.01, 0.5]
        assert [stage["name"] for stage in summary["stages"]] == ["sft", "expert", "other"]

    def test_a_stage_that_saved_no_step_may_change_and_begins_anew(
        self, models: Path, finished: Path, tmp_path: Path
    ) -> None:
        sft, expert, merge = THREE
        wrong = toy(models, sft, {**expert, "optimizer": {"learning_rate": 0.5}}, merge)
        assert forked(lambda: toy_run(wrong, tmp_path), {"PRACTICUM_FAULT": "update:3"}) == 137
        assert (tmp_path / "toy" / "stages" / "02-expert" / "before.json").is_file()
        self.assert_same(finished, toy_run(toy(models, *THREE), tmp_path, resume=True).folder)

    def test_a_stage_may_be_added_to_a_finished_pipeline(
        self, models: Path, finished: Path, tmp_path: Path
    ) -> None:
        two = THREE[:2]
        folder = toy_run(toy(models, *two), tmp_path).folder
        self.assert_same(finished, toy_run(toy(models, *THREE), tmp_path, resume=True).folder)
        assert (folder / "stages" / "03-merge").is_dir()

    def test_another_student_is_refused_where_it_was_made(self, tmp_path: Path) -> None:
        scratch = {"hidden_size": 16, "layers": 1, "heads": 2}
        shared = {"teacher": "self", "evaluation": {"prompts": 0}}
        toy_run(toy(NO_MODELS, {"name": "a"}, student={"model": scratch}, **shared), tmp_path)
        wider = toy(
            NO_MODELS, {"name": "a"}, student={"model": {**scratch, "hidden_size": 32}}, **shared
        )
        with pytest.raises(
            RecipeError, match=r"student\.model\.hidden_size: 16 in the run, 32 now"
        ):
            toy_run(wider, tmp_path, resume=True)

    def test_a_folder_that_is_taken_is_refused_and_one_without_a_pipeline_is_not_resumed(
        self, models: Path, finished: Path, tmp_path: Path
    ) -> None:
        (tmp_path / finished.name).mkdir()
        shutil.copy(finished / "pipeline.json", tmp_path / finished.name)
        with pytest.raises(RecipeError, match="already holds a run; use resume=True"):
            toy_run(toy(models, *THREE), tmp_path)
        shutil.copy(finished / "summary.json", tmp_path / finished.name)
        assert choose_name(tmp_path, finished.name) == f"{finished.name}-2"
        shutil.rmtree(tmp_path / finished.name)
        with pytest.raises(RecipeError, match=r"holds no pipeline: there is no such folder"):
            toy_run(toy(models, *THREE), tmp_path, resume=True)


def test_an_override_of_a_shared_part_leaves_a_part_of_another_type_alone() -> None:
    stages = [{"name": "first"}, {"name": "second", "teacher": {"type": "self"}}]
    data = toy_data(NO_MODELS, *stages)
    recipes = parse_pipeline(data, "toy", ["teacher.model=other", "train.steps=7"]).build_recipes()
    assert recipes["first"].teacher.model == "other"
    assert recipes["second"].teacher.type == "self"
    assert {recipe.train.steps for recipe in recipes.values()} == {7}
    with pytest.raises(RecipeError, match=r"stages\[1\] \(second\)\.teacher\.model: no such key"):
        parse_pipeline(data, "toy", ["stages.second.teacher.model=other"])


class TestReport:
    def test_the_page_loads_nothing_and_its_links_lead_to_the_stages(self, finished: Path) -> None:
        page = Elements((finished / "report.html").read_text())
        links = [attributes["href"] for tag, attributes in page.found if tag == "a"]
        assert len(links) == 3 and all((finished / str(link)).is_file() for link in links)
        assert not {"script", "img", "link", "iframe", "form"} & {tag for tag, _ in page.found}
        assert "cold start" in page.text and "full, reverse_kl" in page.text

    def test_hostile_text_is_shown_and_not_obeyed(self, finished: Path, tmp_path: Path) -> None:
        folder = tmp_path / "toy"
        shutil.copytree(finished, folder)
        for name in ("pipeline.json", "summary.json"):
            data = read_json(folder / name)
            data["stages"][0]["slot"] = data["stages"][0]["name"] = data["name"] = data["claim"] = (
                HOSTILE
            )
            (folder / name).write_text(json.dumps(data))
        page = write_pipeline_report(folder).read_text()
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script" not in page
        assert not set("\u202e\u2066\x1b\x07") & set(page)


class TestCommandLine:
    def test_check_show_run_and_all_that_follows(self, models: Path, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", toy_data(models, *THREE))
        assert said(tmp_path, "check", str(path), "stages.sft.train.steps=1")[0] == 0
        status, text = said(tmp_path, "check", str(path), "stages.sft.train.steps=0")
        assert status == 2 and "stages[0] (sft).train.steps: " in text and "Traceback" not in text
        status, text = said(tmp_path, "show", str(path))
        (tmp_path / "again.yaml").write_text(text)
        assert status == 0 and said(tmp_path, "show", str(tmp_path / "again.yaml")) == (0, text)
        status, text = said(
            tmp_path, "run", str(path), "--out", str(tmp_path), "stages.merge.train.steps=1"
        )
        assert (
            status == 0 and "stage 3 of 3: merge" in text and "held-out accuracy by stage" in text
        ), text
        report = tmp_path / "toy" / "report.html"
        page = report.read_text()
        report.unlink()
        status, text = said(tmp_path, "report", str(tmp_path / "toy"))
        assert (status, report.read_text()) == (0, page) and str(report) in text
        assert said(tmp_path, "report", str(tmp_path / "toy" / "stages" / "01-sft"))[0] == 0
        assert said(tmp_path, "report", str(models))[0] == 2
        status, text = said(tmp_path, "eval", str(tmp_path / "toy"), "--json")
        assert status == 0 and json.loads(text)["prompts"] == 4
        assert said(tmp_path, "export", str(tmp_path / "toy"), str(tmp_path / "last"))[0] == 0
        last = load_file(tmp_path / "toy" / "stages" / "03-merge" / "model" / "model.safetensors")
        exported = load_file(tmp_path / "last" / "model.safetensors")
        assert all(exported[name].equal(value) for name, value in last.items())

    def test_a_second_interrupt_names_the_stage_too(self, models: Path, tmp_path: Path) -> None:
        with wait_in_first_step():
            pid = start_fork(
                lambda: toy_run(toy(models, {"name": "slow"}), tmp_path), output=tmp_path / "output"
            )
        assert interrupt_twice(pid, tmp_path / "output") == 130
        assert "stage 1 of 1: slow: stopped at once" in (tmp_path / "output").read_text()
