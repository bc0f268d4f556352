"""Write the results in docs/performance.md and their plots, docs/img/performance-*.svg, from the recorded lines.

python -m benchmarks page
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import goals

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINES, PAGE, IMAGES = (
    DOCS.parent / "results" / "performance.jsonl",
    DOCS / "performance.md",
    DOCS / "img",
)

Line = dict[str, Any]

BLOCK = re.compile(
    r"(<!-- generated: performance -->\n).*?(?=<!-- end of generated -->)", re.DOTALL
)
"""The part of the page that is written from the recorded lines."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One image: series of points as lines on logarithmic axes, or one bar for each series at each name."""

    name: str
    caption: str
    kind: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[Any, float]]]

    @property
    def digest(self) -> str:
        """The digest of the data, which tells an image of other data, whichever version drew it."""
        content = [self.name, self.caption, self.kind, self.x, self.y, self.series]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The file of the image."""
        return IMAGES / f"performance-{self.name}.svg"


def main() -> None:
    """Write the page and the plots that have something to show."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lines = read(LINES)
    made = build_plots(lines)
    if made:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            sys.exit("the plots are drawn by matplotlib: pip install -e '.[dev]'")
        IMAGES.mkdir(exist_ok=True)
    for plot in made:
        draw(plot)
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(f"wrote {PAGE.name} and {len(made)} plots from {len(lines)} lines")


