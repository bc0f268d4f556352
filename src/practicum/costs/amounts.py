"""Amounts as text: operations and parameters with a decimal unit, bytes with a binary one."""


def format_flops(flops: float | int) -> str:
    """Format a number of floating-point operations, for example `18.3 GFLOP`."""
    for name, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # Three digits would write 999,700 with the smaller unit as 1e+03.
        if abs(flops) >= 0.9995 * unit:
            return f"{flops / unit:.3g} {name}FLOP"
    return f"{flops:.3g} FLOP"


def format_count(count: int) -> str:
    """Format a number of parameters, for example `135M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def format_bytes(size: float | int) -> str:
    """Format a number of bytes, for example `4.1 MiB`."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= unit:
            # Three digits would write 1000 and more with an exponent.
            digits = ".3g" if size < 1000 * unit else ".0f"
            return f"{size / unit:{digits}} {name}"
    return f"{size:.0f} B"
