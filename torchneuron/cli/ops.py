"""`torchneuron ops`: which operators Trainium runs, and how."""

from __future__ import annotations

import argparse
import textwrap

import torch  # noqa: F401  its libraries must be loaded before the extension

from torchneuron import _C

_INTRODUCTION = """# Operators

Written by `make docs` from `csrc/aten/op_table.inc`. A name stands for a family: `add` for `add.Tensor`, `add_`,
`add.out` and so on. Every ATen operator that PyTorch's CPU has works on `neuron`; this list says which ones an engine
of Trainium runs. All others are fallbacks: Trainium would hand them to the host and back. So are all operators on
float64 and complex tensors. 64-bit integers are narrowed to 32 bits on Trainium, and exact here.
"""
_KINDS = {
    "fusible": "Pointwise work, row reductions, losses and optimizers: can become part of a fused program.",
    "library": "Matrix products, convolutions, attention, data movement, selection: one call each.",
    "view": "Change of shape or strides: no work.",
}


def markdown() -> str:
    """docs/operators.md."""
    rows = _C.op_rows()
    parts = [_INTRODUCTION]
    for kind, text in _KINDS.items():
        names = sorted(name for name, of in rows if of == kind)
        listing = textwrap.fill(", ".join(f"`{name}`" for name in names), 118, break_on_hyphens=False)
        parts.append(f"## {kind.capitalize()} ({len(names)})\n{text}\n\n{listing}\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Prints the table, or the rows whose name contains a word."""
    parser = argparse.ArgumentParser("torchneuron ops", description="Which ATen operators Trainium runs, and how.")
    parser.add_argument("word", nargs="?", default="", help="only operators whose name contains it")
    parser.add_argument("--markdown", action="store_true", help="print docs/operators.md")
    options = parser.parse_args(arguments)
    if options.markdown:
        print(markdown(), end="")
        return 0
    for name, kind in sorted(_C.op_rows()):
        if options.word in name:
            print(f"{name:<48}{kind}")
    return 0
