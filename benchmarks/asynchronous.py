"""Measure rollouts ahead of the updates: tokens per second with a slow teacher, and the cost of rollout age.

    python -m benchmarks asynchronous [--delays 0 1 2] [--lags 0 1 2] [--steps 12] [--seeds 0 1 2] [--only speed | learning]

Speed is measured by the wall clock, because waiting takes no processor time. Lags alternate within a round, each on newly loaded
models. A teacher's delay is given in steps of this machine: 1 is a teacher that takes as long as the step itself.
Learning is the reverse KL on held-out prompts after training, over seeds: sampled tokens with and without a ratio, and all tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.measuring import (
    build_parser,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    round_digits,
    spread,
)
from benchmarks.toys import build_recipe_data, pair, play
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherRequest,
)
from practicum.recipe import parse_recipe
from practicum.runs.assembly import assemble_run
from practicum.training.asynchronous import open_step_runner
from practicum.training.loop import train
from practicum.types import Datum, Prompt, Rollout, Sample, SamplingParams, TeacherSignal

LAGS, LEARNING_LAGS, SEEDS = (0, 1, 2), (0, 1, 2, 4, 8), (0, 1, 2)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sampled, none": {"signal": "sampled", "correction": "none"},
    "sampled, ratio": {"signal": "sampled", "correction": "ratio"},
    "full": {"signal": "full"},
}


class Distant(Teacher):
    """A teacher that answers later; see `practicum.ports.Teacher`."""

    def __init__(self, teacher: Teacher, seconds: float) -> None:
        self._teacher = teacher
        self._seconds = seconds

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the teacher."""
        return self._teacher.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the teacher's scores, after a while."""
        time.sleep(self._seconds)
        return self._teacher.score(rollouts, signal)

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """The teacher's own answers."""
        return self._teacher.sample(requests, params)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        """The teacher's."""
        return self._teacher.bind_prompt(prompt)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Nothing follows."""

    def save_state(self) -> dict[str, Tensor]:
        """Nothing to save."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing was saved."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--delays",
        type=float,
        nargs="+",
        help="of the teacher, in steps (default 0 1 2, with --quick 1)",
    )
    parser.add_argument(
        "--lags", type=int, nargs="+", default=list(LAGS), help="values of max_staleness, 0 first"
    )
    parser.add_argument("--steps", type=int, help="of a measurement (default 12, with --quick 4)")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=list(SEEDS),
        help="seeds of the learning runs (default 0 1 2)",
    )
    parser.add_argument("--only", choices=("speed", "learning"), help="run only one half")
    options = parser.parse_args()
    session = open_session("asynchronous", options)
    options.delays = options.delays or ([1.0] if options.quick else [0.0, 1.0, 2.0])
    options.steps = options.steps or (4 if options.quick else 12)
    figures: dict[str, Any] = {}
    if options.only != "learning":
        figures["speed"] = _measure_speed(options, session.rounds, session.warm_up)
    if options.only != "speed":
        figures["learning"] = _measure_learning(options)
    session.report(**figures)


def _measure_speed(options: argparse.Namespace, rounds: int, warm_up: int) -> dict[str, Any]:
    """Measure tokens per second at each delay and lag, and the ratio to the first lag, per round."""
    with tempfile.TemporaryDirectory() as name:
        step_seconds = 1.0 / statistics.median(
            _run(Path(name), options, 0, 0.0)[1] for _ in range(2)
        )
        figures: dict[str, Any] = {"seconds_a_step": round_digits(step_seconds)}
        rows = []
        for delay in options.delays:
            contenders = {
                str(lag): _prepare_run(Path(name), options, lag, delay * step_seconds)
                for lag in options.lags
            }
            speeds = interleave(contenders, rounds, warm_up)
            first = speeds[str(options.lags[0])]
            figures[f"delay {delay:g}"] = {
                lag: {"tokens_per_second": spread(values), "ratio": compute_ratios(values, first)}
                for lag, values in speeds.items()
            }
            rows += [
                [
                    f"{delay:g} steps",
                    lag,
                    spread(values)["median"],
                    compute_ratios(values, first)["median"],
                ]
                for lag, values in speeds.items()
            ]
    print(
        format_table(
            ["teacher's delay", "max_staleness", "tokens a second", f"of {options.lags[0]}'s"], rows
        )
    )
    return figures


