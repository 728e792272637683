"""`torchneuron check`: what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import json
import sys
import textwrap
import types

import pytest
import torch

from torchneuron import _C
from torchneuron.cli.check import check


@pytest.fixture
def write(tmp_path):
    """Writes a script; line 1 is its first line."""

    def run(text: str, name: str = "script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).lstrip())
        return path

    return run


def places(report) -> dict[str, set[str]]:
    """Fallback operators and the places they were called at."""
    found: dict[str, set[str]] = {}
    for row in report.fallback:
        found.setdefault(row["operator"], set()).add(row["where"].rpartition("/")[2])
    return found


def cuda(report) -> dict[str, list[int]]:
    """CUDA-only code and the lines it was met at."""
    found: dict[str, list[int]] = {}
    for row in report.cuda:
        assert row["instead"]
        found.setdefault(row["what"], []).append(int(row["where"].rpartition(":")[2]))
    return found


def test_clean_script(write, capsys):
    report = check(str(write("import torch\ntorch.ones(4, device='neuron').mul(2)\n")), [])
    assert report.exit_code == 0 and report.fallback == report.cuda == [] and report.executed
    assert "Nothing to change." in report.text(all_operators=True)
    assert "aten::mul.Tensor" in report.text(all_operators=True)


def test_nothing_ran_on_neuron(write):
    report = check(str(write("import torch\ntorch.ones(4) + 1\n")), [])
    assert "Nothing ran on neuron" in report.text(all_operators=False)


def test_fallbacks_are_found_where_they_are_called(write):
    script = write("""
        import torch
        x = torch.rand(4, device="neuron")
        for _ in range(3):
            torch.erfinv(x)
        def inner(x):
            return torch.special.i0e(x)
        inner(x)
        x.double() + 1
        """)
    report = check(str(script), [])
    found = places(report)
    assert found["aten::erfinv"] == {"script.py:4"}
    assert found["aten::special_i0e"] == {"script.py:6"}
    assert found["aten::add.Tensor"] == {"script.py:8"}
    calls = {row["operator"]: row["calls"] for row in report.fallback}
    assert calls["aten::erfinv"] == 3
    reasons = {row["operator"]: row["reason"] for row in report.fallback}
    assert "float64" in reasons["aten::add.Tensor"] and "engine" in reasons["aten::erfinv"]


def test_the_innermost_line_outside_of_torch_is_named(write):
    write("import torch\ndef f(x):\n    return torch.nn.functional.ctc_loss(*x)\n", "helper.py")
    script = write("""
        import torch, helper
        logits = torch.rand(5, 1, 4, device="neuron").log_softmax(2)
        target = torch.ones(1, 2, dtype=torch.long, device="neuron")
        helper.f((logits, target, torch.tensor([5]), torch.tensor([2])))
        """)
    where = set().union(*places(check(str(script), [])).values())
    assert where == {"helper.py:3"}


def test_fallbacks_of_the_backward_pass_name_the_forward_line(write):
    script = write("""
        import torch
        x = torch.rand(4, device="neuron", requires_grad=True)
        y = torch.special.i0e(x)
        y.sum().backward()
        """)
    assert places(check(str(script), []))["aten::special_i1e"] == {"script.py:3 (backward)"}


def test_narrowed(write):
    report = check(str(write("import torch\ntorch.arange(4, device='neuron').add(1)\n")), [])
    assert report.narrowed["aten::add.Tensor"] == 1 and report.fallback == []


CUDA_SCRIPT = """
import torch
from torch.cuda.amp import GradScaler, autocast
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(4, 4).cuda()
x = torch.ones(2, 4, device=device)
assert x.is_cuda
y = torch.zeros(2).cuda(non_blocking=True)
with autocast(), torch.cuda.nvtx.range("step"):
    assert model(x).dtype == torch.bfloat16
with torch.autocast("cuda", dtype=torch.float16):
    assert model(x).dtype == torch.float16
scaler = GradScaler()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    x + 1
assert isinstance(stream, torch.cuda.Stream)
torch.cuda.synchronize()
torch.cuda.manual_seed_all(0)
assert torch.cuda.max_memory_allocated("cuda:0") > 0
generator = torch.Generator(device="cuda")
torch.rand(2, device="cuda:0", generator=generator)
torch.save(x, "x.pt")
assert torch.load("x.pt", map_location="cuda").device.type == "neuron"
try:
    import triton
