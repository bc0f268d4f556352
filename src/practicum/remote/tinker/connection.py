"""Hold one session with a service: wait for requests and report failures in one line.

The package retries by itself, for a time that cannot be configured. So this module checks in
parallel that the service is there: while no answer comes, it probes the address, and after
`retry_seconds` seconds without a connection it gives up.
"""

import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from practicum.errors import RecipeError, TeacherError, suggest_install
from practicum.remote.address import AddressConfig, normalize_url, split_host
from practicum.text import excerpt

log = logging.getLogger(__name__)

PROBE_SECONDS, PROBE_INTERVAL = 3.0, 2.0
HEARTBEAT_SECONDS = 30.0
CLOSE_SECONDS = 3.0
SHOWN = 300

LOCAL_KEY = "tml-local"
"""The key for a service on this machine that needs none; the package sends no other form."""


class ServiceConfig(AddressConfig):
    """The address of a service and the patience with it."""

    api_key_env: str | None = Field(
        default=None,
        description="the environment variable that holds the key; none: only on this machine",
    )
    timeout: float = Field(
        default=1800.0, gt=0, description="seconds within which the service must answer"
    )
    retry_seconds: float = Field(
        default=120.0, ge=0, description="seconds without a connection that end the run"
    )
    seed_bits: int = Field(
        default=63,
        ge=16,
        le=63,
        description="bits of a completion's seed that the service takes; 31 for SkyRL",
    )


class SessionLost(TeacherError):
    """The requested object is gone: a service that was restarted has lost its earlier sessions."""


class Connection:
    """A session with a service; `service` is the package's `ServiceClient`.

    Errors are TeacherErrors without the key. `reopened` counts the new sessions.
    """

    def __init__(self, config: ServiceConfig, where: str) -> None:
        self.address = normalize_url(config.url, config.allow_http)
        self.largest_seed = 2**config.seed_bits - 1
        self.reopened = -1
        self._config = config
        self._key = _read_key(config, where)
        self._close: Callable[[], Any] = lambda: None
        _require_package()
        self.reopen()

    def reopen(self) -> None:
        """Open a new session as soon as the service can be reached."""
        import tinker

        self.close()
        self._wait_until_open()
        service = self.call(
            lambda: tinker.ServiceClient(base_url=self.address, api_key=self._key), "a session"
        )
        self.service: Any = service
        self.reopened += 1
        self._close = weakref.finalize(self, _finish_session, service, *split_host(self.address))

    def close(self) -> None:
        """End the session: the service saves unsaved weights, and the package's own tasks end."""
        self._close()

    def wait(self, requests: Sequence[Any], what: str) -> list[Any]:
        """Return the results of the package's requests, in order; the first that fails ends all."""
        futures: list[concurrent.futures.Future[Any]] = [
            request if type(request) is concurrent.futures.Future else request.future()
            for request in requests
        ]
        waiting = set(futures)
        start = last_answer = last_log = monotonic()
        while waiting:
            finished, waiting = concurrent.futures.wait(
                waiting, timeout=PROBE_INTERVAL, return_when=concurrent.futures.FIRST_COMPLETED
            )
            # Any error, an interrupt too, ends the wait for all requests; none may stay open.
            try:
                for future in finished:
                    if (error := _get_error(future)) is not None:
                        raise self._translate(error, what) from None
                clock = monotonic()
                if finished:
                    last_answer = clock
                elif clock - last_answer > self._config.timeout:
                    raise TeacherError(
                        f"{self.address}: {what}: nothing came back for {clock - last_answer:.0f} s; look at it, or raise timeout"
                    )
                else:
                    self._wait_until_open(what)
                if waiting and clock - last_log > HEARTBEAT_SECONDS:
                    last_log = clock
                    log.info(
                        f"waiting for {self.address}: {what}, {len(waiting)} of {len(futures)} for {clock - start:.0f} s"
                    )
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
        return [future.result() for future in futures]

    def call(self, work: Callable[[], Any], what: str) -> Any:
        """Return the result of a blocking call of the package."""
        return self.wait([_run_in_thread(work)], what)[0]

    def request(self, send: Callable[[], Any], what: str) -> Any:
        """Return the result of one request; some of the package's fail when they are made."""
        return self.wait([self.call(send, what)], what)[0]

    def quote(self, text: str) -> str:
        """Return text of the service for a message, without the key."""
        return excerpt(text, self._key, SHOWN)

    def read_context_lengths(self) -> dict[str, int]:
        """Return the context length in tokens of each model for which the service reports one."""

        def ask() -> Any:
            # The package's replacement shares a connection and closes it with any session.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return self.service.get_server_capabilities()

        models = self.call(ask, "what the service can do").supported_models
        return {row.model_name: row.max_context_length for row in models if row.max_context_length}

    def _wait_until_open(self, what: str = "a session") -> None:
        """Wait until the address accepts a connection.

        Raise TeacherError after `retry_seconds` seconds.
        """
        start, is_logged = monotonic(), False
        while (trouble := _probe_port(*split_host(self.address))) is not None:
            away = monotonic() - start
            if away >= self._config.retry_seconds:
                raise TeacherError(
                    f"{self.address}: {what}: no connection for {away:.0f} s ({trouble}); "
                    "start the service, or look at its log, and resume"
                )
            if not is_logged:
                log.info(f"{self.address}: no connection ({trouble}); {what} waits for it")
                is_logged = True
            sleep(min(PROBE_INTERVAL, self._config.retry_seconds))

    def _translate(self, error: BaseException, what: str) -> TeacherError:
        """Return an error of the package as a TeacherError."""
        text = self.quote(str(error) or type(error).__name__)
        status = _find_status(error)
        if status in (401, 403):
            return TeacherError(
                f"{self.address}: {what} was answered with {status}; name the variable that holds "
                "the key with api_key_env, or take another key"
            )
        if status in (404, 410):
            return SessionLost(f"{self.address}: {what}: {text}")
        return TeacherError(f"{self.address}: {what} failed: {text}")


