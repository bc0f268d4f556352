"""Turn text into the tokens behind a prompt: answers, tool calls, and replies to an answer.

The chat template decides. Where its text of the prompt and the answer begins with the prompt, the rest
is what the model should write. Elsewhere the prompt has begun the answer in a way in which the template
writes no answer. Then thoughts that the prompt opened are closed, or the answer is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from practicum.errors import DataError, ModelError
from practicum.prompts import Message, ToolCall
from practicum.text.chat import ChatTemplate
from practicum.text.control import find_unused_marker
from practicum.text.thoughts import CLOSE, OPEN, join_thoughts, split_thoughts

MAX_CACHED_REPLIES = 2048
"""The number of environment replies with cached tokens."""


class ClosedThoughts(DataError):
    """An answer has thoughts, and the prompt has closed its block of thoughts already."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The template's text around an answer behind a prompt.

    `plain` stands before a text without thoughts, `before` and `inner` around thoughts, and `after`
    after the text. `inner` is None if the template shows no thoughts there. `shows_question` is False
    for a template that shows only the last message.
    """

    plain: str
    after: str
    before: str
    inner: str | None
    shows_question: bool

    @property
    def opens_thoughts(self) -> bool:
        """True if the prompt ends within thoughts that the template knows how to close."""
        return self.inner is not None and not self.before.strip()


@dataclass(frozen=True)
class Continuations:
    """The tokens behind the prompts of one chat template."""

    chat: ChatTemplate
    stops: Mapping[int, str]
    """The stop tokens and their texts."""

    def encode(self, messages: Sequence[Message], answer: Message) -> list[int]:
        """Return the tokens of an answer to the messages, with the stop token.

        Raises ClosedThoughts if the prompt closes the thoughts that the answer has, and DataError if the
        template writes no answer behind its prompt.
        """
        answer = self.strip_end(answer)
        marker = self.chat.find_marker([*messages, answer])
        text, after = self._write(messages, answer, marker), self._frame.after
        if not text.endswith(after):
            tokens = self.chat.tokenize(text.split(marker))
            stops = [place for place, token in enumerate(tokens) if token in self.stops]
            return tokens[: stops[-1] + 1] if stops else [*tokens, self.final_stop_id]
        body = text.removesuffix(after)
        tokens = self.chat.tokenize(body.split(marker))
        if tokens and tokens[-1] in self.stops:
            return tokens
        if not self._end:
            return [*tokens, self.final_stop_id]
        # The last piece is encoded together with the end, as in the text of a conversation.
        return self.chat.tokenize(f"{body}{self._end}".split(marker))

    def check(self, messages: Sequence[Message], answer: Message) -> bool:
        """Write an answer as `encode` does and raise as it does, without the time for its tokens.

        Returns True if the text names a stop token before its end, so that only its tokens can tell.
        """
        answer = self.strip_end(answer)
        marker = self.chat.find_marker([*messages, answer])
        body = self._write(messages, answer, marker).removesuffix(self._frame.after)
        return any(stop.strip() in body for stop in self.stops.values())

    def write_calls(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> str | None:
        """Return the text of tool calls behind a prompt, None if the template shows no calls."""
        answer = Message("assistant", "", tool_calls=tuple(calls))
        marker = self.chat.find_marker([*messages, answer])
        text = self.chat.write([*messages, answer], marker, generation=False)
        call_text = _cut(text, self.chat.write(messages, marker))
        if call_text is None:
            # The prompt opens thoughts that the template does not write before calls.
            empty_answer = self.chat.write(
                [*messages, Message("assistant", "")], marker, generation=False
            )
            call_text = _cut(text, empty_answer.removesuffix(self._frame.after)) or ""
        call_text = call_text.replace(marker, "").removesuffix(self._frame.after)
        return call_text if all(call.name in call_text for call in calls) else None

    @property
    def marks(self) -> str:
        """The template's text before, between and after the thoughts and the text of an answer."""
        return f"{self._frame.plain}{self._frame.before}{self._frame.inner or ''}{OPEN}{CLOSE}"

    def read(self, messages: Sequence[Message], text: str) -> str:
        """Return an answer as one text, from the text that a model wrote behind the prompt.

        The thoughts are between `<think>` and `</think>`, even if the model uses other marks. This is
        the inverse of `encode`, up to blanks at the edges.
        """
        frame = self._frame
        if frame.inner is not None and text.startswith(frame.before):
            inner = text.removeprefix(frame.before)
            thoughts, is_closed, content = inner.partition(frame.inner.strip())
            if is_closed:
                return join_thoughts(thoughts.strip("\n"), content.lstrip("\n"))
            if frame.opens_thoughts:
                return join_thoughts(thoughts.strip("\n"), None)
        if frame.plain and text.startswith(frame.plain):
            return text.removeprefix(frame.plain)
        if _opens(self.chat.write(messages, self.chat.find_marker(messages))):
            return join_thoughts(*split_thoughts(f"{OPEN}\n{text}"))
        return text

    def strip_end(self, message: Message) -> Message:
        """Return an answer without an end token that its text names at the end."""
        content = message.content.rstrip()
        while name := next(filter(content.endswith, self._end_names), ""):
            content = content.removesuffix(name).rstrip()
            message = replace(message, content=content)
        return message

    @cached_property
    def _end_names(self) -> list[str]:
        added = self.chat.tokenizer.added_tokens_decoder
        return [
            added[token].content for token in self.stops if token in added and added[token].special
        ]

    def _write(self, messages: Sequence[Message], answer: Message, marker: str) -> str:
        """Return the text behind the prompt, with the marker inside control tokens of the answer."""
        frame, prompt = self._frame, self.chat.write(messages, marker)
        thoughts, text = answer.reasoning, answer.content
        if thoughts is None:
            thoughts, text = split_thoughts(answer.content)
        if not frame.shows_question:
            return self._mark(answer.content, marker)
        if text is None:
            opening = "" if frame.opens_thoughts or _opens(prompt) else frame.before
            return opening + self._mark(thoughts or "", marker)
        plain = replace(answer, content=text, reasoning=None)
        if thoughts is None or (not thoughts and self.chat.reasoning_key):
            return self._write_plain(messages, plain, prompt, marker)
        thinking = replace(plain, reasoning=thoughts)
        if self.chat.reasoning_key is None and answer.reasoning is None:
            # The text of the row itself, with its own blanks.
            thinking = answer
        behind = self._render_behind(messages, thinking, prompt, marker)
        marked = marker.join(self.chat.split(thoughts, is_answer=self.chat.reasoning_key is None))
        if behind is not None and marked.strip() in behind:
            return behind
        plain_text = self._write_plain(messages, plain, prompt, marker)
        if behind is None and not thoughts:
            return plain_text
        if _opens(prompt):
            return f"{marked}\n{plain_text.lstrip()}"
        if behind is None:
            raise ClosedThoughts(
                f"{self.chat.name}: an answer has thoughts, and the prompt ends after a closed block "
                "of thoughts; set `thinking: true` for this model, or remove the thoughts"
            )
        return join_thoughts(marked, plain_text)

    def _write_plain(
        self, messages: Sequence[Message], answer: Message, prompt: str, marker: str
    ) -> str:
        """Return the text of an answer without thoughts; thoughts that the prompt opened are closed."""
        frame = self._frame
        content = self._mark(answer.content, marker)
        behind = self._render_behind(messages, answer, prompt, marker)
        if behind is not None:
            if content.strip() in behind:
                return behind
            return f"{frame.plain}{content}{frame.after}"
        if frame.inner is not None and frame.opens_thoughts:
            return f"{frame.inner}{content}{frame.after}"
        if _opens(prompt):
            return f"{CLOSE}\n\n{content}{frame.after}"
        raise DataError(
            f"{self.chat.name}: the chat template does not write the answer directly after its "
            "prompt; set another `template:` in the recipe, with answers that begin where the prompt "
            "ends"
        )

    def _mark(self, text: str, marker: str) -> str:
        return marker.join(self.chat.split(text, is_answer=True))

    def _render_behind(
        self, messages: Sequence[Message], answer: Message, prompt: str, marker: str
    ) -> str | None:
        """Return what the template writes behind the prompt, None if it writes another prompt."""
        return _cut(self.chat.write([*messages, answer], marker, generation=False), prompt)

    @cached_property
    def _frame(self) -> _Frame:
        unused = find_unused_marker(self.chat.source)
        question, thoughts, content = (f"{unused}{letter}{unused}" for letter in "qra")
        messages, answer = [Message("user", question)], Message("assistant", content)
        marker = self.chat.find_marker([*messages, answer])
        prompt = self.chat.write(messages, marker)
        conversation = self.chat.write([*messages, answer], marker, generation=False)
        if question not in conversation:
            return _Frame("", "", "", None, False)
        plain = (_cut(conversation, prompt) or content).partition(content)[0]
        thinking = replace(answer, reasoning=thoughts)
        behind = self._render_behind(messages, thinking, prompt, marker) or ""
        before, has_thoughts, after_thoughts = behind.partition(thoughts)
        inner = after_thoughts.partition(content)[0] if has_thoughts else None
        after = conversation.rpartition(content)[2]
        return _Frame(plain, after, before if has_thoughts else f"{OPEN}\n", inner, True)

    @cached_property
    def _end(self) -> str:
        """The template's text after an answer up to its stop token; empty without a stop token."""
        return self._cut_at_stop(self._frame.after)[0]

    @cached_property
    def final_stop_id(self) -> int:
        """The stop token that the template writes after an answer, else the tokenizer's."""
        stops = [token for token in self.chat.tokenize([self._end]) if token in self.stops]
        eos = self.chat.tokenizer.eos_token_id
        if isinstance(eos, int) and eos in self.stops:
            stops.append(eos)
        return next(iter(stops), min(self.stops))

    def _cut_at_stop(self, text: str) -> tuple[str, str]:
        """Return a template's text up to its first stop token, and that token; empty without one."""
        places = [(text.find(stop), stop) for stop in self.stops.values() if stop in text]
        start, stop = min(places, default=(0, ""))
        return text[: start + len(stop)], stop

    def encode_reply(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Return the tokens from the student's stop token to its next turn, around a reply."""
        return self._replies(messages)

    @cached_property
    def _replies(self) -> Callable[[tuple[Message, ...]], tuple[int, ...]]:
        """Cache the newest replies: environments repeat themselves, and templates are slow."""
        return lru_cache(maxsize=MAX_CACHED_REPLIES)(self._encode_reply)

    def _encode_reply(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        marker = self.chat.find_marker(messages)
        after_call = messages[0].role == "tool" and self._wants_calls
        after_answer = self._render_after_answer(marker, messages, after_call)
        skipped, stop = self._call_end if after_call else self._answer_end
        first, *later = after_answer[len(skipped) :].split(marker)
        # A tokenizer may split text after a stop token otherwise than at the beginning of a text,
        # so the first piece is encoded together with the stop token.
        after_stop = self.chat.tokenize([stop + first])
        is_stop_first = bool(stop and after_stop and after_stop[0] in self.stops)
        beginning = after_stop[1:] if is_stop_first else self.chat.tokenize([first])
        return tuple(beginning + self.chat.tokenize(later))

    def _render_after_answer(
        self, marker: str, replies: Sequence[Message], after_call: bool = False
    ) -> str:
        """Return the template's text between an answer and the next one, with replies between.

        With `after_call` the answer is a tool call, and the text is what follows the tool's name.
        """
        question, answer = f"{marker}q{marker}", f"{marker}a{marker}"
        turn = Message("assistant", answer)
        if after_call:
            turn = Message("assistant", "", tool_calls=(ToolCall(answer, {}),))
        turns = [Message("user", question), turn, *replies]
        text = self.chat.write(turns, marker, shows_tools=False)
        before, separator, after = text.partition(answer)
        if not separator or question not in before:
            raise ModelError(
                f"{self.chat.name}: the chat template does not show the earlier turns of a "
                "conversation, which this task needs; write another `template:` in the recipe"
            )
        return after

    @cached_property
    def _wants_calls(self) -> bool:
        """True if the template takes a tool's result only after a call."""
        marker = find_unused_marker(self.chat.source)
        try:
            self._render_after_answer(marker, [Message("tool", marker, "tool")])
        except ModelError:
            return True
        return False

    @cached_property
    def _answer_end(self) -> tuple[str, str]:
        """The template's text after an earlier answer up to its stop token, and that token."""
        return self._find_answer_end("user")

    @cached_property
    def _call_end(self) -> tuple[str, str]:
        """The same after the name of a tool that an answer calls."""
        return self._find_answer_end("tool", after_call=True)

    def _find_answer_end(self, role: str, *, after_call: bool = False) -> tuple[str, str]:
        marker = find_unused_marker(self.chat.source)
        reply = Message(role, f"{marker}r{marker}", "tool" if after_call else None)
        between = self._render_after_answer(marker, [reply], after_call).partition(marker)[0]
        return self._cut_at_stop(between)


def _cut(text: str, prompt: str) -> str | None:
    """Return what follows the prompt in a text, None if the text does not begin with the prompt.

    Blanks at the end of the prompt may be missing in the text.
    """
    for beginning in (prompt, prompt.rstrip()):
        if text.startswith(beginning):
            return text.removeprefix(beginning)
    return None


def _opens(prompt: str) -> bool:
    """Return True if the prompt ends within thoughts that it has opened."""
    return prompt.rstrip().endswith(OPEN)
