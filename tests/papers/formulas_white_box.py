"""The losses of sections on white-box distillation, as their papers write them."""

import math
from collections.abc import Sequence as TableHead

import torch
from torch import Tensor

from .case import GAPS, Case, Sequence, Token, jsd, kl, sg


def number(value: Tensor) -> float:
    """Return a value without its gradient."""
    return float(sg(value))


def probability(logprob: Tensor) -> float:
    """Return the probability, without its gradient."""
    return math.exp(number(logprob))


def forward(token: Token) -> Tensor:
    """KL(T || S)."""
    return kl(token.T, token.S)


def reverse(token: Token) -> Tensor:
    """KL(S || T)."""
    return kl(token.S, token.T)


def likelihood(token: Token) -> Tensor:
    """Return minus the log-probability of the token."""
    return -token.lS


def cross_entropy(token: Token) -> Tensor:
    """-sum T log S."""
    return -(token.T.exp() * token.S).sum()


def entropy(logprobs: Tensor) -> float:
    """Shannon entropy in nats."""
    return -sum(math.exp(x) * x for x in sg(logprobs).tolist())


def gap(token: Token) -> float:
    """Return log T - log S of the token, a number."""
    return number(token.lT - token.lS)


def policy_gradient(token: Token, advantage: float) -> Tensor:
    """Return a loss with the gradient -A grad log S."""
    return -advantage * token.lS


def ratio(token: Token) -> Tensor:
    """Learner over sampler."""
    return (token.lS - token.sampler).exp()


def clipped_part(token: Token, advantage: float, epsilon: float) -> Tensor:
    """Return PPO's clipped objective of one token, with its sign turned."""
    value = ratio(token)
    return -torch.minimum(value * advantage, value.clamp(1 - epsilon, 1 + epsilon) * advantage)


def top_tokens(logprobs: Tensor, k: int) -> list[int]:
    """Return the k most likely tokens."""
    return sorted(range(len(logprobs)), key=lambda v: -number(logprobs[v]))[:k]


def partial_forward(token: Token, k: int) -> Tensor:
    """Return sum T log(T / S) over the teacher's k most likely tokens."""
    return sum(
        (token.T[v].exp() * (token.T[v] - token.S[v]) for v in top_tokens(token.T, k)),
        torch.zeros(()),
    )


def total(losses: TableHead[Tensor]) -> Tensor:
    """Their sum."""
    return sum(losses, torch.zeros(()))


def at(case: Case, start: float, end: float) -> float:
    """Return a number on a straight line over the whole run."""
    return start + (end - start) * (case.step - 1) / (case.steps - 1)


def gkd(case: Case) -> Tensor:
    """Equation 1 of 2306.13649 with beta 1/2: the token mean of JSD over the given answers."""
    return case.token_mean(lambda token: jsd(token.S, token.T, 0.5))


def seqkd(case: Case) -> Tensor:
    """L_SEQ-KD of 1606.07947: likelihood of the teacher's text."""
    return case.token_mean(likelihood)


def sft(case: Case) -> Tensor:
    """Likelihood of the demonstrations."""
    return case.token_mean(likelihood)


def classic_kd(case: Case) -> Tensor:
    """(1 - alpha) L_NLL + alpha L_WORD-KD of 1606.07947 with alpha 1/2."""
    return case.token_mean(lambda token: 0.5 * likelihood(token) + 0.5 * cross_entropy(token))


def dagger(case: Case) -> Tensor:
    """Likelihood of the expert's action in every visited state."""
    return case.token_mean(lambda token: -token.S[top_tokens(token.T, 1)[0]])


def imitkd(case: Case) -> Tensor:
    """Cross-entropy to the teacher on the mixed states."""
    return case.token_mean(cross_entropy)


def minillm(case: Case) -> Tensor:
    """Section 2.2 of 2306.08543: the exact step, and length-normalised rewards from the next token on."""
    losses = []
    for row in case.sequences:
        for t, token in enumerate(row.tokens):
            w = number(ratio(token))
            rest = [gap(later) for later in row.tokens[t + 1 :]]
            to_come = sum(rest) / len(rest) if rest else 0.0
            losses += [w * reverse(token), w * policy_gradient(token, to_come)]
    return total(losses) / len(case.sequences)


