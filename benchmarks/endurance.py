"""Run the toy pair for many steps, and check that memory and the time per step are constant from step 500 on.

python -m benchmarks endurance [--steps 2000]
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measuring import build_parser, build_reading, format_table, open_session
from practicum.recipe import load_recipe
from practicum.runs import run
from practicum.runs.console import SilentConsole

WARM = 500
"""Steps after which caches are full."""


def main() -> None:
    """Report one line: growth of the resident set and of the time of a step over all but the first steps."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--steps", type=int, help="steps of the run (default 2000, with --quick 200)"
    )
    options = parser.parse_args()
    session = open_session("endurance", options)
    steps = options.steps or (200 if options.quick else 2000)
    warm = min(WARM, steps // 4)
    console = Gauge()
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(
            "smoke/toy", [f"train.steps={steps}", "train.checkpoint_every=100", "train.threads=1"]
        )
        result = run(recipe, out=Path(folder), console=console)
        disk = (
            sum(path.stat().st_size for path in result.folder.rglob("*") if path.is_file()) / 2**20
        )
    seconds = [
        later - earlier
        for earlier, later in zip(console.seconds, console.seconds[1:], strict=False)
    ]
    part = (steps - warm) // 3
    early, late = median(seconds[warm : warm + part]), median(seconds[-part:])
    growth = (console.resident[-1] - console.resident[warm]) / 2**20
    rows = [
        [
            "resident memory",
            f"{console.resident[warm] / 2**20:.0f} MiB",
            f"{console.resident[-1] / 2**20:.0f} MiB",
        ],
        ["a step", f"{1000 * early:.1f} ms", f"{1000 * late:.1f} ms"],
    ]
    print(
        format_table(
            ["of one processor thread", f"after step {warm}", f"before step {steps}"], rows
        )
    )
    session.report(
        {
            "endurance.memory": build_reading(growth),
            "endurance.seconds": build_reading(late / early),
        },
        steps=steps,
        resident_mib=[
            round(console.resident[step] / 2**20, 1)
            for step in range(0, steps, max(steps // 20, 1))
        ],
        folder_mib=round(disk, 1),
    )


class Gauge(SilentConsole):
    """A console that reads the resident set and the processor's clock at the end of each step."""

    def __init__(self) -> None:
        self.resident: list[int] = []
        self.seconds: list[float] = []
        self._process = psutil.Process()

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Read both."""
        self.resident.append(self._process.memory_info().rss)
        self.seconds.append(time.process_time())


if __name__ == "__main__":
    main()
