"""Send requests to a server that may be slow, broken, gone or hostile: JSON, and no endless wait.

Every request has a deadline. Refused connections, time-outs, 408, 429 and 5xx are retried with
seeded jitter until `retry_seconds` seconds have passed since a request's first failure, an answer
that is no JSON once, any other status never. A host's addresses are looked up and judged before
each connection, which then goes to exactly the judged address. Redirects are not followed, proxies
of the environment not used, and bodies read up to a size that the request allows.
"""

import asyncio
import concurrent.futures
import ipaddress
import json
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urlsplit

from practicum.core import abandon
from practicum.core.randomness import seed_of
from practicum.core.strict_json import JsonError, parse_json
from practicum.core.waits import Wait, show_wait
from practicum.errors import PracticumError, RecipeError, TeacherError, suggest_install
from practicum.remote.address import (
    PLAIN_HTTP,
    AddressConfig,
    explain_forbidden,
    normalize_url,
    redact_url,
    split_host,
)
from practicum.text import excerpt
from practicum.text.safe import MAX_EXCERPT_CHARACTERS

try:
    import httpx2
except ImportError as missing:
    raise RecipeError(
        f"a teacher behind a server needs the package httpx2; {suggest_install('remote')}"
    ) from missing

__all__ = ["AddressConfig", "JsonClient", "JsonRequest", "RequestRefused", "Server"]

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
HEARTBEAT_SECONDS = 30.0
CANCEL_POLL_SECONDS = 0.05
"""The seconds between two checks whether a prefetching thread is cancelled."""

TRANSFER_BYTES_PER_SECOND = 1 << 20
MAX_WAIT_SECONDS = 60.0
"""The most seconds between two attempts, even if the server asks for more."""

DETAIL_BYTES = 8 * MAX_EXCERPT_CHARACTERS
"""The bytes of an answer in which its reason is searched."""

TOO_MANY_REQUESTS = 429
RETRIED_STATUSES = frozenset({408, 425, TOO_MANY_REQUESTS, 500, 502, 503, 504, 529})


