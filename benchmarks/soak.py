"""Long runs that collectives must survive.

    python -m benchmarks.soak agree --rounds 1000     random collectives give gloo's results
    python -m benchmarks.soak kill --rounds 50        a rank dies at a random moment: the others raise, nothing is left

The tests run the same for fewer rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SUM, PRODUCT, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX
OPS = [SUM, SUM, PRODUCT, MIN, MAX]
SIZES = [0, 1, 7, 1000, 4097, 70_001, 400_003]
IN_FLIGHT = 5
# 16-bit sums: one rounding here, several there.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}


class Round:
    """One random collective; `shared` draws the same on all ranks, `own` draws this rank's values."""

    def __init__(self, number, shared, own, ranks, rank, device):
        self.own, self.device, self.ranks, self.place = own, device, ranks, ranks.index(rank)
        self.kind = shared.choice([n.removeprefix("do_") for n in dir(self) if n.startswith("do_")])
        self.dtype = shared.choice(FLOATS + INTEGERS)
        self.op, self.size, self.root = shared.choice(OPS), shared.choice(SIZES), shared.choice(ranks)
        self.asynchronous, self.strided = shared.random() < 0.5, shared.random() < 0.3
        self.counts = [[shared.choice(SIZES) // 4 for _ in ranks] for _ in ranks]
        self.what = f"round {number}: {self.kind} {self.dtype} {self.op} {self.size} among {ranks}"

    def values(self, *shape):
        return torch.randint(0, 4, shape, generator=self.own).to(self.dtype)

    def on_device(self, t):
        if not self.strided:
            return t.to(self.device)
        wide = torch.empty(*t.shape, 2, dtype=t.dtype, device=self.device)
        wide[..., 0] = t
        return wide[..., 0]

    def run(self, group, gloo):
        """Starts the collective on both; returns (work or None, [(result, gloo's result)])."""
        return getattr(self, f"do_{self.kind}")({"group": group, "async_op": self.asynchronous}, gloo)

    def do_all_reduce(self, options, gloo):
        t = self.values(self.size)
        mine = self.on_device(t)
        work = dist.all_reduce(mine, self.op, **options)
        dist.all_reduce(t, self.op, group=gloo)
        return work, [(mine, t)]

    def do_broadcast(self, options, gloo):
        t = self.values(self.size)
        mine = self.on_device(t)
        work = dist.broadcast(mine, self.root, **options)
        dist.broadcast(t, self.root, group=gloo)
        return work, [(mine, t)]

    def do_reduce(self, options, gloo):
        t = self.values(self.size)
        mine = self.on_device(t)
        work = dist.reduce(mine, self.root, self.op, **options)
        dist.reduce(t, self.root, self.op, group=gloo)
        return work, [(mine, t)] if self.ranks[self.place] == self.root else []

    def do_all_gather(self, options, gloo):
        t = self.values(self.size)
        mine, reference = [self.on_device(torch.zeros_like(t)) for _ in self.ranks], [t.clone() for _ in self.ranks]
        work = dist.all_gather(mine, self.on_device(t), **options)
        dist.all_gather(reference, t, group=gloo)
        return work, list(zip(mine, reference))

    def do_all_gather_single(self, options, gloo):
        t = self.values(self.size)
        mine = torch.empty(self.size * len(self.ranks), dtype=self.dtype, device=self.device)
        reference = [t.clone() for _ in self.ranks]
        work = dist.all_gather_single(mine, self.on_device(t), **options)
        dist.all_gather(reference, t, group=gloo)
        return work, [(mine, torch.cat(reference))]

    def do_reduce_scatter(self, options, gloo):
        t = self.values(len(self.ranks) * self.size)
        mine = self.on_device(torch.zeros(self.size, dtype=self.dtype))
        work = dist.reduce_scatter_single(mine, self.on_device(t), self.op, **options)
        dist.all_reduce(t, self.op, group=gloo)
        return work, [(mine, t[self.place * self.size : (self.place + 1) * self.size])]

    def do_all_to_all(self, options, gloo):
        sends, receives = self.counts[self.place], [c[self.place] for c in self.counts]
        t, reference = self.values(sum(sends)), torch.zeros(sum(receives), dtype=self.dtype)
        mine = torch.zeros(sum(receives), dtype=self.dtype, device=self.device)
        work = dist.all_to_all_single(mine, self.on_device(t), receives, sends, **options)
        dist.all_to_all_single(reference, t, receives, sends, group=gloo)
        return work, [(mine, reference)]

    def do_gather(self, options, gloo):
        t, root = self.values(self.size), self.ranks[self.place] == self.root
        mine = [self.on_device(torch.zeros_like(t)) for _ in self.ranks] if root else None
        reference = [t.clone() for _ in self.ranks] if root else None
        work = dist.gather(self.on_device(t), mine, self.root, **options)
        dist.gather(t, reference, self.root, group=gloo)
        return work, list(zip(mine, reference)) if root else []

    def do_scatter(self, options, gloo):
        t, root = self.values(self.size), self.ranks[self.place] == self.root
        parts = [self.values(self.size) for _ in self.ranks] if root else None
        mine = self.on_device(t)
        work = dist.scatter(mine, [self.on_device(p) for p in parts] if root else None, self.root, **options)
        dist.scatter(t, parts, self.root, group=gloo)
        return work, [(mine, t)]

    def do_ring_exchange(self, options, gloo):
        t, into = self.values(self.size), torch.zeros(self.size, dtype=self.dtype)
        n, mine = len(self.ranks), self.on_device(into)
        right, left = self.ranks[(self.place + 1) % n], self.ranks[(self.place - 1) % n]
        for a, b, group in ((self.on_device(t), mine, options["group"]), (t, into, gloo)):
            moves = [dist.P2POp(dist.isend, a, right, group), dist.P2POp(dist.irecv, b, left, group)]
            for work in dist.batch_isend_irecv(moves):
                work.wait()
        return None, [(mine, into)]

    def do_coalesced(self, options, gloo):
        tensors = [self.values(self.size // d) for d in (1, 2, 3)]
        mine = [t.to(self.device) for t in tensors]
        with dist._coalescing_manager(options["group"], self.device, options["async_op"]) as manager:
            for t in mine:
                dist.all_reduce(t, self.op, group=options["group"])
        for t in tensors:
            dist.all_reduce(t, self.op, group=gloo)
        return manager if options["async_op"] else None, list(zip(mine, tensors))

    def do_barrier(self, options, gloo):
        return dist.barrier(**options), []


def agree(rank: int, world: int, rounds: int, seed: int = 0) -> None:
    """Runs the same random program on all ranks, with up to IN_FLIGHT operations under way."""
    shared, own = random.Random(world + 1000 * seed), torch.Generator().manual_seed(rank)
    device = torch.device("neuron", torch.neuron.current_device())
    members = [list(range(world)), *([[0, world - 1], [world - 2, world - 1]] if world > 2 else [])]
    groups = [(m, dist.new_group(m), dist.new_group(m, backend="gloo")) for m in members]
    pending = []

    def check(what, work, results):
        if work is not None:
            work.wait()
        for mine, reference in results:
            tolerance = TOLERANCE.get(reference.dtype, 1e-5)
            torch.testing.assert_close(
                mine.cpu(), reference, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
            )

    for i in range(rounds):
        ranks, group, gloo = shared.choice(groups)
        draw = random.Random(shared.random())
        if rank not in ranks:
            continue
        r = Round(i, draw, own, ranks, rank, device)
        pending.append((r.what, *r.run(group, gloo)))
        if len(pending) >= IN_FLIGHT or not r.asynchronous:
            for entry in pending:
                check(*entry)
            pending.clear()
    for entry in pending:
        check(*entry)
    dist.barrier()


def _victims(rank: int, world: int, folder: str, timeout: float) -> None:
    """Works until the end; writes what it was told."""
    torch.set_num_threads(1)
    torch.neuron.set_device(rank)
    own, shared = torch.Generator().manual_seed(rank), random.Random(1)
    device = torch.device("neuron", rank)
    try:
        dist.init_process_group(
            "neuron",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        Path(folder, f"ready{rank}").touch()
        while True:
            kind = shared.choice(["all_reduce", "all_to_all", "broadcast", "exchange"])
            t = torch.rand(shared.choice(SIZES) * world, generator=own).to(device)
            if kind == "all_reduce":
                dist.all_reduce(t)
            elif kind == "all_to_all":
                dist.all_to_all_single(torch.empty_like(t), t)
            elif kind == "broadcast":
                dist.broadcast(t, 0)
            else:
                into = torch.empty_like(t)
                works = [dist.isend(t, (rank + 1) % world), dist.irecv(into, (rank - 1) % world)]
                for work in works:
                    work.wait()
            if t.numel():
                t[0].item()
    except Exception as e:
        Path(folder, f"told{rank}.new").write_text(f"{type(e).__name__}: {e}")
        os.rename(f"{folder}/told{rank}.new", f"{folder}/told{rank}")
    os._exit(0)


@contextmanager
def nothing_left():
    """Checks that shared memory and temporary files are as before."""

    def state():
        return {str(p) for folder in ("/dev/shm", "/tmp") for p in Path(folder).glob("*neuron*")}

    before = state()
    yield
    assert state() <= before, f"left behind: {state() - before}"


def kill_rounds(rounds: int, world: int, seed: int = 0, timeout: float = 5, report=lambda text: None) -> None:
    """Starts `world` ranks again and again; kills or stops one of them at a random moment."""
    os.environ["NEURON_RT_NUM_CORES"] = str(world)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.soak"])
    draw = random.Random(seed)
    for i in range(rounds):
        with tempfile.TemporaryDirectory() as folder, nothing_left():
            processes = [context.Process(target=_victims, args=(r, world, folder, timeout)) for r in range(world)]
            victim, how = draw.randrange(world), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            try:
                for p in processes:
                    p.start()
                _until(lambda: all(Path(folder, f"ready{r}").exists() for r in range(world)), 120, "ranks to start")
                time.sleep(draw.random() * 0.5)
                os.kill(processes[victim].pid, how)
                start = time.monotonic()
                others = [r for r in range(world) if r != victim]
                _until(lambda: all(Path(folder, f"told{r}").exists() for r in others), timeout + 20, "errors")
                seconds = time.monotonic() - start
                for r in others:
                    told = Path(folder, f"told{r}").read_text()
                    assert f"rank {victim}" in told and "DistBackendError" in told, f"rank {r} was told: {told}"
                report(f"round {i + 1}: rank {victim} got {how.name}; the others raised within {seconds:.2f} s")
            finally:
                for p in processes:
                    if p.pid:
                        p.kill()
                        p.join()


def _until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def _agree_rank(rank, world, folder, rounds, seed):
    torch.set_num_threads(1)
    torch.neuron.set_device(rank)
    dist.init_process_group(
        "neuron", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    start = time.monotonic()
    agree(rank, world, rounds, seed)
    if rank == 0:
        print(f"{rounds} rounds among {world} ranks agree with gloo, {time.monotonic() - start:.0f} s", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Runs one of the two."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["agree", "kill"])
    p.add_argument("--rounds", type=int)
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    if a.what == "kill":
        kill_rounds(a.rounds or 50, a.ranks, a.seed, report=lambda text: print(text, flush=True))
        return
    os.environ["NEURON_RT_NUM_CORES"] = str(a.ranks)
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_agree_rank, (a.ranks, folder, a.rounds or 1000, a.seed), nprocs=a.ranks)


if __name__ == "__main__":
    main()
