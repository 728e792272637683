"""NKI kernels as PyTorch operators; importable as `torch_neuronx`.

nki_op registers a function that launches kernels as an operator: one node in torch.compile, with register_autograd,
register_fake and register_kernel as on torch.library.custom_op. wrap_nki makes one kernel such a node by itself.
"""

from __future__ import annotations

import collections
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index

import torch

from .. import nki  # noqa: F401 - `from torch_neuronx import nki`
from . import arrays
from .errors import DataDependentError, NkiError
from .jit import Kernel, jit
from .tensor import row_major


def nki_op(
    name: str, fn: Callable | None = None, /, *, mutates_args: str | Iterable[str] = (), schema: str | None = None
) -> Callable:
    """Decorator: registers a function of tensors that launches NKI kernels as operator `name` ("namespace::op").

    The function needs type annotations, or `schema`. Without register_fake, result shapes come from tracing its
    kernels. Returns torch.library's CustomOpDef.
    """

    def register(f: Callable) -> object:
        op = torch.library.custom_op(name, f, mutates_args=mutates_args, schema=schema)
        checked = _checked(op, f)
        op.register_kernel(None)(checked)
        op.register_fake(checked)  # kernels accept fake tensors; a later register_fake replaces this
        return op

    return register if fn is None else register(fn)


def _checked(op: object, f: Callable) -> Callable:
    """f, in which kernels may write what the operator's schema says it changes and no other tensor that it is given."""
    arguments = op._opoverload._schema.arguments
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}

    @functools.wraps(f)
    def checked(*args: object, **kwargs: object) -> object:
        named = {**{a.name: v for a, v in zip(arguments, args)}, **kwargs}
        fixed = arrays.found({n: v for n, v in named.items() if n not in changed})
        with arrays.protect(op._qualname, fixed, arrays.found({n: v for n, v in named.items() if n in changed})):
            return f(*args, **kwargs)

    return checked


class WrappedKernel:
    """A kernel as one node of a graph: wrapped[lnc](*args)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: int) -> WrappedKernel:
        return WrappedKernel(self.kernel[grid])

    def __call__(self, *args: object, **kwargs: object) -> object:
        tensors: list[torch.Tensor] = []
        rest = _split((args, kwargs), tensors)
        metadata = tuple([(tuple(map(index, t.shape)), tuple(map(index, t.stride())), t.dtype) for t in tensors])
        handle = _handle(self.kernel, rest)
        layout = _layout(handle, metadata)
        if layout is None:
            return _call_python(self.kernel, args, kwargs)
        return _join(layout, torch.ops.torchneuron.nki([t.resolve_neg() for t in tensors], handle), tensors)


def wrap_nki(kernel: Kernel | Callable) -> WrappedKernel:
    """The kernel as a node that torch.compile keeps whole; wrap_nki(kernel)[lnc](...) on tensors, tuples, lists and
    dicts of them, and constants."""
    return WrappedKernel(jit(kernel))


# ---- arguments and results as lists of tensors, and what is between those
def _split(value: object, tensors: list[torch.Tensor]) -> tuple | None:
    """What `_merged` makes `value` of again: tensors go to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return None
    if isinstance(value, (tuple, list)):
        return (_kind(type(value)), (), tuple([_split(v, tensors) for v in value]))
    if isinstance(value, dict):
        return (_kind(dict), tuple(value), tuple([_split(v, tensors) for v in value.values()]))
    return (_FIXED[type(value)](value) if type(value) in _FIXED else value,)


# What makes a number of a dynamic graph, which may be symbolic, the one that it is: index does, int does not.
_FIXED = {int: index, float: lambda value: float.fromhex(value.hex())}
# By number, as Dynamo takes no types from a function that it assumes to be constant.
_kinds: list[type] = [tuple, list, dict]


@torch._dynamo.assume_constant_result
def _kind(kind: type) -> int:
    """Number of a type of container."""
    if kind not in _kinds:
        _kinds.append(kind)
    return _kinds.index(kind)


def _merged(part: tuple | None, tensors: Iterator[torch.Tensor]) -> object:
    if part is None:
        return next(tensors)
    if len(part) == 1:
        return part[0]
    kind, keys, parts = part
    items = [_merged(p, tensors) for p in parts]
    if _kinds[kind] is dict:
        return dict(zip(keys, items))
    return _kinds[kind](*items) if hasattr(_kinds[kind], "_fields") else _kinds[kind](items)


