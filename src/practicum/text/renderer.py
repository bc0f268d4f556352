"""Messages to token ids by a chat template, and token ids back to text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from practicum.errors import DataError, ModelError
from practicum.prompts import Message
from practicum.text.control import compile_control_pattern, find_unused_marker, split_control_tokens
from practicum.text.safe import excerpt
from practicum.text.templates import TooMuch, render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ADVICE = (
    "write one in the recipe as `template:`, "
    "for example \"{{ messages[-1]['content'] }}\" for a base model"
)

MAX_CACHED_REPLIES = 2048
"""The environment replies whose tokens are remembered."""


@dataclass(frozen=True)
class Renderer:
    """The tokens of prompts and answers for one model; text of users never becomes a control token.

    `system` is the system turn of prompts without one: None leaves it to the template, which may
    write a default, and "" means no system turn at all. `template` replaces the tokenizer's chat
    template; `thinking` sets the template's `enable_thinking`.
    """

    tokenizer: "PreTrainedTokenizerBase"
    system: str | None = None
    template: str | None = None
    thinking: bool | None = None
    stop_ids: frozenset[int] = frozenset()

    @cached_property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary; embedding rows beyond it are padding."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """Return the ids that have a token; the others below the size are holes."""
        return frozenset(self.tokenizer.get_vocab().values())

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt's tokens, up to the beginning of the answer."""
        turns = self._add_system(messages)
        # The text is encoded piece by piece between markers, and a marker stands inside each
        # control token of a user's: it stays text.
        marker = find_unused_marker(self._template, *(turn.content for turn in turns))
        text = self._write([self._mark_control(turn, marker) for turn in turns])
        return tuple(self._tokenize(text.split(marker)))

    def render_all(self, prompts: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt; equal prompts, as in a group, are rendered once."""
        rendered = {
            messages: self.render(messages) for messages in dict.fromkeys(map(tuple, prompts))
        }
        return [rendered[tuple(messages)] for messages in prompts]

    def render_reply(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of a reply: from the student's stop token to its next turn.

        Control tokens in the message stay text. Raises ModelError if the template shows no earlier
        turns or refuses the message's role.
        """
        return self._replies(message)

    @cached_property
    def _replies(self) -> Callable[[Message], tuple[int, ...]]:
        """Cache the newest replies: environments repeat themselves, and templates are slow."""
        return lru_cache(maxsize=MAX_CACHED_REPLIES)(self._render_reply)

    def _render_reply(self, message: Message) -> tuple[int, ...]:
        marker = find_unused_marker(self._template, message.content)
        after_answer = self._render_after_answer(marker, self._mark_control(message, marker))
        skipped, stop = self._answer_end
        first, *later = after_answer[len(skipped) :].split(marker)
        # A tokenizer may split text after a stop token otherwise than at the beginning of a text,
        # so the first piece is encoded together with the stop token.
        after_stop = self._tokenize([stop + first])
        is_stop_first = bool(stop and after_stop and after_stop[0] in self.stop_ids)
        return tuple(
            (after_stop[1:] if is_stop_first else self._tokenize([first])) + self._tokenize(later)
        )

    def _mark_control(self, message: Message, marker: str) -> Message:
        """Return the message with a marker inside each control token of its text."""
        pieces = split_control_tokens(message.content, self._control)
        return replace(message, content=marker.join(pieces))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text; control tokens in it stay text."""
        return self._tokenize(split_control_tokens(text, self._control))

    def encode_answer(self, text: str, limit: int) -> list[int]:
        """Return an answer as the model would write it, with a stop token, cut to `limit` tokens.

        See `encode_answer_text` for the text itself.
        """
        tokens = self.encode_answer_text(text)
        if not tokens or tokens[-1] not in self.stop_ids:
            tokens.append(self.final_stop_id)
        return tokens[:limit]

    def encode_answer_text(self, text: str) -> list[int]:
        """Return the text of an answer as the model would write it, without a stop token.

        Special tokens in the text stay text. Other tokens of a template, such as `<think>`, become
        tokens, because an answer may hold them.
        """
        return self._tokenize(split_control_tokens(text, self._special))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without stop and other control tokens at its end."""
        end = len(tokens)
        while end and tokens[end - 1] in self._control_ids:
            end -= 1
        return str(self.tokenizer.decode(list(tokens[:end]), clean_up_tokenization_spaces=False))

    def decode_all(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each answer, as `decode` does."""
        return [self.decode(tokens) for tokens in answers]

    def decode_token(self, token: int) -> str:
        """Return one token as text, with its leading space.

        A byte that is no character by itself reads as `\\xe2`. An id that the tokenizer does not
        know, which is a padding row of the embedding, reads as `<id>`.
        """
        raw = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(raw, str):
            return f"<{token}>"
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        # The replacement character stands for bytes that are no character by themselves.
        if "\ufffd" in text:
            byte_of = read_byte_alphabet()
            return "".join(
                f"\\x{byte_of[letter]:02x}" if letter in byte_of else letter for letter in raw
            )
        # SentencePiece tokenizers drop the leading space of the first token that they decode.
        return f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text

    def is_control(self, token: int) -> bool:
        """Return True for a stop token or another special token, which no answer shows."""
        return token in self._control_ids

    def _tokenize(self, pieces: Sequence[str]) -> list[int]:
        """Return the tokens of the pieces, each encoded alone."""
        # The template writes the beginning-of-text token; the tokenizer must not add a second one.
        return [
            token
            for piece in pieces
            for token in self.tokenizer.encode(piece, add_special_tokens=False)
        ]

    def _add_system(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            if not message.role.isidentifier():
                raise DataError(
                    f"a message has the role {message.role!r}; write user, assistant or system"
                )
        turns = list(messages)
        if self.system and all(turn.role != "system" for turn in turns):
            turns.insert(0, Message("system", self.system))
        return turns

    def _write(self, turns: Sequence[Message]) -> str:
        text = self._apply_template(turns)
        if self.system == "" and all(turn.role != "system" for turn in turns):
            return self._drop_default_system(text)
        return text

    def _drop_default_system(self, text: str) -> str:
        """Return the text without the system turn that the template writes by default."""
        before, after = self._system_turn
        if not before or not after or not text.startswith(before):
            return text
        _, separator, turns = text[len(before) :].partition(after)
        if not separator:
            return text
        # Some templates open the text, and not its first turn, with a token: it stays. If the token
        # opens every turn, as in ChatML with `<|im_start|>` for it, the next turn brings its own.
        bos = self.tokenizer.bos_token
        opens_text = isinstance(bos, str) and before.startswith(bos) and not turns.startswith(bos)
        return f"{bos}{turns}" if opens_text else turns

    @cached_property
    def _system_turn(self) -> tuple[str, str]:
        """Return the template's text around a lone system turn; both parts empty if it refuses."""
        marker = find_unused_marker(self._template)
        try:
            text = self._apply_template([Message("system", marker)], generation=False)
        except ModelError:
            # A template that refuses a lone system turn has no default system turn to drop.
            return "", ""
        before, _, after = text.partition(marker)
        return before, after

    def _apply_template(self, turns: Sequence[Message], *, generation: bool = True) -> str:
        switches: dict[str, Any] = (
            {} if self.thinking is None else {"enable_thinking": self.thinking}
        )
        try:
            return render_template(
                self._template,
                [{"role": turn.role, "content": turn.content} for turn in turns],
                {
                    **self.tokenizer.special_tokens_map,
                    "add_generation_prompt": generation,
                    **switches,
                },
            )
        except TooMuch as error:
            raise ModelError(
                f"{self._name}: the chat template does too much: {error}; write another "
                "`template:` in the recipe"
            ) from None
        # A template is foreign code and may fail in any way.
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            roles = ", ".join(turn.role for turn in turns)
            raise ModelError(
                f"{self._name}: the chat template refuses messages of the roles {excerpt(roles)} "
                f"({kind}{excerpt(str(error))}); change the prompts or write another `template:` "
                "in the recipe"
            ) from error

    @cached_property
    def _template(self) -> str:
        if self.template is None and self.tokenizer.chat_template is None:
            raise ModelError(f"{self._name}: the model has no chat template; {_ADVICE}")
        try:
            return self.tokenizer.get_chat_template(self.template)
        except ValueError as error:
            raise ModelError(
                f"{self._name}: none of the model's chat templates is the default; {_ADVICE}"
            ) from error

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return compile_control_pattern(self.tokenizer, self._template)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return compile_control_pattern(self.tokenizer, "")

    @cached_property
    def final_stop_id(self) -> int:
        """Return the stop token that the template writes after an answer, else the tokenizer's."""
        marker = find_unused_marker(self._template)
        turns = [Message("user", marker), Message("assistant", marker)]
        ending = self._apply_template(turns, generation=False).rpartition(marker)[2]
        stops = [token for token in self._tokenize([ending]) if token in self.stop_ids]
        eos = self.tokenizer.eos_token_id
        return next(iter(stops), eos if eos in self.stop_ids else min(self.stop_ids))

    def _render_after_answer(self, marker: str, reply: Message) -> str:
        """Return the template's text between an answer and the next one, with a reply between."""
        question, answer = f"{marker}q{marker}", f"{marker}a{marker}"
        turns = [Message("user", question), Message("assistant", answer), reply]
        text = self._apply_template(self._add_system(turns))
        before, separator, after = text.partition(answer)
        if not separator or question not in before:
            raise ModelError(
                f"{self._name}: the chat template does not show the earlier turns of a "
                "conversation, which this task needs; write another `template:` in the recipe"
            )
        return after

    @cached_property
    def _answer_end(self) -> tuple[str, str]:
        """Return the template's text after an answer up to its stop token, and that token.

        Both are empty if the template writes no stop token there.
        """
        marker = find_unused_marker(self._template)
        reply = Message("user", f"{marker}r{marker}")
        between = self._render_after_answer(marker, reply).partition(marker)[0]
        stops = [
            (between.find(stop), stop)
            for stop in map(self.decode_token, sorted(self.stop_ids))
            if stop in between
        ]
        start, stop = min(stops, default=(0, ""))
        return between[: start + len(stop)], stop

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return every token that plain text does not hold: stop, special and other added tokens.

        Added tokens of blanks are left out. `is_control` knows fewer: marks such as `<think>` are
        added without being special.
        """
        added = self.tokenizer.added_tokens_decoder
        marks = {number for number, token in added.items() if token.content.strip()}
        return self._control_ids | marks | set(self.tokenizer.all_special_ids)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return self.stop_ids | {number for number, token in added.items() if token.special}

    @property
    def _name(self) -> str:
        return self.tokenizer.name_or_path or "the tokenizer"


@cache
def read_byte_alphabet() -> dict[str, int]:
    """Return the byte for each letter that byte-level tokenizers write it as."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def collect_stop_ids(
    tokenizer: "PreTrainedTokenizerBase", generation_eos: int | list[int] | None
) -> frozenset[int]:
    """Return every token that ends an answer: the tokenizer's and the generation settings'.

    The padding token is a stop token if it is also an end token: masks come from lengths, never
    from token ids. Raises ModelError if there is no stop token.
    """
    eos = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    tokenizer_eos = tokenizer.eos_token_id
    stops = frozenset(eos + ([tokenizer_eos] if isinstance(tokenizer_eos, int) else []))
    if not stops:
        raise ModelError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: no end-of-sequence token is known, so "
            "no answer would end; name one in the recipe as `stop: [...]`"
        )
    return stops
