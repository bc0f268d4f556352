"""Run folders for the tests of the page: everything that a page can show, and harmful text."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)> "quoted" \u202egnihtemos\u2066 \x1b[31mred\x07 &amp; --> <!--'

ALARMS: list[dict[str, Any]] = [
    {
        "step": 2,
        "id": "M4",
        "name": "truncation",
        "reading": "truncated",
        "value": 0.93,
        "baseline": 0.4,
        "rule": "at least baseline + 0.25, twice",
        "action": "warn",
        "patch": ["rollout.max_new_tokens=8"],
        "set": {"optimizer.learning_rate": 0.001},
    },
    {
        "step": 3,
        "id": "M12",
        "name": "student_entropy",
        "value": 0.05,
        "baseline": None,
        "rule": "",
        "action": "log",
        "patch": None,
    },
]

DOCTOR: dict[str, Any] = {
    "verdict": {
        "word": "GO",
        "meaning": "no check failed",
        "exit_code": 0,
        "because": [],
        "advice": "",
    },
    "checks": [
        {
            "id": "P2",
            "name": "stop event",
            "status": "pass",
            "value": {"mean": -1.2, "low": -1.5, "high": -0.9},
            "anchor": "proposed",
            "sentence": "both stop alike",
            "fix": ["student.stop=[2]"],
        }
    ],
}


def copied(run: Path, folder: Path) -> Path:
    """Copy a run folder, and add alarms and the doctor's verdict."""
    shutil.copytree(run, folder)
    (folder / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in ALARMS))
    (folder / "doctor.json").write_text(json.dumps(DOCTOR))
    return folder


def edit(path: Path, change: Any) -> None:
    """Change a JSON file: `change` gets its value and edits it in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_rows(path: Path, change: Any) -> None:
    """Change every row of a JSONL file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def hostile(run: Path, folder: Path) -> Path:
    """Return a run folder in which every text would do harm if it were executed."""
    copied(run, folder)

    def summary(value: dict[str, Any]) -> None:
        value["name"] = HOSTILE
        for sample in value["samples"]:
            sample.update(prompt=HOSTILE, answer=HOSTILE, before=HOSTILE, after=HOSTILE)

    def recipe(value: dict[str, Any]) -> None:
        value["recipe"].update(about=HOSTILE, name=HOSTILE)
        value["recipe"]["student"]["model"] = HOSTILE
        value["identity"][HOSTILE] = HOSTILE

    def evaluation(value: dict[str, Any]) -> None:
        for trace in value["student"]["traces"]:
            trace["question"] = HOSTILE
            trace["text"][0] = HOSTILE
            trace["teacher"]["texts"][0][0] = HOSTILE
        value["student"]["by_domain"] = {HOSTILE: {"mean": 0.5, "low": 0.1, "high": 0.9}}

    edit(folder / "summary.json", summary)
    edit(folder / "recipe.json", recipe)
    edit(folder / "before.json", evaluation)
    edit(folder / "after.json", evaluation)
    edit_rows(folder / "vocabulary.jsonl", lambda row: row.update(text=HOSTILE))
    edit_rows(folder / "rollouts.jsonl", lambda row: row.update(prompt=HOSTILE, text=HOSTILE))
    edit_rows(
        folder / "metrics.jsonl",
        lambda row: row.update({HOSTILE: row["step"] / 3, f"reverse_kl/{HOSTILE}": 1.0}),
    )
    edit_rows(
        folder / "alarms.jsonl", lambda row: row.update(name=HOSTILE, rule=HOSTILE, patch=[HOSTILE])
    )
    edit(
        folder / "doctor.json",
        lambda value: value.update(
            verdict=HOSTILE, checks=[{"name": HOSTILE, "sentence": HOSTILE}]
        ),
    )
    (folder / "rejected.jsonl").write_text(
        json.dumps({"file": "x", "row": 1, "reason": HOSTILE, "start": HOSTILE}) + "\n"
    )
    return folder


class Elements(HTMLParser):
    """Collects every element with its attributes, and all text that is not a script or a style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.scripts.append(data)
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""
