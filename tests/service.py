"""Our own service on a port of this machine, in a thread, for tests of its clients."""

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from toy import rows

from practicum.core.notes import show_notes
from practicum.models.config import ModelConfig

pytest.importorskip("tinker")
pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""The package asks for its settings through a connection that it never closes."""


@dataclass
class Served:
    """A service of the models `student` and `teacher`; it can be stopped and restarted at the same address."""

    models: Path
    out: Path
    token: str | None = None
    said: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, **names: Path) -> None:
        """Listen; `names` serve other folders under a name."""
        folders = {"student": self.models / "student", "teacher": self.models / "teacher", **names}
        served = {
            name: ModelConfig(model=str(folder), device="cpu") for name, folder in folders.items()
        }
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._server = None
        self._thread = threading.Thread(target=self._run, args=(served,), daemon=True)
        self._thread.start()
        while self._server is None or not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def _run(self, served: Mapping[str, ModelConfig]) -> None:
        """Serve until told to stop, in a separate thread, which only receives the notes of the service."""
        from practicum.core.access import Admission
        from practicum.server.app import build_app
        from practicum.server.model_cache import ModelCache
        from practicum.server.service import Service
        from practicum.server.store import Store

        with show_notes(self.said.append):
            self.service = Service(ModelCache(served, None), Store(self.out), frozenset(served))
            config = uvicorn.Config(
                build_app(self.service, Admission(self.token)),
                log_config=None,
                log_level="error",
                timeout_graceful_shutdown=1,
                lifespan="on",
            )
            self._server = uvicorn.Server(config)
            self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Stop listening; trained weights are saved, as `practicum serve` does when it is told to stop."""
        self._server.should_exit = True
        self._thread.join(30)
        self._listener.close()


def assert_same_but_rounding(one: Path, other: Path) -> None:
    """Assert that two runs drew the same tokens and learned the same: a service's batches only change the last digits."""
    mine, theirs = rows(one / "rollouts.jsonl"), rows(other / "rollouts.jsonl")
    assert [row["tokens"] for row in mine] == [row["tokens"] for row in theirs]
    for row, twin in zip(rows(one / "metrics.jsonl"), rows(other / "metrics.jsonl"), strict=True):
        assert row == pytest.approx(twin, rel=1e-4, abs=1e-6)


@contextlib.contextmanager
def serving(models: Path, out: Path, token: str | None = None) -> Iterator[Served]:
    """Run a service until the block ends."""
    served = Served(models, out, token)
    served.start()
    try:
        yield served
    finally:
        served.stop()
        gc.collect()  # leftovers of the package are found now, within the test that used it
