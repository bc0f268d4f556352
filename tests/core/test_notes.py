"""Notes reach the block in which they were made, in one process with many blocks."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context

import pytest

from practicum.core.notes import LOGGER, Listener, copy_notes, hide_notes, show_notes

log = logging.getLogger("practicum.somewhere")


def test_a_warning_says_so_and_the_rest_is_as_it_was_logged() -> None:
    shown: list[str] = []
    with show_notes(shown.append):
        log.info("100 % of 3 rows left out")
        log.warning("the teacher is the student")
        log.debug("nobody asked")
    log.info("too late")
    assert shown == ["100 % of 3 rows left out", "warning: the teacher is the student"]


def test_nothing_of_it_is_left_behind() -> None:
    before = LOGGER.level, LOGGER.handlers[:]
    with suppress(RuntimeError), show_notes(print), copy_notes(print):
        assert sum(isinstance(handler, Listener) for handler in LOGGER.handlers) == 2
        assert log.isEnabledFor(logging.INFO)
        raise RuntimeError
    assert (LOGGER.level, LOGGER.handlers) == before


def test_an_inner_block_is_not_shown_outside_and_a_kept_one_is() -> None:
    outer: list[str] = []
    inner: list[str] = []
    kept: list[str] = []
    with show_notes(outer.append):
        with show_notes(inner.append):
            log.info("inner")
        with hide_notes():
            log.warning("hidden")
        with copy_notes(kept.append):
            log.info("both")
        log.info("outer")
    assert (outer, inner, kept) == (["both", "outer"], ["inner"], ["both"])


def test_without_a_listener_only_warnings_are_seen(capfd: pytest.CaptureFixture[str]) -> None:
    log.info("nobody listens")
    log.warning("look here")
    captured = capfd.readouterr()
    assert "nobody listens" not in captured.out + captured.err


def test_two_runs_in_two_threads_do_not_mix() -> None:
    meeting = threading.Barrier(2, timeout=10)

    def run(name: str) -> list[str]:
        shown: list[str] = []
        with show_notes(shown.append):
            for number in range(5):
                meeting.wait()
                log.info(f"{name} {number}")
        return shown

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, ("one", "two")))
    assert found == [[f"{name} {number}" for number in range(5)] for name in ("one", "two")]
    assert not any(isinstance(handler, Listener) for handler in LOGGER.handlers)


def test_a_thread_of_a_run_notes_where_its_context_does() -> None:
    shown: list[str] = []
    with show_notes(shown.append), ThreadPoolExecutor(1) as pool:
        pool.submit(copy_context().run, log.info, "from a thread").result()
        pool.submit(log.info, "from nowhere").result()
    assert shown == ["from a thread"]


def test_what_a_console_raises_reaches_whoever_logged() -> None:
    def refuse(text: str) -> None:
        raise OSError(text)

    with show_notes(refuse), pytest.raises(OSError, match="no paper"):
        log.info("no paper")
