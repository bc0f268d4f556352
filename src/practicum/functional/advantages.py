"""Rewards of whole completions and their advantages for each token."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise
from practicum.functional.table import Number, Table, defaults_of

SMALLEST_SPREAD = 1e-6
"""Added to the standard deviation of a group, so that equal rewards give 0."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """One way to turn the rewards of a prompt's completions into their advantages.

    `function(rewards)` returns one number per reward. With `anchored` it is `function(rewards,
    anchor)`. `anchor` has the rewards of the reference's completions of the same prompt, at least
    one; these completions have no advantage themselves.
    """

    name: str
    function: Callable[..., Sequence[float]]
    summary: str
    paper: str = ""
    anchored: bool = False


ADVANTAGES = Table(Advantage, "advantages")
"""Every advantage of a whole completion by name."""


@dataclass(frozen=True, slots=True)
class RewardRule:
    """One way to join the reward and the teacher in the advantage of a sampled token.

    `function(teacher, reward, log_ratio, **parameters)` returns the advantage of each token,
    without gradient, from three inputs: the teacher's return, the advantage of the completion's
    reward, and `log T - log S`. `advantage` names the entry of `ADVANTAGES` that computes the
    reward's advantage if a recipe names none. Without the teacher, the loss uses this advantage,
    times the parameter named `factor` if it is set. A rule without `advantage` ignores the reward.
    """

    name: str
    function: Callable[..., Tensor]
    summary: str
    paper: str = ""
    advantage: str = "group_normalized"
    reads_log_ratio: bool = True
    factor: str = ""

    @property
    def defaults(self) -> Mapping[str, Number]:
        """The parameters with their defaults, beginning with the function's parameters."""
        named = {"advantage": self.advantage} if self.advantage else {}
        return {**defaults_of(self.function), **named}

    def join(
        self,
        teacher: Float[Tensor, " T"],
        reward: Float[Tensor, " T"],
        log_ratio: Float[Tensor, " T"],
        arguments: Mapping[str, Number],
    ) -> Float[Tensor, " T"]:
        """Return the advantage of each token, under the arguments that a recipe gives."""
        named = {key: number for key, number in arguments.items() if key != "advantage"}
        return self.function(teacher.detach(), reward, log_ratio.detach(), **named).detach()

    def read_factor(self, arguments: Mapping[str, Number]) -> float:
        """Return the factor of the reward's advantage if there is no teacher."""
        return float(arguments[self.factor]) if self.factor else 1.0


REWARDS = Table(RewardRule, "rewards")
"""Every rule that joins a reward and a teacher, by name."""


def group_centre(rewards: Sequence[float]) -> list[float]:
    """Return the rewards of one prompt's completions minus their mean, not divided by their spread
    (arXiv 2503.20783).
    """
    mean = sum(rewards) / max(len(rewards), 1)
    return [reward - mean for reward in rewards]


def plain(rewards: Sequence[float]) -> list[float]:
    """Return the rewards unchanged (REINFORCE, Williams 1992)."""
    return list(rewards)


