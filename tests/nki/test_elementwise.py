"""Elementwise instructions against NumPy statements of the specification: compute in fp32, round once to dst."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from nki_reference import NP, ulps

import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32


def abs_max(a, b):
    return np.where(np.abs(a) > np.abs(b), a, b)


def abs_min(a, b):
    return np.where(np.abs(a) < np.abs(b), a, b)


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "less": np.less, "less_equal": np.less_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor, "abs_max": abs_max, "abs_min": abs_min,
}  # fmt: skip
BITWISE = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}
FLOATS = ["float32", "bfloat16", "float16"]


def saturate(x, dtype):
    info = np.iinfo(dtype)
    return np.clip(np.rint(np.nan_to_num(x, nan=0.0)), info.min, info.max).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", BINARY)
def test_tensor_tensor(run, rng, op, dtype):
    a, b = (rng.integers(-4, 5, (128, 77)).astype(NP[dtype]) / NP[dtype](2) for _ in range(2))
    got = run(lambda o, x, y: nisa.tensor_tensor(o, x, y, getattr(nl, op)), [((128, 77), dtype)], a, b)
    want = BINARY[op](a.astype(F32), b.astype(F32)).astype(F32).astype(NP[dtype])
    np.testing.assert_array_equal(got, want)


def test_tensor_tensor_rounds_once_to_dst(run, rng):
    a, b = rng.standard_normal((64, 33)).astype(F32), rng.standard_normal((64, 33)).astype(F32)
    for dtype in ("bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn"):
        got = run(lambda o, x, y: nisa.tensor_tensor(o, x, y, nl.multiply), [((64, 33), dtype)], a, b)
        np.testing.assert_array_equal(got.view(np.uint8), (a * b).astype(NP[dtype]).view(np.uint8))


@pytest.mark.parametrize("op", BITWISE)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint16", "int8", "uint8"])
def test_bitwise(run, rng, op, dtype):
    info = np.iinfo(NP[dtype])
    a, b = (rng.integers(info.min, info.max, (32, 50), dtype=NP[dtype], endpoint=True) for _ in range(2))
    got = run(lambda o, x, y: nisa.tensor_tensor(o, x, y, getattr(nl, op)), [((32, 50), dtype)], a, b)
    np.testing.assert_array_equal(got, BITWISE[op](a, b))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint16", "int8", "uint8"])
def test_shifts_are_logical_and_invert(run, rng, dtype):
    t, bits = NP[dtype], np.dtype(NP[dtype]).itemsize * 8
    a = rng.integers(np.iinfo(t).min, np.iinfo(t).max, (16, 20), dtype=t, endpoint=True)
    unsigned = a.view(f"u{bits // 8}")
    shift = [((16, 20), dtype)]
    left = run(lambda o, x: nisa.tensor_scalar(o, x, nl.left_shift, 3), shift, a)
    right = run(lambda o, x: nisa.tensor_scalar(o, x, nl.right_shift, 3), shift, a)
    inverted = run(lambda o, x: nisa.tensor_scalar(o, x, nl.invert, 0), shift, a)
    np.testing.assert_array_equal(left.view(unsigned.dtype), (unsigned << 3).astype(unsigned.dtype))
    np.testing.assert_array_equal(right.view(unsigned.dtype), unsigned >> 3)
    np.testing.assert_array_equal(inverted, ~a)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_32bit_integers_are_exact_on_gpsimd_and_fp32_on_vector(run, rng, dtype):
    t = NP[dtype]
    a, b = (rng.integers(np.iinfo(t).min, np.iinfo(t).max, (128, 9), dtype=t, endpoint=True) for _ in range(2))
    out = [((128, 9), dtype)]
    with np.errstate(over="ignore"):
        for op, f in (("add", np.add), ("subtract", np.subtract), ("multiply", np.multiply), ("maximum", np.maximum)):
            got = run(lambda o, x, y, op=op: nisa.tensor_tensor(o, x, y, getattr(nl, op)), out, a, b)
            np.testing.assert_array_equal(got, f(a, b))
    got = run(lambda o, x, y: nisa.tensor_tensor(o, x, y, nl.add, engine=nisa.engine.vector), out, a, b)
    np.testing.assert_array_equal(got, saturate((a.astype(F32) + b.astype(F32)).astype(np.float64), t))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_float_to_integer_rounds_to_even_and_saturates(run, dtype):
    x = np.array(
        [[0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 127.5, 128, 255.5, 1e10, -1e10, 3e38, np.inf, -np.inf, 65535.5]], F32
    )
    got = run(lambda o, v: nisa.tensor_copy(o, v), [(x.shape, dtype)], x)
    np.testing.assert_array_equal(got, saturate(x.astype(np.float64), NP[dtype]))


@pytest.mark.parametrize("dtype", list(NP))
def test_tensor_copy_keeps_bits_and_casts_through_fp32(run, rng, dtype):
    raw = rng.integers(0, 256, (64, 4 * np.dtype(NP[dtype]).itemsize), dtype=np.uint8)
    a = raw.view(NP[dtype])
    same = run(lambda o, x: nisa.tensor_copy(o, x), [(a.shape, dtype)], a)
    np.testing.assert_array_equal(same.view(np.uint8), raw)
    wide = run(lambda o, x: nisa.tensor_copy(o, x), [(a.shape, "float32")], a)
    np.testing.assert_array_equal(wide, a.astype(F32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn"])
def test_narrowing_matches_ml_dtypes_everywhere(run, dtype):
    """All exponents, around halfway points, specials."""
    with np.errstate(over="ignore"):
        x = np.concatenate(
            [np.ldexp(m, np.arange(-150, 128)) for m in (1, 1.0625, 1.125, 1.1875, 1.5, 1.75, 1.9375, 1.97)]
        )
    x = np.concatenate([x, -x, [0.0, -0.0, np.inf, -np.inf]]).astype(F32)
    x = np.concatenate([x, np.nextafter(x, F32(np.inf)), np.nextafter(x, F32(-np.inf))])[None, :]
    with np.errstate(over="ignore"):
        want = x.astype(NP[dtype])
    got = run(lambda o, v: nisa.tensor_copy(o, v), [(x.shape, dtype)], x)
    nan = np.isnan(want.astype(F32))
    np.testing.assert_array_equal(np.isnan(got.astype(F32)), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint8), want[~nan].view(np.uint8))


@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
def test_tensor_scalar_two_operators(run, rng, reverse):
    a, s = rng.standard_normal((128, 40)).astype(F32), rng.standard_normal((128, 1)).astype(F32)

    def body(o, x, v):
        nisa.tensor_scalar(o, x, nl.subtract, v, reverse[0], nl.multiply, 3.0, reverse[1])

    got = run(body, [((128, 40), "float32")], a, s)
    np.testing.assert_array_equal(got, (s - a if reverse[0] else a - s) * F32(3))


def test_tensor_scalar_unary_operators(run, rng):
    a = rng.uniform(0.25, 4, (32, 16)).astype(F32)
    for op, want in (("square", a * a), ("reciprocal", F32(1) / a), ("rsqrt", F32(1) / np.sqrt(a)), ("abs", np.abs(a))):
        got = run(lambda o, x, op=op: nisa.tensor_scalar(o, x, getattr(nl, op), 0.0), [((32, 16), "float32")], a)
        np.testing.assert_array_equal(got, want)
    got = run(lambda o, x: nisa.tensor_scalar(o, x, nl.power, 0.5), [((32, 16), "float32")], a)
    assert ulps(got, np.sqrt(a)) <= 1


@pytest.mark.parametrize("shape", [(1, 1), (128, 1), (7, 1), (128, 2000), (3, 1025)])
def test_shapes_of_tensor_scalar(run, rng, shape):
    a = rng.standard_normal(shape).astype(F32)
    got = run(
        lambda o, x: nisa.tensor_scalar(o, x, nl.multiply, 2.0, op1=nl.add, operand1=1.0), [(shape, "float32")], a
    )
    np.testing.assert_array_equal(got, a * F32(2) + F32(1))


def test_scalar_tensor_tensor(run, rng):
    a, b, s = (rng.standard_normal(n).astype(F32) for n in ((100, 30), (100, 30), (100, 1)))

    def body(o, x, y, v):
        nisa.scalar_tensor_tensor(o, x, nl.multiply, v, nl.subtract, y, reverse1=True)

    np.testing.assert_array_equal(run(body, [((100, 30), "float32")], a, b, s), b - a * s)


ACTIVATIONS = {
    "copy": lambda x: x, "square": lambda x: x * x, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0), "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_dx": lambda x: 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)), "silu": lambda x: x / (1 + np.exp(-x)),
    "silu_dx": lambda x: (s := 1 / (1 + np.exp(-x))) + x * s * (1 - s), "tanh": np.tanh,
    "gelu_apprx_sigmoid_dx": lambda x: (s := 1 / (1 + np.exp(-1.702 * x))) + 1.702 * x * s * (1 - s),
    "softplus": lambda x: np.logaddexp(x, 0), "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "erf": np.vectorize(math.erf), "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), "exp": np.exp,
    "arctan": np.arctan, "sign": np.sign, "abs": np.abs,
}  # fmt: skip
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("op", list(ACTIVATIONS) + list(POSITIVE))
def test_activation_functions(run, rng, op):
    x = np.concatenate([rng.uniform(-8, 8, 4000), np.linspace(-3, 3, 2001), [0.0, 1.0, -1.0]]).astype(F32)
    if op in POSITIVE:
        x = np.concatenate([np.abs(x) + F32(1e-3), np.geomspace(1e-18, 1e18, 500).astype(F32)])
    x = x[None, :]
    want = (ACTIVATIONS | POSITIVE)[op](x.astype(np.float64))
    got = run(lambda o, v: nisa.activation(o, getattr(nl, op), v), [(x.shape, "float32")], x)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=4e-7)


def test_exp_and_log_over_their_range(run):
    x = np.linspace(-103, 88.7, 5001).astype(F32)[None, :]
    got = run(lambda o, v: nisa.activation(o, nl.exp, v), [(x.shape, "float32")], x)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=3e-7, atol=3e-45)
    y = np.geomspace(1e-44, 3e38, 5001).astype(F32)[None, :]
    got = run(lambda o, v: nisa.activation(o, nl.log, v), [(y.shape, "float32")], y)
    np.testing.assert_allclose(got, np.log(y.astype(np.float64)), rtol=3e-7, atol=1e-7)


def test_special_values_of_activations(run):
    x = np.array([[np.inf, -np.inf, np.nan, 0.0]], F32)
    for op, want in (
        ("exp", [np.inf, 0, np.nan, 1]), ("log", [np.inf, np.nan, np.nan, -np.inf]), ("tanh", [1, -1, np.nan, 0]),
        ("sigmoid", [1, 0, np.nan, 0.5]), ("erf", [1, -1, np.nan, 0]), ("reciprocal", [0, 0, np.nan, np.inf]),
    ):  # fmt: skip
        got = run(lambda o, v, op=op: nisa.activation(o, getattr(nl, op), v), [(x.shape, "float32")], x)
        np.testing.assert_array_equal(got, np.array([want], F32))


def test_sin_goes_on_as_a_cubic_outside_pi(run):
    """ScalarE's sine is right on [-pi, pi]; at 9.0 it gives about 27.65. nl.sin reduces the range first."""
    x = np.linspace(-np.pi, np.pi, 999).astype(F32)[None, :]
    got = run(lambda o, v: nisa.activation(o, nl.sin, v), [(x.shape, "float32")], x)
    np.testing.assert_allclose(got, np.sin(x.astype(np.float64)), atol=3e-7)
    nine = np.full((1, 1), 9.0, F32)
    assert abs(run(lambda o, v: nisa.activation(o, nl.sin, v), [((1, 1), "float32")], nine)[0, 0] - 27.65) < 0.01