def _require_package() -> None:
    """Raise RecipeError if the package, or a part of it, is missing, and silence its log.

    This module reports the same events in its own words.
    """
    try:
        import tinker  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"a service is asked through the tinker package, which cannot be imported ({error}); "
            f"{suggest_install('tinker')}"
        ) from None
    logging.getLogger("tinker").setLevel(logging.CRITICAL)


def _read_key(config: ServiceConfig, where: str) -> str:
    if config.api_key_env is None:
        if urlsplit(config.url).hostname in ("localhost", "127.0.0.1", "::1"):
            return LOCAL_KEY
        raise RecipeError(
            f"{where}.api_key_env: name the environment variable that holds the key of {config.url}"
        )
    key = os.environ.get(config.api_key_env, "").strip()
    if not key.isascii() or not key.isprintable() or not key.startswith(("tml-", "eyJ")):
        raise RecipeError(
            f"{where}.api_key_env: the environment variable {config.api_key_env} holds no key "
            "that begins with tml-; set it before the run"
        )
    return key


def _probe_port(host: str, port: int) -> str | None:
    """Return why an address accepts no connection, or None if it does."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


def _run_in_thread(work: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    """Start blocking work on a daemon thread, which cannot delay the end of the run."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the future carries any error to the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="practicum-tinker", daemon=True).start()
    return future


def _get_error(future: "concurrent.futures.Future[Any]") -> BaseException | None:
    if future.cancelled():
        return concurrent.futures.CancelledError("it was cancelled")
    return future.exception()


def _find_status(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error of the package, or None."""
    import tinker

    while error is not None and not isinstance(error, tinker.APIStatusError):
        error = error.__cause__
    return None if error is None else error.status_code


def _finish_session(service: Any, host: str, port: int) -> None:
    """Finish a session if the service can be reached."""
    # The run is over: no error of foreign code may change how it ends.
    with contextlib.suppress(Exception):
        if _probe_port(host, port) is None:
            service.close("success").result(timeout=CLOSE_SECONDS)
