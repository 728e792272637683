"""Which operators ran, and how Trainium would have run them."""

from __future__ import annotations

from torchneuron import _C


def get_executed_ops() -> dict[str, int]:
    """Calls of each operator that did work since the last `clear_op_tracking()`, most first. Views do no work."""
    return _sorted({name: executed for name, executed, _, _, _ in _C.op_counters()})


def get_fallback_ops() -> dict[str, dict[str, int | str]]:
    """Operators that Trainium would have handed to the host: `{name: {"count": ..., "reason": ...}}`."""
    found = [(name, fallback, known) for name, _, _, fallback, known in _C.op_counters() if fallback]
    return {
        name: {
            "count": count,
            "reason": "float64 or complex arithmetic" if known else "no engine of Trainium runs it",
        }
        for name, count, known in sorted(found, key=lambda row: -row[1])
    }


def get_narrowed_ops() -> dict[str, int]:
    """Calls with 64-bit integers, which Trainium keeps in 32 bits; here they are exact."""
    return _sorted({name: narrowed for name, _, narrowed, _, _ in _C.op_counters() if narrowed})


def clear_op_tracking() -> None:
    """Starts counting from zero."""
    _C.clear_op_counters()


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
