"""Implementations of the four verbs, one file or folder each; the name is the recipe's key."""
