"""The ledger of a run: the tokens and operations of each model, phase by phase.

Everything except bytes is counted from the requests, never from a clock, so a resumed run has the
same counts. Bytes to and from other processes depend on repeated requests, so they are recorded
separately, in the row of the seconds. A teacher with a cache on disk is counted as if every request
reached it, because cache hits depend on earlier runs. A micro-batch that is repeated at half the
size counts once.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import chain
from operator import add
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from practicum.costs.shape import ModelDims, ReadTokens, count_continued_tokens, count_read_tokens
from practicum.types import HeadLike, Metrics

Phase = Literal["sample", "score", "update"]
PHASES: tuple[Phase, ...] = ("sample", "score", "update")

UNITS, NEWEST = ("flops", "tokens", "seconds"), 10
"""The units of spending, and the number of newest steps that predict the next one."""

WIRE_BYTES = "wire_bytes"
"""The only count that differs in a resumed run."""

STUDENT = "student"
"""The name of the model that is trained; all others are scorers."""

Texts = Sequence[tuple[tuple[int, ...], int]]
"""Texts, each as the prompt's tokens and the number of tokens after them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The work of one model in one phase.

    `tokens` counts the tokens that were sampled, scored or trained on, `prompt_tokens` the prompts
    before them, and `wire_bytes` the bytes to and from another process.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    flops: int = 0
    wire_bytes: int = 0

    def __add__(self, usage: "Usage") -> "Usage":
        return Usage(*map(add, astuple(self), astuple(usage)))


UsageByPhase = dict[tuple[Phase, str], Usage]
"""The usage of each model in each phase."""

UsageRow = tuple[Phase, str, int, int, int, int]
"""The work of one model in one phase as JSON data: phase, name, and the numbers of `Usage`."""


def write_usage(usage: UsageByPhase) -> list[UsageRow]:
    """Return usage as JSON data."""
    return [
        (phase, name, part.tokens, part.prompt_tokens, part.flops, part.wire_bytes)
        for (phase, name), part in usage.items()
    ]


def read_usage(rows: Iterable[UsageRow]) -> UsageByPhase:
    """Read back the result of `write_usage`."""
    return {(phase, name): Usage(*numbers) for phase, name, *numbers in rows}


_THREAD_USAGE: ContextVar[UsageByPhase | None] = ContextVar("thread_usage", default=None)
"""The record of a thread that works ahead of the loop; None elsewhere."""


class Ledger:
    """The usage of each model and phase since the last `take`.

    `dims` holds the known dimensions of the models by name.
    """

    def __init__(self) -> None:
        self.dims: dict[str, ModelDims] = {}
        self._names: dict[str, None] = {}
        self._usage: UsageByPhase = {}

    def meter(self, name: str) -> "Meter":
        """Return the meter of one model: `student`, `teacher`, `teacher/math`, `reference`, ..."""
        self._names[name] = None
        return Meter(self, name)

    def add(self, phase: Phase, name: str, usage: Usage) -> None:
        """Add usage of one model in one phase."""
        # The usage of a step sampled ahead belongs to the row of the step that trains on it, so it
        # is kept separately: the counts of a row do not depend on how far ahead the thread is.
        thread_usage = _THREAD_USAGE.get()
        total = self._usage if thread_usage is None else thread_usage
        total[phase, name] = total.get((phase, name), Usage()) + usage

    @contextmanager
    def record_separately(self) -> Iterator[UsageByPhase]:
        """Record this thread's usage in the block separately, to `put` it at its own step."""
        lap: UsageByPhase = {}
        token = _THREAD_USAGE.set(lap)
        try:
            yield lap
        finally:
            _THREAD_USAGE.reset(token)

    def merge(self, lap: UsageByPhase) -> None:
        """Add usage that was recorded separately."""
        for (phase, name), usage in lap.items():
            self.add(phase, name, usage)

    def take_bytes(self) -> Metrics:
        """Return `wire_bytes`, the bytes since the last `take`; call it before `take`."""
        return {WIRE_BYTES: float(_sum(self._usage.values()).wire_bytes)}

    def take(self) -> Metrics:
        """Return the metrics of the usage since the last call and reset it; see `build_cost_metrics`."""
        usage, self._usage = self._usage, {}
        return build_cost_metrics(usage, [name for name in self._names if name != STUDENT])


@dataclass(frozen=True, slots=True)
class Meter:
    """The counter of one model's work; it counts only tokens if the model's size is unknown."""

    ledger: Ledger
    name: str

    def declare_size(self, parameters: int) -> None:
        """Count two operations per token and parameter: the size is known, the layers are not."""
        # Attention is left out: layers and heads are not known.
        self.ledger.dims[self.name] = ModelDims(parameters, parameters, 0, 0, 0, 0, 0, 0)

    def count_sampled(self, texts: Texts) -> None:
        """Count completions that the model sampled after these prompts."""
        # A prompt is prefilled once for all of its completions, however short it is.
        self._read("sample", texts, heads=True, decoded=True)

    def count_continued(self, texts: Sequence[tuple[int, int, int]]) -> None:
        """Count completions of texts that continue earlier texts; see `count_continued_tokens`."""
        self._add(
            "sample", count_continued_tokens(texts), sum(text[2] for text in texts), heads=True
        )

    def count_scored(self, texts: Texts, *, heads: bool) -> None:
        """Count scored texts: up to log-probabilities with `heads`, else up to hidden states."""
        self._read("score", texts, heads=heads)

    def count_head(self, tokens: int) -> None:
        """Count the head's product with hidden states of this model, in any process."""
        shape = self.ledger.dims.get(self.name)
        flops = 0 if shape is None else shape.count_head_flops(tokens)
        self.ledger.add("score", self.name, Usage(flops=flops))

    def count_bytes(self, phase: Phase, wire_bytes: int) -> None:
        """Count the bytes sent to and from the model's process."""
        self.ledger.add(phase, self.name, Usage(wire_bytes=wire_bytes))

    def _read(self, phase: Phase, texts: Texts, *, heads: bool, decoded: bool = False) -> None:
        read = count_read_tokens(texts, decoded=decoded)
        self._add(phase, read, sum(count for _, count in texts), heads=heads)

    def _add(self, phase: Phase, read: ReadTokens, tokens: int, *, heads: bool) -> None:
        shape = self.ledger.dims.get(self.name)
        flops = 0 if shape is None else shape.count_hidden_flops(read.tokens, read.contexts)
        if shape is not None and heads:
            flops += shape.count_head_flops(tokens)
        self.ledger.add(phase, self.name, Usage(tokens, read.prompt_tokens, flops))


