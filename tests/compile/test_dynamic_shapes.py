"""Dynamic shapes: one executable for every size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend


def test_sizes_do_not_recompile():
    def f(x, w):
        b, t, d = x.shape
        y = (x.reshape(b * t, d) @ w).view(b, t, -1)
        y = F.pad(y, (0, t % 4))[:, : t // 2 + 1]
        return (
            y.mean(1),
            torch.arange(t, device=x.device) * t,
            x.new_zeros(t, 2),
            y.shape[1],
            torch.cat([y, y], 1).flatten(1),
        )

    counter = CompileCounterWithBackend("neuron")
    g = torch.compile(f, backend=counter, dynamic=True, fullgraph=True)
    w = torch.randn(8, 12).to("neuron")
    for t in (5, 6, 7, 16, 33):
        x = torch.randn(2, t, 8).to("neuron")
        for a, b in zip(g(x, w), f(x, w)):
            assert torch.equal(a.cpu(), b.cpu()) if isinstance(a, torch.Tensor) else a == b
    assert counter.frame_count == 1


def test_automatic_dynamic_shapes_with_backward():
    def f(x, w):
        return F.layer_norm((x @ w).relu() * x.shape[0], (4,)).sum()

    counter = CompileCounterWithBackend("neuron")
    g = torch.compile(f, backend=counter)
    for n in (3, 4, 5, 9):
        grads = []
        for h in (f, g):
            x, w = (
                torch.ones(n, 6).to("neuron").requires_grad_(),
                torch.linspace(-1, 1, 24).view(6, 4).to("neuron").requires_grad_(),
            )
            h(x, w).backward()
            grads.append((x.grad.cpu(), w.grad.cpu()))
        assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert counter.frame_count == 2


def test_symbolic_float():
    f = lambda x, s: x * s + s
    g = torch.compile(f, backend="neuron", dynamic=True)
    x = torch.ones(3, device="neuron")
    for s in (1.5, 2.5, -3.25):
        assert torch.equal(g(x, s).cpu(), f(x, s).cpu())
