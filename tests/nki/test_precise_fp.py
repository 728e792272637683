"""NKI_PRECISE_FP=0: narrow floats on chip keep fp32's digits; types, shapes and results' types stay."""

import ml_dtypes
import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl


@nki.jit
def third(x):
    t = nl.ndarray(x.shape, nl.bfloat16, nl.sbuf)
    nisa.tensor_scalar(t, _loaded(x), nl.multiply, 1.0 / 3.0)
    assert t.dtype == nl.bfloat16
    half = t.slice(1, 0, 4)
    nisa.tensor_scalar(half, half, nl.multiply, 3.0)
    out = nl.ndarray(x.shape, nl.float32, nl.shared_hbm)
    nisa.dma_copy(out, t)
    narrow = nl.ndarray(x.shape, t.dtype, nl.shared_hbm)
    nisa.dma_copy(narrow, t)
    return out, narrow


def _loaded(x):
    t = nl.ndarray(x.shape, x.dtype, nl.sbuf)
    nisa.dma_copy(t, x)
    return t


@nki.jit
def reinterpreted(x):
    t = _loaded(x)
    nisa.memset(t.view(nl.uint16), 0)
    return x


@pytest.mark.parametrize("precise", ["1", "0"])
def test_on_chip_values(precise, monkeypatch, rng):
    monkeypatch.setenv("NKI_PRECISE_FP", precise)
    x = rng.standard_normal((128, 8)).astype(np.float32)
    out, narrow = nki.simulate(third)(x)
    want = x * np.float32(1 / 3)
    if precise == "1":
        want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
    want[:, :4] *= np.float32(3)
    if precise == "1":
        want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(out, want)
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, want.astype(ml_dtypes.bfloat16))


def test_bytes_of_a_kept_type_are_refused(monkeypatch, rng):
    x = rng.standard_normal((4, 8)).astype(ml_dtypes.bfloat16)
    nki.simulate(reinterpreted)(x)
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    with pytest.raises(nki.NkiError, match="NKI_PRECISE_FP=0"):
        nki.simulate(reinterpreted)(x)
