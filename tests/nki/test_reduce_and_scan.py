"""Reductions, scans, statistics, search and gather against NumPy."""

import numpy as np
import pytest
from nki_reference import NP

import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32


def out(*shape, dtype="float32"):
    return (shape, dtype)


@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 1000, 5000])
@pytest.mark.parametrize(
    "op,f", [("add", np.add), ("maximum", np.maximum), ("minimum", np.minimum), ("multiply", np.multiply)]
)
def test_tensor_reduce(run, rng, op, f, n):
    x = rng.uniform(0.9, 1.1, (128, n)).astype(F32)
    got = run(lambda o, v: nisa.tensor_reduce(o, getattr(nl, op), v, axis=1), [out(128, 1)], x)
    np.testing.assert_allclose(got[:, 0], f.reduce(x.astype(np.float64), axis=1), rtol=2e-5)
    if op in ("maximum", "minimum"):
        np.testing.assert_array_equal(got[:, 0], f.reduce(x, axis=1))


def test_tensor_reduce_axes_and_negate(run, rng):
    x = rng.standard_normal((64, 3, 5, 7)).astype(F32)
    got = run(lambda o, v: nisa.tensor_reduce(o, nl.maximum, v, axis=(2, 3), negate=True), [out(64, 3)], x)
    np.testing.assert_array_equal(got, -x.max((2, 3)))
    got = run(lambda o, v: nisa.tensor_reduce(o, nl.add, v.permute((0, 1, 3, 2)), axis=-1), [out(64, 3, 7)], x)
    np.testing.assert_allclose(got, x.sum(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "op,f", [("bitwise_and", np.bitwise_and), ("bitwise_or", np.bitwise_or), ("bitwise_xor", np.bitwise_xor)]
)
def test_bitwise_reduce(run, rng, op, f):
    x = rng.integers(-(2**31), 2**31, (16, 9), dtype=np.int32)
    got = run(lambda o, v: nisa.tensor_reduce(o, getattr(nl, op), v, axis=1), [out(16, 1, dtype="int32")], x)
    np.testing.assert_array_equal(got[:, 0], f.reduce(x, axis=1))


def test_subtract_reduce_takes_the_rest_from_the_first(run, rng):
    x = rng.integers(-9, 9, (16, 12)).astype(F32)
    got = run(lambda o, v: nisa.tensor_reduce(o, nl.subtract, v, axis=1), [out(16, 1)], x)
    np.testing.assert_array_equal(got[:, 0], x[:, 0] - x[:, 1:].sum(1))


@pytest.mark.parametrize("op,f", [("add", np.add.reduce), ("maximum", np.maximum.reduce), ("average", np.mean)])
def test_tensor_partition_reduce(run, rng, op, f):
    x = rng.integers(-9, 9, (128, 40)).astype(F32)
    got = run(lambda o, v: nisa.tensor_partition_reduce(o, op, v), [out(1, 40)], x)
    np.testing.assert_allclose(got[0], f(x, axis=0), rtol=1e-6)


def test_tensor_partition_reduce_bitwise(run, rng):
    x = rng.integers(0, 2**31, (64, 10), dtype=np.int32)
    got = run(lambda o, v: nisa.tensor_partition_reduce(o, nl.bitwise_or, v), [out(1, 10, dtype="int32")], x)
    np.testing.assert_array_equal(got[0], np.bitwise_or.reduce(x, axis=0))


def test_tensor_scalar_reduce(run, rng):
    x, s = rng.standard_normal((128, 50)).astype(F32), rng.standard_normal((128, 1)).astype(F32)

    def body(o, r, r2, v, k):
        nisa.tensor_scalar_reduce(o, v, nl.multiply, k, nl.maximum, r, reduce_res_negate=True)
        nisa.tensor_scalar_reduce(o, v, nl.multiply, k, nl.add, r2, reduce_cmd=nisa.reduce_cmd.load_reduce,
                                  reduce_init=k)  # fmt: skip

    y, r, r2 = run(body, [out(128, 50), out(128, 1), out(128, 1)], x, s)
    np.testing.assert_array_equal(y, x * s)
    np.testing.assert_array_equal(r[:, 0], -(x * s).max(1))
    np.testing.assert_allclose(r2[:, 0], s[:, 0] + (x * s).sum(1), rtol=1e-4, atol=1e-4)


def test_tensor_scalar_cumulative(run, rng):
    x = rng.integers(-4, 5, (64, 30)).astype(F32)

    def body(o, o2, v):
        nisa.tensor_scalar_cumulative(o, v, nl.multiply, nl.add, 2.0)
        nisa.tensor_scalar_cumulative(o2, v, nl.add, nl.maximum, 0.0, 1.0, nisa.reduce_cmd.load_reduce)

    a, b = run(body, [out(64, 30), out(64, 30)], x)
    np.testing.assert_array_equal(a, np.cumsum(2 * x, 1))
    np.testing.assert_array_equal(b, np.maximum.accumulate(np.maximum(x, 1), 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_tensor_scan(run, rng, dtype):
    a, b = (rng.uniform(0, 1, (128, 60)).astype(NP[dtype]) for _ in range(2))
    s = rng.uniform(0, 1, (128, 1)).astype(F32)
    got = run(
        lambda o, x, y, k: nisa.tensor_tensor_scan(o, x, y, k, nl.multiply, nl.add),
        [out(128, 60, dtype=dtype)],
        a,
        b,
        s,
    )
    state, want = s[:, 0], []
    for i in range(60):
        state = a[:, i].astype(F32) * state + b[:, i].astype(F32)
        want.append(state)
    np.testing.assert_array_equal(got, np.stack(want, 1).astype(NP[dtype]))


@pytest.mark.parametrize("n", [1, 2, 5, 512])
def test_bn_stats_and_aggr(run, rng, n):
    x = rng.standard_normal((128, n)).astype(F32) + 5

    def body(o, agg, v):
        nisa.bn_stats(o, v)
        nisa.bn_aggr(agg, o)

    stats, agg = run(body, [out(128, 6), out(128, 2)], x)
    for k, part in enumerate((x[:, 0::2], x[:, 1::2])):
        count = part.shape[1]
        np.testing.assert_array_equal(stats[:, 3 * k], np.full(128, count))
        if count:
            np.testing.assert_allclose(stats[:, 3 * k + 1], part.astype(np.float64).mean(1), rtol=1e-6)
            np.testing.assert_allclose(
                stats[:, 3 * k + 2], part.astype(np.float64).var(1) * count, rtol=1e-4, atol=1e-6
            )
    np.testing.assert_allclose(agg[:, 0], x.astype(np.float64).mean(1), rtol=1e-6)
    np.testing.assert_allclose(agg[:, 1], x.astype(np.float64).var(1), rtol=1e-4, atol=1e-6)


def test_max8_find_index8_match_replace8(run, rng):
    x = np.stack([rng.permutation(100) for _ in range(128)]).astype(F32)

    def body(top, idx, rest, where, v):
        nisa.max8(top, v)
        nisa.nc_find_index8(idx, v, top)
        nisa.nc_match_replace8(rest, v, top, -1.0, where)

    shapes = [out(128, 8), out(128, 8, dtype="uint32"), out(128, 100), out(128, 8, dtype="uint32")]
    top, idx, rest, where = run(body, shapes, x)
    order = np.argsort(-x, 1)[:, :8]
    np.testing.assert_array_equal(top, np.take_along_axis(x, order, 1))
    np.testing.assert_array_equal(idx, order)
    np.testing.assert_array_equal(where, order)
    want = x.copy()
    np.put_along_axis(want, order, -1, 1)
    np.testing.assert_array_equal(rest, want)


def test_find_index8_duplicates_and_missing(run):
    x = np.array([[5, 7, 5, 7, 5, 1, 2, 3]], F32)
    v = np.array([[7, 7, 7, 5, 5, 5, 5, 9]], F32)
    got = run(lambda o, a, b: nisa.nc_find_index8(o, a, b), [out(1, 8, dtype="uint32")], x, v)
    missing = 0xFFFFFFFF
    np.testing.assert_array_equal(got, [[1, 3, missing, 0, 2, 4, missing, missing]])


def test_match_replace8_duplicates_take_descending_positions(run):
    x = np.array([[5, 7, 5, 7, 5, 1, 2, 3]], F32)
    v = np.array([[5, 5, 9, 9, 9, 9, 9, 7]], F32)
    shapes = [out(1, 8), out(1, 8, dtype="uint32")]
    got, where = run(lambda o, w, a, b: nisa.nc_match_replace8(o, a, b, 0.0, w), shapes, x, v)
    np.testing.assert_array_equal(got, [[0, 0, 0, 7, 5, 1, 2, 3]])
    np.testing.assert_array_equal(where[0, [0, 1, 7]], [2, 0, 1])


def test_nc_stream_shuffle(run, rng):
    x = rng.standard_normal((128, 20)).astype(F32)
    mask = list(rng.integers(0, 32, 32))
    mask[3] = 255

    def body(o, v):
        nisa.memset(o, 7)
        nisa.nc_stream_shuffle(o, v, mask)

    want = np.concatenate([x[32 * q : 32 * q + 32][np.minimum(mask, 31)] for q in range(4)])
    want[3::32] = 7
    np.testing.assert_array_equal(run(body, [out(128, 20)], x), want)
    one = rng.standard_normal((1, 20)).astype(F32)
    got = run(lambda o, v: nisa.nc_stream_shuffle(o, v, [0] * 32), [out(32, 20)], one)
    np.testing.assert_array_equal(got, np.repeat(one, 32, 0))


@pytest.mark.parametrize("run_length", [1, 2, 4])
def test_local_gather(run, rng, run_length):
    src = rng.standard_normal((32, 64)).astype(F32)
    index = rng.integers(0, 64 // run_length, (32, 3), dtype=np.uint16) * np.uint16(run_length)  # a run's first element
    n = 16 * 3 * run_length

    def body(o, s, i):
        nisa.local_gather(o, s, i, run_length)

    want = np.empty((32, n), F32)
    for core in range(2):
        flat = index[16 * core : 16 * core + 16].T.reshape(-1).astype(int)
        columns = (flat[:, None] + np.arange(run_length)).reshape(-1)
        want[16 * core : 16 * core + 16] = src[16 * core : 16 * core + 16][:, columns]
    np.testing.assert_array_equal(run(body, [out(32, n)], src, index), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_nc_n_gather_and_gather_flattened(run, rng, dtype):
    x = rng.integers(-9, 9, (128, 40)).astype(NP[dtype])
    i = rng.integers(0, 40, (128, 11), dtype=np.uint32)
    want = np.take_along_axis(x, i.astype(int), 1)
    np.testing.assert_array_equal(
        run(lambda o, d, k: nisa.nc_n_gather(o, d, k), [out(128, 11, dtype=dtype)], x, i), want
    )
    got = run(lambda o, d, k: nisa.tensor_copy(o, nl.gather_flattened(d, k)), [out(128, 11, dtype=dtype)], x, i)
    np.testing.assert_array_equal(got, want)


def test_nonzero_with_count(run, rng):
    x = (rng.uniform(size=(128, 30)) < 0.4).astype(F32)

    def body(o, v):
        nisa.memset(o, 0)
        nisa.nonzero_with_count(o, v, index_offset=100, padding_val=-7)

    got = run(body, [out(128, 31, dtype="int32")], x)
    for p in range(0, 128, 16):
        hits = np.flatnonzero(x[p]) + 100
        np.testing.assert_array_equal(got[p], np.concatenate([hits, np.full(30 - len(hits), -7), [len(hits)]]))
    assert not got[1].any(), "other partitions stay as they are"


def test_sequence_bounds(run):
    ids = np.array([[1, 1, 2, 2, 2, 0, 3, 0]], F32)
    got = run(lambda o, v: nisa.sequence_bounds(o, v), [out(1, 2, 8)], ids)
    np.testing.assert_array_equal(got[0, 0], [0, 0, 2, 2, 2, 8, 6, 8])
    np.testing.assert_array_equal(got[0, 1], [2, 2, 5, 5, 5, -1, 7, -1])


def test_topk(run, rng):
    """Each of the 16 partitions that hold the stream gets all of its largest."""
    n, k = 64, 12
    stream = rng.permutation(n).astype(NP["bfloat16"])
    x = stream.reshape(n // 16, 16).T.copy()  # element i in partition i % 16
    shapes = [((16, k), "bfloat16"), ((16, k), "uint32")]
    values, index = run(lambda v, i, s: nisa.topk(v, i, s, n), shapes, x)
    np.testing.assert_array_equal(values.astype(F32), np.tile(np.sort(stream.astype(F32))[-k:], (16, 1)))
    np.testing.assert_array_equal(stream[index], values)
