"""Connections with headers or bodies that do not arrive, over a real socket."""

import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("uvicorn")

import uvicorn

from practicum.server.limits import RequestLimits
from practicum.server.protocol import build_protocol

pytestmark = pytest.mark.long


async def application(scope, receive, send):
    """Answer `/early` immediately, and all other paths after the body."""
    if scope["path"] != "/early":
        while (await receive()).get("more_body"):
            pass
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def port():
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application,
        log_config=None,
        lifespan="off",
        ws="none",
        http=build_protocol(RequestLimits(header_seconds=0.5)),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


@contextlib.contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield connection


def answer(connection):
    """Return the answer, up to the end of its body."""
    read = b""
    while not read.endswith(b"ok"):
        part = connection.recv(4096)
        assert part, read
        read += part
    return read


def closed(connection, drip=b""):
    """Return whether the peer ends the connection, while a byte is sent now and then."""
    connection.settimeout(0.1)
    for _ in range(100):
        with contextlib.suppress(TimeoutError):
            try:
                if not connection.recv(4096):
                    return True
            except ConnectionResetError:
                return True
        if drip:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(drip)
    return False


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half"])
def test_headers_that_do_not_arrive_end_the_connection(port, sent):
    with connected(port) as connection:
        connection.sendall(sent)
        assert closed(connection, drip=b"x" if sent else b"")


def test_headers_that_do_not_arrive_after_an_answer_end_the_connection(port):
    with connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200")
        time.sleep(0.8)  # a connection at rest is kept for the next request
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET ")
        assert closed(connection)


def test_a_body_that_goes_on_after_the_answer_ends_the_connection(port):
    with connected(port) as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 200")
        assert closed(connection, drip=b"x")


def test_a_body_is_waited_for_by_the_application(port):
    with connected(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        time.sleep(0.8)
        connection.sendall(b"xy")
        assert answer(connection).startswith(b"HTTP/1.1 200")
