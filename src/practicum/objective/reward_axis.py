"""Turn the rewards of completions, or of their turns, into the advantage of each token."""

from collections.abc import Sequence

from torch import Tensor

from practicum.functional.advantages import ADVANTAGES
from practicum.objective.signals.score import Config as Score
from practicum.objective.spec import Term
from practicum.objective.tokens import TokenBatch

UNCHANGED = "none"
"""The advantage that is the reward itself."""


def compute_reward_advantages(term: Term, advantage: str, batch: TokenBatch) -> Tensor:
    """Return the advantage of each token's completion in its prompt's group; 0 without a reward.

    A scorer's numbers of single tokens are taken as they are if the completion's would be, too.
    """
    by_token = batch.read_judgements(term.scorer) if advantage == UNCHANGED else None
    if by_token is not None:
        return by_token
    return batch.spread(
        ("advantage", advantage, term.scorer),
        lambda: _compare_rewards(advantage, batch, read_rewards(term, batch)),
    )


def compute_own_advantages(term: Term, advantage: str, batch: TokenBatch) -> Tensor:
    """Return the same among the completions that a signal compares; 0 for all others."""
    if not isinstance(term.signal, Score):
        return compute_reward_advantages(term, advantage, batch)
    source = term.source if term.signal.among == "source" else "all"
    if term.signal.per == "turn":
        return batch.spread_turns(
            ("advantage by turn", advantage, term.scorer, source),
            lambda: _compare_turns(term, advantage, batch, source),
        )
    if term.signal.per == "episode":
        return batch.spread(
            ("advantage of episodes", advantage, term.scorer, source),
            lambda: _compare_rewards(advantage, batch, _add_up_episodes(term, batch), source),
        )
    if source == "all":
        return compute_reward_advantages(term, advantage, batch)
    return batch.spread(
        ("advantage", advantage, term.scorer, source),
        lambda: _compare_rewards(advantage, batch, read_rewards(term, batch), source),
    )


def _compare_rewards(
    advantage: str, batch: TokenBatch, row_rewards: Sequence[float | None], source: str = "all"
) -> list[float]:
    """Return the advantage of each row among those of a source; 0 for rows of other sources.

    An anchored advantage compares with the reference's rows, and is 0 where there are none.
    """
    entry = ADVANTAGES[advantage]
    by_row = [0.0] * len(batch.groups)
    for rows in batch.group_rows():
        rewards = {row: reward for row in rows if (reward := row_rewards[row]) is not None}
        anchor = [rewards[row] for row in rewards if batch.sources[row] == "reference"]
        compared = {
            row: reward
            for row, reward in rewards.items()
            if source in ("all", batch.sources[row])
            and not (entry.anchored and batch.sources[row] == "reference")
        }
        if entry.anchored and not anchor:
            continue
        extra = (anchor,) if entry.anchored else ()
        advantages = entry.function(list(compared.values()), *extra)
        for row, row_advantage in zip(compared, advantages, strict=True):
            by_row[row] = row_advantage
    return [by_row[row] for row in batch.first]


def _compare_turns(term: Term, advantage: str, batch: TokenBatch, source: str) -> list[list[float]]:
    """Return the advantage of each turn of each row among the same turns of its group's rows.

    The return of a turn adds up the rewards from it on, so that no turn answers for what came
    before it. Rows that ended earlier have no such turn and are not compared.
    """
    returns = _list_returns(term, batch)
    by_row = [[0.0] * len(rewards) for rewards in batch.turn_rewards]
    for rows in batch.group_rows():
        compared = [
            row
            for row in rows
            if returns[row] is not None and source in ("all", batch.sources[row])
        ]
        for turn in range(max((len(by_row[row]) for row in compared), default=0)):
            reached = {
                row: row_returns[turn]
                for row in compared
                if (row_returns := returns[row]) is not None and turn < len(row_returns)
            }
            # A baseline over the same turn of other conversations knows nothing of this turn's action.
            advantages = ADVANTAGES[advantage].function(list(reached.values()))
            for row, turn_advantage in zip(reached, advantages, strict=True):
                by_row[row][turn] = turn_advantage
    return [by_row[row] for row in batch.first]


def _add_up_episodes(term: Term, batch: TokenBatch) -> list[float | None]:
    """Return the whole return of each row, the rewards of its turns and its own."""
    # A conversation that ended before its first turn has the completion's reward alone.
    return [
        row_returns[0] if row_returns else reward
        for row_returns, reward in zip(
            _list_returns(term, batch), read_rewards(term, batch), strict=True
        )
    ]


def _list_returns(term: Term, batch: TokenBatch) -> list[list[float] | None]:
    """Return what follows each turn of each row; None for rows without any reward."""
    return [
        _add_up_turns(rewards, last)
        for rewards, last in zip(batch.turn_rewards, read_rewards(term, batch), strict=True)
    ]


def _add_up_turns(rewards: Sequence[float | None], last: float | None) -> list[float] | None:
    """Return the sum of the rewards from each turn on; `last` is the completion's own.

    None if there is no reward at all.
    """
    if last is None and all(reward is None for reward in rewards):
        return None
    total, returns = last or 0.0, []
    for reward in reversed(rewards):
        # The first sum of a conversation without rewards a turn is its reward, to the last bit.
        total = total if reward is None else total + reward
        returns.append(total)
    return returns[::-1]


def read_rewards(term: Term, batch: TokenBatch) -> Sequence[float | None]:
    """Return the reward of each row by the scorer of the term."""
    return batch.rewards.get(term.scorer, [None] * len(batch.groups))
