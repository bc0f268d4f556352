"""Apply a model's chat template to messages, and mark control tokens of foreign text.

A marker stands inside each control token in the text of a user or a tool. The rendered text is split
at the markers and encoded piece by piece, so no tokenizer reads a control token there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import jinja2

from practicum.errors import DataError, ModelError
from practicum.pictures import is_sound, split_text
from practicum.prompts import Message, ToolUse
from practicum.text.control import compile_control_pattern, find_unused_marker, split_control_tokens
from practicum.text.safe import excerpt
from practicum.text.templates import TooMuch, render_template
from practicum.text.thoughts import CLOSE, OPEN, join_thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ADVICE = (
    "write one in the recipe as `template:`, "
    "for example \"{{ messages[-1]['content'] }}\" for a base model"
)

CALL_ID = "call00000"
"""The id of a tool call, for templates that write one; results follow their calls in order."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The keys under which chat templates read the thoughts of a turn."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with its tokenizer, switches and tools; see `practicum.text.Renderer`."""

    tokenizer: "PreTrainedTokenizerBase"
    system: str | None = None
    template: str | None = None
    thinking: bool | None = None
    tools: ToolUse | None = None

    @property
    def name(self) -> str:
        """The model's name in messages to users."""
        return self.tokenizer.name_or_path or "the tokenizer"

    @cached_property
    def source(self) -> str:
        """Return the template's text; ModelError if the model has none."""
        if self.template is None and self.tokenizer.chat_template is None:
            raise ModelError(f"{self.name}: the model has no chat template; {_ADVICE}")
        try:
            # Some tokenizers have a separate template for tools.
            schemas = (
                None if self.tools is None else [tool.to_json() for tool in self.tools.schemas]
            )
            return self.tokenizer.get_chat_template(self.template, schemas)
        except ValueError as error:
            raise ModelError(
                f"{self.name}: the model has several chat templates and no default; {_ADVICE}"
            ) from error

    def find_marker(self, turns: Sequence[Message]) -> str:
        """Return a marker that occurs in no turn, in no tool and not in the template."""
        schemas = [] if self.tools is None else [tool.to_json() for tool in self.tools.schemas]
        texts = json.dumps([schemas, [turn.to_json() for turn in turns]], ensure_ascii=False)
        return find_unused_marker(self.source, texts)

    def write(
        self,
        messages: Sequence[Message],
        marker: str,
        *,
        generation: bool = True,
        shows_tools: bool = True,
    ) -> str:
        """Return the text of a conversation, with the marker inside each control token of a text.

        It ends where the answer begins (`generation`), or after the last message.
        """
        turns = [self._mark_turn(turn, marker) for turn in self.add_system(messages)]
        try:
            return self._write_turns(turns, marker, generation, shows_tools)
        except ModelError:
            if not any("tool_calls" in turn for turn in turns):
                raise
        # Some templates want the arguments of calls as the text of a JSON object.
        for call in chain.from_iterable(turn.get("tool_calls", ()) for turn in turns):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return self._write_turns(turns, marker, generation, shows_tools)

    def _write_turns(
        self, turns: list[dict[str, Any]], marker: str, generation: bool, shows_tools: bool
    ) -> str:
        schemas = () if self.tools is None or not shows_tools else self.tools.schemas
        tools = [self._mark_json(schema.to_json(), marker, self.control) for schema in schemas]
        if self.system != "" or any(turn["role"] == "system" for turn in turns):
            return self._apply(turns, tools, generation=generation)
        if tools:
            # The template lists the tools in the system turn, so the turn must stay.
            empty = self._write_turn(Message("system", ""))
            return self._apply([empty, *turns], tools, generation=generation)
        return self._drop_default_system(self._apply(turns, generation=generation))

    def add_system(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages after the recipe's system turn; DataError for a role that is no word."""
        for message in messages:
            if not message.role.isidentifier():
                raise DataError(
                    f"a message has the role {message.role!r}; write user, assistant or system"
                )
        turns = list(messages)
        if self.system and all(turn.role != "system" for turn in turns):
            turns.insert(0, Message("system", self.system))
        return turns

    def tokenize(self, pieces: Sequence[str]) -> list[int]:
        """Return the tokens of the pieces, each encoded separately."""
        # The template writes the beginning-of-text token; the tokenizer must not add a second one.
        try:
            return [
                token
                for piece in pieces
                for token in self.tokenizer.encode(piece, add_special_tokens=False)
            ]
        except BaseException as error:
            # The library's panics have no class that could be imported, and are no Exceptions.
            if type(error).__name__ != "PanicException":
                raise
            text = excerpt("".join(pieces))
            raise ModelError(
                f"the rules in tokenizer.json fail on the text '{text}' ({error}); copy the file again "
                "from where the model is published"
            ) from error

    def split(self, text: str, *, is_answer: bool) -> list[str]:
        """Split a text inside its control tokens. An answer keeps tokens such as `<think>`."""
        return split_control_tokens(text, self.special if is_answer else self.control)

    @cached_property
    def control(self) -> re.Pattern[str]:
        """A pattern of the special tokens and the added tokens that the template uses."""
        return compile_control_pattern(self.tokenizer, self.source)

    @cached_property
    def special(self) -> re.Pattern[str]:
        """A pattern of the special tokens, without the marks around thoughts."""
        return compile_control_pattern(self.tokenizer, "", without=(OPEN, CLOSE))

    @cached_property
    def reasoning_key(self) -> str | None:
        """Return the key under which the template reads an answer's thoughts, None without one."""
        marker = find_unused_marker(self.source)
        turns = self.add_system([Message("user", f"{marker}q")])
        answer = {"role": "assistant", "content": f"{marker}a"}
        for key in REASONING_KEYS:
            # Most templates name no key, and need no rendering to tell.
            if not re.search(rf"\b{key}\b", self.source):
                continue
            fields = [*map(self._write_turn, turns), {**answer, key: f"{marker}r{marker}"}]
            try:
                if f"{marker}r{marker}" in self._apply(fields, generation=False):
                    return key
            except ModelError:
                continue
        return None

    def _mark_turn(self, turn: Message, marker: str) -> dict[str, Any]:
        """Return a turn as templates read it, with a marker inside each control token."""
        is_answer = turn.role == "assistant"
        fields = self._write_turn(turn)
        # A template decides by `</think>` what it writes of an earlier answer.
        texts = [
            marker.join(self.split(text, is_answer=is_answer))
            for text in split_text(fields["content"], turn.images)
        ]
        fields["content"] = _list_parts(texts, turn.images) if turn.images else texts[0]
        other_texts = {
            name: fields[name] for name in (*REASONING_KEYS, "tool_calls") if name in fields
        }
        return {**fields, **self._mark_json(other_texts, marker, self.control)}

    def _write_turn(self, turn: Message) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": turn.role, "content": turn.content}
        # Templates that write no name and no id read neither.
        if turn.role == "tool":
            fields |= {"name": turn.name or "tool", "tool_call_id": CALL_ID}
        if turn.reasoning is not None:
            key = self.reasoning_key
            if key is None:
                fields["content"] = join_thoughts(turn.reasoning, turn.content)
            else:
                fields[key] = turn.reasoning
        if turn.tool_calls:
            fields["tool_calls"] = [{**call.to_json(), "id": CALL_ID} for call in turn.tool_calls]
        return fields

    def _mark_json(self, part: Any, marker: str, pattern: re.Pattern[str]) -> Any:
        """Return JSON data with a marker inside each control token of its texts and names."""
        if isinstance(part, str):
            return marker.join(split_control_tokens(part, pattern))
        if isinstance(part, dict):
            return {
                self._mark_json(key, marker, pattern): self._mark_json(member, marker, pattern)
                for key, member in part.items()
            }
        if isinstance(part, list):
            return [self._mark_json(member, marker, pattern) for member in part]
        return part

    @cached_property
    def _needs_parts(self) -> bool:
        """Return True if the template shows a question as a list of parts and not as a text."""
        marker = find_unused_marker(self.source)
        question = {"role": "user", "content": marker}

        def shows(turn: Mapping[str, Any]) -> bool:
            try:
                return marker in self._render([turn], generation=True)
            except ModelError:
                return False

        # Most templates name no type of a part, and need no rendering to tell.
        may_need = re.search(r"\btype\b", self.source) is not None
        return may_need and not shows(question) and shows(_write_parts(question))

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
        marker = find_unused_marker(self.source)
        try:
            text = self._apply([self._write_turn(Message("system", marker))], generation=False)
        except ModelError:
            # A template that refuses a lone system turn has no default system turn to drop.
            return "", ""
        before, _, after = text.partition(marker)
        return before, after

    def _apply(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool,
    ) -> str:
        """Return the text that the template writes; ModelError if it refuses the turns."""
        turns = [_write_parts(turn) for turn in turns] if self._needs_parts else turns
        return self._render(turns, tools, generation=generation)

    def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool,
    ) -> str:
        switches: dict[str, Any] = (
            {} if self.thinking is None else {"enable_thinking": self.thinking}
        )
        try:
            return render_template(
                self.source,
                turns,
                {
                    **self.tokenizer.special_tokens_map,
                    "add_generation_prompt": generation,
                    **switches,
                },
                tools or None,
            )
        except TooMuch as error:
            raise ModelError(
                f"{self.name}: the chat template does too much: {error}; write another "
                "`template:` in the recipe"
            ) from None
        # A template is foreign code and may fail in any way.
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            roles = ", ".join(str(turn["role"]) for turn in turns)
            raise ModelError(
                f"{self.name}: the chat template refuses messages of the roles {excerpt(roles)} "
                f"({kind}{excerpt(str(error))}); change the prompts or write another `template:` "
                "in the recipe"
            ) from error


def _list_parts(texts: Sequence[str], images: Sequence[str]) -> list[dict[str, str]]:
    """Return the texts around pictures and sounds as a turn's parts."""
    parts = [{"type": "text", "text": texts[0]}]
    for image, text in zip(images, texts[1:], strict=True):
        kind = "audio" if is_sound(image) else "image"
        parts += [{"type": kind}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def _write_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn with its text as a list of one part."""
    content = turn["content"]
    text = [{"type": "text", "text": content}]
    return {**turn, "content": text if isinstance(content, str) else content}
