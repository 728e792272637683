"""The plans of compiled graphs on disk.

An entry is data: a plan as JSON, compressed, behind a checksum. It is written to a temporary file and renamed, so that
any number of processes may read and write at once; whatever does not read back whole is made again. Nothing is ever
unpickled. The name of an entry is the hash of all that the plan depends on: the graph with the types, sizes and strides
of its values, the passes, and the versions of PyTorch and of this package.

The same bytes travel with `torch.compiler.save_cache_artifacts()`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.compiler._cache import CacheArtifactManager

import torchneuron
from torchneuron import _C, env
from torchneuron.compile.artifact import PlanArtifact
from torchneuron.compile.plan import Plan, Slot, Step

log = logging.getLogger(__name__)

_MAGIC = b"torchneuron plan 1\n"
# Bytes of constants (folded masks and tables) that an entry may carry.
_CONSTANT_BYTES = 1 << 20
# Files that are kept; the oldest go first.
_ENTRIES = 4096

_ENUMS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.memory_format: "memory_format",
    torch.layout: "layout",
    torch.device: "device",
}


class Unencodable(Exception):
    """A plan holds something that is not data: a function of Python, a large constant."""


def directory() -> Path:
    """Where entries are."""
    return Path(env.CACHE_DIR.get()).expanduser() / "compile"


def _encode(value: Any) -> Any:
    if isinstance(value, Slot):
        return {"slot": value.index}
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: _encode(v) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Step):
        return {"step": [_encode(getattr(value, f)) for f in _FIELDS]}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    for kind, name in _ENUMS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise Unencodable(f"a {type(value).__name__}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "slot":
        return Slot(content)
    if kind == "dict":
        return {k: _decode(v) for k, v in content.items()}
    if kind == "step":
        return Step(**dict(zip(_FIELDS, map(_decode, content))))
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "device":
        return torch.device(content)
    if kind not in _ENUMS.values():
        raise ValueError(f"unknown kind of value {kind!r}")
    return getattr(torch, content)


def _encode_constant(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout != torch.strided:
        raise Unencodable(f"a constant of layout {tensor.layout}")
    elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    if elements.nbytes > _CONSTANT_BYTES:
        raise Unencodable("a large constant")
    return {
        "data": base64.b85encode(elements.cpu().view(torch.uint8).numpy().tobytes()).decode(),
        "dtype": _encode(tensor.dtype),
        "device": _encode(tensor.device),
        "place": [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()],
    }


def _decode_constant(entry: dict[str, Any]) -> torch.Tensor:
    raw = bytearray(base64.b85decode(entry["data"]))
    dtype = _decode(entry["dtype"])
    elements = torch.frombuffer(raw, dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
    return elements.to(_decode(entry["device"])).as_strided(*entry["place"])


# What a step is on disk; the rest is known to lowering alone.
_FIELDS = tuple(f.name for f in fields(Step) if f.name not in ("function", "label", "fusion", "writes"))


def encode(plan: Plan) -> bytes:
    """A plan as bytes. Raises Unencodable if it holds what is not data."""
    if any(step.kind in ("python", "kernel") for step in plan.steps):
        raise Unencodable("a call of Python or a kernel")
    document = {
        "inputs": plan.inputs,
        "slots": plan.slots,
        "constants": [[slot, _encode_constant(t)] for slot, t in plan.constants],
        "steps": _encode(plan.steps),
        "outputs": _encode(plan.outputs),
    }
    payload = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def decode(content: bytes) -> Plan:
    """The plan in `content`. Raises ValueError if it is not one that `encode` made, byte for byte."""
    head = len(_MAGIC) + hashlib.sha256().digest_size
    payload = content[head:]
    if content[:head] != _MAGIC + hashlib.sha256(payload).digest():
        raise ValueError("the entry is torn or of another version")
    document = json.loads(zlib.decompress(payload))
    return Plan(
        document["inputs"],
        document["slots"],
        [(slot, _decode_constant(entry)) for slot, entry in document["constants"]],
        _decode(document["steps"]),
        _decode(document["outputs"]),
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flags = (value.is_conj(), value.is_neg(), value.is_sparse, value.is_nested)
        strides = tuple(value.stride()) if value.layout == torch.strided and not value.is_nested else ()
        return f"{value.dtype}{tuple(value.shape)}{strides}{value.device}{flags}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_describe, value))}]"
    return f"{type(value).__name__}:{value}"


@functools.cache
def _build() -> str:
    """What else a plan depends on: the code that makes it and the code that reads it."""
    files = [Path(_C.__file__), *sorted(Path(__file__).parent.rglob("*.py"))]
    stats = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return f"{torch.__version__} {torchneuron.__version__} {stats}"


def key(graph: torch.fx.GraphModule, settings: Iterable[str]) -> str:
    """The name of a graph's entry."""
    from torchneuron.compile.lowering import user_line

    digest = hashlib.sha256(f"{_build()} {sorted(settings)}\n".encode())
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "torchneuron":
            raise Unencodable("a call of a kernel by its number in this process")
        line = f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {_describe(node.meta.get('val'))}"
        digest.update(f"{line} {user_line(node)}\n".encode())
        if node.op == "get_attr":
            constant = functools.reduce(getattr, str(node.target).split("."), graph)
            if isinstance(constant, torch.Tensor) and constant.numel() * constant.itemsize <= _CONSTANT_BYTES:
                digest.update(constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(constant, torch.Tensor):
                raise Unencodable("large constants")
    return digest.hexdigest()


def _path(name: str) -> Path:
    return directory() / name[:2] / name


def load(name: str) -> Plan | None:
    """The plan called `name`, or None if there is none that reads back whole; a broken one is removed."""
    path = _path(name)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        plan = decode(content)
    except Exception as error:
        # Whatever is wrong with it: it is made again.
        log.warning("Cache entry %s is not used: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    CacheArtifactManager.record_artifact(PlanArtifact.type(), name, content)
    return plan


def store(name: str, plan: Plan) -> None:
    """Keeps a plan. A cache that cannot be written to is no error."""
    content = encode(plan)
    CacheArtifactManager.record_artifact(PlanArtifact.type(), name, content)
    write(name, content)


def write(name: str, content: bytes) -> None:
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _trim()
    except OSError as error:
        log.warning("The compile cache in %s cannot be written: %s", directory(), error)


@functools.cache
def _trim() -> None:
    """Once a process: removes the oldest entries beyond the limit."""
    files = [p for p in directory().glob("*/*") if p.is_file()]
    if len(files) <= _ENTRIES:
        return
    with contextlib.suppress(OSError):  # another process trims, too
        for path in sorted(files, key=lambda p: p.stat().st_mtime)[: len(files) - _ENTRIES]:
            path.unlink(missing_ok=True)
