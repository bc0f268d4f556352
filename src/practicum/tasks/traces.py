"""The prompts of recorded agent traces, for `rollout.source: traces(PATH)` with the same file.

The traces hold the rewards. There are no held-out prompts: only the harness that recorded the
traces can judge new answers.
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from practicum.errors import DataError
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.text.trace_rows import read_traced_answers


class Config(TaskConfig):
    """The file of traces."""

    reads_files: ClassVar[bool] = True
    type: Literal["traces"] = "traces"
    path: Path = Field(description="JSONL traces of verifiers; relative to the recipe's folder")

    def find_problems(self, base_dir: Path) -> list[str]:
        """Return a problem of the file, in one line."""
        try:
            read_traced_answers(base_dir / self.path.expanduser())
        except DataError as error:
            return [str(error)]
        return []


def build(config: Config, context: TaskContext) -> Task:
    """Read the file; DataError if a line is not a trace."""
    answers = read_traced_answers(context.base_dir / config.path.expanduser())
    prompts = {answer.prompt.id: answer.prompt for answer in answers}
    return PromptSet(list(prompts.values()), [])
