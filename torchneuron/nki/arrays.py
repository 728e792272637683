"""Arrays of callers (NumPy, torch) as memory of a kernel, and back."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import enum
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable

import numpy as np

from . import dtypes, errors
from .ops import Op
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


def holds_fake(x: object) -> bool:
    """Is x a tensor without data, or a tuple, list or dict with one?"""
    if isinstance(x, (tuple, list)):
        return any(map(holds_fake, x))
    return any(map(holds_fake, x.values())) if isinstance(x, dict) else is_fake(x)


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
    grad: str = ""  # why autograd must not lose sight of the tensor; empty: it does not look

    def check_writable(self, number: int) -> None:
        """ValueError if the kernel, which writes this argument, cannot; RuntimeError, as for operators in place, if
        autograd follows it."""
        if isinstance(self.array, np.ndarray) and not self.array.flags.writeable:
            raise ValueError(f"the kernel writes its argument {number} (of the arrays, from 0), which is read-only")
        if self.grad:
            raise RuntimeError(
                f"a {self.grad} that requires grad is being used in an in-place operation: the kernel writes its "
                f"argument {number} (of the arrays, from 0). Call it under torch.no_grad(), or make it an operator "
                "with nki_op and register_autograd"
            )

    def written(self) -> None:
        """After the kernel has written it."""
        if not is_torch(self.array):
            if self.is_copy:
                self.array[...] = self.memory
        elif self.is_copy:
            self.array.copy_(self.memory)
        elif not self.array.is_inference():
            _torch().autograd.graph.increment_version(self.array)


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
    torch = _torch()
    detached = x.detach()
    memory = detached.resolve_conj().resolve_neg().contiguous()
    if memory.device.type == "neuron":  # what its stream still holds comes first, as for every operator
        torch.neuron.current_stream(memory.device).synchronize()
    followed = x.requires_grad and torch.is_grad_enabled() and not _below_autograd(x)
    grad = ("leaf Variable" if x.is_leaf else "tensor") if followed else ""
    return Input(detached, shape, t, memory.data_ptr(), memory, memory.data_ptr() != detached.data_ptr(), grad)


def _below_autograd(x: object) -> bool:
    """Is this inside an operator, for which autograd has done its part?"""
    torch = _torch()
    key = torch._C.DispatchKey.AutogradCPU if x.device.type == "cpu" else torch._C.DispatchKey.AutogradPrivateUse1
    return torch._C._dispatch_tls_local_exclude_set().has(key)


def inputs(args: object, given: list[Input]) -> object:
    """args with Inputs in place of arrays, which are appended to `given`: one for what is the same memory."""
    known: dict[tuple, Input] = {}

    def swap(x: object) -> Input:
        place = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
        strides = x.strides if isinstance(x, np.ndarray) else x.stride()
        same = (place, tuple(x.shape), tuple(strides), str(x.dtype), is_torch(x) and x.is_neg())
        found = known.get(same)
        if found is None:
            found = known[same] = as_input(x)
        given.append(found)
        return found

    return replace(args, swap)


def aliases(given: list[Input]) -> tuple[int, ...]:
    """For each argument the first one with its memory."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), i) for i, x in enumerate(given))


def overlap(given: list[Input], written: Iterable[int]) -> tuple[int, int] | None:
    """A written argument and another one that share a part of their memory but are not the same."""
    for i in written:
        for j, other in enumerate(given):
            if other is not given[i] and _share(given[i].array, other.array):
                return i, j
    return None


def _share(a: object, b: object) -> bool:
    a, b = _as_bytes(a), _as_bytes(b)
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def _as_bytes(x: object) -> np.ndarray:
    """An array that lies where x does; only for its place."""
    if isinstance(x, np.ndarray):
        return x
    size = x.element_size()
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (extent * size)).from_address(x.data_ptr()))
    elements = raw.view(np.dtype((np.void, size)))
    return np.lib.stride_tricks.as_strided(elements, tuple(x.shape), [s * size for s in x.stride()])


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
        ends = [s * (n - 1) for s, n in zip(t.strides, t.shape) if n]
        low, high = t.offset + sum(e for e in ends if e < 0), t.offset + sum(e for e in ends if e > 0)
        if 0 not in t.shape and (low < 0 or (high + 1) * t.dtype.itemsize > self.bytes):
            raise errors.NkiOutOfBoundsError(
                f"a kernel returns elements {low} to {high} of {t.name}, which has {self.bytes // t.dtype.itemsize}"
            )


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
    return like.new_empty_strided(output.shape, _strides(output), dtype=torch_dtype(output.dtype))


def _strides(output: Output) -> tuple[int, ...]:
    if min(output.strides, default=0) < 0:
        raise errors.NkiValidationError(
            f"a torch tensor has no negative strides: a kernel returns a view with strides {output.strides}"
        )
    return output.strides


def as_result(output: Output, memory: object, like: object) -> object:
    """The output as an array like `like`. memory: bytes (NumPy or torch) of its storage."""
    if is_torch(like):
        torch = _torch()
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory).to(like.device)
        return torch.as_strided(memory.view(torch_dtype(output.dtype)), output.shape, _strides(output), output.offset)
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


# What is its own stand-in in a cache key, though it may have attributes.
_PLAIN = (str, bytes, type(None), enum.Enum, type, types.ModuleType, types.BuiltinFunctionType, np.ufunc, Op)


def key(value: object, within: tuple[object, ...] = ()) -> object:
    """A hashable stand-in for an argument: arrays by signature, the rest by value and type. Unhashable if there is
    none. within: the objects that this is part of."""
    kind = type(value)
    if is_array(value):
        return ("array", signature(value), is_torch(value))
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return (kind, value.hex())  # which tells 0.0 from -0.0
    if isinstance(value, (int, *_PLAIN)):
        return (kind, value)
    for i, outer in enumerate(within):
        if value is outer:
            return ("within", i)
    if len(within) > 20:
        raise Unhashable
    within = (*within, value)
    if isinstance(value, (list, tuple)):
        return (kind, tuple(key(v, within) for v in value))
    if isinstance(value, dict):
        return (kind, tuple((key(k, within), key(v, within)) for k, v in value.items()))
    if isinstance(value, types.FunctionType):
        try:
            cells = [c.cell_contents for c in value.__closure__ or ()]
        except ValueError:  # a variable that has no value yet
            raise Unhashable from None
        return (value, tuple(key(c, within) for c in cells))
    if isinstance(value, types.MethodType):
        return (value.__func__, key(value.__self__, within))
    if isinstance(value, functools.partial):
        return (kind, key(value.func, within), key(value.args, within), key(value.keywords, within))
    slots = [n for c in kind.__mro__ for n in _slots(c) if hasattr(value, n)]
    if hasattr(value, "__dict__") or slots:
        state = {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in slots}}
        return (kind, tuple((k, key(v, within)) for k, v in state.items()))
    try:
        hash(value)
    except TypeError:
        raise Unhashable from None
    return (kind, value)


def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(n for n in names if n not in ("__dict__", "__weakref__"))
