"""From AOTAutograd's graph to a plan.

Every node has a step: operators by their schema, arithmetic on sizes by name, and whatever has no C++ form
(higher-order operators, functions of Python) as a call of Python.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from torchneuron import _C
from torchneuron.compile.fusing import fuse
from torchneuron.compile.plan import Plan, Slot, Step

_REAL_FUNCTIONS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")

# Functions on sizes and scalars, and what csrc/compile/scalar_step.cpp calls them.
SCALARS: dict[Any, str] = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "truediv",
    operator.floordiv: "floordiv", operator.mod: "mod", operator.pow: "pow", operator.neg: "neg", operator.pos: "pos",
    operator.abs: "abs", operator.eq: "eq", operator.ne: "ne", operator.lt: "lt", operator.le: "le",
    operator.gt: "gt", operator.ge: "ge", operator.and_: "bit_and", operator.or_: "bit_or", operator.not_: "not",
    operator.lshift: "lshift", operator.rshift: "rshift",
    math.floor: "floor", math.ceil: "ceil", math.trunc: "int", round: "round", min: "min", max: "max", int: "int",
    float: "float", bool: "bool", abs: "abs",
    torch.sym_int: "int", torch.sym_float: "float", torch.sym_not: "not", torch.sym_ite: "select",
    torch.sym_max: "max", torch.sym_min: "min", torch.sym_sum: "sum",
    **{getattr(torch, f"_sym_{name}"): name for name in _REAL_FUNCTIONS if hasattr(torch, f"_sym_{name}")},
    torch.ops.aten.sym_size.int: "size", torch.ops.aten.sym_stride.int: "stride",
    torch.ops.aten.sym_numel.default: "numel", torch.ops.aten.sym_storage_offset.default: "storage_offset",
}  # fmt: skip

# Types of schema arguments that an executable has no constants of.
_FOREIGN = ("PyObjectType", "ClassType", "AnyType", "FunctionType")


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The (fake) tensors that nodes in an argument or a node's value stand for."""
    found = []
    for leaf in pytree.tree_leaves(value):
        leaf = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
        found += [t for t in (leaf if isinstance(leaf, (list, tuple)) else [leaf]) if isinstance(t, torch.Tensor)]
    return found


def user_line(node: Node) -> str:
    """The innermost line of the user's code that made the node, or nothing."""
    trace = node.meta.get("stack_trace")
    places = re.findall(r'File "(.+)", line (\d+), in (.+)', trace) if trace else []
    return "{}:{}, in {}".format(*places[-1]) if places else ""


def only_unpacked(node: Node) -> bool:
    """Whether nobody uses a node's list of results as a list."""
    if not all(user.target is operator.getitem for user in node.users):
        return False
    return all(only_unpacked(u) for u in node.users if isinstance(u.meta.get("val"), (list, tuple)))


# Types of the tensors that fused programs work on (dtype_of in csrc/fusion/record.cpp).
_LANES = {torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8, torch.bool}

# Arguments that the host reads: which they are (csrc/fusion/nll.cpp).
_LABELS = {torch.ops.aten.nll_loss_forward.default: 1, torch.ops.aten.nll_loss_backward.default: 2}


@functools.cache
def _facts(op: torch._ops.OpOverload) -> tuple[bool, str, bool]:
    """Whether an operator may run its CPU kernel on host faces, how it fuses, whether it writes to an argument."""
    name = op._schema.name, op._schema.overload_name
    return _C.runs_bridged(*name), _C.fusion_of(*name), op._schema.is_mutable


