"""What a run writes down at every step: metrics, rollouts, alarms, and, apart from all of them, seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.costs import WIRE_BYTES
from practicum.monitors import Alarm
from practicum.rollouts import RolloutRow, to_exact_floats
from practicum.run_dir import Journal, RunDir, json_number, read_rows, shapes
from practicum.text import Renderer
from practicum.training.loop import StepResult
from practicum.types import Rollout, TokenRecord


class RunJournals:
    """The journals of a run, written together.

    Only `timings.jsonl` depends on the clock, so the others come out the same however often a run is resumed. Where
    rollouts are `replayed`, a run that cannot write them down stops. With a `renderer` each token is written down as text
    when it first occurs.
    """

    def __init__(
        self, home: RunDir, renderer: Renderer | None = None, replayed: bool = False
    ) -> None:
        self._metrics = Journal(home.metrics_jsonl, essential=True)
        self._rollouts = Journal(home.rollouts_jsonl, essential=replayed)
        self._timings = Journal(timings_jsonl(home), essential=False)
        self._alarms = Journal(home.alarms_jsonl, essential=False)
        self._vocabulary = Journal(vocabulary_jsonl(home), essential=False)
        self._journals = (
            self._metrics,
            self._rollouts,
            self._timings,
            self._alarms,
            self._vocabulary,
        )
        self._renderer = renderer
        self._seen = {row["id"] for row in read_rows(vocabulary_jsonl(home), shapes.VOCABULARY)}

    def __enter__(self) -> "RunJournals":
        return self

    def __exit__(self, *_: object) -> None:
        for journal in self._journals:
            journal.close()

    def truncate_after(self, step: int) -> None:
        """Forget the rows of later steps, which a resumed run writes again."""
        for journal in self._journals:
            journal.truncate_after(step)

    def write(self, result: StepResult) -> None:
        """One row of metrics, one of timings, and one a rollout."""
        timings = {
            name: value for name, value in result.metrics.items() if _is_nondeterministic(name)
        }
        numbers = {
            name: json_number(value)
            for name, value in result.metrics.items()
            if name not in timings
        }
        self._metrics.append({"step": result.step, **numbers})
        self._timings.append({"step": result.step, **timings})
        self._write_tokens(result)
        for rollout, output in zip(
            result.rollouts, result.outputs.split(result.rollouts), strict=True
        ):
            self._rollouts.append(_rollout_row(result.step, rollout, output))

    def _write_tokens(self, result: StepResult) -> None:
        """What the step's new tokens read as, so that rollouts.jsonl can be shown without a tokenizer."""
        if self._renderer is None:
            return
        new = {
            token for rollout in result.rollouts for token in rollout.tokens.tolist()
        } - self._seen
        for token in sorted(new):
            text, control = self._renderer.decode_token(token), self._renderer.is_control(token)
            self._vocabulary.append(
                {"step": result.step, "id": token, "text": text, "control": control}
            )
        self._seen |= new

    def write_alarms(self, alarms: Sequence[Alarm]) -> None:
        """One row an alarm."""
        for alarm in alarms:
            self._alarms.append(alarm.row())

    def sync(self) -> None:
        """Wait until the rows are on the disk, so that no checkpoint outlives them."""
        for journal in self._journals:
            journal.sync()

    def losses(self) -> list[str]:
        """What could not be written, one line a journal."""
        failed_journals = [journal for journal in self._journals if journal.dropped]
        return [
            f"{journal.dropped} rows of {journal.path.name} could not be written"
            for journal in failed_journals
        ]


def timings_jsonl(home: RunDir) -> Path:
    """Where the seconds of each phase are written."""
    return home.path / "timings.jsonl"


def vocabulary_jsonl(home: RunDir) -> Path:
    """Where it is written what the tokens of the rollouts read as."""
    return home.path / "vocabulary.jsonl"


def _is_nondeterministic(name: str) -> bool:
    """Whether a metric is another one in a run that is done again: seconds, and bytes to and from other processes."""
    return name.startswith("seconds_") or name == WIRE_BYTES


def _rollout_row(step: int, rollout: Rollout, output: TokenRecord) -> dict[str, Any]:
    """One line of rollouts.jsonl; with its `teacher_logprobs` the file is a tape for the scripted teacher."""
    return {
        **RolloutRow.of(step, rollout).to_json(),
        "reward": rollout.reward,
        "teacher_logprobs": to_exact_floats(output.teacher_logprobs),
        "divergence": to_exact_floats(output.divergence),
        "student_entropy": to_exact_floats(output.student_entropy),
        "teacher_entropy": to_exact_floats(output.teacher_entropy),
        "weight": to_exact_floats(output.weight),
    }
