"""Define the estimators of a term: how disagreement becomes a gradient."""

from typing import Literal

from pydantic import Field

from practicum.core.calls import Call


class Auto(Call):
    """Pathwise if there are candidates to differentiate, score_function for sampled signals."""

    type: Literal["auto"] = "auto"


class Pathwise(Call):
    """Differentiate the divergence itself at every visited state (GKD 2306.13649)."""

    type: Literal["pathwise"] = "pathwise"


class ScoreFunction(Call):
    """Policy gradient with the advantage of the sampled token.
    `gamma` 1 is the sequence-level gradient.

    `baseline`: none; kl, the full divergence at the state (vOPD 2605.07865); group_mean, the mean
    return of the other completions of the prompt. `start` 1 begins the return at the next token,
    beside a pathwise term for this one, and `length` mean divides it by the number of remaining
    tokens (MiniLLM 2306.08543). `over` candidates sums over the candidates of a topk signal, each
    with its renormalised student probability (2604.13016). `unit` turn adds up the rest of the turn,
    and the later turns of a conversation with `gamma` a turn.
    """

    type: Literal["score_function"] = "score_function"
    gamma: float = Field(default=0.0, ge=0, le=1)
    baseline: Literal["none", "kl", "group_mean"] = "none"
    start: Literal[0, 1] = 0
    length: Literal["sum", "mean"] = "sum"
    over: Literal["sampled", "candidates"] = "sampled"
    unit: Literal["token", "turn"] = "token"

    def explain_turns(self) -> str | None:
        """Return why returns by turn do not go with the other settings, or None."""
        if self.unit == "turn" and (self.start, self.length) != (0, "sum"):
            return "unit=turn adds up the rest of a turn; leave out start and length"
        return None


class K2Surrogate(Call):
    """Back-propagate half the squared log-ratio of a token: exactly the gradient of reverse KL."""

    type: Literal["k2_surrogate"] = "k2_surrogate"
