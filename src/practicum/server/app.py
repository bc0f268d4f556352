"""Define the routes: what a request may contain, how it is read, and the form of each answer.

Every refusal has a status that the tinker package understands: 400 the request is wrong, 401 no
token, 403 from a web page or under another name, 404 no such thing, 410 no longer there, 413 too
large, 429 too much.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from practicum.core.access import Admission
from practicum.errors import CheckpointError, DataError
from practicum.server import requests as bodies
from practicum.server.refusals import HttpRefusal
from practicum.server.service import Service
from practicum.server.wire import PROTOBUF, read_train_request

V1 = "/api/v1"
MAX_INLINE_BYTES = 2**16
"""The bytes of JSON that are parsed on the event loop; more are parsed on another thread."""

B = TypeVar("B", bound=bodies.Body)
Page = Callable[[Request], Awaitable[Response]]
PUBLIC_PATHS = ("/healthz", f"{V1}/healthz")
"""The paths that need no token."""


@dataclass(frozen=True, slots=True)
class AuthMiddleware:
    """Pass on the requests that are admitted; see `practicum.core.access.Admission`."""

    app: ASGIApp
    admission: Admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted request on, or answer with the refusal."""
        refusal = self._find_refusal(scope) if scope["type"] == "http" else None
        await (self.app if refusal is None else _respond_refusal(refusal))(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> HttpRefusal | None:
        headers = {
            name.decode("latin-1"): content.decode("latin-1") for name, content in scope["headers"]
        }
        # Two lengths of one body let a proxy and this server read different requests from it.
        if "content-length" in headers and "transfer-encoding" in headers:
            return HttpRefusal(
                400,
                "a body has a content-length or is sent in chunks, not both; send one of the two headers",
            )
        refusal = self.admission.find_refusal(headers.get, is_public=scope["path"] in PUBLIC_PATHS)
        if refusal is None:
            return None
        status, reason = refusal
        advice = "; set TINKER_API_KEY to the token of this server" if status == 401 else ""
        return HttpRefusal(status, reason + advice)


def build_app(service: Service, admission: Admission) -> ASGIApp:
    """Return the ASGI application."""
    pages = _Pages(service)

    @asynccontextmanager
    async def lifespan(app: Starlette):  # type: ignore[no-untyped-def]
        yield
        await asyncio.to_thread(service.close)

    app = Starlette(routes=pages.build_routes(), lifespan=lifespan)
    for kind in (HttpRefusal, DataError, CheckpointError):
        app.add_exception_handler(kind, _respond_error)
    return AuthMiddleware(app, admission)


class _Pages:
    """The routes, each with its method."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.limits

    def build_routes(self) -> list[Route]:
        service, catalogue = self._service, self._service.catalogue
        posts: dict[str, tuple[type[bodies.Body], Callable[[Any], dict[str, Any]]]] = {
            "client/config": (bodies.ClientConfig, lambda body: CLIENT_CONFIG),
            "client/dynamic_config": (bodies.ClientConfig, lambda body: DYNAMIC_CONFIG),
            "create_session": (bodies.CreateSession, service.create_session),
            "sessions/search": (bodies.SearchSessions, service.search_sessions),
            "session_heartbeat": (bodies.OfSession, service.record_heartbeat),
            "create_model": (bodies.CreateModel, service.create_model),
            "load_weights": (bodies.LoadWeights, service.load_weights),
            "get_info": (bodies.OfModel, service.describe_model),
            "unload_model": (bodies.OfModel, service.unload),
            "optim_step": (bodies.OptimStep, service.step_optimizer),
            "save_weights": (bodies.SaveWeights, service.save_weights),
            "save_weights_for_sampler": (bodies.SaveWeights, service.save_for_sampler),
            "create_sampling_session": (bodies.CreateSampler, service.create_sampler),
            "asample": (bodies.SampleBody, service.sample),
            "weights_info": (bodies.WeightsInfo, catalogue.describe_weights),
        }
        return [
            *(
                Route(f"{V1}/{name}", self._serve_json(kind, work), methods=["POST"])
                for name, (kind, work) in posts.items()
            ),
            *(Route(path, _report_health) for path in PUBLIC_PATHS),
            Route(f"{V1}/forward_backward", self.forward_backward, methods=["POST"]),
            Route(f"{V1}/retrieve_future", self.retrieve, methods=["POST"]),
            Route(f"{V1}/cancel_future", self.cancel, methods=["POST"]),
            Route(f"{V1}/telemetry", self.accept_telemetry, methods=["POST"]),
            Route(f"{V1}/sessions/{{session}}/finish", self.finish, methods=["POST"]),
            Route(f"{V1}/get_server_capabilities", _look_up(catalogue.describe_models)),
            Route(f"{V1}/samplers/{{sampler_id}}", _look_up(service.describe_sampler)),
            Route(f"{V1}/training_runs", _look_up(catalogue.list_runs)),
            Route(f"{V1}/training_runs/{{run}}", _look_up(catalogue.get_run)),
            Route(f"{V1}/training_runs/{{run}}/checkpoints", _look_up(catalogue.list_checkpoints)),
            Route(f"{V1}/{CHECKPOINT}", self.delete, methods=["DELETE"]),
            Route(f"{V1}/{CHECKPOINT}/ttl", self.set_lifetime, methods=["PUT"]),
            Route(f"{V1}/copy_weights", self.copy, methods=["POST"]),
            Route(f"{V1}/checkpoints", _look_up(catalogue.list_checkpoints)),
            Route(f"{V1}/sessions", self.list_sessions),
            Route(f"{V1}/sessions/{{session}}", self.describe_session),
            *(
                Route(f"{V1}/{path}", _refuse(reason), methods=METHODS)
                for path, reason in UNSUPPORTED.items()
            ),
            Route("/{path:path}", _refuse_unknown, methods=METHODS),
        ]

    def _serve_json(self, kind: type[bodies.Body], work: Callable[[Any], dict[str, Any]]) -> Page:
        async def respond(request: Request) -> Response:
            return JSONResponse(work(await self._read(kind, request)))

        return respond

    async def forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-type") != PROTOBUF or "content-encoding" in request.headers:
            raise HttpRefusal(400, f"forward_backward reads {PROTOBUF}, not compressed")
        body = await self._receive(request, self._limits.body_bytes)
        parsed = await asyncio.to_thread(read_train_request, body)
        return JSONResponse(self._service.forward_backward(parsed))

    async def retrieve(self, request: Request) -> Response:
        """Return the answer to an earlier request, or ask to try again after a wait."""
        future = self._service.futures.get((await self._read(bodies.Retrieve, request)).request_id)
        # `asyncio.wait` leaves the request running at the time-out; `wait_for` would cancel it.
        await asyncio.wait([asyncio.wrap_future(future)], timeout=self._limits.poll_seconds)
        if not future.done():
            return JSONResponse({"type": "try_again", "queue_state": "active"})
        if future.cancelled():
            text = "the request was cancelled, or the server is closing"
            return JSONResponse({"error": text, "category": "server"})
        answer = future.result()
        return Response(answer.body, media_type=answer.media_type)

    async def cancel(self, request: Request) -> Response:
        self._service.futures.get((await self._read(bodies.Retrieve, request)).request_id).cancel()
        return JSONResponse({})

    async def accept_telemetry(self, request: Request) -> Response:
        # Read and dropped: nothing about the use of this server leaves or stays.
        await self._receive(request, self._json_bytes)
        return JSONResponse({"status": "accepted"})

    async def finish(self, request: Request) -> Response:
        await self._receive(request, self._json_bytes)
        self._service.finish(request.path_params["session"])
        return JSONResponse({})

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.catalogue.delete_checkpoint, **request.path_params)
        return JSONResponse({})

    async def set_lifetime(self, request: Request) -> Response:
        seconds = (await self._read(bodies.SetLifetime, request)).ttl_seconds
        set_lifetime = self._service.catalogue.set_lifetime
        await asyncio.to_thread(set_lifetime, **request.path_params, seconds=seconds)
        return JSONResponse({})

    async def copy(self, request: Request) -> Response:
        """Copy a checkpoint into a new run, once for each idempotency key of a client."""
        body = await self._read(bodies.CopyWeights, request)
        key = request.headers.get("x-idempotency-key")
        # The same key gives the same run, so a repeated copy overwrites itself.
        run = str(uuid.uuid4() if key is None else uuid.uuid5(uuid.NAMESPACE_OID, key))
        copy = self._service.catalogue.copy
        return JSONResponse(await asyncio.to_thread(copy, body.source_path, run, body.ttl_seconds))

    async def list_sessions(self, request: Request) -> Response:
        offset = _read_number(request, "offset", default=0)
        limit = _read_number(request, "limit", default=20)
        return JSONResponse(self._service.list_sessions(offset, limit))

    async def describe_session(self, request: Request) -> Response:
        return JSONResponse(self._service.describe_session(request.path_params["session"]))

    @property
    def _json_bytes(self) -> int:
        return self._limits.compute_json_bytes(self._service.catalogue.longest_context)

    async def _read(self, kind: type[B], request: Request) -> B:
        """Return the JSON body of a request; a large one is parsed on another thread."""
        body = await self._receive(request, self._json_bytes)
        if len(body) > MAX_INLINE_BYTES:
            return await asyncio.to_thread(bodies.read, kind, body)
        return bodies.read(kind, body)

    async def _receive(self, request: Request, max_bytes: int) -> bytes:
        """Return the body of a request; raise `HttpRefusal` if it is too large or too slow."""
        too_large = HttpRefusal(413, f"the body is larger than {max_bytes} bytes; send it in parts")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > max_bytes:
                        raise too_large
                    parts.append(part)
        except ClientDisconnect as error:
            raise HttpRefusal(400, "the connection ended within the body") from error
        except TimeoutError as error:
            raise HttpRefusal(
                408, f"the body was not here within {self._limits.body_seconds:g} s; send it again"
            ) from error
        return b"".join(parts)


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
NO_PUBLISHING = "every client of this server can read all checkpoints, so publishing is not needed"
NO_EXPORT = (
    "weights are not saved elsewhere; use save_state, which writes to `practicum serve --out`"
)
UNSUPPORTED = {
    "save_weights_external": NO_EXPORT,
    f"{CHECKPOINT}/external_weights_urls": NO_EXPORT,
    f"{CHECKPOINT}/publish": NO_PUBLISHING,
    "sessions/{session}/project": "there are no projects here",
    "sessions/{session}/trace_export": "no traces are recorded here",
    "billing/{path:path}": "nothing is billed here",
    "audit": "no audit log is kept here",
    "create_custom_loss": (
        "losses are not uploaded here; use forward_backward_custom, which computes yours on your side"
    ),
}
"""The parts of the Tinker API without use on one machine, each with the reason for the client."""

CLIENT_CONFIG: dict[str, Any] = {
    "use_pyqwest_transport": False,
    # Parts of a batch arrive in order, as their gradients are added in that order.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "pjwt_auth_enabled": False,
}
"""The features of this server, in the client's words."""

DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


def _look_up(work: Callable[..., dict[str, Any]]) -> Page:
    """Return a page that calls `work` with the names of the path, on another thread."""

    async def respond(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(work, **request.path_params))

    return respond


def _refuse(reason: str) -> Page:
    async def respond(request: Request) -> Response:
        raise HttpRefusal(400, reason)

    return respond


async def _refuse_unknown(request: Request) -> Response:
    raise HttpRefusal(
        404,
        f"this server has no {request.method} {request.url.path!a:.120}; docs/serve.md lists what it has",
    )


def _read_number(request: Request, name: str, default: int) -> int:
    """Return a number of the query, at least 0 and of at most nine digits."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HttpRefusal(400, f"{name} is {text!a:.20}; write a number from 0 on")
    return int(text)


async def _report_health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _respond_refusal(refusal: HttpRefusal) -> Response:
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    body = json.dumps({"error": str(refusal)})
    return Response(body, refusal.status, headers, "application/json")


async def _respond_error(request: Request, error: Exception) -> Response:
    """Return the answer to an error of the service.

    A missing checkpoint is 404; any other error means that the request is wrong.
    """
    if isinstance(error, HttpRefusal):
        return _respond_refusal(error)
    status = 404 if isinstance(error, CheckpointError) else 400
    return _respond_refusal(HttpRefusal(status, str(error)))
