"""Timing of alternatives side by side: interleaved repeats in one process, medians, ratios."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

THREADS = int(os.environ.get("BENCH_THREADS", "2"))


def interleaved(
    runs: dict[str, Callable[[], object]], repeats: int, inner: int = 1, warm_up: int = 2
) -> dict[str, float]:
    """Median seconds of one call of each function; the functions take turns, so that all see the same machine."""
    torch.set_num_threads(THREADS)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(warm_up * inner):
            run()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                for _ in range(inner):
                    run()
                times[name].append((time.perf_counter() - start) / inner)
    finally:
        gc.enable()
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def paired_ratio(
    run: Callable[[], object], base: Callable[[], object], repeats: int, inner: int
) -> tuple[float, float, float]:
    """(seconds of `run`, seconds of `base`, median of the ratios of neighbouring measurements)."""
    torch.set_num_threads(THREADS)
    for f in (run, base):
        for _ in range(2 * inner):
            f()
    mine, theirs = [], []
    gc.disable()
    try:
        for _ in range(repeats):
            for f, out in ((run, mine), (base, theirs)):
                start = time.perf_counter()
                for _ in range(inner):
                    f()
                out.append((time.perf_counter() - start) / inner)
    finally:
        gc.enable()
    ratio = statistics.median(a / b for a, b in zip(mine, theirs))
    return statistics.median(mine), statistics.median(theirs), ratio


def in_fresh_process(module: str, *args: str) -> str:
    """Standard output of `python -m benchmarks.<module> args`."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def peak_rss() -> int:
    """Largest resident memory of this process since `reset_peak_rss`, in bytes."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) << 10


def reset_peak_rss() -> None:
    """Makes the kernel forget the peak so far."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
