"""Kernels as PyTorch operators: torch_neuronx.nki_op and wrap_nki.

Inside torch.compile a kernel is one node of the graph: torchneuron::nki(tensors, handle), where the handle stands for
the kernel and its other arguments. wrap_nki makes one kernel such a node by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch

from .. import nki  # noqa: F401 - `from torch_neuronx import nki`
from . import arrays
from .errors import NkiError, NkiValidationError
from .jit import Kernel, jit


def nki_op(
    name: str, fn: Callable | None = None, /, *, mutates_args: str | Iterable[str] = (), schema: str | None = None
) -> Callable:
    """Decorator: registers a function of tensors that launches NKI kernels as operator `name` ("namespace::op").

    The function needs type annotations, or `schema`. mutates_args: names of the arguments that it writes; NkiError when
    it writes another. Without register_fake, result shapes come from tracing its kernels. Returns torch.library's
    CustomOpDef.
    """

    def register(f: Callable) -> object:
        checked = f if mutates_args == "unknown" else _checked(name, f, mutates_args)
        op = torch.library.custom_op(name, checked, mutates_args=mutates_args, schema=schema)
        op.register_fake(f)  # kernels accept fake tensors; a later register_fake replaces this
        return op

    return register if fn is None else register(fn)


def _checked(name: str, f: Callable, mutates_args: Iterable[str]) -> Callable:
    """f, which must not write tensors but those of the names."""
    declared, parameters = set(mutates_args), inspect.signature(f)

    @functools.wraps(f)
    def call(*args: object, **kwargs: object) -> object:
        given = parameters.bind(*args, **kwargs).arguments.items()
        before = [
            (k, x, x._version)
            for k, x in given
            if isinstance(x, torch.Tensor) and k not in declared and not x.is_inference()
        ]
        result = f(*args, **kwargs)
        for k, x, version in before:
            if x._version != version:
                raise NkiError(f"{name} writes its argument {k}, which mutates_args does not name")
        return result

    return call


# ---- arguments and results as tensors and what stands around them ---------------------------------------------------
# A structure is ("tensor",), ("value", x), ("tuple" or "list", structures) or ("dict", keys, structures).
_SEQUENCES = {"tuple": tuple, "list": list}


def _take_apart(value: object, tensors: list[torch.Tensor]) -> tuple:
    """The structure of a value; its tensors go to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor",)
    if type(value) in (tuple, list):
        return (type(value).__name__, tuple(_take_apart(v, tensors) for v in value))
    if type(value) is dict:
        return ("dict", tuple(value), tuple(_take_apart(v, tensors) for v in value.values()))
    return ("value", value)


def _put_together(structure: tuple, tensors: list[torch.Tensor]) -> object:
    """The value of a structure; its tensors are taken from the front of the list."""
    kind = structure[0]
    if kind == "tensor":
        return tensors.pop(0)
    if kind == "value":
        return structure[1]
    parts = [_put_together(s, tensors) for s in structure[-1]]
    return dict(zip(structure[1], parts)) if kind == "dict" else _SEQUENCES[kind](parts)


class WrappedKernel:
    """A kernel as one node of a graph: wrapped[lnc](*args)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: int) -> WrappedKernel:
        return WrappedKernel(self.kernel[grid])

    def __call__(self, *args: object, **kwargs: object) -> object:
        tensors: list[torch.Tensor] = []
        handle = _handle(self.kernel, _take_apart(args, tensors), _take_apart(kwargs, tensors))
        if not tensors:
            return self.kernel(*args, **kwargs)
        results = torch.ops.torchneuron.nki(tensors, handle)
        return _put_together(_result_structure(handle), list(results))


def wrap_nki(kernel: Kernel | Callable) -> WrappedKernel:
    """The kernel as a node that torch.compile keeps whole; wrap_nki(kernel)[lnc](...) on tensors, tuples, lists and
    dicts of tensors, and constants. Its result may be of the same kinds."""
    return WrappedKernel(jit(kernel))


_calls: list[tuple[Kernel, tuple, tuple]] = []
_handles: dict[tuple, int] = {}
_results: dict[int, tuple] = {}  # structures of results by handle


@torch._dynamo.assume_constant_result
def _handle(kernel: Kernel, args: tuple, kwargs: tuple) -> int:
    """Number of a call: the kernel and the structures of its arguments."""
    call = (kernel, args, kwargs)
    try:
        key = (kernel, arrays.key(args), arrays.key(kwargs))
    except arrays.Unhashable:
        key = (kernel, object())
    handle = _handles.setdefault(key, len(_calls))
    if handle == len(_calls):
        _calls.append(call)
    return handle


@torch._dynamo.assume_constant_result
def _result_structure(handle: int) -> tuple:
    """How the kernel of call number `handle` returned its results last."""
    return _results[handle]


def _arguments(tensors: list[torch.Tensor], handle: int) -> tuple[Kernel, tuple, dict]:
    """The kernel of a call, and its arguments with these tensors."""
    kernel, args, kwargs = _calls[handle]
    given = list(tensors)
    return kernel, _put_together(args, given), _put_together(kwargs, given)


def kernel_name(handle: int) -> str:
    """The name of the kernel of call number `handle`."""
    return _calls[handle][0].__name__


def launch_of(handle: int, tensors: list[torch.Tensor]) -> dict | None:
    """What a compiled graph needs to launch call number `handle` on tensors of these shapes and types without Python.

    None: it must be called (it runs step by step, writes an argument, or returns no plain tensors).
    """
    kernel, args, kwargs = _arguments(tensors, handle)
    return kernel.plain_launch(args, kwargs)


@torch.library.custom_op("torchneuron::nki", mutates_args=())
def _call(tensors: list[torch.Tensor], handle: int) -> list[torch.Tensor]:
    """Launches call number `handle` on its tensors."""
    kernel, args, kwargs = _arguments(tensors, handle)
    if any(map(arrays.is_fake, tensors)):
        traced = kernel.trace(args, kwargs)
        if traced is not None and traced.written:
            raise NkiError(
                f"{kernel.__name__} writes its argument {traced.written[0]}: in a compiled graph it must be an "
                'operator that says so, torch_neuronx.nki_op("namespace::name", mutates_args=...)'
            )
    results: list[torch.Tensor] = []
    structure = _take_apart(kernel(*args, **kwargs), results)
    if "value" in _kinds(structure):
        raise NkiValidationError(
            f"{kernel.__name__} returns something else than tensors, and tuples, lists and dicts of them"
        )
    _results[handle] = structure
    known = list(tensors)
    for i, r in enumerate(results):  # an operator's results are its own
        if any(torch._C._is_alias_of(r, t) for t in known):
            results[i] = r.clone()
        known.append(results[i])
    return results


def _kinds(structure: tuple) -> set[str]:
    parts = () if structure[0] in ("tensor", "value") else structure[-1]
    return {structure[0]}.union(*map(_kinds, parts))


_call.register_fake(_call._init_fn)
