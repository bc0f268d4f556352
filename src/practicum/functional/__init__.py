"""Pure functions of tensors: student first, log-probabilities in, one number per position out."""

from practicum.functional import divergences
from practicum.functional.advantages import (
    ADVANTAGES,
    REWARDS,
    Advantage,
    RewardRule,
    add_reward,
    clip,
    group_centre,
    group_normalize,
    leave_one_out,
    modulate,
)
from practicum.functional.chunked import chunks
from practicum.functional.distributions import (
    SUPPORTS,
    TAILS,
    candidates,
    contrast,
    entropy,
    greedy,
    log_linear,
    mixture,
    overlap,
    restrict,
    restrict_candidates,
    temper,
)
from practicum.functional.divergences import *
from practicum.functional.estimators import (
    CORRECTIONS,
    Correction,
    k1,
    k2,
    k3,
    score_function_returns,
)
from practicum.functional.policy import (
    POLICY_LOSSES,
    PolicyLoss,
    cispo,
    cross_entropy,
    dro,
    gspo,
    importance_sampling,
    ppo,
)
from practicum.functional.pools import (
    arithmetic,
    conflict_cosine,
    disagreement,
    geometric,
    member_weights,
    top1_conflict,
)
from practicum.functional.registry import register
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleStatistics, SampleWeight
from practicum.functional.sequence import (
    AGGREGATES,
    gather_logprobs,
    reward_to_go,
    token_coefficients,
)
from practicum.functional.weights import WEIGHTS, TokenStatistics, Weight

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "CORRECTIONS",
    "POLICY_LOSSES",
    "REWARDS",
    "SAMPLE_WEIGHTS",
    "SUPPORTS",
    "TAILS",
    "WEIGHTS",
    "Advantage",
    "Correction",
    "PolicyLoss",
    "RewardRule",
    "SampleStatistics",
    "SampleWeight",
    "TokenStatistics",
    "Weight",
    "add_reward",
    "arithmetic",
    "candidates",
    "chunks",
    "cispo",
    "clip",
    "conflict_cosine",
    "contrast",
    "cross_entropy",
    "disagreement",
    "dro",
    "entropy",
    "gather_logprobs",
    "geometric",
    "greedy",
    "group_centre",
    "group_normalize",
    "gspo",
    "importance_sampling",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "log_linear",
    "member_weights",
    "mixture",
    "modulate",
    "overlap",
    "ppo",
    "register",
    "restrict",
    "restrict_candidates",
    "reward_to_go",
    "score_function_returns",
    "temper",
    "token_coefficients",
    "top1_conflict",
]
__all__ += divergences.__all__
