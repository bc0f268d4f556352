"""A stopped rank is named, and a slow rank is not."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore
from toy import start_fork, when

from practicum.backends.torchrun.heartbeat import ENDED, Heartbeat, RankSign, Silence
from practicum.backends.torchrun.one_thread import OneThread

LIMIT = 20.0


@pytest.fixture
def hearts() -> Iterator[Callable[..., Heartbeat]]:
    """Start heartbeats, which end with the test."""
    with ExitStack() as at_end:

        def start(*arguments: object) -> Heartbeat:
            heart = Heartbeat(*arguments)
            at_end.callback(heart.stop)
            return heart

        yield start


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.booleans()), max_size=50))
def test_only_seconds_in_which_the_observer_was_awake_count(
    looks: list[tuple[float, bool]],
) -> None:
    """Check that a rank that beats at each fifth second of the observer is never silent for long."""
    silence, gap = Silence(1.0), 1.0
    moment, number, unchanged = 0.0, 0, 0.0
    silence.observe(number, moment)
    for elapsed, has_beaten in looks:
        moment += elapsed
        unchanged += min(elapsed, gap)
        if has_beaten or unchanged > 5.0:
            number, unchanged = number + 1, 0.0
        assert silence.observe(number, moment) == pytest.approx(unchanged)
        assert silence.seconds <= 5.0


def test_a_value_that_never_changes_reaches_every_limit() -> None:
    silence = Silence(1.0)
    seconds = [silence.observe(7, 0.5 * look) for look in range(2 * int(LIMIT) + 1)]
    assert seconds[-1] == LIMIT


def test_a_sign_is_read_as_it_was_written() -> None:
    for sign in (RankSign(3, 17, "vm", "take weights"), RankSign(1, 2, "vm")):
        assert RankSign.decode(sign.encode().encode()) == sign


def test_who_gives_no_more_signs_is_named_by_the_first_rank_and_the_first_by_all(
    hearts: Callable[..., Heartbeat],
) -> None:
    store = HashStore()
    first, second, third = (hearts(store, rank, 3, 0.4) for rank in range(3))
    second.work = "optim_step"
    when(lambda: {sign.work for sign in first.get_signs().values()} == {"optim_step", ""})
    place = f"(process {os.getpid()} on {socket.gethostname()})"
    second.stop()
    when(lambda: bool(first.find_stuck()))
    assert first.find_stuck() == f"trainer 1 {place}, last seen at optim_step,"
    assert not third.find_stuck()
    first.stop()
    when(lambda: bool(third.find_stuck()))
    assert third.find_stuck() == f"trainer 0 {place}"


def test_a_rank_that_has_not_begun_is_not_watched(hearts: Callable[..., Heartbeat]) -> None:
    store = HashStore()
    first = hearts(store, 0, 2, 0.2)
    time.sleep(0.4)
    assert not first.find_stuck() and not first.get_signs()
    assert not first.has_ended
    store.set(ENDED, "8")
    when(lambda: first.has_ended)


def test_a_rank_that_computes_for_long_beats_meanwhile(hearts: Callable[..., Heartbeat]) -> None:
    store = HashStore()
    first, second = (hearts(store, rank, 2, 0.8) for rank in range(2))
    when(lambda: 1 in first.get_signs() and 0 in second.get_signs())
    numbers = torch.rand(2**18)
    end, stuck = time.monotonic() + 1.6, set()
    while time.monotonic() < end:
        numbers.sort()
        stuck |= {first.find_stuck(), second.find_stuck()}
    assert stuck == {""}


def test_a_store_that_is_stopped_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearts: Callable[..., Heartbeat]
) -> None:
    port_file = tmp_path / "port"

    def host() -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.write_text(f"{store.port}\n")
        signal.pause()

    pid = start_fork(host)
    try:
        when(lambda: port_file.exists() and port_file.read_text().endswith("\n"))
        port = int(port_file.read_text())
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        heart = hearts(store, 0, 1, 0.4)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        os.kill(pid, signal.SIGSTOP)
        when(lambda: bool(heart.find_stuck()))
        assert heart.is_cut_off
        assert heart.find_stuck() == f"the launcher's store at 127.0.0.1:{port}"
        os.kill(pid, signal.SIGCONT)
        heart.stop()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_call_that_is_stuck_does_not_hold_its_caller() -> None:
    thread, checks = OneThread(), []

    def give_up() -> None:
        checks.append(1)
        raise RuntimeError("stuck")

    assert thread.run(lambda: 7, give_up) == 7
    with pytest.raises(KeyError):
        thread.run(lambda: {}[1], give_up)
    assert not checks and not thread.is_busy
    with pytest.raises(RuntimeError, match="stuck"):
        thread.run(lambda: time.sleep(0.3), give_up)
    assert thread.is_busy
    when(lambda: not thread.is_busy)
    thread.stop()
