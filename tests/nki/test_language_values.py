"""Every function of nl that computes values, against NumPy: over types, shapes, views, memories and edge values.

The tables state the specification: arithmetic in fp32, results rounded to even (integers: also saturated), bitwise
operators on bit patterns, tiles of 32-bit integers exactly.
"""

import math
import operator

import ml_dtypes
import numpy as np
import pytest
from nki_reference import NP

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32, F64 = np.float32, np.float64
FLOATS, INTS = ("float32", "bfloat16", "float16"), ("int32", "uint32", "int8", "uint8")
WIDE_INTS = ("int32", "uint32")
OTHER_TYPES = ("float32", "int32", "bfloat16")
SHAPES = ((1, 1), (128, 1), (3, 5), (2, 3, 4))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def is_int(dtype):
    return dtype in INTS


def cast(x, dtype):
    """x as engines store it."""
    if not is_int(dtype):
        return np.asarray(x).astype(F32).astype(NP[dtype])
    info = np.iinfo(NP[dtype])
    return np.clip(np.rint(np.nan_to_num(np.asarray(x, F64), nan=0.0)), info.min, info.max).astype(NP[dtype])


def edges(dtype):
    """Zeros, signs, halves, equal magnitudes, limits, and for floats also what is not finite or subnormal."""
    if is_int(dtype):
        i = np.iinfo(NP[dtype])
        x = [0, 1, 2, 3, 7, 100, -1, -2, -3, -100, i.max, i.max - 1, i.min, i.min + 1]
        return np.unique(np.clip(x, i.min, i.max)).astype(NP[dtype])
    i = ml_dtypes.finfo(NP[dtype])
    x = [0.0, -0.0, 0.5, -0.5, 1, -1, 1.5, 2.5, -2.5, 3, -3, 7.25, -20, 30, np.inf, -np.inf, np.nan]
    x += [float(v) for v in (i.max, i.min, i.tiny, i.smallest_subnormal, -i.smallest_subnormal)]
    return np.array(x).astype(NP[dtype])


def filled(shape, values, turn=0):
    return np.resize(np.roll(values, turn), shape)


def random(rng, shape, dtype, low=-3, high=3):
    return cast(rng.uniform(max(low, 0) if dtype[0] == "u" else low, high, shape), dtype)


def both(body, *arrays):
    """Arrays of the tiles that body returns for SBUF tiles of `arrays`: step by step and traced, which are the same."""

    def kernel(*args):
        out = []
        tiles = body(*(nl.load(a) for a in args))
        for t in tiles if isinstance(tiles, (tuple, list)) else [tiles]:
            out.append(nl.ndarray(t.shape, t.dtype, nl.shared_hbm))
            nl.store(out[-1], nl.copy(t))
        return tuple(out)

    stepped, traced = nki.simulate(kernel)(*arrays), nki.jit(kernel)(*arrays)
    for s, t in zip(stepped, traced, strict=True):
        assert s.dtype == t.dtype and s.tobytes() == t.tobytes()
    return traced


def check(got, want, dtype, rtol=0.0, atol=0.0, signed=False, label=None):
    """got is `want` rounded to dtype, or what a value within the tolerances rounds to. NaNs are at the same places;
    signed: zeros have the same sign."""
    want = np.asarray(want)
    assert got.dtype == NP[dtype] and got.shape == want.shape, (label, got.dtype, got.shape, want.shape)
    if want.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want.astype(NP[dtype]), str(label))
        return
    slack = np.nan_to_num(np.abs(want.astype(F64)) * rtol + atol, posinf=0.0)
    low, high = (cast(want + sign * slack if rtol or atol else want, dtype).astype(F64) for sign in (-1, 1))
    nan, value = np.isnan(low), got.astype(F64)
    np.testing.assert_array_equal(np.isnan(value), nan, str(label))
    ok = nan | ((low <= value) & (value <= high))
    assert ok.all(), (label, got[~ok], low[~ok], high[~ok])
    if signed and not is_int(dtype):
        zero = (low == 0) & (high == 0) & (value == 0)
        np.testing.assert_array_equal(np.signbit(value)[zero], np.signbit(low)[zero], str(label))


