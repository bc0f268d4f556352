"""Run the compiled decode step; see `practicum.backends.local.decode_step.StepProgram`."""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.decode_step import DecodeJob, LayerStates, TokenTree, copy_heads
from practicum.backends.local.llama_weights import LlamaWeights, compute_rotations
from practicum.backends.local.native.library import NativeLibrary
from practicum.backends.local.native.packed_copies import PackJob, pack_weights
from practicum.backends.local.native.product import PackedProduct, pack_columns
from practicum.functional.head import Head

LAYER_FIELDS = (
    "input_layernorm.weight",
    "qkv",
    "qkv_bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
    "post_attention_layernorm.weight",
    "gate_up",
    "mlp.down_proj.weight",
)
"""The fields of `layer` in step.c, in order."""


class _LayerStruct(ctypes.Structure):
    _fields_ = tuple((name.replace(".", "_"), ctypes.c_void_p) for name in LAYER_FIELDS)


class _ModelStruct(ctypes.Structure):
    """The struct `model` of step.c."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("layers", "width", "heads", "groups", "head_width")),
        *((name, ctypes.c_long) for name in ("inner", "slots", "longest", "captures")),
        ("captured", ctypes.c_void_p),
        ("layer", ctypes.POINTER(_LayerStruct)),
        *((name, ctypes.c_void_p) for name in ("embedding", "final_norm", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    )


class NativeStep:
    """The compiled step over a packed copy of the weights; see `StepProgram`.

    The bits of a row do not depend on the rest of the batch or on the number of threads.
    """

    @torch.no_grad()
    def __init__(self, job: DecodeJob, library: NativeLibrary, weights: LlamaWeights) -> None:
        self.lower: Float[Tensor, "B N F"] | None = None
        self._captured = torch.tensor(job.captured, dtype=torch.long)
        self._slots, self._zeros = torch.arange(job.rows), torch.zeros(job.rows, dtype=torch.long)
        self._library = library
        self._width = weights.embedding.shape[1]
        head = job.language_model.head()
        self._head = head.detached()
        *layers, packed_head = pack_weights(
            job.language_model,
            job.overlay,
            [_plan_packing(layer, library.panel) for layer in weights.layers]
            + [_plan_packing_head(head, library.panel)],
        )
        shape = len(layers), job.rows, weights.groups, job.longest, weights.head_width
        self._keys, self._values = torch.empty(shape), torch.empty(shape)
        cosines, sines = compute_rotations(
            job.language_model, weights.head_width, job.longest, torch.float32
        )
        # The struct holds addresses: these tensors must live as long as the struct.
        self._tensors = [layers, weights, cosines, sines]
        table = (_LayerStruct * len(layers))(
            *(
                _LayerStruct(*(_find_address(layer.get(name)) for name in LAYER_FIELDS))
                for layer in layers
            )
        )
        self._model = _ModelStruct(
            len(layers),
            self._width,
            weights.heads,
            weights.groups,
            weights.head_width,
            weights.inner,
            job.rows,
            job.longest,
            len(job.captured),
            _find_address(self._captured),
            table,
            *map(_find_address, (weights.embedding, weights.final_norm, cosines, sines)),
            *map(_find_address, (self._keys, self._values)),
            weights.epsilon,
            weights.head_width**-0.5,
        )
        self._threads = torch.get_num_threads()
        rows = job.rows * job.tokens_per_read
        room = library.call("measure_room", self._model, rows, threads=self._threads)
        self._room = torch.empty(room)
        bias = None if head.bias is None else head.bias.detach()[: head.vocab_size]
        self._product = PackedProduct(library, packed_head["weight"], head.vocab_size, bias)

    def store_prompt(
        self, slot: int, states: Mapping[int, LayerStates], indices: Int[Tensor, " L"]
    ) -> None:
        """Put a prompt's keys and values into a slot; `indices` selects its tokens in `states`."""
        for layer, (keys, values) in states.items():
            self._keys[layer, slot, :, : len(indices)] = keys[indices].transpose(0, 1)
            self._values[layer, slot, :, : len(indices)] = values[indices].transpose(0, 1)

    def move_slot(self, source: int, slot: int, length: int) -> None:
        """Copy a text of `length` tokens to another slot."""
        for store in (self._keys, self._values):
            store[:, slot, :, :length] = store[:, source, :, :length]

    def read_slot(self, slot: int, length: int) -> dict[int, LayerStates]:
        """Return a copy of a text's keys and values by layer."""
        return {
            layer: copy_heads(stores, slot, length)
            for layer, stores in enumerate(zip(self._keys, self._values, strict=True))
        }

    def move_places(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Put the tokens at these places after the text next to each other."""
        for store in (self._keys, self._values):
            places = store[:, slot, :, length:]
            places[:, :, : len(nodes)] = places[:, :, list(nodes)]

    def read(
        self, tokens: Int[Tensor, "B N"], lengths: Sequence[int], tree: TokenTree | None = None
    ) -> Float[Tensor, "B N D"]:
        """Read tokens after texts; return the hidden states that predict the next ones."""
        batch, count = tokens.shape
        hidden = torch.empty(batch, count, self._width)
        captures = len(self._captured)
        self.lower = torch.empty(batch, count, captures * self._width) if captures else None
        slots, ends, reach = self._slots, torch.tensor(lengths), 1
        depths = branches = self._zeros
        if tree is not None:
            slots = slots[:batch].repeat_interleave(count)
            ends, depths = ends.repeat_interleave(count), tree.depths.repeat(batch)
            branches = tree.list_branches()
            reach = branches.shape[-1]
        self._library.call(
            "advance",
            *(self._model, batch * count, reach, tokens.contiguous(), slots, ends),
            *(depths, branches, hidden, self.lower, self._room),
            threads=self._threads,
        )
        return hidden

    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Return the logits of the next tokens, without a gradient."""
        return self._head.scaled_and_capped(self._product(hidden))


def _plan_packing(layer: Mapping[str, Tensor], panel: int) -> PackJob:
    return PackJob(list(layer.values()), panel, lambda: _pack_layer(layer, panel))


def _plan_packing_head(head: Head, panel: int) -> PackJob:
    # Use `detach`: `data` has a separate version, which does not increase when the weight changes.
    rows = head.weight.detach()[: head.vocab_size]
    return PackJob([rows], panel, lambda: {"weight": pack_columns(rows, panel)})


def _pack_layer(layer: Mapping[str, Tensor], panel: int) -> dict[str, Tensor]:
    """Return a layer's tensors as step.c reads them: queries, keys and values in one product."""
    packed = {name: weight.contiguous() for name, weight in layer.items() if name in LAYER_FIELDS}
    maps = [f"self_attn.{name}_proj" for name in "qkv"]
    packed["qkv"] = pack_columns(torch.cat([layer[f"{name}.weight"] for name in maps]), panel)
    if any(f"{name}.bias" in layer for name in maps):
        biases = (
            layer.get(
                f"{name}.bias", layer[f"{name}.weight"].new_zeros(len(layer[f"{name}.weight"]))
            )
            for name in maps
        )
        packed["qkv_bias"] = torch.cat(list(biases))
    gate_up = (pack_columns(layer[f"mlp.{name}_proj.weight"], panel) for name in ("gate", "up"))
    packed["gate_up"] = torch.cat(list(gate_up))
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        packed[name] = pack_columns(layer[name], panel)
    return packed


def _find_address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
