"""Registrations with parts of PyTorch that `import torch` does not load: done when, and if, those are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _default_backend(registry: ModuleType) -> None:
    def neuron_or_inductor(*args: Any, **kwargs: Any) -> Any:
        from torchneuron.compile import default_backend

        return default_backend(*args, **kwargs)

    registry.set_default_backend(neuron_or_inductor)


def _device_interface(interfaces: ModuleType) -> None:
    from torchneuron.device._dynamo_interface import make_interface

    interfaces.register_interface_for_device("neuron", make_interface(interfaces.DeviceInterface))


def _rng_state(rng_prims: ModuleType) -> None:
    from torchneuron.device import _patches

    _patches.rng_state_operators(rng_prims)


def _flex_attention(flex_attention: ModuleType) -> None:
    from torchneuron.device import _patches

    _patches.flex_attention_device(flex_attention)


def _cache_artifacts(cache: ModuleType) -> None:
    from torchneuron.compile.artifact import PlanArtifact

    cache.CacheArtifactFactory.register(PlanArtifact)


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "torch._dynamo.backends.registry": _default_backend,
    "torch._dynamo.device_interface": _device_interface,
    "torch._prims.rng_prims": _rng_state,
    "torch.nn.attention.flex_attention": _flex_attention,
    "torch.compiler._cache": _cache_artifacts,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _AFTER_IMPORT[module.__name__](module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules above where they are, and adds our registration to their import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Registers now what is imported already, and the rest at its import."""
    for name, register in _AFTER_IMPORT.items():
        if name in sys.modules:
            register(sys.modules[name])
    sys.meta_path.insert(0, Finder())
