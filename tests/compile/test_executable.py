"""What compiled code does, against eager code on the device (bit for bit) and on CPU."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torchneuron import _C


def neuron(*shape, **kw):
    return torch.randn(*shape, **kw).to("neuron")


def runs(f):
    """How many executables `f()` runs, and its result."""
    before = torch.neuron.fusion_stats()["executables_run"]
    out = f()
    return torch.neuron.fusion_stats()["executables_run"] - before, out


def test_matmul_norm_and_reduction(same_bits):
    def f(x, w):
        return F.layer_norm(torch.sigmoid(x @ w) * x, (16,)).relu().sum(-1)

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    got = same_bits(f, x.to("neuron"), w.to("neuron"))
    torch.testing.assert_close(got.cpu(), f(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8, torch.bool]
)
def test_types(same_bits, dtype):
    x = (neuron(6, 5) * 4).to(dtype)
    same_bits(
        lambda t: (
            t + t,
            t.t().contiguous(),
            t.float().sum(0),
            torch.where(t > 0, t, torch.zeros_like(t)),
            t.to(torch.int16),
        ),
        x,
    )


def test_several_results_and_lists(same_bits):
    def f(x):
        a, b, c = x.split([2, 3, 3], 1)
        values, indices = x.topk(3, dim=1)
        return torch.cat([c, a, b], 1), values, indices, *x.unbind(0), torch.stack([a, c[:, :2]])

    same_bits(f, neuron(4, 8))


def test_views_share_memory_as_in_eager(same_bits):
    def f(x):
        y = x * 2
        return y, y[1:], y.t(), y.view(-1)[::2], x[0], x

    x = neuron(4, 6)
    y, rows, transposed, every_second, first, itself = same_bits(f, x)
    assert itself is x
    y.zero_()
    assert not rows.any() and not transposed.any() and not every_second.any()
    first.fill_(7)
    assert (x[0] == 7).all()


def test_equal_results_are_two_tensors(same_bits):
    a, b = same_bits(lambda x: (x + 1, x + 1), neuron(3))
    a.zero_()
    assert b.any()


def test_folded_constants_are_not_given_away():
    f = torch.compile(
        lambda x: (torch.full((3,), 2.0, device=x.device), x + torch.ones(3, device=x.device)), backend="neuron"
    )
    x = neuron(3)
    f(x)[0].zero_()
    assert f(x)[0].tolist() == [2, 2, 2]


def test_inputs_are_written_as_in_eager():
    def f(x, buffer):
        buffer.add_(x.sum(0))
        x[1:].mul_(2)
        x.t_()
        return buffer * 2

    def run(g):
        x, buffer = torch.arange(6.0).view(2, 3).to("neuron"), torch.zeros(3, device="neuron")
        return [g(x, buffer).cpu(), x.cpu(), buffer.cpu()]

    for a, b in zip(run(torch.compile(f, backend="neuron")), run(f)):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_a_cache_is_written_where_it_is():
    """A decoding step writes one row of a big cache; the rest is neither copied nor touched."""

    def step(cache, at, row):
        cache.index_copy_(0, at, row)
        cache[0] = row[0] * 2
        return cache.sum(0)

    def run(g):
        cache = torch.ones(1 << 12, 64).to("neuron")
        out = [g(cache, torch.tensor([i]).to("neuron"), torch.full((1, 64), 3.0).to("neuron")).cpu() for i in (5, 6)]
        return [*out, cache.cpu()], cache

    f = torch.compile(step, backend="neuron", fullgraph=True)
    for a, b in zip(run(f)[0], run(step)[0]):
        assert torch.equal(a, b)
    cache = torch.ones(1 << 12, 64).to("neuron")
    inputs = torch.tensor([1]).to("neuron"), torch.zeros(1, 64).to("neuron")
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    f(cache, *inputs)
    assert torch.neuron.max_memory_allocated() - before < cache.nbytes / 2


def test_a_write_shows_through_aliases():
    def f(x, y):
        x.add_(1)
        return y * 2

    x = torch.zeros(4, device="neuron")
    assert torch.compile(f, backend="neuron")(x, x[1:]).tolist() == [2, 2, 2]


def test_writing_an_input_breaks_a_saved_tensor_as_in_eager():
    w = torch.ones(3, device="neuron", requires_grad=True)
    x = torch.ones(3, device="neuron")
    y = (w * x).sum()
    torch.compile(lambda t: t.add_(1), backend="neuron")(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_scalars_of_data(same_bits):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):

        def f(x):
            n = x.sum().item()
            return x * n + n

        same_bits(f, neuron(5))


def test_sizes_that_depend_on_data(same_bits):
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        same_bits(lambda x: x.nonzero().float().sum(0) + x[x > 0].numel(), neuron(20))


def test_random_numbers_are_eager_s(same_bits):
    def f(x):
        return (
            F.dropout(x, 0.3),
            torch.rand_like(x),
            torch.randn(4, device=x.device),
            x.bernoulli(0.5),
            torch.randperm(9, device=x.device),
        )

    same_bits(f, torch.ones(100, device="neuron"))
    host = torch.get_rng_state()
    torch.compile(f, backend="neuron")(torch.ones(100, device="neuron"))
    assert torch.equal(host, torch.get_rng_state())


def test_autocast(same_bits):
    def f(x, w):
        with torch.autocast("neuron", dtype=torch.bfloat16):
            return F.softmax(x @ w, -1), x @ w

    same_bits(f, neuron(4, 4), neuron(4, 4))


def test_training_step_has_eager_bits():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.out = nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 10), nn.LayerNorm(10), nn.GELU())

        def forward(self, x, target):
            return F.cross_entropy(self.out(F.dropout(F.relu(self.norm(self.conv(x))), 0.2, self.training)), target)

    a = Net().to("neuron")
    b = Net().to("neuron")
    b.load_state_dict(a.state_dict())
    x, target = neuron(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]).to("neuron")
    compiled = torch.compile(b, backend="neuron", fullgraph=True)
    for seed in range(2):
        for model in (a, compiled):
            torch.manual_seed(seed)
            model.zero_grad()
            model(x, target).backward()
    for p, q in zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers())):
        assert torch.equal(p.cpu(), q.cpu())
        if p.grad is not None:
            assert torch.equal(p.grad.cpu(), q.grad.cpu())


def test_checkpoint_replays_the_mask_of_dropout():
    x = torch.ones(4096, device="neuron", requires_grad=True)
    step = torch.compile(lambda t: checkpoint(lambda u: F.dropout(u, 0.5), t, use_reentrant=False), backend="neuron")
    y = step(x)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), (y != 0).float().cpu() * 2)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, foreach=True),
    ],
)
def test_optimizers(make):
    torch.manual_seed(0)
    a, b = nn.Linear(8, 8).to("neuron"), nn.Linear(8, 8).to("neuron")
    b.load_state_dict(a.state_dict())
    oa, ob = make(a.parameters(), lr=1e-2), make(b.parameters(), lr=1e-2)
    step = torch.compile(ob.step, backend="neuron")
    x = neuron(4, 8)
    for _ in range(3):
        for model, optimizer, do in ((a, oa, oa.step), (b, ob, step)):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            do()
    assert torch.allclose(a.weight.cpu(), b.weight.cpu(), rtol=1e-5, atol=1e-6)


def test_host_tensors_beside_neuron_tensors(same_bits):
    def f(x, h):
        h = h + 1
        return x * h.sum(), h, x.cpu() + h, h.to("neuron") * x

    same_bits(f, neuron(4), torch.arange(4.0))


def test_graph_breaks():
    def f(x):
        y = x * 2
        if y.sum().item() > 0:
            y = y.relu() + 1
        torch._dynamo.graph_break()
        return y.softmax(-1)

    g = torch.compile(f, backend="neuron")
    for s in (1.0, -1.0):
        x = torch.full((4, 4), s, device="neuron")
        assert torch.equal(g(x).cpu(), f(x).cpu())


def test_a_python_operator_is_a_step():
    @torch.library.custom_op("torchneuron_test::twice_plus", mutates_args=())
    def twice_plus(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * 2 + n

    @twice_plus.register_fake
    def _(x, n):
        return torch.empty_like(x)

    @torch.library.custom_op("torchneuron_test::add_into", mutates_args=("x",))
    def add_into(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    def f(x):
        y = x.sin()
        add_into(y, x)
        add_into(x, y)
        return twice_plus(y, 3) + 1

    def run(g):
        x = torch.arange(4.0, device="neuron")
        return g(x).cpu(), x.cpu()

    for a, b in zip(run(torch.compile(f, backend="neuron", fullgraph=True)), run(f)):
        assert torch.equal(a, b)


def test_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="neuron")
    q, k, v = (neuron(1, 2, 128, 16) for _ in range(3))
    bias = neuron(2)
    score = lambda s, b, h, i, j: s + bias[h] * (i - j)
    got = torch.compile(
        lambda *t: flex_attention(*t, score_mod=score, block_mask=mask), backend="neuron", fullgraph=True
    )(q, k, v)
    at = torch.arange(128)
    scores = q.cpu() @ k.cpu().transpose(-1, -2) / 4 + bias.cpu()[:, None, None] * (at[:, None] - at)
    expected = scores.masked_fill(at[:, None] < at, float("-inf")).softmax(-1) @ v.cpu()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_flex_attention_backward():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (neuron(1, 2, 128, 16).requires_grad_() for _ in range(3))
    torch.compile(flex_attention, backend="neuron", fullgraph=True)(q, k, v).square().sum().backward()
    host = [t.detach().cpu().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*host).square().sum().backward()
    for t, h in zip((q, k, v), host):
        torch.testing.assert_close(t.grad.cpu(), h.grad, rtol=1e-4, atol=1e-5)


def test_control_flow_operators(same_bits):
    def f(x):
        return torch.cond(x.sum() > 0, lambda t: t.sin() + 1, lambda t: t.cos(), (x,))

    same_bits(f, torch.ones(4, device="neuron"))
    same_bits(f, -torch.ones(4, device="neuron"))


def test_exported_program(same_bits):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to("neuron")
    x = neuron(4, 8)
    program = torch.export.export(model, (x,))
    got = torch.compile(program.module(), backend="neuron")(x)
    assert torch.equal(got.cpu(), model(x).cpu())


def test_higher_derivative_through_compiled_forward():
    f = torch.compile(lambda x: (x.sin() * x).sum(), backend="neuron")
    x = neuron(5).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x)
    h = x.detach().cpu()
    torch.testing.assert_close(g.cpu(), h.cos() * h + h.sin(), rtol=1e-5, atol=1e-6)


def test_sparse_inputs_pass_through():
    x = torch.eye(3).to_sparse().to("neuron")
    got = torch.compile(lambda t, v: torch.sparse.mm(t, v) + 1, backend="neuron")(x, torch.ones(3, 2, device="neuron"))
    assert got.tolist() == [[2, 2]] * 3


def test_inference_mode(same_bits):
    with torch.inference_mode():
        assert same_bits(lambda x: x.sin() + 1, neuron(3)).is_inference()


def test_empty_tensors(same_bits):
    same_bits(lambda x: (x + 1, x.view(-1), torch.cat([x, x]), x.sum()), torch.empty(0, 3, device="neuron"))


def test_one_executable_a_call_and_no_python():
    f = torch.compile(lambda x: (x.sin() + 1).softmax(-1), backend="neuron", fullgraph=True)
    x = neuron(4, 4)
    f(x)
    assert runs(lambda: f(x))[0] == 1


def test_threads_share_an_executable():
    f = torch.compile(lambda x: (x * 2).relu().sum(), backend="neuron", fullgraph=True)
    x = torch.ones(1000, device="neuron")
    f(x)
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(50):
                if f(x).item() != 2000:
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_intermediates_are_freed_at_their_last_use():
    def chain(x):
        for _ in range(8):
            x = x.sin()
        return x

    f = torch.compile(chain, backend="neuron", fullgraph=True)
    x = torch.ones(1 << 20, device="neuron")
    f(x)
    gc.collect()
    torch.neuron.reset_peak_memory_stats()
    before = torch.neuron.memory_allocated()
    f(x)
    assert torch.neuron.max_memory_allocated() - before <= 2 * x.nbytes + 4096


def test_nothing_stays_allocated():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).to("neuron")
    f = torch.compile(model, backend="neuron")
    x = neuron(32, 64)

    def step():
        f(x).sum().backward()
        model.zero_grad()

    step()
    gc.collect()
    before = torch.neuron.memory_allocated()
    for _ in range(5):
        step()
    gc.collect()
    assert torch.neuron.memory_allocated() == before


def test_captured_graph_replays_compiled_code():
    f = torch.compile(lambda x: (x * 2).relu() + 1, backend="neuron", fullgraph=True)
    x = neuron(8)
    f(x)
    graph = torch.accelerator.Graph()
    with graph:
        y = f(x)
    x.copy_(torch.arange(8.0) - 4)
    graph.replay()
    assert y.tolist() == [1, 1, 1, 1, 1, 3, 5, 7]


def test_a_mode_that_watches_sees_neuron_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((str(func), args[0].device.type))
            return func(*args, **(kwargs or {}))

    plan_run = torch.compile(lambda x: x.sin() + 1, backend="neuron", fullgraph=True)
    x = neuron(4)
    plan_run(x)
    with Watch():
        plan_run(x)
    assert not seen or {device for _, device in seen} == {"neuron"}


def test_an_error_names_the_operator_and_the_line():
    def f(x, i):
        return x.index_select(0, i)  # the culprit

    g = torch.compile(f, backend="neuron", fullgraph=True)
    g(neuron(3, 2), torch.tensor([1]).to("neuron"))
    with pytest.raises((IndexError, RuntimeError), match="(?s)out of range.*index_select.*test_executable.py"):
        g(neuron(3, 2), torch.tensor([7]).to("neuron"))


def test_a_python_error_comes_through():
    @torch.library.custom_op("torchneuron_test::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("on purpose")

    fails.register_fake(lambda x: torch.empty_like(x))
    with pytest.raises(KeyError, match="on purpose"):
        torch.compile(lambda x: fails(x), backend="neuron")(neuron(3))


def test_strict_mode_refuses_fallbacks(python):
    code = """
