"""List the served models, the runs that trained them, and the checkpoints.

The catalogue changes nothing but the store, in which it deletes and copies checkpoints, and may be
used on any thread.
"""

import itertools
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from practicum.errors import CheckpointError, DataError
from practicum.models.digests import find_revision
from practicum.server.model_cache import ModelCache
from practicum.server.refusals import HttpRefusal
from practicum.server.requests import WeightsInfo
from practicum.server.store import CheckpointAddress, Store
from practicum.server.training import AdapterSpec, TrainingModel

Reply = dict[str, Any]


class Catalogue:
    """The answers that need no model; `models` are the service's models in training."""

    def __init__(
        self,
        shelf: ModelCache,
        store: Store,
        students: frozenset[str],
        models: Mapping[str, TrainingModel],
    ) -> None:
        self._shelf = shelf
        self._store = store
        self._students = students
        self._models = models

    @property
    def longest_context(self) -> int:
        """Return the largest context length of all models in tokens."""
        return self._shelf.longest_context

    def describe_models(self) -> Reply:
        """Return the served models with their abilities and revisions, and what serves them."""
        rows = []
        for name in self._shelf.served:
            loaded = self._shelf.peek(name)
            context = None if loaded is None else loaded.context_length
            abilities = {"trainable": name in self._students, "sampleable": True}
            revision = find_revision(str(self._shelf.served[name].model))
            about = {"model_name": name, "max_context_length": context, "revision": revision}
            rows.append({**about, **abilities})
        return {"supported_models": rows, "server": f"practicum {version('practicum')}"}

    def describe_weights(self, body: WeightsInfo) -> Reply:
        """Return the base model and the adapters of a checkpoint."""
        spec = AdapterSpec.from_json(self._store.read_state(body.tinker_path)["adapter"])
        return {
            "base_model": spec.base,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": False,
            "train_mlp": "mlp" in spec.parts,
            "train_attn": "attention" in spec.parts,
        }

    def get_run(self, run: str) -> Reply:
        """Return a run that is live or saved; raise `HttpRefusal` with 404 if it is neither."""
        described = self._find_run(run)
        if described is None:
            raise HttpRefusal(404, f"there is no training run {run!a:.120}")
        return described

    def list_runs(self) -> Reply:
        """Return all runs that are live or saved.

        A run that ends meanwhile without a checkpoint is left out.
        """
        names = sorted({*self._models, *self._store.list_runs()})
        rows = [row for name in names if (row := self._find_run(name)) is not None]
        return {"training_runs": rows, "cursor": _build_cursor(len(rows))}

    def list_checkpoints(self, run: str | None = None) -> Reply:
        """Return the checkpoints of one run, or of all."""
        runs = self._store.list_runs() if run is None else [run]
        rows = []
        for address, changed, size in itertools.chain(*map(self._store.list_checkpoints, runs)):
            expiry = self._store.read_expiry(address)
            row = {
                "checkpoint_id": f"{address.kind}/{address.name}",
                "checkpoint_type": "training" if address.kind == "weights" else "sampler",
                "time": changed.isoformat(),
                "tinker_path": str(address),
                "size_bytes": size,
                "expires_at": None if expiry is None else expiry.isoformat(),
            }
            rows.append(row)
        return {"checkpoints": rows, "cursor": _build_cursor(len(rows))}

    def count_checkpoints(self, runs: Iterable[str]) -> int:
        """Return the number of checkpoints of some runs together."""
        return sum(len(self._store.list_checkpoints(run)) for run in runs)

    def delete_checkpoint(self, run: str, kind: str, name: str) -> None:
        """Delete a checkpoint."""
        self._store.delete(_parse_address(run, kind, name))

    def set_lifetime(self, run: str, kind: str, name: str, seconds: int | None) -> None:
        """Let a checkpoint expire after `seconds`; None keeps it."""
        self._store.set_lifetime(_parse_address(run, kind, name), seconds)

    def copy(self, path: str, run: str, lifetime: int | None) -> Reply:
        """Copy a checkpoint into a new run."""
        state = self._store.read_state(path)
        source = CheckpointAddress.read(path)
        target = CheckpointAddress(f"{run}:train:0", source.kind, source.name)
        self._store.copy(source, target, lifetime)
        description = {**state["adapter"], "user_metadata": state["user_metadata"]}
        self._store.write_run(target.run, description)
        return {"tinker_path": str(target)}

    def check_served(self, name: str) -> None:
        """Raise `HttpRefusal` with 404 if no model has the name."""
        if name not in self._shelf.served:
            raise HttpRefusal(
                404,
                f"no model {name!a:.120} is served here; there are {', '.join(self._shelf.served)}",
            )

    def check_student(self, name: str) -> None:
        """Raise `HttpRefusal` if no model has the name or it may not be trained."""
        self.check_served(name)
        if name not in self._students:
            raise HttpRefusal(
                400,
                f"{name} only samples and scores here; to be trained are {', '.join(sorted(self._students))}",
            )

    def _find_run(self, run: str) -> Reply | None:
        model = self._models.get(run)
        if model is not None:
            described, last_request = model.describe(), datetime.now(UTC)
        elif (saved := self._store.read_run(run)) is not None:
            described, last_request = saved
        else:
            return None
        return {
            "training_run_id": run,
            "base_model": described["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": described["rank"],
            "last_request_time": last_request.isoformat(),
            "user_metadata": described["user_metadata"],
        }


def _parse_address(run: str, kind: str, name: str) -> CheckpointAddress:
    """Return the address of a checkpoint.

    A malformed one raises CheckpointError, as there is no checkpoint with that address.
    """
    try:
        return CheckpointAddress.read(f"tinker://{run}/{kind}/{name}")
    except DataError as error:
        raise CheckpointError(str(error)) from error


def _build_cursor(count: int) -> Reply:
    return {"offset": 0, "limit": count, "total_count": count}
