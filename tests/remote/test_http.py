"""A server may be slow, broken, gone or hostile: each ends with one line within a bounded time, and nothing waits forever."""

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from stub_server import Fault, Stub, drip, flood, hang_up, late, raw, status

from practicum.core.notes import show_notes
from practicum.errors import TeacherError
from practicum.remote import http
from practicum.remote.address import normalize_url, redact_url
from practicum.remote.http import (
    JsonClient,
    JsonRequest,
    RequestRefused,
    Server,
)

pytestmark = pytest.mark.long


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


def client(stub: Stub, heartbeat: float = 30.0, **fields: Any) -> JsonClient:
    return JsonClient(Server(stub.url, **{"retry_seconds": 3.0, **fields}), heartbeat)


def question(number: int = 0, seconds: float = 5.0, largest: int = 1 << 16) -> JsonRequest:
    body = {
        "prompt": [1, 2, 3 + number % 5],
        "prompt_logprobs": 0,
        "max_tokens": 1,
        "temperature": 1.0,
        "number": number,
    }
    return JsonRequest("/v1/completions", body, f"completion {number}", seconds, largest)


# Requests that pass and requests that do not.


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(502, b"<html>"),
        status(503, b"loading"),
        status(429),
        status(408),
        hang_up,
        raw(b""),
        raw(b"<p>"),
    ],
    ids=["500", "502", "503", "429", "408", "closed", "empty", "html"],
)
def test_what_may_pass_is_asked_again_and_said_once(
    stub: Stub, notes: list[str], fault: Fault
) -> None:
    stub.script = [fault]
    assert "choices" in client(stub).ask(question())
    assert len(stub.asked) == 2
    assert (
        len(notes) == 1
        and notes[0].startswith(stub.url)
        and notes[0].endswith("completion 0 is asked again")
    )


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (status(400, b'{"error": "too many"}'), RequestRefused, r"refused with 400 \(.*too many"),
        (status(404), RequestRefused, "refused with 404"),
        (
            status(401),
            RequestRefused,
            "answered with 401; name the environment variable.*api_key_env",
        ),
        (
            status(302, Location="http://elsewhere/x?token=1"),
            TeacherError,
            r"302 and points to http://elsewhere/x, which is not",
        ),
        (flood, TeacherError, "longer than 65536 bytes"),
    ],
    ids=["400", "404", "401", "redirect", "flood"],
)
def test_what_does_not_pass_is_asked_once(
    stub: Stub, fault: Fault, kind: type[Exception], words: str
) -> None:
    stub.script = [fault]
    with pytest.raises(kind, match=words) as caught:
        client(stub).ask(question())
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert len(stub.asked) == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"<html></html>", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1, "a": 2}', b"[" * 50_000],
)
def test_an_answer_that_is_never_json_is_asked_twice(stub: Stub, body: bytes) -> None:
    stub.script = [raw(body)] * 3
    with pytest.raises(
        TeacherError,
        match=r"/v1/completions: completion 0 failed 2 times .* not JSON .*check the address",
    ):
        client(stub).ask(question())
    assert len(stub.asked) == 2


@pytest.mark.parametrize(
    "asked",
    ["1000000000", formatdate(time.time() + 10**6, usegmt=True), "1e9", "soon", "-3", "٣"],
    ids=["seconds", "date", "float", "word", "negative", "other digits"],
)
def test_however_long_a_server_asks_to_wait_it_is_bounded(asked: str) -> None:
    headers = http.httpx2.Headers([(b"Retry-After", asked.encode())])
    assert 0 <= http._read_retry_after(headers) <= http.MAX_WAIT_SECONDS


def test_a_number_and_a_date_say_how_long_to_wait() -> None:
    later = formatdate(time.time() + 20, usegmt=True)
    assert http._read_retry_after(http.httpx2.Headers({"Retry-After": "7"})) == 7.0
    assert 15 < http._read_retry_after(http.httpx2.Headers({"Retry-After": later})) <= 20


def test_a_server_that_stays_away_is_given_up_with_its_address_and_the_reason(stub: Stub) -> None:
    stub.stop()
    with pytest.raises(
        TeacherError,
        match=rf"{stub.url}/v1/completions: completion 0 failed \d+ times .* no connection .*resume",
    ):
        client(stub, retry_seconds=1.0).ask(question())


def test_a_name_that_nobody_has_is_given_up() -> None:
    unknown = JsonClient(Server("https://no-such-host.invalid", retry_seconds=0.5))
    with pytest.raises(TeacherError, match=r"the name no-such-host\.invalid is not known"):
        unknown.ask(JsonRequest("/v1/models"))


# Time.


@pytest.mark.parametrize("fault", [late(3.0), drip(3.0)], ids=["silent", "drip"])
def test_a_deadline_ends_an_answer_that_does_not(
    stub: Stub, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.1)
    stub.script = [fault, fault]
    with pytest.raises(
        TeacherError, match=r"completion 0 failed 2 times .* did not (begin to )?answer within"
    ):
        client(stub, retry_seconds=0.0).ask(question(seconds=0.3, largest=1000))


def test_only_the_request_that_was_not_answered_is_asked_again(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.3)
    stub.script = [late(3.0)]
    asked = [question(number, seconds=1.0, largest=1 << 16) for number in range(8)]
    answers = client(stub, concurrency=4, retry_seconds=10.0).send_all(asked)
    assert len(answers) == 8
    numbers = [body["number"] for _, body in stub.asked]
    assert sorted(numbers) == sorted([*range(8), max(set(numbers), key=numbers.count)])


