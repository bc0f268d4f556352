"""A teacher with another tokenizer scores the text of the student's tokens, span by span.

The teacher reads the prompt in its own template and the answer in its own tokens. Both
tokenizations are aligned by bytes into spans: the smallest stretches that start and end at a
boundary of both. For the sampled signal, a span is one action: each of its tokens gets the whole
log-ratio of the span, which is the exact gradient of the reverse KL over spans.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import CapabilityError, VocabularyError
from practicum.losses import read_tokens
from practicum.objective import Full, Signal
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
    walk,
)
from practicum.teachers import pool, route
from practicum.teaching.chat import PromptWriter
from practicum.teaching.client import FollowerTeacher, rewrite_sample
from practicum.teaching.vocabulary import FoldedHead, ReorderedHead
from practicum.text import Renderer
from practicum.text.translation import TranslatedText, Translator
from practicum.types import (
    HeadLike,
    Message,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
)

log = logging.getLogger(__name__)


class Config(TeacherConfig):
    """The teacher with another tokenizer, and its token for the student's stop."""

    type: Literal["translated"] = "translated"
    teacher: Plugin("teachers", TeacherConfig) = Field(  # type: ignore[valid-type]
        description="the scorer: a `model`, an `openai_api` or a `tinker`, directly or inside "
        "`privileged` or `cached`"
    )
    stop: str | None = Field(
        default=None,
        description="the teacher's token for the student's stop; none: its template's stop token",
    )
    credit: Literal["word", "span"] = Field(
        default="word",
        description="the unit of one log-ratio: a word, for an exact gradient, or the smallest "
        "span that both tokenizers share",
    )

    @model_validator(mode="after")
    def _check_inner(self) -> "Config":
        for _, inner in walk(self.teacher):
            if isinstance(inner, route.Config | pool.Config):
                raise ValueError(
                    f"a {inner.type} is several teachers; put `translated` around each member with "
                    "another tokenizer"
                )
            if isinstance(inner, Config):
                raise ValueError("the inner teacher is already translated; remove one `translated`")
        return self

    def capabilities(self) -> Capabilities:
        """Return the signals of the inner teacher that spans can carry."""
        return _narrow(self.teacher.capabilities())


def _narrow(inner: Capabilities) -> Capabilities:
    """Return the remaining capabilities of a teacher with other tokens."""
    is_whole = "full" in inner.signals
    return replace(
        inner,
        supports=inner.supports if is_whole else inner.supports & {"teacher"},
        needs_candidates=False,
        raw_logits=False,
        by_span=True,
        repeats_scores=True,
    )


class TranslatedTeacher(FollowerTeacher):
    """A teacher that translates for an inner teacher; see `practicum.ports.Teacher`.

    Without a translator the inner teacher uses the student's tokens, and its answers are returned
    unchanged.
    """

    def __init__(self, inner: Teacher, translator: Translator | None) -> None:
        self._inner = self._follower = inner
        self._translator = translator

    @property
    def capabilities(self) -> Capabilities:
        """The remaining capabilities of the inner teacher; see `Config.capabilities`."""
        return _narrow(self._inner.capabilities)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the text of each rollout in the inner teacher's tokens, and return it by span.

        Tokens in no span are unknown, and a rollout without any span has an empty signal.
        """
        if self._translator is None:
            return self._inner.score(rollouts, signal)
        translator = self._translator
        if not signal.sampled:
            # A distribution belongs to one token, so words do not matter.
            translator = replace(translator, credit="span")
        texts = [translate_rollout(rollout, translator) for rollout in rollouts]
        rewritten = {
            n: replace_tokens(rollouts[n], text) for n, text in enumerate(texts) if text.spans
        }
        scored = self._inner.score(list(rewritten.values()), signal)
        answers = dict(zip(rewritten, scored, strict=True))
        return [
            self._read(answers[n], text, rollouts[n], signal) if n in answers else TeacherSignal()
            for n, text in enumerate(texts)
        ]

    def _read(
        self, answer: TeacherSignal, text: TranslatedText, rollout: Rollout, signal: Signal
    ) -> TeacherSignal:
        """Convert a signal for the teacher's tokens to the student's tokens."""
        assert self._translator is not None, "only other tokens are translated"
        if not signal.sampled:
            picked = pick_single_tokens(answer, text, rollout, self._common)
            if not (isinstance(signal, Full) and signal.reads_more):
                return picked
            spans = tuple((span.student, span.teacher) for span in text.spans)
            tokens = torch.tensor(text.tokens)
            translated = TranslatedAnswer(
                answer, tokens, spans, lambda: self._spellings, lambda: self._word_starts
            )
            return signal.add_more(picked, translated)
        spread = spread_spans(answer, text, len(rollout.tokens))
        # A renamed token is one token, as in one vocabulary.
        return replace(spread, span_starts=None) if self._translator.renames else spread

    @cached_property
    def _common(self) -> "CommonTokens":
        assert self._translator is not None, "only other tokens are translated"
        return CommonTokens.of(self._translator)

    @cached_property
    def _spellings(self) -> Int[Tensor, "N 3"]:
        assert self._translator is not None, "only other tokens are translated"
        return self._common.spell_others(self._translator)

    @cached_property
    def _word_starts(self) -> tuple[Int[Tensor, " M"], Int[Tensor, " N"]]:
        assert self._translator is not None, "only other tokens are translated"
        student, teacher = self._translator.find_word_starts()
        return torch.tensor(student), torch.tensor(teacher)

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Sample from the inner teacher up to its own stop, in the student's tokens."""
        translator = self._translator
        if translator is None:
            return self._inner.sample(requests, params)
        # The student's stops are other tokens at the teacher, or do not exist there.
        stops = translator.teacher.stop_ids | {translator.stop_id}
        samples = self._inner.sample(requests, replace(params, stop_ids=stops))
        return samples and [
            rewrite_sample(sample, request.prompt, translator.teacher, translator.student, params)
            for sample, request in zip(samples, requests, strict=True)
        ]

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        """Return the teacher as a client of only this prompt, if it writes."""
        if self._translator is None:
            return self._inner.bind_prompt(prompt)
        if not self.capabilities.writes:
            return None
        prompt_tokens = self._translator.student.render(prompt.messages)
        return PromptedClient(PromptWriter(self, prompt), prompt_tokens, accepts_tokens=False)