def _results(kernel: Kernel, result: object, arguments: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple]:
    """The tensors in a kernel's result as an operator has them, sharing no memory with each other or an argument, and
    the layout from which `_join` makes the result: its parts, and for each tensor which argument or output it is a view
    of."""
    outputs: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    rest = _split(result, found)
    for value in _values(rest):
        if not isinstance(value, (int, float, str, type(None))):
            raise NkiError(
                kernel.__name__, "", f"returns {value!r}: kernels of graphs return tensors, numbers and names"
            )
    uses = collections.Counter(_storage(t) for t in found)
    bases = {_storage(t): (0, i, t) for i, t in reversed(list(enumerate(arguments)))}

    def place(t: torch.Tensor) -> tuple:
        for i, x in enumerate(arguments):
            if t is x:
                return (0, i, None)
        s = _storage(t)
        if s not in bases:
            whole = t if uses[s] == 1 else t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
            bases[s] = (1, len(outputs), whole)
            outputs.append(whole)
        where, number, base = bases[s]
        if base is t:
            return (where, number, None)
        start = t.storage_offset() - base.storage_offset() * base.element_size() // t.element_size()
        return (where, number, (t.dtype, start, tuple(t.shape), tuple(t.stride())))

    return outputs, (rest, tuple(map(place, found)))


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _join(layout: tuple, outputs: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> object:
    """A kernel's result from an operator's."""
    rest, places = layout
    found = []
    for where, number, view in places:
        t = (arguments, outputs)[where][number]
        if view is not None:
            dtype, start, shape, strides = view
            t = t.view(-1) if t.dtype == dtype else t.view(-1).view(dtype)
            if strides == row_major(shape):  # which compiled functions may write to
                t = t[start : start + math.prod(shape)].view(shape)
            else:
                t = t[start:].as_strided(shape, strides)
        found.append(t)
    return _merged(rest, iter(found))


# ---- calls by number
_calls: dict[int, tuple[Kernel, tuple]] = {}
_numbers: dict[object, int] = {}
_lock = threading.Lock()


@torch._dynamo.assume_constant_result
def _handle(kernel: Kernel, rest: tuple) -> int:
    """Number of a call: the kernel, and its arguments but for tensors. NkiError if there are arrays in those."""
    if arrays.found(rest):
        raise NkiError(
            kernel.__name__, "",
            "has NumPy arrays, or tensors in other objects: wrap_nki and compiled functions take torch tensors, alone "
            "or in tuples, lists and dicts",
        )  # fmt: skip
    try:
        key = (kernel, arrays.key(rest))
    except arrays.Unhashable:
        key = object()  # a call of its own
    with _lock:
        number = _numbers.setdefault(key, len(_numbers))
        _calls[number] = (kernel, rest)  # the last that is like it: those before may have changed
    return number


@torch._dynamo.assume_constant_result
def _layout(handle: int, metadata: tuple) -> tuple | None:
    """What the result of a call on tensors of these sizes, strides and types is made of. None: a kernel whose Python
    needs values, so that only running it tells."""
    tensors = [torch.empty_strided(*sizes, dtype=dtype, device="meta") for *sizes, dtype in metadata]
    kernel, args, kwargs = _arguments(tensors, handle)
    try:
        return _results(kernel, _call_python(kernel, args, kwargs), tensors)[1]
    except DataDependentError:
        return None
    except Exception:  # noqa: BLE001 - the operator raises it again, as operators do
        return (None,), ()


def _values(part: tuple | None) -> list[object]:
    """What is no tensor and no container in what `_split` returns."""
    if part is None:
        return []
    return [part[0]] if len(part) == 1 else [v for p in part[2] for v in _values(p)]


@functools.partial(torch._dynamo.disable, reason="an NKI kernel needs values while its Python runs")
def _call_python(kernel: Kernel, args: tuple, kwargs: dict) -> object:
    return kernel(*args, **kwargs)


def _arguments(tensors: list[torch.Tensor], handle: int) -> tuple[Kernel, tuple, dict]:
    """The kernel of a call, and its arguments with these tensors."""
    kernel, rest = _calls[handle]
    return kernel, *_merged(rest, iter(tensors))


def kernel_name(handle: int) -> str:
    """The name of the kernel of call number `handle`."""
    return _calls[handle][0].__name__


def launch_of(handle: int, tensors: list[torch.Tensor]) -> dict | None:
    """What a compiled graph needs to launch call number `handle` on tensors of these shapes and types without Python.

    None: it must be called (it runs step by step, writes an argument, or returns what is no whole tensor of its own).
    """
    kernel, args, kwargs = _arguments(tensors, handle)
    return kernel.plain_launch(args, kwargs)


@torch.library.custom_op("torchneuron::nki", mutates_args=())
def _call(tensors: list[torch.Tensor], handle: int) -> list[torch.Tensor]:
    """Launches call number `handle` on its tensors."""
    kernel, args, kwargs = _arguments(tensors, handle)
    with arrays.protect("a compiled graph", tensors):
        return _results(kernel, kernel(*args, **kwargs), tensors)[0]


_call.register_fake(_call._init_fn)
