"""What the passes ask of a graph: which nodes are views, which storage a node's value lies in, what leaves the graph.

Graphs of AOTAutograd are functional: nothing but `copy_` into an input (and operators that a custom schema declares to
mutate) writes to memory.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node


@functools.cache
def _aliasing(op: torch._ops.OpOverload) -> tuple[bool, bool]:
    """Whether an operator returns a view, and whether it writes to an argument."""
    returns = op._schema.returns
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return view, op._schema.is_mutable


def is_operator(node: Node, *packets: Any) -> bool:
    """Whether a node calls an ATen-like operator; with `packets`, one of their overloads."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
        return False
    return not packets or op.overloadpacket in packets


def is_view(node: Node) -> bool:
    """Whether a node's value lies in its first argument's storage."""
    return is_operator(node) and (_aliasing(node.target)[0] or node.target is torch.ops.aten._unsafe_view.default)


@functools.cache
def draws(op: torch._ops.OpOverload) -> bool:
    """Whether an operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def has_effect(node: Node) -> bool:
    """Whether a node does something besides having a value: writes, draws random numbers, talks to others."""
    if is_operator(node) and node.target.namespace == "aten":
        return _aliasing(node.target)[1] or draws(node.target) or not node.target._schema.returns
    return node.is_impure()


def is_pure(node: Node) -> bool:
    """Whether a node's value is a function of its arguments."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator) or has_effect(node):
        return False
    return not is_operator(node) or node.target.overloadpacket not in _UNINITIALISED


_UNINITIALISED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


def value(node: Node) -> Any:
    """The fake tensor (or number, or list of them) that stands for a node's value."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), torch.Tensor)


def base(node: Node) -> Node:
    """The node whose storage a node's value lies in: where its chain of views starts."""
    while True:
        if is_view(node) and isinstance(node.args[0], Node):
            node = node.args[0]
        elif node.target is operator.getitem and is_view(node.args[0]):
            node = node.args[0]
        else:
            return node


def output_node(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def outputs(graph: Graph) -> list[Node]:
    """Nodes whose values the graph returns."""
    return [v for v in pytree.tree_leaves(output_node(graph).args) if isinstance(v, Node)]


def written(graph: Graph) -> set[Node]:
    """Bases that the graph writes to."""
    found = set()
    for node in graph.nodes:
        if is_operator(node) and _aliasing(node.target)[1]:
            found.update(base(a) for a in node.all_input_nodes)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            found.update(base(a) for a in node.all_input_nodes)  # nothing is known about it
    return found


def same_layout(a: Any, b: Any) -> bool:
    """Whether two fake tensors have the same sizes, strides, type and device, known without a guard."""
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout == torch.strided
        and same_numbers(a.shape, b.shape)
        and same_numbers(a.stride(), b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def same_numbers(a: Any, b: Any) -> bool:
    """Whether two lists of sizes are equal, symbols compared as expressions."""
    return len(a) == len(b) and all(_expression(x) == _expression(y) for x, y in zip(a, b))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


class Leaving:
    """Which storages a caller sees: those of outputs and inputs. Two values that a caller sees must not come to share
    memory, as he may write to one of them."""

    def __init__(self, graph: Graph) -> None:
        self.outputs = set(outputs(graph))
        self.bases = {base(n) for n in self.outputs}
        self.written = written(graph)

    def may_replace(self, node: Node, by: Node) -> bool:
        """Whether users of `node` may take `by`, which has the same value, without anybody seeing that."""
        source = base(by)
        if source in self.written or base(node) in self.written:
            return False
        if base(node) not in self.bases or base(node) is source:
            # Nobody outside sees the node's storage, or it is the same already.
            return node not in self.outputs or (by.op != "placeholder" and by not in self.outputs)
        return source.op != "placeholder" and source.op != "get_attr" and source not in self.bases

    def replace(self, node: Node, by: Node) -> None:
        node.replace_all_uses_with(by)
        if node in self.outputs:
            self.outputs.remove(node)
            self.outputs.add(by)
            self.bases.add(base(by))
