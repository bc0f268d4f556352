"""The nouns. Every value that flows through a step is a frozen dataclass; every tensor carries its shape.

Axes: B rollouts, T tokens of one completion, K candidates, V vocabulary, D hidden width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

StopReason = Literal["stop", "length", "error", "timeout"]
"""Why a completion ended: its stop token, the limit of its tokens, or an environment that failed or took too long."""

FAILURES: tuple[StopReason, ...] = ("error", "timeout")
"""The stop reasons of a conversation that its environment broke off."""

Source = Literal["student", "dataset", "teacher"]
Author = Literal["student", "dataset", "teacher", "environment"]
AUTHORS: tuple[Author, ...] = get_args(Author)
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, for example `Message("user", "What is 8 times 7?")`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as text: what a task yields, before any tokenizer has seen it.

    `answer` is what a verifier compares with, `response` a whole worked answer to imitate (the answer where there is
    none). `privileged` holds the fields that only a teacher may see (a solution, a hint, a document); `domain` and
    `teacher` are labels for reporting and for routing.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    response: str | None = None
    domain: str | None = None
    teacher: str | None = None
    privileged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample: `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 keep every token.

    A completion stops at one of the `stop_ids`, and where it has come to one of the `stop_texts`, which may begin and end within
    a token; `practicum.text.stop_check` looks for both.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()

    def stops(self, tokens: Sequence[int]) -> bool:
        """Return whether a completion stops at the last of its tokens, however many it may have."""
        return tokens[-1] in self.stop_ids


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to draw: the prompt's tokens and the seed of its own random stream."""

    prompt_tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One completion to score: the log-probabilities of `tokens` after `prompt_tokens`, and of `candidates` at each of them."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    candidates: Int[Tensor, "T K"] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """One drawn completion. The stop token, where there is one, is its last token.

    `sampling_logprobs` are under the distribution that was sampled from (after temperature, top-k and top-p);
    `policy_logprobs` are under the model's own, untempered distribution.
    """

    tokens: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: the role that speaks, as in `Message`, the number of its tokens, and its text.

    The tokens of an environment's turn include what the chat template writes around its text.
    """

    role: str
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of one prompt, token for token as it was sampled; it is never tokenised again.

    `loss_mask` is True where the token is learned from. `sample` numbers the completions of one prompt within a step, so
    (prompt.id, sample) names the rollout and prompt.id names its group. `source` is who wrote the tokens that are
    learned from; log-probabilities that nobody knows, such as the student's own of a dataset's tokens, are NaN in
    `policy_logprobs` and 0 in `sampling_logprobs` (a behaviour probability of 1). `candidates` are the student's likeliest
    tokens at each position, where a teacher has to be told which tokens to score.

    `authors` gives the writer of each token as its place in `AUTHORS`; None: `source` wrote them all. `turns` are those of a
    conversation with an environment, in order; a completion that is one answer has none. `notes` are texts about the rollout
    that were made on the way, by name, such as an environment's feedback; a privileged teacher may show them.
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

    @classmethod
    def from_text(cls, prompt: Prompt, *replies: str) -> "Rollout":
        """Return a rollout of which only the student's texts are known, one a turn: what a task's reward reads.

        Example: `task.reward(Rollout.from_text(prompt, "8 times 7 is 56"))`.
        """
        none = torch.zeros(0)
        turns = tuple(Turn("assistant", 0, reply) for reply in replies) if len(replies) > 1 else ()
        text = "\n".join(replies)
        return cls(prompt, (), none.long(), none.bool(), none, none, 0, "stop", text, turns=turns)

    @property
    def replies(self) -> tuple[str, ...]:
        """The text of each turn of the student's side; the whole text where there are no turns."""
        return (
            tuple(turn.text for turn in self.turns if turn.role == "assistant")
            if self.turns
            else (self.text,)
        )

    def written_by(self, author: Author) -> Bool[Tensor, " T"]:
        """Return True at the tokens that `author` wrote."""
        if self.authors is None:
            return torch.full(self.loss_mask.shape, self.source == author)
        return self.authors == AUTHORS.index(author)


@runtime_checkable
class HeadLike(Protocol):
    """What reads hidden states: a `Head`, or one whose weights are elsewhere until they are needed."""

    @property
    def vocab_size(self) -> int:
        """How many tokens it tells apart."""
        ...

    @property
    def key(self) -> tuple[int, ...]:
        """What tells two heads apart: hidden states are read together where the keys of their heads are equal."""
        ...

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Log-probabilities of the tokens, in float32."""
        ...

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Their logits, in float32; with `room` without a graph, and in the memory it makes unless there is a better place."""
        ...

    def release(self) -> None:
        """Let go of what was only brought here to be read; the next `logprobs` brings it back."""
        ...


