"""Fused steps: eager's bits, no eager operators, memory for what lives at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from torchneuron import _C
from torchneuron.compile.fusing import MOST_OPERATORS, fuse
from torchneuron.compile.plan import Plan, Slot, Step, mark_drops


def neuron(*shape, **kw):
    return torch.randn(*shape, **kw).to("neuron")


def stats(f):
    torch.neuron.synchronize()
    torch.neuron.reset_fusion_stats()
    out = f()
    torch.neuron.synchronize()
    return torch.neuron.fusion_stats(), out


def warm(f, *arguments):
    """A compiled function that has seen its arguments often enough to run recordings."""
    g = torch.compile(f, backend="neuron", fullgraph=True)
    for _ in range(3):
        g(*arguments)
    return g


def test_no_eager_operators_after_the_first_run():
    f = lambda x, y: F.layer_norm(torch.sigmoid(x) * y + x, (128,)).relu().sum(-1)
    x, y = neuron(64, 128), neuron(64, 128)
    g = warm(f, x, y)
    s, out = stats(lambda: g(x, y))
    assert s["executables_run"] == 1 and s["ops_recorded"] == 0 and s["library_calls"] == 0 and s["programs_built"] == 0
    assert s["ops_fused"] >= 5 and s["stores_elided"] >= 3
    assert torch.equal(out.cpu(), f(x, y).cpu())


CHAINS = {
    "arithmetic": lambda x, y: (x * 1.7 + y).abs().sqrt() / (y.exp() + 1) - x,
    "comparisons": lambda x, y: torch.where(x > y, x, -y) * (x == x),
    "casts": lambda x, y: ((x.bfloat16() * y.bfloat16()).float() + x.to(torch.float16)).to(torch.int32) + 1,
    "views": lambda x, y: (x.t() + y.t()).t().view(-1)[3:].view(-1, 1) * 2 + x[0, :1],
    "broadcasts": lambda x, y: (x[:, :1] + y[:1]).clamp(-1, 1) * x.unsqueeze(0),
    "softmax": lambda x, y: (x.masked_fill(y > 1, float("-inf")).softmax(-1), x.log_softmax(-1)),
    "norm": lambda x, y: F.layer_norm(F.gelu(x) + y, (12,)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "results in the middle": lambda x, y: ((a := x + y), (b := a * 2), b.t(), (b[1:] - 1)),
    "slow sums": lambda x, y: ((x * y).sum(0) + 1, ((x + y) * 2).sum(0), (x.sum(0) * y.sum(1)[0]).exp()),
    "matrix products between": lambda x, y: ((x.relu() + 1) @ (y.t() * 2)).tanh() * 0.5 @ (x + y).sigmoid(),
    "fills": lambda x, y: torch.zeros_like(x) + y * torch.full((12,), 3.0, device=x.device),
}


@pytest.mark.parametrize("name", CHAINS)
def test_eager_bits(name):
    f = CHAINS[name]
    g = torch.compile(f, backend="neuron", fullgraph=True, options={"passes": []})
    h = torch.compile(f, backend="neuron", fullgraph=True)
    for seed in range(3):  # recorded, perhaps cut, run again
        torch.manual_seed(seed)
        x, y = neuron(8, 12), neuron(8, 12)
        expected = f(x, y)
        for got in (g(x, y), h(x, y)):
            for e, o in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(got)):
                assert e.stride() == o.stride() and e.dtype == o.dtype
                assert torch.equal(e.cpu().nan_to_num(), o.cpu().nan_to_num())


def test_a_step_over_long_chains():
    def f(x):
        for i in range(3 * MOST_OPERATORS):
            x = x * 1.01 + i
        return x

    x = neuron(100)
    g = warm(f, x)
    s, out = stats(lambda: g(x))
    assert s["ops_recorded"] == 0 and torch.equal(out.cpu(), f(x).cpu())


def test_inputs_are_written():
    def f(x, y):
        x.mul_(2).add_(y)
        y[1:].copy_(x[:-1])
        return x.sum(-1)

    def run(h):
        x, y = torch.arange(12.0).view(3, 4).to("neuron"), torch.ones(3, 4, device="neuron")
        outs = [h(x, y).cpu() for _ in range(4)]
        return [*outs, x.cpu(), y.cpu()]

    for a, b in zip(run(torch.compile(f, backend="neuron", fullgraph=True)), run(f)):
        assert torch.equal(a, b)


def test_other_geometries_are_other_recordings():
    f = lambda x, y: (x * 2 + y).relu()
    g = torch.compile(f, backend="neuron", dynamic=True, fullgraph=True)
    for n, m in [(2, 4), (3, 4), (7, 4), (2, 5)] * 2:
        x, y = neuron(n, m), neuron(m)
        for a in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :m]):
            assert torch.equal(g(a, y).cpu(), f(a, y).cpu())
    assert g(torch.empty(0, 4, device="neuron"), neuron(4)).shape == (0, 4)
    assert torch.equal(g(x, y).cpu(), f(x, y).cpu())


def test_inputs_that_share_memory():
    f = lambda x, y: (x + 1) * y
    base = neuron(20)
    g = torch.compile(f, backend="neuron", dynamic=False)
    for x, y in ((base[:10], base[10:]), (base[:10], base[5:15]), (base[:10], neuron(10)), (base[:10], base[:10])):
        assert torch.equal(g(x, y).cpu(), f(x, y).cpu())


def test_numbers_that_change():
    f = lambda x, n, h: (x * n + h) * 2
    g = torch.compile(f, backend="neuron", dynamic=True)
    x = neuron(5)
    for n in (1.5, 2.5, -1.0, 7.0):
        h = torch.tensor(n * 3)
        assert torch.equal(g(x, n, h).cpu(), f(x, n, h).cpu())


def test_pending_eager_work_is_seen():
    g = warm(lambda x: x * 2 + 1, neuron(8))
    x = torch.zeros(8, device="neuron")
    y = g(x + 1) + 1
    assert y.tolist() == [4] * 8


def test_temporaries_share_an_arena():
    def f(x):
        for _ in range(8):  # other numbers of elements: each round is a program that reads what the last one wrote
            x = x.exp()[1:].neg()
        return x

    x = torch.zeros(256, 1024, device="neuron")
    g = warm(f, x)
    torch.neuron.synchronize()
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    s, out = stats(lambda: g(x))
    assert s["programs_run"] >= 8 and s["library_calls"] == 0
    assert torch.neuron.max_memory_allocated() - before <= 3.1 * x.nbytes
    assert torch.equal(out.cpu(), f(x).cpu())


def test_threads_record_the_same_step():
    f = lambda x: (x * 2 + 1).sigmoid().sum(-1)
    g = torch.compile(f, backend="neuron", fullgraph=True)
    inputs = [neuron(n, 16) for n in (4, 4, 4, 4)]
    expected = [f(x).cpu() for x in inputs]
    g(inputs[0])
    wrong = []

    def work(x, e):
        with torch.no_grad():
            for _ in range(30):
                if not torch.equal(g(x).cpu(), e):
                    wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("environment", [{"TORCH_NEURON_FUSION": "0"}, {"NEURON_LAUNCH_BLOCKING": "1"}])
def test_without_fusion(python, environment):
    code = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(8, 16).to("neuron")
f = torch.compile(lambda t: F.layer_norm(t.sigmoid() * t, (16,)).relu().sum(-1), backend="neuron", fullgraph=True)
for _ in range(3):
    y = f(x)
print(y.cpu().numpy().tobytes().hex())
"""
    outs = [python("-c", code, **e) for e in ({}, environment)]
    assert outs[0].stdout == outs[1].stdout != "", outs[1].stderr


