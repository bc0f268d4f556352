"""Implementations of the four verbs, one file or folder each; its name is the recipe's key."""
