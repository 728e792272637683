"""What fusion costs before it saves anything: a window's time in the fuser, torch.compile's time, peak memory."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.harness import THREADS, in_fresh_process
from benchmarks.models import Block, gpt_training_step

# Microseconds for 8 operators; speed against Inductor; bytes against unfused.
BARS = {"make": 50.0, "find": 1.0, "compile": 10.0, "memory": 1.0}

CHAINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x, y: ((x * 2 + y).exp() - y).tanh().mul(x).add(1).sigmoid(),
    "softmax": lambda x, y: ((x * 0.5 + y).relu() - 1).softmax(-1).mul(y).neg().abs(),
    "rms norm": lambda x, y: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * y).add(x).neg(),
}


def window_costs() -> dict[str, tuple[float, float]]:
    """Microseconds of making and of finding the program of each chain of 8 operators."""
    x, y = (torch.randn(64, 64, device="neuron") for _ in range(2))
    costs = {}
    for name, chain in CHAINS.items():
        rounds = []
        for _ in range(21):
            torch.neuron.synchronize()
            before = torch.neuron.fusion_stats()["ops_recorded"]
            result = chain(x, y)
            assert torch.neuron.fusion_stats()["ops_recorded"] == before + 8
            rounds.append([seconds * 1e6 for seconds in torch.neuron._C.window_costs(100)])
            del result
        make, find = (statistics.median(column) for column in zip(*rounds))
        costs[name] = make, find
    return costs


def compile_seconds(backend: str) -> float:
    """Seconds of the first forward and backward of a compiled GPT block less those of the second. Imports are warm."""
    device = "cpu" if backend == "inductor" else "neuron"
    torch.set_num_threads(THREADS)
    warm = torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)
    warm(torch.ones(4, device=device, requires_grad=True)).backward()
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(384, 6).to(device)
    x = torch.randn(8, 128, 384).to(device).requires_grad_()
    step = torch.compile(block, backend=backend)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        step(x).sum().backward()
        x.grad.sum().item()
        times.append(time.perf_counter() - start)
    return times[0] - times[1]


def peak_bytes() -> int:
    """Peak of the device's memory over three GPT training steps."""
    step = gpt_training_step("neuron")
    for _ in range(3):
        step().item()
    return torch.neuron.max_memory_allocated()


def in_empty_caches(*args: str, **environment: str) -> float:
    """What a fresh process of this module prints, all caches of compilers empty."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCH_NEURON_CACHE_DIR": f"{folder}/neuron"}
        before = dict(os.environ)
        os.environ.update(caches | environment)
        try:
            return float(in_fresh_process("costs", *args).split()[-1])
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> None:
    """Prints a table of each."""

    def line(name: str, value: str, bar: str, met: bool) -> None:
        print(f"{name:34}{value:>42}{bar:>16}{'' if met else '  missed'}", flush=True)

    for name, (make, find) in window_costs().items():
        line(f"8 operators, {name}: make", f"{make:.1f} us", f"<= {BARS['make']:.0f} us", make <= BARS["make"])
        line(f"8 operators, {name}: find", f"{find:.2f} us", f"<= {BARS['find']:.0f} us", find <= BARS["find"])
    rounds = [[in_empty_caches("compile", b) for b in ("neuron", "inductor")] for _ in range(3)]
    mine, theirs = (statistics.median(column) for column in zip(*rounds))
    ratio = theirs / mine
    shown = f"{mine:.2f} s, Inductor {theirs:.2f} s: {ratio:.1f}x"
    line("compile a GPT block, both passes", shown, f">= {BARS['compile']:.0f}x", ratio >= BARS["compile"])
    fused, alone = (in_empty_caches("memory", TORCH_NEURON_FUSION=on) for on in "10")
    shown = f"{fused / 2**20:.1f} MiB, unfused {alone / 2**20:.1f} MiB"
    line("peak memory of a GPT step", shown, "<= unfused", fused <= alone * BARS["memory"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        print(compile_seconds(sys.argv[2]))
    elif sys.argv[1:2] == ["memory"]:
        print(peak_bytes())
    else:
        main()
