"""`torchneuron comm-bench`: its table, and what it predicts."""

import json
import subprocess
import sys

import pytest

from torchneuron.distributed import bench


def test_table_beside_gloo(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torchneuron", "comm-bench", "all_reduce", "all_gather", "-e", "16384", "-n", "2"]
    done = subprocess.run(
        [*command, "-w", "1", "-N", "4", "--report-to-json-file", str(report)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for column in (
        "size(B)",
        "time(us)",
        "algbw(GB/s)",
        "busbw(GB/s)",
        "algorithm",
        "of copy",
        "gloo(us)",
        "trn2x4(us)",
    ):
        assert column in done.stdout
    rows = json.loads(report.read_text())["results"]
    assert [(r["operation"], r["bytes"]) for r in rows] == [
        (o, b) for o in ("all_reduce", "all_gather") for b in (4096, 16384)
    ]
    assert all(r["neuron_s"] > 0 and r["gloo_s"] > 0 and r["copy_s"] > 0 for r in rows)


def test_bus_bandwidth_counts_as_nccom_test_does():
    assert bench.bus_factor("all_reduce", 4) == 1.5
    assert bench.bus_factor("all_gather", 4) == bench.bus_factor("reduce_scatter", 4) == 0.75
    assert bench.bus_factor("broadcast", 4) == 1


@pytest.mark.parametrize("operation", bench.OPERATIONS)
def test_predictions_grow_with_size_and_hosts(operation):
    seconds = [bench.predicted_seconds(operation, size, 64, 1) for size in bench.sizes(4096, 1 << 30, 16)]
    assert seconds == sorted(seconds)
    assert bench.predicted_seconds(operation, 1 << 26, 64 * 4, 4) > bench.predicted_seconds(operation, 1 << 26, 64, 1)
    # A gibibyte is a matter of bandwidth: the bytes on the slowest link at its speed.
    least = (1 << 30) * bench.bus_factor(operation, 64) / bench.NEURON_LINK.bytes_per_s
    assert bench.predicted_seconds(operation, 1 << 30, 64, 1) == pytest.approx(least, rel=0.2)
