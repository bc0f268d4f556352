"""One session with a service: requests waited for, failures told in one line, the session closed when it is let go of.

The package asks again by itself, for a time that nobody here can set. So whether the service is there at all is looked at
beside it: while nothing comes, the address is knocked at, and after `give_up_after` seconds without a connection all is over.
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

from practicum.errors import RecipeError, TeacherError
from practicum.remote.http import AddressConfig, base_url
from practicum.text import excerpt

log = logging.getLogger(__name__)

KNOCK_SECONDS, KNOCK_EVERY = 3.0, 2.0
HEARTBEAT_SECONDS = 30.0
CLOSE_SECONDS = 3.0
SHOWN = 300

LOCAL_KEY = "tml-local"
"""What is sent to a service on this machine that wants no key; the package sends none that begins otherwise."""


class ServiceConfig(AddressConfig):
    """Where a service is and how patiently it is asked."""

    api_key_env: str | None = Field(
        default=None,
        description="the environment variable that holds the key; none: only on this machine",
    )
    timeout: float = Field(
        default=1800.0, gt=0, description="seconds in which something has to come back"
    )
    give_up_after: float = Field(
        default=120.0, ge=0, description="seconds without a connection that end the run"
    )


class SessionLost(TeacherError):
    """What was asked for is not there any more: a service that was started again knows no sessions of before."""


class Connection:
    """A session with a service; `service` is the package's `ServiceClient`.

    Errors are TeacherErrors, of which none holds the key. `reopened` counts how often a new session was begun.
    """

    def __init__(self, config: ServiceConfig, where: str) -> None:
        self.address = base_url(config.url, config.allow_http)
        self.reopened = -1
        self._config = config
        self._key = _key(config, where)
        self._close: Callable[[], Any] = lambda: None
        _package()
        self.reopen()

    def reopen(self) -> None:
        """Begin a new session, as soon as the service can be reached."""
        import tinker

        self.close()
        self._knock_until_open()
        service = self.call(
            lambda: tinker.ServiceClient(base_url=self.address, api_key=self._key), "a session"
        )
        self.service: Any = service
        self.reopened += 1
        self._close = weakref.finalize(self, _closed, service, *self._host())

    def close(self) -> None:
        """End the session: the service saves what it has not, and the package's own tasks end."""
        self._close()

    def wait(self, requests: Sequence[Any], what: str) -> list[Any]:
        """The answers to some of the package's requests, in order; the first that fails ends all."""
        futures: list[concurrent.futures.Future[Any]] = [
            request if type(request) is concurrent.futures.Future else request.future()
            for request in requests
        ]
        waiting = set(futures)
        begun = heard = said = monotonic()
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, timeout=KNOCK_EVERY, return_when=concurrent.futures.FIRST_COMPLETED
            )
            try:
                for future in done:
                    if (error := _error(future)) is not None:
                        raise self._failed(error, what) from None
                now = monotonic()
                if done:
                    heard = now
                elif now - heard > self._config.timeout:
                    raise TeacherError(
                        f"{self.address}: {what}: nothing came back for {now - heard:.0f} s; look at it, or raise timeout"
                    )
                else:
                    self._knock_until_open(what)
                if waiting and now - said > HEARTBEAT_SECONDS:
                    said = now
                    log.info(
                        f"waiting for {self.address}: {what}, {len(waiting)} of {len(futures)} for {now - begun:.0f} s"
                    )
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
        return [future.result() for future in futures]

    def call(self, work: Callable[[], Any], what: str) -> Any:
        """What one of the package's calls that block comes to."""
        return self.wait([_in_thread(work)], what)[0]

    def answer(self, request: Callable[[], Any], what: str) -> Any:
        """What one request comes to; some of the package's fail as they are made."""
        return self.wait([self.call(request, what)], what)[0]

    def shown(self, text: str) -> str:
        """Return text of the service as a message shows it, without the key."""
        return excerpt(text, self._key, SHOWN)

    def contexts(self) -> dict[str, int]:
        """The longest text that each of the service's models reads, of those that it says it of."""

        def ask() -> Any:
            with (
                warnings.catch_warnings()
            ):  # the package's new way shares one connection, and closes it with any session
                warnings.simplefilter("ignore", FutureWarning)
                return self.service.get_server_capabilities()

        found = self.call(ask, "what the service can do").supported_models
        return {row.model_name: row.max_context_length for row in found if row.max_context_length}

    def _knock_until_open(self, what: str = "a session") -> None:
        """Wait until the address takes a connection; TeacherError after `give_up_after` seconds without."""
        begun, told = monotonic(), False
        while (trouble := _probe_port(*self._host())) is not None:
            away = monotonic() - begun
            if away >= self._config.give_up_after:
                raise TeacherError(
                    f"{self.address}: {what}: no connection for {away:.0f} s ({trouble}); start the service, or look at its log, "
                    "and resume"
                )
            if not told:
                log.info(f"{self.address}: no connection ({trouble}); {what} waits for it")
                told = True
            sleep(min(KNOCK_EVERY, self._config.give_up_after))

    def _host(self) -> tuple[str, int]:
        parts = urlsplit(self.address)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def _failed(self, error: BaseException, what: str) -> TeacherError:
        """What one of the package's errors comes to."""
        shown = self.shown(str(error) or type(error).__name__)
        status = _status(error)
        if status in (401, 403):
            return TeacherError(
                f"{self.address}: {what} was answered with {status}; name the variable that holds the key with "
                "api_key_env, or take another key"
            )
        if status in (404, 410):
            return SessionLost(f"{self.address}: {what}: {shown}")
        return TeacherError(f"{self.address}: {what} failed: {shown}")


