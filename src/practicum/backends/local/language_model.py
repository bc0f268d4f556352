"""A causal language model cut in two: a body that gives hidden states, and the head that reads them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from practicum.backends.local.attention import Layout
from practicum.errors import ModelError
from practicum.types import Head


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Any `AutoModelForCausalLM`; `vocab_size` counts the tokenizer's tokens, not the rows of the embedding.

    Texts of at most `packs_up_to` tokens can be laid end to end (see `practicum.backends.local.packing.ready_to_pack`).
    """

    model: PreTrainedModel
    vocab_size: int
    autocast: bool = False
    packs_up_to: int = 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def context_length(self) -> int:
        """The longest sequence the model was made for."""
        return int(self.model.config.get_text_config().max_position_embeddings)

    @property
    def window(self) -> int | None:
        """The fewest last tokens that a layer sees, or None where all of them see everything."""
        cache = self.new_cache()
        layers = zip(cache.layers, cache.is_sliding, strict=True)
        return min((int(layer.get_max_length()) for layer, sliding in layers if sliding), default=None)

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache."""
        return DynamicCache(config=self.model.config)

    def body(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B M"],
        cache: DynamicCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """The last hidden states; `attention_mask` also covers what is in the cache (M = cached + L)."""
        positions = (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)[:, -input_ids.shape[1] :]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = self.model.base_model(
                input_ids=input_ids,
                attention_mask=attention_mask.long(),
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return output.last_hidden_state

    def packed(
        self, input_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], layout: Layout
    ) -> Float[Tensor, "T D"]:
        """The last hidden states of texts laid end to end, each token at its position in its own text."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = self.model.base_model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                attention_mask=input_ids.new_zeros(1, 1, 1, 1),  # a mask made ready: transformers adds none of its own
                use_cache=False,
                layout=layout,
            )
        return output.last_hidden_state[0]

    def head(self) -> Head:
        """The head over the live weights; its gradient reaches them."""
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, torch.nn.Linear), "a causal language model ends in a linear head"
        config = self.model.config.get_text_config().to_dict()
        scale = config.get("logit_scale") or 1.0 / (config.get("logits_scaling") or 1.0)
        return Head(
            weight=layer.weight,
            vocab_size=self.vocab_size,
            bias=layer.bias,
            scale=float(scale),
            softcap=config.get("final_logit_softcapping"),
        )

    @torch.no_grad()
    def check_split(self) -> None:
        """ModelError unless body and head together give the model's own log-probabilities."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        mask = torch.ones_like(ids, dtype=torch.bool)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            whole = self.model(input_ids=ids, attention_mask=mask.long()).logits.float()
        if not torch.isfinite(whole).all():
            raise ModelError(
                f"{self.model.name_or_path}: the model's logits are not finite on a short probe, so its weights hold NaN or "
                "infinite values; download or convert them again"
            )
        split = self.head().logprobs(self.body(ids, mask))
        difference = (split - torch.log_softmax(whole[..., : self.vocab_size], dim=-1)).abs().max().item()
        tolerance = 1e-3 if self.model.dtype == torch.float32 and not self.autocast else 0.2
        if difference > tolerance:
            raise ModelError(
                f"{self.model.name_or_path}: {type(self.model).__name__} changes its logits after the head in a way that is "
                f"not known here (log-probabilities differ by {difference:.2g}); use another architecture"
            )

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @contextlib.contextmanager
    def weights(self, overlay: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the named parameters have the overlay's values; the live ones come back after it."""
        parameters = dict(self.model.named_parameters()) if overlay else {}
        live = {name: parameters[name].data for name in overlay}
        try:
            for name, value in overlay.items():
                parameters[name].data = value
            yield
        finally:
            for name, value in live.items():
                parameters[name].data = value


@contextlib.contextmanager
def forwards_exchanged(forwards: Mapping[torch.nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Within the block the modules compute with other functions than their own."""
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward  # found on the module itself before its class is asked
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


def find_layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    """The list of a model's layers: the one with as many modules as its config counts; None where there is no such list."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList))
    return next((module for module in lists if len(module) == count), None)