@dataclass(frozen=True, slots=True)
class CommonTokens:
    """The tokens of student and teacher that are the same.

    `columns` has the teacher's id of each of the student's tokens, then the ids of the teacher's
    other tokens. `outside` are the student's tokens that the teacher lacks. `student_ids` has the
    student's id of each of the teacher's tokens, or -1 if the student lacks the token.
    """

    student_size: int
    columns: Int[Tensor, " C"]
    outside: Int[Tensor, " M"]
    student_ids: Int[Tensor, " V"]

    @classmethod
    def of(cls, translator: Translator) -> "CommonTokens":
        """Compare two vocabularies."""
        size, teacher_size = translator.student.vocab_size, translator.teacher.vocab_size
        common = translator.common_ids
        student_ids = torch.full((teacher_size,), -1)
        for student_id, teacher_id in common.items():
            student_ids[teacher_id] = student_id
        # A token that the teacher lacks has any column: it is masked.
        columns = [common.get(token, 0) for token in range(size)]
        teacher_only = (student_ids < 0).nonzero()[:, 0]
        return cls(
            size,
            torch.cat([torch.tensor(columns), teacher_only]),
            torch.tensor([token for token in range(size) if token not in common]).long(),
            student_ids,
        )

    def spell_others(self, translator: Translator) -> Int[Tensor, "N 3"]:
        """Spell the student's tokens that the teacher lacks in its tokens; see `TranslatedAnswer`."""
        places = {int(number): place for place, number in enumerate(self.columns.tolist())}
        # A placeholder has the column of another token, so the common tokens' columns take priority.
        places |= {teacher: student for student, teacher in translator.common_ids.items()}
        entries = [
            (token, places[piece], place)
            for token in self.outside.tolist()
            for place, piece in enumerate(translator.spell(token))
        ]
        return torch.tensor(entries, dtype=torch.long).view(-1, 3)

    def read_own(self, head: HeadLike) -> ReorderedHead:
        """Return the teacher's head over the tokens that the student lacks."""
        return ReorderedHead(head, self.columns[self.student_size :])

    def fold(self, head: HeadLike) -> FoldedHead:
        """Return the teacher's head over the student's tokens and one bucket."""
        teacher_only = torch.arange(self.student_size, len(self.columns))
        return FoldedHead(
            ReorderedHead(head, self.columns), self.student_size, self.outside, teacher_only
        )


def pick_single_tokens(
    answer: TeacherSignal, text: TranslatedText, rollout: Rollout, common: CommonTokens
) -> TeacherSignal:
    """Return a teacher's distributions at tokens that both tokenizers have; others are unknown.

    Both models are compared over the tokens that both have, and one bucket.
    """
    count = len(rollout.tokens)
    rows = torch.zeros(count, dtype=torch.long)
    unknown = torch.ones(count, dtype=torch.bool)
    for span in text.spans:
        if span.is_single:
            rows[span.student.start] = span.teacher.start
            unknown[span.student.start] = False
    unknown |= torch.isin(rollout.tokens, common.outside)
    signal = answer[rows]
    ids, topk_logprobs = signal.topk_ids, signal.topk_logprobs
    if ids is not None and topk_logprobs is not None:
        ids = common.student_ids.to(ids.device)[ids]
        # The mass of tokens that the student lacks goes to the tail.
        topk_logprobs = topk_logprobs.masked_fill(ids < 0, -torch.inf)
        ids = ids.clamp(min=0)
    return replace(
        signal,
        topk_ids=ids,
        topk_logprobs=topk_logprobs,
        head=None if signal.head is None else common.fold(signal.head),
        own=None if signal.head is None else common.read_own(signal.head),
        outside=common.outside,
        unknown=unknown,
    )


