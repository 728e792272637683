"""`torchneuron explain`: runs a script and shows which of its lines fused into what, why each window of calls closed,
and how many bytes of memory traffic that saved."""

from __future__ import annotations

import argparse
import contextlib
import json
import linecache
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchneuron.cli._script import run_script
from torchneuron.cli._table import table

# Reasons of csrc/fusion/observer.h in words.
REASONS = {
    "drained": "a read, or a call that is not fusible",
    "nodes": "full: 64 calls",
    "memory": "256 MiB of dropped tensors",
    "thread": "another thread goes on",
    "compiled": "end of a compiled step",
}


@dataclass
class Program:
    """Programs of the same calls from the same lines."""

    operators: list[str]
    lines: list[str]
    elements: int
    rows: int  # 0 without reductions
    runs: int = 0
    bytes_moved: int = 0  # by all runs
    bytes_alone: int = 0  # that the calls would have moved one by one


@dataclass
class Report:
    """What a run showed."""

    script: str
    exit_code: int = 0
    seconds: float = 0.0
    stats: dict[str, int] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)  # why, where, count
    nki: str = ""  # about the NKI sources

    def text(self, most: int) -> str:
        """The report for a terminal, with at most `most` rows a table."""
        failed = f"exit code {self.exit_code}" if self.exit_code else "ran through"
        parts = [f"== torchneuron explain {self.script}: {failed}, {self.seconds:.1f} s"]
        if not self.programs:
            return "\n\n".join([*parts, "Nothing was fused. Does the script run on neuron?"])
        alone, moved = (sum(getattr(p, name) for p in self.programs) for name in ("bytes_alone", "bytes_moved"))
        shared = sum(p.runs * len(p.operators) for p in self.programs if len(p.operators) > 1)
        calls = sum(p.runs * len(p.operators) for p in self.programs)
        parts.append(
            f"{calls:,} fusible calls became {sum(p.runs for p in self.programs):,} programs; {shared:,} calls shared "
            f"one with others. They moved {size(moved)} instead of {size(alone)}. "
            f"{self.stats['library_calls']:,} calls were library operators."
        )
        if self.stats["executables_run"]:
            parts.append(
                f"{self.stats['executables_run']:,} calls of compiled graphs; a fused step of theirs is shown once."
            )
        ranked = sorted(self.programs, key=lambda p: p.bytes_moved - p.bytes_alone)
        rows = [
            (
                p.runs,
                p.elements,
                size((p.bytes_alone - p.bytes_moved) // p.runs),
                ", ".join(p.lines) or "?",
                " ".join(p.operators),
            )
            for p in ranked[:most]
        ]
        parts.append(table(("runs", "elements", "saved a run", "lines", "operators"), rows))
        if len(ranked) > most:
            parts.append(f"... and {len(ranked) - most:,} more programs (--all)")
        parts.append("Why windows closed:")
        rows = [(w["count"], REASONS[w["why"]], w["where"], source(w["where"])) for w in self.windows[:most]]
        parts.append(table(("windows", "because", "at", "source"), rows))
        if self.nki:
            parts.append(self.nki)
        return "\n\n".join(parts)


def size(count: int) -> str:
    """Bytes in a unit that reads well."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def source(where: str) -> str:
    """The text of `file:line`."""
    file, _, line = where.removesuffix(" (backward)").rpartition(":")
    return linecache.getline(file, int(line)).strip() if file else ""


class Watch:
    """Gathers what the observer is told. Calls may come from several threads; each holds the GIL."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.windows: Counter[tuple[str, str]] = Counter()

    @staticmethod
    def _place() -> str:
        from torchneuron.cli import _where

        forward = _where.forward_of_backward()
        return f"{forward} (backward)" if forward else _where.caller()

    def recorded(self) -> int:
        """The number of the line that makes a call."""
        return self.places.setdefault(self._place(), len(self.places))

    def closed(self, why: str, programs: list[tuple[Any, ...]]) -> None:
        """Notes a window and its programs."""
        places = list(self.places)
        self.windows[why, self._place()] += 1
        for calls, elements, rows, moved, alone in programs:
            lines = [places[number] for _, number in calls if number is not None]
            names = [name for name, _ in calls]
            key = (*names, *lines, elements, rows)
            program = self.programs.setdefault(key, Program(names, list(dict.fromkeys(lines)), elements, rows))
            program.runs += 1
            program.bytes_moved += moved
            program.bytes_alone += alone


def write_sources(folder: Path, programs: list[Any]) -> str:
    """Writes one file for each program that has NKI source; returns what there is to say about it."""
    folder.mkdir(parents=True, exist_ok=True)
    names: Counter[str] = Counter()
    missing = []
    for program in programs:
        if program.source is None:
            missing.append((program.runs, program.reason))
            continue
        name = program.source.name
        names[name] += 1
        number = f"_{names[name]}" if names[name] > 1 else ""
        (folder / f"{name}{number}.py").write_text(program.source.text)
    text = f"{names.total():,} programs as NKI source in {folder}; each runs alone: python FILE."
    if missing:
        text += f"\n\n{len(missing):,} programs have no NKI source with the same bits:"
        text += "\n\n" + table(("runs", "because"), missing)
    return text


def explain(script: str, arguments: list[str], as_module: bool = False, nki: Path | None = None) -> Report:
    """Runs a script and returns what fused. nki: a folder for the NKI sources of its programs."""
    import torch

    from torchneuron import _C, device  # loads the device where autoload is off

    watch, report, start = Watch(), Report(script), time.perf_counter()
    programs = device.fused_programs() if nki else contextlib.nullcontext([])
    device.synchronize()
    device.reset_fusion_stats()
    _C.set_fusion_observer(watch.recorded, watch.closed)
    try:
        # Anomaly mode: nodes of the backward pass know the forward line that made them.
        with torch.autograd.set_detect_anomaly(True, check_nan=False), programs as sources:
            report.exit_code = run_script(script, arguments, as_module)
            device.synchronize()
    finally:
        _C.set_fusion_observer(None, None)
    report.seconds = time.perf_counter() - start
    report.stats = device.fusion_stats()
    report.programs = list(watch.programs.values())
    report.windows = [{"why": why, "where": where, "count": n} for (why, where), n in watch.windows.most_common()]
    if nki:
        report.nki = write_sources(nki, sources)
    return report


def main(arguments: list[str]) -> int:
    """Explains a script; returns the script's exit code."""
    parser = argparse.ArgumentParser("torchneuron explain", description=__doc__)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--all", action="store_true", help="list every program and window, not the first 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report into FILE as well")
    parser.add_argument("--nki", type=Path, metavar="DIR", help="write each program as NKI source into a file of DIR")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs="*", default=[], help="the script's arguments, after --")
    args = parser.parse_args(arguments)
    if not args.module and not Path(args.script).is_file():
        parser.error(f"there is no file {args.script}")
    try:
        report = explain(args.script, args.arguments, args.module, args.nki)
    except ImportError as error:
        print(f"torchneuron explain: the device cannot be loaded: {error}. See `torchneuron info`.", file=sys.stderr)
        return 1
    print(f"\n{report.text(sys.maxsize if args.all else 20)}")
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1))
    return report.exit_code
