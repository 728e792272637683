"""Losses of a small GPT under PyTorch's ways to spread it over ranks, beside those of a single process on the CPU.

    python -m benchmarks.parallel --steps 50

trains on Python's language reference and prints, for each way, the largest difference of the losses. Every way is
PyTorch's own, unchanged; the tests run the same recipes for fewer steps.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, LAYERS, LENGTH, BATCH, EXPERTS = 48, 4, 4, 64, 8, 4
RATE = 1e-3
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
SYMBOLS = "".join(sorted(set(TEXT)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A mixture of experts, of which each token takes one. With a group, each rank holds its share of the experts and
    tokens travel to them and back."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(MLP() for _ in range(EXPERTS))
        self.group = None

    def spread(self, group):
        """Keeps this rank's share of the experts."""
        share = EXPERTS // group.size()
        self.group, first = group, dist.get_rank(group) * share
        self.experts = self.experts[first : first + share]

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS)
        results = self.run(tokens[order], counts)
        return (torch.zeros_like(tokens).index_copy(0, order, results) * weight.unsqueeze(-1)).view_as(x)

    def run(self, tokens, counts):
        if self.group is None:
            return torch.cat([f(t) for f, t in zip(self.experts, tokens.split(counts.tolist()))])
        from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

        ranks, share = self.group.size(), len(self.experts)
        theirs = all_to_all_single(counts, None, None, self.group).view(ranks, share)  # by sender and expert
        sent, received = counts.view(ranks, share).sum(1).tolist(), theirs.sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, received, sent, self.group)
        pieces = arrived.split(theirs.flatten().tolist())
        done = [f(torch.cat(pieces[i::share])).split(theirs[:, i].tolist()) for i, f in enumerate(self.experts)]
        back = torch.cat([done[i][r] for r in range(ranks) for i in range(share)])
        return all_to_all_single_autograd(back, sent, received, self.group)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, mlp=MLP):
        super().__init__()
        self.token, self.place = nn.Embedding(len(SYMBOLS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mlp) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(SYMBOLS))

    def forward(self, tokens, places=None):
        if places is None:
            places = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """A part of the model for a pipeline."""

    def __init__(self, model, index, stages):
        super().__init__()
        share = LAYERS // stages
        self.blocks = model.blocks[index * share : (index + 1) * share]
        self.embeddings = nn.ModuleList([model.token, model.place]) if index == 0 else None
        self.end = nn.Sequential(model.norm, model.head) if index == stages - 1 else None

    def forward(self, x):
        if self.embeddings is not None:
            token, place = self.embeddings
            x = token(x) + place(torch.arange(LENGTH, device=x.device).expand_as(x))
        for block in self.blocks:
            x = block(x)
        return x if self.end is None else self.end(x)


def make_model(mlp=MLP):
    torch.manual_seed(0)
    return Model(mlp)


def make_optimizer(parameters, **options):
    return torch.optim.AdamW(parameters, lr=RATE, **options)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@functools.cache
def batches(steps):
    """(tokens, targets) of each step: BATCH random pieces of the text, and the same moved by one character."""
    index = {c: i for i, c in enumerate(SYMBOLS)}
    data = torch.tensor([index[c] for c in TEXT])
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(len(data) - LENGTH - 1, (steps, BATCH, 1), generator=draw) + torch.arange(LENGTH)
    return [(data[s], data[s + 1]) for s in starts]


@functools.cache
def single_process(steps, mlp=MLP):
    """The losses of one process on the CPU."""
    model = make_model(mlp)
    optimizer, losses = make_optimizer(model.parameters()), []
    for tokens, targets in batches(steps):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True)
class Job:
    rank: int
    ranks: int
    device: torch.device
    steps: int

    def mesh(self, *shape, names):
        return init_device_mesh("neuron", shape, mesh_dim_names=names)


def train(job, model, optimizer=None, part=0, parts=1, group=None, after_backward=None):
    """Trains on the `part`-th of `parts` shares of every batch; returns the losses of the whole batches."""
    optimizer = optimizer or make_optimizer(model.parameters())
    losses = []
    for tokens, targets in batches(job.steps):
        tokens, targets = (t.chunk(parts)[part].to(job.device) for t in (tokens, targets))
        loss = loss_of(model(tokens), targets)
        loss.backward()
        if after_backward:
            after_backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        losses.append(mean.item())
    return losses


def data_parallel(job, model, optimizer=None):
    return train(job, model, optimizer, job.rank, job.ranks)


def ddp(job, hook=None, **options):
    model = DistributedDataParallel(make_model().to(job.device), bucket_cap_mb=0.1, **options)
    if hook:
        model.register_comm_hook(*hook)
    return data_parallel(job, model)


def own_hook(state, bucket):
    """A communication hook as users write them: its future has a continuation, which waits for another collective."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def then(fut):
        check = torch.ones(1, device=buffer.device)
        dist.all_reduce(check, async_op=True).get_future().wait()
        return fut.value()[0] * (check / dist.get_world_size())

    return future.then(then)


def bf16_hook(state, bucket):
    """PyTorch's, under another name: DDP refuses it by its name where there is neither NCCL nor XCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def ddp_power_sgd(job):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
    return ddp(job, (state, powerSGD_hook.powerSGD_hook))


