"""Run the processes of one run in lockstep: the first sends requests, and all perform them.

Requests and answers go through collectives of gloo, which run in a separate thread: the thread
that waits for them gives up after a deadline, or when a process is stuck. A process that cannot continue
writes the reason into the launcher's store before it ends, and the first process reads it there.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from practicum.backends._sharded.crossing import pack, unpack
from practicum.backends._sharded.rank_verbs import ProcessSettings
from practicum.backends._sharded.silence import build_silence_error
from practicum.backends.torchrun.config import Config
from practicum.backends.torchrun.failures import RunEnded, Trouble, Unanswered, shorten
from practicum.backends.torchrun.heartbeat import BEAT_SECONDS, ENDED, Heartbeat
from practicum.backends.torchrun.one_thread import OneThread
from practicum.backends.torchrun.rank_process import RankProcess
from practicum.core.abandon import Cancelled
from practicum.core.leaving import LAST_ACTS
from practicum.core.notes import hide_notes
from practicum.core.options import spell_options
from practicum.core.waits import display_waits
from practicum.errors import PracticumError, RecipeError, WorkerLost

T = TypeVar("T")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables with which torchrun tells a process its rank and address."""

PREFIX = "practicum"
"""The prefix of our keys in the launcher's store."""

AFTERMATH_SECONDS = 2.0
"""The time that other processes have to report why they cannot continue."""

POLL_SECONDS = 0.1
"""The time between two checks of the store."""

MARGIN_SECONDS = 60.0
"""The time after the longest deadline at which a collective gives up by itself."""

STARTING = frozenset({"meet", "_open", "load", "load_scorer"})
"""The verbs with the timeout `backend.start_patience`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A verb of a `RankProcess`, or of the group itself if the number is 0.

    `shares` are the arguments, the same for all ranks or one share per rank. If the request is
    `apart`, the ranks do not communicate while they perform it, and survive an error.
    """

    number: int
    verb: str
    shares: Sequence[Sequence[Any]]
    apart: bool


class Membership:
    """The group that this process currently belongs to."""

    group: ClassVar["LockstepGroup | None"] = None


