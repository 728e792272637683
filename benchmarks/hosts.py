"""Pretends several hosts: a network namespace each, joined by a virtual cable. Needs root and `ip` (Debian: iproute2).

    python -m benchmarks.hosts --ranks-per-host 2 -- python -m torchneuron comm-bench all_reduce

runs a command once for each rank, with the environment that torchrun would give it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

PORT = 29511


def missing() -> str:
    """Why there can be no pretended hosts here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "apt-get install iproute2"
    made = subprocess.run(["ip", "netns", "add", f"neuron-try-{os.getpid()}"], capture_output=True, text=True)
    if made.returncode:
        return made.stderr.strip()
    _ip("netns", "del", f"neuron-try-{os.getpid()}")
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Two hosts while the context lasts; what runs on them is killed at its end."""

    def __init__(self) -> None:
        mark = os.getpid() % 100_000
        self.names = [f"neuron{mark}{x}" for x in "ab"]
        self.cables = [f"nr{mark}{x}" for x in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
            for name, cable, address in zip(self.names, self.cables, self.addresses):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                _ip("-n", name, "link", "set", cable, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def set_link(self, host: int, state: str) -> None:
        """Takes the cable of a host `up` or `down`."""
        _ip("-n", self.names[host], "link", "set", self.cables[host], state)

    def start(
        self, command: list[str], ranks_per_host: int, capture: bool = False, **environment: str
    ) -> list[subprocess.Popen[str]]:
        """Starts the command for every rank, host by host; returns the processes in the order of the ranks."""
        world = ranks_per_host * len(self.names)
        for rank in range(world):
            host, local = divmod(rank, ranks_per_host)
            variables = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": ranks_per_host,
                "NEURON_RT_NUM_CORES": ranks_per_host,
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": PORT,
                "OMP_NUM_THREADS": 1,
                "GLOO_SOCKET_IFNAME": self.cables[host],
            }
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self.names[host], *command],
                    env=os.environ | {k: str(v) for k, v in variables.items()} | environment,
                    stdout=subprocess.PIPE if capture else None,
                    stderr=subprocess.STDOUT if capture else None,
                    text=True,
                )
            )
        return self.processes[-world:]


def main() -> int:
    """Runs the command on two hosts; returns the first exit code that is not 0."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks-per-host", type=int, default=1)
    p.add_argument("command", nargs="+")
    a = p.parse_args()
    if problem := missing():
        p.error(problem)
    with Hosts() as hosts:
        return next((code for q in hosts.start(a.command, a.ranks_per_host) if (code := q.wait())), 0)


if __name__ == "__main__":
    sys.exit(main())
