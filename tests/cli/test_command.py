"""The command `torchneuron` itself, `info` and `env`."""

from __future__ import annotations

import pytest

import torchneuron
from torchneuron import env
from torchneuron.cli import COMMANDS, main
from torchneuron.cli._table import table

MAIN = "import sys; from torchneuron.cli import main; sys.exit(main({}))"


def test_usage(capsys):
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: torchneuron COMMAND" in shown and all(name in shown for name in ("info", "check", "env"))


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == torchneuron.__version__ + "\n"


def test_unknown_command(capsys):
    assert main(["inof"]) == 2
    error = capsys.readouterr().err
    assert "no command 'inof'" in error and "info" in error


def test_a_command_whose_module_is_missing_is_not_offered(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, "future", ("torchneuron_future.main", "later"))
    assert main(["future"]) == 2
    assert main([]) == 0
    assert "later" not in capsys.readouterr().out


def test_as_module(python):
    assert python("-m", "torchneuron", "--version").stdout == torchneuron.__version__ + "\n"


def test_closed_pipe(python, tmp_path):
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1);" + MAIN.format(["env"])
    run = python("-c", code)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("name", ["info", "env", "check"])
def test_help(python, name):
    run = python("-m", "torchneuron", name, "--help")
    assert run.returncode == 0 and f"usage: torchneuron {name}" in run.stdout


# info -----------------------------------------------------------------------------------------------------------------


def test_info(python):
    run = python("-m", "torchneuron", "info", NEURON_RT_NUM_CORES="2")
    assert (run.returncode, run.stderr) == (0, "")
    for text in ("neuron:0", "neuron:1", "software NeuronCore", "NEURON_RT_NUM_CORES=2", "neuronx-cc", ">=2.13"):
        assert text in run.stdout


@pytest.mark.parametrize(
    "before, environment, said",
    [
        ("sys.modules['torch'] = None", {}, ["torch", "cannot be imported", "pip install"]),
        ("sys.modules['torchneuron._C'] = None", {}, ["extension", "missing", "make build"]),
        ("", {"NEURON_RT_NUM_CORES": "x"}, ["autoload", "failed", "NEURON_RT_NUM_CORES='x'", "docs/environment.md"]),
    ],
    ids=["no torch", "no extension", "bad variable"],
)
def test_info_says_what_is_wrong(python, before, environment, said):
    run = python("-c", f"import sys; {before}\n" + MAIN.format(["info"]), **environment)
    assert run.returncode == 1 and (not run.stderr or "RuntimeWarning: The neuron device" in run.stderr)
    assert all(text in run.stdout for text in said)


def test_info_with_autoload_off(python):
    run = python("-m", "torchneuron", "info", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.returncode == 0 and "off (TORCH_DEVICE_BACKEND_AUTOLOAD=0)" in run.stdout


# env ------------------------------------------------------------------------------------------------------------------


def test_env_lists_every_variable_and_its_value(capsys, monkeypatch):
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "7")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert all(v.name in shown for v in env.VARIABLES)
    assert any(line.split()[:2] == ["NEURON_RT_NUM_CORES", "7"] for line in shown.splitlines())


def test_env_without_torch(python):
    run = python("-c", "import sys; sys.modules['torch'] = None\n" + MAIN.format(["env"]))
    assert run.returncode == 0 and "NEURON_RT_NUM_CORES" in run.stdout


def test_table():
    shown = table(("name", "count", "what"), [("a", 1234, "x " * 30), ("long name", 5, "y")], width=48)
    assert shown.splitlines() == [
        "name       count  what",
        "---------  -----  ------------------------------",
        "a          1,234  x x x x x x x x x x x x x x x",
        "                  x x x x x x x x x x x x x x x",
        "long name      5  y",
    ]


def test_empty_table():
    assert table(("name", "count"), []).splitlines()[0] == "name  count"
