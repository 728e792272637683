"""Pattern replacement: several operators become one that does the same work in one go.

`select_backward` writes a slice into zeros. The gradient of an unbound tensor (q, k and v of one product) is a sum of
them, each as large as the whole: four tensors written and three additions for what is one `stack`. The values are the
same; only where a gradient is -0.0 the sum with zeros has +0.0.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import is_operator, is_tensor, value

aten = torch.ops.aten


def _terms(node: Node) -> list[Node] | None:
    """The summands of a tree of additions whose inner nodes nobody else reads."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(map(is_tensor, node.args)):
        return [node]
    terms = []
    for part in node.args:
        inner = part.target is aten.add.Tensor and len(part.users) == 1
        terms += _terms(part) if inner else [part]
    return terms


def _stack(graph: Graph, node: Node) -> bool:
    terms = _terms(node)
    if len(terms) < 2 or not all(t.target is aten.select_backward.default and len(t.users) == 1 for t in terms):
        return False
    sizes, dim = terms[0].args[1], terms[0].args[2]
    if any(t.args[1] != sizes or t.args[2] != dim for t in terms):
        return False
    dim %= len(sizes)
    by_index = {t.args[3]: t.args[0] for t in terms}
    # Every slice once: no zeros are left, and nothing is added to anything else.
    if not isinstance(sizes[dim], int) or len(terms) != sizes[dim] or sorted(by_index) != list(range(sizes[dim])):
        return False
    if len({value(t.args[0]).dtype for t in terms}) != 1 or not value(node).is_contiguous():
        return False
    with graph.inserting_before(node):
        stacked = graph.call_function(aten.stack.default, ([by_index[i] for i in range(sizes[dim])], dim))
    stacked.meta = dict(node.meta)
    node.replace_all_uses_with(stacked)
    return True


def run(graph: Graph) -> bool:
    changed = False
    for node in reversed(list(graph.nodes)):
        if is_operator(node, aten.add) and len(node.users) > 0:
            changed |= _stack(graph, node)
    return changed
