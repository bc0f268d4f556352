"""MLflow: a tracking server or a local file next to the run folders; `mlflow ui` shows it."""

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from practicum.trackers import Tracker, TrackerContext, import_client, translate_failures
from practicum.types import FrozenConfig

TAG = "practicum.id"
"""The tag by which a resumed run finds its MLflow run."""

STEP_METRIC = "tokens"
"""A metric that every step has."""

MAX_PARAM_CHARS = 500
"""The maximum length of a parameter that every MLflow store accepts."""

MAX_PARAMS = 100
"""The maximum number of parameters per request."""


class Config(FrozenConfig):
    """The server and the experiment.

    User and password stay in `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`.
    """

    type: Literal["mlflow"] = "mlflow"
    experiment: str = "practicum"
    uri: str | None = Field(
        default=None,
        description="none: MLFLOW_TRACKING_URI, else `mlflow.db` next to the run folder",
    )

    @field_validator("uri")
    @classmethod
    def _has_no_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "holds a password; "
                "set MLFLOW_TRACKING_PASSWORD instead, because recipes are saved and shown"
            )
        return uri


class MLflow:
    """One run of MLflow; see `Tracker`."""

    def __init__(self, config: Config, context: TrackerContext, module: Any) -> None:
        local = f"sqlite:///{context.run_dir.parent / 'mlflow.db'}"
        self._mlflow = module
        self._context = context
        self._experiment = config.experiment
        self._uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or local
        self._client: Any = None
        self._run = ""
        self._finished = False

    def begin(self, first_step: int) -> int:
        """Find the run by its tag, or create it with the recipe as its parameters."""
        with self._translate_failures("the run cannot begin"):
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            experiment = self._client.get_experiment_by_name(self._experiment)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self._experiment)
            )
            runs = self._client.search_runs(
                [experiment_id], f"tags.`{TAG}` = '{self._context.id}'", max_results=1
            )
            if runs:
                self._run = runs[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
                history = self._client.get_metric_history(self._run, STEP_METRIC)
                return max((point.step for point in history), default=0)
            created = self._client.create_run(
                experiment_id, run_name=self._context.run, tags={TAG: self._context.id}
            )
            self._run = created.info.run_id
            params = [
                self._mlflow.entities.Param(key, str(value)[:MAX_PARAM_CHARS])
                for key, value in self._context.settings.items()
            ]
            # A resolved recipe can have more keys than one request may send.
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run, params=params[start : start + MAX_PARAMS])
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step as one batch."""
        timestamp = int(time.time() * 1000)
        batch = [
            self._mlflow.entities.Metric(name, value, timestamp, step)
            for name, value in metrics.items()
        ]
        with self._translate_failures(f"step {step} cannot be sent"):
            self._client.log_batch(self._run, metrics=batch)

    def finish(self, summary: Mapping[str, float], verdict: str) -> None:
        """Send the final numbers as metrics of step 0, and the verdict as a tag."""
        self.log(0, summary)
        with self._translate_failures("the verdict cannot be sent"):
            self._client.set_tag(self._run, "practicum.verdict", verdict)
        self._finished = True

    def close(self) -> None:
        """End the run, with the status KILLED if it was stopped."""
        if not self._run:
            return
        status = "FINISHED" if self._finished else "KILLED"
        with self._translate_failures("the run cannot end"):
            self._client.set_terminated(self._run, status=status)

    def _translate_failures(self, message: str) -> AbstractContextManager[None]:
        failures = self._mlflow.exceptions.MlflowException, OSError
        advice = "; look at tracking.uri and the server"
        return translate_failures(f"mlflow: {message}", *failures, advice=advice)


def build(config: Config, context: TrackerContext) -> Tracker:
    """Import MLflow without its telemetry, and build the tracker."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return MLflow(config, context, import_client("mlflow"))
