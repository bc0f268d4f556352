"""Move training models to and from checkpoints."""

import logging
from collections.abc import Callable, Mapping

from practicum.errors import CheckpointError, DataError, PracticumError
from practicum.server.model_cache import ModelCache
from practicum.server.store import CheckpointAddress, Store
from practicum.server.training import AdapterSpec, TrainingModel

log = logging.getLogger(__name__)


class ModelSaver:
    """Load and save training models; used only on the worker's thread.

    `on_save` runs with the address of each checkpoint that was written.
    """

    def __init__(self, shelf: ModelCache, store: Store, on_save: Callable[[str], None]) -> None:
        self._shelf = shelf
        self._store = store
        self._on_save = on_save

    def load(self, model: TrainingModel, path: str, *, with_optimizer: bool) -> None:
        """Load a checkpoint into a model, with its moments and step count or as a new start.

        Raise DataError for a checkpoint to sample from, CheckpointError for one of another base
        model or of other adapters.
        """
        address = CheckpointAddress.read(path)
        if address.kind != "weights":
            raise DataError(
                f"{path} was saved for sampling; continue training from tinker://{address.run}/weights/"
            )
        checkpoint = self._store.load(path)
        state, base = checkpoint.state, self._shelf.get(model.spec.base)
        if state["base_sha256"] != self._shelf.compute_fingerprint(model.spec.base):
            raise CheckpointError(
                f"{path} was trained over another model than the model that is now served as {model.spec.base}"
            )
        spec = AdapterSpec.from_json(state["adapter"])
        if (spec.rank, spec.parts) != (model.spec.rank, model.spec.parts):
            raise CheckpointError(
                f"{path} has rank {spec.rank} around {' and '.join(spec.parts)}, the model another"
            )
        optimizer = checkpoint.read_tensors("optimizer") if with_optimizer else {}
        model.load(base, {"student": checkpoint.read_tensors("student"), "optimizer": optimizer})
        model.steps = model.saved_steps = int(state["steps"]) if with_optimizer else 0
        log.info(f"{model.spec.base}: loaded {path}")

    def save(
        self,
        model: TrainingModel,
        address: CheckpointAddress,
        metadata: Mapping[str, str] | None,
        *,
        overwrite: bool,
        lifetime: int | None = None,
    ) -> None:
        """Write a checkpoint; one to sample from has no moments."""
        tensors = model.get_state()
        if address.kind != "weights":
            tensors = {"student": tensors["student"]}
        state = {
            "adapter": model.spec.to_json(),
            "base_sha256": self._shelf.compute_fingerprint(model.spec.base),
            "steps": model.steps,
            "user_metadata": dict(metadata or model.metadata),
        }
        self._store.write_run(model.id, model.describe())
        self._store.save(address, tensors, state, overwrite=overwrite, lifetime=lifetime)
        self._on_save(str(address))
        if address.kind == "weights":
            model.saved_steps = model.steps
        log.info(f"saved {address}")

    def save_progress(self, model: TrainingModel) -> None:
        """Save a model that has trained since its last checkpoint; a failure is only logged."""
        if model.steps == model.saved_steps or not model.get_state():
            return
        address = CheckpointAddress(model.id, "weights", f"closing-{model.steps}")
        try:
            self.save(model, address, None, overwrite=True)
        except PracticumError as error:
            log.info(f"{model.id} could not be saved: {error}")
