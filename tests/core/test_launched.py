"""A line of all processes of a launch is printed once; two different lines are tested in tests/backends/test_torchrun.py."""

import socket

import pytest

from practicum.core import launched
from practicum.core.launched import is_first_message


def test_a_launcher_that_is_gone_keeps_no_process_from_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launched, "SECONDS", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert is_first_message("a line")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(unused.getsockname()[1]))
        assert is_first_message("a line")
