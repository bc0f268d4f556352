"""The base of all learned scorers: their model, its optimizer, and their share of the prompts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import ModelError
from practicum.models.config import FinishedStage, StudentConfig
from practicum.models.tensors import SavedTensor, read_tensors
from practicum.ports import AdamParams, ScalarModel
from practicum.ports.scoring import Scorer, ScorerContext, ScorerSettings, name_role
from practicum.types import Metrics, Rollout, ScoreRequest

Loss = Callable[[Float[Tensor, " N"]], Tensor]
"""The loss of a scorer as a function of all predictions of its model."""


class LearnedConfig(ScorerSettings):
    """The settings of every learned scorer."""

    model: StudentConfig | None = Field(
        default=None,
        description="model to initialize the body from, and its trainable parts; none: a copy of "
        "the initial student",
    )
    begin: FinishedStage | None = Field(
        default=None,
        description="stage to continue training the scorer of the same name from, as `{model: "
        "{stage: NAME}}`",
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, description="learning rate of the scorer's AdamW optimizer"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="maximum norm of its gradient")
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="first steps in which the scorer learns but returns no judgements, so that the "
        "student learns nothing from it",
    )
    updates: int = Field(
        default=1, ge=1, description="optimizer steps of the scorer per training step"
    )

    @property
    def loads_scalar(self) -> bool:
        """True: every learned scorer loads a scalar model."""
        return True

    @property
    def scalar_model(self) -> StudentConfig | None:
        """The settings of the scorer's model."""
        return self.model

    def build_adam_params(self) -> AdamParams:
        """Return the settings of the scorer's optimizer, without weight decay."""
        return AdamParams(self.learning_rate, max_grad_norm=self.max_grad_norm)


class LearnedScorer(Scorer):
    """A scorer with a model of one number per token; `steps` counts the steps that it learned from."""

    def __init__(self, config: LearnedConfig, context: ScorerContext) -> None:
        self._updates = config.updates
        self._warmup_steps = config.warmup_steps
        self._adam = config.build_adam_params()
        self._model = self.open_model(config, context)
        self._seed = context.seed
        self.steps = 0
        if config.begin is not None and not context.is_dry_run:
            path = find_state(config.begin.model, context.name)
            context.register_file(path)
            self.load_state(read_tensors(path))

    def open_model(self, config: LearnedConfig, context: ScorerContext) -> ScalarModel:
        """Return the scorer's model; by default a separate body."""
        return context.load_scalar(config.model)

    @property
    def is_warming_up(self) -> bool:
        """True while the scorer learns but returns no judgements."""
        return self.steps < self._warmup_steps

    def predict_ends(self, rollouts: Sequence[Rollout]) -> Float[Tensor, " B"]:
        """Return the model's number after the last token of each rollout."""
        numbers = self._model.predict(list(map(end_text, rollouts)))
        return torch.stack([row[-1] for row in numbers]) if rollouts else torch.zeros(0)

    def descend(self, texts: Sequence[ScoreRequest], compute_loss: Loss) -> Metrics:
        """Run the scorer's updates; return the loss and gradient norm of the first update.

        `skipped` counts the updates with a gradient that was not finite.
        """
        metrics: Metrics = {}
        skipped = 0.0
        for _ in range(self._updates):
            # Use two passes. The gradient of the loss with respect to the predictions is computed
            # over the whole batch before the first micro-batch. The split into micro-batches
            # therefore does not change the result, and no graph spans several micro-batches.
            numbers = torch.cat(self._model.predict(texts)).requires_grad_()
            loss = compute_loss(numbers)
            (slopes,) = torch.autograd.grad(loss, numbers)
            lengths = [len(text.tokens) for text in texts]
            step = self._model.fit(texts, slopes.split(lengths), self._adam)
            metrics = metrics or {"loss": loss.item(), **step}
            skipped += step.get("skipped", 0.0)
        return {**metrics, "skipped": skipped}

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the model's weights and moments, and the count of steps."""
        return {**self._model.save_state(), "steps": torch.tensor([self.steps])}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `save_state` returned."""
        if tensors:
            weights = dict(tensors)
            self.steps = int(weights.pop("steps").item())
            self._model.load_state(weights)


def find_state(model: str, name: str) -> Path:
    """Return the file of a scorer's newest state in the stage that a model folder belongs to."""
    folder = Path(model).parent / "checkpoints"
    paths = folder.glob(f"step-*/{name_role(name)}.safetensors")
    newest = max(paths, key=lambda path: int(path.parent.name.partition("-")[2]), default=None)
    if newest is None:
        raise ModelError(
            f"scorers.{name}.begin: {folder} holds no state of a scorer {name!r}; set a stage in "
            "which this scorer learned"
        )
    return newest


def end_text(rollout: Rollout) -> ScoreRequest:
    """Return a request for a single number, predicted after the rollout's last token."""
    return ScoreRequest((*rollout.prompt_tokens, *rollout.tokens.tolist()), (0,))


def is_own(seed: int, share: float, prompt_id: str) -> bool:
    """Return True if a prompt belongs to the share of prompts that a scorer learns from."""
    # Seeds are uniform below 2**63, so the seed itself is the coin.
    return seed_of(seed, "split", prompt_id) < share * 2**63
