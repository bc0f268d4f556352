"""What `practicum plan` says against what happens: peak memory of whole steps, and seconds after a calibration.

python -m benchmarks plan [--cases toy quickstart adapters]
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import clear_peak, in_a_process, memory, parser, session, spread, table

CASES: dict[str, tuple[str, ...]] = {
    "toy": ("smoke/toy", "student.model.pretrain.steps=0", "teacher.model.pretrain.steps=0"),
    "quickstart": ("quickstart", "train.threads=1"),
    "adapters": (
        "quickstart",
        "train.threads=1",
        "student.lora={rank: 16, alpha: 32}",
        "student.trainable_layers=null",
    ),
}
STEPS = 5
"""The first warms up, the second calibrates, the others are predicted."""


def main() -> None:
    """Report one line: memory is that of a process, seconds are of the wall and want an idle machine."""
    made = parser(__doc__)
    made.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    made.add_argument("--measure", choices=list(CASES), help="internal: do the steps of a case")
    made.add_argument("--predict", choices=list(CASES), help="internal: plan a case")
    made.add_argument("--answer-tokens", type=int, help="internal: how long its answers are")
    options = made.parse_args()
    if options.measure or options.predict:
        found = (
            _steps(options.measure)
            if options.measure
            else _planned(options.predict, options.answer_tokens)
        )
        print(json.dumps(found))
        return
    now = session("plan", options)
    readings, rows, figures = {}, [], {}
    for case in ["toy"] if options.quick else options.cases:
        rounds = 1 if options.quick else min(now.rounds, 3)
        steps = [in_a_process("benchmarks.plan", "--measure", case) for _ in range(rounds)]
        length = round(max(found["length"] for found in steps))
        planned = in_a_process("benchmarks.plan", "--predict", case, "--answer-tokens", length)
        ratios = spread([found["peak"] / planned["peak"] for found in steps])
        readings[f"plan.memory.{case}"] = ratios
        figures[case] = {"planned": planned, "measured": steps}
        seconds = readings[f"plan.seconds.{case}"] = spread(
            [found["seconds"] / found["predicted"] for found in steps]
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
    print(table(["case", "peak MiB", "planned MiB", "ratio", "seconds", "seconds / planned"], rows))
    now.report(readings, cases=figures)


def _steps(case: str) -> dict[str, Any]:
    """The peak of a process that does a few steps, and the seconds of the later ones beside those foretold by the second."""
    from practicum.costs import PHASES
    from practicum.recipe import load_recipe
    from practicum.runs.assembly import assemble_run
    from practicum.studies.plan.planning import StepTiming
    from practicum.training.loop import train_step

    recipe, *overrides = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        clear_peak()
        built = assemble_run(load_recipe(recipe, overrides), Path(folder))
        done = [
            train_step(step, built.parts, built.settings).metrics for step in range(1, STEPS + 1)
        ]
    flops = [{phase: row[f"cost/flops_{phase}"] for phase in PHASES} for row in done]
    seconds = [{phase: row[f"seconds_{phase}"] for phase in PHASES} for row in done]
    calibration = StepTiming(seconds[1], flops[1], done[1]["length"])
    return {
        "peak": memory(),
        "length": max(row["length"] for row in done),
        "seconds": sum(sum(of_step.values()) for of_step in seconds[2:]),
        "predicted": sum(sum(calibration.predict(of_step).values()) for of_step in flops[2:]),
    }


def _planned(case: str, answer_tokens: int | None) -> dict[str, Any]:
    """The planned peak in MiB of the phases of a step, which is what the other process does."""
    from practicum.recipe import load_recipe
    from practicum.studies.plan import plan

    recipe, *overrides = CASES[case]
    made = plan(load_recipe(recipe, overrides), limit=2**60, answer_tokens=answer_tokens)
    phases = {phase: made.memory.of(phase) / 2**20 for phase in ("sample", "score", "update")}
    return {"peak": max(phases.values()), "phases": phases}


if __name__ == "__main__":
    main()
