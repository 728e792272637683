"""The plan of an executable: what Python hands to C++, and what the cache keeps.

A plan is a list of steps on numbered slots. Inputs take the first slots, then come the graph's constant tensors, then
each result. A step names its operator, its arguments (`Slot` for a slot, anything else is a constant; lists may hold
slots), the slots of its results and the slots that nobody needs after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchneuron import _C

Slot = _C.Slot


@dataclass
class Step:
    """One step. `kind` is "operator" (through C++), "fused" (operators as programs), "numbers" (operators on float32
    tensors of the host without dimensions, computed as floats), "scalar" (arithmetic on sizes), "kernel" (an operator
    that launches an NKI kernel) or "python" (a call of Python). Of steps that hold others `args` are the slots from
    outside, `outs` those that are read after it."""

    kind: str
    name: str
    args: list[Any]
    outs: list[int]
    overload: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)  # of a "fused" step or one of "numbers"
    # Of a "python" step: slots' values to a list of results; of a "kernel" step: a list of tensors to a launch or None.
    function: Callable[..., Any] | None = None
    label: str = ""  # of a "kernel" step: the kernel's name
    bridged: bool = False  # may run PyTorch's CPU kernel on host faces of the tensors
    device: int = -1  # index of the neuron device that the results are on; -1: host
    dtypes: list[torch.dtype] = field(default_factory=list)  # of the neuron tensors among the arguments
    drops: list[int] = field(default_factory=list)
    where: str = ""
    fusion: str = "none"  # "program", "view", "number" or "none": how the operator takes part in steps with others
    writes: bool = False  # to an argument


@dataclass
class Plan:
    """`constants`: (slot, tensor) pairs; `outputs`: slots and constants that the executable returns."""

    inputs: int
    slots: int
    constants: list[tuple[int, torch.Tensor]]
    steps: list[Step]
    outputs: list[Any]

    def build(self) -> Callable[[list[Any]], list[Any]]:
        """The executable: takes a list of inputs, which it empties, and returns the outputs."""
        steps = [{**vars(step), "steps": [vars(inner) for inner in step.steps]} for step in self.steps]
        executable = _C.Executable(self.inputs, self.slots, self.constants, steps, self.outputs)
        executable._boxed_call = True  # to AOTAutograd: takes its inputs as a list that it empties
        return executable


def slots_in(value: Any) -> list[int]:
    """The slots that an argument mentions, in order."""
    if isinstance(value, Slot):
        return [value.index]
    if isinstance(value, (list, tuple)):
        return [s for item in value for s in slots_in(item)]
    return []


def mark_drops(plan: Plan) -> None:
    """Fills in `drops`: each slot is dropped after its last use, or at once if nobody uses it."""
    alive = {s for value in plan.outputs for s in slots_in(value)}

    def mark(step: Step) -> None:
        step.drops = []
        for inner in reversed(step.steps):
            mark(inner)
        for slot in step.outs + slots_in([*step.args, *step.kwargs.values()]):
            if slot not in alive:
                alive.add(slot)
                step.drops.append(slot)

    for step in reversed(plan.steps):
        mark(step)


def render(plan: Plan) -> str:
    """The plan as text, one step a line."""

    def word(value: Any) -> str:
        if isinstance(value, Slot):
            return f"%{value.index}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(word, value)) + "]"
        if isinstance(value, float):
            return f"{value:g}"
        return str(value).removeprefix("torch.")

    def line(step: Step, margin: str) -> str:
        outs = ", ".join("_" if o in step.drops else f"%{o}" for o in step.outs)
        args = ", ".join([*map(word, step.args), *(f"{k}={word(v)}" for k, v in step.kwargs.items())])
        how = {"operator": "cpu kernel" if step.bridged else "dispatched"}.get(step.kind, step.kind)
        name = f"{step.name}.{step.overload}" if step.overload else step.name
        freed = [f"%{s}" for s in step.drops if s not in step.outs]
        frees = f"  frees {', '.join(freed)}" if freed else ""
        return f"{margin}{outs + ' = ' if outs else ''}{name}({args})  [{how}]{frees}"

    lines = [f"executable: {plan.inputs} inputs, {len(plan.steps)} steps, {plan.slots} slots"]
    lines += [f"  %{slot} = constant {tuple(t.shape)} {t.dtype} {t.device}" for slot, t in plan.constants]
    for step in plan.steps:
        lines.append(line(step, "  "))
        lines += [line(inner, "      ") for inner in step.steps]
    lines.append(f"  return {', '.join(map(word, plan.outputs))}")
    return "\n".join(lines)


__all__ = ["Plan", "Slot", "Step", "mark_drops", "render", "slots_in"]
