"""Access to a server of this machine: addresses that only it can reach, and tokens."""

import ipaddress
import os
import stat
from pathlib import Path

from practicum.errors import RecipeError

TOKEN_VARIABLE = "PRACTICUM_SERVER_TOKEN"
PREFIX = "tml-"
"""The start of a token; the tinker package sends no other."""


def read_token(path: Path | None) -> str | None:
    """Return the token of the environment, or of a file that only its owner can read.

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
                f"--token-file {path} cannot be read ({type(error).__name__})"
            ) from error
        # Any right of group or others.
        if stat.S_IMODE(mode) & 0o077:
            raise RecipeError(f"--token-file {path} can be read by others; chmod 600 {path}")
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
