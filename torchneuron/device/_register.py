"""Registers the device with PyTorch: name, module, methods, serialization, processes."""

from __future__ import annotations

import os
import sys

import torch

from torchneuron import _C, distributed, env
from torchneuron.device import _lazy, _patches, _sharing, fusion

# HBM of one logical core of trn2.48xlarge: 96 GiB a chip, four logical cores (LNC 2) a chip.
_CORE_MEMORY = 24 << 30


def _machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as f:
            total = min(total, int(f.read()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        pass
    return total


def register(module_name: str) -> None:
    """Makes `neuron` a device of this process's PyTorch."""
    env.check()
    count = env.device_count()
    capacity = env.MEMORY_BYTES.get() or min(_CORE_MEMORY, _machine_memory() * 9 // 10 // count)
    torch.utils.rename_privateuse1_backend("neuron")
    _C.initialize(
        device_count=count,
        capacity=capacity,
        launch_blocking=env.LAUNCH_BLOCKING.get(),
        strict=env.STRICT.get(),
        fusion=env.FUSION.get(),
    )
    torch._register_device_module("neuron", sys.modules[module_name])
    torch.set_autocast_dtype("neuron", torch.bfloat16)  # of this thread; PyTorch keeps it for each thread
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.nn.parameter.UninitializedTensorMixin._allowed_methods.append(torch.Tensor.neuron)
    _sharing.register()
    _patches.apply()
    _lazy.install()
    fusion.install_log()
    distributed.register()
