"""The kinds of use: how the samples of a database entry are made, and what is done with one.

A recipe is run twice, with copies of the same sample on CPU and on the device, and must not know which.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.autograd import forward_ad
from torch.testing._internal import common_methods_invocations, common_modules, common_optimizers
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# The database wraps random operators so that they seed and restore the generators; that would hide which they use.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


@dataclass
class Sample:
    """`tree` is what is copied to the device; `about` is for the recipe."""

    tree: Any
    about: Any = None
    # the error that the database expects, if it is a sample of a wrong use
    error: Any = None


@dataclass(frozen=True)
class Kind:
    """One kind of use of a database's entries."""

    applies: Callable[[Any, torch.dtype | None], bool]
    samples: Callable[[Any, torch.dtype | None], Iterable[Sample]]
    recipe: Callable[[Any, Sample], Any]
    # at most so many samples, evenly spread, unless the command asks for another number
    limit: int = 40
    # which results share a storage must be as on CPU; of gradients autograd promises nothing about that
    aliasing: bool = True


@dataclass(frozen=True)
class Suite:
    """A database of PyTorch: its entries by name, and the kinds of use."""

    entries: Callable[[], dict[str, Any]]
    dtypes: Callable[[Any], Iterable[torch.dtype]]
    kinds: dict[str, Kind]
    # kinds that have no data type
    untyped: frozenset[str] = field(default_factory=frozenset)


# Recipes for operators -------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _seeded_like(t: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Numbers in [-1, 1] that are the same on each device and, since they have few bits, in each floating type."""
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    real = t.dtype.to_real() if t.is_complex() else t.dtype
    shape = (*t.shape, 2) if t.is_complex() else t.shape
    values = torch.randint(-64, 65, shape, generator=generator).to(real) / 64
    return (torch.view_as_complex(values) if t.is_complex() else values).to(t.device)


def _forward(op: Any, sample: Sample) -> Any:
    args, kwargs = sample.tree
    return op(*args, **kwargs)


def _alias(op: Any, sample: Sample) -> Any:
    """Writes into results that share memory with an argument: the argument must change."""
    inputs = {t.untyped_storage()._cdata for t in _tensors(sample.tree) if t.layout == torch.strided}
    with torch.no_grad():
        result = _forward(op, sample)
        for t in _tensors(result):
            if t.layout == torch.strided and t.untyped_storage()._cdata in inputs:
                t.fill_(1)
    return result


def _in_place(op: Any, sample: Sample) -> Any:
    if sample.about.broadcasts_input:
        raise NotImplementedError("an in-place operator cannot broadcast its first argument")
    (first, *args), kwargs = sample.tree
    with torch.no_grad():
        result = op.inplace_variant(first, *args, **kwargs)
    same = [a is b for a, b in zip(_tensors(result), _tensors(first))]
    return result, same


def _strided_like(t: torch.Tensor) -> torch.Tensor:
    """A tensor that takes every other element of larger memory."""
    return torch.full((*t.shape, 2), 7, device=t.device).to(t.dtype)[..., 0]


_OUT_SHAPES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: torch.full_like(t, 7),
    _strided_like,
    lambda t: torch.empty(0, dtype=t.dtype, device=t.device),
]


def _out(op: Any, sample: Sample) -> Any:
    """`out=` with the right strides, with others, and with a tensor of no elements that must be resized."""
    args, kwargs = sample.tree
    results = []
    with torch.no_grad():
        expected = op(*args, **kwargs)
        for make in _OUT_SHAPES:
            out = tree_map(lambda t, make=make: make(t) if isinstance(t, torch.Tensor) else t, expected)
            before = [t.data_ptr() for t in _tensors(out)]
            returned = op(*args, **kwargs, out=out)
            same_object = [a is b for a, b in zip(_tensors(returned), _tensors(out))]
            moved = [a != t.data_ptr() for a, t in zip(before, _tensors(out)) if a]
            results.append((list(_tensors(out)), same_object, moved))
    return results


def _differentiable(tree: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(tree) if t.requires_grad]


def _grad(outputs: list[torch.Tensor], leaves: list[torch.Tensor], create_graph: bool = False) -> Any:
    """Gradients of `outputs` for seeded output gradients.

    Gradients are added up in an order that depends on time where there are several roots, and on the thread that made
    a node (sequence numbers are per thread) where gradients have a graph. There everything runs in this thread.
    """
    seeds = [_seeded_like(o, i) for i, o in enumerate(outputs)]
    with torch.autograd.set_multithreading_enabled(len(outputs) == 1 and not create_graph):
        return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True, create_graph=create_graph)


def _gradients(op: Any, sample: Sample, create_graph: bool = False) -> tuple[list[torch.Tensor], Any]:
    leaves = _differentiable(sample.tree)
    outputs = _differentiable(sample.about.output_process_fn_grad(_forward(op, sample)))
    if not leaves or not outputs:
        raise NotImplementedError("nothing to differentiate")
    return leaves, _grad(outputs, leaves, create_graph)


