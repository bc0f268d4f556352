"""Trackio: a local database with a dashboard, in `TRACKIO_DIR`; `trackio show` opens it."""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any, Literal

from practicum.errors import ResourceError
from practicum.text import excerpt
from practicum.trackers import Tracker, TrackerContext, import_client
from practicum.types import FrozenConfig


class Config(FrozenConfig):
    """The project in the database."""

    type: Literal["trackio"] = "trackio"
    project: str = "practicum"


class Trackio:
    """One run of trackio; see `Tracker`."""

    def __init__(self, config: Config, context: TrackerContext, module: Any) -> None:
        self._trackio = module
        self._project = config.project
        # Trackio identifies a run by its name, so the name includes the id.
        self._name = f"{context.run}-{context.id[:8]}"
        self._settings = dict(context.settings)
        self._run: Any = None
        self._last_step = 0

    def begin(self, first_step: int) -> int:
        """Start or continue the run of this name, without machine metrics."""
        try:
            is_known = self._is_known()
            # Trackio prints a banner, which would break our JSON lines output.
            with redirect_stdout(io.StringIO()):
                self._run = self._trackio.init(
                    self._project,
                    name=self._name,
                    config=self._settings,
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except (OSError, ValueError) as error:
            raise ResourceError(f"trackio: the run cannot begin ({excerpt(str(error))})") from error
        return first_step - 1 if is_known else 0

    def _is_known(self) -> bool:
        try:
            return any(run.name == self._name for run in self._trackio.Api().runs(self._project))
        except ValueError:  # no such project yet
            return False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics as one row."""
        self._last_step = step
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, float], verdict: str) -> None:
        """Write the final numbers and the verdict as another row of the last step."""
        self._run.log({**summary, "final/verdict": verdict}, step=self._last_step)

    def close(self) -> None:
        """Wait until every row is in the database."""
        if self._run is not None:
            with redirect_stdout(io.StringIO()):
                self._trackio.finish()


def build(config: Config, context: TrackerContext) -> Tracker:
    """Import trackio and build the tracker."""
    return Trackio(config, context, import_client("trackio"))
