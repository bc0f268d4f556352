"""The table of monitors: a new one is a function in `rules.py` and an entry here.

Alarms of these monitors must come out the same however often a run is resumed. M25 (the pace of
each phase) reads the clock, so it stands apart in `pace.py`. M28 (budgets) is `train.budget`.
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

    `level` and `change` are its thresholds, and `rule_text` is the rule with both filled in.
    After `persistence` steps in a row that break the rule, `action` follows; `escalation` is a score
    and the action that follows from that score on. The `grade` of the thresholds is `published` if
    `source` states them as they stand here.
    """

    id: str
    name: str
    judge: Callable[[StepView, Thresholds], RuleResult | None]
    rule_text: str
    patches: tuple[patches.Patch, ...]
    source: str = "common practice"
    grade: Grade = "proposed"
    action: str = "warn"
    level: float | None = None
    change: float | None = None
    persistence: int = 2
    escalation: tuple[float, str] | None = None

    @property
    def can_end_run(self) -> bool:
        """True if one of the monitor's actions ends a run."""
        return not {self.action, *(self.escalation or ())}.isdisjoint({"finish", "pause", "stop"})

    @property
    def can_pause(self) -> bool:
        """True if one of the monitor's actions pauses a run."""
        return "pause" in (self.action, *(self.escalation or ()))


