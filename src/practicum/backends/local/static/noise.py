"""Draw the random numbers of completions on the device, equal to the numbers of their CPU streams.

A stream of `practicum.backends.local.drawing` is a Mersenne Twister (MT19937, Matsumoto and
Nishimura 1998). Its words obey a recurrence: word n is computed from the words n - 624, n - 623 and
n - 227. A stream's state is therefore any 624 consecutive words, and 227 words of all streams are
computed at once. A counter-based generator such as Philox would need as many tensor operations, and
its numbers would differ from the CPU's.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.drawing import count_exponentials, open_random_stream

WORDS = 624
"""The number of words in a state."""

MIDDLE = 397
"""The second word of the recurrence, counted from the first."""

LAG = WORDS - MIDDLE
"""The number of words that can be computed at once: the next word needs the first of them."""

UPPER, LOWER, TWIST = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
STATE_OFFSET = 24
"""The byte offset of the words in the state of `torch.Generator`; each word has eight bytes."""


def read_stream(seed: int) -> Int[Tensor, " W"]:
    """Return the state of a completion's random stream before its first token."""
    state = open_random_stream(seed).get_state()
    return state[STATE_OFFSET : STATE_OFFSET + 8 * WORDS].view(torch.int64).clone()


def draw_exponentials_on_device(
    states: Int[Tensor, "B W"], vocabulary: int
) -> tuple[Float[Tensor, "B N"], Int[Tensor, "B W"]]:
    """Draw the variates of one token of each stream, and return the streams' next states.

    The variates equal the results of `practicum.backends.local.drawing.draw_exponentials`, up to
    the rounding of a logarithm in float64.
    """
    words = _extend(states, 2 * count_exponentials(vocabulary))
    outputs = _temper(words[:, WORDS:])
    # As in torch: join two words to 64 bits, the first word on top, and make a number from 53 of
    # them.
    bits = ((outputs[:, 0::2] & 0x1FFFFF) << 32) | outputs[:, 1::2]
    return -torch.log1p(-(bits.double() * 2.0**-53)), words[:, -WORDS:]


def _extend(states: Int[Tensor, "B W"], count: int) -> Int[Tensor, "B M"]:
    """Return each state followed by the next `count` words of its stream."""
    words = states.new_empty(len(states), WORDS + count)
    words[:, :WORDS] = states
    for start in range(0, count, WORDS - 1):
        first, second = words[:, start : start + WORDS - 1], words[:, start + 1 : start + WORDS]
        # The lowest bit of the two joined words is the lowest bit of the second.
        twisted = (((first & UPPER) | (second & LOWER)) >> 1) ^ ((second & 1) * TWIST)
        length = min(WORDS - 1, count - start)
        for low in range(0, length, LAG):
            high = min(low + LAG, length)
            torch.bitwise_xor(
                words[:, start + MIDDLE + low : start + MIDDLE + high],
                twisted[:, low:high],
                out=words[:, start + WORDS + low : start + WORDS + high],
            )
    return words


def _temper(words: Int[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """Return the words after the generator's tempering."""
    words = words ^ (words >> 11)
    words = words ^ ((words << 7) & 0x9D2C5680)
    words = words ^ ((words << 15) & 0xEFC60000)
    return words ^ (words >> 18)
