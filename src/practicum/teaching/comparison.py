"""Compare a server with a model folder: scores of fixed texts, and explanations of differences.

Each explanation turns the folder's distributions into the scores that a server with that fault
would give. The first explanation that covers nearly all of the difference is named.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.types import TeacherSignal

EXPLAINED = 0.2
"""The largest share of the difference that an explanation may leave."""

SAME = 0.01
"""The mean difference in nats below which two models are the same; rounding explains the rest."""

ROUNDINGS = 3.0
"""The multiple of the difference in the folder's own bfloat16 that still counts as rounding."""

ALIKE = 0.9
"""The correlation of scores from which two models are one model at another precision."""

TEMPERATURES = 0.2, 5.0
ROUNDS, STEPS = 4, 13
"""The range of temperatures that are tried, the rounds of the search, and the tries in each."""

Verdict = Literal[
    "the same model",
    "another temperature",
    "off by one position",
    "a permuted vocabulary",
    "fewer bits",
    "other weights",
]


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text of T tokens: the folder's distribution at each of them, and the server's answer."""

    tokens: Int[Tensor, " T"]
    local: Float[Tensor, "T V"]
    served: TeacherSignal

    @property
    def own(self) -> Float[Tensor, " T"]:
        """The folder's log-probability of each token."""
        return _pick(self.local, self.tokens)

    @property
    def answered(self) -> Float[Tensor, " T"]:
        """The server's log-probability of each token."""
        assert self.served.logprobs is not None
        return self.served.logprobs


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """The verdict on a server, and its distance from the folder in nats per token.

    - difference, largest: of the log-probabilities of the texts' tokens, on average and at most
    - divergence: KL(folder || server), None if the scores belong to no distribution over the tokens
    - rounding: the mean difference of the folder in bfloat16 from itself
    """

    verdict: Verdict
    detail: str
    difference: float
    largest: float
    divergence: float | None
    rounding: float
    tokens: int

    @property
    def is_same(self) -> bool:
        """True if nothing but rounding separates the two."""
        return self.verdict == "the same model"

    def render_lines(self) -> list[str]:
        """Return the comparison for a terminal, line by line."""
        divergence = "" if self.divergence is None else f"; KL {self.divergence:.2g} per token"
        return [
            f"against: {self.verdict}: {self.detail}",
            f"differ: by {self.difference:.2g} nats per token (at most {self.largest:.2g}) over "
            f"{self.tokens} tokens{divergence}; bfloat16 rounding causes {self.rounding:.1g}",
        ]


def compare_scores(
    texts: Sequence[ScoredText], rounding: float, other_texts: str | None
) -> ModelComparison:
    """Compare a server's scores with a folder's, and name what separates them.

    `rounding` is the mean difference that bfloat16 causes. `other_texts` describes the server's
    tokens with other texts than the folder's, None if all texts agree.
    """
    gaps = torch.cat([text.answered - text.own for text in texts])
    difference = float(gaps.abs().mean())
    verdict, detail = _explain(texts, difference, rounding, other_texts)
    is_distribution = verdict not in ("off by one position", "a permuted vocabulary")
    return ModelComparison(
        verdict,
        detail,
        difference,
        float(gaps.abs().max()),
        _estimate_divergence(gaps) if is_distribution else None,
        rounding,
        len(gaps),
    )


def _explain(
    texts: Sequence[ScoredText], difference: float, rounding: float, other_texts: str | None
) -> tuple[Verdict, str]:
    """Return the verdict and its reason."""
    if other_texts is not None:
        return "a permuted vocabulary", other_texts
    # A model with large weights loses more by rounding, so no fixed limit fits all models.
    limit = max(SAME, ROUNDINGS * rounding)
    if difference <= limit:
        return "the same model", "its scores equal the folder's up to rounding"
    # The simplest fault comes first: a temperature has one parameter, so it rarely fits other
    # faults.
    bound = EXPLAINED * difference
    temperature, unexplained = _fit_temperature(texts)
    if unexplained <= bound:
        return (
            "another temperature",
            f"the scores are the folder's at temperature {temperature:.2f}; {unexplained:.1g} nats per "
            "token remain; serve it without a default temperature, or with raw log-probabilities",
        )
    shift = _find_shift(texts, bound)
    if shift is not None:
        return "off by one position", f"{shift}; check the code that cuts the server's lists"
    if _has_other_order(texts, bound):
        return (
            "a permuted vocabulary",
            "its candidates have the folder's probabilities at other token ids; serve it with the "
            "folder's tokenizer and embedding",
        )
    correlation = _measure_correlation(texts)
    if correlation >= ALIKE:
        return (
            "fewer bits",
            f"the scores correlate by {correlation:.3f} and differ by {difference / rounding:.0f} "
            "times bfloat16's difference: quantised weights or states, or slightly retrained weights",
        )
    return (
        "other weights",
        f"the scores correlate by {correlation:.3f}, and neither a temperature, a position nor an "
        "order of the tokens explains them",
    )


