"""Losses with a verifier's reward, or with a reference in addition to the teacher, as their papers write them."""

import math
from collections.abc import Callable, Iterator
from statistics import mean, stdev

import torch
from torch import Tensor

from .case import Case, Sequence, Token, jsd, kl, sg

EPSILON = 1e-6  # added to the standard deviation of a group, so that equal rewards give 0

Rule = Callable[[list[float], int], float]


def reward_itself(rewards: list[float], place: int) -> float:
    """REINFORCE without a baseline."""
    return rewards[place]


def normalized(rewards: list[float], place: int) -> float:
    """The advantage of GRPO: (r - mean) / std."""
    return (rewards[place] - mean(rewards)) / (stdev(rewards) + EPSILON)


def centred(rewards: list[float], place: int) -> float:
    """The advantage of Dr. GRPO: r - mean."""
    return rewards[place] - mean(rewards)


def against_others(rewards: list[float], place: int) -> float:
    """The advantage of RLOO: r - the mean of all other rewards."""
    return rewards[place] - mean(rewards[:place] + rewards[place + 1 :])


def advantages(case: Case, rule: Rule) -> Iterator[tuple[Sequence, float]]:
    """Yield every rollout with its advantage within the rollouts of its prompt."""
    for group in case.groups():
        rewards = [row.reward for row in group]
        for place, row in enumerate(group):
            yield row, rule(rewards, place)


def ratio(token: Token) -> Tensor:
    """pi / pi_old, differentiable."""
    return torch.exp(token.lS - token.sampler)