import torch
f = torch.compile(lambda x: torch.linalg.svdvals(x), backend="neuron")
try:
    f(torch.ones(3, 3, device="neuron"))
except NotImplementedError as e:
    print("refused", "svd" in str(e))
"""
    out = python("-c", code, TORCH_NEURON_STRICT="1")
    assert out.stdout.strip() == "refused True", out.stderr


def test_fallbacks_are_counted():
    f = torch.compile(lambda x: torch.linalg.svdvals(x), backend="neuron")
    x = torch.eye(3, device="neuron")
    f(x)
    torch.neuron.clear_op_tracking()
    f(x)
    assert any("svd" in name for name in torch.neuron.get_fallback_ops())


@pytest.mark.parametrize("function", ["add", "floordiv", "mod", "pow", "truediv", "min", "round"])
def test_scalar_arithmetic_is_python_s(function):
    import operator

    python = {"min": min, "round": lambda a, b: round(a)}.get(function) or getattr(operator, function)
    values = [-7, -2, 3, 5, -7.5, 2.5, 3.5]
    for a in values:
        for b in values:
            if function == "pow" and (a < 0 or b < 0):
                continue
            args = [_C.Slot(0), _C.Slot(1)]
            step = {
                "kind": "scalar",
                "name": function,
                "args": args[:1] if function == "round" else args,
                "outs": [2],
                "drops": [0, 1],
                "where": "",
            }
            (got,) = _C.Executable(2, 3, [], [step], [_C.Slot(2)])([a, b])
            assert got == python(a, b) and type(got) is type(python(a, b)), (a, b)


def test_division_of_sizes_by_zero():
    step = {"kind": "scalar", "name": "floordiv", "args": [_C.Slot(0), 0], "outs": [1], "drops": [], "where": ""}
    with pytest.raises(ValueError, match="zero"):
        _C.Executable(1, 2, [], [step], [_C.Slot(1)])([3])


def test_wrong_number_of_inputs():
    with pytest.raises(RuntimeError, match="takes 1 inputs, got 2"):
        _C.Executable(1, 1, [], [], [_C.Slot(0)])([1, 2])