@dataclass(frozen=True, slots=True)
class PaperTeacher(FollowerTeacher):
    """A translated teacher in a plan, where answers have no text: one token for each token."""

    inner: Teacher

    @property
    def capabilities(self) -> Capabilities:
        """The remaining capabilities of the inner teacher."""
        return _narrow(self.inner.capabilities)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the rollouts without translation; each sampled token is a span."""
        answers = self.inner.score(rollouts, signal)
        if not signal.sampled:
            return answers
        return [
            replace(answer, span_starts=torch.ones_like(rollout.loss_mask))
            for answer, rollout in zip(answers, rollouts, strict=True)
        ]

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Sample from the inner teacher."""
        return self.inner.sample(requests, params)


def translate_rollout(rollout: Rollout, translator: Translator) -> TranslatedText:
    """Translate a rollout's answer, or each turn of its conversation.

    A span is left out unless all of its tokens are supervised and have one author.
    """
    tokens = rollout.tokens.tolist()
    text = TranslatedText()
    if not rollout.turns:
        text = translator.translate(tokens)
    start = 0
    for turn in rollout.turns:
        turn_tokens = tokens[start : start + turn.tokens]
        later = (
            translator.translate(turn_tokens)
            if turn.role == "assistant"
            else translator.translate_reply(Message(turn.role, turn.text))
        )
        text = text.extend(later, start)
        start += turn.tokens
    return replace(text, spans=tuple(span for span in text.spans if _is_one(rollout, span.student)))


def _is_one(rollout: Rollout, part: slice) -> bool:
    """Return True if a part of a rollout is supervised and has one author."""
    authors = rollout.authors
    return bool(rollout.loss_mask[part].all()) and (
        authors is None or len(authors[part].unique()) == 1
    )


def replace_tokens(rollout: Rollout, text: TranslatedText) -> Rollout:
    """Return the rollout with the teacher's tokens, without known probabilities."""
    tokens = torch.tensor(text.tokens, dtype=torch.long)
    return replace(
        rollout,
        tokens=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        sampling_logprobs=torch.zeros(len(tokens)),
        policy_logprobs=torch.full((len(tokens),), torch.nan),
        candidates=None,
        authors=None,
        turns=(),
    )


def spread_spans(answer: TeacherSignal, text: TranslatedText, count: int) -> TeacherSignal:
    """Convert a signal for the teacher's tokens into a signal for `count` tokens of the student.

    The log-probability of a span is spread evenly over its tokens: only the sum is read.
    """
    read = read_tokens(answer, slice(None)).logprobs
    if read is None:
        return TeacherSignal()
    # Tokens outside of spans keep 0, which is never read; NaN would count as a broken answer.
    logprobs = torch.zeros(count, dtype=read.dtype)
    starts, unknown = torch.ones(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    for span in text.spans:
        size = span.student.stop - span.student.start
        logprobs[span.student] = read[span.teacher].sum() / size
        unknown[span.student] = False
        starts[span.student.start + 1 : span.student.stop] = False
    return TeacherSignal(logprobs=logprobs, unknown=unknown, span_starts=starts)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the inner teacher in its own tokens, and the translation unless they are the student's.

    Raises CapabilityError if the inner teacher has no separate tokenizer.
    """
    renderers: list[Renderer] = []
    receive = partial(_receive, renderers)
    inner = replace(context, compare=receive).build(config.teacher)
    if not renderers:
        raise CapabilityError(
            f"translated: the inner teacher {config.teacher.type!r} has no separate tokenizer; "
            "remove `translated`"
        )
    if context.is_dry_run:
        return PaperTeacher(inner)
    if not _differs(context, renderers[0]):
        return TranslatedTeacher(inner, None)
    translator = Translator(context.renderer, renderers[0], config.stop, config.credit)
    log.info(translator.describe())
    return TranslatedTeacher(inner, translator)


def _receive(renderers: list[Renderer], student: Renderer, teacher: Renderer) -> None:
    """Note the renderer of the inner teacher, which is built as if its tokens were the student's."""
    renderers.append(teacher)


def _differs(context: TeacherContext, renderer: Renderer) -> bool:
    """Return True if the teacher's tokens are not the student's."""
    # The run's own comparison: `practicum answers` needs the teacher's tokens unchanged.
    try:
        return context.compare(context.renderer, renderer) is not None
    except VocabularyError:
        return True
