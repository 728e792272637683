"""Values of the functions of nki.isa: one row per function, over types, shapes, views, memories, operators and edges.

A row calls the function on tiles and says in NumPy what the specification says: fp32 arithmetic, one cast to the result's
type. It runs for each pair of types (sources', results') and each placement of the operands, step by step and traced.
Elements of a result's buffer that the result does not have must keep what they were: KEPT.
"""

import functools
import zlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from nki_reference import NP

import torchneuron.nki as nki
import torchneuron.nki.collectives as ncc
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32, INF, KEPT = np.float32, np.inf, 7
FP32_MIN = np.finfo(F32).min


def traced(kernel):
    def call(*args):
        compiled = nki.jit(kernel)
        assert compiled.trace(args, {}) is not None
        return compiled(*args)

    return call


WAYS = [nki.simulate, traced]


@pytest.fixture(autouse=True)
def trn3(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")


# ---- types and values ------------------------------------------------------------------------------------------------
def is_int(dtype):
    return dtype in ("int32", "uint32", "int16", "uint16", "int8", "uint8")


def cast(x, dtype):
    """Through fp32; to nearest even, integers saturate. What has the type already keeps its bits."""
    x, t = np.asarray(x), NP[dtype]
    if x.dtype == t:
        return x
    with np.errstate(all="ignore"):
        x = x.astype(F32)
        if not is_int(dtype):
            return x.astype(t)
        x = np.where(np.isnan(x), 0, np.rint(x.astype(float)))
        return np.clip(x, np.iinfo(t).min, np.iinfo(t).max).astype(t)


EDGES = [0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 127.5, 128.5, 255.5, -129, 65504, 65519, 1e5, 2.0**24 + 2, -(2.0**31), 3e9,
         3e38, -3e38, 1e-40, -1e-40, 6e-8, 1e-5, INF, -INF, np.nan]  # fmt: skip


def values(rng, kind, shape, dtype):
    """edge: all of a type's extremes; ordered: without NaN; small: what sums are exact for; powers: products, too."""
    t = NP[dtype]
    if kind in ("small", "powers"):
        pool = [1, 2] + [-1, -2] * (dtype[0] != "u") + [0.5, -0.5] * (not is_int(dtype)) + [0, 4] * (kind == "small")
    elif is_int(dtype):
        i = np.iinfo(t)
        pool = np.array([i.min, i.min + 1, 0, 1, 2, 3, 100, i.max // 2 + 1, i.max - 1, i.max], np.int64)
    else:
        pool = np.array(EDGES[:-1] if kind == "ordered" else EDGES, F32)
    with np.errstate(all="ignore"):
        pool = np.asarray(pool).astype(t)
    places = rng.permutation(np.arange(np.prod(shape)) + rng.integers(len(pool)))  # each value as often as the others
    return pool[places % len(pool)].reshape(shape)


def check(got, want, dtype, rtol=0.0, signs=False):
    """Equal (signs: zeros too); with rtol: as near as that and the type's rounding."""
    if is_int(dtype) and want.dtype.kind not in "iu":  # what an integer NaN is, nothing says
        got = np.where(np.isnan(want), 0, got)
    want = cast(want, dtype)
    if rtol:
        eps = {"float32": 0, "bfloat16": 2**-7, "float16": 2**-9}.get(dtype, 0)
        atol = 1 if is_int(dtype) else 1e-7
        return np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=rtol + eps, atol=atol)
    got, want = got.astype(float), want.astype(float)
    np.testing.assert_array_equal(got, want)
    if signs:
        np.testing.assert_array_equal(np.signbit(got)[want == 0], np.signbit(want)[want == 0])


# ---- places ----------------------------------------------------------------------------------------------------------
# Of a tile [P, ...]: the shape of the buffer, and how it lies there. The same functions serve NKI tensors and arrays.
def _start(p):
    return 0 if p > 64 else 64 if p > 32 else 32


PLACES = {
    "whole": (lambda s: s, lambda t, s: t),
    "psum": (lambda s: s, lambda t, s: t),
    "strided": (lambda s: (*s[:-1], 2 * s[-1] + 1), lambda t, s: t[..., 1::2]),
    "permuted": (lambda s: (s[0], *s[:0:-1]), lambda t, s: permute(t, (0, *range(len(s) - 1, 0, -1)))),
    "partitions": (lambda s: (_start(s[0]) + s[0], *s[1:]), lambda t, s: t[_start(s[0]) : _start(s[0]) + s[0]]),
}


def permute(t, dims):
    return t.transpose(dims) if isinstance(t, np.ndarray) else t.permute(dims)


def execute(way, call, outs, ins, places=()):
    """The buffers of results [(shape, dtype, place)] that `call` got views of, and views of the arrays `ins`."""

    def tile(shape, dtype, place):
        whole, part = PLACES[place]
        buffer = nl.ndarray(whole(shape), dtype, nl.psum if place == "psum" else nl.sbuf)
        return buffer, part(buffer, shape)

    def kernel(*args):
        sources, results = [], []
        for a, place in zip(args, [*places, *["whole"] * len(args)]):
            view = tile(a.shape, a.dtype, place)[1]
            if place == "psum":
                nisa.tensor_copy(view, nl.load(a))
            else:
                nisa.dma_copy(view, a)
            sources.append(view)
        for shape, dtype, place in outs:
            results.append(tile(shape, dtype, place))
            nisa.memset(results[-1][0], KEPT)
        call(*(view for _, view in results), *sources)
        for i, (buffer, _) in enumerate(results):
            if outs[i][2] == "psum":
                buffer = nl.copy(buffer)
            results[i] = nl.ndarray(buffer.shape, buffer.dtype, nl.shared_hbm)
            nisa.dma_copy(results[i], buffer)
        return tuple(results)

    return way(kernel)(*ins)


def check_placed(got, want, shape, dtype, place, *how):
    whole, part = PLACES[place]
    got, kept = np.asarray(got), np.full(whole(shape), KEPT, NP[dtype])
    check(part(got, shape), np.reshape(want, shape), dtype, *how)
    part(kept, shape)[...] = part(got, shape)
    np.testing.assert_array_equal(got.view(np.uint8), kept.view(np.uint8))  # around it


# P, free dimensions, places of the first result, of the first source, and of all others
SETTINGS = [
    (1, (1,), "whole", "strided", "whole"), (3, (7,), "strided", "partitions", "whole"),
    (32, (2, 3), "permuted", "strided", "partitions"), (128, (2, 3), "strided", "permuted", "permuted"),
    (128, (7,), "psum", "strided", "strided"), (32, (7,), "partitions", "psum", "whole"), (3, (1,), "psum", "psum", "whole"),
]  # fmt: skip
SAME = [(t, t) for t in ("float32", "bfloat16", "float16")]
FLOATS = [*SAME, ("bfloat16", "float32"), ("float32", "float16")]
MIXED = [*FLOATS, ("float32", "int32"), ("float32", "uint8"), ("float16", "int8"), ("int32", "float32"),
         ("uint32", "bfloat16"), ("int16", "int16"), ("uint8", "int8"), ("int8", "uint32")]  # fmt: skip
NARROW = [p for p in MIXED if not {"int32", "uint32"} & set(p)]
EVERY = [*MIXED, *((t, t) for t in ("int32", "uint32", "uint16", "int8", "uint8", "float8_e4m3", "float8_e5m2"))]
ALL_SAME = [(t, t) for t in NP]
WIDE = [(p, f, *places) for (p, _, *places), f in zip(SETTINGS, [(8,), (11,), (2, 5), (3, 7), (8,), (30,), (2, 4)])]


class Row(NamedTuple):
    call: object  # (results..., sources..., **variant): issues the instruction
    want: object  # (sources as [P, F] in fp32..., **variant) -> the results
    types: list
    operands: str = "x"  # see OPERANDS
    results: str = "d"  # see RESULTS
    variants: list = [{}]
    kind: str = "edge"
    raw: bool = False  # want gets arrays as they are, and dtype=
    rtol: float = 0.0
    psum: bool = True  # GpSimdE has none
    settings: list = SETTINGS


RESULTS = {  # shape and type, by the source's shape and the pair's second type
    "d": lambda s, t: (s, t), "1": lambda s, t: ((1, *s[1:]), t), "R": lambda s, t: ((s[0], 1), t), "T": lambda s, t: (s[::-1], t),
    "r": lambda s, t: ((s[0], 1), "float32"), "2": lambda s, t: ((s[0], 2), t), "6": lambda s, t: ((s[0], 6), t),
    "8": lambda s, t: ((s[0], 8), t), "i": lambda s, t: ((s[0], 8), "uint32"), "j": lambda s, t: ((s[0], 8), "uint16"),
    "I": lambda s, t: ((s[0], 2), "uint32"), "n": lambda s, t: ((s[0], np.prod(s[1:]) + 1), t), "q": lambda s, t: ((1, 2, np.prod(s[1:])), t),
}  # fmt: skip
OPERANDS = {  # by a generator, the kind of values, the shape and the pair's first type
    "x": values, "s": lambda g, k, s, t: values(g, k, (s[0], 1), "float32"),  # a number for each partition
    "v": lambda g, k, s, t: values(g, k, (s[0], 8), t),
    "b": lambda g, k, s, t: g.choice(np.array([0, 1, 128, 255], np.uint8), s),
    "h": lambda g, k, s, t: g.choice(np.array([0, 1, -(2**15)], np.int16), s),
    "w": lambda g, k, s, t: g.choice(np.array([0, 1, 2**15], np.uint16), s),
    "u": lambda g, k, s, t: g.choice(np.array([0, 1, 2**31], np.uint32), s),
    "g": lambda g, k, s, t: g.integers(0, np.prod(s[1:]), s, np.uint32),
    "c": lambda g, k, s, t: np.abs(values(g, k, s, t)),
    "t": lambda g, k, s, t: g.permutation(np.prod(s)).astype(NP[t]).reshape(s),
    "k": lambda g, k, s, t: np.sort(g.choice(np.array([0, 1, 2, 2**24, 2**24 + 1]), s)).astype(NP[t]),
}  # fmt: skip


def op(name):
    return getattr(nl, name) if name else None


def cmd(name):
    return getattr(nisa.reduce_cmd, name)


def steps(name):
    """reduce goes on after another instruction; the others begin."""
    return [cmd(n) for n in (["reset_reduce", "reduce"] if name == "reduce" else [name])]


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "less": np.less, "less_equal": np.less_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor, "abs_max": lambda a, b: np.where(np.abs(a) > np.abs(b), a, b),
    "abs_min": lambda a, b: np.where(np.abs(a) < np.abs(b), a, b),
}  # fmt: skip
ARITHMETIC, COMPARISONS = ("add", "subtract", "multiply", "maximum", "minimum"), list(BINARY)[5:11]
IDENTITY = {"add": 0, "subtract": 0, "multiply": 1, "maximum": -INF, "minimum": INF, "abs_max": 0, "abs_min": INF}
FUNCTIONS = {
    "copy": lambda x: x, "square": lambda x: x * x, "relu": lambda x: np.maximum(x, 0), "abs": np.abs,
    "exp": lambda x: np.exp(x.astype(float)), "sigmoid": lambda x: 1 / (1 + np.exp(-x.astype(float))),
}  # fmt: skip


def apply(name, a, b, reverse=False):
    return a if name in (None, "bypass") else F32(BINARY[name](b, a) if reverse else BINARY[name](a, b))


def fold(name, x, start=None):
    """Of each row, from the operator's identity."""
    first = np.full(x.shape[:1], IDENTITY[name] if start is None else start, F32)
    return functools.reduce(functools.partial(apply, name), x.T, first)[:, None]


def scan(state, x, step):
    out = []
    for column in np.moveaxis(x, -1, 0):
        out.append(state := F32(step(column, state)))
    return np.stack(out, 1)


def with_register(y, name, command, start=None):
    """The register after an instruction, or two, whose results are y."""
    once = fold(name, y, start if command == "load_reduce" else None)
    return fold(name, np.concatenate([once, y], 1)) if command == "reduce" else once


# ---- elementwise -----------------------------------------------------------------------------------------------------
def activation2_want(x, s, op0, op1, imm0, imm1, reverse0, reverse1, f, reduce_op):
    z = apply(op1, apply(op0, x, s if imm0 is None else F32(imm0), reverse0), F32(imm1), reverse1)
    y = F32(np.where(z > 0, z, F32(0.25) * z) if f == "prelu" else FUNCTIONS[f](z))
    return y, fold(reduce_op, y)


def activation2(d, r, x, s, op0, op1, imm0, imm1, reverse0, reverse1, f, reduce_op):
    nisa.activate2(d, op(f), x, s if imm0 is None else imm0, imm1, op(op0), op(op1), relu_param=0.25, reverse0=reverse0,
                   reverse1=reverse1, reduce_op=op(reduce_op), reduce_res=r, reduce_cmd=cmd("reset_reduce"))  # fmt: skip


PAIRS = [("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"), ("subtract", "bypass"),
         ("bypass", "bypass")]  # fmt: skip


def repeated(call, r, command, **options):
    for c in steps(command):
        call(reduce_res=r, reduce_cmd=c, **options)


def pattern_of(t, step):
    return [[step, t.shape[1]]] if t.ndim == 2 else [[10 * step, t.shape[1]], [-step, t.shape[2]]]


def affine(t, step, multiplier, offset):
    at = np.indices(t.shape)
    return offset + multiplier * at[0] + sum(s * i for (s, _), i in zip(pattern_of(t, step), at[1:]))


def cumulative(x, s, a, f, c):
    z = apply(a, x, s)
    y = scan(s[:, 0] if c == "load_reduce" else np.full(len(x), IDENTITY[f], F32), z, lambda v, t: apply(f, v, t))
    return scan(y[:, -1], z, lambda v, t: apply(f, v, t)) if c == "reduce" else y


def bn_stats(x):
    parts = [x[:, k::2].astype(float) for k in (0, 1)]
    return np.concatenate([np.stack([np.full(len(p), p.shape[1]), p.mean(1), p.var(1) * p.shape[1]], 1) if p.size else
                           np.zeros((len(p), 3)) for p in parts], 1)  # fmt: skip


def bn_aggr(t):
    """Mean and variance of all elements that the triples (count, mean, count * variance) of each row are about."""
    n, mean, m2 = (t[:, k::3].astype(float) for k in range(3))
    total = n.sum(1)
    all_mean = (n * mean).sum(1) / total
    return np.stack([all_mean, (m2 + n * (mean - all_mean[:, None]) ** 2).sum(1) / total], 1)


def find_index8(data, vals, dtype="uint32"):
    """Equal values take their places in order; all ones: none is left."""
    out = np.full(vals.shape, np.iinfo(dtype).max, dtype)
    for row, v, at in zip(data, vals, out):
        for i in range(8):
            places = np.flatnonzero(row == v[i])[np.sum(v[:i] == v[i]) :]
            at[i] = places[0] if len(places) else at[i]
    return out


def match_replace8(data, vals, imm, dtype="uint32"):
    """Of equal values the last takes the first place."""
    where = find_index8(data, vals[:, ::-1], dtype)[:, ::-1]
    out = data.copy()
    for row, at in zip(out, where):
        row[at[at != np.iinfo(dtype).max]] = imm
    return out, where


def nonzero(x, offset, padding):
    out = np.full((len(x), x.shape[1] + 1), KEPT, np.int32)
    for p in range(0, len(x), 16):
        hits = np.flatnonzero(x[p])
        out[p] = [*(hits + offset), *[padding] * (x.shape[1] - len(hits)), len(hits)]
    return out


def sequence_bounds(ids):
    ids = ids.reshape(-1)
    runs = [np.flatnonzero(ids == i) for i in ids]  # they are sorted
    return F32([np.where(ids == 0, ids.size, [r[0] for r in runs]), np.where(ids == 0, -1, [r[-1] + 1 for r in runs])])


def topk(x, n, k):
    """Of each 16 partitions: they hold a stream, element i in partition i % 16; each gets the k largest."""
    values, places = [], []
    for group in np.split(x, len(x) // 16):
        stream = group.T.reshape(-1)[:n]
        order = np.argsort(stream)[-k:]
        values += [stream[order]] * 16
        places += [order] * 16
    return F32(values), np.uint32(places)


COMMANDS = ("reset_reduce", "reduce", "load_reduce")
ROWS = {
    "tensor_copy": Row(
        lambda d, x, e: nisa.tensor_copy(d, x, engine=e), lambda x, e, dtype: x, EVERY, raw=True,
        variants=[{"e": nisa.engine.vector}, {"e": nisa.engine.scalar}],
    ),
    "tensor_copy on GpSimdE": Row(lambda d, x: nisa.tensor_copy(d, x, engine=nisa.engine.gpsimd), lambda x, dtype: x,
                                  EVERY, raw=True, psum=False),
    "tensor_copy_predicated": Row(
        lambda d, x, m, reverse, number: nisa.tensor_copy_predicated(d, x if number is None else number, m, reverse),
        lambda x, m, reverse, number, dtype: np.where((m != 0) != reverse, x if number is None else cast(number, dtype),
                                                      cast(KEPT, dtype)),
        ALL_SAME, "xu", variants=[{"reverse": r, "number": n} for r in (False, True) for n in (None, 3)], raw=True,
    ),
    "tensor_tensor": Row(
        lambda d, x, y, f: nisa.tensor_tensor(d, x, y, op(f), engine=nisa.engine.vector),
        lambda x, y, f: apply(f, x, y), MIXED, "xx", variants=[{"f": f} for f in BINARY],
    ),
    "tensor_scalar": Row(
        lambda d, x, s, op0, op1, n, r0, r1: nisa.tensor_scalar(d, x, op(op0), s if r0 else 2.5, r0, op(op1),
                                                                                s if n else None, r1),
        lambda x, s, op0, op1, n, r0, r1: apply(op1, apply(op0, x, s if r0 else F32(2.5), r0), s, r1), MIXED, "xs",
        variants=[dict(op0=a, op1=b, n=b is not None, r0=r, r1=not r) for r in (False, True) for a, b in
                  [("subtract", None), ("subtract", "multiply"), ("add", "subtract"), ("less", "logical_or"),
                   ("maximum", "minimum"), ("abs_max", "greater"), ("logical_xor", "abs_min")]],
    ),
    "scalar_tensor_tensor": Row(
        lambda d, x, y, s, a, b, r0, r1: nisa.scalar_tensor_tensor(d, x, op(a), s if r0 else 2.5, op(b), y, r0, r1),
        lambda x, y, s, a, b, r0, r1: apply(b, apply(a, x, s if r0 else F32(2.5), r0), y, r1), MIXED, "xxs",
        variants=[dict(a=a, b=b, r0=r0, r1=r1) for r0 in (False, True) for r1 in (False, True)
                  for a, b in [("subtract", "subtract"), ("multiply", "less"), ("minimum", "maximum")]],
    ),
    "activation": Row(
        lambda d, x, s, y, f, number: nisa.activation(d, op(f), x, *((0.5, 2.0) if number else (s, y))),
        lambda x, s, y, f, number: FUNCTIONS[f](x * F32(2) + F32(0.5) if number else x * y + s), FLOATS, "xss",
        variants=[{"f": f, "number": n} for f in FUNCTIONS for n in (False, True)], kind="small", rtol=2e-6,
    ),
    "activation of edges": Row(
        lambda d, x, f: nisa.activation(d, op(f), x), lambda x, f: FUNCTIONS[f](x), MIXED,
        variants=[{"f": f} for f in FUNCTIONS], rtol=2e-6,
    ),
    "activation, reduce_cmd": Row(
        lambda d, r, x, c: repeated(functools.partial(nisa.activation, d, nl.square, x, reduce_op=nl.add), r, c),
        lambda x, c: (x * x, with_register(x * x, "add", c)), MIXED, "x", "dr",
        variants=[{"c": c} for c in COMMANDS[:2]], kind="small",
    ),
    "activation_reduce": Row(
        lambda d, r, x, s: nisa.activation_reduce(d, nl.abs, x, nl.add, r, bias=s, scale=2.0),
        lambda x, s: (y := np.abs(x * F32(2) + s), fold("add", y)), MIXED, "xs", "dr", kind="small",
    ),
    "activate2": Row(
        activation2, activation2_want, MIXED, "xs", "dr", kind="small",
        variants=[dict(op0=a, op1=b, imm0=[2.0, None][r], imm1=0.5, reverse0=r and a != "bypass",
                       reverse1=r and b != "bypass", f=["copy", "prelu"][r], reduce_op=o)
                  for a, b in PAIRS for r in (False, True) for o in (["add", "maximum", "minimum"][len(a) % 3],)]
        + [dict(op0="subtract", op1="bypass", imm0=1.0, imm1=0.0, reverse0=False, reverse1=False, f="abs", reduce_op=o)
           for o in ("add", "maximum", "minimum", "abs_max", "abs_min")],
    ),
    "exponential": Row(
        lambda d, r, x, s, c: repeated(functools.partial(nisa.exponential, d, x, s), r, c,
                                       reduce_init=1.5 if c == "load_reduce" else 0.0),
        lambda x, s, c: (y := F32(np.exp((x - s).astype(float))), with_register(y, "add", c, 1.5)), FLOATS, "xs", "dr",
        variants=[{"c": c} for c in COMMANDS], kind="small", rtol=1e-6,
    ),
    "exponential of edges": Row(lambda d, x: nisa.exponential(d, x), lambda x: np.exp(x.astype(float)), MIXED, rtol=1e-6),
    "reciprocal": Row(nisa.reciprocal, lambda x: F32(1) / x, MIXED),
    "memset": Row(lambda d, x, e: nisa.memset(d, 100, e), lambda x, e: np.full(x.shape, 100, F32), ALL_SAME, kind="small",
                  variants=[{"e": nisa.engine.vector}]),
    "memset of edges": Row(lambda d, x, v: nisa.memset(d, v), lambda x, v: np.full(x.shape, v, F32), FLOATS,
                           variants=[{"v": v} for v in (0, -1.5, 65519.0, 3e38, 1e-40, INF, -INF, np.nan)]),
    "dropout, none and all": Row(
        lambda d, x, p: nisa.dropout(d, x, p), lambda x, p, dtype: x if p == 0 else np.zeros_like(x),
        ALL_SAME, variants=[{"p": 0.0}, {"p": 1.0}], raw=True,
    ),
    # ---- movement ----------------------------------------------------------------------------------------------------
    "dma_copy": Row(nisa.dma_copy, lambda x, dtype: x, EVERY, raw=True, psum=False),
    "dma_compute": Row(
        lambda d, x, y, n: nisa.dma_compute(d, [x, y, *[x] * 14][:n], nl.add),
        lambda x, y, n: functools.reduce(np.add, [x, y, *[x] * 14][:n]), EVERY, "xx", kind="small", psum=False,
        variants=[{"n": n} for n in (1, 2, 3, 16)],
    ),
    "dma_compute of edges": Row(lambda d, x, y: nisa.dma_compute(d, [x, y], nl.add), np.add, EVERY, "xx", psum=False),
    "dma_transpose": Row(nisa.dma_transpose, lambda x, dtype: x.T, ALL_SAME, results="T", raw=True, psum=False),
    "nc_transpose on VectorE": Row(
        lambda d, x: nisa.nc_transpose(d, x, nisa.engine.vector), lambda x, dtype: x.T, ALL_SAME, results="T", raw=True,
        settings=[(p, (n,), *places) for p, n, *places in ((1, 1, "psum", "strided", 0), (3, 7, "strided", "partitions", 0),
                                                           (32, 32, "partitions", "psum", 0))],
    ),
    "nc_transpose on TensorE": Row(
        lambda d, x: nisa.nc_transpose(d, x), lambda x, dtype: x.T, ALL_SAME, results="T", raw=True,
        settings=[(p, (n,), "psum", place, 0) for p, n, place in ((1, 1, "strided"), (3, 128, "partitions"),
                                                                  (128, 7, "strided"))],
    ),
    # ---- selection ---------------------------------------------------------------------------------------------------
    "select_reduce": Row(
        lambda d, r, x, m, s, number, reverse, c: repeated(
            functools.partial(nisa.select_reduce, d, m, x, -1.5 if number else s, reverse_pred=reverse), r, c),
        lambda x, m, s, number, reverse, c: (y := np.where((m != 0) != reverse, x, F32(-1.5) if number else s),
                                             with_register(y, "maximum", c)), NARROW, "xbs", "dr",
        variants=[dict(number=n, reverse=v, c=c) for n in (False, True) for v in (False, True) for c in COMMANDS[:2]],
    ),
    "select_reduce, idle": Row(lambda d, x, m, s: nisa.select_reduce(d, m, x, s), lambda x, m, s: np.where(m != 0, x, s),
                               NARROW, "xbs"),
    "range_select": Row(
        lambda d, r, x, s, t, a, b, start, c: repeated(
            functools.partial(nisa.range_select, d, x, op(a), op(b), s, t, range_start=start), r, c),
        lambda x, s, t, a, b, start, c: (
            y := np.where(apply(a, i := F32(start + np.arange(x.shape[1])), s) * apply(b, i, t) != 0, x, FP32_MIN),
            with_register(y, "maximum", c)), [*FLOATS, ("float32", "bfloat16")], "xss", "dr",
        variants=[dict(a=a, b=b, start=start, c=c) for a, b in zip(COMPARISONS, COMPARISONS[::-1]) if "not" not in a + b
                  for start, c in ((0, "reset_reduce"), (0, "reduce"), (2**24 - 8, "reduce"))],
    ),
    "affine_select": Row(
        lambda d, x, f, step, k, offset: nisa.affine_select(d, pattern_of(d, step), k, x, -1.5 if step < 3 else 0.0,
                                                            op(f), offset),
        lambda x, f, step, k, offset, dtype: np.where(BINARY[f](affine(x, step, k, offset), 0), cast(x, dtype),
                                                      cast(-1.5 if step < 3 else 0.0, dtype)),
        [*MIXED, ("int32", "int32"), ("uint32", "uint32")], raw=True, psum=False,
        variants=[dict(f=f, step=s, k=k, offset=o) for f in COMPARISONS for s, k, o in ((1, -1, 0), (-3, 2, 5), (4, 0, -8))],
    ),
    "iota": Row(
        lambda d, x, step, k, offset: nisa.iota(d, pattern_of(d, step), offset, k),
        lambda x, step, k, offset, dtype: affine(x, step, k, offset).astype(NP[dtype] if is_int(dtype) else F32),
        [(t, t) for t in ("float32", "bfloat16", "float16", "int32", "uint32", "int16", "uint16")], raw=True, psum=False,
        variants=[dict(step=3, k=7, offset=100), dict(step=0, k=0, offset=0)],
    ),
    "iota in int32": Row(
        lambda d, x, step, k, offset: nisa.iota(d, pattern_of(d, step), offset, k),
        lambda x, step, k, offset, dtype: affine(x, step, k, offset).astype(NP[dtype] if is_int(dtype) else F32),
        [("int32", "int32"), ("float32", "float32")], raw=True, psum=False,
        variants=[dict(step=-1, k=-5, offset=-5), dict(step=10**7, k=-(10**6), offset=2**30)],
    ),
    # ---- reductions and scans ----------------------------------------------------------------------------------------
    "tensor_reduce": Row(
        lambda d, x, f, negate: nisa.tensor_reduce(d, op(f), x, tuple(range(1, x.ndim)), negate=negate),
        lambda x, f, negate: (-1 if negate else 1) * (apply(f, x[:, :1], fold("add", x[:, 1:])) if f == "subtract" else
                                                      fold(f, x)), MIXED, "x", "R", kind="small",
        variants=[dict(f=f, negate=n) for f in ARITHMETIC for n in (False, True)],
    ),
    "tensor_reduce of edges": Row(
        lambda d, x, f: nisa.tensor_reduce(d, op(f), x, tuple(range(1, x.ndim))), lambda x, f: fold(f, x), MIXED, "x", "R",
        variants=[dict(f=f) for f in ("maximum", "minimum")],
    ),
    "tensor_partition_reduce": Row(
        lambda d, x, f: nisa.tensor_partition_reduce(d, f, x),
        lambda x, f: fold("add" if f == "average" else f, x.T).T / F32(len(x) if f == "average" else 1), MIXED, "x", "1",
        variants=[dict(f=f) for f in ("add", "average", "maximum")], kind="small", psum=False,
    ),
    "tensor_partition_reduce of bits": Row(
        lambda d, x, f: nisa.tensor_partition_reduce(d, f, x),
        lambda x, f, dtype: getattr(np, f).reduce(x, axis=0), [(t, t) for t in NP if is_int(t)], "x", "1", raw=True,
        variants=[dict(f="bitwise_or"), dict(f="bitwise_and")], psum=False,
    ),
    "tensor_scalar_reduce": Row(
        lambda d, r, x, s, a, v, f, c, negate: repeated(
            functools.partial(nisa.tensor_scalar_reduce, d, x, op(a), s, op(f), reverse0=v, reduce_res_negate=negate), r, c,
            reduce_init=s if c == "load_reduce" else None),
        lambda x, s, a, v, f, c, negate: (y := apply(a, x, s, v),
                                          (-1 if negate else 1) * with_register(y, f, c, s[:, 0])), MIXED, "xs", "dr",
        variants=[dict(a=a, v=v, f=f, c=c, negate=v) for a, v in (("multiply", False), ("maximum", True))
                  for f in ("add", "multiply", "maximum", "minimum") for c in COMMANDS], kind="powers",
    ),
    "tensor_scalar_cumulative": Row(
        lambda d, x, s, a, f, c: [
            nisa.tensor_scalar_cumulative(d, x, op(a), op(f), s, s if k == cmd("load_reduce") else None, k)
            for k in steps(c)],
        cumulative, NARROW, "xs",
        variants=[dict(a=a, f=f, c=c) for a in ("multiply", "minimum") for f in ARITHMETIC for c in COMMANDS],
        kind="powers",
    ),
    "tensor_tensor_scan": Row(
        lambda d, x, y, s, a, b, r0, r1: nisa.tensor_tensor_scan(d, x, y, 0.5 if r0 else s, op(a), op(b), r0, r1),
        lambda x, y, s, a, b, r0, r1: scan(
            np.full(len(x), 0.5, F32) if r0 else s[:, 0], np.stack([x, y]),
            lambda v, t: apply(b, apply(a, v[0], t, r0), v[1], r1)), MIXED, "xxs", kind="powers",
        variants=[dict(a=a, b=b, r0=r0, r1=r1) for r0 in (False, True) for r1 in (False, True)
                  for a, b in [("multiply", "add"), ("subtract", "subtract"), ("maximum", "minimum"), ("less", "add")]],
    ),
    "bn_stats": Row(nisa.bn_stats, bn_stats, FLOATS, "x", "6", kind="small", rtol=1e-6),
    "bn_aggr": Row(
        nisa.bn_aggr, bn_aggr, FLOATS, "c", "2", kind="powers", rtol=2e-6,
        settings=[(p, f, *places) for (p, _, *places), f in zip(SETTINGS, [(3,), (6,), (3, 3), (2, 3), (9,), (6,), (3,)])],
    ),
    # ---- search and gather -------------------------------------------------------------------------------------------
    "max8": Row(nisa.max8, lambda x: np.sort(x, 1)[:, :-9:-1], MIXED, "x", "8", kind="ordered", settings=WIDE),
    "nc_find_index8": Row(nisa.nc_find_index8, find_index8, MIXED, "xv", "i", kind="ordered", settings=WIDE),
    "nc_find_index8 in 16 bits": Row(nisa.nc_find_index8, functools.partial(find_index8, dtype="uint16"), FLOATS, "xv", "j",
                                     kind="powers", settings=WIDE),
    "nc_match_replace8": Row(
        lambda d, i, x, v, imm: nisa.nc_match_replace8(d, x, v, imm, i), match_replace8, MIXED, "xv", "di", kind="ordered",
        variants=[{"imm": m} for m in (0.0, -1.5, -INF)], settings=WIDE,
    ),
    "nc_match_replace8 in 16 bits": Row(
        lambda d, i, x, v: nisa.nc_match_replace8(d, x, v, -3e38, i),
        lambda x, v: match_replace8(x, v, -3e38, "uint16"), FLOATS, "xv", "dj", kind="powers", settings=WIDE,
    ),
    "nc_n_gather": Row(nisa.nc_n_gather, lambda x, i, dtype: np.take_along_axis(
        x.reshape(len(x), -1), i.reshape(len(x), -1).astype(int), 1), ALL_SAME, "xg", raw=True, psum=False),
    "nonzero_with_count": Row(
        lambda d, x, offset, padding: nisa.nonzero_with_count(d, x, offset, padding), nonzero,
        [("float32", "int32"), ("int32", "int32")], "x", "n", psum=False,
        variants=[dict(offset=0, padding=-1), dict(offset=2**30, padding=-(2**31))],
    ),
    "sequence_bounds": Row(
        nisa.sequence_bounds, lambda x, dtype: sequence_bounds(x),
        [(a, b) for a in ("float32", "int32") for b in ("float32", "int32")], "k", "q", raw=True, psum=False,
        settings=[(1, (n,), "whole", place, "whole") for n in (1, 7, 40) for place in ("strided", "partitions")],
    ),
    "topk": Row(lambda v, i, x, n: nisa.topk(v, i, x, n), functools.partial(topk, k=8), [("bfloat16", "bfloat16")], "t", "8i",
                variants=[{"n": n} for n in (8, 11, 32)], psum=False,
                settings=[(p, (2,), "strided", place, "partitions") for p, place in ((16, "strided"), (64, "permuted"))]),
    "nc_stream_shuffle": Row(
        lambda d, x, mask: nisa.nc_stream_shuffle(d, x, mask),
        lambda x, mask, dtype: np.where(np.reshape(mask * (len(x) // 32), (-1, *[1] * (x.ndim - 1))) == 255, cast(KEPT, dtype),
                                        x[[p // 32 * 32 + min(m, 31) for p, m in enumerate(mask * (len(x) // 32))]]),
        ALL_SAME, raw=True, variants=[{"mask": [*range(31, -1, -1)]}, {"mask": [5, 255, 0, 31] * 8}],
        settings=[(p, *rest) for p, (_, *rest) in zip((32, 64, 32, 128, 128, 32, 32), SETTINGS)],
    ),
}  # fmt: skip
EXACT = ("add", "multiply")  # whose order of summands and factors matters, if they are not small
for name, of, changed in (
    ("topk of 2", "topk", dict(want=functools.partial(topk, k=2), results="2I")),
    ("memset on GpSimdE", "memset", dict(variants=[{"e": nisa.engine.gpsimd}], psum=False)),
    ("tensor_copy_predicated by uint8", "tensor_copy_predicated", dict(operands="xb")),
    ("tensor_copy_predicated by uint16", "tensor_copy_predicated", dict(operands="xw")),
    ("select_reduce by int16", "select_reduce", dict(operands="xhs")),
    ("range_select within", "range_select", dict(kind="small")),
    ("activate2 of edges", "activate2", dict(kind="edge", variants=[
        {**v, "reduce_op": "maximum"} for v in ROWS["activate2"].variants if v["f"] == "copy"])),
    ("tensor_scalar_reduce of edges", "tensor_scalar_reduce", dict(kind="edge", variants=[
        v for v in ROWS["tensor_scalar_reduce"].variants if v["f"] not in EXACT])),
    ("tensor_scalar_cumulative of edges", "tensor_scalar_cumulative", dict(kind="edge")),
    ("tensor_tensor_scan of edges", "tensor_tensor_scan", dict(kind="edge")),
):  # fmt: skip
    ROWS[name] = ROWS[of]._replace(**changed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name, types", [(n, t) for n in ROWS for t in ROWS[n].types],
                         ids=lambda x: x if isinstance(x, str) else "-".join(x))  # fmt: skip
def test_values(name, types, way):
    row, rng = ROWS[name], np.random.default_rng(zlib.crc32(f"{name} {types}".encode()))
    for v, variant in enumerate(row.variants):
        few = len(row.variants) > 4 and len(row.settings) > 3  # not all of many variants in all of many settings
        settings = [row.settings[(v + j) % len(row.settings)] for j in (0, 3)] if few else row.settings
        for p, free, to, first, rest in settings:
            shape = (p, *free)
            sources = [OPERANDS[o](rng, row.kind, shape, types[0]) for o in row.operands]
            results = [(*RESULTS[r](shape, types[1]), rest if i else to) for i, r in enumerate(row.results)]
            places = [first, *[rest] * (len(sources) - 1)]
            if not row.psum:
                results = [(s, t, "strided" if at == "psum" else at) for s, t, at in results]
                places = ["strided" if at == "psum" else at for at in places]
            with np.errstate(all="ignore"):
                if row.raw:
                    want = row.want(*sources, **variant, dtype=types[1])
                else:
                    want = row.want(*(x.reshape(p, -1).astype(F32) for x in sources), **variant)
            got = execute(way, functools.partial(row.call, **variant), results, sources, places)
            try:
                for g, w, result in zip(got, want if isinstance(want, tuple) else (want,), results):
                    check_placed(g, w, *result, row.rtol, row.raw)
            except AssertionError as e:
                e.add_note(f"{variant}, sources {places} {shape}, results {results}")
                raise


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", NP)
def test_local_gather(way, dtype):
    """Each 16 partitions go by the indices in their own rows; elements that no valid index gives keep what they were."""
    rng = np.random.default_rng(1)
    for p, run, valid, place in zip((16, 32, 64, 128), (1, 2, 4, 32), (None, 5, 17, None), PLACES):
        place = "strided" if place == "psum" else place
        x = values(rng, "edge", (p, 2, 40), dtype)
        index = rng.integers(0, 80 - run, (p, 2), np.uint16)
        want = np.full((p, 32, run), KEPT).astype(NP[dtype])
        for g in range(0, p, 16):
            for i, at in enumerate(index[g : g + 16].T.reshape(-1)[:valid]):
                want[g : g + 16, i] = x[g : g + 16].reshape(16, -1)[:, at : at + run]
        call = functools.partial(nisa.local_gather, num_elem_per_idx=run, num_valid_indices=valid)
        (got,) = execute(way, call, [((p, 32, run), dtype, place)], [x, index], ["strided", "strided"])
        check_placed(got, want, (p, 32, run), dtype, place)


# ---- TensorE and MX types --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"])
def test_nc_matmul(way, dtype):
    """accumulate: False overwrites, True adds, None overwrites what is new in PSUM."""
    rng = np.random.default_rng(2)
    for k, m, free, *places in ((1, 1, (1,), "strided", "whole"), (3, 128, (7,), "partitions", "strided"),
                                (32, 3, (2, 3), "strided", "permuted"), (128, 32, (2, 3), "strided", "strided")):  # fmt: skip
        a, b = values(rng, "small", (k, m), dtype), values(rng, "small", (k, *free), dtype)
        product = a.astype(F32).T @ b.reshape(k, -1).astype(F32)
        for modes, times in (
            ([False], 1),
            ([None], 1),
            ([None, None], 2),
            ([False, True, True], 3),
            ([None, False], 1),
        ):

            def call(d, x, y):
                new = nl.ndarray(d.shape, d.dtype, nl.psum)  # d has been written
                for mode in modes:
                    nisa.nc_matmul(new, x, y, accumulate=mode)
                nisa.tensor_copy(d, new)

            (got,) = execute(way, call, [((m, *free), "float32", "permuted")], [a, b], places)
            check_placed(got, product * times, (m, *free), "float32", "permuted")
    x, y = values(rng, "edge", (1, 27), dtype), values(rng, "edge", (1, 30), dtype)
    x, y = (np.where(np.abs(v.astype(F32)) < 1e-30, NP[dtype](0), v) for v in (x, y))  # may count as 0
    overwrite = functools.partial(nisa.nc_matmul, accumulate=False)
    (got,) = execute(way, overwrite, [((27, 30), "float32", "psum")], [x, y])
    with np.errstate(all="ignore"):
        check(got, x.astype(F32).T * y.astype(F32), "float32")


LANES = {"float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 448, 8), "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 57344, 15)}


def mx_rows(p):
    """Rows of the scales of P partitions."""
    return [32 * (g // 4) + g % 4 for g in range(p // 8)]


def quantized(x, lane, headroom):
    """OCP MX: 8 partitions by 4 elements share 2^(floor(log2(largest)) - emax), one more with headroom; saturating."""
    element, largest, emax = lane
    groups = x.astype(float).reshape(len(x) // 8, 8, -1, 4)
    top = np.nanmax(np.abs(groups), (1, 3), initial=0)
    exponent = np.where(top > 0, np.floor(np.log2(np.where(top > 0, top, 1))) - emax + headroom, -127)
    exponent = np.clip(exponent, -127, 127)
    q = np.clip(groups / np.exp2(exponent)[:, None, :, None], -largest, largest).astype(F32).astype(element)
    return q.reshape(len(x), -1), np.uint8(exponent + 127)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode, headroom", [("ocp", 0), ("", 1)])
@pytest.mark.parametrize("scale_type", ["uint8", "float8_e8m0fnu"])
@pytest.mark.parametrize("x4", LANES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantize_mx(monkeypatch, way, dtype, x4, scale_type, mode, headroom):
    """Groups of all sizes; of zeros; of the smallest and largest numbers; with NaN; with inf."""
    monkeypatch.setenv("TORCH_NEURON_MX_SCALE", mode)
    rng = np.random.default_rng(3)
    for p, n, place in ((32, 1, "whole"), (32, 7, "strided"), (64, 6, "strided"), (128, 8, "permuted")):
        shape = (p, 4 * n) if n % 2 else (p, 2, 2 * n)
        x = (rng.standard_normal((p, 4 * n)) * np.exp2(rng.integers(-12, 12, (p, 4 * n)))).astype(NP[dtype])
        x[:8, :4] = 0
        tiny, huge = ml_dtypes.finfo(NP[dtype]).smallest_subnormal, ml_dtypes.finfo(NP[dtype]).max
        x[8:16, :4] = rng.choice(np.array([0, tiny, -tiny, 4 * tiny], NP[dtype]), (8, 4))
        x[16:24, :4] = rng.choice(np.array([-huge, huge, 1, -1, 0.5], NP[dtype]), (8, 4))
        x[17, 1] = np.nan
        x[24, :4] = [INF, -INF, 1, -huge]
        want, scales = quantized(x, LANES[x4], headroom)
        rows = p // 8 if p == 32 else p
        results = [((p, n), "uint32", "strided"), ((rows, n), "uint8", "whole")]

        def call(q, s, t):
            q4, new = nl.ndarray(q.shape, getattr(nl, x4)), nl.ndarray(s.shape, getattr(nl, scale_type))
            nisa.quantize_mx(q4, t, new)
            nisa.tensor_copy(q, q4.view(nl.uint32))
            nisa.tensor_copy(s, new.view(nl.uint8))

        q, s = execute(way, call, results, [x.reshape(shape)], [place])
        got = PLACES["strided"][1](q, None).copy().view(LANES[x4][0])
        np.testing.assert_array_equal(got.astype(F32), want.astype(F32))
        np.testing.assert_array_equal(s[mx_rows(p)], scales)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("x4", LANES)
def test_nc_matmul_mx(way, x4):
    """Values by 2^(scale - 127); scales from the smallest to what leaves products in fp32, and NaN."""
    rng, element = np.random.default_rng(4), LANES[x4][0]
    for p, m, n in ((32, 2, 1), (64, 4, 7), (128, 128, 6)):
        a, b = (rng.choice(np.array([0, 1, -1, 2, 0.5]), (p, k, 4)).astype(element) for k in (m, n))
        sa, sb = (rng.integers(125, 130, (p if p > 32 else p // 8, k), np.uint8) for k in (m, n))
        rows = mx_rows(p)
        sa[:, 0], sb[:, -1] = 0, 240
        sa[rows[0], 1] = 255

        def call(d, x, y, *scales):
            x, y = (t.view(getattr(nl, x4)) for t in (x, y))
            new = nl.ndarray(d.shape, d.dtype, nl.psum)
            nisa.nc_matmul_mx(new, x, y, *scales)
            nisa.tensor_copy(d, new)

        sources = [a.reshape(p, -1).view(np.uint32), b.reshape(p, -1).view(np.uint32), sa, sb]
        (got,) = execute(way, call, [((m, n), "float32", "strided")], sources)
        x, y = (t.astype(float) * np.where(s == 255, np.nan, np.exp2(s - 127.0))[rows].repeat(8, 0)[:, :, None]
                for t, s in ((a, sa), (b, sb)))  # fmt: skip
        check_placed(got, np.einsum("kml,knl->mn", x, y), (m, n), "float32", "strided", 1e-6)


# ---- random numbers --------------------------------------------------------------------------------------------------
def bits_of(way, engine, dtype="uint32", shape=(128, 64), seed=None, state=None, place="whole"):
    """Two draws, and the states before and after them."""
    words = 24 if engine == "vector" else 6

    def call(a, b, before, after, *given):
        e = getattr(nisa.engine, engine)
        if seed is not None:
            nisa.set_rng_seed(given[0])
        if state is not None:
            nisa.rand_set_state(given[-1], e)
        nisa.rand_get_state(before, e)
        nisa.rng(a, e)
        nisa.rng(b, e)
        nisa.rand_get_state(after, e)

    given = [x for x in (None if seed is None else np.array([[seed]], np.uint32), state) if x is not None]
    outs = [(shape, dtype, place)] * 2 + [((shape[0], words), "uint32", "whole")] * 2
    got = execute(way, call, outs, given)
    return *(PLACES[place][1](g, shape) for g in got[:2]), *got[2:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["vector", "gpsimd"])
def test_rng_states_and_seeds(way, engine):
    """A state goes through set and get, and gives what it gave before; a seed gives what it gives; each word counts."""
    a, b, before, after = bits_of(way, engine)
    again = bits_of(way, engine, state=before)
    np.testing.assert_array_equal([a, b], again[:2])
    np.testing.assert_array_equal(again[2:], [before, after])
    np.testing.assert_array_equal(bits_of(way, engine, state=after)[2], after)
    assert len(np.unique(before, axis=0)) == 128 and (before != after).any(1).all()
    state = np.random.default_rng(5).integers(0, 2**32, before.shape, np.uint32)
    drawn = bits_of(way, engine, state=state)
    np.testing.assert_array_equal(drawn[2], state)
    for word in range(state.shape[1]):
        other = state.copy()
        other[:, word] ^= 1 << 7
        assert (bits_of(way, engine, state=other)[0] != drawn[0]).any(1).all()
    if engine == "vector":
        one, same, two = (bits_of(way, engine, seed=s)[0] for s in (1, 1, 2**32 - 1))
        np.testing.assert_array_equal(one, same)
        assert (one != two).mean() > 0.99


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["vector", "gpsimd"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint16", "int8", "uint8"])
def test_rng(way, engine, dtype):
    """Each bit is 1 in half of all numbers, of partitions and draws that have nothing in common; narrow types get the low
    bits."""
    width = 8 * NP[dtype]().itemsize
    for shape, place in (((128, 64), "strided"), ((3, 7), "partitions"), ((32, 2, 3), "permuted")):
        state = np.random.default_rng(6).integers(0, 2**32, (shape[0], 24 if engine == "vector" else 6), np.uint32)
        got = bits_of(way, engine, dtype, shape, state=state, place=place)[:2]
        whole = bits_of(way, engine, "uint32", shape, state=state, place=place)[:2]
        for g, w in zip(got, whole):
            np.testing.assert_array_equal(g.astype(np.int64) & (2**width - 1), w & np.uint32(2**width - 1))
        if shape == (128, 64):
            a, b = (np.unpackbits(w.copy().view(np.uint8), bitorder="little").reshape(-1, 32) for w in whole)
            assert (np.abs(a.mean(0) - 0.5) < 0.03).all() and (np.abs((a ^ b).mean(0) - 0.5) < 0.03).all()
            assert (np.abs((a.reshape(128, 64, 32)[1:] ^ a.reshape(128, 64, 32)[:-1]).mean((0, 1)) - 0.5) < 0.03).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [t for t in NP if "float8" not in t])
def test_rand2(way, dtype):
    """Uniform between numbers or tiles of them, however far they are apart."""
    rng = np.random.default_rng(7)
    low, high = np.full((128, 1), 0 if dtype[0] == "u" else -100, F32), rng.integers(101, 120, (128, 1)).astype(F32)
    for place in ("strided", "psum"):
        (got,) = execute(way, nisa.rand2, [((128, 256), dtype, place)], [low, high])
        got = PLACES[place][1](got, None).astype(float)
        assert (got >= low).all() and (got <= high).all()
        u = (got - low) / (high - low)
        assert np.abs(np.quantile(u, [0.1, 0.5, 0.9]) - [0.1, 0.5, 0.9]).max() < 0.02
        assert np.abs(u.mean(1) - 0.5).max() < 0.1
        assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.03
    for bounds in ((0.0, 1.0), (-3e38, 3e38), (1.0, float(np.nextafter(F32(1), F32(2)))), (1e-40, 2e-40)):
        (got,) = execute(way, lambda d: nisa.rand2(d, *bounds), [((3, 2, 40), "float32", "permuted")], [])
        got = got.astype(float) / bounds[1]
        assert (got >= bounds[0] / bounds[1] - 1e-6).all() and (got <= 1 + 1e-6).all() and len(np.unique(got)) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", NP)
def test_dropout(way, dtype):
    """By one probability, or one for each partition; what is kept keeps its bits."""
    x = values(np.random.default_rng(8), "edge", (128, 10, 30), dtype)
    x = np.where(x.astype(F32) == 0, NP[dtype](1), x)
    prob = np.linspace(0, 1, 128, dtype=F32)[:, None]
    for place, p in (("strided", 0.3), ("permuted", prob)):
        call = (lambda d, t, s: nisa.dropout(d, t, s)) if p is prob else (lambda d, t, s: nisa.dropout(d, t, p))
        (got,) = execute(way, call, [(x.shape, dtype, place)], [x, prob], ["strided"])
        got = PLACES[place][1](got, x.shape)
        kept = ~(got.astype(float) == 0)
        np.testing.assert_array_equal(got[kept].astype(float), x[kept].astype(float))
        assert np.abs(1 - kept.mean((1, 2)) - np.ravel(p)).max() < 0.12
        assert abs(1 - kept.mean() - np.mean(p)) < 0.01


# ---- cores and ranks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
@pytest.mark.parametrize("engine", ["dma", "gpsimd_dma"])
@pytest.mark.parametrize("dtype", NP)
def test_sendrecv_and_core_barrier(way, dtype, engine):
    """Cores exchange views of any type bit by bit, and read after a barrier what the other one wrote before it."""
    engines = [getattr(nisa.engine, e) for e in ("gpsimd", "vector", "scalar", "tensor", "sync")]

    for i, (p, free, to, source, _) in enumerate(SETTINGS):
        shape, places = (p, *free), ["strided" if at == "psum" else at for at in (source, to)]
        x = values(np.random.default_rng(9), "edge", (2, *shape), dtype)

        def kernel(x):
            out, middle = (nl.ndarray(x.shape, x.dtype, nl.shared_hbm) for _ in range(2))
            me = nl.program_id(0)
            src, dst = (PLACES[at][1](nl.ndarray(PLACES[at][0](shape), x.dtype), shape) for at in places)
            nisa.dma_copy(src, x[me])
            nisa.sendrecv(src, dst, 1 - me, 1 - me, pipe_id=i, dma_engine=getattr(nisa.dma_engine, engine))
            nisa.dma_copy(middle[me], dst)
            nisa.core_barrier(middle, (0, 1), engines[i % 5])
            nisa.dma_copy(dst, middle[1 - me])
            nisa.dma_copy(out[me], dst)
            return out, middle

        for got, want in zip(way(nki.jit(kernel)[2])(x), (x, x[::-1])):
            np.testing.assert_array_equal(np.array(got).view(np.uint8), np.array(want).view(np.uint8))


@pytest.mark.parametrize("dtype", [t for t in NP if "float8" not in t])
def test_collectives(dtype):
    """Reductions in fp32 with one cast; the others bit by bit; in HBM, and of views in SBUF."""
    rng, group = np.random.default_rng(10), ncc.ReplicaGroup([[0, 1, 2]])
    for memory in ("hbm", "sbuf"):
        for kind, f in (("small", "add"), ("ordered", "maximum"), ("ordered", "minimum")):
            xs = [values(rng, kind, (6, 12), dtype) for _ in range(3)]

            def kernel(x):
                def tile(rows, columns, call):
                    place = (rows, columns), x.dtype
                    out = nl.ndarray(*place, nl.shared_hbm)
                    if memory == "hbm":
                        call(x, out)
                    else:
                        src, dst = (PLACES["strided"][1](nl.ndarray(PLACES["strided"][0](s), x.dtype), s)
                                    for s in (x.shape, (rows, columns)))  # fmt: skip
                        nisa.dma_copy(src, x)
                        call(src, dst)
                        nisa.dma_copy(out, dst)
                    return out

                return (tile(6, 12, lambda s, d: ncc.all_reduce([s], [d], group, op(f))),
                        tile(2, 12, lambda s, d: ncc.reduce_scatter([s], [d], group, 0, op(f))),
                        tile(18, 12, lambda s, d: ncc.all_gather([s], [d], group, 0)),
                        tile(6, 12, lambda s, d: ncc.collective_permute([s], [d], [(0, 1), (1, 2), (2, 0)])))  # fmt: skip

            total = functools.reduce(lambda a, b: apply(f, a, b), [x.astype(F32) for x in xs])
            for rank, got in enumerate(nki.simulate_ranks(kernel, [(x,) for x in xs])):
                wants = total, total[2 * rank : 2 * rank + 2], np.concatenate(xs), xs[rank - 1]
                for g, w in zip(got, wants):
                    check(g, w, dtype)
