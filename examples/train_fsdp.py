"""Trains a character model with FSDP2 on several neuron devices; nothing in the model or the loop knows the device.

    torchrun --standalone --nproc-per-node=4 examples/train_fsdp.py

The same file runs on many hosts: see docs/distributed.md.
"""

import argparse
import os
import pathlib
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, symbols, width, layers, heads, length):
        super().__init__()
        self.token, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", type=pathlib.Path, help="file to learn from (default: Python's language reference)")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=16, help="sequences of all ranks together")
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--width", type=int, default=96)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--checkpoint", help="folder to save the sharded model to")
    a = p.parse_args()

    torch.neuron.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("neuron", torch.neuron.current_device())

    text = a.text.read_bytes() if a.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()
    torch.manual_seed(0)  # the same weights on every rank
    model = Model(128, a.width, a.layers, 4, a.length).to(device)
    mesh = init_device_mesh("neuron", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    if rank == 0:
        size = sum(x.numel() for x in model.parameters())
        print(f"{ranks} ranks share {size:,} parameters and learn from {len(text):,} characters", flush=True)
    draw = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    for step in range(1, a.steps + 1):
        begin = torch.randint(len(text) - a.length - 1, (a.batch,), generator=draw)[rank::ranks]
        tokens = torch.stack([text[b : b + a.length + 1] for b in begin]).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == a.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                seconds = (time.perf_counter() - start) / step
                print(f"step {step:4d} of {a.steps}   loss {mean.item():.4f}   {seconds:.3f} s/step", flush=True)
    if a.checkpoint:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=a.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
