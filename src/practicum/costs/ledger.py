"""Who was asked for what, phase by phase: the ledger of a run.

Everything but bytes is counted from the requests, never from a clock, so a resumed run counts the same. Bytes to and from
other processes depend on what had to be asked again, so they are taken apart, and stand where seconds stand. A teacher whose
answers are kept on disk is counted as if it were asked each time, for what is found there depends on what ran before.
Micro-batches that did not fit in memory and were begun anew are counted once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from practicum.costs.segments import SHORTEST_SHARED_PREFIX
from practicum.costs.shape import ModelDims, count_read_tokens
from practicum.types import HeadLike, Metrics

Phase = Literal["sample", "score", "update"]
PHASES: tuple[Phase, ...] = ("sample", "score", "update")

UNITS, NEWEST = ("flops", "tokens", "seconds"), 10
"""What a run spends, and how many of its newest steps foretell what the next one takes."""

WIRE_BYTES = "wire_bytes"
"""The one count that is not the same in a run that was resumed."""

STUDENT = "student"
"""The name of the model that learns; all others are scorers."""

Texts = Sequence[tuple[tuple[int, ...], int]]
"""Texts as a prompt's tokens and the number of tokens after it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one model did in one phase.

    `tokens` were drawn, scored or learned from; `prompt_tokens` were read before them; `wire_bytes` went to another process and
    back.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    flops: int = 0
    wire_bytes: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.tokens + other.tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.flops + other.flops,
            self.wire_bytes + other.wire_bytes,
        )


Lap = dict[tuple[Phase, str], Usage]
"""The work of each model in each phase."""

_THREAD_USAGE: ContextVar[Lap | None] = ContextVar("apart", default=None)
"""Where a thread that works ahead writes its work down."""


class Ledger:
    """The work of each model in each phase since the last `take`; `shapes` are the models by name, as far as they are known."""

    def __init__(self) -> None:
        self.shapes: dict[str, ModelDims] = {}
        self._names: dict[str, None] = {}
        self._work: Lap = {}

    def meter(self, name: str) -> "Meter":
        """What counts the work of one model: `student`, `teacher`, `teacher/math`, `reference`, ..."""
        self._names[name] = None
        return Meter(self, name)

    def add(self, phase: Phase, name: str, work: Usage) -> None:
        """Count some work."""
        apart = _THREAD_USAGE.get()
        counts = self._work if apart is None else apart
        counts[phase, name] = counts.get((phase, name), Usage()) + work

    @contextmanager
    def record_separately(self) -> Iterator[Lap]:
        """Within the block, in this thread, work is counted in a lap of its own, to be put in when its step is learned from."""
        lap: Lap = {}
        token = _THREAD_USAGE.set(lap)
        try:
            yield lap
        finally:
            _THREAD_USAGE.reset(token)

    def put(self, lap: Lap) -> None:
        """Count the work of a lap."""
        for (phase, name), work in lap.items():
            self.add(phase, name, work)

    def take_bytes(self) -> Metrics:
        """`wire_bytes`, those sent and received since the last `take`; to be asked before it."""
        return {WIRE_BYTES: float(_sum(self._work.values()).wire_bytes)}

    def take(self) -> Metrics:
        """The columns of what was counted since the last time; see `cost_metrics`."""
        work, self._work = self._work, {}
        return cost_metrics(work, [name for name in self._names if name != STUDENT])


@dataclass(frozen=True, slots=True)
class Meter:
    """Counts the work of one model; of a model whose shape is not known, the tokens alone."""

    ledger: Ledger
    name: str

    def count_sampled(self, texts: Texts) -> None:
        """It drew so many tokens after each prompt."""
        self._read("sample", texts, heads=True, shortest=0)

    def scored(self, texts: Texts, *, heads: bool) -> None:
        """It scored so many tokens after each prompt; `heads`: up to their log-probabilities, else to the hidden states."""
        self._read("score", texts, heads=heads)

    def count_head(self, tokens: int) -> None:
        """Its head was applied to hidden states that it gave, wherever that took place."""
        shape = self.ledger.shapes.get(self.name)
        self.ledger.add(
            "score", self.name, Usage(flops=0 if shape is None else shape.logits(tokens))
        )

    def sent(self, phase: Phase, wire_bytes: int) -> None:
        """So many bytes went to the process that it runs in, and came back."""
        self.ledger.add(phase, self.name, Usage(wire_bytes=wire_bytes))

    def _read(
        self, phase: Phase, texts: Texts, *, heads: bool, shortest: int = SHORTEST_SHARED_PREFIX
    ) -> None:
        read = count_read_tokens(texts, shortest)
        tokens = sum(count for _, count in texts)
        shape = self.ledger.shapes.get(self.name)
        flops = 0
        if shape is not None:
            flops = shape.hidden(read.tokens, read.contexts) + (
                shape.logits(tokens) if heads else 0
            )
        self.ledger.add(phase, self.name, Usage(tokens, read.prompt_tokens, flops))


def _ignore(tokens: int) -> None:
    pass


