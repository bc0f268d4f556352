"""Break the recipe products as a user might: report the doctor's findings before the run, and the alarms during it.

    python -m benchmarks broken [--only NAME ...]

The student is *dressed*: copied to a new folder with another chat template or end token. Its weights never change. In these cases
the teacher is a separate model, so that the two can differ.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import Session, build_environment, build_parser, format_table
from practicum.models.sources import locate_gguf

MODEL = "smollm2-135m-instruct"
PLAIN = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}{{ 'assistant: ' }}"
END_OF_TEXT = {"id": 0, "text": "<|endoftext|>"}
"""The token at which a base model of this family stops, and an instruct model does not."""

APART = "teacher.teacher={type: model, model: " + MODEL + ', system: ""}'
"""The same teacher as a separate model, which keeps its own template."""

STUDENT = "student.model="
"""Followed by the folder of the dressed student."""


def main() -> None:
    """Report one line for each way."""
    parser = build_parser(__doc__)
    parser.add_argument("--only", nargs="+", help="some of the ways")
    options = parser.parse_args()
    session = Session(
        "broken", options.quick, options.record, command="python -m benchmarks broken"
    )
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, overrides in build_ways(Path(place)).items():
            if options.only is None or name in options.only:
                outcome = examine(Path(place), overrides) | run_products(
                    Path(place), name, overrides, options.quick
                )
                rows.append(
                    [
                        name,
                        outcome["verdict"],
                        " ".join(outcome["checks"]),
                        " ".join(outcome["alarms"]) or outcome["ended"],
                    ]
                )
                session.report(
                    way=name, overrides=[hide_place(text, place) for text in overrides], **outcome
                )
    print(
        format_table(
            ["the recipe products", "verdict before", "checks that do not pass", "alarms during"],
            rows,
        )
    )


def build_ways(place: Path) -> dict[str, list[str]]:
    """The overrides of each way to break it."""
    return {
        "as it is": [],
        "another template": [APART, f"student.template={PLAIN}"],
        "another stop token": [APART, f"{STUDENT}{dress_model(place / 'other-stop', stops=True)}"],
        "a base model": [
            APART,
            f"{STUDENT}{dress_model(place / 'base', stops=True, template=PLAIN)}",
        ],
        "learning rate x 100": ["optimizer.learning_rate=0.01"],
        "temperature 0.2": ["rollout.temperature=0.2"],
    }


def dress_model(folder: Path, stops: bool = False, template: str | None = None) -> Path:
    """Copy the packaged model to a folder, with another end token or chat template."""
    shutil.copytree(locate_gguf(MODEL), folder)
    if stops:
        for name in ("config.json", "generation_config.json"):
            change(
                folder / name,
                {"eos_token_id": END_OF_TEXT["id"], "pad_token_id": END_OF_TEXT["id"]},
            )
        change(
            folder / "tokenizer_config.json",
            {"eos_token": END_OF_TEXT["text"], "pad_token": END_OF_TEXT["text"]},
        )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def change(path: Path, changes: Mapping[str, Any]) -> None:
    """Set some keys of a JSON file."""
    path.write_text(
        json.dumps({**json.loads(path.read_text("utf-8")), **changes}), encoding="utf-8"
    )


def examine(place: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The verdict, and the checks that do not pass."""
    path = place / "doctor.json"
    run_practicum("doctor", "products", *overrides, "--out", str(path))
    diagnosis = json.loads(path.read_text("utf-8"))
    unwell = [
        f"{check['id']} {check['name']}"
        for check in diagnosis["checks"]
        if check["status"] in ("warn", "fail")
    ]
    return {"verdict": diagnosis["verdict"]["word"], "checks": unwell}


def run_products(place: Path, name: str, overrides: Sequence[str], quick: bool) -> dict[str, Any]:
    """The alarms of a run with the step at which each sounded first, and how it ended; nothing is evaluated."""
    run = name.replace(" ", "-")
    steps = ["train.steps=2"] if quick else []
    code = run_practicum(
        "run",
        "products",
        *overrides,
        *steps,
        "evaluation.prompts=0",
        f"name={run}",
        "--out",
        str(place),
    )
    alarms: dict[str, str] = {}
    for line in (place / run / "alarms.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        alarms.setdefault(row["id"], f"{row['id']} {row['name']} ({row['step']})")
    return {"alarms": list(alarms.values()), "ended": f"exit {code}"}


def run_practicum(*arguments: str) -> int:
    """The exit code of a command of this library."""
    command = [sys.executable, "-m", "practicum", *arguments]
    return subprocess.run(
        command, capture_output=True, env=build_environment(), check=False
    ).returncode


def hide_place(text: str, place: str) -> str:
    """The override without the place of this machine's temporary files."""
    return text.replace(place, "FOLDER")


if __name__ == "__main__":
    main()
