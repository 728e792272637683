"""Patches of torch: the only file for them. Each names what is missing, the upstream issue, and when it may go."""

from __future__ import annotations

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


def apply() -> None:
    """Applies the patches that this torch needs."""
    _dlpack_device()
