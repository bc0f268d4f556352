"""A shell in which an agent repairs files until their tests pass."""

PARTS = {"tasks": ["shell"]}
