import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from practicum.models import digests as model_files
from practicum.models.digests import compute_fingerprint, digest_model

SHAPING = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "modeling_own.py",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every file that shapes a model, and some that do not."""
    for name in (*SHAPING, "README.md", "optimizer.pt", "notes.txt", "logs/tokenizer.json"):
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "model"


def test_every_file_that_shapes_a_model_has_a_digest_of_its_own(folder: Path) -> None:
    digests = digest_model(str(folder))
    assert digests.keys() == SHAPING
    assert len(set(digests.values())) == len(SHAPING)
    (folder / "merges.txt").write_text("other")
    changed = digest_model(str(folder))
    assert [name for name in digests if digests[name] != changed[name]] == ["merges.txt"]


def test_how_a_model_reads_does_not_depend_on_its_weights(folder: Path) -> None:
    left_out = SHAPING - digest_model(str(folder), weights=False).keys()
    assert left_out == {"model-00001-of-00002.safetensors", "adapter_model.safetensors"}


def test_a_fingerprint_is_of_the_content_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert compute_fingerprint(str(copy)) == compute_fingerprint(str(folder))
    (copy / "config.json").write_text("other")
    assert compute_fingerprint(str(copy)) != compute_fingerprint(str(folder))


def test_a_hub_name_stands_for_the_commit_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter(["5d0a", "77be"])
    monkeypatch.setattr(
        model_files,
        "snapshot_download",
        lambda name, **_: str(tmp_path / "snapshots" / next(commits)),
    )
    assert digest_model("Qwen/Qwen3-0.6B") == {"commit": "Qwen/Qwen3-0.6B@5d0a"}
    assert digest_model("Qwen/Qwen3-0.6B") == {"commit": "Qwen/Qwen3-0.6B@77be"}


@pytest.mark.parametrize("name", ["nobody/not-there", "base of a service (rank 16)"])
def test_what_is_neither_a_folder_nor_in_the_cache_is_known_by_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: str, **__: object) -> str:
        raise LocalEntryNotFoundError("not in the cache")

    if "/" in name:
        monkeypatch.setattr(model_files, "snapshot_download", nothing)
    assert digest_model(name) == {"name": name}
