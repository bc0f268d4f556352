"""From the rows of any source to the prompts of a task: settings, rejected rows, held-out rows."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from practicum.core.calls import suggest_name
from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.foreign import name_object
from practicum.grading import program_tests
from practicum.grading.explaining import EXPLANATIONS
from practicum.grading.gold_check import GoldChecker, describe_exact, describe_long
from practicum.grading.graders import (
    FUNCTIONS,
    RewardRange,
    Verifier,
    find_missing_module,
    open_grader,
)
from practicum.grading.verifiers import PACKAGES, VERIFIERS, check_installed
from practicum.ports import TaskConfig, TaskContext
from practicum.rows.answered import PromptSet
from practicum.rows.fields import FIELDS, read_prompt
from practicum.rows.formats import (
    FORMATS,
    PRIVILEGED,
    QUESTIONS,
    ColumnReader,
    Columns,
    get_column,
    propose_columns,
    quote_name,
    shows_media,
)
from practicum.rows.pictures import locate_pictures
from practicum.rows.row_files import EXCERPT, Row
from practicum.rows.strict import Rejected
from practicum.sandbox.deadline import OwnWalls
from practicum.statistics.turn_statistics import reward_step
from practicum.text.safe import excerpt
from practicum.thoughts import read_answer
from practicum.types import Prompt

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


class RowsConfig(TaskConfig):
    """The settings of a task that reads rows, wherever they lie."""

    # Each task says what these three are; here they have their place in the table of keys.
    type: Any
    path: Any
    heldout: Any
    columns: Annotated[dict[str, str], AfterValidator(_check_fields)] = Field(
        default={},
        description="the column of each field with another name, as `{prompt: question, system: instructions}`",
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
        description="if a wall around the verifier is missing: refuse, or run without it; `off`: no "
        "walls",
    )
    max_rejected: float = Field(
        default=0.01, ge=0, le=1, description="a larger share of bad rows ends the run"
    )

    def find_verifier_problems(self) -> list[str]:
        """Return a line if the verifier's package or module is missing."""
        try:
            check_installed(name_object(self.verifier))
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
    """Reads the sources of a task's prompts; bad rows go to the rejected file, if there is one.

    A row is good if each of the `verifiers` can judge by its answer; by default it is the config's.
    """

    def __init__(
        self,
        config: RowsConfig,
        rejected_path: Path | None = None,
        verifiers: Sequence[str] | None = None,
    ) -> None:
        self._config = config
        self._verifiers = [name_object(config.verifier)] if verifiers is None else verifiers
        self._rejected_path = rejected_path
        self._ids: dict[str, set[str]] = {}
        self._sources: Counter[str] = Counter()
        self._noted: set[str] = set()

    def read(
        self, rows: Iterable[Row], source: str, part: str, folder: Path = Path()
    ) -> list[Prompt]:
        """Return the prompts of a source's rows, for a part of the task such as `train`.

        A row without an id is named by its part and number, and from the part's second source on by
        the source's number too. Paths of pictures start at `folder`. DataError with the first bad row
        if too many are bad or none is good.
        """
        self._sources[part] += 1
        prefix = part if self._sources[part] == 1 else f"{part}-{self._sources[part]}"
        rows = iter(rows)
        first = next(rows, None)
        columns = ColumnReader(self._choose_columns(first, source, part), self._config.strict)
        ids = self._ids.setdefault(part, set())
        prompts: list[Prompt] = []
        refusals, pictures = _Refusals(), list[int]()
        checkers = [
            GoldChecker(verifier, self._config.sandbox, source) for verifier in self._verifiers
        ]
        for row in chain([] if first is None else [first], rows):
            try:
                prompt = self._read_row(row, columns, f"{prefix}-{row.number}", ids, folder)
                for checker in checkers:
                    _check_answer(prompt, checker)
            except Rejected as rejection:
                refusals.add(row, str(rejection))
                self._write_rejected(source, row, str(rejection))
            else:
                ids.add(prompt.id)
                prompts.append(prompt)
                if shows_media(prompt):
                    pictures.append(row.number)
                if prompt.answer is not None:
                    for checker in checkers:
                        checker.note_unit(prompt.answer, row.number)
        self._check_counts(source, len(prompts), refusals, columns)
        self._check_columns(source, columns)
        self._note_columns(source, columns, prompts)
        exact = describe_exact(_list_answers(prompts)) if "exact" in self._verifiers else None
        units = (checker.describe_units() for checker in checkers)
        for note in filter(None, (exact, *units)):
            log.info(f"{source}: {note}")
        if pictures:
            log.info(
                f"{source}: {len(pictures)} of {len(prompts)} rows hold a tag such as <image> or "
                f"<img ...> and have no picture, the first is row {pictures[0]}; give pictures in the "
                "column images, or leave out rows with questions that need one"
            )
        return prompts

    def _choose_columns(self, first: Row | None, source: str, part: str) -> Mapping[str, str]:
        """Return the config's `columns`; none for held-out rows that have the fields' own names.

        A benchmark that is held out rarely has the columns of the training rows.
        """
        columns = self._config.columns
        if part != "heldout" or not columns or first is None:
            return columns
        row = first.columns
        if isinstance(row, Rejected):
            return columns
        if any(get_column(row, name) is not None for name in columns.values()):
            return columns
        if not QUESTIONS.keys() & row.keys() and not any(form.fits(row) for form in FORMATS):
            return columns
        names = ", ".join(map(quote_name, columns.values()))
        log.info(f"{source}: read without task.columns, since row {first.number} has no {names}")
        return {}

    def _read_row(
        self, row: Row, columns: ColumnReader, name: str, ids: set[str], folder: Path
    ) -> Prompt:
        if isinstance(row.columns, Rejected):
            raise row.columns
        tests, columns_read = self._split_tests(row.columns)
        prompt = read_prompt(columns.read(columns_read), name, columns.note_unused)
        columns.check_label(row.columns, prompt)
        prompt = locate_pictures(prompt, folder)
        prompt = replace(prompt, privileged={**prompt.privileged, **tests})
        if prompt.id in ids:
            raise Rejected(f"id {prompt.id[:EXCERPT]!r} was used before")
        return prompt

    def _split_tests(self, row: Columns) -> tuple[dict[str, str], Columns]:
        """Return the tests of a row for the verifier that runs them, and its other columns."""
        if not FUNCTIONS.keys() & set(self._verifiers):
            return {}, row
        try:
            tests = {program_tests.FIELD: program_tests.read_tests(row)}
        except ValueError as error:
            raise Rejected(str(error)) from None
        return tests, {
            name: cell for name, cell in row.items() if name not in program_tests.COLUMNS
        }

    def _write_rejected(self, source: str, row: Row, reason: str) -> None:
        if self._rejected_path is None:
            return
        line = {"file": source, "row": row.number, "reason": reason, "text": row.cut()}
        with self._rejected_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _check_counts(
        self, source: str, good: int, refusals: _Refusals, columns: ColumnReader
    ) -> None:
        allowed, total = self._config.max_rejected, good + refusals.count
        if refusals.first is not None and not good:
            raise DataError(
                f"{source}: all of its {total} rows are unusable; {refusals.describe_first()}"
                f"{self._advise(refusals.first, columns)}"
            )
        if refusals.first is not None and refusals.count > allowed * total:
            raise DataError(
                f"{source}: {refusals.count} of {total} rows cannot be used; "
                f"{refusals.describe_first()}; fix them, or raise task.max_rejected, which is "
                f"{allowed:g}"
            )
        if not good:
            raise DataError(
                f"{source}: no rows; write one row per line, for example "
                '{"prompt": "...", "answer": "..."}'
            )
        if refusals.first is not None:
            log.info(
                f"{source}: {refusals.count} of {total} rows rejected "
                f"(row {refusals.first.number}: {refusals.reason})"
            )

    def _advise(self, row: Row, columns: ColumnReader) -> str:
        """Return the `columns` to write for a row without a question, or an empty text."""
        if isinstance(row.columns, Rejected) or self._config.columns or columns.form:
            return ""
        if QUESTIONS.keys() & row.columns.keys():
            return ""
        if proposal := propose_columns(row.columns):
            return f"; write {proposal} in the task"
        names = _list_columns(list(row.columns)) if row.columns else "no columns"
        first = quote_name(next(iter(row.columns), "NAME"))
        return (
            f"; it has {names}: write columns: {{prompt: {first}}} in the task, or another of them"
        )

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
            proposal = columns.propose_answer()
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


