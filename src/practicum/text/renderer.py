"""Messages to token ids by a chat template, and token ids back to text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from practicum.errors import DataError, ModelError
from practicum.text.control import broken, control_pattern, find_unused_marker
from practicum.text.safe import excerpt
from practicum.text.templates import TooMuch, render_template
from practicum.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ADVICE = "write one in the recipe as `template:`, for example \"{{ messages[-1]['content'] }}\" for a base model"

REPLIES = 2048
"""So many replies of an environment are remembered as tokens."""


@dataclass(frozen=True)
class Renderer:
    """Writes prompts as one model reads them; text of users never becomes a control token.

    `system` is the system turn of prompts that bring none: None leaves it to the template, which may write one of its
    own, and "" means no system turn at all. `template` replaces the tokenizer's chat template; `thinking` sets the
    template's `enable_thinking`.
    """

    tokenizer: "PreTrainedTokenizerBase"
    system: str | None = None
    template: str | None = None
    thinking: bool | None = None
    stop_ids: frozenset[int] = frozenset()

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer tells apart; rows of an embedding beyond them are padding."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt's tokens, up to where the answer begins."""
        turns = self._with_system(messages)
        control = self._control
        if control is None or not any(control.search(turn.content) for turn in turns):
            return tuple(self._ids(self._text(turns)))
        mark = find_unused_marker(self._template, *(turn.content for turn in turns))
        text = self._text(
            [replace(turn, content=broken(turn.content, control, mark)) for turn in turns]
        )
        # Each side of a mark is encoded alone, so no control token of a user's survives whole.
        return tuple(number for piece in text.split(mark) for number in self._ids(piece))

    def render_all(self, prompts: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt; equal ones, such as those of a group, are rendered once."""
        rendered = {
            messages: self.render(messages) for messages in dict.fromkeys(map(tuple, prompts))
        }
        return [rendered[tuple(messages)] for messages in prompts]

    def render_reply(self, message: Message) -> tuple[int, ...]:
        """Return the tokens between the student's stop token and its next turn when `message` is said in between.

        Control tokens in its text are read as text. Raises ModelError where the template shows no earlier turns or refuses the
        message's role.
        """
        return self._replies(message)

    @cached_property
    def _replies(self) -> Callable[[Message], tuple[int, ...]]:
        """The newest replies: an environment says the same to many, and templates are slow."""
        return lru_cache(maxsize=REPLIES)(self._render_reply)

    def _render_reply(self, message: Message) -> tuple[int, ...]:
        mark = find_unused_marker(self._template, message.content)
        whole = (
            message.content
            if self._control is None
            else broken(message.content, self._control, mark)
        )
        skipped, stop = self._answer_end
        first, *others = self._after_answer(mark, replace(message, content=whole))[
            len(skipped) :
        ].split(mark)
        # What follows a stop token may be cut into tokens otherwise than what begins a text.
        after_stop = self._ids(stop + first)
        ids = (
            after_stop[1:]
            if after_stop and after_stop[0] in self.stop_ids and stop
            else self._ids(first)
        )
        return tuple(ids + [number for piece in others for number in self._ids(piece)])

    def encode(self, text: str) -> list[int]:
        """Plain text as tokens; control tokens in it are read as text."""
        return self._encoded(text, self._control)

    def encode_answer(self, text: str, limit: int) -> list[int]:
        """A given answer as the model would write it: at most `limit` tokens, the last a stop token where it fits.

        Special tokens in the text are read as text. Other tokens of a template, such as `<think>`, are tokens here,
        because an answer may hold them.
        """
        tokens = self._encoded(text, self._special)
        if not tokens or tokens[-1] not in self.stop_ids:
            tokens.append(self._final_stop_token)
        return tokens[:limit]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without the stop and other control tokens at its end."""
        end = len(tokens)
        while end and tokens[end - 1] in self._silent:
            end -= 1
        return str(self.tokenizer.decode(list(tokens[:end]), clean_up_tokenization_spaces=False))

    def decode_all(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each answer, as `decode` does."""
        return [self.decode(tokens) for tokens in answers]

    def decode_token(self, token: int) -> str:
        """One token as text: its leading space kept, and bytes that are no character by themselves as `\\xe2`.

        A number that the tokenizer does not know, a padding row of the embedding, is `<number>`.
        """
        raw = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(raw, str):
            return f"<{token}>"
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if "\ufffd" in text:
            by_letter = _bytes_by_letter()
            return "".join(
                f"\\x{by_letter[letter]:02x}" if letter in by_letter else letter for letter in raw
            )
        return f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text

    def is_control(self, token: int) -> bool:
        """Whether the token is a stop token or another special one, which no answer shows."""
        return token in self._silent

    def _encoded(self, text: str, control: re.Pattern[str] | None) -> list[int]:
        if control is None or not control.search(text):
            return self._ids(text)
        mark = find_unused_marker(text)
        return [
            number
            for piece in broken(text, control, mark).split(mark)
            for number in self._ids(piece)
        ]

    def _ids(self, text: str) -> list[int]:
        # The template writes the beginning-of-text token; the tokenizer must not add a second one.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            if not message.role.isidentifier():
                raise DataError(
                    f"a message has the role {message.role!r}; write user, assistant or system"
                )
        turns = list(messages)
        if self.system and all(turn.role != "system" for turn in turns):
            turns.insert(0, Message("system", self.system))
        return turns

    def _text(self, turns: Sequence[Message]) -> str:
        text = self._templated(turns)
        if self.system == "" and all(turn.role != "system" for turn in turns):
            return self._without_default(text)
        return text

    def _without_default(self, text: str) -> str:
        """The text without the system turn that the template writes when a conversation has none."""
        before, after = self._system_turn
        if not before or not after or not text.startswith(before):
            return text
        _, found, rest = text[len(before) :].partition(after)
        if not found:
            return text
        # Some templates open the text, and not its first turn, with a token: it stays. Where the token opens every
        # turn, as in ChatML read with `<|im_start|>` for it, the next turn brings its own.
        bos = self.tokenizer.bos_token
        opens = isinstance(bos, str) and before.startswith(bos) and not rest.startswith(bos)
        return f"{bos}{rest}" if opens else rest

    @cached_property
    def _system_turn(self) -> tuple[str, str]:
        """What the template writes before and after the content of a lone system turn; empty where it takes none."""
        mark = find_unused_marker(self._template)
        try:
            text = self._templated([Message("system", mark)], generation=False)
        except ModelError:
            # A template that refuses a lone system turn has no system turn of its own to take away.
            return "", ""
        before, _, after = text.partition(mark)
        return before, after

    def _templated(self, turns: Sequence[Message], *, generation: bool = True) -> str:
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
                f"{self._name}: the chat template does too much: {error}; write another `template:` in the recipe"
            ) from None
        except (
            Exception
        ) as error:  # a template is a program of somebody else's and may fail in any way
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            roles = ", ".join(turn.role for turn in turns)
            raise ModelError(
                f"{self._name}: the chat template refuses messages of the roles {excerpt(roles)} ({kind}{excerpt(str(error))}); "
                "change the prompts or write another `template:` in the recipe"
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
    def _control(self) -> re.Pattern[str] | None:
        return control_pattern(self.tokenizer, self._template)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        return control_pattern(self.tokenizer, "")

    @cached_property
    def _final_stop_token(self) -> int:
        """The stop token after an answer: the one that the template writes there, else the tokenizer's own."""
        mark = find_unused_marker(self._template)
        text = self._templated(
            [Message("user", mark), Message("assistant", mark)], generation=False
        )
        written = [
            number for number in self._ids(text.rpartition(mark)[2]) if number in self.stop_ids
        ]
        own = self.tokenizer.eos_token_id
        return next(iter(written), own if own in self.stop_ids else min(self.stop_ids))

    def _after_answer(self, mark: str, reply: Message) -> str:
        """Return what the template writes after an answer that gets this reply, up to where the next answer begins."""
        asked, answered = f"{mark}q{mark}", f"{mark}a{mark}"
        turns = [Message("user", asked), Message("assistant", answered), reply]
        before, found, after = self._templated(self._with_system(turns)).partition(answered)
        if not found or asked not in before:
            raise ModelError(
                f"{self._name}: the chat template does not show the earlier turns of a conversation, which this task needs; write "
                "another `template:` in the recipe"
            )
        return after

    @cached_property
    def _answer_end(self) -> tuple[str, str]:
        """What the template writes after an answer, up to its stop token, and that token; both empty where it writes none."""
        mark = find_unused_marker(self._template)
        between = self._after_answer(mark, Message("user", f"{mark}r{mark}")).partition(mark)[0]
        found = [
            (between.find(stop), stop)
            for stop in map(self.decode_token, sorted(self.stop_ids))
            if stop in between
        ]
        place, stop = min(found, default=(0, ""))
        return between[: place + len(stop)], stop

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Every token that no text is written with: stop tokens, special ones, and others that were added but blanks.

        These are more than `is_control` knows: marks such as `<think>` are added without being special.
        """
        added = self.tokenizer.added_tokens_decoder
        marks = {
            number for number, token in added.items() if token.special or token.content.strip()
        }
        return self.stop_ids | marks | set(self.tokenizer.all_special_ids)

    @cached_property
    def _silent(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return self.stop_ids | {number for number, token in added.items() if token.special}

    @property
    def _name(self) -> str:
        return self.tokenizer.name_or_path or "the tokenizer"


@cache
def _bytes_by_letter() -> dict[str, int]:
    """Return how byte-level tokenizers write the bytes of a token."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def stop_ids(
    tokenizer: "PreTrainedTokenizerBase", generation_eos: int | list[int] | None
) -> frozenset[int]:
    """Every token that ends an answer: the tokenizer's and the generation settings'; ModelError where there is none.

    The padding token is a stop token where it is also an end token: masks come from lengths, never from token ids.
    """
    eos = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    own = tokenizer.eos_token_id
    stops = frozenset(eos + ([own] if isinstance(own, int) else []))
    if not stops:
        raise ModelError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: no end-of-sequence token is known, so no answer would end; "
            "name one in the recipe as `stop: [...]`"
        )
    return stops
