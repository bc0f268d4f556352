"""The forms that rows have elsewhere, and the way from the columns of a source to `FIELDS`.

To add a form, add an entry to `FORMATS`.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from practicum.core.calls import suggest_name
from practicum.rows.chat_turns import WEIGHTS
from practicum.rows.fields import FIELDS
from practicum.rows.strict import Rejected
from practicum.types import Prompt

Columns = Mapping[str, Any]
"""One row of a source, by the names of its columns."""

QUESTIONS = {"prompt": "messages", "messages": "prompt"}
"""The two fields that hold a question, each mapped to its alternative."""
PRIVILEGED = "privileged."
"""The prefix of a privileged field in `columns`, as in `privileged.hint`."""
LIKE = 0.75
"""The similarity from which a column's name is taken for a misspelt field."""

LONGEST_NAME = 60

_MEDIA_TEXT = re.compile(
    r"^data:|^https?:|\.(jpe?g|png|gif|webp|bmp|mp4|avi|mov|webm|mp3|wav|flac|ogg|opus|m4a)\b",
    re.IGNORECASE,
)
_MEDIA_TAG = re.compile(r"<img\b[^<>]*>|<(image|video|audio)>", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,60}|[a-z]+\[\](\.[A-Za-z0-9_\[\]]{1,30}){1,3}")

ALIASES = {"system_prompt": "system", "image": "images", "audio": "audios", "video": "videos"}
"""Columns that are read as a field of another name, if nothing else gives that field."""
MEDIA = re.compile(r"(image|picture|video|audio)(s|_url|_urls|_path|_paths|_key)?")
"""The names of columns with pictures, videos or sounds."""
LABELS = ("label", "kto_tag")
"""The columns that say whether an answer is wanted (KTO, TRL's unpaired preferences)."""
TRUTHS = {"true": True, "false": False}
LABEL_NUMBERS = {"1": True, "0": False}

COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "problem", "instruction", "query", "input", "goal", "task", "text"),
    "messages": (
        "conversation",
        "conversations",
        "dialogue",
        "dialog",
        "chat",
        "turns",
        "chosen_messages",
    ),
    "answer": (
        "final_answer",
        "correct_answer",
        "expected_answer",
        "ground_truth",
        "answerkey",
        "correct",
        "solution",
        "label",
        "target",
        "gold",
        "expected",
        "reference",
        "output",
    ),
    "response": ("completion", "reply", "rationale", "reasoning", "demonstration"),
}
"""The common column names of each field in other datasets, most likely first."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A known form of rows: how to recognise it, and its conversion to fields of `FIELDS`.

    Its rows have all columns of `needs` and no column of `lacks`. `reads` are further columns that the
    conversion reads, and `repeats` are needed columns that it does not read. The conversion gets a
    row without empty columns. Any other column is read as the field of its name, or is not used.
    """

    name: str
    needs: frozenset[str]
    lacks: frozenset[str]
    convert: Callable[[Columns], dict[str, Any]]
    reads: frozenset[str] = frozenset()
    repeats: frozenset[str] = frozenset()

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
    """Join instruction and input by a line, after the turns of `history` (LLaMA-Factory's column)."""
    parts = [row.get("instruction"), row.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise Rejected("instruction or input is not a text")
    return {
        "messages": _join_history(row, "\n".join(filter(None, parts))),
        "response": row.get("output") or None,
    }


def _convert_swift(row: Columns) -> dict[str, Any]:
    """Put the turns of `history` before the query."""
    return {"messages": _join_history(row, row["query"]), "response": row["response"]}


def _convert_options(row: Columns) -> dict[str, Any]:
    """Take `options` as the choices, and the letter in `answer` or the index in `answer_index`."""
    answer, index = row.get("answer"), row.get("answer_index")
    is_letter = isinstance(answer, str) and answer in ascii_uppercase and len(answer) == 1
    if is_letter and type(index) is int and ascii_uppercase[index : index + 1] != answer:
        raise Rejected(f"answer is {answer!r} and answer_index {index}, which is another choice")
    answer = index if answer is None else answer
    return {"prompt": row["question"], "choices": row["options"], "answer": answer}


def _join_history(row: Columns, question: Any) -> list[dict[str, Any]]:
    """Return the turns of `history`, which is a list of pairs, and the question after them."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise Rejected("history is not a list of pairs of question and answer")
    turns: list[tuple[str, Any]] = []
    for asked_before, answer in history:
        turns += [("user", asked_before), ("assistant", answer)]
    turns.append(("user", question))
    return [{"role": role, "content": text} for role, text in turns]


STEP_COLUMNS = ("chosen", "chosen_observation", "rejected", "rejected_observation", "correct_step")
"""The columns of a corrected step: the new and the replaced step, each with its observation."""


def _convert_steps(row: Columns) -> dict[str, Any]:
    """Take the conversation before a step as the question and the corrected step as the response."""
    # If nothing was wrong, the columns are empty.
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
        convert=_convert_steps,
        reads=frozenset({"chosen_observation", "rejected_observation", "correct_step"}),
    ),
    RowFormat(
        "verl",
        needs=frozenset({"prompt", "reward_model"}),
        lacks=frozenset({"messages", "answer"}),
        convert=rename(
            {"prompt": "prompt", "answer": "reward_model.ground_truth", "domain": "data_source"}
        ),
        reads=frozenset({"data_source"}),
    ),
    RowFormat(
        "TRL prompt-completion",
        needs=frozenset({"prompt", "completion"}),
        lacks=frozenset({"messages", "response"}),
        convert=rename({"prompt": "prompt", "response": "completion"}),
    ),
    RowFormat(
        "TRL prompt and solution",
        needs=frozenset({"prompt", "solution"}),
        lacks=frozenset({"messages", "answer"}),
        convert=rename({"prompt": "prompt", "answer": "solution"}),
    ),
    RowFormat(
        "ShareGPT",
        needs=frozenset({"conversations"}),
        lacks=frozenset({"prompt", "messages"}),
        convert=rename({"messages": "conversations"}),
    ),
    RowFormat(
        "ROLL",
        needs=frozenset({"prompt", "messages", "ground_truth"}),
        lacks=frozenset({"answer"}),
        convert=rename({"messages": "messages", "answer": "ground_truth"}),
        repeats=frozenset({"prompt"}),
    ),
    RowFormat(
        "MMLU",
        needs=frozenset({"question", "choices", "answer"}),
        lacks=frozenset({"prompt", "messages"}),
        convert=rename({"prompt": "question", "choices": "choices", "answer": "answer"}),
    ),
    RowFormat(
        "MMLU-Pro",
        needs=frozenset({"question", "options", "answer"}),
        lacks=frozenset({"prompt", "messages", "choices"}),
        convert=_convert_options,
        reads=frozenset({"answer_index"}),
    ),
    RowFormat(
        "MMLU-Pro without letters",
        needs=frozenset({"question", "options", "answer_index"}),
        lacks=frozenset({"prompt", "messages", "choices"}),
        convert=_convert_options,
        reads=frozenset({"answer"}),
    ),
    RowFormat(
        "ms-swift",
        needs=frozenset({"query", "response"}),
        lacks=frozenset({"prompt", "messages"}),
        convert=_convert_swift,
        reads=frozenset({"history"}),
    ),
    RowFormat(
        "ms-swift with a conversation",
        needs=frozenset({"conversation"}),
        lacks=frozenset({"prompt", "messages", "conversations"}),
        convert=rename({"messages": "conversation"}),
    ),
    RowFormat(
        "Alpaca",
        needs=frozenset({"instruction", "output"}),
        lacks=frozenset({"prompt", "messages", "response"}),
        convert=_convert_alpaca,
        reads=frozenset({"input", "history"}),
    ),
)
"""Every known form in addition to practicum's own; the first form that fits a row is used."""


class ColumnReader:
    """Reads the fields of one source's rows from their columns, and remembers unused columns.

    `columns` come from the recipe: fields with the names of their columns. Without them, the first
    row of a known form decides the form of all rows. With `strict`, an unused column rejects its
    row.
    """

    def __init__(self, columns: Mapping[str, str], strict: bool) -> None:
        self._columns = columns
        self._strict = strict
        self._form: RowFormat | None = None
        self._is_decided = bool(columns)
        self._convert = rename(columns)
        # A column that the recipe gives to one field is not read as another.
        self._taken = {*columns.values(), *(name.partition(".")[0] for name in columns.values())}
        self._unused: dict[str, Any] = {}
        self._unseen = set(columns.values())

    def read(self, row: Columns) -> dict[str, Any]:
        """Return the row's fields, of `FIELDS`; Rejected if its media have another name, or it lacks its question."""
        row = {name: value for name, value in row.items() if value is not None}
        if not self._is_decided:
            self._recognise(row)
        if self._unseen:
            self._unseen -= {name for name in self._unseen if get_column(row, name) is not None}
        fields = self._convert(row)
        # A question has one column: if `prompt` is read, `messages` is not, and the reverse.
        hidden = {QUESTIONS[field] for field in (*fields, *self._columns) if field in QUESTIONS}
        names = {*fields, *self._columns, *hidden}
        for name, cell in row.items():
            if name in self._taken:
                continue
            field = ALIASES.get(name, name)
            if field in ("images", "audios", "videos") and not _is_media(name, cell):
                # Also the name of a container's image.
                field = ""
            if field in FIELDS and field not in names:
                fields[field] = cell
                names.add(field)
            elif cell not in ("", [], {}) and not _is_label(name, cell):
                if _is_media(name, cell):
                    raise Rejected(
                        f"the column {quote_name(name)} has media, and its name is not read; for pictures, write "
                        f"columns: {{images: {quote_name(name)}}}, audios for sounds and videos for frames"
                    )
                self.note_unused(name, cell)
        for field in self._columns.keys() & QUESTIONS.keys() - fields.keys():
            column = self._columns[field]
            hint = suggest_name(column, [name for name in row if len(name) < LONGEST_NAME])
            raise Rejected(f"no column {quote_name(column)}, which holds the {field}; {hint}")
        return fields

    def check_label(self, row: Columns, prompt: Prompt) -> None:
        """Reject a row if its label or weight says not to imitate its response."""
        for name in WEIGHTS:
            weight = row.get(name)
            is_zero = isinstance(weight, bool | int | float) and not weight
            if is_zero and name not in self._taken and prompt.response is not None:
                raise Rejected(
                    f"{name} is {weight}, so its answer is not one to imitate; leave the row out, or "
                    "only give its question"
                )
        for name in LABELS:
            if name in self._taken or not _is_label(name, row.get(name)):
                continue
            if prompt.response is None:
                self.note_unused(name, row[name])
            elif _read_label(row[name]) is False:
                label = _write_label(row[name]).lower()
                is_number = label in LABEL_NUMBERS
                advice = (
                    f"; if it is a class, write columns: {{domain: {name}}}" if is_number else ""
                )
                raise Rejected(
                    f"{name} is {label}, so its answer is not one to imitate; leave the row out, or "
                    f"only give its question{advice}"
                )

    def note_unused(self, name: str, value: Any = None) -> None:
        """Remember a column, or a key of a turn, that is not used; Rejected if `strict`."""
        if self._strict:
            raise Rejected(f"unknown field {name[:LONGEST_NAME]!r}; {suggest_name(name, FIELDS)}")
        self._unused.setdefault(name, value)

    def propose_answer(self) -> str:
        """Return the `columns: {...}` that an unused column with answers suggests, or an empty text."""
        # A truth value is no answer that a verifier compares with.
        names = [name for name, value in self._unused.items() if _read_truth(value) is None]
        return propose_columns(["prompt", *names])

    def _recognise(self, row: Columns) -> None:
        self._form = next((form for form in FORMATS if form.fits(row)), None)
        if self._form is not None:
            self._convert = self._form.convert
            self._taken = set(self._form.needs | self._form.reads) - self._form.repeats
        self._is_decided = self._form is not None or bool(QUESTIONS.keys() & row.keys())

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


def _is_media(name: str, cell: Any) -> bool:
    """Return True for something in a column of pictures, videos or sounds."""
    is_media = isinstance(cell, list | Mapping | bytes) or (
        isinstance(cell, str) and _MEDIA_TEXT.search(cell)
    )
    return bool(cell and is_media and MEDIA.fullmatch(name.lower()))


def shows_media(prompt: Prompt) -> bool:
    """Return True if a prompt's text has a tag in place of a picture that it lacks."""
    turns = (message for message in prompt.messages if not message.images)
    return any(_MEDIA_TAG.search(message.content) for message in turns)


def _is_label(name: str, cell: Any) -> bool:
    """Return True for a column that says whether the row's answer is wanted."""
    return name in LABELS and _read_label(cell) is not None


def _read_label(cell: Any) -> bool | None:
    """Return whether an answer is wanted, which tables also hold as 0 or 1, or None."""
    truth = _read_truth(cell)
    if truth is None and isinstance(cell, str | int | float):
        return LABEL_NUMBERS.get(_write_label(cell))
    return truth


def _write_label(cell: str | int | float) -> str:
    # A column that lacks some labels holds 1 as 1.0.
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def _read_truth(cell: Any) -> bool | None:
    """Return a truth value, which tables hold as a text, or None."""
    if isinstance(cell, str):
        return TRUTHS.get(cell.lower())
    return cell if isinstance(cell, bool) else None


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
    """Move the most likely column of the first field that has one from `free` to `chosen`."""
    for field in fields:
        likely = [name for name in (field, *COLUMN_NAMES[field]) if name in free]
        likely += difflib.get_close_matches(field, free, n=1, cutoff=LIKE)
        if likely:
            chosen[field] = free.pop(likely[0])
            return
