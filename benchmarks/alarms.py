"""False alarms: healthy toy runs with different seeds, and how many of them each monitor spoke up in.

    python -m benchmarks alarms [--runs 200] [--rows FILE]

Five kinds take turns: one that stands still (a learning rate of nothing, so that its steps differ by chance alone), three that
learn (full reverse KL, one sampled token, JSD over candidates), and a longer one. Every run has a seed of its own. A rate counts
runs in which the monitor gave at least one alarm graver than `log`. Alarms follow from the rows of metrics.jsonl alone: with
`--rows` these are kept, and a second command judges them again without a run.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measuring import parser, session, single, table
from benchmarks.toys import only_warned, pair, play, recipe_data
from practicum.diagnosis.monitors import MONITORS, Watch
from practicum.recipe import parse_recipe, resolved
from practicum.statistics import wilson

PAIRS, STUDENT, TEACHER = 4, 80, 200
KINDS: dict[str, dict[str, Any]] = {
    "still": {"optimizer.learning_rate": 1e-9, "train.steps": 32},
    "full": {"train.steps": 32},
    "sampled": {"objective": {"signal": "sampled"}, "train.steps": 32},
    "candidates": {"objective": {"signal": "topk(6)", "divergence": "jsd(0.3)"}, "train.steps": 32},
    "long": {"train.steps": 70},
}
Run = tuple[str, dict[str, Any], list[dict[str, Any]]]
"""The kind of a run, its resolved recipe, its rows."""


def main() -> None:
    """Report one line."""
    made = parser(__doc__)
    made.add_argument("--runs", type=int, help="how many (default 200, with --quick 5)")
    made.add_argument("--rows", type=Path, help="where the rows of all runs are kept, or were")
    options = made.parse_args()
    count = options.runs or (5 if options.quick else 200)
    now = session("alarms", options)
    spoke: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    runs: Counter[str] = Counter()
    left = []
    for kind, recipe, rows in _runs(count, options.quick, options.rows):
        runs[kind] += 1
        alarms = Watch(recipe, parse_recipe(recipe, "toy").monitors).replay(rows)
        spoke[kind].update({alarm.id for alarm in alarms if alarm.action != "log"})
        if kind == "full":
            left.append(rows[-1]["reverse_kl"] / rows[0]["reverse_kl"])
    total: Counter[str] = sum(spoke.values(), Counter())
    rates = {name: total[name] / runs.total() for name in MONITORS}
    print(
        table(
            ["id", "monitor", *KINDS, "rate"],
            [[name, MONITORS[name].name, *(spoke[kind][name] for kind in KINDS), rates[name]] for name in MONITORS],
        )
    )
    print(f"{runs.total()} runs; the highest rate is {max(rates.values()):.3f}")
    now.report(
        {"alarms.false": single(max(rates.values()))},
        runs=dict(runs),
        spoke={name: total[name] for name in MONITORS if total[name]},
        by_kind={kind: dict(counts) for kind, counts in spoke.items()},
        upper_end_of_none=wilson(0, runs.total()).high,
        reverse_kl_left=sum(left) / len(left),
    )


def _runs(count: int, quick: bool, kept: Path | None) -> Iterator[Run]:
    """The runs that are kept, or new ones, which are kept where that is wanted."""
    if kept is not None and kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row["kind"], row["recipe"], row["rows"]
        return
    for run in _new_runs(count, quick):
        if kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(zip(("kind", "recipe", "rows"), run, strict=True))) + "\n")
        yield run


def _new_runs(count: int, quick: bool) -> Iterator[Run]:
    pairs = 1 if quick else PAIRS
    for number in range(pairs):
        with pair(*((5, 10) if quick else (STUDENT, TEACHER)), seed=number) as models:
            for seed in range(number, count, pairs):
                kind = list(KINDS)[seed // pairs % len(KINDS)]
                setting = {"seed": seed, "monitors": only_warned(list(MONITORS)), "train.prompts_per_step": 6}
                setting |= KINDS[kind] | ({"train.steps": 12} if quick else {})
                rows = play(models, setting).rows
                yield kind, resolved(parse_recipe(recipe_data(models, setting), "toy")), rows


if __name__ == "__main__":
    main()
