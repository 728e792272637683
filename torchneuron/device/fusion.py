"""What adaptive eager does: counters, and the log of programs (`TORCH_LOGS=+neuron`)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchneuron import _C
from torchneuron.device.streams import synchronize

if TYPE_CHECKING:
    from torchneuron.nki.source import Source

_log = logging.getLogger("torchneuron.fusion")


def fusion_stats() -> dict[str, int]:
    """Counters since the last `reset_fusion_stats()`, of all devices.

    Returns:
        `ops_recorded`: calls of fusible operators; `ops_fused`: those of them that shared a program with another;
        `library_calls`: operators that ran PyTorch's CPU kernel; `programs_built`: programs made because none in the
        cache fitted; `programs_run`; `stores_elided`: results that were never written because nobody could see them
        any more; `executables_run`: calls of what `torch.compile` made. What is pending is not counted as run:
        `torch.neuron.synchronize()` first.
    """
    return _C.fusion_stats()


def reset_fusion_stats() -> None:
    """Sets the counters of `fusion_stats()` to 0."""
    _C.reset_fusion_stats()


@dataclass
class FusedProgram:
    """A program that ran, as NKI source."""

    operators: list[str]
    rows: int
    columns: int  # 1 without reductions
    source: Source | None  # None: there is no NKI source with the same bits
    reason: str  # why not
    runs: int = 0


class _Recorder:
    """Gathers programs, each once. Calls may come from several threads; each holds the GIL."""

    def __init__(self) -> None:
        self.programs: dict[Any, FusedProgram] = {}

    def ran(self, calls: list[tuple[str, int | None]], structure: dict[str, Any], runs: list[tuple[Any, ...]]) -> None:
        from torchneuron.nki import source

        for run in runs:
            program = source.Program.of((name for name, _ in calls), structure, run)
            if not program.writes:
                continue
            if program.key not in self.programs:
                printed, reason = None, ""
                try:
                    printed = source.print_source(program)
                except source.NoNkiForm as error:
                    reason = str(error)
                self.programs[program.key] = FusedProgram(
                    list(program.operators), program.rows, program.columns, printed, reason
                )
            self.programs[program.key].runs += 1


_recorders: list[_Recorder] = []


def _tell_recorders(*facts: Any) -> None:
    for recorder in list(_recorders):
        recorder.ran(*facts)


@contextlib.contextmanager
def fused_programs() -> Iterator[list[FusedProgram]]:
    """Gathers the fused programs that run inside a `with` block, each once, with its NKI source.

    The list is filled when the block ends:

        with torch.neuron.fused_programs() as programs:
            y = torch.softmax(x, -1)
        print(programs[0].source.text)

    A program has `source`, which has `text`, a Python file that runs alone, and `kernel()`; where NKI has no way to the
    same bits `source` is None and `reason` names the step. Calls of compiled graphs show when they are first made.
    """
    recorder, programs = _Recorder(), []
    synchronize()
    _recorders.append(recorder)
    _C.set_structure_observer(_tell_recorders)
    try:
        yield programs
    finally:
        synchronize()
        _recorders.remove(recorder)
        if not _recorders:
            _C.set_structure_observer(None)
        programs += recorder.programs.values()


def install_log() -> None:
    """Makes `neuron` a name for `TORCH_LOGS`: with `+neuron` each window's programs are printed as they run."""
    torch._logging._internal.register_log("neuron", ["torchneuron"])
    if not os.environ.get("TORCH_LOGS"):
        return
    torch._logging._internal._init_logs()  # it was read before the name was known
    if _log.isEnabledFor(logging.DEBUG):
        _C.set_program_listener(_log.debug)
