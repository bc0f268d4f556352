"""Kinds of notes that a recipe may make of rollouts, one file each; its name is the `type` in `notes`."""