def test_activation_scale_bias_and_accumulation(run, rng):
    x, bias, scale = (rng.standard_normal(n).astype(F32) for n in ((128, 600), (128, 1), (128, 1)))

    def body(o, s1, s2, v, b, k):
        nisa.activation(o, nl.tanh, v, bias=b, scale=k, reduce_op=nl.add, reduce_res=s1,
                        reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip
        nisa.activation(o, nl.copy, o, reduce_op=nl.add, reduce_res=s2, reduce_cmd=nisa.reduce_cmd.reduce)

    out = [((128, 600), "float32"), ((128, 1), "float32"), ((128, 1), "float32")]
    y, once, twice = run(body, out, x, bias, scale)
    want = np.tanh((x * scale + bias).astype(np.float64))
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(once[:, 0], want.sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(twice[:, 0], 2 * want.sum(1), rtol=1e-4, atol=1e-4)


def test_activation_reduce_result_may_alias_its_input(run, rng):
    """The register is stored after all elements are read: a [P, 1] tile can be input, result and sum."""
    x = rng.standard_normal((128, 1)).astype(F32)

    def body(o, v):
        nisa.tensor_copy(o, v)
        nisa.activation_reduce(o, nl.square, o, nl.add, o)

    np.testing.assert_array_equal(run(body, [((128, 1), "float32")], x), x * x)


def test_activate2(run, rng):
    x = rng.standard_normal((64, 50)).astype(F32)

    def body(o, r, v):
        nisa.activate2(o, nl.prelu, v, 2.0, 0.5, nl.multiply, nl.subtract, relu_param=0.25, reduce_op=nl.maximum,
                       reduce_res=r, reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip

    y, r = run(body, [((64, 50), "float32"), ((64, 1), "float32")], x)
    z = x * F32(2) - F32(0.5)
    want = np.where(z > 0, z, F32(0.25) * z)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(r[:, 0], want.max(1))


def test_exponential(run, rng):
    x = rng.standard_normal((128, 100)).astype(F32)
    m = x.max(1, keepdims=True)

    def body(o, r, v, h):
        nisa.exponential(o, v, h, r, nisa.reduce_cmd.reset_reduce)

    y, r = run(body, [(x.shape, "float32"), ((128, 1), "float32")], x, m)
    want = np.exp((x - m).astype(np.float64))
    np.testing.assert_allclose(y, want, rtol=3e-7)
    np.testing.assert_allclose(r[:, 0], want.sum(1), rtol=1e-6)


def test_reciprocal(run, rng):
    x = rng.uniform(0.1, 9, (128, 65)).astype(F32)
    np.testing.assert_array_equal(run(lambda o, v: nisa.reciprocal(o, v), [(x.shape, "float32")], x), F32(1) / x)


@pytest.mark.parametrize("dtype", list(NP))
def test_memset(run, dtype):
    got = run(lambda o: nisa.memset(o, 3), [((128, 5), dtype)])
    np.testing.assert_array_equal(got, np.full((128, 5), 3, NP[dtype]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_tensor_copy_predicated(run, rng, dtype, reverse):
    a, b = (rng.integers(-9, 9, (128, 30)).astype(NP[dtype]) for _ in range(2))
    p = rng.integers(0, 2, (128, 30), dtype=np.uint8)

    def body(o, x, y, q):
        nisa.tensor_copy(o, y)
        nisa.tensor_copy_predicated(o, x, q, reverse_pred=reverse)

    np.testing.assert_array_equal(run(body, [(a.shape, dtype)], a, b, p), np.where((p == 0) == reverse, a, b))


def test_select_reduce(run, rng):
    a, s = rng.standard_normal((128, 40)).astype(F32), rng.standard_normal((128, 1)).astype(F32)
    p = rng.integers(0, 2, (128, 40), dtype=np.uint8)

    def body(o, r, q, x, v):
        nisa.select_reduce(o, q, x, v, r, nisa.reduce_cmd.reset_reduce)

    y, r = run(body, [(a.shape, "float32"), ((128, 1), "float32")], p, a, s)
    want = np.where(p != 0, a, s)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(r[:, 0], want.max(1))


def test_range_select(run, rng):
    a = rng.standard_normal((128, 64)).astype(F32)
    lo, hi = rng.integers(0, 30, (128, 1)).astype(F32), rng.integers(30, 64, (128, 1)).astype(F32)

    def body(o, r, x, b0, b1):
        nisa.range_select(o, x, nl.greater_equal, nl.less, b0, b1, reduce_res=r, range_start=5)

    y, r = run(body, [(a.shape, "float32"), ((128, 1), "float32")], a, lo, hi)
    i = np.arange(64) + 5
    want = np.where((i >= lo) & (i < hi), a, np.finfo(F32).min)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(r[:, 0], want.max(1))


def test_affine_select_and_iota(run, rng):
    a = rng.standard_normal((128, 6, 20)).astype(F32)
    value = 3 - 2 * np.arange(128)[:, None, None] + 10 * np.arange(6)[:, None] + np.arange(20)

    def select(o, x):
        nisa.affine_select(o, [[10, 6], [1, 20]], -2, x, -1.0, nl.greater_equal, 3)

    np.testing.assert_array_equal(run(select, [(a.shape, "float32")], a), np.where(value >= 0, a, F32(-1)))
    for dtype in ("int32", "float32", "bfloat16"):
        got = run(lambda o: nisa.iota(o, [[10, 6], [1, 20]], 3, -2), [(a.shape, dtype)])
        np.testing.assert_array_equal(got, value.astype(NP[dtype]))


def test_dropout(run, rng):
    x = rng.uniform(1, 2, (128, 1000)).astype(F32)
    out = [(x.shape, "float32")]
    y = run(lambda o, v: nisa.dropout(o, v, 0.3), out, x)
    kept = y != 0
    np.testing.assert_array_equal(y[kept], x[kept])
    assert abs(1 - kept.mean() - 0.3) < 0.01
    assert not run(lambda o, v: nisa.dropout(o, v, 1.0), out, x).any()
    np.testing.assert_array_equal(run(lambda o, v: nisa.dropout(o, v, 0.0), out, x), x)


def test_views_strided_broadcast_and_multidimensional(run, rng):
    a = rng.standard_normal((64, 4, 10)).astype(F32)
    b = rng.standard_normal((64, 10)).astype(F32)

    def body(o, x, y):
        nisa.tensor_tensor(o.permute((0, 2, 1)), x.permute((0, 2, 1)), y.expand_dim(2).broadcast(2, 4), nl.add)

    np.testing.assert_array_equal(run(body, [(a.shape, "float32")], a, b), a + b[:, None, :])
    got = run(lambda o, x, y: nisa.tensor_copy(o, x[:, 1:4:2, ::3]), [((64, 2, 4), "float32")], a, b)
    np.testing.assert_array_equal(got, a[:, 1:4:2, ::3])


def test_overlapping_result_reads_before_it_writes(run, rng):
    a = rng.standard_normal((32, 3000)).astype(F32)

    def body(o, x):
        nisa.tensor_copy(o, x)
        nisa.tensor_tensor(o[:, 1:3000], o[:, 0:2999], o[:, 1:3000], nl.add)

    want = a.copy()
    want[:, 1:] = a[:, :-1] + a[:, 1:]
    np.testing.assert_array_equal(run(body, [(a.shape, "float32")], a), want)


def test_partition_groups_may_differ(run, rng):
    a = rng.standard_normal((128, 8)).astype(F32)

    def body(o, x):
        nisa.tensor_scalar(o[64:96], x[32:64], nl.multiply, 2.0)
        nisa.tensor_copy(o[0:64], x[64:128])
        nisa.tensor_copy(o[96:128], x[0:32])

    np.testing.assert_array_equal(
        run(body, [(a.shape, "float32")], a), np.concatenate([a[64:], a[32:64] * F32(2), a[:32]])
    )


def test_results_equal_torch_on_bfloat16_chains(run):
    torch.manual_seed(0)
    x = torch.randn(128, 64, dtype=torch.bfloat16)

    def body(o, v):
        nisa.tensor_scalar(o, v, nl.multiply, 0.3)
        nisa.tensor_tensor(o, o, v, nl.add)

    got = run(body, [((128, 64), "bfloat16")], x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    want = (x * 0.3) + x
    np.testing.assert_array_equal(got.view(np.uint16), want.view(torch.uint16).numpy())


@pytest.mark.parametrize("shape", [(4, 1), (4, 3)])
def test_activation_keeps_the_sign_of_zero(run, shape):
    """Also of tiles with one element a partition, which go through the functions as one vector."""
    zeros = np.full(shape, -0.0, F32)
    assert np.signbit(run(lambda o, v: nisa.activation(o, nl.copy, v), [(shape, "float32")], zeros)).all()
    assert (run(lambda o, v: nisa.activation(o, nl.reciprocal, v), [(shape, "float32")], zeros) == -np.inf).all()
