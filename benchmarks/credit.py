"""Check published cross-tokenizer losses against the gradient that they estimate, by enumeration over random pairs.

    python -m benchmarks credit [--pairs 200] [--seed 0]

A student writes two of three tokens, and a teacher has one token for each of the nine pairs. Autograd gives the exact gradient of
the reverse KL. A share of the pair's log-ratio for each token is an estimate; its expectation is taken over all nine pairs. The
remaining two lines need no gradient. A loss of logits should not change when a constant is added to all logits of one position
(SimCT, 2605.07711, averages the logits of a span), and a merged row (GOLD) should be a distribution.
"""

from typing import Literal

import torch
from torch import Tensor

from benchmarks.measuring import build_parser, format_table
from practicum.functional.sequence import share_spans

Share = Literal["whole", "even", "surprise"]

V = 3
SHIFT = 2.0
"""The constant that is added to the logits of the second position."""


def main() -> None:
    """Print a line for each share and for each remaining check."""
    parser = build_parser(__doc__)
    parser.add_argument("--pairs", type=int, help="random pairs (default 200, with --quick 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs")
    options = parser.parse_args()
    count = options.pairs or (5 if options.quick else 200)
    generator = torch.Generator().manual_seed(options.seed)
    pairs = [draw_pair(generator) for _ in range(count)]
    rows = []
    for share in ("whole", "even", "surprise"):
        compared = torch.stack([compare_share(share, *pair) for pair in pairs])
        cosine, error = compared.unbind(-1)
        rows.append([share, *(f"{number:.3f}" for number in (cosine.mean(), cosine.min()))])
        rows[-1] += [f"{number:.2g}" for number in (error.mean(), error.max())]
    print(
        format_table(
            ["share of the log-ratio", "cosine, mean", "least", "relative error, mean", "greatest"],
            rows,
        )
    )
    changes = torch.stack([change_by_shift(student) for student, _ in pairs])
    print(
        f"a span's mean logit: a constant of {SHIFT:g} changes a probability by "
        f"{changes.mean():.2f} on average, at most {changes.max():.2f}"
    )
    sums = torch.stack([sum_merged_row(student) for student, _ in pairs])
    print(f"a merged row sums to {sums.mean():.2f} on average, at least {sums.min():.2f}")


def draw_pair(generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """Return the student's logits of both positions, and the teacher's log-probabilities [V, V]."""
    first, second, teacher = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((V,), (V, V), (V * V,))
    )
    return [first, second], teacher.log_softmax(0).view(V, V)


def compare_share(share: Share, logits: list[Tensor], teacher: Tensor) -> Tensor:
    """Return the cosine of the expected gradient with the exact one, and the relative error."""
    leaves = [part.clone().requires_grad_() for part in logits]
    first, second = (part.log_softmax(-1) for part in leaves)
    student = first[:, None] + second
    kl = (student.exp() * (student - teacher)).sum()
    exact = flatten(torch.autograd.grad(kl, leaves, retain_graph=True))
    # The score function, each pair of tokens as often as the student writes it.
    total = torch.zeros((), dtype=torch.float64)
    for first_id in range(V):
        for second_id in range(V):
            tokens = torch.stack([first[first_id], second[first_id, second_id]])
            logprobs = tokens.detach()
            ratio = (teacher[first_id, second_id] - logprobs.sum()).expand(2)
            spans = torch.zeros(2, dtype=torch.long)
            parts = ratio if share == "whole" else share_spans(ratio, logprobs, spans, share)
            total = total - logprobs.sum().exp() * (parts * tokens).sum()
    estimate = flatten(torch.autograd.grad(total, leaves))
    cosine = torch.nn.functional.cosine_similarity(estimate, exact, dim=0)
    return torch.stack([cosine, (estimate - exact).norm() / exact.norm()])


def flatten(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the gradients as one vector."""
    return torch.cat([part.flatten() for part in parts])


def change_by_shift(logits: list[Tensor]) -> Tensor:
    """Return how much a probability changes when a constant is added to the second position's logits."""
    first, second = logits[0], logits[1][0]

    def compare(later: Tensor) -> Tensor:
        span = (first[0] + later[1]) / 2
        return torch.cat([first, span[None]]).softmax(0)

    return (compare(second) - compare(second + SHIFT)).abs().max()


def sum_merged_row(logits: list[Tensor]) -> Tensor:
    """Return the sum of the first position's row times the probability of the token that follows."""
    row = logits[0].softmax(0) * logits[1][0].softmax(0)[1]
    return row.sum()


if __name__ == "__main__":
    main()
