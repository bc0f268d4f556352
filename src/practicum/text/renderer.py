"""Messages to token ids by a chat template, and token ids back to text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from practicum.errors import DataError, ModelError
from practicum.prompts import Message, ToolCall, ToolSchema, ToolUse
from practicum.text.control import compile_control_pattern, find_unused_marker, split_control_tokens
from practicum.text.safe import excerpt
from practicum.text.stored import restore_tokens
from practicum.text.templates import TooMuch, render_template
from practicum.text.tool_calls import FORMS, UnreadableCall, find_form, read_calls, read_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ADVICE = (
    "write one in the recipe as `template:`, "
    "for example \"{{ messages[-1]['content'] }}\" for a base model"
)

MAX_CACHED_REPLIES = 2048
"""The environment replies whose tokens are remembered."""

CALL_ID = "call00000"
"""The identity of a call, for templates that write one; results follow their calls in order."""


@dataclass(frozen=True)
class Renderer:
    """The tokens of prompts and answers for one model; text of users never becomes a control token.

    `system` is the system turn of prompts without one: None leaves it to the template, which may
    write a default, and "" means no system turn at all. `template` replaces the tokenizer's chat
    template; `thinking` sets the template's `enable_thinking`. The template writes the `tools` that
    the model may call before each prompt.
    """

    tokenizer: "PreTrainedTokenizerBase"
    system: str | None = None
    template: str | None = None
    thinking: bool | None = None
    stop_ids: frozenset[int] = frozenset()
    tools: ToolUse | None = None

    @cached_property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary; embedding rows beyond it are padding."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """Return the ids that have a token; the others below the size are holes."""
        return frozenset(self.tokenizer.get_vocab().values())

    def save(self, folder: Path) -> None:
        """Write the tokenizer with its template into a folder, for programs that render themselves."""
        self.tokenizer.save_pretrained(folder)
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt's tokens, up to the beginning of the answer.

        A last message of the assistant's is an answer that has begun: its text is the end. Earlier
        answers with tokens are written in these: see `restore_tokens`.
        """
        if messages and messages[-1].role == "assistant":
            *earlier, answer = messages
            return (*self.render(earlier), *self.encode_answer_text(answer.content))
        if stored := restore_tokens(messages, self):
            return stored
        turns = self._add_system(messages)
        # The text is encoded piece by piece between markers, and a marker stands inside each
        # control token of a user's or a tool's: it stays text.
        schemas = () if self.tools is None else self.tools.schemas
        marker = find_unused_marker(self._template, str(schemas), *(turn.content for turn in turns))
        marked = [self._mark_control(turn, marker) for turn in turns]
        text = self._write(marked, [self._mark_schema(schema, marker) for schema in schemas])
        return tuple(self._tokenize(text.split(marker)))

    def with_tools(self, tools: ToolUse) -> "Renderer":
        """Return a renderer of prompts with these tools, whose calls it can read.

        Raises ModelError if the chat template does not show them, or if its calls have no known
        form.
        """
        renderer = replace(self, tools=tools)
        schemas = [schema.to_json() for schema in tools.schemas]
        text = renderer._write(self._add_system([Message("user", "")]), schemas)
        missing = [schema.name for schema in tools.schemas if schema.name not in text]
        if missing:
            raise ModelError(
                f"{self._name}: the chat template does not show the tools ({excerpt(missing[0])}); "
                "write a `template:` that writes `tools`, or take a model that was made for them"
            )
        assert renderer.call_form
        return renderer

    @cached_property
    def call_form(self) -> str:
        """Return the form of calls: the tools' own, the tokenizer's `response`, or the template's."""
        form = "auto" if self.tools is None else self.tools.calls
        if form != "auto":
            return form
        if self.template is None and self.tokenizer.response_template is not None:
            return "response"
        form = find_form(self._template)
        if form is None:
            raise ModelError(
                f"{self._name}: the chat template asks for calls in no known form; write "
                f"task.calls: one of {', '.join(FORMS)}"
            )
        return form

    def read_calls(self, text: str) -> list[ToolCall]:
        """Return the calls of tools in a model's turn; UnreadableCall if one cannot be read."""
        schemas = () if self.tools is None else self.tools.schemas
        if self.call_form != "response":
            return read_calls(text, self.call_form, schemas)
        try:
            message = self.tokenizer.parse_response(
                text, prefix=self._answer_start, tools=[schema.to_json() for schema in schemas]
            )
        # A parser of the model's own reads foreign text, and may fail in any way.
        except Exception as error:
            raise UnreadableCall(f"{type(error).__name__}: {excerpt(str(error))}") from None
        return read_message(message if isinstance(message, dict) else {})

    @cached_property
    def _answer_start(self) -> str:
        """Return a prompt's text, with what the template writes of the answer already."""
        return self._apply_template([Message("user", "")])

    def _mark_schema(self, schema: ToolSchema, marker: str) -> dict[str, Any]:
        """Return a tool as a template reads it, with a marker inside each control token."""

        def mark(part: Any) -> Any:
            if isinstance(part, str):
                return marker.join(split_control_tokens(part, self._control))
            if isinstance(part, dict):
                return {mark(key): mark(member) for key, member in part.items()}
            return [mark(member) for member in part] if isinstance(part, list) else part

        return mark(schema.to_json())

    def render_all(self, prompts: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt; equal prompts, as in a group, are rendered once."""
        rendered = {
            messages: self.render(messages) for messages in dict.fromkeys(map(tuple, prompts))
        }
        return [rendered[tuple(messages)] for messages in prompts]

    def render_reply(self, *messages: Message) -> tuple[int, ...]:
        """Return the tokens of a reply: from the student's stop token to its next turn.

        Control tokens in the messages stay text. Raises ModelError if the template shows no earlier
        turns or refuses a message's role.
        """
        return self._replies(messages)

    @cached_property
    def _replies(self) -> Callable[[tuple[Message, ...]], tuple[int, ...]]:
        """Cache the newest replies: environments repeat themselves, and templates are slow."""
        return lru_cache(maxsize=MAX_CACHED_REPLIES)(self._render_reply)

    def _render_reply(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        marker = find_unused_marker(self._template, *(message.content for message in messages))
        after_call = messages[0].role == "tool" and self._wants_calls
        marked = [self._mark_control(message, marker) for message in messages]
        after_answer = self._render_after_answer(marker, marked, after_call)
        skipped, stop = self._call_end if after_call else self._answer_end
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

    def _write(self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if self.system == "" and all(turn.role != "system" for turn in turns):
            if tools:
                # The tools stand in the system turn, which must stay.
                return self._apply_template([Message("system", ""), *turns], tools=tools)
            return self._drop_default_system(self._apply_template(turns))
        return self._apply_template(turns, tools=tools)

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

    def _apply_template(
        self,
        turns: Sequence[Message],
        *,
        generation: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        calls: str = "",
    ) -> str:
        """Return the text of the turns; the last answer calls the tool `calls`, if any."""
        switches: dict[str, Any] = (
            {} if self.thinking is None else {"enable_thinking": self.thinking}
        )
        try:
            return render_template(
                self._template,
                [_write_turn(turn, calls) for turn in turns],
                {
                    **self.tokenizer.special_tokens_map,
                    "add_generation_prompt": generation,
                    **switches,
                },
                tools or None,
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
            # Some tokenizers have a template of their own for tools.
            schemas = (
                None if self.tools is None else [tool.to_json() for tool in self.tools.schemas]
            )
            return self.tokenizer.get_chat_template(self.template, schemas)
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

    def _render_after_answer(
        self, marker: str, replies: Sequence[Message], after_call: bool = False
    ) -> str:
        """Return the template's text between an answer and the next one, with replies between.

        With `after_call` the answer is a call of a tool, and the text is that after its name.
        """
        question, answer = f"{marker}q{marker}", f"{marker}a{marker}"
        answer_turn = Message("assistant", "" if after_call else answer)
        turns = self._add_system([Message("user", question), answer_turn, *replies])
        text = self._apply_template(turns, calls=answer if after_call else "")
        before, separator, after = text.partition(answer)
        if not separator or question not in before:
            raise ModelError(
                f"{self._name}: the chat template does not show the earlier turns of a "
                "conversation, which this task needs; write another `template:` in the recipe"
            )
        return after

    @cached_property
    def _wants_calls(self) -> bool:
        """Return True if the template takes a tool's result after a call alone."""
        marker = find_unused_marker(self._template)
        try:
            self._render_after_answer(marker, [Message("tool", marker, "tool")])
        except ModelError:
            return True
        return False

    @cached_property
    def _answer_end(self) -> tuple[str, str]:
        """Return the template's text after an answer up to its stop token, and that token.

        Both are empty if the template writes no stop token there.
        """
        return self._find_answer_end("user")

    @cached_property
    def _call_end(self) -> tuple[str, str]:
        """Return the same after the name of a tool that an answer calls."""
        return self._find_answer_end("tool", after_call=True)

    def _find_answer_end(self, role: str, *, after_call: bool = False) -> tuple[str, str]:
        marker = find_unused_marker(self._template)
        reply = Message(role, f"{marker}r{marker}", "tool" if after_call else None)
        between = self._render_after_answer(marker, [reply], after_call).partition(marker)[0]
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


def _write_turn(turn: Message, calls: str) -> dict[str, Any]:
    """Return a turn as templates read it; an answer without text calls the tool `calls`."""
    fields: dict[str, Any] = {"role": turn.role, "content": turn.content}
    # Templates that write no name and no identity read neither.
    if turn.role == "tool":
        return {**fields, "name": turn.name or "tool", "tool_call_id": CALL_ID}
    if calls and turn.role == "assistant":
        call = {"name": calls, "arguments": {}}
        fields["tool_calls"] = [{"type": "function", "id": CALL_ID, "function": call}]
    return fields


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
