"""The prompts that a run learns from, chosen by the share of right answers to each prompt.

The student answered in this run, up to the newest step (PACED 2603.11178), or the answers are from
an earlier run: a stage of the student, or a stage in which the teacher answered.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from practicum.core.randomness import seed_of
from practicum.errors import CheckpointError, DataError
from practicum.rollouts import select_prompts
from practicum.rows.row_files import HOPELESS_ROW, read_rows
from practicum.types import Prompt, Rollout

NEWEST = 32
"""The number of a prompt's newest answers in this run that count."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Choose the prompts of each step by their pass rates.

    Prompts with a rate from `low` to `high` are chosen, if the rate of the second half of their
    answers exceeds that of the first half by at most `rise`. A chosen prompt with rate p is drawn
    in proportion to `p**a (1 - p)**b`, for `powers` (a, b). `is_live`: the answers of this run count.
    `outcomes` tells right from wrong answers, by prompt id.
    """

    prompts: Sequence[Prompt]
    low: float = 0.0
    high: float = 1.0
    rise: float | None = None
    powers: tuple[float, float] = (0.0, 0.0)
    is_live: bool = True
    outcomes: dict[str, deque[bool]] = field(default_factory=dict)

    def read_run(self, path: Path) -> None:
        """Read the answers of an earlier run.

        Raises DataError if a row is not a rollout, or if no prompt of this run was answered.
        """
        if not path.is_file():
            raise DataError(
                f"train.curriculum.run: no file {path}; give the folder of a finished run"
            )
        names = {prompt.id for prompt in self.prompts}
        for name, reward in _read_rewards(path):
            if name in names and reward is not None:
                self.outcomes.setdefault(name, deque()).append(reward >= 1.0)
        if not self.outcomes:
            raise DataError(
                f"train.curriculum.run: {path} has no rewarded answer to a prompt of this run; name a "
                "run on the same task"
            )

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Note the student's new answers, if this run counts."""
        for rollout in rollouts if self.is_live else ():
            if rollout.source == "student" and rollout.reward is not None:
                results = self.outcomes.setdefault(rollout.prompt.id, deque(maxlen=NEWEST))
                results.append(rollout.reward >= 1.0)

    def list_chosen(self) -> list[Prompt]:
        """Return the chosen prompts, with those without an answer if this run counts."""
        return [p for p in self.prompts if self._is_chosen(list(self.outcomes.get(p.id, ())))]

    def select(self, seed: int, step: int, count: int) -> list[Prompt]:
        """Return the prompts of a step; the result depends on the outcomes and on (seed, step).

        All prompts can be drawn if none is chosen.
        """
        chosen = self.list_chosen() or list(self.prompts)
        a, b = self.powers
        if a == b == 0:
            return select_prompts(chosen, seed, step, count)
        # Never 0 or 1, so that no prompt is lost for ever.
        results = [self.outcomes.get(prompt.id, ()) for prompt in chosen]
        rates = [(sum(right) + 1) / (len(right) + 2) for right in results]
        stream = random.Random(seed_of(seed, "curriculum", step))
        selected: list[Prompt] = []
        while len(selected) < count:
            # Draw without replacement: in the order in which independent clocks strike.
            strikes = [stream.expovariate(p**a * (1 - p) ** b) for p in rates]
            order = sorted(range(len(chosen)), key=strikes.__getitem__)
            selected += [chosen[place] for place in order[: count - len(selected)]]
        return selected

    def save_state(self) -> dict[str, list[bool]]:
        """Return the outcomes of this run as JSON data."""
        return {name: list(results) for name, results in self.outcomes.items() if self.is_live}

    def load_state(self, state: Mapping[str, Sequence[bool]]) -> None:
        """Restore the outcomes of this run; CheckpointError if they are of other prompts."""
        if not state.keys() <= {prompt.id for prompt in self.prompts}:
            raise CheckpointError("the curriculum in the checkpoint has other prompts; start anew")
        self.outcomes.update({name: deque(results, NEWEST) for name, results in state.items()})

    def _is_chosen(self, results: Sequence[bool]) -> bool:
        if not results:
            return self.is_live
        if self.rise is not None and len(results) > 1:
            half = len(results) // 2
            first, results = results[:half], results[half:]
            # The newer half also tells how good the student is now.
            if sum(results) / len(results) - sum(first) / half > self.rise:
                return False
        return self.low <= sum(results) / len(results) <= self.high


def _read_rewards(path: Path) -> Iterator[tuple[str, float | None]]:
    """Yield the prompt and the reward of each row."""
    for row in read_rows(path, HOPELESS_ROW):
        match row.columns:
            case {"prompt": str(name), "reward": int() | float() | None as reward}:
                yield name, reward
            case _:
                raise DataError(
                    f"train.curriculum.run: {path}: row {row.number} is not a rollout; give the "
                    "unmodified rollouts.jsonl of a run"
                )
