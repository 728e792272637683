"""Arithmetic on numbers of the host: the CPU's bits, tensors only for who reads them, nothing recorded twice."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchneuron import _C
from torchneuron.compile.passes import PASSES
from torchneuron.compile.plan import Plan, Slot, Step, mark_drops

aten = torch.ops.aten
VALUES = [0.0, -0.0, 1.0, 2.0, 3.0, 7.0, 1000.0, 0.1, 1e-30, 3e38, -5.5, float("inf"), float("nan")]


def executable(steps: list[Step], inputs: int, slots: int, outputs: list[int]):
    p = Plan(inputs, slots, [], [Step("numbers", "numbers", [], [], steps=steps)], [Slot(o) for o in outputs])
    mark_drops(p)
    return p.build()


def tensors(values=VALUES):
    return [torch.tensor(v) for v in values]


LISTS = [("_foreach_neg", "", None), ("_foreach_reciprocal", "", None), ("_foreach_sqrt", "", None)]
LISTS += [(f"_foreach_{op}", "Scalar", n) for op in ("add", "sub", "mul", "div") for n in (1, 0.001, -3.7)]
LISTS += [(f"_foreach_{op}", "List", "list") for op in ("add", "sub", "mul", "div")]
LISTS += [("_foreach_pow", "ScalarAndTensor", n) for n in (0.9, 0.999, 1, 2.5)]


@pytest.mark.parametrize("name, overload, other", LISTS)
def test_bits_of_lists(name, overload, other):
    n = len(VALUES)
    op = getattr(getattr(aten, name), overload or "default")
    lists = [tensors(), tensors(VALUES[::-1])]
    first = [Slot(i) for i in range(n)]
    second = [Slot(n + i) for i in range(n)] if other == "list" else other

    def arguments(a, b):
        return [other, a] if overload == "ScalarAndTensor" else [a] if other is None else [a, b]

    want = op(*arguments(lists[0], lists[1] if other == "list" else other))
    outs = list(range(2 * n, 3 * n))
    got = executable([Step("operator", f"aten::{name}", arguments(first, second), outs, overload)], 2 * n, 3 * n, outs)(
        sum(lists, [])
    )
    for w, g in zip(want, got):
        assert g.dtype == torch.float32 and g.dim() == 0
        assert torch.equal(w.view(torch.int32), g.view(torch.int32)) or (w.isnan() and g.isnan())


def test_writes_are_seen_and_values_between_are_no_tensors():
    steps = [
        Step("operator", "aten::_foreach_add", [[Slot(0), Slot(1)], 1], [2, 3], "Scalar"),
        Step("operator", "aten::_foreach_copy_", [[Slot(0), Slot(1)], [Slot(2), Slot(3)]], [], writes=True),
        Step("operator", "aten::mul", [Slot(0), Slot(3)], [4], "Tensor"),
        Step("operator", "aten::pow", [2, Slot(4)], [5], "Scalar"),
    ]
    run = executable(steps, 2, 6, [5])
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    assert [t.item() for t in run([a, b])] == [64.0]
    assert (a.item(), b.item()) == (2.0, 3.0)


def test_other_tensors_are_operators():
    """What the plan did not promise (a type, sizes) is left to PyTorch."""
    steps = [
        Step("operator", "aten::add", [Slot(0), 1], [1], "Tensor"),
        Step("operator", "aten::neg", [Slot(1)], [2]),
    ]
    run = executable(steps, 1, 3, [2])
    for t in (torch.tensor(3), torch.arange(3.0), torch.tensor(2.5, dtype=torch.float64)):
        (got,) = run([t])
        assert torch.equal(got, -(t + 1)) and got.dtype == t.dtype
    with pytest.raises(ValueError):
        executable([Step("operator", "aten::exp", [Slot(0)], [1])], 1, 2, [1])


def targets(graph):
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def moved(f, *inputs):
    """The operators of a graph after the pass, which must change nothing."""
    graph = make_fx(f, tracing_mode="fake")(*[t.clone() for t in inputs])
    PASSES["numbers"](graph.graph)
    graph.recompile()
    want, got = ([t.clone() for t in inputs] for _ in range(2))
    assert torch.equal(f(*want), graph(*got))
    assert all(torch.equal(w, g) for w, g in zip(want, got))
    return targets(graph)


X, STEP = torch.arange(4.0), torch.tensor(3.0)


def test_numbers_go_first():
    def f(x, step):
        y = x * 2
        new = step + 1
        z = y * new
        step.copy_(new)
        return z + 1

    assert moved(f, X, STEP) == ["aten.add.Tensor", "aten.copy_.default", "aten.mul.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]  # fmt: skip


@pytest.mark.parametrize(
    "f",
    [
        lambda x, step: (x * step) + 0 * step.copy_(step + 1),  # the write comes after a read
        lambda x, step: x * (x.sum() + 1),  # a number of the device
    ],
    ids=["written", "device"],
)
def test_what_depends_on_the_device_stays(f):
    x = X.to("neuron") if torch.neuron.is_available() else X
    graph = make_fx(f, tracing_mode="fake")(x, STEP.clone())
    before = targets(graph)
    PASSES["numbers"](graph.graph)
    after = targets(graph)
    writes = [t for t in before if t == "aten.copy_.default"]
    assert before == after or (writes and after.index("aten.mul.Tensor") < after.index(writes[0]))


def test_numbers_of_the_host_come_with_the_run():
    """A number that changes is no new recording; one that a program does not take as it is, is."""

    def f(x, n):
        return (x * n + n).relu() - n

    g = torch.compile(f, backend="neuron", fullgraph=True)
    x = torch.randn(33).to("neuron")
    g(x, torch.tensor(1.5))
    torch.neuron.synchronize()
    torch.neuron.reset_fusion_stats()
    for n in (2.5, -1.0, 7.0, float("inf"), float("nan"), 1e-42):
        got, want = g(x, torch.tensor(n)).cpu(), f(x, torch.tensor(n)).cpu()
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    torch.neuron.synchronize()
    eager = 6 * 4
    assert torch.neuron.fusion_stats()["ops_recorded"] == eager


def test_one_number_for_two_arguments():
    """The first run has one tensor twice, later ones two tensors."""
    g = torch.compile(lambda x, a, b: x * a + b, backend="neuron", fullgraph=True)
    x = torch.arange(5.0).to("neuron")
    same = torch.tensor(2.0)
    assert torch.equal(g(x, same, same).cpu(), torch.arange(5.0) * 2 + 2)
    for a, b in ((2.0, 3.0), (4.0, 2.0), (2.0, 2.0)):
        assert torch.equal(g(x, torch.tensor(a), torch.tensor(b)).cpu(), torch.arange(5.0) * a + b)


def test_whole_numbers_are_part_of_the_recording():
    g = torch.compile(lambda x, n: x // n + n, backend="neuron", fullgraph=True)
    x = torch.arange(-5, 6, dtype=torch.int32)
    for n in (2, 3, -2, 2, 3):
        assert torch.equal(g(x.to("neuron"), torch.tensor(n)).cpu(), x // torch.tensor(n) + n)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_compiled_step_is_one_program(foreach):
    """AdamW on tensors of several shapes, whose copies come in another order than its lists."""
    parameters = [torch.nn.Parameter(torch.randn(8 * (1 + i % 3), 16).to("neuron")) for i in range(7)]
    copies = [torch.nn.Parameter(p.detach().cpu()) for p in parameters]
    optimizers = [torch.optim.AdamW(p, lr=1e-2, foreach=foreach) for p in (parameters, copies)]
    step = torch.compile(optimizers[0].step, backend="neuron")
    for k in range(6):
        for p, q in zip(parameters, copies):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.to("neuron")
        torch.neuron.synchronize()
        torch.neuron.reset_fusion_stats()
        step()
        optimizers[1].step()
        torch.neuron.synchronize()
        stats = torch.neuron.fusion_stats()
        for p, q in zip(parameters, copies):
            torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-6)
    if foreach:
        assert stats["ops_recorded"] == 0 and stats["library_calls"] == 0 and stats["programs_run"] == 1


def test_the_table_has_float_arithmetic():
    assert _C.computes_numbers("aten::_foreach_pow", "ScalarAndTensor")
    assert not _C.computes_numbers("aten::_foreach_exp", "")