def to_psum(t):
    p = nl.ndarray((*t.shape[:-1], 2 * t.shape[-1]), t.dtype, nl.psum)[..., ::2]
    nisa.tensor_copy(p, t)
    return p


# How a tile lies: the array to load for the values of another, and the view of it that has them.
LAYOUTS = {
    "whole": (lambda a: a, lambda t: t),
    "strided": (lambda a: np.repeat(a, 2, -1), lambda t: t[..., ::2]),
    "permuted": (lambda a: a.swapaxes(1, -1).copy(), lambda t: t.permute((0, *reversed(range(1, t.ndim))))),
    "partitions": (lambda a: a if len(a) > 32 else np.concatenate([a[:1]] * 32 + [a]), lambda t: t if t.shape[0] > 64 else t[32:]),
    "psum": (lambda a: a, to_psum),
}  # fmt: skip
SBUF = tuple(LAYOUTS)[:-1]


def expect(body, arrays, want, dtype, layout="whole", only=None, **near):
    """Every tile that body returns has the values `want`. layout: of the operands, or of the one with number `only`."""
    here = [LAYOUTS[layout if only in (None, i) else "whole"] for i in range(len(arrays))]
    packed = [pack(a) for (pack, _), a in zip(here, arrays)]
    for got in both(lambda *tiles: body(*(view(t) for (_, view), t in zip(here, tiles))), *packed):
        check(got, want, dtype, **near, label=(layout, only, *(a.shape for a in arrays)))


# ---- elementwise ---------------------------------------------------------------------------------------------------
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


erf = np.vectorize(math.erf, otypes=[F64])
EXACT, NEAR = {"signed": True}, {"rtol": 2e-6, "atol": 5e-7}
# name: statement in double precision, how near
UNARY = {
    "abs": (np.abs, EXACT), "negative": (np.negative, EXACT), "square": (lambda x: (F32(1) * x.astype(F32)) ** 2, EXACT),
    "ceil": (np.ceil, EXACT), "floor": (np.floor, EXACT), "trunc": (np.trunc, EXACT), "sign": (np.sign, {}),
    "relu": (lambda x: np.where(x <= 0, 0, x), {}), "logical_not": (lambda x: x == 0, {}),
    "exp": (np.exp, {"rtol": 1e-6}), "log": (np.log, {"rtol": 1e-6, "atol": 1e-7}),
    "sqrt": (np.sqrt, {"rtol": 1e-6, "signed": True}), "rsqrt": (lambda x: 1 / np.sqrt(x), {"rtol": 1e-6, "signed": True}),
    "reciprocal": (lambda x: 1 / x, {"rtol": 1e-6, "signed": True}),
    "sin": (np.sin, NEAR), "cos": (np.cos, NEAR), "tan": (np.tan, NEAR), "tanh": (np.tanh, NEAR), "arctan": (np.arctan, NEAR),
    "sigmoid": (sigmoid, NEAR), "softplus": (lambda x: np.logaddexp(x, 0), NEAR), "erf": (erf, NEAR),
    "mish": (lambda x: x * np.tanh(np.logaddexp(x, 0)), NEAR), "silu": (lambda x: x * sigmoid(x), NEAR),
    "silu_dx": (lambda x: (s := sigmoid(x)) + x * s * (1 - s), NEAR),
    "erf_dx": (lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), NEAR),
    "gelu": (lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))), NEAR),
    "gelu_dx": (lambda x: 0.5 * (1 + erf(x / math.sqrt(2))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi), NEAR),
    "gelu_apprx_tanh": (lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), NEAR),
    "gelu_apprx_sigmoid": (lambda x: x * sigmoid(1.702 * x), NEAR),
    "gelu_apprx_sigmoid_dx": (lambda x: (s := sigmoid(1.702 * x)) + 1.702 * x * s * (1 - s), NEAR),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("name", UNARY)
