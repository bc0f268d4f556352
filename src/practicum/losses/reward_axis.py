"""Turn the rewards of completions, or of their turns, into the advantage of each token."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from practicum.functional.advantages import ADVANTAGES
from practicum.losses.tokens import TokenBatch
from practicum.objective.spec import Term

UNCHANGED = "none"
"""The advantage that is the reward itself."""


@dataclass(frozen=True, slots=True)
class RewardComparison:
    """A rule that turns the rewards of a scorer into advantages, and the completions to compare.

    `source` limits the comparison to the completions of a writer, and `unit` is the unit of a
    reward: a rollout, a turn with or without ("step") the turns after it, or the whole episode.
    """

    advantage: str
    scorer: str
    source: str = "all"
    unit: str = "rollout"

    def compute(self, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the advantage of each token's completion in its prompt's group; 0 without a reward.

        A scorer's per-token numbers are used unchanged if the completion's reward would be used
        unchanged, too.
        """
        key = self.unit, self.advantage, self.scorer, self.source
        if self.unit in ("turn", "step"):
            return batch.spread_turns(key, lambda: self._compare_turns(batch))
        if self.unit == "episode":
            return batch.spread(key, lambda: self._compare(batch, self._add_up_episodes(batch)))
        by_token = None
        if self.source == "all" and self.advantage == UNCHANGED:
            by_token = batch.read_judgements(self.scorer)
        if by_token is not None:
            return by_token
        return batch.spread(key, lambda: self._compare(batch, batch.read_rewards(self.scorer)))

    def _compare(self, batch: TokenBatch, row_rewards: Sequence[float | None]) -> list[float]:
        """Return the advantage of each row among the rows of the source; 0 for rows of other
        sources.

        An anchored advantage compares with the reference's rows, and is 0 without reference rows.
        """
        entry = ADVANTAGES[self.advantage]
        by_row = [0.0] * len(batch.groups)
        for rows in batch.group_rows():
            rewards = {row: reward for row in rows if (reward := row_rewards[row]) is not None}
            anchor = [rewards[row] for row in rewards if batch.sources[row] == "reference"]
            compared = {
                row: reward
                for row, reward in rewards.items()
                if self.source in ("all", batch.sources[row])
                and not (entry.anchored and batch.sources[row] == "reference")
            }
            if entry.anchored and not anchor:
                continue
            extra = (anchor,) if entry.anchored else ()
            advantages = entry.function(list(compared.values()), *extra)
            for row, row_advantage in zip(compared, advantages, strict=True):
                by_row[row] = row_advantage
        return [by_row[row] for row in batch.first]

    def _compare_turns(self, batch: TokenBatch) -> list[list[float]]:
        """Return the advantage of each turn of each row among the same turns of its group's rows.

        No turn is credited with earlier rewards. Rows that ended earlier have no such turn and are not compared.
        """
        returns = self._list_returns(batch)
        by_row = [[0.0] * len(rewards) for rewards in batch.turn_rewards]
        for rows in batch.group_rows():
            compared = [
                row
                for row in rows
                if returns[row] is not None and self.source in ("all", batch.sources[row])
            ]
            for turn in range(max((len(by_row[row]) for row in compared), default=0)):
                reached = {
                    row: row_returns[turn]
                    for row in compared
                    if (row_returns := returns[row]) is not None and turn < len(row_returns)
                }
                # A baseline over the same turn of other conversations does not depend on this
                # turn's action.
                advantages = ADVANTAGES[self.advantage].function(list(reached.values()))
                for row, turn_advantage in zip(reached, advantages, strict=True):
                    by_row[row][turn] = turn_advantage
        return [by_row[row] for row in batch.first]

    def _add_up_episodes(self, batch: TokenBatch) -> list[float | None]:
        """Return the total return of each row: the rewards of its turns plus its own reward."""
        # A conversation that ended before its first turn has only the completion's reward.
        return [
            row_returns[0] if row_returns else reward
            for row_returns, reward in zip(
                self._list_returns(batch), batch.read_rewards(self.scorer), strict=True
            )
        ]

    def _list_returns(self, batch: TokenBatch) -> list[list[float] | None]:
        """Return the return of each turn of each row; None for rows without any reward."""
        add = _add_last if self.unit == "step" else _add_up_turns
        return [
            add(rewards, last)
            for rewards, last in zip(
                batch.turn_rewards, batch.read_rewards(self.scorer), strict=True
            )
        ]


def compile_outcome(term: Term, advantage: str) -> RewardComparison:
    """Return the comparison of a signal that only compares rewards."""
    source = term.source if term.signal.compares_within_source else "all"
    return RewardComparison(advantage, term.scorer, source, term.signal.reward_unit)


def compile_reward(term: Term) -> RewardComparison:
    """Return the comparison of the rewards that join a teacher's advantage."""
    return RewardComparison(term.reward_advantage, term.scorer)


def _add_up_turns(rewards: Sequence[float | None], last: float | None) -> list[float] | None:
    """Return the sum of the rewards from each turn on; `last` is the completion's own.

    None if there is no reward at all.
    """
    if last is None and all(reward is None for reward in rewards):
        return None
    total, returns = last or 0.0, []
    for reward in reversed(rewards):
        # Without turn rewards, the first sum of a conversation is exactly its reward, to the last
        # bit.
        total = total if reward is None else total + reward
        returns.append(total)
    return returns[::-1]


def _add_last(rewards: Sequence[float | None], last: float | None) -> list[float] | None:
    """Return the reward of each turn plus the completion's, as `_add_up_turns` otherwise."""
    if last is None and all(reward is None for reward in rewards):
        return None
    return [(reward or 0.0) + (last or 0.0) for reward in rewards]
