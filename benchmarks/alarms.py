"""Count false and true alarms of each monitor over many seeds of toy runs, most of them healthy.

    python -m benchmarks alarms [--runs 680] [--rows FILE] [--only KIND ...]

Kinds of runs alternate, and each kind tests some of the monitors: see `KINDS`. Every run has a different seed. A rate counts the
runs with at least one alarm more severe than `log`, among the runs in which the monitor had values to check. Runs of a kind that is
broken on purpose only count for its monitor, as true alarms. Alarms depend only on the rows of metrics.jsonl. With `--rows`, the
rows are stored as the runs end; a second command continues an interrupted one, and stored rows are judged again without a run.
With `--only`, runs of other kinds are skipped, and the remaining runs do not change.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.failures import FAILURES
from benchmarks.measuring import build_parser, build_reading, format_table, open_session
from benchmarks.toys import (
    CALLING,
    SUMS,
    build_recipe_data,
    build_task_data,
    list_warnings,
    pair,
    play,
)
from practicum.monitors import MONITORS, History, MonitorSettings, StepView, Thresholds, Watch
from practicum.monitors.facts import RecipeFacts
from practicum.recipe import parse_recipe, resolve_recipe
from practicum.statistics import wilson

RUNS, PAIRS, STUDENT, TEACHER = 680, 4, 80, 200

LETTERS = {
    "type": "skills",
    "skills": ["copy", "next"],
    "alphabet": "abcdefghijklmnopqrstuvwxyz",
    "shortest": 12,
    "longest": 20,
    "train_size": 256,
    "heldout_size": 8,
}
"""Long answers in two domains, with more letters than the 16 top tokens that are compared."""

TWO_LETTERS = {"alphabet": "ab", "longest": 5, "train_size": 30, "heldout_size": 30}
"""A task that the toy models solve in part."""

THREE_LETTERS = {
    "type": "skills",
    "skills": ["double"],
    "alphabet": "abc",
    "shortest": 6,
    "longest": 10,
    "train_size": 256,
    "heldout_size": 8,
}
"""Long answers that repeat the same letter, like their prompts."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of run: its changes of the toy recipe, and its task if it differs; `MODELS` is a folder in it.

    `taught` are the supervised steps of student and teacher before the run; kinds with long answers or rewards have too few steps.
    `broken` is the monitor that should raise an alarm, if a kind is not meant to be healthy.
    """

    changes: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)
    monitors: Mapping[str, Any] = field(default_factory=dict)
    taught: tuple[int, int] = (STUDENT, TEACHER)
    broken: str = ""


REWARDED = [
    {"signal": "score", "coefficient": 0.1},
    {"signal": "full", "divergence": "reverse_kl"},
]
OFTEN = {"prompts": 30, "samples": 4, "temperature": 1.0, "every": 4, "teacher": False}
HELDOUT = {"prompts": 16, "every": 8, "teacher": False}
SEEING = {
    "type": "privileged",
    "teacher": {"type": "self", "weights": "periodic", "period": 8},
    "demonstrations": [{"prompt": "ab", "answer": "ba"}],
}
MEMBER = {"type": "model", "model": "MODELS/teacher"}
KINDS: dict[str, Kind] = {
    "still": Kind({"optimizer.learning_rate": 1e-9, "train.steps": 32}),
    "full": Kind({"train.steps": 32, "evaluation": HELDOUT}),
    "sampled": Kind({"objective": {"signal": "sampled"}, "train.steps": 32, "evaluation": HELDOUT}),
    "candidates": Kind(
        {
            "objective": {"signal": "topk(6)", "divergence": "jsd(0.3)"},
            "train.steps": 32,
            "evaluation": HELDOUT,
        }
    ),
    "long": Kind({"train.steps": 70}),
    "rewarded": Kind(
        {"objective": {"losses": REWARDED}, "train.steps": 32, "rollout.n": 8, "evaluation": OFTEN},
        TWO_LETTERS,
        taught=(400, 1000),
    ),
    "scored": Kind(
        {
            "objective": {"losses": [{**REWARDED[0], "scorer": "orm"}, REWARDED[1]]},
            "scorers": {"orm": {"type": "outcome", "share": 0.5, "learning_rate": 0.001}},
            "train.steps": 32,
            "rollout.n": 8,
            "evaluation": OFTEN,
        },
        TWO_LETTERS,
        taught=(400, 1000),
    ),
    "weighted": Kind({"objective.weights": "entropy_top(0.8)", "train.steps": 32}),
    "replayed": Kind(
        {
            "rollout.source": "mix(student=0.5, other=replay)",
            "rollout.replay_size": 48,
            "train.steps": 32,
        },
        monitors={"M18": {"action": "warn", "level": 16}},
    ),
    "copied": Kind({"teacher": SEEING, "train.steps": 32}),
    "letters": Kind({"rollout.max_new_tokens": 24, "train.steps": 40}, LETTERS, taught=(400, 1000)),
    "repeats": Kind(
        {"rollout.max_new_tokens": 24, "train.steps": 40}, THREE_LETTERS, taught=(400, 1000)
    ),
    "routed": Kind(
        {
            "teacher": {
                "type": "route",
                "key": "domain",
                "teachers": {"copy": MEMBER, "next": MEMBER},
            },
            "rollout.max_new_tokens": 24,
            "train.steps": 24,
        },
        LETTERS,
        taught=(400, 1000),
    ),
    "called": Kind(CALLING, {**SUMS, "again": 0.2}, taught=(800, 1000)),
    "called often": Kind(CALLING, {**SUMS, "again": 0.7}, taught=(800, 1000), broken="M37"),
    "scored by length": Kind(
        {**FAILURES["a scorer that likes length"].broken, "train.steps": 32},
        taught=(150, 120),
        broken="M36",
    ),
    "too fast": Kind(
        {"optimizer.learning_rate": 0.3, "train.steps": 32, "evaluation": HELDOUT}, broken="M39"
    ),
}
HEALTH = ("reward", "settled_prompts", "truncated", "repetition", "reverse_kl")
"""Readings by which it is seen whether a kind of run is healthy."""
AlarmRun = tuple[str, dict[str, Any], list[dict[str, Any]]]
"""The kind of a run, its resolved recipe, its rows."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--runs", type=int, help=f"how many (default {RUNS}, with --quick {len(KINDS)})"
    )
    parser.add_argument(
        "--rows", type=Path, help="file to store the rows of all runs, and to resume from"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    options = parser.parse_args()
    count = options.runs or (len(KINDS) if options.quick else RUNS)
    session = open_session("alarms", options)
    spoke: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    looked: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    divergences_left = []
    ends: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for kind, recipe, rows in _yield_runs(
        list_numbers(count, options.only), options.quick, options.rows
    ):
        runs[kind] += 1
        settings = parse_recipe(recipe, "toy").monitors
        alarms = Watch(recipe, settings).replay(rows)
        spoke[kind].update({alarm.id for alarm in alarms if alarm.action != "log"})
        if not KINDS[kind].broken:
            looked.update(find_watching_monitors(recipe, settings, rows))
        ends[kind].append((rows[0], rows[-1]))
        if kind == "full":
            divergences_left.append(rows[-1]["reverse_kl"] / rows[0]["reverse_kl"])
    total: Counter[str] = sum(
        (spoke[name] for name, kind in KINDS.items() if not kind.broken), Counter()
    )
    rates = {name: total[name] / looked[name] for name in MONITORS if looked[name]}
    print(
        format_table(
            ["id", "monitor", *KINDS, "runs", "rate", "at most"],
            [
                [
                    name,
                    MONITORS[name].name,
                    *(spoke[kind][name] for kind in KINDS),
                    looked[name],
                    rates.get(name, ""),
                    wilson(total[name], looked[name]).high if looked[name] else "",
                ]
                for name in MONITORS
            ],
        )
    )
    print("\nmedian at the first step, at the last, and the greatest at the last")
    print(
        format_table(
            ["kind", *HEALTH],
            [[kind, *_summarize_health(pairs)] for kind, pairs in ends.items() if pairs],
        )
    )
    for name in (name for name, kind in KINDS.items() if kind.broken and runs[name]):
        monitor = KINDS[name].broken
        share = wilson(spoke[name][monitor], runs[name])
        print(
            f"true alarms: {monitor} in {spoke[name][monitor]} of {runs[name]} runs {name}: {share}"
        )
    print(f"{runs.total()} runs; the highest rate is {max(rates.values(), default=0.0):.3f}")
    session.report(
        {"alarms.false": build_reading(max(rates.values(), default=0.0))},
        runs=dict(runs),
        looked=dict(looked),
        spoke={name: total[name] for name in MONITORS if total[name]},
        by_kind={kind: dict(counts) for kind, counts in spoke.items()},
        upper_end_of_none=wilson(0, sum(runs[n] for n in KINDS if not KINDS[n].broken)).high,
        reverse_kl_left=sum(divergences_left) / max(len(divergences_left), 1),
    )


def _summarize_health(ends: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return each reading of `HEALTH` at the first and last steps of runs of a kind, which tell whether they are healthy."""
    cells = []
    for reading in HEALTH:
        first, last = (
            [row[reading] for row in rows if reading in row] for rows in zip(*ends, strict=True)
        )
        cells.append(
            f"{median(first):.2f}, {median(last):.2f}, {max(last):.2f}" if first and last else ""
        )
    return cells


def find_watching_monitors(
    recipe: Mapping[str, Any], settings: Mapping[str, MonitorSettings], rows: list[dict[str, Any]]
) -> set[str]:
    """Return the monitors that had values to check; monitors of the overlap need tokens outside the overlap."""
    history, facts, watching = History(), RecipeFacts.of(recipe), set()
    for row in rows:
        history.add(
            {
                name: value
                for name, value in row.items()
                if name != "step" and isinstance(value, int | float)
            }
        )
        view = StepView(row["step"], history.get_rows(1)[0], history, facts)
        for monitor in (candidate for candidate in MONITORS.values() if candidate.action != "off"):
            level = settings[monitor.id].level if monitor.level is None else monitor.level
            if monitor.judge(view, Thresholds(level, monitor.change)) is not None:
                watching.add(monitor.id)
    everything = all(row.get("overlap", 1.0) > 0.95 for row in rows)
    return watching - {"M9", "M10"} if everything else watching


def list_numbers(count: int, only: Collection[str]) -> list[int]:
    """Return the numbers of the first runs, without runs of other kinds."""
    return [number for number in range(count) if list(KINDS)[number % len(KINDS)] in only]


def _yield_runs(numbers: Sequence[int], quick: bool, store: Path | None) -> Iterator[AlarmRun]:
    """Yield the stored runs, then run the missing ones, and store them if `store` is given."""
    stored = {} if store is None else dict(_read_runs(store))
    with ExitStack() as stack:
        models: dict[tuple[int, str], Path] = {}
        for number in numbers:
            if number not in stored:
                stored[number] = _play_run(number, quick, models, stack)
                if store is not None:
                    _keep(store, number, stored[number])
            yield stored.pop(number)


def _read_runs(path: Path) -> Iterator[tuple[int, AlarmRun]]:
    """The runs of a file by their number; a last line that was torn by a kill is cut off."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        path.write_bytes(content[:end])
    for line in content[:end].splitlines():
        row = json.loads(line)
        yield row["number"], (row["kind"], row["recipe"], row["rows"])


def _keep(path: Path, number: int, run: AlarmRun) -> None:
    row = {"number": number, **dict(zip(("kind", "recipe", "rows"), run, strict=True))}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _play_run(
    number: int, quick: bool, models: dict[tuple[int, str], Path], stack: ExitStack
) -> AlarmRun:
    """One run; pairs of models are made when they are first needed."""
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    seed = number // len(KINDS) % (1 if quick else PAIRS)
    taught = (5, 10) if quick else kind.taught
    place = (seed, json.dumps([kind.task, taught]))
    if place not in models:
        models[place] = stack.enter_context(pair(*taught, seed=seed, task=kind.task))
    folder = models[place]
    setting = {
        "seed": number,
        "monitors": {**list_warnings(list(MONITORS)), **kind.monitors},
        "train.prompts_per_step": 6,
    }
    setting |= {"task": build_task_data(kind.task), **_fill_in_folder(kind.changes, folder)}
    setting |= {"train.steps": 12} if quick else {}
    rows = play(folder, setting).rows
    return name, resolve_recipe(parse_recipe(build_recipe_data(folder, setting), "toy")), rows


def _fill_in_folder(value: Any, folder: Path) -> Any:
    """Settings with the folder of the models put in."""
    if isinstance(value, Mapping):
        return {key: _fill_in_folder(inner, folder) for key, inner in value.items()}
    return value.replace("MODELS", str(folder)) if isinstance(value, str) else value


if __name__ == "__main__":
    main()
