"""The forms that rows have elsewhere, and the way from the columns of a source to `FIELDS`.

To add a form, add an entry to `FORMATS`.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from practicum.core.calls import suggest_name
from practicum.tasks._rows import FIELDS, Rejected

Columns = Mapping[str, Any]
"""One row of a source, by the names of its columns."""

QUESTIONS = {"prompt": "messages", "messages": "prompt"}
"""The two fields that hold a question, each with the other one."""
PRIVILEGED = "privileged."
"""The prefix of a privileged field in `columns`, as in `privileged.hint`."""
LIKE = 0.75
"""The similarity from which a column's name is taken for a misspelt field."""

LONGEST_NAME = 60

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,60}")

COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "problem", "instruction", "query", "input", "goal", "task", "text"),
    "messages": ("conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    "answer": (
        "solution",
        "ground_truth",
        "label",
        "final_answer",
        "correct_answer",
        "expected_answer",
        "target",
        "gold",
        "expected",
        "reference",
        "output",
    ),
    "response": ("completion", "reply", "rationale", "reasoning", "demonstration"),
}
"""The names that columns of each field have elsewhere, the likeliest first."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A known form of rows: what recognises it, and the conversion to fields of `FIELDS`.

    Its rows have all columns of `needs` and none of `lacks`; `knows` are its other columns. The
    conversion gets a row without empty columns. Columns that are in neither `needs` nor `knows` and
    have a field's name are taken as that field.
    """

    name: str
    needs: frozenset[str]
    lacks: frozenset[str]
    knows: frozenset[str]
    convert: Callable[[Columns], dict[str, Any]]

    def fits(self, row: Columns) -> bool:
        """Return True if the row has this form."""
        return self.needs <= row.keys() and not self.lacks & row.keys()


def get_column(row: Columns, name: str) -> Any:
    """Return a column's value, or None; `reward_model.ground_truth` is a field within a column."""
    if name in row:
        return row[name]
    column, _, inner = name.partition(".")
    outer = row.get(column)
    return get_column(outer, inner) if inner and isinstance(outer, Mapping) else None


def rename(columns: Mapping[str, str]) -> Callable[[Columns], dict[str, Any]]:
    """Return the conversion that takes each field from a column."""

    def convert(row: Columns) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for field, column in columns.items():
            cell = get_column(row, column)
            if cell is None:
                continue
            if not field.startswith(PRIVILEGED):
                fields[field] = cell
            elif isinstance(cell, str | int | float) and not isinstance(cell, bool):
                fields.setdefault("privileged", {})[field.removeprefix(PRIVILEGED)] = str(cell)
            else:
                raise Rejected(f"column {quote_name(column)} is not a text, as {field} is")
        return fields

    return convert


def _convert_alpaca(row: Columns) -> dict[str, Any]:
    """Join instruction and input by a line, after the turns of `history` (LlamaFactory's column)."""
    parts = [row.get("instruction"), row.get("input") or ""]
    history = row.get("history") or []
    if not all(isinstance(part, str) for part in parts):
        raise Rejected("instruction or input is not a text")
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise Rejected("history is not a list of pairs of question and answer")
    turns = [("system", row["system"])] if row.get("system") else []
    for question, answer in history:
        turns += [("user", question), ("assistant", answer)]
    turns.append(("user", "\n".join(filter(None, parts))))
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "response": row.get("output") or None}


def _convert_sharegpt(row: Columns) -> dict[str, Any]:
    """Put the text of the column `system` (LlamaFactory's) before the turns."""
    turns = row.get("conversations")
    if row.get("system") and isinstance(turns, list):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    return {"messages": turns}


STEP_COLUMNS = ("chosen", "chosen_observation", "rejected", "rejected_observation", "correct_step")
"""The columns of a corrected step: what was written and what it replaces, with what followed each."""


def _convert_steps(row: Columns) -> dict[str, Any]:
    """Take the conversation before a step as the question and the corrected step as the response."""
    # Where nothing was wrong the columns are empty.
    steps = {name: row[name] for name in STEP_COLUMNS if row.get(name)}
    if not all(isinstance(text, str) for text in steps.values()):
        raise Rejected(f"one of {', '.join(steps)} is not a text")
    fields = {"messages": row.get("prompt"), "answer": row.get("gt_answer") or None}
    if "chosen" in steps:
        fields["response"] = steps["chosen"]
    return {**fields, "privileged": steps} if steps else fields


