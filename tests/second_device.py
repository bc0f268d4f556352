"""A second device in this process: tensors that wrap tensors of the CPU and refuse to mix with them.

Code that runs on it would run on a GPU: a tensor that was created on the wrong device, or that never moved, is an
error as on a GPU. Every transfer and every value that the program waits for is counted. The numbers are the CPU's.
"""

import functools
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class _DeviceModule:
    """The calls that torch makes to a device module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the device has no separate random numbers."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class SecondTensor(Tensor):
    """A tensor on the second device; `held` has its numbers."""

    held: Tensor
    counts: ClassVar[Counter[str]] = Counter()
    """Transfers to and from the device, and waits for a value of it."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "SecondTensor":
        made: SecondTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SecondTensor({self.held})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        self.counts["waits"] += 1
        return self.held.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: "SecondTensor") -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        device = kwargs.get("device")
        if name == "_to_copy" and device is not None and torch.device(device).type == "cpu":
            cls.counts["to the CPU"] += 1
            return func(args[0].held, **kwargs)
        if name == "copy_" and isinstance(args[0], cls) != isinstance(args[1], cls):
            cls.counts["from the CPU" if isinstance(args[0], cls) else "to the CPU"] += 1
            target, source = (getattr(value, "held", value) for value in args[:2])
            target.copy_(source)
            return args[0]
        if name in ("_local_scalar_dense", "nonzero", "masked_select"):
            cls.counts["waits"] += 1
        if name in INDEXING:
            args = (args[0], [cls._move_index(index) for index in args[1]], *args[2:])
        plain_args = [_unwrap(value) for value in args]
        plain = {key: _unwrap(value) for key, value in kwargs.items()}
        if device is not None:
            plain["device"] = torch.device("cpu")
        result = _wrap(func(*plain_args, **plain))
        return return_and_correct_aliasing(func, args, kwargs, result) if _aliases(func) else result

    @classmethod
    def _move_index(cls, index: Tensor | None) -> Tensor | None:
        """Transfer a CPU index: a tensor of the device may be indexed by one."""
        if index is None or isinstance(index, cls):
            return index
        cls.counts["from the CPU"] += 1
        return cls(index)


def _unwrap(value: Any) -> Any:
    """Return the numbers of a tensor, or of each in a list; a scalar of the CPU may be combined with any device."""
    if isinstance(value, SecondTensor):
        return value.held
    if isinstance(value, Tensor) and value.dim() > 0:
        raise RuntimeError("tensors on two devices")
    return [_unwrap(item) for item in value] if isinstance(value, list | tuple) else value


def _wrap(value: Any) -> Any:
    if isinstance(value, Tensor):
        return SecondTensor(value)
    return type(value)(map(_wrap, value)) if isinstance(value, list | tuple) else value


@functools.cache
def _aliases(func: Any) -> bool:
    """Return True if a result of the operation is one of its arguments, or a view of one."""
    schema = func._schema
    return any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))


def _make_empty(size: Any, dtype: Any = None, **layout: Any) -> Tensor:
    return SecondTensor(torch.empty(size, dtype=dtype))


def _make_strided(size: Any, stride: Any, dtype: Any = None, **layout: Any) -> Tensor:
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))


def _make_range(*bounds: Any, dtype: Any = None, **layout: Any) -> Tensor:
    """Make a range of its final size: torch's own begins empty and resizes it, which a wrapper cannot do."""
    return SecondTensor(torch.arange(*bounds, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a CPU tensor, as `torch.tensor(..., device=...)` does."""
    SecondTensor.counts["from the CPU"] += 1
    target.held.copy_(getattr(source, "held", source))  # type: ignore[attr-defined]
    return target


_setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _make_empty, "PrivateUse1")
_library.impl("empty_strided", _make_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
for _range in ("arange", "arange.start", "arange.start_step"):
    _library.impl(_range, _make_range, "PrivateUse1")
