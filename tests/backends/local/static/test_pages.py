"""Weights that were released to the operating system are read again, unchanged, at the next access."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from practicum.backends.local.pages import page_out


def read_file_memory() -> int:
    """Return the KiB that mapped files take of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this advice")
def test_mapped_weights_leave_memory_and_come_back_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    rows = torch.arange(2**13)[:, None].expand(-1, 2**10).contiguous().float()
    save_file({"weight": rows, "odd": torch.ones(3)}, path)
    with safe_open(path, framework="pt") as file:
        weight, odd = file.get_tensor("weight"), file.get_tensor("odd")
    weight.sum()
    before = read_file_memory()
    # Also computed weights, and one that is smaller than a page.
    computed = torch.ones(2**20)
    page_out([weight, odd, computed])
    assert before - read_file_memory() > 24 * 1024
    assert weight[5000, 7] == 5000
    assert before - read_file_memory() > 24 * 1024, "a row is read without its neighbours"
    assert weight.equal(rows) and odd.equal(torch.ones(3)) and computed.sum() == 2**20
