"""What adaptive eager does: counters, and the log of programs (`TORCH_LOGS=+neuron`)."""

from __future__ import annotations

import logging
import os

import torch

from torchneuron import _C

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


def install_log() -> None:
    """Makes `neuron` a name for `TORCH_LOGS`: with `+neuron` each window's programs are printed as they run."""
    torch._logging._internal.register_log("neuron", ["torchneuron"])
    if not os.environ.get("TORCH_LOGS"):
        return
    torch._logging._internal._init_logs()  # it was read before the name was known
    if _log.isEnabledFor(logging.DEBUG):
        _C.set_program_listener(_log.debug)
