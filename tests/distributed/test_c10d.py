"""What torch.distributed offers beyond the plain collectives, and how works, futures and streams go together."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def _device():
    return torch.device("neuron", torch.neuron.current_device())


def _split(rank, world):
    pair = [[0, 1], [2, 3]][rank // 2]
    group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    x = torch.full((5,), rank + 1.0, device=_device())
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(pair) + 2.0] * 5
    assert dist.get_process_group_ranks(group) == pair


def test_split_group(ranks):
    ranks(4, _split, bound=True)


def _split_again(rank, world):
    """Groups that come and go quickly, of other members each time; ranks leave a group at their own pace."""
    for i in range(12):
        pairs = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]][i % 3]
        group = dist.split_group(split_ranks=pairs)
        pair = next(p for p in pairs if rank in p)
        x = torch.full((5,), rank + 10.0 * i, device=_device())
        dist.all_reduce(x, group=group)
        assert x.tolist() == [sum(pair) + 20.0 * i] * 5
        dist.destroy_process_group(group)


def test_split_groups_again_and_again(ranks):
    ranks(4, _split_again, bound=True)


def _recorded(rank, world):
    """What eager fusion has recorded and not run when a collective is called is part of its input."""
    for size in (7, 500_000):
        for call in (dist.all_reduce, lambda x: dist.all_reduce(x, async_op=True).wait()):
            x = torch.arange(size, dtype=torch.float32, device=_device())
            if rank:
                time.sleep(0.2)
            x = x * 2 + rank
            call(x)
            y = x + 1  # and what reads the result comes after it
            assert torch.equal(y.cpu(), torch.arange(size) * 2.0 * world + sum(range(world)) + 1)


def test_collectives_see_what_is_recorded(ranks):
    ranks(2, _recorded)


def _shrink(rank, world):
    if rank == 1:
        return  # as if it were lost
    dist.shrink_group([1])
    assert (dist.get_rank(), dist.get_world_size()) == ([0, 2, 3].index(rank), 3)
    x = torch.full((3,), float(rank), device=_device())
    dist.all_reduce(x)
    assert x.tolist() == [5.0] * 3


def test_shrink(ranks):
    ranks(4, _shrink, bound=True)


def _merge(rank, world):
    from torchneuron import _C

    backend = dist.group.WORLD._get_backend(torch.device("neuron"))
    store = dist.PrefixStore("merged", dist.distributed_c10d._get_default_store())
    group = dist.group.WORLD.merge_remote_group(store, world, timedelta(seconds=30), "merged")
    x = torch.full((3,), float(rank), device=_device())
    group.allreduce([x]).wait()
    assert x.tolist() == [sum(range(world))] * 3
    assert isinstance(backend, _C.ProcessGroupNeuron)


def test_merge(ranks):
    ranks(2, _merge)


def _functional(rank, world):
    group = dist.group.WORLD
    x = torch.arange(8.0, device=_device()) + rank

    def everything(x):
        a = funcol.all_reduce(x * 2, "sum", group)
        b = funcol.all_gather_tensor(x[:2] + a[:2], 0, group)
        c = funcol.reduce_scatter_tensor(b, "sum", 0, group)
        d = funcol.all_to_all_single(x, None, None, group)
        e = funcol.broadcast(d, 1, group)
        f, g = funcol.all_reduce_coalesced([c, e], "max", group)
        return a, b, f, g

    def expected(rank):
        every = [torch.arange(8.0) + r for r in range(world)]
        a = 2 * sum(every)
        b = torch.cat([x[:2] + a[:2] for x in every])
        c = [world * p for p in b.chunk(world)]
        e = torch.cat([x.chunk(world)[1] for x in every])
        return a, b, torch.stack(c).max(0).values, e

    for function in (everything, torch.compile(everything, backend="neuron", fullgraph=True)):
        for got, want in zip(function(x), expected(rank)):
            torch.testing.assert_close(got.cpu(), want)


def test_functional_collectives_eager_and_compiled(ranks):
    ranks(2, _functional, timeout=100)


def _sparse(rank, world):
    shape = (6, 3)
    dense = torch.zeros(shape)
    dense[rank], dense[5] = 1.0 + rank, 2.0
    for device in (_device(), torch.device("cpu")):
        x = dense.to_sparse(1).to(device)
        dist.all_reduce(x)
        want = torch.zeros(shape)
        for r in range(world):
            want[r] += 1.0 + r
        want[5] += 2.0 * world
        assert torch.equal(x.to_dense().cpu(), want)
    # An embedding with sparse gradients under DDP.
    torch.manual_seed(0)
    model = torch.nn.Embedding(10, 4, sparse=True).to(_device())
    model = torch.nn.parallel.DistributedDataParallel(model)
    model(torch.tensor([rank, 7], device=_device())).sum().backward()
    want = torch.zeros(10, 4)
    want[:world], want[7] = 1 / world, 1.0
    assert torch.allclose(model.module.weight.grad.to_dense().cpu(), want)


def test_sparse_tensors_are_summed(ranks):
    ranks(3, _sparse)


def _monitored(rank, world):
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20), True)
    if rank in (1, 2):
        time.sleep(3)
        return
    with pytest.raises(dist.DistBackendError) as e:
        group.monitored_barrier(timedelta(seconds=1), True)
    text = str(e.value)
    if rank == 0:
        assert "rank 1, rank 2 did not come" in text and "What each rank was doing" in text, text
    else:
        assert "rank 0" in text and "rank 1, rank 2 did not come" in text, text


def test_monitored_barrier_names_all_that_do_not_come(ranks):
    ranks(4, _monitored)


def _objects(rank, world):
    every = [None] * world
    dist.all_gather_object(every, {"rank": rank, "text": "x" * 1000 * rank})
    assert [e["rank"] for e in every] == list(range(world)) and len(every[2]["text"]) == 2000
    box = [("from", 1)] if rank == 1 else [None]
    dist.broadcast_object_list(box, 1)
    assert box == [("from", 1)]
    mine = [None]
    dist.scatter_object_list(mine, [{"to": r} for r in range(world)] if rank == 0 else None, 0)
    assert mine == [{"to": rank}]
    gathered = [None] * world if rank == 2 else None
    dist.gather_object(rank * 10, gathered, 2)
    assert rank != 2 or gathered == [0, 10, 20]
    if rank == 0:
        dist.send_object_list([{"a": torch.ones(2)}], 1)
    elif rank == 1:
        box = [None]
        dist.recv_object_list(box, 0)
        assert torch.equal(box[0]["a"], torch.ones(2))


def test_objects(ranks):
    ranks(3, _objects)


def _streams(rank, world):
    device = _device()
    late = dist.new_group()
    x = torch.full((1000,), 1.0, device=device)
    side = torch.neuron.Stream()
    if rank == 1:
        time.sleep(1.0)
    start = time.monotonic()
    with torch.neuron.stream(side):
        work = dist.all_reduce(x, group=late, async_op=True)
        work.wait()  # the stream waits, not the host
    waited = time.monotonic() - start
    if rank == 0:
        assert waited < 0.5 and not work.is_completed()
        # Other streams go on, also what their queues hold.
        y = torch.ones(1000, device=device)
        z = torch.empty(1000).pin_memory()
        z.copy_(y, non_blocking=True)
        torch.neuron.current_stream().synchronize()
        assert z.sum() == 1000 and not work.is_completed()
        other = torch.neuron.Event()
        other.record()
        assert other.query()
    # A stream that waits for the side stream sees the sum.
    torch.neuron.current_stream().wait_stream(side)
    assert (x + 1).sum().item() == 1000 * (world + 1)
    assert work.is_completed()


def test_wait_blocks_the_stream_not_the_host(ranks):
    ranks(2, _streams)


def _queued(rank, world):
    """Collectives on what earlier collectives are still to write, without a wait of the host."""
    x = torch.ones(300_000, device=_device())
    if rank == 1:
        time.sleep(0.3)
    for _ in range(5):
        dist.all_reduce(x)
    y = torch.empty(world * 300_000, device=_device())
    dist.all_gather_single(y, x)
    assert (y == world**5).all().item()


def test_collectives_follow_their_stream(ranks):
    ranks(3, _queued)


def _continuations(rank, world):
    """A continuation may call collectives and wait for them; they are called in one order on all ranks."""
    x = [torch.full((20_000,), float(i), device=_device()) for i in range(6)]

    def then(future):
        (result,) = future.value()
        again = dist.all_reduce(result, async_op=True).get_future()
        return again.wait()[0] + 1

    futures = [dist.all_reduce(t, async_op=True).get_future().then(then) for t in x]
    for i, future in enumerate(futures):
        assert (future.wait() == i * world**2 + 1).all().item()


def test_continuations_of_futures(ranks):
    ranks(3, _continuations)


def _future_of_cpu_tensors(rank, world):
    x = torch.ones(10)
    future = dist.all_reduce(x, async_op=True).get_future()
    second = future.then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0])
    assert second.wait().tolist() == [float(world**2)] * 10


def test_futures_of_cpu_tensors(ranks):
    ranks(2, _future_of_cpu_tensors)


def _error_through_future(rank, world):
    x = torch.ones(1000 + rank, device=_device())
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(dist.DistBackendError, match="different collectives"):
        work.get_future().wait()  # raises only if the ranks have met already
        x.sum().item()


def test_errors_reach_the_stream_that_waits(ranks):
    ranks(2, _error_through_future)


def _memory(rank, world):
    """Shared memory does not grow with groups' messages."""
    device = _device()

    segments = [line for line in open("/proc/self/maps") if "memfd:torchneuron" in line]

    def size(line):
        begin, end = (int(v, 16) for v in line.split()[0].split("-"))
        return end - begin

    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        for elements in (10, 100_000, 3_000_000):
            dist.all_reduce(torch.ones(elements, device=device), group=group)
    after = [line for line in open("/proc/self/maps") if "memfd:torchneuron" in line]
    # Those of the ranks, each once; ranks of earlier tests may still hold what they have read from others.
    assert world <= len(after) <= len(segments) <= 4
    assert all(size(line) <= 64 << 20 for line in after)


def test_shared_memory_per_rank_is_fixed(ranks):
    ranks(2, _memory)
