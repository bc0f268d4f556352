"""What requests mean: sessions, training models and samplers, and what is put in the worker's queue for them.

Every method runs on the thread of the event loop and returns at once; what takes long is a job, whose answer is fetched by its
request's id. The id of a training request is that of its model with the number that the client gave it, so that a request sent
twice is done once.

Jobs run on the worker's thread, one after another. They alone touch `_unnamed`, `_published` and what a
`TrainingModel` learns; of the tables they add and remove snapshots in `_samplers`, and remove a model whose creation failed from
`_models`. All else in the tables is changed on the event loop. Each change is one operation on a dict, which cannot be torn apart.
"""

import logging
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

from practicum.core.randomness import seed_of
from practicum.errors import CheckpointError, DataError, PracticumError
from practicum.ports import AdamParams
from practicum.server import requests as asked
from practicum.server.catalogue import Catalogue, run_data
from practicum.server.futures import Answer, Futures
from practicum.server.limits import Limits
from practicum.server.refusals import HttpRefusal
from practicum.server.running import (
    Published,
    SampleItem,
    Sampler,
    SamplingExecutor,
    check_tokens,
    failure,
    json_answer,
)
from practicum.server.sessions import Session, matching, newest_first
from practicum.server.shelf import ModelCache
from practicum.server.store import CheckpointAddress, Store
from practicum.server.training import (
    AdapterSpec,
    TrainingModel,
    forward_backward,
    optim_step,
    resolve_max_grad_norm,
)
from practicum.server.wire import PROTOBUF, TrainRequest, train_response
from practicum.server.worker import ModelJob, Worker

MOST_UNNAMED = {"snapshot": 4, "inflight": 1024}
"""So many of a model's unnamed snapshots, and of the sessions that follow what it publishes and share one set of weights, can be
sampled from; an older one is gone."""

MOST_MODELS, MOST_SESSIONS = 64, 1024
IDLE_SECONDS = 3600.0
"""A session that was silent for so long is ended when another begins, its models saved."""

Reply = dict[str, Any]

log = logging.getLogger(__name__)