def sign(rewards: Sequence[float]) -> list[float]:
    """Return 2 r - 1 of each reward: 1 for a good answer and -1 for a bad one, without a group (arXiv
    2603.10165).
    """
    return [2.0 * reward - 1.0 for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the remaining rewards, or 0 for a single reward (RLOO,
    arXiv 2402.14740).
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def group_normalize(rewards: Sequence[float]) -> list[float]:
    """Return the centred rewards over their sample standard deviation (GRPO, arXiv 2402.03300)."""
    centred = group_centre(rewards)
    if len(rewards) < 2:
        return centred
    spread = math.sqrt(sum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (spread + SMALLEST_SPREAD) for value in centred]


def best_of_n(rewards: Sequence[float], anchor: Sequence[float]) -> list[float]:
    """Return log(best-of-N / anchor) of each completion, minus the mean over the remaining
    completions (BOND, arXiv 2407.14622, theorem 1).

    N is the number of the anchor's rewards. With F the share of the anchor's rewards that are no
    better and G the share that are worse, the ratio is `sum_i F**(N - i) G**(i - 1)`. An F of 0 is
    replaced by `0.5 / N`.
    """
    count = len(anchor)
    log_ratios = []
    for reward in rewards:
        no_better = max(sum(anchored <= reward for anchored in anchor), 0.5) / count
        worse = sum(anchored < reward for anchored in anchor) / count
        ties = sum((worse / no_better) ** power for power in range(count))
        log_ratios.append((count - 1) * math.log(no_better) + math.log(ties))
    return leave_one_out(log_ratios)


def below_anchor(rewards: Sequence[float], anchor: Sequence[float]) -> list[float]:
    """Return `-2**N log 2` for completions worse than all N of the anchor and 0 otherwise, minus
    the mean over the remaining completions (J-BOND, arXiv 2407.14622, with N = 2).

    Its mean over the anchor's draws is log F where F is one half.
    """
    penalty = 2.0 ** len(anchor) * math.log(2.0)
    return leave_one_out([-penalty * (reward < min(anchor)) for reward in rewards])


ADVANTAGES |= {
    entry.name: entry
    for entry in (
        Advantage(
            "group_normalized",
            group_normalize,
            "centred and divided by the spread: GRPO",
            "2402.03300",
        ),
        Advantage(
            "group_mean", group_centre, "minus the mean of the group: Dr. GRPO", "2503.20783"
        ),
        Advantage(
            "leave_one_out",
            leave_one_out,
            "minus the mean of the rest of the group: RLOO",
            "2402.14740",
        ),
        Advantage("none", plain, "the reward itself: REINFORCE"),
        Advantage(
            "signed", sign, "1 for a good answer and -1 for a bad one: OpenClaw-RL", "2603.10165"
        ),
        Advantage(
            "best_of_n",
            best_of_n,
            "log-ratio of best-of-N to the reference, from N reference answers: BOND",
            "2407.14622",
            anchored=True,
        ),
        Advantage(
            "below_anchor",
            below_anchor,
            "a penalty for answers worse than all reference answers: J-BOND",
            "2407.14622",
            anchored=True,
        ),
    )
}


def add_reward(
    advantage: Float[Tensor, " T"], reward: float | Float[Tensor, " T"], weight: float
) -> Float[Tensor, " T"]:
    """Add `weight` times a completion's reward to its distillation advantage (MOPD, 2601.02780)."""
    return precise(advantage.detach()) + weight * reward


def modulate(
    reward: Float[Tensor, " T"], log_ratio: Float[Tensor, " T"], strength: float, bound: float
) -> Float[Tensor, " T"]:
    """Return the reward's advantage A with its size set by the teacher (RLSD, arXiv 2604.03128).

    `A ((1 - strength) + strength clip((T / S)**sign(A), 1 - bound, 1 + bound))`, where `log_ratio`
    is log T - log S. The sign of A never changes. ValueError if `strength` is outside [0, 1] or
    `bound` outside [0, 1).
    """
    if not (0.0 <= strength <= 1.0 and 0.0 <= bound < 1.0):
        raise ValueError(
            f"modulate needs strength in [0, 1] and bound in [0, 1), got {strength:g} and {bound:g}"
        )
    leaning = (log_ratio.detach() * reward.sign()).exp().clamp(1.0 - bound, 1.0 + bound)
    return reward * ((1.0 - strength) + strength * leaning)


def clip(advantage: Float[Tensor, "*s"], low: float, high: float) -> Float[Tensor, "*s"]:
    """Return the advantage clamped to [low, high].

    A token with a clipped advantage keeps its gradient; with a clipped loss it would not.
    """
    if low > high:
        raise ValueError(f"clip needs low <= high, got low {low} and high {high}")
    return torch.clamp(precise(advantage.detach()), low, high)


def _ignore(teacher: Tensor, reward: Tensor, log_ratio: Tensor) -> Tensor:
    return teacher


def _add_advantage(
    teacher: Tensor, reward: Tensor, log_ratio: Tensor, coefficient: float = 1.0
) -> Tensor:
    return add_reward(teacher, reward, coefficient)


def _modulate(
    teacher: Tensor, reward: Tensor, log_ratio: Tensor, strength: float = 0.5, bound: float = 0.2
) -> Tensor:
    return modulate(reward, log_ratio, strength, bound)


REWARDS |= {
    entry.name: entry
    for entry in (
        RewardRule("none", _ignore, "Only the teacher.", advantage="", reads_log_ratio=False),
        RewardRule(
            "add_advantage",
            _add_advantage,
            "Add `coefficient` times the advantage of the completion's reward at each token (slime).",
            "2601.02780",
            reads_log_ratio=False,
            factor="coefficient",
        ),
        RewardRule(
            "modulate",
            _modulate,
            "The reward gives each token's advantage its sign, the teacher its size: RLSD.",
            "2604.03128",
        ),
    )
}
