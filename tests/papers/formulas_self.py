"""The losses of self-distillation, as their papers write them; T is the same model with more in its context."""

from collections import Counter

import torch
from torch import Tensor

from .case import Case, Sequence, Token, jsd, kl, sg


def _reverse_kl(case: Case) -> Tensor:
    return case.token_mean(lambda token: kl(token.S, token.T))


def opsd(case: Case) -> Tensor:
    """The token mean of JSD(1/2), where a token's divergence beyond 0.05 counts as the constant 0.05."""
    return case.token_mean(lambda token: jsd(token.S, token.T, 0.5).clamp(max=0.05))


crisp = opsdl = sdft = sd_zero = _reverse_kl


def _bucketed(token: Token, k: int) -> tuple[Tensor, Tensor]:
    """Student and teacher on the student's k likeliest tokens and one bucket for the rest."""
    best = token.S.detach().topk(min(k, len(token.S))).indices

    def with_rest(logprobs: Tensor) -> Tensor:
        kept = logprobs[best]
        if len(best) == len(logprobs):
            return kept
        return torch.cat([kept, (1 - kept.exp().sum()).log()[None]])

    return with_rest(token.S), with_rest(token.T)


def opcd(case: Case) -> Tensor:
    """KL(S || T) on the student's top 256 and a bucket."""
    return case.token_mean(lambda token: kl(*_bucketed(token, 256)))


def sdpo(case: Case) -> Tensor:
    """JSD(1/2) on the student's top 100 and a bucket, times the importance ratio, at most 2."""

    def loss(token: Token) -> Tensor:
        ratio = (sg(token.lS) - token.sampler).exp().clamp(max=2.0)
        return ratio * jsd(*_bucketed(token, 100), 0.5)

    return case.token_mean(loss)


def gates(case: Case) -> Tensor:
    """KL(S || T) on the completions that say what at least half of their group says."""
    total = torch.zeros((), dtype=torch.float64)
    for group in case.groups():
        counts = Counter(row.text for row in group)
        for row in group:
            if counts[row.text] >= 0.5 * len(group):
                total = total + sum(kl(token.S, token.T) for token in row.tokens)
    return total / case.count


def pi_distill(case: Case) -> Tensor:
    """The group-normalised reward's policy gradient, and half of the sampled reverse KL's."""
    total = torch.zeros((), dtype=torch.float64)
    for group in case.groups():
        for row in group:
            advantage = _normalised(row, group)
            for token in row.tokens:
                total = total - advantage * token.lS - 0.5 * sg(token.lT - token.lS) * token.lS
    return total / case.count


def _normalised(row: Sequence, group: list[Sequence]) -> float:
    rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
    return float((row.reward - rewards.mean()) / (rewards.std() + 1e-6))


def caopd(case: Case) -> Tensor:
    """The policy gradient of log T - log S of the sampled token."""
    return case.token_mean(lambda token: -sg(token.lT - token.lS) * token.lS)


def ssd(case: Case) -> Tensor:
    """The negative log-likelihood of the model's own answers."""
    return case.token_mean(lambda token: -token.lS)


def context_distillation(case: Case) -> Tensor:
    """KL(T || S) on whichever answers there are."""
    return case.token_mean(lambda token: kl(token.T, token.S))
