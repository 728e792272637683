"""Neuron tensors through torch.multiprocessing share their memory, as CUDA tensors do."""

import subprocess
import sys

SCRIPT = """
import torch, torch.multiprocessing as mp
from multiprocessing.reduction import ForkingPickler

def child(inbox, outbox):
    x, view, p = inbox.get()
    assert x.device.type == "neuron" and isinstance(p, torch.nn.Parameter) and p.requires_grad
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x[0] = 7
    outbox.put(x * 2)

if __name__ == "__main__":
    context = mp.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=child, args=(inbox, outbox))
    process.start()
    x, p = torch.zeros(4, device="neuron"), torch.nn.Parameter(torch.ones(2, device="neuron"))
    alias = x.view(2, 2)
    inbox.put((x, x[1:3], p))
    y = outbox.get()
    assert y.tolist() == [14, 0, 0, 0], y
    assert x[0].item() == 7 and alias[0, 0].item() == 7, "the child wrote into the same memory"
    process.join()
    assert process.exitcode == 0
    try:
        ForkingPickler.dumps((x + p.sum()).detach().requires_grad_() * 2)
    except RuntimeError as e:
        assert "leaf" in str(e)
    else:
        raise SystemExit("a non-leaf was sent")
"""


def test_memory_is_shared(tmp_path):
    script = tmp_path / "share.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
