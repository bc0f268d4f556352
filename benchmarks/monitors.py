"""Measure the cost of monitoring: seconds of readings, rules and their columns in rollouts.jsonl, as a share of their step.

    python -m benchmarks monitors

Random weights, full reverse KL, on the pair 17m <- 57m and on a toy pair. Each step is timed and then monitored, so both times are
of the same step. Values that are written only for the monitors (entropies and coefficient of every token) count as monitoring.
"""

import tempfile
import time
from pathlib import Path

from benchmarks import models
from benchmarks.measuring import (
    Session,
    build_parser,
    compute_ratios,
    format_table,
    open_session,
    spread,
)
from benchmarks.step_ours import Given
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.residency import build_scorer
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.monitors import Watch
from practicum.objective import Objective
from practicum.ports import AdamParams
from practicum.recipe import load_recipe, resolve_recipe
from practicum.rollouts import to_exact_floats
from practicum.rollouts.sources.student import Config as StudentSource
from practicum.teaching.client import ClientTeacher
from practicum.training.loop import StepComponents, StepPlan, StepSettings, train_step
from practicum.types import Message, Prompt, SamplingParams, StepResult

WORKLOADS = {"17m": ("17m", "57m", 8, 128), "toy": ("toy", "toy-teacher", 16, 64)}
QUICK = {"toy": ("tiny", "tiny-teacher", 4, 16)}


def main() -> None:
    """Report one line for each workload."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--config", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS), help="only these"
    )
    options = parser.parse_args()
    session = open_session("monitors", options)
    for name in ["toy"] if options.quick else options.config:
        _measure(session, name, *(QUICK if options.quick else WORKLOADS)[name])


def _measure(
    session: Session, name: str, student: str, teacher: str, count: int, new_tokens: int
) -> None:
    """Steps of one pair, each timed and then watched."""
    with tempfile.TemporaryDirectory() as folder:
        parts, settings = _build_parts(Path(folder), student, teacher, count, new_tokens)
    watch = Watch(resolve_recipe(load_recipe("smoke/toy")), {})
    steps, watched, tokens = [], [], []
    for step in range(1, session.warm_up + session.rounds + 1):
        start = time.process_time()
        result = train_step(step, parts, settings)
        middle = time.process_time()
        _watch_step(watch, result)
        if step > session.warm_up:
            steps.append(middle - start)
            watched.append(time.process_time() - middle)
            tokens.append(result.metrics["tokens"])
    share = compute_ratios(watched, steps)
    rows = [
        [
            name,
            spread(steps)["median"],
            spread(watched)["median"],
            share["median"],
            share["greatest"],
        ]
    ]
    print(format_table(["pair", "s a step", "s watching", "share", "greatest"], rows))
    session.report(
        {"monitors.cost": share} if name == "17m" else {},
        config=name,
        pair=[student, teacher],
        tokens=spread(tokens),
        step_seconds=spread(steps),
        watch_seconds=spread(watched),
        share=share,
    )


def _watch_step(watch: Watch, result: StepResult) -> None:
    """All that is done for the monitors after a step."""
    watch.judge(result.step, watch.read(result).metrics)
    for output in result.outputs.split(result.rollouts):
        for column in (output.student_entropy, output.teacher_entropy, output.weight):
            to_exact_floats(column)


def _build_parts(
    folder: Path, student: str, teacher: str, count: int, new_tokens: int
) -> tuple[StepComponents, StepSettings]:
    stops = frozenset({1})
    vocabulary = models.SHAPES[student].vocabulary
    models.write_folder(models.SHAPES[student], folder / "student", 1, stops)
    models.write_folder(models.SHAPES[teacher], folder / "teacher", 2, stops)
    loaded = load_student(StudentConfig(model=str(folder / "student"), device="cpu"), seed=0)
    taught = ScorerConfig(model=str(folder / "teacher"), device="cpu")
    teacher_model = load(taught)
    trainer = models.build_trainer(loaded.language_model, count)
    scoring = build_scorer(
        teacher_model, taught, trainer.limits.sampling_batch, trainer.limits.chunk_tokens
    )
    prompts = [
        Prompt(str(number), (Message("user", models.render_words(prompt)),))
        for number, prompt in enumerate(models.draw_prompts(count, vocabulary, seed=5))
    ]
    plan = StepPlan(
        Objective(),
        1,
        SamplingParams(new_tokens, stop_ids=stops),
        StudentSource(),
        AdamParams(1e-4),
    )
    scores = ClientTeacher(scoring, teacher_model.renderer)
    parts = StepComponents(
        trainer, trainer.build_sampling_client(), scores, Given(prompts), loaded.renderer, prompts
    )
    return parts, StepSettings(0, count, lambda step: plan)


if __name__ == "__main__":
    main()
