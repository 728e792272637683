"""Fixtures: run instructions on tiles, step by step and traced."""

import os
import sys

import numpy as np
import pytest

import torchneuron.nki as nki

sys.path.insert(0, os.path.dirname(__file__))
from nki_reference import kernel_of  # noqa: E402


@pytest.fixture(params=["step", "traced"])
def run(request, monkeypatch):
    """run(body, outputs, *arrays, target="trn3"): the arrays that body wrote; once step by step, once traced."""

    def call(body, outputs, *arrays, target="trn3", psum=()):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        k = nki.jit(kernel_of(body, outputs, psum))
        if request.param == "step":
            results = nki.simulate(k)(*arrays)
        else:
            assert k.trace(arrays, {}) is not None, "the kernel can be traced"
            results = k(*arrays)
        return results[0] if len(results) == 1 else results

    return call


@pytest.fixture
def rng():
    return np.random.default_rng(0)
