"""Routes and statuses: what may come in, how it is read, and how each answer looks.

Everything that is refused is refused here, with a status that the tinker package understands: 400 what was sent is wrong,
401 no token, 403 from a web page or under another name, 404 no such thing, 410 no longer there, 413 too large, 429 too much.
"""

import asyncio
import hmac
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from practicum.errors import CheckpointError, DataError
from practicum.server import requests as asked
from practicum.server.refusals import HttpRefusal
from practicum.server.service import Service
from practicum.server.wire import PROTOBUF, read_train_request

V1 = "/api/v1"
PARSED_HERE = 2**16
"""Bytes of JSON that are parsed on the event loop; more are parsed on another thread."""

B = TypeVar("B", bound=asked.Body)
Page = Callable[[Request], Awaitable[Response]]
OPEN = ("/healthz", f"{V1}/healthz")
"""What is answered without a token."""


@dataclass(frozen=True, slots=True)
class AuthMiddleware:
    """Lets in who knows the token, under one of the names of this machine, and no web page.

    A page that a browser has open could otherwise send requests to a server on the same machine.
    """

    app: ASGIApp
    token: str | None
    hosts: frozenset[str] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        refused = self._refused(scope) if scope["type"] == "http" else None
        await (self.app if refused is None else _refusal(refused))(scope, receive, send)

    def _refused(self, scope: Scope) -> HttpRefusal | None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            return HttpRefusal(
                400,
                "a body has a content-length or is sent in chunks, not both; send one of the two headers",
            )
        host = _hostname(headers.get(b"host", b"").decode("latin-1"))
        if b"origin" in headers:
            return HttpRefusal(403, "requests from web pages are not answered")
        if self.hosts is not None and host not in self.hosts:
            return HttpRefusal(
                403,
                f"this server is not called {host!a:.80}; there are {', '.join(sorted(self.hosts))}",
            )
        if self.token is None or scope["path"] in OPEN:
            return None
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(
            b"Bearer "
        )
        if hmac.compare_digest(given, self.token.encode()):
            return None
        return HttpRefusal(
            401, "the token is missing or wrong; set TINKER_API_KEY to the token of this server"
        )