def test_unary(rng, name, dtype):
    statement, near = UNARY[name]
    function = getattr(nl, name)
    for x in (filled((2, 64), edges(dtype)), *(random(rng, shape, dtype, -9, 9) for shape in SHAPES)):
        for layout in LAYOUTS if name != "rsqrt" else SBUF:  # which is GpSimdE's, too
            expect(function, [x], statement(x.astype(F32).astype(F64)), dtype, layout, **near)
    x = filled((1, 64), edges(dtype))
    for other in OTHER_TYPES:
        want = statement(x.astype(F32).astype(F64))
        expect(lambda t: function(t, dtype=getattr(nl, other)), [x], want, other, **near)


def power(a, b):
    """np.power of arrays: with a number, 0.5 is the square root there, which differs at -inf."""
    return np.power(*(np.ascontiguousarray(v, F64) for v in np.broadcast_arrays(a, b)))


# name: statement in fp32, how near
BINARY = {
    "add": (np.add, EXACT), "subtract": (np.subtract, EXACT), "multiply": (np.multiply, EXACT), "divide": (np.divide, EXACT),
    "maximum": (np.maximum, {}), "minimum": (np.minimum, {}),
    "abs_max": (lambda a, b: np.where(np.abs(a) > np.abs(b), a, b), EXACT),
    "abs_min": (lambda a, b: np.where(np.abs(a) < np.abs(b), a, b), EXACT),
    "power": (power, {"rtol": 1e-6}),
    "mod": (np.mod, {}), "fmod": (np.fmod, EXACT),
    "logical_and": (lambda a, b: (a != 0) & (b != 0), {}), "logical_or": (lambda a, b: (a != 0) | (b != 0), {}),
    "logical_xor": (lambda a, b: (a != 0) != (b != 0), {}),
}  # fmt: skip
COMPARISONS = {
    "equal": (operator.eq, {}), "not_equal": (operator.ne, {}), "less": (operator.lt, {}), "less_equal": (operator.le, {}),
    "greater": (operator.gt, {}), "greater_equal": (operator.ge, {}),
}  # fmt: skip


def with_number(dtype, number):
    """Type of a result of a tile and a number, which counts as int32 or fp32."""
    if not is_int(dtype):
        return dtype if isinstance(number, int) else "float32"
    return "int32" if isinstance(number, int) and dtype != "uint32" else "float32"


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("name", BINARY | COMPARISONS)
def test_binary(rng, name, dtype):
    statement, near = (BINARY | COMPARISONS)[name]
    function, values = getattr(nl, name), edges(dtype)
    in_fp32 = name in ("divide", "power", "mod", "fmod")  # of 32-bit integers: those that fp32 has
    if in_fp32 and is_int(dtype):
        values = values[np.abs(values.astype(F64)) < 2**24]

    def want(a, b, out=None):
        """out: integers of that type, exact if the operands are of 32 bits."""
        if out in WIDE_INTS and dtype in WIDE_INTS and not in_fp32:
            return statement(a.astype(np.int64), b.astype(np.int64)).astype(NP[out])
        return statement(a.astype(F32), b.astype(F32))

    edge_pairs = [np.ascontiguousarray(m) for m in np.meshgrid(values, values, indexing="ij")]
    for a, b in [edge_pairs, *([random(rng, shape, dtype) for _ in range(2)] for shape in SHAPES)]:
        for layout in SBUF:
            expect(function, [a, b], want(a, b, dtype), dtype, layout, **near)
        for side in (0, 1) if name != "power" else ():  # power is GpSimdE's, which has no PSUM
            expect(function, [a, b], want(a, b), dtype, "psum", side, **near)
        if a[0].size > 1:
            column = b.reshape(len(b), -1)[:, :1].copy()
            wide = column.reshape(len(b), *[1] * (b.ndim - 1))
            expect(lambda x, y: function(x, y), [a, column], want(a, wide), dtype, **near)
            expect(lambda x, y: function(y, x), [a, column], want(wide, a), dtype, **near)
            flat = a.reshape(len(a), -1)
            repeated = want(flat, column, dtype)
            expect(lambda x, y: function(x, y.broadcast(1, x.shape[1])), [flat, column], repeated, dtype, **near)
    a, b = edge_pairs
    for other in OTHER_TYPES:
        expect(lambda x, y: function(x, y, dtype=getattr(nl, other)), [a, b], want(a, b, other), other, **near)
    for number in (2, -3, 0, 1, 0.5, -1.5):
        out, x = dtype if name in COMPARISONS else with_number(dtype, number), a[:, :1].copy()
        expect(lambda t: function(t, number), [x], want(x, F32(number)), out, **near)
        expect(lambda t: function(number, t), [x], want(F32(number), x), out, **near)


