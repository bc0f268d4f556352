"""Rows with control tokens in their texts are counted."""

from text.test_renderer import RENDERER

from practicum.runs.row_texts import describe_texts
from practicum.types import Message, Prompt


def test_rows_that_name_control_tokens_are_counted_by_kind():
    templated = (Message("user", "<|im_start|>user\n8*7?<|im_end|>\n<|im_start|>assistant\n"),)
    plain = (Message("user", "8*7?"),)
    prompts = [
        Prompt("a", templated, response="56"),
        Prompt("b", plain, response="56<|im_end|>\n"),
        Prompt("c", plain, response="a<|im_start|>b"),
        Prompt("d", plain, response="<think>\n7*8\n</think>\n\n56"),
    ]
    first, second, third = describe_texts(prompts, RENDERER)
    assert first.startswith("1 of 4 prompts name control tokens")
    assert second == "1 of 4 responses end with an end token as text, which is removed"
    assert third.startswith("1 of 4 responses name control tokens")
    assert describe_texts(prompts[3:], RENDERER) == []