def _ignore(tokens: int) -> None:
    pass


class MeteredHead:
    """A head that counts its products where they are computed; see `practicum.types.HeadLike`.

    `name` is the name of the model that the head belongs to.
    """

    def __init__(self, head: HeadLike, name: str, count: Callable[[int], None]) -> None:
        self.bare = head
        self.name = name
        self._count = count

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop the counter in another process; `practicum.ports.metering.count_heads` adds one."""
        return MeteredHead, (self.bare, self.name, _ignore)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.bare.vocab_size

    @cached_property
    def key(self) -> tuple[int, ...]:
        """The key of the wrapped head, cached because each rollout needs it."""
        return self.bare.key

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return log-probabilities of the tokens."""
        self._count(hidden[..., 0].numel())
        return self.bare.logprobs(hidden)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits."""
        self._count(hidden[..., 0].numel())
        return self.bare.logits(hidden, room)

    def release(self) -> None:
        """Release the wrapped head."""
        self.bare.release()


def build_cost_metrics(usage: Mapping[tuple[Phase, str], Usage], scorers: Sequence[str]) -> Metrics:
    """Return the cost columns of a row of metrics; if there are several scorers, each also has its
    own columns.

    The student sampled `cost/sampled_tokens` after `cost/prompt_tokens`, teachers sampled
    `cost/teacher_tokens`; scorers scored `cost/scored_tokens` after `cost/scored_prompt_tokens`;
    `cost/update_tokens` were trained on.
    """
    totals = {
        phase: _sum(amount for (at, _), amount in usage.items() if at == phase) for phase in PHASES
    }
    student = usage.get(("sample", STUDENT), Usage())
    columns = {
        "sampled_tokens": student.tokens,
        "prompt_tokens": student.prompt_tokens,
        "teacher_tokens": totals["sample"].tokens - student.tokens,
        "scored_tokens": totals["score"].tokens,
        "scored_prompt_tokens": totals["score"].prompt_tokens,
        "update_tokens": totals["update"].tokens,
        **{f"flops_{phase}": total.flops for phase, total in totals.items()},
        "flops": _sum(totals.values()).flops,
    }
    if len(scorers) > 1:
        for name in scorers:
            score = usage.get(("score", name), Usage())
            short = name.removeprefix("teacher/")
            columns |= {f"scored_tokens/{short}": score.tokens, f"flops_score/{short}": score.flops}
    return {f"cost/{name}": float(number) for name, number in columns.items()}


def _sum(amounts: Iterable[Usage]) -> Usage:
    return sum(amounts, Usage())


def summarize_costs(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cost columns summed over rows of metrics.jsonl, by phase."""
    total: dict[str, float] = defaultdict(float)
    for name, number in chain.from_iterable(row.items() for row in rows):
        if name.startswith("cost/"):
            total[name.removeprefix("cost/")] += number
    scored = "scored_tokens/"
    scorers = [name.removeprefix(scored) for name in total if name.startswith(scored)]

    def select(**columns: str) -> dict[str, float]:
        return {name: total.get(column, 0.0) for name, column in columns.items()}

    prompt_columns = select(prompt_tokens="prompt_tokens", teacher_tokens="teacher_tokens")
    read = select(tokens="scored_tokens", prompt_tokens="scored_prompt_tokens")
    by_teacher = {
        name: select(tokens=f"scored_tokens/{name}", flops=f"flops_score/{name}")
        for name in scorers
    }
    return {
        "flops": total.get("flops", 0.0),
        "sample": select(flops="flops_sample", tokens="sampled_tokens") | prompt_columns,
        "score": {**select(flops="flops_score"), **read, "teachers": by_teacher},
        "update": select(flops="flops_update", tokens="update_tokens"),
    }


class BudgetTracker:
    """The spending of a run so far, and the most expensive of its newest steps.

    Spending is counted in operations, tokens trained on and seconds; `wire_bytes` are the bytes to
    and from other processes.
    """

    def __init__(self) -> None:
        self.wire_bytes = 0.0
        self.totals = dict.fromkeys(UNITS, 0.0)
        self._steps: dict[str, deque[float]] = {unit: deque(maxlen=NEWEST) for unit in UNITS}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add a step, or a row of metrics.jsonl or of timings.jsonl about it."""
        self.wire_bytes += metrics.get(WIRE_BYTES, 0.0)
        seconds = [value for name, value in metrics.items() if name.startswith("seconds_")]
        amounts = {
            "flops": metrics.get("cost/flops"),
            "tokens": metrics.get("tokens"),
            "seconds": sum(seconds) if seconds else None,
        }
        for unit, amount in amounts.items():
            if amount is not None:
                self.totals[unit] += amount
                self._steps[unit].append(amount)

    @property
    def next_step(self) -> dict[str, float]:
        """The expected cost of the next step: the largest of the newest; 0 before the first."""
        return {unit: max(steps, default=0.0) for unit, steps in self._steps.items()}
