"""`torchneuron comm-bench`: times collectives on neuron beside gloo, as a table in the form of nccom-test.

It starts its ranks on this host; under torchrun each process is a rank, so that it measures several hosts too.

A time is that of one of several calls in a row, after one that is not counted: ranks wake up in that one. `copy` is the
time in which every rank copies as many bytes from memory to memory, all at once, and `of copy` how close the operation
comes to that: to the memory bandwidth.
The last columns say what the same operation would take on trn2, from the algorithm's steps and the bytes that each rank
moves: within an instance over NeuronLink, or between instances over EFA.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

MOST_IN_A_ROW = 20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Network:
    """A network between ranks of trn2.

    Attributes:
        step_s: time of one step of an algorithm, without data.
        floor_s: fixed time of a collective.
        bytes_per_s: bandwidth of one rank.
        source: where the numbers come from.
    """

    step_s: float
    floor_s: float
    bytes_per_s: float
    source: str


# One logical core (LNC 2) of trn2.48xlarge.
NEURON_LINK = Network(
    1.5e-6, 6e-6, 1024e9 / 4, "1,024 GB/s per chip of NeuronLink-v3, four logical cores a chip; 1-2 us per ring hop"
)
EFA = Network(15e-6, 6e-6, 50e9 / 8, "3.2 Tb/s per instance for 64 ranks; 15 us from memory to memory")


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes that cross the slowest link, as a multiple of the operation's size (the convention of nccom-test)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation != "broadcast" else 1.0


def predicted_seconds(operation: str, size: int, ranks: int, hosts: int) -> float:
    """Time on trn2 of an operation of `size` bytes among `ranks` ranks on `hosts` instances.

    Within an instance the better of a ring and recursive doubling; between instances a second stage among the ranks in
    the same place of each.
    """

    def stage(network: Network, members: int, stage_size: float) -> float:
        if members < 2:
            return 0.0
        passes = 2 if operation == "all_reduce" else 1
        ring = passes * (members - 1) * network.step_s
        doubling = passes * (members - 1).bit_length() * network.step_s
        return min(ring, doubling) + stage_size * bus_factor(operation, members) / network.bytes_per_s

    local = max(1, ranks // hosts)
    return NEURON_LINK.floor_s + stage(NEURON_LINK, local, size) + stage(EFA, hosts, size / local)


def sizes(smallest: int, biggest: int, factor: int) -> list[int]:
    """Sizes in bytes from `smallest` to `biggest`, each `factor` times the one before."""
    out = [smallest]
    while out[-1] * factor <= biggest:
        out.append(out[-1] * factor)
    return out


def _prepare(operation: str, size: int, dtype: Any, device: Any, group: Any) -> Callable[[], Any]:
    """A function that runs the operation once on `size` bytes: of the whole buffer, all ranks' parts together."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    part = max(1, size // dtype.itemsize // ranks)
    # Zeros stay zeros, however often they are added; filled, so that every page has memory of its own.
    whole = torch.full((part * ranks,), 0, dtype=dtype, device=device)
    piece = torch.full((part,), 0, dtype=dtype, device=device)
    other = torch.empty_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }[operation]


