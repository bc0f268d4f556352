"""Seeded distinct words over an alphabet, for the built-in tasks on short strings."""

import random


def sample_words(
    draw: random.Random, alphabet: str, shortest: int, longest: int, count: int
) -> list[str]:
    """Sample distinct words; a smaller `count` gives the first of the words of a larger one."""
    # A dictionary as an ordered set: repeated words are skipped and the order of drawing stays.
    words: dict[str, None] = {}
    while len(words) < count:
        length = draw.randint(shortest, longest)
        words["".join(draw.choices(alphabet, k=length))] = None
    return list(words)


def check_letters(field: str, letters: str, example: str) -> None:
    """Raise ValueError unless the letters are lower-case and distinct."""
    if len(set(letters)) < len(letters) or not letters.isalpha() or not letters.islower():
        raise ValueError(
            f"{field} {letters!r}: write lower-case letters, each once, for example {example}"
        )


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
