"""The clips of a term, one file each: a class `Config`, see `objective.clip_call`."""

NEEDED = ("Config",)
"""The names that a module of another package must have to be a clip."""
