"""The processes of one run: the first one asks, and all of them do what it asks.

Requests and answers go through collectives of gloo, each with a deadline. A process that cannot go
on writes the reason into the launcher's store before it ends, and the first process reads it there.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from practicum.backends._sharded.rank_verbs import ProcessSettings
from practicum.backends.torchrun import Config
from practicum.backends.torchrun.rank_process import RankProcess
from practicum.core.abandon import Cancelled
from practicum.core.notes import hide_notes
from practicum.core.options import spell_options
from practicum.core.waits import display_waits
from practicum.errors import PracticumError, RecipeError, WorkerLost

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which torchrun tells a process its place."""

AFTERMATH_SECONDS = 2.0
"""The time in which other processes still say why they cannot go on."""

POLL_SECONDS = 0.1
"""The time between two looks into the store."""

BEAT_SECONDS = 0.5
"""The time between two signs of life of a process that serves."""

ENDED = "ended"
"""The key that the first process sets in the store when its run ended, with its exit code."""


@dataclass(frozen=True, slots=True)
class Request:
    """A verb of a `RankProcess`, or of the group itself where the number is 0.

    `shares` are the arguments, the same for all ranks or one for each. Apart, the ranks have no
    word with each other meanwhile, and outlive an error.
    """

    number: int
    verb: str
    shares: Sequence[Sequence[Any]]
    apart: bool


class Membership:
    """The group that this process belongs to, while it does."""

    group: ClassVar["LockstepGroup | None"] = None


