"""Questions to somebody else's server, who may be slow, broken, gone or hostile: JSON both ways, and nothing waits forever.

Every request has a deadline. Refused connections, time-outs, 408, 429 and 5xx are tried again with seeded jitter until
`give_up_after` seconds passed since a request's first failure; an answer that is no JSON once; any other status never. A host's
addresses are looked up and judged before each connection, which then goes to exactly the address that was judged. Redirects
are not followed, proxies of the environment not used, and bodies read up to a size that the question allows.
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

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from practicum.core import abandon
from practicum.core.randomness import seed_of
from practicum.errors import PracticumError, RecipeError, TeacherError
from practicum.text import excerpt, make_printable
from practicum.text.safe import SHOWN

try:
    import httpx2
except ImportError as missing:
    raise RecipeError(
        "a teacher behind a server needs the package httpx2; install it with pip install 'practicum[remote]'"
    ) from missing

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
HEARTBEAT_SECONDS = 30.0
ABANDONED_SECONDS = 0.05
"""So often a thread that asks ahead looks whether anybody still waits."""

TRANSFER_BYTES_PER_SECOND = 1 << 20
LONGEST_WAIT = 60.0
"""Seconds between two attempts at most, whatever the server asks for."""

LOOKED_AT = 8 * SHOWN
"""Bytes of an answer in which its reason is looked for."""

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
Addresses = list[ipaddress.IPv4Address | ipaddress.IPv6Address]

METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"),
    )
)
"""Where clouds answer with credentials; link-local addresses are refused as a whole besides."""


class RequestRefused(TeacherError):
    """The server understood a question and said no; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """One request: where to, with which JSON (None: a GET), its name for people, its seconds and its largest answer."""

    path: str
    body: Mapping[str, Any] | None = None
    name: str = "the request"
    seconds: float = 15.0
    largest: int = 1 << 20

    @property
    def deadline(self) -> float:
        """Seconds to the last byte: those to the first one and the transfer of the largest answer."""
        return CONNECT_SECONDS + self.seconds + self.largest / TRANSFER_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is and how to treat it; `key` is sent to it and shown to nobody.

    `give_up_after` are the seconds in which a failing request is tried again.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    allow_http: bool = False
    concurrency: int = 16
    give_up_after: float = 120.0
    seed: int = 0


def base_url(url: str, allow_http: bool = False) -> str:
    """The address of a server as its questions begin, without `/v1` and slashes at its end; ValueError where it must not be."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{redact_url(url)!r} is no address ({error}); {_WRITE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{redact_url(url)!r} is not the address of a server; {_WRITE}")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "the address holds a user or a password; take it out and name an environment variable: api_key_env"
        )
    if (
        parts.query
        or parts.fragment
        or not url.isascii()
        or make_printable(url) != url
        or " " in url
        or "\\" in url
    ):
        raise ValueError(f"{redact_url(url)!r} holds more than host, port and path; {_WRITE}")
    literal = _literal(parts.hostname)
    if literal is None and _numeric(parts.hostname):
        raise ValueError(
            f"{parts.hostname!r} is an address in disguise; write it with dots, as in 127.0.0.1"
        )
    problem = None if literal is None else _forbidden(literal)
    if problem is not None:
        raise ValueError(
            f"{parts.hostname} is {problem}, which is never asked; name the server's own address"
        )
    local = parts.hostname == "localhost" if literal is None else literal.is_loopback
    if parts.scheme == "http" and not (local or allow_http):
        raise ValueError(_PLAIN.format(host=parts.hostname))
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


_WRITE = "write for example https://host or http://localhost:8000"
_PLAIN = (
    "plain http to {host} shows prompts and keys to everyone on the way; write https, or allow_http: true where the network is "
    "your own"
)


class AddressConfig(BaseModel):
    """Where a server is, in the configuration of whoever asks it; a secret in the address is refused where it is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str = Field(
        description="https://host, or http://localhost:8000; other plain http needs `allow_http`"
    )
    allow_http: bool = Field(
        default=False,
        description="plain http to other machines, which everyone on the way can read",
    )

    @field_validator("url")
    @classmethod
    def _no_secrets(cls, url: str) -> str:
        base_url(url, allow_http=True)
        return url

    @model_validator(mode="after")
    def _safe(self) -> "AddressConfig":
        base_url(self.url, self.allow_http)
        return self


