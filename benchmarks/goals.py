"""Define the goals: the measured quantity, its target, and the comparison of a reading with it.

A reading is a median with its smallest and largest round. A goal is missed only if its best round also misses it. If the rounds
disagree and are further apart than `SPREAD` of their median, the measurement is void.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

SPREAD = 0.15
IDLE_LOAD = 1.5
"""The load average up to which only the measurement itself keeps the machine busy."""
HEAD = ("goal", "measured", "threshold", "stands", "rounds", "spread")


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal; `sense` says on which side of the threshold (or between which two) a reading has to be."""

    key: str
    about: str
    sense: Literal["most", "least", "between"]
    threshold: float
    upper: float = 0.0
    unit: str = ""
    quiet: float | None = None
    """The threshold on an idle core with AVX-512; None: the same everywhere."""

    @property
    def bound(self) -> str:
        """The threshold as a reader writes it."""
        if self.sense == "between":
            return f"{self.threshold:g} to {self.upper:g}{self.unit}"
        sign = "≤" if self.sense == "most" else "≥"
        quiet = "" if self.quiet is None else f"; {self.quiet:g} on an idle AVX-512 core"
        return f"{sign} {self.threshold:g}{self.unit}{quiet}"

    def on(self, line: Mapping[str, Any]) -> "Goal":
        """Return the goal with the threshold for the machine of a line."""
        is_quiet = max(line["load"]) <= IDLE_LOAD and line["machine"].get("vectors") == "AVX512"
        if self.quiet is None or not is_quiet:
            return self
        return replace(self, threshold=self.quiet, quiet=None)

    def accepts(self, value: float) -> bool:
        """Return True if a value is on the right side."""
        if self.sense == "between":
            return self.threshold <= value <= self.upper
        return value <= self.threshold if self.sense == "most" else value >= self.threshold


