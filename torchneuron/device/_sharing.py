"""Neuron tensors through `torch.multiprocessing`: their memory moves to shared memory, as `share_memory_()` does on CPU."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Defers to the first import of `torch.multiprocessing.reductions`, which `import torch` has done already."""
