"""Messages to token ids by a chat template, and token ids back to text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from practicum.errors import ModelError
from practicum.pictures import IMAGE, PictureReader, get_mark, is_picture
from practicum.prompts import Message, ToolCall, ToolSchema, ToolUse
from practicum.text.chat import ChatTemplate
from practicum.text.continuations import ClosedThoughts, Continuations
from practicum.text.control import find_unused_marker
from practicum.text.safe import excerpt
from practicum.text.thoughts import CLOSE
from practicum.text.tool_calls import FORMS, UnreadableCall, find_form, read_calls, read_message
from practicum.thoughts import is_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Renderer:
    """The tokens of prompts and answers for one model; text of users never becomes a control token.

    `system` is the system turn of prompts without one: None leaves it to the template, which may
    write a default, and "" means no system turn at all. `template` replaces the tokenizer's chat
    template; `thinking` sets the template's `enable_thinking`. The template writes the `tools` that
    the model may call before each prompt. `pictures` reads the pictures of prompts; None: the model
    reads text only.
    """

    tokenizer: "PreTrainedTokenizerBase"
    system: str | None = None
    template: str | None = None
    thinking: bool | None = None
    stop_ids: frozenset[int] = frozenset()
    tools: ToolUse | None = None
    pictures: PictureReader | None = None

    @cached_property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary; embedding rows beyond it are padding."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """Return the ids that have a token; other ids below the size are holes."""
        return frozenset(self.tokenizer.get_vocab().values())

    @cached_property
    def longest_token(self) -> int:
        """Return the largest number of characters of one token, for cheap bounds on text lengths."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def save(self, folder: Path) -> None:
        """Write the tokenizer with its template into a folder, for programs that render themselves."""
        self.tokenizer.save_pretrained(folder)
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt's tokens, up to the beginning of the answer.

        A last message of the assistant's is an answer that has begun: its text is the end. Earlier
        answers with tokens are written in these, see `restore_tokens`. Raises ModelError if the
        template does not show the question.
        """
        if messages and messages[-1].role == "assistant":
            *earlier, answer = messages
            return (*self.render(earlier), *self.encode_answer_text(answer.content))
        images = [image for message in messages for image in message.images]
        reader = self._find_reader(images) if images else None
        if not self._shows_question:
            raise ModelError(
                f"{self._chat.name}: the chat template does not show the question; write another "
                "`template:` in the recipe"
            )
        if stored := self.restore_tokens(messages):
            return stored
        turns = [
            self._behind.strip_end(turn) if turn.role == "assistant" else turn for turn in messages
        ]
        marker = self._chat.find_marker(turns)
        text = self._chat.write(turns, marker)
        if reader is not None:
            return tuple(self._tokenize_around(text, marker, images, reader))
        return tuple(self._chat.tokenize(text.split(marker)))

    def _tokenize_around(
        self, text: str, marker: str, images: Sequence[str], reader: PictureReader
    ) -> Iterator[int]:
        """Yield the tokens of a prompt's text, with pictures in the places that the template wrote."""
        pieces = text.split(reader.place)
        self._check_places(len(pieces) - 1, images, reader)
        yield from self._chat.tokenize(pieces[0].split(marker))
        for image, piece in zip(images, pieces[1:], strict=True):
            yield from reader.read(image)
            yield from self._chat.tokenize(piece.split(marker))

    def _find_reader(self, images: Sequence[str]) -> PictureReader:
        """Return the reader of pictures or sounds; ModelError if they are not read here."""
        reader = self.pictures
        if reader is None or {reader.mark} != set(map(get_mark, images)):
            raise ModelError(
                f"{self._chat.name}: a prompt has pictures or sounds, and they are not read here; they need "
                "backend: local without rollout.engine and without a drafter, and a model of them "
                "with its processor; a teacher may see none (type: privileged, images: none)"
            )
        return reader

    def _check_places(self, count: int, images: Sequence[str], reader: PictureReader) -> None:
        """Raise ModelError unless the template wrote one place for each picture."""
        if count != len(images):
            raise ModelError(
                f"{self._chat.name}: the chat template shows {count} of {len(images)} pictures or sounds; "
                f"write a `template:` with {reader.place} for each"
            )

    def restore_tokens(self, messages: Sequence[Message]) -> tuple[int, ...] | None:
        """Return the tokens of a conversation with stored answer tokens, up to the next answer.

        None if the stored tokens do not spell the answers' texts in this tokenizer, or if the
        template shows no earlier turns. The messages before the first of these answers are rendered.
        If their tokens equal the stored tokens, the template is the same, and the stored tokens of
        other speakers are used too; otherwise the template writes their messages.
        """
        places = (place for place, message in enumerate(messages) if _has_answer_tokens(message))
        start = next(places, 0)
        answers = [message for message in messages[start:] if message.role == "assistant"]
        if not start or not all(map(self._is_spelling, answers)):
            return None
        tokens = self.render(messages[:start])
        is_same = tokens == messages[start - 1].tokens
        try:
            for is_answer, run in groupby(messages[start:], lambda turn: turn.role == "assistant"):
                turns = tuple(run)
                if is_answer or (is_same and all(turn.tokens for turn in turns)):
                    tokens += tuple(token for turn in turns for token in turn.tokens)
                else:
                    tokens += self.render_reply(*turns)
        except ModelError:
            # Such a template changes earlier turns, and it can only read them as text.
            return None
        return tokens

    def restores(self, messages: Sequence[Message]) -> bool:
        """Return True if rendering yields the stored tokens, or if no tokens were stored."""
        stored = tuple(token for message in messages for token in message.tokens)
        return not stored or self.render(messages) == stored

    def _is_spelling(self, answer: Message) -> bool:
        """Return True if the answer's tokens are its text in this tokenizer, to the stop token."""
        return (
            self.token_ids.issuperset(answer.tokens)
            and not self.stop_ids.isdisjoint(answer.tokens[-1:])
            and self.decode(answer.tokens) == answer.content
        )

    @cached_property
    def _shows_question(self) -> bool:
        marker = find_unused_marker(self._chat.source)
        try:
            return f"{marker}q" in self._chat.write([Message("user", f"{marker}q")], marker * 2)
        except ModelError:
            # The template requires other turns; rendering the prompts raises its error.
            return True

    def with_tools(self, tools: ToolUse) -> "Renderer":
        """Return a renderer that shows these tools in prompts and can read their calls.

        Raises ModelError if the chat template does not show them, or if its calls have no known
        form.
        """
        renderer = replace(self, tools=tools)
        question = [Message("user", "")]
        text = renderer._chat.write(question, find_unused_marker(renderer._chat.source))
        missing = [schema.name for schema in tools.schemas if schema.name not in text]
        if missing:
            raise ModelError(
                f"{self._chat.name}: the chat template does not show the tools ({excerpt(missing[0])}); "
                "write a `template:` that writes `tools`, or take a model that was made for them"
            )
        renderer._check_calls(question)
        return renderer

    def _check_calls(self, question: Sequence[Message]) -> None:
        """Raise ModelError if a call that the template writes is not read back as the same call."""
        schemas = () if self.tools is None else self.tools.schemas
        for call in map(_build_example, schemas):
            text = self._behind.write_calls(question, [call])
            if text is None:
                # The template shows no calls, so what a model writes is unknown.
                assert self.call_form
                return
            try:
                calls = self.read_calls(self.decode(self._chat.tokenize([text])))
                problem = "other calls are read"
            except UnreadableCall as error:
                calls, problem = [], str(error)
            if calls != [call]:
                raise ModelError(
                    f"{self._chat.name}: task.calls: {self.call_form}: the chat template writes calls in "
                    f"another form, such as {excerpt(text.strip(), most=80)} ({problem}); write the "
                    f"model's form: one of {', '.join(FORMS)}"
                )

    @cached_property
    def call_form(self) -> str:
        """Return the form of calls: the tools' own, the tokenizer's `response`, or the template's."""
        form = "auto" if self.tools is None else self.tools.calls
        if form != "auto":
            return form
        if self.template is None and self.tokenizer.response_template is not None:
            return "response"
        form = find_form(self._chat.source)
        if form is None:
            raise ModelError(
                f"{self._chat.name}: the chat template asks for calls in no known form; set "
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
    def opens_thoughts(self) -> bool:
        """Return True if the template begins an answer inside the model's thoughts."""
        question = [Message("user", "")]
        marker = self._chat.find_marker(question)
        before = self._chat.write(question, marker, generation=False)
        return is_thinking(self._answer_start.removeprefix(before))

    @cached_property
    def _answer_start(self) -> str:
        """Return a prompt's text, including the template's own start of the answer."""
        question = [Message("user", "")]
        return self._chat.write(question, self._chat.find_marker(question))

    def render_all(self, prompts: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt; equal prompts, as in a group, are rendered once."""
        rendered = {
            messages: self.render(messages) for messages in dict.fromkeys(map(tuple, prompts))
        }
        return [rendered[tuple(messages)] for messages in prompts]

    def render_reply(self, *messages: Message) -> tuple[int, ...]:
        """Return the tokens of a reply: from the student's stop token to its next turn.

        Control tokens in the messages stay text. Raises ModelError if the template shows no earlier
        turns or refuses a message's role, or if pictures are not read.
        """
        images = [image for message in messages for image in message.images]
        tokens = self._behind.encode_reply(messages)
        if not images:
            return tokens
        reader = self._find_reader(images)
        place = self.tokenizer.convert_tokens_to_ids(reader.place)
        self._check_places(tokens.count(place), images, reader)
        waiting = iter(images)
        return tuple(
            inner
            for token in tokens
            for inner in (reader.read(next(waiting)) if token == place else (token,))
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text; control tokens in it stay text."""
        return self._chat.tokenize(self._chat.split(text, is_answer=False))

    def encode_answer(
        self,
        messages: Sequence[Message] | None,
        answer: str | Message,
        limit: int,
        *,
        drops_thoughts: bool = False,
    ) -> list[int]:
        """Return an answer as the model would write it, with a stop token, cut to `limit` tokens.

        The chat template decides which text surrounds the answer and its thoughts; a text has its
        thoughts between `<think>` and `</think>`. Raises DataError if the prompt closes a block of
        thoughts and the answer has thoughts; `drops_thoughts` leaves the thoughts out instead.
        Without messages, or after an answer that has begun, the text itself follows the prompt.
        """
        if isinstance(answer, str):
            answer = Message("assistant", answer)
        if not messages or messages[-1].role == "assistant":
            tokens = self.encode_answer_text(answer.content)
            is_ended = bool(tokens) and tokens[-1] in self.stop_ids
            return (tokens if is_ended else [*tokens, self.final_stop_id])[:limit]
        try:
            tokens = self._behind.encode(messages, answer)
        except ClosedThoughts:
            if not drops_thoughts:
                raise
            text = answer.content.rpartition(CLOSE)[2].lstrip("\n")
            tokens = self._behind.encode(messages, replace(answer, content=text, reasoning=None))
        return tokens[:limit]

    def check_answer(self, messages: Sequence[Message], answer: Message) -> bool:
        """Raise what `encode_answer` raises for an answer, without its tokens.

        Returns True if only the tokens tell whether a stop token stands before the end.
        """
        return messages[-1].role == "assistant" or self._behind.check(messages, answer)

    def encode_answer_text(self, text: str) -> list[int]:
        """Return text that continues an answer, without a stop token.

        Special tokens in the text stay text. Other tokens of a template, such as `<think>`, become
        tokens, because an answer may hold them.
        """
        return self._chat.tokenize(self._chat.split(text, is_answer=True))

    def read_answer(self, messages: Sequence[Message], tokens: Sequence[int]) -> str:
        """Return an answer to the messages as text, with its thoughts between `<think>` and `</think>`.

        `decode` only returns the model's text. This adds the opening mark of thoughts if it was in the
        prompt, and removes channel marks and other special tokens.
        """
        marks = self._behind.marks
        dropped = self._control_ids | set(self.tokenizer.all_special_ids)
        answer_tokens = [
            token for token in tokens if token not in dropped or self.decode_token(token) in marks
        ]
        return self._behind.read(messages, self.decode(answer_tokens))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without stop and other control tokens at its end."""
        end = len(tokens)
        while end and tokens[end - 1] in self._control_ids:
            end -= 1
        text = [token for token in tokens[:end] if not is_picture(token)]
        return str(self.tokenizer.decode(text, clean_up_tokenization_spaces=False))

    def decode_all(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each answer, as `decode` does."""
        return [self.decode(tokens) for tokens in answers]

    def decode_token(self, token: int) -> str:
        """Return one token as text, with its leading space.

        A byte that is no character by itself reads as `\\xe2`. An id that the tokenizer does not
        know, which is a padding row of the embedding, reads as `<id>`.
        """
        if is_picture(token):
            return IMAGE if self.pictures is None else self.pictures.mark
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

    def names_control(self, text: str) -> bool:
        """Return True if a text names a special token of the tokenizer."""
        return self._chat.special.search(text) is not None

    def strip_end(self, answer: Message) -> Message:
        """Return an answer without an end token that its text names at the end."""
        return self._behind.strip_end(answer)

    def is_control(self, token: int) -> bool:
        """Return True for a stop token or another special token, which no answer shows."""
        return token in self._control_ids

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.system, self.template, self.thinking, self.tools)

    @cached_property
    def _behind(self) -> Continuations:
        stops = {token: self.decode_token(token) for token in sorted(self.stop_ids)}
        return Continuations(self._chat, stops)

    @cached_property
    def final_stop_id(self) -> int:
        """Return the stop token that the template writes after an answer, else the tokenizer's."""
        return self._behind.final_stop_id

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


_EXAMPLES = {"string": "a b", "integer": 3, "number": 1.5, "boolean": True}
"""An argument of each simple type, for calls that try out a form."""


def _build_example(schema: ToolSchema) -> ToolCall:
    """Return an example call of a tool, with its arguments of simple types."""
    declared = schema.parameters.get("properties", {})
    kinds = {name: str(dict(fields).get("type")) for name, fields in declared.items()}
    arguments = {name: _EXAMPLES[kind] for name, kind in kinds.items() if kind in _EXAMPLES}
    return ToolCall(schema.name, arguments)


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


def _has_answer_tokens(message: Message) -> bool:
    return message.role == "assistant" and bool(message.tokens)
