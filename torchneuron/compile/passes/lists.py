"""Lists: operators on lists of tensors stay one operator for the whole list.

Compiled optimizers work on lists, but AOTAutograd ends their graph with a copy into each parameter and each state, and
makes of `_foreach_lerp_` a sum of products with tensors full of the weight. An operator for each tensor cuts the step
into many, and each value between them goes through memory. Neighbouring copies become `_foreach_copy_`; products with
lists of equal numbers become products with the number. No bit changes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import base, is_tensor, same_layout, value

aten = torch.ops.aten


def _is_copy(node: Node) -> bool:
    """Whether a node copies a computed tensor into an input of the same layout, and nobody reads its value."""
    if node.target is not aten.copy_.default or len(node.args) != 2 or node.kwargs or node.users:
        return False
    to, source = node.args
    return (
        to.op == "placeholder"
        and is_tensor(source)
        and base(source).op != "placeholder"
        and same_layout(value(to), value(source))
    )


def _join(graph: Graph, copies: list[Node]) -> bool:
    """One `_foreach_copy_` for the results of each list operator in place of neighbouring copies. They write to
    different inputs and read none, so that their order does not matter: it becomes the list operator's, since lists are
    one program member by member."""
    kinds: dict[Any, list[Node]] = {}
    for copy in copies:
        to, source = copy.args
        made_by = source.args[0] if source.target is operator.getitem else None
        kinds.setdefault((made_by, value(to).dtype, value(to).device), []).append(copy)
    changed = False
    for group in kinds.values():
        if len(group) < 2:
            continue
        if group[0].args[1].target is operator.getitem:
            group.sort(key=lambda copy: copy.args[1].args[1])
        first = next(c for c in copies if c in group)
        with graph.inserting_before(first):
            graph.call_function(aten._foreach_copy_.default, tuple(map(list, zip(*(c.args for c in group)))))
        for copy in group:
            graph.erase_node(copy)
        changed = True
    return changed


def _join_copies(graph: Graph) -> bool:
    changed = False
    group: list[Node] = []
    for node in list(graph.nodes):
        if _is_copy(node) and not any(node.args[0] is c.args[0] for c in group):
            group.append(node)
            continue
        changed |= _join(graph, group)
        group = []
    return changed


def _number(tensors: Any) -> float | None:
    """The number that all tensors of a list are full of."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return None
    if not all(isinstance(t, Node) and t.target is aten.full_like.default for t in tensors):
        return None
    numbers = {t.args[1] for t in tensors}
    return numbers.pop() if len(numbers) == 1 and isinstance(tensors[0].args[1], (int, float)) else None


def _multiply_by_number(graph: Graph, node: Node) -> bool:
    """`a + b * c` with a list `b` or `c` of equal numbers; in float32, where the product is rounded just the same."""
    for i in (1, 2):
        number, others = _number(node.args[i]), node.args[3 - i]
        if number is None or not all(
            is_tensor(o) and value(o).dtype == torch.float32 for o in (*others, *node.args[0])
        ):
            continue
        if not all(same_layout(value(t), value(o)) for t, o in zip(node.args[i], others)):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten._foreach_mul.Scalar, (others, number))
            product.meta["val"] = [value(o) for o in others]
            terms = [graph.call_function(operator.getitem, (product, k)) for k in range(len(others))]
            for term, other in zip(terms, others):
                term.meta["val"] = value(other)
        node.target, node.args = aten._foreach_add.List, (node.args[0], terms)
        return True
    return False


def run(graph: Graph) -> bool:
    changed = _join_copies(graph)
    for node in list(graph.nodes):
        if node.target is aten._foreach_addcmul.Scalar and len(node.args) == 3 and not node.kwargs:
            changed |= _multiply_by_number(graph, node)
    return changed