def _hostname(header: str) -> str | None:
    """The name of a Host header without its port; None where it is none."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def make_app(
    service: Service, *, token: str | None = None, hosts: frozenset[str] | None = None
) -> ASGIApp:
    """The ASGI application. `hosts` are the names under which it may be called; None: any."""
    pages = _Pages(service)

    @asynccontextmanager
    async def lifespan(app: Starlette):  # type: ignore[no-untyped-def]
        yield
        await asyncio.to_thread(service.close)

    app = Starlette(routes=pages.routes(), lifespan=lifespan)
    for kind in (HttpRefusal, DataError, CheckpointError):
        app.add_exception_handler(kind, _refusal_of)
    return AuthMiddleware(app, token, hosts)


class _Pages:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.limits

    def routes(self) -> list[Route]:
        service, catalogue = self._service, self._service.catalogue
        simple: dict[str, tuple[type[asked.Body], Callable[[Any], dict[str, Any]]]] = {
            "client/config": (asked.ClientConfig, lambda body: CLIENT_CONFIG),
            "client/dynamic_config": (
                asked.ClientConfig,
                lambda body: {"sample_cancel_enabled": True},
            ),
            "create_session": (asked.CreateSession, service.create_session),
            "sessions/search": (asked.SearchSessions, service.search_sessions),
            "session_heartbeat": (asked.OfSession, lambda body: service.heartbeat(body.session_id)),
            "create_model": (asked.CreateModel, service.create_model),
            "load_weights": (asked.LoadWeights, service.load_weights),
            "get_info": (asked.OfModel, lambda body: service.info(body.model_id)),
            "unload_model": (asked.OfModel, lambda body: service.unload(body.model_id)),
            "optim_step": (asked.OptimStep, service.optim_step),
            "save_weights": (asked.SaveWeights, service.save_weights),
            "save_weights_for_sampler": (asked.SaveWeights, service.save_for_sampler),
            "create_sampling_session": (asked.CreateSampler, service.create_sampler),
            "asample": (asked.SampleBody, service.sample),
            "weights_info": (
                asked.WeightsInfo,
                lambda body: service.catalogue.weights_info(body.tinker_path),
            ),
        }
        posts = [
            Route(f"{V1}/{name}", self._simple(*what), methods=["POST"])
            for name, what in simple.items()
        ]
        return [
            *posts,
            Route("/healthz", _healthy),
            Route(f"{V1}/healthz", _healthy),
            Route(f"{V1}/forward_backward", self.forward_backward, methods=["POST"]),
            Route(f"{V1}/retrieve_future", self.retrieve, methods=["POST"]),
            Route(f"{V1}/cancel_future", self.cancel, methods=["POST"]),
            Route(f"{V1}/telemetry", self.telemetry, methods=["POST"]),
            Route(f"{V1}/sessions/{{session}}/finish", self.finish, methods=["POST"]),
            Route(f"{V1}/get_server_capabilities", _look_up(catalogue.capabilities)),
            Route(f"{V1}/samplers/{{sampler_id}}", _look_up(service.sampler_info)),
            Route(f"{V1}/training_runs", _look_up(catalogue.training_runs)),
            Route(f"{V1}/training_runs/{{run}}", _look_up(catalogue.training_run)),
            Route(f"{V1}/training_runs/{{run}}/checkpoints", _look_up(catalogue.checkpoints)),
            Route(f"{V1}/{CHECKPOINT}", self.delete, methods=["DELETE"]),
            Route(f"{V1}/{CHECKPOINT}/ttl", self.lifetime, methods=["PUT"]),
            Route(f"{V1}/copy_weights", self.copy, methods=["POST"]),
            Route(f"{V1}/checkpoints", _look_up(catalogue.checkpoints)),
            Route(f"{V1}/sessions", self.sessions),
            Route(f"{V1}/sessions/{{session}}", self.session),
            *(
                Route(f"{V1}/{path}", _not_done(reason), methods=METHODS)
                for path, reason in NOT_DONE.items()
            ),
            Route("/{path:path}", _unknown, methods=METHODS),
        ]

    def _simple(self, kind: type[asked.Body], work: Callable[[Any], dict[str, Any]]) -> Page:
        async def page(request: Request) -> Response:
            return JSONResponse(work(await self._read(kind, request)))

        return page

    async def forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-type") != PROTOBUF or "content-encoding" in request.headers:
            raise HttpRefusal(400, f"forward_backward reads {PROTOBUF}, not compressed")
        body = await self._body(request, self._limits.body_bytes)
        return JSONResponse(
            self._service.forward_backward(await asyncio.to_thread(read_train_request, body))
        )

    async def retrieve(self, request: Request) -> Response:
        """The answer to an earlier request, or the word to try again after a while of waiting."""
        future = self._service.futures.get((await self._read(asked.Retrieve, request)).request_id)
        await asyncio.wait([asyncio.wrap_future(future)], timeout=self._limits.poll_seconds)
        if not future.done():
            return JSONResponse({"type": "try_again", "queue_state": "active"})
        if future.cancelled():
            return JSONResponse(
                {
                    "error": "the request was cancelled, or the server is closing",
                    "category": "server",
                }
            )
        answer = future.result()
        return Response(answer.body, media_type=answer.media_type)

    async def cancel(self, request: Request) -> Response:
        self._service.futures.get((await self._read(asked.Retrieve, request)).request_id).cancel()
        return JSONResponse({})

    async def telemetry(self, request: Request) -> Response:
        await self._body(request, self._json_bytes)  # nothing of it is kept
        return JSONResponse({"status": "accepted"})

    async def finish(self, request: Request) -> Response:
        await self._body(request, self._json_bytes)
        self._service.finish(request.path_params["session"])
        return JSONResponse({})

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.catalogue.delete_checkpoint, **request.path_params)
        return JSONResponse({})

    async def lifetime(self, request: Request) -> Response:
        seconds = (await self._read(asked.SetLifetime, request)).ttl_seconds
        await asyncio.to_thread(
            self._service.catalogue.set_lifetime, **request.path_params, seconds=seconds
        )
        return JSONResponse({})

    async def copy(self, request: Request) -> Response:
        """A copy in a run of its own, once for each key with which a client says that it is asking again."""
        body = await self._read(asked.CopyWeights, request)
        key = request.headers.get("x-idempotency-key")
        run = str(uuid.uuid4() if key is None else uuid.uuid5(uuid.NAMESPACE_OID, key))
        copied = await asyncio.to_thread(
            self._service.catalogue.copy, body.source_path, run, body.ttl_seconds
        )
        return JSONResponse(copied)

    async def sessions(self, request: Request) -> Response:
        offset, limit = (
            _number(request, name, other) for name, other in (("offset", 0), ("limit", 20))
        )
        return JSONResponse(self._service.sessions(offset, limit))

    async def session(self, request: Request) -> Response:
        return JSONResponse(self._service.session_info(request.path_params["session"]))

    @property
    def _json_bytes(self) -> int:
        return self._limits.json_bytes(self._service.catalogue.longest_context)

    async def _read(self, kind: type[B], request: Request) -> B:
        """The JSON body of a request; a large one is parsed on another thread."""
        body = await self._body(request, self._json_bytes)
        return (
            await asyncio.to_thread(asked.read, kind, body)
            if len(body) > PARSED_HERE
            else asked.read(kind, body)
        )

    async def _body(self, request: Request, most: int) -> bytes:
        """What is sent, as soon as all of it is here; `Refused` where it is too large or too slow."""
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
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
OTHERS = "whoever may call this server reads all of its checkpoints, so there is nobody to publish one to"
OUTSIDE = (
    "weights are not saved elsewhere; use save_state, whose folder `practicum serve --out` names"
)
NOT_DONE = {
    "save_weights_external": OUTSIDE,
    f"{CHECKPOINT}/external_weights_urls": OUTSIDE,
    f"{CHECKPOINT}/publish": OTHERS,
    "sessions/{session}/project": "there are no projects here",
    "sessions/{session}/trace_export": "no traces are recorded here",
    "billing/{path:path}": "nothing is billed here",
    "audit": "no audit log is kept here",
    "create_custom_loss": "losses are not uploaded here; use forward_backward_custom, which computes yours on your side",
}
"""What the Tinker API has and one machine has no use for, each with the reason that a client is told."""

CLIENT_CONFIG: dict[str, Any] = {
    "use_pyqwest_transport": False,
    "parallel_fwdbwd_chunks": False,  # parts of a batch arrive in order
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "pjwt_auth_enabled": False,
}
"""What the client is told about this server."""


def _look_up(work: Callable[..., dict[str, Any]]) -> Page:
    """Return the page that answers with what `work` makes of the names in the path, on another thread."""

    async def page(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(work, **request.path_params))

    return page


def _not_done(reason: str) -> Page:
    async def page(request: Request) -> Response:
        raise HttpRefusal(400, reason)

    return page


async def _unknown(request: Request) -> Response:
    raise HttpRefusal(
        404,
        f"this server has no {request.method} {request.url.path!a:.120}; docs/serve.md lists what it has",
    )


def _number(request: Request, name: str, other: int) -> int:
    """Return a number of the query, at least 0 and of at most nine digits."""
    text = request.query_params.get(name, str(other))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HttpRefusal(400, f"{name} is {text!a:.20}; write a number from 0 on")
    return int(text)


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _too_large(most: int) -> HttpRefusal:
    return HttpRefusal(413, f"the body is larger than {most} bytes; send it in parts")


def _refusal(refused: HttpRefusal) -> Response:
    headers = {} if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    return Response(
        json.dumps({"error": str(refused)}), refused.status, headers, "application/json"
    )


async def _refusal_of(request: Request, error: Exception) -> Response:
    """Answer an error of the service; one of a checkpoint's says that it is not there, any other that the request is wrong."""
    if isinstance(error, HttpRefusal):
        return _refusal(error)
    return _refusal(HttpRefusal(404 if isinstance(error, CheckpointError) else 400, str(error)))
