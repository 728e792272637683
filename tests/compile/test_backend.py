"""torch.compile on neuron against eager code on neuron and on CPU."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_same_bits_as_eager():
    def f(x, w):
        return F.layer_norm(torch.sigmoid(x @ w) * x, (16,)).relu().sum(-1)

    x, w = torch.randn(8, 16, device="neuron"), torch.randn(16, 16, device="neuron")
    assert torch.equal(torch.compile(f, backend="neuron", fullgraph=True)(x, w).cpu(), f(x, w).cpu())


def test_checkpoint_replays_the_mask_of_dropout():
    x = torch.ones(4096, device="neuron", requires_grad=True)
    step = torch.compile(lambda t: checkpoint(lambda u: F.dropout(u, 0.5), t, use_reentrant=False), backend="neuron")
    y = step(x)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), (y != 0).float().cpu() * 2)


def test_no_backend_named_goes_by_the_tensors():
    f = torch.compile(lambda t: (t.sin() + 1).sum(-1))
    x = torch.randn(4, 8)
    torch.testing.assert_close(f(x.to("neuron")).cpu(), (x.sin() + 1).sum(-1))


def test_factory_in_the_graph():
    f = torch.compile(lambda n: torch.arange(n, device="neuron").float() * 2, fullgraph=True)
    assert f(5).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("arguments", [{"mode": "reduce-overhead"}, {"options": {"nonsense": 1}}])
def test_what_is_not_known_is_refused(arguments):
    with pytest.raises(Exception, match="neuron backend"):
        torch.compile(nn.Linear(2, 2).to("neuron"), backend="neuron", **arguments)(torch.ones(1, 2, device="neuron"))


def test_streams_and_device_queries_can_be_traced():
    @torch.compile(backend="neuron")
    def f(x):
        return x * torch.neuron.device_count() + torch.neuron.current_device()

    assert f(torch.ones(2, device="neuron")).tolist() == [torch.neuron.device_count()] * 2
