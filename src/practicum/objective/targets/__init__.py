"""The targets of a term, one file each: a class `Config`, see `objective.target_call`."""

NEEDED = ("Config",)
"""The names that a module of another package must have to be a target."""
