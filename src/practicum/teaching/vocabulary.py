"""A client for a teacher with another vocabulary, with requests and answers in the student's ids.

Both vocabularies agree at all shared ids. The teacher reads a token that it lacks as the token's
text, does not score it, and never writes a token that the student lacks. Its probability mass on
such tokens is one number at each position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.support import fold_outside
from practicum.objective import Signal
from practicum.ports import DecodeBatch, SamplingClient, TeacherContext
from practicum.ports.wrapping import WrappedClient
from practicum.text import Renderer, VocabularyMap
from practicum.types import (
    HeadLike,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)


def translate_client(
    client: SamplingClient, renderer: Renderer, context: TeacherContext
) -> SamplingClient:
    """Return a client that takes and gives the student's ids; itself if the vocabularies agree.

    `renderer` is the teacher's. Raises VocabularyError if the vocabularies contradict each other.
    """
    vocabulary = context.compare(context.renderer, renderer)
    # Weightless models have no head with a row for each token.
    if vocabulary is None or context.is_dry_run:
        return client
    spellings = {
        token: tuple(renderer.encode(context.renderer.decode_token(token)))
        for token in vocabulary.student_only
        if token not in renderer.token_ids
    }
    return TranslatingClient(client, vocabulary, spellings)


@dataclass(frozen=True, slots=True)
class FoldedHead:
    """A teacher's head over the ids of the student, and one bucket; see `practicum.types.HeadLike`.

    `outside` are the student's ids that the teacher lacks, and `own` the teacher's ids that the
    student lacks.
    """

    bare: HeadLike
    student_size: int
    outside: Int[Tensor, " M"]
    own: Int[Tensor, " R"]

    @property
    def vocab_size(self) -> int:
        """The number of the student's ids, and the bucket."""
        return self.student_size + 1

    @property
    def key(self) -> tuple[int, ...]:
        """The key of the teacher's head: all of its signals are folded alike."""
        return self.bare.key

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities, normalised over all tokens of the teacher."""
        return self._fold(self.bare.logprobs(hidden))

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits; the bucket's is the logarithm of a sum of exponentials."""
        logits = self._fold(self.bare.logits(hidden))
        return logits if room is None else room().copy_(logits)

    def release(self) -> None:
        """Release the teacher's head."""
        self.bare.release()

    def take_head(self, bare: HeadLike) -> "FoldedHead":
        """Return the same view of another head of the teacher's."""
        return replace(self, bare=bare)

    def _fold(self, scores: Tensor) -> Tensor:
        ids = self.outside.to(scores.device), self.own.to(scores.device)
        return fold_outside(scores, self.student_size, *ids)


@dataclass(frozen=True, slots=True)
class ReorderedHead:
    """A head with some of its tokens, in any order; see `practicum.types.HeadLike`."""

    bare: HeadLike
    columns: Int[Tensor, " C"]

    @property
    def vocab_size(self) -> int:
        """The number of columns."""
        return len(self.columns)

    @property
    def key(self) -> tuple[int, ...]:
        """The key of the head: all of its signals are reordered alike."""
        return self.bare.key

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities, normalised over all tokens of the teacher."""
        scores = self.bare.logprobs(hidden)
        return scores[..., self.columns.to(scores.device)]

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits."""
        scores = self.bare.logits(hidden)
        return scores[..., self.columns.to(scores.device)]

    def release(self) -> None:
        """Release the head."""
        self.bare.release()

    def take_head(self, bare: HeadLike) -> "ReorderedHead":
        """Return the same view of another head of the teacher's."""
        return replace(self, bare=bare)