def skewed(token: Token, alpha: float) -> Tensor:
    """Return the log of (1 - alpha) T + alpha S."""
    return ((1 - alpha) * token.T.exp() + alpha * token.S.exp()).log()


def distillm(case: Case) -> Tensor:
    """SRKL of 2402.03898, its mixture differentiated too: KL(S || 0.9 T + 0.1 S)."""
    return case.token_mean(lambda token: kl(token.S, skewed(token, 0.1)))


def distillm_2(case: Case) -> Tensor:
    """(2 - beta) SKL on the teacher's answers + beta SRKL on the student's, its mixture held constant.

    Algorithm 1 of 2503.07067: alpha is 1 - (1 - 0.1) m / gap by answer, from the second step on, within the code's bounds.
    """
    beta = 1.0 + 0.5 * min(1.0, (case.step - 1) / 19)
    losses = []
    for row in case.sequences:
        mine, theirs = (
            math.exp(sum(map(number, logprobs)) / len(row.tokens))
            for logprobs in ([t.lS for t in row.tokens], [t.lT for t in row.tokens])
        )
        gap = theirs - mine if row.source == "teacher" else mine - theirs
        anchor = GAPS.get(f"gap_of_{row.source}", 0.0) if case.step > 1 else 0.0
        alpha = min(max(1 - 0.9 * anchor / (gap + 1e-5), 0.01), 0.1)
        for token in row.tokens:
            if row.source == "teacher":
                losses.append((2 - beta) * kl(token.T, skewed(token, 1 - alpha)))
            if row.source == "student":
                losses.append(beta * kl(token.S, sg(skewed(token, alpha))))
    return total(losses) / case.count


def akl(case: Case) -> Tensor:
    """2404.02657: w FKL + (1 - w) RKL, w the head's share of |T - S|, the head the most likely half of the teacher's mass."""

    def loss(token: Token) -> Tensor:
        head = tail = mass = 0.0
        for v in top_tokens(token.T, len(token.T)):
            difference = abs(probability(token.T[v]) - probability(token.S[v]))
            if mass < 0.5:
                head += difference
            else:
                tail += difference
            mass += probability(token.T[v])
        w = head / (head + tail)
        return w * forward(token) + (1 - w) * reverse(token)

    return case.token_mean(loss)


def todi(case: Case) -> Tensor:
    """2505.16297: each token's terms of both KLs, weighted by the sigmoid of the log-ratio."""

    def loss(token: Token) -> Tensor:
        terms = []
        for s, t in zip(token.S, token.T, strict=True):
            w = 1 / (1 + math.exp(number(s - t)))
            terms.append(w * t.exp() * (t - s) + (1 - w) * s.exp() * (s - t))
        return total(terms)

    return case.token_mean(loss)


def taid(case: Case) -> Tensor:
    """FKL to softmax((1 - t) z_S + t z_T), the student's part held constant; t is 0.4 until a loss has been measured."""
    t = 0.4

    def loss(token: Token) -> Tensor:
        target = torch.log_softmax((1 - t) * sg(token.S) + t * token.T, -1)
        return kl(target, token.S)

    return case.token_mean(loss)


def veto(case: Case) -> Tensor:
    """FKL to Q, which is T S^beta normalised and held constant; beta falls from 0.8 to 0."""
    beta = at(case, 0.8, 0.0)

    def loss(token: Token) -> Tensor:
        weights = token.T.exp() * sg(token.S).exp() ** beta
        return kl((weights / weights.sum()).log(), token.S)

    return case.token_mean(loss)


def tip(case: Case) -> Tensor:
    """2604.14084: the mean RKL over the half of the tokens with the highest h + d - h d."""
    tokens = list(case.tokens())
    entropies, divergences = (
        [entropy(token.S) for token in tokens],
        [number(reverse(token)) for token in tokens],
    )
    scores = []
    for h, d in zip(entropies, divergences, strict=True):
        h, d = h / max(entropies), d / max(divergences)
        scores.append(h + d - h * d)
    best = sorted(range(len(tokens)), key=lambda i: -scores[i])[: math.ceil(len(tokens) / 2)]
    return total([reverse(tokens[i]) for i in best]) / (len(tokens) / 2)


def perplexity(row: Sequence, whose: str) -> float:
    """Return exp of the mean negative log-probability of an answer."""
    logprobs = [number(token.lS if whose == "student" else token.lT) for token in row.tokens]
    return math.exp(-sum(logprobs) / len(logprobs))


