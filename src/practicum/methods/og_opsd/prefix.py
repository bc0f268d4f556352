"""Weight the first tokens of a completion until the teacher's summed entropy reaches a budget."""

import math

import torch
from torch import Tensor

from practicum.functional.weights import TokenStatistics, Weight


def _cut_by_entropy(statistics: TokenStatistics, budget: float = 2.0) -> Tensor:
    """Mark the supervised tokens before which the teacher's entropies in the completion sum to less
    than `budget` nats.

    The first token is always marked. ValueError if `budget` is not positive.
    """
    if not budget > 0.0:
        raise ValueError(f"entropy_prefix: budget must be positive, got {budget:g}")
    entropy, rows = statistics.teacher_entropy, statistics.rows
    assert entropy is not None and rows is not None, "an objective gives the statistics in needs"
    mask = (statistics.loss_mask != 0).double()
    entropy = torch.where(mask > 0, entropy.detach().double(), 0.0)
    totals = entropy.new_zeros(int(rows.max()) + 1 if len(rows) else 0).index_add_(0, rows, entropy)
    # Tokens of a completion are consecutive, so one running sum serves all completions.
    before = (entropy.cumsum(0) - entropy) - (totals.cumsum(0) - totals)[rows]
    return (mask * (before < budget)).float()


entropy_prefix = Weight(
    "entropy_prefix",
    _cut_by_entropy,
    "the first tokens of each completion, up to a sum of the teacher's entropy",
    "2610.05070",
    needs=("teacher_entropy", "rows"),
    identity={"budget": math.inf},
)
