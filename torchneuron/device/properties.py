"""What a device is."""

from __future__ import annotations

from dataclasses import dataclass

from torchneuron import _C
from torchneuron.device._index import Device, device_index


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device. `total_memory` is in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Properties of `device`."""
    index = device_index(device)
    return DeviceProperties(get_device_name(index), _C.memory_info(index)[1])


def get_device_name(device: Device = None) -> str:
    """Name of `device`."""
    index = device_index(device)
    if index >= _C.device_count():
        _C.init_device(index)  # raises, and says which devices there are
    return "software NeuronCore"


def get_device_capability(device: Device = None) -> None:
    """None: Trainium has no compute capability."""
    device_index(device)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 is Trainium's main data type."""
    return True
