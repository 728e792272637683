"""Arrays of callers (NumPy, torch) as memory of a kernel, and back."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import enum
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

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


@dataclasses.dataclass(eq=False)
class Input:
    """An array argument. memory: its values, contiguous; `finish_write` writes them back where they are a copy."""

    array: object
    shape: tuple[int, ...]
    dtype: dtypes.DType
    pointer: int
    memory: object
    is_copy: bool

    def finish_write(self) -> None:
        """Called when a kernel has written `memory`."""
        if isinstance(self.array, np.ndarray):
            if self.is_copy:
                self.array[...] = self.memory
            return
        torch, seen = _torch(), self.array.detach()  # which has the version counter of the caller's tensor
        if self.is_copy:
            seen.copy_(self.memory)
        elif not seen.is_inference():
            torch.autograd.graph.increment_version(seen)


def is_writable(x: object) -> bool:
    """May a kernel write x? Not what is read-only, and not what autograd follows: kernels have no gradient."""
    if isinstance(x, np.ndarray):
        return x.flags.writeable
    return not (x.requires_grad and _torch().is_grad_enabled())


def check_writable(x: object, number: int, kernel: str) -> None:
    """ValueError, or RuntimeError as PyTorch has it, if a kernel, which writes its array `number`, may not; NkiError in
    an operator that does not declare it."""
    which = f"{kernel} writes its argument {number} (of the arrays, from 0)"
    if isinstance(x, np.ndarray):
        if not is_writable(x):
            raise ValueError(f"{which}, which is read-only")
        return
    for operator, storages in _protected.get():
        if x.untyped_storage()._cdata in storages:
            raise errors.NkiError(
                kernel, f"argument {number}",
                f"(of the arrays, from 0) is written: in {operator} the kernel must be an operator that says so, "
                'torch_neuronx.nki_op("namespace::name", mutates_args=...)',
            )  # fmt: skip
    if is_writable(x):
        return
    if x.is_leaf:
        raise RuntimeError(
            f"a leaf Variable that requires grad is being used in an in-place operation: {which}; call it under "
            "torch.no_grad() or with a detached tensor"
        )
    raise RuntimeError(
        f"{which}, which requires grad, and kernels have no gradient: call it under torch.no_grad(), or give it one by "
        "torch_neuronx.nki_op and register_autograd"
    )


_protected: contextvars.ContextVar[tuple] = contextvars.ContextVar("protected", default=())


@contextlib.contextmanager
def protect(operator: str, fixed: Iterable[object], changed: Iterable[object] = ()) -> Iterator[None]:
    """Inside, kernels may not write the memory of the tensors `fixed`, but for that of `changed`: NkiError names the
    operator, which does not declare it."""
    fixed, changed = ({t.untyped_storage()._cdata for t in tensors} for tensors in (fixed, changed))
    token = _protected.set((*_protected.get(), (operator, fixed - changed)))
    try:
        yield
    finally:
        _protected.reset(token)


class _Places:
    """A torch tensor's memory for NumPy, whatever its device and type."""

    def __init__(self, x: object) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "data": (x.data_ptr(), True),
            "shape": tuple(x.shape),
            "strides": tuple(s * size for s in x.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def share_memory(x: object, y: object) -> bool:
    """Do two arrays have a byte in common?"""
    return np.shares_memory(*(a if isinstance(a, np.ndarray) else np.asarray(_Places(a)) for a in (x, y)))


def _same(x: object, y: object) -> bool:
    """Are two arrays the same memory, seen in the same way?"""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        if type(x) is not type(y) or x.ctypes.data != y.ctypes.data or x.strides != y.strides:
            return False
    elif x.data_ptr() != y.data_ptr() or x.stride() != y.stride() or x.is_neg() != y.is_neg():
        return False
    return (x.shape, x.dtype, is_writable(x)) == (y.shape, y.dtype, is_writable(y))


def firsts(given: Sequence[object]) -> list[int]:
    """For each array the number of the first one that is the same memory, seen in the same way."""
    return [next(j for j, y in enumerate(given) if y is x or _same(x, y)) for x in given]


def sizes(x: object) -> tuple[int, ...]:
    """The shape of an argument; ValueError if there is nothing in it."""
    shape = tuple(int(n) for n in x.shape)  # int: sizes of a dynamic graph are fixed
    if 0 in shape:
        raise ValueError(f"an argument of shape {shape} has no elements: kernels take arrays that have some")
    return shape


def as_input(x: object, step: bool = False) -> Input:
    """x as kernel memory: itself where it is contiguous, of this machine's byte order and not negated, else a copy.

    step: a kernel that writes it shows that when it ends, so what may not be written is a copy too.
    """
    shape, t = sizes(x), dtypes.dtype(x.dtype)
    private = step and not is_writable(x)
    if isinstance(x, np.ndarray):
        as_it_is = x.flags.c_contiguous and x.dtype.isnative and not private
        memory = x if as_it_is else np.array(x, x.dtype.newbyteorder("="), order="C", copy=True)
        return Input(x, shape, t, memory.ctypes.data, memory, memory is not x)
    detached = x.detach()
    memory = detached.clone() if private else detached
    memory = memory.resolve_neg().contiguous()
    if memory.device.type == "neuron":  # what its stream still holds comes first, as for every operator
        _torch().neuron.current_stream(memory.device).synchronize()
    return Input(x, shape, t, memory.data_ptr(), memory, memory.data_ptr() != detached.data_ptr())


def as_fake_input(x: object) -> Input:
    """An argument of a kernel that is not run, as there are tensors without data."""
    memory = x.detach().resolve_neg().contiguous() if is_torch(x) else x
    return Input(x, sizes(x), dtypes.dtype(x.dtype), 0, memory, False)


class Output:
    """A result: a view of one of the kernel's HBM tensors."""

    def __init__(self, t: NkiTensor, for_torch: bool) -> None:
        if for_torch and any(s < 0 for s in t.strides):
            raise errors.NkiValidationError(
                "", t.name,
                f"is returned as a view of strides {t.strides}, which PyTorch has not: copy it into a "
                "tensor of its own",
            )  # fmt: skip
        if t.on_chip:
            raise errors.NkiValidationError("", t.name, f"is returned from {t.buffer!r}: a kernel returns HBM tensors")
        if t.is_indirect():
            raise errors.NkiValidationError(
                "", t.name, "is returned as a view by a register: a kernel returns tensors at fixed places"
            )
        self.storage, self.shape, self.strides, self.offset, self.dtype = (
            t.storage.id, t.shape, t.strides, t.offset, t.dtype,
        )  # fmt: skip
        self.bytes = math.prod(t.storage.shape) * t.storage.dtype.itemsize
        ends = [s * (n - 1) for s, n in zip(t.strides, t.shape) if n]
        low, high = t.offset + sum(e for e in ends if e < 0), t.offset + sum(e for e in ends if e > 0)
        if 0 not in t.shape and (low < 0 or (high + 1) * t.dtype.itemsize > self.bytes):
            raise errors.NkiOutOfBoundsError(
                "", t.name, f"elements {low} to {high} are returned, it has {self.bytes // t.dtype.itemsize}"
            )


def bytes_of(memory: object) -> object:
    """A contiguous array as bytes."""
    return memory.reshape(-1).view(_torch().uint8 if is_torch(memory) else np.uint8)


def new_memory(like: object, size: int, cleared: bool, values: np.ndarray | None = None) -> tuple[object, int]:
    """Bytes, 0 if `cleared`, or `values`, of the same kind and device as `like` (None: NumPy), and their address."""
    if is_torch(like):
        torch = _torch()
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        address = memory.data_ptr()
        if cleared:  # now, not when the stream comes to it
            ctypes.memset(address, 0, size)
    else:
        memory = new_bytes(size, cleared)
        address = memory.ctypes.data
    if values is not None:
        ctypes.memmove(address, values.ctypes.data, size)
    return memory, address


def torch_dtype(t: dtypes.DType) -> object:
    """The torch dtype of an NKI type; TypeError if torch has none."""
    name = {"bool_": "bool", "tfloat32": "float32"}.get(str(t), str(t))
    found = getattr(_torch(), name, None)
    if found is None:
        raise TypeError(f"torch has no type for {t}")
    return found


def memory_like(memory: np.ndarray, like: object) -> object:
    """Bytes as those of `like`."""
    return _torch().from_numpy(memory).to(like.device) if is_torch(like) else memory


def as_result(output: Output, memory: object, like: object) -> object:
    """The output as an array like `like`. memory: bytes of its storage, of the same kind."""
    if is_torch(like):
        return _torch().as_strided(memory.view(torch_dtype(output.dtype)), output.shape, output.strides, output.offset)
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
    if not _holds_array(value):
        return value
    clone = copy.copy(value)
    for k, v in _attributes(value).items():
        object.__setattr__(clone, k, replace(v, swap))
    return clone


def found(*values: object) -> list[object]:
    """The arrays in `values`, in the order of `replace`."""
    result: list[object] = []
    replace(values, result.append)
    return result


def _attributes(value: object) -> dict[str, object]:
    """What an object holds, by name."""
    found = dict(getattr(value, "__dict__", ()))
    found.update((name, getattr(value, name)) for name in _slots(type(value)) if hasattr(value, name))
    return found


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    declared = [c.__dict__.get("__slots__", ()) for c in kind.__mro__ if c.__module__ != "builtins"]
    names = [n for slots in declared for n in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def _holds_array(value: object, depth: int = 0) -> bool:
    if is_array(value):
        return True
    if depth > 4 or isinstance(value, (str, bytes, int, float, type(None), enum.Enum, type)) or callable(value):
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds_array(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return any(_holds_array(v, depth + 1) for v in value.values())
    return any(_holds_array(v, depth + 1) for v in _attributes(value).values())


class Unhashable(Exception):
    """An argument cannot be part of a cache key."""


class Opaque:
    """Base of what a cache key compares by identity."""


@dataclasses.dataclass(frozen=True)
class _Signature:
    """In a key: an array that the kernel sees as a tensor."""

    shape: tuple[int, ...]
    dtype: str
    is_torch: bool


def key(value: object) -> object:
    """A hashable stand-in for arguments: arrays by shape and type; the rest by types and values, whatever they compare
    equal to (1, True and 1.0 differ, 0.0 and -0.0 too). Unhashable if a value cannot be told."""
    try:
        found = _key(replace(value, lambda x: _Signature(sizes(x), str(x.dtype), is_torch(x))))
        hash(found)
    except (RecursionError, TypeError):
        raise Unhashable from None
    return found


_PLAIN = {type(None), type(...), bool, int, str, bytes, dtypes.DType, _Signature, range}
# Whose own equality, within a type, is all that there is to tell.
_SELF = (type, enum.Enum, types.BuiltinFunctionType, types.ModuleType, np.dtype, np.ufunc, Opaque)


def _key(value: object) -> object:
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    if kind is tuple or kind is list:
        return (kind, *map(_key, value))
    if kind is dict:
        return (kind, *((_key(k), _key(v)) for k, v in value.items()))
    if isinstance(value, _SELF):
        return (kind, value)
    if kind is types.FunctionType:
        return _function_key(value)
    if isinstance(value, (np.ndarray, np.generic)):  # an array here is a constant: nothing made a tensor of it
        if value.dtype.hasobject:
            raise Unhashable
        return (kind, value.shape, str(value.dtype), value.tobytes())
    if is_torch(value):
        raise Unhashable
    try:
        parts = value.__reduce_ex__(4)  # what pickle would keep: the type, attributes, slots, items
    except Exception:  # noqa: BLE001 - anything that has no such parts
        raise Unhashable from None
    if isinstance(parts, str):  # the one object of its name
        return (kind, value)
    return (kind, *(_key(tuple(p) if isinstance(p, Iterator) else p) for p in parts))


def _function_key(f: types.FunctionType) -> object:
    """A function by itself; with values that it keeps, by its code and those."""
    if not (f.__closure__ or f.__defaults__ or f.__kwdefaults__ or f.__dict__):
        return f
    try:
        cells = tuple(c.cell_contents for c in f.__closure__ or ())
    except ValueError:  # a name that has no value yet
        raise Unhashable from None
    kept = (cells, f.__defaults__, f.__kwdefaults__, f.__dict__)
    return (f.__code__, id(f.__globals__), f.__qualname__, *map(_key, kept))
