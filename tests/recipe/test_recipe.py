"""A recipe reports every mistake at once, and nothing in its text runs, hides or grows."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import TASK, toy_data, toy_recipe, write_recipe

from practicum.core.notes import show_notes
from practicum.errors import CapabilityError, RecipeError
from practicum.recipe import (
    find_recipe,
    list_recipe_names,
    load_recipe,
    override,
    override_all,
    parse_recipe,
    resolve_recipe,
)
from practicum.recipe.sections import OptimizerConfig
from practicum.recipe.yaml_files import read_yaml
from practicum.runs.assembly import assemble_run
from practicum.runs.overrides import apply_overrides

NO_MODELS = Path("models")


def problems(changes: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(toy_data(NO_MODELS, changes), "my.yaml")
    assert all(
        "\n" not in problem and problem.startswith("my.yaml: ") for problem in caught.value.problems
    )
    return [problem.removeprefix("my.yaml: ") for problem in caught.value.problems]


def test_every_mistake_is_reported_at_once() -> None:
    found = problems(
        {
            "train.steps": 0,
            "train.stepz": 3,
            "optimizer.learning_rate": "fast",
            "rollout.top_p": 1.5,
            "student.model": None,
            "objective": {"divergence": "revers_kl"},
            "task": {"type": "revers"},
        }
    )
    text = "\n".join(found)
    for field in (
        "train.steps",
        "train.stepz",
        "optimizer.learning_rate",
        "rollout.top_p",
        "student.model",
    ):
        assert any(line.startswith(field) for line in found), field
    assert (
        "did you mean 'reverse_kl'" in text
        and "did you mean 'reverse'" in text
        and "did you mean 'steps'" in text
    )


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"optimizer.learning_rat": 1},
        r"optimizer\.learning_rat: no such key; did you mean 'learning_rate'",
    ),
    "unknown key at the top": ({"studnet": 1}, r"studnet: no such key; did you mean 'student'"),
    "unknown key of a teacher": (
        {"teacher.modle": "x"},
        r"teacher.*modle: no such key; did you mean 'model'",
    ),
    "unknown key of a task": (
        {"task.shortes": 1},
        r"task.*shortes: no such key; did you mean 'shortest'",
    ),
    "unknown teacher": (
        {"teacher": {"type": "modell"}},
        r"no teacher named 'modell'; did you mean 'model'",
    ),
    "teacher without a type": (
        {"teacher": {}},
        r"teacher: write a mapping with a `type`, one of: .*model",
    ),
    "no module": ({"teacher": {"type": "nowhere.at.all"}}, r"no module 'nowhere\.at\.all'"),
    "negative": (
        {"optimizer.learning_rate": -1},
        r"optimizer\.learning_rate: .*greater than 0 \(given: -1\)",
    ),
    "wrong choice": (
        {"optimizer.schedule": "cos"},
        r"optimizer\.schedule: .*'cosine'.*\(given: 'cos'\)",
    ),
    "wrong divergence": (
        {"objective": {"divergence": "jds(0.3)"}},
        r"no divergence named 'jds'; did you mean 'jsd'",
    ),
    "wrong parameter": ({"objective": {"divergence": "jsd(7)"}}, r"objective.*7"),
    "an impossible pair": (
        {"objective": {"signal": "sampled", "estimator": "pathwise"}},
        r"set estimator: score_function",
    ),
    "a list where a mapping belongs": ({"train": [1, 2]}, r"train: "),
    "nothing where a mapping belongs": ({"train": None}, r"train: "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_its_field_and_what_to_write(name: str) -> None:
    changes, text = MISTAKES[name]
    (found,) = problems(changes)
    assert __import__("re").search(text, found), found


def test_what_is_missing_is_named() -> None:
    data = toy_data(NO_MODELS)
    del data["train"], data["student"]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "my.yaml")
    assert caught.value.problems == [
        "my.yaml: student: missing; set it",
        "my.yaml: train: missing; set it",
    ]


def test_a_signal_the_teacher_cannot_give_is_a_capability_error(tmp_path: Path) -> None:
    changes = {"teacher": {"type": "scripted", "tape": "x"}, "objective": {"signal": "topk(4)"}}
    with pytest.raises(
        CapabilityError,
        match=r"losses\[0\]\.signal: teacher 'scripted' cannot give signal 'topk'.*sampled",
    ):
        parse_recipe(toy_data(NO_MODELS, changes), "my.yaml")


def test_a_resolved_recipe_reads_back_as_itself() -> None:
    objective = {
        "losses": [
            {"signal": "topk(4, tail=sampled)", "divergence": "jsd(0.3)"},
            {"signal": "full"},
        ]
    }
    teacher = {"type": "privileged", "teacher": {"type": "self", "weights": "ema"}, "system": "s"}
    recipe = parse_recipe(toy_data(NO_MODELS, {"objective": objective, "teacher": teacher}), "x")
    assert parse_recipe(resolve_recipe(recipe), "again") == recipe
    assert resolve_recipe(parse_recipe(resolve_recipe(recipe), "again")) == resolve_recipe(recipe)


ATTACKS: dict[str, tuple[bytes, str]] = {
    "a python object": (b"a: !!python/object/apply:os.system ['touch owned']", "not YAML.*python"),
    "a python name": (b"a: !!python/name:os.system", "not YAML.*python"),
    "an unknown tag": (b"a: !env HOME", "not YAML.*!env"),
    "an alias": (b"a: &x [1]\nb: *x", "aliases"),
    "laughs": (b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]", "aliases"),
    "a merge": (b"a: &a {x: 1}\nb: {<<: *a}", "aliases"),
    "a key twice": (b"train: {steps: 1, steps: 2}", "'steps' occurs twice"),
    "a key twice at the top": (b"seed: 1\nseed: 2", "'seed' occurs twice"),
    "two documents": (b"seed: 1\n---\nseed: 2", "not YAML"),
    "deep nesting": (b"a: " + b"[" * 5000, "not YAML.*line 1: nested more than 64 deep"),
    "deep nesting, closed": (
        b"a: " + b"[" * 20000 + b"]" * 20000,
        "not YAML.*line 1: nested more than 64 deep",
    ),
    "deep mappings": (
        b"{a: " * 3000 + b"1" + b"}" * 3000,
        "not YAML.*line 1: nested more than 64 deep",
    ),
    "deep indentation": (b"- " * 3000, "not YAML.*line 1: nested more than 64 deep"),
    "too large": (b"#" * (1 << 18) + b"\nseed: 1", "larger than 256 KiB"),
    "binary": (bytes(range(256)), "cannot be read|not YAML"),
    "NUL": (b"seed: \x00", "not YAML"),
    "other text": (b"\xff\xfes\x00e\x00", "cannot be read|not YAML"),
    "a list": (b"- 1\n- 2", "a recipe is a mapping"),
    "nothing": (b"", "the file is empty; write a recipe into it"),
    "numbers for names": (b"1: 2", "a recipe is a mapping"),
    "a list for a name": (b"? [a, b]\n: 1", "not YAML|a recipe is a mapping"),
    "a mapping for a name": (b"? {a: b}\n: 1", "not YAML|a recipe is a mapping"),
    "tabs": (b"train:\n\tsteps: 1", "not YAML"),
    "an impossible date": (b"seed: 2024-99-99", "not YAML"),
    "a huge number": (b"seed: " + b"9" * 5000, "not YAML"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_yaml_that_is_no_recipe_is_refused_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, text = ATTACKS[name]
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=text) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert "bad.yaml" in str(caught.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("word", ["off", "no", "on", "Yes"])
def test_only_true_and_false_are_booleans(tmp_path: Path, word: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"{word}: 1\na: {word}\nb: [true, False, falsehood]\n")
    assert read_yaml(file) == {word: 1, "a": word, "b": [True, False, "falsehood"]}


def test_a_verifier_without_a_sandbox_is_written_as_documented(models: Path) -> None:
    rows = {"type": "jsonl", "path": "rows.jsonl", "verifier": "my_rewards:verify"}
    recipe = apply_overrides(toy_recipe(models, {"task": rows}), ["task.sandbox=off"])
    assert recipe.task.model_dump()["sandbox"] == "off"


def test_a_folder_or_nothing_is_no_recipe(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.yaml"):
        with pytest.raises(RecipeError):
            load_recipe(path)


def test_environment_variables_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    path = tmp_path / "r.yaml"
    path.write_text("about: ${SECRET_TOKEN} $SECRET_TOKEN\n")
    assert "hunter2" not in str(read_yaml(path))


def test_an_override_sets_one_value_by_its_dotted_name() -> None:
    data = toy_data(NO_MODELS)
    for text in (
        "train.steps=7",
        "optimizer.schedule=cosine",
        "rollout.top_p=0.5",
        "about=a: b",
        "evaluation={prompts: 3}",
    ):
        override(data, text)
    recipe = parse_recipe({**data, "about": str(data["about"])}, "x")
    assert (recipe.train.steps, recipe.optimizer.schedule, recipe.rollout.top_p) == (
        7,
        "cosine",
        0.5,
    )
    assert recipe.evaluation.prompts == 3


def test_a_call_with_commas_can_be_an_override() -> None:
    data = toy_data(NO_MODELS)
    override(data, "objective.signal=topk(4, tail=sampled)")
    assert parse_recipe(data, "x").objective.losses[0].signal.name == "topk"


@pytest.mark.parametrize(
    ("overrides", "section", "note"),
    [
        (["task.type=skills"], {"type": "skills"}, "drops its alphabet, shortest, longest"),
        (["task.type=skills", "task.modulus=7"], {"type": "skills", "modulus": 7}, "resets"),
        (["task.modulus=7", "task.type=skills"], {"type": "skills", "modulus": 7}, "resets"),
        (["task.shortest=1", "task.type=skills"], {"type": "skills", "shortest": 1}, "alphabet"),
        (["task.type=reverse"], TASK, ""),
    ],
)
def test_an_override_of_the_type_starts_its_section_anew(
    overrides: list[str], section: dict[str, Any], note: str
) -> None:
    data = toy_data(NO_MODELS)
    notes = override_all(data, overrides)
    assert data["task"] == section
    assert bool(notes) == bool(note) and note in "".join(notes)


def test_an_override_of_a_nested_type_starts_only_the_nested_section_anew() -> None:
    pool = {"type": "pool", "teachers": [{"type": "model", "model": "a"}, {"type": "self"}]}
    data = {"teacher": {"type": "privileged", "teacher": {"type": "self", "weights": "ema"}}}
    assert override_all(data, ["teacher.teacher.type=model", "teacher.teacher.model=x"]) == [
        "teacher.teacher.type=model resets teacher.teacher and drops its weights"
    ]
    assert data["teacher"]["teacher"] == {"type": "model", "model": "x"}
    data = {"teacher": pool}
    override_all(data, ["teacher.teachers.0.type=self"])
    assert pool["teachers"] == [{"type": "self"}, {"type": "self"}]


def test_reading_a_recipe_notes_the_section_that_starts_anew(
    tmp_path: Path, notes: list[str]
) -> None:
    path = write_recipe(NO_MODELS, tmp_path / "r.yaml")
    recipe = load_recipe(path, ["teacher.type=self", "teacher.weights=frozen"])
    assert recipe.teacher.type == "self"
    assert notes == [f"{path}: teacher.type=self resets teacher and drops its model"]


@pytest.mark.parametrize(
    "text", ["train.steps", "=3", "", "train..steps=3", ".steps=3", "train.=3"]
)
def test_an_override_that_is_none_says_how_to_write_one(text: str) -> None:
    with pytest.raises(RecipeError, match=r"use for example train\.steps=4"):
        override(toy_data(NO_MODELS), text)


def test_an_override_of_what_there_is_not_is_refused_when_the_recipe_is_read() -> None:
    data = toy_data(NO_MODELS)
    override(data, "train.stepz=3")
    with pytest.raises(RecipeError, match=r"train\.stepz: no such key; did you mean 'steps'"):
        parse_recipe(data, "x")


def test_an_override_within_a_short_form_does_not_lose_it() -> None:
    data = {"monitors": {"M31": "finish"}}
    told = r"monitors\.M31 is 'finish', which has no keys; write the whole of it, monitors\.M31=\{change: 0\.1, \.\.\.\}"
    with pytest.raises(RecipeError, match=told):
        override(data, "monitors.M31.change=0.1")
    with pytest.raises(
        RecipeError, match=r"student is 'here'.*student=\{model: \{seed: 1, \.\.\.\}\}"
    ):
        override({"student": "here"}, "student.model.seed=1")
    assert data == {"monitors": {"M31": "finish"}}


@pytest.mark.parametrize("value", ["!!python/object/apply:os.system [id]", "[" * 5000])
def test_an_override_runs_nothing(value: str) -> None:
    data = toy_data(NO_MODELS)
    override(data, f"about={value}")
    assert data["about"] == value


def test_packaged_recipes_are_found_by_name() -> None:
    assert {"quickstart", "smoke/toy"} <= set(list_recipe_names())
    assert find_recipe("quickstart").samefile(find_recipe("recipes/quickstart.yaml"))
    with pytest.raises(RecipeError, match="did you mean 'quickstart'"):
        find_recipe("quikstart")


@pytest.mark.parametrize(
    "name", ["../pyproject", "../../etc/passwd", "/etc/passwd.yaml", "", "a\0b", "x" * 5000]
)
def test_a_packaged_name_does_not_leave_the_folder_of_recipes(name: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe(name)


def test_the_learning_rate_warms_up_then_falls() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=2)
    rates = [config.build_adam_params(step, 10).learning_rate for step in range(1, 11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True) and 0 < rates[-1] < 0.1
    linear = [
        OptimizerConfig(learning_rate=1.0, schedule="linear")
        .build_adam_params(step, 4)
        .learning_rate
        for step in range(1, 5)
    ]
    assert linear == [1.0, 0.75, 0.5, 0.25]
    assert (
        OptimizerConfig(learning_rate=1.0, warmup_steps=9).build_adam_params(9, 4).learning_rate
        == 1.0
    )


def test_a_relative_model_folder_starts_at_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    (tmp_path / "recipe.yaml").write_text(
        "student: {model: student}\nteacher: {type: privileged, teacher: {type: model, model: ./student}, system: hint}\n"
        "task: {type: reverse}\ntrain: {steps: 1}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.student.model == str(tmp_path / "student")
    assert recipe.teacher.teacher.model == str(tmp_path / "student")
    assert (
        load_recipe(tmp_path / "recipe.yaml", ["student.model=elsewhere"]).student.model
        == "elsewhere"
    )


@pytest.mark.parametrize(
    ("clip", "warned"), [("entries(0.05)", True), ("loss(0.05)", False), ("none", False)]
)
def test_a_clip_that_pushes_the_teachers_tokens_down_is_named(
    models: Path, tmp_path: Path, clip: str, warned: bool
) -> None:
    said: list[str] = []
    with show_notes(said.append):
        assemble_run(toy_recipe(models, {"objective.clip": clip}), tmp_path)
    lines = [
        line for line in said if line.startswith("warning: objective.losses[0].clip 'entries'")
    ]
    assert len(lines) == warned
    assert not warned or "set clip: none" in lines[0]


WORDS = [
    "student",
    "teacher",
    "task",
    "model",
    "type",
    "rollout",
    "objective",
    "losses",
    "signal",
    "n",
    "train",
    "extends",
    "stages",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)
PLACES = [
    "train.steps",
    "divergence",
    "teacher",
    "monitors.M5",
    "student.lora",
    "objective.losses.0.weights",
    "task.type",
    "train",
]


def read_or_refused(read: Callable[[], object]) -> None:
    """Let a reader return a recipe or refuse the text; any other error fails the test."""
    with contextlib.suppress(RecipeError):
        read()


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=80)
    | st.text(max_size=80).map(str.encode)
    | VALUES.map(lambda data: json.dumps(data).encode())
)
def test_a_file_of_any_bytes_is_a_recipe_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text)
    read_or_refused(lambda: load_recipe(path))


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=20)
    | st.tuples(st.sampled_from(PLACES), st.text(max_size=14) | VALUES.map(json.dumps)).map(
        "=".join
    )
)
def test_any_override_gives_a_recipe_or_is_refused(text: str) -> None:
    read_or_refused(lambda: load_recipe("smoke/toy", [text]))


def test_a_recipe_extends_a_file_beside_it_or_a_packaged_one(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("extends: smoke/toy\ntrain: {steps: 3}\nstudent: {model: {hidden_size: 16}}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: base.yaml\nseed: 7\ntask: {type: skills, skills: [reverse]}\nteacher: {model: {seed: 2}}\n"
    )
    recipe = load_recipe(mine)
    assert (recipe.seed, recipe.train.steps, recipe.task.type) == (7, 3, "skills")
    assert recipe.objective == load_recipe("smoke/toy").objective
    assert recipe.name == "mine"


def test_files_in_overrides_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check both kinds in one command: a task's file and a model's folder."""
    folder, here = tmp_path / "recipes", tmp_path / "here"
    for place in (folder, here):
        place.mkdir()
        (place / "rows.jsonl").write_text("{}\n")
    (folder / "only.jsonl").write_text("{}\n")
    (here / "teacher").mkdir()
    mine = folder / "mine.yaml"
    mine.write_text("student: org/m-1B\nteacher: org/m-8B\ntask: {type: jsonl, path: rows.jsonl}\n")
    monkeypatch.chdir(here)
    recipe = load_recipe(mine)
    assert str(Path(recipe.base_dir) / recipe.task.path) == str(folder / "rows.jsonl")
    both = load_recipe(mine, ["task.path=rows.jsonl", "teacher.model=teacher"])
    assert str(both.task.path) == str(here / "rows.jsonl") and both.teacher.model == "teacher"
    whole = load_recipe(mine, ["task={type: jsonl, path: [rows.jsonl, only.jsonl], heldout: 0.5}"])
    assert list(map(str, whole.task.path)) == [str(here / "rows.jsonl"), str(folder / "only.jsonl")]
    assert whole.task.heldout == 0.5
    gone = load_recipe(mine, ["task.path=gone.jsonl", "task={type: reverse}"])
    assert gone.task.type == "reverse"
    assert str(load_recipe(mine, ["task.path=gone.jsonl"]).task.path) == "gone.jsonl"


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ("smoke/toi", "did you mean 'smoke/toy'? practicum ls recipes"),
        ("mine.yaml", "which extends this one again"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path: Path, parent: str, message: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {parent}\n")
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(mine)
