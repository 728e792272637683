"""`torchneuron info`: what is here, what is missing and how to get it. Works when torch or the extension is missing."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torchneuron
from torchneuron import env
from torchneuron.cli._table import table

_PACKAGE = Path(torchneuron.__file__).parent
_REBUILD = "Build it: `make build` in the source tree (docs/errors.md)."


def _program(name: str) -> Callable[[], str | None]:
    return lambda: shutil.which(name)


def _library(name: str) -> Callable[[], str | None]:
    return lambda: ctypes.util.find_library(name)


# What the device can do without: name, how it is found, what it is for, how to get it.
OPTIONAL = [
    ("libfabric", _library("fabric"), "collectives between hosts", "sudo apt-get install libfabric1"),
    ("neuronx-cc", _program("neuronx-cc"), "compiling for Trainium itself", "AWS Neuron SDK, package neuronx-cc"),
    ("libnrt", _library("nrt"), "running on Trainium itself", "AWS Neuron SDK, package aws-neuronx-runtime-lib"),
    ("ccache", _program("ccache"), "faster rebuilds; not used at run time", "sudo apt-get install ccache"),
]


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _required_torch() -> str:
    try:
        wanted = importlib.metadata.requires("torchneuron") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((text.removeprefix("torch") for text in wanted if text.startswith(("torch<", "torch>"))), "")


def _extension() -> Path | None:
    """The file of torchneuron._C, found without loading it."""
    spec = importlib.util.find_spec("torchneuron._C")
    return Path(spec.origin) if spec and spec.origin else None


def _device_rows() -> Iterator[tuple[str, str]]:
    """Torch, the extension and the device; each row says what to do where something is wrong."""
    try:
        import torch
    except Exception as error:
        yield "torch", f"cannot be imported: {error}. Install it: pip install 'torch{_required_torch()}'."
        return
    yield "torch", f"{torch.__version__} (supported: {_required_torch() or 'see pyproject.toml'})"
    extension = _extension()
    if not extension:
        others = sorted(path.name for path in _PACKAGE.glob("_C.*"))
        found = f"there is {', '.join(others)}, for another Python" if others else "not built"
        yield "extension", f"missing: {found}. {_REBUILD}"
        return
    yield "extension", str(extension)

    loaded = hasattr(torch, "neuron")
    error = torchneuron._load_error
    if not loaded and not error:
        try:
            importlib.import_module("torchneuron.device")
        except Exception as caught:
            error = caught
    if error:
        yield "autoload", f"failed: {type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            yield "", f"The extension was built for another torch or Python. {_REBUILD}"
        return
    switched_off = os.environ.get(env.AUTOLOAD.name) == "0"
    reason = f"off ({env.AUTOLOAD.name}=0)" if switched_off else "no entry point: the package is not installed"
    yield "autoload", "`import torch` loads the device" if loaded else f"{reason}; `import torchneuron.device` loads it"
    for i in range(torch.neuron.device_count()):
        properties = torch.neuron.get_device_properties(i)
        yield f"neuron:{i}", f"{properties.name}, {_size(properties.total_memory)}"
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"


def _rows() -> Iterator[tuple[str, str]]:
    yield "torchneuron", f"{torchneuron.__version__} in {_PACKAGE}"
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield from _device_rows()


def main(arguments: list[str]) -> int:
    """Prints what is here; returns 1 if the device cannot be used."""
    argparse.ArgumentParser("torchneuron info", description=__doc__).parse_args(arguments)
    rows = list(_rows())
    print(table(("what", "state"), rows))
    print("\nenvironment (all variables: torchneuron env)")
    in_use = [(v.name, os.environ[v.name]) for v in env.VARIABLES if v.name in os.environ]
    print("\n".join(f"  {name}={value}" for name, value in in_use) or "  nothing set")
    print()
    found = [(name, probe() or "-", purpose, "" if probe() else how) for name, probe, purpose, how in OPTIONAL]
    print(table(("optional", "found", "for", "to get it"), found))
    return 0 if any(name.startswith("neuron:") for name, _ in rows) else 1
