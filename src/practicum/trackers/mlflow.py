"""MLflow: a tracking server, or without one a file beside the run folders; `mlflow ui` shows it."""

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from practicum.trackers import Tracker, TrackerContext, client, telling

TAG = "practicum.id"
"""The tag by which a resumed run finds itself again."""

EVERY_STEP = "tokens"
"""A metric that every step has."""

LONGEST = 500
"""Characters of a recipe's value that every store takes."""


class Config(BaseModel):
    """Which server and experiment. User and password stay in `MLFLOW_TRACKING_USERNAME` and `_PASSWORD`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["mlflow"] = "mlflow"
    experiment: str = "practicum"
    uri: str | None = Field(
        default=None,
        description="none: MLFLOW_TRACKING_URI, else `mlflow.db` beside the run folder",
    )

    @field_validator("uri")
    @classmethod
    def _has_no_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "holds a password; write it into MLFLOW_TRACKING_PASSWORD, since recipes are saved and shown"
            )
        return uri


class MLflow:
    """One run of MLflow; see `Tracker`."""

    def __init__(self, config: Config, context: TrackerContext, module: Any) -> None:
        local = f"sqlite:///{context.home.parent / 'mlflow.db'}"
        self._mlflow = module
        self._context = context
        self._experiment = config.experiment
        self._uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or local
        self._client: Any = None
        self._run = ""
        self._finished = False

    def begin(self, first_step: int) -> int:
        """Find the run with our tag, or create it with the recipe as its parameters."""
        with self._telling("the run cannot begin"):
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            experiment = self._client.get_experiment_by_name(self._experiment)
            number = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self._experiment)
            )
            found = self._client.search_runs(
                [number], f"tags.`{TAG}` = '{self._context.id}'", max_results=1
            )
            if found:
                self._run = found[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
                return max(
                    (
                        point.step
                        for point in self._client.get_metric_history(self._run, EVERY_STEP)
                    ),
                    default=0,
                )
            created = self._client.create_run(
                number, run_name=self._context.run, tags={TAG: self._context.id}
            )
            self._run = created.info.run_id
            params = [
                self._mlflow.entities.Param(key, str(value)[:LONGEST])
                for key, value in self._context.settings.items()
            ]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._run, params=params[start : start + 100])
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One batch of metrics."""
        now = int(time.time() * 1000)
        batch = [
            self._mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()
        ]
        with self._telling(f"step {step} cannot be sent"):
            self._client.log_batch(self._run, metrics=batch)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Metrics of the whole run."""
        self.log(0, summary)
        self._finished = True

    def close(self) -> None:
        """End the run, as killed where it was stopped."""
        if not self._run:
            return
        with self._telling("the run cannot end"):
            self._client.set_terminated(
                self._run, status="FINISHED" if self._finished else "KILLED"
            )

    def _telling(self, what: str) -> AbstractContextManager[None]:
        failures = self._mlflow.exceptions.MlflowException, OSError
        return telling(f"mlflow: {what}", *failures, advice="; look at tracking.uri and the server")


def build(config: Config, context: TrackerContext) -> Tracker:
    """Find the package, with its own reports switched off."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return MLflow(config, context, client("mlflow"))
