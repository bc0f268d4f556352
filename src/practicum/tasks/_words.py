"""Seeded distinct words over an alphabet, for the built-in tasks on short strings."""

import random


def sample_words(
    draw: random.Random, alphabet: str, shortest: int, longest: int, count: int
) -> list[str]:
    """Sample distinct words; a smaller `count` gives the first of the words of a larger one."""
    words: dict[str, None] = {}
    while len(words) < count:
        length = draw.randint(shortest, longest)
        words["".join(draw.choices(alphabet, k=length))] = None
    return list(words)


def check_enough(alphabet: str, shortest: int, longest: int, count: int, noun: str) -> None:
    """Raise ValueError if the alphabet makes fewer than `count` words of these lengths."""
    if shortest > longest:
        raise ValueError(
            f"shortest is {shortest} and longest {longest}; shortest may not be greater"
        )
    available = sum(len(alphabet) ** length for length in range(shortest, longest + 1))
    if count > available:
        raise ValueError(
            f"train_size and heldout_size ask for {count} {noun}, but {len(alphabet)} letters make "
            f"only {available} of length {shortest} to {longest}; raise longest, or lower the sizes"
        )
