"""Common subexpressions: the same operator on the same arguments runs once.

Not across a write to memory, not for random operators, and not where a caller would get one tensor in place of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import Leaving, is_operator, is_pure


def _key(value: Any) -> Any:
    """Hashable; tells 1, 1.0 and True apart."""
    if isinstance(value, (list, tuple)):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    # repr, since -0.0 == 0.0
    return (type(value), repr(value) if isinstance(value, float) else value)


def run(graph: Graph) -> bool:
    leaving = Leaving(graph)
    seen: dict[Any, Node] = {}
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not is_pure(node):
            if (
                is_operator(node)
                and node.target._schema.is_mutable
                or isinstance(node.target, torch._ops.HigherOrderOperator)
            ):
                seen.clear()
            continue
        try:
            first = seen.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        except TypeError:  # an argument that has no hash
            continue
        if first is not node and leaving.may_replace(node, first):
            leaving.replace(node, first)
            graph.erase_node(node)
            changed = True
    return changed