class RequestRefused(TeacherError):
    """The server understood a request and refused it; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """One request.

    `body` is sent as JSON (None: a GET), `name` is for messages, `seconds` bounds the wait for the
    first byte and `largest` the bytes of the answer.
    """

    path: str
    body: Mapping[str, Any] | None = None
    name: str = "the request"
    seconds: float = 15.0
    max_answer_bytes: int = 1 << 20
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def deadline(self) -> float:
        """Return the seconds to the last byte: to the first one, and the largest transfer."""
        return CONNECT_SECONDS + self.seconds + self.max_answer_bytes / TRANSFER_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server and the limits of its use; `key` is sent to it and never shown.

    `key_header` is the header of the bare key (None: `Authorization: Bearer KEY`). A failing request
    is retried for `retry_seconds` seconds.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    key_header: str | None = None
    allow_http: bool = False
    concurrency: int = 16
    retry_seconds: float = 120.0
    seed: int = 0


class _RetryableError(Exception):
    """An attempt that may succeed when repeated.

    `wait` has the seconds that the server asks to wait; `garbage` is True if the answer was
    malformed, `limited` if there were too many requests.
    """

    def __init__(
        self, why: str, wait: float = 0.0, garbage: bool = False, limited: bool = False
    ) -> None:
        super().__init__(why)
        self.why = why
        self.limited = limited
        self.wait = wait
        self.garbage = garbage


@dataclass(slots=True)
class _OpenRequest:
    """A request without an answer: when it started, and its last trouble."""

    name: str
    since: float
    trouble: str = ""


class JsonClient:
    """Send requests to a server, several at once, and return the answers in their order.

    An error is a TeacherError (`RequestRefused` for a refusal) of one line with the server, the
    request, the reason and what to do. A wait is logged every `heartbeat` seconds, and the first
    failure of a request at once. `failures` counts the retries, `rate_limits` the retries because
    of a rate limit, and `wire_bytes` the bytes of all bodies in both directions.
    """

    def __init__(self, server: Server, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.server = server
        self.failures = 0
        self.rate_limits = 0
        self.wire_bytes = 0
        self._heartbeat = heartbeat
        self.address = normalize_url(server.url, server.allow_http)
        """The server's address, to be shown."""
        self._tls = ssl.create_default_context() if self.address.startswith("https") else False
        self._num_asked = 0

    def quote(self, text: str, most: int = MAX_EXCERPT_CHARACTERS) -> str:
        """Return text of the server for a message, without the key."""
        return excerpt(text, self.server.key, most)

    def ask(self, question: JsonRequest) -> Any:
        """Return the answer to one request."""
        return self.send_all([question])[0]

    def send_all(
        self,
        questions: Sequence[JsonRequest],
        read: Callable[[int, Any], Any] = lambda index, answer: answer,
    ) -> list[Any]:
        """Return the answers to all requests, in order; the first final failure ends all.

        `read` receives the index and the answer of each request on arrival; its result is
        returned.
        """
        if not questions:
            return []
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._exchange_all(questions, read))
        # A notebook already runs an event loop in this thread, so ours runs in another.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(
                copy_context().run, asyncio.run, self._exchange_all(questions, read)
            ).result()

    async def _exchange_all(
        self, questions: Sequence[JsonRequest], read: Callable[[int, Any], Any]
    ) -> list[Any]:
        open_requests: dict[int, _OpenRequest] = {}
        concurrency = self.server.concurrency
        slots = asyncio.Semaphore(concurrency)
        client = httpx2.AsyncClient(
            verify=self._tls,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=concurrency),
            trust_env=False,
            follow_redirects=False,
        )
        first = self._num_asked
        self._num_asked += len(questions)

        async def ask(index: int, question: JsonRequest, wait: Wait) -> Any:
            async with slots:
                number = first + index
                answer = await self._ask_until_answered(client, question, number, open_requests)
            wait.advance()
            return read(index, answer)

        name = f"answers of {self.address}"
        try:
            with show_wait(name, len(questions)) as wait:
                async with client, asyncio.TaskGroup() as group:
                    beat = group.create_task(self._report_waiting(open_requests, len(questions)))
                    watch = group.create_task(_wait_for_cancel())
                    answers = [
                        group.create_task(ask(index, question, wait))
                        for index, question in enumerate(questions)
                    ]
                    await asyncio.wait(answers)
                    beat.cancel()
                    watch.cancel()
        except BaseExceptionGroup as group:
            # One failed request cancels all other requests, and their errors do not show the cause.
            errors = [error for error in group.exceptions if isinstance(error, PracticumError)]
            raise errors[0] if errors else group.exceptions[0] from None
        return [task.result() for task in answers]

    async def _report_waiting(self, open_requests: Mapping[int, _OpenRequest], count: int) -> None:
        """Log the oldest open request at intervals."""
        while True:
            await asyncio.sleep(self._heartbeat)
            if open_requests:
                oldest = min(open_requests.values(), key=lambda waiting: waiting.since)
                trouble = f", last trouble: {oldest.trouble}" if oldest.trouble else ""
                log.info(
                    f"waiting for {self.address}: {len(open_requests)} of {count} requests are "
                    f"open, {oldest.name} for {monotonic() - oldest.since:.0f} s{trouble}"
                )

    async def _ask_until_answered(
        self,
        client: httpx2.AsyncClient,
        question: JsonRequest,
        number: int,
        open_requests: dict[int, _OpenRequest],
    ) -> Any:
        """Repeat a request until it has an answer or its time is over."""
        # Seeded by the request's number, so waits do not depend on the order of the answers.
        jitter = Random(seed_of(self.server.seed, "jitter", number))
        first_failure: float | None = None
        garbage = tries = 0
        waiting = open_requests[number] = _OpenRequest(question.name, monotonic())
        while True:
            try:
                answer = await self._try_once(client, question)
            except _RetryableError as failure:
                tries += 1
                garbage += failure.garbage
                self._note(failure, waiting)
                first_failure = first_failure or monotonic()
                elapsed = monotonic() - first_failure
                backoff = min(MAX_WAIT_SECONDS, 0.25 * 2 ** min(tries, 8))
                wait = max(failure.wait, backoff * (0.5 + jitter.random() / 2))
                # Every request gets a second attempt, even if the first attempt took too long.
                if garbage > 1 or (tries > 1 and elapsed + wait > self.server.retry_seconds):
                    raise self._build_timeout_error(question, failure, tries, elapsed) from None
                await asyncio.sleep(min(wait, self.server.retry_seconds))
            else:
                del open_requests[number]
                return answer

    def _note(self, failure: _RetryableError, waiting: _OpenRequest) -> None:
        self.failures += 1
        self.rate_limits += failure.limited
        if not waiting.trouble:
            log.info(f"{self.address}: {failure.why}; {waiting.name} is asked again")
        waiting.trouble = failure.why

    def _build_timeout_error(
        self, question: JsonRequest, failure: _RetryableError, tries: int, elapsed: float
    ) -> TeacherError:
        advice = "check the address" if failure.garbage else "start the server, or look at its log"
        return TeacherError(
            f"{self.address}{question.path}: {question.name} failed {tries} times in "
            f"{elapsed:.0f} s, at last because {failure.why}; {advice}, and resume"
        )

    async def _try_once(self, client: httpx2.AsyncClient, question: JsonRequest) -> Any:
        """Make one attempt within its deadline; raise `_RetryableError` if another may succeed."""
        try:
            async with asyncio.timeout(question.deadline):
                address = await self._resolve_allowed_address()
                status, headers, body = await self._exchange(client, question, address)
        except TimeoutError:
            raise _RetryableError(f"it did not answer within {question.deadline:.0f} s") from None
        except httpx2.ConnectTimeout:
            why = f"it did not accept a connection within {CONNECT_SECONDS:.0f} s"
            raise _RetryableError(why) from None
        except httpx2.TimeoutException:
            why = f"it did not begin to answer within {question.seconds:.0f} s"
            raise _RetryableError(why) from None
        except httpx2.ConnectError as error:
            if _is_untrusted(error):
                raise TeacherError(
                    f"{self.address}: its certificate is not to be trusted "
                    f"({self.quote(str(error))}); name the host as the certificate does, or let SSL_CERT_FILE name the authority"
                ) from None
            raise _RetryableError(f"no connection ({self.quote(str(error))})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = self.quote(str(error) or type(error).__name__)
            raise _RetryableError(f"the connection broke ({why})") from None
        return self._parse_answer(question, status, headers, body)

    async def _resolve_allowed_address(self) -> str:
        """Return an address of the host, after all of them were judged."""
        host, port = split_host(self.address)
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise _RetryableError(f"the name {host} is not known ({error.strerror})") from None
        # One forbidden address condemns the name: the server decides which of them is used.
        numbers = (str(entry[4][0]).partition("%")[0] for entry in entries)
        addresses = [ipaddress.ip_address(number) for number in numbers]
        for address in addresses:
            problem = explain_forbidden(address)
            if problem is not None:
                raise TeacherError(
                    f"{self.address}: {host} is at {address}, {problem}, which is never asked; name another server"
                )
        may_be_plain = self.server.allow_http or all(a.is_loopback for a in addresses)
        if self.address.startswith("http:") and not may_be_plain:
            raise TeacherError(f"{self.address}: {PLAIN_HTTP.format(host=host)}")
        return str(addresses[0])

    async def _exchange(
        self, client: httpx2.AsyncClient, question: JsonRequest, address: str
    ) -> tuple[int, httpx2.Headers, bytes]:
        """Return status, headers and body of one request to a judged address."""
        parts = urlsplit(f"{self.address}{question.path}")
        body = None
        # The connection goes to the judged number, so a second look-up of the name cannot lead it
        # elsewhere. The name remains in the Host header and in TLS (SNI and certificate).
        headers = {
            "Host": parts.netloc,
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "practicum",
        }
        if question.body is not None:
            body = json.dumps(question.body, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        headers |= question.headers
        key, key_header = self.server.key, self.server.key_header
        if key is not None:
            bearer = {"Authorization": f"Bearer {key}"}
            headers |= bearer if key_header is None else {key_header: key}
        request = client.build_request(
            "GET" if body is None else "POST",
            _replace_host(parts, address),
            content=body,
            headers=headers,
            timeout=httpx2.Timeout(question.seconds, connect=CONNECT_SECONDS),
            extensions={"sni_hostname": parts.hostname},
        )
        self.wire_bytes += len(body or b"")
        response = await client.send(request, stream=True)
        try:
            received = bytearray()
            # Raw bytes, and `identity` above: a small compressed body cannot unfold in memory.
            async for chunk in response.aiter_raw():
                received += chunk
                self.wire_bytes += len(chunk)
                if len(received) > question.max_answer_bytes:
                    raise TeacherError(
                        f"{self.address}{question.path}: the answer to {question.name} is longer "
                        f"than {question.max_answer_bytes} bytes, more than any valid answer needs; check the address"
                    )
            return response.status_code, response.headers, bytes(received)
        finally:
            await response.aclose()

    def _parse_answer(
        self, question: JsonRequest, status: int, headers: httpx2.Headers, body: bytes
    ) -> Any:
        """Return the JSON of an answer; raise `_RetryableError` or TeacherError without one."""
        where = f"{self.address}{question.path}"
        detail = self.quote(body[:DETAIL_BYTES].decode("utf-8", "replace"))
        if status in RETRIED_STATUSES:
            why = f"it answered {status}{f' ({detail})' if detail else ''}"
            limited = status == TOO_MANY_REQUESTS
            raise _RetryableError(why, wait=_read_retry_after(headers), limited=limited)
        if 300 <= status < 400:
            to = self.quote(redact_url(headers.get("Location", "nowhere")))
            raise TeacherError(
                f"{where}: it answered {status} and points to {to}, which is not followed; write the new address"
            )
        if status in (401, 403):
            raise RequestRefused(
                f"{where}: {question.name} was answered with {status}; name the environment "
                "variable that holds the key with api_key_env, or take another key",
                status,
            )
        if status != 200:
            text = f"{where}: {question.name} was refused with {status} ({detail})"
            raise RequestRefused(text, status)
        try:
            return parse_json(body)
        except JsonError as error:
            kind = self.quote(headers.get("Content-Type", "no type"))
            why = f"({kind}, {len(body)} bytes: {self.quote(str(error), 80)})"
            raise _RetryableError(f"the answer is not JSON {why}", garbage=True) from None


async def _wait_for_cancel() -> None:
    """Raise as soon as the work of this thread is cancelled; return if it cannot be."""
    # A `threading.Event` cannot be awaited, so it is polled.
    while abandon.get_cancel_event() is not None:
        abandon.check()
        await asyncio.sleep(CANCEL_POLL_SECONDS)


def _replace_host(parts: SplitResult, address: str) -> str:
    """Return the address with the host's number in place of its name."""
    host = f"[{address}]" if ":" in address else address
    return parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}").geturl()


def _is_untrusted(error: BaseException | None) -> bool:
    """Return True if a connection failed because of the server's certificate."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _read_retry_after(headers: httpx2.Headers) -> float:
    """Return the seconds that a server asks to wait, from a number or a date, capped.

    0 if the header is missing or malformed.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text[:12]), MAX_WAIT_SECONDS)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0.0
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), MAX_WAIT_SECONDS)