def measure(
    operations: list[str], byte_sizes: list[int], dtype: Any, iterations: int, warmup: int, gloo: bool
) -> list[dict]:
    """Times the operations in the group of this process; the backends take turns. Every rank must call it."""
    import torch
    import torch.distributed as dist

    backend = dist.group.WORLD._get_backend(torch.device("neuron"))
    groups = {"neuron": (dist.group.WORLD, torch.device("neuron", torch.neuron.current_device()))}
    if gloo:
        groups["gloo"] = (dist.new_group(backend="gloo"), torch.device("cpu"))
    # A copy is over before the next rank of its core begins; together they take as long as they are many.
    turns = max(1.0, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) / len(os.sched_getaffinity(0)))
    rows = []
    for operation in operations:
        for size in byte_sizes:
            calls = {name: _prepare(operation, size, dtype, device, group) for name, (group, device) in groups.items()}
            source, target = (torch.full((size,), 0, dtype=torch.uint8) for _ in range(2))
            calls["copy"] = lambda source=source, target=target: target.copy_(source)
            times: dict[str, list[float]] = {name: [] for name in calls}
            in_a_row = max(1, min(MOST_IN_A_ROW, (1 << 20) // size))
            for i in range(warmup + iterations):
                for name, call in calls.items():
                    dist.barrier()
                    call()
                    torch.neuron.synchronize()
                    start = time.perf_counter()
                    for _ in range(in_a_row):
                        call()
                    torch.neuron.synchronize()
                    if i >= warmup:
                        times[name].append((time.perf_counter() - start) / in_a_row)
            medians = torch.tensor([statistics.median(t) for t in times.values()], dtype=torch.float64)
            dist.all_reduce(medians, op=dist.ReduceOp.MAX)  # a collective takes what its slowest rank takes
            row = dict(zip((f"{name}_s" for name in times), medians.tolist()))
            row["copy_s"] *= turns
            rows.append({"operation": operation, "bytes": size, "algorithm": backend.algorithm(operation, size), **row})
    return rows


def table(rows: list[dict], ranks: int, hosts: int, dtype: str, itemsize: int) -> str:
    """The results as text, in the columns of nccom-test and then gloo's and the predicted times."""
    head = (
        f"{'size(B)':>12} {'count(elems)':>13} {'type':>9} {'time(us)':>10} {'algbw(GB/s)':>12} {'busbw(GB/s)':>12} "
        f"{'algorithm':>12} {'copy(us)':>9} {'of copy':>8} {'gloo(us)':>10} {'speedup':>8} {'trn2(us)':>9} "
        f"{f'trn2x{hosts}(us)':>11}"
    )
    lines: list[str] = []
    for operation in dict.fromkeys(r["operation"] for r in rows):
        lines += [f"{operation}, {ranks} ranks", head]
        bandwidths = []
        for r in (r for r in rows if r["operation"] == operation):
            size, seconds, gloo = r["bytes"], r["neuron_s"], r.get("gloo_s")
            bandwidth = size / seconds / 1e9
            bandwidths.append(bandwidth * bus_factor(operation, ranks))
            near = predicted_seconds(operation, size, ranks, 1)
            far = predicted_seconds(operation, size, ranks * hosts, hosts)
            beside = (f"{gloo * 1e6:.1f}", f"{gloo / seconds:.1f}x") if gloo else ("-", "-")
            lines.append(
                f"{size:>12} {size // itemsize:>13} {dtype:>9} {seconds * 1e6:>10.1f} {bandwidth:>12.2f} "
                f"{bandwidths[-1]:>12.2f} {r['algorithm']:>12} {r['copy_s'] * 1e6:>9.1f} {r['copy_s'] / seconds:>8.0%} "
                f"{beside[0]:>10} {beside[1]:>8} {near * 1e6:>9.1f} {far * 1e6:>11.1f}"
            )
        lines.append(f"Avg bus bandwidth: {statistics.mean(bandwidths):.2f} GB/s")
        ratios = [r["gloo_s"] / r["neuron_s"] for r in rows if r["operation"] == operation and "gloo_s" in r]
        if ratios:
            lines.append(f"Faster than gloo: {statistics.geometric_mean(ratios):.1f}x (geometric mean)")
        lines.append("")
    return "\n".join(lines)


def _rank(local_rank: int, rank: int, ranks: int, rendezvous: str, arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.neuron.set_device(local_rank)
    dist.init_process_group(
        "neuron", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=arguments.timeout)
    )
    dtype = getattr(torch, arguments.datatype)
    rows = measure(
        arguments.operations,
        sizes(arguments.minbytes, arguments.maxbytes, arguments.stepfactor),
        dtype,
        arguments.iters,
        arguments.warmup_iters,
        not arguments.no_gloo,
    )
    if rank == 0:
        print(table(rows, ranks, arguments.nodes, arguments.datatype, dtype.itemsize))
        if arguments.report_to_json_file:
            with open(arguments.report_to_json_file, "w") as f:
                json.dump({"ranks": ranks, "results": rows}, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def _spawned(rank: int, ranks: int, rendezvous: str, arguments: argparse.Namespace) -> None:
    _rank(rank, rank, ranks, rendezvous, arguments)


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks on this host, unless torchrun started this process as one, and prints the table."""
    if "RANK" in os.environ:
        place = (int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
        _rank(*place, "env://", arguments)
        return 0
    os.environ["NEURON_RT_NUM_CORES"] = str(arguments.nworkers)
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, (arguments.nworkers, f"file://{folder}/store", arguments), nprocs=arguments.nworkers)
    return 0


def main(arguments: list[str]) -> int:
    """Runs the command with its arguments; returns the exit code."""
    p = argparse.ArgumentParser("torchneuron comm-bench", description=__doc__)
    p.add_argument("operations", nargs="*", default=list(OPERATIONS[:3]), metavar="operation",
                   help=f"any of {', '.join(OPERATIONS)} (default: the first three)")  # fmt: skip
    p.add_argument("-r", "--nworkers", type=int, default=2, help="ranks")
    p.add_argument("-N", "--nodes", type=int, default=16, help="trn2 instances of the last predicted column")
    p.add_argument("-b", "--minbytes", type=int, default=4 << 10)
    p.add_argument("-e", "--maxbytes", type=int, default=64 << 20)
    p.add_argument("-f", "--stepfactor", type=int, default=4)
    p.add_argument("-n", "--iters", type=int, default=20)
    p.add_argument("-w", "--warmup-iters", type=int, default=5)
    p.add_argument("-d", "--datatype", default="float32")
    p.add_argument("--timeout", type=int, default=300, help="seconds until a collective is given up")
    p.add_argument("--no-gloo", action="store_true", help="do not measure gloo")
    p.add_argument("--report-to-json-file", metavar="FILE")
    parsed = p.parse_args(arguments)
    if unknown := set(parsed.operations) - set(OPERATIONS):
        p.error(f"unknown operation {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    return run(parsed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
