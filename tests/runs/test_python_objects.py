"""Python objects that a user has: models with tokenizers, lists of dicts, datasets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toy import TASK, make_model, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import practicum
from practicum.errors import DataError, RecipeError
from practicum.runs import RunResult, open_student

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


def read(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


ROWS = [
    {"prompt": text, "answer": text[::-1]}
    for text in ("ab", "abc", "bc", "bcd", "cd", "cda", "da", "dab", "ac", "bd")
]


@pytest.fixture
def distill(models: Path, tmp_path: Path) -> Callable[..., RunResult]:
    """Call `practicum.distill` with a tiny run as the default."""

    def call(**changes: Any) -> RunResult:
        sections = {
            "student": str(models / "student"),
            "teacher": str(models / "teacher"),
            "task": TASK,
            "train": {"steps": 2, "prompts_per_step": 4, "threads": 1},
            "rollout": {"max_new_tokens": 4},
            "evaluation": {"prompts": 0},
            "out": tmp_path,
        }
        return practicum.distill(**{**sections, **changes})

    return call


def bytes_of(result: RunResult) -> bytes:
    return (result.folder / "metrics.jsonl").read_bytes()


def test_paths_and_objects_give_the_bytes_of_sections(
    models: Path, distill: Callable[..., RunResult]
) -> None:
    sections = distill(
        student={"model": str(models / "student")},
        teacher={"type": "model", "model": str(models / "teacher")},
        name="sections",
    )
    texts = distill(name="texts")
    paths = distill(student=models / "student", teacher=models / "teacher", name="paths")
    student, tokenizer = read(models / "student")
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    objects = distill(
        student={"model": (student, tokenizer)}, teacher=read(models / "teacher"), name="objects"
    )
    assert bytes_of(sections) == bytes_of(texts) == bytes_of(paths) == bytes_of(objects)
    assert all(torch.equal(weight, before[name]) for name, weight in student.state_dict().items())
    assert not any(parameter.grad is not None for parameter in student.parameters())


def test_a_run_of_objects_is_a_run_like_any_other(
    models: Path, tmp_path: Path, distill: Callable[..., RunResult]
) -> None:
    pair, wrong = read(models / "student"), read(models / "teacher")
    task = {"type": "jsonl", "path": ROWS, "heldout": ROWS[:2], "verifier": "exact"}
    result = distill(student=pair, task=task, evaluation={"prompts": 2})
    saved = json.loads((result.folder / "recipe.json").read_text())
    copy = Path(saved["recipe"]["student"]["model"])
    assert copy.parent == tmp_path / "distill.inputs"
    assert "student/model.safetensors" in saved["identity"]
    assert rows(Path(saved["recipe"]["task"]["path"])) == ROWS
    assert practicum.evaluate(result.folder)["prompts"] == 2
    open_student(result.folder)
    (result.folder / "summary.json").unlink()
    again = distill(student=pair, task=task, evaluation={"prompts": 2}, resume=True)
    assert again.summary == result.summary
    assert len(list((tmp_path / "distill.inputs").iterdir())) == 3
    with pytest.raises(RecipeError, match=r"student\.model: .* in the run, .* now"):
        distill(student=wrong, task=task, evaluation={"prompts": 2}, resume=True)
    with pytest.raises(RecipeError, match=r"task\.path: .* in the run, .* now"):
        distill(
            student=pair, task={**task, "path": ROWS[1:]}, evaluation={"prompts": 2}, resume=True
        )


def test_a_peft_model_is_a_student_and_a_teacher(
    models: Path, distill: Callable[..., RunResult]
) -> None:
    model, tokenizer = read(models / "student")
    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = (get_peft_model(model, settings), tokenizer)
    result = distill(
        student={"model": adapted, "lora": {"rank": 2, "alpha": 8}},
        teacher=adapted,
        train={"steps": 1},
    )
    assert (
        "student/base/config.json"
        in json.loads((result.folder / "recipe.json").read_text())["identity"]
    )


@pytest.mark.parametrize("kind", ["list", "iterator", "dataset"])
def test_rows_are_a_task(distill: Callable[..., RunResult], kind: str) -> None:
    if kind == "dataset":
        datasets = pytest.importorskip("datasets")
        given: Any = datasets.Dataset.from_list(ROWS)
    else:
        given = ROWS if kind == "list" else iter(ROWS)
    result = distill(task=given)
    saved = json.loads((result.folder / "recipe.json").read_text())["recipe"]["task"]
    assert saved["type"] == "jsonl"
    assert rows(Path(saved["path"])) == ROWS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no rows; an iterator that was used before"),
        (["ab"], "row 1 is of type str; give mappings"),
        ([ROWS[0], {"prompt": object()}], "row 2 cannot be written as JSON .*type object"),
        ([{"prompt": "a", "answer": float("nan")}], "row 1 cannot be written as JSON"),
    ],
    ids=["empty", "texts", "object", "nan"],
)
def test_rows_that_no_file_can_hold_are_refused_by_number(
    distill: Callable[..., RunResult], tmp_path: Path, given: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        distill(task=given)
    assert not list((tmp_path / "distill.inputs").iterdir())


def test_objects_that_are_no_models_are_refused_before_anything_is_written(
    models: Path, tmp_path: Path, distill: Callable[..., RunResult]
) -> None:
    model, tokenizer = read(models / "student")
    with pytest.raises(RecipeError, match=r"student=\(model, tokenizer\)"):
        distill(student=model)
    with pytest.raises(RecipeError, match=r"teacher: an object of type int is not accepted; give"):
        distill(teacher=3)
    with pytest.raises(RecipeError, match="objective"):
        distill(student=(model, tokenizer), objective={"divergenc": "jsd(0.1)"})
    assert not list(tmp_path.iterdir())
