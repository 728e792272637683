"""Passes over AOTAutograd's graphs, one a file, in the order in which they run.

A pass takes a `torch.fx.Graph`, changes it in place and says whether it did. None changes a bit of a result, save where
its file says what it changes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, GraphModule

from torchneuron.compile.passes import (
    common_subexpressions,
    constant_folding,
    dead_code,
    layout,
    lists,
    numbers,
    patterns,
    reinplace,
    views,
)

PASSES: dict[str, Callable[[Graph], bool]] = {
    "dead_code": dead_code.run,
    "views": views.run,
    "common_subexpressions": common_subexpressions.run,
    "constant_folding": constant_folding.run,
    "layout": layout.run,
    "patterns": patterns.run,
    "reinplace": reinplace.run,  # from here on the graph is functional no more
    "lists": lists.run,
    "numbers": numbers.run,
}


def run_passes(module: GraphModule, names: frozenset[str] = frozenset(PASSES)) -> None:
    """Runs the passes called `names`."""
    for name, run in PASSES.items():
        if name in names and run(module.graph) and "dead_code" in names:
            dead_code.run(module.graph)