def _computes_numbers(node: Node, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Whether an operator is arithmetic on float32 tensors of the host without dimensions, whose result is new."""
    name = node.target._schema.name, node.target._schema.overload_name
    if node.kwargs or len(node.args) > 2 or not inputs or not _C.computes_numbers(*name):
        return False
    if node.target._schema.is_mutable and node.users:
        return False
    return all(t.device.type == "cpu" and t.dim() == 0 and t.dtype == torch.float32 for t in (*inputs, *results))


def _site(op: torch._ops.OpOverload, node: Node) -> dict[str, Any]:
    """Where an operator runs, and how."""
    inputs = tensors_of((node.args, node.kwargs))
    results = tensors_of(node.meta.get("val"))
    bridged, fusion, writes = _facts(op)
    site = {"dtypes": [t.dtype for t in inputs if t.device.type == "neuron"], "writes": writes}
    neuron = {t.device.index for t in (*inputs, *results) if t.device.type == "neuron"}
    if _computes_numbers(node, inputs, results):
        return {**site, "fusion": "number"}
    if len(neuron) != 1 or not all(t.layout == torch.strided and not t.is_nested for t in (*inputs, *results)):
        return site
    # Tensors without dimensions may live on the host beside neuron tensors; results then are neuron tensors.
    if any(t.device.type != "neuron" and t.dim() > 0 for t in inputs) or any(
        t.device.type != "neuron" for t in results
    ):
        return site
    labels = tensors_of(node.args[_LABELS[op] : _LABELS[op] + 1]) if op in _LABELS else []
    lanes = all(
        t.dtype in _LANES or any(t is label for label in labels)
        for t in (*inputs, *results)
        if t.device.type == "neuron"
    )
    if fusion == "view" or (fusion == "program" and lanes):
        site["fusion"] = fusion
    return {**site, "device": neuron.pop(), "bridged": bridged}


class Lowering:
    """Walks a graph once; `plan` is the result."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.slots: dict[Node, int] = {}
        self.several: dict[Node, list[Any]] = {}  # nodes with several results: their slots, nested as the results are
        self.objects: dict[Node, Any] = {}  # what is no tensor among the graph's attributes
        self.constants: list[tuple[int, torch.Tensor]] = []
        self.steps: list[Step] = []
        self.count = 0
        self.plan = self._lower()

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _lower(self) -> Plan:
        nodes = list(self.graph.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        for node in inputs:
            self.slots[node] = self._new()
        outputs: list[Any] = []
        for node in nodes:
            if node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = [self._argument(v) for v in pytree.tree_leaves(node.args[0], is_leaf=lambda v: v is None)]
            elif node.op != "placeholder":
                raise NotImplementedError(f"AOTAutograd's graphs have no nodes of kind {node.op}: {node.format_node()}")
        return Plan(len(inputs), self.count, self.constants, self.steps, outputs)

    def _attribute(self, node: Node) -> None:
        value = functools.reduce(getattr, node.target.split("."), self.graph)
        if isinstance(value, torch.Tensor):
            self.slots[node] = self._new()
            self.constants.append((self.slots[node], value))
        else:
            self.objects[node] = value

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return Slot(self.slots[value])
        if isinstance(value, (list, tuple)):
            return [self._argument(v) for v in value]
        return value

    def _call(self, node: Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.several:
            result = self.several[node.args[0]][node.args[1]]
            if isinstance(result, list):
                self.several[node] = result
            else:
                self.slots[node] = result
        elif self._is_scalar(node):
            args = [self._argument(a) for a in node.args]
            if node.target is torch.sym_sum:
                (args,) = args
            self.slots[node] = self._new()
            self._add(node, Step("scalar", SCALARS[node.target], args, [self.slots[node]]))
        elif self._is_operator(node):
            self._operator(node)
        else:
            self._python(node)

    def _is_scalar(self, node: Node) -> bool:
        if node.target not in SCALARS or node.kwargs:
            return False
        return is_number(node.meta.get("val"))

    def _is_operator(self, node: Node) -> bool:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload):
            return False
        if any(a.type.kind() in _FOREIGN or "torch.classes" in str(a.type) for a in op._schema.arguments):
            return False
        if isinstance(node.meta.get("val"), (list, tuple)) and not only_unpacked(node):
            return False
        return not any(n in self.objects for n in node.all_input_nodes)

    def _outs(self, node: Node) -> list[int]:
        """Slots for the results of a node, flattened."""
        results = node.meta.get("val")
        if not isinstance(results, (list, tuple)) or not only_unpacked(node):
            self.slots[node] = self._new()
            return [self.slots[node]]
        self.several[node] = [
            [self._new() for _ in r] if isinstance(r, (list, tuple)) else self._new() for r in results
        ]
        return pytree.tree_leaves(self.several[node])

    def _operator(self, node: Node) -> None:
        op = node.target
        step = Step(
            "operator",
            op._schema.name,
            [self._argument(a) for a in node.args],
            self._outs(node) if op._schema.returns else [],
            overload=op._schema.overload_name,
            kwargs={k: self._argument(v) for k, v in node.kwargs.items()},
            **_site(op, node),
        )
        if step.name == "torchneuron::nki" and isinstance(node.meta["val"], list) and step.device >= 0:
            from torchneuron.nki import torch_ops

            step.kind, handle = "kernel", node.args[1]
            step.label = torch_ops.kernel_name(handle)
            step.function = functools.partial(torch_ops.launch_of, handle)
        self._add(node, step)

    def _python(self, node: Node) -> None:
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node) and leaf not in self.objects]
        fixed = [self.objects.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in leaves]
        outs = self._outs(node)
        function = call_python(node.target, fixed, dynamic, spec, node in self.several)
        name = getattr(node.target, "__name__", str(node.target))
        self._add(node, Step("python", name, [Slot(self.slots[leaves[i]]) for i in dynamic], outs, function=function))

    def _add(self, node: Node, step: Step) -> None:
        line = user_line(node)
        step.where = f"In {step.name} of a compiled graph" + (f" ({line})" if line else "")
        self.steps.append(step)


def call_python(
    target: Callable[..., Any], leaves: Sequence[Any], dynamic: Sequence[int], spec: pytree.TreeSpec, several: bool
) -> Callable[..., list[Any]]:
    """`target` as a function of the values at the positions `dynamic` of its flattened arguments, to a list."""

    def call(*values: Any) -> list[Any]:
        full = list(leaves)
        for position, value in zip(dynamic, values):
            full[position] = value
        args, kwargs = pytree.tree_unflatten(full, spec)
        result = target(*args, **kwargs)
        return pytree.tree_leaves(result, is_leaf=lambda v: v is None) if several else [result]

    return call


def lower(graph: GraphModule) -> Plan:
    """The plan of a graph of AOTAutograd's (ATen operators, functional, positional inputs)."""
    plan = Lowering(graph).plan
    fuse(plan)
    return plan