def read(path: Path) -> list[Line]:
    """Return the recorded lines, without lines of quick runs."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if not line.get("quick")]


def fill_page(text: str, lines: Sequence[Line]) -> str:
    """Replace the generated results in the text of the page."""
    return BLOCK.sub(lambda match: match[1] + render_results(lines), text)


def render_results(lines: Sequence[Line]) -> str:
    """Render every goal with its result, the plots and the measurements as Markdown."""
    newest = find_latest(lines)
    used: list[Line] = []
    sections = [
        _render_section(group, members, newest, used) for group, members in goals.GOALS.items()
    ]
    images = [
        f"![{plot.caption}](img/{plot.path.name})\n\n{plot.caption}.\n"
        for plot in build_plots(lines)
    ]
    parts = [render_summary(newest), *sections]
    if images:
        parts += ["## Plots\n", *images]
    return "\n".join([*parts, _render_measurements(used)])


def find_latest(lines: Iterable[Line]) -> dict[str, Line]:
    """The newest line that holds a reading of each goal."""
    return {key: line for line in lines for key in line.get("readings", {}) if key in goals.BY_KEY}


def render_summary(newest: Mapping[str, Line]) -> str:
    """Return the sentence that counts the goals by verdict."""
    counts: dict[str, int] = {}
    for goal in goals.BY_KEY.values():
        verdict = _judge(goal, newest).partition(":")[0]
        counts[verdict] = counts.get(verdict, 0) + 1
    order = ["pass", "fail", *sorted(counts.keys() - {"pass", "fail", NOTHING}), NOTHING]
    sentence = ", ".join(f"{counts[name]} {name}" for name in order if name in counts)
    return f"Of {len(goals.BY_KEY)} goals: {sentence}.\n"


NOTHING = "not measured"


def _judge(goal: goals.Goal, newest: Mapping[str, Line]) -> str:
    line = newest.get(goal.key)
    if line is None:
        return NOTHING
    return goals.judge_goal(goal.on(line), line["readings"][goal.key])


def _render_section(
    group: str, members: Sequence[goals.Goal], newest: Mapping[str, Line], used: list[Line]
) -> str:
    rows = []
    for goal in members:
        line = newest.get(goal.key)
        if line is None:
            rows.append([goal.about, "", goal.bound, NOTHING, "", ""])
            continue
        if line not in used:
            used.append(line)
        reading = line["readings"][goal.key]
        ends = f"{goals.number(reading['least'])} to {goals.number(reading['greatest'])}"
        rounds = int(reading["count"])
        verdict = f"**{_judge(goal, newest)}**"
        measured = f"{goals.number(reading['median'])}{goal.unit}"
        rows.append(
            [
                goal.about,
                measured,
                goal.on(line).bound,
                verdict,
                f"{ends} ({rounds})" if rounds > 1 else "",
                f"[{used.index(line) + 1}]",
            ]
        )
    head = [
        "goal",
        "measured",
        "threshold",
        "result",
        "range (rounds)",
        "measurement",
    ]
    floors = "".join(filter(None, (_describe_floor(goal, newest) for goal in members)))
    return f"## {group}\n\n{render_table(head, rows)}" + (f"{floors}\n" if floors else "")


def _describe_floor(goal: goals.Goal, newest: Mapping[str, Line]) -> str | None:
    """Return what a ratio of speeds would be at the floor of a step, and the goal in floors."""
    name, line = goal.key.rpartition(".")[0], newest.get(goal.key)
    if goal.quiet is None or line is None or f"{name}.roofline" not in line["readings"]:
        return None
    readings = {key: reading["median"] for key, reading in line["readings"].items()}
    highest = readings[goal.key] * readings[f"{name}.roofline"]
    text = (
        f"\n- {goal.about}: a step of what arithmetic and bandwidth allow, and no more, would reach "
        f"{highest:.3g}. "
    ) + (
        f"So {goal.quiet:g} cannot be reached on this core."
        if highest < goal.quiet
        else f"To reach {goal.quiet:g} is to take {highest / goal.quiet:.2f} times as long."
    )
    if f"{name}.kernels" not in readings:
        return text
    least = readings[f"{name}.kernels"]
    is_out_of_reach = highest / least < goal.quiet <= highest
    verdict = f", so {goal.quiet:g} cannot be reached with these kernels" if is_out_of_reach else ""
    return (
        f"{text} Its kernels (MKL, oneDNN and the compiled program) take {least:.2f} times the floor here: "
        f"without any overhead between them it would reach {highest / least:.3g}{verdict}."
    )


def _describe_machine(machine: Mapping[str, Any]) -> str:
    """The processor with its vectors, where the line knows them, and the threads in use."""
    vectors = f" ({machine['vectors']})" if "vectors" in machine else ""
    cores = f"{machine['cores']} cores, {machine['threads']} in use"
    return f"{machine['processor']}{vectors}, {cores}"


def _render_measurements(used: Sequence[Line]) -> str:
    if not used:
        return "## Measurements\n\nNone has been recorded yet.\n"
    rows = []
    for number, line in enumerate(used, start=1):
        machine = line["machine"]
        versions = [machine[name] for name in ("python", "torch", "transformers")]
        peers = [f"{name} {version}" for name, version in line.get("peers", {}).items()]
        before, after = line["load"]
        ceilings = line.get("ceilings", {})
        rows.append(
            [
                str(number),
                f"`{line['command']}`{_describe_case(line)}",
                _describe_machine(machine),
                ", ".join([*versions, *peers]),
                f"{before:g}, {after:g}",
                f"{ceilings['gflops']:.0f} GFLOP/s, {ceilings['read_gb']:.0f} GB/s"
                if ceilings
                else "",
                line["commit"],
                line["time"][:10],
            ]
        )
    head = [
        "",
        "command",
        "machine",
        "Python, torch, transformers",
        "load before, after",
        "ceilings of a core",
        "commit",
        "day",
    ]
    note = "`+` after a commit: files in `src` had uncommitted changes."
    return f"## Measurements\n\n{note}\n\n{render_table(head, rows)}"


def _describe_case(line: Line) -> str:
    """Return the words that distinguish a line from further results of its command."""
    if line["benchmark"] == "loss":
        return f", T = {line['tokens']:,}, V = {line['vocabulary']:,}"
    if line["benchmark"] == "rollout":
        return f", {line['model']}, {line['lengths']}, {line['slots']} slots"
    return f", {line['config']}" if line["benchmark"] == "step" else ""


def build_plots(lines: Sequence[Line]) -> list[Plot]:
    """Return the plots that have data, from the newest full line of each case."""
    speed = "tokens_per_second"
    plotted = [line for line in _select_lines(lines, "loss") if _is_plotted(line)]
    loss = _choose_full_lines(plotted, "seconds", lambda line: line["tokens"])
    rollouts = _choose_full_lines(
        _select_lines(lines, "rollout"),
        speed,
        lambda line: f"{line['model']}, {line['lengths']}, {line['slots']}",
    )
    steps = _choose_full_lines(_select_lines(lines, "step"), speed, lambda line: line["config"])
    made = [
        Plot(
            "loss-time",
            "Seconds of the loss with its gradient against the tokens, V = 49,152, student 256 wide, teacher 512",
            "lines",
            "tokens",
            "seconds",
            _turn(
                {tokens: _take_medians(line["seconds"]) for tokens, line in sorted(loss.items())}
            ),
        ),
        Plot(
            "loss-memory",
            "Extra peak memory of the loss against the tokens, V = 49,152",
            "lines",
            "tokens",
            "MiB",
            _turn({tokens: line["peak_mib"] for tokens, line in sorted(loss.items())}),
        ),
        Plot(
            "rollout-speed",
            "Tokens per processor second of rollouts: model, lengths and slots",
            "bars",
            "",
            "tokens / s",
            _turn({name: _take_medians(line[speed]) for name, line in rollouts.items()}),
        ),
        Plot(
            "step-speed",
            "Answer tokens per processor second of whole training steps",
            "bars",
            "",
            "tokens / s",
            _turn({name: _take_medians(line[speed]) for name, line in steps.items()}),
        ),
        Plot(
            "step-memory",
            "Peak memory of the whole training process",
            "bars",
            "",
            "MiB",
            _turn({name: _take_medians(line["peak_mib"]) for name, line in steps.items()}),
        ),
        *_plot_teachers(lines),
        *_plot_scaling(lines),
    ]
    return [plot for plot in made if plot.series]


def _plot_teachers(lines: Sequence[Line]) -> list[Plot]:
    made = []
    for line in _select_lines(lines, "teachers")[-1:]:
        routed = {"route": "routed", "sum": "summed"}
        times = {
            routed[kind]: [(k, line["seconds"][f"{kind} {k}"]["median"]) for k in line["k"]]
            for kind in routed
        }
        memory = {
            f"{routed[kind]}, {where}": [
                (k, line["peak_mib"][f"{kind} {k} {where}"]) for k in line["k"]
            ]
            for kind in routed
            for where in ("resident", "disk")
        }
        caption = "against the number of teachers of the same tokens"
        made += [
            Plot(
                "teachers-time",
                f"Seconds of a step {caption}",
                "lines",
                "teachers",
                "seconds",
                times,
            ),
            Plot(
                "teachers-memory",
                f"Peak memory of a step {caption}",
                "lines",
                "teachers",
                "MiB",
                memory,
            ),
        ]
    return made


def _plot_scaling(lines: Sequence[Line]) -> list[Plot]:
    """Plot each cost relative to the cost of its smallest size."""
    titles = {
        "loss.tokens": "loss, tokens",
        "loss.vocabulary": "loss, vocabulary",
        "step.tokens": "step, tokens",
        "rollout.prompts": "decoding per token, prompts",
    }
    made = []
    for line in _select_lines(lines, "scaling")[-1:]:
        series = {
            title: [
                (size / fit["sizes"][0], seconds / fit["seconds"][0])
                for size, seconds in zip(fit["sizes"], fit["seconds"], strict=True)
            ]
            for what, title in titles.items()
            for fit in [line["fits"][what]]
        }
        caption = "Seconds relative to the smallest size, against the relative size"
        made.append(
            Plot(
                "scaling",
                caption,
                "lines",
                "size / smallest size",
                "seconds / seconds of the smallest size",
                series,
            )
        )
    return made


def _select_lines(lines: Sequence[Line], benchmark: str) -> list[Line]:
    return [
        line
        for line in lines
        if line["benchmark"] == benchmark and line.get("device", "cpu") == "cpu"
    ]


def _choose_full_lines(
    lines: Sequence[Line], column: str, name_case: Callable[[Line], Any]
) -> dict[Any, Line]:
    """Return the newest line of each case that lacks no contender of an older one.

    A measurement of some contenders never hides one of all. Their figures are not joined: they
    may come from two machines.
    """
    chosen: dict[Any, Line] = {}
    for line in lines:
        case = name_case(line)
        if case not in chosen or line[column].keys() >= chosen[case][column].keys():
            chosen[case] = line
    return chosen


def _is_plotted(line: Line) -> bool:
    return line["vocabulary"] == 49152 and line["widths"] == [256, 512]


def _take_medians(readings: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {name: reading["median"] for name, reading in readings.items()}


def _turn(columns: Mapping[Any, Mapping[str, float]]) -> dict[str, list[tuple[Any, float]]]:
    """From values by place and name to the points of each name."""
    series: dict[str, list[tuple[Any, float]]] = {}
    for place, values in columns.items():
        for name, value in values.items():
            series.setdefault(name, []).append((place, value))
    return series


def draw(plot: Plot) -> None:
    """Write the image; the same data give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings: dict[Any, Any] = {"svg.hashsalt": "practicum", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        DRAWN[plot.kind](axes, plot)
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8)
        unstamped = {"Date": None, "Creator": None, "Description": plot.digest}
        figure.savefig(plot.path, format="svg", metadata=unstamped)
        pyplot.close(figure)


def _draw_lines(axes: Any, plot: Plot) -> None:
    for name, points in plot.series.items():
        is_ours = name in ("ours", "reverse_kl")
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=3,
            linewidth=2 if is_ours else 1,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda value, place: f"{value:g}")
    places = sorted({x for points in plot.series.values() for x, _ in points})
    axes.set_xticks(places, [f"{place:g}" for place in places])


def _draw_bars(axes: Any, plot: Plot) -> None:
    places = list(dict.fromkeys(x for points in plot.series.values() for x, _ in points))
    width = 0.8 / len(plot.series)
    for number, (name, points) in enumerate(plot.series.items()):
        at = [places.index(x) - 0.4 + width * (number + 0.5) for x, _ in points]
        bars = axes.bar(at, [y for _, y in points], width, label=name)
        axes.bar_label(bars, fmt=lambda value: goals.number(value), fontsize=7)
    axes.set_xticks(range(len(places)), places)


DRAWN: dict[str, Callable[[Any, Plot], None]] = {"lines": _draw_lines, "bars": _draw_bars}


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *cells])


if __name__ == "__main__":
    main()
