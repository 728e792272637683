"""Runs a function in several ranks."""

import os
import tempfile
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, world, folder, body, arguments, backend, timeout):
    torch.set_num_threads(1)
    torch.neuron.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        body(rank, world, *arguments)
    except BaseException:
        with open(f"{folder}/error{rank}", "w") as f:
            f.write(traceback.format_exc())
        raise
    dist.destroy_process_group()


@pytest.fixture
def ranks(monkeypatch):
    """ranks(world, body, *arguments): runs body(rank, world, *arguments) in `world` processes with a process group."""

    def run(world, body, *arguments, backend="neuron", timeout=120):
        monkeypatch.setenv("NEURON_RT_NUM_CORES", str(world))
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(_rank, (world, folder, body, arguments, backend, timeout), nprocs=world)
            except Exception:
                texts = [open(f"{folder}/{n}").read() for n in sorted(os.listdir(folder)) if n.startswith("error")]
                pytest.fail("\n".join(texts) or traceback.format_exc())

    return run
