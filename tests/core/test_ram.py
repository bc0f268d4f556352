"""The memory of the machine or of its container."""

from pathlib import Path

import pytest

from practicum.core import ram


def test_a_container_has_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "CGROUP", tmp_path)
    machine = ram.read_total_memory()
    assert machine > 1 << 20 and ram.read_free_memory() > 0, "no cgroup: the machine's"
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert (ram.read_total_memory(), ram.read_free_memory()) == (5000, 3000)
    (tmp_path / "memory.max").write_text("max\n")
    assert ram.read_total_memory() == machine, "a cgroup without a limit"
