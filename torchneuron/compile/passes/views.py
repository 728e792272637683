"""View folding: a view of a view is one view, or none.

Views cost no work on the data but a call each. `alias` and `detach` mean nothing within a graph; pairs of transposes
undo each other; a `view` of a `view` needs only the last shape; a view with its source's sizes and strides is its
source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import Leaving, is_operator, is_tensor, is_view, same_layout, same_numbers, value

aten = torch.ops.aten
_RESHAPES = (aten.view, aten._unsafe_view)


def _same_place(a: Any, b: Any) -> bool:
    return same_layout(a, b) and same_numbers([a.storage_offset()], [b.storage_offset()])


def _source(node: Node) -> Node | None:
    """A node further up the chain of views that has the same value, or None."""
    place = value(node)
    source = node.args[0]
    found = None
    while is_tensor(source):
        if _same_place(value(source), place):
            found = source
        if not is_view(source):
            break
        source = source.args[0]
    return found


def _shorten(node: Node) -> bool:
    """view(view(x)) becomes view(x), where x has strides that allow it."""
    source = node.args[0]
    if not (is_operator(node, *_RESHAPES) and is_operator(source, *_RESHAPES) and is_tensor(source.args[0])):
        return False
    root = source.args[0]
    fake = value(root)
    if value(node).dtype != fake.dtype or not fake.is_contiguous():
        return False
    node.replace_input_with(source, root)
    return True


def run(graph: Graph) -> bool:
    leaving = Leaving(graph)
    changed = False
    for node in list(graph.nodes):
        if not is_view(node) or not is_tensor(node):
            continue
        if not is_tensor(node.args[0]):
            continue
        source = _source(node)
        if source is not None and leaving.may_replace(node, source):
            leaving.replace(node, source)
            graph.erase_node(node)
            changed = True
        elif _shorten(node):
            changed = True
    return changed
