"""The monitors: a new one is a function in `rules.py` and an entry here.

M25 (the pace of each phase) reads the clock and stands by itself in `pace.py`, and M28 (budgets) is `train.budget`: what a monitor
here says must come out the same however often a run is resumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from practicum.monitors import patches, rules
from practicum.monitors.history import StepView
from practicum.monitors.rules import RuleResult, Thresholds

Grade = Literal["published", "proposed"]


@dataclass(frozen=True, slots=True)
class Monitor:
    """One rule about the steps of a run.

    `level` and `change` are its thresholds, `persistence` the steps in a row that must break the rule, `action` what follows, and
    `worse` the score from which on something graver does. `says` is the rule in words, with its thresholds. `grade` is about the
    thresholds: `published` where they stand in `source` as they stand here.
    """

    id: str
    name: str
    judge: Callable[[StepView, Thresholds], RuleResult | None]
    says: str
    patches: tuple[patches.Patch, ...]
    source: str
    grade: Grade = "proposed"
    action: str = "warn"
    level: float | None = None
    change: float | None = None
    persistence: int = 2
    worse: tuple[float, str] | None = None

    @property
    def stop_condition(self) -> bool:
        """Whether it may end a run."""
        return bool(
            {self.action, self.worse[1] if self.worse else ""} & {"finish", "pause", "stop"}
        )


MONITORS: dict[str, Monitor] = {
    monitor.id: monitor
    for monitor in (
        Monitor(
            "M1",
            "numbers",
            rules.not_finite,
            "{level:g} or more updates of 20 were left out because a loss or gradient was no number",
            (patches.halve_learning_rate,),
            "common practice",
            level=1.0,
            persistence=1,
        ),
        Monitor(
            "M2",
            "gradient spike",
            rules.gradient_spike,
            "{change:g} times the median norm of the 20 steps before",
            (patches.halve_learning_rate,),
            "common practice",
            change=10.0,
        ),
        Monitor(
            "M3",
            "gradient collapse",
            rules.gradient_collapse,
            "at most {change:g} times the baseline while reverse_kl is more than half of its own",
            (patches.bounded, patches.halve_learning_rate),
            "2604.13016, section 6.2",
            change=0.1,
        ),
        Monitor(
            "M4",
            "truncation",
            rules.truncation,
            "{change:g} above the baseline, or {level:g} and 0.1 above it",
            (patches.with_answers, patches.halve_learning_rate),
            "2604.08527",
            action="pause",
            level=0.9,
            change=0.25,
        ),
        Monitor(
            "M5",
            "repetition",
            rules.repetition,
            "{level:g} above the baseline; 4 times that ends the run",
            (patches.with_answers, patches.halve_learning_rate),
            "2604.08527",
            action="checkpoint",
            level=0.05,
            worse=(4.0, "stop"),
        ),
        Monitor(
            "M6",
            "length",
            rules.length,
            "{level:g} times what it was within 30 steps, or {change:g} times; 1.5 times as bad, and the run pauses",
            (patches.with_answers, patches.halve_learning_rate),
            "2604.08527",
            level=1.5,
            change=0.5,
            worse=(1.5, "pause"),
        ),
        Monitor(
            "M7",
            "length hacking",
            rules.repeated_advantage,
            "{level:g} nats over the other tokens and twice its error, on 5 % of all tokens",
            (patches.with_answers, patches.halve_learning_rate),
            "2604.08527",
            level=0.1,
        ),
        Monitor(
            "M8",
            "stop event",
            rules.stop_event,
            "{level:g} nats or less at the best tenth of the student's stops",
            (patches.trusting, patches.clipped, patches.bounded),
            "the SimOPD audit; 2607.13399",
            action="pause",
            level=-5.0,
        ),
        Monitor(
            "M9",
            "stalled",
            rules.stalled,
            "within {change:g} for 30 steps, under 0.95, with reverse_kl flat and over half its baseline",
            (patches.teacher_writes, patches.with_answers, patches.halve_learning_rate),
            "2604.13016; a healthy run without a rise is known",
            change=0.01,
        ),
        Monitor(
            "M10",
            "overlap mass",
            rules.overlap_mass,
            "below {level:g}, and {change:g} below the baseline",
            (patches.with_tail, patches.whole, patches.halve_learning_rate),
            "2604.13016: 0.97 to 0.99 even in weak runs",
            level=0.9,
            change=0.05,
        ),
        Monitor(
            "M11",
            "entropy gap",
            rules.entropy_gap,
            "rising over 6 spans of 5 steps, by {change:g} of itself, after step 50",
            (patches.halve_learning_rate,),
            "2604.13016",
            change=0.2,
        ),
        Monitor(
            "M12",
            "student entropy",
            rules.student_entropy,
            "at most {change:g} times the baseline or {level:g} nats, and under half of the teacher's",
            (patches.bounded, patches.halve_learning_rate),
            "2603.07079",
            level=0.1,
            change=0.5,
        ),
        Monitor(
            "M13",
            "tail entropy",
            rules.tail_entropy,
            "{change:g} times the baseline in the last bin of positions, the first being flat",
            (patches.shorter, patches.train_on_prefix, patches.halve_learning_rate),
            "2604.13016, section 6.1",
            change=2.0,
        ),
        Monitor(
            "M14",
            "low-KL traps",
            rules.trap,
            "{level:g} of all completions, or {change:g} above the baseline",
            (patches.train_on_prefix, patches.with_answers, patches.halve_learning_rate),
            "2606.09471",
            level=0.5,
            change=0.2,
        ),
        Monitor(
            "M15",
            "few tokens dominate",
            rules.tails,
            "{level:g} of the tokens more than 10 nats off, or half of all divergence on {level:g} of them",
            (patches.clipped, patches.bounded),
            "2604.14084; 2607.13399",
            level=0.01,
        ),
        Monitor(
            "M16",
            "engine error",
            rules.engine_error,
            "over {level:g}, or {change:g} over the baseline",
            (patches.corrected, patches.halve_learning_rate),
            "NeMo-RL, its GRPO guide",
            "published",
            action="stop",
            level=1.05,
            change=0.02,
            persistence=5,
        ),
        Monitor(
            "M17",
            "importance weights",
            rules.importance,
            "an effective share under {level:g}, a chi-squared over 1, or a mean outside 0.5 to 2",
            (patches.corrected, patches.reduce_staleness),
            "verl, docs/algo/rollout_corr.md",
            "published",
            level=0.3,
        ),
        Monitor(
            "M18",
            "staleness",
            rules.staleness,
            "over the level, which has to be set",
            (patches.reduce_staleness,),
            "verl, docs/advance/fully_async.md",
        ),
        Monitor(
            "M19",
            "teacher health",
            rules.teacher_health,
            "{level:g} of the completions unanswered by a teacher that had answered all",
            (patches.saved_often,),
            "common practice",
            action="pause",
            level=0.01,
        ),
        Monitor(
            "M20",
            "diversity",
            rules.diversity,
            "{change:g} of it lost, and neither because answers became right nor because the teacher's are alike",
            (patches.bounded, patches.halve_learning_rate),
            "2604.10688; 2606.26091",
            change=0.3,
        ),
        Monitor(
            "M21",
            "held-out accuracy",
            rules.heldout_loss,
            "the upper end of the gain's 95 % interval is below {level:g} in two evaluations in a row; three end the run",
            (patches.halve_learning_rate,),
            "2604.13016, section 3.3",
            action="checkpoint",
            level=0.0,
            persistence=2,
            worse=(2.0, "stop"),
        ),
        Monitor(
            "M22",
            "no signal",
            rules.no_signal,
            "at most {level:g} of the completions differ from the teacher by 0.0001 nats a token",
            (patches.with_answers, patches.more_answers),
            "TRL, issue 2217",
            level=0.0,
        ),
        Monitor(
            "M23",
            "engagement",
            rules.engagement,
            "over {level:g} of the tokens left out by weights, or under {change:g}",
            (patches.unweighted,),
            "the SimOPD audit",
            action="log",
            level=0.5,
            change=0.001,
        ),
        Monitor(
            "M24",
            "settled prompts",
            rules.settled,
            "over {level:g} of the prompts answered all right or all wrong",
            (patches.more_answers,),
            "2603.11178",
            level=0.8,
        ),
        Monitor(
            "M26",
            "teachers' shares",
            rules.teacher_share,
            "one of several teachers with over {level:g} of the loss (of two: 0.8), or under {change:g}",
            (patches.bounded, patches.halve_learning_rate),
            "2608.19098",
            level=0.6,
            change=0.05,
        ),
        Monitor(
            "M27",
            "refresh shock",
            rules.refresh_shock,
            "at most {change:g} times that before the teacher was copied anew, at two copies in a row",
            (patches.averaged, patches.halve_learning_rate),
            "2605.02943",
            change=0.3,
            persistence=2,
        ),
        Monitor(
            "M29",
            "divergence",
            rules.divergence,
            "{change:g} times that of the first step, and {level:g} nats more",
            (patches.halve_learning_rate,),
            "a learning rate x 100, in docs/monitors.md",
            level=1.0,
            change=2.0,
            persistence=3,
        ),
        Monitor(
            "M30",
            "overconfidence",
            rules.overconfidence,
            "{level:g} surer than right, {change:g} more so than at the start, and its 95 % interval above 0",
            (patches.softer, patches.covering, patches.halve_learning_rate),
            "2604.16830",
            level=0.1,
            change=0.1,
        ),
        Monitor(
            "M31",
            "plateau",
            rules.plateau,
            "over {level:g}, and no more than {change:g} above what it was when it last rose",
            (patches.halve_learning_rate,),
            "patience, as in early stopping",
            action="off",
            level=0.0,
            change=0.02,
            persistence=3,
        ),
        Monitor(
            "M32",
            "empty updates",
            rules.empty_updates,
            "{level:g} or more updates of a step had no token to learn from, and were skipped",
            (patches.unfiltered, patches.more_answers),
            "common practice",
            level=1.0,
        ),
        Monitor(
            "M33",
            "empty answers",
            rules.empty_answers,
            "{level:g} of the answers have no text: look at student.template, student.thinking and student.stop",
            (patches.with_answers, patches.teacher_writes),
            "common practice",
            level=0.5,
        ),
    )
}
"""Every monitor by its id."""
