"""`torch.compile(backend="neuron")`: found by Dynamo through the `torch_dynamo_backends` entry point."""

from __future__ import annotations

from torchneuron.compile.backend import default_backend, neuron_backend

__all__ = ["default_backend", "neuron_backend"]
