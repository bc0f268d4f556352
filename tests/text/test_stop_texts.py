"""A completion stops at a text wherever its tokens begin and end."""

import pytest
from text.test_renderer import TOKENIZER

from practicum.errors import CapabilityError
from practicum.text import Renderer, build_character_tokenizer, refuse_stop_texts, stop_check
from practicum.types import SamplingParams

BYTES = Renderer(TOKENIZER)


@pytest.mark.parametrize(
    "text", ["b", "ab", "\n\n", "Ende", "é", "日本語の終わり", "🎉🎊🎉🎊🎉", "a<think>"]
)
def test_a_completion_stops_with_the_token_that_completes_a_text(text: str) -> None:
    stops = stop_check(SamplingParams(99, stop_texts=("nowhere", text)), TOKENIZER)
    before, own = BYTES.encode("xy 日🎉 z"), BYTES.encode(text)
    drawn = [*before, *own]
    assert stops([drawn[:count] for count in range(1, len(drawn) + 1)]) == [False] * (
        len(drawn) - 1
    ) + [True]


def test_a_stop_token_stops_beside_texts() -> None:
    stops = stop_check(SamplingParams(9, stop_ids=frozenset({65}), stop_texts=("zz",)), TOKENIZER)
    assert stops([[64, 65], [65, 64]]) == [True, False]


def test_a_special_token_is_a_text_too() -> None:
    tokenizer = build_character_tokenizer("abc")
    stops = stop_check(SamplingParams(9, stop_texts=(str(tokenizer.eos_token),)), tokenizer)
    assert stops([[*Renderer(tokenizer).encode("ab"), tokenizer.eos_token_id]]) == [True]


def test_who_cannot_read_refuses_in_one_line() -> None:
    params = SamplingParams(9, stop_texts=("zz",))
    with pytest.raises(
        CapabilityError,
        match=r"^stop_texts \['zz'\]: a model without a tokenizer .* set stop_ids$",
    ):
        stop_check(params, None)
    with pytest.raises(
        CapabilityError,
        match=r"^stop_texts \['zz'\]: the service at x ends an answer only at stop tokens",
    ):
        refuse_stop_texts(params, "the service at x")
    refuse_stop_texts(SamplingParams(9), "the service at x")
    assert stop_check(SamplingParams(9, stop_ids=frozenset({3})), None)([[3]]) == [True]