class LockstepGroup:
    """This process's place among the ranks; see the module."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        limit = timedelta(seconds=patience)
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        store, self.rank, self.count = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        self._store = PrefixStore("practicum", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=PrefixStore("ranks", store),
            rank=self.rank,
            world_size=self.count,
            timeout=limit,
        )
        control = dist.new_group(backend="gloo", timeout=limit)
        assert isinstance(control, dist.ProcessGroup), "every process is in the group of all"
        self._control = control
        self.processes: dict[int, RankProcess] = {}
        self._numbers = 0
        self._turn = threading.Lock()
        self._loss: WorkerLost | None = None

    def open_process(self, nodes: int, settings: ProcessSettings) -> int:
        """Make a new `RankProcess` in all ranks; return its number."""
        self._numbers += 1
        self.ask_each(0, "_open", [(self._numbers, nodes, settings)])
        return self._numbers

    def close_process(self, number: int) -> None:
        """Let go of a `RankProcess` in all ranks, if they are still there."""
        if self._loss is None:
            self.ask_each(0, "_close", [(number,)])

    def ask(self, number: int, verb: str, *arguments: Any) -> list[Any]:
        """Let all ranks do the same in step; return their answers in the order of the ranks."""
        return self._request(Request(number, verb, [arguments], apart=False))

    def ask_each(self, number: int, verb: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        """Let each rank do its own share apart from the others; return their answers."""
        return self._request(Request(number, verb, shares, apart=True))

    def _open(self, number: int, nodes: int, settings: ProcessSettings) -> None:
        settings.apply(f"trainer {self.rank}")
        self.processes[number] = RankProcess(self.rank, nodes, settings)

    def _close(self, number: int) -> None:
        del self.processes[number]

    def _rest(self) -> None:
        """Do nothing: the first process is still there."""

    def _request(self, request: Request) -> list[Any]:
        # Threads take turns: the ranks would wait for each other if they had another order.
        with self._turn:
            if self._loss is not None:
                raise WorkerLost(f"{request.verb}: the trainers of this run have ended")
            try:
                self._send(request)
                outcomes: list[Any] = [None] * self.count
                outcome = self._perform(request)
                dist.gather_object(outcome, outcomes, dst=0, group=self._control)
            except BaseException as error:
                self._end_with(error, request.verb)
        # This process's error is its own object: that of a cancelled thread has no copy.
        for _, error in (outcome, *outcomes[1:]):
            if error is not None:
                raise error
        return [answer for answer, _ in (outcome, *outcomes[1:])]

    def _send(self, message: Request | int | None) -> Any:
        """Return the message of the first process: a request, or the exit code of its run."""
        messages = [message]
        dist.broadcast_object_list(messages, src=0, group=self._control)
        return messages[0]

    def _perform(self, request: Request) -> tuple[Any, Exception | None]:
        """Do this rank's part; return its answer, and the error of a part that was done apart."""
        owner = self.processes[request.number] if request.number else self
        arguments = request.shares[self.rank if len(request.shares) > 1 else 0]
        try:
            return getattr(owner, request.verb)(*arguments), None
        except (PracticumError, OSError, Cancelled) as error:
            if not request.apart:
                raise
            return None, error

    def serve(self) -> int:
        """Do what the first process asks until its run ends; return the run's exit code.

        Raises WorkerLost if the first process was lost.
        """
        try:
            with _repeat(self._beat, BEAT_SECONDS):
                while not isinstance(request := self._send(None), int):
                    dist.gather_object(self._perform(request), dst=0, group=self._control)
                return request
        except BaseException as error:
            trouble = _describe_trouble(error)
            with suppress(RuntimeError):
                self._store.set(f"trouble-{self.rank}", f"{trouble.code} {trouble.text}")
            if trouble.is_bug:
                raise
            if trouble.code:
                # The first process says it, once this one's end has broken the link.
                return trouble.code
        with suppress(RuntimeError):
            if self._await_keys([ENDED], 2 * AFTERMATH_SECONDS):
                return int(self._store.get(ENDED))
        raise WorkerLost(
            "trainer 0, which leads the run, was lost; go on from the newest checkpoint with "
            f"{spell_options(resume=True)}"
        )

    def _beat(self) -> None:
        with suppress(RuntimeError):
            self._store.add(f"beat-{self.rank}", 1)

    def _await_keys(self, keys: Sequence[str], seconds: float) -> bool:
        """Return True once the store has all keys, False if it has not after some seconds."""
        deadline = time.monotonic() + seconds
        # The store's own wait writes to standard error when its time is over.
        while not (has_all := self._store.check(list(keys))) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return has_all

    def _end_with(self, error: BaseException, verb: str) -> NoReturn:
        """End the group, of which a rank cannot go on, and raise what explains it best."""
        self._loss = WorkerLost(f"{verb} failed")
        if _describe_trouble(error).is_elsewhere:
            raise self._explain_loss(error, verb) from error
        raise error

    def _explain_loss(self, error: BaseException, verb: str) -> Exception:
        """Return the error that a rank wrote down, or else who broke the link."""
        ranks = range(1, self.count)
        before = [self._count_beats(rank) for rank in ranks]
        with suppress(RuntimeError):
            self._await_keys([f"trouble-{rank}" for rank in ranks], AFTERMATH_SECONDS)
        troubles = [self._read_trouble(rank) for rank in ranks]
        for trouble in troubles:
            if trouble.code > 0:
                error_there = PracticumError(trouble.text)
                error_there.exit_code = trouble.code
                return error_there
        failed = [rank for rank, trouble in zip(ranks, troubles, strict=True) if trouble.is_bug]
        silent = [
            rank
            for rank, beats in zip(ranks, before, strict=True)
            if beats == self._count_beats(rank)
        ]
        names = ", ".join(f"trainer {rank}" for rank in failed or silent)
        names = names or f"a trainer ({_shorten(error)})"
        reason = next((f" ({trouble.text})" for trouble in troubles if trouble.is_bug), "")
        go_on = spell_options(resume=True)
        if not failed and "Timed out" in str(error):
            return WorkerLost(
                f"no answer to {verb} in {self._patience:g} s (backend.patience) from {names}; look "
                f"at its machine, then go on with {go_on}"
            )
        return WorkerLost(
            f"{names} was lost in {verb}{reason}; nothing of this step is kept, go on from the "
            f"newest checkpoint with {go_on}"
        )

    def _count_beats(self, rank: int) -> int:
        try:
            return self._store.add(f"beat-{rank}", 0)
        except RuntimeError:
            return 0

    def _read_trouble(self, rank: int) -> "_Trouble":
        key = f"trouble-{rank}"
        with suppress(RuntimeError):
            if self._store.check([key]):
                code, _, text = self._store.get(key).decode().partition(" ")
                return _Trouble(int(code), text)
        return _Trouble(0)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Let the others hear of this process within their patience, and of the end of its run."""
        code = PracticumError.exit_code
        try:
            with _repeat(self._ask_for_nothing, self._patience / 4):
                yield
            code = 0
        except PracticumError as error:
            code = error.exit_code
            raise
        finally:
            with suppress(RuntimeError):
                self._store.set(ENDED, str(code))
                if self._loss is None:
                    self._send(code)

    def _ask_for_nothing(self) -> None:
        # A loss is for the next request to raise.
        if self._loss is None:
            with suppress(PracticumError, OSError):
                self.ask_each(0, "_rest", [()])


@contextmanager
def join_processes(config: Config) -> Iterator[bool]:
    """Meet the processes that torchrun started: True in the first one, which runs the recipe.

    The others serve until its run has ended, and end with its exit code if it failed.
    """
    _check_start(config)
    Membership.group = group = LockstepGroup(config.patience)
    try:
        if group.rank == 0:
            with group.lead():
                yield True
            return
        # What a model has to say is said in the first process.
        with _ignore_stop_signals(), hide_notes(), display_waits(None):
            code = group.serve()
        if code:
            raise SystemExit(code)
        yield False
    finally:
        Membership.group = None
        dist.destroy_process_group()


def _check_start(config: Config) -> None:
    """Raise RecipeError unless torchrun started as many processes as the recipe says."""
    command = f"torchrun --nproc-per-node {config.trainers} -m practicum run"
    if not all(name in os.environ for name in VARIABLES):
        raise RecipeError(
            "backend 'torchrun' runs in processes that torchrun starts, and this one was started "
            f"alone; write {command} ..., or backend: {{type: ray, trainers: {config.trainers}}}"
        )
    count = int(os.environ["WORLD_SIZE"])
    if count == config.trainers:
        return
    raise RecipeError(
        f"backend.trainers is {config.trainers} and torchrun started {count} processes; write "
        f"backend.trainers={count}, or {command} ..."
    )


@contextmanager
def _ignore_stop_signals() -> Iterator[None]:
    """Leave it to the first process when to stop: it saves its state, which takes all ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _repeat(act: Callable[[], None], seconds: float) -> Iterator[None]:
    """Let another thread act every few seconds within the block."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(seconds):
            act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class _Trouble:
    """The reason why a rank cannot go on: an exit code and a text for the user.

    The code 0 is a link that another rank broke, and -1 an error that nobody foresaw.
    """

    code: int
    text: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """True if another rank is the cause."""
        return self.code == 0

    @property
    def is_bug(self) -> bool:
        """True if the error is none for the user."""
        return self.code < 0


def _describe_trouble(error: BaseException) -> _Trouble:
    if isinstance(error, PracticumError | OSError):
        kind = error if isinstance(error, PracticumError) else PracticumError
        return _Trouble(kind.exit_code, _shorten(error))
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return _Trouble(0)
    return _Trouble(-1, f"{type(error).__name__}: {_shorten(error)}")


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
