"""`torchneuron explain`: lines, operators, reasons and bytes of a script whose fusion can be told by hand."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
x = torch.arange(1000.0).to("neuron")
torch.neuron.synchronize()
for _ in range(3):
    y = torch.sigmoid(x) * x
    y = y + 1
    y.tolist()
many = x
for _ in range(64):
    many = many * 1.5
weight = torch.ones(1000, device="neuron", requires_grad=True)
torch.neuron.synchronize()
loss = (weight * x).sum()
loss.backward()
"""


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "import sys; from torchneuron.cli import main; sys.exit(main(sys.argv[1:]))"]
    return subprocess.run([*command, "explain", *arguments, path], capture_output=True, text=True, timeout=120)


def test_report(tmp_path):
    script, result = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    done = run(script, "--json", str(result))
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())

    chain = next(p for p in report["programs"] if p["operators"] == ["sigmoid", "mul", "add"])
    assert chain["runs"] == 3 and chain["elements"] == 1000 and chain["rows"] == 0
    assert [line.rpartition(":")[2] for line in chain["lines"]] == ["6", "7"]
    # x is read and y written, 4 bytes an element; alone the calls read 1, 2, 1 and write 1 tensor each.
    assert chain["bytes_moved"] == 3 * 2 * 4000
    assert chain["bytes_alone"] == 3 * 7 * 4000

    windows = {(w["why"], w["where"].rpartition(":")[2]): w["count"] for w in report["windows"]}
    assert windows["drained", "8"] == 3
    assert windows["nodes", "11"] == 1

    backward = next(p for p in report["programs"] if any(line.endswith("(backward)") for line in p["lines"]))
    assert backward["lines"][-1].split(":")[-1] == "14 (backward)"
    assert "y.tolist()" in done.stdout


def test_a_script_that_fails_is_explained(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(7)\n")
    done = run(script)
    assert done.returncode == 7
    assert "exit code 7" in done.stdout and "Nothing was fused" in done.stdout


def test_programs_are_written_as_nki_source(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "nki"
    script.write_text(SCRIPT + "torch.erfc(x).tolist()\n")
    done = run(script, "--nki", str(folder))
    assert done.returncode == 0, done.stderr
    assert "have no NKI source" not in done.stdout
    assert any("erfc" in file.name for file in folder.iterdir())
    assert "def kernel(" in (folder / "sigmoid_mul_add_1000.py").read_text()
    assert len(list(folder.glob("sigmoid_mul_add*"))) == 1  # it ran three times
    alone = subprocess.run(
        [sys.executable, folder / "sigmoid_mul_add_1000.py"], capture_output=True, text=True, timeout=120
    )
    assert alone.returncode == 0, alone.stderr
    assert "(1000,) torch.float32" in alone.stdout
