"""An endpoint that serves the student in training to programs and users.

Requests wait for the student's next turn. A program sends tokens to a line with a secret path, so
that several conversations share one server and no other program on this machine can join a
conversation. Users send messages to the line `v1`, as with any server of the chat protocol.
"""

import contextlib
import json
import queue
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from practicum.agents.chat_words import (
    ChatProblem,
    ChatRequest,
    list_logprobs,
    read_chat_request,
    write_answer,
    write_stream,
)
from practicum.core.access import Admission, name_hosts, name_place
from practicum.ports import SampledTurn, TurnRequest

MODEL = "student"
"""The name of the model at the endpoint."""

CONTEXT = 1 << 20
"""The context length that the endpoint reports; the run itself ends conversations that are too long."""

MAX_BODY_BYTES = 1 << 26
"""The maximum size of a request body."""

MAX_WAITING = 1024
"""The maximum number of requests that wait in one line."""

USERS = "v1"
"""The path of the users' line."""

CLOSED = "the conversation is over"


class _GenerateRequest(BaseModel):
    # A training client also sends sampling settings, which are ignored: the recipe sets them.
    model_config = ConfigDict(frozen=True)
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]


@dataclass(frozen=True, slots=True)
class EngineLine:
    """The line of one conversation, or of all users: its address and its incoming requests."""

    base_url: str
    events: "queue.SimpleQueue[TurnRequest | object]" = field(default_factory=queue.SimpleQueue)


class TokenEngine:
    """The server of all lines; it runs until the process ends or `close` is called."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        admission: Admission | None = None,
        *,
        serves_users: bool = False,
    ) -> None:
        """Start listening; OSError if the address is in use."""
        self._lines: dict[str, EngineLine] = {}
        lines, admits = self._lines, admission or Admission(hosts=name_hosts(host))

        class LineHandler(_EngineHandler):
            lines_by_path = lines
            admission = admits

        self._server = _LineServer((host, port), LineHandler)
        self._address = f"http://{name_place(host, self._server.server_port)}"
        # Users may send requests immediately, so their line must exist before the server starts.
        self.users = EngineLine(f"{self._address}/{USERS}")
        if serves_users:
            self._lines[USERS] = self.users
        threading.Thread(
            target=self._server.serve_forever, name="token engine", daemon=True
        ).start()

    def open_line(self) -> EngineLine:
        """Open a line for one conversation of a program."""
        path = secrets.token_hex(16)
        line = self._lines[path] = EngineLine(f"{self._address}/{path}/v1")
        return line

    def close_line(self, line: EngineLine) -> None:
        """Remove a line, and refuse the requests that still wait in it."""
        path = next((path for path, open_line in self._lines.items() if open_line is line), None)
        self._lines.pop(path or "", None)
        while not line.events.empty():
            event = line.events.get()
            if isinstance(event, TurnRequest):
                event.reply(CLOSED)

    def close(self) -> None:
        """Refuse all waiting requests, and stop listening."""
        for line in list(self._lines.values()):
            self.close_line(line)
        self._server.shutdown()
        self._server.server_close()


class _LineServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        # The base class creates its socket from this.
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)


class _EngineHandler(BaseHTTPRequestHandler):
    lines_by_path: ClassVar[dict[str, EngineLine]]
    admission: ClassVar[Admission]
    timeout = 120
    """The maximum time in seconds for a request to arrive."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a step has many requests."""

    # The standard library defines the method names.
    def do_GET(self) -> None:
        """List the only model, `student`."""
        refusal = self.admission.find_refusal(self.headers.get)
        if refusal is not None:
            self._refuse(*refusal)
            return
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "practicum"}
        self._write(200, {"object": "list", "data": [{**model, "max_model_len": CONTEXT}]})

    def do_POST(self) -> None:
        """Wait for the turn that continues the tokens or messages, and send it."""
        path, _, action = self.path.lstrip("/").partition("/")
        line = self.lines_by_path.get(path)
        length = self.headers.get("content-length") or "0"
        refusal = self.admission.find_refusal(self.headers.get)
        if refusal is not None:
            self._refuse(*refusal)
        elif not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._refuse(413, f"send at most {MAX_BODY_BYTES} bytes")
        elif line is not None and path == USERS and action == "chat/completions":
            self._answer_messages(line, self.rfile.read(int(length)))
        elif line is not None and path != USERS and action == "inference/v1/generate":
            self._answer_tokens(line, self.rfile.read(int(length)))
        else:
            self._refuse(404, "no such line")

    def _answer_tokens(self, line: EngineLine, body: bytes) -> None:
        """Answer a program in tokens, as the endpoint of vLLM does."""
        try:
            message = _GenerateRequest.model_validate_json(body)
        except ValidationError:
            self._refuse(400, "token_ids are needed")
            return
        turn = self._wait(line, TurnRequest(tokens=tuple(message.token_ids)))
        if turn is not None:
            choice = {
                "index": 0,
                "token_ids": list(turn.tokens),
                # A truncated turn ends its conversation and is never sent.
                "finish_reason": "stop",
                "logprobs": {"content": list_logprobs(turn)},
            }
            self._write(200, {"request_id": secrets.token_hex(8), "choices": [choice]})

    def _answer_messages(self, line: EngineLine, body: bytes) -> None:
        """Answer a user in a message, whole or as a stream."""
        try:
            chat: ChatRequest = read_chat_request(body, MODEL)
            request = chat.build_turn_request()
        except ChatProblem as problem:
            self._refuse(400, str(problem))
            return
        turn = self._wait(line, request)
        if turn is None:
            return
        has_logprobs = bool(chat.logprobs)
        if chat.stream:
            self._send("text/event-stream", write_stream(turn, MODEL, logprobs=has_logprobs))
        else:
            self._write(200, write_answer(turn, MODEL, logprobs=has_logprobs))

    def _wait(self, line: EngineLine, request: TurnRequest) -> SampledTurn | None:
        """Return the turn for a request; if the request is refused, send the reason, return None."""
        if line.events.qsize() >= MAX_WAITING:
            self._refuse(429, f"{MAX_WAITING} requests wait already; try again later")
            return None
        line.events.put(request)
        # If the line was closed in the meantime, nothing else would answer this request.
        if line not in list(self.lines_by_path.values()):
            request.reply(CLOSED)
        turn = request.answers.get()
        if isinstance(turn, str):
            self._refuse(400, turn)
            return None
        return turn

    def _refuse(self, status: int, reason: str) -> None:
        self._write(status, {"error": {"message": reason}})

    def _write(self, status: int, data: Any) -> None:
        self._send("application/json", [json.dumps(data).encode()], status)

    def _send(self, media_type: str, parts: Iterable[bytes], status: int = 200) -> None:
        body = b"".join(parts)
        # A cancelled program may have closed the connection.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("content-type", media_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
