"""Numbers first: arithmetic on the host's numbers comes before the device's operators.

A compiled optimizer counts its steps in tensors of the host and writes the counters back at the graph's end. Between
operators of the device that would cut a fused step in two. What neither needs the device's results nor meets them in
memory goes before all of them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import base, draws, is_operator, value


def _is_number(node: Node) -> bool:
    tensors = value(node) if isinstance(value(node), (list, tuple)) else [value(node)]
    return all(isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.dim() == 0 for t in tensors)


def _is_arithmetic(node: Node) -> bool:
    """Whether a node is an operator on numbers of the host alone."""
    if node.target is operator.getitem:
        return _is_number(node)
    if not is_operator(node) or node.target.namespace != "aten" or draws(node.target):
        return False
    read = node.all_input_nodes
    return bool(read) and all(map(_is_number, read)) and (not node.target._schema.returns or _is_number(node))


def _bases(values: Any) -> set[Node]:
    return {base(v) for v in pytree.tree_leaves(values) if isinstance(v, Node)}


def _written(node: Node) -> set[Node]:
    """Storages that a node writes to, as far as is known; of what has no schema all that it is given."""
    if not is_operator(node):
        return _bases((node.args, node.kwargs)) if node.target is not operator.getitem else set()
    arguments = node.target._schema.arguments
    given = {**{a.name: v for a, v in zip(arguments, node.args)}, **node.kwargs}
    return _bases([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])


def run(graph: Graph) -> bool:
    changed = False
    first: Node | None = None  # of those that stay
    stay: set[Node] = set()
    touched: set[Node] = set()  # storages that those read or write
    written: set[Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        read = node.all_input_nodes
        bases, to = set(map(base, read)), _written(node)
        apart = not stay & set(read) and not bases & written and not to & touched
        if _is_arithmetic(node) and apart and not (to and node.users):
            if first is not None:
                first.prepend(node)
                changed = True
            continue
        first = first or node
        stay.add(node)
        touched |= bases
        written |= to
    return changed
