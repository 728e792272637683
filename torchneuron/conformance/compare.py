"""Copies samples to a device and compares what the two devices make of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_leaves, tree_map

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Mismatch(AssertionError):
    """The devices differ; the text says in what."""


class Inexact(Mismatch):
    """The values differ by more than rounding explains."""


def copy_to(tree: Any, device: str) -> Any:
    """A deep copy of `tree` on `device`, whose tensors keep strides, offsets, shared storages and requires_grad.

    Devices and generators that say CPU say `device` in the copy.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}

    def strided(t: torch.Tensor) -> torch.Tensor:
        source = t.untyped_storage()
        if source._cdata not in storages:
            storages[source._cdata] = torch.UntypedStorage(source.nbytes(), device=device).copy_(source)
        out = torch.empty(0, dtype=t.dtype, device=device)
        out.set_(storages[source._cdata], t.storage_offset(), t.size(), t.stride())
        torch._C._set_conj(out, t.is_conj())
        torch._C._set_neg(out, t.is_neg())
        return out

    def tensor(t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            plain = t.layout == torch.strided and not t.is_quantized and not t.is_nested
            out = strided(t.detach()) if plain else t.detach().clone().to(device)
        if isinstance(t, torch.nn.Parameter):
            out = torch.nn.Parameter(out, requires_grad=t.requires_grad)
        return out.requires_grad_(t.requires_grad)

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.device.type != "cpu":  # a meta tensor
                return x
            if id(x) not in tensors:
                tensors[id(x)] = tensor(x)
            return tensors[id(x)]
        if isinstance(x, torch.nn.Module):
            return copy.deepcopy(x).to(device)
        if isinstance(x, torch.device):
            return torch.device(device) if x.type == "cpu" else x
        if isinstance(x, torch.Generator):
            return torch.Generator(device).manual_seed(x.initial_seed())
        return device if isinstance(x, str) and x == "cpu" else x

    return tree_map(leaf, tree)


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse, quantized or nested tensor is made of; empty for a dense one."""
    if t.is_nested:
        return list(t.unbind()) if t.layout == torch.strided else [t.values(), t.offsets()]
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    return [t.int_repr()] if t.is_quantized else []


def _describe(t: torch.Tensor) -> dict[str, Any]:
    """What must be equal beside the values."""
    about: dict[str, Any] = {"dtype": t.dtype, "layout": t.layout, "requires_grad": t.requires_grad}
    if t.is_nested:
        return about | {"dim": t.dim()}
    about["shape"] = tuple(t.shape)
    if t.layout == torch.sparse_coo:
        about |= {"coalesced": t.is_coalesced(), "sparse_dim": t.sparse_dim()}
    if t.layout == torch.strided:
        about |= {"stride": t.stride(), "conj": t.is_conj(), "neg": t.is_neg()}
    if t.is_quantized:
        about["qscheme"] = t.qscheme()
        if t.qscheme() == torch.per_tensor_affine:
            about |= {"scale": t.q_scale(), "zero_point": t.q_zero_point()}
        else:
            about |= {"scales": t.q_per_channel_scales().tolist(), "zeros": t.q_per_channel_zero_points().tolist()}
    return about


def shared_storages(tensors: list[torch.Tensor]) -> list[tuple[int, int] | None]:
    """For each dense tensor the position of the first one that has the same storage, and its offset there."""
    first: dict[int, int] = {}

    def place(i: int, t: torch.Tensor) -> tuple[int, int] | None:
        dense = t.layout == torch.strided and not t.is_nested
        return (first.setdefault(t.untyped_storage()._cdata, i), t.storage_offset()) if dense else None

    return [place(i, t) for i, t in enumerate(tensors)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense CPU tensors have the same bits; any NaN equals any other."""
    a, b = (x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for x in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return True
    if not a.is_floating_point():
        return False
    nan = a.float().isnan() & b.float().isnan()
    a, b = (x.float() if x.element_size() == 1 else x for x in (a, b))
    return bool(nan.any()) and same_bits(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def _same_values(where: str, cpu: torch.Tensor, host: torch.Tensor) -> bool:
    """False if they are equal within rounding only; raises Mismatch if not even that."""
    if same_bits(cpu, host):
        return True
    try:
        torch.testing.assert_close(host, cpu, equal_nan=True)
    except AssertionError as error:
        raise Inexact(f"{where}: {' '.join(str(error).split())}") from None
    return False


def _compare_tensor(where: str, cpu: torch.Tensor, dev: torch.Tensor, device: str, values: bool) -> bool:
    expected_device = device if cpu.device.type == "cpu" else cpu.device.type
    if dev.device.type != expected_device:
        raise Mismatch(f"{where} is on {dev.device}")
    want, got = _describe(cpu), _describe(dev)
    wrong = {key: (got.get(key), want[key]) for key in want if want[key] != got.get(key)}
    if wrong:
        raise Mismatch(f"{where}: " + ", ".join(f"{k} is {g}, on CPU {w}" for k, (g, w) in wrong.items()))
    if dev.device.type == "meta":
        return True
    if parts := _parts(cpu):
        pairs = list(zip(parts, _parts(dev)))
        return all([_compare_tensor(f"{where} part {i}", c, d, device, values) for i, (c, d) in enumerate(pairs)])
    return not values or _same_values(where, cpu, dev.detach().cpu())


def no_less_exact(cpu: Any, dev: Any, exact: Any) -> bool:
    """Whether the results of `dev` are as near to `exact`, the results in wider types, as those of `cpu`.

    The measure is the largest error of a tensor in units of what `torch.testing.assert_close` allows for one rounding.
    Twice CPU's is as near, and so are three units: a result of one element may be exact on CPU by chance.
    """
    trees = [[x.detach().cpu() for x in tree_leaves(t) if isinstance(x, torch.Tensor)] for t in (cpu, dev, exact)]
    if len({len(tree) for tree in trees}) != 1:
        return False
    for c, d, e in zip(*trees):
        if not c.shape == d.shape == e.shape:
            return False
        if not (c.is_floating_point() or c.is_complex()):
            if not torch.equal(c, d):
                return False
            continue
        rtol, atol = default_tolerances(c)
        c, d, e = (torch.view_as_real(x.to(torch.complex128)) for x in (c, d, e))
        finite = e.isfinite() & c.isfinite() & d.isfinite()
        if not torch.equal(c[~finite].nan_to_num(), d[~finite].nan_to_num()):
            return False
        worst = [((x - e).abs() / (atol + rtol * e.abs()))[finite].max().item() if finite.any() else 0 for x in (c, d)]
        if worst[1] > max(3, 2 * worst[0]):
            return False
    return True


def compare(cpu: Any, dev: Any, device: str, values: bool = True, aliasing: bool = True) -> bool:
    """Compares two results, without the values or which of them share storages if these are false.

    Returns false if some values are equal within rounding only; raises Mismatch if results differ.
    """
    cpus, devs = tree_leaves(cpu), tree_leaves(dev)
    if len(cpus) != len(devs):
        raise Mismatch(f"{len(devs)} results, on CPU {len(cpus)}")
    exact = True
    for i, (c, d) in enumerate(zip(cpus, devs)):
        if isinstance(c, torch.Tensor) and isinstance(d, torch.Tensor):
            exact &= _compare_tensor(f"result {i}", c, d, device, values)
        elif isinstance(c, torch.device):
            if d.type != (device if c.type == "cpu" else c.type):
                raise Mismatch(f"result {i} is {d}")
        elif type(c) is not type(d) or (values and c != d and not (c != c and d != d)):
            raise Mismatch(f"result {i} is {d!r}, on CPU {c!r}")
    tensors = [[x for x in leaves if isinstance(x, torch.Tensor)] for leaves in (cpus, devs)]
    shared = [shared_storages(t) for t in tensors]
    if aliasing and shared[0] != shared[1]:
        raise Mismatch(f"storages (first result that has it, offset) are {shared[1]}, on CPU {shared[0]}")
    return exact