def test_answers_come_in_the_order_of_the_questions(stub: Stub) -> None:
    stub.script = [late(0.3), late(0.2), None, late(0.1)]
    asked = [question(number) for number in range(5)]
    tokens = [
        next(iter(a["choices"][0]["prompt_logprobs"][2])) for a in client(stub).send_all(asked)
    ]
    assert tokens == ["3", "4", "5", "6", "7"]
    assert client(stub).send_all([]) == []


def test_a_long_wait_is_named_now_and_then(stub: Stub, notes: list[str]) -> None:
    stub.script = [late(0.7)]
    client(stub, heartbeat=0.2).ask(question(3))
    assert notes and all(
        line.startswith(f"waiting for {stub.url}: 1 of 1 requests are open, completion 3 for")
        for line in notes
    )


def test_a_server_that_comes_back_is_asked_on(stub: Stub) -> None:
    asking = client(stub, retry_seconds=20.0)
    before = asking.ask(question())
    stub.stop()

    def come_back(text: str) -> None:
        if "asked again" in text:
            stub.start()

    asking = client(stub, retry_seconds=20.0)
    with show_notes(come_back):
        assert asking.ask(question()) == before and asking.failures >= 1


# Secrets and addresses.


def test_the_key_goes_to_the_server_and_nowhere_else(stub: Stub, notes: list[str]) -> None:
    stub.key = "sk-secret"
    good = client(stub, key="sk-secret")
    assert "choices" in good.ask(question())
    assert "sk-secret" not in repr(good.server)
    stub.script = [status(400, b"bad key sk-secret")]
    with pytest.raises(RequestRefused) as caught:
        good.ask(question())
    assert "sk-secret" not in str(caught.value) and "***" in str(caught.value)
    with pytest.raises(RequestRefused, match="401"):
        client(stub, key="other").ask(question())
    stub.script = [status(503, b"bad key sk-secret")]
    good.ask(question())
    assert len(notes) == 1 and "sk-secret" not in notes[0]


def test_what_a_server_says_is_shown_harmlessly_and_shortened(stub: Stub) -> None:
    stub.script = [status(400, b"\x1b[2J\xe2\x80\xae" + b"x" * 5000)]
    with pytest.raises(RequestRefused) as caught:
        client(stub).ask(question())
    assert (
        "\x1b" not in str(caught.value)
        and "\u202e" not in str(caught.value)
        and len(str(caught.value)) < 400
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "is not the address of a server"),
        ("ftp://host/x", "is not the address of a server"),
        ("localhost:8000", "is not the address of a server"),
        ("", "is not the address of a server"),
        ("http://", "is not the address of a server"),
        ("http://host:99999", "is no address"),
        ("https://key:secret@host", "holds a user or a password"),
        ("https://key@host", "holds a user or a password"),
        ("https://host/v1?api_key=secret", "more than host, port and path"),
        ("https://host\\@evil", "holds a user or a password"),
        ("http://169.254.169.254/latest", "link-local or metadata address, which is never asked"),
        ("https://[fd00:ec2::254]/", "link-local or metadata address"),
        ("https://[::ffff:169.254.169.254]/", "link-local or metadata address"),
        ("https://[fe80::1]", "link-local or metadata address"),
        ("https://100.100.100.200", "link-local or metadata address"),
        ("https://0.0.0.0:8000", "not the address of one machine"),
        ("https://224.0.0.1", "not the address of one machine"),
        ("http://2130706433", "an address in disguise"),
        ("http://0x7f.1", "an address in disguise"),
        ("http://127.1", "an address in disguise"),
        ("http://example.com", "plain http to example.com shows prompts and keys"),
        ("http://10.0.0.7:8000", "plain http to 10.0.0.7"),
    ],
)
def test_addresses_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        normalize_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://api.example.com/v1", "https://api.example.com"),
        ("https://api.example.com/team/v1", "https://api.example.com/team"),
        ("https://10.0.0.7", "https://10.0.0.7"),
    ],
)
def test_addresses_that_are_asked(url: str, base: str) -> None:
    assert normalize_url(url) == base == normalize_url(base)
    assert normalize_url("http://10.0.0.7:8000", allow_http=True) == "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    ("address", "words"),
    [("169.254.169.254", "never asked"), ("10.1.2.3", "plain http to localhost")],
)
def test_a_name_is_judged_by_where_it_leads(
    monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(TeacherError, match=words):
        JsonClient(Server("http://localhost:1")).ask(JsonRequest("/v1/models"))


def test_proxies_of_the_environment_are_not_used(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "data" in client(stub).ask(JsonRequest("/v1/models"))


def test_a_certificate_is_held_against_the_name_though_the_address_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    words = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        "-days",
        "2",
    ]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([openssl, *words], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with Stub(tls=tls) as stub:
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        assert "data" in JsonClient(Server(f"https://localhost:{stub.port}")).ask(
            JsonRequest("/v1/models")
        )
        with pytest.raises(TeacherError, match="its certificate is not to be trusted"):
            JsonClient(Server(f"https://127.0.0.1:{stub.port}")).ask(JsonRequest("/v1/models"))
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(TeacherError, match="its certificate is not to be trusted"):
            JsonClient(Server(f"https://localhost:{stub.port}")).ask(JsonRequest("/v1/models"))


def test_an_address_is_shown_without_its_secrets() -> None:
    assert redact_url("https://key:secret@host/path?token=1#x") == "https://host/path"
    assert redact_url("key:secret@host") == "host"


def test_a_running_loop_such_as_a_notebooks_is_no_hindrance(stub: Stub) -> None:
    import asyncio

    async def cell() -> Any:
        return client(stub).ask(JsonRequest("/v1/models"))

    assert "data" in asyncio.run(cell())
