"""Operators that are taken apart before the graph is cut into forward and backward, although eager code has them whole.

The cut then keeps less: of a log-softmax the largest element and the logarithm of each row, from which the backward
pass computes it again in the program that reads it, instead of a tensor as large as the input. The parts are those of
the operator's row (csrc/fusion/reductions.cpp), so the bits are its bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten


@contextlib.contextmanager
def _computed_again() -> Iterator[None]:
    """What is traced here is not kept for the backward pass, as if the user had checkpointed it."""
    meta = fx_traceback.current_meta
    before = dict(meta)
    if "recompute" not in meta:
        meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    try:
        yield
    finally:
        meta.clear()
        meta.update(before)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    # In other types each part would be rounded; over other dims the operator is the library's.
    if x.device.type != "neuron" or x.dtype != torch.float32 or half_to_float or x.dim() == 0:
        return NotImplemented
    if dim not in (-1, x.dim() - 1) or not x.is_contiguous():
        return NotImplemented
    largest = x.amax(-1, keepdim=True)
    with _computed_again():
        shifted = x - largest
    logarithm = shifted.exp().sum(-1, keepdim=True).log()
    with _computed_again():
        return shifted - logarithm


DECOMPOSITIONS = {aten._log_softmax.default: _log_softmax}
