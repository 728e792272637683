"""nl.*: creation, operators on tiles, reductions, queries, against NumPy."""

import math

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


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "maximum": np.maximum,
    "minimum": np.minimum, "power": np.power, "fmod": np.fmod, "mod": np.mod, "equal": np.equal,
    "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
    "greater_equal": np.greater_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor, "abs_max": lambda a, b: np.where(np.abs(a) > np.abs(b), a, b),
    "abs_min": lambda a, b: np.where(np.abs(a) < np.abs(b), a, b),
}  # fmt: skip


@pytest.mark.parametrize("op", BINARY)
def test_binary(rng, op):
    a, b = rng.uniform(0.5, 4, (64, 20)).astype(F32), rng.uniform(0.5, 3, (64, 20)).astype(F32)
    f, g = getattr(nl, op), BINARY[op]
    np.testing.assert_allclose(values(lambda x, y: f(nl.load(x), nl.load(y)), a, b), g(a, b).astype(F32), rtol=1e-6)
    np.testing.assert_allclose(values(lambda x: f(nl.load(x), 2.0), a), g(a, F32(2)).astype(F32), rtol=1e-6)
    np.testing.assert_allclose(values(lambda x: f(1.5, nl.load(x)), a), g(F32(1.5), a).astype(F32), rtol=1e-6)
    column = b[:, :1].copy()
    np.testing.assert_allclose(
        values(lambda x, y: f(nl.load(x), nl.load(y)), a, column), g(a, column).astype(F32), rtol=1e-6
    )


@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bitwise(rng, op):
    a, b = rng.integers(0, 1000, (32, 9), dtype=np.int32), rng.integers(0, 8, (32, 9), dtype=np.int32)
    got = values(lambda x, y: getattr(nl, op)(nl.load(x), nl.load(y)), a, b)
    np.testing.assert_array_equal(got, getattr(np, op)(a, b))


UNARY = {
    "abs": np.abs, "square": np.square, "exp": np.exp, "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0), "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "arctan": np.arctan, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc,
    "negative": np.negative, "sign": np.sign, "logical_not": np.logical_not, "copy": lambda x: x,
    "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.logaddexp(x, 0), "reciprocal": lambda x: 1 / x,
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)), "erf": np.vectorize(math.erf),
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_dx": lambda x: 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "silu_dx": lambda x: (s := 1 / (1 + np.exp(-x))) + x * s * (1 - s),
    "gelu_apprx_sigmoid_dx": lambda x: (s := 1 / (1 + np.exp(-1.702 * x))) + 1.702 * x * s * (1 - s),
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_unary(rng, op):
    x = rng.uniform(-20 if op in ("sin", "cos") else -3, 20 if op in ("sin", "cos") else 3, (32, 40)).astype(F32)
    got = values(lambda a: getattr(nl, op)(nl.load(a)), x)
    np.testing.assert_allclose(got, UNARY[op](x.astype(np.float64)).astype(F32), rtol=2e-6, atol=5e-7)


def test_positive_unary_and_invert(rng):
    x = rng.uniform(0.1, 9, (32, 40)).astype(F32)
    for op, f in (("log", np.log), ("sqrt", np.sqrt), ("rsqrt", lambda v: 1 / np.sqrt(v))):
        np.testing.assert_allclose(values(lambda a, op=op: getattr(nl, op)(nl.load(a)), x), f(x), rtol=1e-6, atol=1e-6)
    i = rng.integers(-99, 99, (8, 8), dtype=np.int32)
    np.testing.assert_array_equal(values(lambda a: nl.invert(nl.load(a)), i), ~i)


@pytest.mark.parametrize("op", ["sum", "max", "min", "mean", "prod"])
def test_reductions(rng, op):
    x = rng.uniform(0.9, 1.1, (64, 4, 8)).astype(F32)
    f = getattr(np, op)
    got = values(lambda a: getattr(nl, op)(nl.load(a), axis=[1, 2]), x)
    np.testing.assert_allclose(got, f(x, axis=(1, 2))[:, None], rtol=1e-5)
    got = values(lambda a: getattr(nl, op)(nl.load(a), axis=2), x)
    np.testing.assert_allclose(got, f(x, axis=2), rtol=1e-5)
    got = values(lambda a: getattr(nl, op)(nl.load(a), axis=2, keepdims=True), x)
    np.testing.assert_allclose(got, f(x, axis=2, keepdims=True), rtol=1e-5)


def test_var_all_softmax_rms_norm(rng):
    x, w = rng.standard_normal((64, 50)).astype(F32), rng.standard_normal((1, 50)).astype(F32)
    np.testing.assert_allclose(values(lambda a: nl.var(nl.load(a), axis=1), x), x.var(1, keepdims=True), rtol=1e-4)
    y = rng.standard_normal((16, 3, 20)).astype(F32)
    np.testing.assert_allclose(values(lambda a: nl.var(nl.load(a), axis=2), y), y.var(2, keepdims=True), rtol=1e-4)
    z = (rng.uniform(size=(64, 4)) < 0.8).astype(F32)
    np.testing.assert_array_equal(values(lambda a: nl.all(nl.load(a), axis=1), z), z.all(1)[:, None].astype(F32))
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(values(lambda a: nl.softmax(nl.load(a)), x), e / e.sum(1, keepdims=True), rtol=1e-5)
    want = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w
    got = values(lambda a, b: nl.rms_norm(nl.load(a), nl.load(b), axis=1, n=50), x, w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_where_dropout_expand_broadcast(rng):
    x, y = (rng.standard_normal((32, 6)).astype(F32) for _ in range(2))
    c = (rng.uniform(size=(32, 6)) < 0.5).astype(F32)
    got = values(lambda a, b, p: nl.where(nl.load(p), nl.load(a), nl.load(b)), x, y, c)
    np.testing.assert_array_equal(got, np.where(c != 0, x, y))
    got = values(lambda a, p: nl.where(nl.load(p), nl.load(a), -1.0), x, c)
    np.testing.assert_array_equal(got, np.where(c != 0, x, F32(-1)))
    dropped = values(lambda a: nl.dropout(nl.load(a), 0.5), np.ones((128, 200), F32))
    assert set(np.unique(dropped)) == {0, 1} and abs(dropped.mean() - 0.5) < 0.03
    got = values(lambda a: nl.broadcast_to(nl.expand_dims(nl.load(a), 1), (32, 4, 6)), x)
    np.testing.assert_array_equal(got, np.broadcast_to(x[:, None], (32, 4, 6)))
    row = x[:1].copy()
    np.testing.assert_array_equal(values(lambda a: nl.broadcast_to(nl.load(a), (100, 6)), row), np.repeat(row, 100, 0))


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


def test_transpose_matmul_load_transpose(rng):
    a, b = rng.standard_normal((32, 20)).astype(F32), rng.standard_normal((32, 30)).astype(F32)
    np.testing.assert_array_equal(values(lambda x: nl.transpose(nl.load(x)), a), a.T)
    np.testing.assert_array_equal(values(lambda x: nl.load_transpose2d(x), a), a.T)
    got = values(lambda x, y: nl.matmul(nl.load(x), nl.load(y), transpose_x=True), a, b)
    np.testing.assert_allclose(got, a.T @ b, rtol=1e-5, atol=1e-5)
    at = a.T.copy()
    got = values(lambda x, y: nl.matmul(nl.load(x), nl.load(y)), at, b)
    np.testing.assert_allclose(got, a.T @ b, rtol=1e-5, atol=1e-5)


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