def plan(*steps, outputs=()):
    return Plan(4, 20, [], list(steps), [Slot(o) for o in outputs])


def step(name, args, out, fusion="program", **kw):
    return Step("operator", name, [Slot(a) for a in args], [out], device=0, fusion=fusion, **kw)


def test_groups():
    p = plan(
        step("view", [0], 4, "view"),
        step("a", [4], 5),
        step("mm", [0, 1], 6, "none"),  # not of the group: goes before it
        Step("scalar", "add", [Slot(3), 1], [7]),
        step("v", [5], 8, "view"),
        step("b", [8, 6], 9),
        step("w", [9], 10, "view"),
        step("mm2", [10, 5], 11, "none"),
        step("c", [11], 12),
        outputs=[12, 7],
    )
    fuse(p)
    assert [s.name for s in p.steps] == ["mm", "add", "view", "a, b", "w", "mm2", "c"]
    fused = p.steps[3]
    assert [a.index for a in fused.args] == [4, 6] and fused.outs == [5, 9]
    assert [s.drops for s in fused.steps] == [[4], [], [8, 6]]


def test_nothing_passes_a_write():
    p = plan(step("copy_", [0, 1], 4, writes=True), step("mm", [0, 1], 5, "none"), step("a", [1], 6), outputs=[5, 6])
    fuse(p)
    assert [s.name for s in p.steps] == ["copy_", "mm", "a"]
    q = plan(step("a", [0], 4), step("index_put_", [0, 1], 5, "none", writes=True), step("b", [4], 6), outputs=[6])
    fuse(q)
    assert [s.name for s in q.steps] == ["a", "index_put_", "b"]


def test_groups_are_of_one_device_and_end():
    p = plan(step("a", [0], 4), Step("operator", "b", [Slot(1)], [5], device=1, fusion="program"), outputs=[4, 5])
    fuse(p)
    assert [s.name for s in p.steps] == ["a", "b"]
    q = plan(*[step("a", [i + 3], i + 4) for i in range(MOST_OPERATORS + 1)], outputs=[MOST_OPERATORS + 4])
    fuse(q)
    assert len(q.steps) == 2


def test_drops_are_at_the_last_use():
    p = plan(step("a", [0, 1], 4), step("b", [4, 0], 5), step("c", [1], 6), outputs=[5])
    mark_drops(p)
    assert [s.drops for s in p.steps] == [[], [4, 0], [6, 1]]


