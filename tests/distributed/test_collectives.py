"""Collectives of the neuron backend against gloo on the same values."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import soak


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_collectives_agree_with_gloo(ranks, world):
    ranks(world, soak.agree, 150)


def _reductions(rank, world):
    device = torch.device("neuron", rank)
    total = sum(range(1, world + 1))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.full((5,), rank + 1.0, dtype=dtype, device=device)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(x.cpu(), torch.full((5,), total / world, dtype=dtype))
        x = torch.full((5,), rank + 1.0, dtype=dtype, device=device)
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
        torch.testing.assert_close(x.cpu(), torch.full((5,), total * 0.5, dtype=dtype))
    x = torch.tensor([1 << rank, 3], device=device)
    dist.all_reduce(x, op=dist.ReduceOp.BXOR)
    assert x.tolist() == [(1 << world) - 1, 3 * (world % 2)]
    z = torch.full((3,), 1 + 1j * rank, device=device)
    dist.all_reduce(z)
    assert (z.cpu() == torch.full((3,), world + 1j * sum(range(world)))).all()
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(z, op=dist.ReduceOp.MAX)


def test_average_scaled_bitwise_and_complex(ranks):
    ranks(3, _reductions)


def _messages(rank, world):
    device = torch.device("neuron", rank)
    right, left = (rank + 1) % world, (rank - 1) % world
    for size in (1, 5000, 2_000_000):
        # Every rank sends before it receives.
        out, into = torch.full((size,), float(rank), device=device), torch.empty(size, device=device)
        works = [dist.isend(out, right), dist.irecv(into, left)]
        for w in works:
            w.wait()
        assert (into == left).all()
    if rank == 0:
        senders = set()
        for _ in range(world - 1):
            into = torch.empty(3, device=device)
            senders.add(dist.recv(into))
        assert senders == set(range(1, world))
    else:
        dist.send(torch.ones(3, device=device), 0)
    works = [dist.all_reduce(torch.ones(100_000, device=device), async_op=True) for _ in range(10)]
    assert [w.get_future().wait()[0][0].item() for w in reversed(works)] == [world] * 10


def test_messages_in_any_order(ranks):
    ranks(3, _messages)


def _default_group(rank, world):
    x = torch.ones(2, device=torch.device("neuron", rank))
    dist.all_reduce(x)
    assert x.tolist() == [world, world] and dist.get_backend() in ("neuron", "undefined")


def test_backend_is_found_without_a_name(ranks):
    ranks(2, _default_group, backend=None)


def _mismatch(rank, world):
    x = torch.ones(10 + rank, device=torch.device("neuron", rank))
    with pytest.raises(dist.DistBackendError, match="different collectives.*rank"):
        dist.all_reduce(x)
        x.tolist()  # errors surface where the host waits
    with pytest.raises(dist.DistBackendError, match="cannot be used any more"):
        dist.barrier()


def test_mismatch_is_explained(ranks):
    ranks(2, _mismatch)


def _one_gibibyte(rank, world):
    x = torch.full((1 << 28,), rank + 1.0, device=torch.device("neuron", rank))
    dist.all_reduce(x)
    assert x[0].item() == x[-1].item() == sum(range(1, world + 1))


def test_one_gibibyte(ranks):
    ranks(2, _one_gibibyte)
