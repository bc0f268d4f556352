"""A server on loopback that scores as its model does, in the dialect it is given, with scripted faults."""

import base64
import fcntl
import io
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.models.config import ModelConfig
from practicum.types import SampleRequest, SamplingParams

Fault = Callable[["Handler", bytes], bytes | None]
"""Answers in the server's place, given its normal answer (None), or changes that answer."""

Model = Callable[[Sequence[int]], Tensor]
"""The log-probabilities [T, V] of each token of a text given the tokens before it."""


def table(vocabulary: int = 11, seed: int = 0) -> Model:
    """Return a model that only reads the last token."""
    rows = torch.randn(
        vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(seed)
    ).log_softmax(-1)
    return lambda ids: rows[[vocabulary, *ids[:-1]]]


class FolderModel:
    """A model folder that scores, and writes by the seed of a request."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load(ModelConfig(model=str(folder)))

    def __call__(self, ids: Sequence[int]) -> Tensor:
        model = self.loaded.language_model
        with torch.no_grad():
            logits = model.model(torch.tensor([[*ids]])).logits[0, :, : model.vocab_size].float()
        return torch.cat([torch.zeros(1, model.vocab_size), logits[:-1]]).log_softmax(-1)

    def stream(self, ids: Sequence[int]) -> Tensor:
        """Return the output of the last layer, before the last norm."""
        kept: list[Tensor] = []
        model: Any = self.loaded.language_model.model
        hook = model.model.layers[-1].register_forward_hook(
            lambda layer, given, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            model(torch.tensor([[*ids]]))
        hook.remove()
        return kept[0].reshape(len(ids), -1)

    def write(
        self, ids: Sequence[int], most: int, seed: int, temperature: float
    ) -> tuple[list[int], list[float], bool]:
        params = SamplingParams(most, temperature, stop_ids=self.loaded.renderer.stop_ids)
        (sample,) = LocalSampler(self.loaded.language_model).sample(
            [SampleRequest(tuple(ids), seed)], params
        )
        return (
            sample.tokens.tolist(),
            sample.sampling_logprobs.tolist(),
            sample.stop_reason == "stop",
        )


@dataclass
class Stub:
    """The server and its log; `script` lists the faults of the next questions, None for no fault."""

    model: Any = field(default_factory=table)
    dialect: str = "vllm"
    name: str = "m"
    most: int = 20
    context: int | None = 64
    tempered: bool = False
    bend: Callable[[Tensor], Tensor] = lambda rows: rows
    answers_as: str | None = None
    states: Path | None = None
    names: bool = False
    change_states: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
    writes_after: float = 0.0
    key: str | None = None
    script: list[Fault | None] = field(default_factory=list)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    port: int = 0
    tls: ssl.SSLContext | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Stub":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen: the first time on a port that the system chooses, later on the same one."""
        stub = self

        class Bound(Handler):
            owner = stub

        self._server = Server(("127.0.0.1", self.port), Bound)
        self.port = self._server.server_address[1]
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def scored(self) -> list[Any]:
        """Return the bodies of the scoring questions."""
        return [
            body
            for path, body in self.asked
            if "prompt_logprobs" in (body or {}) or (body or {}).get("echo")
        ]

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON of a healthy answer."""
        if path == "/v1/models":
            return 200, {
                "data": [{"id": self.name, "owned_by": self.dialect, "max_model_len": self.context}]
            }
        if path == "/v1/chat/completions":
            return 200, {
                "choices": [
                    {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
                ],
                "usage": {"prompt_tokens": 10, "completion_tokens": 2},
            }
        if path == "/v1/messages":
            return 200, {
                "content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "ab"}],
                "stop_reason": "end_turn",
                "usage": {"input_tokens": 10, "output_tokens": 2},
            }
        if path == "/inference/v1/generate" and self.names:
            return self._names(body)
        if path == "/generate" and self.dialect == "sglang":
            return self._sglang(body)
        if path == "/v1/completions" and self.dialect in ("vllm", "echo", "echo_text"):
            code, said = self._completions(body)
            if self.states is not None and code == 200:
                said["kv_transfer_params"] = {"hidden_states_path": self._write_states(body)}
            return code, said
        return 404, {"error": {"message": "File Not Found"}}

    def _write_states(self, body: Any) -> str:
        """Name a file, lock it, and write it a while later, as vLLM's connector does."""
        assert self.states is not None
        with self.lock:
            stream = self.model.stream(body["prompt"])
            file = self.states / f"cmpl-{len(self.asked)}-{id(body)}-0.safetensors"
        # Two layers, so that the last one has to be chosen.
        hidden = torch.stack([stream.flip(0), stream], dim=1)
        tensors = self.change_states(
            {"hidden_states": hidden, "token_ids": torch.tensor(body["prompt"])}
        )
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            try:
                if tensors:
                    save_file(tensors, file)
            finally:
                os.close(lock)

        threading.Timer(self.writes_after, finish).start()
        # The server's own view of a shared folder.
        return f"/somewhere/else/{file.name}"

    def _logprobs(self, ids: Sequence[int], temperature: float) -> Tensor:
        with self.lock:
            rows = self.model(ids)
        return self.bend((rows / temperature).log_softmax(-1) if self.tempered else rows)

    def _completions(self, body: Any) -> tuple[int, Any]:
        ids = body["prompt"]
        k = (
            body.get("prompt_logprobs")
            if self.dialect == "vllm"
            else body.get("logprobs")
            if body.get("echo")
            else None
        )
        if k is None:
            return 200, {"choices": [self._wrote(body)]}
        if k > self.most:
            return 400, {
                "error": {
                    "message": f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.most}"
                }
            }
        rows = self._logprobs(ids, body["temperature"])
        if k > rows.shape[1]:
            return 500, {"error": {"message": "the engine died"}}  # as in vLLM
        tops = rows.topk(k, dim=-1).indices.tolist() if k else [[] for _ in ids]
        if self.dialect == "vllm":
            given = [
                {
                    str(t): {"logprob": rows[place, t].item(), "rank": 1}
                    for t in {token, *tops[place]}
                }
                for place, token in enumerate(ids)
            ]
            return 200, {
                "choices": [
                    {"text": "", "finish_reason": "length", "prompt_logprobs": [None, *given[1:]]}
                ]
            }
        numbered = self.dialect == "echo"
        word = (lambda token: f"token_id:{token}") if numbered else (lambda token: f"w{token}")
        own = [rows[place, token].item() for place, token in enumerate(ids)]
        best = [{word(t): rows[place, t].item() for t in tops[place]} for place in range(len(ids))]
        logprobs = {"tokens": [*map(word, ids), word(0)], "token_logprobs": [None, *own[1:], -1.0]}
        return 200, {
            "choices": [
                {"text": "", "logprobs": {**logprobs, "top_logprobs": [None, *best[1:], {}]}}
            ]
        }

    def _wrote(self, body: Any) -> dict[str, Any]:
        if not isinstance(self.model, FolderModel):
            return {
                "text": "x",
                "finish_reason": "length",
                "token_ids": [3],
                "logprobs": {"token_logprobs": [-1.0]},
            }
        with self.lock:
            tokens, logprobs, stopped = self.model.write(
                body["prompt"], body["max_tokens"], body.get("seed", 0), body["temperature"]
            )
        ids = (
            {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            if self.dialect == "vllm"
            else {}
        )
        text = self.model.loaded.renderer.decode(tokens)
        return {
            "text": text,
            "finish_reason": "stop" if stopped else "length",
            "stop_reason": None,
            **ids,
        }

    def _sglang(self, body: Any) -> tuple[int, Any]:
        ids, params = body["input_ids"], body["sampling_params"]
        if "logprob_start_len" not in body:
            if not isinstance(self.model, FolderModel):
                about = {
                    "finish_reason": {"type": "length"},
                    "output_token_logprobs": [[-1.0, 3, None]],
                }
                return 200, {"text": "", "meta_info": about}
            # SGLang takes no seed, so the prompt replaces it.
            (tokens, logprobs, stopped) = self.model.write(
                ids, params["max_new_tokens"], len(ids), params["temperature"]
            )
            about = {
                "finish_reason": {"type": "stop", "matched": tokens[-1]}
                if stopped
                else {"type": "length", "length": 1}
            }
            about["output_token_logprobs"] = [
                [lp, token, None] for lp, token in zip(logprobs, tokens, strict=True)
            ]
            return 200, {"text": "", "output_ids": tokens, "meta_info": about}
        rows, begin, k = (
            self._logprobs(ids, params["temperature"]),
            body["logprob_start_len"],
            body["top_logprobs_num"],
        )
        own = [[rows[p, ids[p]].item(), ids[p], None] for p in range(begin + 1, len(ids))]
        values, best = rows.topk(min(k, rows.shape[1]), dim=-1)
        top = [
            [[v, i, None] for v, i in zip(values[p].tolist(), best[p].tolist(), strict=True)]
            for p in range(begin + 1, len(ids))
        ]
        about = {
            "input_token_logprobs": [[None, ids[begin], None], *own],
            "input_top_logprobs": [None, *top],
        }
        if not k:
            del about["input_top_logprobs"]
        union = body.get("token_ids_logprob")
        if union and self.names:
            table = [[[rows[p, i].item(), i, None] for i in union] for p in range(len(ids))]
            about["input_token_ids_logprobs"] = [None, *table[begin + 1 :]]
        return 200, {"text": "", "meta_info": about}

    def _names(self, body: Any) -> tuple[int, Any]:
        """Answer as vLLM's entry point for tokens does, with a table in numpy's format."""
        params = body["sampling_params"]
        ids, named = body["token_ids"], params["prompt_logprob_token_ids"]
        rows = self._logprobs(ids, params["temperature"])
        first = params["prompt_logprob_start"] + 1
        table = [[rows[first + n, i].item() for i in row] for n, row in enumerate(named)]
        file = io.BytesIO()
        np.save(file, np.array(table, dtype=np.float32), allow_pickle=False)
        return 200, {"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}


class Server(ThreadingHTTPServer):
    """Runs threads that end with the process; clients may break pipes."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    owner: Stub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Any) -> None:
        stub = self.owner
        keys = (self.headers.get("x-api-key"), self.headers.get("Authorization"))
        if stub.key is not None and keys not in ((stub.key, None), (None, f"Bearer {stub.key}")):
            self.send(401, b'{"error": "no key"}')
            return
        with stub.lock:
            stub.asked.append((self.path, body))
            fault = stub.script.pop(0) if stub.script and body is not None else None
        status, answer = stub.answer(self.path, body)
        if stub.answers_as is not None and body is not None:
            answer["model"] = stub.answers_as
        data: bytes | None = json.dumps(answer).encode()
        if fault is not None:
            data = fault(self, data or b"")
        if data is not None:
            self.send(status, data)

    def send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


def status(code: int, body: bytes = b"", **headers: str) -> Fault:
    """Return another status than 200."""

    def fault(handler: Handler, _: bytes) -> None:
        handler.send(code, body, **headers)

    return fault


def changed(edit: Callable[[Any], Any]) -> Fault:
    """Change something in the right answer; `edit` changes in place or returns another answer."""

    def fault(_: Handler, data: bytes) -> bytes:
        answer = json.loads(data)
        other = edit(answer)
        return json.dumps(answer if other is None else other).encode()

    return fault


def raw(body: bytes) -> Fault:
    """Return status 200 and exactly these bytes."""
    return lambda _, __: body


def late(seconds: float) -> Fault:
    """Return the right answer after a delay."""

    def fault(_: Handler, data: bytes) -> bytes:
        time.sleep(seconds)
        return data

    return fault


def drip(seconds: float) -> Fault:
    """Send good headers, and then a byte now and then."""

    def fault(handler: Handler, data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        end = time.monotonic() + seconds
        for byte in data:
            if time.monotonic() > end:
                break
            handler.wfile.write(bytes([byte]))
            time.sleep(0.05)
        handler.close_connection = True

    return fault


def flood(handler: Handler, _: bytes) -> None:
    """Send far more than any answer needs, in pieces and without a length."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" " * (1 << 16))
    handler.close_connection = True


def hang_up(handler: Handler, _: bytes) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()
