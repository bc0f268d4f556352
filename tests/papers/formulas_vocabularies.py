"""The papers' formulas for teachers with another tokenizer: spans of tokens, and vocabularies with some common tokens."""

import torch
from torch import Tensor

from .case import OUTSIDE, OWN, SPECIAL, Case, Token, V, carry, jsd, kl, lead, list_spellings, sg


def alm(case: Case) -> Tensor:
    """2503.20083's code: the forward KL of Bernoulli(T(c, e)^(1 / tau)) and Bernoulli(S(c, e)^(1 / tau)), tau 100.

    T(c, e) is the probability of a chunk c and of a token e after it that may begin a word. A chunk goes on until the
    teacher gives these tokens more than 0.1. After the last chunk is no token.
    """
    total = torch.zeros(())
    for row in case.sequences:
        spans = row.spans()
        chunk: list[Token] = []
        for number, span in enumerate(spans):
            chunk = chunk + span
            after = spans[number + 1][0] if number + 1 < len(spans) else None
            if after is not None and after.T.exp()[list(SPECIAL)].sum() <= 0.1:
                continue
            p, q = (
                torch.stack(
                    [logprobs[token.id] for token, logprobs in pairs]
                    + [next_.exp()[list(SPECIAL)].sum().log() for next_ in ends]
                )
                .div(100)
                .sum()
                .exp()
                for pairs, ends in (
                    ([(token, token.T) for token in chunk], [after.T] if after else []),
                    ([(token, token.S) for token in chunk], [after.S] if after else []),
                )
            )
            total = total + p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            chunk = []
    return total / case.count


def dpca(case: Case) -> Tensor:
    """2606.09456: minus the mean of A_i log S(y_i), A_i = (l_T(c) / l_S(c) - 1) log S(y_i) for the tokens of a chunk c."""
    total = torch.zeros(())
    for row in case.sequences:
        for span in row.spans():
            l_T = float(sum(token.lT for token in span))
            l_S = float(sum(sg(token.lS) for token in span))
            for token in span:
                total = total - (l_T / l_S - 1) * sg(token.lS) * token.lS
    return total / case.count


