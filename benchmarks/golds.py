"""Judge the answers of public mathematics datasets with the verifier `math` and with math-verify itself.

    python -m benchmarks golds --folder FOLDER [--rows 700] [--record]

FOLDER has the files at their paths in the public repositories, `FOLDER/OWNER/NAME/PATH`; missing files are skipped.
The correct reply is the answer itself in a box. The wrong reply is the first number of an answer that contains more than a
number. The reference is math-verify with the answer in `$...$`. A row that practicum rejects counts as wrong.
"""

import argparse
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import describe_commit, format_table
from practicum.grading.gold_check import PLAIN, GoldChecker
from practicum.grading.golds import find_first_number, list_boxes, mark, read_number, take_final
from practicum.grading.math_verify import open_mathematics
from practicum.grading.verifiers import VERIFIERS

RECORD = Path(__file__).resolve().parents[1] / "results" / "golds.json"


@dataclass(frozen=True, slots=True)
class Column:
    """An answer column: its file, and the answer of a row, or None for a row that is left out."""

    name: str
    file: str
    read: Callable[[Mapping[str, Any]], str | None]


def _find_box(row: Mapping[str, Any]) -> str | None:
    """Return the content of the last box in a row's solution."""
    start = row["solution"].rfind("\\boxed{")
    if start < 0:
        return None
    text, level = row["solution"][start + len("\\boxed{") :], 1
    for place, letter in enumerate(text):
        level += {"{": 1, "}": -1}.get(letter, 0)
        if not level:
            return text[:place]
    return None


def _choose_source(source: str, row: Mapping[str, Any]) -> str | None:
    return row["ground_truth"] if row["source"] == source else None


QWEN = "QwenLM/Qwen2.5-Math/evaluation/data"
ROLL = "alibaba/ROLL/data"
COLUMNS = (
    Column("MATH-500", f"{ROLL}/math_benchmarks.jsonl", partial(_choose_source, "MATH-500")),
    Column("DeepMath", f"{ROLL}/math_deepmath_deal.jsonl", lambda row: row["ground_truth"]),
    Column("Minerva", f"{QWEN}/minerva_math/test.jsonl", _find_box),
    Column("OlympiadBench", f"{QWEN}/olympiadbench/test.jsonl", lambda row: row["final_answer"][0]),
    Column("Gaokao 2023 en", f"{QWEN}/gaokao2023en/test.jsonl", lambda row: row["answer"]),
    Column("GSM8K", f"{QWEN}/gsm8k/test.jsonl", lambda row: row["answer"]),
    Column("AIME 2024", f"{QWEN}/aime24/test.jsonl", lambda row: row["answer"]),
)


def main() -> None:
    """Measure each column, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=700, help="the most rows of a column")
    parser.add_argument("--record", action="store_true", help="write results/golds.json")
    parser.add_argument("--quick", action="store_true", help="ten rows of each column")
    options = parser.parse_args()
    rows = 10 if options.quick else options.rows
    columns = [
        measure_column(column, options.folder / column.file, rows)
        for column in COLUMNS
        if (options.folder / column.file).is_file()
    ]
    print(format_table(*list_cells({"columns": columns})))
    if options.record:
        from importlib.metadata import version

        record = {
            "date": date.today().isoformat(),
            "commit": describe_commit(),
            "math_verify": version("math-verify"),
            "columns": columns,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def list_cells(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of a record."""
    head = [
        "answers",
        "right answers scored 1",
        "math-verify",
        "refused",
        "more than a number",
        "first number scored 1",
        "math-verify",
        "only by practicum",
        "check, ms per row",
    ]
    keys = ("right", "reference_right", "refused", "richer", "first", "reference_first", "excess")
    rows = [
        [
            f"{column['name']}, {column['measured']} of {column['rows']}",
            *(str(column[key]) for key in keys),
            f"{column['check_ms']:.1f}",
        ]
        for column in record["columns"]
    ]
    return head, rows


def measure_column(column: Column, path: Path, most: int) -> dict[str, Any]:
    """Return the counts of one column's first rows."""
    answers = list(_read_answers(column, path))
    right, wrong = _Count(), _Count()
    refused = 0
    for answer in answers[:most]:
        checker = GoldChecker("math", "require", column.name)
        is_refused = not answer.strip() or checker.find_problem(answer) is not None
        refused += is_refused
        final = take_final(answer)
        right.add(answer, list_boxes(final)[0], is_refused)
        number = find_first_number(final)
        if read_number(answer) is None and number is not None:
            wrong.add(answer, f"\\boxed{{{number}}}", is_refused)
        elif read_number(answer) is None:
            wrong.count += 1
    return {
        "name": column.name,
        "file": column.file,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "rows": len(answers),
        "measured": right.count,
        "right": right.practicum,
        "reference_right": right.reference,
        "refused": refused,
        "richer": wrong.count,
        "first": wrong.practicum,
        "reference_first": wrong.reference,
        "excess": wrong.only_practicum,
        "check_ms": _time_checks(answers[:most]),
    }


def _time_checks(answers: Sequence[str]) -> float:
    """Return the processor time per row of the check, in milliseconds; equal answers are checked once."""
    mathematics = open_mathematics()
    start = time.process_time()
    for answer in dict.fromkeys(answers):
        if not PLAIN.fullmatch(take_final(answer)):
            # An answer that is not mathematics is refused.
            with suppress(ValueError):
                mathematics.find_problem(answer)
    return round(1000 * (time.process_time() - start) / len(answers), 2)


@dataclass
class _Count:
    """The replies of one kind, and how many of them score 1 by practicum and by math-verify."""

    count: int = 0
    practicum: int = 0
    reference: int = 0
    only_practicum: int = 0

    def add(self, answer: str, reply: str, is_refused: bool) -> None:
        judged = not is_refused and VERIFIERS["math"](reply, answer) == 1.0
        reference = _ask_reference(answer, reply)
        self.count += 1
        self.practicum += judged
        self.reference += reference
        self.only_practicum += judged and not reference


def _read_answers(column: Column, path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        answer = column.read(json.loads(line))
        if answer is not None:
            yield answer


def _ask_reference(answer: str, reply: str) -> bool:
    """Return what math-verify says with the answer in `$...$`, as its own documentation asks."""
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    final = take_final(answer)
    gold = final if re.search(r"(?<!\\)\$", final) else mark(final)
    return verify(
        parse(gold, parsing_timeout=0), parse(reply, parsing_timeout=0), timeout_seconds=0
    )


if __name__ == "__main__":
    main()
