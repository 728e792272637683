"""The neuron device against PyTorch's CPU: cost of a call, of a training step, and its memory."""

from __future__ import annotations

import sys

import torch

from benchmarks.harness import in_fresh_process, paired_ratio, peak_rss, reset_peak_rss
from benchmarks.models import gpt_training_step

BARS = {"add_8_floats": 1.5, "gpt_step_time": 1.05, "gpt_step_peak_memory": 1.1}


def small_add() -> tuple[float, float, float]:
    """Seconds of `x + y` on 8 floats on neuron and on cpu, and their ratio."""
    (a, b), (c, d) = ([torch.ones(8, device=device) for _ in range(2)] for device in ("neuron", "cpu"))
    return paired_ratio(lambda: a + b, lambda: c + d, repeats=61, inner=2000)


def gpt_step() -> tuple[float, float, float]:
    """Seconds of a GPT training step on neuron and on cpu, and their ratio."""
    mine, theirs = gpt_training_step("neuron"), gpt_training_step("cpu")
    return paired_ratio(lambda: mine().item(), lambda: theirs().item(), repeats=15, inner=1)


def gpt_peak(device: str) -> int:
    """Bytes by which the process grows for the model and three steps of it."""
    torch.set_num_threads(2)
    torch.zeros(1, device=device)
    before = peak_rss()
    reset_peak_rss()
    step = gpt_training_step(device)
    for _ in range(3):
        step().item()
    return peak_rss() - before


def main() -> None:
    """Prints a table of ratios and whether each meets its bar."""
    rows = []
    for name, (mine, theirs, ratio) in {"add_8_floats": small_add(), "gpt_step_time": gpt_step()}.items():
        rows.append((name, f"{mine * 1e6:.2f} us", f"{theirs * 1e6:.2f} us", ratio))
    peaks = {device: int(in_fresh_process("device", "peak", device)) for device in ("neuron", "cpu")}
    ratio = peaks["neuron"] / peaks["cpu"]
    rows.append(("gpt_step_peak_memory", f"{peaks['neuron'] >> 20} MiB", f"{peaks['cpu'] >> 20} MiB", ratio))
    print(f"{'device':24}{'neuron':>16}{'cpu':>16}{'ratio':>8}{'bar':>8}")
    for name, mine, theirs, ratio in rows:
        verdict = "" if ratio <= BARS[name] else "  missed"
        print(f"{name:24}{mine:>16}{theirs:>16}{ratio:8.2f}{BARS[name]:8.2f}{verdict}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        print(gpt_peak(sys.argv[2]))
    else:
        main()