class Service:
    """All that is served; `students` are the names of the models that may be trained."""

    def __init__(
        self,
        shelf: ModelCache,
        store: Store,
        students: frozenset[str],
        futures: Futures | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.futures = futures or Futures()
        self.limits = limits or Limits()
        self._shelf = shelf
        self._store = store
        self._running = SamplingExecutor(shelf, store, self.limits.sampled_tokens)
        # A request may be answered in an empty context (`reset_contextvars` of uvicorn), where nobody would hear its notes.
        self._context = copy_context()
        self._worker = Worker(self._make_error_answer, shelf.fits)
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, TrainingModel] = {}
        self.catalogue = Catalogue(shelf, store, students, self._models)
        self._samplers: dict[str, Sampler] = {}
        self._unnamed: dict[tuple[str, str], deque[str]] = {}
        self._published: dict[str, Published] = {}
        shelf.evicted.append(self._suspend)

    # Sessions

    def create_session(self, body: asked.CreateSession) -> Reply:
        """A new session; silent ones are ended first."""
        now = time.monotonic()
        for name in [
            name for name, session in self._sessions.items() if now - session.heard > IDLE_SECONDS
        ]:
            self._context.run(log.info, f"session {name} was silent for an hour and is ended")
            self.finish(name)
        if len(self._sessions) >= MOST_SESSIONS:
            raise HttpRefusal(429, f"{MOST_SESSIONS} sessions are open; close some", retry_after=30)
        session_id = str(uuid.uuid4())
        metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
        self._sessions[session_id] = Session(session_id, now, body.display_name, metadata)
        return {"type": "create_session", "session_id": session_id}

    def heartbeat(self, session_id: str) -> Reply:
        """A session is alive; 410 where it has ended or is not of this server."""
        if session_id not in self._sessions:
            raise HttpRefusal(410, "the session has ended")
        self._sessions[session_id].heard = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str) -> None:
        """End a session: its models are saved where they have learned since, and let go."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for sampler in session.samplers:
            self._samplers.pop(sampler, None)
        for name in session.models:
            self._release(name)

    def session_info(self, session_id: str) -> Reply:
        """What belongs to a session that is open; it is not heard of by that."""
        if session_id not in self._sessions:
            raise HttpRefusal(404, f"there is no open session {session_id!a:.120}")
        return self._sessions[session_id].data()

    def sessions(self, offset: int, limit: int) -> Reply:
        """The open sessions, newest first."""
        return {
            "sessions": [
                session.id for session in newest_first(self._sessions.values())[offset:][:limit]
            ]
        }

    def search_sessions(self, body: asked.SearchSessions) -> Reply:
        """A page of the open sessions that match."""
        found = matching(self._sessions.values(), body)
        page = found[: body.limit]
        more = (
            {"last_created_at": page[-1].created.isoformat(), "last_session_id": page[-1].id}
            if page
            else None
        )
        counted = [
            session.summary(self.catalogue.count_checkpoints(session.models)) for session in page
        ]
        return {"sessions": counted, "next_cursor": more if len(found) > len(page) else None}

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise HttpRefusal(
                410, "the session has ended or belongs to an earlier server; create a new one"
            )
        self._sessions[session_id].heard = time.monotonic()
        return self._sessions[session_id]

    # Training models

    def create_model(self, body: asked.CreateModel) -> Reply:
        """A training model over a served base; its id is made of the session and the client's number."""
        session = self._session(body.session_id)
        self.catalogue.check_student(body.base_model)
        lora = body.lora_config
        if lora is None:
            raise HttpRefusal(400, "lora_config is missing: only adapters are trained here")
        wanted = {"attention": lora.train_attn, "mlp": lora.train_mlp}
        parts = tuple(part for part, trained in wanted.items() if trained)
        if not parts:
            raise HttpRefusal(
                400, "train_attn and train_mlp are both off, so there is nothing to train"
            )
        spec = AdapterSpec(body.base_model, lora.rank, lora.seed or 0, parts)
        model = self._new_model(
            session, f"{body.session_id}:train:{body.model_seq_id}", spec, body.user_metadata
        )

        def work() -> Answer:
            model.over(self._shelf.get(spec.base))
            log.info(f"{spec.base}: a new model to train, rank {spec.rank}")
            return json_answer({"type": "create_model", "model_id": model.id})

        return self._enqueue_training(f"{model.id}:create", work, spec.base, model)

    def load_weights(self, body: asked.LoadWeights) -> Reply:
        """Saved weights into a model that is there, or into a new one of the size that the checkpoint says."""
        if body.model_id is not None:
            model, created = self._model(body.model_id), None
            name = _numbered(body.model_id, body.seq_id)
        elif body.session_id is None or body.model_seq_id is None:
            raise HttpRefusal(
                400, "load_weights needs a model_id, or a session_id with a model_seq_id"
            )
        else:
            saved = self.catalogue.saved(body.path)
            spec = AdapterSpec.of_data(saved["adapter"])
            if body.base_model is not None:
                spec = replace(spec, base=body.base_model)
            self.catalogue.check_student(spec.base)
            metadata = body.user_metadata or saved["user_metadata"]
            model_id = f"{body.session_id}:train:{body.model_seq_id}"
            model = created = self._new_model(
                self._session(body.session_id), model_id, spec, metadata
            )
            name = f"{model_id}:create"

        def work() -> Answer:
            self._load(model, body.path, with_optimizer=body.optimizer)
            return json_answer({"type": "load_weights", "path": body.path, "model_id": model.id})

        return self._enqueue_training(name, work, model.spec.base, created)

    def info(self, model_id: str) -> Reply:
        """What a training model is."""
        model = self._model(model_id)
        loaded = self._shelf.known(model.spec.base)
        source = None if loaded is None else loaded.source
        data = {
            "arch": None if loaded is None else loaded.architecture,
            "model_name": model.spec.base,
            "tokenizer_id": str(Path(source).absolute())
            if source is not None and Path(source).is_dir()
            else None,
        }
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": model.spec.base,
        }

    def forward_backward(self, request: TrainRequest) -> Reply:
        """The gradient of a loss, added to what has been accumulated; or the loss alone."""
        model = self._model(request.model_id)

        def work() -> Answer:
            start = time.monotonic()
            found = forward_backward(model, self._shelf.get(model.spec.base), request)
            tokens = sum(len(datum.tokens) for datum in request.data)
            verb = "forward" if request.forward_only else "forward_backward"
            log.info(
                f"{model.spec.base}: {verb} {request.loss} on {len(request.data)} texts of {tokens:,} tokens, "
                f"loss {sum(found.losses):.4g}, {time.monotonic() - start:.2f} s"
            )
            shaped = [
                logprobs.view(datum.inputs["target_tokens"].shape)
                for logprobs, datum in zip(found.logprobs, request.data, strict=True)
            ]
            return Answer(train_response(shaped, {"loss:sum": sum(found.losses)}), PROTOBUF)

        return self._enqueue_training(_numbered(model.id, request.seq_id), work, model.spec.base)

    def optim_step(self, body: asked.OptimStep) -> Reply:
        """One optimizer step."""
        model = self._model(body.model_id)
        adam = body.adam_params
        params = AdamParams(
            adam.learning_rate,
            (adam.beta1, adam.beta2),
            adam.eps,
            adam.weight_decay,
            resolve_max_grad_norm(adam.grad_clip_norm),
        )

        def work() -> Answer:
            metrics = dict(optim_step(model, self._shelf.get(model.spec.base), params))
            if metrics.get("empty_updates"):
                log.info(
                    f"{model.spec.base}: step {model.steps} moved nothing, for nothing was supervised"
                )
            if metrics["skipped"]:
                log.info(
                    f"{model.spec.base}: step {model.steps} skipped, its gradient is not finite"
                )
                metrics["grad_norm"] = 0.0
            return json_answer({"metrics": metrics})

        return self._enqueue_training(_numbered(model.id, body.seq_id), work, model.spec.base)

    def save_weights(self, body: asked.SaveWeights) -> Reply:
        """A checkpoint to go on training from: weights and moments."""
        model = self._model(body.model_id)
        return self._save_later(
            body, model, "weights", body.path or f"step-{model.steps}", "save_weights"
        )

    def save_for_sampler(self, body: asked.SaveWeights) -> Reply:
        """Weights to sample from: kept on disk under a name, or in memory without one.

        In memory they are a snapshot, or with `inflight` what all such sampling sessions of the model sample from henceforth.
        """
        model = self._model(body.model_id)
        if body.path is not None:
            return self._save_later(
                body, model, "sampler_weights", body.path, "save_weights_for_sampler"
            )
        session = model.id.split(":")[0]
        sampler_id = f"{session}:sample:{body.sampling_session_seq_id}"

        def snapshot() -> Answer:
            weights = model.over(self._shelf.get(model.spec.base)).save_state()["student"]
            held = {name: tensor.clone() for name, tensor in weights.items()}
            published = Published(sampler_id, held)
            if body.kind == "inflight":
                published = self._published.setdefault(
                    model.id, Published(f"{model.id} in flight", held)
                )
                published.weights = held
            self._samplers[sampler_id] = Sampler(sampler_id, model.spec.base, model.spec, published)
            kept = self._unnamed.setdefault((model.id, body.kind), deque())
            kept.append(sampler_id)
            if len(kept) > MOST_UNNAMED[body.kind]:
                self._samplers.pop(kept.popleft(), None)
            return json_answer(
                {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}
            )

        return self._enqueue_training(_numbered(model.id, body.seq_id), snapshot, model.spec.base)

    def _save_later(
        self, body: asked.SaveWeights, model: TrainingModel, kind: str, name: str, request: str
    ) -> Reply:
        """Queue a save on disk; DataError where the name cannot be one."""
        address = CheckpointAddress.read(f"tinker://{model.id}/{kind}/{name}")

        def work() -> Answer:
            self._save(
                model,
                address,
                body.user_metadata,
                overwrite=body.overwrite,
                lifetime=body.ttl_seconds,
            )
            return json_answer({"type": request, "path": str(address)})

        return self._enqueue_training(_numbered(model.id, body.seq_id), work, model.spec.base)

    def unload(self, model_id: str) -> Reply:
        """Let go of a training model; what it learned since it was saved is saved first."""
        base = self._model(model_id).spec.base
        self._release(model_id)
        answer = json_answer({"type": "unload_model", "model_id": model_id})
        return self._enqueue_training(f"{model_id}:unload", lambda: answer, base)

    # Samplers

    def create_sampler(self, body: asked.CreateSampler) -> Reply:
        """A sampling session over a base model or saved weights."""
        session = self._session(body.session_id)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if sampler_id not in self._samplers:
            self._samplers[sampler_id] = self._sampler(sampler_id, body.base_model, body.model_path)
            session.samplers.append(sampler_id)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampler_info(self, sampler_id: str) -> Reply:
        """What a sampling session samples from."""
        sampler = self._known_sampler(sampler_id)
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path}

    def sample(self, body: asked.SampleBody) -> Reply:
        """Completions, and what is asked about the prompt."""
        if body.record_stability_info:
            raise HttpRefusal(400, asked.NOT_STABLE)
        check_tokens(
            body.num_samples, body.sampling_params.max_tokens or 1, self.limits.sampled_tokens
        )
        if body.sampling_session_id is not None:
            sampler = self._known_sampler(body.sampling_session_id)
        else:
            sampler = self._sampler("", body.base_model, body.model_path)
        numbered = body.sampling_session_id is not None and body.seq_id is not None
        name = f"{sampler.id}:{body.seq_id}" if numbered else f"sample:{uuid.uuid4()}"
        seed = body.sampling_params.seed
        if seed is None:
            seed = seed_of(name)
        item = SampleItem(
            body,
            body.prompt.tokens(),
            sampler,
            seed if 0 <= seed < 2**63 else seed_of("request", seed),
        )
        key = (sampler.key, item.one_pass)
        job = ModelJob(item, self._running.answer, key, item.lane, sampler.base)
        self.futures.open(name, lambda: self._worker.submit(job))
        ids = [f"{name}:{number}" for number in range(body.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    # The end

    def close(self, timeout: float = 60.0) -> None:
        """Stop the worker and save every model that has learned since it was saved."""
        if not self._worker.close(timeout):
            log.info("the models are still at work; what was learned since the last save is lost")
            return
        for model in self._models.values():
            self._save_learned(model)

    # Inside

    def _new_model(
        self, session: Session, model_id: str, spec: AdapterSpec, metadata: Mapping[str, Any] | None
    ) -> TrainingModel:
        if model_id in self._models:
            return self._models[model_id]
        if len(self._models) >= MOST_MODELS:
            raise HttpRefusal(
                429, f"{MOST_MODELS} models are being trained; unload some", retry_after=30
            )
        model = TrainingModel(
            model_id, spec, {key: str(value) for key, value in (metadata or {}).items()}
        )
        self._models[model_id] = model
        session.models.append(model_id)
        return model

    def _load(self, model: TrainingModel, path: str, *, with_optimizer: bool) -> None:
        address = CheckpointAddress.read(path)
        if address.kind != "weights":
            raise DataError(
                f"{path} was saved to sample from; train on from one of tinker://{address.run}/weights/"
            )
        checkpoint = self._store.load(path)
        base = self._shelf.get(model.spec.base)
        if checkpoint.state["base_sha256"] != self._shelf.fingerprint(model.spec.base):
            raise CheckpointError(
                f"{path} was trained over another model than the one that is now served as {model.spec.base}"
            )
        spec = AdapterSpec.of_data(checkpoint.state["adapter"])
        if (spec.rank, spec.parts) != (model.spec.rank, model.spec.parts):
            raise CheckpointError(
                f"{path} has rank {spec.rank} around {' and '.join(spec.parts)}, the model another"
            )
        optimizer = checkpoint.tensors("optimizer") if with_optimizer else {}
        model.load(base, {"student": checkpoint.tensors("student"), "optimizer": optimizer})
        model.steps = model.saved_steps = int(checkpoint.state["steps"]) if with_optimizer else 0
        log.info(f"{model.spec.base}: loaded {path}")

    def _save(
        self,
        model: TrainingModel,
        address: CheckpointAddress,
        metadata: Mapping[str, str] | None,
        *,
        overwrite: bool,
        lifetime: int | None = None,
    ) -> None:
        tensors = model.state()
        if address.kind != "weights":
            tensors = {"student": tensors["student"]}
        state = {
            "adapter": model.spec.data(),
            "base_sha256": self._shelf.fingerprint(model.spec.base),
            "steps": model.steps,
            "user_metadata": dict(metadata or model.metadata),
        }
        self._store.write_run(model.id, run_data(model))
        self._store.save(address, tensors, state, overwrite=overwrite, lifetime=lifetime)
        self._running.forget(str(address))
        if address.kind == "weights":
            model.saved_steps = model.steps
        log.info(f"saved {address}")

    def _save_learned(self, model: TrainingModel) -> None:
        if model.steps == model.saved_steps or not model.state():
            return
        address = CheckpointAddress(model.id, "weights", f"closing-{model.steps}")
        try:
            self._save(model, address, None, overwrite=True)
        except PracticumError as error:
            log.info(f"{model.id} could not be saved: {error}")

    def _release(self, model_id: str) -> None:
        """Take no more requests for a model; save and forget it, and its snapshots, after what was asked of it before."""
        model = self._models.pop(model_id, None)
        if model is None:
            return

        def work() -> Answer:
            for kind in MOST_UNNAMED:
                for sampler in self._unnamed.pop((model_id, kind), ()):
                    self._samplers.pop(sampler, None)
            self._published.pop(model_id, None)
            self._save_learned(model)
            model.trainer = None
            return json_answer({})

        self._worker.submit(ModelJob(None, lambda items: [work()]))

    def _enqueue_training(
        self, name: str, work: Callable[[], Answer], base: str, created: TrainingModel | None = None
    ) -> Reply:
        """Queue the work of a training request on a base; a model whose creation fails is forgotten."""

        def run(items: object) -> list[Answer]:
            try:
                return [work()]
            except BaseException:
                if created is not None and created.trainer is None:
                    self._models.pop(created.id, None)
                raise

        def begin() -> "Future[Answer]":
            return self._worker.submit(ModelJob(None, run, base=base))

        self.futures.open(name, begin)
        reply: Reply = {"request_id": name}
        return reply if created is None else {**reply, "model_id": created.id}

    def _make_error_answer(self, error: Exception) -> Answer:
        if isinstance(error, PracticumError | HttpRefusal):
            log.info(f"refused: {error}")
            return failure(error)
        log.info(f"failed: {type(error).__name__}: {error}")
        traceback.print_exception(error)  # a mistake of ours: whoever runs the server can report it
        return json_answer(
            {
                "error": f"the server failed ({type(error).__name__}); its console says more",
                "category": "server",
            }
        )

    def _suspend(self, base: str) -> None:
        for model in list(self._models.values()):
            if model.spec.base == base:
                model.suspend()

    def _model(self, model_id: str) -> TrainingModel:
        if model_id not in self._models:
            raise HttpRefusal(
                404,
                f"there is no training model {model_id!a:.120} here; it may belong to an earlier server",
            )
        session = self._sessions.get(model_id.split(":")[0])
        if session is not None:
            session.heard = time.monotonic()
        return self._models[model_id]

    def _known_sampler(self, sampler_id: str) -> Sampler:
        if sampler_id in self._samplers:
            return self._samplers[sampler_id]
        raise HttpRefusal(
            410,
            f"there is no sampling session {sampler_id!a:.120}; a model keeps its newest {MOST_UNNAMED['snapshot']} snapshots and "
            f"{MOST_UNNAMED['inflight']} that follow it",
        )

    def _sampler(self, sampler_id: str, base: str | None, path: str | None) -> Sampler:
        if path is not None:
            spec = AdapterSpec.of_data(self.catalogue.saved(path)["adapter"])
            self.catalogue.check_served(spec.base)
            return Sampler(sampler_id, spec.base, spec, None, path)
        if base is None:
            raise HttpRefusal(400, "name a base_model or a model_path to sample from")
        self.catalogue.check_served(base)
        return Sampler(sampler_id, base)


def _numbered(model_id: str, number: int | None) -> str:
    return f"{model_id}:{uuid.uuid4()}" if number is None else f"{model_id}:{number}"