@pytest.mark.parametrize("a, b, out", [
    ("int8", "float16", "float16"), ("float16", "bfloat16", "float32"), ("bfloat16", "float32", "float32"),
    ("int8", "uint8", "int16"), ("int8", "uint16", "int32"), ("int32", "uint32", "float32"), ("int8", "int32", "int32"),
])  # fmt: skip
def test_types_of_two_tiles(rng, a, b, out):
    x, y = rng.integers(0, 9, (3, 5)).astype(NP[a]), rng.integers(1, 9, (3, 5)).astype(NP[b])
    for function, statement in ((nl.multiply, np.multiply), (nl.less, np.less), (nl.logical_and, np.logical_and)):
        for first, second in ((x, y), (y, x)):
            (got,) = both(function, first, second)
            same(got, statement(first.astype(F32), second.astype(F32)).astype(NP[out]))


def test_numbers_of_bool_count_as_uint8():
    x = np.array([[-2, 0, 5]], np.int8)
    same(both(lambda t: nl.add(t, True), x)[0], (x + 1).astype(np.int16))


BITWISE = {"bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
           "left_shift": operator.lshift, "right_shift": operator.rshift}  # fmt: skip


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("name", BITWISE)
def test_bitwise(name, dtype):
    """On bit patterns: shifts are logical, signed or not; counts are below the width."""
    function, t, shifts = getattr(nl, name), np.dtype(NP[dtype]), "shift" in name
    bits = np.dtype(f"u{t.itemsize}")
    second = np.arange(8 * t.itemsize).astype(t) if shifts else edges(dtype)
    a, b = (np.ascontiguousarray(m) for m in np.meshgrid(edges(dtype), second, indexing="ij"))

    def want(x, y):
        return BITWISE[name](np.asarray(x, t).view(bits), np.asarray(y, t).view(bits)).astype(bits).view(t)

    for layout in SBUF:
        expect(function, [a, b], want(a, b), dtype, layout)
    for side in (0, 1):
        expect(function, [a, b], want(a, b), dtype, "psum", side)
    for number in (3, 1, 0) if shifts or dtype[0] == "u" else (3, 0, -1, -100):
        expect(lambda x: function(x, number), [a], want(a, number), dtype)
        expect(lambda y: function(number, y), [b], want(number, b), dtype)
    expect(function, [a, b[:, 1:2].copy()], want(a, b[:, 1:2]), dtype)
    expect(function, [a[:, :1].copy(), b], want(a[:, :1], b), dtype)


