"""Every key of a run's files, removed, of another type or added: shown, or refused in one line, and never a traceback."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from toy import rows, toy_run

from practicum.errors import CheckpointError, PracticumError
from practicum.report import write_report
from practicum.report.model_card import build_card
from practicum.run_dir import RunDir, read_json, read_rows, shapes
from practicum.runs import RunResult, open_run
from practicum.runs.examining import read_evaluations
from practicum.runs.exporting import read_facts
from practicum.studies.compare.outcomes import read_outcome

SMALL = {
    "evaluation.prompts": 2,
    "evaluation.every": 2,
    "train.steps": 2,
    "train.checkpoint_every": 1,
    "train.prompts_per_step": 1,
    "rollout.n": 2,
    "prices": {"machine_hour": 1.0},
    "monitors": {"M4": {"level": 0.001}},
}
RETYPED: tuple[Any, ...] = ({"a": [1]}, None, "x", [["x"]], 7, 1e300)
DOCTOR = {
    "verdict": {"word": "GO", "meaning": "it fits"},
    "checks": [{"id": "P1", "name": "a", "status": "pass", "value": {"mean": 1.0}, "fix": ["a=1"]}],
}

Command = Callable[[Path], object]
Place = tuple[str | int, ...]


def show(folder: Path) -> None:
    write_report(folder)


def resume(folder: Path) -> None:
    open_run(folder)
    RunResult.read(folder)


def describe(folder: Path) -> None:
    build_card(read_facts(folder, is_adapter=False, has_template=True))
    RunResult.read(folder)._repr_html_()
    read_outcome("arm", 0, folder, folder.parent)


def read_back(folder: Path) -> None:
    read_evaluations(folder / "before.json")


FILES: dict[str, tuple[TypeAdapter[Any], tuple[Command, ...]]] = {
    "recipe.json": (shapes.SHOWN_RUN, (show, resume)),
    "before.json": (shapes.BEFORE, (show, read_back)),
    "after.json": (shapes.AFTER, (show, describe)),
    "summary.json": (shapes.SUMMARY, (show, describe)),
    "doctor.json": (shapes.DOCTOR, (show,)),
    "metrics.jsonl": (shapes.METRICS, (show, describe)),
    "timings.jsonl": (shapes.TIMINGS, (show, describe)),
    "rollouts.jsonl": (shapes.ROLLOUT, (show,)),
    "alarms.jsonl": (shapes.ALARM, (show,)),
    "vocabulary.jsonl": (shapes.VOCABULARY, (show,)),
    "starts.jsonl": (shapes.START, (show,)),
}


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy_run(models, tmp_path_factory.mktemp("finished"), SMALL).folder
    (folder / "doctor.json").write_text(json.dumps(DOCTOR))
    assert rows(folder / "alarms.jsonl")
    return folder


def read(path: Path, shape: TypeAdapter[Any]) -> Any:
    return next(read_rows(path, shape)) if path.suffix == ".jsonl" else read_json(path, shape)


def load(text: bytes, name: str) -> Any:
    return json.loads(text.splitlines()[0] if name.endswith(".jsonl") else text)


def write(path: Path, content: Any, original: bytes) -> None:
    lines = original.splitlines(keepends=True)[1:] if path.suffix == ".jsonl" else []
    path.write_bytes(b"".join([json.dumps(content).encode() + b"\n", *lines]))


def walk(content: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every path with its content; of a list, only the first entry."""
    yield place, content
    if isinstance(content, dict):
        for key, part in content.items():
            yield from walk(part, (*place, key))
    elif isinstance(content, list) and content:
        yield from walk(content[0], (*place, 0))


def follow(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def change(content: Any, place: Place, *value: Any) -> Any:
    """Return a copy with another value at a path, or without the path."""
    copy = json.loads(json.dumps(content))
    if value:
        follow(copy, place[:-1])[place[-1]] = value[0]
    else:
        del follow(copy, place[:-1])[place[-1]]
    return copy


def list_changes(name: str, content: Any) -> Iterator[Any]:
    for place, _ in walk(content):
        # The settings in a recipe have separate tests.
        if place and not (name == "recipe.json" and place[0] == "recipe" and len(place) > 2):
            yield change(content, place)
            for value in RETYPED:
                yield change(content, place, value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_key_that_is_missing_or_of_another_type_is_damage(
    finished: Path, name: str, every: int
) -> None:
    path, (shape, commands) = finished / name, FILES[name]
    original = path.read_bytes()
    refusals: list[PracticumError] = []
    try:
        for content in islice(list_changes(name, load(original, name)), 0, None, every):
            write(path, content, original)
            try:
                read(path, shape)
                for command in commands:
                    command(finished)
            except PracticumError as error:
                refusals.append(error)
    finally:
        path.write_bytes(original)
    assert refusals or name == "doctor.json"
    for refusal in refusals:
        assert isinstance(refusal, CheckpointError), refusal
        assert name in str(refusal) and "\n" not in str(refusal)


@pytest.mark.parametrize("name", FILES)
def test_further_keys_at_every_level_are_left_out(finished: Path, name: str) -> None:
    path, (shape, commands) = finished / name, FILES[name]
    original = path.read_bytes()
    content = load(original, name)
    before = read(path, shape)
    # Maps of names have no further keys, and unknown settings of a recipe are refused on purpose.
    maps = {
        "identity",
        "by_domain",
        "drafts",
        "cost",
        "versions",
        "alarms",
        "lost_rows",
        "set",
        "scaling",
    }
    maps |= {"recipe", "notes", "judgements"}
    wider = json.loads(json.dumps(content))
    for place, part in walk(content):
        if (
            isinstance(part, dict)
            and not maps & set(place)
            and path.stem not in ("timings", "metrics")
        ):
            follow(wider, place)["added_later"] = {"x": [1]}
    try:
        write(path, wider, original)
        found = read(path, shape)
        for command in commands:
            command(finished)
    finally:
        path.write_bytes(original)
    if path.suffix == ".json" and name != "doctor.json":
        assert found == before


@pytest.mark.parametrize("name", ["before.json", "after.json", "summary.json", "recipe.json"])
def test_what_this_version_writes_is_read_whole(finished: Path, name: str) -> None:
    assert read_json(finished / name, FILES[name][0]) == json.loads((finished / name).read_bytes())


def test_the_list_of_files_is_complete(finished: Path) -> None:
    found = {path.name for path in finished.glob("*.json*")}
    assert found - {"report.html"} == FILES.keys()
    assert RunDir(finished).recipe_json.is_file()
