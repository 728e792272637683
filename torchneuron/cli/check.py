"""`torchneuron check`: runs a script and reports what Trainium would not run as it is, and where the script says so."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchneuron.cli._script import run_script
from torchneuron.cli._table import table


@dataclass
class Report:
    """What a run showed."""

    script: str
    exit_code: int = 0
    seconds: float = 0.0
    executed: dict[str, int] = field(default_factory=dict)
    narrowed: dict[str, int] = field(default_factory=dict)
    fallback: list[dict[str, Any]] = field(default_factory=list)  # operator, calls, reason, where
    cuda: list[dict[str, str]] = field(default_factory=list)  # what, where, instead

    def text(self, all_operators: bool) -> str:
        """The report for a terminal."""
        failed = f"exit code {self.exit_code}" if self.exit_code else "ran through"
        parts = [f"== torchneuron check {self.script}: {failed}, {self.seconds:.1f} s"]
        total, narrowed = sum(self.executed.values()), sum(self.narrowed.values())
        fallback = sum(row["calls"] for row in self.fallback)
        if total:
            parts.append(
                f"{total:,} operator calls on neuron: {total - narrowed - fallback:,} native, {narrowed:,} narrowed, "
                f"{fallback:,} by fallback."
            )
        else:
            parts.append('Nothing ran on neuron. Does the script choose its device by itself? Pass it "neuron".')
        if self.fallback:
            rows = [(row["operator"], row["calls"], row["where"], row["reason"]) for row in self.fallback]
            parts.append("Fallbacks: Trainium would hand these to the host and back.")
            parts.append(table(("operator", "calls", "where", "reason"), rows))
        if self.narrowed:
            parts.append("Narrowed: 64-bit integers that Trainium keeps in 32 bits. Harmless for indices and labels.")
            parts.append(table(("operator", "calls"), self.narrowed.items()))
        if all_operators:
            special = {row["operator"] for row in self.fallback} | set(self.narrowed)
            rows = [(name, calls) for name, calls in self.executed.items() if name not in special]
            parts += ["Native", table(("operator", "calls"), rows)]
        if self.cuda:
            rows = [(row["what"], row["where"], row["instead"]) for row in self.cuda]
            parts.append("For CUDA alone (the check went on with neuron in its place):")
            parts.append(table(("found", "where", "write instead"), rows))
        if total and not self.fallback and not self.cuda:
            parts.append("Nothing to change.")
        return "\n\n".join(parts)


def check(script: str, arguments: list[str], as_module: bool = False) -> Report:
    """Runs a script and returns what it showed."""
    import torch

    from torchneuron import _C, device  # loads the device where autoload is off
    from torchneuron.cli import _where
    from torchneuron.cli._cuda import Watch

    places: Counter[tuple[str, str]] = Counter()

    def on_fallback(operator: str) -> None:
        forward = _where.forward_of_backward()
        places[operator, f"{forward} (backward)" if forward else _where.caller()] += 1

    report, watch, start = Report(script), Watch(), time.perf_counter()
    device.clear_op_tracking()
    _C.set_fallback_listener(on_fallback)
    try:
        # Anomaly mode: nodes of the backward pass know the forward line that made them.
        with watch.active(), torch.autograd.set_detect_anomaly(True, check_nan=False):
            report.exit_code = run_script(script, arguments, as_module)
            device.synchronize()
    finally:
        _C.set_fallback_listener(None)
    report.seconds = time.perf_counter() - start
    report.executed = device.get_executed_ops()
    report.narrowed = device.get_narrowed_ops()
    reasons = {name: entry["reason"] for name, entry in device.get_fallback_ops().items()}
    report.fallback = [
        {"operator": operator, "calls": calls, "where": where, "reason": reasons.get(operator, "")}
        for (operator, where), calls in places.most_common()
    ]
    report.cuda = [{"what": what, "where": where, "instead": instead} for what, where, instead in watch.uses]
    return report


def main(arguments: list[str]) -> int:
    """Checks a script; returns the script's exit code."""
    parser = argparse.ArgumentParser("torchneuron check", description=__doc__)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--all", action="store_true", help="list the operators that ran natively, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report into FILE as well")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs="*", default=[], help="the script's arguments, after --")
    args = parser.parse_args(arguments)
    if not args.module and not Path(args.script).is_file():
        parser.error(f"there is no file {args.script}")
    try:
        report = check(args.script, args.arguments, args.module)
    except ImportError as error:
        print(f"torchneuron check: the device cannot be loaded: {error}. See `torchneuron info`.", file=sys.stderr)
        return 1
    print(f"\n{report.text(args.all)}")
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1))
    return report.exit_code
