"""Errors about a process that gives no sign of life."""

from practicum.core.options import spell_options
from practicum.errors import WorkerLost


def describe_process(title: str, pid: int, host: str, work: str) -> str:
    """Describe a process: its title, its machine and its last known work."""
    return f"{title} (process {pid} on {host}){f', last seen at {work},' if work else ''}"


def build_silence_error(stuck: str, seconds: float, verb: str, restarts: int = 0) -> WorkerLost:
    """Return the error of a run that waits for `verb` while a process or a machine is stuck."""
    return WorkerLost(
        f"{stuck} has given no sign of life for {seconds:g} s (backend.silence) while the run "
        f"waited for {verb}; check its machine, then resume from the newest checkpoint with "
        f"{spell_options(resume=True)}",
        restarts,
    )
