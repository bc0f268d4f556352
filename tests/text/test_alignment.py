"""Two tokenizations of one text are aligned by bytes: laws over random tokenizers and texts of every plane."""

import random
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from practicum.errors import VocabularyError
from practicum.text import Renderer, build_character_tokenizer
from practicum.text.alignment import Span, TokenBytes, align_tokens
from practicum.text.from_scratch import CONTROL, TEMPLATE, build_byte_tokenizer
from practicum.text.translation import Translator, split_at_invalid_bytes

TEXTS = (
    "",
    " ",
    "a",
    "abab cab",
    " abc",
    "\tab\n\n  c\r\n",
    "12 345 6789",
    "\u00e9t\u00e9 \u03b1\u03b2 \u6f22\u5b57",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "\x00\x7f\ufeff\ufffd",
    "".join(chr((plane << 16) + 0x1234) for plane in range(17)),
    "def f(x):\n    return x\n\n\n   a  b     c",
    "a</s>b<user>",
)
ALPHABET = sorted(set("".join(TEXTS) + "abc123"))


def wrap(tokenizer: Tokenizer) -> Renderer:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return Renderer(wrapped, stop_ids=frozenset({2}))


def merge(pieces: Sequence[str], count: int, rng: random.Random) -> tuple[list[str], list]:
    """Draw random merges of existing pieces."""
    made, merges = list(pieces), []
    while len(merges) < count:
        pair = rng.choice(made[-60:]), rng.choice(made[-60:])
        if "".join(pair) not in made:
            merges.append(pair)
            made.append("".join(pair))
    return made, merges


def byte_level(seed: int, *, regex: bool = False) -> Renderer:
    """Build a byte-level tokenizer with random merges, also of parts of characters."""
    rng = random.Random(seed)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng.shuffle(letters)
    model = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    seen = [
        letter for text in TEXTS for piece, _ in model.pre_tokenize_str(text) for letter in piece
    ]
    made, merges = merge([*letters, *rng.sample(seen, 40)], 60, rng)
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys([*CONTROL, *made]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = model, decoders.ByteLevel()
    return wrap(tokenizer)


def sentencepiece(seed: int, prepend: str = "never") -> Renderer:
    """Build a tokenizer in the form of SentencePiece with random merges, which knows some characters."""
    rng = random.Random(seed)
    known = [*rng.sample([letter for letter in ALPHABET if letter != " "], 20), "\u2581"]
    made, merges = merge(known, 60, rng)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys([*CONTROL, *fallback, *made]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    strip = [] if prepend == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return wrap(tokenizer)


def sentencepiece_of_blanks(seed: int) -> Renderer:
    """Build a tokenizer like Gemma's: a normalizer writes spaces, and runs of them are added tokens, not special ones."""
    renderer = sentencepiece(seed)
    tokenizer: Any = renderer.tokenizer.backend_tokenizer
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = None
    added = ["\u2581" * count for count in (2, 3, 4)] + ["\n\n", "<unused0>"]
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in added])
    return wrap(tokenizer)


def byte_level_with_added(seed: int) -> Renderer:
    """Build a byte-level tokenizer with added tokens that are not special, one with letters of bytes."""
    tokenizer: Any = byte_level(seed).tokenizer.backend_tokenizer
    tokenizer.add_tokens(["<think>", "\n\n", "a  b", "\uff5c\u2581"])
    return wrap(tokenizer)


def metaspace(seed: int) -> Renderer:
    """Build pieces that a Metaspace decoder joins, which drops the space before the first piece."""
    renderer = sentencepiece(seed, "first")
    tokenizer: Any = renderer.tokenizer.backend_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    )
    return wrap(tokenizer)


KINDS = {
    "bytes": lambda seed: byte_level(seed),
    "bytes with words": lambda seed: byte_level(seed, regex=True),
    "pieces": lambda seed: sentencepiece(seed),
    "pieces after a blank": lambda seed: sentencepiece(seed, "always"),
    "pieces and added blanks": sentencepiece_of_blanks,
    "bytes and added tokens": byte_level_with_added,
    "pieces by metaspace": metaspace,
}
PREFIXED = ("pieces after a blank", "pieces by metaspace")
"""The kinds that write a space before a text."""


