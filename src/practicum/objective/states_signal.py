"""The base of signals that read a teacher's hidden states."""

from practicum.errors import TeacherError
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Capabilities, SignalCall


class StatesSignal(SignalCall):
    """A signal that reads a teacher's hidden states through its head."""

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse also a teacher without hidden states."""
        if problem := super().explain_refusal(capabilities):
            return problem
        # A translated teacher's states go through a folded head, so its logits are not raw logits.
        if capabilities.raw_logits or capabilities.by_span:
            return None
        return (
            f"gives no hidden states, which signal {self.name!r} needs; set signal: full, or use a "
            "teacher of type model, self or translated"
        )

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but the derivative."""
        if gradient.pathwise and plain:
            return None
        return (
            f"signal {self.name!r} differentiates its own divergence; leave out target and "
            "estimator"
        )

    def require_spans(self, comparison: SignalComparison, column: str) -> None:
        """Raise TeacherError if a teacher with other tokens gives no column about its spans."""
        if comparison.teacher.outside is not None and column not in comparison.teacher.extras:
            raise TeacherError(
                f"signal {self.name!r} reads the spans of one {comparison.against}, which several "
                "teachers or siblings do not give; set signal: full, or use one teacher"
            )
