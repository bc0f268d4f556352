"""Kinds of tools that a task may offer, one file each; its name is the `type` in `task.tools`."""
