"""TensorE, transposes, MX types and DMA against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from nki_reference import NP

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32


def matmul_into(o, compute):
    """Runs compute(psum tile) and copies the tile to o."""
    p = nl.ndarray(o.shape, nl.float32, nl.psum)
    compute(p)
    nisa.tensor_copy(o, p)


@pytest.mark.parametrize(
    "k,m,n", [(128, 128, 512), (1, 1, 1), (64, 32, 17), (128, 5, 513 - 1), (3, 128, 100), (127, 97, 33)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_nc_matmul(run, rng, k, m, n, dtype):
    a, b = rng.standard_normal((k, m)).astype(NP[dtype]), rng.standard_normal((k, n)).astype(NP[dtype])
    got = run(lambda o, x, y: matmul_into(o, lambda p: nisa.nc_matmul(p, x, y)), [((m, n), "float32")], a, b)
    want = a.astype(np.float64).T @ b.astype(np.float64)
    scale = np.abs(a.astype(np.float64)).T @ np.abs(b.astype(np.float64))
    assert (np.abs(got - want) <= scale * 2.0**-23 * max(1, k) ** 0.5 * 2 + 1e-30).all()


def test_accumulation_modes(run, rng):
    a, b = (rng.integers(-3, 4, (64, n)).astype(F32) for n in (32, 50))
    product = a.T @ b

    def automatic(p, x, y):  # first write overwrites, later ones add, element by element
        nisa.nc_matmul(p[:, 0:20], x, y[:, 0:20])
        nisa.nc_matmul(p, x, y)
        nisa.nc_matmul(p, x, y)

    want = 2 * product
    want[:, :20] = 3 * product[:, :20]
    got = run(lambda o, x, y: matmul_into(o, lambda p: automatic(p, x, y)), [((32, 50), "float32")], a, b)
    np.testing.assert_array_equal(got, want)

    def explicit(p, x, y):
        nisa.nc_matmul(p, x, y, accumulate=False)
        nisa.nc_matmul(p, x, y, accumulate=True)
        nisa.nc_matmul(p[:, 0:10], x, y[:, 0:10], accumulate=False)

    want = 2 * product
    want[:, :10] = product[:, :10]
    got = run(lambda o, x, y: matmul_into(o, lambda p: explicit(p, x, y)), [((32, 50), "float32")], a, b)
    np.testing.assert_array_equal(got, want)


def test_accumulation_in_a_device_loop(run, rng):
    a, b = (rng.integers(-3, 4, (64, n)).astype(F32) for n in (32, 50))

    def body(o, x, y):
        p = nl.ndarray((32, 50), nl.float32, nl.psum)
        for _ in nl.dynamic_range(5):
            nisa.nc_matmul(p, x, y)
        nisa.tensor_copy(o, p)

    np.testing.assert_array_equal(run(body, [((32, 50), "float32")], a, b), 5 * (a.T @ b))


def test_bfloat16_accumulation_rounds_at_every_write(run, rng):
    a, b = (
        rng.standard_normal((128, 16)).astype(ml_dtypes.bfloat16),
        rng.standard_normal((128, 30)).astype(ml_dtypes.bfloat16),
    )

    def body(o, x, y):
        p = nl.ndarray((16, 30), nl.bfloat16, nl.psum)
        for _ in range(3):
            nisa.nc_matmul(p, x, y)
        nisa.tensor_copy(o, p)

    product = a.astype(F32).T @ b.astype(F32)
    want = product.astype(ml_dtypes.bfloat16)
    for _ in range(2):
        want = (want.astype(F32) + product).astype(ml_dtypes.bfloat16)
    got = run(body, [((16, 30), "bfloat16")], a, b)
    np.testing.assert_allclose(got.astype(F32), want.astype(F32), rtol=2**-7)


@pytest.mark.parametrize("mode", [nisa.matmul_perf_mode.double_row, "double_row"], ids=["member", "name"])
def test_double_row(run, rng, mode):
    a, b = (rng.integers(-3, 4, (128, 2, n)).astype(ml_dtypes.float8_e4m3) for n in (64, 100))
    got = run(
        lambda o, x, y: matmul_into(o, lambda p: nisa.nc_matmul(p, x, y, perf_mode=mode)),
        [((64, 100), "float32")],
        a,
        b,
    )
    np.testing.assert_array_equal(got, np.einsum("krm,krn->mn", a.astype(F32), b.astype(F32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_nc_transpose(run, rng, dtype):
    x = rng.integers(0, 100, (96, 70)).astype(NP[dtype])

    def body(o, v):
        p = nl.ndarray((70, 96), dtype, nl.psum)
        nisa.nc_transpose(p, v)
        nisa.tensor_copy(o, p)

    np.testing.assert_array_equal(run(body, [((70, 96), dtype)], x), x.T)
    small = x[:32, :20].copy()
    got = run(lambda o, v: nisa.nc_transpose(o, v, nisa.engine.vector), [((20, 32), dtype)], small)
    np.testing.assert_array_equal(got, small.T)


def test_matmul_transpose_mode_keeps_bits(run, rng):
    x = rng.standard_normal((64, 48)).astype(ml_dtypes.bfloat16)
    x[3, 5] = np.inf
    eye = np.eye(64).astype(ml_dtypes.bfloat16)

    def body(o, v, i):
        p = nl.ndarray((48, 64), nl.bfloat16, nl.psum)
        nisa.nc_matmul(p, v, i, is_transpose=True)
        nisa.tensor_copy(o, p)

    np.testing.assert_array_equal(run(body, [((48, 64), "bfloat16")], x, eye), x.T)


def packed(values, lane):
    return values.astype(lane).view(np.uint32)


def test_quantize_mx_and_matmul_mx(run, rng, monkeypatch):
    """Quantise as the OCP rule and with headroom says; multiply: dequantised values, contracted over P * 4."""
    p, m, n = 128, 32, 40
    a = (rng.standard_normal((p, 4 * m)) * np.exp2(rng.integers(-6, 6, (p, 1)))).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((p, 4 * n)).astype(ml_dtypes.bfloat16)

    def reference(x, headroom):
        g = x.astype(np.float64).reshape(p // 8, 8, -1, 4)
        top = np.abs(g).max((1, 3))
        e = np.where(top > 0, np.floor(np.log2(np.where(top > 0, top, 1))) - (8 - headroom), -127)
        scale = np.exp2(e)[:, None, :, None]
        q = np.clip(g / scale, -448, 448).astype(F32).astype(ml_dtypes.float8_e4m3fn)
        return q.reshape(p, -1), (e + 127).astype(np.uint8), (q.astype(np.float64) * scale).reshape(p, -1)

    def body(qa, sa, qb, sb, prod, x, y):
        for v, q, s in ((x, qa, sa), (y, qb, sb)):
            nisa.quantize_mx(q, v, s)
        psum = nl.ndarray((m, n), nl.float32, nl.psum)
        nisa.nc_matmul_mx(psum, qa, qb, sa, sb)
        nisa.tensor_copy(prod, psum)

    outputs = [
        ((p, m), "float8_e4m3fn_x4"),
        ((p, m), "uint8"),
        ((p, n), "float8_e4m3fn_x4"),
        ((p, n), "uint8"),
        ((m, n), "float32"),
    ]
    for mode, headroom in (("ocp", 0), ("", 1)):
        monkeypatch.setenv("TORCH_NEURON_MX_SCALE", mode)
        qa, sa, qb, _, got = run(body, outputs, a, b)
        (wa, ea, da), (wb, _, db) = reference(a, headroom), reference(b, headroom)
        np.testing.assert_array_equal(qa, wa.view(nl.float8_e4m3fn_x4))
        np.testing.assert_array_equal(qb, wb.view(nl.float8_e4m3fn_x4))
        want = np.zeros((p, m), np.uint8)  # rows without a scale are 0
        want[[32 * (g // 4) + g % 4 for g in range(p // 8)]] = ea
        np.testing.assert_array_equal(sa, want)
        x, y = da.reshape(p, m, 4), db.reshape(p, n, 4)
        np.testing.assert_allclose(got, np.einsum("kml,knl->mn", x, y), rtol=1e-5, atol=1e-3)


def test_mx_scales_of_two_tiles_share_a_buffer(rng, monkeypatch):
    """Beside each other, in rows 0 to 3 and 4 to 7 of each 32 partitions, they give what scales by themselves give."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    a, b = (rng.standard_normal((128, 4 * n)).astype(ml_dtypes.bfloat16) for n in (32, 40))

    def kernel(first, second, start):
        out = nl.ndarray((32, 40), nl.float32, nl.shared_hbm)
        scales = [nl.ndarray((128, 40), nl.uint8) for _ in range(1 if start else 2)]
        for s in scales:
            nisa.memset(s, 0)
        factors = []
        for x, s in ((first, scales[0][:, 0:32]), (second, scales[-1][start:])):
            t = nl.load(x)
            q = nl.ndarray((128, x.shape[1] // 4), nl.float8_e4m3fn_x4)
            nisa.quantize_mx(q, t, s)
            factors.append((q, s))
        p = nl.ndarray((32, 40), nl.float32, nl.psum)
        (x, sx), (y, sy) = factors
        nisa.nc_matmul_mx(p, x, y, sx, sy)
        nl.store(out, nl.copy(p))
        return out

    apart = nki.simulate(kernel)(a, b, 0)
    np.testing.assert_array_equal(nki.simulate(kernel)(a, b, 4), apart)
    with pytest.raises(nki.NkiValidationError, match="dst_scale start partition 6.*0, 4, 8 or 12"):
        nki.simulate(kernel)(a, b, 6)


def test_matmul_mx_reads_only_rows_that_hold_scales(rng, monkeypatch):
    """Rows 0 to 3 of each 32 partitions; nothing need be in the others. A tile without all of them is refused."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    p, m, n = 128, 16, 24
    x, y = (rng.integers(0, 2**16, (p, k), dtype=np.uint16) for k in (m, n))
    scale_x, scale_y = (rng.integers(120, 134, (p // 8, k), dtype=np.uint8) for k in (m, n))

    def kernel(x, y, scale_x, scale_y, quadrants, rows):
        out = nl.ndarray((m, n), nl.float32, nl.shared_hbm)
        factors = []
        for v, s in ((x, scale_x), (y, scale_y)):
            t, scales = nl.ndarray(v.shape, nl.float4_e2m1fn_x4), nl.ndarray(v.shape, nl.uint8)
            nisa.dma_copy(t.view(nl.uint16), v)
            for q in range(quadrants):
                nisa.dma_copy(scales[32 * q : 32 * q + 4], s[4 * q : 4 * q + 4])
            factors.append((t, scales))
        psum = nl.ndarray((m, n), nl.float32, nl.psum)
        (a, sa), (b, sb) = factors
        nisa.nc_matmul_mx(psum, a, b, sa, sb[:rows])
        nl.store(out, nl.copy(psum))
        return out

    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def values(words, scale):
        d = table[words[:, :, None] >> np.array([0, 4, 8, 12]) & 15]
        return d * np.exp2(np.repeat(scale.astype(float), 8, 0) - 127)[:, :, None]

    expected = np.einsum("kml,knl->mn", values(x, scale_x), values(y, scale_y))
    for run_kernel in (nki.simulate(kernel), nki.jit(kernel)):
        np.testing.assert_allclose(run_kernel(x, y, scale_x, scale_y, 4, p), expected, rtol=1e-5, atol=0.01)
        with pytest.raises(nki.NkiUninitialisedReadError, match="partition 96"):
            run_kernel(x, y, scale_x, scale_y, 3, p)
        with pytest.raises(nki.NkiValidationError, match=r"moving_scale shape \(98, 24\) is smaller than \(100, 24\)"):
            run_kernel(x, y, scale_x, scale_y, 4, 98)


def test_matmul_mx_fp4(run, rng):
    """Four 4-bit values per element: sign, two exponent bits, one mantissa bit."""
    codes = rng.integers(0, 16, (32, 16, 4))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    words = (codes << np.array([0, 4, 8, 12])).sum(-1).astype(np.uint16)
    x = words.view(nl.float4_e2m1fn_x4)
    scale = rng.integers(120, 134, (4, 16), dtype=np.uint8)

    def body(o, v, s):
        matmul_into(o, lambda p: nisa.nc_matmul_mx(p, v, v, s, s))

    got = run(body, [((16, 16), "float32")], x, scale)
    d = table[codes] * np.exp2(np.repeat(scale.astype(float), 8, 0) - 127)[:, :, None]
    np.testing.assert_allclose(got, np.einsum("kml,knl->mn", d, d), rtol=1e-5)


# ---- DMA -----------------------------------------------------------------------------------------------------------
def both_ways(kernel, *args):
    """Result step by step; equal to the traced one."""
    a, b = nki.simulate(kernel)(*args), nki.jit(kernel)(*args)
    np.testing.assert_array_equal(a, b)
    return a


@pytest.mark.parametrize("src", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("dst", ["float32", "bfloat16", "int32", "uint8"])
def test_dma_copy_casts(rng, src, dst):
    x = rng.integers(0, 200, (70, 33)).astype(NP[src])

    def k(a):
        o = nl.ndarray(a.shape, dst, nl.shared_hbm)
        t = nl.ndarray(a.shape, dst, nl.sbuf)
        nisa.dma_copy(t, a)
        nisa.dma_copy(o, t)
        return o

    np.testing.assert_array_equal(both_ways(k, x), x.astype(F32).astype(NP[dst]))


def test_dma_copy_shapes_strides_and_broadcast(rng):
    x = rng.standard_normal((6, 40, 10)).astype(F32)

    def k(a):
        o = nl.ndarray((40, 6, 10), nl.float32, nl.shared_hbm)
        t = nl.ndarray((40, 60), nl.float32, nl.sbuf)
        nisa.dma_copy(t.reshape((40, 6, 10)), a.permute((1, 0, 2)))
        nisa.dma_copy(o.reshape((240, 10)), t)
        return o

    np.testing.assert_array_equal(both_ways(k, x), x.transpose(1, 0, 2))

    def broadcast(a):
        o = nl.ndarray((128, 10), nl.float32, nl.shared_hbm)
        t = nl.ndarray((128, 10), nl.float32, nl.sbuf)
        nisa.dma_copy(t, a.ap([[0, 128], [1, 10]], offset=410))
        nisa.dma_copy(o, t)
        return o

    np.testing.assert_array_equal(both_ways(broadcast, x), np.broadcast_to(x[1, 1], (128, 10)))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_dma_transpose(rng, rank):
    shape = {2: (30, 50), 3: (5, 6, 40), 4: (3, 4, 5, 20)}[rank]
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[rank]
    x = rng.standard_normal(shape).astype(F32)
    turned = tuple(shape[a] for a in axes)

    def k(a):
        o = nl.ndarray(turned, nl.float32, nl.shared_hbm)
        t = nl.ndarray(turned, nl.float32, nl.sbuf)
        nisa.dma_transpose(t, a)
        nisa.dma_copy(o, t)
        return o

    np.testing.assert_array_equal(both_ways(k, x), x.transpose(axes))


def test_gather_and_scatter_rows(rng):
    table = rng.standard_normal((50, 12)).astype(F32)
    idx = rng.permutation(50)[:32].astype(np.int32)[:, None]

    def gather(a, i):
        o = nl.ndarray((32, 12), nl.float32, nl.shared_hbm)
        t, n = nl.ndarray((32, 12), nl.float32), nl.ndarray((32, 1), nl.int32)
        nisa.dma_copy(n, i)
        nisa.dma_copy(t, a.ap([[12, 32], [1, 12]], vector_offset=n))
        nisa.dma_copy(o, t)
        return o

    np.testing.assert_array_equal(both_ways(gather, table, idx), table[idx[:, 0]])

    def scatter(a, i):
        o = nl.zeros((50, 12), nl.float32, nl.shared_hbm)
        t, n = nl.ndarray((32, 12), nl.float32), nl.ndarray((32, 1), nl.int32)
        nisa.dma_copy(n, i)
        nisa.dma_copy(t, a[0:32])
        nisa.dma_copy(o.vector_select(0, n), t)
        return o

    want = np.zeros((50, 12), F32)
    want[idx[:, 0]] = table[:32]
    np.testing.assert_array_equal(both_ways(scatter, table, idx), want)


def test_out_of_bounds_rows_raise_or_are_skipped(rng):
    table = rng.standard_normal((20, 5)).astype(F32)
    idx = np.array([[3], [25], [0], [-1]], np.int32)

    def make(mode):
        def k(a, i):
            o = nl.ndarray((4, 5), nl.float32, nl.shared_hbm)
            t, n = nl.full((4, 5), 9.0, nl.float32), nl.ndarray((4, 1), nl.int32)
            nisa.dma_copy(n, i)
            nisa.dma_copy(t, a.ap([[5, 4], [1, 5]], vector_offset=n), oob_mode=mode)
            nisa.dma_copy(o, t)
            return o

        return k

    got = both_ways(make(nisa.oob_mode.skip), table, idx)
    np.testing.assert_array_equal(got, np.stack([table[3], np.full(5, 9), table[0], np.full(5, 9)]))
    for run in (nki.simulate(make(nisa.oob_mode.error)), nki.jit(make(nisa.oob_mode.error))):
        with pytest.raises(nki.NkiOutOfBoundsError, match="dma_copy src.*row 1"):
            run(table, idx)


def test_dma_compute_adds_and_scatters(rng):
    a, b, c = (rng.integers(-9, 9, (16, 8)).astype(F32) for _ in range(3))

    def add3(x, y, z):
        o = nl.ndarray((16, 8), nl.float32, nl.shared_hbm)
        nisa.dma_compute(o, [x, y, z], nl.add)
        return o

    np.testing.assert_array_equal(both_ways(add3, a, b, c), a + b + c)
    idx = np.array([2, 5, 2, 2] * 4, np.int32)[:, None]

    def scatter_add(x, i):
        o = nl.zeros((8, 8), nl.float32, nl.shared_hbm)
        t, n = nl.ndarray((16, 8), nl.float32), nl.ndarray((16, 1), nl.int32)
        nisa.dma_copy(t, x)
        nisa.dma_copy(n, i)
        rows = o.vector_select(0, n)
        nisa.dma_compute(rows, [t, rows], nl.add, unique_indices=False)
        return o

    want = np.zeros((8, 8), F32)
    np.add.at(want, idx[:, 0], a)
    np.testing.assert_array_equal(both_ways(scatter_add, a, idx), want)


def test_scalar_offset_from_a_tile_and_from_a_loop(rng):
    x = rng.standard_normal((10, 6, 4)).astype(F32)
    at = np.array([[3]], np.int32)

    def from_tile(a, i):
        o = nl.ndarray((6, 4), nl.float32, nl.shared_hbm)
        n, t = nl.ndarray((1, 1), nl.int32), nl.ndarray((6, 4), nl.float32)
        nisa.dma_copy(n, i)
        nisa.dma_copy(t, a.select(0, n))
        nisa.dma_copy(o, t)
        return o

    np.testing.assert_array_equal(both_ways(from_tile, x, at), x[3])

    def loop(a, i):
        o = nl.ndarray((10, 6, 4), nl.float32, nl.shared_hbm)
        for n in nl.dynamic_range(10):
            t = nl.ndarray((6, 4), nl.float32)
            nisa.dma_copy(t, a[n])
            nisa.tensor_scalar(t, t, nl.multiply, 2.0)
            nisa.dma_copy(o[n], t)
        return o

    np.testing.assert_array_equal(both_ways(loop, x, at), 2 * x)


def test_indirect_elements(run, rng):
    x = rng.standard_normal((32, 40)).astype(F32)
    index = rng.integers(0, 40, (32, 2), dtype=np.uint16)
    got = run(lambda o, v, i: nisa.tensor_copy(o, v.indirect(i, 20)), [((32, 20), "float32")], x, index)
    want = np.empty((32, 20), F32)
    for p in range(32):
        group = index[p // 16 * 16 : p // 16 * 16 + 16]
        want[p] = [x[p, group[k % 16, k // 16]] for k in range(20)]
    np.testing.assert_array_equal(got, want)
