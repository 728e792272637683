"""From what users write for a device to its index."""

from __future__ import annotations

import torch

from torchneuron import _C

Device = torch.device | str | int | None


def device_index(device: Device, optional: bool = False) -> int:
    """Index of `device`; the current device for None and for `"neuron"` without an index.

    Raises ValueError for another device type. `optional` lets a negative index pass.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return device if optional or device >= 0 else _C.current_device()
    if device is None:
        return _C.current_device()
    device = torch.device(device)
    if device.type != "neuron":
        raise ValueError(f"Expected a neuron device, but got {device}. Write 'neuron' or 'neuron:0'.")
    return _C.current_device() if device.index is None else device.index
