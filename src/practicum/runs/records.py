"""The journals of a run: rows of metrics, rollouts and alarms, and, in a file apart, of seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.costs import WIRE_BYTES
from practicum.monitors import Alarm
from practicum.rollouts import RolloutRow, to_exact_floats
from practicum.run_dir import Journal, RunDir, read_rows, shapes, to_json_number
from practicum.text import Renderer
from practicum.training.loop import StepResult
from practicum.types import Rollout, TokenRecord


class RunJournals:
    """The journals of a run, written together.

    Only `timings.jsonl` depends on the clock, so the other files are the same however often a run
    is resumed. With `rollouts_required`, a run that cannot write its rollouts stops. With a
    `renderer`, `vocabulary.jsonl` gets each token as text when it first occurs.
    """

    def __init__(
        self, run_dir: RunDir, renderer: Renderer | None = None, *, rollouts_required: bool = False
    ) -> None:
        self._metrics = Journal(run_dir.metrics_jsonl, essential=True)
        self._rollouts = Journal(run_dir.rollouts_jsonl, essential=rollouts_required)
        self._timings = Journal(locate_timings(run_dir), essential=False)
        self._alarms = Journal(run_dir.alarms_jsonl, essential=False)
        self._vocabulary = Journal(locate_vocabulary(run_dir), essential=False)
        self._journals = (
            self._metrics,
            self._rollouts,
            self._timings,
            self._alarms,
            self._vocabulary,
        )
        self._renderer = renderer
        # A resumed run does not write the tokens of earlier steps again.
        self._seen = {row["id"] for row in read_rows(locate_vocabulary(run_dir), shapes.VOCABULARY)}

    def __enter__(self) -> "RunJournals":
        return self

    def __exit__(self, *_: object) -> None:
        for journal in self._journals:
            journal.close()

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, which a resumed run writes again."""
        for journal in self._journals:
            journal.truncate_after(step)

    def write(self, result: StepResult) -> None:
        """Append a row of metrics, a row of timings, and a row for each rollout."""
        metrics, timings = {}, {}
        # Timings go to a file of their own, so that metrics.jsonl has the same bytes in every run.
        for name, number in result.metrics.items():
            if _is_nondeterministic(name):
                timings[name] = number
            else:
                metrics[name] = to_json_number(number)
        self._metrics.append({"step": result.step, **metrics})
        self._timings.append({"step": result.step, **timings})
        self._write_tokens(result)
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

    def describe_losses(self) -> list[str]:
        """Return a line for each journal that lost rows."""
        return [
            f"{journal.dropped} rows of {journal.path.name} could not be written"
            for journal in self._journals
            if journal.dropped
        ]


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