class MeteredHead:
    """A head whose products are counted where they take place; see `practicum.types.HeadLike`.

    `name` is that of the model whose head it is.
    """

    def __init__(self, head: HeadLike, name: str, count: Callable[[int], None]) -> None:
        self.bare = head
        self.name = name
        self._count = count

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process nobody counts, unless somebody there does: see `practicum.ports.metering.count_heads`."""
        return MeteredHead, (self.bare, self.name, _ignore)

    @property
    def vocab_size(self) -> int:
        """How many tokens it tells apart."""
        return self.bare.vocab_size

    @cached_property
    def key(self) -> tuple[int, ...]:
        """That of the head inside, which is asked for every rollout and never changes."""
        return self.bare.key

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Log-probabilities of the tokens."""
        self._count(hidden[..., 0].numel())
        return self.bare.logprobs(hidden)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Their logits."""
        self._count(hidden[..., 0].numel())
        return self.bare.logits(hidden, room)

    def release(self) -> None:
        """Let the head inside go."""
        self.bare.release()


def cost_metrics(work: Mapping[tuple[Phase, str], Usage], scorers: Sequence[str]) -> Metrics:
    """The columns of a row of metrics; where there are several scorers, also tokens and operations of each.

    `cost/sampled_tokens` the student drew, after reading `cost/prompt_tokens`; `cost/teacher_prompt_tokens` teachers drew;
    `cost/scored_tokens` they scored, after reading `cost/scored_prompt_tokens`; `cost/update_tokens` were learned from.
    """
    of_phase = {
        phase: [(name, done) for (at, name), done in work.items() if at == phase]
        for phase in PHASES
    }
    own = _sum(done for name, done in of_phase["sample"] if name == STUDENT)
    scored = _sum(done for _, done in of_phase["score"])
    flops = {phase: _sum(done for _, done in of_phase[phase]).flops for phase in PHASES}
    columns = {
        "sampled_tokens": own.tokens,
        "prompt_tokens": own.prompt_tokens,
        "teacher_tokens": sum(done.tokens for name, done in of_phase["sample"] if name != STUDENT),
        "scored_tokens": scored.tokens,
        "scored_prompt_tokens": scored.prompt_tokens,
        "update_tokens": _sum(done for _, done in of_phase["update"]).tokens,
        **{f"flops_{phase}": number for phase, number in flops.items()},
        "flops": sum(flops.values()),
    }
    if len(scorers) > 1:
        for name in scorers:
            done = work.get(("score", name), Usage())
            short = name.removeprefix("teacher/")
            columns |= {f"scored_tokens/{short}": done.tokens, f"flops_score/{short}": done.flops}
    return {f"cost/{name}": float(number) for name, number in columns.items()}


def _sum(work: Iterable[Usage]) -> Usage:
    return sum(work, Usage())


def cost_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of all rows summed, by phase; every number is a sum over the rows of metrics.jsonl."""
    total: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("cost/"):
                key = name.removeprefix("cost/")
                total[key] = total.get(key, 0.0) + value
    of_scorer = [
        name.removeprefix("scored_tokens/") for name in total if name.startswith("scored_tokens/")
    ]

    def numbers(**columns: str) -> dict[str, float]:
        return {name: total.get(column, 0.0) for name, column in columns.items()}

    return {
        "flops": total.get("flops", 0.0),
        "sample": numbers(
            flops="flops_sample",
            tokens="sampled_tokens",
            prompt_tokens="prompt_tokens",
            teacher_tokens="teacher_tokens",
        ),
        "score": {
            **numbers(
                flops="flops_score", tokens="scored_tokens", prompt_tokens="scored_prompt_tokens"
            ),
            "teachers": {
                name: numbers(tokens=f"scored_tokens/{name}", flops=f"flops_score/{name}")
                for name in of_scorer
            },
        },
        "update": numbers(flops="flops_update", tokens="update_tokens"),
    }


class BudgetTracker:
    """What a run has spent so far, and the most that one of its newest steps did: operations, tokens learned from, seconds.

    `wire_bytes` are those to and from other processes.
    """

    def __init__(self) -> None:
        self.wire_bytes = 0.0
        self.spent = dict.fromkeys(UNITS, 0.0)
        self._steps: dict[str, deque[float]] = {unit: deque(maxlen=NEWEST) for unit in UNITS}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Count a step, or a row of metrics.jsonl or of timings.jsonl about it."""
        self.wire_bytes += metrics.get(WIRE_BYTES, 0.0)
        seconds = [value for name, value in metrics.items() if name.startswith("seconds_")]
        found = {"flops": metrics.get("cost/flops"), "tokens": metrics.get("tokens")}
        found["seconds"] = sum(seconds) if seconds else None
        for unit, amount in found.items():
            if amount is not None:
                self.spent[unit] += amount
                self._steps[unit].append(amount)

    @property
    def next_step(self) -> dict[str, float]:
        """What the next step is expected to take: as much as the dearest of the newest; nothing before the first."""
        return {unit: max(steps, default=0.0) for unit, steps in self._steps.items()}
