"""Provoke the documented failures of distillation in toy runs: the first alarm, its step, and the effect of a remedy.

    python -m benchmarks failures [--only NAME ...]

Each failure runs twice with the same seed, without and with its remedy. The outcome is the mean of a reading over the last five
steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measuring import build_parser, format_table, open_session
from benchmarks.toys import CALLING, SUMS, Played, build_task_data, list_warnings, pair, play
from practicum.monitors import MONITORS
from practicum.training import loop
from practicum.types import Rollout

STUDENT, TEACHER = 40, 120


@dataclass(frozen=True, slots=True)
class FailedRun:
    """One failure: how it is provoked, the monitor that should raise an alarm, the remedy, and the reading that shows its effect.

    `less` is whether less of the reading is better. `tampered` changes the completions between sampler and learner.
    """

    monitor: str
    broken: Mapping[str, Any]
    mended: Mapping[str, Any]
    outcome: str
    remedy: str
    source: str
    less: bool = True
    tampered: Callable[[Rollout], Rollout] | None = None
    slow: bool = False
    task: Mapping[str, Any] = field(default_factory=dict)
    student: int = STUDENT
    teacher: int = TEACHER


def bend_teacher(models: str = "teacher", **faults: Any) -> dict[str, Any]:
    """Return a teacher with a fault; see `benchmarks.bent_teacher`."""
    return {
        "type": "benchmarks.bent_teacher",
        "teacher": {"type": "model", "model": models},
        **faults,
    }


def shift_logprobs(rollout: Rollout) -> Rollout:
    """Shift the sampler's log-probabilities by one token."""
    return replace(rollout, policy_logprobs=rollout.policy_logprobs.roll(1))


def halve_logprobs(rollout: Rollout) -> Rollout:
    """The sampler's log-probabilities as they would be at another temperature, but for a constant."""
    return replace(rollout, policy_logprobs=rollout.policy_logprobs / 2)


ANCHORS = [
    {"signal": "full", "divergence": "reverse_kl", "source": "student"},
    {"signal": "text", "divergence": "ce", "source": "dataset"},
    {
        "signal": "full",
        "divergence": "reverse_kl",
        "against": "reference",
        "source": "student",
        "coefficient": 0.1,
    },
]
STABLE = {
    "rollout.source": "join(dataset, 2)",
    "reference": {"type": "self", "weights": "frozen"},
    "objective": {"losses": ANCHORS},
}
REWARDED = [
    {"signal": "score", "coefficient": 1.0},
    {"signal": "full", "divergence": "reverse_kl", "coefficient": 0.01},
]