@runtime_checkable
class StatesLike(Protocol):
    """Hidden states that are in another process until they are read.

    `finite` is what was found where they were made: whether every entry is a number.
    """

    finite: bool

    def __len__(self) -> int: ...

    def fetch(self) -> Float[Tensor, "T D"]:
        """Bring them here."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherSignal:
    """What a teacher says about one rollout, at each of its T tokens.

    A local teacher answers with `hidden` and its `head`, from which every other form can be computed; a remote one
    answers with `logprobs` of the sampled tokens and, where it can, with its own top candidates. A signal with none of
    them is silence: the rollout is not distilled. `name` says which of several teachers it was; `pool` is the answer of
    several at once.
    """

    logprobs: Float[Tensor, " T"] | None = None
    topk_ids: Int[Tensor, "T K"] | None = None
    topk_logprobs: Float[Tensor, "T K"] | None = None
    hidden: Float[Tensor, "T D"] | StatesLike | None = None
    head: HeadLike | None = None
    name: str = ""
    pool: "PooledSignal | None" = None

    @property
    def states(self) -> Float[Tensor, "T D"] | None:
        """The hidden states, brought here where they are elsewhere."""
        return (
            self.hidden
            if self.hidden is None or isinstance(self.hidden, Tensor)
            else self.hidden.fetch()
        )

    def fetch(self) -> "TeacherSignal":
        """Return the signal with all hidden states brought here, those of a pool's members too."""
        pool = (
            None
            if self.pool is None
            else replace(self.pool, members=tuple(m.fetch() for m in self.pool.members))
        )
        return replace(self, hidden=self.states, pool=pool)

    @property
    def silent(self) -> bool:
        """Whether the teacher said nothing about this rollout."""
        return (
            self.logprobs is None
            and self.topk_logprobs is None
            and self.hidden is None
            and self.pool is None
        )

    def __getitem__(self, part: slice) -> "TeacherSignal":
        """The same about some of the tokens."""
        tensors = {
            name: None if tensor is None else tensor[part]
            for name, tensor in (
                ("logprobs", self.logprobs),
                ("topk_ids", self.topk_ids),
                ("topk_logprobs", self.topk_logprobs),
                ("hidden", self.states),
            )
        }
        pool = (
            None
            if self.pool is None
            else replace(self.pool, members=tuple(m[part] for m in self.pool.members))
        )
        return replace(self, **tensors, pool=pool)

    @property
    def heads(self) -> tuple[HeadLike, ...]:
        """The heads that read its hidden states: its own, and those of a pool's members."""
        members = () if self.pool is None else self.pool.members
        own = () if self.head is None else (self.head,)
        return own + tuple(head for member in members for head in member.heads)


def fetch_states(signals: Sequence[TeacherSignal]) -> list[Float[Tensor, "T D"] | None]:
    """Return the hidden states of each signal, brought here where they are elsewhere."""
    return [signal.states for signal in signals]


@dataclass(frozen=True, slots=True)
class PooledSignal:
    """Several teachers on one rollout: their weighted geometric or arithmetic mean, or the sum of their own losses.

    All `members` speak, and each has its `name`. A member whose own entropy at a token exceeds `gate` nats does not count
    there; see `practicum.functional.member_weights`.
    """

    kind: Literal["geometric", "arithmetic", "sum"]
    weights: tuple[float, ...]
    members: tuple[TeacherSignal, ...]
    gate: float | None = None


@dataclass(frozen=True, slots=True)
class Datum:
    """What crosses the boundary to a training client: a rollout, what its teacher said, and what the reference said.

    `weight` is the share of this teacher where several each have a datum of their own for the same rollout.
    """

    rollout: Rollout
    signal: TeacherSignal
    reference: TeacherSignal = field(default_factory=TeacherSignal)
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Report what the objective computed at each token of some rollouts, end to end; NaN at tokens that were not learned from.

    `teacher_logprobs`, `divergence` and `teacher_entropy` (nats) are
    those of the first term; `weight` is the coefficient that the token side gave the token, summed over the terms;
    `reverse_kl` is to the teacher itself, whatever the terms.
    """

    logprobs: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    student_entropy: Float[Tensor, " T"]
    teacher_entropy: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    reverse_kl: Float[Tensor, " T"]

    def columns(self) -> list[Float[Tensor, " T"]]:
        """Return the columns in the order of the fields."""
        return [getattr(self, each.name) for each in fields(self)]

    def split(self, rollouts: "Sequence[Rollout]") -> "list[TokenRecord]":
        """Return the outputs of each rollout."""
        parts = [
            column.split([len(rollout.tokens) for rollout in rollouts]) for column in self.columns()
        ]
        return [TokenRecord(*columns) for columns in zip(*parts, strict=True)]

    @classmethod
    def join(cls, outputs: "Sequence[TokenRecord]") -> "TokenRecord":
        """Return the outputs of several parts, end to end."""
        return cls(*map(torch.cat, zip(*(part.columns() for part in outputs), strict=True)))


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The outcome of `forward_backward`: means over all tokens, and numbers of each token, in the order of the data.

    `supervised` counts the tokens of each datum that the loss gives a coefficient other than 0, after filters, weights and
    advantages. An update in which all of them are 0 leaves weights and moments as they are. `head_reads` are the tokens that
    teachers' heads were applied to in another process, by the teacher's name; in this one they are counted where they are read.
    """

    metrics: Metrics
    outputs: TokenRecord
    supervised: list[int]
    head_reads: Mapping[str, int] = field(default_factory=dict)
