"""A causal language model in two parts: a body that computes hidden states, and its head."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from practicum.backends.local.attention import AttentionLayout
from practicum.backends.local.pictures import Pictures
from practicum.backends.local.rotary import find_stretched_length
from practicum.errors import ModelError
from practicum.functional.head import Head

CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
"""The config keys that hold the context length in tokens, the most common key first."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""The names of the cache of bodies; the first is used since transformers 5.24."""

UNBOUNDED = 1 << 20
"""The context length of models without a table of positions (Mamba, ALiBi)."""


class Decoding(StrEnum):
    """The implementations of decoding; their tokens differ only by rounding."""

    TORCH = "torch"
    """Transformers' modules."""
    NATIVE = "native"
    """The compiled step; see `practicum.backends.local.native`."""
    FLASH_GRAPH = "graph with flash attention"
    """The static step with torch's flash kernel; see `practicum.backends.local.static`."""
    MASKED_GRAPH = "graph with masked attention"
    """The static step with a mask."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """An `AutoModelForCausalLM` with the facts that this backend has measured about it.

    `vocab_size` counts the tokenizer's tokens, not the rows of the embedding. Texts of at most
    `max_packed_tokens` tokens can be packed (see
    `practicum.backends.local.packing.enable_packing`). `no_sampling_reason` explains why the model
    cannot be sampled from; it is empty if it can (see `practicum.backends.local.trial`). The
    `tokenizer` decodes completions that stop at texts. `decoding` is the implementation that
    samples completions. `longest_text` is the longest text, in tokens, for which the model's rotary
    frequencies are fixed; None if they do not depend on length (see
    `practicum.backends.local.rotary`). `pictures` holds the pictures that the ids of a batch may name;
    such a model packs no texts, and reads a prompt's pictures together with all of its tokens.
    """

    model: PreTrainedModel
    vocab_size: int
    autocast: bool = False
    max_packed_tokens: int = 0
    no_sampling_reason: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None
    decoding: Decoding = Decoding.TORCH
    longest_text: int | None = None
    pictures: Pictures | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def context_length(self) -> int:
        """The longest sequence that the model was made for, in tokens."""
        config = self.model.config.get_text_config()
        stretched = find_stretched_length(config)
        if stretched is not None:
            return stretched
        described, renamed = config.to_dict(), config.attribute_map
        lengths = (described.get(renamed.get(name, name)) for name in CONTEXT_LENGTH_KEYS)
        return next((int(length) for length in lengths if length), UNBOUNDED)

    def check_length(self, tokens: int) -> None:
        """Raise ModelError if a text of `tokens` tokens needs other rotary frequencies."""
        if self.longest_text is not None and tokens > self.longest_text:
            raise ModelError(
                f"{self.model.name_or_path}: a text of {tokens} tokens, but the rotary frequencies are "
                f"fixed for texts of up to {self.longest_text}; set longest_text: {tokens} where the "
                "recipe names this model"
            )

    @property
    def is_exact(self) -> bool:
        """True if two ways to compute the same thing differ only by the rounding of float32."""
        return self.model.dtype == torch.float32 and not self.autocast

    @property
    def window(self) -> int | None:
        """The smallest sliding window, in tokens, or None if every layer sees all tokens."""
        cache = DynamicCache(config=self.model.config)
        layers = zip(cache.layers, cache.is_sliding, strict=True)
        lengths = (int(layer.get_max_length()) for layer, sliding in layers if sliding)
        return min(lengths, default=None)

    @property
    def row_limit(self) -> int | None:
        """The maximum tokens of a row with padding or several texts; None without a limit.

        Llama 4 scales queries by their position in the row, starting at `floor_scale` tokens.
        """
        described = self.model.config.get_text_config().to_dict()
        scale = described.get("floor_scale") if described.get("attn_temperature_tuning") else None
        return None if scale is None else int(scale) - 1

    @property
    def is_recurrent(self) -> bool:
        """True if a layer keeps a recurrent state instead of keys and values for each token."""
        layers = DynamicCache(config=self.model.config).layers
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)

    @property
    def attends(self) -> bool:
        """True if a layer keeps keys and values of each token; false for a pure state-space model."""
        layers = DynamicCache(config=self.model.config).layers
        return any(isinstance(layer, CacheLayerMixin) for layer in layers)

    def body(
        self, input_ids: Int[Tensor, "B L"], attention_mask: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L D"]:
        """Return the last hidden states of a padded batch."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = find_body(self.model)(
                **self._read(input_ids, attention_mask),
                attention_mask=attention_mask.long(),
                use_cache=False,
            )
        return output.last_hidden_state

    def extend_body(
        self,
        cache: Cache | None,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B M"],
        offsets: Int[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Cache]:
        """Continue cached texts; return the new tokens' last hidden states and the longer cache.

        `attention_mask` also covers the cached tokens (M = cached + L). Without a cache the model
        creates a suitable one. `offsets` are added to the positions after cached pictures; see
        `measure_offsets`. Raises ModelError if the model does not use a transformers cache.
        """
        body, length = find_body(self.model), input_ids.shape[1]
        parameters = inspect.signature(body.forward).parameters
        name = next((name for name in CACHE_NAMES if name in parameters), None)
        # A pure state-space model has no attention, so only the new tokens need a mask.
        mask = attention_mask if self.attends else attention_mask[:, -length:]
        arguments = self._read(input_ids, attention_mask)
        if offsets is not None:
            arguments["position_ids"] = arguments["position_ids"] + offsets[:, None]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = body(
                **arguments,
                attention_mask=mask.long(),
                use_cache=True,
                **({name: cache} if name else {}),
            )
        if name is None or not isinstance(output.get(name), Cache):
            raise ModelError(f"{type(body).__name__} does not use a transformers cache")
        return output.last_hidden_state, output[name]

    def _read(
        self, input_ids: Int[Tensor, "B L"], attention_mask: Bool[Tensor, "B M"]
    ) -> dict[str, Tensor]:
        """Return the body's arguments for new tokens: ids, positions, and the pictures they name."""
        positions = _count_positions(attention_mask)[:, -input_ids.shape[1] :]
        arguments = {"input_ids": input_ids, "position_ids": positions}
        if self.pictures is None:
            return arguments
        body = find_body(self.model)
        return arguments | self.pictures.collect(body, input_ids, attention_mask)

    def measure_offsets(
        self, input_ids: Int[Tensor, "B L"], attention_mask: Bool[Tensor, "B L"]
    ) -> Int[Tensor, " B"] | None:
        """Return how far the positions of later tokens differ from their places in the texts.

        A picture has fewer positions than tokens in some models (Qwen). None if no text has one.
        """
        positions = self._read(input_ids, attention_mask)["position_ids"]
        if positions.ndim == 2:
            return None
        return positions.amax(dim=(0, 2)) + 1 - attention_mask.sum(dim=1)

    def forward_packed(
        self, input_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], layout: AttentionLayout
    ) -> Float[Tensor, "T D"]:
        """Return the last hidden states of packed texts; `positions` count within each text."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            output = find_body(self.model)(
                input_ids=input_ids[None],
                position_ids=positions[None],
                # transformers does not change a mask with four axes, and builds no causal mask.
                attention_mask=input_ids.new_zeros(1, 1, 1, 1),
                use_cache=False,
                layout=layout,
            )
        return output.last_hidden_state[0]

    def head(self) -> Head:
        """Return the head over the live weights; gradients reach these weights."""
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, torch.nn.Linear), "a causal language model ends in a linear head"
        config = self.model.config.get_text_config().to_dict()
        multiplier = config.get("logit_scale") or config.get("lm_head_multiplier")
        scale = multiplier or 1.0 / (config.get("logits_scaling") or 1.0)
        # Trained weights are float32: their products use a copy that is rounded once per call.
        is_rounded = self.autocast and layer.weight.dtype == torch.float32
        rows = layer.weight.detach()[: self.vocab_size]
        return Head(
            weight=layer.weight,
            vocab_size=self.vocab_size,
            bias=layer.bias,
            scale=float(scale),
            softcap=config.get("final_logit_softcapping"),
            operand=rows.to(torch.bfloat16) if is_rounded else None,
        )

    @torch.no_grad()
    def check_split(self) -> None:
        """Raise ModelError unless body and head together give the model's own log-probabilities."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        mask = torch.ones_like(ids, dtype=torch.bool)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=ids, attention_mask=mask.long()).logits.float()
        if not torch.isfinite(logits).all():
            raise ModelError(
                f"{self.model.name_or_path}: the model's logits are not finite on a short probe, "
                "so its weights hold NaN or infinite values; download or convert them again"
            )
        expected = torch.log_softmax(logits[..., : self.vocab_size], dim=-1)
        split = self.head().logprobs(self.body(ids, mask))
        difference = (split - expected).abs().max().item()
        if difference > (1e-3 if self.is_exact else 0.2):
            raise ModelError(
                f"{self.model.name_or_path}: {type(self.model).__name__} changes its logits after "
                "the head in a way that is not known here (log-probabilities differ by "
                f"{difference:.2g}); use another architecture"
            )

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def weights(self, overlay: Mapping[str, Tensor]) -> Iterator[None]:
        """Give parameters the overlay's values by name within the block, then restore them."""
        # Swap `.data`, not the parameter: modules, tied weights and the optimizer keep their
        # references, and nothing is copied. Every thread that uses these modules sees the overlay,
        # so no other thread may run them in the meantime. A snapshot for sampling ahead has its own
        # modules.
        parameters = dict(self.model.named_parameters()) if overlay else {}
        live = {name: parameters[name].data for name in overlay}
        try:
            for name, tensor in overlay.items():
                parameters[name].data = tensor
            yield
        finally:
            for name, tensor in live.items():
                parameters[name].data = tensor


