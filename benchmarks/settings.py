"""Find the learning rates that train or destroy the packaged 135M model, for all weights and for adapters.

    python -m benchmarks settings [--rates 1e-6 1e-2] [--seeds 0 1 2] [--record]

The student is distilled by GKD from itself with a system turn in its prompt. Each run starts from the same weights, and runs of one
seed see the same prompts. Monitors only warn. The held-out reverse KL, the share of truncated answers and the accuracy are measured
before and after. `--record` adds the runs to results/settings.json and replaces runs with the same training, rate and seed.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.measuring import describe_commit, format_table
from benchmarks.toys import list_warnings
from practicum.monitors import MONITORS
from practicum.recipe import load_recipe
from practicum.runs import run

RECORD = Path(__file__).resolve().parents[1] / "results" / "settings.json"

RATES = (1e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 2e-3, 1e-2)

SYSTEM = "Answer with an equation such as 7 * 9 = 63."
"""The system turn that the teacher sees and the student does not."""

KINDS = {"all weights": [], "adapters": ["student.lora={}"]}

HEAD = [
    "training",
    "rate",
    "seed",
    "reverse KL before",
    "after",
    "entropy",
    "accuracy",
    "cut",
    "alarms",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one run: held-out values, and the monitors that raised an alarm."""

    training: str
    rate: float
    seed: int
    commit: str
    before: dict[str, float]
    after: dict[str, float]
    alarms: list[str]


def main() -> None:
    """Train at each rate, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--record", action="store_true", help="write results/settings.json")
    parser.add_argument("--quick", action="store_true", help="one step at one rate of each kind")
    arguments = parser.parse_args()
    rates, steps = ([5e-5], 1) if arguments.quick else (arguments.rates, arguments.steps)
    outcomes: list[Outcome] = []
    for seed in arguments.seeds:
        for kind in arguments.kinds:
            for rate in rates:
                outcomes.append(measure(kind, rate, seed, steps))
                print(format_table(HEAD, [list_cells(outcomes[-1])]), flush=True)
                if arguments.record:
                    record(outcomes[-1], steps)
    print(format_table(HEAD, [list_cells(outcome) for outcome in outcomes]))


def record(outcome: Outcome, steps: int) -> None:
    """Put an outcome into results/settings.json, in the order of training, rate and seed."""
    content = json.loads(RECORD.read_text(encoding="utf-8"))
    if content["steps"] != steps:
        raise SystemExit(
            f"{RECORD} has runs of {content['steps']} steps; write --steps {content['steps']}"
        )
    new = asdict(outcome)
    runs = [row for row in content["runs"] if name_run(row) != name_run(new)]
    content = {
        "date": date.today().isoformat(),
        "steps": steps,
        "runs": sorted([*runs, new], key=name_run),
    }
    lines = ",\n".join(f"  {json.dumps(row)}" for row in content.pop("runs"))
    text = json.dumps(content)[:-1] + f', "runs": [\n{lines}\n]}}\n'
    RECORD.write_text(text, encoding="utf-8")


def name_run(row: dict[str, Any]) -> tuple[str, float, int]:
    """Return what tells a recorded run from others."""
    return row["training"], row["rate"], row["seed"]


def measure(kind: str, rate: float, seed: int, steps: int) -> Outcome:
    """Return the outcome of one run at one learning rate."""
    overrides = [
        *KINDS[kind],
        f"optimizer.learning_rate={rate}",
        f"seed={seed}",
        f"train.steps={steps}",
        "train.prompts_per_step=16",
        "train.threads=1",
        "rollout.max_new_tokens=24",
        "evaluation.max_new_tokens=24",
        "evaluation.prompts=36",
        "student.trainable_layers=null",
        f"monitors={json.dumps(list_warnings(list(MONITORS)))}",
        f"teacher={{type: model, model: smollm2-135m-instruct, system: {json.dumps(SYSTEM)}}}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "rates.yaml"
        recipe.write_text("extends: papers/gkd\nsetting: smollm2\n", encoding="utf-8")
        result = run(load_recipe(recipe, overrides), out=Path(folder) / "runs")
        alarms = sorted({alarm["id"] for alarm in read_alarms(result.folder)})
        summary = result.summary
    before, after = pick(summary["before"]), pick(summary["after"])
    return Outcome(kind, rate, seed, describe_commit(), before, after, alarms)


def read_alarms(folder: Path) -> list[dict[str, str]]:
    """Return the alarms of a run."""
    path = folder / "alarms.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def pick(evaluation: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation that are compared."""
    return {
        "reverse_kl": evaluation["reverse_kl"],
        "entropy": evaluation["student_entropy"],
        "accuracy": evaluation["accuracy"]["mean"],
        "cut": evaluation["truncated"],
    }


def list_cells(outcome: Outcome) -> Sequence[str]:
    """Return the cells of an outcome's line."""
    before, after = outcome.before, outcome.after
    return [
        outcome.training,
        f"{outcome.rate:g}",
        str(outcome.seed),
        f"{before['reverse_kl']:.3f}",
        f"{after['reverse_kl']:.3f}",
        f"{before['entropy']:.2f} to {after['entropy']:.2f}",
        f"{before['accuracy']:.2f} to {after['accuracy']:.2f}",
        f"{before['cut']:.2f} to {after['cut']:.2f}",
        " ".join(outcome.alarms) or "none",
    ]


if __name__ == "__main__":
    main()
