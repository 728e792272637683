"""Arrays of callers (NumPy, torch) as memory of a kernel, and back."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import enum
import math
import sys
from collections.abc import Callable

import numpy as np

from . import dtypes, errors
from .session import new_bytes
from .tensor import NkiTensor


def _torch() -> object:
    """torch, if the process has it."""
    return sys.modules.get("torch")


def is_torch(x: object) -> bool:
    torch = _torch()
    return torch is not None and isinstance(x, torch.Tensor)


def is_fake(x: object) -> bool:
    """A tensor without data: torch.compile's fake tensors, the meta device."""
    if not is_torch(x):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor) or x.device.type == "meta"


def is_array(x: object) -> bool:
    return isinstance(x, np.ndarray) or is_torch(x)


@dataclasses.dataclass
class Input:
    """An array argument. memory: its bytes, contiguous; `restore` writes them back where they are a copy."""

    array: object
    shape: tuple[int, ...]
    dtype: dtypes.DType
    pointer: int
    memory: object
    is_copy: bool

    def check_writable(self, number: int) -> None:
        """ValueError if the kernel, which writes this argument, cannot."""
        if isinstance(self.array, np.ndarray) and not self.array.flags.writeable:
            raise ValueError(f"the kernel writes its argument {number} (of the arrays, from 0), which is read-only")

    def restore(self) -> None:
        if not self.is_copy:
            return
        if isinstance(self.array, np.ndarray):
            self.array[...] = self.memory
        else:
            self.array.copy_(self.memory)


def sizes(x: object) -> tuple[int, ...]:
    """The shape of an argument; ValueError if there is nothing in it."""
    shape = tuple(int(n) for n in x.shape)  # int: sizes of a dynamic graph are fixed
    if 0 in shape:
        raise ValueError(f"an argument of shape {shape} has no elements: kernels take arrays that have some")
    return shape


def signature(x: object) -> tuple:
    """What of an array a traced kernel depends on."""
    return (sizes(x), str(x.dtype))


def as_input(x: object) -> Input:
    """x as kernel memory: itself where it is contiguous, writable and of this machine's byte order, else a copy."""
    shape, t = sizes(x), dtypes.dtype(x.dtype)
    if isinstance(x, np.ndarray):
        as_it_is = x.flags.c_contiguous and x.flags.writeable and x.dtype.isnative
        memory = x if as_it_is else np.array(x, x.dtype.newbyteorder("="), order="C", copy=True)
        return Input(x, shape, t, memory.ctypes.data, memory, memory is not x)
    detached = x.detach()
    memory = detached.contiguous()
    if memory.device.type == "neuron":  # what its stream still holds comes first, as for every operator
        _torch().neuron.current_stream(memory.device).synchronize()
    return Input(detached, shape, t, memory.data_ptr(), memory, memory.data_ptr() != detached.data_ptr())


class Output:
    """A result: a view of one of the kernel's HBM tensors."""

    def __init__(self, t: NkiTensor) -> None:
        if t.on_chip:
            raise errors.NkiValidationError(f"a kernel returns HBM tensors, {t.name} is in {t.buffer!r}")
        if t.is_indirect():
            raise errors.NkiValidationError(
                f"a kernel returns tensors at fixed places, not a view of {t.name} by a register"
            )
        self.storage, self.shape, self.strides, self.offset, self.dtype = (
            t.storage.id, t.shape, t.strides, t.offset, t.dtype,
        )  # fmt: skip
        self.bytes = math.prod(t.storage.shape) * t.storage.dtype.itemsize


def bytes_of(x: Input) -> object:
    """The memory of an argument as bytes."""
    return x.memory.reshape(-1).view(_torch().uint8 if is_torch(x.memory) else np.uint8)


def new_memory(like: object, size: int, cleared: bool) -> tuple[object, int]:
    """Bytes, 0 if `cleared`, of the same kind and device as `like` (None: NumPy), and their address."""
    if is_torch(like):
        torch = _torch()
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        if cleared:  # now, not when the stream comes to it
            ctypes.memset(memory.data_ptr(), 0, size)
        return memory, memory.data_ptr()
    memory = new_bytes(size, cleared)
    return memory, memory.ctypes.data


def torch_dtype(t: dtypes.DType) -> object:
    """The torch dtype of an NKI type; TypeError if torch has none."""
    name = {"bool_": "bool", "tfloat32": "float32"}.get(str(t), str(t))
    found = getattr(_torch(), name, None)
    if found is None:
        raise TypeError(f"torch has no type for {t}")
    return found


def as_fake(output: Output, like: object) -> object:
    """The output as a tensor without data."""
    return like.new_empty(output.shape, dtype=torch_dtype(output.dtype))


def as_result(output: Output, memory: object, like: object) -> object:
    """The output as an array like `like`. memory: bytes (NumPy or torch) of its storage."""
    if is_torch(like):
        torch = _torch()
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory).to(like.device)
        return torch.as_strided(memory.view(torch_dtype(output.dtype)), output.shape, output.strides, output.offset)
    t = dtypes.numpy_dtype(output.dtype)
    if not memory.size:
        return np.empty(output.shape, t)
    strides = [s * t.itemsize for s in output.strides]
    return np.ndarray(output.shape, t, memory.data, output.offset * t.itemsize, strides).copy()


def replace(value: object, swap: Callable[[object], object]) -> object:
    """`value` with arrays inside tuples, lists, dicts and objects' attributes replaced by swap(array)."""
    if is_array(value):
        return swap(value)
    if isinstance(value, (str, bytes, int, float, bool, type(None), enum.Enum, NkiTensor, type)) or callable(value):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace(v, swap) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replace(v, swap) for v in value)
    if isinstance(value, dict):
        return {k: replace(v, swap) for k, v in value.items()}
    fields = getattr(value, "__dict__", None)
    if not fields or not _holds_array(value):
        return value
    clone = copy.copy(value)
    for k, v in fields.items():
        object.__setattr__(clone, k, replace(v, swap))
    return clone


def _holds_array(value: object, depth: int = 0) -> bool:
    if is_array(value):
        return True
    if depth > 4 or isinstance(value, (str, bytes, int, float, type(None), enum.Enum, type)):
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds_array(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return any(_holds_array(v, depth + 1) for v in value.values())
    return any(_holds_array(v, depth + 1) for v in getattr(value, "__dict__", {}).values())


class Unhashable(Exception):
    """An argument cannot be part of a cache key."""


def key(value: object) -> object:
    """A hashable stand-in for an argument: arrays by signature, the rest by value. Unhashable if there is none."""
    if is_array(value):
        return ("array", signature(value), is_torch(value))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(key(v) for v in value))
    if isinstance(value, dict):
        return ("dict", tuple((k, key(v)) for k, v in value.items()))
    if isinstance(value, float):
        return (type(value), float(value).hex())  # which tells 0.0 from -0.0
    if isinstance(value, (int, bool)):
        return (type(value), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), tuple((f.name, key(getattr(value, f.name))) for f in dataclasses.fields(value)))
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, enum.Enum):
        return (type(value), tuple((k, key(v)) for k, v in vars(value).items()))
    try:
        hash(value)
    except TypeError:
        raise Unhashable from None
    return value
