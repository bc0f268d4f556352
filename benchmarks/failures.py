"""Provoke the documented failures of distillation in toy runs: the first alarm, its step, and the effect of a remedy.

    python -m benchmarks failures [--only NAME ...]
    python -m benchmarks failures --draws 5

Each failure runs twice with the same seed, without and with its remedy. The outcome is the mean of a reading over the last five
steps. With `--draws`, the failures that have a healthy twin, which is the same run without the fault, run with that many
seeds of models and prompts: failing, with the remedy, and as the twin.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measuring import build_parser, format_table, open_session, spread
from benchmarks.toys import CALLING, SUMS, Played, build_task_data, list_warnings, pair, play
from practicum.monitors import MONITORS
from practicum.training import loop
from practicum.types import Rollout

STUDENT, TEACHER = 40, 120


@dataclass(frozen=True, slots=True)
class FailedRun:
    """One failure: how it is provoked, the monitor that should raise an alarm, the remedy, and the reading that shows its effect.

    `less` is whether less of the reading is better. `tampered` changes the completions between sampler and learner. `twin` are the
    changes that take the fault away.
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
    twin: Mapping[str, Any] | None = None


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

WALKS = {"type": "walker", "turns": 8, "slip": 0.001, "train_size": 2048, "heldout_size": 0}
OWN_WALKS = {"signal": "full", "divergence": "reverse_kl", "source": "student"}
IMITATION = {"signal": "text", "divergence": "ce", "source": "teacher"}

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
        {
            "reference": {"type": "self", "weights": "frozen"},
            "objective": {
                "losses": [
                    {
                        "signal": "full",
                        "divergence": "reverse_kl",
                        "target": "log_linear(teacher=4)",
                    },
                    {
                        "signal": "full",
                        "divergence": "reverse_kl",
                        "against": "reference",
                        "coefficient": 4.0,
                    },
                ]
            },
        },
        "unique_answers",
        "a KL to the initial student",
        "2605.08737",
        less=False,
        twin={"objective.target": "log_linear(teacher=1)"},
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
        twin={"objective.target": "teacher(temperature=1)"},
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
        twin={"teacher": {"type": "model", "model": "teacher"}},
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
        twin={"teacher": {"type": "model", "model": "teacher"}},
    ),
    "derailment": FailedRun(
        "M34",
        {
            "teacher": {"type": "expert"},
            "rollout": {"n": 1, "max_new_tokens": 40, "source": "join(teacher, 1)"},
            # The student's own walks are watched and hardly trained on.
            "objective": {"losses": [{**OWN_WALKS, "coefficient": 1e-6}, IMITATION]},
            "optimizer": {"learning_rate": 0.004, "warmup_steps": 5, "betas": [0.9, 0.98]},
            "train": {"steps": 100, "prompts_per_step": 48, "threads": 1},
            "backend": {"sampling_batch": 96},
        },
        {"objective": {"losses": [OWN_WALKS, IMITATION]}},
        "wrong_after",
        "the expert also labels the student's own walks (DAgger)",
        "1011.0686",
        slow=True,
        task=WALKS,
        student=1200,
        teacher=0,
        twin={"task": {**WALKS, "spread": 6}},
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


DRAWN = [
    "failure",
    "monitor",
    "reading",
    "failing: alarms",
    "median",
    "remedy: alarms",
    "median",
    "twin: alarms",
    "median",
]


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
            broken = play(models, _build_settings(models, failure, {}, 0))
        mended = play(models, _build_settings(models, failure, failure.mended, 0))
    steps = [alarm["step"] for alarm in broken.alarms if alarm["id"] == failure.monitor]
    return Outcome(
        min(steps, default=None),
        broken.list_ids(),
        _read_outcome(broken, failure.outcome),
        _read_outcome(mended, failure.outcome),
        mended.list_ids(),
    )


def draw(failure: FailedRun, draws: int) -> dict[str, dict[str, Any]]:
    """Return the outcomes and the seeds with an alarm of a failure, of its remedy and of its healthy twin."""
    arms: dict[str, Mapping[str, Any]] = {
        "failing": {},
        "with the remedy": failure.mended,
        "twin": failure.twin or {},
    }
    by_arm = {arm: {"alarms": [], "outcomes": []} for arm in arms}
    for seed in range(draws):
        with pair(failure.student, failure.teacher, seed, failure.task) as models:
            for arm, changes in arms.items():
                played = play(models, _build_settings(models, failure, changes, seed))
                if failure.monitor in played.list_ids():
                    by_arm[arm]["alarms"].append(seed)
                by_arm[arm]["outcomes"].append(round(_read_outcome(played, failure.outcome), 4))
    return by_arm


def _build_settings(
    models: Path, failure: FailedRun, changes: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    made = {
        "task": build_task_data(failure.task),
        "monitors": list_warnings(list(MONITORS)),
        **failure.broken,
        **changes,
        "seed": seed,
    }
    teacher = made.get("teacher", {})
    model = {"type": "model", "model": str(models / "teacher")}
    if teacher.get("type") == "benchmarks.bent_teacher":
        made["teacher"] = {**teacher, "teacher": model}
    if teacher.get("type") == "model":
        made["teacher"] = model
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


def _report_draws(options: Namespace) -> None:
    session = open_session("failures", options)
    figures = {}
    for name in options.only or [name for name in FAILURES if FAILURES[name].twin is not None]:
        failure = FAILURES[name]
        by_arm = draw(failure, options.draws)
        figures[name] = {"monitor": failure.monitor, "reading": failure.outcome, **by_arm}
        row = [name, failure.monitor, failure.outcome]
        for arm in by_arm.values():
            row += [f"{len(arm['alarms'])} of {options.draws}", spread(arm["outcomes"])["median"]]
        print(format_table(DRAWN, [row]))
    session.report(modes=figures)


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(FAILURES), help="run only these")
    parser.add_argument("--draws", type=int, help="seeds for the failures with a healthy twin")
    options = parser.parse_args()
    if options.draws:
        lacking = [name for name in options.only or () if FAILURES[name].twin is None]
        if lacking:
            parser.error(f"--draws: no healthy twin is defined for {', '.join(lacking)}")
        _report_draws(options)
        return
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
