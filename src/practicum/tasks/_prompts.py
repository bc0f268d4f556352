"""From the rows of any source to the prompts of a task: settings, rejected rows, held-out rows."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from practicum.core.calls import suggest_name
from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.statistics.turns import reward_step
from practicum.tasks._answered import PromptSet
from practicum.tasks._context import TaskContext
from practicum.tasks._deadline import OwnWalls
from practicum.tasks._explaining import EXPLANATIONS
from practicum.tasks._files import EXCERPT, Row
from practicum.tasks._formats import (
    PRIVILEGED,
    QUESTIONS,
    ColumnReader,
    propose_columns,
    quote_name,
)
from practicum.tasks._grading import (
    RewardRange,
    Verifier,
    find_missing_module,
    name_function,
    open_grader,
)
from practicum.tasks._rows import FIELDS, Rejected, read_prompt
from practicum.tasks._verifiers import PACKAGES, check_installed, find_last_number
from practicum.text.safe import excerpt
from practicum.types import FrozenConfig, Prompt

log = logging.getLogger(__name__)

SHOWN_COLUMNS = 8
LONGEST_REASON = 400
Count = Annotated[int, Field(strict=True, ge=0)]
Share = Annotated[float, Field(strict=True, ge=0, lt=1)]


def _check_fields(columns: Mapping[str, str]) -> Mapping[str, str]:
    for field in columns:
        if field not in FIELDS and not field.startswith(PRIVILEGED):
            raise ValueError(
                f"no field {field!r}; {suggest_name(field, [*FIELDS, f'{PRIVILEGED}NAME'])}"
            )
    if {"prompt", "messages"} <= columns.keys():
        raise ValueError("give a column to either prompt or messages")
    return columns


class RowsConfig(FrozenConfig):
    """The settings of a task that reads rows, wherever they lie."""

    # Each task says what these three are; here they have their place in the table of keys.
    type: Any
    path: Any
    heldout: Any
    columns: Annotated[dict[str, str], AfterValidator(_check_fields)] = Field(
        default={},
        description="the column of each field with another name, as `{prompt: question}`",
    )
    strict: bool = Field(
        default=False, description="reject rows with a column that is not used, instead of a note"
    )
    verifier: Verifier = Field(
        default="exact", description="a name, or a function of yours as `package.module:function`"
    )
    reward_range: RewardRange = Field(
        default=(0.0, 1.0), description="the least and largest number that your function returns"
    )
    step_rewards: bool = Field(
        default=False,
        description="an answer that does not solve a row with a corrected step has 0.5 if it is "
        "that step (`chosen`), 0 if it is the `rejected` one, else 0.1 (SCoRe 2509.14257)",
    )
    sandbox: OwnWalls = Field(
        default="require",
        description="a missing wall around the verifier: refuse, do without it; `off`: no walls",
    )
    max_rejected: float = Field(
        default=0.01, ge=0, le=1, description="a larger share of bad rows ends the run"
    )

    def find_verifier_problems(self) -> list[str]:
        """Return the line on a verifier whose package or module is missing, if it is."""
        try:
            check_installed(name_function(self.verifier))
        except DataError as error:
            return [str(error)]
        return list(filter(None, [find_missing_module(self.verifier)]))


@dataclass
class _Refusals:
    """The rows of one source that were rejected: their number, and the first with its reason."""

    count: int = 0
    first: Row | None = None
    reason: str = ""

    def add(self, row: Row, reason: str) -> None:
        self.count += 1
        if self.first is None:
            self.first, self.reason = row, excerpt(reason, most=LONGEST_REASON)

    def describe_first(self) -> str:
        """Return the first rejected row with its number, its first characters and the reason."""
        if self.first is None:
            return ""
        start = excerpt(self.first.cut(), most=EXCERPT)
        return f"row {self.first.number}{' is ' if start else ''}{start}: {self.reason}"


class PromptReader:
    """Reads the sources of a task's prompts; bad rows go to the rejected file, if there is one."""

    def __init__(self, config: RowsConfig, rejected_path: Path | None = None) -> None:
        self._config = config
        self._rejected_path = rejected_path
        self._ids: dict[str, set[str]] = {}
        self._sources: Counter[str] = Counter()
        self._noted: set[str] = set()

    def read(self, rows: Iterable[Row], source: str, part: str) -> list[Prompt]:
        """Return the prompts of a source's rows, for a part of the task such as `train`.

        A row without an id is named by its part and number, and from the part's second source on by
        the source's number too. DataError with the first bad row if too many are bad or none is
        good.
        """
        self._sources[part] += 1
        prefix = part if self._sources[part] == 1 else f"{part}-{self._sources[part]}"
        columns = ColumnReader(self._config.columns, self._config.strict)
        ids = self._ids.setdefault(part, set())
        prompts: list[Prompt] = []
        refusals = _Refusals()
        for row in rows:
            try:
                prompt = self._read_row(row, columns, f"{prefix}-{row.number}", ids)
            except Rejected as rejection:
                refusals.add(row, str(rejection))
                self._write_rejected(source, row, str(rejection))
            else:
                ids.add(prompt.id)
                prompts.append(prompt)
        self._check_counts(source, len(prompts), refusals)
        self._check_columns(source, columns)
        self._note_columns(source, columns, prompts)
        return prompts

    def _read_row(self, row: Row, columns: ColumnReader, name: str, ids: set[str]) -> Prompt:
        if isinstance(row.columns, Rejected):
            raise row.columns
        prompt = read_prompt(columns.read(row.columns), name)
        _check_answer(prompt, name_function(self._config.verifier))
        if prompt.id in ids:
            raise Rejected(f"id {prompt.id[:EXCERPT]!r} was used before")
        return prompt

    def _write_rejected(self, source: str, row: Row, reason: str) -> None:
        if self._rejected_path is None:
            return
        line = {"file": source, "row": row.number, "reason": reason, "text": row.cut()}
        with self._rejected_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _check_counts(self, source: str, good: int, refusals: _Refusals) -> None:
        allowed, total = self._config.max_rejected, good + refusals.count
        if refusals.first is not None and not good:
            raise DataError(
                f"{source}: none of its {total} rows can be used; {refusals.describe_first()}"
                f"{self._advise(refusals.first)}"
            )
        if refusals.first is not None and refusals.count > allowed * total:
            raise DataError(
                f"{source}: {refusals.count} of {total} rows cannot be used; "
                f"{refusals.describe_first()}; mend them, or raise task.max_rejected, which is "
                f"{allowed:g}"
            )
        if not good:
            raise DataError(
                f"{source}: no rows; write one a line, for example "
                '{"prompt": "...", "answer": "..."}'
            )
        if refusals.first is not None:
            log.info(
                f"{source}: {refusals.count} of {total} rows rejected "
                f"(row {refusals.first.number}: {refusals.reason})"
            )

    def _advise(self, row: Row) -> str:
        """Return the proposal of `columns` for a row without a question, or an empty text."""
        if isinstance(row.columns, Rejected) or self._config.columns:
            return ""
        proposal = "" if QUESTIONS.keys() & row.columns.keys() else propose_columns(row.columns)
        return f"; write {proposal} in the task" if proposal else ""

    def _check_columns(self, source: str, columns: ColumnReader) -> None:
        for name in columns.unseen:
            raise DataError(
                f"{source}: no row has the column {quote_name(name)}, which task.columns names; "
                f"not used: {', '.join(map(quote_name, columns.unused[:SHOWN_COLUMNS])) or 'none'}"
            )

    def _note_columns(self, source: str, columns: ColumnReader, prompts: Sequence[Prompt]) -> None:
        """Log once what form the rows have, and which columns are not used."""
        notes = [] if columns.form is None else [f"read as rows of {columns.form}"]
        if columns.unused:
            notes.append(f"not used: {_list_columns(columns.unused)}")
            proposal = propose_columns(["prompt", *columns.unused])
            if proposal and all(prompt.answer is None for prompt in prompts):
                notes.append(f"no row has an answer; perhaps write {proposal}")
        note = "; ".join(notes)
        if note and note not in self._noted:
            self._noted.add(note)
            log.info(f"{source}: {note}")


