"""The last layer's hidden states, which vLLM writes to files; norm and head are applied here.

vLLM's connector replies with the name of a file and writes the file afterwards, under a lock.
So the full distribution of a served model costs twice its width in bytes per token, and vLLM needs
no patch.
"""

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from practicum.costs import Meter
from practicum.errors import TeacherError
from practicum.models.config import ModelConfig
from practicum.objective import EVERY_SIGNAL, Capabilities, Full, Signal
from practicum.ports import (
    ModelEnding,
    SamplingClient,
    StepFollower,
)
from practicum.remote.http import JsonRequest
from practicum.teaching.dialects import read_states_name
from practicum.teaching.remote import RemoteClient
from practicum.types import (
    FrozenConfig,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

LOCK_SECONDS = 60.0
"""Seconds in which a file must have been written after its request was answered."""

POLL_SECONDS = 0.01

STATE_BYTES = 2
"""The bytes of a number in the files of a model in half precision."""

MAX_GAP = 0.05
"""Mean nats by which the canary may differ here from the server; half precision causes less."""


class StatesConfig(FrozenConfig):
    """The folder of a server's hidden states, and the model with the last norm and head."""

    folder: str = Field(description="folder that the server writes to, as this machine sees it")
    model: str = Field(
        description="folder, hub name or packaged name of the served model; its last norm and head "
        "are read from it"
    )
    trust_remote_code: bool = Field(
        default=False, description="run the Python code of the model folder"
    )

    def describe_model(self) -> ModelConfig:
        """Return the settings of the model with the last norm and head."""
        return ModelConfig(model=self.model, device="cpu", trust_remote_code=self.trust_remote_code)


@dataclass(frozen=True, slots=True)
class StatesFolder:
    """The folder of a server's hidden states on this machine."""

    path: Path
    width: int
    seconds: float = LOCK_SECONDS

    def take(self, answer: Any, tokens: Sequence[int]) -> Float[Tensor, "T D"]:
        """Return the last layer's states of a text and remove their file. Raises TeacherError."""
        name = read_states_name(answer)
        if name is None:
            raise TeacherError(
                "its answer names no hidden states; start the server with the flags that "
                "practicum probe prints"
            )
        file = self.path / name
        self._wait(file)
        try:
            tensors = load_file(file)
        except FileNotFoundError:
            raise TeacherError(
                f"{file} was named but does not exist: the server failed to write it (its log says "
                "why; vLLM 0.32 on a CPU always fails), or writes to another folder"
            ) from None
        except (OSError, SafetensorError) as error:
            raise TeacherError(f"{file} cannot be read ({error}); look at the server") from error
        states = self._check(file, tensors, tokens)
        try:
            # No other process reads these files, and the files of a whole run would fill the disk.
            file.unlink()
            self._lock_of(file).unlink()
        except OSError as error:
            raise TeacherError(
                f"{file} cannot be removed ({error.strerror}), and such files would fill the "
                "folder; let this user write there"
            ) from error
        return states

    def _lock_of(self, file: Path) -> Path:
        return file.with_name(f"{file.name}.lock")

    def _wait(self, file: Path) -> None:
        """Wait until the server has released the file's lock, with a timeout."""
        lock, end = self._lock_of(file), monotonic() + self.seconds
        try:
            descriptor = os.open(lock, os.O_RDONLY)
        except OSError as error:
            raise TeacherError(
                f"{lock} cannot be opened ({error.strerror}), so it is not known when the states "
                "are complete; name the folder that the server writes to, and leave its "
                "use_synchronization_lock on"
            ) from error
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    # Without a timeout, the wait would not end if the server died while a child
                    # held the lock.
                    if monotonic() > end:
                        raise TeacherError(
                            f"{file} was not written in {self.seconds:g} s; look at the server"
                        ) from None
                    sleep(POLL_SECONDS)
        finally:
            os.close(descriptor)

    def _check(self, file: Path, tensors: dict[str, Tensor], tokens: Sequence[int]) -> Tensor:
        states, ids = tensors.get("hidden_states"), tensors.get("token_ids")
        if states is None or ids is None or states.ndim != 3:
            raise TeacherError(
                f"{file} holds no hidden_states [tokens, layers, width] and token_ids"
            )
        if ids.tolist() != list(tokens):
            raise TeacherError(f"{file} has other tokens than were sent; look at the server")
        if states.shape[0] != len(tokens) or states.shape[2] != self.width:
            raise TeacherError(
                f"{file} has states of {tuple(states.shape)} for {len(tokens)} tokens, and the "
                f"model's width is {self.width}; name the model that is served"
            )
        last = states[:, -1].float()
        if not torch.isfinite(last).all():
            raise TeacherError(f"{file} holds NaN or infinite states; look at the server")
        return last


class StatesClient(StepFollower, SamplingClient):
    """A client that reads full distributions from a server's files; see `SamplingClient`.

    The server writes a file for every request. A rollout's file is removed when it is read; the
    files of the probe, the canary and completions stay in the folder.
    """

    def __init__(
        self,
        remote: RemoteClient,
        folder: StatesFolder,
        ending: ModelEnding,
        model: str,
        meter: Meter | None,
    ) -> None:
        self._remote = remote
        self._folder = folder
        self._ending = ending
        self._model = model
        self._meter = meter

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return EVERY_SIGNAL

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return the hidden states of each request's tokens with the head that reads them."""
        # Files are read after the last answer: waiting for a lock would delay other requests.
        answers = self._remote.ask_about(requests, self._build_body, _keep_answer, None)
        return [
            self._read(answer, request) for answer, request in zip(answers, requests, strict=True)
        ]

    def _build_body(self, request: ScoreRequest) -> JsonRequest:
        ids = [*request.prompt_tokens, *request.tokens]
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        return JsonRequest("/v1/completions", body)

    def _read(self, answer: Any, request: ScoreRequest) -> TeacherSignal:
        width, head = self._ending.width, self._ending.head
        if not request.tokens:
            return TeacherSignal(hidden=torch.zeros(0, width), head=head)
        try:
            stream = self._folder.take(answer, [*request.prompt_tokens, *request.tokens])
        except TeacherError as error:
            raise TeacherError(f"{self._remote.address}: {error}") from error
        if self._meter is not None:
            self._meter.count_bytes("score", STATE_BYTES * stream.numel())
        # The state at each token predicts the next one.
        start = len(request.prompt_tokens) - 1
        hidden = self._ending.finish(stream[start : start + len(request.tokens)])
        return TeacherSignal(hidden=hidden, head=head)

    def check_ending(self, canary: ScoreRequest, expected: Float[Tensor, " T"]) -> None:
        """Raise TeacherError unless norm and head here give the server's own scores of a text."""
        (signal,) = self.score([canary], Full())
        states, head = signal.states, signal.head
        assert states is not None and head is not None
        tokens = torch.tensor(canary.tokens)[:, None]
        scores = head.logprobs(states).cpu().gather(1, tokens)[:, 0]
        gap = (scores - expected).abs().mean().item()
        if not gap <= MAX_GAP:
            raise TeacherError(
                f"{self._remote.address}: the norm and head of {self._ending.source} give other "
                f"log-probabilities than the server, by {gap:.3g} nats per token; "
                "name the served model as teacher.states.model, and let the server write the states "
                "of its last layer (eagle_aux_hidden_state_layer_ids: the number of its layers)"
            )

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample completions at the server."""
        return self._remote.sample(requests, params)

    def save_state(self) -> dict[str, Tensor]:
        """Return the state of the inner client: its canary, and the tokens used so far."""
        return self._remote.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `save_state`."""
        self._remote.load_state(tensors)


def _keep_answer(json_request: JsonRequest, request: ScoreRequest, answer: Any) -> Any:
    return answer
