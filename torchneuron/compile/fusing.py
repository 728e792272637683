"""Which steps become one: fusible operators that follow each other, and the views between them, a fused step;
arithmetic on the host's numbers one of numbers.

A step that has nothing to do with the open group (a size, a library operator on other tensors) goes before it, so that
the group goes on; one that needs a result of the group, or that the group's writes could meet, closes it.
"""

from __future__ import annotations

import itertools

from torchneuron.compile.plan import Plan, Slot, Step, mark_drops, slots_in

# The eager recorder's window closes at 64 nodes, and some operators are two.
MOST_OPERATORS = 30
_FUSIBLE = ("program", "view")


class _Group:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.made: set[int] = set()
        self.writes = False

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self.made.update(step.outs)
        self.writes |= step.writes

    def takes(self, step: Step) -> bool:
        operators = sum(s.fusion == "program" for s in self.steps)
        fits = operators < MOST_OPERATORS and all(s.device == step.device for s in self.steps)
        return step.fusion in _FUSIBLE and fits

    def lets_pass(self, step: Step) -> bool:
        """Whether a step may run before the group that it comes after."""
        if not self.steps or step.fusion in _FUSIBLE:
            return False
        if self.made & set(slots_in([*step.args, *step.kwargs.values()])):
            return False
        return step.kind == "scalar" or (step.kind == "operator" and not step.writes and not self.writes)

    def emit(self) -> list[Step]:
        """The group as steps: fused from its first fusible operator to its last, views around them as they are."""
        at = [i for i, s in enumerate(self.steps) if s.fusion == "program"]
        if not at:
            return self.steps
        first, last = at[0], at[-1] + 1
        return [*self.steps[:first], _fused(self.steps[first:last]), *self.steps[last:]]


def _fused(steps: list[Step]) -> Step:
    name = ", ".join(s.name.removeprefix("aten::") for s in steps if s.fusion == "program")
    inner = [Step(**{**vars(s), "bridged": False}) for s in steps]
    return Step("fused", name, [], [], steps=inner, device=steps[0].device, where="In a fused step of a compiled graph")


def _join_numbers(steps: list[Step]) -> list[Step]:
    joined: list[Step] = []
    for number, run in itertools.groupby(steps, lambda s: s.fusion == "number"):
        inner = list(run)
        name = ", ".join(s.name.removeprefix("aten::") for s in inner)
        joined += [Step("numbers", name, [], [], steps=inner, where=inner[0].where)] if number else inner
    return joined


def fuse(plan: Plan) -> None:
    """Groups the plan's steps and fills in what each drops."""
    steps: list[Step] = []
    group = _Group()
    for step in _join_numbers(plan.steps):
        if group.takes(step):
            group.add(step)
        elif group.lets_pass(step):
            steps.append(step)
        else:
            steps += group.emit()
            group = _Group()
            if group.takes(step):
                group.add(step)
            else:
                steps.append(step)
    plan.steps = steps + group.emit()
    mark_drops(plan)
    for step in plan.steps:
        if step.steps:
            made = [o for s in step.steps for o in s.outs]
            read = slots_in([a for s in step.steps for a in (*s.args, *s.kwargs.values())])
            inside = {d for s in step.steps for d in s.drops}
            step.args = [Slot(i) for i in dict.fromkeys(read) if i not in made]
            step.outs = [o for o in made if o not in inside]
