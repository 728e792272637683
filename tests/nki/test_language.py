"""nl.*: creation, constants, random numbers, types and queries (values: test_language_values.py)."""

import numpy as np
import pytest
from nki_reference import NP

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl
from torchneuron.nki import dtypes

F32 = np.float32


def values(kernel, *arrays):
    """What `kernel(*HBM tensors)` returns as an on-chip tile, stored and returned; the same both ways."""

    def k(*args):
        t = kernel(*args)
        s = nl.ndarray(t.shape, t.dtype)
        nisa.tensor_copy(s, t)
        o = nl.ndarray(t.shape, t.dtype, nl.shared_hbm)
        nl.store(o, s)
        return o

    a, b = nki.simulate(k)(*arrays), nki.jit(k)(*arrays)
    np.testing.assert_array_equal(a, b)
    return a


def test_creation(rng):
    np.testing.assert_array_equal(values(lambda: nl.zeros((4, 5), nl.int32)), np.zeros((4, 5), np.int32))
    np.testing.assert_array_equal(values(lambda: nl.ones((4, 5), nl.bfloat16)), np.ones((4, 5), NP["bfloat16"]))
    np.testing.assert_array_equal(values(lambda: nl.full((4, 5), 2.5, nl.float32)), np.full((4, 5), F32(2.5)))
    x = rng.standard_normal((4, 5)).astype(F32)
    np.testing.assert_array_equal(values(lambda a: nl.zeros_like(nl.load(a)), x), np.zeros((4, 5), F32))

    def hbm_of_ones(a):
        h = nl.full((3, 5000), 1.0, nl.float32, nl.hbm)
        return nl.load(h)

    np.testing.assert_array_equal(values(hbm_of_ones, x), np.ones((3, 5000), F32))

    def like(a):
        t = nl.empty_like(nl.load(a), dtype=nl.bfloat16)
        assert t.shape == (4, 5) and t.dtype == nl.bfloat16 and t.buffer is nl.sbuf
        nisa.memset(t, 1)
        return t

    values(like, x)
    u = values(lambda: nl.rand((128, 300), nl.float32))
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and len(np.unique(u)) > 30000


def test_constants(tmp_path, rng):
    c = rng.standard_normal((6, 7)).astype(F32)
    np.save(tmp_path / "c.npy", c)
    np.testing.assert_array_equal(values(lambda: nl.load(nl.shared_constant(c))), c)
    np.testing.assert_array_equal(values(lambda: nl.load(nl.shared_constant(str(tmp_path / "c.npy")))), c)
    np.testing.assert_array_equal(values(lambda: nl.shared_identity_matrix(9)), np.eye(9, dtype=np.uint8))


def test_load_and_store_cast(rng):
    x = rng.standard_normal((10, 12)).astype(F32)
    np.testing.assert_array_equal(values(lambda a: nl.load(a, dtype=nl.bfloat16), x), x.astype(NP["bfloat16"]))

    def k(a):
        o = nl.ndarray((3, 4), nl.float32, nl.shared_hbm)
        nl.store(o, 7.0)
        return o

    np.testing.assert_array_equal(nki.simulate(k)(x), np.full((3, 4), F32(7)))


