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
    "setting",
    [
        "NEURON_RT_NUM_CORES=many",
        "NEURON_RT_VISIBLE_CORES=3-1",
        "NEURON_RT_VISIBLE_CORES=-1",
        "TORCH_NEURON_FUSION=nonsense",
        "TORCH_NEURON_MEMORY_BYTES=99999999999999999999999",
        "NEURON_SIMD=fast",
        "NEURON_PLATFORM_TARGET_OVERRIDE=trn9",
    ],
)
@pytest.mark.parametrize("options", [[], ["-W", "error"]], ids=["", "warnings are errors"])
def test_a_setting_that_cannot_be_read_is_named(python, setting, options):
    name, value = setting.split("=")
    code = "import torch; print((torch.ones(2) + 1).tolist(), hasattr(torch, 'neuron'))"
    run = python(*options, "-c", code, **{name: value})
    assert (run.returncode, run.stdout) == (0, "[2.0, 2.0] False\n")
    assert options or f"RuntimeWarning: The neuron device is not available: {name}='{value}': expected" in run.stderr


def test_an_empty_setting_is_none(python):
    names = ["TORCH_NEURON_FUSION", "TORCH_NEURON_MEMORY_BYTES", "NEURON_RT_VISIBLE_CORES", "TORCH_NEURON_CACHE_DIR"]
    code = (
        "import torch, torchneuron.env as env; x = torch.ones(8, device='neuron'); (x * 2 + 1).sum().item();"
        "print(torch.neuron.fusion_stats()['ops_fused'] > 0, env.NKI_PRECISE_FP.get())"
    )
    run = python("-c", code, **dict.fromkeys([*names, "NKI_PRECISE_FP"], ""))
    assert (run.stdout, run.stderr) == ("True True\n", "")


def test_import_torch_survives(python):
    code = BROKEN + "import torch; print((torch.ones(2) + 1).tolist(), hasattr(torch, 'neuron'))"
    run = python("-c", code)
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