@pytest.mark.parametrize("dtype", INTS)
def test_invert(dtype):
    for shape in SHAPES:
        x = filled(shape, edges(dtype), 1)
        for layout in LAYOUTS:
            expect(nl.invert, [x], ~x, dtype, layout)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_where(rng, dtype):
    for shape in ((2, 64), *SHAPES):
        x, y = filled(shape, edges(dtype)), filled(shape, edges(dtype), 5)
        for condition in ("float32", "bfloat16", "uint8"):
            c = rng.integers(0, 2, shape).astype(NP[condition])
            for layout, side in [(layout, None) for layout in SBUF] + [("psum", i) for i in range(3)]:
                expect(nl.where, [c, x, y], np.where(c != 0, x, y), dtype, layout, side, signed=True)
            expect(lambda p, a: nl.where(p, a, 2), [c, x], np.where(c != 0, x, NP[dtype](2)), dtype, signed=True)
            expect(lambda p, a: nl.where(p, 3, a), [c, x], np.where(c != 0, NP[dtype](3), x), dtype, signed=True)
            expect(lambda p, a: nl.where(p, a, a, dtype=nl.float32), [c, x], x.astype(F32), "float32", signed=True)
        if not is_int(dtype):
            expect(lambda p, a: nl.where(p, a, 0.5), [c, x], np.where(c != 0, x, NP[dtype](0.5)), dtype, signed=True)


# ---- reductions ----------------------------------------------------------------------------------------------------
REDUCTIONS = {
    "sum": (np.sum, {}), "prod": (np.prod, {}), "max": (np.max, {}), "min": (np.min, {}), "mean": (np.mean, {"rtol": 1e-6}),
    "var": (np.var, {"rtol": 1e-5, "atol": 1e-6}),
    "all": (lambda x, axis, keepdims: np.all(x != 0, axis=axis, keepdims=keepdims), {}),
}  # fmt: skip
AXES = {2: (1, [-1]), 3: (-1, [2], (1, 2), [-1, -2]), 4: (3, (2, 3), [1, 2, 3])}


def axes_of(x, axis):
    return tuple(a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis))


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(rng, name, dtype):
    statement, near = REDUCTIONS[name]
    function = getattr(nl, name)
    few = [0.5, 1, -1, 2, -2] if name == "prod" else [0, 0.25, 1, -3, 2.5, 7, 100, 90]  # exact in any order
    inputs = [cast(rng.choice(few, shape), dtype) for shape in (*SHAPES, (2, 3, 2, 2), (128, 20), (5, 300))]
    if name in ("max", "min", "all"):
        inputs.append(rng.choice(edges(dtype), (128, 3)))
    elif not is_int(dtype):
        inf, nan = np.inf, np.nan
        inputs.append(np.array([[1, inf, 2], [inf, -inf, 1], [nan, 1, 2], [-0.0, 0, 0], [0, inf, 2]]).astype(NP[dtype]))
    for x in inputs if name != "prod" else inputs[:-2] + inputs[-1:]:
        for axis in AXES[x.ndim]:
            axes = axes_of(x, axis)
            kept = statement(x.astype(F32).astype(F64), axis=axes, keepdims=True)
            rest = [n for d, n in enumerate(x.shape) if d not in axes]
            want = kept if name == "var" else kept.reshape(rest if len(rest) > 1 else (*rest, 1))
            for layout in LAYOUTS:
                expect(lambda t: function(t, axis), [x], want, dtype, layout, **near)
            for other in OTHER_TYPES:
                expect(lambda t: function(t, axis, dtype=getattr(nl, other)), [x], want, other, **near)
            if name != "all":
                expect(lambda t: function(t, axis=axis, keepdims=True), [x], kept, dtype, **near)


