"""A causal language model cut in two: a body that gives hidden states, and the head that reads them."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from practicum.backends.local.attention import AttentionLayout
from practicum.errors import ModelError
from practicum.functional.head import Head

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
"""Under which names a config says how many tokens the model was made for, the usual one first."""

UNBOUNDED = 1 << 20
"""The context of a model whose config names none: it has no table of positions that could end (Mamba, ALiBi)."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Any `AutoModelForCausalLM`; `vocab_size` counts the tokenizer's tokens, not the rows of the embedding.

    Texts of at most `packs_up_to` tokens can be laid end to end (see `practicum.backends.local.packing.enable_packing`).
    `unsampled` says why the model cannot be sampled from, and is empty where it can (see `practicum.backends.local.trial`).
    Where a completion is to stop at texts, its tokens are read with the `tokenizer`.
    """

    model: PreTrainedModel
    vocab_size: int
    autocast: bool = False
    packs_up_to: int = 0
    unsampled: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def context_length(self) -> int:
        """The longest sequence the model was made for."""
        config = self.model.config.get_text_config()
        described, renamed = config.to_dict(), config.attribute_map
        lengths = (described.get(renamed.get(name, name)) for name in LENGTHS)
        return next((int(length) for length in lengths if length), UNBOUNDED)

    @property
    def exact(self) -> bool:
        """Whether what is computed twice in different ways may differ by the rounding of float32 alone."""
        return self.model.dtype == torch.float32 and not self.autocast

    @property
    def window(self) -> int | None:
        """The fewest last tokens that a layer sees, or None where all of them see everything."""
        cache = DynamicCache(config=self.model.config)
        layers = zip(cache.layers, cache.is_sliding, strict=True)
        return min(
            (int(layer.get_max_length()) for layer, sliding in layers if sliding), default=None
        )

    @property
    def recurrent(self) -> bool:
        """Whether a layer keeps a state of all that was read, in place of keys and values of each token."""
        layers = DynamicCache(config=self.model.config).layers
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)

    def body(
        self, input_ids: Int[Tensor, "B L"], attention_mask: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L D"]:
        """The last hidden states."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = find_body(self.model)(
                input_ids=input_ids,
                attention_mask=attention_mask.long(),
                position_ids=_positions(attention_mask),
                use_cache=False,
            )
        return output.last_hidden_state

    def body_after(
        self,
        cache: Cache | None,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B M"],
    ) -> tuple[Float[Tensor, "B L D"], Cache]:
        """Return the last hidden states of texts that go on from a cache, and the cache with them in it.

        `attention_mask` covers what is in the cache too (M = cached + L). Without a cache the model makes one of its own kind.
        Raises ModelError where the model keeps what it has read in no cache of transformers.
        """
        body, length = find_body(self.model), input_ids.shape[1]
        names = inspect.signature(body.forward).parameters
        name, mask = "past_key_values", attention_mask
        if "cache_params" in names:  # no attention: nothing but the new tokens is masked
            name, mask = "cache_params", attention_mask[:, -length:]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = body(
                input_ids=input_ids,
                attention_mask=mask.long(),
                position_ids=_positions(attention_mask)[:, -length:],
                use_cache=True,
                **{name: cache},
            )
        if name not in names or not isinstance(output.get(name), Cache):
            raise ModelError(
                f"{type(body).__name__} keeps what it has read in no cache of transformers"
            )
        return output.last_hidden_state, output[name]

    def forward_packed(
        self, input_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], layout: AttentionLayout
    ) -> Float[Tensor, "T D"]:
        """The last hidden states of texts laid end to end, each token at its position in its own text."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = find_body(self.model)(
                input_ids=input_ids[None],
                position_ids=positions[None],
                attention_mask=input_ids.new_zeros(
                    1, 1, 1, 1
                ),  # a mask made ready: transformers adds none of its own
                use_cache=False,
                layout=layout,
            )
        return output.last_hidden_state[0]

    def head(self) -> Head:
        """The head over the live weights; its gradient reaches them."""
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, torch.nn.Linear), "a causal language model ends in a linear head"
        config = self.model.config.get_text_config().to_dict()
        multiplier = config.get("logit_scale") or config.get("lm_head_multiplier")
        scale = multiplier or 1.0 / (config.get("logits_scaling") or 1.0)
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
        difference = (
            (split - torch.log_softmax(whole[..., : self.vocab_size], dim=-1)).abs().max().item()
        )
        if difference > (1e-3 if self.exact else 0.2):
            raise ModelError(
                f"{self.model.name_or_path}: {type(self.model).__name__} changes its logits after the head in a way that is "
                f"not known here (log-probabilities differ by {difference:.2g}); use another architecture"
            )

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that learn, by name."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @contextlib.contextmanager
    def weights(self, overlay: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the named parameters have the overlay's values; the live ones come back after it."""
        # Replacing `.data` and not the parameter keeps what modules, tied weights and the optimizer hold, and copies nothing. Every
        # thread that uses these modules sees the overlay, so no other thread may run them meanwhile: a snapshot for sampling
        # ahead has modules of its own.
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
def patch_forwards(forwards: Mapping[torch.nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Within the block the modules compute with other functions than their own."""
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = (
                forward  # found on the module itself before its class is asked
            )
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


def _positions(attention_mask: Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """Each token's position in its own text, padding left out."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)


def find_body(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a causal language model that gives its last hidden states, which is all of it but the head.

    transformers looks it up by a name, and gives the whole model where a class keeps it under another one (Llama 4).
    """
    if model.base_model is not model:
        return model.base_model
    bodies = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(bodies) != 1:
        raise ModelError(
            f"{model.name_or_path}: no body was found in {type(model).__name__}; use another architecture"
        )
    return bodies[0]


def find_layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    """The list of a model's layers: the one with as many modules as its config counts; None where there is no such list."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (
        module for module in find_body(model).modules() if isinstance(module, torch.nn.ModuleList)
    )
    return next((module for module in lists if len(module) == count), None)
