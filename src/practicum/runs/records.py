"""The journals of a run: rows of metrics, rollouts and alarms, and, in a separate file, of
seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.costs import WIRE_BYTES
from practicum.errors import CheckpointError
from practicum.monitors import Alarm
from practicum.rollouts import RolloutRow, to_exact_floats
from practicum.run_dir import (
    Checkpoint,
    Journal,
    JournalRecord,
    RunDir,
    check_journal,
    read_rows,
    shapes,
    to_json_number,
    truncate_journal,
)
from practicum.runs.thumbnails import Thumbnails
from practicum.text import Renderer
from practicum.types import Rollout, StepResult, TokenRecord


class RunJournals:
    """The journals of a run, written together.

    Only `timings.jsonl` depends on the clock, so all further files are the same no matter how often a
    run is resumed. With `rollouts_required`, a run that cannot write its rollouts stops. With a
    `renderer`, `vocabulary.jsonl` gets each token as text when it first occurs, and `pictures` gets a
    small copy of each picture. `checkpoint` is the
    checkpoint that the run resumes from, if any.
    """

    def __init__(
        self,
        run_dir: RunDir,
        renderer: Renderer | None = None,
        *,
        rollouts_required: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        required = {run_dir.metrics_jsonl, *[run_dir.rollouts_jsonl] * rollouts_required}
        lost_rows = count_lost_rows(checkpoint)
        self._journals = [
            Journal(path, essential=path in required, dropped=lost_rows.get(path.name, 0))
            for path in list_journals(run_dir)
        ]
        self._metrics, self._rollouts, self._timings, self._alarms, self._vocabulary = (
            self._journals
        )
        self._renderer = renderer
        self._thumbnails = Thumbnails(run_dir.path, renderer and renderer.pictures)
        # A resumed run does not write the tokens of earlier steps again.
        self._seen = {row["id"] for row in read_rows(locate_vocabulary(run_dir), shapes.VOCABULARY)}

    def __enter__(self) -> "RunJournals":
        return self

    def __exit__(self, *_: object) -> None:
        for journal in self._journals:
            journal.close()

    def write(self, result: StepResult) -> None:
        """Append a row of metrics, a row of timings, and a row for each rollout."""
        metrics, timings = {}, {}
        # Timings go to a separate file, so that metrics.jsonl has the same bytes in every run.
        for name, number in result.metrics.items():
            if _is_nondeterministic(name):
                timings[name] = number
            else:
                metrics[name] = to_json_number(number)
        self._metrics.append({"step": result.step, **metrics})
        self._timings.append({"step": result.step, **timings})
        self._write_tokens(result)
        self._thumbnails.write(result.rollouts)
        outputs = result.outputs.split(result.rollouts)
        for rollout, output in zip(result.rollouts, outputs, strict=True):
            self._rollouts.append(_build_rollout_row(result.step, rollout, output))

    def _write_tokens(self, result: StepResult) -> None:
        """Append the step's new tokens as text: the report shows rollouts without a tokenizer."""
        if self._renderer is None:
            return
        tokens = {token for rollout in result.rollouts for token in rollout.tokens.tolist()}
        for token in sorted(tokens - self._seen):
            text, control = self._renderer.decode_token(token), self._renderer.is_control(token)
            self._vocabulary.append(
                {"step": result.step, "id": token, "text": text, "control": control}
            )
        self._seen |= tokens

    def write_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Append a row for each alarm."""
        for alarm in alarms:
            self._alarms.append(alarm.to_row())

    def sync(self) -> None:
        """Wait until the rows are on the disk, so that no checkpoint is newer than its rows."""
        for journal in self._journals:
            journal.sync()

    def record(self) -> dict[str, JournalRecord]:
        """Return the digests of all journals by name, for a checkpoint."""
        return {journal.path.name: journal.record() for journal in self._journals}

    @property
    def lost_rows(self) -> dict[str, int]:
        """The number of rows that could not be written, by the name of the journal."""
        return {journal.path.name: journal.dropped for journal in self._journals if journal.dropped}


def list_journals(run_dir: RunDir) -> list[Path]:
    """Return the paths of metrics, rollouts, timings, alarms and vocabulary."""
    return [
        run_dir.metrics_jsonl,
        run_dir.rollouts_jsonl,
        locate_timings(run_dir),
        run_dir.alarms_jsonl,
        locate_vocabulary(run_dir),
    ]


def count_lost_rows(checkpoint: Checkpoint | None) -> dict[str, int]:
    """Return the number of rows that were lost before a checkpoint, by the name of the journal."""
    records = {} if checkpoint is None else checkpoint.journals
    return {name: record.lost_rows for name, record in records.items() if record.lost_rows}


def check_journals(run_dir: RunDir, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the journals have the same rows as at a checkpoint."""
    for path in list_journals(run_dir):
        if path.name not in checkpoint.journals:
            raise CheckpointError(
                f"{checkpoint.path} has no digests of {path.name}; start a new run"
            )
        check_journal(path, checkpoint.journals[path.name])


def truncate_journals(run_dir: RunDir, checkpoint: Checkpoint | None) -> None:
    """Cut the rows after a checkpoint, which the resumed run writes again."""
    for path in list_journals(run_dir):
        truncate_journal(path, 0 if checkpoint is None else checkpoint.journals[path.name].size)


def locate_timings(run_dir: RunDir) -> Path:
    """Return the path of the seconds of each phase."""
    return run_dir.path / "timings.jsonl"


def locate_vocabulary(run_dir: RunDir) -> Path:
    """Return the path of the tokens of the rollouts as text."""
    return run_dir.path / "vocabulary.jsonl"


def _is_nondeterministic(name: str) -> bool:
    """Return True if a repeated run can report another value, as for seconds and wire bytes."""
    return name.startswith("seconds_") or name == WIRE_BYTES


def _encode_judgements(rollout: Rollout) -> dict[str, Any]:
    """Return the scorers' values of a rollout by name, if there are scorers."""
    values = {name: judgement.value for name, judgement in rollout.judgements.items()}
    return {"judgements": values} if values else {}


def _build_rollout_row(step: int, rollout: Rollout, output: TokenRecord) -> dict[str, Any]:
    """Return a row of rollouts.jsonl; the scripted teacher replays its `teacher_logprobs`."""
    return {
        **RolloutRow.of(step, rollout).to_json(),
        "reward": rollout.reward,
        **_encode_judgements(rollout),
        "teacher_logprobs": to_exact_floats(output.teacher_logprobs),
        "divergence": to_exact_floats(output.divergence),
        "student_entropy": to_exact_floats(output.student_entropy),
        "teacher_entropy": to_exact_floats(output.teacher_entropy),
        "weight": to_exact_floats(output.weight),
    }