def scope(case: Case) -> Tensor:
    """2604.10688: right answers by PPL_S, wrong ones by 1 / PPL_T, each normalised within the group; tau 1."""
    losses = []
    for group in case.groups():
        right = [row for row in group if row.reward >= 1]
        wrong = [row for row in group if row.reward < 1]
        for row in right:
            w = perplexity(row, "student") / sum(perplexity(other, "student") for other in right)
            losses += [w * sg(ratio(token)) * likelihood(token) for token in row.tokens]
        for row in wrong:
            w = (
                1
                / perplexity(row, "teacher")
                / sum(1 / perplexity(other, "teacher") for other in wrong)
            )
            losses += [-w * gap(token) * ratio(token) for token in row.tokens]
    return total(losses) / len(case.sequences)


def paced(case: Case) -> Tensor:
    """2603.11178: forward KL in the first half of the run, reverse KL in the second; p (1 - p) chooses the prompts."""
    return case.token_mean(forward if case.step <= 20 else reverse)


def fast_opd(case: Case) -> Tensor:
    """Reverse KL on the sampled tokens, which form the prefix."""
    return case.token_mean(reverse)


def entropy_aware_opd(case: Case) -> Tensor:
    """2603.07079: clipped sampled reverse KL everywhere, and top-16 forward KL where the teacher's entropy exceeds 0.8.

    Equation 6: A = log T - log S_old. Equation 10: sum over v of T'_v (log T'_v - log S_v), T' renormalised over its top 16.
    """

    def loss(token: Token) -> Tensor:
        clipped = clipped_part(token, number(token.lT) - token.sampler, 0.2)
        support = top_tokens(token.T, 16)
        truncated = torch.log_softmax(token.T[support], -1)
        return clipped + kl(truncated, token.S[support]) if entropy(token.T) > 0.8 else clipped

    return case.token_mean(loss)


def reopold(case: Case) -> Tensor:
    """2603.11137: max(R, log(lambda) / (1 - lambda)) as the token's reward; later only the least certain fifth of tokens."""
    floor = math.log(0.2) / (1 - 0.2)
    tokens = sorted(case.tokens(), key=lambda token: -entropy(token.S))
    kept = tokens if case.step <= 20 else tokens[: math.ceil(0.2 * len(tokens))]
    return total([-ratio(token) * max(gap(token), floor) for token in kept]) / case.count


def revisiting_opd(case: Case) -> Tensor:
    """2603.25562: reverse KL between both distributions, each renormalised over the teacher's 32 most likely tokens.

    Special tokens are masked.
    """

    def loss(token: Token) -> Tensor:
        if token.special:
            return torch.zeros(())
        support = top_tokens(token.T, 32)
        return kl(torch.log_softmax(token.S[support], -1), torch.log_softmax(token.T[support], -1))

    return case.token_mean(loss)


def rethinking_opd(case: Case) -> Tensor:
    """The released code of 2604.13016: over the student's 16 most likely tokens, A = -(log S - log T) p, p renormalised."""

    def loss(token: Token) -> Tensor:
        support = top_tokens(token.S, 16)
        mass = sum(probability(token.S[v]) for v in support)
        terms = []
        for v in support:
            p = probability(token.S[v]) / mass
            terms.append(-p * number(token.T[v] - token.S[v]) * token.S[v])
        return total(terms)

    return case.token_mean(loss)


def stable_opd(case: Case) -> Tensor:
    """Equations 5 and 6 of 2604.08527: clipped OPD + lambda SFT on good answers + beta KL(S || reference)."""
    losses = []
    for row in case.sequences:
        for token in row.tokens:
            if row.source == "student":
                losses += [clipped_part(token, gap(token), 0.2), 0.1 * kl(token.S, token.R)]
            if row.source == "dataset":
                losses.append(1.0 * likelihood(token))
    return total(losses) / case.count


def vopd(case: Case) -> Tensor:
    """2605.07865 and its code's `vopd.yaml`: the advantage r - V with V = -KL(S || T), over all tokens."""
    return case.token_mean(
        lambda token: policy_gradient(token, gap(token) + number(reverse(token)))
    )


