"""The child: it opens the backend of its process and answers requests until the parent closes the connection."""

import os
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from backends.child.held import HELD, ChildHead, ChildStates
from practicum.core.notes import show_notes
from practicum.errors import PracticumError
from practicum.ports import BackendContext
from practicum.ports.metering import count_heads
from practicum.runs.opening import open_local
from practicum.types import TeacherSignal

LEARNER = ("renderer", "context_length", "source", "dims", "trainable_dims", "state_bytes")
MODEL = ("renderer", "context_length", "source", "dims", "no_sampling_reason")


def answer(connection: Connection, seed: int, models: Path) -> None:
    """Answer questions in order: `(dropped, method, arguments)` to `("result", value)` or `("error", error)`.

    `dropped` are the names of states that are no longer held.
    """
    torch.set_num_threads(1)
    child = Child(seed, models)
    with show_notes(lambda text: connection.send(("note", text))):
        while True:
            try:
                dropped, method, arguments = connection.recv()
            except EOFError:
                return
            for name in dropped:
                del HELD[name]
            try:
                connection.send(("result", getattr(child, method)(*arguments)))
            except PracticumError as error:
                connection.send(("error", error))


class Child:
    """The methods of the child; clients are identified by name."""

    def __init__(self, seed: int, models: Path) -> None:
        def no_task() -> Any:
            raise AssertionError("only models of folders are asked for")

        self.backend = open_local(BackendContext(seed, models, no_task, no_task))
        self.clients: dict[str, Any] = {}
        self.student: Any = None
        self.made = 0

    def load_student(self, config: Any) -> dict[str, Any]:
        self.student = self.backend.load_student(config)
        self.clients["sampler"] = self.backend.build_sampler(self.student)
        return {name: getattr(self.student, name) for name in LEARNER}

    def load_scorer(self, config: Any, name: str) -> dict[str, Any]:
        model = self.backend.load_scorer(config, name)
        self.clients[name] = model.client
        return {field: getattr(model, field) for field in MODEL}

    def load_self(self, rule: Any, name: str) -> None:
        self.clients[name] = self.backend.build_self_teacher(self.student, rule, name)

    def capabilities(self, name: str) -> Any:
        return self.clients[name].capabilities

    def sample(self, name: str, requests: Any, params: Any) -> Any:
        return self.clients[name].sample(requests, params)

    def score(self, name: str, requests: Any, signal: Any) -> list[TeacherSignal]:
        return [self._named(answer) for answer in self.clients[name].score(requests, signal)]

    def of_client(self, name: str, method: str, *arguments: Any) -> Any:
        return getattr(self.clients[name], method)(*arguments)

    def snapshot(self) -> str:
        name = f"snapshot {len(self.clients)}"
        self.clients[name] = self.student.trainer.snapshot()
        return name

    def forward_backward(self, data: Any, *arguments: Any) -> Any:
        reads: Counter[str] = Counter()
        result = self.student.trainer.forward_backward(count_heads(data, reads), *arguments)
        return replace(result, head_reads=dict(reads))

    def optim_step(self, params: Any) -> Any:
        return self.student.trainer.optim_step(params)

    def explain_unsupported(self, objective: Any) -> str | None:
        return self.student.trainer.explain_unsupported(objective)

    def save(self, folder: Path) -> None:
        self.backend.save(self.student, folder)

    def copy_state(self) -> None:
        self.copy = self.backend.copy_state(self.student)

    def write_copy(self, folder: Path) -> None:
        self.copy(folder)

    def load(self, folder: Path, moments: bool) -> None:
        self.backend.load(self.student, folder, moments=moments)

    def export(self, folder: Path) -> None:
        self.backend.export(self.student, folder)

    def fetch(self, name: str) -> Any:
        return HELD[name]

    def names_held(self) -> list[str]:
        return list(HELD)

    def _named(self, answer: TeacherSignal) -> TeacherSignal:
        """Return the answer with names for objects that stay here."""
        if answer.states is None or answer.head is None:
            return answer
        states = ChildStates(
            os.getpid(),
            f"states {self.made}",
            len(answer.states),
            bool(torch.isfinite(answer.states).all()),
        )
        self.made += 1
        number = hash(answer.head.key)
        HELD[states.name], HELD[f"head {number}"] = answer.states, answer.head
        return replace(
            answer, hidden=states, head=ChildHead(os.getpid(), number, answer.head.vocab_size)
        )
