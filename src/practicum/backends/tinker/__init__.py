"""The backend `tinker`: the student at a Tinker API service; the loop and the objective stay here.

student   the settings of the student, unsupported recipes, and the backend
probing   trials of how a service handles targets and optimizer settings
trainer   gradients in two passes, optimizer steps, checkpoints
wire      the requests for the log-probabilities that an objective needs
"""

from practicum.backends.tinker.student import Config, build, build_on_paper
from practicum.backends.tinker.trainer import ServiceTrainer

__all__ = ["Config", "ServiceTrainer", "build", "build_on_paper"]
