"""Faults that `practicum serve` finds before it reports that it is ready."""

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from practicum.errors import ModelError, ResourceError
from practicum.server.serving import ServerOptions, serve


@pytest.mark.parametrize("options", [("nobody/nothing",), ("x=nobody/nothing",)])
def test_a_hub_name_that_does_not_exist_is_refused_before_the_address_is_taken(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    served = ServerOptions([str(models / "student")], options, out=tmp_path / "served", port=0)
    with pytest.raises(ModelError, match="no folder, and the hub gave") as caught:
        serve(served)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("nobody/nothing: ")
    assert not (tmp_path / "served").exists()


def test_a_folder_that_is_there_comes_as_far_as_the_address(models: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServerOptions([str(models / "student")], out=tmp_path / "served", port=port)
        with pytest.raises(ResourceError, match="cannot be served on"):
            serve(options)