def cut(text: bytes, rng: random.Random) -> list[bytes]:
    """Draw random pieces of a text, some of them empty."""
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(len(text) + 2)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def align_slowly(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[tuple[int, int]]:
    """Find the ends of the spans by looking at every pair of tokens."""
    ends = []
    for i in range(1, len(student) + 1):
        for j in range(1, len(teacher) + 1):
            same = sum(map(len, student[:i])) == sum(map(len, teacher[:j])) > 0
            last = student[i : i + 1] != [b""] and teacher[j : j + 1] != [b""]
            if same and last:
                ends.append((i, j))
    return ends


def test_spans_are_the_smallest_stretches_at_whose_ends_both_have_a_boundary() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = bytes(rng.choices(b"ab\xe2\x82", k=rng.randrange(9)))
        student, teacher = cut(text, rng), cut(text, rng)
        spans = align_tokens(student, teacher)
        assert [(span.student.stop, span.teacher.stop) for span in spans] == align_slowly(
            student, teacher
        )
        starts = [(span.student.start, span.teacher.start) for span in spans]
        assert starts == [(0, 0), *((s.student.stop, s.teacher.stop) for s in spans)][: len(spans)]
        for span in spans:
            assert b"".join(student[span.student]) == b"".join(teacher[span.teacher])
        if text:
            assert spans[-1].student.stop == len(student)


def test_one_tokenization_twice_gives_spans_of_one_token() -> None:
    rng = random.Random(1)
    for _ in range(100):
        tokens = [piece for piece in cut(b"abcdefgh", rng) if piece]
        spans = align_tokens(tokens, tokens)
        assert [span.student for span in spans] == [slice(n, n + 1) for n in range(len(tokens))]
        assert all(span.is_single for span in spans)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_an_answers_tokens_are_its_text(kind: str) -> None:
    for seed in range(3):
        renderer = KINDS[kind](seed)
        read = TokenBytes.read(renderer.tokenizer)
        for text in TEXTS[:-1]:
            tokens = renderer.encode_answer_text(text)
            spelled = b"".join(read.spell(tokens, at_start=True))
            # A tokenizer that begins every text with a space cannot distinguish it from a space in the text.
            expected = text.removeprefix(" ") if read.drops_first_space else text
            assert spelled == expected.encode(), (kind, seed, text)


@pytest.mark.parametrize("student", KINDS)
@pytest.mark.parametrize("teacher", KINDS)
def test_a_translated_answer_is_the_same_text_in_the_teachers_own_tokens(
    student: str, teacher: str
) -> None:
    for seed in range(2):
        own, other = KINDS[student](seed), KINDS[teacher](seed + 10)
        translator = Translator(own, other)
        for text in TEXTS[:-1]:
            tokens = [*own.encode_answer_text(text), 2]
            translated = translator.translate(tokens)
            assert translated.whole
            read = own.decode(tokens)
            assert list(translated.tokens) == [*other.encode_answer_text(read), 2]
            assert other.decode(translated.tokens) in (read, read.removeprefix(" "))
            # Every token is in one span, and the stop is a separate span.
            places = [n for s in translated.spans for n in range(s.student.start, s.student.stop)]
            assert places == sorted(set(places))
            assert len(places) == len(tokens) or not read
            last, ends = translated.spans[-1], (len(tokens), len(translated.tokens))
            assert last == Span(*(slice(end - 1, end) for end in ends))


@pytest.mark.parametrize("teacher", KINDS)
def test_random_tokens_of_the_student_are_read_as_the_bytes_that_they_are(teacher: str) -> None:
    """Check texts that no tokenizer would write: other cuts, broken characters, half surrogates."""
    rng = random.Random(2)
    own, other = byte_level(5), KINDS[teacher](6)
    translator = Translator(own, other)
    pieces = TokenBytes.read(own.tokenizer).pieces
    theirs = TokenBytes.read(other.tokenizer)
    ids = sorted(pieces)
    high = [number for number, piece in pieces.items() if max(piece) > 0x7F]
    for _ in range(60):
        tokens = rng.choices(high if rng.random() < 0.5 else ids, k=rng.randrange(12))
        translated = translator.translate([*tokens, 2])
        text = b"".join(pieces[token] for token in tokens)
        if not translated.whole:
            # It puts a space after broken bytes, so it would read another text.
            assert teacher in PREFIXED and len(split_at_invalid_bytes(text)) > 1
            continue
        spelled = b"".join(theirs.spell(translated.tokens[:-1], at_start=not text.startswith(b" ")))
        assert spelled == text, (text, spelled)
        covered = [n for s in translated.spans for n in range(s.student.start, s.student.stop)]
        assert covered == list(range(len(tokens) + 1))


def test_half_a_surrogate_pair_is_bytes() -> None:
    renderer = Renderer(build_byte_tokenizer("ab"), stop_ids=frozenset({2}))
    pieces = {piece: token for token, piece in TokenBytes.read(renderer.tokenizer).pieces.items()}
    half = [pieces[bytes([byte])] for byte in "a\ud800b".encode("utf-8", "surrogatepass")]
    for teacher in (sentencepiece(0), byte_level(0)):
        translated = Translator(renderer, teacher).translate(half)
        assert translated.whole
        assert translated.spans[-1].student.stop == len(half)
    assert split_at_invalid_bytes(b"a\xed\xa0\x80b") == [
        (b"a", True),
        (b"\xed", False),
        (b"\xa0", False),
        (b"\x80", False),
        (b"b", True),
    ]


def test_a_text_of_control_tokens_stays_text_and_a_control_token_is_left_out() -> None:
    own, other = sentencepiece(1), byte_level(2)
    translator = Translator(own, other)
    text = "a</s>b<user>"
    tokens = own.encode_answer_text(text)
    assert 2 not in tokens
    translated = translator.translate(tokens)
    assert other.tokenizer.decode(translated.tokens) == text
    assert not set(translated.tokens) & set(range(len(CONTROL)))
    mixed = [*own.encode("ab"), 3, *own.encode("c"), 2]
    translated = translator.translate(mixed)
    place = mixed.index(3)
    assert list(translated.tokens) == [*other.encode("ab"), *other.encode("c"), 2]
    assert all(not span.student.start <= place < span.student.stop for span in translated.spans)


def test_the_stop_is_the_teachers_own() -> None:
    own, other = sentencepiece(1), byte_level(2)
    assert Translator(own, other).stop_id == 2
    assert Translator(own, other, stop="<user>").translate([2]).tokens == (3,)
    with pytest.raises(
        VocabularyError, match=r"teacher\.stop: '</x>' is not a token of the teacher"
    ):
        _ = Translator(own, other, stop="</x>").stop_id


def test_an_answer_without_tokens_has_no_span() -> None:
    translated = Translator(sentencepiece(1), byte_level(2)).translate([])
    assert translated.tokens == () and translated.spans == ()


def test_the_same_tokens_under_other_ids_are_renamed_one_by_one() -> None:
    """Check also a token that the tokenizer would not have written: the text is not encoded again."""
    own = byte_level(3)
    names = sorted(own.tokenizer.get_vocab(), key=lambda token: own.tokenizer.get_vocab()[token])
    rng = random.Random(0)
    shuffled = names[len(CONTROL) :]
    rng.shuffle(shuffled)
    vocabulary = {token: n for n, token in enumerate([*names[: len(CONTROL)], *shuffled])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    other = wrap(tokenizer)
    tokens = [*range(7, 60), 2]
    translated = Translator(own, other).translate(tokens)
    assert own.tokenizer.convert_ids_to_tokens(tokens) == other.tokenizer.convert_ids_to_tokens(
        list(translated.tokens)
    )
    assert all(span.is_single for span in translated.spans)


def test_a_text_that_the_teachers_tokenizer_changes_ends_the_translation() -> None:
    """Stop there: the probability would belong to another text, and later tokens would be read after it."""
    lower = byte_level(4)
    lower.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    translator = Translator(byte_level(3), lower)
    own = translator.student
    assert translator.translate([*own.encode("abc"), 2]).whole
    translated = translator.translate([*own.encode("Abc"), 2])
    assert not translated.whole and translated.tokens == () and translated.spans == ()
    # A tokenizer of characters has no token for a character beyond its alphabet.
    characters = Renderer(build_character_tokenizer("abc"), stop_ids=frozenset({2}))
    translated = Translator(own, characters).translate([*own.encode("abcd"), 2])
    assert not translated.whole


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_teacher_that_changes_the_form_of_letters_reads_only_what_it_leaves(form: str) -> None:
    normal: Any = byte_level(4)
    normal.tokenizer.backend_tokenizer.normalizer = getattr(normalizers, form)()
    own = byte_level(3)
    kept, changed = "ab \u00e9 \u03b1", "e\u0301 \uff21 \ufb01"
    assert Translator(own, normal).translate(own.encode_answer_text(kept)).whole
    assert not Translator(own, normal).translate(own.encode_answer_text(changed)).whole
    # A student of this kind wrote the changed letters.
    tokens = normal.encode_answer_text(changed)
    translated = Translator(normal, own).translate(tokens)
    assert translated.whole
    assert own.decode(translated.tokens) == unicodedata.normalize(form, changed)  # type: ignore[arg-type]


def test_the_spaces_before_code_are_spaces() -> None:
    """Gemma's tokenizer has added tokens for runs of spaces, written with the letter U+2581."""
    code = "a c(b):\n    ab b\n"
    gemma, other = sentencepiece_of_blanks(0), byte_level(0)
    four = gemma.tokenizer.convert_tokens_to_ids("\u2581" * 4)
    tokens = gemma.encode_answer_text(code)
    assert four in tokens
    assert TokenBytes.read(gemma.tokenizer).pieces[four] == b"    "
    assert other.decode(Translator(gemma, other).translate(tokens).tokens) == code
    translated = Translator(other, gemma).translate(other.encode_answer_text(code))
    assert translated.whole and gemma.decode(translated.tokens) == code


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_random_tokens_are_their_decoded_text(kind: str) -> None:
    rng = random.Random(3)
    for seed in range(2):
        renderer = KINDS[kind](seed)
        backend: Any = renderer.tokenizer.backend_tokenizer
        read = TokenBytes.read(renderer.tokenizer)
        names = renderer.tokenizer.get_vocab()
        assert read.pieces.keys() == {*names.values()} - {*renderer.tokenizer.all_special_ids}
        # A decoder may drop a space at the beginning, so that a letter comes first.
        letter = next(n for name, n in names.items() if backend.decode([n]) == name.strip() != "")
        for tokens in ([letter, *rng.choices([*read.pieces], k=5)] for _ in range(300)):
            text = backend.decode(tokens, skip_special_tokens=False)
            spelled = b"".join(read.spell(tokens))
            assert "\ufffd" in text or spelled.decode() == text, (kind, tokens)
        for number, piece in read.pieces.items():
            decoded = backend.decode([letter, number])
            assert decoded == backend.decode([letter]) + piece.decode("utf-8", "replace")


def test_bytes_that_contradict_the_decoder_are_refused() -> None:
    """A step after the byte-level decoder adds text before each replacement character."""
    renderer = byte_level(0)
    tokenizer: Any = renderer.tokenizer.backend_tokenizer
    twice = decoders.Replace("\ufffd", "?\ufffd")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), twice])
    with pytest.raises(VocabularyError, match=r"token \d+ .* is read as b'.*', and the tokenizer"):
        TokenBytes.read(renderer.tokenizer)


def test_a_tokenizer_whose_tokens_are_no_stretches_of_a_text_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyError, match="it joins tokens by WordPiece; take a byte-level"):
        TokenBytes.read(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
