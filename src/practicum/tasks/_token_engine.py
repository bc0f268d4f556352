"""An endpoint that samples tokens for another program: its requests wait until a turn is handed over.

The path of a conversation is a secret of its own, so several conversations share one server and no
other program of this machine can speak in one of them.
"""

import contextlib
import json
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from practicum.ports import SampledTurn

MODEL = "student"
"""The name of the model at the endpoint."""

CONTEXT = 1 << 20
"""The longest text that the endpoint promises: the run itself ends conversations that are too long."""

MAX_BODY_BYTES = 1 << 26
"""The longest request that is read."""


class _GenerateRequest(BaseModel):
    # A training client also sends settings of sampling: those of the recipe hold.
    model_config = ConfigDict(frozen=True)
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request for the tokens after a text; `reply` hands them over, None refuses."""

    tokens: tuple[int, ...]
    answers: "queue.SimpleQueue[SampledTurn | None]" = field(default_factory=queue.SimpleQueue)

    def reply(self, turn: SampledTurn | None) -> None:
        """Answer the request."""
        self.answers.put(turn)


@dataclass(frozen=True, slots=True)
class EngineLine:
    """The line of one conversation: where its program asks, and the requests that came in."""

    base_url: str
    events: "queue.SimpleQueue[TokenRequest | object]" = field(default_factory=queue.SimpleQueue)


class TokenEngine:
    """The server of all lines; it ends with the process."""

    def __init__(self) -> None:
        self._lines: dict[str, EngineLine] = {}
        lines = self._lines

        class LineHandler(_EngineHandler):
            lines_by_path = lines

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), LineHandler)
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, name="token engine", daemon=True
        ).start()

    def open_line(self) -> EngineLine:
        """Return a line for one conversation."""
        path = secrets.token_hex(16)
        line = EngineLine(f"http://127.0.0.1:{self._server.server_port}/{path}/v1")
        self._lines[path] = line
        return line

    def close_line(self, line: EngineLine) -> None:
        """Forget a line, and refuse the requests that still wait in it."""
        self._lines.pop(line.base_url.split("/")[-2], None)
        while not line.events.empty():
            event = line.events.get()
            if isinstance(event, TokenRequest):
                event.reply(None)


class _EngineHandler(BaseHTTPRequestHandler):
    lines_by_path: ClassVar[dict[str, EngineLine]]

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a step has many requests."""

    # The names are those of the standard library.
    def do_GET(self) -> None:
        """List the one model."""
        self._write(200, {"data": [{"id": MODEL, "max_model_len": CONTEXT}]})

    def do_POST(self) -> None:
        """Wait for the turn that goes on from the tokens, and return it."""
        path, _, action = self.path.lstrip("/").partition("/")
        line = self.lines_by_path.get(path)
        length = self.headers.get("content-length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._write(413, {"error": {"message": f"send at most {MAX_BODY_BYTES} bytes"}})
            return
        if line is None or action != "inference/v1/generate":
            self._write(404, {"error": {"message": "no such line"}})
            return
        try:
            message = _GenerateRequest.model_validate_json(self.rfile.read(int(length)))
        except ValidationError:
            self._write(400, {"error": {"message": "token_ids are needed"}})
            return
        request = TokenRequest(tuple(message.token_ids))
        line.events.put(request)
        # A line that was closed meanwhile is emptied by nobody.
        if path not in self.lines_by_path:
            request.reply(None)
        turn = request.answers.get()
        if turn is None:
            self._write(400, {"error": {"message": "the conversation is over"}})
            return
        self._write(200, _build_answer(turn))

    def _write(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        # A program that was cancelled reads no answer.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _build_answer(turn: SampledTurn) -> dict[str, Any]:
    """Return a turn as the endpoint of vLLM writes it."""
    pairs: Sequence[tuple[int, float]] = list(zip(turn.tokens, turn.logprobs, strict=True))
    content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
    choice = {
        "index": 0,
        "token_ids": list(turn.tokens),
        # A turn that was cut off ends its conversation and is never handed over.
        "finish_reason": "stop",
        "logprobs": {"content": content},
    }
    return {"request_id": secrets.token_hex(8), "choices": [choice]}
