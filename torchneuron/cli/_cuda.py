"""Meets code that is for CUDA alone while a script runs: notes it, and lets the script go on with the neuron device.

For the time of a check only. Nothing here is loaded otherwise.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchneuron.cli import _where

# What to write for what CUDA code uses. Names of torch.cuda that are not here have the same name in torch.accelerator
# or torch.neuron, or no counterpart.
INSTEAD = {
    ".cuda()": ".to(device)",
    ".is_cuda": 'tensor.device.type != "cpu"',
    "torch.cuda.current_device": "torch.accelerator.current_device_index()",
    "torch.cuda.set_device": "torch.accelerator.set_device_index(...)",
    "torch.cuda.device": "torch.accelerator.device_index(...)",
    "torch.cuda.mem_get_info": "torch.accelerator.get_memory_info()",
    "torch.cuda.Stream": "torch.Stream(device=device)",
    "torch.cuda.Event": "torch.Event(device=device)",
    "torch.cuda.stream": "with stream: (a torch.Stream is a context manager)",
    "torch.cuda.CUDAGraph": "torch.accelerator.Graph",
    "torch.cuda.graph": "torch.accelerator.Graph",
    "torch.cuda.manual_seed": "torch.manual_seed(...), which seeds every device",
    "torch.cuda.manual_seed_all": "torch.manual_seed(...), which seeds every device",
    "torch.cuda.nvtx": "torch.profiler.record_function(...)",
    "torch.cuda.amp.autocast": "torch.autocast(device_type=device.type)",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler(device.type)",
}
# Functions and classes that take a device: their arguments are translated.
TAKES_DEVICE = [
    (torch, "autocast"), (torch.amp, "autocast"), (torch.amp, "GradScaler"), (torch, "Generator"), (torch, "load"),
    (torch, "set_default_device"), (torch, "get_device_module"), (torch, "Event"), (torch, "Stream"),
]  # fmt: skip
# Packages that need CUDA.
PACKAGES = {
    "apex": "torch.amp and torch.nn",
    "bitsandbytes": "torch.bfloat16 weights; there is no counterpart",
    "cupy": "torch",
    "flash_attn": "torch.nn.functional.scaled_dot_product_attention",
    "pycuda": "torch",
    "pynvml": "torch.accelerator.memory_stats(), get_memory_info()",
    "transformer_engine": "torch.nn",
    "triton": "PyTorch operators, or an NKI kernel",
    "xformers": "torch.nn.functional.scaled_dot_product_attention",
}

Use = tuple[str, str, str]
"""What was used, where, and what to write instead."""


def translate(value: Any) -> Any:
    """`value` with the device cuda replaced by neuron."""
    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        return "neuron" + value[4:]
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("neuron", value.index) if value.index is not None else torch.device("neuron")
    if type(value) is dict:
        return {key: translate(inner) for key, inner in value.items()}
    return value


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, (str, torch.device)) else "{...}"


class _Nothing:
    """Stands for a module whose functions need not do anything: each returns an empty context."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: contextlib.nullcontext()