def ranked(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the L1 distance of sorted probabilities; the shorter list ends with zeros."""
    size = max(len(student), len(teacher))
    lists = [
        torch.cat([probs.exp(), torch.zeros(size - len(probs))]).sort(descending=True).values
        for probs in (student, teacher)
    ]
    return (lists[0] - lists[1]).abs().sum()


def whole(token: Token) -> Tensor:
    """Return the teacher's log-probabilities of the common tokens, then of its own."""
    return torch.cat([token.T[: V - OUTSIDE], token.own])


def uld(case: Case) -> Tensor:
    """2402.12030's code: cross-entropy, and 1.5 times the L1 distance of sorted probabilities at the same token index.

    Indices end with the shorter of both tokenizations, here the teacher's, which has one token for each span.
    """
    total = torch.zeros(())
    for row in case.sequences:
        common = row.tokens[: len(row.spans())]
        ranks = sum(ranked(token.S, whole(token)) for token in common) / len(common)
        total = total + 1.5 * ranks - sum(token.lS for token in row.tokens) / len(row.tokens)
    return total / len(case.sequences)


def gold(case: Case) -> Tensor:
    """TRL: JSD(0.5) of matched tokens times their share of the teacher's vocabulary, plus sorted L1 of the rest times its share.

    A span's row is the first token's, times the probability of the span's later tokens: here a quarter of the level, negated,
    is its logarithm for the teacher.
    """
    matched = V - OUTSIDE
    weight = matched / (matched + OWN)
    total = torch.zeros(())
    for row in case.sequences:
        losses = []
        for first, *later in row.spans():
            S = first.S + sum((token.lS for token in later), torch.zeros(()))
            scale = -first.level / 4 if later else 0.0
            same = jsd(S[:matched], first.T[:matched] + scale, 0.5)
            losses.append(weight * same + (1 - weight) * ranked(S[matched:], first.own + scale))
        total = total + sum(losses) / len(losses)
    return total / len(case.sequences)


def x_token(case: Case) -> Tensor:
    """2605.21699's code: sg(CE / KL) KL(T || S W) + CE, with a row of W for each of the student's tokens: 1, or 10/11 and 1/11.

    CE and KL are compared over a micro-batch, by default one text. Over a span S W is a mean of probabilities, and T the
    exponential of a mean of log-probabilities: here a quarter of the level lower than at the first token.
    """
    matrix = torch.zeros(V, V + OWN, dtype=torch.float64)
    for token in range(V - OUTSIDE):
        matrix[token, token] = 1.0
    for token, column, place in list_spellings():
        matrix[token, column] += (10 / 11, 1 / 11)[place]
    assert torch.allclose(matrix.sum(-1), torch.ones(V).double())
    # The student's own tokens have no mass on either side.
    used = torch.tensor([column for column in range(V + OWN) if not V - OUTSIDE <= column < V])
    total = torch.zeros(())
    for row in case.sequences:
        losses = []
        for span in row.spans():
            carried = sum(token.S.exp() @ matrix[:, used] for token in span) / len(span)
            carried = carried / (carried.sum() + 1e-10) + 1e-10
            target = whole(span[0]) - (span[0].level / 4 if len(span) > 1 else 0.0)
            losses.append(kl(target, carried.log()))
        distance = sum(losses) / len(losses)
        entropy = -sum(token.lS for token in row.tokens) / case.count
        total = total + sg(entropy / abs(distance)) * distance + entropy
    return total


def simct(case: Case) -> Tensor:
    """2605.07711's code: KL(S || T) over the common tokens and the stretch that starts here, with the mean logit of its tokens.

    A stretch ends with the next token that both models have as one token.
    """
    total = torch.zeros(())
    for row in case.sequences:
        stretch: list[Token] = []
        for span in row.spans():
            stretch = stretch + span
            if len(span) > 1:
                continue
            first, size, stretch = stretch[0], len(stretch), []
            mine, theirs = first.logits[: V - OUTSIDE], first.T[: V - OUTSIDE]
            if size > 1:
                inside = row.tokens[first.position : first.position + size]
                mean = torch.stack([token.logits[token.id] for token in inside]).mean()
                mine = torch.cat([mine, mean[None]])
                theirs = torch.cat([theirs, torch.tensor([first.level - 8.0])])
            elif not first.is_known:
                continue
            total = total + kl(mine.log_softmax(-1), theirs.log_softmax(-1))
    return total / case.count


def dskd_v2(case: Case) -> Tensor:
    """2504.11426's code: -log S of given answers, and KL(T' || S) + KL(T || S') of the student's.

    T' and S' are states through the opposite head. The first divergence counts where T' has the teacher's most likely token
    at its top, the second where the student has this token.
    """
    total = torch.zeros(())
    for row in case.sequences:
        for token in row.tokens:
            if row.source == "dataset":
                total = total - token.lS
            if row.source != "student" or not token.is_known:
                continue
            there = torch.cat([token.T[: V - OUTSIDE], token.own])
            best = int(there.argmax())
            through = lead(token.R, best)
            if best < V - OUTSIDE:
                total = total + kl(there, carry(token.S))
                if int(through.argmax()) == best:
                    total = total + kl(through, token.S)
    return total / case.count


def simple_opd(case: Case) -> Tensor:
    """After a summary of 2608.14277: -A log S(c) of each chunk c, and 0.1 KL(S || the initial student).

    A is log T(c) - log S(c) within 2 of 0. It is also the next token's, which ends the chunk.
    """
    total = torch.zeros(())
    for row in case.sequences:
        before = 0.0
        for span in row.spans():
            advantage = float(sum(token.lT - sg(token.lS) for token in span))
            advantage = min(max(advantage, -2.0), 2.0)
            total = total - before * span[0].lS
            total = total - advantage * sum((token.lS for token in span), torch.zeros(()))
            before = advantage
        total = total + 0.1 * sum(kl(token.S, token.R) for token in row.tokens)
    return total / case.count
