"""The losses of models that learn from themselves in a richer context, as their papers write them; T is that model."""

from collections.abc import Callable
from statistics import mean, stdev

import torch
from torch import Tensor

from .case import Case, Sequence, Token, kl, sg

Divergence = Callable[[list[Tensor], list[Tensor]], Tensor]


def ratio(token: Token) -> Tensor:
    """Return the learner's probability of the token over the sampler's, differentiable."""
    return torch.exp(token.lS - token.sampler)


def group_advantage(case: Case, row: Sequence) -> float:
    """Return GRPO's advantage of a rollout within the group of its prompt."""
    rewards = [other.reward for other in case.sequences if other.group == row.group]
    return (row.reward - mean(rewards)) / (stdev(rewards) + 1e-6)


def top_tokens(logprobs: Tensor, k: int) -> list[int]:
    """Return the ids of the k most likely tokens."""
    values = logprobs.tolist()
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:k]


def half_jsd(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return the Jensen-Shannon divergence of two lists of probabilities."""
    total = torch.zeros(())
    for s, t in zip(student, teacher, strict=True):
        middle = (s + t) / 2
        total = total + t * torch.log(t / middle) / 2 + s * torch.log(s / middle) / 2
    return total


def opsd(case: Case) -> Tensor:
    """Section 3 of 2601.18734: KL(T || S) at each token, without the clip of the released script."""
    return case.token_mean(lambda token: kl(token.T, token.S))


def og_opsd(case: Case) -> Tensor:
    """After a summary of 2610.05070: KL(T || S) on right answers, and KL(S || T) on wrong ones until the teacher's entropy sums
    to 4.
    """
    total = torch.zeros(())
    for row in case.sequences:
        spent = 0.0
        for token in row.tokens:
            if row.reward >= 1:
                total = total + kl(token.T, token.S)
            elif spent < 4:
                total = total + kl(token.S, token.T)
            spent -= float((token.T.exp() * token.T).sum())
    return total / case.count


def crisp(case: Case) -> Tensor:
    """Equation 1 of 2603.05433, over |y|: KL(S || T)."""
    return case.sequence_mean(lambda token: kl(token.S, token.T))


def opcd(case: Case) -> Tensor:
    """2602.12275: KL(S || T) over the student's 256 most likely tokens, both renormalised there."""

    def loss(token: Token) -> Tensor:
        ids = top_tokens(token.S, 256)
        return kl(torch.log_softmax(token.S[ids], -1), torch.log_softmax(token.T[ids], -1))

    return case.token_mean(loss)


def opsdl(case: Case) -> Tensor:
    """2604.17535: the policy gradient with A_t = log T(y_t | short) - log S(y_t | long)."""
    return case.token_mean(lambda token: -sg(token.lT - token.lS) * token.lS)


def sdft(case: Case) -> Tensor:
    """2601.19897: KL(S || T) at each token, the mean of each answer."""
    return case.sequence_mean(lambda token: kl(token.S, token.T))


def sdpo_term(token: Token, k: int, divergence: Divergence) -> Tensor:
    """Return a divergence of the student's top k and a bucket for the rest, times min(S / S_old, 2)."""
    ids = top_tokens(token.S, k)
    student, teacher = ([logprobs[id].exp() for id in ids] for logprobs in (token.S, token.T))
    if len(ids) < len(token.S):
        student, teacher = ([*chosen, 1 - sum(chosen)] for chosen in (student, teacher))
    return sg(ratio(token).clamp(max=2)) * divergence(student, teacher)


def sdpo(case: Case) -> Tensor:
    """2601.20802 as released: JSD of the student's top 100 and a bucket."""
    return case.token_mean(lambda token: sdpo_term(token, 100, half_jsd))


def tisd(case: Case) -> Tensor:
    """2609.30878 as released: reverse KL of the student's top 20 and a bucket, at every token of the changed answers."""

    def reverse(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
        parts = [s * torch.log(s / t) for s, t in zip(student, teacher, strict=True)]
        return sum(parts, torch.zeros(()))

    return case.token_mean(lambda token: sdpo_term(token, 20, reverse))


def sd_zero(case: Case) -> Tensor:
    """Section 2.2 of 2604.12002: E sum_t KL(S(. | x) || T(. | x, y, P_r))."""
    rows = case.sequences
    return sum(
        (kl(token.S, token.T) for row in rows for token in row.tokens), torch.zeros(())
    ) / len(rows)


def gates(case: Case) -> Tensor:
    """2602.20574: cross-entropy of the answers that at least half of the prompt's answers agree with."""
    total = torch.zeros(())
    for group in case.groups():
        texts = [row.text for row in group]
        for row in group:
            if texts.count(row.text) >= len(texts) / 2:
                total = total - sum(token.lS for token in row.tokens)
    return total / case.count


def pi_distill(case: Case) -> Tensor:
    """2602.04942: (1 - alpha) (- E_T[S / sg[T] A] + beta KL(sg[T] || S)) + alpha (- E_T[A] + beta KL(T || sg[S])).

    The sampler is the teacher: the same model after its own prompt, whose gradient the second half has.
    """
    alpha, beta = 0.1, 0.25
    total = torch.zeros(())
    for row in case.sequences:
        advantage = group_advantage(case, row)
        for token in row.tokens:
            student = beta * kl(token.T, token.S) - ratio(token) * advantage
            acted = torch.exp(token.C[token.id] - token.sampler)
            teacher = beta * kl(token.C, token.R) - acted * advantage
            total = total + (1 - alpha) * student + alpha * teacher
    return total / case.count


def caopd(case: Case) -> Tensor:
    """2604.16830: the loss of self-distillation, KL(S || T), to a teacher with another statement of confidence."""
    return case.sequence_mean(lambda token: kl(token.S, token.T))


def ssd(case: Case) -> Tensor:
    """2604.01193: cross-entropy of the sampled tokens."""
    return case.token_mean(lambda token: -token.lS)


def rstar(case: Case) -> Tensor:
    """2408.06195 with training: cross-entropy of the answers that were selected."""
    return case.token_mean(lambda token: -token.lS)


def context_distillation(case: Case) -> Tensor:
    """2209.15189: cross-entropy of the sampled tokens without their context."""
    return case.token_mean(lambda token: -token.lS)


def skill_sd(case: Case) -> Tensor:
    """2604.10674: GRPO and 0.3 rho k3(T / S), where the gradient also goes through rho."""
    total = torch.zeros(())
    for row in case.sequences:
        advantage = group_advantage(case, row)
        for token in row.tokens:
            rho, log_r = ratio(token), token.lT - token.lS
            surrogate = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            k3 = torch.exp(log_r) - 1 - log_r
            total = total + (-surrogate + 0.3 * rho * k3) / len(row.tokens)
    return total / len(case.sequences)


def openclaw_rl(case: Case) -> Tensor:
    """Equation 1 of 2603.10165 as released: PPO's surrogate of 1 or -1, plus the surrogate of the four most likely tokens.

    Their old policy is the learner before the update, and A_v = w_v clip(log T(v) - log S_old(v), -1, 1) with w_v the
    old policy's probability among the four.
    """
    total = torch.zeros(())
    for row in case.sequences:
        for token in row.tokens:
            rho, advantage = ratio(token), 2 * row.score - 1
            loss = -torch.minimum(rho * advantage, rho.clamp(0.8, 1.28) * advantage)
            ids = top_tokens(token.S, 4)
            new, old, teacher = token.S[ids], sg(token.S[ids]), token.T[ids]
            rho = torch.exp(new - old)
            weighed = torch.softmax(old, -1) * (teacher - old).clamp(-1, 1)
            loss = loss - torch.minimum(rho * weighed, rho.clamp(0.8, 1.28) * weighed).sum()
            total = total + loss / len(row.tokens)
    return total / len(case.sequences)


served_openclaw_rl = openclaw_rl


def kepo(case: Case) -> Tensor:
    """After the abstract of 2602.00400: GRPO, and 0.1 KL(S || T) at the tokens of right answers."""
    total = torch.zeros(())
    for row in case.sequences:
        advantage = group_advantage(case, row)
        for token in row.tokens:
            rho = ratio(token)
            surrogate = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            dense = kl(token.S, token.T) if row.reward == 1 else torch.zeros(())
            total = total + (-surrogate + 0.1 * dense) / len(row.tokens)
    return total / len(case.sequences)


def x_opd(case: Case) -> Tensor:
    """After the abstract of 2603.24596: KL(S || T) at each token, where T reads the transcript."""
    return case.token_mean(lambda token: kl(token.S, token.T))


def tcod(case: Case) -> Tensor:
    """After the abstract of 2604.24005: KL(S || T) at the tokens of the available turns."""
    return case.token_mean(lambda token: kl(token.S, token.T))


tcod_b2f = tcod


def user_interactions(case: Case) -> Tensor:
    """2603.12273 as released: - clip(sg[log T - log S], -2, 2) log S, the mean of each answer."""
    return case.sequence_mean(lambda token: -sg(token.lT - token.lS).clamp(-2, 2) * token.lS)