def test_kinds_of_operators():
    assert _C.fusion_of("aten::mul", "Tensor") == "program" and _C.fusion_of("aten::view", "") == "view"
    for name, overload in (("aten::mm", ""), ("aten::rand", ""), ("aten::sort", ""), ("aten::native_dropout", "")):
        assert _C.fusion_of(name, overload) == "none"


def losses(reduction):
    def loss(x, labels):
        return F.cross_entropy(x * 2, labels.flatten(), ignore_index=1, reduction=reduction)

    return loss


@pytest.mark.parametrize("name", ["add", "sub", "rsub", "mul", "div"])
def test_operators_with_numbers_fuse(name):
    """AOTAutograd's backward graphs have overloads that eager code meets as composites."""
    op = getattr(torch.ops.aten, name).Scalar
    f = lambda x: op(x.exp(), 3).tanh()
    x = neuron(40)
    g = warm(f, x)
    s, out = stats(lambda: g(x))
    assert s["programs_run"] == 1 and s["ops_recorded"] == 0
    assert torch.equal(out.cpu(), f(x).cpu())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_are_looked_at_in_every_run(reduction):
    """What the host reads at a call comes with the run, forward and backward, and nothing is recorded again."""
    f = losses(reduction)
    g = torch.compile(f, backend="neuron", fullgraph=True)
    x = torch.randn(6, 5)
    for k in range(6):
        labels = torch.full((2, 3), k % 5)
        labels[k % 2, k % 3] = 3
        mine, eager, host = (x.clone().to(d).requires_grad_() for d in ("neuron", "neuron", "cpu"))
        weights = torch.arange(6.0) if reduction == "none" else torch.tensor(2.0)

        def both(f, x, device, labels=labels, weights=weights):
            out = f(x, labels.to(device))
            out.backward(weights.to(device))
            return out.detach().cpu(), x.grad.cpu()

        inputs = labels.to("neuron"), weights.to("neuron")
        s, got = stats(lambda: both(g, mine, "neuron", *inputs))
        for a, b in zip(got, both(f, eager, "neuron")):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(got, both(f, host, "cpu")):
            torch.testing.assert_close(a, b, equal_nan=True)
        if k > 1:
            assert s["ops_recorded"] == 0 and s["library_calls"] == 0, s


def test_a_label_that_is_no_class_raises_in_every_run():
    g = torch.compile(losses("mean"), backend="neuron", fullgraph=True)
    x = neuron(6, 5)
    for labels in ([0, 1, 2, 3, 4, 0], [0, 1, 5, 3, 4, 0], [4, 4, 4, 4, 4, 4], [0, 1, 2, 3, 4, -1]):
        good = all(0 <= label < 5 for label in labels)
        labels = torch.tensor(labels).to("neuron")
        if good:
            torch.testing.assert_close(g(x, labels).cpu(), losses("mean")(x.cpu(), labels.cpu()))
        else:
            with pytest.raises(IndexError, match="out of bounds"):
                g(x, labels)


def test_the_weight_of_all_labels_is_a_result():
    g = torch.compile(lambda x, y: torch.ops.aten.nll_loss_forward(x + 0, y, None, 1, 2), backend="neuron")
    x = neuron(5, 4)
    for labels in ([0, 1, 2, 3, 0], [2, 2, 2, 1, 0], [2, 2, 2, 2, 2]):
        loss, weight = g(x, torch.tensor(labels).to("neuron"))
        want = torch.ops.aten.nll_loss_forward(x.cpu(), torch.tensor(labels), None, 1, 2)
        torch.testing.assert_close((loss.cpu(), weight.cpu()), want, equal_nan=True)


def test_a_log_softmax_is_computed_again():
    """Forward and backward keep a row's largest element and logarithm, no tensor as large as the input besides it."""
    f = lambda x: x.log_softmax(-1)
    x = torch.randn(40, 300)
    x[3, 4], x[5] = float("-inf"), float("-inf")
    x[6, 2], x[7, 1] = float("inf"), float("nan")
    gradient = torch.randn(40, 300).to("neuron")
    kept = []
    results = []
    for g in (torch.compile(f, backend="neuron", fullgraph=True), f):
        leaf = x.to("neuron").requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append((g is f, t.numel())), t)[1], lambda t: t):
            out = g(leaf)
        out.backward(gradient)
        results.append((out.detach().cpu(), leaf.grad.cpu()))
    for a, b in zip(*results):
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
    assert sorted(n for eager, n in kept if not eager) == [40, 40, x.numel()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 5).bfloat16().to("neuron"),
        lambda: torch.randn(5, 6).to("neuron").t(),
        lambda: torch.randn(3, 5000).to("neuron"),
        lambda: torch.tensor(1.5).to("neuron"),
        lambda: torch.randn(0, 5).to("neuron"),
        lambda: torch.randn(4, 3, 2).to("neuron"),
    ],
)
def test_log_softmax_of_any_kind(same_bits, make):
    for dim in (-1, 0):
        same_bits(lambda x: x.log_softmax(dim).exp(), make())  # noqa: B023
        torch._dynamo.reset()
