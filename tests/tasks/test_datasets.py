"""Hugging Face datasets as their own package writes them, and datasets that cannot be loaded."""

import sys
from pathlib import Path
from typing import Any

import pytest

from practicum.core.notes import show_notes
from practicum.errors import DataError
from practicum.ports import Task, TaskContext
from practicum.tasks.datasets import Config, build
from practicum.types import Message

datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(12)]
COLUMNS = {"prompt": "question"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def task(folder: Path, notes: list[str] | None = None, **settings: Any) -> Task:
    config = Config.model_validate({"verifier": "number", "columns": COLUMNS, **settings})
    with show_notes([].append if notes is None else notes.append):
        return build(config, TaskContext(0, folder, folder / "rejected.jsonl"))


def save(folder: Path) -> None:
    train, test = datasets.Dataset.from_list(ROWS[:8]), datasets.Dataset.from_list(ROWS[8:])
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(folder / "splits"))
    train.save_to_disk(str(folder / "one"))
    (folder / "files").mkdir()
    train.to_json(str(folder / "files" / "train.jsonl"))
    test.to_json(str(folder / "files" / "test.jsonl"))
    train.to_csv(str(folder / "rows.csv"))
    train.to_parquet(str(folder / "rows-0.parquet"))
    test.to_parquet(str(folder / "rows-1.parquet"))


def test_saved_datasets_and_data_files_are_read(tmp_path: Path) -> None:
    save(tmp_path)
    for settings, train, heldout in [
        ({"path": "splits", "heldout": "test"}, 8, 4),
        ({"path": "splits", "split": "test", "heldout": 1}, 3, 1),
        ({"path": "one", "heldout": 2}, 6, 2),
        ({"path": "files", "heldout": "test"}, 8, 4),
        ({"path": "rows.csv", "heldout": 0}, 8, 0),
        ({"path": "rows-*.parquet", "heldout": 0}, 12, 0),
    ]:
        built = task(tmp_path, **settings)
        assert (len(built.train_prompts()), len(built.heldout_prompts())) == (train, heldout)
        prompt = built.train_prompts()[0]
        assert prompt.messages[0].content.startswith("What is ") and "####" in (prompt.answer or "")


def test_rows_of_a_dataset_are_read_as_those_of_files(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(
        DataError, match=r"one\[train\]: all of its .*write columns: \{prompt: question\}"
    ):
        task(tmp_path, path="one", columns={})
    rows = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "turns"))
    notes: list[str] = []
    (prompt,) = task(tmp_path, notes, path="turns", columns={}, heldout=0).train_prompts()
    assert (prompt.messages, prompt.response) == ((Message("user", "q"),), "a")
    assert notes == ["turns[train]: read as rows of ShareGPT"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "splits", "split": "dev"}, "no split 'dev'; it has: train, test"),
        ({"path": "one", "heldout": "test"}, "no split 'test'; it has: train; a number or share"),
        ({"path": "./missing"}, "no such folder or file, and './missing' is no hub name"),
        ({"path": "files/*.txt"}, "no such folder or file"),
        ({"path": "rows.xls"}, "end its name in one of .arrow, .csv"),
        ({"path": "rows.csv", "split": "dev"}, "split 'dev' cannot be loaded"),
        ({"path": "empty"}, "split 'train' cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save(tmp_path)
    (tmp_path / "rows.xls").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message) as refusal:
        task(tmp_path, **settings)
    assert len(str(refusal.value).splitlines()) == 1
    config = Config.model_validate({"columns": COLUMNS, **settings})
    (problem,) = config.find_problems(tmp_path)
    assert problem == str(refusal.value)


def test_a_hub_name_is_asked_for_by_a_run_and_not_by_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, split: str) -> Any:
        asked.append((path, name, split))
        if path == "nobody/nothing":
            raise ConnectionError("Couldn't reach\nthe Hub")
        return datasets.Dataset.from_list(ROWS[:8] if split == "train" else ROWS[8:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = Config(path="openai/gsm8k", name="main", heldout="test", columns=COLUMNS)
    assert config.find_problems(tmp_path) == [] and asked == []
    assert len(task(tmp_path, **config.model_dump()).heldout_prompts()) == 4
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    with pytest.raises(DataError, match=r"ConnectionError: Couldn't reach the Hub\); check task.p"):
        task(tmp_path, path="nobody/nothing")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError,
        match=r"needs the package datasets; in the checkout of practicum, run: pip install -e '\.\[datasets\]'",
    ):
        task(tmp_path, path="x/y")
