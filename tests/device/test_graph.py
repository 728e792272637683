"""torch.accelerator.Graph: capture has no effect, a replay does what eager code would."""

import pytest
import torch
import torch.nn as nn


@pytest.fixture
def stream():
    return torch.Stream("neuron")


def test_capture_leaves_memory_as_it_was_and_replay_runs(stream):
    x, log = torch.arange(4.0, device="neuron"), torch.zeros(4, device="neuron")
    graph = torch.accelerator.Graph()
    with stream, graph:
        x += 1
        y = (x * 2).relu()
        log.copy_(y)
    assert x.tolist() == [0, 1, 2, 3] and log.tolist() == [0, 0, 0, 0]
    for turn in (1, 2):
        graph.replay()
        assert x.tolist() == [turn + i for i in range(4)]
        assert y.tolist() == log.tolist() == [2 * (turn + i) for i in range(4)]


def test_replay_of_a_training_step_equals_eager(stream):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to("neuron")
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    data = [torch.randn(5, 6) for _ in range(4)]
    (eager, eager_opt), (captured, captured_opt) = make(), make()
    static = data[0].to("neuron")

    def step(model, opt, x):
        opt.zero_grad(set_to_none=False)
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    # Both sides take one eager step first, which makes gradients and momentum buffers.
    step(eager, eager_opt, static)
    step(captured, captured_opt, static)
    graph = torch.accelerator.Graph()
    with stream, graph:
        loss = step(captured, captured_opt, static)
    for x in data[1:]:
        static.copy_(x)
        graph.replay()
        assert loss.item() == step(eager, eager_opt, x.to("neuron")).item()
    for a, b in zip(captured.parameters(), eager.parameters()):
        assert torch.equal(a.cpu(), b.cpu())


def test_concatenations_are_recorded(stream):
    """What is computed to be concatenated is written to where it belongs, in a captured graph too."""
    x = torch.arange(64.0, device="neuron").view(2, 32)
    graph = torch.accelerator.Graph()
    torch.neuron.synchronize()
    before = torch.neuron.fusion_stats()
    with stream, graph:
        y = torch.cat([x * 2, x + 1, x.flip(0)], 1)
    after = torch.neuron.fusion_stats()
    assert after["ops_recorded"] - before["ops_recorded"] >= 5
    for k in (1.0, -3.0):
        host = torch.arange(64.0).view(2, 32) * k
        x.copy_(host)
        graph.replay()
        assert torch.equal(y.cpu(), torch.cat([host * 2, host + 1, host.flip(0)], 1))


DRAWS = {
    "bernoulli": lambda: torch.empty(4096, device="neuron").bernoulli_(0.5),
    "fills": lambda: torch.rand(999, device="neuron") + torch.randn(999, device="neuron"),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(4096, device="neuron") + 1, 0.3, True),
    "library": lambda: torch.randperm(500, device="neuron") + torch.rand(500, device="neuron"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operators_draw_anew_at_each_replay(stream, name):
    draw = DRAWS[name]
    torch.manual_seed(3)
    before = torch.neuron.get_rng_state()
    graph = torch.accelerator.Graph()
    with stream, graph:
        drawn = draw()
    assert torch.equal(before, torch.neuron.get_rng_state())
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first.cpu(), drawn.cpu())
    second = drawn.clone()
    after = torch.neuron.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), draw().cpu())
    assert torch.equal(second.cpu(), draw().cpu())
    assert torch.equal(after, torch.neuron.get_rng_state())


@pytest.mark.parametrize(
    "work", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: x[x > 0]], ids=range(4)
)
def test_what_needs_the_host_is_refused_and_the_device_works_on(stream, work):
    x = torch.ones(3, device="neuron")
    with pytest.raises(RuntimeError, match="captured"):
        with stream, torch.accelerator.Graph():
            work(x)
    assert x.sum().item() == 3


def test_memory_of_a_graph_returns_when_it_goes(stream):
    torch.neuron.empty_cache()
    held = torch.neuron.memory_allocated()
    graph = torch.accelerator.Graph()
    with stream, graph:
        y = torch.ones(1 << 20, device="neuron") * 2
    torch.neuron.empty_cache()
    graph.replay()
    assert y[-1].item() == 2
    del y
    graph.reset()
    torch.neuron.empty_cache()
    assert torch.neuron.memory_allocated() == held
