import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from practicum.errors import ModelError
from practicum.models import digests as model_files
from practicum.models.digests import compute_fingerprint, digest_model, record_model
from practicum.models.files import digest_file

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
    """Make a folder with every file that shapes a model, and some that do not."""
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


def rewrite(path: Path, text: str) -> None:
    """Replace a file by one with the size and the modification time of the earlier one."""
    status = path.stat()
    other = path.with_name("other")
    other.write_text(text)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)
    assert path.stat().st_size == status.st_size, "the text has another length"


def test_every_file_that_is_replaced_added_or_removed_is_refused_by_name(folder: Path) -> None:
    record = record_model(str(folder))
    for thorough in (True, False):
        record.check(thorough=thorough)
    # Without its config, the folder would count as an adapter.
    for name in SHAPING - {"config.json"}:
        path = folder / name
        rewrite(path, name.upper())
        for thorough in (True, False):
            with pytest.raises(
                ModelError, match=rf"{name} has SHA-256 \w{{12}} instead of \w{{12}}"
            ):
                record.check(thorough=thorough)
        path.unlink()
        with pytest.raises(
            ModelError, match=f"{name} is missing, so the model differs from the model that"
        ):
            record.check(thorough=False)
        path.write_text(name)
        record.check(thorough=False)
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"vocab.json is new, so .*; restore the earlier files, or"
    ):
        record.check(thorough=True)


def test_a_restart_reads_only_files_whose_stamp_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, read = record_model(str(folder)), list[str]()

    def digest(path: Path) -> str:
        read.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(model_files, "digest_file", digest)
    record.check(thorough=False)
    assert not read
    # The same content in another file, as after a copy to another machine.
    rewrite(folder / "merges.txt", "merges.txt")
    record.check(thorough=False)
    assert read == ["merges.txt"]
    # Content of the same size written into the file itself, which changes its time.
    (folder / "config.json").write_text("CONFIG.JSON")
    with pytest.raises(ModelError, match=r"config\.json has SHA-256"):
        record.check(thorough=False)


def test_processes_of_a_machine_divide_the_files_and_miss_none(folder: Path) -> None:
    record = record_model(str(folder))
    for name in SHAPING:
        status = (folder / name).stat()
        (folder / name).write_text(name.upper())
        os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        seen = 0
        for index in range(3):
            try:
                record.check(thorough=True, share=(index, 3))
            except ModelError:
                seen += 1
        assert seen == 1, name
        (folder / name).write_text(name)


def test_files_that_change_while_they_are_recorded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(path: Path) -> str:
        path.write_text("still being written")
        return digest_file(path)

    monkeypatch.setattr(model_files, "digest_file", digest)
    with pytest.raises(ModelError, match="its files changed while they were read; wait until"):
        record_model(str(folder))


def test_a_hub_model_is_held_to_the_commit_of_its_first_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = ["5d0a"]
    monkeypatch.setattr(
        model_files,
        "snapshot_download",
        lambda name, **_: str(tmp_path / "snapshots" / commits[-1]),
    )
    first = record_model("Qwen/Qwen3-0.6B")
    assert not first.digests, "the first load decides on the commit"
    record = first.confirm()
    assert record.digests == {"commit": "Qwen/Qwen3-0.6B@5d0a"}
    assert record.confirm() == record
    commits.append("77be")
    with pytest.raises(ModelError, match=r"commit is Qwen/Qwen3-0.6B@77be instead of .*@5d0a"):
        record.confirm()
    with pytest.raises(ModelError, match=r"in one process and Qwen/Qwen3-0.6B@5d0a in another"):
        record.require_equal([first.confirm()])
