"""Neuron tensors through `torch.multiprocessing`.

A sent storage moves to shared memory once, in place, as `share_memory_()` does for CPU: both processes see the same
bytes, so a neuron tensor behaves like a CUDA tensor sent by IPC.
"""

from __future__ import annotations

import multiprocessing.resource_sharer as resource_sharer
import multiprocessing.util
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torchneuron import _C

# How long an ending process waits for receivers to fetch what it has sent.
_LINGER_SECONDS = 2.0


def _rebuild_storage(host: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
    flat = torch.empty(0, dtype=torch.uint8).set_(host)
    return _C.from_host(flat, index).untyped_storage()


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "neuron":
        return reductions.reduce_storage(storage)
    host = _C.host_of(storage)
    if host is None or not host.is_shared():
        host = torch.UntypedStorage._new_shared(storage.nbytes())
        _C.rebase(storage, host)
    return _rebuild_storage, (host, storage.device.index)


def _rebuild_tensor(
    cls: type, storage: torch.UntypedStorage, dtype: torch.dtype, geometry: tuple[Any, ...], requires_grad: bool
) -> torch.Tensor:
    offset, size, stride = geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.device.type != "neuron" or tensor.layout != torch.strided or tensor.is_nested:
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "A neuron tensor that is not a leaf and requires grad cannot be sent to another process: "
            "autograd does not cross processes. Send tensor.detach()."
        )
    geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return _rebuild_tensor, (type(tensor), tensor.untyped_storage(), tensor.dtype, geometry, tensor.requires_grad)


def _await_receivers() -> None:
    """Lets receivers fetch shared memory that this process has sent and nobody has taken yet.

    The memory is handed over by a thread of the sender when the receiver unpickles: a worker that puts a result
    and ends at once would take it along.
    """
    deadline = time.monotonic() + _LINGER_SECONDS
    while resource_sharer._resource_sharer._cache and time.monotonic() < deadline:
        time.sleep(0.005)


def register() -> None:
    """Teaches `torch.multiprocessing` neuron tensors and storages."""
    for cls in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(cls, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    multiprocessing.util.Finalize(None, _await_receivers, exitpriority=100)
