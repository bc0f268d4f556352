"""Compute how much each completion counts in a term: its filter times its sample weight."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from practicum.functional.samples import SAMPLE_WEIGHTS, TOKEN_STATISTICS, SampleStatistics
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.objective.spec import Term
from practicum.types import AUTHORS


@dataclass(frozen=True, slots=True)
class CompletionWeights:
    """The filter and the sample weight of a term.

    `statistics` are the per-token statistics that the sample weight needs. `key` names the weights
    in the batch's cache of row values.
    """

    name: str
    arguments: dict[str, float | int | str]
    statistics: frozenset[str]
    filter: str
    source: str
    scorer: str

    @property
    def key(self) -> Hashable:
        """Return the name of the weights, built from all settings that affect them."""
        arguments = tuple(self.arguments.items())
        return "completion weight", self.name, arguments, self.filter, self.source, self.scorer

    def select_tokens(self, batch: TokenBatch) -> Bool[Tensor, " T"]:
        """Return True at the tokens written by the term's source."""
        if self.source == "all":
            return torch.ones_like(batch.authors, dtype=torch.bool)
        return batch.authors == AUTHORS.index(self.source)

    def compute(self, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the weight of each token's completion, 0 if it is not selected."""
        # Without statistics of tokens the weights are the same for every part of the batch.
        if not self.statistics:
            return batch.spread(
                self.key,
                lambda: self._weigh_rows(batch, select_rows(self.filter, self.scorer, batch)),
            )
        is_trained = values.is_scored & self.select_tokens(batch)
        trained_rows = set(batch.rows[is_trained].tolist())
        selected = select_rows(self.filter, self.scorer, batch)
        trains = [is_in and row in trained_rows for row, is_in in enumerate(selected)]
        student, teacher, reference = (
            _compute_mean_nll(logprobs, batch) if name in self.statistics else []
            for name, logprobs in (
                ("student_nll", values.logprobs),
                ("teacher_nll", values.teacher_logprobs),
                ("reference_nll", values.reference_logprobs),
            )
        )
        weights = torch.tensor(self._weigh_rows(batch, trains, student, teacher, reference))
        return weights.to(batch.rows.device)[batch.rows]

    def _weigh_rows(
        self,
        batch: TokenBatch,
        trains: Sequence[bool],
        student_nll: Sequence[float] = (),
        teacher_nll: Sequence[float] = (),
        reference_nll: Sequence[float] = (),
    ) -> list[float]:
        """Return the weight of each row's completion, 0 for rows that the term does not train on."""
        entry = SAMPLE_WEIGHTS[self.name]
        by_row, by_scorer = [1.0] * len(batch.groups), batch.read_rewards(self.scorer)
        of_source = [self.source in ("all", source) for source in batch.sources]
        # A weight that needs no statistic is 1 for every completion.
        for rows in batch.group_rows() if entry.needs else ():
            statistics = SampleStatistics(
                kept=[trains[row] and of_source[row] for row in rows],
                rewards=[by_scorer[row] for row in rows],
                texts=[batch.texts[row] for row in rows],
                student_nll=[student_nll[row] for row in rows if student_nll],
                teacher_nll=[teacher_nll[row] for row in rows if teacher_nll],
                reference_nll=[reference_nll[row] for row in rows if reference_nll],
            )
            weights = entry.function(statistics, **self.arguments)
            for row, weight in zip(rows, weights, strict=True):
                by_row[row] = weight
        return [by_row[first] * counts for first, counts in zip(batch.first, trains, strict=True)]


def compile_completion_weights(term: Term) -> CompletionWeights:
    """Return the filter and the sample weight of a term."""
    return CompletionWeights(
        name=term.samples.name,
        arguments=dict(term.samples.arguments),
        statistics=term.samples_by & frozenset(TOKEN_STATISTICS),
        filter=term.filter,
        source=term.source,
        scorer=term.scorer,
    )


def select_rows(outcome: str, scorer: str, batch: TokenBatch) -> list[bool]:
    """Return True for the rows that a filter by outcome selects.

    A group is solved if one of the student's completions is right; completions of other writers
    count only if the student wrote none.
    """
    right = [None if reward is None else reward >= 1.0 for reward in batch.read_rewards(scorer)]
    solved_first: dict[int, bool] = {}
    for rows in batch.group_rows():
        is_solved = any(right[row] for row in _select_student_rows(rows, batch))
        solved_first |= dict.fromkeys(rows, is_solved)
    # Only first rows are in the groups; a repeated rollout takes the result of its first row.
    solved = [solved_first[row] for row in batch.first]
    selects = {
        "all": lambda row: True,
        "correct": lambda row: right[row] is True,
        "incorrect": lambda row: right[row] is False,
        "failed_group": lambda row: right[row] is not None and not solved[row],
        "solved_group": lambda row: solved[row],
    }[outcome]
    return [selects(row) for row in range(len(batch.groups))]


def _select_student_rows(rows: Sequence[int], batch: TokenBatch) -> Sequence[int]:
    """Return the rows that the student wrote, or all of them if it wrote none."""
    return [row for row in rows if batch.sources[row] == "student"] or rows


def _compute_mean_nll(logprobs: Tensor | None, batch: TokenBatch) -> list[float]:
    """Return the mean negative log-probability of each row's tokens, 0 if it is unknown."""
    count = len(batch.groups)
    nll = torch.zeros_like(batch.aggregate) if logprobs is None else -logprobs.nan_to_num(0.0)
    sums = nll.new_zeros(count).index_add_(0, batch.rows, nll)
    return (sums / torch.bincount(batch.rows, minlength=count).clamp_min(1)).tolist()
