"""Memory of `torch.neuron`: statistics, cache, snapshots. All sizes are bytes."""

from __future__ import annotations

import pickle
from typing import Any

from torchneuron import _C
from torchneuron.device._index import Device, device_index


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Allocator statistics as nested dictionaries: `stats["allocated_bytes"]["all"]["peak"]`."""
    return _C.memory_stats(device_index(device))


def memory_stats(device: Device = None) -> dict[str, int]:
    """Allocator statistics with flat keys as `torch.cuda.memory_stats`: `allocated_bytes.all.current`."""
    flat: dict[str, int] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", memory_stats_as_nested_dict(device))
    return dict(sorted(flat.items()))


def _stat(name: str, field: str, device: Device) -> int:
    return memory_stats_as_nested_dict(device)[name]["all"][field]


def memory_allocated(device: Device = None) -> int:
    """Bytes held by tensors."""
    return _stat("allocated_bytes", "current", device)


def max_memory_allocated(device: Device = None) -> int:
    """Peak of `memory_allocated` since the start or `reset_peak_memory_stats`."""
    return _stat("allocated_bytes", "peak", device)


def memory_reserved(device: Device = None) -> int:
    """Bytes that the allocator holds: allocated and cached."""
    return _stat("reserved_bytes", "current", device)


def max_memory_reserved(device: Device = None) -> int:
    """Peak of `memory_reserved`."""
    return _stat("reserved_bytes", "peak", device)


def reset_peak_memory_stats(device: Device = None) -> None:
    """Peaks start from the current values."""
    _C.reset_peak_memory_stats(device_index(device))


def reset_max_memory_allocated(device: Device = None) -> None:
    """The same as `reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """The running totals (allocated, freed, retries, out-of-memory errors) start from zero."""
    _C.reset_accumulated_memory_stats(device_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total memory of the device."""
    return _C.memory_info(device_index(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limits the device to a part of its memory.

    Args:
        fraction: 0 to 1, of the memory that the device had at first.
        device: the current device if None.

    Raises:
        ValueError: `fraction` is not between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"The fraction must be between 0 and 1, got {fraction}.")
    index = device_index(device)
    total = _total.setdefault(index, mem_get_info(index)[1])
    _C.set_capacity(index, int(total * fraction))


_total: dict[int, int] = {}


def empty_cache() -> None:
    """Gives cached memory that no tensor uses back to the system."""
    _C.empty_cache()


def _human(n: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Table of the allocator's state for people to read."""
    stats = memory_stats_as_nested_dict(device)
    rows = [("allocated_bytes", "held by tensors"), ("active_bytes", "active"), ("reserved_bytes", "reserved"),
            ("inactive_split_bytes", "free parts of segments"), ("requested_bytes", "asked for")]  # fmt: skip
    counts = [("allocation", "tensors' blocks"), ("segment", "segments")]
    lines = [f"{'neuron:' + str(device_index(device)):24}{'current':>12}{'peak':>12}{'total':>12}{'freed':>12}"]
    for names, show in ((rows, _human), (counts, str)):
        for key, label in names:
            for pool in ("all",) if abbreviated else ("all", "large_pool", "small_pool"):
                s = stats[key][pool]
                name = label if pool == "all" else f"  {pool.split('_')[0]}"
                lines.append(
                    f"{name:24}" + "".join(f"{show(s[f]):>12}" for f in ("current", "peak", "allocated", "freed"))
                )
    lines.append(
        f"out of memory errors {stats['num_ooms']}, retries after emptying the cache {stats['num_alloc_retries']}"
    )
    return "\n".join(lines)


def memory_snapshot(device: Device = None) -> list[dict[str, Any]]:
    """Segments and blocks of the device, in the form of `torch.cuda.memory_snapshot`."""
    return _C.memory_segments(device_index(device))


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "python",
    max_entries: int = 100_000,
    device: Device = None,
) -> None:
    """Keeps the last `max_entries` allocator events for `_dump_snapshot`.

    Args:
        enabled: None stops, anything else starts.
        context: None keeps no stacks; anything else keeps the stack of each allocation.
        stacks: "python" (frames of C++ are not kept; "all" is taken for it).
        max_entries: older events are dropped.
        device: the current device if None.
    """
    _C.record_memory_history(device_index(device), max_entries if enabled else 0, bool(enabled and context))


def _snapshot(device: Device = None) -> dict[str, Any]:
    """What pytorch.org/memory_viz reads."""
    index = device_index(device)
    traces: list[list[Any]] = [[] for _ in range(_C.device_count())]
    traces[index] = _C.memory_history(index)
    return {"segments": memory_snapshot(device), "device_traces": traces, "allocator_settings": {}}


def _dump_snapshot(filename: str = "dump_snapshot.pickle", device: Device = None) -> None:
    """Writes `_snapshot` as a pickle for pytorch.org/memory_viz."""
    with open(filename, "wb") as f:
        pickle.dump(_snapshot(device), f)