def ddp_no_sync(job):
    model = DistributedDataParallel(make_model().to(job.device))
    optimizer, losses = make_optimizer(model.parameters()), []
    for tokens, targets in batches(job.steps):
        tokens, targets = (t.chunk(job.ranks)[job.rank].to(job.device).chunk(2) for t in (tokens, targets))
        total = 0
        for i in range(2):
            with model.no_sync() if i == 0 else nullcontext():
                loss = loss_of(model(tokens[i]), targets[i]) / 2
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def zero(job):
    model = DistributedDataParallel(make_model().to(job.device))
    return data_parallel(job, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE))


def fsdp1(job, **options):
    model = FullyShardedDataParallel(
        make_model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=job.device, **options
    )
    return data_parallel(job, model)


def fsdp2_model(job, mesh, model=None, **options):
    model = model or make_model().to(job.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(job, **options):
    model = make_model()
    if "offload_policy" not in options:
        model = model.to(job.device)
    return data_parallel(job, fsdp2_model(job, job.mesh(job.ranks, names=("dp",)), model, **options))


def hsdp(job):
    return data_parallel(job, fsdp2_model(job, job.mesh(2, job.ranks // 2, names=("replicate", "shard"))))


def tensor_parallel_model(job, mesh):
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.out": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    model = make_model().to(job.device)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def tensor_parallel(job):
    model = tensor_parallel_model(job, job.mesh(job.ranks, names=("tp",)))
    # Some parameters are DTensors and some are not: PyTorch's foreach operators take no mixture, on any device.
    return train(job, model, make_optimizer(model.parameters(), foreach=False))


def sequence_parallel(job):
    mesh, model = job.mesh(job.ranks, names=("tp",)), make_model().to(job.device)
    rows = Shard(1)
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=rows) for name in ("attention.out", "mlp.down")}
    plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
    plan |= {
        name: PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        for name in ("attention", "mlp")
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    head = ColwiseParallel(input_layouts=rows, output_layouts=Replicate())
    ends = {"token": embedding, "place": embedding, "norm": SequenceParallel(), "head": head}
    return train(job, parallelize_module(model, mesh, ends))


def ddp_tensor_parallel(job):
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = job.mesh(2, job.ranks // 2, names=("dp", "tp"))
    model = tensor_parallel_model(job, mesh["tp"])
    _pre_dp_module_transform(model)
    group = mesh["dp"].get_group()
    model = DistributedDataParallel(model, process_group=group)
    return train(job, model, None, mesh["dp"].get_local_rank(), 2, group)


def fsdp2_tensor_parallel(job):
    mesh = job.mesh(2, job.ranks // 2, names=("dp", "tp"))
    model = fsdp2_model(job, mesh["dp"], tensor_parallel_model(job, mesh["tp"]))
    return train(job, model, None, mesh["dp"].get_local_rank(), 2, mesh["dp"].get_group())


def context_parallel(job):
    from torch.distributed.tensor.experimental import context_parallel as spread

    mesh = job.mesh(job.ranks, names=("cp",))
    model = DistributedDataParallel(make_model().to(job.device))
    optimizer, losses = make_optimizer(model.parameters()), []
    for tokens, targets in batches(job.steps):
        tokens, targets = tokens.to(job.device), targets.to(job.device)
        places = torch.arange(LENGTH, device=job.device).expand_as(tokens).contiguous()
        with spread(mesh, buffers=[tokens, targets, places], buffer_seq_dims=[1, 1, 1]):
            loss = loss_of(model(tokens, places), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def pipeline(job, schedule, per_rank=1, copies=1):
    """A pipeline with `per_rank` stages on each rank, and `copies` pipelines beside each other with DDP."""
    from torch.distributed.pipelining import PipelineStage

    mesh = job.mesh(job.ranks // copies, copies, names=("pp", "dp"))
    group, place, size = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), job.ranks // copies
    count, whole = size * per_rank, make_model()
    stages, parameters = [], []
    for index in range(place, count, size):
        part = Stage(whole, index, count).to(job.device)
        parameters += part.parameters()
        if copies > 1:
            part = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
        stages.append(PipelineStage(part, index, count, job.device, group=group))
    run = schedule(stages[0] if per_rank == 1 else stages, n_microbatches=4, loss_fn=loss_of)
    optimizer, losses = make_optimizer(parameters), []
    for tokens, targets in batches(job.steps):
        tokens, targets = (t.chunk(copies)[mesh["dp"].get_local_rank()].to(job.device) for t in (tokens, targets))
        parts: list[torch.Tensor] = []
        last = place == size - 1
        run.step(*([tokens] if place == 0 else []), **({"target": targets, "losses": parts} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(parts).mean() if last else torch.zeros((), device=job.device)
        dist.all_reduce(mean)
        losses.append(mean.item() / copies)
    return losses


def one_forward_one_backward(job, copies=1):
    from torch.distributed.pipelining import Schedule1F1B

    return pipeline(job, Schedule1F1B, copies=copies)


def interleaved(job):
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    return pipeline(job, ScheduleInterleaved1F1B, per_rank=2)


def expert_parallel(job):
    model = make_model(Experts).to(job.device)
    for block in model.blocks:
        block.mlp.spread(dist.group.WORLD)

    def average():
        # An expert has seen the tokens of all ranks, each with the gradient of its own rank's mean.
        for name, p in model.named_parameters():
            if p.grad is None:  # no token came
                continue
            if ".experts." in name:
                p.grad /= job.ranks
            else:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)

    return train(job, model, None, job.rank, job.ranks, None, average)


@dataclass(frozen=True)
class Recipe:
    """How to spread the model.

    Attributes:
        run: trains in one rank; returns the losses.
        ranks: number of ranks.
        tolerance: largest difference to a single process's losses that rounding explains; 16-bit ways round more.
        mlp: the model's variant.
    """

    run: Callable[[Job], list[float]]
    ranks: int = 4
    tolerance: float = 1e-4
    mlp: type = MLP


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RECIPES = {
    "ddp": Recipe(ddp, 2),
    "ddp, bucket views": Recipe(lambda job: ddp(job, gradient_as_bucket_view=True)),
    "ddp, static graph": Recipe(lambda job: ddp(job, static_graph=True), 2),
    "ddp, all_reduce hook": Recipe(lambda job: ddp(job, (None, default_hooks.allreduce_hook)), 2),
    "ddp, own hook": Recipe(lambda job: ddp(job, (None, own_hook))),
    "ddp, bf16 hook": Recipe(lambda job: ddp(job, (None, bf16_hook)), 2, 2e-2),
    "ddp, PowerSGD hook": Recipe(ddp_power_sgd, 2, 0.2),
    "ddp, no_sync": Recipe(ddp_no_sync),
    "zero": Recipe(zero),
    "fsdp1": Recipe(fsdp1),
    "fsdp1, original parameters": Recipe(lambda job: fsdp1(job, use_orig_params=True), 2),
    "fsdp1, gradients only": Recipe(lambda job: fsdp1(job, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), 2),
    "fsdp2": Recipe(fsdp2),
    "fsdp2, bf16": Recipe(lambda job: fsdp2(job, mp_policy=BF16), 4, 5e-2),
    "fsdp2, cpu offload": Recipe(lambda job: fsdp2(job, offload_policy=CPUOffloadPolicy()), 2),
    "fsdp2, keep after forward": Recipe(lambda job: fsdp2(job, reshard_after_forward=False), 2),
    "hsdp": Recipe(hsdp),
    "tensor parallel": Recipe(tensor_parallel),
    "sequence parallel": Recipe(sequence_parallel),
    "context parallel": Recipe(context_parallel, 2),
    "pipeline 1f1b": Recipe(one_forward_one_backward),
    "pipeline interleaved": Recipe(interleaved, 2),
    "expert parallel": Recipe(expert_parallel, mlp=Experts),
    "ddp x tensor parallel": Recipe(ddp_tensor_parallel),
    "fsdp2 x tensor parallel": Recipe(fsdp2_tensor_parallel),
    "pipeline x ddp": Recipe(lambda job: one_forward_one_backward(job, copies=2)),
}


def compare(rank, ranks, name, steps):
    """Runs a recipe in this rank; returns (largest difference of its losses, first loss, last loss) on every rank."""
    recipe = RECIPES[name]
    losses = recipe.run(Job(rank, ranks, torch.device("neuron", torch.neuron.current_device()), steps))
    expected = single_process(steps, recipe.mlp) if rank == 0 else losses
    difference = torch.tensor([max(abs(a - b) for a, b in zip(losses, expected))], dtype=torch.float64)
    dist.broadcast(difference, 0)
    assert len(losses) == steps
    return difference.item(), losses[0], losses[-1]


def _rank(rank, ranks, folder, names, steps):
    torch.set_num_threads(1)
    torch.neuron.set_device(rank)
    dist.init_process_group(
        "neuron", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    for name in names:
        start = time.perf_counter()
        difference, first, last = compare(rank, ranks, name, steps)
        good = difference <= RECIPES[name].tolerance
        if rank == 0:
            print(
                f"{name:28} {ranks:>5}   {first:.4f} -> {last:.4f}   {difference:10.2e} {RECIPES[name].tolerance:10.0e}"
                f"   {'ok' if good else 'DIFFERS'}   {time.perf_counter() - start:6.1f} s",
                flush=True,
            )
        assert good, name
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the recipes, each with its number of ranks on this host."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipes", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)}")
    p.add_argument("--steps", type=int, default=50)
    a = p.parse_args()
    os.environ["NEURON_RT_NUM_CORES"] = "4"
    import torch.multiprocessing as mp

    print(f"{'recipe':28} ranks   loss, {a.steps} steps      difference  tolerance", flush=True)
    for ranks in sorted({RECIPES[name].ranks for name in a.recipes}):
        names = [name for name in a.recipes if RECIPES[name].ranks == ranks]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder, names, a.steps), nprocs=ranks)


if __name__ == "__main__":
    main()
