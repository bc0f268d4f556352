"""Measure the time and the size of the report of a long run, from a generated run folder: no model is loaded.

python -m benchmarks report [--steps 1000] [--rollouts 8] [--tokens 200]
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import build_parser, format_table, open_session, spread

COLUMNS = (
    "sampling_logprobs",
    "policy_logprobs",
    "teacher_logprobs",
    "divergence",
    "student_entropy",
    "teacher_entropy",
)
WORDS = 400


def main() -> None:
    """Report processor seconds of writing the page and of a live page's refresh, and the page's megabytes."""
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=8, help="of each step")
    parser.add_argument("--tokens", type=int, default=200, help="of each rollout")
    options = parser.parse_args()
    session = open_session("report", options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_up_run(folder, options)
        rounds = [_time_page(folder) for _ in range(session.warm_up + session.rounds)][
            session.warm_up :
        ]
        size = (folder / "report.html").stat().st_size / 1e6
        read = (folder / "rollouts.jsonl").stat().st_size / 1e6
    page, live = (
        spread([page_seconds for page_seconds, _ in rounds]),
        spread([live_seconds for _, live_seconds in rounds]),
    )
    rows = [
        ["processor seconds of the page", page["median"]],
        ["processor seconds of a live page", live["median"]],
        ["megabytes of the page", size],
        ["megabytes of rollouts.jsonl", read],
    ]
    print(format_table(["what", "value"], rows))
    session.report(
        {"report.page": page, "report.live": live}, megabytes=size, rollouts_megabytes=read
    )


def _time_page(folder: Path) -> tuple[float, float]:
    """Processor seconds of writing the page, and of making the parts of a live one."""
    from practicum.report import write_report
    from practicum.report.live import LivePage

    start = time.process_time()
    write_report(folder)
    middle = time.process_time()
    LivePage(folder).get_changes_since("")
    return middle - start, time.process_time() - middle


def make_up_run(folder: Path, options: argparse.Namespace) -> None:
    """A run's folder of random numbers, as large as asked."""
    chance = random.Random(0)
    recipe = {
        "name": "made-up",
        "about": "",
        "seed": 0,
        "train": {"steps": options.steps, "threads": 1},
    }
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, "identity": {}}))
    words = [{"step": 1, "id": id, "text": f" word{id}", "control": id == 0} for id in range(WORDS)]
    _write(folder / "vocabulary.jsonl", words)
    _write(
        folder / "metrics.jsonl",
        [_draw_metrics(step, options, chance) for step in range(1, options.steps + 1)],
    )
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(1, options.steps + 1):
            for number in range(options.rollouts):
                file.write(json.dumps(_draw_rollout(step, number, options.tokens, chance)) + "\n")


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _draw_metrics(
    step: int, options: argparse.Namespace, chance: random.Random
) -> dict[str, float]:
    names = (
        "reverse_kl",
        "reward",
        "student_entropy",
        "teacher_entropy",
        "overlap",
        "overlap_mass",
        "grad_norm",
        "truncated",
    )
    counts = {
        "rollouts": options.rollouts,
        "length": float(options.tokens),
        "tokens": options.rollouts * options.tokens,
    }
    return {"step": step, **counts, **{name: chance.random() for name in names}}


def _draw_rollout(step: int, number: int, tokens: int, chance: random.Random) -> dict[str, Any]:
    return {
        "step": step,
        "prompt": f"prompt-{(step * 7 + number // 2) % 300}",
        "sample": number,
        "source": "student",
        "policy_version": step - 1,
        "text": "text",
        "stop_reason": "stop",
        "prompt_tokens": [1, 2, 3],
        "tokens": [chance.randrange(WORDS) for _ in range(tokens)],
        "loss_mask": [True] * tokens,
        **{
            name: [
                -chance.random() if "logprobs" in name else chance.random() for _ in range(tokens)
            ]
            for name in COLUMNS
        },
        "weight": [1 / tokens] * tokens,
        "reward": float(chance.random() < 0.5),
    }


if __name__ == "__main__":
    main()
