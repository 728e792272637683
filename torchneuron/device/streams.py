"""Streams and events of `torch.neuron`: PyTorch's generic classes, bound to this device."""

from __future__ import annotations

from typing import Any

import torch

from torchneuron import _C
from torchneuron.device._index import Device, device_index


def _of(device: Device) -> torch.device:
    return torch.device("neuron", device_index(device))


class _Generic(type):
    """PyTorch compares streams and events by exact type: `torch.neuron.Stream(...)` makes a generic `torch.Stream`."""

    generic: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.generic) and instance.device.type == "neuron"


class Stream(metaclass=_Generic):
    """An in-order queue of device work.

    Args:
        device: where; the current device if None.
        priority: accepted as on CUDA; all streams of the software device have one priority.
    """

    generic = torch.Stream

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> torch.Stream:
        if "stream_id" in kwargs:
            return torch.Stream(**kwargs)
        return torch.Stream(device=_of(device), priority=priority)


class Event(metaclass=_Generic):
    """A point in a stream. `elapsed_time` is host wall time in milliseconds; predicted Trainium time is another call's.

    Args:
        enable_timing: whether `elapsed_time` may be asked.
        blocking: accepted as on CUDA; a waiting thread sleeps in any case.
        interprocess: must be False.
        device: where it will be recorded; the current device if None.
    """

    generic = torch.Event

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, device: Device = None
    ) -> torch.Event:
        if interprocess:
            raise ValueError("neuron events cannot be shared between processes; leave interprocess=False.")
        return torch.Event(device=_of(device), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Device = None) -> torch.Stream:
    """The stream that this thread's work on `device` goes to."""
    return torch.accelerator.current_stream(_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    """Stream 0 of `device`, which is current unless another is set."""
    where = _of(device)
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=_C.default_stream(where.index), device_index=where.index, device_type=kind)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes `stream` current on its device, and its device the current one."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream current, and its device; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = _C.current_device()
        self._before = current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is None:
            return
        set_stream(self._before)
        _C.set_device(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """`with torch.neuron.stream(s):` runs the block's work on `s`."""
    return StreamContext(stream)


def synchronize(device: Device = None) -> None:
    """Waits for all work on `device`. Ctrl-C interrupts the wait."""
    _C.synchronize(device_index(device))
