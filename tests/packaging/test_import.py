"""`import torch` loads the device: quietly, quickly, and without harm when something is missing."""

from __future__ import annotations

import statistics

import pytest

BROKEN = "import sys; sys.modules['torchneuron._C'] = None\n"


def test_import_torch_is_enough_and_quiet(python):
    run = python("-c", "import torch; assert torch.ones(2, device='neuron').sum().item() == 2")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_switched_off(python):
    run = python("-c", "import torch; print(hasattr(torch, 'neuron'))", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (run.stdout, run.stderr) == ("False\n", "")


def test_switched_off_and_loaded_by_hand(python):
    code = "import torch, torchneuron.device; print(torch.ones(2, device='neuron').device)"
    run = python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (run.stdout, run.stderr) == ("neuron:0\n", "")


@pytest.mark.parametrize(
    "before, environment",
    [(BROKEN, {}), ("", {"NEURON_RT_NUM_CORES": "many"})],
    ids=["no extension", "bad environment variable"],
)
def test_import_torch_survives(python, before, environment):
    code = before + "import torch; print((torch.ones(2) + 1).tolist(), hasattr(torch, 'neuron'))"
    run = python("-c", code, **environment)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[2.0, 2.0] False\n", "")


def test_reason_is_kept(python):
    run = python("-c", BROKEN + "import torch, torchneuron; print(type(torchneuron._load_error).__name__)")
    assert run.stdout == "ModuleNotFoundError\n"


def test_autoload_takes_at_most_150_ms(python):
    code = (
        "import time, torch, torchneuron; start = time.process_time(); torchneuron._autoload();"
        "print(time.process_time() - start)"
    )
    seconds = [float(python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout) for _ in range(3)]
    assert statistics.median(seconds) < 0.15