def clipped(value: Tensor, advantage: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's loss of one token: -min(r A, clip(r) A)."""
    return -torch.minimum(value * advantage, value.clamp(1 - low, 1 + high) * advantage)


def right(row: Sequence) -> bool:
    """Return whether the verifier accepts the rollout."""
    return row.reward >= 1


def linearly(case: Case, start: float, end: float) -> float:
    """Return a number on the straight line from the first step to the last."""
    return start + (end - start) * (case.step - 1) / (case.steps - 1)


def entropy(token: Token) -> Tensor:
    """Return the entropy of the learner's distribution, differentiable."""
    return -(token.S.exp() * token.S).sum()


def k2(token: Token, other: Tensor) -> Tensor:
    """Return half the squared log-ratio of the token, differentiable."""
    return (token.lS - other) ** 2 / 2


def reinforce(case: Case) -> Tensor:
    """Theorem 1 of Williams 1992: minus the mean over answers of r log pi(y | x)."""
    rows = list(advantages(case, reward_itself))
    return sum(-reward * sum(token.lS for token in row.tokens) for row, reward in rows) / len(rows)


def rloo(case: Case) -> Tensor:
    """Section 2.3 of 2402.14740: minus the mean over answers of (r - mean of all other rewards) log pi(y | x)."""
    rows = list(advantages(case, against_others))
    return sum(-advantage * sum(token.lS for token in row.tokens) for row, advantage in rows) / len(
        rows
    )


def grpo(case: Case) -> Tensor:
    """Equations 3 and 4 of 2402.03300: the clipped surrogate and 0.04 times k3 to the reference, 1 / |o| per answer."""

    def loss(token: Token, advantage: float) -> Tensor:
        k3 = torch.exp(token.lR - token.lS) - (token.lR - token.lS) - 1
        return clipped(ratio(token), advantage) + 0.04 * k3

    rows = list(advantages(case, normalized))
    return sum(
        sum(loss(token, a) for token in row.tokens) / len(row.tokens) for row, a in rows
    ) / len(rows)


def echo(case: Case) -> Tensor:
    """2605.24517 as released: GRPO's clipped surrogate, and 0.05 times the cross-entropy of an environment's tokens, each
    1 / length. Here the tokens of the answers also represent an environment's tokens.
    """
    rows = list(advantages(case, normalized))
    surrogate = sum(
        sum(clipped(ratio(token), a) for token in row.tokens) / len(row.tokens) for row, a in rows
    ) / len(rows)
    return surrogate + 0.05 * case.sequence_mean(lambda token: -token.lS)


def ovd(case: Case) -> Tensor:
    """GRPO's clipped surrogate with the verifier's rewards that 2601.21968's judge accepts, and the likelihood of the teacher's
    tokens by the verifier's own rewards, 1 / |o| per answer.
    """
    total = torch.zeros(())
    for group in case.groups():
        judged, rewards = [row.score for row in group], [row.reward for row in group]
        for place, row in enumerate(group):
            if row.source == "student":
                losses = [clipped(ratio(token), normalized(judged, place)) for token in row.tokens]
            elif row.source == "teacher":
                losses = [-normalized(rewards, place) * token.lS for token in row.tokens]
            else:
                continue
            total = total + sum(losses) / len(row.tokens)
    return total / len(case.sequences)


def ppo(case: Case) -> Tensor:
    """Equations 7 and 9 of 1707.06347: the clipped surrogate of each token's own advantage, less c2 = 0.01 times the entropy, the
    mean over tokens.
    """
    return case.token_mean(
        lambda token: clipped(ratio(token), token.advantage) - 0.01 * entropy(token)
    )


def dr_grpo(case: Case) -> Tensor:
    """Section 3.2 of 2503.20783: the clipped surrogate of the centred reward, summed over tokens, over the token limit."""
    rows = list(advantages(case, centred))
    return sum(clipped(ratio(token), a) for row, a in rows for token in row.tokens) / (
        8 * len(rows)
    )


def kdrl(case: Case) -> Tensor:
    """2506.02208: minus rho A, plus beta k2 to the teacher, over all tokens; beta falls from 5e-3 to 1e-3."""
    beta = linearly(case, 5e-3, 1e-3)
    reward = sum(
        -ratio(token) * a for row, a in advantages(case, normalized) for token in row.tokens
    )
    return (reward + beta * sum(k2(token, token.lT) for token in case.tokens())) / case.count


def _extrapolated(case: Case, scale: float) -> Tensor:
    """Section 3.2 of 2602.12125: the advantage lambda (log T - log R) - (log S - log R) of each token, weight at most 5."""

    def loss(token: Token) -> Tensor:
        advantage = scale * (token.lT - token.lR) - (token.lS - token.lR)
        return -sg(ratio(token).clamp(max=5) * advantage) * token.lS

    return case.token_mean(loss)


def g_opd(case: Case) -> Tensor:
    """Half of the teacher's reward."""
    return _extrapolated(case, 0.5)


def exopd(case: Case) -> Tensor:
    """The teacher's reward and a quarter of it."""
    return _extrapolated(case, 1.25)


def aligndistil(case: Case) -> Tensor:
    """2503.02832 as released: beta / w KL(S || softmax(z_T + w (z_T - z_R))), w = 15 sum |T - R| + 0.001.

    The target's log-probabilities are held above -50, as in every reverse KL of the library.
    """

    def loss(token: Token) -> Tensor:
        w = 15 * (token.T.exp() - token.R.exp()).abs().sum() + 1e-3
        target = torch.log_softmax(token.T + w * (token.T - token.R), -1)
        return 0.1 / w * kl(token.S, torch.maximum(target, sg(token.S).clamp(max=-50)))

    return case.sequence_mean(loss)


def rlad(case: Case) -> Tensor:
    """2602.22495: PPO's clip of (S / S_old)^alpha (S / T)^(1 - alpha) with GRPO's advantage, alpha 1/2."""

    def loss(token: Token, advantage: float) -> Tensor:
        anchored = torch.exp(0.5 * (token.lS - token.sampler) + 0.5 * (token.lS - token.lT))
        return clipped(anchored, advantage)

    rows = list(advantages(case, normalized))
    return sum(
        sum(loss(token, a) for token in row.tokens) / len(row.tokens) for row, a in rows
    ) / len(rows)


def rlsd(case: Case) -> Tensor:
    """2604.03128: A ((1 - lambda) + lambda clip((T / S)^sign(A), 1 - eps, 1 + eps)) in PPO's clip; lambda falls to 0."""
    strength, bound = linearly(case, 0.5, 0.0), 0.2

    def loss(token: Token, advantage: float) -> Tensor:
        sign = (advantage > 0) - (advantage < 0)
        leaning = min(max(float(torch.exp(sign * (token.lT - sg(token.lS)))), 1 - bound), 1 + bound)
        return clipped(ratio(token), advantage * ((1 - strength) + strength * leaning))

    return (
        sum(loss(token, a) for row, a in advantages(case, normalized) for token in row.tokens)
        / case.count
    )


def rlcsd(case: Case) -> Tensor:
    """2606.11709, released code: the mean of PPO's loss with A, plus its mean at the tokens with A + 0.5 tanh(e / 0.02).

    e is the log-probability after the right hint minus that after the wrong hints. Tokens of the second mean change by
    more than 0.02, and A keeps its sign.
    """
    moved, unmoved = [], []
    for row, advantage in advantages(case, normalized):
        for token in row.tokens:
            change = 0.5 * math.tanh(float(token.lT - token.lR) / 0.02)
            if abs(change) <= 0.02:
                unmoved.append(clipped(ratio(token), advantage))
            else:
                raised = advantage + change
                bounded = max(raised, 0.0) if advantage > 0 else min(raised, 0.0)
                moved.append(clipped(ratio(token), bounded if advantage else 0.0))
    return sum(sum(losses) / max(len(losses), 1) for losses in (moved, unmoved))


def sipo(case: Case) -> Tensor:
    """After a summary of 2609.36742: PPO's clip of A times T / R for right answers or R / T for wrong ones, within 1 +- 0.2.

    T is the model after a right hint and R the model after a wrong one.
    """

    def loss(token: Token, advantage: float) -> Tensor:
        right, wrong = (float(torch.exp(logprob)) for logprob in (token.lT, token.lR))
        credit = right / wrong if advantage > 0 else wrong / right
        return clipped(ratio(token), advantage * min(max(credit, 0.8), 1.2))

    return (
        sum(loss(token, a) for row, a in advantages(case, normalized) for token in row.tokens)
        / case.count
    )


def hdpo(case: Case) -> Tensor:
    """2603.23871: GRPO among the student's own answers where one is right; else 0.1 JSD on the informed model's right answers."""
    total = torch.zeros(())
    for group in case.groups():
        own = [row for row in group if row.source == "student"]
        rewards = [row.reward for row in own]
        failed = not any(right(row) for row in own)
        for row in group:
            for token in row.tokens:
                if row.source == "student" and not failed:
                    advantage = normalized(rewards, own.index(row)) if len(own) > 1 else 0.0
                    total = total + clipped(ratio(token), advantage)
                if row.source == "teacher" and failed and right(row):
                    total = total + 0.1 * jsd(token.S, token.T, 0.5)
    return total / case.count


def sdpg(case: Case) -> Tensor:
    """2606.04036 as released: GRPO + beta KL(S || T) where A > 0 + alpha k2 to the reference; both 0.001."""

    def loss(token: Token, advantage: float) -> Tensor:
        gate = 1.0 if advantage > 0 else 0.0
        distilled = 0.001 * gate * kl(token.S, token.T)
        return clipped(ratio(token), advantage, 0.2, 0.28) + distilled + 0.001 * k2(token, token.lR)

    return (
        sum(loss(token, a) for row, a in advantages(case, normalized) for token in row.tokens)
        / case.count
    )


def srpo(case: Case) -> Tensor:
    """2604.02288: GRPO on right answers; on wrong ones JSD to the self-teacher, each token by exp(-H) of the teacher.

    The JSD is SDPO's, of the student's top 100 and a bucket for the rest.
    """

    def loss(row: Sequence, token: Token, advantage: float) -> Tensor:
        if right(row):
            return clipped(ratio(token), advantage)
        entropy = -(token.T.exp() * token.T).sum()
        best = token.S.argsort(descending=True)[:100]
        parts = [logprobs[best].exp() for logprobs in (token.S, token.T)]
        student, teacher = (torch.cat([part, 1 - part.sum()[None]]).log() for part in parts)
        return torch.exp(-entropy) * jsd(student, teacher, 0.5)

    return (
        sum(loss(row, token, a) for row, a in advantages(case, normalized) for token in row.tokens)
        / case.count
    )


def luffy(case: Case) -> Tensor:
    """2504.14945 as released: own tokens by PPO's clip, the trace's by f(p) = p / (p + 0.1); advantages over both."""

    def loss(row: Sequence, token: Token, advantage: float) -> Tensor:
        if row.source == "student":
            return clipped(ratio(token), advantage)
        p = torch.exp(token.lS)
        return -advantage * p / (p + 0.1)

    rows = list(advantages(case, centred))
    own = [(row, a) for row, a in rows if row.source in ("student", "dataset")]
    return sum(loss(row, token, a) for row, a in own for token in row.tokens) / (8 * len(rows))


def llm4teach(case: Case) -> Tensor:
    """2311.13373 and its code: PPO's clip of the critic's advantages, plus the coefficient, from 10 to 0.1, times the cross-entropy
    of the teacher's actions, less 0.001 times the entropy.
    """
    coefficient = linearly(case, 10.0, 0.1)

    def loss(token: Token) -> Tensor:
        imitation = -(token.T.exp() * token.S).sum()
        reward = clipped(ratio(token), token.advantage)
        return reward + coefficient * imitation - 0.001 * entropy(token)

    return case.token_mean(loss)


def rpd(case: Case) -> Tensor:
    """2503.05833: PPO's clip of the critic's advantages, plus a falling coefficient times the squared distance of two actions.

    An action is a bin's middle, and the last 256 tokens are the bins. Before an action's value stands its kind: forward KL of
    the distributions in which all bins are one. The critic and the entropy are those of the baseline PPO.
    """
    coefficient = linearly(case, 10.0, 0.1)
    middles = torch.tensor([(2 * place + 1) / 256 - 1 for place in range(256)]).double()

    def split(logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside, outside = logprobs[-256:].exp(), logprobs[:-256].exp()
        return outside, inside.sum(), (inside * middles).sum() / inside.sum()

    def loss(token: Token) -> Tensor:
        (others, bins, action), (others_T, bins_T, action_T) = split(token.S), split(token.T)
        kind = (others_T * (others_T / others).log()).sum() + bins_T * (bins_T / bins).log()
        distance = kind + 10 * bins_T * (action - action_T) ** 2
        reward = clipped(ratio(token), token.advantage)
        return reward + coefficient * distance - 0.001 * entropy(token)

    return case.token_mean(loss)


def vold_text(case: Case) -> Tensor:
    """2510.23497: GRPO and KL(S || T) on the same answers."""

    def loss(token: Token, advantage: float) -> Tensor:
        return clipped(ratio(token), advantage) + kl(token.S, token.T)

    rows = list(advantages(case, normalized))
    return sum(
        sum(loss(token, a) for token in row.tokens) / len(row.tokens) for row, a in rows
    ) / len(rows)


def j_bond(case: Case) -> Tensor:
    """Algorithm 2 of 2407.14622: (1 - beta) G_FW + beta G_BW + gamma G_Reg with beta and gamma 1/2; equation 19 has G_Reg's sign.

    Equation 17 is -log 16 for two anchor answers; for N of them its mean at the median is log 1/2 with 2^N log 2.
    """
    beta, gamma, total = 0.5, 0.5, torch.zeros(())
    for group in case.groups():
        own = [row for row in group if row.source == "student"]
        anchor = [row for row in group if row.source == "reference"]
        if anchor:
            worst, top = (pick(row.reward for row in anchor) for pick in (min, max))
            penalty = 2 ** len(anchor) * math.log(2)
            returns = [-penalty if row.reward < worst else 0.0 for row in own]
            for row, value in zip(own, returns, strict=True):
                baseline = (sum(returns) - value) / (len(own) - 1)
                likelihood = sum((token.lS for token in row.tokens), torch.zeros(()))
                # One of two answers of the student.
                total = total - beta * (value - baseline) * likelihood / 2
            best = [row for row in anchor if row.reward == top]
            for row in best:
                likelihood = sum((token.lS for token in row.tokens), torch.zeros(()))
                total = total - (1 - beta) * likelihood / len(best)
        for row in own:
            for place, token in enumerate(row.tokens):
                distance = sum(float(sg(later.lS - later.lR)) for later in row.tokens[place:])
                total = total + (beta + gamma) * distance * token.lS / 2
    # Four answers per prompt.
    return total / (len(case.sequences) / 4)


def bond(case: Case) -> Tensor:
    """2407.14622: half of KL(S || best-of-N) by policy gradient, with theorem 1 for the ratio of best-of-N to the anchor,
    and half of KL(best-of-N || S) by the likelihood of the anchor's best answer; means over half the answers and an eighth.
    """
    total = torch.zeros(())
    for group in case.groups():
        own = [row for row in group if row.source == "student"]
        anchor = [row.reward for row in group if row.source == "reference"]
        best = [row for row in group if row.source == "reference" and row.reward == max(anchor)]
        n = len(anchor)

        def log_ratio(row: Sequence, anchor: list[float] = anchor, n: int = n) -> float:
            if not anchor:
                return 0.0
            p_no_better = max(sum(r <= row.reward for r in anchor), 0.5) / n
            p_worse = sum(r < row.reward for r in anchor) / n
            return math.log(
                sum(p_no_better ** (n - i) * p_worse ** (i - 1) for i in range(1, n + 1))
            )

        for row in own:
            others = [log_ratio(other) for other in own if other is not row]
            advantage = log_ratio(row) - sum(others) / len(others)
            for place, token in enumerate(row.tokens):
                to_anchor = sum(
                    (later.lR - sg(later.lS) for later in row.tokens[place:]), torch.zeros(())
                )
                total = total - (advantage + to_anchor) * token.lS
        for row in best:
            total = total - 4 * sum((token.lS for token in row.tokens), torch.zeros(())) / len(best)
    return total / len(case.sequences)


def gad(case: Case) -> Tensor:
    """2511.10643: first the likelihood of the teacher's answers, then GRPO on the discriminator's logit of the student's.

    0.001 times k3 to the reference on the student's answers at all steps.
    """
    if case.step <= 20:
        likely = [
            -token.lS for row in case.sequences if row.source == "teacher" for token in row.tokens
        ]
        likelihood = sum(likely, torch.zeros(())) / case.count
    else:
        likelihood = torch.zeros(())
    surrogate = torch.zeros(())
    for group in case.groups():
        own = [row for row in group if row.source == "student"]
        scores = [row.score for row in own]
        for place, row in enumerate(own):
            advantage = normalized(scores, place) if len(own) > 1 else 0.0
            surrogate = surrogate - advantage * sum(token.lS for token in row.tokens)
            surrogate = surrogate + 0.001 * sum(
                torch.exp(token.lR - token.lS) - (token.lR - token.lS) - 1 for token in row.tokens
            )
    return likelihood + surrogate / case.count
