"""Runs functions in several ranks. The rank processes live for the whole session, so a test costs no start of Python."""

import os
import tempfile
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4
START_SECONDS = 300  # on a machine that has other things to do


def _run(job):
    rank, world, folder, body, arguments, options = job
    torch.neuron.set_device(rank)
    if options.pop("bound"):
        options["device_id"] = torch.device("neuron", rank)
    timeout = timedelta(seconds=options.pop("timeout"))
    dist.init_process_group(
        init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout, **options
    )
    try:
        body(rank, world, *arguments)
    finally:
        dist.destroy_process_group()


def _serve(pipe):
    torch.set_num_threads(1)
    pipe.send("")
    while job := pipe.recv():
        try:
            _run(job)
            pipe.send("")
        except BaseException:
            pipe.send(f"rank {job[0]}: {traceback.format_exc()}")


class Ranks:
    """ranks(world, body, *arguments): runs body(rank, world, *arguments) in `world` processes with a process group.

    `bound` binds the group to the device of each rank, as some of PyTorch's functions want.
    """

    def __init__(self):
        self.pipes, self.processes = [], []

    def start(self):
        os.environ["NEURON_RT_NUM_CORES"] = str(RANKS)
        context = mp.get_context("spawn")
        for _ in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        problems = [self._answer(rank, START_SECONDS) for rank in range(RANKS)]
        assert not any(problems), problems

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

    def __call__(self, world, body, *arguments, backend="neuron", timeout=60, bound=False):
        if not self.processes:
            self.start()
        with tempfile.TemporaryDirectory() as folder:
            options = {"backend": backend, "timeout": timeout, "bound": bound}
            for rank in range(world):
                self.pipes[rank].send((rank, world, folder, body, arguments, options))
            try:
                problems = [self._answer(rank, 4 * timeout) for rank in range(world)]
            except BaseException:
                self.stop()
                raise
            if any(problems):
                self.stop()  # nobody knows what state they are in
                pytest.fail("\n".join(p for p in problems if p))

    def _answer(self, rank, seconds):
        try:
            if not self.pipes[rank].poll(seconds):
                return f"rank {rank}: no answer after {seconds} s"
            return self.pipes[rank].recv()
        except EOFError:
            return f"rank {rank} died: exit code {self.processes[rank].exitcode}"


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.stop()