def _prepare_run(
    folder: Path, options: argparse.Namespace, lag: int, seconds: float
) -> Callable[[], float]:
    return lambda: _run(folder, options, lag, seconds)[0]


def _run(
    folder: Path, options: argparse.Namespace, lag: int, seconds: float
) -> tuple[float, float]:
    """Return trained tokens and steps per second, by the wall clock; models and threads are created before."""
    recipe = parse_recipe(_build_recipe(options, lag), "asynchronous")
    built = assemble_run(recipe, folder)
    components = built.parts
    parts = replace(components, teacher=Distant(components.teacher, seconds))
    start = time.monotonic()
    with open_step_runner(parts, built.settings, options.steps, lag) as how:
        tokens = sum(
            result.metrics["tokens"]
            for result in train(1, options.steps, parts, built.settings, how.step)
        )
    wall = time.monotonic() - start
    return tokens / wall, options.steps / wall


def _build_recipe(options: argparse.Namespace, lag: int) -> dict[str, Any]:
    """A pair that spends its time in products, not in Python: width 128, and answers of 32 tokens."""
    shape = {
        "architecture": "llama",
        "hidden_size": 64 if options.quick else 128,
        "layers": 2,
        "heads": 4,
    }
    changes = {
        "student": {"model": {**shape, "seed": 1}},
        "teacher": {"type": "model", "model": {**shape, "seed": 2}},
        "rollout": {"n": 4, "max_new_tokens": 16 if options.quick else 32, "max_staleness": lag},
        "objective": OBJECTIVES["sampled, ratio"],
        "train": {"steps": options.steps, "prompts_per_step": 8, "threads": 1},
    }
    return build_recipe_data(Path(), changes)


def _measure_learning(options: argparse.Namespace) -> dict[str, Any]:
    """The reverse KL left on held-out prompts, for each objective and lag: all seeds, and their median."""
    lags, seeds, steps = ((0, 2), (0,), 8) if options.quick else (LEARNING_LAGS, options.seeds, 60)
    remaining: dict[str, dict[int, list[float]]] = {
        name: {lag: [] for lag in lags} for name in OBJECTIVES
    }
    start = []
    for seed in seeds:
        with pair(40, 200, seed) as models:
            for name, objective in OBJECTIVES.items():
                for lag in lags:
                    summary = play(models, _build_changes(seed, steps, lag, objective)).summary
                    remaining[name][lag].append(
                        summary["after"]["reverse_kl"] if summary else float("nan")
                    )
                    start += (
                        [summary["before"]["reverse_kl"]]
                        if summary and name == "full" and lag == 0
                        else []
                    )
    rows = [
        [name, lag, statistics.median(values), *values]
        for name, of in remaining.items()
        for lag, values in of.items()
    ]
    print(
        format_table(
            [
                "objective",
                "max_staleness",
                "reverse KL left, median",
                *(f"seed {seed}" for seed in seeds),
            ],
            rows,
        )
    )
    return {
        "steps": steps,
        "before": [round_digits(value) for value in start],
        "left": {
            name: {lag: [round_digits(v) for v in of[lag]] for lag in lags}
            for name, of in remaining.items()
        },
        "median": {
            name: {lag: round_digits(statistics.median(of[lag])) for lag in lags}
            for name, of in remaining.items()
        },
    }


def _build_changes(seed: int, steps: int, lag: int, objective: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "seed": seed,
        "objective": dict(objective),
        "optimizer.learning_rate": 0.003,
        "rollout": {"n": 4, "max_new_tokens": 8, "max_staleness": lag},
        "train": {"steps": steps, "prompts_per_step": 16, "threads": 1},
        "evaluation": {"prompts": 16, "samples": 4, "temperature": 1.0, "teacher": False},
        "monitors": "off",
    }


if __name__ == "__main__":
    main()
