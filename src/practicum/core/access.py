"""Access to a server of this machine: local addresses, tokens, and the check of each caller."""

import hmac
import ipaddress
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from practicum.errors import RecipeError

TOKEN_VARIABLE = "PRACTICUM_SERVER_TOKEN"
PREFIX = "tml-"
"""The prefix of a token; the tinker package only sends tokens with this prefix."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The admitted callers: they have the token, if one is set, and use one of the host names, if
    any are set.

    Web pages are never admitted: a page open in a browser could otherwise send requests to a server
    on the same machine.
    """

    token: str | None = None
    hosts: frozenset[str] | None = None

    def find_refusal(
        self, read_header: Callable[[str], str | None], *, is_public: bool = False
    ) -> tuple[int, str] | None:
        """Return the status and the reason why a request is refused, or None.

        `read_header` returns a header by its lowercase name. A public path needs no token.
        """
        name = _read_hostname(read_header("host") or "")
        # A request from an image or a link of a page has no origin, but browsers send its source.
        # An address that the user types has the source `none`.
        if read_header("origin") is not None or read_header("sec-fetch-site") not in (None, "none"):
            return 403, "requests from web pages are not answered"
        if self.hosts is not None and name not in self.hosts:
            hosts = ", ".join(sorted(self.hosts))
            return 403, f"this server is not called {name!a:.80}; there are {hosts}"
        if self.token is None or is_public:
            return None
        bearer = (read_header("authorization") or "").removeprefix("Bearer ")
        sent_token = read_header("x-api-key") or bearer
        # The comparison takes the same time for every wrong token.
        if hmac.compare_digest(sent_token.encode(), self.token.encode()):
            return None
        return 401, "the token is missing or wrong"


def _read_hostname(header: str) -> str | None:
    """Return the host of a Host header without its port; None if it is malformed."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def name_place(host: str, port: int) -> str:
    """Return host and port as in a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def name_hosts(host: str) -> frozenset[str] | None:
    """Return the names of a server that only this machine can reach; None: any name."""
    return frozenset({"localhost", "127.0.0.1", "::1", host}) if is_loopback(host) else None


def read_admission(
    host: str, token_file: Path | None, host_setting: str, file_setting: str
) -> Admission:
    """Return a host's admitted callers; RecipeError if anyone could call or the token is weak."""
    token = read_token(token_file, file_setting)
    if token is None and not is_loopback(host):
        raise RecipeError(
            f"{host_setting} {host} can be reached from other machines, so a token is needed: set "
            f"{TOKEN_VARIABLE} or write {file_setting} FILE with one that begins with {PREFIX}"
        )
    return Admission(token, name_hosts(host))


def read_token(path: Path | None, setting: str) -> str | None:
    """Return the token from the environment, or from the file in `setting`, which only its owner
    may read.

    Raise RecipeError if the token is weak or the file is readable by others.
    """
    if path is None:
        token, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    else:
        where = str(path)
        try:
            mode = path.stat().st_mode
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(
                f"{setting} {path} cannot be read ({type(error).__name__})"
            ) from error
        # Any permission of group or others.
        if stat.S_IMODE(mode) & 0o077:
            raise RecipeError(f"{setting} {path} can be read by others; chmod 600 {path}")
    if token is None:
        return None
    is_plain = token.isascii() and token.isprintable()
    if not is_plain or not token.startswith(PREFIX) or len(token) < 20:
        raise RecipeError(
            f"the token of {where} must begin with {PREFIX} and have at least 20 plain characters"
        )
    return token


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
