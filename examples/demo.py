"""Trains both tasks of train.py on `cpu` and on `neuron` with the same seeds and compares them: `make demo`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
import train

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

DEVICES = ("cpu", "neuron")
# How a curve is drawn: the CPU's broad and pale, so that the device's is seen where both are the same.
LINES = {
    "cpu": {"color": "#f2a65a", "linewidth": 5, "solid_capstyle": "round"},
    "neuron": {"color": "#1f4e79", "linewidth": 1.2},
}
TITLES = {
    "gpt": "Character-level GPT on Python's language reference",
    "digits": "Convolutional network on scikit-learn's digits",
}

Result = dict[str, Any]


def run(task: str, **options: int) -> dict[str, Result]:
    """Trains `task` on each device; the neuron result also has the operators that ran."""
    results: dict[str, Result] = {}
    for device in DEVICES:
        torch.neuron.clear_op_tracking()
        results[device] = train.TASKS[task](torch.device(device), seed=0, **options)
    results["neuron"]["operators"] = {
        "executed": torch.neuron.get_executed_ops(),
        "narrowed": torch.neuron.get_narrowed_ops(),
        "fallback": torch.neuron.get_fallback_ops(),
    }
    return results


def deviations(results: dict[str, Result]) -> list[float]:
    """Difference of the two loss curves at each step."""
    return [abs(a - b) for a, b in zip(*(results[device]["losses"] for device in DEVICES))]


def describe_deviation(results: dict[str, Result]) -> str:
    largest = max(deviations(results))
    return f"{largest:.1e}" if largest else "0 (bit for bit the same)"


def report(task: str, results: dict[str, Result]) -> str:
    cpu, neuron = (results[device] for device in DEVICES)
    rows = [("", *DEVICES, "neuron / cpu")]
    speeds = cpu["throughput"], neuron["throughput"]
    rows.append((cpu["unit"], f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[1] / speeds[0]:.2f}"))
    for name in ("validation_loss", "accuracy"):
        if name in cpu:
            rows.append((name.replace("_", " "), f"{cpu[name]:.4f}", f"{neuron[name]:.4f}", ""))
    lines = [TITLES[task]] + ["  {:<18}{:>12}{:>12}{:>15}".format(*row) for row in rows]
    lines.append(f"  largest deviation between the loss curves: {describe_deviation(results)}")
    ops = neuron["operators"]
    lines.append(
        f"  operators on neuron: {len(ops['executed'])} kinds, {sum(ops['executed'].values()):,} calls; "
        f"{sum(ops['narrowed'].values()):,} with 64-bit integers that Trainium narrows to 32 bits"
    )
    if ops["fallback"]:
        lines.append("  operators that Trainium would hand to the host:")
        lines += [f"    {name}: {entry['count']:,} calls, {entry['reason']}" for name, entry in ops["fallback"].items()]
    else:
        lines.append("  operators that Trainium would hand to the host: none")
    return "\n".join(lines)


def style(axes: plt.Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def plot_losses(task: str, results: dict[str, Result], file: Path) -> None:
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=(4, 1), layout="constrained", dpi=120
    )
    steps = range(1, len(results["cpu"]["losses"]) + 1)
    for device in DEVICES:
        top.plot(steps, results[device]["losses"], label=device, **LINES[device])
    top.set(title=TITLES[task], ylabel="training loss", ylim=(0, None))
    top.legend(frameon=False)
    difference = deviations(results)
    bottom.fill_between(steps, difference, color="#1f4e79")
    bottom.set(xlabel="step", ylabel="|difference|", ylim=(0, max(max(difference), 1e-6)), xlim=(0, len(steps)))
    bottom.set_title(f"largest difference: {describe_deviation(results)}", loc="right", fontsize="medium")
    style(top)
    style(bottom)
    figure.savefig(file)
    plt.close(figure)


def plot_throughput(all_results: dict[str, dict[str, Result]], file: Path) -> None:
    figure, panels = plt.subplots(1, len(all_results), figsize=(8, 3.6), layout="constrained", dpi=120, squeeze=False)
    for axes, (task, results) in zip(panels[0], all_results.items()):
        speeds = [results[device]["throughput"] for device in DEVICES]
        bars = axes.bar(DEVICES, speeds, color=[LINES[device]["color"] for device in DEVICES], width=0.6)
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
        axes.set(title=task, ylabel=results["cpu"]["unit"], ylim=(0, max(speeds) * 1.12))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        style(axes)
    figure.suptitle(f"Training throughput (higher is better; threads: {torch.get_num_threads()})")
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, help="training steps of each task")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    options = {"steps": args.steps} if args.steps else {}
    all_results = {task: run(task, **options) for task in train.TASKS}

    print(f"\nWhat the GPT wrote on neuron:\n\n{all_results['gpt']['neuron']['sample']}")
    for task, results in all_results.items():
        print(f"\n{report(task, results)}")
        plot_losses(task, results, args.out / f"{task}-loss.png")
    plot_throughput(all_results, args.out / "throughput.png")
    (args.out / "results.json").write_text(json.dumps(all_results, indent=1))
    print(f"\nIn {args.out}/: " + ", ".join(sorted(path.name for path in args.out.iterdir())))


if __name__ == "__main__":
    main()
