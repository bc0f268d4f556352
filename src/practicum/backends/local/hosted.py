"""Host models in this process for a service; see `practicum.ports.hosting`."""

from collections.abc import Generator, Mapping, Sequence

from torch import Tensor

from practicum.backends.local.adapters import PARTS, add_adapters
from practicum.backends.local.client_loss import forward_backward_targets, forward_targets
from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import load
from practicum.backends.local.prompt_scores import score_prompts, split_questions
from practicum.backends.local.residency import clone_to
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.sizes import measure_dims
from practicum.backends.local.trainer import LocalTrainer
from practicum.models.config import Lora, ModelConfig
from practicum.ports import AdamParams
from practicum.ports.hosting import GivenResult, GivenTokens, PromptQuestion, PromptScores, Weights
from practicum.types import Metrics, Sample, SampleRequest, SamplingParams


class LocalReader:
    """A hosted model that samples and scores; implements `practicum.ports.hosting.Reader`."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._model = language_model

    def draw(
        self, requests: Sequence[SampleRequest], params: SamplingParams, weights: Weights
    ) -> Generator[None, None, list[Sample]]:
        """Sample one completion per request, as many at once as the device allows."""
        longest = max(len(request.prompt_tokens) for request in requests) + params.max_new_tokens
        rows = _count_rows(self._model, longest)
        return LocalSampler(self._model, weights or {}, rows).run_steps(requests, params)

    def score(
        self, questions: Sequence[PromptQuestion], weights: Weights
    ) -> Generator[None, None, list[PromptScores]]:
        """Answer requests for scores of prompts, and yield after each pass."""
        scores: list[PromptScores] = []
        for part in split_questions(self._model, questions):
            scores += score_prompts(self._model, weights, questions[part])
            yield
        return scores

    def bring(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights on the model's device."""
        return {name: tensor.to(self._model.device) for name, tensor in weights.items()}


class LocalAdapters:
    """Hosted adapters that train; implements `practicum.ports.hosting.Adapters`."""

    def __init__(self, language_model: LanguageModel) -> None:
        self.trainer = LocalTrainer(language_model)

    def forward(self, data: Sequence[GivenTokens]) -> GivenResult:
        """Return target log-probabilities and losses without a gradient."""
        return forward_targets(self.trainer, data)

    def forward_backward(self, data: Sequence[GivenTokens], seed: int) -> GivenResult:
        """Add the gradient of the targets' losses to the accumulated gradients."""
        return forward_backward_targets(self.trainer, data, seed)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW."""
        return self.trainer.optim_step(params)

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights and AdamW's moments."""
        return self.trainer.save_state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the weights and AdamW's moments."""
        self.trainer.load_state(tensors)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, by parameter name."""
        parameters = self.trainer.language_model.trainable_parameters()
        return {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the accumulated gradients."""
        for name, weight in self.trainer.language_model.trainable_parameters().items():
            weight.grad = gradients.get(name)

    def build_reader(self) -> LocalReader:
        """Return a reader of the model with these adapters."""
        return LocalReader(self.trainer.language_model)


class LocalHosted:
    """A hosted base model; implements `practicum.ports.hosting.Hosted`."""

    def __init__(self, config: ModelConfig) -> None:
        loaded = load(config)
        self._model = loaded.language_model
        self.source = loaded.source
        self.renderer = loaded.renderer
        self.context_length = loaded.context_length
        self.vocab_size = self._model.vocab_size
        self.architecture = self._model.model.config.model_type
        storages = [weight.untyped_storage() for weight in self._model.model.parameters()]
        self.size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def build_reader(self) -> LocalReader:
        """Return a reader of the base model."""
        return LocalReader(self._model)

    def adapt(self, lora: Lora, seed: int, parts: tuple[str, ...]) -> LocalAdapters:
        """Add new adapters around the weights, which are stored once."""
        return LocalAdapters(add_shared_adapters(self._model, lora, seed, parts))


def add_shared_adapters(
    base: LanguageModel, lora: Lora, seed: int, parts: tuple[str, ...] = PARTS
) -> LanguageModel:
    """Return a model with new trainable adapters that shares the weights of `base`.

    `base` itself does not change.
    """
    adapted = clone_to(base.device, base)
    layers = adapted.model.config.get_text_config().num_hidden_layers
    add_adapters(adapted.model, lora, seed, list(range(layers)), parts)
    for parameter in adapted.trainable_parameters().values():
        parameter.data = parameter.data.float()
    return adapted


def _count_rows(model: LanguageModel, longest: int) -> int:
    """Return how many texts of length `longest` the device can decode at once, at least 1."""
    dims, limits = measure_dims(model), find_limits(model.device)
    token_bytes = 2 * dims.layers * dims.kv_heads * dims.head_dim * model.model.dtype.itemsize
    return min(max(limits.service_bytes // (token_bytes * longest), 1), limits.service_rows)
