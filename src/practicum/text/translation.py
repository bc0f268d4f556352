"""Write the answers of a student in the tokens of a teacher with another tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from practicum.errors import VocabularyError
from practicum.prompts import Message
from practicum.text.alignment import Span, TokenBytes, align_tokens, join_words
from practicum.text.renderer import Renderer

ONE_TO_ONE = Span(slice(0, 1), slice(0, 1))
"""The first token of each side."""


@dataclass(frozen=True, slots=True)
class TranslatedText:
    """An answer in a teacher's tokens, and the spans of it that both tokenizers know.

    A student's token in no span has nothing that corresponds to it at the teacher. The text is not
    `whole` if the teacher's tokenizer could not write all of it: it then ends before that part.
    """

    tokens: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    whole: bool = True

    def extend(self, later: "TranslatedText", start: int) -> "TranslatedText":
        """Return the text with one after it, which begins at the student's token `start`.

        Nothing comes after a text that is not whole: the teacher would read it in a wrong context.
        """
        if not self.whole:
            return self
        spans = (span.shift(start, len(self.tokens)) for span in later.spans)
        return TranslatedText(self.tokens + later.tokens, (*self.spans, *spans), later.whole)


@dataclass(frozen=True)
class Translator:
    """Translates between the tokens of a student and the tokens of a teacher.

    `stop` is the teacher's token for the student's stop tokens. None stands for the stop token that
    the teacher's template writes after an answer. With `credit` word, spans are joined until they
    end at a boundary of the teacher that does not depend on the following text.
    """

    student: Renderer
    teacher: Renderer
    stop: str | None = None
    credit: Literal["word", "span"] = "word"

    @cached_property
    def stop_id(self) -> int:
        """The teacher's token for the student's stop; VocabularyError if it does not have it."""
        if self.stop is None:
            return self.teacher.final_stop_id
        number = self.teacher.tokenizer.get_vocab().get(self.stop)
        if number is None:
            raise VocabularyError(
                f"teacher.stop: {self.stop!r} is not a token of the teacher; set one of its tokens, "
                "or leave stop out for its template's stop token"
            )
        return number

    def describe(self) -> str:
        """Describe the translation in one line; VocabularyError if it is impossible."""
        pieces = self._student_bytes.pieces
        shared = len({*pieces.values()} & {*self._teacher_bytes.pieces.values()})
        stops = [self.student.decode_token(stop) for stop in sorted(self.student.stop_ids)]
        return (
            f"the teacher reads the student's text in its own tokens: {shared} of {len(pieces)} "
            f"tokens are tokens of both, and the student's stop ({', '.join(stops)}) stands for the "
            f"teacher's {self.teacher.decode_token(self.stop_id)}"
        )

    def translate(self, tokens: Sequence[int]) -> TranslatedText:
        """Translate the student's tokens of one turn.

        The text between control tokens is encoded by the teacher's tokenizer as the teacher would
        write it. A stop token is a separate span, and other control tokens are left out. If the
        vocabularies have the same tokens under other ids, each token is translated individually.
        """
        if self._renamed is not None:
            renamed = tuple(self._renamed[token] for token in tokens)
            places = range(len(renamed))
            return TranslatedText(renamed, tuple(ONE_TO_ONE.shift(n, n) for n in places))
        text, start = TranslatedText(), 0
        pieces = self._student_bytes.pieces
        for place, token in enumerate(tokens):
            is_stop = token in self.student.stop_ids
            # A stop token may be an ordinary one that the recipe names.
            if token in pieces and not is_stop:
                continue
            text = text.extend(self._translate_text(tokens[start:place], start == 0), start)
            if is_stop:
                text = text.extend(TranslatedText((self.stop_id,), (ONE_TO_ONE,)), place)
            start = place + 1
        return text.extend(self._translate_text(tokens[start:], start == 0), start)

    def translate_reply(self, message: Message) -> TranslatedText:
        """Return an environment's turn as the teacher's template writes it, without any span."""
        return TranslatedText(self.teacher.render_reply(message))

    @cached_property
    def common_ids(self) -> dict[int, int]:
        """The teacher's id of each of the student's tokens that both have, each of them once.

        They are the tokens of the same bytes, and the stop. Of several tokens of one text the last is
        taken: the single bytes of SentencePiece come before its characters.
        """
        if self._renamed is not None:
            return self._renamed
        student = {piece: number for number, piece in sorted(self._student_bytes.pieces.items())}
        teacher = {piece: number for number, piece in sorted(self._teacher_bytes.pieces.items())}
        common = {
            number: teacher[piece]
            for piece, number in student.items()
            if piece in teacher and teacher[piece] != self.stop_id
        }
        return {**common, self.student.final_stop_id: self.stop_id}

    def spell(self, token: int) -> tuple[int, ...]:
        """Return the teacher's tokens for the text of one of the student's; none if it has none."""
        encoded = self._encode(self._student_bytes.pieces.get(token, b""))
        return () if encoded is None else tuple(encoded[0])

    def find_word_starts(self) -> tuple[list[int], list[int]]:
        """Return the tokens of student and teacher that begin with a space, tab or line break.

        Control tokens and the stop also count: no other token holds them.
        """
        sides = (
            (self.student, self._student_bytes, self.student.stop_ids),
            (self.teacher, self._teacher_bytes, {self.stop_id}),
        )
        student, teacher = (
            [
                token
                for token in range(renderer.vocab_size)
                if token in stops or read.pieces.get(token, b" ")[:1] in (b" ", b"\t", b"\n")
            ]
            for renderer, read, stops in sides
        )
        return student, teacher

    @property
    def renames(self) -> bool:
        """True if each token is translated by itself: both have the same tokens."""
        return self._renamed is not None

    @cached_property
    def _renamed(self) -> dict[int, int] | None:
        """The teacher's id of each of the student's tokens if both have the same tokens."""
        student_ids = self.student.tokenizer.get_vocab()
        teacher_ids = self.teacher.tokenizer.get_vocab()
        if student_ids.keys() != teacher_ids.keys():
            return None
        return {number: teacher_ids[token] for token, number in student_ids.items()}

    @cached_property
    def _student_bytes(self) -> TokenBytes:
        return TokenBytes.read(self.student.tokenizer)

    @cached_property
    def _teacher_bytes(self) -> TokenBytes:
        return TokenBytes.read(self.teacher.tokenizer)

    @cached_property
    def _crosses_words(self) -> bool:
        return self._teacher_bytes.crosses_words

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        return self._teacher_bytes.find_byte_tokens()

    def _translate_text(self, tokens: Sequence[int], at_start: bool) -> TranslatedText:
        """Translate tokens without control tokens; nothing is whole that the teacher cannot write."""
        spelled = self._student_bytes.spell(tokens, at_start=at_start)
        encoded = self._encode(b"".join(spelled))
        if encoded is None:
            return TranslatedText(whole=False)
        ids, pieces = encoded
        spans = align_tokens(spelled, pieces)
        if spans and self.credit == "word":
            spans = (
                [Span(slice(0, spans[-1].student.stop), slice(0, spans[-1].teacher.stop))]
                if self._crosses_words
                else join_words(spans, spelled)
            )
        return TranslatedText(tuple(ids), tuple(spans))

    def _encode(self, text: bytes) -> tuple[list[int], list[bytes]] | None:
        """Return the teacher's tokens of a text and their bytes; None if it cannot write the text."""
        ids: list[int] = []
        pieces: list[bytes] = []
        for part, is_valid in split_at_invalid_bytes(text):
            if is_valid:
                numbers = self.teacher.encode_answer_text(part.decode())
                read = self._teacher_bytes.spell(numbers)
                if not ids and b"".join(read) == b" " + part and read[0][:1] == b" ":
                    # Its tokenizer begins each text with a space, which is no part of it.
                    read[0] = read[0][1:]
            else:
                # No text holds these bytes, but a model may write and read their tokens.
                numbers = [self._byte_tokens[byte] for byte in part if byte in self._byte_tokens]
                read = self._teacher_bytes.spell(numbers)
            if b"".join(read) != part:
                return None
            ids += numbers
            pieces += read
        return ids, pieces


def split_at_invalid_bytes(text: bytes) -> list[tuple[bytes, bool]]:
    """Return the stretches of valid UTF-8 and of other bytes, in order; True marks valid ones."""
    parts: list[tuple[bytes, bool]] = []
    while text:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            if error.start:
                parts.append((text[: error.start], True))
            parts.append((text[error.start : error.end], False))
            text = text[error.end :]
        else:
            parts.append((text, True))
            break
    return parts
