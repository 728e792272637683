"""Collectives of the neuron backend against gloo on the same values."""

import random

import pytest
import torch
import torch.distributed as dist

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
SIZES = [0, 1, 7, 1000, 4097, 70_001, 400_003]


def _random_rounds(rank, world, rounds):
    """The same random program on all ranks; the values differ by rank."""
    shared, own = random.Random(world), torch.Generator().manual_seed(rank)
    device = torch.device("neuron", rank)
    members = [list(range(world)), *([[0, world - 1]] if world > 1 else [])]
    groups = [(m, dist.new_group(m), dist.new_group(m, backend="gloo")) for m in members]
    pending = []

    def check(what, work, results):
        if work is not None:
            work.wait()
        for mine, reference in results:
            # 16-bit sums: one rounding here, several there.
            tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(reference.dtype, 1e-5)
            torch.testing.assert_close(
                mine.cpu(), reference, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
            )

    for i in range(rounds):
        ranks, group, gloo = shared.choice(groups)
        kind = shared.choice(
            ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "barrier"]
        )
        dtype, op, size = shared.choice(DTYPES), shared.choice(OPS), shared.choice(SIZES)
        root, asynchronous, strided = shared.choice(ranks), shared.random() < 0.5, shared.random() < 0.3
        if rank not in ranks:
            continue
        n = len(ranks)

        def values(*shape):
            return torch.randint(0, 4, shape, generator=own).to(dtype)

        def on_device(t):
            if not strided:
                return t.to(device)
            wide = torch.empty(*t.shape, 2, dtype=t.dtype, device=device)
            wide[..., 0] = t
            return wide[..., 0]

        what = f"round {i}: {kind} {dtype} {op} {size} of {n}"
        work, results = None, []
        if kind == "all_reduce":
            t = values(size)
            mine = on_device(t)
            work = dist.all_reduce(mine, op=op, group=group, async_op=asynchronous)
            dist.all_reduce(t, op=op, group=gloo)
            results = [(mine, t)]
        elif kind == "broadcast":
            t = values(size)
            mine = on_device(t)
            work = dist.broadcast(mine, root, group=group, async_op=asynchronous)
            dist.broadcast(t, root, group=gloo)
            results = [(mine, t)]
        elif kind == "reduce":
            t = values(size)
            mine = on_device(t)
            work = dist.reduce(mine, root, op=op, group=group, async_op=asynchronous)
            dist.reduce(t, root, op=op, group=gloo)
            results = [(mine, t)] if rank == root else []
        elif kind == "all_gather":
            t = values(size)
            mine = [on_device(torch.zeros_like(t)) for _ in ranks]
            reference = [torch.zeros_like(t) for _ in ranks]
            work = dist.all_gather(mine, on_device(t), group=group, async_op=asynchronous)
            dist.all_gather(reference, t, group=gloo)
            results = list(zip(mine, reference))
        elif kind == "reduce_scatter":
            t, part = values(n * size), torch.zeros(size, dtype=dtype)
            mine = on_device(part)
            work = dist.reduce_scatter_tensor(mine, t.to(device), op=op, group=group, async_op=asynchronous)
            dist.all_reduce(t, op=op, group=gloo)
            place = ranks.index(rank)
            results = [(mine, t[place * size : (place + 1) * size])]
        elif kind == "all_to_all":
            counts = [[(a * 3 + b) % 4 * size // 4 for b in range(n)] for a in range(n)]
            place = ranks.index(rank)
            sends, receives = counts[place], [counts[r][place] for r in range(n)]
            t, reference = values(sum(sends)), torch.zeros(sum(receives), dtype=dtype)
            mine = torch.zeros(sum(receives), dtype=dtype, device=device)
            work = dist.all_to_all_single(mine, t.to(device), receives, sends, group=group, async_op=asynchronous)
            dist.all_to_all_single(reference, t, receives, sends, group=gloo)
            results = [(mine, reference)]
        else:
            dist.barrier(group=group)
        pending.append((what, work, results))
        if len(pending) > 4 or not asynchronous:
            for entry in pending:
                check(*entry)
            pending.clear()
    for entry in pending:
        check(*entry)
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_collectives_agree_with_gloo(ranks, world):
    ranks(world, _random_rounds, 350)


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
