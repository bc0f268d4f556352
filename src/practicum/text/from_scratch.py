"""A tokenizer made from an alphabet, for models made from scratch."""

from typing import TYPE_CHECKING

from practicum.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL = ("<pad>", "<s>", "</s>", "<user>", "<assistant>", "<system>", "<unk>")

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_character_tokenizer(alphabet: str) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with seven control tokens, then one token for each character.

    `</s>` ends an answer.

    Example: with the alphabet "ab", the conversation `user: ab` becomes `<user>`, `a`, `b`,
    `<assistant>`.
    """
    if not alphabet:
        raise ModelError(
            "a character tokenizer needs an alphabet of one character or more; the alphabet is "
            "empty"
        )
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: number for number, token in enumerate([*CONTROL, *dict.fromkeys(alphabet)])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # A dot would not match a line break.
    splitter = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.pre_tokenizer = splitter  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
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