@pytest.mark.parametrize("name", [*REDUCTIONS, "softmax", "rms_norm"])
@pytest.mark.parametrize("axis", [0, 1, (0, 1, 2), ()])
def test_axes_that_are_not_trailing_free_ones_are_refused(name, axis):
    rest = (np.ones((1, 4), F32),) if name == "rms_norm" else ()
    with pytest.raises(nki.NkiError, match=f"{name}.*axis"):
        both(lambda t, *w: getattr(nl, name)(t, *w, axis, *(4 for _ in w)), np.ones((2, 3, 4), F32), *rest)


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(rng, dtype):
    inf, nan, near = np.inf, np.nan, {"rtol": 4e-6, "atol": 1e-9}
    inputs = [random(rng, shape, dtype, -9, 9) for shape in (*SHAPES, (2, 3, 2, 2), (5, 300))]
    inputs.append(np.array([[1, -inf, 2], [6e4, 6e4, -6e4], [inf, 1, 2], [nan, 1, 2], [0, -0.0, 0]]).astype(NP[dtype]))

    def want(x, axes):
        e = np.exp(x.astype(F64) - x.astype(F64).max(axes, keepdims=True))
        return e / e.sum(axes, keepdims=True)

    for x in inputs:
        for axis in AXES[x.ndim]:
            for layout in LAYOUTS:
                expect(lambda t: nl.softmax(t, axis), [x], want(x, axes_of(x, axis)), dtype, layout, **near)
        expect(nl.softmax, [x], want(x, -1), dtype, **near)
        expect(lambda t: nl.softmax(t, axis=-1, dtype=nl.float32), [x], want(x, -1), "float32", **near)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(rng, dtype):
    """x / sqrt(sum of squares / n + epsilon) * w, for n other than the count too, and rows of zeros."""
    for shape in (*SHAPES, (2, 3, 2, 2)):
        x = random(rng, shape, dtype)
        x[-1] = 0
        for axis in AXES[x.ndim]:
            square = (x.astype(F64) ** 2).sum(axes_of(x, axis), keepdims=True)
            for rows in (1, shape[0]):
                w = random(rng, (rows, *shape[1:]), dtype)
                want = x.astype(F64) / np.sqrt(square / 7 + 1e-3) * w.astype(F64)
                norm = lambda t, v: nl.rms_norm(t, v, axis, n=7, epsilon=1e-3)
                for layout in LAYOUTS:
                    expect(norm, [x, w], want, dtype, layout, 0, rtol=4e-6, atol=1e-9)
            in_bfloat16 = lambda t, v: nl.rms_norm(t, v, axis, 7, 1e-3, nl.float32, nl.bfloat16)
            expect(in_bfloat16, [x, w], want, "float32", rtol=0.02, atol=1e-6)


# ---- movement and creation -----------------------------------------------------------------------------------------
def bits(rng, shape, dtype):
    """Any bit patterns of the type."""
    width = np.dtype(NP[dtype]).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * width), dtype=np.uint8).view(NP[dtype])


def same(got, want, label=""):
    assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes(), (label, got, want)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_copy_and_transpose_keep_bits(rng, dtype):
    for shape in SHAPES:
        x = bits(rng, shape, dtype)
        flat = x.reshape(len(x), -1)
        for layout, (pack, view) in LAYOUTS.items():
            same(both(lambda t: nl.copy(view(t)), pack(x))[0], x, layout)
            if layout in SBUF:  # what TensorE reads
                same(both(lambda t: nl.transpose(view(t)), pack(flat))[0], flat.T, layout)


@pytest.mark.parametrize("other", FLOATS + INTS)
@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_casts_of_copy_load_store_and_transposes(dtype, other):
    t = getattr(nl, other)
    for shape in SHAPES:
        x = filled(shape, edges(dtype), 3)
        flat = x.reshape(len(x), -1)

        def kernel(a, b):
            out = [nl.ndarray(s, t, nl.shared_hbm) for s in (*[a.shape] * 3, *[b.shape[::-1]] * 2)]
            nl.store(out[0], nl.load(a))
            nl.store(out[1], nl.load(a, dtype=t))
            nl.store(out[2], nl.copy(nl.load(a), dtype=t))
            nl.store(out[3], nl.copy(nl.transpose(nl.load(b), dtype=t)))
            nl.store(out[4], nl.load_transpose2d(b, dtype=t))
            return tuple(out)

        for launch in (nki.simulate, nki.jit):
            for i, got in enumerate(launch(kernel)(x, flat)):
                want = x if i < 3 else flat.T
                check(got, want if other == dtype else cast(want.astype(F32), other), other, signed=True, label=i)