class TranslatingClient(WrappedClient):
    """A `practicum.ports.SamplingClient` between the student's ids and a teacher's.

    `spellings` has the teacher's tokens for the text of each token that the teacher lacks.
    """

    def __init__(
        self,
        client: SamplingClient,
        vocabulary: VocabularyMap,
        spellings: Mapping[int, tuple[int, ...]],
    ) -> None:
        super().__init__(client)
        self._vocabulary = vocabulary
        self._spellings = spellings
        self._outside = torch.tensor(vocabulary.student_only, dtype=torch.long)
        self._own = torch.tensor(vocabulary.teacher_only, dtype=torch.long)
        self._banned = frozenset(vocabulary.teacher_only)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample completions without tokens that the student lacks.

        Raises TeacherError if the client samples such a token anyway.
        """
        spelled = [
            replace(request, prompt_tokens=self._spell(request.prompt_tokens))
            for request in requests
        ]
        stops = params.stop_ids.difference(self._vocabulary.student_only)
        params = replace(params, stop_ids=stops, banned_ids=params.banned_ids | self._banned)
        samples = super().sample(spelled, params)
        for sample in samples:
            unknown = self._banned.intersection(sample.tokens.tolist())
            if unknown:
                raise TeacherError(
                    f"the teacher generated token {min(unknown)}, which the student lacks, although "
                    "the token was banned; use the teacher only for scoring: set "
                    "rollout.source: student and evaluation.teacher: false"
                )
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score completions of the student; the answers use the student's ids."""
        texts = [_SpelledText.of(request.tokens, self._spellings) for request in requests]
        spelled = [
            ScoreRequest(
                self._spell(request.prompt_tokens),
                text.tokens,
                None
                if request.candidates is None
                else self._replace_candidates(request.candidates)[text.owners],
            )
            for request, text in zip(requests, texts, strict=True)
        ]
        answers = super().score(spelled, signal)
        return [
            self._translate(answer, text, request, signal)
            for answer, text, request in zip(answers, texts, requests, strict=True)
        ]

    def _spell(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return _SpelledText.of(tokens, self._spellings).tokens

    def _translate(
        self, answer: TeacherSignal, text: "_SpelledText", request: ScoreRequest, signal: Signal
    ) -> TeacherSignal:
        """Return an answer with one entry for each of the student's tokens, in the student's ids.

        Log-probabilities of unknown tokens are 0, and no code reads them.
        """
        if answer.is_empty:
            return answer
        if len(text.tokens) != len(request.tokens):
            answer = answer[text.starts]
        logprobs, head = answer.logprobs, answer.head
        unknown = torch.isin(torch.tensor(request.tokens, dtype=torch.long), self._outside)
        if logprobs is not None:
            logprobs = logprobs.masked_fill(unknown.to(logprobs.device), 0.0)
        own_head = None
        if head is not None:
            own_head = ReorderedHead(head, self._own)
            head = FoldedHead(head, self._vocabulary.student_size, self._outside, self._own)
        ids, topk_logprobs = answer.topk_ids, answer.topk_logprobs
        if ids is not None and topk_logprobs is not None:
            lacking, unshared = ids, self._own
            if signal.chooser == "student" and request.candidates is not None:
                ids = lacking = request.candidates.to(ids)
                unshared = self._outside
            is_lacking = torch.isin(lacking, unshared.to(ids))
            # Their mass goes to the tail: an impossible candidate is not a candidate.
            topk_logprobs = topk_logprobs.masked_fill(is_lacking, -torch.inf)
            ids = ids.masked_fill(is_lacking, 0)
        return replace(
            answer,
            logprobs=logprobs,
            topk_ids=ids,
            topk_logprobs=topk_logprobs,
            head=head,
            outside=self._outside,
            unknown=unknown,
            own=own_head,
        )

    def _replace_candidates(self, candidates: Int[Tensor, "T K"]) -> Int[Tensor, "T K"]:
        """Replace candidates that the teacher lacks by distinct other ids."""
        is_lacking = torch.isin(candidates, self._outside.to(candidates))
        replaced = candidates.clone()
        for row in is_lacking.any(dim=-1).nonzero()[:, 0].tolist():
            excluded = {*candidates[row].tolist(), *self._vocabulary.student_only}
            count = int(is_lacking[row].sum())
            free = (
                token for token in range(self._vocabulary.teacher_size) if token not in excluded
            )
            fillers = [next(free) for _ in range(count)]
            replaced[row, is_lacking[row]] = candidates.new_tensor(fillers)
        return replaced

    def open_decode_batch(
        self, prompts: Sequence[tuple[int, ...]], max_rows: int, max_new_tokens: int
    ) -> DecodeBatch:
        """Open a decode batch that returns logits of the student's ids."""
        spelled = [self._spell(prompt) for prompt in prompts]
        batch = super().open_decode_batch(spelled, max_rows, max_new_tokens)
        first_tokens = {token: spelling[0] for token, spelling in self._spellings.items()}
        return TranslatingDecodeBatch(
            batch, self._vocabulary.student_size, self._outside, self._own, first_tokens
        )


@dataclass(frozen=True, slots=True)
class TranslatingDecodeBatch:
    """A `practicum.ports.DecodeBatch` in the student's ids.

    Rows advance by one token, so the teacher reads only the first token of the spelling of a token
    that it lacks.
    """

    bare: DecodeBatch
    student_size: int
    outside: Int[Tensor, " M"]
    own: Int[Tensor, " R"]
    first_tokens: Mapping[int, int]

    @property
    def supports_refill(self) -> bool:
        """True if rows can be admitted while others decode."""
        return self.bare.supports_refill

    def admit(self, max_rows: int) -> int:
        """Prefill at most `max_rows` queued prompts, and return their number."""
        return self.bare.admit(max_rows)

    def logits(self) -> Float[Tensor, "B V"]:
        """Return the logits of the student's ids, -inf for ids that the teacher lacks."""
        logits = self.bare.logits()
        ids = self.outside.to(logits.device), self.own.to(logits.device)
        return fold_outside(logits, self.student_size, *ids)[:, :-1]

    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """Append one token to each row, then keep only the rows in `keep`."""
        spelled = [self.first_tokens.get(token, token) for token in tokens.tolist()]
        self.bare.advance(tokens.new_tensor(spelled), keep)


@dataclass(frozen=True, slots=True)
class _SpelledText:
    """A completion in the teacher's tokens.

    For each of the student's T tokens, `starts` has the position of its first teacher token. For
    each of the N teacher tokens, `owners` has the position of its student token.
    """

    tokens: tuple[int, ...]
    starts: Int[Tensor, " T"]
    owners: Int[Tensor, " N"]

    @staticmethod
    def of(tokens: Sequence[int], spellings: Mapping[int, tuple[int, ...]]) -> "_SpelledText":
        pieces = [spellings.get(token, (token,)) for token in tokens]
        lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.long)
        return _SpelledText(
            tuple(token for piece in pieces for token in piece),
            lengths.cumsum(0) - lengths,
            torch.arange(len(pieces)).repeat_interleave(lengths),
        )
