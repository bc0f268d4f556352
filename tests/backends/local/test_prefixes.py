"""A prefix shared by texts is read once per run, and no bit of a state depends on the cached parts."""

import pytest
import torch
from toy import in_check

from backends.tiny import ARCHITECTURES, random_tokens, tiny
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.prefixes import PrefixStore
from practicum.costs.segments import FEWEST_SAVED_TOKENS, count_packed_tokens
from practicum.types import ScoreRequest

ROOT = random_tokens(FEWEST_SAVED_TOKENS + 14, 9)


def texts(first: int, root: tuple[int, ...] = ROOT) -> list[ScoreRequest]:
    """Return unequal texts after the root, two of the same prompt, one without an answer."""
    prompts = [(*root, number + 3, *random_tokens(4 + number, first)) for number in range(5)]
    lengths = [7, 1, 0, 3, 12]
    made = [
        ScoreRequest(prompt, random_tokens(length, first + 50 + length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return [*made, ScoreRequest(prompts[0], random_tokens(5, first + 90))]


def count_read_tokens(model, call) -> int:
    """Count the tokens that pass through the body in the call."""
    counts: list[int] = []
    hook = model.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: counts.append(inputs[0].numel())
    )
    call()
    hook.remove()
    return sum(counts)


@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
def test_states_are_those_of_whole_texts(architecture):
    model, store = tiny(architecture), PrefixStore()
    for first in (1, 2):
        expected = compute_hidden_states(model, texts(first))
        states = store.compute_hidden_states(model, texts(first))
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_no_bit_depends_on_what_the_store_holds():
    model, warm = tiny(), PrefixStore()
    for first in (1, 2, 1):
        fresh = PrefixStore().compute_hidden_states(model, texts(first))
        assert torch.equal(warm.compute_hidden_states(model, texts(first)), fresh)
        no_room = PrefixStore(max_bytes=0).compute_hidden_states(model, texts(first))
        assert torch.equal(no_room, fresh)


def test_a_prefix_is_read_once_while_it_is_the_same():
    model, store = tiny(), PrefixStore()

    def count(first: int, root: tuple[int, ...] = ROOT) -> int:
        some = texts(first, root)
        return count_read_tokens(model, lambda: store.compute_hidden_states(model, some))

    expected = count_packed_tokens(texts(1))
    assert count(1) == expected
    assert count(2) == expected - len(ROOT)
    other = random_tokens(len(ROOT), 8)
    assert count(1, other) == expected, "one prefix is kept, the newest"
    assert count(1) == expected
    no_room = PrefixStore(max_bytes=0)
    for _ in range(2):
        read = count_read_tokens(model, lambda: no_room.compute_hidden_states(model, texts(1)))
        assert read == expected


def test_texts_without_a_common_prefix_are_read_as_ever():
    model, store = tiny(), PrefixStore()
    some = [ScoreRequest(random_tokens(9, seed), random_tokens(4, seed + 20)) for seed in range(3)]
    expected = compute_hidden_states(model, some)
    assert torch.equal(store.compute_hidden_states(model, some), expected)