GOALS: dict[str, tuple[Goal, ...]] = {
    "The loss": (
        Goal(
            "loss.products.49152",
            "time / its four matrix products, V = 49,152, T = 2,048",
            "most",
            1.35,
        ),
        Goal(
            "loss.products.151936",
            "time / its four matrix products, V = 151,936, T = 512",
            "most",
            1.35,
        ),
        Goal("loss.trl", "time / the kernel of TRL 1.16, V = 49,152, T = 2,048", "most", 0.40),
        Goal("loss.naive", "time / whole [T, V] matrices, V = 49,152, T = 2,048", "most", 0.75),
        Goal("loss.liger", "time / LigerFusedLinearJSDLoss, V = 49,152, T = 2,048", "most", 0.70),
        Goal("loss.memory", "extra peak memory, V = 49,152, T = 8,192", "most", 256, unit=" MiB"),
        Goal(
            "loss.memory_growth",
            "its growth from T = 2,048 to 8,192 a token",
            "most",
            6144,
            unit=" B",
        ),
        Goal("loss.forward_kl", "forward KL / reverse KL", "most", 1.15),
        Goal("loss.tvd", "total variation / reverse KL", "most", 1.20),
        Goal("loss.jsd", "Jensen-Shannon / reverse KL", "most", 1.45),
        Goal("loss.sampled", "full vocabulary / only the sampled token", "most", 1.10),
    ),
    "Rollouts": (
        Goal(
            "rollout.fixed",
            "tokens per second / HF generate, 17m, 8 answers of one length",
            "least",
            1.9,
        ),
        Goal(
            "rollout.mixed",
            "tokens per second / HF generate, 17m, mixed lengths, 8 slots",
            "least",
            3.4,
        ),
        Goal("rollout.occupancy", "share of the slots at work there", "least", 0.75),
        Goal("rollout.floor.17m", "a decode step / its floor, 17m, 8 slots", "most", 2.5),
        Goal("rollout.floor.135m", "a decode step / its floor, 135m, 8 slots", "most", 1.6),
        Goal("rollout.draw.8", "share of drawing in a decode step, 17m, 8 slots", "most", 0.12),
        Goal("rollout.draw.32", "share of drawing in a decode step, 17m, 32 slots", "most", 0.12),
        Goal("rollout.draw.64", "share of drawing in a decode step, 17m, 64 slots", "most", 0.12),
        Goal(
            "rollout.flips",
            "share of tokens that another number of slots changes, SmolLM2-135M",
            "most",
            1e-4,
        ),
        Goal("turns.17m", "six turns with the history kept / read again, 17m", "most", 0.8),
        Goal("turns.135m", "six turns with the history kept / read again, 135m", "most", 0.8),
    ),
    "The whole step": (
        Goal(
            "step.fixed.gkd",
            "tokens per second / TRL's GKDTrainer, 8 answers of one length",
            "least",
            2.6,
            quiet=3.5,
        ),
        Goal("step.fixed.distillation", "the same / TRL's DistillationTrainer", "least", 1.9),
        Goal(
            "step.mixed.gkd",
            "tokens per second / GKDTrainer, 32 answers of mixed lengths",
            "least",
            6.0,
            quiet=8.0,
        ),
        Goal("step.mixed.distillation", "the same / DistillationTrainer", "least", 4.5),
        Goal(
            "step.toy.gkd", "tokens per second / GKDTrainer, the toy pair", "least", 1.8, quiet=2.2
        ),
        Goal("step.fixed.memory.gkd", "peak memory / GKDTrainer, one length", "most", 0.5),
        Goal(
            "step.fixed.memory.distillation",
            "peak memory / DistillationTrainer, one length",
            "most",
            0.5,
        ),
        Goal("step.mixed.memory.gkd", "peak memory / GKDTrainer, mixed lengths", "most", 0.5),
        Goal(
            "step.mixed.memory.distillation",
            "peak memory / DistillationTrainer, mixed lengths",
            "most",
            0.5,
        ),
        Goal(
            "step.fixed.roofline",
            "time / what arithmetic and bandwidth allow, one length",
            "most",
            1.9,
        ),
        Goal(
            "step.mixed.roofline",
            "time / what arithmetic and bandwidth allow, mixed lengths",
            "most",
            1.9,
        ),
        Goal(
            "step.toy.roofline",
            "time / what arithmetic and bandwidth allow, the toy pair",
            "most",
            2.0,
        ),
        Goal(
            "step.fixed.framework",
            "share outside the calls of the backend, one length",
            "most",
            0.03,
        ),
        Goal(
            "step.toy.framework",
            "share outside the calls of the backend, the toy pair",
            "most",
            0.08,
        ),
        Goal(
            "step.loss",
            "greatest difference of the loss from TRL's on the same answers",
            "most",
            1e-4,
        ),
    ),
    "The cache of teachers' states": (
        Goal(
            "cache.second",
            "second scoring / the first, over the expected cost of the head",
            "most",
            1.15,
        ),
        Goal(
            "cache.bytes",
            "bytes per token beyond two per number of the hidden state",
            "most",
            16,
            unit=" B",
        ),
        Goal("cache.error", "relative error of the gradient from the cache's format", "most", 3e-3),
    ),
    "Sampling with a drafter": (
        Goal(
            "drafts.speed_1", "tokens per second, `rollout.draft` / without, one text", "least", 1.5
        ),
        Goal(
            "drafts.speed_8",
            "tokens per second, `rollout.draft` with `most_texts: 1` / without, 8 texts at a time",
            "least",
            0.97,
        ),
    ),
    "Several teachers": (
        Goal(
            "teachers.route.time",
            "step, 8 routed teachers / 1, the same tokens, weights resident",
            "most",
            1.10,
        ),
        Goal(
            "teachers.route.memory",
            "peak memory, 8 routed teachers / 1, weights on disk",
            "most",
            1.15,
        ),
        Goal(
            "teachers.sum.time",
            "scoring and loss, 8 summed teachers / 8 times one teacher",
            "most",
            1.05,
        ),
    ),
    "Growth": (
        Goal("scaling.loss.tokens", "loss time as a power of the tokens", "between", 0.95, 1.05),
        Goal(
            "scaling.loss.vocabulary",
            "loss time as a power of the vocabulary",
            "between",
            0.93,
            1.07,
        ),
        Goal(
            "scaling.step.tokens",
            "step time as a power of the tokens, one length",
            "between",
            0.90,
            1.10,
        ),
        Goal(
            "scaling.rollout.prompts",
            "decode time a token as a power of the prompts",
            "between",
            -0.15,
            0.05,
        ),
        Goal(
            "scaling.prefix",
            "a step on the first quarter of each answer / on all of it",
            "most",
            0.3375,
        ),
        # Two processes on two cores then decode 1.7 times the tokens of one.
        Goal(
            "processes.decoding",
            "a token's processor seconds, two decoding processes at once / one",
            "most",
            1.18,
        ),
    ),
    "A long run": (
        Goal(
            "endurance.memory",
            "growth of the resident set from step 500 to 2,000",
            "most",
            16,
            unit=" MiB",
        ),
        Goal("endurance.seconds", "a step before the last / a step after the 500th", "most", 1.1),
    ),
    "Starting": (
        Goal("startup.help", "`practicum --help`, wall", "most", 0.5, unit=" s"),
        Goal("startup.check", "`practicum check quickstart`, processor", "most", 3.0, unit=" s"),
        Goal("startup.first", "the first step beyond a warm one", "most", 2.0, unit=" s"),
    ),
    "The plan": (
        Goal(
            "plan.memory.toy", "peak memory measured / planned, the toy pair", "between", 0.85, 1.15
        ),
        Goal(
            "plan.memory.products",
            "the same, products (SmolLM2-135M)",
            "between",
            0.85,
            1.15,
        ),
        Goal(
            "plan.memory.adapters",
            "the same, with adapters instead of layers",
            "between",
            0.85,
            1.15,
        ),
        Goal(
            "plan.seconds.toy",
            "seconds measured / planned from the step before, the toy pair",
            "between",
            0.75,
            1.25,
        ),
        Goal("plan.seconds.products", "the same, products", "between", 0.75, 1.25),
        Goal(
            "plan.seconds.adapters",
            "the same, with adapters instead of layers",
            "between",
            0.75,
            1.25,
        ),
    ),
    "A cluster": (
        Goal(
            "workers.share",
            "tokens a processor second of two FSDP2 workers / of one, 17m",
            "least",
            0.85,
        ),
        Goal(
            "workers.empty", "eight requests without work to two processes", "most", 50, unit=" ms"
        ),
        Goal(
            "workers.references",
            "192 MiB of hidden states from process to process by reference",
            "least",
            1.0,
            unit=" GB/s",
        ),
    ),
    "A GPU": (
        Goal(
            "gpu.loss.products",
            "loss / its four matrix products, V = 151,936, T = 8,192, bfloat16",
            "most",
            1.45,
        ),
        Goal("gpu.loss.memory", "extra peak memory of the loss there", "most", 1, unit=" GiB"),
        Goal(
            "gpu.update",
            "learned tokens per second, full vocabulary, Qwen3-0.6B, 8k tokens",
            "least",
            26_000,
        ),
        Goal("gpu.update.memory", "peak memory there", "most", 20, unit=" GiB"),
        Goal(
            "gpu.decode", "rollouts / what the bandwidth allows, Qwen3-0.6B, 64 rows", "least", 0.5
        ),
    ),
}
BY_KEY = {goal.key: goal for group in GOALS.values() for goal in group}


def judge_goal(goal: Goal, reading: Mapping[str, float]) -> str:
    """Return the verdict on a reading in words."""
    ends = [goal.accepts(reading[end]) for end in ("least", "greatest")]
    if goal.accepts(reading["median"]):
        word = "pass"
    elif any(ends):
        word = "pass in its best round only"
    else:
        word = "fail"
    agreed = all(ends) or not any(ends)
    if reading["spread"] > SPREAD and not agreed:
        return f"{word}, but void: the rounds differ by {reading['spread']:.0%}"
    return word


def describe_standing(goal: Goal, reading: Mapping[str, float]) -> tuple[str, ...]:
    """Return a row of `HEAD`."""
    return (
        goal.about,
        f"{number(reading['median'])}{goal.unit}",
        goal.bound,
        judge_goal(goal, reading),
        str(int(reading["count"])),
        f"{reading['spread']:.0%}",
    )


def number(value: float) -> str:
    """A number with three digits, without an exponent where it is of usual size."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
