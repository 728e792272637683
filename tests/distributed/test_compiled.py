"""Collectives in compiled graphs."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def _collectives(rank, world):
    def f(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        z = functional.all_gather_tensor(y + rank, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(z, "sum", 0, dist.group.WORLD) + 1

    x = torch.arange(8.0).to("neuron") + rank
    expected = f(x)
    compiled = torch.compile(f, backend="neuron", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x).cpu(), expected.cpu())


def _data_parallel(rank, world):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to("neuron")
    twin = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to("neuron")
    twin.load_state_dict(model.state_dict())
    x = torch.randn(4, 8).to("neuron") + rank
    for m, wrap in ((model, lambda m: m), (twin, lambda m: torch.compile(m, backend="neuron"))):
        parallel = wrap(torch.nn.parallel.DistributedDataParallel(m))
        parallel(x).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())


def test_functional_collectives_are_steps(ranks):
    ranks(2, _collectives)


def test_compiled_data_parallel_model(ranks):
    ranks(2, _data_parallel, timeout=120)
