"""Seeded words over an alphabet, all different: what the built-in tasks on short strings ask about."""

import random


def sample_words(
    draw: random.Random, alphabet: str, shortest: int, longest: int, count: int
) -> list[str]:
    """So many words of `shortest` to `longest` letters; those of a smaller count come first in those of a larger."""
    words: dict[str, None] = {}
    while len(words) < count:
        length = draw.randint(shortest, longest)
        words["".join(draw.choices(alphabet, k=length))] = None
    return list(words)


def check_enough(alphabet: str, shortest: int, longest: int, wanted: int, what: str) -> None:
    """ValueError where there are not so many words, or none at all."""
    if shortest > longest:
        raise ValueError(
            f"shortest is {shortest} and longest {longest}; shortest may not be greater"
        )
    there_are = sum(len(alphabet) ** length for length in range(shortest, longest + 1))
    if wanted > there_are:
        raise ValueError(
            f"train_size and heldout_size ask for {wanted} {what}, but {len(alphabet)} letters make only "
            f"{there_are} of length {shortest} to {longest}; raise longest, or lower the sizes"
        )