FORMATS: tuple[RowFormat, ...] = (
    RowFormat(
        "easydistill's SCoRe",
        needs=frozenset({"prompt", "chosen", "rejected", "gt_answer"}),
        lacks=frozenset({"messages", "answer"}),
        knows=frozenset({"chosen_observation", "rejected_observation", "correct_step"}),
        convert=_convert_steps,
    ),
    RowFormat(
        "verl",
        needs=frozenset({"prompt", "reward_model"}),
        lacks=frozenset({"messages", "answer"}),
        knows=frozenset({"data_source", "ability", "extra_info", "agent_name"}),
        convert=rename(
            {"prompt": "prompt", "answer": "reward_model.ground_truth", "domain": "data_source"}
        ),
    ),
    RowFormat(
        "TRL prompt-completion",
        needs=frozenset({"prompt", "completion"}),
        lacks=frozenset({"messages", "response"}),
        knows=frozenset(),
        convert=rename({"prompt": "prompt", "response": "completion"}),
    ),
    RowFormat(
        "TRL prompt and solution",
        needs=frozenset({"prompt", "solution"}),
        lacks=frozenset({"messages", "answer"}),
        knows=frozenset(),
        convert=rename({"prompt": "prompt", "answer": "solution"}),
    ),
    RowFormat(
        "ShareGPT",
        needs=frozenset({"conversations"}),
        lacks=frozenset({"prompt", "messages"}),
        knows=frozenset({"system", "tools"}),
        convert=_convert_sharegpt,
    ),
    RowFormat(
        "Alpaca",
        needs=frozenset({"instruction", "output"}),
        lacks=frozenset({"prompt", "messages", "response"}),
        knows=frozenset({"input", "system", "history", "text"}),
        convert=_convert_alpaca,
    ),
)
"""Every known form besides practicum's own; the first that fits a row is taken."""


class ColumnReader:
    """Takes the fields of one source's rows from their columns, and remembers the unused ones.

    `columns` are the recipe's: fields with the names of their columns. Without them, the first row
    of a known form decides the form of all rows. With `strict`, an unused column rejects its row.
    """

    def __init__(self, columns: Mapping[str, str], strict: bool) -> None:
        self._columns = columns
        self._strict = strict
        self._form: RowFormat | None = None
        self._is_decided = bool(columns)
        self._convert = rename(columns)
        # A column that the recipe gives to one field is not read as another, and a question has one
        # column: the other of these two is not read.
        self._taken = {*columns.values(), *(name.partition(".")[0] for name in columns.values())}
        self._hidden = {QUESTIONS[field] for field in columns if field in QUESTIONS}
        self._unused: dict[str, None] = {}
        self._unseen = set(columns.values())

    def read(self, row: Columns) -> dict[str, Any]:
        """Return the row's fields, of `FIELDS`; Rejected if the row lacks its question's column."""
        row = {name: value for name, value in row.items() if value is not None}
        if not self._is_decided:
            self._recognise(row)
        if self._unseen:
            self._unseen -= {name for name in self._unseen if get_column(row, name) is not None}
        fields = {}
        for name, value in row.items():
            if name in FIELDS and name not in self._taken and name not in self._hidden:
                fields[name] = value
            elif name not in self._taken:
                self._note_unused(name)
        fields.update(self._convert(row))
        for field in self._columns.keys() & QUESTIONS.keys() - fields.keys():
            column = self._columns[field]
            hint = suggest_name(column, [name for name in row if len(name) < LONGEST_NAME])
            raise Rejected(f"no column {quote_name(column)}, which holds the {field}; {hint}")
        return fields

    def _recognise(self, row: Columns) -> None:
        self._form = next((form for form in FORMATS if form.fits(row)), None)
        if self._form is not None:
            self._convert = self._form.convert
            self._taken = {*self._form.needs, *self._form.knows}
        self._is_decided = self._form is not None or bool(QUESTIONS.keys() & row.keys())

    def _note_unused(self, name: str) -> None:
        if self._strict:
            raise Rejected(f"unknown field {name[:LONGEST_NAME]!r}; {suggest_name(name, FIELDS)}")
        self._unused.setdefault(name)

    @property
    def form(self) -> str | None:
        """Return the name of the known form that the rows have, or None."""
        return None if self._form is None else self._form.name

    @property
    def unused(self) -> list[str]:
        """Return the columns that were not used so far, in the order of the rows."""
        return list(self._unused)

    @property
    def unseen(self) -> list[str]:
        """Return the columns that the recipe names and no row had so far."""
        return sorted(self._unseen)


def quote_name(name: str) -> str:
    """Return a column's name as YAML reads it, on one printable line."""
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name[:LONGEST_NAME])


def propose_columns(names: Iterable[str]) -> str:
    """Return the `columns: {...}` that a recipe may need for rows with these columns.

    It names the columns of the question and of the answer where no column has the field's own name.
    Empty if no name tells.
    """
    free = {name.lower().replace(" ", "_").replace("-", "_"): name for name in names}
    chosen: dict[str, str] = {}
    for alternatives in (("prompt", "messages"), ("answer", "response")):
        if not any(free.get(field) == field for field in alternatives):
            _choose_column(alternatives, free, chosen)
    parts = ", ".join(f"{field}: {quote_name(name)}" for field, name in chosen.items())
    return f"columns: {{{parts}}}" if parts else ""


def _choose_column(fields: Iterable[str], free: dict[str, str], chosen: dict[str, str]) -> None:
    """Move the likeliest column of the first field that has one from `free` to `chosen`."""
    for field in fields:
        likely = [name for name in (field, *COLUMN_NAMES[field]) if name in free]
        likely += difflib.get_close_matches(field, free, n=1, cutoff=LIKE)
        if likely:
            chosen[field] = free.pop(likely[0])
            return