except ImportError:
    pass
assert model.weight.device == x.device == y.device
"""


def test_package_that_is_imported_already_is_found(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))
    report = check(str(write("import torch\nimport xformers\n")), [])
    assert cuda(report) == {"import xformers": [2]}


def test_cuda_script_runs_and_each_use_is_found(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    report = check(str(write(CUDA_SCRIPT)), [])
    assert report.exit_code == 0
    assert cuda(report) == {
        "torch.cuda.amp.GradScaler": [2],
        "torch.cuda.amp.autocast": [2],
        "torch.cuda.is_available": [3],
        '"cuda" in torch.device': [3],
        ".cuda()": [4, 7],
        ".is_cuda": [6],
        "torch.cuda.nvtx": [8],
        '"cuda" in torch.autocast': [10],
        "torch.cuda.Stream": [13, 16],
        "torch.cuda.stream": [14],
        "torch.cuda.synchronize": [17],
        "torch.cuda.manual_seed_all": [18],
        "torch.cuda.max_memory_allocated": [19],
        '"cuda:0" in torch.cuda.max_memory_allocated': [19],
        '"cuda" in torch.Generator': [20],
        '"cuda:0" in torch.rand': [21],
        '"cuda" in torch.load': [23],
        "import triton": [25],
    }
    assert "torch.accelerator.synchronize" in report.text(all_operators=False)


def test_nothing_is_left_behind(write):
    before = (torch.autocast, torch.load, torch.Generator)
    check(str(write("import torch\nraise ValueError\n")), [])
    assert type(torch.cuda) is types.ModuleType
    assert (torch.autocast, torch.load, torch.Generator) == before
    assert not torch.cuda.is_available() and not torch.is_anomaly_enabled()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1).cuda()
    _C.set_fallback_listener(None)


@pytest.mark.parametrize(
    "line, code, said",
    [
        ("raise ValueError('what')", 1, "ValueError: what"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('stopped')", 1, "stopped"),
        ("torch.ones(2, device='neuron') + torch.ones(2)", 1, "same device"),
    ],
)
def test_exit_code(write, capsys, line, code, said):
    script = write(f"import sys, torch\n{line}\n")
    report = check(str(script), [])
    error = capsys.readouterr().err
    assert report.exit_code == code and said in error
    assert "runpy" not in error


def test_command_line(write, python, tmp_path):
    script = write("""
        import sys, torch
        assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "1"], sys.argv
        import beside
        torch.erfinv(torch.rand(2, device="neuron"))
        """)
    write("", "beside.py")
    out = tmp_path / "report.json"
    run = python("-m", "torchneuron", "check", "--json", out, script, "--", "--lr", "1")
    assert (run.returncode, run.stderr) == (0, "")
    assert "aten::erfinv" in run.stdout and "script.py:4" in run.stdout
    assert json.loads(out.read_text())["fallback"][0]["operator"] == "aten::erfinv"


@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_forked_child_ends_with_its_own_code(write, python, command):
    script = write("""
        import os, sys, torch
        torch.ones(3, device="neuron").sum().item()
        child = os.fork()
        if not child:
            sys.exit(3)
        print("child", os.waitpid(child, 0)[1] >> 8)
        """)
    run = python("-m", "torchneuron", command, script)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("child 3") == 1 and run.stdout.count(f"== torchneuron {command}") == 1


def test_module(write, python):
    write("import torch, sys\ntorch.ones(1, device='neuron')\nsys.exit(len(sys.argv))\n", "job.py")
    assert python("-m", "torchneuron", "check", "-m", "job", "--", "a", "b").returncode == 3


def test_missing_script(python):
    run = python("-m", "torchneuron", "check", "nothing.py")
    assert run.returncode == 2 and "there is no file nothing.py" in run.stderr


def test_device_cannot_be_loaded(write, python):
    script = write("pass\n")
    code = (
        "import sys; sys.modules['torchneuron._C'] = None; from torchneuron.cli import main;"
        f"sys.exit(main(['check', {str(script)!r}]))"
    )
    run = python("-c", code)
    assert run.returncode == 1 and "torchneuron info" in run.stderr
