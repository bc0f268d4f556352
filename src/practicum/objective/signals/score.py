"""One reward per completion, from the verifier."""

from typing import ClassVar, Literal

from practicum.functional.advantages import ADVANTAGES
from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import AdvantageName, SignalCall


class Config(SignalCall):
    """One reward per completion, from the verifier; no teacher is needed.

    `advantage`: group_normalized is GRPO, group_mean Dr. GRPO, leave_one_out RLOO, none REINFORCE.
    `among=source` compares only the completions of the term's source (HDPO 2603.23871). `unit=turn`
    compares the return of each turn of a conversation: the environment's rewards from this turn on,
    plus the completion's reward; `unit=step` only this turn's reward plus the completion's
    (OpenClaw-RL 2603.10165). `unit=episode` compares the return of the whole conversation.
    """

    type: Literal["score"] = "score"
    advantage: AdvantageName = "group_normalized"
    among: Literal["source"] | None = None
    unit: Literal["rollout", "episode", "turn", "step"] = "rollout"
    sampled: ClassVar[bool] = True
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @property
    def outcome(self) -> AdvantageName:
        """Return the advantage."""
        return self.advantage

    @property
    def reward_unit(self) -> Literal["rollout", "episode", "turn", "step"]:
        """Return the unit."""
        return self.unit

    @property
    def compares_within_source(self) -> bool:
        """Return True for `among=source`."""
        return self.among == "source"

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern a teacher."""
        if not isinstance(gradient, ScoreFunction):
            return (
                "signal 'score' is a reward, not a function of the logits; set estimator: "
                "score_function"
            )
        if divergence != "reverse_kl" or not plain or gradient != ScoreFunction():
            return (
                "signal 'score' asks no teacher; leave out target, divergence and the estimator's "
                "arguments"
            )
        if self.unit in ("turn", "step") and ADVANTAGES[self.advantage].anchored:
            return f"advantage {self.advantage!r} is for whole answers; leave out unit={self.unit}"
        return None

    def explain_extras(self, *, has_reward: bool, clip: str, source: str) -> str | None:
        """Refuse `among=source` if the term trains on the answers of all writers."""
        if self.among and source == "all":
            return "among=source compares the answers of one writer; set source: student"
        return None
