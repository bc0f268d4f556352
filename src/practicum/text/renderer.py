"""Messages to token ids by a chat template, and token ids back to text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from transformers import PreTrainedTokenizerBase

from practicum.errors import ModelError
from practicum.types import Message

_SENTINEL = "\ue000{}\ue001"


@dataclass(frozen=True, slots=True)
class Renderer:
    """Writes prompts as one model reads them. Text of users never becomes a control token.

    `system` is a turn put before prompts that bring none; `template` replaces the tokenizer's own chat template;
    `thinking` sets the template's `enable_thinking`.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    template: str | None = None
    thinking: bool | None = None
    stop_ids: frozenset[int] = frozenset()

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt's tokens, up to where the answer begins."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if self.system is not None and all(turn["role"] != "system" for turn in turns):
            turns.insert(0, {"role": "system", "content": self.system})
        control = self._control_tokens()
        if control is None or not any(control.search(turn["content"]) for turn in turns):
            return tuple(self.tokenizer.encode(self._templated(turns), add_special_tokens=False))
        return self._piecewise(turns)

    def encode(self, text: str) -> list[int]:
        """Plain text as tokens; control tokens in it are read as text."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without its stop token and other control tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _templated(self, turns: Sequence[dict[str, str]]) -> str:
        template = self.template if self.template is not None else self.tokenizer.chat_template
        if template is None:
            raise ModelError(
                f"{self.tokenizer.name_or_path}: the model has no chat template; write one in the recipe as `template:`, for "
                "example \"{{ messages[-1]['content'] }}\" for a base model"
            )
        switches = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(turns), chat_template=template, tokenize=False, add_generation_prompt=True, **switches
                )
            )
        except jinja2.TemplateError as error:
            raise ModelError(
                f"{self.tokenizer.name_or_path}: the chat template refuses these messages ({error})"
            ) from error

    def _piecewise(self, turns: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Template pieces with control tokens, contents without: the contents never meet the tokenizer's parser."""
        marks = [_SENTINEL.format(number) for number in range(len(turns))]
        marked = [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)]
        contents = {mark: turn["content"] for mark, turn in zip(marks, turns, strict=True)}
        ids: list[int] = []
        for piece in re.split("(\ue000[0-9]+\ue001)", self._templated(marked)):
            encoded = (
                self.encode(contents[piece])
                if piece in contents
                else self.tokenizer.encode(piece, add_special_tokens=False)
            )
            ids += encoded
        return tuple(ids)

    def _control_tokens(self) -> re.Pattern[str] | None:
        names = [str(token) for token in self.tokenizer.get_added_vocab()]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | list[int] | None) -> frozenset[int]:
    """Every token that ends an answer: the tokenizer's and the generation settings'; ModelError where there is none."""
    eos = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    own = tokenizer.eos_token_id
    stops = frozenset([*eos, *([own] if isinstance(own, int) else [])])
    if not stops:
        raise ModelError(
            f"{tokenizer.name_or_path}: no end-of-sequence token is known; name one in the recipe as `stop: [...]`"
        )
    return stops