def _check_answer(prompt: Prompt, checker: GoldChecker) -> None:
    problem = None if prompt.answer is None else checker.find_problem(prompt.answer)
    if problem is not None:
        raise Rejected(problem)


def _list_answers(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.answer for prompt in prompts if prompt.answer is not None]


def describe_long_answers(
    task: Any, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]], limit: int
) -> str | None:
    """Return a note on answers of rows that have more tokens than a reply may have, or None.

    Only the verifier `exact` compares a reply with the whole of an answer.
    """
    if not isinstance(task, RowsConfig) or task.verifier != "exact":
        return None
    return describe_long(_list_answers(prompts), encode, limit)


def build_prompt_set(
    config: RowsConfig,
    context: TaskContext,
    read_part: Callable[[PromptReader, str], list[Prompt]],
) -> PromptSet:
    """Build the task; `read_part` reads its parts `train` and `heldout`.

    The second part is not read if `config.heldout` is a number or share: then held-out rows are
    chosen from the first part. DataError if too many rows are bad or no training row is left.
    """
    grade = open_grader(config.verifier, config.sandbox, config.reward_range)
    reads_thoughts = name_object(config.verifier) not in VERIFIERS
    if config.step_rewards:
        # A step is compared with its thoughts, and the verifier reads the text after them.
        grade = _grade_steps(grade if reads_thoughts else _grade_answers(grade))
        reads_thoughts = True
    context.packages.extend(PACKAGES.get(name_object(config.verifier), ()))
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
            f"{config.path}: every training row is also held out; hold out fewer, or give other rows; "
            "only to evaluate on rows: practicum eval RUN --rows FILE"
        )
    if len(unseen) < len(train):
        log.info(
            f"{len(train) - len(unseen)} of {len(train)} training rows left out: "
            "the same question is held out"
        )
    explain = EXPLANATIONS.get(name_object(config.verifier))
    return PromptSet(unseen, heldout, grade=grade, explain=explain, reads_thoughts=reads_thoughts)


def _grade_answers(
    grade: Callable[[str, Prompt], float | None],
) -> Callable[[str, Prompt], float | None]:
    """Return the grader of whole completions, which only grades the text after the thoughts."""
    return lambda reply, prompt: grade(read_answer(reply), prompt)


def _grade_steps(
    grade: Callable[[str, Prompt], float | None],
) -> Callable[[str, Prompt], float | None]:
    """Return the grader that also scores a step that does not solve its row."""

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


def _normalize(prompt: Prompt) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    return tuple(
        (message.role, " ".join(message.content.split()), message.images)
        for message in prompt.messages
    )
