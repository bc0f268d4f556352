"""The backend `tinker`: the student at a service that speaks the Tinker API; the loop and the objective stay here.

student   what a recipe says of it, and what it refuses
trainer   gradients in two passes, optimizer steps, checkpoints
wire      the tokens whose log-probabilities an objective needs, as the wire has them
"""

from practicum.backends.tinker.student import Config, build, build_on_paper
from practicum.backends.tinker.trainer import ServiceTrainer

__all__ = ["Config", "ServiceTrainer", "build", "build_on_paper"]
