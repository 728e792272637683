"""Constant folding: what depends on constants alone is computed when the graph is compiled.

Results are kept on the device for the life of the executable, so they are limited in size; a result that the caller
gets is made anew in each run, because he may write to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import Leaving, base, is_operator, is_pure, is_view, value

# Bytes of one folded tensor. A mask of 512 x 512 floats is a MiB.
LIMIT = 1 << 20


def _foldable(node: Node, constants: set[Node]) -> bool:
    if not is_operator(node) or not is_pure(node) or torch.Tag.data_dependent_output in node.target.tags:
        return False
    fake = value(node)
    if not isinstance(fake, torch.Tensor) or fake.layout != torch.strided or fake.device.type not in ("cpu", "neuron"):
        return False
    if any(isinstance(s, torch.SymInt) for s in (*fake.shape, *fake.stride())):
        return False
    return fake.numel() * fake.itemsize <= LIMIT and all(a in constants for a in node.all_input_nodes)


def run(graph: Graph) -> bool:
    owner = graph.owning_module
    leaving = Leaving(graph)
    constants: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(owner, str(node.target), None), torch.Tensor):
            if node not in leaving.written:
                constants.add(node)
        elif _foldable(node, constants) and base(node) not in leaving.bases and base(node) not in leaving.written:
            constants.add(node)
    # Fold where constants meet the rest of the graph; what only they used is dead afterwards. A view of a constant that
    # is an attribute already is no work.
    changed = False
    values: dict[Node, torch.Tensor] = {}

    def compute(node: Node) -> torch.Tensor:
        if node not in values:
            if node.op == "get_attr":
                values[node] = getattr(owner, str(node.target))
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), compute)
                with torch.no_grad():
                    values[node] = node.target(*args, **kwargs)
        return values[node]

    for node in list(graph.nodes):
        if node not in constants or node.op == "get_attr" or all(user in constants for user in node.users):
            continue
        if is_view(node) and base(node).op == "get_attr":
            continue
        _replace(graph, node, compute(node))
        changed = True
    return changed


def _replace(graph: Graph, node: Node, result: torch.Tensor) -> None:
    owner: Any = graph.owning_module
    name, i = "_folded_0", 0
    while hasattr(owner, name):
        i += 1
        name = f"_folded_{i}"
    owner.register_buffer(name, result, persistent=False)
    with graph.inserting_before(node):
        constant = graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
    graph.erase_node(node)
