"""Measure how a teacher with another tokenizer reads a student's answers, for P1."""

from collections.abc import Sequence
from dataclasses import dataclass

from practicum.objective import Sampled
from practicum.runs.check_outcome import CheckOutcome
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import format_number
from practicum.text import Renderer
from practicum.text.alignment import Span, TokenBytes
from practicum.text.translation import Translator
from practicum.types import Rollout, ScoreRequest

LONG_SPAN = 6
"""In a span of more tokens than this, the span's one number says little about each token."""

MAX_SILENT = 0.01
"""The share of tokens that the teacher cannot read, above which P1 warns."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A student's answer with its spans, and the bytes of its tokens."""

    rollout: Rollout
    spans: Sequence[Span]
    pieces: Sequence[bytes]

    def count_bytes(self, span: Span) -> int:
        """Return the number of bytes of a span."""
        return sum(map(len, self.pieces[span.student]))

    @property
    def digits(self) -> list[tuple[Span, int]]:
        """The spans with digits, each with the number of its digits."""
        texts = ((span, b"".join(self.pieces[span.student])) for span in self.spans)
        counts = ((span, sum(48 <= byte < 58 for byte in text)) for span, text in texts)
        return [(span, count) for span, count in counts if count]


def judge_translation(
    evidence: Evidence, translators: Sequence[Translator], details: dict[str, float | None]
) -> CheckOutcome:
    """Judge P1 for a teacher that reads the student's text with its own tokenizer."""
    # Each of several teachers reads every answer, including answers that a route would not send it.
    answers = [answer for translator in translators for answer in _read(evidence, translator)]
    spans = [(answer, span) for answer in answers for span in answer.spans]
    tokens = sum(len(answer.pieces) for answer in answers)
    if not spans:
        return CheckOutcome("warn", "the teacher can read no answer of the student's", fix=())
    lengths = [span.student.stop - span.student.start for _, span in spans]
    count_all = sum(answer.count_bytes(span) for answer, span in spans)
    single = sum(answer.count_bytes(span) for answer, span in spans if span.is_single)
    digits = [pair for answer in answers for pair in answer.digits]
    count_digits = sum(count for _, count in digits)
    split = sum(count for span, count in digits if not span.is_single)
    silent = 1 - sum(lengths) / tokens
    details = {
        **details,
        "share of bytes in spans of one token each": single / count_all if count_all else None,
        "mean tokens of a span": sum(lengths) / len(lengths),
        f"share of tokens in spans of more than {LONG_SPAN}": sum(
            length for length in lengths if length > LONG_SPAN
        )
        / tokens,
        "share of digits that are split differently": split / count_digits
        if count_digits
        else None,
        "share of tokens that the teacher cannot read": silent,
        **_price_spans(evidence, answers),
        **_price_spelling(evidence),
    }
    text = (
        f"{translators[0].describe()}; a span has {format_number(sum(lengths) / len(lengths))} of "
        f"the student's tokens, and {format_number(single / count_all if count_all else 1.0)} of the "
        "bytes are in spans of one token each"
    )
    if silent <= MAX_SILENT:
        return CheckOutcome("pass", text, details=details)
    return CheckOutcome(
        "warn",
        f"{text}; the teacher cannot read {format_number(silent)} of the tokens: control tokens in "
        "the answers, or characters that its tokenizer changes",
        details=details,
    )


def _read(evidence: Evidence, translator: Translator) -> list[ReadAnswer]:
    """Return the student's answers as the teacher reads them."""
    student_bytes = TokenBytes.read(translator.student.tokenizer)
    answers = []
    for rollout in evidence.rollouts:
        tokens = rollout.tokens.tolist()
        if tokens and not rollout.turns:
            spans = translator.translate(tokens).spans
            answers.append(ReadAnswer(rollout, spans, student_bytes.spell(tokens, at_start=True)))
    return answers


def _price_spans(evidence: Evidence, answers: Sequence[ReadAnswer]) -> dict[str, float | None]:
    """Return the mean log-ratio of student and teacher, in nats, by kind of span.

    The kinds are spans of one token for both models, and spans of several tokens.
    """
    by_rollout = {id(row.rollout): row for row in evidence.measurements}
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for answer in answers:
        row = by_rollout[id(answer.rollout)]
        if row.teacher_logprobs is None:
            continue
        ratio = row.logprobs.cpu() - row.teacher_logprobs.cpu()
        for span in answer.spans:
            ratios[span.is_single].append(float(ratio[span.student].sum()))
    return {
        f"student over teacher, nats per span {where}": sum(values) / len(values)
        if values
        else None
        for where, values in (
            ("of one token each", ratios[True]),
            ("of several", ratios[False]),
        )
    }


def _price_spelling(evidence: Evidence) -> dict[str, float | None]:
    """Return the cost of sampled tokens that the student's own tokenizer would not have written.

    The cost is the student's log-probability of its re-encoded text, minus its log-probability of
    the tokens that it sampled, as a mean over all answers.
    """
    renderer = evidence.renderer
    pairs = [
        (row, _spell_again(renderer, row.rollout))
        for row in evidence.measurements
        if len(row.rollout.tokens) and not row.rollout.turns
    ]
    changed = [
        (row, tokens) for row, tokens in pairs if list(tokens) != row.rollout.tokens.tolist()
    ]
    if not pairs:
        return {}
    # Unchanged answers have no cost.
    requests = [ScoreRequest(row.rollout.prompt_tokens, tokens) for row, tokens in changed]
    signals = evidence.components.parts.sampler.score(requests, Sampled()) if requests else []
    gains = [
        float(signal.logprobs.sum() - row.logprobs.sum().cpu())
        for (row, _), signal in zip(changed, signals, strict=True)
        if signal.logprobs is not None
    ]
    return {
        "share of answers that re-tokenize differently": len(changed) / len(pairs),
        "nats per answer gained by re-tokenizing": sum(gains) / len(pairs),
    }


def _spell_again(renderer: Renderer, rollout: Rollout) -> tuple[int, ...]:
    """Return the tokens of a rollout's text, with a stop token if the rollout has one."""
    tokens = rollout.tokens.tolist()
    stop = tokens[-1:] if tokens[-1] in renderer.stop_ids else []
    text_tokens = renderer.encode_answer_text(renderer.decode(tokens))
    return (*text_tokens, *stop) if text_tokens or stop else tuple(tokens)
