"""Choose the dtype of a model's matrix products, and the precision of float32 products on a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from practicum.backends.local.language_model import LanguageModel
from practicum.models.config import DtypeName, ModelConfig, StudentConfig
from practicum.models.sources import find_base

DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HALVES = ("bfloat16", "float16")
"""The dtypes of a checkpoint that a frozen model reads in bfloat16."""


def choose_dtype(config: ModelConfig, source: str, device: str) -> DtypeName:
    """Return the dtype of a model's products; `device` is the type of device that computes them.

    `auto` is float32 except on CUDA. There a student is bfloat16 over float32 weights, and a frozen
    model has the dtype of its checkpoint. `source` is the folder or hub name of its weights.
    """
    if config.dtype != "auto":
        return config.dtype
    if device != "cuda":
        return "float32"
    if isinstance(config, StudentConfig):
        return "bfloat16"
    settings, _ = PretrainedConfig.get_config_dict(
        find_base(source), trust_remote_code=config.trust_remote_code
    )
    return "bfloat16" if _find_stored_dtype(settings) in HALVES else "float32"


def name_dtype(language_model: LanguageModel) -> DtypeName:
    """Return the dtype of the products of a loaded model."""
    return "bfloat16" if language_model.autocast else "float32"


def _find_stored_dtype(settings: dict[str, Any]) -> str | None:
    """Return the dtype that a config.json states, at its top or for the model of text."""
    for section in (settings, settings.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                return str(section[key]).removeprefix("torch.")
    return None


class FloatProducts:
    """The products in float32 on CUDA of this process: exact once a recipe names `dtype: float32`."""

    are_exact = False


def prepare_products(config: ModelConfig, model: PreTrainedModel, device: torch.device) -> None:
    """Let products in float32 use TF32 on CUDA, unless a model of this process names float32."""
    if device.type != "cuda":
        return
    FloatProducts.are_exact |= config.dtype == "float32"
    torch.set_float32_matmul_precision("highest" if FloatProducts.are_exact else "high")
    keep_angles_exact(model)


class _ExactOuterProducts(TorchFunctionMode):
    """Compute a product over one number as an elementwise one, which TF32 does not round."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func in (torch.matmul, Tensor.matmul, Tensor.__matmul__)
        if is_product and args[0].shape[-1] == 1 and min(map(torch.Tensor.dim, args)) > 1:
            return args[0] * args[1]
        return func(*args, **(kwargs or {}))


_EXACT_OUTER_PRODUCTS = _ExactOuterProducts()


def keep_angles_exact(model: PreTrainedModel) -> None:
    """Keep TF32 out of the angles of rotary embeddings, which would be wrong at distant positions."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(name.endswith("inv_freq") for name in buffers):
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)


def _enter(*_: Any) -> None:
    _EXACT_OUTER_PRODUCTS.__enter__()


def _leave(*_: Any) -> None:
    _EXACT_OUTER_PRODUCTS.__exit__(None, None, None)
