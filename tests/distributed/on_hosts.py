"""What test_hosts.py runs in every rank: `on_hosts.py <function>`."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks import parallel

TIMEOUT = 6


def start(seconds):
    torch.set_num_threads(1)
    torch.neuron.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("neuron", timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def train():
    """FSDP2 over all hosts, and the collectives that hosts have algorithms of their own for."""
    rank, world = start(60)
    difference, first, last = parallel.compare(rank, world, "fsdp2", 4)
    assert difference <= 1e-4 and last < first, (difference, first, last)
    device = torch.device("neuron", torch.neuron.current_device())
    backend = dist.group.WORLD._get_backend(device)
    for size in (3, 40_000, 3_000_001):
        x = torch.arange(size, dtype=torch.float32, device=device) + rank
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), torch.arange(size) * world + sum(range(world)))
    algorithm = backend.algorithm("all_reduce", 12_000_004)
    assert algorithm == ("hierarchical" if int(os.environ["LOCAL_WORLD_SIZE"]) > 1 else "doubling"), algorithm
    from benchmarks import soak

    soak.agree(rank, world, 40)
    print("GOOD", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def forever():
    """Trains until something happens, and says what."""
    rank, world = start(TIMEOUT)
    device = torch.device("neuron", torch.neuron.current_device())
    model = parallel.Job(rank, world, device, 1)
    model = parallel.fsdp2_model(model, model.mesh(world, names=("dp",)))
    tokens, targets = (t.to(device) for t in parallel.batches(1)[0])
    begin = time.monotonic()
    try:
        for step in range(10_000):
            begin = time.monotonic()
            loss = parallel.loss_of(model(tokens), targets)
            loss.backward()
            loss.item()
            if step == 2:
                print("READY", flush=True)
    except Exception as e:
        print(f"ERROR AFTER {time.monotonic() - begin:.1f} s {type(e).__name__}: {e}", flush=True)
    os._exit(0)


def first():
    """The first collective."""
    try:
        start(TIMEOUT)
        dist.barrier()
        print("GOOD", flush=True)
    except Exception as e:
        print(f"{type(e).__name__}: {e}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
