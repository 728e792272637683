"""What a whole job does: restarts after a killed rank, and checkpoints that another number of ranks loads."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks import parallel

RESTART = """
import os, signal, sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
folder = sys.argv[1]
rank = int(os.environ["RANK"])
torch.neuron.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("neuron")
device = torch.device("neuron", torch.neuron.current_device())
state = {"step": torch.zeros(1, device=device), "sum": torch.zeros(4, device=device)}
if os.path.exists(f"{folder}/step"):
    dcp.load(state, checkpoint_id=f"{folder}/step")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while state["step"].item() < 6:
    if first and rank == 1 and state["step"].item() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(x)
    state["sum"] += x
    state["step"] += 1
    if state["step"].item() == 3:
        dcp.save(state, checkpoint_id=f"{folder}/step")
if rank == 0:
    print("RESULT", os.environ["TORCHELASTIC_RESTART_COUNT"], state["sum"].tolist())
dist.destroy_process_group()
"""


def test_torchrun_restarts_after_a_killed_rank(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RESTART)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [*command, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"NEURON_RT_NUM_CORES": "2", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"RESULT 1 {[18.0] * 4}" in done.stdout, done.stdout


def _sharded(rank, world):
    job = parallel.Job(rank, world, torch.device("neuron", torch.neuron.current_device()), 2)
    model = parallel.fsdp2_model(job, job.mesh(world, names=("dp",)))
    optimizer = parallel.make_optimizer(model.parameters())
    return job, model, optimizer


def _save(rank, world, folder):
    job, model, optimizer = _sharded(rank, world)
    parallel.train(job, model, optimizer, rank, world)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    whole = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


def _load(rank, world, folder):
    job, model, optimizer = _sharded(rank, world)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    whole = torch.load(f"{folder}/whole.pt")
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor().cpu(), whole[name]), name
        assert optimizer.state[p]["exp_avg"].full_tensor().abs().sum() > 0, name
    dist.barrier()


@pytest.mark.parametrize("saved, loaded", [(4, 2), (2, 3)])
def test_checkpoints_are_resharded(ranks, tmp_path, saved, loaded):
    ranks(saved, _save, str(tmp_path))
    ranks(loaded, _load, str(tmp_path))
