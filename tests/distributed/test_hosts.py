"""Ranks on two pretended hosts: values over libfabric, and what ranks are told when the network or a rank is lost."""

import ctypes.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import PORT, Hosts, missing

PROGRAM = Path(__file__).with_name("on_hosts.py")
TIMEOUT = 6  # that of on_hosts.py

pytestmark = pytest.mark.skipif(
    bool(missing()) or not ctypes.util.find_library("fabric"),
    reason=missing() or "apt-get install libfabric-dev, and build again",
)


@pytest.fixture
def hosts(monkeypatch, root):
    monkeypatch.setenv("PYTHONPATH", str(root))
    with Hosts() as pair:
        yield pair


def _start(hosts, function, ranks_per_host, **environment):
    command = [sys.executable, "-W", "ignore", str(PROGRAM), function]
    return hosts.start(command, ranks_per_host, capture=True, **environment)


def _outputs(processes, seconds=150):
    end = time.monotonic() + seconds
    return [p.communicate(timeout=max(1, end - time.monotonic()))[0] for p in processes]


def _wait_until_ready(processes):
    for p in processes:
        for line in p.stdout:
            if "READY" in line:
                break
        else:
            pytest.fail(f"a rank ended before it was ready: exit code {p.wait()}")


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_fsdp2_and_collectives_over_two_hosts(hosts, ranks_per_host):
    for text in _outputs(_start(hosts, "train", ranks_per_host)):
        assert "GOOD" in text, text


def _check_told(text, lost):
    """An error within the timeout that names the operation, a lost rank and what this host's ranks were doing."""
    match = re.search(r"ERROR AFTER ([0-9.]+) s (\w+): (.*)", text, re.DOTALL)
    assert match, text
    assert float(match[1]) < TIMEOUT + 5 and match[2] == "DistBackendError", text
    assert re.search(r"(all_gather|reduce_scatter|all_reduce) #\d+", match[3]), text
    assert any(f"rank {r}" in match[3] for r in lost) and "What each rank was doing" in match[3], text


def test_link_down(hosts):
    processes = _start(hosts, "forever", 2)
    _wait_until_ready(processes)
    hosts.set_link(0, "down")
    texts = _outputs(processes)
    for rank, text in enumerate(texts):
        _check_told(text, [2, 3] if rank < 2 else [0, 1])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_on_another_host(hosts, how):
    processes = _start(hosts, "forever", 2)
    _wait_until_ready(processes)
    processes[3].send_signal(how)
    for text in _outputs(processes[:3]):
        _check_told(text, [3])
        # Ranks of both hosts have told what they do; the lost one is silent, or seen by its own host.
        cause, record = text.split("What each rank was doing", 1)
        doing = dict(re.findall(r"^  rank (\d) \([^)]*\): (.*)$", record, re.MULTILINE))
        assert set(doing) == set("0123") and all(" #" in doing[r] for r in "012"), text
        assert "rank 3" in cause.split("failed:", 1)[1], text
    processes[3].kill()
    processes[3].wait()
    for name in hosts.names:
        assert not [line for line in _sockets(name, "-a") if not line.startswith("TIME-WAIT")]


def test_traffic_stays_on_the_interface_chosen(hosts):
    """Nothing listens on other addresses than that of the interface."""
    processes = _start(hosts, "forever", 1, TORCH_NEURON_INTERFACE=hosts.cables[0])
    # The name is that of the first host; the second has none like it and says so.
    text = processes[1].communicate(timeout=60)[0]
    assert f"TORCH_NEURON_INTERFACE={hosts.cables[0]}" in text and "this host has" in text, text


def _sockets(host, *options):
    """Lines of `ss` on a pretended host."""
    command = ["ip", "netns", "exec", host, "ss", "-Htnp", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _listening(hosts, host, process):
    """Addresses that the transport of a rank listens on."""
    lines = [line for line in _sockets(hosts.names[host], "-l") if f"pid={process.pid}," in line]
    return [line.split()[3] for line in lines if f":{PORT} " not in line]  # that is the store of PyTorch


def test_listening_addresses(hosts):
    processes = _start(hosts, "forever", 1)
    _wait_until_ready(processes)
    for host, process in enumerate(processes):
        ours = _listening(hosts, host, process)
        assert ours and all(a.startswith(hosts.addresses[host] + ":") for a in ours), ours


STRANGER = """
import random, socket, sys
host, port = sys.argv[1].rsplit(":", 1)
for i in range(60):
    try:
        s = socket.create_connection((host, int(port)), timeout=10)
    except OSError:
        break  # the job has ended
    with s:
        s.settimeout(0.05)
        try:
            s.sendall(random.randbytes(random.choice([1, 20, 64, 1000, 100_000])))
            s.recv(1)
        except OSError:
            pass
else:
    i = 60
print(i)
"""


def test_strangers_cannot_disturb(hosts):
    """Whoever connects to a rank and sends it random bytes changes nothing."""
    processes = _start(hosts, "train", 1)
    addresses = []
    while not addresses:
        assert all(p.poll() is None for p in processes)
        addresses = _listening(hosts, 0, processes[0])
        time.sleep(0.1)
    command = ["ip", "netns", "exec", hosts.names[1], sys.executable, "-c", STRANGER, addresses[0]]
    connections = int(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout)
    assert connections > 0
    for text in _outputs(processes):
        assert "GOOD" in text, text


def test_missing_libfabric_names_the_package(hosts):
    library = os.path.realpath(
        subprocess.run(
            "ldconfig -p | sed -n 's/.*libfabric.so.1.*=> //p' | head -1", shell=True, capture_output=True, text=True
        ).stdout.strip()
    )
    script = f'mount --bind /dev/null {library} && exec "$0" "$@"'
    command = ["unshare", "-m", "bash", "-c", script, sys.executable, "-W", "ignore", str(PROGRAM), "first"]
    texts = _outputs(hosts.start(command, 1, capture=True))
    # The first to fail takes the store with it, perhaps before the other has come that far.
    assert any("DistBackendError" in text and "libfabric1" in text for text in texts), texts
    assert all("Error" in text for text in texts), texts