def _package() -> None:
    """RecipeError where the package is missing, or a part of it; what it logs is said here in other words."""
    try:
        import tinker  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"a service is asked through the tinker package, which cannot be imported ({error}); install it with pip install "
            "'practicum[tinker]'"
        ) from None
    logging.getLogger("tinker").setLevel(logging.CRITICAL)


def _key(config: ServiceConfig, where: str) -> str:
    if config.api_key_env is None:
        if urlsplit(config.url).hostname in ("localhost", "127.0.0.1", "::1"):
            return LOCAL_KEY
        raise RecipeError(
            f"{where}.api_key_env: name the environment variable that holds the key of {config.url}"
        )
    key = os.environ.get(config.api_key_env, "").strip()
    if not key.isascii() or not key.isprintable() or not key.startswith(("tml-", "eyJ")):
        raise RecipeError(
            f"{where}.api_key_env: the environment variable {config.api_key_env} holds no key that begins with tml-; set it before "
            "the run"
        )
    return key


def _probe_port(host: str, port: int) -> str | None:
    """Why nothing listens at an address, or None."""
    try:
        socket.create_connection((host, port), timeout=KNOCK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


def _in_thread(work: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    """The result of work that blocks, done on a thread that holds up nobody's end."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits is told
            future.set_exception(error)

    threading.Thread(target=run, name="practicum-tinker", daemon=True).start()
    return future


def _error(future: "concurrent.futures.Future[Any]") -> BaseException | None:
    return (
        concurrent.futures.CancelledError("it was cancelled")
        if future.cancelled()
        else future.exception()
    )


def _status(error: BaseException | None) -> int | None:
    """The HTTP status that an error of the package goes back to, where it does."""
    import tinker

    while error is not None and not isinstance(error, tinker.APIStatusError):
        error = error.__cause__
    return None if error is None else error.status_code


def _closed(service: Any, host: str, port: int) -> None:
    """Finish a session; where the service is away there is nobody to tell."""
    with contextlib.suppress(Exception):  # the run is over, whatever the package thinks of it
        if _probe_port(host, port) is None:
            service.close("success").result(timeout=CLOSE_SECONDS)
