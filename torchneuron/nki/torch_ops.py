"""NKI kernels as PyTorch operators; importable as `torch_neuronx`.

nki_op registers a function that launches kernels as an operator: one node in torch.compile, with register_autograd,
register_fake and register_kernel as on torch.library.custom_op. wrap_nki makes one kernel such a node by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .. import nki  # noqa: F401 - `from torch_neuronx import nki`
from . import arrays
from .errors import NkiError
from .jit import Kernel, jit


def nki_op(
    name: str, fn: Callable | None = None, /, *, mutates_args: str | Iterable[str] = (), schema: str | None = None
) -> Callable:
    """Decorator: registers a function of tensors that launches NKI kernels as operator `name` ("namespace::op").

    The function needs type annotations, or `schema`. Without register_fake, result shapes come from tracing its
    kernels. Returns torch.library's CustomOpDef.
    """

    def register(f: Callable) -> object:
        op = torch.library.custom_op(name, f, mutates_args=mutates_args, schema=schema)
        op.register_fake(f)  # kernels accept fake tensors; a later register_fake replaces this
        return op

    return register if fn is None else register(fn)


class WrappedKernel:
    """A kernel as one node of a graph: wrapped[lnc](*args)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: int) -> WrappedKernel:
        return WrappedKernel(self.kernel[grid])

    def __call__(self, *args: object, **kwargs: object) -> object:
        names = tuple(kwargs)
        values = [*args, *kwargs.values()]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        rest = tuple(None if isinstance(v, torch.Tensor) else (v,) for v in values)
        handle = _handle(self.kernel, rest, names)
        results = torch.ops.torchneuron.nki(tensors, handle)
        return results[0] if len(results) == 1 else tuple(results)


def wrap_nki(kernel: Kernel | Callable) -> WrappedKernel:
    """The kernel as a node that torch.compile keeps whole; wrap_nki(kernel)[lnc](...) on tensors and constants."""
    return WrappedKernel(jit(kernel))


_calls: list[tuple[Kernel, tuple, tuple[str, ...]]] = []


@torch._dynamo.assume_constant_result
def _handle(kernel: Kernel, rest: tuple, names: tuple[str, ...]) -> int:
    """Number of a call: the kernel, its arguments that are no tensors, the names of the last ones."""
    call = (kernel, rest, names)
    for i, known in enumerate(_calls):
        if known[0] is kernel and known[1:] == call[1:]:
            return i
    _calls.append(call)
    return len(_calls) - 1


def _arguments(tensors: list[torch.Tensor], handle: int) -> tuple[Kernel, tuple, dict]:
    """The kernel of a call, and its arguments with these tensors."""
    kernel, rest, names = _calls[handle]
    given = iter(tensors)
    values = [next(given) if v is None else v[0] for v in rest]
    split = len(values) - len(names)
    return kernel, tuple(values[:split]), dict(zip(names, values[split:]))


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
    result = kernel(*args, **kwargs)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    return [r.clone() if any(r is t for t in tensors) else r for r in results]


_call.register_fake(_call._init_fn)