def redact_url(url: str) -> str:
    """An address that can be shown: nothing before an @, and nothing after a question mark."""
    before, slashes, rest = url.partition("//")
    if not slashes:
        before, rest = "", before
    host, slash, path = rest.partition("/")
    shown = f"{before}{slashes}{host.rpartition('@')[2]}{slash}{path}".partition("?")[0].partition(
        "#"
    )[0]
    return excerpt(shown)


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _numeric(host: str) -> bool:
    """Whether a resolver may read a name as an address: 2130706433, 0x7f.1, 127.1."""
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True


def _forbidden(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """What kind of address it is that nothing is ever sent to, or None."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        return _forbidden(mapped)
    if address in METADATA or address.is_link_local:
        return "a link-local or metadata address"
    if (
        address.is_multicast
        or address.is_unspecified
        or (address.is_reserved and not address.is_loopback)
    ):
        return "not the address of one machine"
    return None


class _RetryableError(Exception):
    """An attempt failed in a way that may pass: why, what the server asked to wait, and whether it said anything wrong."""

    def __init__(self, why: str, wait: float = 0.0, garbage: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.wait = wait
        self.garbage = garbage


@dataclass(slots=True)
class _Waiting:
    """An open question: since when it is open, and what went wrong last."""

    name: str
    since: float
    trouble: str = ""


class JsonClient:
    """Asks a server questions, several at once, and gives the answers in the order of the questions.

    Raises TeacherError (`Refused` where the server said no) with one line that names the server, the request, the reason and
    what to do. While it waits it says so every `heartbeat` seconds, and once at the first failure. `failures` counts what had to
    be asked again, `wire_bytes` the bytes of all bodies that went out and came back.
    """

    def __init__(self, server: Server, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.server = server
        self.failures = 0
        self.wire_bytes = 0
        self._heartbeat = heartbeat
        self.address = base_url(server.url, server.allow_http)
        """The server's address, to be shown."""
        self._tls = ssl.create_default_context() if self.address.startswith("https") else False
        self._asked = 0

    def shown(self, text: str, most: int = SHOWN) -> str:
        """Return text of the server as a message shows it, without the key."""
        return excerpt(text, self.server.key, most)

    def ask(self, question: JsonRequest) -> Any:
        """The answer to one question."""
        return self.send_all([question])[0]

    def send_all(
        self,
        questions: Sequence[JsonRequest],
        read: Callable[[int, Any], Any] = lambda place, answer: answer,
    ) -> list[Any]:
        """The answers to all questions, in their order; the first that fails for good ends all.

        `read` makes of each answer, as it comes, what is kept of it; it is given the place of its question.
        """
        if not questions:
            return []
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._all(questions, read))
        # A notebook runs a loop of its own in this thread, so ours runs in another.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, asyncio.run, self._all(questions, read)).result()

    async def _all(
        self, questions: Sequence[JsonRequest], read: Callable[[int, Any], Any]
    ) -> list[Any]:
        open_ones: dict[int, _Waiting] = {}
        slots = asyncio.Semaphore(self.server.concurrency)
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=self.server.concurrency
        )
        client = httpx2.AsyncClient(
            verify=self._tls,
            timeout=timeout,
            limits=limits,
            trust_env=False,
            follow_redirects=False,
        )
        first = self._asked
        self._asked += len(questions)

        async def one(place: int, question: JsonRequest) -> Any:
            return read(
                place, await self._answered(client, slots, question, first + place, open_ones)
            )

        try:
            async with client, asyncio.TaskGroup() as group:
                beat = group.create_task(self._report_waiting(open_ones, len(questions)))
                watch = group.create_task(_until_abandoned())
                answers = [
                    group.create_task(one(place, question))
                    for place, question in enumerate(questions)
                ]
                await asyncio.wait(answers)
                beat.cancel()
                watch.cancel()
        except BaseExceptionGroup as group:
            own = [error for error in group.exceptions if isinstance(error, PracticumError)]
            raise own[0] if own else group.exceptions[0] from None
        return [task.result() for task in answers]

    async def _report_waiting(self, open_ones: Mapping[int, _Waiting], count: int) -> None:
        """Say what is being waited for, now and then."""
        while True:
            await asyncio.sleep(self._heartbeat)
            if open_ones:
                oldest = min(open_ones.values(), key=lambda waiting: waiting.since)
                trouble = f", last trouble: {oldest.trouble}" if oldest.trouble else ""
                log.info(
                    f"waiting for {self.address}: {len(open_ones)} of {count} requests are open, {oldest.name} for "
                    f"{monotonic() - oldest.since:.0f} s{trouble}"
                )

    async def _answered(
        self,
        client: httpx2.AsyncClient,
        slots: asyncio.Semaphore,
        question: JsonRequest,
        number: int,
        open_ones: dict[int, _Waiting],
    ) -> Any:
        """One question, asked until it is answered or it is time to give up."""
        jitter = Random(seed_of(self.server.seed, "jitter", number))
        first_failure: float | None = None
        garbage = tries = 0
        async with slots:
            waiting = open_ones[number] = _Waiting(question.name, monotonic())
            while True:
                try:
                    answer = await self._attempt(client, question)
                except _RetryableError as failure:
                    tries += 1
                    garbage += failure.garbage
                    self._note(failure, waiting)
                    first_failure = first_failure or monotonic()
                    wait = max(
                        failure.wait,
                        min(LONGEST_WAIT, 0.25 * 2 ** min(tries, 8)) * (0.5 + jitter.random() / 2),
                    )
                    spent = monotonic() - first_failure
                    if garbage > 1 or (tries > 1 and spent + wait > self.server.give_up_after):
                        raise self._make_timeout_error(question, failure, tries, spent) from None
                    await asyncio.sleep(min(wait, self.server.give_up_after))
                else:
                    del open_ones[number]
                    return answer

    def _note(self, failure: _RetryableError, waiting: _Waiting) -> None:
        self.failures += 1
        if not waiting.trouble:
            log.info(f"{self.address}: {failure.why}; {waiting.name} is asked again")
        waiting.trouble = failure.why

    def _make_timeout_error(
        self, question: JsonRequest, failure: _RetryableError, tries: int, spent: float
    ) -> TeacherError:
        advice = (
            "look at what the address is" if failure.garbage else "start it, or look at its log"
        )
        return TeacherError(
            f"{self.address}{question.path}: {question.name} failed {tries} times in {spent:.0f} s, at last because {failure.why}; "
            f"{advice}, and resume"
        )

    async def _attempt(self, client: httpx2.AsyncClient, question: JsonRequest) -> Any:
        """One attempt within its deadline; `_RetryableError` where another may succeed."""
        try:
            async with asyncio.timeout(question.deadline):
                address = await self._resolve_allowed_address()
                status, headers, body = await self._exchange(client, question, address)
        except TimeoutError:
            raise _RetryableError(f"it did not answer within {question.deadline:.0f} s") from None
        except httpx2.ConnectTimeout:
            raise _RetryableError(
                f"it did not accept a connection within {CONNECT_SECONDS:.0f} s"
            ) from None
        except httpx2.TimeoutException:
            raise _RetryableError(
                f"it did not begin to answer within {question.seconds:.0f} s"
            ) from None
        except httpx2.ConnectError as error:
            if _untrusted(error):
                raise TeacherError(
                    f"{self.address}: its certificate is not to be trusted ({self.shown(str(error))}); name the host as the "
                    "certificate does, or let SSL_CERT_FILE name the authority"
                ) from None
            raise _RetryableError(f"no connection ({self.shown(str(error))})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _RetryableError(
                f"the connection broke ({self.shown(str(error) or type(error).__name__)})"
            ) from None
        return self._judged_answer(question, status, headers, body)

    async def _resolve_allowed_address(self) -> str:
        """An address of the host that may be asked."""
        parts = urlsplit(self.address)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise _RetryableError(f"the name {host} is not known ({error.strerror})") from None
        addresses: Addresses = [
            ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found
        ]
        for address in addresses:
            problem = _forbidden(address)
            if problem is not None:
                raise TeacherError(
                    f"{self.address}: {host} is at {address}, {problem}, which is never asked; name another server"
                )
        if (
            parts.scheme == "http"
            and not self.server.allow_http
            and not all(a.is_loopback for a in addresses)
        ):
            raise TeacherError(f"{self.address}: {_PLAIN.format(host=host)}")
        return str(addresses[0])

    async def _exchange(
        self, client: httpx2.AsyncClient, question: JsonRequest, address: str
    ) -> tuple[int, httpx2.Headers, bytes]:
        """Status, headers and body of one request to a judged address."""
        parts = urlsplit(f"{self.address}{question.path}")
        body = (
            None if question.body is None else json.dumps(question.body, allow_nan=False).encode()
        )
        headers = {
            "Host": parts.netloc,
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "practicum",
        }
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.server.key is not None:
            headers["Authorization"] = f"Bearer {self.server.key}"
        timeout = httpx2.Timeout(question.seconds, connect=CONNECT_SECONDS)
        request = client.build_request(
            "GET" if body is None else "POST",
            _at(parts, address),
            content=body,
            headers=headers,
            timeout=timeout,
            extensions={"timeout": timeout.as_dict(), "sni_hostname": parts.hostname},
        )
        self.wire_bytes += len(body or b"")
        response = await client.send(request, stream=True)
        try:
            received = bytearray()
            async for chunk in response.aiter_raw():
                received += chunk
                self.wire_bytes += len(chunk)
                if len(received) > question.largest:
                    raise TeacherError(
                        f"{self.address}{question.path}: the answer to {question.name} is longer than {question.largest} bytes, "
                        "which no answer to it needs to be; look at what the address is"
                    )
            return response.status_code, response.headers, bytes(received)
        finally:
            await response.aclose()

    def _judged_answer(
        self, question: JsonRequest, status: int, headers: httpx2.Headers, body: bytes
    ) -> Any:
        """The JSON of an answer; `_RetryableError` or TeacherError where there is none."""
        where = f"{self.address}{question.path}"
        detail = self.shown(body[:LOOKED_AT].decode("utf-8", "replace"))
        if status in AGAIN:
            raise _RetryableError(
                f"it answered {status}{f' ({detail})' if detail else ''}",
                wait=_retry_after(headers),
            )
        if 300 <= status < 400:
            to = self.shown(redact_url(headers.get("Location", "nowhere")))
            raise TeacherError(
                f"{where}: it answered {status} and points to {to}, which is not followed; write the new address"
            )
        if status in (401, 403):
            raise RequestRefused(
                f"{where}: {question.name} was answered with {status}; name the environment variable that holds the key with "
                "api_key_env, or take another key",
                status,
            )
        if status != 200:
            raise RequestRefused(
                f"{where}: {question.name} was refused with {status} ({detail})", status
            )
        try:
            return json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_twins)
        except (ValueError, RecursionError) as error:
            kind = self.shown(headers.get("Content-Type", "no type"))
            why = (
                f"the answer is not JSON ({kind}, {len(body)} bytes: {self.shown(str(error), 80)})"
            )
            raise _RetryableError(why, garbage=True) from None


async def _until_abandoned() -> None:
    """Abandoned as soon as nobody waits for the answers any more."""
    while abandon.told() is not None:
        abandon.check()
        await asyncio.sleep(ABANDONED_SECONDS)


def _at(parts: SplitResult, address: str) -> str:
    """The same address with the host's number in place of its name."""
    host = f"[{address}]" if ":" in address else address
    return parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}").geturl()


def _untrusted(error: BaseException | None) -> bool:
    """Whether a connection failed because of the server's certificate."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _retry_after(headers: httpx2.Headers) -> float:
    """The seconds that a server asks to wait, as a number or a date, capped; 0 where it says nothing sensible."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text[:12]), LONGEST_WAIT)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0.0
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), LONGEST_WAIT)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found
