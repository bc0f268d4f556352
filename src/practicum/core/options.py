"""Spell options in the syntax of the caller: `--resume` in a shell, `resume=True` in Python.

Errors and notes name what to write instead. The same function is called from both places, so
messages get the spelling of an option here. Python is the default; the command line selects the
shell's syntax.
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FLAGS = {"set": "--set", "overrides": ""}
"""The options to copy and paste; an override is a word without a flag."""

_in_shell: ContextVar[bool] = ContextVar("in_shell", default=False)


@contextmanager
def spell_for_shell() -> Iterator[None]:
    """Spell the options of the block as a shell writes them."""
    token = _in_shell.set(True)
    try:
        yield
    finally:
        _in_shell.reset(token)


def spell_options(**options: object) -> str:
    """Return options as the caller writes them.

    `resume=True, out="another folder"` is `--resume --out another folder` in a shell. A list is an
    option that is repeated there.
    """
    if _in_shell.get():
        return " ".join(
            word for name, setting in options.items() for word in _list_words(name, setting)
        )
    return ", ".join(
        f"{name}={'True' if setting is True else json.dumps(setting)}"
        for name, setting in options.items()
    )


def _list_words(name: str, setting: object) -> Iterator[str]:
    """Yield an option's words in a shell."""
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if setting is True:
        yield flag
        return
    for item in setting if isinstance(setting, list) else [setting]:
        # Only overrides are pasted; a text such as "another folder" is for reading.
        word = shlex.quote(str(item)) if name in _FLAGS else str(item)
        yield f"{flag} {word}".strip()