def opd_plus(case: Case) -> Tensor:
    """2606.01039: r f'(r) - f(r) as the advantage, for f(r) of Jensen-Shannon.

    JSD is E_S[f(r)] with f(r) = r/2 log(2r / (1 + r)) + 1/2 log(2 / (1 + r)), and r f' - f = 1/2 log((1 + r) / 2).
    """
    return case.token_mean(
        lambda token: policy_gradient(token, 0.5 * math.log((1 + math.exp(gap(token))) / 2))
    )


def power_opd(case: Case) -> Tensor:
    """2606.17199: the reward T^alpha - S^alpha with alpha 5."""
    return case.token_mean(
        lambda token: policy_gradient(token, probability(5 * token.lT) - probability(5 * token.lS))
    )


def aopd(case: Case) -> Tensor:
    """Equation 10 of 2605.06387: the policy gradient where A > 0, top-K forward KL elsewhere, 1 / |y|."""

    def loss(token: Token) -> Tensor:
        return policy_gradient(token, gap(token)) if gap(token) > 0 else partial_forward(token, 16)

    return case.sequence_mean(loss)


def tr_opd(case: Case) -> Tensor:
    """2606.01249 in expectation over its mask: min(T / S, 1) trusts the token, otherwise top-64 forward KL.

    The teacher's own tokens, the prefix, have the forward KL with beta 0.001.
    """

    def loss(token: Token) -> Tensor:
        trust = min(math.exp(gap(token)), 1.0)
        return trust * policy_gradient(token, gap(token)) + (1 - trust) * partial_forward(token, 64)

    losses = [loss(t) for row in case.sequences if row.source == "student" for t in row.tokens]
    prefixes = [
        0.001 * partial_forward(token, 64)
        for row in case.sequences
        if row.source == "teacher"
        for token in row.tokens
    ]
    return total(losses + prefixes) / case.count


def iw_opd(case: Case) -> Tensor:
    """2606.22600: weights 1 + gamma (1 - cumulative share of |A|), gamma 1/2."""
    losses = []
    for row in case.sequences:
        whole = sum(abs(gap(token)) for token in row.tokens)
        so_far = 0.0
        for token in row.tokens:
            so_far += abs(gap(token))
            losses.append((1 + 0.5 * (1 - so_far / whole)) * policy_gradient(token, gap(token)))
    return total(losses) / case.count


def selectkd(case: Case) -> Tensor:
    """2510.24021: forward KL, 0.01 of it where the student's most likely token is not among the teacher's 5."""

    def loss(token: Token) -> Tensor:
        is_accepted = int(token.S.argmax()) in top_tokens(token.T, 5)
        return forward(token) * (1.0 if is_accepted else 0.01)

    return case.sequence_mean(loss)


def drawn(token: Token, uniform: float) -> int:
    """Return the token of the learner at which its cumulative probability passes a random number."""
    passed = 0.0
    for v, p in enumerate(sg(token.S).exp().tolist()):
        passed += p
        if passed > uniform:
            return v
    return len(token.S) - 1


def hpd(case: Case) -> Tensor:
    """2604.20244 as released: the expert's token y, and a sampled token w where the student has too much probability."""

    def loss(token: Token) -> Tensor:
        w = drawn(token, float(token.uniforms[0]))
        expert = probability(token.lS) * (number(token.lT) - number(token.lS))
        other = probability(token.S[w]) * (number(token.T[w]) - number(token.S[w]))
        counts = expert
        if expert > 0:
            counts += probability(token.lT)
            if other < 0:
                counts += probability(token.lT)
        result = -counts * token.lS
        if w != token.id and other < 0:
            result = result - other * token.S[w]
        return result

    return case.token_mean(loss)


def async_opd(case: Case) -> Tensor:
    """2606.24143: the mean over 16 tokens drawn from the learner, with the learner's own log-probability in the advantage."""

    def loss(token: Token) -> Tensor:
        draws = [drawn(token, float(uniform)) for uniform in token.uniforms[:16]]
        return total([-number(token.T[v] - token.S[v]) * token.S[v] for v in draws]) / 16

    return case.token_mean(loss)


def distillspec(case: Case) -> Tensor:
    """2310.08461: one minus the acceptance rate, sum of min(S, T)."""
    return case.token_mean(lambda token: 1 - torch.minimum(token.S.exp(), token.T.exp()).sum())