def _pick(rows: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return each row's value at its token."""
    return rows.gather(1, tokens[:, None]).squeeze(1)


def _measure_rest(
    texts: Sequence[ScoredText], predict: Callable[[ScoredText], Tensor], first: int, last: int
) -> float:
    """Return the mean difference from predicted scores; `first` and `last` tokens are left out."""
    rests = []
    for text in texts:
        inner = slice(first, len(text.tokens) - last)
        rests.append((text.answered[inner] - predict(text)).abs())
    return float(torch.cat(rests).mean())


def _fit_temperature(texts: Sequence[ScoredText]) -> tuple[float, float]:
    """Return the temperature that explains the scores best, and the remaining difference."""

    def measure(temperature: float) -> float:
        return _measure_rest(
            texts,
            lambda text: _pick((text.local / temperature).log_softmax(-1), text.tokens),
            0,
            0,
        )

    low, high = (torch.tensor(TEMPERATURES).log()).tolist()
    best = 1.0
    for _ in range(ROUNDS):
        grid = torch.linspace(low, high, STEPS).exp().tolist()
        best = min(grid, key=measure)
        # A better temperature can only lie between the two neighbours of the best.
        step = (high - low) / (STEPS - 1)
        center = float(torch.tensor(best).log())
        low, high = center - step, center + step
    return best, measure(best)


def _find_shift(texts: Sequence[ScoredText], bound: float) -> str | None:
    """Explain how the scores are off by one position; None if they are not."""
    explanations: Iterable[tuple[str, Callable[[ScoredText], Tensor]]] = (
        ("each score belongs to the token before", lambda text: text.own[:-2]),
        ("each score belongs to the next token", lambda text: text.own[2:]),
        (
            "each token is scored by the prediction of the token before it",
            lambda text: _pick(text.local[:-2], text.tokens[1:-1]),
        ),
        (
            "each token is scored by the prediction of the token after it",
            lambda text: _pick(text.local[2:], text.tokens[1:-1]),
        ),
    )
    for reason, predict in explanations:
        if _measure_rest(texts, predict, 1, 1) <= bound:
            return reason
    return None


def _has_other_order(texts: Sequence[ScoredText], bound: float) -> bool:
    """Return True if the candidates' probabilities are the folder's and their ids are not."""
    rests, shared = [], []
    for text in texts:
        ids, logprobs = text.served.topk_ids, text.served.topk_logprobs
        if ids is None or logprobs is None:
            return False
        top = text.local.topk(min(ids.shape[1], text.local.shape[1]), dim=-1)
        rests.append((logprobs - top.values).abs().flatten())
        shared.append((ids == top.indices).float().flatten())
    # Sorted by probability, a distribution looks the same under every order of the vocabulary.
    is_explained = float(torch.cat(rests).mean()) <= bound
    return is_explained and float(torch.cat(shared).mean()) < 0.5


def _measure_correlation(texts: Sequence[ScoredText]) -> float:
    """Return the correlation of the server's scores with the folder's."""
    pairs = torch.stack(
        [torch.cat([text.own for text in texts]), torch.cat([text.answered for text in texts])]
    )
    return float(torch.corrcoef(pairs.double())[0, 1].nan_to_num(0.0))


def _estimate_divergence(gaps: Float[Tensor, " N"]) -> float:
    """Estimate KL(folder || server) from the scores of texts that the folder wrote.

    The mean of exp(g) - 1 - g is unbiased, like the mean of -g, and no term is negative.
    """
    # A plain mean of gaps has an error far above the divergence caused by a few bits.
    double = gaps.double()
    return float((double.exp() - 1.0 - double).mean())
