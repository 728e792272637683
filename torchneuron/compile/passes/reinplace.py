"""Writing in place: an operator that changes a part of a tensor changes it where it is, if nobody needs the old one.

AOTAutograd makes `cache[i] = x` a new cache with one row changed, and copies that into the input at the end. Here the
row is written and the rest stays untouched. The operators are those that leave most of their input as it was (scatters,
index writes); for others a fused program writes its result where it belongs.

The old tensor must be a temporary that is not read afterwards, or an input whose final value comes from here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from torchneuron.compile.passes._graph import Leaving, base, is_operator, is_tensor, is_view, same_layout, value

aten = torch.ops.aten

# Functional operators and their forms that write to the first argument.
_WRITES = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name, overloads in {
        "index_put": ("default",),
        "index_add": ("default",),
        "index_copy": ("default",),
        "index_fill": ("int_Scalar", "int_Tensor"),
        "scatter": ("src", "value"),
        "scatter_add": ("default",),
        "scatter_reduce": ("two",),
        "masked_scatter": ("default",),
    }.items()
    for overload in overloads
}
# Operators that return a tensor with a view of it replaced, and that view.
_VIEW_WRITES = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


class _Storages:
    """Which storage a value lies in, given what was made to write in place."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.moved: dict[Node, Node] = {}  # results that now lie in another storage
        self.leaving = Leaving(graph)

    def of(self, node: Node) -> Node:
        root = base(node)
        while root in self.moved:
            root = base(self.moved[root])
        return root

    def members(self, root: Node) -> Iterable[Node]:
        return (node for node in self.order if is_tensor(node) and self.of(node) is root)

    def read_after(self, root: Node, at: Node, but: Node | None) -> bool:
        """Whether values in a storage as they are before `at` are needed after it; `but`: the write at the end."""
        last = self.order[at]
        return any(
            self.order[user] > last and user is not but and not is_view(user)
            for member in self.members(root)
            for user in member.users
        )


def _final_copy(storages: _Storages, node: Node) -> tuple[Node, Node] | None:
    """The input that a node's value is finally copied to, and the copy."""
    pending = [node]
    while pending:
        current = pending.pop()
        for user in current.users:
            if user.target is aten.copy_.default and user.args[1] is current and user.args[0].op == "placeholder":
                return user.args[0], user
            if is_view(user) or user.target in _WRITES or user.target in _VIEW_WRITES:
                if user.args[0] is current:
                    pending.append(user)
    return None


def _may_write(storages: _Storages, node: Node) -> bool:
    target = node.args[0]
    if not is_tensor(target) or not same_layout(value(node), value(target)):
        return False
    root = storages.of(target)
    if any(storages.of(a) is root for a in node.all_input_nodes if a is not target and is_tensor(a)):
        return False
    copy = None
    if root.op == "placeholder":
        found = _final_copy(storages, node)
        if found is None or found[0] is not root:
            return False
        copy = found[1]
        # Nobody but the copy writes to the input, and what it copies has the input's layout.
        if sum(u.target is aten.copy_.default and u.args[0] is root for u in root.users) != 1:
            return False
        if not same_layout(value(copy.args[1]), value(root)):
            return False
    elif root.op != "call_function" or not is_operator(root) or root in storages.leaving.written:
        return False
    outputs = storages.leaving.outputs
    if any(storages.of(o) in (root, storages.of(node)) for o in outputs if is_tensor(o)):
        return False
    if any(stride == 0 and size != 1 for size, stride in zip(value(target).shape, value(target).stride())):
        return False  # an expanded tensor
    return not storages.read_after(root, node, copy)


def _write(graph: Graph, node: Node) -> None:
    target = node.args[0]
    with graph.inserting_before(node):
        if node.target in _WRITES:
            graph.call_function(_WRITES[node.target], node.args, node.kwargs).meta = dict(node.meta)
        else:
            named = {k: v for k, v in node.kwargs.items() if k != "src"}
            source = node.args[1] if len(node.args) > 1 else node.kwargs["src"]
            if is_operator(source, aten.copy):  # copy_ converts and expands as well
                source = source.args[1]
            view = graph.call_function(_VIEW_WRITES[node.target], (target, *node.args[2:]), named)
            view.meta = {**node.meta, "val": _view_value(node, view)}
            graph.call_function(aten.copy_.default, (view, source)).meta = dict(view.meta)


def _view_value(node: Node, view: Node) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    fake = value(node.args[0])
    args, kwargs = torch.fx.node.map_arg((view.args, view.kwargs), value)
    if isinstance(fake, FakeTensor):
        with fake.fake_mode:
            return view.target(*args, **kwargs)
    return view.target(*args, **kwargs)


def run(graph: Graph) -> bool:
    candidates = [n for n in graph.nodes if n.target in _WRITES or n.target in _VIEW_WRITES]
    if not candidates:
        return False
    storages = _Storages(graph)
    chosen: list[Node] = []
    for node in candidates:
        if _may_write(storages, node):
            storages.moved[node] = node.args[0]
            chosen.append(node)
    for copy in [n for n in graph.nodes if n.target is aten.copy_.default and isinstance(n.args[1], Node)]:
        if copy.args[0].op == "placeholder" and storages.of(copy.args[1]) is copy.args[0]:
            graph.erase_node(copy)
    for node in chosen:
        _write(graph, node)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(chosen)