def _backward(op: Any, sample: Sample) -> Any:
    return _gradients(op, sample)[1]


def _double_backward(op: Any, sample: Sample) -> Any:
    leaves, gradients = _gradients(op, sample, create_graph=True)
    again = _differentiable(list(gradients))
    if not again:
        return gradients
    return gradients, _grad(again, leaves)


def _jvp(op: Any, sample: Sample) -> Any:
    with forward_ad.dual_level():

        def dual(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.requires_grad:
                return x
            return forward_ad.make_dual(x.detach(), _seeded_like(x))

        args, kwargs = tree_map(dual, sample.tree)
        out = sample.about.output_process_fn_grad(op(*args, **kwargs))
        return [tuple(forward_ad.unpack_dual(t)) for t in _tensors(out)]


def _vmap(op: Any, sample: Sample) -> Any:
    leaves, spec = tree_flatten(sample.tree)
    batched = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(batched, tensors):
            filled[i] = t
        args, kwargs = tree_unflatten(filled, spec)
        return op(*args, **kwargs)

    with torch.no_grad():
        stacked = [torch.stack([leaves[i], leaves[i]]) for i in batched]
        return torch.func.vmap(call, randomness="different")(*stacked)


# Samples of operators --------------------------------------------------------------------------------------------


def _sample(s: Any) -> Sample:
    return Sample(((s.input, *s.args), s.kwargs), s)


def _op_samples(op: Any, dtype: torch.dtype | None, requires_grad: bool = False) -> Iterator[Sample]:
    return map(_sample, op.sample_inputs("cpu", dtype, requires_grad=requires_grad))


def _grad_samples(op: Any, dtype: torch.dtype | None) -> Iterator[Sample]:
    return _op_samples(op, dtype, requires_grad=True)


def _noncontiguous_samples(op: Any, dtype: torch.dtype | None) -> Iterator[Sample]:
    return (_sample(s.noncontiguous()) for s in op.sample_inputs("cpu", dtype))


def _sparse_samples(layout: torch.layout, op: Any, dtype: torch.dtype | None) -> Iterator[Sample]:
    return map(_sample, op.sample_inputs_sparse(layout, "cpu", dtype))


def _error_samples(op: Any, dtype: torch.dtype | None) -> Iterator[Sample]:
    for e in op.error_inputs("cpu"):
        yield Sample(((e.sample_input.input, *e.sample_input.args), e.sample_input.kwargs), e.sample_input, e)


def _always(op: Any, dtype: torch.dtype | None) -> bool:
    return True


def _supports_grad(op: Any, dtype: torch.dtype | None) -> bool:
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def _sparse_kinds() -> dict[str, Kind]:
    layouts = {"sparse COO": torch.sparse_coo, "sparse CSR": torch.sparse_csr, "sparse CSC": torch.sparse_csc,
               "sparse BSR": torch.sparse_bsr, "sparse BSC": torch.sparse_bsc}  # fmt: skip
    return {
        name: Kind(lambda op, dtype, l=layout: op.supports_sparse_layout(l), functools.partial(_sparse_samples, layout),
                   _forward, 20)
        for name, layout in layouts.items()
    }  # fmt: skip


_OPERATOR_KINDS = {
    "forward": Kind(_always, _op_samples, _forward, 100),
    "non-contiguous": Kind(_always, _noncontiguous_samples, _forward),
    "aliasing": Kind(_always, _op_samples, _alias, 10),
    "out=": Kind(lambda op, _: op.supports_out, _op_samples, _out, 20),
    "in-place": Kind(lambda op, _: op.inplace_variant is not None, _op_samples, _in_place),
    "backward": Kind(_supports_grad, _grad_samples, _backward),
    "double backward": Kind(lambda op, d: op.supports_gradgrad and _supports_grad(op, d), _grad_samples,
                            _double_backward, 6),
    "forward AD": Kind(lambda op, d: op.supports_forward_ad and _supports_grad(op, d), _grad_samples, _jvp, 6),
    "vmap": Kind(_always, _op_samples, _vmap, 6),
    "errors": Kind(lambda op, _: op.error_inputs_func is not None, _error_samples, _forward, 10000),
    **_sparse_kinds(),
}  # fmt: skip


def _by_name(entries: Iterable[Any], name: Callable[[Any], str]) -> dict[str, Any]:
    named = [(name(e), e) for e in entries]
    assert len(dict(named)) == len(named), "two entries of a database have one name"
    return dict(named)


# Modules ---------------------------------------------------------------------------------------------------------


def _module_samples(info: Any, dtype: torch.dtype | None) -> Iterator[Sample]:
    for training in (True, False):
        torch.manual_seed(0)
        for inputs in info.module_inputs_func(info, "cpu", dtype, True, training):
            if inputs.forward_input is None:
                continue
            made, given = inputs.constructor_input, inputs.forward_input
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            if info.is_lazy:  # parameters get their shapes from the first call
                with torch.no_grad():
                    module(*given.args, **given.kwargs)
            yield Sample((module, given.args, given.kwargs))


def _module_forward(info: Any, sample: Sample) -> Any:
    module, args, kwargs = sample.tree
    result = module(*args, **kwargs)
    return result, dict(module.state_dict())


def _module_backward(info: Any, sample: Sample) -> Any:
    module, args, kwargs = sample.tree
    outputs = _differentiable(module(*args, **kwargs))
    leaves = [*module.parameters(), *_differentiable((args, kwargs))]
    if not outputs or not leaves:
        raise NotImplementedError("nothing to differentiate")
    return _grad(outputs, leaves)


def _module_reload(info: Any, sample: Sample) -> Any:
    """A state dict goes back into a module; `to` keeps parameter objects."""
    module, args, kwargs = sample.tree
    state = {name: t.clone() for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    module.load_state_dict(state, strict=False)
    before = [id(p) for p in module.parameters()]
    module.to("cpu").to(_tensors((args, kwargs))[0].device)
    return module.state_dict(), before == [id(p) for p in module.parameters()], module(*args, **kwargs)


_MODULE_KINDS = {
    "module forward": Kind(_always, _module_samples, _module_forward, 200),
    "module backward": Kind(_always, _module_samples, _module_backward, 200, aliasing=False),
    "module state": Kind(_always, _module_samples, _module_reload, 10),
}


# Optimizers ------------------------------------------------------------------------------------------------------

_STEPS = 3
# Counters, which optimizers may keep on the host.
_HOST_STATE = ("step", "mu_product")


def _optimizer_samples(info: Any, dtype: torch.dtype | None) -> Iterator[Sample]:
    if info.only_supports_sparse_grads:
        variants: list[dict[str, Any]] = [{}]
    else:
        variants = [{"foreach": False}] + [{impl: True} for impl in info.supported_impls if impl != "differentiable"]
    for inputs in info.optim_inputs_func(device="cpu"):
        for variant in variants:
            if set(variant) & set(inputs.kwargs):
                continue
            generator = torch.Generator().manual_seed(0)
            shapes = ([4, 3], [5], [2, 3, 2])
            if info.optim_cls.__name__ == "Muon":  # takes matrices only
                shapes = ([4, 3], [5, 2], [2, 6])
            params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]
            grads = [[torch.randn(s, generator=generator, dtype=dtype) for s in shapes] for _ in range(_STEPS)]
            if info.only_supports_sparse_grads:
                grads = [[g.to_sparse() for g in step] for step in grads]
            yield Sample((params, grads, inputs.kwargs), variant)


def _optimizer_step(info: Any, sample: Sample) -> Any:
    params, grads, kwargs = sample.tree
    optimizer = info.optim_cls(params, **kwargs, **sample.about)
    history = []
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        optimizer.step(lambda: sum(p.detach().abs().sum() for p in params))
        history.append([p.detach().clone() for p in params])
    state = optimizer.state_dict()["state"]
    return history, [{k: v for k, v in sorted(s.items()) if k not in _HOST_STATE} for s in state.values()]


def _optimizer_reload(info: Any, sample: Sample) -> Any:
    """A state dict moves to a new optimizer, which goes on as the first would."""
    params, grads, kwargs = sample.tree
    first = info.optim_cls(params, **kwargs, **sample.about)
    results = []
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        first.step(lambda: sum(p.detach().abs().sum() for p in params))
        second = info.optim_cls(params, **kwargs, **sample.about)
        second.load_state_dict(first.state_dict())
        first = second
        results.append([p.detach().clone() for p in params])
    return results


_OPTIMIZER_KINDS = {
    "optimizer step": Kind(_always, _optimizer_samples, _optimizer_step, 200),
    "optimizer state": Kind(_always, _optimizer_samples, _optimizer_reload, 200),
}

SUITES = {
    "operator": Suite(
        lambda: _by_name(common_methods_invocations.op_db, lambda op: op.full_name),
        lambda op: op.supported_dtypes("cpu"),
        _OPERATOR_KINDS,
        frozenset({"errors"}),
    ),
    "reference": Suite(
        lambda: _by_name(common_methods_invocations.python_ref_db, lambda op: op.full_name),
        lambda op: op.supported_dtypes("cpu") & {torch.float32, torch.int64, torch.complex64},
        {"python reference": Kind(_always, _op_samples, _forward, 20)},
    ),
    "module": Suite(
        lambda: _by_name(common_modules.module_db, lambda m: m.name),
        lambda m: [d for d in m.dtypes],
        _MODULE_KINDS,
    ),
    "optimizer": Suite(
        lambda: _by_name(common_optimizers.optim_db, lambda o: o.optim_cls.__name__),
        lambda o: [torch.float32, torch.float64] + ([torch.complex64] if o.supports_complex else []),
        _OPTIMIZER_KINDS,
    ),
}


def spread(samples: list[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples, evenly spread over the list."""
    if len(samples) <= limit:
        return samples
    return [samples[i * len(samples) // limit] for i in range(limit)]


def reset_seeds() -> None:
    """Sample generators draw from several global generators: each case starts them anew."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
