"""Predicted timelines of kernels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from .. import _core
from ..perf import targets
from . import errors
from .jit import Kernel, jit


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an instruction on the timeline. start, end in µs; bytes that DMA moves, hbm_bytes that it reads from
    HBM and writes to it; floating-point operations (TensorE) and the type of what is multiplied. times: how many
    runs it stands for: of a long device loop only the first trips are on the timeline."""

    name: str
    engine: str
    start: float
    end: float
    location: str
    bytes: int
    hbm_bytes: int
    flops: float
    dtype: str
    waits_for: int  # index of the event that decided the start; -1: none
    times: int = 1


@dataclasses.dataclass
class Profile:
    """Prediction of a kernel on a target.

    latency_us: first start to last end. engines: share of the latency in which each engine is busy (dma: mean of its
    engines). instructions: in the order in which they run. sbuf: (time µs, live bytes per partition) steps. notes: on
    loops of which not all trips are on the timeline.
    """

    kernel: str
    target: str
    latency_us: float
    engines: dict[str, float]
    instructions: list[Event]
    sbuf: list[tuple[float, int]]
    sbuf_bytes: int
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def bytes_moved(self) -> int:
        """Bytes that DMA moves."""
        return sum(i.bytes * i.times for i in self.instructions)

    @property
    def hbm_bytes(self) -> int:
        """Bytes read from HBM and written to it."""
        return sum(i.hbm_bytes * i.times for i in self.instructions)

    @property
    def flops(self) -> float:
        """Floating-point operations of TensorE."""
        return sum(i.flops * i.times for i in self.instructions)

    @property
    def critical_path(self) -> list[Event]:
        """The chain of instructions that decides the latency, first to last."""
        if not self.instructions:
            return []
        i = max(range(len(self.instructions)), key=lambda k: self.instructions[k].end)
        chain = []
        while i >= 0:
            chain.append(self.instructions[i])
            i = self.instructions[i].waits_for
        return chain[::-1]

    def roofline(self) -> dict[str, float]:
        """Position on the target's roofline: intensity (FLOP per byte of HBM traffic), achieved and attainable TFLOP/s,
        the balance point, and achieved and attainable GB/s of HBM. TensorE's peak is that of the types multiplied."""
        values = targets.get(self.target).values
        seconds, bandwidth = self.latency_us * 1e-6, values["hbm_bytes_per_ns"] * 1e9
        least = sum(i.flops * i.times / (values[_peak(i.dtype)] * 1e12) for i in self.instructions if i.flops)
        peak = self.flops / least if least else values["tflops_bf16"] * 1e12
        intensity = self.flops / self.hbm_bytes if self.hbm_bytes else 0.0
        reached = min(peak, intensity * bandwidth) if self.hbm_bytes else peak if self.flops else 0.0
        return {
            "intensity": intensity,
            "achieved_tflops": self.flops / seconds / 1e12 if seconds else 0.0,
            "attainable_tflops": reached / 1e12,
            "balance": peak / bandwidth,
            "achieved_gb_s": self.hbm_bytes / seconds / 1e9 if seconds else 0.0,
            "attainable_gb_s": bandwidth / 1e9,
        }

    def save_perfetto(self, path: str | Path) -> None:
        """Writes the timeline in the Chrome trace format, which Perfetto opens."""
        tracks = {name: i + 1 for i, name in enumerate(sorted({e.engine for e in self.instructions}))}
        events: list[dict] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for name, tid in tracks.items()
        ]
        events.append(
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{self.kernel} on {self.target}"}}
        )
        for e in self.instructions:
            events.append(
                {"ph": "X", "pid": 1, "tid": tracks[e.engine], "name": e.name, "ts": e.start, "dur": e.end - e.start,
                 "args": {"location": e.location, "bytes": e.bytes, "flops": e.flops, "times": e.times}}
            )  # fmt: skip
        for time, live in self.sbuf:
            events.append({"ph": "C", "pid": 1, "name": "SBUF bytes per partition", "ts": time, "args": {"live": live}})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

    def save_html(self, path: str | Path) -> None:
        """Writes one self-contained page: timeline, utilisation, SBUF use over time."""
        from .report import render

        Path(path).write_text(render(self))


def profile(kernel: Kernel | Callable, target: str | None = None, core: int = 0) -> Callable[..., Profile]:
    """profile(kernel, target="trn2")(*args): the kernel's predicted timeline for these arguments (shapes and types
    count, values do not: a loop whose trips depend on them is counted once, and noted). target: trn1, trn2, trn3;
    default as in nki.simulate. core: which core of a launch on two; time that it waits for the other is not in the
    prediction."""
    kernel = jit(kernel)
    hardware = targets.get(target) if target else targets.default()
    if not 0 <= core < kernel.lnc:
        raise ValueError(f"{kernel.__name__} is launched on {kernel.lnc} core(s), there is no core {core}")

    def run(*args: object, **kwargs: object) -> Profile:
        try:
            traced = kernel._trace(args, kwargs, hardware, runs=False)
        except errors.DataDependentError as e:
            raise errors.NkiError(
                kernel.__name__, "", f"takes a time that depends on values and cannot be predicted: {e}"
            ) from e
        session = traced.cores[core].session
        program = session.program
        latency, busy, raw, loops = _core.predict(program, hardware.model())
        events = [
            Event(program.name(index), engine, start / 1e3, end / 1e3, session.locate(program.source(index)), *rest)
            for index, engine, start, end, *rest in raw
        ]  # fmt: skip
        last = {row[0]: row[2] / 1e3 for row in raw}
        first = {row[0]: row[2] / 1e3 for row in reversed(raw)}
        notes = {_note(session.locate(source), trips, shown): None for source, trips, shown in loops}
        return Profile(
            kernel=kernel.__name__,
            target=hardware.name,
            latency_us=latency / 1e3,
            engines={name: ns / latency if latency else 0.0 for name, ns in busy.items()},
            instructions=events,
            sbuf=_live_steps(program, first, last),
            sbuf_bytes=hardware.sbuf_bytes,
            notes=list(notes),
        )

    return run


def _peak(dtype: str) -> str:
    """Name of TensorE's rate for a type of its inputs."""
    return "tflops_fp32" if dtype in ("float32", "tfloat32") else f"tflops_{'bf16' if '16' in dtype else 'fp8'}"


def _note(where: str, trips: int, shown: int) -> str:
    if trips:
        return f"the loop at {where} makes {trips} trips: {shown} are on the timeline, the others take as long as these"
    return f"the trips of the loop at {where} depend on values: {shown} are counted"


def _live_steps(
    program: _core.Program, first_start: dict[int, float], last_start: dict[int, float]
) -> list[tuple[float, int]]:
    """(time, live bytes per partition) whenever it changes. first_start, last_start: of each instruction by index."""
    steps: dict[float, int] = {}
    for first, last, size, _ in program.live_bytes(_core.MEMORIES["sbuf"]):
        start, end = first_start.get(first - 1, 0.0), last_start.get(last - 1, 0.0)
        steps[start] = steps.get(start, 0) + size
        steps[end] = steps.get(end, 0) - size
    live, out = 0, []
    for time in sorted(steps):
        live += steps[time]
        out.append((time, live))
    return out
