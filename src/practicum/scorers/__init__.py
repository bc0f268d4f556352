"""Scorers: one file for each judge of answers, named as in a recipe; a new file adds one.

A file has a `Config` with `type` and `follows_student`, and `build(config, context)`, which returns
a `practicum.ports.scoring.Scorer`: see docs/scorers.md.
"""
