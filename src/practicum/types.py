"""The values of a training step, as frozen dataclasses; every tensor carries its shape.

Axes: B rollouts, T tokens of one completion, K candidates, V vocabulary, D hidden width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from practicum.columns import TokenColumns, select_tokens
from practicum.prompts import CallOutcome as CallOutcome
from practicum.prompts import CallRecord as CallRecord
from practicum.prompts import Message as Message
from practicum.prompts import Prompt as Prompt
from practicum.prompts import ToolCall as ToolCall
from practicum.prompts import ToolSchema as ToolSchema
from practicum.prompts import ToolUse as ToolUse
from practicum.prompts import Turn as Turn
from practicum.thoughts import read_answer

StopReason = Literal["stop", "length", "error", "timeout", "turns", "bad_calls"]
"""A completion's end: a stop, the token limit, an environment's failure or timeout, the limit of
turns, or too many calls of tools that no tool could answer."""

FAILURES: tuple[StopReason, ...] = ("error", "timeout")
"""The stop reasons of a conversation that its environment ended by failing."""

Source = Literal["student", "dataset", "teacher", "reference"]
Author = Literal["student", "dataset", "teacher", "environment", "reference", "harness"]
AUTHORS: tuple[Author, ...] = get_args(Author)
"""All authors; `Rollout.authors` holds indices into this tuple."""

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace at which conversations ask environments: their number at once, the time, the order.

    With `together`, each conversation waits for the slowest of a round, and the same seed gives the
    same bytes. `seconds` is the total time limit of one conversation's environment.
    """

    at_once: int = 1
    seconds: float | None = None
    together: bool = True


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling settings: `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 keep every token.

    A completion stops after one of the `stop_ids` and after one of the `stop_texts`, which may
    begin and end within a token; `practicum.text.stop_check` looks for both. The `banned_ids` are
    never sampled. A conversation ends after `max_turns` turns of the model, None: never, and asks
    its environment at a `pace`. If `rescored`, the same client scores the completions next, so it
    may keep its computed states.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    banned_ids: frozenset[int] = frozenset()
    max_turns: int | None = None
    rescored: bool = False
    pace: Pace = Pace()

    def should_stop(self, tokens: Sequence[int]) -> bool:
        """Return True if the last token is a stop token. `max_new_tokens` is not checked."""
        return tokens[-1] in self.stop_ids


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample: the prompt's tokens and the seed of its random stream.

    `continues` is (seed, count) if `prompt_tokens` end within a completion: sampling then continues
    the random stream of this seed after `count` tokens. Samplers that cannot do this use `seed`.
    """

    prompt_tokens: tuple[int, ...]
    seed: int
    continues: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TextStates:
    """The states that a model computed while it generated a text; later passes may reuse them.

    `text` are the tokens of prompt and completion. `hidden` are the states that predict the
    completion's tokens, and `lower` are the inputs of the first trainable layer at all tokens
    except the last; either may be None. `model` and `version` identify the weights.
    """

    text: tuple[int, ...]
    model: int
    version: int
    hidden: Float[Tensor, "T D"] | None
    lower: Float[Tensor, "L D"] | None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One completion to score.

    Asks for the log-probabilities of `tokens` after `prompt_tokens`, and of the K `candidates` at
    each of these positions. `states` may save a local model a part of the pass.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    candidates: Int[Tensor, "T K"] | None = field(default=None, compare=False)
    states: TextStates | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DraftRound:
    """A round of speculative decoding: the drafts that one call of the target verified.

    `start` is the index of the completion's token that the first draft proposes, and `accepted`
    counts the accepted drafts that are in the completion. The target's token follows them.
    """

    start: int
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled completion. If it ended at a stop token, the stop token is its last token.

    `sampling_logprobs` are under the sampling distribution (after temperature, top-k and top-p),
    `policy_logprobs` under the model's untempered distribution.
    """

    tokens: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    stop_reason: StopReason
    text: str | None = None
    """The text of a writer with a different tokenizer, which the student's tokens may not spell
    exactly; otherwise None.
    """
    states: TextStates | None = field(default=None, compare=False, repr=False)
    authors: UInt8[Tensor, " T"] | None = None
    """The author of each token as an index into `AUTHORS`; None if one author wrote all."""
    rounds: tuple[DraftRound, ...] = ()
    """The rounds of a completion that was decoded with a drafter."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer of a scorer about one rollout: one number, or None if it cannot decide.

    `tokens` holds one number per token, such as an advantage, if the scorer judges single tokens.
    """

    value: float | None
    tokens: Float[Tensor, " T"] | None = None
    rejected: tuple[str, ...] = ()
    """The faults of the scorer's own judgement, which this one replaces; see `practicum.ports.gate`."""


@dataclass(frozen=True, slots=True)
class SearchStep:
    """One step of an answer that a tree search found: its node, its tokens and its value.

    `node` names the node that the step ends at, `0.2.1` the second child of the third child of the
    root. `reward` is the mean reward of the `visits` answers through it, or None without any, and
    `value` is the same mean with a scorer's value as one additional answer, which guided the
    search.
    """

    node: str
    tokens: int
    visits: int
    value: float | None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of one prompt, token for token as sampled; its text is never tokenized again.

    `loss_mask` is True at the supervised tokens, and `source` is who wrote these. `sample` numbers
    the completions of one prompt within a step: (prompt.id, sample) names the rollout, prompt.id
    its group. Unknown log-probabilities, such as the student's for a dataset's tokens, are NaN in
    `policy_logprobs` and 0 in `sampling_logprobs` (a behaviour probability of 1). `candidates` are
    the student's K most likely tokens at each position, for teachers that need a list of tokens to
    score.

    `authors` holds the author of each token as an index into `AUTHORS`; None means that `source`
    wrote all of them. `turns` are the turns of a conversation with an environment, in order; they
    are empty for a single answer. `notes` are named texts about the rollout, such as an
    environment's feedback; a privileged teacher may show them. `steps` are the steps that a tree
    search kept, starting at the first token; the tokens after them belong to a rejected step.
    `reward` is the verifier's, and `judgements` are the scorers', by the names that the recipe
    gives them. `states` are the states that the student computed while it generated the text, for
    the update of its step. `versions` holds each token's policy version; `policy_version` is the
    oldest version, or the version of all tokens without `versions`. With `opens_thoughts` the text
    begins inside thoughts. `rejected` are kinds of refused values. `rounds` are the rounds of
    speculative decoding that wrote the tokens, if a drafter took part.
    """

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    tokens: Int[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    policy_version: int
    stop_reason: StopReason
    text: str
    sample: int = 0
    reward: float | None = None
    source: Source = "student"
    candidates: Int[Tensor, "T K"] | None = None
    authors: UInt8[Tensor, " T"] | None = None
    turns: tuple[Turn, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    judgements: Mapping[str, Judgement] = field(default_factory=dict)
    steps: tuple[SearchStep, ...] = ()
    states: TextStates | None = field(default=None, compare=False, repr=False)
    versions: Int[Tensor, " T"] | None = None
    opens_thoughts: bool = False
    rejected: tuple[str, ...] = ()
    rounds: tuple[DraftRound, ...] = ()

    @classmethod
    def from_text(cls, prompt: Prompt, *replies: str) -> "Rollout":
        """Return a rollout that has only the student's texts, one per turn, for a task's reward.

        Example: `task.reward(Rollout.from_text(prompt, "8 times 7 is 56"))`.
        """
        none = torch.zeros(0)
        turns = tuple(Turn("assistant", 0, reply) for reply in replies) if len(replies) > 1 else ()
        text = "\n".join(replies)
        return cls(prompt, (), none.long(), none.bool(), none, none, 0, "stop", text, turns=turns)

    @property
    def answer(self) -> str:
        """The text after the model's thoughts, which verifiers read; empty if they never end."""
        return read_answer(self.text, self.opens_thoughts)

    @property
    def replies(self) -> tuple[str, ...]:
        """The text of each of the student's turns, or the full text if there are no turns."""
        if not self.turns:
            return (self.text,)
        return tuple(turn.text for turn in self.turns if turn.role == "assistant")

    @property
    def token_versions(self) -> Int[Tensor, " T"]:
        """The version of the policy at each token."""
        same = torch.full((len(self.tokens),), self.policy_version)
        return same if self.versions is None else self.versions

    def mark_tokens_by(self, author: Author) -> Bool[Tensor, " T"]:
        """Return a mask that is True at the tokens that `author` wrote."""
        if self.authors is None:
            return torch.full(self.loss_mask.shape, self.source == author)
        return self.authors == AUTHORS.index(author)


@runtime_checkable
class HeadLike(Protocol):
    """Turns hidden states into logits: a `Head`, or a head that loads its weights when needed."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        ...

    @property
    def key(self) -> tuple[int, ...]:
        """The identity of the head; hidden states of heads with equal keys are read together."""
        ...

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities of all tokens, in float32."""
        ...

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits, in float32.

        With `room` there is no autograd graph, and the logits may be written into the buffer that
        `room()` returns.
        """
        ...

    def release(self) -> None:
        """Free weights that were loaded only for reading; the next `logprobs` loads them again."""
        ...


@runtime_checkable
class StatesLike(Protocol):
    """Hidden states stored elsewhere until they are read: in another process or on the host."""

    @property
    def finite(self) -> bool:
        """True if every entry was finite where the states were computed."""
        ...

    def __len__(self) -> int: ...

    def fetch(self) -> Float[Tensor, "T D"]:
        """Copy the hidden states to the place where they are read."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherSignal(TokenColumns):
    """The answer of a teacher about one rollout, at each of its T tokens.

    A local teacher gives `hidden` and its `head`, from which every other form can be computed. A
    remote one gives `logprobs` of the sampled tokens and, if it can, its own top candidates. A
    signal without any of them is empty: the rollout is not distilled. `name` identifies one of
    several teachers, and `pool` holds the answers of several at once.

    All ids are the student's. `outside` are the ids that the teacher does not have; the head's last
    column is then the mass of the tokens that only the teacher has. None if both have the same
    vocabulary. `unknown` is True at tokens that the teacher does not have: the signal is undefined
    there.

    A teacher with another tokenizer knows the probability of a span of tokens, not of each token:
    `span_starts` is True at the first token of each span, and the `logprobs` of a span's tokens add
    up to the log-probability of its text. None: each token is a span. `own` is a head over the
    tokens that only the teacher has; the last column of `head` is their sum.

    Further answers for one kind of signal have names: `extras` are columns, and `constants` are
    tensors that all tokens share.
    """

    logprobs: Float[Tensor, " T"] | None = None
    topk_ids: Int[Tensor, "T K"] | None = None
    topk_logprobs: Float[Tensor, "T K"] | None = None
    hidden: Float[Tensor, "T D"] | StatesLike | None = None
    head: HeadLike | None = None
    name: str = ""
    pool: "PooledSignal | None" = None
    outside: Int[Tensor, " M"] | None = None
    unknown: Bool[Tensor, " T"] | None = None
    span_starts: Bool[Tensor, " T"] | None = None
    own: HeadLike | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    shared: ClassVar[frozenset[str]] = frozenset({"outside", "constants"})

    @property
    def states(self) -> Float[Tensor, "T D"] | None:
        """The hidden states in this process; fetches them if they are stored elsewhere."""
        hidden = self.hidden
        return hidden if hidden is None or isinstance(hidden, Tensor) else hidden.fetch()

    def fetch(self) -> "TeacherSignal":
        """Return the signal with all hidden states fetched, a pool's members included."""
        pool = self.pool and self.pool.map_members(TeacherSignal.fetch)
        return replace(self, hidden=self.states, pool=pool)

    @property
    def is_empty(self) -> bool:
        """True if the teacher gave no signal for this rollout."""
        answers = (self.logprobs, self.topk_logprobs, self.hidden, self.pool)
        return all(answer is None for answer in answers)

    def __getitem__(self, part: slice | Int[Tensor, " t"]) -> "TeacherSignal":
        """Return the signal of some of the tokens, with its hidden states fetched."""
        return self.fetch().map_columns(lambda column: select_tokens(column, part))

    @property
    def unknown_tokens(self) -> Bool[Tensor, " T"] | None:
        """True at tokens that the teacher, or one of a pool, does not have; None if it has all."""
        members = (self,) if self.pool is None else self.pool.members
        marks = [member.unknown for member in members if member.unknown is not None]
        return torch.stack(marks).any(dim=0) if marks else None

    @property
    def shared_starts(self) -> Bool[Tensor, " T"] | None:
        """True where spans of all of a pool's members start; None if each token is a span."""
        members = (self,) if self.pool is None else self.pool.members
        starts = [member.span_starts for member in members if member.span_starts is not None]
        return torch.stack(starts).all(dim=0) if starts else None

    @property
    def heads(self) -> tuple[HeadLike, ...]:
        """The heads that read the hidden states, the heads of a pool's members included."""
        members = () if self.pool is None else self.pool.members
        head = () if self.head is None else (self.head,)
        return head + tuple(head for member in members for head in member.heads)


@dataclass(frozen=True, slots=True)
class PooledSignal(TokenColumns):
    """Several teachers' signals on one rollout, and the way to combine them.

    `kind` is their weighted geometric or arithmetic mean, or the sum of one loss per member. No
    member is empty, and each has its `name`. A member with an entropy above `gate` nats at a token
    does not count there; see `practicum.functional.member_weights`.
    """

    kind: Literal["geometric", "arithmetic", "sum"]
    weights: tuple[float, ...]
    members: tuple[TeacherSignal, ...]
    gate: float | None = None

    def map_members(self, change: Callable[[TeacherSignal], TeacherSignal]) -> "PooledSignal":
        """Return the pool with `change` applied to each member."""
        return replace(self, members=tuple(map(change, self.members)))


@dataclass(frozen=True, slots=True)
class Datum:
    """One rollout with the teacher's and the reference's signals, as a training client receives it.

    If several teachers each have a datum for the same rollout, `weight` is this teacher's share.
    `context` are the prompt's tokens in the teacher's context, if a loss term reads them.
    """

    rollout: Rollout
    signal: TeacherSignal
    reference: TeacherSignal = field(default_factory=TeacherSignal)
    weight: float = 1.0
    context: tuple[int, ...] | None = None

    @property
    def shared_starts(self) -> Bool[Tensor, " T"] | None:
        """Return True where spans of teacher and reference start; None if each token is a span."""
        both = (self.signal.shared_starts, self.reference.shared_starts)
        starts = [mask for mask in both if mask is not None]
        return torch.stack(starts).all(dim=0) if starts else None


@dataclass(frozen=True, slots=True)
class TokenRecord(TokenColumns):
    """The per-token numbers of an update, for one or more concatenated rollouts.

    They are NaN at tokens that are not supervised. `teacher_logprobs`, `divergence` and
    `teacher_entropy` (nats) belong to the first loss term. `weight` is the detached loss
    coefficient of the token, summed over the terms. `reverse_kl` is always to the teacher itself,
    independent of the terms.
    """

    logprobs: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    student_entropy: Float[Tensor, " T"]
    teacher_entropy: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    reverse_kl: Float[Tensor, " T"]

    def split(self, rollouts: "Sequence[Rollout]") -> "list[TokenRecord]":
        """Return the record of each rollout."""
        ends = list(accumulate((len(rollout.tokens) for rollout in rollouts), initial=0))
        return [self[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The outcome of `forward_backward`: means over all tokens, and numbers of each token in order.

    `supervised` counts the tokens of each datum with a nonzero loss coefficient after filters,
    weights and advantages. If all counts are 0, the update leaves weights and moments unchanged.
    `head_reads` are the tokens to which another process applied a teacher's head, by the teacher's
    name; in this process, the heads themselves count their tokens.
    """

    metrics: Metrics
    outputs: TokenRecord
    supervised: list[int]
    head_reads: Mapping[str, int] = field(default_factory=dict)

    def add_losses(self, name: str, *later: "ForwardResult") -> "ForwardResult":
        """Add the tokens and losses of later terms to the metrics, after their name."""
        metrics = {
            metric if metric == "nonfinite" else f"{name}_{metric}": value
            for result in later
            for metric, value in result.metrics.items()
            if metric in ("tokens", "nonfinite") or metric.startswith("loss")
        }
        return replace(self, metrics=self.metrics | metrics)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The rollouts of a step, the per-token numbers of its update, and its metrics."""

    step: int
    rollouts: list[Rollout]
    outputs: TokenRecord
    metrics: Metrics


class FrozenConfig(BaseModel):
    """Settings that never change once they are read; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
