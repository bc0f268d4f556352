"""Start a server from the options of the command line and run it until it is stopped."""

import contextlib
import ctypes
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from practicum.core.access import name_place, read_admission
from practicum.errors import RecipeError, ResourceError, suggest_install
from practicum.models.config import ModelConfig
from practicum.models.sources import locate, needs_conversion
from practicum.runs.opening import check_model_files, resolve_run

GIB = 2**30
MAX_PRODUCTS, MAX_HEAPS = 64, 2
CACHES_OF_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The environment variables that bound the caches of matrix products.

The first is oneDNN's for compiled products, the second ideep's, torch's layer over it, for their
descriptions.
"""

M_ARENA_MAX = -8
"""The option's number in glibc's malloc.h."""

DTYPES, DEVICES = (
    get_args(ModelConfig.model_fields[key].annotation) for key in ("dtype", "device")
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of the command line; a model is `MODEL`, or `NAME=MODEL` to serve it as NAME."""

    models: Sequence[str]
    students: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    out: Path = Path("served")
    memory_gib: float | None = None
    token_file: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    request_tokens: int = 2**21


def serve(options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM, and save models in training before returning.

    Raise RecipeError if the options cannot be right, ModelError if a model is missing or cannot be
    reached on the hub, ResourceError if the address is in use.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise RecipeError(
            f"serve needs the packages starlette and uvicorn; {suggest_install('server')}"
        ) from error
    from practicum.server.app import build_app
    from practicum.server.limits import RequestLimits
    from practicum.server.model_cache import ModelCache
    from practicum.server.protocol import build_protocol
    from practicum.server.service import Service
    from practicum.server.store import Store
    from practicum.server.wire import load_messages

    load_messages()
    bound_memory()
    named, students = parse_models(options)
    served = {name: resolve_run(config) for name, config in named.items()}
    for name, config in served.items():
        if needs_conversion(str(config.model)):
            log.info(f"converting {name} to safetensors, once: about 20 s")
        if not Path(locate(config)).is_dir():
            log.info(f"looking for {config.model} on the hub")
        # Also of a hub name, so that no client's first request finds out that it does not exist.
        check_model_files(config)
    admission = read_admission(options.host, options.token_file, "--host", "--token-file")
    listener = _listen(options.host, options.port)
    port = listener.getsockname()[1]
    memory = None if options.memory_gib is None else int(options.memory_gib * GIB)
    limits = RequestLimits(sampled_tokens=options.request_tokens)
    service = Service(ModelCache(served, memory), Store(options.out), students, limits=limits)
    config = uvicorn.Config(
        build_app(service, admission),
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=4096,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
        lifespan="on",
        http=build_protocol(limits),
        ws="none",
    )
    address = f"http://{name_place(options.host, port)}"
    log.info(f"serving {', '.join(served)} on {address}")
    log.info(f"to be trained: {', '.join(sorted(students))}; checkpoints go to {options.out}")
    log.info(
        f"for clients: TINKER_BASE_URL={address} TINKER_API_KEY={'YOUR-TOKEN' if admission.token else 'tml-local'}"
    )
    uvicorn.Server(config).run(sockets=[listener])


def bound_memory() -> None:
    """Bound the memory in addition to the models: compiled products, and heaps of many threads.

    Call this before the first product. Neither bound changes a number. Without glibc there is no
    bound for heaps.
    """
    for variable in CACHES_OF_PRODUCTS:
        os.environ.setdefault(variable, str(MAX_PRODUCTS))
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        # A C library other than glibc has no mallopt: AttributeError.
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_HEAPS)


def parse_models(options: ServerOptions) -> tuple[Mapping[str, ModelConfig], frozenset[str]]:
    """Return the models by name, and the names that may be trained: all, unless some are given."""
    settings = {"dtype": options.dtype, "device": options.device}
    for option, choices in (("dtype", DTYPES), ("device", DEVICES)):
        if settings[option] not in choices:
            raise RecipeError(f"--{option} {settings[option]}: write one of {', '.join(choices)}")
    served: dict[str, ModelConfig] = {}
    for text in [*options.models, *options.students]:
        name, _, model = text.rpartition("=")
        config = ModelConfig.model_validate({"model": model, **settings})
        if served.setdefault(name or model, config) != config:
            raise RecipeError(
                f"two models are named {name or model}; give one of them another name with NAME=MODEL"
            )
    students = [text.rpartition("=")[0] or text for text in options.students]
    return served, frozenset(students or served)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP by name asyncio sets TCP_NODELAY; without it each small answer waits 40 ms
    # for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"{name_place(host, port)} cannot be served on ({error.strerror}); write another "
            "--port or --host"
        ) from error
    return listener