class Watch(TorchFunctionMode):
    """While active, CUDA-only code of the script is noted in `uses` and works on the neuron device."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Use, None] = {}  # in order of appearance

    def note(self, what: str, instead: str) -> None:
        self.uses.setdefault((what, _where.caller(), instead))

    # Arguments ----------------------------------------------------------------------------------------------------

    def _arguments(self, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        new_args = tuple(translate(a) for a in args)
        new_kwargs = {key: translate(a) for key, a in kwargs.items()}
        for old, new in zip((*args, *kwargs.values()), (*new_args, *new_kwargs.values())):
            if old is not new and old != new:
                self.note(f"{_shown(old)} in {name}", _shown(new))
        return new_args, new_kwargs

    def _taking_neuron(self, target: Any, name: str) -> Any:
        """`target`, a function or class, that takes cuda for neuron."""
        if not isinstance(target, type):

            @functools.wraps(target)
            def call(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = self._arguments(name, args, kwargs)
                return target(*args, **kwargs)

            return call

        class Meta(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                args, kwargs = self._arguments(name, args, kwargs)
                return target(*args, **kwargs)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, target)

            def __subclasscheck__(cls, subclass: type) -> bool:
                return issubclass(subclass, target)

            def __getattr__(cls, attribute: str) -> Any:
                return getattr(target, attribute)

        return Meta(target.__name__, (), {"__doc__": target.__doc__})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Every call of PyTorch's functions and tensor methods comes through here."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            self.note(".cuda()", INSTEAD[".cuda()"])
            tensor, device, non_blocking, *_ = (*args, kwargs.get("device"), kwargs.get("non_blocking", False), None)
            index = device if isinstance(device, int) else torch.device(device or "cuda").index
            return tensor.to(torch.device("neuron", index), non_blocking=bool(non_blocking))
        if func == torch.Tensor.is_cuda.__get__:
            if _where.is_internal(_asking_file()):
                return func(*args, **kwargs)
            self.note(".is_cuda", INSTEAD[".is_cuda"])
            return args[0].device.type == "neuron"
        name = getattr(func, "__name__", str(func))
        owner = "torch" if getattr(torch, name, None) is func else "Tensor"
        args, kwargs = self._arguments(f"{owner}.{name}", args, kwargs)
        return func(*args, **kwargs)

    # torch.cuda ---------------------------------------------------------------------------------------------------

    def _counterpart(self, module: str, name: str, original: Any) -> Any:
        """Notes the use of an attribute of torch.cuda and returns what stands in for it."""
        full = f"{module}.{name}"
        if full in INSTEAD:
            instead = INSTEAD[full]
        elif hasattr(torch.accelerator, name):
            instead = f"torch.accelerator.{name}"
        elif hasattr(torch.neuron, name):
            instead = f"torch.neuron.{name}"
        else:
            instead = 'nothing: only where device.type == "cuda"'
        self.note(full, instead)
        if full == "torch.cuda.nvtx":
            return _Nothing()
        if module == "torch.cuda.amp" and hasattr(torch.amp, name):
            return functools.partial(getattr(torch.amp, name), "neuron")
        target = getattr(torch.neuron, name, original)
        return self._taking_neuron(target, full) if callable(target) else target

    def _watched_module(self) -> type[types.ModuleType]:
        watch = self

        class Watched(types.ModuleType):
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if name.startswith("__") or _where.is_internal(sys._getframe(1).f_code.co_filename):
                    return value
                if isinstance(value, types.ModuleType) and name != "nvtx":
                    return value
                return watch._counterpart(super().__getattribute__("__name__"), name, value)

        return Watched

    # Process groups and imports -----------------------------------------------------------------------------------

    def _init_process_group(self, original: Callable[..., Any], backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend and "nccl" in str(backend):
            known = torch.distributed.is_backend_available("neuron")
            self.note(f'backend "{backend}"', 'leave it out, or backend="neuron"')
            backend = "neuron" if known else "gloo"
        args, kwargs = self._arguments("init_process_group", args, kwargs)
        return original(backend, *args, **kwargs)

    def _import(self, original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """What `import` calls. PyTorch may have imported the package already (triton is part of its CUDA builds)."""
        package = name.partition(".")[0]
        if package in PACKAGES and not _where.is_internal(_asking_file()):
            self.note(f"import {package}", PACKAGES[package])
        return original(name, *args, **kwargs)

    @contextlib.contextmanager
    def active(self) -> Iterator[Watch]:
        """Watches until the block is left."""
        with contextlib.ExitStack() as stack:

            def replace(owner: Any, name: str, value: Any) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            for owner, name in TAKES_DEVICE:
                replace(owner, name, self._taking_neuron(getattr(owner, name), f"torch.{name}"))
            if torch.distributed.is_available():
                original = torch.distributed.init_process_group
                replace(torch.distributed, "init_process_group", functools.partial(self._init_process_group, original))
            watched = self._watched_module()
            for name, module in list(sys.modules.items()):
                if (name == "torch.cuda" or name.startswith("torch.cuda.")) and type(module) is types.ModuleType:
                    replace(module, "__class__", watched)
            replace(builtins, "__import__", functools.partial(self._import, builtins.__import__))
            stack.enter_context(self)
            yield self


def _asking_file() -> str:
    """The innermost file on the stack beyond this one, PyTorch's function modes and the import system."""
    skipped = (__file__, torch.overrides.__file__, "<frozen ")
    return next((file for file, _ in _where.stack() if not file.startswith(skipped)), "")