def _list_columns(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_COLUMNS
    listed = ", ".join(map(quote_name, names[:SHOWN_COLUMNS]))
    word = "the column" if len(names) == 1 else "the columns"
    return f"{word} {listed}" + (f" and {more} more" if more > 0 else "")


def _check_answer(prompt: Prompt, verifier: str) -> None:
    answer = prompt.answer
    compares_numbers = verifier in ("number", "first_line")
    if compares_numbers and answer is not None and find_last_number(answer) is None:
        raise Rejected(
            f"answer {answer[:EXCERPT]!r} has no number, which the verifier {verifier!r} compares"
        )


def build_prompt_set(
    config: RowsConfig,
    context: TaskContext,
    read_part: Callable[[PromptReader, str], list[Prompt]],
) -> PromptSet:
    """Build the task whose parts `train` and `heldout` the function reads.

    The second part is read only if `config.heldout` is no number or share: these are chosen from
    the first. DataError if too many rows are bad or none is left to train on.
    """
    grade = open_grader(config.verifier, config.sandbox, config.reward_range)
    if config.step_rewards:
        grade = _grade_steps(grade)
    context.packages.extend(PACKAGES.get(name_function(config.verifier), ()))
    if context.rejected_path is not None:
        context.rejected_path.unlink(missing_ok=True)
    reader = PromptReader(config, context.rejected_path)
    train = read_part(reader, "train")
    if isinstance(config.heldout, int | float):
        heldout = choose_heldout(train, config.heldout, context.seed)
        ids = {prompt.id for prompt in heldout}
        train = [prompt for prompt in train if prompt.id not in ids]
    else:
        heldout = read_part(reader, "heldout")
    questions = {_normalize(prompt) for prompt in heldout}
    unseen = [prompt for prompt in train if _normalize(prompt) not in questions]
    if not unseen:
        raise DataError(
            f"{config.path}: every training row is also held out; hold out fewer, or give other rows"
        )
    if len(unseen) < len(train):
        log.info(
            f"{len(train) - len(unseen)} of {len(train)} training rows left out: "
            "the same question is held out"
        )
    explain = EXPLANATIONS.get(name_function(config.verifier))
    return PromptSet(train=unseen, heldout=heldout, grade=grade, explain=explain)


def _grade_steps(
    grade: Callable[[str, Prompt], float | None],
) -> Callable[[str, Prompt], float | None]:
    """Return the grader that also knows what a step is worth that does not solve its row."""

    def grade_step(reply: str, prompt: Prompt) -> float | None:
        solved, steps = grade(reply, prompt), prompt.privileged
        if solved is None or solved >= 1 or "chosen" not in steps:
            return solved
        return reward_step(reply, steps["chosen"], steps.get("rejected", ""))

    return grade_step


def choose_heldout(prompts: Sequence[Prompt], amount: int | float, seed: int) -> list[Prompt]:
    """Choose a number or a share of the prompts by a hash of the id: new rows move few old ones."""
    hashes = {prompt.id: seed_of(seed, "heldout", prompt.id) for prompt in prompts}
    ordered = sorted(hashes.values())
    if isinstance(amount, int):
        chosen = set(ordered[:amount])
    else:
        # The hashes are 63-bit numbers, so each id is held out with the probability `amount`.
        chosen = {number for number in ordered if number < amount * 2**63}
        # A share of a few rows may choose none: then one row is held out if another remains.
        chosen |= set(ordered[:1]) if amount and len(prompts) > 1 else set()
    return [prompt for prompt in prompts if hashes[prompt.id] in chosen]


def _normalize(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, " ".join(message.content.split())) for message in prompt.messages)
