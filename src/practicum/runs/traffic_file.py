"""The user traffic in a run's folder: written as users send messages, read when the run resumes."""

import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from practicum.errors import CheckpointError, DataError
from practicum.recipe import Recipe
from practicum.rollouts import Traffic, TrafficRow
from practicum.rollouts.sources import served
from practicum.run_dir import Journal, RunDir, read_rows
from practicum.runs.assembly import RunComponents


def open_traffic(
    run_dir: RunDir, recipe: Recipe, components: RunComponents, exit_stack: ExitStack
) -> RunComponents:
    """Return the components with the run's traffic, if its source is users.

    Requests of users are not served before the first step asks for rollouts.
    """
    source, task = recipe.rollout.source, components.parts.task
    if not isinstance(source, served.Config):
        return components
    assert task.serves_users, "another task is refused when the run is assembled"
    path = run_dir.traffic_jsonl
    if source.path is not None and not path.exists():
        _copy(Path(recipe.base_dir) / Path(source.path).expanduser(), path)
    journal = exit_stack.enter_context(closing(Journal(path, essential=True)))
    exit_stack.callback(task.close)
    traffic = Traffic(
        append=journal.append,
        longest_prompt=min(
            recipe.prompt_tokens, components.student.context_length - recipe.longest_answer
        ),
        ledger=components.parts.ledger,
        users=task if source.path is None else None,
    )
    traffic.restore(_read(path))
    return replace(components, parts=replace(components.parts, traffic=traffic))


def _copy(source: Path, path: Path) -> None:
    # The run keeps a copy of its training data, so that it can resume if the original file changes.
    try:
        shutil.copyfile(source, path)
    except OSError as error:
        raise DataError(
            f"rollout.source: {source} cannot be read ({error.strerror}); give the traffic.jsonl of "
            "a run"
        ) from error


def _read(path: Path) -> list[TrafficRow]:
    rows = []
    for number, row in enumerate(read_rows(path), start=1):
        try:
            rows.append(TrafficRow.model_validate(row))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise CheckpointError(
                f"{path} line {number} is no turn ({first['msg']}); put it back from a copy"
            ) from None
    return rows
