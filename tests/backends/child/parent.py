"""The parent's side of the pipe: each method of the port is one question to the child."""

import logging
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from backends.child.held import ASK, bring, take_dropped
from backends.child.process import answer
from practicum.errors import ResourceError
from practicum.objective import Objective, Signal
from practicum.ports import (
    AdamParams,
    BackendContext,
    Capabilities,
    Model,
    SelfTeacher,
    Student,
    WeightUpdateRule,
)
from practicum.types import (
    Datum,
    ForwardResult,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

PATIENCE = 300.0
"""Seconds to wait for an answer."""

PRELOAD = ["practicum.runs.assembly", "transformers.modeling_utils"]
"""Imports that take seconds are done once for all children."""

log = logging.getLogger("practicum.backends.child")


class ChildBackend:
    """See `practicum.ports.Backend`."""

    def __init__(self, context: BackendContext) -> None:
        self._lock = threading.Lock()
        start = multiprocessing.get_context("forkserver")
        start.set_forkserver_preload(PRELOAD)
        self._connection, theirs = start.Pipe()
        self.process = start.Process(
            target=answer, args=(theirs, context.seed, context.models_dir), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        ASK[self.pid] = lambda name: self.ask("fetch", name)
        context.at_end.callback(self.close)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the child's answer, or raise its error; ResourceError if the child is gone or silent."""
        with self._lock:
            try:
                self._connection.send((take_dropped(self.pid), method, arguments))
                while True:
                    if not self._connection.poll(PATIENCE):
                        raise ResourceError(
                            f"the child process did not answer {method} in {PATIENCE:g} s; resume the run"
                        )
                    kind, value = self._connection.recv()
                    if kind == "result":
                        return value
                    if kind == "error":
                        raise value
                    log.info(value)
            except (EOFError, BrokenPipeError, ConnectionResetError) as error:
                raise ResourceError(
                    f"the child process was lost in {method}; resume with --resume"
                ) from error

    def close(self) -> None:
        """Let the child end; its states can no longer be fetched."""
        ASK.pop(self.pid, None)
        take_dropped(self.pid)
        self._connection.close()
        self.process.join(10)

    def load_student(self, config: Any) -> Student:
        return Student(trainer=ChildTrainer(self), **self.ask("load_student", config))

    def load_scorer(self, config: Any, name: str) -> Model:
        return Model(client=ChildClient(self, name), **self.ask("load_scorer", config, name))

    def build_sampler(self, student: Student) -> "ChildClient":
        return ChildClient(self, "sampler")

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> "ChildClient":
        self.ask("load_self", rule, name)
        return ChildClient(self, name)

    def save(self, student: Student, folder: Path) -> None:
        self.ask("save", folder)

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        self.ask("copy_state")
        return lambda folder: self.ask("write_copy", folder)

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        self.ask("load", folder, moments)

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        self.ask("export", folder)


class ChildClient(SelfTeacher):
    """A self-teacher, see `practicum.ports.SelfTeacher`; a client that does not follow the student is never asked for its state."""

    def __init__(self, backend: ChildBackend, name: str) -> None:
        self._backend = backend
        self._name = name

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.ask("capabilities", self._name)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        return self._backend.ask("sample", self._name, requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        return self._backend.ask("score", self._name, requests, signal)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        self._backend.ask("of_client", self._name, "after_step", step, ())

    def save_state(self) -> dict[str, Tensor]:
        return self._backend.ask("of_client", self._name, "save_state")

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._backend.ask("of_client", self._name, "load_state", dict(tensors))


class ChildTrainer:
    """See `practicum.ports.TrainingClient`."""

    def __init__(self, backend: ChildBackend) -> None:
        self._backend = backend

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        process = self._backend.pid
        data = [
            replace(
                datum,
                signal=bring(datum.signal, process),
                reference=bring(datum.reference, process),
            )
            for datum in data
        ]
        return self._backend.ask("forward_backward", data, objective, seed)

    def optim_step(self, params: AdamParams) -> Metrics:
        return self._backend.ask("optim_step", params)

    def snapshot(self) -> ChildClient:
        return ChildClient(self._backend, self._backend.ask("snapshot"))

    def explain_unsupported(self, objective: Objective) -> str | None:
        return self._backend.ask("explain_unsupported", objective)
