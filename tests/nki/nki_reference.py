"""What tests of NKI share: kernels around instructions, NumPy's types, distances."""

import ml_dtypes
import numpy as np

import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

NP = {
    "float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int32": np.int32,
    "uint32": np.uint32, "int16": np.int16, "uint16": np.uint16, "int8": np.int8, "uint8": np.uint8,
    "float8_e4m3": ml_dtypes.float8_e4m3, "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


def kernel_of(body, outputs, psum=()):
    """A kernel that loads its arguments to SBUF (arguments whose number is in psum: on to PSUM), gives `body` the tiles
    and empty SBUF tiles of `outputs` [(shape, dtype)], and returns what body wrote there."""

    def kernel(*args):
        tiles = []
        for i, a in enumerate(args):
            t = nl.ndarray(a.shape, a.dtype, nl.sbuf)
            nisa.dma_copy(t, a)
            if i in psum:
                p = nl.ndarray(a.shape, a.dtype, nl.psum)
                nisa.tensor_copy(p, t)
                t = p
            tiles.append(t)
        results = [nl.ndarray(shape, dtype, nl.sbuf) for shape, dtype in outputs]
        body(*results, *tiles)
        out = []
        for r in results:
            h = nl.ndarray(r.shape, r.dtype, nl.shared_hbm)
            nisa.dma_copy(h, r)
            out.append(h)
        return tuple(out)

    return kernel


def ulps(got, want):
    """Largest distance in units of the last place of fp32 `want`."""
    got, want = np.float32(got), np.float32(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    distance = np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want)).astype(np.float64)
    return float(np.where(same, 0, distance).max())
