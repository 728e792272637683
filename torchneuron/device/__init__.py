"""The device module: `torch.neuron`, with the names of `torch.cuda`.

Importing it registers the device (`torch.device("neuron")`). `import torch` does so by itself.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch

from torchneuron import _C
from torchneuron.device import _register
from torchneuron.device._index import Device, device_index
from torchneuron.device.fusion import fused_programs, fusion_stats, reset_fusion_stats
from torchneuron.device.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from torchneuron.device.ops import clear_op_tracking, get_executed_ops, get_fallback_ops, get_narrowed_ops
from torchneuron.device.properties import (
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_bf16_supported,
)
from torchneuron.device.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torchneuron.device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)

__all__ = [
    "Event", "Stream", "StreamContext", "can_device_access_peer", "clear_op_tracking", "current_device",
    "current_stream", "default_generators", "default_stream", "device", "device_count", "device_of", "empty_cache",
    "fused_programs", "fusion_stats", "get_amp_supported_dtype", "get_device_capability", "get_device_name",
    "get_device_properties", "get_executed_ops", "get_fallback_ops", "get_narrowed_ops", "get_rng_state",
    "get_rng_state_all", "init", "initial_seed", "is_available", "is_bf16_supported", "is_current_stream_capturing",
    "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict",
    "memory_summary", "reset_accumulated_memory_stats", "reset_fusion_stats", "reset_max_memory_allocated",
    "reset_peak_memory_stats", "seed", "seed_all", "set_device", "set_per_process_memory_fraction", "set_rng_state",
    "set_rng_state_all", "set_stream", "stream", "synchronize",
]  # fmt: skip


def is_available() -> bool:
    """Whether there is a neuron device: the software NeuronCore always is one."""
    return _C.device_count() > 0


def device_count() -> int:
    """Number of neuron devices of this process."""
    return _C.device_count()


def is_initialized() -> bool:
    """Whether a neuron device was used in this process."""
    return _C.initialized() and not _is_in_bad_fork()


def init() -> None:
    """Initialises the current device. Every first use does so by itself."""
    _C.init_device(-1)


def _lazy_init() -> None:
    init()


def _lazy_call(callback: Callable[[], Any], **_: Any) -> None:
    callback()


def _is_in_bad_fork() -> bool:
    return _C.in_bad_fork()


def current_device() -> int:
    """Index of the current device of this thread."""
    return _C.current_device()


def set_device(device: Device) -> None:
    """Makes `device` the current device of this thread."""
    _C.set_device(device_index(device))


def is_current_stream_capturing() -> bool:
    """Whether this thread captures a graph (`torch.accelerator.Graph`)."""
    return _C.is_capturing()


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether copies between two devices need no detour over the host: always, on one machine."""
    indices = [device_index(d) for d in (device, peer_device)]
    for index in indices:
        if index >= device_count():
            raise AssertionError(f"There is no device neuron:{index}: this process has {device_count()}.")
    return indices[0] != indices[1]


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Data types that `torch.autocast("neuron")` takes."""
    return [torch.bfloat16, torch.float16, torch.float32]


class device:
    """Context manager that changes the current device.

    Args:
        device: index, `torch.device` or string; a negative index or None changes nothing.
    """

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        if self.idx >= 0:
            _C.set_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        if self.idx >= 0:
            _C.set_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a neuron tensor or storage current; others change nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "neuron" else None)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(_C.default_generator(i) for i in range(device_count()))
    if name == "_initialized":  # torch.utils.checkpoint stashes the RNG state only if this is true
        return is_initialized()
    raise AttributeError(f"module 'torch.neuron' has no attribute '{name}'")


_register.register(__name__)
atexit.register(_C.shutdown)