class LockstepGroup:
    """This process's member of the group of ranks; see the module."""

    def __init__(self, config: Config) -> None:
        self._config = config
        longest = max(config.patience, config.start_patience)
        self._limit = timedelta(seconds=longest + MARGIN_SECONDS)
        meeting = timedelta(seconds=config.start_patience)
        # One thread may wait in a call while the heartbeat thread writes, so there are two
        # connections.
        (store, self.rank, self.count), (second_store, _, _) = (
            next(rendezvous("env://", timeout=meeting)) for _ in range(2)
        )
        store.set_timeout(self._limit)
        self._store = PrefixStore(PREFIX, store)
        self._heartbeat = Heartbeat(
            PrefixStore(PREFIX, second_store), self.rank, self.count, config.silence
        )
        self._thread = OneThread()
        self._numbers = 0
        self._turn = threading.Lock()
        self._loss: WorkerLost | None = None
        self.processes: dict[int, RankProcess] = {}
        try:
            self._control = self._run(partial(self._meet, store), self._build_check("meet"))
        except Unanswered as error:
            raise error.loss from None
        except RuntimeError as error:
            if not Trouble.describe(error).is_elsewhere:
                raise
            raise WorkerLost(
                f"the {self.count} processes did not meet ({shorten(error)}); read the "
                "output of all processes"
            ) from error

    def _meet(self, store: Store) -> dist.ProcessGroup:
        """Open the process groups of all ranks; return the group of requests and answers."""
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=PrefixStore("ranks", store),
            rank=self.rank,
            world_size=self.count,
            timeout=self._limit,
        )
        control = dist.new_group(backend="gloo", timeout=self._limit)
        assert isinstance(control, dist.ProcessGroup), "every process is in the group of all"
        return control

    def close(self) -> None:
        """Leave the group; a collective that still waits is abandoned."""
        self._heartbeat.stop()
        self._thread.stop()
        if not self._thread.is_busy and dist.is_initialized():
            dist.destroy_process_group()

    def open_process(self, nodes: int, settings: ProcessSettings) -> int:
        """Make a new `RankProcess` in all ranks; return its number."""
        self._numbers += 1
        self.ask_each(0, "_open", [(self._numbers, nodes, settings)])
        return self._numbers

    def close_process(self, number: int) -> None:
        """Drop a `RankProcess` in all ranks that are still running."""
        if self._loss is None:
            self.ask_each(0, "_close", [(number,)])

    def ask(self, number: int, verb: str, *arguments: Any) -> list[Any]:
        """Run the same call in all ranks, in step; return the answers in rank order."""
        return self._request(Request(number, verb, [arguments], apart=False))

    def ask_each(self, number: int, verb: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        """Let each rank perform its own share independently; return all answers."""
        return self._request(Request(number, verb, shares, apart=True))

    def _open(self, number: int, nodes: int, settings: ProcessSettings) -> None:
        settings.apply(f"trainer {self.rank}")
        self.processes[number] = RankProcess(self.rank, nodes, settings)

    def _close(self, number: int) -> None:
        del self.processes[number]

    def _rest(self) -> None:
        """Do nothing; the request shows that the first process is still running."""

    def _request(self, request: Request) -> list[Any]:
        # Threads take turns: the ranks would deadlock if they received requests in different
        # orders.
        with self._turn:
            if self._loss is not None:
                raise WorkerLost(f"{request.verb}: the trainers of this run have ended")
            try:
                outcomes = self._run(
                    partial(self._exchange, request), self._build_check(request.verb)
                )
            except BaseException as error:
                self._end_with(error, request.verb)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [answer for answer, _ in outcomes]

    def _run(self, call: Callable[[], T], check: Callable[[], None]) -> T:
        """Return the result of a call that uses collectives."""
        try:
            return self._thread.run(call, check)
        finally:
            if self._thread.is_busy:
                # Python would wait for the collective at the end of the process.
                LAST_ACTS.append(self._heartbeat.stop)

    def _build_check(self, verb: str) -> Callable[[], None]:
        """Return a check that raises Unanswered if a rank is stuck or if a verb's time is over."""
        config = self._config
        key, seconds = (
            ("start_patience", config.start_patience)
            if verb in STARTING
            else ("patience", config.patience)
        )
        deadline = time.monotonic() + seconds

        def check() -> None:
            self._check_signs(verb)
            if time.monotonic() > deadline:
                raise Unanswered(self._build_late_error(verb, f"{seconds:g} s (backend.{key})"))

        return check

    def _check_signs(self, verb: str) -> None:
        if stuck := self._heartbeat.find_stuck():
            raise Unanswered(build_silence_error(stuck, self._heartbeat.limit, verb))

    def _build_late_error(self, verb: str, time_limit: str) -> WorkerLost:
        signs = self._heartbeat.get_signs()
        late = [rank for rank, sign in signs.items() if sign.work]
        names = ", ".join(f"trainer {rank}" for rank in late) or "the other trainers"
        return WorkerLost(
            f"no answer to {verb} in {time_limit} from {names}; check its machine, then resume with "
            f"{spell_options(resume=True)}"
        )

    def _exchange(self, request: Request) -> list[tuple[Any, Exception | None]]:
        """Send a request, do this rank's part, and return the outcomes of all ranks."""
        self._send(request)
        outcomes: list[Any] = [None] * self.count
        outcome = self._perform(request)
        # This process already has its outcome and needs no copy.
        dist.gather_object(pack(None), outcomes, dst=0, group=self._control)
        # This process's error stays the original object: the error of a cancelled thread cannot be
        # copied.
        return [outcome, *map(unpack, outcomes[1:])]

    def _send(self, message: Request | int | None) -> Any:
        """Return the message of the first process: a request, or the exit code of its run."""
        messages = [pack(message)]
        dist.broadcast_object_list(messages, src=0, group=self._control)
        return unpack(messages[0])

    def _perform(self, request: Request) -> tuple[Any, Exception | None]:
        """Perform this rank's part; return its answer, and the error of an independent part."""
        owner = self.processes[request.number] if request.number else self
        arguments = request.shares[self.rank if len(request.shares) > 1 else 0]
        self._heartbeat.work = request.verb
        try:
            return getattr(owner, request.verb)(*arguments), None
        except (PracticumError, OSError, Cancelled) as error:
            if not request.apart:
                raise
            return None, error
        finally:
            self._heartbeat.work = ""

    def serve(self) -> int:
        """Serve the first process's requests until its run ends; return the run's exit code.

        Raises WorkerLost if the first process was lost.
        """
        end = _Countdown(2 * AFTERMATH_SECONDS)

        def check() -> None:
            if not self._heartbeat.has_ended:
                self._check_signs("a request")
            # The first process has ended, and this process waits for a process that cannot answer.
            elif end.is_over():
                raise RunEnded

        try:
            return self._run(self._serve_requests, check)
        except Unanswered as error:
            raise error.loss from None
        except BaseException as error:
            trouble = Trouble.describe(error)
            self._set_key(f"trouble-{self.rank}", f"{trouble.code} {trouble.text}")
            if trouble.is_bug:
                raise
            if trouble.code:
                # The first process reports the error after the end of this process has broken the
                # link.
                return trouble.code
        with suppress(RuntimeError):
            if self._await_keys([ENDED], 2 * AFTERMATH_SECONDS):
                return int(self._store.get(ENDED))
        raise WorkerLost(
            "trainer 0, which leads the run, was lost; resume from the newest checkpoint with "
            f"{spell_options(resume=True)}"
        )

    def _serve_requests(self) -> int:
        while not isinstance(request := self._send(None), int):
            dist.gather_object(pack(self._perform(request)), dst=0, group=self._control)
        return request

    def _set_key(self, key: str, text: str) -> None:
        """Write into the store if it is available."""
        if not self._heartbeat.is_cut_off:
            with suppress(RuntimeError):
                self._store.set(key, text)

    def _await_keys(self, keys: Sequence[str], seconds: float) -> bool:
        """Return True once the store has all keys, or False after `seconds` seconds."""
        deadline = time.monotonic() + seconds
        # The store's own wait writes to standard error on a timeout.
        while not (has_all := self._store.check(list(keys))) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return has_all

    def _end_with(self, error: BaseException, verb: str) -> NoReturn:
        """End the group because a rank cannot continue, and raise the best explanation."""
        self._loss = WorkerLost(f"{verb} failed")
        if not Trouble.describe(error).is_elsewhere:
            raise error
        reason = self._explain_loss(error, verb)
        # Other processes may wait for a stuck process, and the end of a run takes a while.
        self._set_key(ENDED, str(reason.exit_code))
        raise reason from error

    def _explain_loss(self, error: BaseException, verb: str) -> PracticumError:
        """Return the error that a rank reported, or name the rank that broke the link."""
        if isinstance(error, Unanswered) and self._heartbeat.is_cut_off:
            return error.loss
        ranks = range(1, self.count)
        # The last sign of a dead process may not have been read yet.
        time.sleep(2 * BEAT_SECONDS)
        before = self._heartbeat.get_signs()
        with suppress(RuntimeError):
            self._await_keys([f"trouble-{rank}" for rank in ranks], AFTERMATH_SECONDS)
        troubles = [self._read_trouble(rank) for rank in ranks]
        for trouble in troubles:
            if trouble.code > 0:
                error_there = PracticumError(trouble.text)
                error_there.exit_code = trouble.code
                return error_there
        if isinstance(error, Unanswered):
            return error.loss
        failed = [rank for rank, trouble in zip(ranks, troubles, strict=True) if trouble.is_bug]
        after = self._heartbeat.get_signs()
        silent = [rank for rank in ranks if before.get(rank) == after.get(rank)]
        names = ", ".join(f"trainer {rank}" for rank in failed or silent)
        names = names or f"a trainer ({shorten(error)})"
        reason = next((f" ({trouble.text})" for trouble in troubles if trouble.is_bug), "")
        return WorkerLost(
            f"{names} was lost in {verb}{reason}; this step is discarded; resume from the "
            f"newest checkpoint with {spell_options(resume=True)}"
        )

    def _read_trouble(self, rank: int) -> "Trouble":
        key = f"trouble-{rank}"
        with suppress(RuntimeError):
            if self._store.check([key]):
                code, _, text = self._store.get(key).decode().partition(" ")
                return Trouble(int(code), text)
        return Trouble(0)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Stay in contact with all processes within the block, and tell them when the run ends."""
        code = PracticumError.exit_code
        try:
            with _repeat(self._ask_for_nothing, self._limit.total_seconds() / 4):
                yield
            code = 0
        except PracticumError as error:
            code = error.exit_code
            raise
        finally:
            self._set_key(ENDED, str(code))
            if self._loss is None:
                self._dismiss(code)

    def _dismiss(self, code: int) -> None:
        """End all other processes with the exit code of the run."""
        try:
            with suppress(RuntimeError):
                self._run(partial(self._send, code), self._build_check("end"))
        except Unanswered as error:
            # If the run failed, its error is already being raised.
            if not code:
                raise error.loss from None

    def _ask_for_nothing(self) -> None:
        # The next request raises the loss.
        if self._loss is None:
            with suppress(PracticumError, OSError):
                self.ask_each(0, "_rest", [()])


@contextmanager
def join_processes(config: Config) -> Iterator[bool]:
    """Connect the processes that torchrun started; yield True in the first, which runs the recipe.

    All other processes serve until its run has ended, and end with its exit code if it failed.
    """
    _check_start(config)
    Membership.group = group = LockstepGroup(config)
    try:
        if group.rank == 0:
            with group.lead():
                yield True
            return
        # The first process shows the notes of a model.
        with _ignore_stop_signals(), hide_notes(), display_waits(None):
            code = group.serve()
        if code:
            raise SystemExit(code)
        yield False
    finally:
        Membership.group = None
        group.close()


def _check_start(config: Config) -> None:
    """Raise RecipeError unless torchrun started the recipe's number of processes."""
    command = f"torchrun --nproc-per-node {config.trainers} -m practicum run"
    if not all(name in os.environ for name in VARIABLES):
        raise RecipeError(
            "backend 'torchrun' runs in processes that torchrun starts, and torchrun did not start "
            f"this one; run {command} ..., or set backend: {{type: ray, trainers: {config.trainers}}}"
        )
    count = int(os.environ["WORLD_SIZE"])
    if count == config.trainers:
        return
    raise RecipeError(
        f"backend.trainers is {config.trainers} and torchrun started {count} processes; set "
        f"backend.trainers={count}, or {command} ..."
    )


@contextmanager
def _ignore_stop_signals() -> Iterator[None]:
    """Ignore stop signals: the first process decides when to stop, and needs all ranks to save."""
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
    """Call a function in another thread every few seconds within the block."""
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


@dataclass(slots=True)
class _Countdown:
    """A countdown that starts at the first check whether it is over."""

    seconds: float
    _end: float | None = None

    def is_over(self) -> bool:
        self._end = self._end or time.monotonic() + self.seconds
        return time.monotonic() > self._end
