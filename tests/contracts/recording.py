"""A tracker that records its calls, for the tests of every tracker's calls."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from practicum.errors import ResourceError
from practicum.trackers import Tracker, TrackerContext


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["tests.contracts.recording"] = "tests.contracts.recording"
    path: str
    holds: int = 0
    fails_at: int | None = None


class Recording:
    def __init__(self, config: Config, context: TrackerContext) -> None:
        self._config = config
        self._context = context

    def begin(self, first_step: int) -> int:
        settings = dict(self._context.settings)
        self._write(
            "begin",
            {
                "first": first_step,
                "id": self._context.id,
                "run": self._context.run,
                "settings": settings,
            },
        )
        return self._config.holds

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._config.fails_at:
            raise ResourceError("recording: the service is gone")
        self._write("log", {"step": step, "metrics": dict(metrics)})

    def finish(self, summary: Mapping[str, float], verdict: str) -> None:
        self._write("finish", {**summary, "verdict": verdict})

    def close(self) -> None:
        self._write("close", {})

    def _write(self, call: str, content: Mapping[str, object]) -> None:
        with Path(self._config.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, **content}, allow_nan=False) + "\n")


def build(config: Config, context: TrackerContext) -> Tracker:
    return Recording(config, context)
