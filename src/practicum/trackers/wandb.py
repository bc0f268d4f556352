"""Weights & Biases: online if a key is set, otherwise offline; it never prompts for a key.

`wandb sync` uploads an offline run.
"""

import netrc
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal

from pydantic import Field

from practicum.trackers import Tracker, TrackerContext, import_client, translate_failures
from practicum.types import FrozenConfig

HOST = "api.wandb.ai"


class Config(FrozenConfig):
    """The project of the run. The key stays in `WANDB_API_KEY` or ~/.netrc."""

    type: Literal["wandb"] = "wandb"
    project: str = "practicum"
    entity: str | None = Field(default=None, description="user or team; none: the key's default")
    group: str | None = None
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="none: WANDB_MODE, else online if a key is set, else offline"
    )


class Wandb:
    """One run of Weights & Biases; see `Tracker`."""

    def __init__(self, config: Config, context: TrackerContext, module: Any) -> None:
        self._config = config
        self._context = context
        self._wandb = module
        self._run: Any = None
        self._finished = False

    def begin(self, first_step: int) -> int:
        """Start or continue the run of this id, without code, git, terminal or machine metrics."""
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        with self._translate_failures("the run cannot begin", advice="; set tracking.mode=offline"):
            self._run = self._wandb.init(
                project=self._config.project,
                entity=self._config.entity,
                group=self._config.group,
                name=self._context.run,
                id=self._context.id,
                dir=str(self._context.run_dir),
                mode=_choose_mode(self._config),
                resume="allow",
                config=dict(self._context.settings),
                settings=settings,
            )
        # A killed offline run loses unwritten rows and starts again at step 0, so a resume sends
        # every step again under the same id; the service keeps a step that arrives twice only once.
        return max(int(self._run.starting_step) - 1, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics as one row of history."""
        with self._translate_failures(f"step {step} cannot be sent"):
            self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, float], verdict: str) -> None:
        """Send the final numbers and the verdict as the run's summary."""
        with self._translate_failures("the summary cannot be sent"):
            self._run.summary.update({**summary, "final/verdict": verdict})
        self._finished = True

    def close(self) -> None:
        """End the run, as failed if it was stopped."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._finished else 1)

    def _translate_failures(self, message: str, advice: str = "") -> AbstractContextManager[None]:
        return translate_failures(f"wandb: {message}", self._wandb.Error, OSError, advice=advice)


def build(config: Config, context: TrackerContext) -> Tracker:
    """Import wandb without its error reports, and build the tracker."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return Wandb(config, context, import_client("wandb"))


def _choose_mode(config: Config) -> str:
    """Return the mode of the recipe, else of the environment, else online if a key is set."""
    return config.mode or os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(HOST) is not None
    return False
