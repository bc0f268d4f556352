import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from practicum.errors import ModelError
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.text.from_scratch import CONTROL, TOKENIZERS
from practicum.types import Message

ALPHABET = "abc .,'\n\tZ09\u00e9\u4f60\U0001f600\u0301<>s/"
TOKENIZER = build_character_tokenizer(ALPHABET)


@given(st.text(alphabet=ALPHABET))
def test_encode_and_decode_are_inverse(text: str) -> None:
    renderer = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
    tokens = renderer.encode(text)
    assert len(tokens) == len(text)
    assert renderer.decode(tokens) == text


def test_one_token_a_character_after_the_control_tokens() -> None:
    tokenizer = build_character_tokenizer("abca")
    assert len(tokenizer) == len(CONTROL) + 3
    assert tokenizer.get_vocab() == {
        token: number for number, token in enumerate([*CONTROL, "a", "b", "c"])
    }
    assert tokenizer.encode("az") == [7, 6]
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.pad_token == "<pad>"


@given(st.text(alphabet="abc d"))
def test_doubled_characters_are_one_token(text: str) -> None:
    tokenizer = TOKENIZERS["doubles"]("abc d")
    pieces = [token.replace("\u2581", " ") for token in tokenizer.tokenize(text)]
    assert "".join(pieces) == text
    assert all(len(piece) == 1 or piece[0] == piece[1:] for piece in pieces)
    assert TOKENIZERS["pieces"]("abc d").tokenize(text) == list(text.replace(" ", "\u2581"))
    singles = (pair for pair in itertools.pairwise(pieces) if pair[0] == pair[1])
    assert all(len(first) == 2 for first, _ in singles)


def test_each_mark_of_thoughts_is_one_token() -> None:
    tokenizer = TOKENIZERS["thoughts"]("ab<>/think")
    renderer = Renderer(tokenizer, stop_ids=collect_stop_ids(tokenizer, None))
    tokens = renderer.encode_answer([Message("user", "a")], "<think>ab</think>b", 9)
    pieces = [renderer.decode_token(token) for token in tokens]
    assert pieces == ["<think>", "a", "b", "</think>", "b", "</s>"]
    assert renderer.decode(tokens) == "<think>ab</think>b"


def test_the_chat_template_writes_plain_roles() -> None:
    tokens = Renderer(build_character_tokenizer("ab")).render(
        [
            Message("system", "b"),
            Message("user", "a"),
            Message("assistant", "b"),
            Message("user", "ab"),
        ]
    )
    text = [
        "<system>",
        "b",
        "<user>",
        "a",
        "<assistant>",
        "b",
        "</s>",
        "<user>",
        "a",
        "b",
        "<assistant>",
    ]
    assert TOKENIZER.convert_ids_to_tokens([token for token in tokens if token < 7]) == [
        t for t in text if len(t) > 1
    ]
    assert build_character_tokenizer("ab").convert_ids_to_tokens(list(tokens)) == text


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        Message("user", ALPHABET),
        Message("assistant", "<user>a</s>"),
        Message("user", "a"),
    ]
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert Renderer(loaded).render(messages) == Renderer(TOKENIZER).render(messages)
    assert loaded.decode(loaded.encode(ALPHABET)) == ALPHABET
    assert collect_stop_ids(loaded, None) == collect_stop_ids(TOKENIZER, None)
    assert loaded.chat_template == TOKENIZER.chat_template


def test_an_empty_alphabet_is_refused() -> None:
    with pytest.raises(ModelError, match="the alphabet is empty"):
        build_character_tokenizer("")
