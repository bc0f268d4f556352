"""Compare the figures of `practicum plan` with measured ones: peak memory of whole steps, and seconds after a calibration.

python -m benchmarks plan [--cases toy products adapters]
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    build_parser,
    clear_peak,
    format_table,
    open_session,
    read_memory,
    run_in_process,
    spread,
)

CASES: dict[str, tuple[str, ...]] = {
    "toy": ("smoke/toy", "student.model.pretrain.steps=0", "teacher.model.pretrain.steps=0"),
    "products": ("products", "train.threads=1"),
    "adapters": (
        "products",
        "train.threads=1",
        "student.lora={rank: 16, alpha: 32}",
        "student.trainable_layers=null",
    ),
}
STEPS = 5
"""The first step warms up, the second calibrates, and the remaining steps are predicted."""


def main() -> None:
    """Report one line: memory per process, and wall seconds, which need an idle machine."""
    parser = build_parser(__doc__)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--measure", choices=list(CASES), help="internal: do the steps of a case")
    parser.add_argument("--predict", choices=list(CASES), help="internal: plan a case")
    parser.add_argument("--answer-tokens", type=int, help="internal: how long its answers are")
    options = parser.parse_args()
    if options.measure or options.predict:
        figures = (
            _measure_steps(options.measure)
            if options.measure
            else _plan_case(options.predict, options.answer_tokens)
        )
        print(json.dumps(figures))
        return
    session = open_session("plan", options)
    readings, rows, figures = {}, [], {}
    for case in ["toy"] if options.quick else options.cases:
        rounds = 1 if options.quick else min(session.rounds, 3)
        steps = [run_in_process("benchmarks.plan", "--measure", case) for _ in range(rounds)]
        length = round(max(measured["length"] for measured in steps))
        planned = run_in_process("benchmarks.plan", "--predict", case, "--answer-tokens", length)
        ratios = spread([measured["peak"] / planned["peak"] for measured in steps])
        readings[f"plan.memory.{case}"] = ratios
        figures[case] = {"planned": planned, "measured": steps}
        seconds = readings[f"plan.seconds.{case}"] = spread(
            [measured["seconds"] / measured["predicted"] for measured in steps]
        )
        rows.append(
            [
                case,
                steps[0]["peak"],
                planned["peak"],
                ratios["median"],
                steps[0]["seconds"],
                seconds["median"],
            ]
        )
    print(
        format_table(
            ["case", "peak MiB", "planned MiB", "ratio", "seconds", "seconds / planned"], rows
        )
    )
    session.report(readings, cases=figures)


def _measure_steps(case: str) -> dict[str, Any]:
    """Measure the peak of a process that takes a few steps, and compare later steps' seconds with the prediction."""
    from practicum.costs import PHASES
    from practicum.recipe import load_recipe
    from practicum.runs.assembly import assemble_run
    from practicum.runs.plan.planning import StepTiming
    from practicum.training.loop import train_step

    recipe, *overrides = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        clear_peak()
        built = assemble_run(load_recipe(recipe, overrides), Path(folder))
        metrics = [
            train_step(step, built.parts, built.settings).metrics for step in range(1, STEPS + 1)
        ]
    flops = [{phase: row[f"cost/flops_{phase}"] for phase in PHASES} for row in metrics]
    seconds = [{phase: row[f"seconds_{phase}"] for phase in PHASES} for row in metrics]
    calibration = StepTiming(seconds[1], flops[1], metrics[1]["length"])
    return {
        "peak": read_memory(),
        "length": max(row["length"] for row in metrics),
        "seconds": sum(sum(of_step.values()) for of_step in seconds[2:]),
        "predicted": sum(sum(calibration.predict(of_step).values()) for of_step in flops[2:]),
    }


def _plan_case(case: str, answer_tokens: int | None) -> dict[str, Any]:
    """Return the planned peak in MiB of the phases of a step, which the measured process executes."""
    from practicum.recipe import load_recipe
    from practicum.runs.plan import plan

    recipe, *overrides = CASES[case]
    made = plan(load_recipe(recipe, overrides), limit=2**60, answer_tokens=answer_tokens)
    phases = {phase: made.memory.of(phase) / 2**20 for phase in ("sample", "score", "update")}
    return {"peak": max(phases.values()), "phases": phases}


if __name__ == "__main__":
    main()
