"""Models of this process as a service holds them; see `practicum.ports.hosting`."""

from collections.abc import Generator, Mapping, Sequence

from torch import Tensor

from practicum.backends.local.adapted import add_shared_adapters
from practicum.backends.local.given import forward_backward_targets, forward_targets
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import load
from practicum.backends.local.prompt_scores import score_prompts
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.models.config import Lora, ModelConfig
from practicum.ports import AdamParams
from practicum.ports.hosting import GivenResult, GivenTokens, PromptQuestion, PromptScores, Weights
from practicum.types import Metrics, Sample, SampleRequest, SamplingParams

MIB = 2**20
KEYS_AND_VALUES_MIB = 1024
"""Memory for the keys and values of the answers being decoded; it decides how many are decoded at once."""


class LocalReader:
    """See `practicum.ports.hosting.Reader`."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._model = language_model

    def draw(
        self, requests: Sequence[SampleRequest], params: SamplingParams, weights: Weights
    ) -> Generator[None, None, list[Sample]]:
        """Draw one completion a request, as many at once as memory for their keys and values allows."""
        longest = max(len(request.prompt_tokens) for request in requests) + params.max_new_tokens
        return LocalSampler(self._model, weights or {}, _rows(self._model, longest)).steps(
            requests, params
        )

    def score(self, questions: Sequence[PromptQuestion], weights: Weights) -> list[PromptScores]:
        """Answer questions about prompts."""
        return score_prompts(self._model, weights, questions)

    def bring(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights on the model's device."""
        return {name: tensor.to(self._model.device) for name, tensor in weights.items()}


class LocalAdapters:
    """See `practicum.ports.hosting.Adapters`."""

    def __init__(self, language_model: LanguageModel) -> None:
        self.trainer = LocalTrainer(language_model)

    def forward(self, data: Sequence[GivenTokens]) -> GivenResult:
        """Return the numbers without a gradient."""
        return forward_targets(self.trainer, data)

    def forward_backward(self, data: Sequence[GivenTokens], seed: int) -> GivenResult:
        """Add the gradient of given tokens' losses."""
        return forward_backward_targets(self.trainer, data, seed)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW."""
        return self.trainer.optim_step(params)

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return weights and moments."""
        return self.trainer.save_state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore weights and moments."""
        self.trainer.load_state(tensors)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients, by the names of the weights."""
        parameters = self.trainer.language_model.trainable_parameters()
        return {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Let this be what has been accumulated."""
        for name, weight in self.trainer.language_model.trainable_parameters().items():
            weight.grad = gradients.get(name)

    def reader(self) -> LocalReader:
        """Return the modules with these adapters."""
        return LocalReader(self.trainer.language_model)


class LocalHosted:
    """See `practicum.ports.hosting.Hosted`."""

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

    def reader(self) -> LocalReader:
        """Return the model itself."""
        return LocalReader(self._model)

    def adapt(self, lora: Lora, seed: int, parts: tuple[str, ...]) -> LocalAdapters:
        """Make new adapters over the weights, which are held once."""
        return LocalAdapters(add_shared_adapters(self._model, lora, seed, parts))


def _rows(model: LanguageModel, longest: int) -> int:
    """Return how many texts of that length are decoded at once: what `KEYS_AND_VALUES_MIB` holds, 1 to 64."""
    config = model.model.config.get_text_config().to_dict()
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    a_token = 2 * config["num_hidden_layers"] * heads * width * model.model.dtype.itemsize
    return min(max(KEYS_AND_VALUES_MIB * MIB // (a_token * longest), 1), 64)
