"""The losses of published training recipes, as their reports write them."""

from statistics import mean, stdev

import torch
from torch import Tensor

from .case import Case, Sequence, Token, kl, sg


def ratio(token: Token) -> Tensor:
    """Return the learner's probability of the token over the sampler's, differentiable."""
    return torch.exp(token.lS - token.sampler)


def within(token: Token, low: float, high: float) -> Tensor:
    """Return the detached ratio where it is within the bounds, else 0."""
    value = sg(ratio(token))
    return value if low <= value <= high else torch.zeros(())


def group_advantage(case: Case, row: Sequence) -> float:
    """Return GRPO's advantage of a rollout within the group of its prompt."""
    rewards = [other.reward for other in case.sequences if other.group == row.group]
    return (row.reward - mean(rewards)) / (stdev(rewards) + 1e-6)


def by_source(case: Case) -> Tensor:
    """Cross-entropy of the teacher's tokens and KL(S || T) at the student's, over all tokens."""
    total = torch.zeros(())
    for row in case.sequences:
        for token in row.tokens:
            if row.source == "teacher":
                total = total - token.lS
            if row.source == "student":
                total = total + kl(token.S, token.T)
    return total / case.count


def thinking_machines(case: Case) -> Tensor:
    """The blog and train_on_policy.py: importance sampling with the advantage -(log S_sampled - log T)."""
    return case.token_mean(lambda token: -ratio(token) * (token.lT - token.sampler))


def qwen3_opd(case: Case) -> Tensor:
    """Section 4.5 of 2505.09388: imitation of responses, then KL to the teacher's logits; never both in a batch."""
    return by_source(case)


def gemma_2(case: Case) -> Tensor:
    """Section 4 of 2408.00118: imitation of responses and KL to the teacher on the student's own."""
    return by_source(case)


def mimo_mopd(case: Case) -> Tensor:
    """Section 4.4 of 2601.02780: - E 1/|y| sum_t w_t (sg[log T / S] + alpha A_ORM) log S."""
    total = torch.zeros(())
    for row in case.sequences:
        outcome = group_advantage(case, row)
        for token in row.tokens:
            advantage = sg(token.lT - token.lS) + 1.0 * outcome
            total = total - within(token, 0.5, 2.0) * advantage * token.lS / len(row.tokens)
    return total / len(case.sequences)


def nemotron_cascade_2(case: Case) -> Tensor:
    """Equations 2 to 4 of 2603.19220: the same with only the teacher's advantage."""
    return case.sequence_mean(
        lambda token: -within(token, 0.5, 2.0) * sg(token.lT - token.lS) * token.lS
    )


def glm_5_opd(case: Case) -> Tensor:
    """Section 3.5 of 2602.15763: pop(rho) r A with A = sg[log T / S] and r = S / sg[S], which is 1 at the first update."""

    def loss(token: Token) -> Tensor:
        r = torch.exp(token.lS - sg(token.lS))
        return -within(token, 0.5, 2.0) * r * sg(token.lT - token.lS)

    return case.sequence_mean(loss)


def deepseek_v4_opd(case: Case) -> Tensor:
    """Equation 29 of the report, of one expert: KL(S || E) over the whole vocabulary."""
    return case.token_mean(lambda token: kl(token.S, token.T))


def slime(case: Case) -> Tensor:
    """The documentation: GRPO's clipped surrogate with the advantage A - 1.0 (log S - log T)."""
    total = torch.zeros(())
    for row in case.sequences:
        for token in row.tokens:
            advantage = group_advantage(case, row) - 1.0 * sg(token.lS - token.lT)
            r = ratio(token)
            total = total - torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage) / len(
                row.tokens
            )
    return total / len(case.sequences)


def lightning_opd(case: Case) -> Tensor:
    """2604.13010, slime: - sg[stored log T - log S] log S on stored answers, each answer's mean."""
    return case.sequence_mean(lambda token: -sg(token.lT - token.lS) * token.lS)
