"""Predictions beside published measurements of single kernels: docs/fidelity.md is this module's output.

A point is a measurement if its source states a measured time and enough of the configuration to build the kernel.
Targets and upper bounds are listed apart, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DMA_GUIDE = "aws-neuron-sdk, nki/get-started, DMA overview (saturation curve, read off the figure)"
# The figure's axis has no numbers and it names no target: shares (%) of its last point, 32768 bytes, which is taken for
# the sustained rate of 16 engines of trn2, 23 bytes/ns each.
PLATEAU = 368.0
DMA_CURVE = {
    32: 1.2, 64: 2.6, 128: 5, 256: 10.3, 512: 20.6, 1024: 42.4, 2048: 81.3, 4096: 96.6, 8192: 98.3, 16384: 99.0,
}  # fmt: skip


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


MAMBA = "aws-neuron-sdk, nki/guides/tutorials/fused_mamba"
# version, sequence length, channels, measured µs. Version 1 loads delta and u for every state, 2 once, 3 works in tiles
# of 512. All of them multiply delta and u again for every state.
MAMBA_TIMES = (
    (1, 512, 256, 172.93), (1, 512, 4096, 2340), (2, 512, 4096, 1610), (3, 512, 4096, 1600), (3, 1024, 4096, 3300),
    (3, 2048, 4096, 6600), (3, 3072, 4096, 10100), (3, 4096, 4096, 13300), (3, 5120, 4096, 17300),
    (3, 6144, 4096, 19600), (3, 7168, 4096, 24200), (3, 8192, 4096, 27800),
)  # fmt: skip


def _mamba(version: int, products_once: bool = False) -> Callable:
    """The tutorial's fused Mamba: delta, u [channels, seq], a [channels, 16], b, c [16, seq]. Rows of b and c go to all
    partitions as products with ones, which VectorE reads in PSUM (the architecture guide says so).

    products_once: delta * u of versions 2 and 3 is not computed again for every state.
    """
    from .. import nki
    from ..nki import isa
    from ..nki import language as nl

    @nki.jit
    def mamba(delta, u, a, b, c):  # noqa: ANN001, ANN202
        channels, length = delta.shape
        states = a.shape[1]
        width = 512 if version == 3 else length
        out = nl.ndarray(delta.shape, nl.float32, nl.shared_hbm)
        ones = nl.ndarray((1, 128), nl.float32)
        isa.memset(ones, 1.0)

        def load(source):  # noqa: ANN001, ANN202
            t = nl.ndarray(source.shape, nl.float32)
            isa.dma_copy(t, source)
            return t

        def to_all_partitions(row):  # noqa: ANN001, ANN202
            t = nl.ndarray((128, width), nl.float32, nl.psum)
            isa.nc_matmul(t, ones, load(row))
            return t

        for first in range(0, channels, 128):
            rows = slice(first, first + 128)
            total = nl.ndarray((128, length), nl.float32)
            isa.memset(total, 0.0)
            whole = nl.ndarray((128, length), nl.float32) if products_once else None
            for state in range(states):
                if version == 1 or not state:
                    d, v = load(delta[rows]), load(u[rows])
                decay_rate = load(a[rows, state : state + 1])
                last = 0.0
                if version == 3:
                    last = nl.ndarray((128, 1), nl.float32)
                    isa.memset(last, 0.0)
                for begin in range(0, length, width):
                    part = slice(begin, begin + width)
                    decay, x, y, z = (nl.ndarray((128, width), nl.float32) for _ in range(4))
                    isa.activation(decay, nl.exp, d[:, part], scale=decay_rate)
                    row = to_all_partitions(b[state : state + 1, part])
                    product = whole[:, part] if products_once else nl.ndarray((128, width), nl.float32)
                    if not (products_once and state):
                        isa.tensor_tensor(product, d[:, part], v[:, part], nl.multiply)
                    isa.tensor_tensor(x, product, row, nl.multiply)
                    isa.tensor_tensor_scan(y, decay, x, last, nl.multiply, nl.add)
                    if version == 3:
                        isa.tensor_copy(last, y[:, width - 1 : width])
                    isa.tensor_tensor(z, y, to_all_partitions(c[state : state + 1, part]), nl.multiply)
                    isa.tensor_tensor(total[:, part], total[:, part], z, nl.add)
            isa.dma_copy(out[rows], total)
        return out

    return mamba


def _mamba_inputs(length: int, channels: int) -> tuple:
    return tuple(np.zeros(s, np.float32) for s in ((channels, length), (channels, length), (channels, 16), (16, length),
                                                   (16, length)))  # fmt: skip


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
        "aws-neuron-sdk, nki/get-started, DMA overview",
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
    return [*curve, one_engine, chain, *_mambas(False)]


def _mambas(products_once: bool) -> list[Point]:
    return [
        Point(
            f"fused Mamba {version}, {length} x {channels} channels, 16 states: latency", "trn1", time * 1e3, MAMBA,
            _mamba(version, products_once), lambda n=length, c=channels: _mamba_inputs(n, c),
        )
        for version, length, channels, time in MAMBA_TIMES
        if not products_once or version > 1
    ]  # fmt: skip


def products_once() -> list[Point]:
    """The fused Mamba kernels that, unlike their text, do not repeat a product: see docs/fidelity.md."""
    return _mambas(True)


NOT_COMPARED = (
    ("rmsnorm_quant 2K..32K x 8192/16384, trn2 LNC2 (nki-library)", "a target that the test must not exceed"),
    ("nki-samples thresholds (SD attention, rmsnorm_qkv, double-row matmul, adaptive pool, resize)", "upper bounds"),
    ("tutorial matmul: engine-active percentages", "percentages of an unstated duration"),
    ("fused Mamba 2, 8192 x 4096 channels, trn1: 53.33 ms in the text, 52.2 ms beside the other lengths",
     "needs more SBUF than there is: the vendor's compiler spills, in ways that are not published"),
    ("fused Mamba in PyTorch by XLA, 512 x 256 channels, trn1: 151.83 ms", "no kernel: the compiler's program is not "
     "published"),
    ("DMA instruction on a hardware descriptor generator, trn2: about 600 ns", "its issue runs beside the engine's "
     "other work and the clock charges none: there is no time to compare"),
    ("semaphore to start of a DMA: about 1,300 ns", "is a constant of the clock"),
    ("DMA in a well-written kernel: about 70 % of its peak", "a rule of thumb without a kernel"),
    ("Llama, BERT, ViT training and decoding", "whole models: the planner's business"),
)  # fmt: skip


def predict_ns(point: Point) -> float:
    """The predicted time that corresponds to the measured one."""
    from ..nki import profile

    p = profile(point.kernel, target=point.target)(*point.inputs())
    if "per transfer" in point.name:
        events = [e for e in p.instructions if e.engine == "dma"]
        return (events[-1].end - events[7].end) * 1e3 / (len(events) - 8)
    if "latency" in point.name:
        return p.latency_us * 1e3
    if "transfer time" in point.name:
        (event,) = (e for e in p.instructions if e.engine == "dma")
        return (event.end - event.start) * 1e3
    events = [e for e in p.instructions if e.engine == "scalar"]
    return (events[-1].start - events[0].start) * 1e3 / (len(events) - 1)


def _table(predictions: list[tuple[Point, float]]) -> list[str]:
    return [
        "| kernel | target | measured ns | predicted ns | error | fitted | source |",
        "|---|---|---:|---:|---:|---|---|",
        *(
            f"| {p.name} | {p.target} | {p.measured_ns:,.0f} | {predicted:,.0f} | {predicted / p.measured_ns - 1:+.0%} "
            f"| {'yes' if p.fitted else 'no'} | {p.source} |"
            for p, predicted in predictions
        ),
    ]


def _count(predictions: list[tuple[Point, float]]) -> str:
    """How many are near, in words."""

    def near(chosen: list[tuple[Point, float]]) -> int:
        return sum(abs(predicted / p.measured_ns - 1) <= 0.25 for p, predicted in chosen)

    fresh = [(p, predicted) for p, predicted in predictions if not p.fitted]
    share = near(predictions) / len(predictions)
    return (
        f"{near(predictions)} of {len(predictions)} points are within 25 % ({share:.0%}); of the {len(fresh)} without "
        f"a fitted constant, {near(fresh)}"
    )


def markdown() -> str:
    """docs/fidelity.md."""
    published = [(p, predict_ns(p)) for p in points()]
    once = [(p, predict_ns(p)) for p in products_once()]
    by_name = {p.name: (p, predicted) for p, predicted in once}
    replaced = [by_name.get(p.name, (p, predicted)) for p, predicted in published]
    lines = [
        "# Predicted against measured",
        "",
        "Generated by `torchneuron nki fidelity`. Nothing here was run on Neuron hardware: the measurements are "
        "published ones. *Fitted*: the two constants of the DMA row cost were fitted over this series, so it shows the "
        "quality of the fit, not of a prediction; the figure has no numbers on its axis and names no target, its last "
        "point is taken for trn2's sustained rate.",
        "",
        f"* Kernels as published: {_count(published)}.",
        f"* With the product of Mamba 2 and 3 once (below): {_count(replaced)}.",
        "",
        "## Kernels as published",
        "",
        *_table(published),
        "",
        "## Mamba 2 and 3 with one product of delta and u",
        "",
        "The published text multiplies delta and u again for every state, in all three versions; the clock counts what "
        "a kernel says. The measured programs of versions 2 and 3 seem not to: VectorE's published active shares, "
        "92.16 % of 2.34 ms for version 1 and 99.63 % of 1.61 ms for version 2, are 2.16 and 1.60 ms, 1.34 to 1. Its "
        "instructions as published take the same cycles in both, 8 N for a state; with the product once, version 2 "
        "takes 6 N: 1.33 to 1. In version 1, which loads delta and u for every state, there is nothing to remove. "
        "That the vendor's compiler removed it is inferred, not published.",
        "",
        *_table(once),
        "",
        "## Published, but not compared",
        "",
        "| point | why |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in NOT_COMPARED),
    ]
    return "\n".join(lines) + "\n"
