"""Turn requests into jobs on sessions, training models and samplers.

Every method runs on the thread of the event loop and returns at once. Slow work is a job, and its
answer is fetched by the id of its request. The id of a training request is the model's id with the
client's number, so that a request sent twice is executed once.

Jobs run on the worker's thread, one after another. Only jobs touch `_unnamed`, `_published` and the
state of a `TrainingModel`. Jobs change two of the tables: they add snapshots to `_samplers`, and
remove a model from `_models` if its creation failed. Everything else in the tables changes on the
event loop. Each change is one operation on a dict and therefore atomic.
"""

import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

from practicum.core.randomness import seed_of
from practicum.ports import AdamParams
from practicum.server import requests as bodies
from practicum.server.catalogue import Catalogue, Reply
from practicum.server.executor import (
    PublishedWeights,
    SampleItem,
    Sampler,
    SamplingExecutor,
    check_tokens,
    encode_error,
    encode_json,
)
from practicum.server.futures import Futures, ResponseBody
from practicum.server.limits import RequestLimits
from practicum.server.model_cache import ModelCache
from practicum.server.refusals import HttpRefusal
from practicum.server.saving import ModelSaver
from practicum.server.sessions import ClientSession, search, sort_by_age
from practicum.server.store import CheckpointAddress, Store
from practicum.server.training import AdapterSpec, TrainingModel, forward_backward
from practicum.server.wire import PROTOBUF, TrainRequest, encode_training
from practicum.server.worker import ModelJob, Worker

MAX_UNNAMED = {"snapshot": 4, "inflight": 1024}
"""The number of a model's unnamed snapshots, and of sessions that follow its published weights.

An older one can no longer be sampled from. Sessions that follow share one set of weights.
"""

MAX_MODELS, MAX_SESSIONS = 64, 1024
MAX_SAMPLERS = 16384
"""The sampling sessions that one session may open: they are kept until it ends."""

IDLE_SECONDS = 3600.0
"""A session that was silent for so long is ended when another starts, its models saved."""

log = logging.getLogger(__name__)