def osd(case: Case) -> Tensor:
    """2310.07177: forward KL where the target wrote the token, that is where it rejected the draft."""
    losses = [
        forward(token) for row in case.sequences if row.source == "teacher" for token in row.tokens
    ]
    return total(losses) / case.count


def ketchup(case: Case) -> Tensor:
    """2504.19024: minus the mean over answers of the sum of (G_t - b_t) log pi(y_t), with the teacher's logits q and the
    Bellman optimality equation over K = 2 steps; b is the mean return of the tokens in all other answers.
    """
    k = 2
    returns: dict[int, list[float]] = {}
    for row in case.sequences:
        q = [float(token.lT) + token.level for token in row.tokens]
        v = [float(token.T.max()) + token.level for token in row.tokens] + [0.0] * k
        ends = [v[min(place + k, len(v) - 1)] for place in range(len(q))]
        returns[id(row)] = [
            sum(q[u] - ends[u] for u in range(place, len(q), k)) for place in range(len(q))
        ]
    total = torch.zeros(())
    for group in case.groups():
        for row in group:
            others = [value for other in group if other is not row for value in returns[id(other)]]
            baseline = sum(others) / len(others) if others else 0.0
            for token, value in zip(row.tokens, returns[id(row)], strict=True):
                total = total - (value - baseline) * token.lS
    return total / len(case.sequences)


def rise(case: Case) -> Tensor:
    """After a summary of 2609.05295: KL(S || softmax(2 log T - log R)), R an earlier copy of the student.

    The target's log-probabilities are held above -50, as in every reverse KL of the library.
    """

    def loss(token: Token) -> Tensor:
        extrapolated = token.T.exp() ** 2 / token.R.exp()
        target = (extrapolated / extrapolated.sum()).log()
        return kl(token.S, torch.maximum(target, sg(token.S).clamp(max=-50)))

    return case.token_mean(loss)


def gamma_opd(case: Case) -> Tensor:
    """After a summary of 2609.16937: minus the token mean of G_t log S, G_t = log T - log S + G_(t+1) / 2."""
    losses = []
    for row in case.sequences:
        to_come = 0.0
        for token in reversed(row.tokens):
            to_come = gap(token) + to_come / 2
            losses.append(policy_gradient(token, to_come))
    return total(losses) / case.count


def skd(case: Case) -> Tensor:
    """2410.11325 as released: the mean KL(T || S) over the tokens of both writers."""
    return case.token_mean(forward)


def adaswitch(case: Case) -> Tensor:
    """After the abstract of 2510.07842: the mean KL(T || S) over the tokens of both writers."""
    return case.token_mean(forward)


def relay_opd(case: Case) -> Tensor:
    """2607.26057 as released: the k1 estimate of the reverse KL as an advantage, at the tokens of both writers."""
    return case.token_mean(lambda token: policy_gradient(token, gap(token)))


def eagle_3(case: Case) -> Tensor:
    """The loss of one depth in the released code: cross-entropy to the target, which has a constant entropy."""
    return case.token_mean(cross_entropy)


def draft_opd(case: Case) -> Tensor:
    """Released weights: 1 for the target's text, 2 for tokens that the drafter drafted itself."""
    losses = [
        cross_entropy(token) if row.source == "teacher" else 2 * reverse(token)
        for row in case.sequences
        if row.source in ("teacher", "student")
        for token in row.tokens
    ]
    return total(losses) / case.count


def va_opd(case: Case) -> Tensor:
    """2605.21924: KL(S || T), averaged apart over the fifth of an answer's tokens with the largest log T - log R and over the
    others; a prompt's answers count by the softmax of their mean log T - log R.
    """

    def loss(row: Sequence) -> Tensor:
        ordered = sorted(row.tokens, key=lambda token: float(token.lR - token.lT))
        count = math.ceil(len(ordered) / 5)
        halves = [half for half in (ordered[:count], ordered[count:]) if half]
        return sum(sum(kl(t.S, t.T) for t in half) / len(half) for half in halves) / len(halves)

    total = torch.zeros(())
    for group in case.groups():
        gaps = [float(sum(t.lT - t.lR for t in row.tokens)) / len(row.tokens) for row in group]
        scale = sum(math.exp(gap) for gap in gaps)
        total += sum(
            4 * math.exp(gap) / scale * loss(row) for gap, row in zip(gaps, group, strict=True)
        )
    return total / len(case.sequences)
