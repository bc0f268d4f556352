"""A model's parameters are counted in the headers of its files, or read from its name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from practicum.models.size import LONGEST_HEADER, count_parameters


def test_the_parameters_of_all_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, folder / "model-1.safetensors")
    save_file({"c": torch.zeros(())}, folder / "model-2.safetensors")
    assert count_parameters("Qwen3-8B", tmp_path)[0] == 18, "files count more than the name"
    assert count_parameters(str(folder), Path("/"))[0] == 18


def test_an_adapter_has_the_size_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"})
    )
    save_file({"a": torch.zeros(3)}, tmp_path / "adapter_model.safetensors")
    assert count_parameters(str(tmp_path), Path())[0] == 600_000_000


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m-instruct", 135e6),
        ("qwen2.5-coder-1.5b-instruct", 1.5e9),
        ("Qwen/Qwen3-0.6B", 0.6e9),
        ("meta-llama/Llama-3.1-8B-Instruct", 8e9),
        ("google/gemma-3-270m-it", 270e6),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("7B/Mistral", None),
        ("org/phi-4", None),
        ("org/model-4bit", None),
    ],
)
def test_the_size_in_a_name_is_read(name: str, parameters: float | None) -> None:
    assert count_parameters(name, Path())[0] == parameters


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x04\0\0\0\0\0\0\0nope",
        (LONGEST_HEADER + 1).to_bytes(8, "little"),
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x0b\0\0\0\0\0\0\0{"a": null}',
    ],
)
def test_a_broken_file_has_no_size(content: bytes, tmp_path: Path) -> None:
    """Check that it is refused where it is loaded, with the reason."""
    (tmp_path / "model.safetensors").write_bytes(content)
    assert count_parameters(str(tmp_path), Path())[0] is None
