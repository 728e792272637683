"""Fused programs and NKI kernels run on as many threads as `torch.set_num_threads` says."""

import subprocess
import sys

import pytest

FUSED = "x = torch.empty(1 << 22, device='neuron'); y = (x * 2 + 1).sum(); torch.neuron.synchronize()"
KERNEL = """
import numpy, nki, nki.isa as nisa, nki.language as nl
@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    for _ in range(4):
        nisa.activation(dst=tile, op=nl.exp, data=tile)
    nisa.dma_copy(dst=out, src=tile)
    return out
double(torch.empty(128, 8192, device='neuron')); torch.neuron.synchronize()
"""


@pytest.mark.parametrize("work", [FUSED, KERNEL], ids=["fused", "kernel"])
def test_threads(work: str) -> None:
    tasks = "len(os.listdir('/proc/self/task'))"
    code = f"import os, torch\ntorch.set_num_threads(4)\nbefore = {tasks}\n{work}\nprint({tasks} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The calling thread, or a stream's, which then is new itself, and three helpers.
    assert int(done.stdout) in (3, 4)
