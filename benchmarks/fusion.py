"""Eager and compiled code on neuron against PyTorch's CPU eager and Inductor, on the workloads of workloads.py."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import interleaved
from benchmarks.workloads import WORKLOADS, Workload

# Least speed against CPU eager by kind, and of the geometric mean; the same against Inductor.
EAGER_BARS = {"chain": 3.0, "tiny": 0.75, "model": 0.9}
EAGER_MEAN, COMPILED_LEAST, COMPILED_MEAN = 1.8, 0.8, 1.2
VARIANTS: dict[str, tuple[str, str | None]] = {
    "cpu": ("cpu", None),
    "neuron": ("neuron", None),
    "inductor": ("cpu", "inductor"),
    "compiled": ("neuron", "neuron"),
}


def make(workload: Workload, variant: str) -> Callable[[], Any]:
    """The step of a workload, which returns when the device is done."""
    device, backend = VARIANTS[variant]
    torch.manual_seed(0)
    wrap = (lambda f: f) if backend is None else (lambda f: torch.compile(f, backend=backend))
    step = workload.make(device, wrap)
    if device == "cpu":
        return step

    def finished() -> Any:
        result = step()
        torch.neuron.synchronize()
        return result

    return finished


def measure(workload: Workload, variants: list[str], repeats: int = 21) -> dict[str, float]:
    """Median seconds of a step of each variant, interleaved; steps below 1 ms are timed in groups."""
    torch._dynamo.reset()
    steps = {v: make(workload, v) for v in variants}
    once = interleaved(steps, repeats=3, warm_up=3)
    inner = max(1, int(1e-3 / max(once.values())))
    if max(once.values()) > 0.1:
        repeats = max(5, repeats // 3)
    return interleaved(steps, repeats, inner)


def main(names: list[str] | None = None, variants: list[str] | None = None) -> None:
    """Prints milliseconds and speeds of the workloads named (or all), each as soon as it is measured."""
    variants = variants or list(VARIANTS)
    print(f"{'ms':30}" + "".join(f"{v:>10}" for v in variants) + f"{'eager':>10}{'compiled':>10}")
    eager, compiled, misses = [], [], []
    for w in WORKLOADS:
        if names and w.name not in names:
            continue
        t = measure(w, variants)
        line = f"{w.name:30}" + "".join(f"{t[v] * 1e3:10.3f}" for v in variants)
        if "cpu" in t and "neuron" in t:
            eager.append(t["cpu"] / t["neuron"])
            line += f"{eager[-1]:9.2f}x"
            if eager[-1] < EAGER_BARS[w.kind]:
                misses.append(f"{w.name}: eager {eager[-1]:.2f}x, bar {EAGER_BARS[w.kind]}x")
        if "inductor" in t and "compiled" in t:
            compiled.append(t["inductor"] / t["compiled"])
            line += f"{compiled[-1]:9.2f}x"
            if compiled[-1] < COMPILED_LEAST:
                misses.append(f"{w.name}: compiled {compiled[-1]:.2f}x, bar {COMPILED_LEAST}x")
        print(line, flush=True)
    for what, ratios, bar in (("eager", eager, EAGER_MEAN), ("compiled", compiled, COMPILED_MEAN)):
        if ratios:
            print(f"geometric mean, {what}: {statistics.geometric_mean(ratios):.2f}x (bar {bar}x)")
    print("\n".join(["missed:", *misses]) if misses else "every bar is met")


if __name__ == "__main__":
    chosen = [a for a in sys.argv[1:] if a in VARIANTS]
    main([a for a in sys.argv[1:] if a not in VARIANTS], chosen)
