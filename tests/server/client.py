"""A small client of the service for tests: JSON and protobuf as the tinker package sends them, without the package."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("google.protobuf")

from starlette.testclient import TestClient

from practicum.core.access import Admission
from practicum.core.notes import show_notes
from practicum.models.config import ModelConfig
from practicum.server.app import build_app
from practicum.server.futures import Futures, ResponseBody
from practicum.server.limits import RequestLimits
from practicum.server.model_cache import ModelCache
from practicum.server.service import Service
from practicum.server.store import Store
from practicum.server.wire import PROTOBUF, load_messages
from practicum.server.worker import ModelJob

V1 = "/api/v1"


class VerifierFailed(Exception):
    """A future that ended with an error."""


class Client:
    """The requests of one session, with a wait for each answer."""

    def __init__(self, http: TestClient, service: Service, said: list[str]) -> None:
        self.http = http
        self.service = service
        self.said = said
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")[
            "session_id"
        ]
        self.numbers: dict[str, int] = {}

    def post(self, name: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = self.http.post(f"{V1}/{name}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    def wait(self, reply: Mapping[str, Any]) -> Any:
        while True:
            response = self.http.post(
                f"{V1}/retrieve_future", json={"request_id": reply["request_id"]}
            )
            assert response.status_code == 200, response.text
            if response.headers["content-type"] == PROTOBUF:
                return response.content
            found = response.json()
            if "error" in found:
                raise VerifierFailed(found["error"])
            if found.get("type") != "try_again":
                return found

    def number(self, model: str) -> int:
        self.numbers[model] = self.numbers.get(model, 0) + 1
        return self.numbers[model]

    def model(self, base: str = "student", number: int = 0, **lora: Any) -> str:
        reply = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=base,
            lora_config={"rank": 4, "seed": 0, **lora},
            user_metadata={"renderer_name": "plain"},
        )
        return self.wait(reply)["model_id"]

    def sampler(self, number: int, **what: str) -> str:
        reply = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=number,
            **what,
        )
        return reply["sampling_session_id"]

    def ask(
        self,
        tokens: Sequence[int],
        *,
        seed: int = 0,
        max_tokens: int | None = 4,
        num: int = 1,
        **more: Any,
    ) -> Any:
        """Build a sampling request; `stop`, `temperature`, `top_k`, `top_p` go to the sampling parameters."""
        names = ("stop", "temperature", "top_k", "top_p")
        params = {
            "seed": seed,
            "max_tokens": max_tokens,
            **{name: more.pop(name) for name in names if name in more},
        }
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        return self.post("asample", num_samples=num, prompt=prompt, sampling_params=params, **more)

    def sample(self, tokens: Sequence[int], **more: Any) -> Any:
        message = load_messages().SampleResponse()
        message.ParseFromString(self.wait(self.ask(tokens, **more)))
        return message

    def train(
        self,
        model: str,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        *,
        forward_only: bool = False,
        **config: float,
    ) -> Any:
        message = self.train_request(model, data, loss, config)
        message.forward_only = forward_only
        return self.train_bytes(message.SerializeToString())

    def train_bytes(self, body: bytes) -> Any:
        response = self.http.post(
            f"{V1}/forward_backward", content=body, headers={"content-type": PROTOBUF}
        )
        assert response.status_code == 200, response.text
        output = load_messages().ForwardBackwardOutput()
        output.ParseFromString(self.wait(response.json()))
        return output

    def train_request(
        self, model: str, data: Sequence[Mapping[str, Any]], loss: str, config: Mapping[str, float]
    ) -> Any:
        message = load_messages().ForwardBackwardRequest(
            model_id=model, seq_id=self.number(model), loss_fn=loss
        )
        for name, value in config.items():
            message.loss_fn_config_v2[name].number = value
        for datum in data:
            added = message.data.add()
            added.model_input.add().encoded_text.tokens = np.asarray(
                datum["tokens"], dtype="<i4"
            ).tobytes()
            for name, values in datum.items():
                if name != "tokens":
                    write(added.loss_fn_inputs[name], np.asarray(values))
        return message

    def step(self, model: str, learning_rate: float = 0.01, **adam: float) -> dict[str, Any]:
        params = {"learning_rate": learning_rate, **adam}
        return self.wait(
            self.post("optim_step", model_id=model, seq_id=self.number(model), adam_params=params)
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing begin within the block, so that its requests wait together."""
        free = threading.Event()

        def wait(items: Sequence[None]) -> list[ResponseBody]:
            free.wait(60)
            return [ResponseBody(b"{}", "application/json")]

        self.service._worker.submit(ModelJob(None, wait))
        try:
            yield
        finally:
            free.set()

    def save(self, model: str, path: str, kind: str = "save_weights", **more: Any) -> str:
        return self.wait(
            self.post(kind, model_id=model, path=path, seq_id=self.number(model), **more)
        )["path"]


def write(message: Any, values: np.ndarray) -> None:
    whole = values.dtype.kind == "i"
    message.dtype = load_messages().DTYPE_INT64 if whole else load_messages().DTYPE_FLOAT32
    message.shape.extend(values.shape)
    message.dense = values.astype("<i8" if whole else "<f4").tobytes()


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


def logprobs(output: Any) -> list[np.ndarray]:
    """Return the log-probabilities of each datum of a ForwardBackwardOutput."""
    found = []
    for record in output.loss_fn_outputs:
        batched = record.fields["logprobs"]
        offsets = np.frombuffer(batched.offsets, dtype="<i8")
        for start, stop in pairwise(offsets):
            found.append(floats(batched.data[start:stop]).reshape(-1, *batched.trailing_shape))
    return found


@contextlib.contextmanager
def serving(
    models: Path,
    out: Path,
    *,
    memory: int | None = None,
    students: Sequence[str] = ("student",),
    max_open: int = 4096,
    limits: RequestLimits | None = None,
    **gate: Any,
) -> Iterator[Client]:
    """Run a service over the models of a folder, without a socket."""
    names = ("student", "teacher")
    said: list[str] = []
    served = {name: ModelConfig(model=str(models / name), device="cpu") for name in names}
    token = gate.get("token")
    with show_notes(said.append):
        service = Service(
            ModelCache(served, memory),
            Store(out),
            frozenset(students),
            Futures(max_open),
            limits or RequestLimits(body_bytes=2**20, poll_seconds=5.0),
        )
        app = build_app(service, Admission(**gate))
        with TestClient(
            app, base_url="http://localhost", headers={"x-api-key": token} if token else {}
        ) as http:
            yield Client(http, service, said)
