"""Compare the values of two models' actions, which are written as tokens of bins.

The tokens of the bins are consecutive and in the order of their values, from -1 to 1, as in
vision-language-action models (OpenVLA 2406.09246).
"""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.errors import CapabilityError
from practicum.functional.precision import finite
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Full, SignalCall

SPREAD = 0.1
"""The standard deviation that widens both Gaussians: a certain action has no spread of its own."""


class Config(SignalCall):
    """The distance of the expected action of student and teacher (RPD 2503.05833).

    At each token the probabilities of the `bins` action tokens from id `first` on are summed into
    one entry, and the divergence compares the distributions over this entry and the other tokens.
    The distance of the expected values in the bins is added, times `scale` and the teacher's
    probability of an action: their squared difference (`mse`), or KL(T || S) of Gaussians with the
    means and variances of both (`gaussian`). A negative `first` counts from the end of the
    vocabulary.
    """

    type: Literal["action"] = "action"
    first: int = -256
    bins: int = Field(default=256, ge=2)
    distance: Literal["mse", "gaussian"] = "mse"
    scale: float = Field(default=1.0, gt=0)
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the whole distribution."""
        return Full()

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator except the derivative."""
        if gradient.pathwise and plain:
            return None
        return "signal 'action' is differentiated; leave out target and estimator"

    def try_out(self) -> None:
        """Do nothing: the example has no tokens of bins."""

    def compare(self, comparison: SignalComparison) -> Float[Tensor, " T"]:
        """Return the divergence of the merged distributions and the distance of the actions.

        Raises CapabilityError if the vocabulary has no such tokens.
        """
        teacher = comparison.teacher.full
        assert teacher is not None, "the signal asks for whole distributions"
        size = comparison.student.shape[-1]
        start = self.first + size if self.first < 0 else self.first
        if not 0 <= start <= size - self.bins:
            raise CapabilityError(
                f"objective.signal: action({self.first}, {self.bins}): the vocabulary of {size} tokens has no such ids; "
                "set first to the id of the lowest bin's token"
            )
        bins = slice(start, start + self.bins)
        student_action, student_rest = split_action(comparison.student, bins)
        teacher_action, teacher_rest = split_action(teacher, bins)
        merged = comparison.contributions(student_rest, teacher_rest).sum(dim=-1)
        compute = mean_square if self.distance == "mse" else gaussian_kl
        distance = compute(student_action, teacher_action)
        return merged + self.scale * teacher_rest[..., -1].exp() * distance


def split_action(
    logprobs: Float[Tensor, "*s V"], bins: slice
) -> tuple[Float[Tensor, "*s B"], Float[Tensor, "*s W"]]:
    """Return the log-probabilities within the bins, and all others followed by the bins' sum."""
    logprobs = finite(logprobs)
    inside = logprobs[..., bins]
    total = inside.logsumexp(dim=-1, keepdim=True)
    outside = [logprobs[..., : bins.start], logprobs[..., bins.stop :]]
    return inside - total, torch.cat([*outside, total], dim=-1)


def compute_values(bins: int) -> Float[Tensor, " B"]:
    """Return the value in the middle of each bin, from -1 to 1."""
    return (2 * torch.arange(bins) + 1) / bins - 1


def compute_moments(
    logprobs: Float[Tensor, "*s B"],
) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Return the mean and the variance of the action's value."""
    probabilities = logprobs.exp()
    values = compute_values(logprobs.shape[-1]).to(probabilities)
    mean = (probabilities * values).sum(dim=-1)
    variance = (probabilities * (values - mean[..., None]).square()).sum(dim=-1)
    return mean, variance


def mean_square(
    student: Float[Tensor, "*s B"], teacher: Float[Tensor, "*s B"]
) -> Float[Tensor, "*s"]:
    """Return the squared difference of the mean actions."""
    return (compute_moments(student)[0] - compute_moments(teacher)[0]).square()


def gaussian_kl(
    student: Float[Tensor, "*s B"], teacher: Float[Tensor, "*s B"]
) -> Float[Tensor, "*s"]:
    """Return KL(T || S) of the Gaussians with the means and variances of the actions, in nats.

    Both variances are larger by `SPREAD` squared.
    """
    mean, variance = compute_moments(student)
    teacher_mean, teacher_variance = compute_moments(teacher)
    variance, teacher_variance = variance + SPREAD**2, teacher_variance + SPREAD**2
    ratio = teacher_variance / variance
    return 0.5 * (ratio - 1.0 - ratio.log() + (mean - teacher_mean).square() / variance)
