"""Every form that c10d has of a collective, against sums and lists made here."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.complex64, torch.complex128]  # fmt: skip
MOVED = [*SUMMED, *FLOAT8, torch.bool, torch.uint16, torch.uint32, torch.uint64]


def _device():
    return torch.device("neuron", torch.neuron.current_device())


def _values(rank, size, dtype=torch.float32):
    return (torch.arange(size) % 3 + rank).to(dtype)


def _same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    raw = (lambda t: t.cpu().contiguous().view(torch.uint8)) if want.dtype in FLOAT8 else (lambda t: t.cpu())
    assert torch.equal(raw(got), raw(want)), (got, want)


def _dtypes(rank, world):
    every = range(world)
    for dtype in SUMMED:
        x = _values(rank, 5, dtype).to(_device())
        dist.all_reduce(x)
        _same(x, sum(_values(r, 5, dtype) for r in every).to(dtype))
    for dtype in MOVED:
        mine = _values(rank, 4, dtype).to(_device())
        whole = torch.empty(4 * world, dtype=dtype, device=_device())
        dist.all_gather_single(whole, mine)
        _same(whole, torch.cat([_values(r, 4, dtype) for r in every]))
        x = mine.clone()
        dist.broadcast(x, world - 1)
        _same(x, _values(world - 1, 4, dtype))
    flags = torch.tensor([rank == 0, True, False], device=_device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    _same(flags, torch.tensor([True, True, False]))


def _uneven(rank, world):
    every, sizes = range(world), [3 + r for r in range(world)]
    outs = [torch.empty(s, device=_device()) for s in sizes]
    dist.all_gather(outs, _values(rank, sizes[rank]).to(_device()))
    for r in every:
        _same(outs[r], _values(r, sizes[r]))
    out = torch.empty(sizes[rank], device=_device())
    dist.reduce_scatter(out, [_values(rank, s).to(_device()) for s in sizes])
    _same(out, sum(_values(r, sizes[rank]) for r in every))
    outs = [torch.empty(r + 2 * rank, device=_device()) for r in every]
    dist.all_to_all(outs, [_values(rank, 2 * r + rank).to(_device()) for r in every])
    for r in every:
        _same(outs[r], _values(r, 2 * rank + r))
    # Rows that are not contiguous, and none at all.
    wide = torch.arange(24.0).view(4, 6).to(_device()) + rank
    dist.all_reduce(wide[:, 1::2])
    want = torch.arange(24.0).view(4, 6) + rank
    want[:, 1::2] = sum(torch.arange(24.0).view(4, 6)[:, 1::2] + r for r in every)
    _same(wide, want)
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0)):
        call(torch.empty(0, 3, device=_device()))
    transposed = torch.arange(6.0).view(2, 3).to(_device()).t() + rank
    whole = [torch.empty(3, 2, device=_device()) for _ in every]
    dist.all_gather(whole, transposed)
    for r in every:
        _same(whole[r], torch.arange(6.0).view(2, 3).t() + r)


def _coalesced(rank, world):
    every, group = range(world), dist.group.WORLD
    parts = [_values(rank, s).to(_device()) for s in (4, 6)]
    outs = [torch.empty(s * world, device=_device()) for s in (4, 6)]
    with dist._coalescing_manager(group, _device(), async_ops=True) as manager:
        for out, part in zip(outs, parts):
            dist.all_gather_single(out, part)
    manager.wait()
    for out, s in zip(outs, (4, 6)):
        _same(out, torch.cat([_values(r, s) for r in every]))
    shares = [torch.empty(s, device=_device()) for s in (2, 5)]
    with dist._coalescing_manager(group, _device()):
        for share in shares:
            dist.reduce_scatter_single(share, _values(rank, len(share) * world).to(_device()))
    for share in shares:
        whole = sum(_values(r, len(share) * world) for r in every)
        _same(share, whole[rank * len(share) : (rank + 1) * len(share)])
    tensors = [_values(rank, s).to(_device()) for s in (2, 3)]
    dist.all_reduce_coalesced(tensors)
    for t, s in zip(tensors, (2, 3)):
        _same(t, sum(_values(r, s) for r in every))
    lists = [[torch.empty(s, device=_device()) for s in (2, 3)] for _ in every]
    dist.all_gather_coalesced(lists, [_values(rank, s).to(_device()) for s in (2, 3)])
    for r in every:
        for t, s in zip(lists[r], (2, 3)):
            _same(t, _values(r, s))


def _scaled(rank, world):
    op = dist._make_nccl_premul_sum(0.5)
    factor = dist._make_nccl_premul_sum(torch.tensor([2.0], device=_device()))
    total = sum(_values(r, 2 * world) for r in range(world))
    for scale, how in ((0.5, op), (2.0, factor)):
        out = torch.empty(2, device=_device())
        dist.reduce_scatter_single(out, _values(rank, 2 * world).to(_device()), how)
        _same(out, total[2 * rank : 2 * rank + 2] * scale)
        x = _values(rank, 2 * world).to(_device())
        dist.reduce(x, 0, how)
        if rank == 0:
            _same(x, total * scale)


def _batches(rank, world):
    """Messages of every pair in one batch; from anybody, also in a group of some; with tags in another order."""
    every = range(world)
    into = [torch.empty(7, device=_device()) for _ in every]
    moves = [dist.P2POp(dist.irecv, into[r], r) for r in every if r != rank]
    moves += [dist.P2POp(dist.isend, _values(10 * rank + r, 7).to(_device()), r) for r in every if r != rank]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    for r in every:
        if r != rank:
            _same(into[r], _values(10 * r + rank, 7))
    pair = dist.new_group([0, world - 1])
    if rank == world - 1:
        dist.send(_values(5, 3).to(_device()), 0, group=pair)
    if rank == 0:
        x = torch.empty(3, device=_device())
        assert dist.recv(x, group=pair) == world - 1
        _same(x, _values(5, 3))
    if rank == 1:
        works = [dist.isend(_values(tag, 3).to(_device()), 0, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    if rank == 0:
        for tag in (3, 1, 2):
            x = torch.empty(3, device=_device())
            dist.recv(x, 1, tag=tag)
            _same(x, _values(tag, 3))


def _functional(rank, world):
    """Uneven and differentiable functional collectives, eager and compiled."""
    group = dist.group.WORLD
    sends = [rank + r for r in range(world)]  # symmetric: as many come from a rank as go to it

    def function(x):
        y = funcol.all_to_all_single_autograd(x, sends, sends, group)
        z = funcol.all_gather_tensor_autograd(y[:1] * 2, 0, group)
        return funcol.reduce_scatter_tensor_autograd(z * y.sum(), "sum", 0, group)

    results = []
    for call in (function, torch.compile(function, backend="neuron", fullgraph=True)):
        x = _values(rank, sum(sends)).to(_device()).requires_grad_()
        y = call(x)
        y.sum().backward()
        results.append((y.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(results[0], results[1])
    every = range(world)
    received = [
        torch.cat([_values(r, sum(r + q for q in every)).split([r + q for q in every])[me] for r in every])
        for me in every
    ]
    heads = torch.stack([y[0] * 2 for y in received])
    torch.testing.assert_close(results[0][0], heads[rank : rank + 1] * sum(y.sum() for y in received))


@pytest.mark.parametrize("form", [_dtypes, _uneven, _coalesced, _scaled, _batches, _functional])
def test_forms(ranks, form):
    ranks(3, form, timeout=100)