def test_load_and_store_of_parts_of_a_tensor(rng):
    x = bits(rng, (6, 10), "float32")

    def kernel(a):
        out, row = nl.zeros((6, 10), nl.float32, nl.shared_hbm), nl.zeros((7,), nl.float32, nl.shared_hbm)
        nl.store(out[1:6:2, 3:9:2], nl.load(a[0:3, 1:4]))
        nl.store(row, nl.load(a[2, 3:10]))
        nl.store(out[0, 0:2], -0.5)
        return out, row, nl.shared_constant(x)

    want = np.zeros((6, 10), F32)
    want[1:6:2, 3:9:2] = x[0:3, 1:4]
    want[0, 0:2] = -0.5
    for launch in (nki.simulate, nki.jit):
        for got, values in zip(launch(kernel)(x), (want, x[2, 3:10], x), strict=True):
            same(got, values)
    with pytest.raises(nki.NkiError, match="psum"):
        nki.simulate(lambda a: nl.store(a, to_psum(nl.load(a))))(x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul(rng, dtype):
    for k, m, n in ((1, 1, 1), (128, 1, 5), (3, 5, 7), (128, 128, 512)):
        x, y = (rng.integers(-4, 5, s).astype(NP[dtype]) for s in ((k, m), (k, n)))
        want = x.astype(F32).T @ y.astype(F32)
        for layout in SBUF:  # what TensorE reads
            expect(lambda a, b: nl.matmul(a, b, transpose_x=True), [x, y], want, "float32", layout)
            expect(nl.matmul, [x.T.copy(), y], want, "float32", layout)
    x, y = (np.array(v).astype(NP[dtype]) for v in ([[1, np.inf], [0, 1], [2, np.nan]], [[1, 0, -1], [np.inf, 1, 2]]))
    expect(nl.matmul, [x, y], x.astype(F32) @ y.astype(F32), "float32")


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_broadcast_to_and_expand_dims(rng, dtype):
    rows = (((1, 5), (3, 5)), ((1, 1), (128, 2)), ((1, 3, 1), (40, 3, 4)), ((1, 600), (100, 600)))
    for shape, to in (((3, 1), (3, 5)), ((2, 1, 4), (2, 3, 4)), ((3, 5), (3, 5)), *rows):
        x = filled(shape, edges(dtype), 1)
        near = {"signed": True} if shape[0] == to[0] else {"atol": 2e-38}  # TensorE loses -0 and subnormals of rows
        for layout in LAYOUTS:
            expect(lambda t: nl.broadcast_to(t, to), [x], np.broadcast_to(x, to), dtype, layout, **near)
        for other in OTHER_TYPES:
            want = np.broadcast_to(x, to) if other == dtype else np.broadcast_to(cast(x.astype(F32), other), to)
            expect(lambda t: nl.broadcast_to(t, to, dtype=getattr(nl, other)), [x], want, other, **near)
    x = bits(rng, (3, 5), dtype)
    for axis, want in ((1, x[:, None]), (2, x[:, :, None]), (-1, x[:, :, None])):
        same(both(lambda t: nl.expand_dims(t, axis), x)[0], want)
    with pytest.raises(nki.NkiError, match="broadcast"):
        both(lambda t: nl.broadcast_to(t, (2, 5)), x)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_gather_flattened(rng, dtype):
    for shape, taken in zip((*SHAPES, (2, 3, 4)), ((1, 1), (128, 3), (3, 2), (2, 5), (2, 2, 7))):
        x = filled(shape, edges(dtype), 2)
        i = rng.integers(0, x[0].size, taken, dtype=np.uint32)
        i.flat[0] = x[0].size - 1
        want = np.take_along_axis(x.reshape(len(x), -1), i.reshape(len(i), -1).astype(int), 1).reshape(taken)
        for layout in SBUF:  # what GpSimdE reads
            expect(nl.gather_flattened, [x, i], want, dtype, layout, signed=True)
        wide = want.astype(F32)
        expect(lambda d, k: nl.gather_flattened(d, k, dtype=nl.float32), [x, i], wide, "float32", signed=True)
        if x.ndim == 2:
            expect(lambda d, k: nl.gather_flattened(d, k, axis=1), [x, i], want, dtype, signed=True)
    with pytest.raises(nki.NkiError, match="gather_flattened axis"):
        both(lambda d, k: nl.gather_flattened(d, k, axis=1), x, i)


MEMORIES = [nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm]


@pytest.mark.parametrize("buffer", MEMORIES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_creation(dtype, buffer):
    """full, ones, zeros, zeros_like, empty_like; shapes may mark their partition dimension, as older kernels do."""
    t = getattr(nl, dtype)

    def seen(tile):
        assert tile.buffer is buffer and tile.dtype == dtype
        return nl.load(tile) if nl.is_hbm(buffer) else tile

    def stored(tile):
        nl.store(tile, 3) if nl.is_hbm(buffer) else nisa.memset(tile, 3)
        return tile

    for shape in (*SHAPES, (3, 700)):
        marked = (nl.par_dim(shape[0]), *shape[1:])
        for value in edges(dtype):
            filling = lambda: seen(nl.full(marked, value.item(), t, buffer))
            expect(filling, [], np.full(shape, value), dtype, signed=True)
        ones = lambda: nl.ones(shape, t, buffer=buffer)
        zeros = lambda: (seen(nl.zeros(shape, t, buffer=buffer)), seen(nl.zeros_like(ones())))
        expect(lambda: seen(ones()), [], np.ones(shape, NP[dtype]), dtype)
        expect(zeros, [], np.zeros(shape), dtype, signed=True)
        expect(lambda: seen(stored(nl.empty_like(ones()))), [], np.full(shape, 3), dtype)
        expect(lambda: nl.zeros_like(ones(), dtype=nl.int16, buffer=nl.sbuf), [], np.zeros(shape, np.int16), "int16")


@pytest.mark.parametrize("buffer", MEMORIES, ids=str)
@pytest.mark.parametrize("dtype", (*FLOATS, "float8_e4m3"))
def test_rand(dtype, buffer):
    def kernel():
        t = nl.rand((128, 300), getattr(nl, dtype), buffer=buffer)
        assert t.buffer is buffer
        return nl.load(t) if nl.is_hbm(buffer) else t

    x = both(kernel)[0].astype(F64)
    assert 0 <= x.min() and x.max() < 1 and abs(x.mean() - 0.5) < 0.01 and abs(x.var() - 1 / 12) < 0.01
    assert (np.abs(np.corrcoef(x[:40]) - np.eye(40)) < 0.4).all()  # no row repeats another


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout(rng, dtype):
    x = cast(rng.uniform(1, 2, (128, 200)), dtype)
    rates = np.repeat(np.array([0, 1, 0.25, 0.75], F32), 32)[:, None]

    def body(t, r):
        return nl.dropout(t, 0.0), nl.dropout(t, 1.0), nl.dropout(t, r), nl.dropout(t, r, dtype=nl.float32)

    none, every, some, wide = both(body, x, rates)
    same(none, x)
    same(every, np.zeros_like(x))
    for got, values in ((some, x), (wide, x.astype(F32))):
        assert got.dtype == values.dtype and ((got == 0) | (got == values)).all()
        share = (got == 0).reshape(4, -1).mean(1)
        np.testing.assert_allclose(share, [0, 1, 0.25, 0.75], atol=0.03)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_shared_identity_matrix(dtype):
    for n in (1, 9, 128):
        same(both(lambda: nl.shared_identity_matrix(n, dtype=getattr(nl, dtype)))[0], np.eye(n).astype(NP[dtype]))