_MONITORS = (
    Monitor(
        "M1",
        "numbers",
        rules.judge_numbers,
        "{level:g} or more updates of 20 were left out because a loss or gradient was not finite",
        (patches.halve_learning_rate,),
        level=1.0,
        persistence=1,
    ),
    Monitor(
        "M2",
        "gradient spike",
        rules.judge_gradient_spike,
        "{change:g} times the median norm of the 20 steps before",
        (patches.halve_learning_rate,),
        change=10.0,
    ),
    Monitor(
        "M3",
        "gradient collapse",
        rules.judge_gradient_collapse,
        "at most {change:g} times the baseline while reverse_kl is over half of its baseline",
        (patches.use_bounded_divergence, patches.halve_learning_rate),
        "2604.13016, section 6.2",
        change=0.1,
    ),
    Monitor(
        "M4",
        "truncation",
        rules.judge_truncation,
        "{change:g} above the baseline, or {level:g} and 0.1 above it",
        (patches.add_dataset_answers, patches.halve_learning_rate),
        "2604.08527",
        action="pause",
        level=0.9,
        change=0.25,
    ),
    Monitor(
        "M5",
        "repetition",
        rules.judge_repetition,
        "{level:g} above the baseline; 4 times that ends the run",
        (patches.add_dataset_answers, patches.halve_learning_rate),
        "2604.08527",
        action="checkpoint",
        level=0.05,
        escalation=(4.0, "stop"),
    ),
    Monitor(
        "M6",
        "length",
        rules.judge_length,
        "{level:g} times or {change:g} times the length of up to 30 steps before; the run "
        "pauses at 1.5 times that",
        (patches.add_dataset_answers, patches.halve_learning_rate),
        "2604.08527",
        level=1.5,
        change=0.5,
        escalation=(1.5, "pause"),
    ),
    Monitor(
        "M7",
        "length hacking",
        rules.judge_length_hacking,
        "{level:g} nats and twice its error above the other tokens, on 5 % of all tokens",
        (patches.add_dataset_answers, patches.halve_learning_rate),
        "2604.08527",
        level=0.1,
    ),
    Monitor(
        "M8",
        "stop event",
        rules.judge_stops,
        "{level:g} nats or less at the best tenth of the student's stops",
        (patches.drop_implausible_tokens, patches.clip_advantage, patches.use_bounded_divergence),
        "the SimOPD audit; 2607.13399",
        action="pause",
        level=-5.0,
    ),
    Monitor(
        "M9",
        "stalled",
        rules.judge_stall,
        "within {change:g} for 30 steps, under 0.95, with reverse_kl flat and over half its "
        "baseline",
        (patches.sample_from_teacher, patches.add_dataset_answers, patches.halve_learning_rate),
        "2604.13016; a healthy run without a rise is known",
        change=0.01,
    ),
    Monitor(
        "M10",
        "overlap mass",
        rules.judge_overlap_mass,
        "below {level:g}, and {change:g} below the baseline",
        (patches.add_tail_bucket, patches.use_full_signal, patches.halve_learning_rate),
        "2604.13016: 0.97 to 0.99 even in weak runs",
        level=0.9,
        change=0.05,
    ),
    Monitor(
        "M11",
        "entropy gap",
        rules.judge_entropy_gap,
        "rising over 6 spans of 5 steps, by {change:g} of itself, after step 50",
        (patches.halve_learning_rate,),
        "2604.13016",
        change=0.2,
    ),
    Monitor(
        "M12",
        "student entropy",
        rules.judge_student_entropy,
        "at most {change:g} times the baseline or {level:g} nats, and under half of the teacher's",
        (patches.use_bounded_divergence, patches.halve_learning_rate),
        "2603.07079",
        level=0.1,
        change=0.5,
    ),
    Monitor(
        "M13",
        "tail entropy",
        rules.judge_tail_entropy,
        "{change:g} times the baseline in the last bin of positions, the first being flat",
        (patches.halve_completions, patches.train_on_prefix, patches.halve_learning_rate),
        "2604.13016, section 6.1",
        change=2.0,
    ),
    Monitor(
        "M14",
        "low-KL traps",
        rules.judge_traps,
        "{level:g} of all completions, or {change:g} above the baseline",
        (patches.train_on_prefix, patches.add_dataset_answers, patches.halve_learning_rate),
        "2606.09471",
        level=0.5,
        change=0.2,
    ),
    Monitor(
        "M15",
        "few tokens dominate",
        rules.judge_dominant_tokens,
        "{level:g} of the tokens more than 10 nats off, or half of all divergence on "
        "{level:g} of them",
        (patches.clip_advantage, patches.use_bounded_divergence),
        "2604.14084; 2607.13399",
        level=0.01,
    ),
    Monitor(
        "M16",
        "engine error",
        rules.judge_engine_error,
        "over {level:g}, or {change:g} over the baseline",
        (patches.leave_engine_out, patches.correct_importance),
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
        rules.judge_importance,
        "an effective share under {level:g}, a chi-squared over 1, or a mean outside 0.5 to 2",
        (patches.correct_importance, patches.reduce_staleness),
        "verl, docs/algo/rollout_corr.md",
        "published",
        level=0.3,
    ),
    Monitor(
        "M18",
        "staleness",
        rules.judge_staleness,
        "over the level, which has to be set",
        (patches.reduce_staleness,),
        "verl, docs/advance/fully_async.md",
    ),
    Monitor(
        "M19",
        "teacher health",
        rules.judge_teacher_health,
        "{level:g} of the completions left unanswered by a teacher that answered all before",
        (patches.save_every_step,),
        action="pause",
        level=0.01,
    ),
    Monitor(
        "M20",
        "diversity",
        rules.judge_diversity,
        "{change:g} of it lost, though answers did not become right and the teacher's are "
        "not alike",
        (patches.use_bounded_divergence, patches.halve_learning_rate),
        "2604.10688; 2606.26091",
        change=0.3,
    ),
    Monitor(
        "M21",
        "held-out accuracy",
        rules.judge_heldout_accuracy,
        "the upper end of the gain's 95 % interval is below {level:g} in two evaluations in "
        "a row; three end the run",
        (patches.halve_learning_rate,),
        "2604.13016, section 3.3",
        action="checkpoint",
        level=0.0,
        persistence=2,
        escalation=(2.0, "stop"),
    ),
    Monitor(
        "M22",
        "no signal",
        rules.judge_signal,
        "at most {level:g} of the completions differ from the teacher by 0.0001 nats a token",
        (patches.add_dataset_answers, patches.double_completions),
        "TRL, issue 2217",
        level=0.0,
    ),
    Monitor(
        "M23",
        "engagement",
        rules.judge_engagement,
        "weights drop over {level:g} of the tokens, or under {change:g}",
        (patches.use_all_tokens,),
        "the SimOPD audit",
        action="log",
        level=0.5,
        change=0.001,
    ),
    Monitor(
        "M24",
        "settled prompts",
        rules.judge_settled_prompts,
        "over {level:g} of the prompts have all completions right or all wrong",
        (patches.double_completions,),
        "2603.11178",
        level=0.8,
    ),
    Monitor(
        "M26",
        "teachers' shares",
        rules.judge_teacher_shares,
        "one of several teachers has over {level:g} of the loss (of two: 0.8), or under {change:g}",
        (patches.use_bounded_divergence, patches.halve_learning_rate),
        "2608.19098",
        level=0.6,
        change=0.05,
    ),
    Monitor(
        "M27",
        "refresh shock",
        rules.judge_refresh_shock,
        "at most {change:g} times the divergence before the copy, at two copies in a row",
        (patches.use_ema_teacher, patches.halve_learning_rate),
        "2605.02943",
        change=0.3,
        persistence=2,
    ),
    Monitor(
        "M29",
        "divergence",
        rules.judge_divergence,
        "{change:g} times the divergence of the first step, and {level:g} nats above it",
        (patches.halve_learning_rate,),
        "python -m benchmarks settings: 0.13 to 1.18 in two steps at ten times the rate",
        level=0.2,
        change=2.0,
    ),
    Monitor(
        "M30",
        "overconfidence",
        rules.judge_overconfidence,
        "confidence exceeds accuracy by {level:g}, by {change:g} more than at the start, and "
        "the 95 % interval of the rise is above 0",
        (patches.raise_teacher_temperature, patches.use_forward_kl, patches.halve_learning_rate),
        "2604.16830",
        level=0.1,
        change=0.1,
    ),
    Monitor(
        "M31",
        "plateau",
        rules.judge_plateau,
        "over {level:g}, and no more than {change:g} above its last rise",
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
        rules.judge_empty_updates,
        "{level:g} or more updates of a step had no token to train on and were skipped",
        (patches.remove_filters, patches.double_completions),
        level=1.0,
    ),
    Monitor(
        "M33",
        "empty answers",
        rules.judge_empty_answers,
        "{level:g} of the completions have no text: check student.template, student.thinking "
        "and student.stop",
        (patches.add_dataset_answers, patches.sample_from_teacher),
        level=0.5,
    ),
    Monitor(
        "M34",
        "derailment",
        rules.judge_derailment,
        "turns after a wrong turn are wrong more often by {change:g} than turns after right ones",
        (patches.correct_turns, patches.grow_conversations, patches.halve_learning_rate),
        "the compounding of errors over turns, 1011.0686",
        change=0.3,
        persistence=3,
    ),
    Monitor(
        "M35",
        "constant teacher",
        rules.judge_constancy,
        "{level:g} of the completions have one teacher score for all of their tokens: look at the "
        "teacher's weights, above all after they were moved",
        (patches.save_every_step,),
        "Relax, pull request 287",
        action="pause",
        level=0.5,
        persistence=1,
    ),
    Monitor(
        "M36",
        "scorer gap",
        rules.judge_scorer_gap,
        "the scorer's value minus the reward is {change:g} above its baseline, the reward is not, and "
        "the scorer ranks right above wrong answers with {level:g} or less, or nothing is right",
        (patches.use_verifier,),
        "2210.10760",
        level=0.6,
        change=0.2,
        persistence=3,
    ),
    Monitor(
        "M37",
        "needless calls",
        rules.judge_needless_calls,
        "right answers make {level:g} or more calls of tools beyond the fewest that a right answer to "
        "the same prompt made, on average: an answer costs more and is no better",
        (patches.halve_tool_turns, patches.halve_learning_rate),
        level=0.5,
        persistence=3,
    ),
    Monitor(
        "M38",
        "scorer's numbers",
        rules.judge_scorer_numbers,
        "{level:g} or more updates of a scorer in 20 steps were left out because its loss or gradient "
        "was not finite",
        (patches.halve_scorer_rates,),
        level=1.0,
        persistence=1,
    ),
    Monitor(
        "M39",
        "distance",
        rules.judge_distance,
        "{change:g} times the held-out divergence before training, and {level:g} nats per token above it",
        (patches.halve_learning_rate,),
        action="stop",
        level=0.2,
        change=2.0,
        persistence=1,
    ),
    Monitor(
        "M40",
        "distance with rewards",
        rules.judge_distance_with_rewards,
        "{change:g} times the held-out divergence before training, and {level:g} nats per token above it",
        (patches.halve_learning_rate,),
        level=0.2,
        change=2.0,
        persistence=1,
    ),
)

MONITORS: dict[str, Monitor] = {monitor.id: monitor for monitor in _MONITORS}
"""All monitors by id."""
