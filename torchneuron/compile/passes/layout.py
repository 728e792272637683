"""Layout: copies that change nothing go.

`clone` and `_to_copy` of a tensor that has the wanted type and strides already are the tensor itself, where nobody can
tell: neither is written to, and the caller does not get both.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from torchneuron.compile.passes._graph import Leaving, is_operator, is_tensor, same_layout, value

aten = torch.ops.aten


def run(graph: Graph) -> bool:
    leaving = Leaving(graph)
    changed = False
    for node in list(graph.nodes):
        if not is_operator(node, aten.clone, aten._to_copy) or not is_tensor(node.args[0]):
            continue
        source = node.args[0]
        if same_layout(value(node), value(source)) and leaving.may_replace(node, source):
            leaving.replace(node, source)
            graph.erase_node(node)
            changed = True
    return changed
