"""Tokenizers made from an alphabet, for models made from scratch."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from practicum.errors import ModelError
from practicum.text.thoughts import CLOSE, OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL = ("<pad>", "<s>", "</s>", "<user>", "<assistant>", "<system>", "<unk>")

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


MEDIA_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else 'TOKEN' }}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""The chat template of a model that also reads pictures or sounds, with `TOKEN` for each."""


def add_media_token(tokenizer: "PreTrainedTokenizerFast", token: str) -> None:
    """Add the token of a picture or a sound to a tokenizer, with a template that writes it."""
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [token]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = MEDIA_TEMPLATE.replace("TOKEN", token)


def build_character_tokenizer(alphabet: str) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with seven control tokens, then one token for each character.

    `</s>` ends an answer.

    Example: with the alphabet "ab", the conversation `user: ab` becomes `<user>`, `a`, `b`,
    `<assistant>`.
    """
    if not alphabet:
        raise ModelError("the alphabet is empty; a tokenizer needs one character or more")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(_number_tokens(alphabet), unk_token="<unk>"))
    # A dot would not match a line break.
    splitter = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.pre_tokenizer = splitter  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return _wrap(tokenizer)


def build_thinking_tokenizer(alphabet: str) -> "PreTrainedTokenizerFast":
    """Return a character tokenizer that also has a token for each of the marks of thoughts."""
    tokenizer = build_character_tokenizer(alphabet)
    tokenizer.add_tokens([OPEN, CLOSE])
    return tokenizer


def build_byte_tokenizer(alphabet: str) -> "PreTrainedTokenizerFast":
    """Return a byte-level tokenizer: seven control tokens, then one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(_number_tokens(letters), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # type: ignore[assignment]
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _wrap(tokenizer)


def build_pair_tokenizer(alphabet: str, distinct: int = 2) -> "PreTrainedTokenizerFast":
    """Return a tokenizer in the form of SentencePiece, with a token for a pair of at most `distinct` different characters.

    Its other tokens are seven control tokens, 256 bytes for characters that are not in the alphabet, and the characters. A blank
    is written as `\u2581`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = list(dict.fromkeys(alphabet.replace(" ", "\u2581")))
    pairs = [(first, second) for first in letters for second in letters]
    merges = [pair for pair in pairs if len(set(pair)) <= distinct]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = _number_tokens([*fallback, *letters, *map("".join, merges)])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(  # type: ignore[assignment]
        prepend_scheme="never", split=False
    )
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _wrap(tokenizer)


TOKENIZERS: Mapping[str, Callable[[str], "PreTrainedTokenizerFast"]] = {
    "characters": build_character_tokenizer,
    "thoughts": build_thinking_tokenizer,
    "bytes": build_byte_tokenizer,
    "pairs": build_pair_tokenizer,
    "doubles": partial(build_pair_tokenizer, distinct=1),
    "pieces": partial(build_pair_tokenizer, distinct=0),
}
"""The kinds of tokenizers that a from-scratch model may have, each made from an alphabet."""


def _number_tokens(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys([*CONTROL, *tokens]))}


def _wrap(tokenizer: Any) -> "PreTrainedTokenizerFast":
    """Return the tokenizer with its control tokens and the chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