class Service:
    """The service; `students` are the names of the models that may be trained."""

    def __init__(
        self,
        shelf: ModelCache,
        store: Store,
        students: frozenset[str],
        futures: Futures | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        self.futures = futures or Futures()
        self.limits = limits or RequestLimits()
        self._shelf = shelf
        self._store = store
        self._executor = SamplingExecutor(shelf, store, self.limits.sampled_tokens)
        self._saver = ModelSaver(shelf, store, self._executor.forget)
        # uvicorn may run a request in an empty context (`reset_contextvars`), without log handlers.
        self._context = copy_context()
        self._worker = Worker(encode_error, shelf.fits)
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, TrainingModel] = {}
        self.catalogue = Catalogue(shelf, store, students, self._models)
        self._samplers: dict[str, Sampler] = {}
        self._unnamed: dict[tuple[str, str], deque[str]] = {}
        self._published: dict[str, PublishedWeights] = {}
        shelf.on_evict.append(self._suspend)

    # Sessions

    def create_session(self, body: bodies.CreateSession) -> Reply:
        """Open a session; sessions that were silent for too long are ended first."""
        idle_since = time.monotonic() - IDLE_SECONDS
        # Checked only here: idle sessions cost memory, which matters when another needs it.
        for name, session in list(self._sessions.items()):
            if session.last_seen < idle_since:
                self._context.run(log.info, f"session {name} was silent for an hour and is ended")
                self.finish(name)
        if len(self._sessions) >= MAX_SESSIONS:
            raise HttpRefusal(429, f"{MAX_SESSIONS} sessions are open; close some", retry_after=30)
        session_id = str(uuid.uuid4())
        metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
        session = ClientSession(session_id, time.monotonic(), body.display_name, metadata)
        self._sessions[session_id] = session
        return {"type": "create_session", "session_id": session_id}

    def record_heartbeat(self, body: bodies.OfSession) -> Reply:
        """Note that a session is alive; refuse with 410 if it has ended or is unknown."""
        if body.session_id not in self._sessions:
            raise HttpRefusal(410, "the session has ended")
        self._sessions[body.session_id].last_seen = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str) -> None:
        """End a session: save its models if they have trained since, and drop them."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for sampler in session.samplers:
            self._samplers.pop(sampler, None)
        for name in session.models:
            self._release(name)

    def describe_session(self, session_id: str) -> Reply:
        """Return the models and samplers of an open session, without touching it."""
        if session_id not in self._sessions:
            raise HttpRefusal(404, f"there is no open session {session_id!a:.120}")
        return self._sessions[session_id].to_json()

    def list_sessions(self, offset: int, limit: int) -> Reply:
        """Return the open sessions, newest first."""
        sessions = sort_by_age(self._sessions.values())[offset:][:limit]
        return {"sessions": [session.id for session in sessions]}

    def search_sessions(self, body: bodies.SearchSessions) -> Reply:
        """Return a page of the open sessions that match."""
        matches = search(self._sessions.values(), body)
        page = matches[: body.limit]
        cursor = None
        if len(matches) > len(page):
            last = page[-1]
            cursor = {"last_created_at": last.created.isoformat(), "last_session_id": last.id}
        summaries = [
            session.summarize(self.catalogue.count_checkpoints(session.models)) for session in page
        ]
        return {"sessions": summaries, "next_cursor": cursor}

    def _touch_session(self, session_id: str) -> ClientSession:
        """Return a session, which is alive; refuse with 410 if it has ended or is unknown."""
        if session_id not in self._sessions:
            raise HttpRefusal(
                410, "the session has ended or belongs to an earlier server; create a new one"
            )
        self._sessions[session_id].last_seen = time.monotonic()
        return self._sessions[session_id]

    # Training models

    def create_model(self, body: bodies.CreateModel) -> Reply:
        """Create a training model over a served base model."""
        session = self._touch_session(body.session_id)
        self.catalogue.check_student(body.base_model)
        lora = body.lora_config
        if lora is None:
            raise HttpRefusal(400, "lora_config is missing: only adapters are trained here")
        switches = {"attention": lora.train_attn, "mlp": lora.train_mlp}
        parts = tuple(part for part, is_trained in switches.items() if is_trained)
        if not parts:
            raise HttpRefusal(
                400, "train_attn and train_mlp are both off, so there is nothing to train"
            )
        spec = AdapterSpec(body.base_model, lora.rank, lora.seed or 0, parts)
        model = self._add_model(session, body.model_seq_id, spec, body.user_metadata)

        def create() -> ResponseBody:
            model.attach(self._shelf.get(spec.base))
            log.info(f"{spec.base}: a new model to train, rank {spec.rank}")
            return encode_json({"type": "create_model", "model_id": model.id})

        return self._queue_training(model, create, "create", is_new=True)

    def load_weights(self, body: bodies.LoadWeights) -> Reply:
        """Load saved weights into a model, or into a new one that fits the checkpoint."""
        is_new = body.model_id is None
        if body.model_id is not None:
            model = self._get_model(body.model_id)
        elif body.session_id is None or body.model_seq_id is None:
            raise HttpRefusal(
                400, "load_weights needs a model_id, or a session_id with a model_seq_id"
            )
        else:
            state = self._store.read_state(body.path)
            spec = AdapterSpec.from_json(state["adapter"])
            if body.base_model is not None:
                spec = replace(spec, base=body.base_model)
            self.catalogue.check_student(spec.base)
            metadata = body.user_metadata or state["user_metadata"]
            session = self._touch_session(body.session_id)
            model = self._add_model(session, body.model_seq_id, spec, metadata)

        def load() -> ResponseBody:
            self._saver.load(model, body.path, with_optimizer=body.optimizer)
            return encode_json({"type": "load_weights", "path": body.path, "model_id": model.id})

        return self._queue_training(model, load, "create" if is_new else body.seq_id, is_new=is_new)

    def describe_model(self, body: bodies.OfModel) -> Reply:
        """Return the base model and the adapters of a training model."""
        model = self._get_model(body.model_id)
        loaded = self._shelf.peek(model.spec.base)
        folder = None if loaded is None or loaded.source is None else Path(loaded.source)
        return {
            "type": "get_info",
            "model_data": {
                "arch": None if loaded is None else loaded.architecture,
                "model_name": model.spec.base,
                "tokenizer_id": str(folder.absolute()) if folder and folder.is_dir() else None,
            },
            "model_id": model.id,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": model.spec.base,
        }

    def forward_backward(self, request: TrainRequest) -> Reply:
        """Add the gradient of a loss to the accumulated one, or compute only the loss."""
        model = self._get_model(request.model_id)

        def run() -> ResponseBody:
            start = time.monotonic()
            result = forward_backward(model, self._shelf.get(model.spec.base), request)
            tokens = sum(len(datum.tokens) for datum in request.data)
            verb = "forward" if request.forward_only else "forward_backward"
            log.info(
                f"{model.spec.base}: {verb} {request.loss} on {len(request.data)} texts of "
                f"{tokens:,} tokens, loss {sum(result.losses):.4g}, {time.monotonic() - start:.2f} s"
            )
            shaped = [
                logprobs.view(datum.inputs["target_tokens"].shape)
                for logprobs, datum in zip(result.logprobs, request.data, strict=True)
            ]
            return ResponseBody(encode_training(shaped, {"loss:sum": sum(result.losses)}), PROTOBUF)

        return self._queue_training(model, run, request.seq_id)

    def step_optimizer(self, body: bodies.OptimStep) -> Reply:
        """Take one optimizer step."""
        model = self._get_model(body.model_id)
        adam = body.adam_params
        params = AdamParams(
            adam.learning_rate,
            (adam.beta1, adam.beta2),
            adam.eps,
            adam.weight_decay,
            # The API's 0 means no clipping.
            adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf,
        )

        def step() -> ResponseBody:
            metrics = dict(model.attach(self._shelf.get(model.spec.base)).optim_step(params))
            model.steps += 1
            if metrics.get("empty_updates"):
                log.info(
                    f"{model.spec.base}: step {model.steps} moved nothing, for nothing was supervised"
                )
            if metrics["skipped"]:
                log.info(
                    f"{model.spec.base}: step {model.steps} skipped, its gradient is not finite"
                )
                metrics["grad_norm"] = 0.0
            return encode_json({"metrics": metrics})

        return self._queue_training(model, step, body.seq_id)

    def save_weights(self, body: bodies.SaveWeights) -> Reply:
        """Write a checkpoint to resume training from: weights and moments."""
        model = self._get_model(body.model_id)
        name = body.path or f"step-{model.steps}"
        return self._queue_save(body, model, f"weights/{name}", "save_weights")

    def save_for_sampler(self, body: bodies.SaveWeights) -> Reply:
        """Publish weights to sample from: on disk under a name, or in memory without one.

        In memory they are a snapshot. With `inflight` all such sampling sessions of the model
        follow the newest weights.
        """
        model = self._get_model(body.model_id)
        if body.path is not None:
            name = f"sampler_weights/{body.path}"
            return self._queue_save(body, model, name, "save_weights_for_sampler")
        session = model.id.split(":")[0]
        sampler_id = f"{session}:sample:{body.sampling_session_seq_id}"

        def publish() -> ResponseBody:
            weights = model.attach(self._shelf.get(model.spec.base)).save_state()["student"]
            copies = {name: tensor.clone() for name, tensor in weights.items()}
            published = PublishedWeights(sampler_id, copies)
            if body.kind == "inflight":
                # One object for all sessions that follow the model: they see the exchange at once.
                shared = PublishedWeights(f"{model.id} in flight", copies)
                published = self._published.setdefault(model.id, shared)
                published.weights = copies
            self._samplers[sampler_id] = Sampler(sampler_id, model.spec.base, model.spec, published)
            unnamed = self._unnamed.setdefault((model.id, body.kind), deque())
            unnamed.append(sampler_id)
            if len(unnamed) > MAX_UNNAMED[body.kind]:
                self._samplers.pop(unnamed.popleft(), None)
            reply = {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}
            return encode_json(reply)

        return self._queue_training(model, publish, body.seq_id)

    def _queue_save(
        self, body: bodies.SaveWeights, model: TrainingModel, name: str, request: str
    ) -> Reply:
        """Queue a save on disk; raise DataError if the name cannot be part of an address."""
        address = CheckpointAddress.read(f"tinker://{model.id}/{name}")

        def save() -> ResponseBody:
            self._saver.save(
                model,
                address,
                body.user_metadata,
                overwrite=body.overwrite,
                lifetime=body.ttl_seconds,
            )
            return encode_json({"type": request, "path": str(address)})

        return self._queue_training(model, save, body.seq_id)

    def unload(self, body: bodies.OfModel) -> Reply:
        """Drop a training model; if it has trained since its last checkpoint, save it first."""
        model = self._get_model(body.model_id)
        self._release(model.id)
        answer = encode_json({"type": "unload_model", "model_id": model.id})
        return self._queue_training(model, lambda: answer, "unload")

    # Samplers

    def create_sampler(self, body: bodies.CreateSampler) -> Reply:
        """Open a sampling session over a base model or saved weights."""
        session = self._touch_session(body.session_id)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if sampler_id not in self._samplers:
            if len(session.samplers) >= MAX_SAMPLERS:
                # Waiting frees none, so it is no 429, which clients send again.
                raise HttpRefusal(
                    400,
                    f"this session has opened {MAX_SAMPLERS} sampling sessions, the most that are "
                    "kept; create a new session",
                )
            sampler = self._build_sampler(sampler_id, body.base_model, body.model_path)
            self._samplers[sampler_id] = sampler
            session.samplers.append(sampler_id)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def describe_sampler(self, sampler_id: str) -> Reply:
        """Return the model of a sampling session."""
        sampler = self._get_sampler(sampler_id)
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path}

    def sample(self, body: bodies.SampleBody) -> Reply:
        """Queue a request for completions and log-probabilities of the prompt."""
        if body.record_stability_info:
            raise HttpRefusal(400, bodies.NOT_STABLE)
        max_tokens = body.sampling_params.max_tokens or 1
        check_tokens(body.num_samples, max_tokens, self.limits.sampled_tokens)
        if body.sampling_session_id is not None:
            sampler = self._get_sampler(body.sampling_session_id)
        else:
            sampler = self._build_sampler("", body.base_model, body.model_path)
        is_numbered = body.sampling_session_id is not None and body.seq_id is not None
        name = f"{sampler.id}:{body.seq_id}" if is_numbered else f"sample:{uuid.uuid4()}"
        seed = body.sampling_params.seed
        if seed is None:
            seed = seed_of(name)
        elif not 0 <= seed < 2**63:
            seed = seed_of("request", seed)
        item = SampleItem(body, body.prompt.join_tokens(), sampler, seed)
        key = (sampler.key, item.is_single_pass)
        run = self._executor.execute
        job = ModelJob(item, run, key, item.lane, sampler.base, item.cells)
        self.futures.open(name, lambda: self._worker.submit(job), retry_errors=True)
        ids = [f"{name}:{number}" for number in range(body.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    # The end

    def close(self, timeout: float = 60.0) -> None:
        """Stop the worker and save every model that has trained since its last checkpoint."""
        if not self._worker.close(timeout):
            log.info("the models are still at work; what was learned since the last save is lost")
            return
        for model in self._models.values():
            self._saver.save_progress(model)

    # Inside

    def _add_model(
        self,
        session: ClientSession,
        number: int,
        spec: AdapterSpec,
        metadata: Mapping[str, Any] | None,
    ) -> TrainingModel:
        model_id = f"{session.id}:train:{number}"
        if model_id in self._models:
            return self._models[model_id]
        if len(self._models) >= MAX_MODELS:
            raise HttpRefusal(
                429, f"{MAX_MODELS} models are being trained; unload some", retry_after=30
            )
        texts = {key: str(value) for key, value in (metadata or {}).items()}
        self._models[model_id] = model = TrainingModel(model_id, spec, texts)
        session.models.append(model_id)
        return model

    def _release(self, model_id: str) -> None:
        """Take no more requests for a model; save and drop it after the queued ones."""
        model = self._models.pop(model_id, None)
        if model is None:
            return

        def release() -> ResponseBody:
            for kind in MAX_UNNAMED:
                for sampler in self._unnamed.pop((model_id, kind), ()):
                    self._samplers.pop(sampler, None)
            self._published.pop(model_id, None)
            self._saver.save_progress(model)
            model.trainer = None
            return encode_json({})

        self._worker.submit(ModelJob(None, lambda items: [release()]))

    def _queue_training(
        self,
        model: TrainingModel,
        work: Callable[[], ResponseBody],
        number: int | str | None,
        *,
        is_new: bool = False,
    ) -> Reply:
        """Queue the work of a training request; if creating a model fails, remove the model."""

        def run(items: object) -> list[ResponseBody]:
            try:
                return [work()]
            except BaseException:
                # A model that was never built must not be found by later requests.
                if is_new and model.trainer is None:
                    self._models.pop(model.id, None)
                raise

        request_id = f"{model.id}:{uuid.uuid4() if number is None else number}"
        job = ModelJob(None, run, base=model.spec.base)
        self.futures.open(request_id, lambda: self._worker.submit(job))
        created = {"model_id": model.id} if is_new else {}
        return {"request_id": request_id, **created}

    def _suspend(self, base: str) -> None:
        for model in list(self._models.values()):
            if model.spec.base == base:
                model.suspend()

    def _get_model(self, model_id: str) -> TrainingModel:
        if model_id not in self._models:
            raise HttpRefusal(
                404,
                f"there is no training model {model_id!a:.120} here; it may belong to an earlier server",
            )
        # Every request about a model is a sign of life of the session in its id.
        session = self._sessions.get(model_id.split(":")[0])
        if session is not None:
            session.last_seen = time.monotonic()
        return self._models[model_id]

    def _get_sampler(self, sampler_id: str) -> Sampler:
        if sampler_id in self._samplers:
            return self._samplers[sampler_id]
        raise HttpRefusal(
            410,
            f"there is no sampling session {sampler_id!a:.120}; a model keeps its newest "
            f"{MAX_UNNAMED['snapshot']} snapshots and {MAX_UNNAMED['inflight']} that follow it",
        )

    def _build_sampler(self, sampler_id: str, base: str | None, path: str | None) -> Sampler:
        if path is not None:
            spec = AdapterSpec.from_json(self._store.read_state(path)["adapter"])
            self.catalogue.check_served(spec.base)
            return Sampler(sampler_id, spec.base, spec, None, path)
        if base is None:
            raise HttpRefusal(400, "name a base_model or a model_path to sample from")
        self.catalogue.check_served(base)
        return Sampler(sampler_id, base)
