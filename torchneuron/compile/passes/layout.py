"""Layout: copies that change nothing go.

`clone` and `_to_copy` of a tensor that has the wanted type and strides already are the tensor itself, where nobody can
tell: neither is written to, and the caller does not get both. The functional `copy(to, x)`, which AOTAutograd makes of
`to.copy_(x)`, is `x` if that has the type and strides of `to`; CPU's own would first copy all that `to` is a view of.
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
        if is_operator(node, aten.clone, aten._to_copy):
            source = node.args[0]
        elif is_operator(node, aten.copy):
            source = node.args[1]
        else:
            continue
        if is_tensor(source) and same_layout(value(node), value(source)) and leaving.may_replace(node, source):
            leaving.replace(node, source)
            graph.erase_node(node)
            changed = True
    return changed
