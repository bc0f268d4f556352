"""Read the processor's name, which decides which products are fast."""

import platform
from functools import cache
from pathlib import Path


@cache
def read_processor() -> tuple[str, ...]:
    """Return the lines of /proc/cpuinfo that identify a processor, or the platform's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return (platform.processor(),)
    fields = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return tuple(sorted({line for line in lines if line.startswith(fields)}))


def is_amd() -> bool:
    """Return True if the processor is made by AMD."""
    return any("AuthenticAMD" in line for line in read_processor())
