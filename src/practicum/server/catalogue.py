"""What there is: the models that are served, the runs that trained them, and the checkpoints that are kept.

It changes nothing but the store, where a checkpoint is deleted, and may be asked on any thread.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from practicum.errors import CheckpointError, DataError
from practicum.server.refusals import HttpRefusal
from practicum.server.shelf import ModelCache
from practicum.server.store import CheckpointAddress, Store
from practicum.server.training import AdapterSpec, TrainingModel

Reply = dict[str, Any]


class Catalogue:
    """Answers what can be asked without a model; `models` are those in training, and belong to the service."""

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
        """How many tokens the longest text has that one of the models reads."""
        return self._shelf.longest_context

    def capabilities(self) -> Reply:
        """The models, and what can be done with them."""
        rows = []
        for name in self._shelf.served:
            loaded = self._shelf.known(name)
            context = None if loaded is None else loaded.context_length
            trainable = name in self._students
            rows.append(
                {
                    "model_name": name,
                    "max_context_length": context,
                    "trainable": trainable,
                    "sampleable": True,
                }
            )
        return {"supported_models": rows}

    def weights_info(self, path: str) -> Reply:
        """What a checkpoint was saved from."""
        spec = AdapterSpec.of_data(self.saved(path)["adapter"])
        return {
            "base_model": spec.base,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": False,
            "train_mlp": "mlp" in spec.parts,
            "train_attn": "attention" in spec.parts,
        }

    def training_run(self, run: str) -> Reply:
        """A training run that is live or has kept something; `Refused` with 404 where it is neither."""
        found = self._run(run)
        if found is None:
            raise HttpRefusal(404, f"there is no training run {run!a:.120}")
        return found

    def training_runs(self) -> Reply:
        """All runs that are live or have kept something; one that ends meanwhile and kept nothing is left out."""
        found = [self._run(name) for name in sorted({*self._models, *self._store.runs()})]
        rows = [row for row in found if row is not None]
        return {"training_runs": rows, "cursor": _everything(len(rows))}

    def checkpoints(self, run: str | None = None) -> Reply:
        """The checkpoints of one run, or of all."""
        runs = self._store.runs() if run is None else [run]
        rows = [row for name in runs for row in self._store.addresses(name)]
        listed = [
            {
                "checkpoint_id": f"{address.kind}/{address.name}",
                "checkpoint_type": "training" if address.kind == "weights" else "sampler",
                "time": changed.isoformat(),
                "tinker_path": str(address),
                "size_bytes": size,
                "expires_at": None
                if (expiry := self._store.expiry(address)) is None
                else expiry.isoformat(),
            }
            for address, changed, size in rows
        ]
        return {"checkpoints": listed, "cursor": _everything(len(listed))}

    def count_checkpoints(self, runs: Iterable[str]) -> int:
        """Return how many checkpoints some runs have together."""
        return sum(len(self._store.addresses(run)) for run in runs)

    def delete_checkpoint(self, run: str, kind: str, name: str) -> None:
        """Remove one."""
        self._store.delete(_address(run, kind, name))

    def set_lifetime(self, run: str, kind: str, name: str, seconds: int | None) -> None:
        """Let one expire, or stay."""
        self._store.set_lifetime(_address(run, kind, name), seconds)

    def copy(self, path: str, run: str, lifetime: int | None) -> Reply:
        """Copy a checkpoint into a run of its own."""
        run_id = f"{run}:train:0"
        described = self.saved(path)
        source = CheckpointAddress.read(path)
        target = CheckpointAddress(run_id, source.kind, source.name)
        self._store.copy(source, target, lifetime)
        adapter = described["adapter"]
        self._store.write_run(run_id, {**adapter, "user_metadata": described["user_metadata"]})
        return {"tinker_path": str(target)}

    def saved(self, path: str) -> dict[str, Any]:
        """What a checkpoint says of itself; DataError where it has no such address, CheckpointError where it is not there."""
        return self._store.state(path)

    def check_served(self, name: str) -> None:
        """`Refused` with 404 where no model has the name."""
        if name not in self._shelf.served:
            raise HttpRefusal(
                404,
                f"no model {name!a:.120} is served here; there are {', '.join(self._shelf.served)}",
            )

    def check_student(self, name: str) -> None:
        """`Refused` where no model has the name, or it may not be trained."""
        self.check_served(name)
        if name not in self._students:
            raise HttpRefusal(
                400,
                f"{name} only samples and scores here; to be trained are {', '.join(sorted(self._students))}",
            )

    def _run(self, run: str) -> Reply | None:
        model = self._models.get(run)
        found = (
            (run_data(model), datetime.now(UTC)) if model is not None else self._store.read_run(run)
        )
        if found is None:
            return None
        data, heard = found
        return {
            "training_run_id": run,
            "base_model": data["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": data["rank"],
            "last_request_time": heard.isoformat(),
            "user_metadata": data["user_metadata"],
        }


def _address(run: str, kind: str, name: str) -> CheckpointAddress:
    """Return the address of a checkpoint of a run; CheckpointError where it has none, so that there is no checkpoint either."""
    try:
        return CheckpointAddress.read(f"tinker://{run}/{kind}/{name}")
    except DataError as error:
        raise CheckpointError(str(error)) from error


def run_data(model: TrainingModel) -> dict[str, Any]:
    """What is written down about the run of a model."""
    return {**model.spec.data(), "user_metadata": model.metadata}


def _everything(count: int) -> Reply:
    return {"offset": 0, "limit": count, "total_count": count}
