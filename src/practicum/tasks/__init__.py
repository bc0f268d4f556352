"""Tasks: one file for each source of prompts with its verifier, named as in a recipe."""
