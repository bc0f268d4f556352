"""Conversations are restored with their stored tokens, in any spelling, and in other templates from their text."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.test_renderer import CHATML, HEADERS, INST, byte_tokenizer

from practicum.prompts import ToolCall
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.text.from_scratch import build_pair_tokenizer
from practicum.text.stored import add_tokens
from practicum.types import Message, Prompt, Turn

FORGETS = CHATML.replace("m['content']", "m['content'].split('b')[-1]", 1)
"""A template that leaves out a part of each turn, as other templates leave out thoughts."""

LETTERS = "ab \n"
PAIRS = build_pair_tokenizer(LETTERS)
PAIR_IDS = [
    number
    for token, number in PAIRS.get_vocab().items()
    if set(token) <= {*LETTERS.replace(" ", "\u2581")}
]
QUESTION = (Message("system", "a"), Message("user", "ab"))


def build_renderer(template: str | None = None, *, system: str | None = None) -> Renderer:
    """Return a renderer of pairs of letters, where each text has many spellings."""
    tokenizer = build_pair_tokenizer(LETTERS)
    marks = ["<|bos|>", "<|im_start|>", "<|im|>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    if template is not None:
        template = template.replace("<|im_end|>", "</s>").replace("bos_token", "'<|bos|>'")
    return Renderer(tokenizer, system, template, stop_ids=collect_stop_ids(tokenizer, None))


RENDERER = build_renderer()


def store(
    renderer: Renderer, answers: Sequence[Sequence[int]], reply: str = "b"
) -> tuple[Message, ...]:
    """Return a conversation as played: the prompt, answers in these tokens, and a reply to each."""
    before = renderer.render(QUESTION)
    turns: list[Turn] = []
    tokens: list[int] = []
    for answer in answers:
        said = [*answer, renderer.final_stop_id]
        turns.append(Turn("assistant", len(said), renderer.decode(said)))
        replied = renderer.render_reply(Message("user", reply))
        turns.append(Turn("user", len(replied), reply))
        tokens += [*said, *replied]
    return add_tokens(QUESTION, before, turns, tokens)


def forget(messages: Sequence[Message]) -> list[Message]:
    """Return the same messages without tokens, only as text."""
    return [replace(message, tokens=()) for message in messages]


def join(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(token for message in messages for token in message.tokens)


spellings = st.lists(st.lists(st.sampled_from(PAIR_IDS), max_size=6), min_size=1, max_size=3)


@pytest.mark.parametrize("template", [None, CHATML, HEADERS, INST, FORGETS])
@given(answers=spellings)
def test_a_stored_conversation_comes_back_token_for_token(
    template: str | None, answers: list[list[int]]
) -> None:
    renderer = build_renderer(template)
    stored = store(renderer, answers)
    for end in range(2, len(stored) + 1, 2):
        assert renderer.render(stored[:end]) == join(stored[:end])
        assert renderer.restores(stored[:end])


def test_without_their_tokens_answers_are_spelled_anew_and_may_be_shortened() -> None:
    odd = [[*PAIRS.encode("a"), *PAIRS.encode("b")]]
    for template in (None, FORGETS):
        renderer = build_renderer(template)
        stored = store(renderer, odd)
        assert (
            len(renderer.render(forget(stored))) < len(join(stored)) == len(renderer.render(stored))
        )


@given(answers=spellings)
def test_in_another_context_the_answers_keep_their_tokens(answers: list[list[int]]) -> None:
    stored = store(RENDERER, answers)
    example = (Message("user", "b"), Message("assistant", "bb"))
    told = (*example, *stored[:-1], Message("user", "a\n\nb"))
    before = RENDERER.render([*example, *QUESTION])
    last = RENDERER.render_reply(Message("user", "a\n\nb"))
    assert RENDERER.render(told) == (*before, *join(stored[2:-1]), *last)
    # A teacher's template has other words for the turns of other speakers.
    other = build_renderer(HEADERS)
    reply = other.render_reply(Message("user", "b"))
    expected = other.render(QUESTION)
    for answer in stored[2::2]:
        expected += (*answer.tokens, *reply)
    assert other.render(stored) == expected
    assert not other.restores(stored)
    begun = Message("assistant", "ab")
    assert RENDERER.render([*stored, begun]) == (*join(stored), *RENDERER.encode_answer_text("ab"))


@given(answers=spellings)
def test_another_tokenizer_reads_the_text(answers: list[list[int]]) -> None:
    stored = store(RENDERER, answers)
    characters = build_character_tokenizer(LETTERS)
    for other in (
        Renderer(characters, stop_ids=collect_stop_ids(characters, None)),
        Renderer(byte_tokenizer(), stop_ids=frozenset({258})),
        # Here the answers had not ended.
        replace(RENDERER, stop_ids=frozenset({0})),
    ):
        assert other.render(stored) == other.render(forget(stored))
        # Only a stop token has the same spelling in most tokenizers.
        assert other.restore_tokens(stored) is None or [] in answers


def test_what_others_said_comes_back_where_the_text_does_not_tell_its_tokens() -> None:
    answer = Turn("assistant", 2, "a")
    reply = RENDERER.render_reply(Message("user", "a"), Message("user", "b"))
    said = [*RENDERER.encode("a"), RENDERER.final_stop_id, *reply]
    turns = [answer, Turn("user", len(reply), "a\nb")]
    stored = add_tokens(QUESTION, RENDERER.render(QUESTION), turns, said)
    assert RENDERER.render(stored)[-len(reply) :] == reply
    elsewhere = build_renderer(system="b")
    told = elsewhere.render(stored[1:])
    assert told[-len(reply) :] != reply
    assert told == elsewhere.render(forget(stored[1:]))


def test_a_number_that_is_no_token_is_never_read() -> None:
    stored = store(RENDERER, [[*RENDERER.encode("a"), 10**6]])
    assert stored[2].content == "a", "it has no text"
    assert RENDERER.render(stored) == RENDERER.render(forget(stored))


def test_a_control_token_inside_an_answer_comes_back_as_one() -> None:
    [control] = RENDERER.tokenizer.encode("<user>", add_special_tokens=False)
    stored = store(RENDERER, [[*RENDERER.encode("a"), control, *RENDERER.encode("b")]])
    assert (
        RENDERER.render(stored).count(control) == RENDERER.render(forget(stored)).count(control) + 1
    )


def test_a_template_without_earlier_turns_reads_the_last_one() -> None:
    stored = store(RENDERER, [RENDERER.encode("a")])
    last_alone = replace(RENDERER, template="{{ messages[-1]['content'] }}")
    assert last_alone.render(stored) == tuple(last_alone.encode("b"))


def test_messages_without_tokens_are_stored_as_nothing() -> None:
    assert RENDERER.restores(QUESTION)
    assert add_tokens(QUESTION, (), [Turn("assistant", 0, "a")], ())[:2] == QUESTION
    assert RENDERER.restore_tokens([]) is None
    called = Message("assistant", "", reasoning="b", tool_calls=(ToolCall("clock", {"at": [1]}),))
    messages = (*store(RENDERER, [RENDERER.encode("a")]), called)
    prompt = Prompt("p", messages, privileged={"hint": "b"}, reasoning="a")
    assert {prompt.messages: 1}[messages] == 1, "renderers keep messages by their hash"
    assert Prompt.from_json(json.loads(json.dumps(asdict(prompt)))) == prompt, "read back from JSON"
    # A conversation that begins with an answer has no prompt to render.
    stored = store(RENDERER, [RENDERER.encode("a")])
    assert RENDERER.restore_tokens(stored[2:]) is None
