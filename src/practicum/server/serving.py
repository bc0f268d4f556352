"""From what was asked on the command line to a server that runs until it is told to stop."""

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import RecipeError, ResourceError
from practicum.models.config import ModelConfig
from practicum.models.sources import conversion_pending, locate

TOKEN_VARIABLE = "PRACTICUM_SERVER_TOKEN"
PREFIX = "tml-"
"""What a token begins with, because the tinker package sends no other."""

GIB = 2**30
PRODUCTS_KEPT, HEAPS = 64, 2
CACHES_OF_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The variables with which oneDNN bounds its compiled products, and torch's layer over it, ideep, their descriptions."""

M_ARENA_MAX = -8
"""The name of that option in glibc's malloc.h."""

DTYPES, DEVICES = ("float32", "bfloat16"), ("auto", "cpu", "cuda")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the command line says. Models are `MODEL`, or `NAME=MODEL` to be served under another name."""

    models: Sequence[str]
    students: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    out: Path = Path("served")
    memory_gib: float | None = None
    token_file: Path | None = None
    dtype: str = "float32"
    device: str = "auto"
    request_tokens: int = 2**21


def serve(options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; models that are being trained are saved before it ends. What happens is noted.

    Raises RecipeError where the options cannot be right, ModelError where a model is not there, ResourceError where the
    address is taken.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise RecipeError(
            "serve needs starlette and uvicorn: pip install 'practicum[server]'"
        ) from error
    from practicum.server.app import make_app
    from practicum.server.limits import Limits
    from practicum.server.protocol import connection_with
    from practicum.server.service import Service
    from practicum.server.shelf import ModelCache
    from practicum.server.store import Store
    from practicum.server.wire import messages

    messages()
    bound_memory()
    served, students = named_models(options)
    for name, config in served.items():
        if conversion_pending(str(config.model)):
            log.info(f"converting {name} to safetensors, once: about 20 s")
        locate(config)
    token = read_token(options.token_file)
    local = is_loopback(options.host)
    if not local and token is None:
        raise RecipeError(
            f"--host {options.host} can be reached from other machines, so a token is needed: set {TOKEN_VARIABLE} or write "
            f"--token-file FILE with one that begins with {PREFIX}"
        )
    listener = _listen(options.host, options.port)
    port = listener.getsockname()[1]
    memory = None if options.memory_gib is None else int(options.memory_gib * GIB)
    limits = Limits(sampled_tokens=options.request_tokens)
    service = Service(ModelCache(served, memory), Store(options.out), students, limits=limits)
    hosts = frozenset({"localhost", "127.0.0.1", "::1", options.host}) if local else None
    config = uvicorn.Config(
        make_app(service, token=token, hosts=hosts),
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=4096,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
        lifespan="on",
        http=connection_with(limits),
        ws="none",
    )
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{port}"
    log.info(f"serving {', '.join(served)} on {address}")
    log.info(f"to be trained: {', '.join(sorted(students))}; checkpoints go to {options.out}")
    log.info(
        f"for clients: TINKER_BASE_URL={address} TINKER_API_KEY={'YOUR-TOKEN' if token else 'tml-local'}"
    )
    uvicorn.Server(config).run(sockets=[listener])


def bound_memory() -> None:
    """Bound what the process keeps beside the models: compiled products of every shape, and heaps that many threads grow.

    To be called before the first product. Neither bound changes a number; on a system without glibc the second is left out.
    """
    for variable in CACHES_OF_PRODUCTS:
        os.environ.setdefault(variable, str(PRODUCTS_KEPT))
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        # AttributeError where the C library is another than glibc.
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


def named_models(options: ServerOptions) -> tuple[Mapping[str, ModelConfig], frozenset[str]]:
    """The models by name, and the names of those that may be trained: all of them unless some are named."""
    for option, value, known in (
        ("dtype", options.dtype, DTYPES),
        ("device", options.device, DEVICES),
    ):
        if value not in known:
            raise RecipeError(f"--{option} {value}: write one of {', '.join(known)}")
    served: dict[str, ModelConfig] = {}
    for text in [*options.models, *options.students]:
        name, _, model = text.rpartition("=")
        config = ModelConfig.model_validate(
            {"model": model, "dtype": options.dtype, "device": options.device}
        )
        if served.setdefault(name or model, config) != config:
            raise RecipeError(
                f"two models are named {name or model}; give one of them another name with NAME=MODEL"
            )
    students = [text.rpartition("=")[0] or text for text in options.students]
    return served, frozenset(students or served)


def read_token(path: Path | None) -> str | None:
    """The token of the environment, or of a file that only its owner can read; RecipeError where it is weak or open."""
    if path is None:
        token, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    else:
        where = str(path)
        try:
            mode = path.stat().st_mode
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(
                f"--token-file {path} cannot be read ({type(error).__name__})"
            ) from error
        if stat.S_IMODE(mode) & 0o077:
            raise RecipeError(f"--token-file {path} can be read by others; chmod 600 {path}")
    if token is None:
        return None
    if (
        not token.startswith(PREFIX)
        or len(token) < 20
        or not token.isascii()
        or not token.isprintable()
    ):
        raise RecipeError(
            f"the token of {where} must begin with {PREFIX} and have at least 20 plain characters"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, for asyncio sends small answers at once only where it is; otherwise each waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"{host}:{port} cannot be served on ({error.strerror}); write another --port or --host"
        ) from error
    return listener
