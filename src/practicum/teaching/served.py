"""The settings of a teacher's server, and its HTTP client."""

import os

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.costs import Meter
from practicum.errors import RecipeError
from practicum.remote.http import AddressConfig, JsonClient, Server


class ServedConfig(AddressConfig):
    """The server's address, its key, and the limits of its use."""

    api_key_env: str | None = Field(
        default=None, description="the environment variable that holds the key"
    )
    concurrency: int = Field(default=16, ge=1, le=1024, description="requests at once")
    timeout: float = Field(
        default=30.0, gt=0, description="timeout per request in seconds, excluding generation time"
    )
    tokens_per_second: float = Field(
        default=50.0, gt=0, description="slowest accepted speed of the server, for timeouts"
    )
    retry_seconds: float = Field(
        default=120.0, ge=0, description="seconds during which a failing request is retried"
    )
    parameters: int | None = Field(
        default=None,
        ge=1,
        description="parameters that each token passes, two operations for each; "
        "none: its operations are not counted",
    )

    def declare_size(self, meter: Meter | None) -> None:
        """Set the model's size in the meter, if the recipe states it."""
        if meter is not None and self.parameters is not None:
            meter.declare_size(self.parameters)


def open_server(config: ServedConfig, key_header: str | None = None) -> JsonClient:
    """Return a server's HTTP client with its key; RecipeError if the key's variable is empty.

    `key_header` is the header that carries the bare key (None: `Authorization: Bearer KEY`).
    """
    key = None
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise RecipeError(
                f"teacher.api_key_env: the environment variable {config.api_key_env} holds no key; "
                "set it before the run"
            )
    server = Server(
        url=config.url,
        key=key,
        key_header=key_header,
        allow_http=config.allow_http,
        concurrency=config.concurrency,
        retry_seconds=config.retry_seconds,
        seed=seed_of("http", config.url),
    )
    return JsonClient(server)
