"""The vendor's module names, `nki` and `torch_neuronx`, for this package's implementation."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

# vendor's name -> ours; submodules are listed because `import nki.language` looks them up by name
NAMES = {
    "nki": "torchneuron.nki",
    "nki.language": "torchneuron.nki.language",
    "nki.isa": "torchneuron.nki.isa",
    "nki.isa.constants": "torchneuron.nki.isa_constants",
    "nki.collectives": "torchneuron.nki.collectives",
    "nki.typing": "torchneuron.nki.typing",
    "nki.dtype": "torchneuron.nki.dtypes",
    "nki.tensor": "torchneuron.nki.tensor",
    "torch_neuronx": "torchneuron.nki.torch_ops",
}


def provide(name: str) -> None:
    """Puts our module, and its submodules' names, where `import name` finds them."""
    for vendor, ours in NAMES.items():
        if vendor == name or vendor.startswith(name + "."):
            sys.modules[vendor] = importlib.import_module(ours)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        provide(module.__name__)  # replaces the new, empty module in sys.modules


class Finder(importlib.abc.MetaPathFinder):
    """Last on sys.meta_path: answers for the vendor's names when nobody else does."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True) if name in NAMES else None


def install() -> None:
    """Installs the finder, once."""
    if not any(isinstance(f, Finder) for f in sys.meta_path):
        sys.meta_path.append(Finder())
