"""Judge the address of a server: its form, its secrets, and the machines that are never asked."""

import ipaddress
import socket
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from practicum.text import excerpt, make_printable
from practicum.types import FrozenConfig

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
METADATA_ADDRESSES = frozenset(
    ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
)
"""The addresses at which clouds give out credentials; all link-local addresses are refused too."""


def normalize_url(url: str, allow_http: bool = False) -> str:
    """Return the start of the server's addresses, without `/v1` and slashes at the end.

    Raise ValueError if the address is malformed or forbidden.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{redact_url(url)!r} is no address ({error}); {_EXAMPLE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{redact_url(url)!r} is not the address of a server; {_EXAMPLE}")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "the address holds a user or a password; take it out and name an environment variable: api_key_env"
        )
    is_plain = url.isascii() and make_printable(url) == url and not {" ", "\\"} & set(url)
    if parts.query or parts.fragment or not is_plain:
        raise ValueError(f"{redact_url(url)!r} holds more than host, port and path; {_EXAMPLE}")
    literal = _parse_literal(parts.hostname)
    # Resolvers accept forms that a reader takes for a name; judged by sight they would pass.
    if literal is None and _is_numeric(parts.hostname):
        raise ValueError(
            f"{parts.hostname!r} is an address in disguise; write it with dots, as in 127.0.0.1"
        )
    problem = None if literal is None else explain_forbidden(literal)
    if problem is not None:
        raise ValueError(
            f"{parts.hostname} is {problem}, which is never asked; name the server's own address"
        )
    local = parts.hostname == "localhost" if literal is None else literal.is_loopback
    if parts.scheme == "http" and not (local or allow_http):
        raise ValueError(PLAIN_HTTP.format(host=parts.hostname))
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


_EXAMPLE = "write for example https://host or http://localhost:8000"
PLAIN_HTTP = (
    "plain http to {host} shows prompts and keys to everyone on the way; write https, "
    "or allow_http: true where the network is your own"
)


class AddressConfig(FrozenConfig):
    """The address of a server in a configuration; a secret in it is refused."""

    url: str = Field(
        description="https://host, or http://localhost:8000; other plain http needs `allow_http`"
    )
    allow_http: bool = Field(
        default=False,
        description="plain http to other machines, which everyone on the way can read",
    )

    @field_validator("url")
    @classmethod
    def _check_address(cls, url: str) -> str:
        normalize_url(url, allow_http=True)
        return url

    @model_validator(mode="after")
    def _check_scheme(self) -> "AddressConfig":
        normalize_url(self.url, self.allow_http)
        return self


def redact_url(url: str) -> str:
    """Return an address to show: nothing before an @, and nothing after a question mark."""
    scheme, slashes, address = url.partition("//") if "//" in url else ("", "", url)
    host, slash, path = address.partition("/")
    address = f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"
    return excerpt(address.partition("?")[0].partition("#")[0])


def split_host(url: str) -> tuple[str, int]:
    """Return the host and the port of a normalized address."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _parse_literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_numeric(host: str) -> bool:
    """Return True if a resolver may read a name as an address: 2130706433, 0x7f.1, 127.1."""
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True


def explain_forbidden(address: Address) -> str | None:
    """Return the kind of an address to which nothing is ever sent, or None."""
    # ::ffff:169.254.169.254 reaches the IPv4 address within it.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        return explain_forbidden(mapped)
    if str(address) in METADATA_ADDRESSES or address.is_link_local:
        return "a link-local or metadata address"
    is_reserved = address.is_reserved and not address.is_loopback
    if address.is_multicast or address.is_unspecified or is_reserved:
        return "not the address of one machine"
    return None
