"""The sources of rollouts, one file each: a class `Config` with `collect`, see `rollouts.source`."""

NEEDED = ("Config",)
"""The names that a module of another package must have to be a source."""
