"""Patches of torch: the only file for them. Each names what is missing, the upstream issue, and when it may go."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def _dlpack_device() -> None:
    """`Tensor.__dlpack_device__` raises "Unknown device type" for every renamed PrivateUse1 backend.

    C++ exports such tensors as kDLExtDev. Upstream: pytorch PR #195815, open as of 2.14.1. Goes when that is in.
    """
    original = torch.Tensor.__dlpack_device__

    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if self.device.type == "neuron":
            from torch.utils.dlpack import DLDeviceType

            return (DLDeviceType.kDLExtDev, self.device.index)
        return original(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__


def rng_state_operators(rng_prims: ModuleType) -> None:
    """Activation checkpointing in compiled graphs keeps and replays the RNG state by two operators that know
    cuda, cpu, hpu and xpu by name and refuse every PrivateUse1 backend.

    No upstream issue is known for it. Goes when they ask the device module (torch.get_device_module) instead.
    """
    key = torch._C.DispatchKey.BackendSelect
    save, replay = rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state
    save_others, replay_others = save.py_kernels[key], replay.py_kernels[key]

    def run_and_save(op: Any, *args: Any, **kwargs: Any) -> Any:
        if rng_prims.get_device(args, kwargs) != "neuron":
            return save_others(op, *args, **kwargs)
        return torch.neuron.get_rng_state(), op(*args, **kwargs)

    def run_with(state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        if rng_prims.get_device(args, kwargs) != "neuron":
            return replay_others(state, op, *args, **kwargs)
        current = torch.neuron.get_rng_state()
        torch.neuron.set_rng_state(state)
        try:
            return op(*args, **kwargs)
        finally:
            torch.neuron.set_rng_state(current)

    for operator, kernel in ((save, run_and_save), (replay, run_with)):
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()


def flex_attention_device(flex_attention: ModuleType) -> None:
    """`flex_attention` refuses tensors whose device is not on its list, which no backend can join.

    Upstream marks the check to be removed ("TODO: Remove once non cuda/cpu devices support is added"). Goes with it.
    """
    original = flex_attention._validate_device

    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "neuron":
            original(query, key, value)

    flex_attention._validate_device = _validate_device


def default_backend_of_process_groups(c10d: ModuleType) -> None:
    """`init_process_group()` without a name finds the accelerator's backend, but if that is a custom one it makes gloo
    the group's default, which the group does not have: DDP's logger and other users of the default then fail.

    No upstream issue is known for it. Goes when `_new_process_group_helper` treats custom backends as it does NCCL.
    """
    original = c10d._new_process_group_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        group, store = original(*args, **kwargs)
        if c10d._world.pg_backend_config.get(group) == "neuron:neuron":
            group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
        return group, store

    c10d._new_process_group_helper = helper


def apply() -> None:
    """Applies the patches that this torch needs."""
    _dlpack_device()
