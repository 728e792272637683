"""Predictions beside published measurements of single kernels: docs/fidelity.md is this module's output.

A point is a measurement if its source states a measured time and enough of the configuration to build the kernel.
Targets and upper bounds are listed apart, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DMA_GUIDE = "aws-neuron-sdk, nki/deep-dives, DMA introduction (saturation curve, read off the figure)"
PLATEAU = 368.0  # GB/s of 128 partitions on trn2: 16 engines at 23 bytes/ns
DMA_CURVE = {64: 2.6, 128: 5, 256: 10.3, 512: 20.6, 1024: 42.4, 2048: 81.3, 4096: 96.6, 8192: 98.3, 16384: 99.0}


@dataclass(frozen=True)
class Point:
    """A measured kernel. measured_ns: from the source; fitted: the cost tables were fitted over this series."""

    name: str
    target: str
    measured_ns: float
    source: str
    kernel: Callable
    inputs: Callable[[], tuple]
    fitted: bool = False


def _copies(width: int) -> Callable:
    """32 transfers of 128 rows of `width` bytes from HBM to SBUF: their steady rate is what is compared."""
    from .. import nki
    from ..nki import isa
    from ..nki import language as nl

    @nki.jit
    def dma_copies(x):  # noqa: ANN001, ANN202
        for i in range(32):
            t = nl.ndarray((128, width), nl.uint8)
            isa.dma_copy(t, x[i])
        return x

    return dma_copies


def _one_engine() -> Callable:
    from .. import nki
    from ..nki import isa
    from ..nki import language as nl

    @nki.jit
    def four_rows(x):  # noqa: ANN001, ANN202
        t = nl.ndarray((4, 4096), nl.bfloat16)
        isa.dma_copy(t, x)
        return x

    return four_rows


def _dependent_scalars() -> Callable:
    from .. import nki
    from ..nki import isa
    from ..nki import language as nl

    @nki.jit
    def dependent_activations(x):  # noqa: ANN001, ANN202
        t = nl.ndarray((128, 1), nl.float32)
        isa.memset(t, 1.0)
        for _ in range(64):
            isa.activation(t, nl.copy, t)
        return x

    return dependent_activations


def points() -> list[Point]:
    """Every measurement that has a kernel."""
    curve = [
        Point(
            f"DMA, 128 partitions of {width} bytes, per transfer", "trn2", 128 * width / (PLATEAU * percent / 100),
            DMA_GUIDE, _copies(width), lambda w=width: (np.zeros((32, 128, w), np.uint8),), True,
        )
        for width, percent in DMA_CURVE.items()
    ]  # fmt: skip
    one_engine = Point(
        "DMA of [4, 4096] bf16, one engine: transfer time",
        "trn2",
        1416.0,
        "aws-neuron-sdk, nki/deep-dives, DMA guide",
        _one_engine(),
        lambda: (np.zeros((4, 4096), "bfloat16"),),
    )
    chain = Point(
        "ScalarE, chain of dependent one-element instructions, each",
        "trn1",
        189.0,
        "aws-neuron-sdk, nki/guides/architecture (264 cycles at 1.4 GHz)",
        _dependent_scalars(),
        lambda: (np.zeros((1, 1), np.float32),),
    )
    return [*curve, one_engine, chain]


NOT_COMPARED = (
    ("rmsnorm_quant 2K..32K x 8192/16384, trn2 LNC2 (nki-library)", "a target that the test must not exceed"),
    ("nki-samples thresholds (SD attention, rmsnorm_qkv, double-row matmul, adaptive pool, resize)", "upper bounds"),
    ("tutorial matmul: engine-active percentages", "percentages of an unstated duration"),
    ("fused Mamba, trn1: 172.93 µs .. 53.33 ms", "compiled by the vendor, which reorders and spills; "
     "not built here yet"),
    ("Llama, BERT, ViT training and decoding", "whole models: the planner's business"),
)  # fmt: skip


def predict_ns(point: Point) -> float:
    """The predicted time that corresponds to the measured one."""
    from ..nki import profile

    p = profile(point.kernel, target=point.target)(*point.inputs())
    if "per transfer" in point.name:
        events = [e for e in p.instructions if e.engine == "dma"]
        return (events[-1].end - events[7].end) * 1e3 / (len(events) - 8)
    if "transfer time" in point.name:
        (event,) = (e for e in p.instructions if e.engine == "dma")
        return (event.end - event.start) * 1e3
    events = [e for e in p.instructions if e.engine == "scalar"]
    return (events[-1].start - events[0].start) * 1e3 / (len(events) - 1)


def markdown() -> str:
    """docs/fidelity.md."""
    rows, within, fresh = [], 0, 0
    for point in points():
        predicted = predict_ns(point)
        error = predicted / point.measured_ns - 1
        within += abs(error) <= 0.25
        fresh += abs(error) <= 0.25 and not point.fitted
        rows.append(
            f"| {point.name} | {point.target} | {point.measured_ns:,.0f} | {predicted:,.0f} | {error:+.0%} "
            f"| {'yes' if point.fitted else 'no'} | {point.source} |"
        )
    independent = sum(not p.fitted for p in points())
    lines = [
        "# Predicted against measured",
        "",
        "Generated by `torchneuron nki fidelity`. Nothing here was run on Neuron hardware: the measurements are "
        "published ones. *Fitted*: the two constants of the DMA row cost were fitted over this series, so it shows the "
        "quality of the fit, not of a prediction.",
        "",
        f"{within} of {len(rows)} points are within 25 %; of the {independent} without a fitted constant, {fresh}.",
        "",
        "| kernel | target | measured ns | predicted ns | error | fitted | source |",
        "|---|---|---:|---:|---:|---|---|",
        *rows,
        "",
        "## Published, but not compared",
        "",
        "| point | why |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in NOT_COMPARED),
    ]
    return "\n".join(lines) + "\n"
