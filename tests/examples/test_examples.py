"""The example training script and the demo, in quick variants."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def train(root, python, tmp_path):
    def run(task: str, device: str, **options: int) -> dict:
        out = tmp_path / f"{task}-{device}.json"
        flags = [f"--{name}={value}" for name, value in options.items()]
        done = python(root / "examples/train.py", "--task", task, "--device", device, "--json", out, *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize("task, batch", [("gpt", 2), ("digits", 16)])
def test_both_devices_learn_alike(train, task, batch):
    cpu, neuron = (train(task, device, steps=12, batch=batch) for device in ("cpu", "neuron"))
    assert len(cpu["losses"]) == 12 and cpu["losses"][-1] < cpu["losses"][0]
    assert neuron["losses"] == pytest.approx(cpu["losses"], rel=1e-4)
    assert neuron["throughput"] > 0


def test_seed_decides(train):
    one, again, other = (train("digits", "neuron", steps=3, batch=8, seed=seed)["losses"] for seed in (1, 1, 2))
    assert one == again != other


def test_digits_reach_97_percent(train):
    assert train("digits", "neuron")["accuracy"] >= 0.97


def test_gpt_writes_text(train):
    result = train("gpt", "neuron", steps=2, batch=1)
    assert result["sample"].startswith("The statement ") and len(result["sample"]) == len("The statement ") + 400


@pytest.mark.parametrize("name", ["train.py", "gpt.py", "digits.py"])
def test_no_line_is_special_to_neuron(root, name):
    """Only the usage example at the head of train.py names the device."""
    text = (root / "examples" / name).read_text()
    assert text.count("neuron") == text.count("--device neuron")


def test_runs_in_strict_mode(root, python):
    for task in ("gpt", "digits"):
        run = python(root / "examples/train.py", f"--task={task}", "--steps=2", "--batch=2", TORCH_NEURON_STRICT="1")
        assert run.returncode == 0, run.stderr


def test_demo(root, python, tmp_path):
    run = python(root / "examples/demo.py", "--steps", 3, "--out", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    for said in ("tokens/s", "images/s", "largest deviation", "hand to the host", "accuracy"):
        assert said in run.stdout
    for name in ("gpt-loss.png", "digits-loss.png", "throughput.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert set(json.loads((tmp_path / "out/results.json").read_text())) == {"gpt", "digits"}