def test_random_seed_repeats():
    def k(seed):
        nl.random_seed(nl.load(seed))
        return nl.rand((16, 50), nl.float32)

    a, b, c = (values(k, np.array([[s]], np.int32)) for s in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_random_state_round_trip():
    def k():
        state = nl.ndarray((128, 6), nl.uint32)
        nisa.rand_get_state(state)
        first, second = nl.ndarray((128, 40), nl.uint32), nl.ndarray((128, 40), nl.uint32)
        nisa.rng(first, nisa.engine.gpsimd)
        nisa.rand_set_state(state)
        nisa.rng(second, nisa.engine.gpsimd)
        return nl.equal(first, second, dtype=nl.float32)

    assert values(k).all()


def test_rand2_and_rng_types():
    def k():
        t = nl.ndarray((128, 500), nl.float32)
        nisa.rand2(t, -2.0, 3.0)
        return t

    u = values(k)
    assert -2 <= u.min() and u.max() < 3 and abs(u.mean() - 0.5) < 0.05

    def bits():
        t = nl.ndarray((128, 500), nl.uint8)
        nisa.rng(t)
        return t

    assert len(np.unique(values(bits))) == 256


def test_types():
    assert nl.bfloat16 == "bfloat16" and str(nl.bfloat16) == "bfloat16" and nl.bfloat16 in (nl.float32, nl.bfloat16)
    assert {nl.float32: 1}[nl.float32] == 1 and getattr(nl, str(nl.int8)) is nl.int8
    for name, t in NP.items():
        assert np.dtype(getattr(nl, name)) == np.dtype(t)
    for a, b, want in (
        ("int8", "float16", "float16"), ("float16", "bfloat16", "float32"), ("float8_e4m3", "float8_e5m2", "bfloat16"),
        ("int8", "uint8", "int16"), ("int8", "uint16", "int32"), ("int32", "uint32", "float32"),
        ("int16", "int32", "int32"), ("float16", "float32", "float32"),
    ):  # fmt: skip
        assert dtypes.promote(getattr(nl, a), getattr(nl, b)) == want == dtypes.promote(getattr(nl, b), getattr(nl, a))
    with pytest.raises(nki.NkiValidationError, match="int64"):
        dtypes.dtype(np.int64)


def test_tile_size_follows_the_target(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    t = nl.tile_size
    assert (t.pmax, t.psum_fmax, t.psum_num_banks, t.psum_bank_fmax_bytes) == (128, 512, 8, 2048)
    assert t.total_available_sbuf_size == 224 * 1024 - 16384 - 8 and t.sbuf_size_bytes == 28 * 2**20
    monkeypatch.setenv("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "true")
    assert t.psum_num_banks == 7
    assert nl.is_hbm(nl.hbm) and nl.is_hbm(nl.shared_hbm) and nl.is_sbuf(nl.sbuf) and nl.is_psum(nl.psum)
    assert nl.is_on_chip(nl.psum) and not nl.is_on_chip(nl.hbm)
    versions = []
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen2")
    nki.simulate(lambda x: versions.append(nisa.get_nc_version()) or x)(np.zeros((1, 1), F32))
    assert versions == [nisa.nc_version.gen2] and nisa.nc_version.gen2 < nisa.nc_version.gen3


def test_ranges_unroll():
    for r in (nl.affine_range, nl.sequential_range, nl.static_range, nl.range):
        assert list(r(3)) == [0, 1, 2] and list(r(1, 8, 3)) == [1, 4, 7]
    with nl.no_reorder():
        pass


@pytest.mark.parametrize("target, generation", [("trn1", 2), ("trn2", 3), ("trn3", 4)])
def test_versions(target, generation, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    seen = []

    def kernel(x):
        seen.append((nisa.get_nc_version().value, nisa.get_nc_sub_version()))
        return x

    nki.simulate(kernel)(np.zeros((1, 1), F32))
    assert seen == [(generation, 0)]


def test_a_seed_repeats_the_random_bits(run):
    def body(first, second, other, one, two):
        for out, seed in ((first, one), (other, two), (second, one)):
            nisa.set_rng_seed(seed)
            nisa.rng(out, nisa.engine.vector)

    seeds = [np.full((1, 1), s, np.int32) for s in (7, 8)]
    first, second, other = run(body, [((128, 64), "uint32")] * 3, *seeds)
    np.testing.assert_array_equal(first, second)
    assert (first != other).mean() > 0.99
    assert len(np.unique(first)) > 0.99 * first.size  # partitions have streams of their own
    bits = np.unpackbits(first.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01