@contextlib.contextmanager
def record_layers(model: LanguageModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect the states after each of these numbers of layers, pass by pass, within the block."""
    states: list[Tensor] = []
    if not layers:
        yield states
        return

    def keep(_module: torch.nn.Module, _inputs: object, output: Tensor | tuple[Tensor]) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    modules = find_layers(model.model)
    assert modules is not None, "the layers were chosen among the model's"
    hooks = [modules[layer - 1].register_forward_hook(keep) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def patch_forwards(forwards: Mapping[torch.nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Replace the modules' forward functions within the block."""
    # An entry in the instance's dict overrides the class; an enclosing block may have added an
    # entry.
    outer = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward in outer.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _count_positions(attention_mask: Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """Return each token's position in its text, not counting padding."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)


def find_body(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that computes the last hidden states: all except the head."""
    # transformers finds the body by an attribute's name and returns the full model if a class uses
    # another name (Llama 4).
    if model.base_model is not model:
        return model.base_model
    bodies = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(bodies) != 1:
        raise ModelError(
            f"{model.name_or_path}: no body was found in {type(model).__name__}; use another "
            "architecture"
        )
    return bodies[0]


def find_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the body's part that reads tokens: all of it, except in a model that also reads pictures."""
    if model.config.get_text_config() is model.config:
        return find_body(model)
    return model.get_decoder()


def find_layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    """Return the list with as many modules as the config has layers, or None."""
    count = model.config.get_text_config().num_hidden_layers
    modules = find_decoder(model).modules()
    lists = (module for module in modules if isinstance(module, torch.nn.ModuleList))
    return next((module for module in lists if len(module) == count), None)
