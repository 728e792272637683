"""`torch.compile(backend="neuron")`: found by Dynamo through the `torch_dynamo_backends` entry point."""

from __future__ import annotations

from typing import Any

__all__ = ["default_backend", "neuron_backend"]


def __getattr__(name: str) -> Any:
    # Dynamo is loaded with the backend, so the backend is loaded when Dynamo asks.
    if name in __all__:
        from torchneuron.compile import backend

        return getattr(backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