FAILURES: dict[str, FailedRun] = {
    "stop id that the student never sees": FailedRun(
        "M8",
        {
            "teacher": bend_teacher(stop=-25.0),
            "objective": {"signal": "sampled"},
            "train.steps": 30,
            "optimizer.learning_rate": 0.003,
        },
        {"objective": {"signal": "sampled", "weights": "trust"}},
        "truncated",
        "`weights: trust` leaves out the tokens that the teacher would never write",
        "the SimOPD audit",
    ),
    "repetition": FailedRun(
        "M5",
        {
            "teacher": bend_teacher(bias={"a": 9.0}),
            "train.steps": 30,
            "optimizer.learning_rate": 0.003,
            "rollout.max_new_tokens": 24,
        },
        STABLE,
        "repetition",
        "good answers and a KL to the initial student (Stable-OPD)",
        "2604.08527",
    ),
    "length collapse": FailedRun(
        "M6",
        {
            "teacher": bend_teacher(stop=12.0),
            "train.steps": 36,
            "optimizer.learning_rate": 0.002,
            "rollout.max_new_tokens": 24,
        },
        {**STABLE, "rollout.max_new_tokens": 24},
        "empty",
        "good answers and a KL to the initial student (Stable-OPD)",
        "2607.13399",
        student=0,
    ),
    "diversity collapse": FailedRun(
        "M12",
        {
            "student": {"model": "teacher"},
            "objective.target": "log_linear(teacher=4)",
            "train.steps": 40,
            "rollout.n": 4,
            "optimizer.learning_rate": 0.003,
        },
        {"objective.target": "log_linear(teacher=1)"},
        "unique_answers",
        "the teacher's distribution, not its fourth power",
        "2605.08737",
        less=False,
    ),
    "overconfidence": FailedRun(
        "M30",
        {
            "objective.target": "teacher(temperature=0.25)",
            "train.steps": 40,
            "rollout.n": 4,
            "optimizer.learning_rate": 0.003,
            "evaluation": {
                "prompts": 64,
                "samples": 4,
                "temperature": 1.0,
                "every": 5,
                "teacher": False,
            },
        },
        {"objective.target": "teacher(temperature=2)"},
        "heldout_overconfidence",
        "the teacher at a higher temperature",
        "2604.16830; 2604.00626, section 7.2",
        task={"alphabet": "abc", "longest": 4, "train_size": 53, "heldout_size": 64},
        student=150,
        teacher=300,
    ),
    "one token dominates": FailedRun(
        "M33",
        {"teacher": bend_teacher(bias={"a": -30.0}), "train.steps": 20},
        {"objective.divergence": "jsd(0.5)"},
        "grad_norm",
        "a bounded divergence",
        "2603.25562",
    ),
    "refresh shock": FailedRun(
        "M27",
        {
            "teacher": {"type": "self", "weights": "periodic", "period": 8},
            "objective": {"losses": REWARDED},
            "train.steps": 26,
            "rollout.n": 4,
            "optimizer.learning_rate": 0.003,
        },
        {"teacher": {"type": "self", "weights": "ema", "rate": 0.1}},
        "fall",
        "an average (`ema`) instead of copies",
        "2605.02943",
    ),
    "learning rate x 100": FailedRun(
        "M29",
        {"optimizer.learning_rate": 0.1, "train.steps": 16},
        {"optimizer.learning_rate": 0.001},
        "reverse_kl",
        "the original learning rate",
        "common practice",
    ),
    "no numbers": FailedRun(
        "M1",
        {"optimizer.weight_decay": 1e30, "train.steps": 12},
        {"optimizer.weight_decay": 0.0},
        "skipped",
        "the original weight decay",
        "common practice",
    ),
    "self-play saturation": FailedRun(
        "M22",
        {"teacher": {"type": "self", "weights": "live"}, "train.steps": 12},
        {
            "teacher": {
                "type": "privileged",
                "teacher": {"type": "self"},
                "demonstrations": [{"prompt": "ab", "answer": "ba"}],
            }
        },
        "signal_share",
        "a teacher that sees more than the student",
        "2606.11709",
        less=False,
    ),
    "a scorer that likes length": FailedRun(
        "M36",
        {
            "scorers": {"judge": {"type": "benchmarks.bent_scorer"}},
            "objective": {"signal": "score", "scorer": "judge"},
            "train.steps": 40,
            "rollout.n": 4,
            "optimizer.learning_rate": 0.001,
        },
        {"objective": {"signal": "score"}},
        "reward",
        "the verifier's reward, where a task has one",
        "2210.10760; 2310.03716 for the length",
        less=False,
        student=150,
    ),
    "needless calls": FailedRun(
        "M37",
        CALLING,
        {"task": {**SUMS, "again": 0.0}, "teacher": {"type": "expert", "softness": 0.01}},
        "calls",
        "a teacher that calls once",
        "common practice",
        task={**SUMS, "again": 0.7},
        student=800,
        teacher=1000,
    ),
    "flawed prefix": FailedRun(
        "M14",
        {
            "teacher": bend_teacher(agree_from=60),
            "objective": {"signal": "sampled"},
            "train.steps": 72,
            "rollout.max_new_tokens": 64,
            "rollout.n": 2,
            "optimizer.learning_rate": 1e-5,
        },
        {"rollout.max_new_tokens": 8},
        "tokens",
        "answers cut where the teacher still corrects them",
        "2606.09471",
        slow=True,
        task={"alphabet": "abcdefghijklmnopqrstuvwxyz"},
        student=0,
    ),
    "log-probabilities of the token before": FailedRun(
        "M16",
        {"train.steps": 10},
        {},
        "probability_error",
        "the sampler's own",
        "NeMo-RL",
        tampered=shift_logprobs,
    ),
    "log-probabilities at another temperature": FailedRun(
        "M16",
        {"train.steps": 10},
        {},
        "probability_error",
        "the sampler's own",
        "NeMo-RL",
        tampered=halve_logprobs,
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a failure: the step of its monitor's alarm, all alarms, and the reading without and with the remedy."""

    step: int | None
    spoke: list[str]
    broken: float
    mended: float
    still: list[str]

    def has_helped(self, less: bool) -> bool:
        """Return True if the remedy helped."""
        return self.mended < self.broken if less else self.mended > self.broken


def provoke(failure: FailedRun) -> Outcome:
    """Let a toy run fail, and run it again with the remedy."""
    with pair(failure.student, failure.teacher, task=failure.task) as models:
        with _tampered(failure.tampered) if failure.tampered else nullcontext():
            broken = play(models, _build_settings(models, failure, {}))
        mended = play(models, _build_settings(models, failure, failure.mended))
    steps = [alarm["step"] for alarm in broken.alarms if alarm["id"] == failure.monitor]
    return Outcome(
        min(steps, default=None),
        broken.list_ids(),
        _read_outcome(broken, failure.outcome),
        _read_outcome(mended, failure.outcome),
        mended.list_ids(),
    )


def _build_settings(models: Path, failure: FailedRun, remedy: Mapping[str, Any]) -> dict[str, Any]:
    made = {
        "task": build_task_data(failure.task),
        "monitors": list_warnings(list(MONITORS)),
        **failure.broken,
        **remedy,
    }
    teacher = made.get("teacher", {})
    if teacher.get("type") == "benchmarks.bent_teacher":
        made["teacher"] = {
            **teacher,
            "teacher": {"type": "model", "model": str(models / "teacher")},
        }
    if "student" in made:
        made["student"] = {"model": str(models / made["student"]["model"])}
    return made


def _read_outcome(played: Played, name: str) -> float:
    """A reading's end; `fall` is the greatest fall of the divergence from one step to the next, as a share."""
    if name != "fall":
        return played.average_last(name)
    far = [row["reverse_kl"] for row in played.rows][6:]
    return max(1.0 - later / max(earlier, 1e-9) for earlier, later in pairwise(far))


@contextmanager
def _tampered(change: Callable[[Rollout], Rollout]) -> Iterator[None]:
    """Within the block every completion is changed on its way to the learner."""
    write = loop.collect_rollouts
    loop.collect_rollouts = lambda *arguments: [change(rollout) for rollout in write(*arguments)]
    try:
        yield
    finally:
        loop.collect_rollouts = write


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(FAILURES), help="run only these")
    options = parser.parse_args()
    chosen = options.only or [
        name for name in FAILURES if not (options.quick and FAILURES[name].slow)
    ]
    session = open_session("failures", options)
    rows, figures = [], {}
    for name in chosen:
        failure, outcome = FAILURES[name], provoke(FAILURES[name])
        rows.append(
            [
                name,
                failure.monitor,
                outcome.step,
                failure.outcome,
                outcome.broken,
                outcome.mended,
                failure.remedy,
            ]
        )
        figures[name] = {
            "monitor": failure.monitor,
            "step": outcome.step,
            "spoke": outcome.spoke,
            "reading": failure.outcome,
            "broken": outcome.broken,
            "mended": outcome.mended,
            "spoke_mended": outcome.still,
        }
        print(
            format_table(
                ["failure", "monitor", "step", "reading", "failing", "with the remedy", "remedy"],
                rows[-1:],
            ),
            outcome.spoke,
            outcome.still,
        )
    session.report(failures=figures)


if __name__ == "__main__":
    main()
