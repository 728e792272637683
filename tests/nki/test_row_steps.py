"""Runs of row-local instructions: traced, they go through the machine row by row; the bits are those of single steps."""

import ml_dtypes
import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32
WIDTHS = [1, 7, 500, 1024, 1025, 2600]


def as_bits(a):
    return np.ascontiguousarray(a).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_and_norm(rng, dtype, width):
    """Reductions, functions with scale and bias, accumulation, two-operator instructions: by NumPy in fp32."""

    def kernel(x, w):
        outs = [nl.ndarray(x.shape, nl.float32, nl.shared_hbm) for _ in range(2)]
        rows, cols = x.shape
        for i in range(0, rows, 50):  # not all partitions
            n = min(50, rows - i)
            t, weight = nl.ndarray((n, cols), x.dtype), nl.ndarray((n, cols), w.dtype)
            m, s, e, y, q = (nl.ndarray((n, k), nl.float32) for k in (1, 1, cols, cols, cols))
            nisa.dma_copy(t, x[i : i + n])
            nisa.dma_copy(weight, w.ap([[0, n], [1, cols]]))
            nisa.tensor_reduce(m, nl.maximum, t, 1, negate=True)
            nisa.activation_reduce(e, nl.exp, t, nl.add, s, bias=m)
            nisa.reciprocal(s, s)
            nisa.tensor_scalar(e, e, nl.multiply, s)
            nisa.dma_copy(outs[0][i : i + n], e)
            nisa.tensor_reduce(m, nl.add, t, 1)
            nisa.tensor_scalar(m, m, nl.multiply, 1.0 / cols)
            nisa.tensor_scalar(y, t, nl.subtract, m)
            nisa.activation_reduce(q, nl.square, y, nl.add, s)
            nisa.tensor_scalar(s, s, nl.multiply, 1.0 / cols, op1=nl.add, operand1=1e-5)
            nisa.activation(s, nl.rsqrt, s)
            nisa.scalar_tensor_tensor(y, y, nl.multiply, s, nl.multiply, weight)
            nisa.tensor_tensor(y, y, weight, nl.add)
            nisa.dma_copy(outs[1][i : i + n], y)
        return tuple(outs)

    t = F32 if dtype == "float32" else np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    x, w = (rng.standard_normal(s).astype(t) for s in ((128, width), (width,)))
    x[3] = 0
    traced, stepped = nki.jit(kernel)(x, w), nki.simulate(kernel)(x, w)
    x, w = x.astype(np.float64), w.astype(np.float64)
    e = np.exp(x - x.max(1, keepdims=True))
    y = x - x.mean(1, keepdims=True)
    expected = e / e.sum(1, keepdims=True), y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5) * w + w
    for a, b, c in zip(traced, stepped, expected):
        np.testing.assert_array_equal(as_bits(a), as_bits(b))
        np.testing.assert_allclose(a, c, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", [96, 3000])
def test_what_an_instruction_reads_elsewhere_in_the_row(rng, width):
    """Halves, strides, a row shifted onto itself, one column as a scalar: each sees what was there before it."""

    def kernel(x):
        out = nl.ndarray(x.shape, nl.float32, nl.shared_hbm)
        cols, half = x.shape[1], x.shape[1] // 2
        t, u = nl.ndarray(x.shape, nl.float32), nl.ndarray(x.shape, nl.bfloat16)
        nisa.dma_copy(t, x)
        nisa.tensor_tensor(t[:, :half], t[:, :half], t[:, half:], nl.add)
        nisa.tensor_tensor(t[:, 0:cols:2], t[:, 0:cols:2], t[:, 1:cols:2], nl.subtract)
        nisa.tensor_copy(u, t)
        nisa.tensor_tensor(t[:, half:], t[:, half - 1 : cols - 1], t[:, half:], nl.maximum)
        nisa.tensor_scalar(t, t, nl.add, t[:, 5:6])
        nisa.tensor_tensor(t, t, u, nl.add)
        nisa.dma_copy(out, t)
        return out

    x = rng.integers(-64, 64, (128, width)).astype(F32)
    half, t = width // 2, x.copy()
    t[:, :half] += t[:, half:]
    t[:, ::2] -= t[:, 1::2]
    u = t.astype(ml_dtypes.bfloat16).astype(F32)
    t[:, half:] = np.maximum(t[:, half - 1 : -1], t[:, half:])
    t = t + t[:, 5:6].copy() + u
    np.testing.assert_array_equal(nki.simulate(kernel)(x), t)
    np.testing.assert_array_equal(nki.jit(kernel)(x), t)


def test_accumulation_registers_between_instructions(rng):
    """A row's sum begins anew with each accumulating instruction; a tile keeps what another block of steps needs."""

    def kernel(x):
        out = nl.ndarray((128, 3), nl.float32, nl.shared_hbm)
        t, square, sums = (
            nl.ndarray(x.shape, nl.float32),
            nl.ndarray(x.shape, nl.float32),
            nl.ndarray((128, 3), nl.float32),
        )
        nisa.dma_copy(t, x)
        nisa.activation_reduce(square, nl.square, t, nl.add, sums[:, 0:1])
        turned = nl.ndarray((128, 128), nl.float32, nl.psum)
        nisa.nc_transpose(turned, t[:, :128], nisa.engine.tensor)
        nisa.activation_reduce(square[:, :128], nl.copy, turned, nl.add, sums[:, 1:2])
        nisa.activation_reduce(t, nl.copy, square, nl.add, sums[:, 2:3])
        nisa.dma_copy(out, sums)
        return out

    x = rng.integers(-8, 8, (128, 1500)).astype(F32)
    square = x**2
    square[:, :128] = x[:, :128].T
    expected = np.stack([(x**2).sum(1), x[:, :128].sum(0), square.sum(1)], 1)
    np.testing.assert_array_equal(nki.simulate(kernel)(x), expected)
    np.testing.assert_array_equal(nki.jit(kernel)(x), expected)


def test_results_wider_than_a_chunk_in_another_type(rng):
    """Runs of 2 of a row of 5,000 are reduced; the 2,500 results are rounded to bfloat16."""

    def kernel(x):
        out = nl.ndarray((128, 2500), nl.bfloat16, nl.shared_hbm)
        t, pairs = nl.ndarray(x.shape, nl.float32), nl.ndarray((128, 2500), nl.bfloat16)
        nisa.dma_copy(t, x)
        nisa.tensor_reduce(pairs, nl.add, t.reshape((128, 2500, 2)), 2)
        nisa.dma_copy(out, pairs)
        return out

    x = rng.integers(-64, 64, (128, 5000)).astype(F32)
    expected = x.reshape(128, 2500, 2).sum(2)
    for way in (nki.simulate, nki.jit):
        np.testing.assert_array_equal(way(kernel)(x).astype(F32), expected)


@pytest.mark.parametrize(
    "dtype, rows, width", [("float32", 4100, 1025), ("bfloat16", 8300, 1030), ("float32", 9000, 500)]
)
def test_results_larger_than_the_caches(rng, dtype, rows, width):
    """16 MiB and more, written around the caches: rows that begin within a line, ends of rows, one result read again."""

    def kernel(x):
        outs = [nl.ndarray(x.shape, x.dtype, nl.shared_hbm) for _ in range(3)]
        for i in range(0, rows, 128):
            n = min(128, rows - i)
            t, m = nl.ndarray((n, width), nl.float32), nl.ndarray((n, 1), nl.float32)
            y, z = nl.ndarray((n, width), x.dtype), nl.ndarray((n, width), x.dtype)
            nisa.dma_copy(t, x[i : i + n])
            nisa.tensor_reduce(m, nl.maximum, t, 1)
            nisa.tensor_scalar(y, t, nl.subtract, m)
            nisa.dma_copy(outs[0][i : i + n], y)
            nisa.dma_copy(z, outs[0][i : i + n])
            nisa.tensor_tensor(z, z, y, nl.add)
            nisa.dma_copy(outs[1][i : i + n], z)
            nisa.tensor_scalar(y, t, nl.multiply, 3.0)
            nisa.dma_copy(outs[2][i : i + n, : width - 3], y[:, : width - 3])
            nisa.dma_copy(outs[2][i : i + n, width - 3 :], t[:, :3])
        return tuple(outs)

    t = F32 if dtype == "float32" else ml_dtypes.bfloat16
    x = rng.standard_normal((rows, width)).astype(t)
    f = x.astype(F32)
    less = (f - f.max(1, keepdims=True)).astype(t)
    tripled = (f * F32(3)).astype(t)
    tripled[:, width - 3 :] = x[:, :3]
    for got, want in zip(nki.jit(kernel)(x), (less, (less.astype(F32) * 2).astype(t), tripled)):
        np.testing.assert_array_equal(as_bits(got), as_bits(want))


def test_narrow_numbers_serve_all_chunks_of_a_row(rng):
    """A factor of bfloat16 for each row, while the next instruction converts the row's chunks."""

    def kernel(x, factor):
        out = nl.ndarray(x.shape, nl.float32, nl.shared_hbm)
        t, u, f = nl.ndarray(x.shape, nl.float32), nl.ndarray(x.shape, nl.bfloat16), nl.ndarray((128, 1), nl.bfloat16)
        nisa.dma_copy(t, x)
        nisa.dma_copy(f, factor)
        nisa.tensor_copy(u, t)
        nisa.tensor_scalar(t, t, nl.multiply, f)
        nisa.tensor_tensor(t, u, t, nl.add)
        nisa.activation(t, nl.copy, t, scale=f)
        nisa.tensor_tensor(t, u, t, nl.subtract)
        nisa.dma_copy(out, t)
        return out

    x = rng.integers(-64, 64, (128, 2600)).astype(F32)
    factor = rng.integers(-8, 8, (128, 1)).astype(ml_dtypes.bfloat16)
    f = factor.astype(F32)
    for way in (nki.simulate, nki.jit):
        np.testing.assert_array_equal(way(kernel)(x, factor), x - (x + x * f) * f)


@pytest.mark.parametrize("seed", [*range(12), 122, 143, 192, 194])
def test_random_runs_give_the_bits_of_single_steps(seed):
    """Instructions drawn at random on tiles of three types, whole or in parts; what they mean is tested elsewhere."""
    draw = np.random.default_rng(seed)
    width = int(draw.choice([64, 1000, 1024, 2048, 2600]))
    types = (nl.float32, nl.bfloat16, nl.float16)
    rows = int(draw.choice([128, 70]))

    def part():
        half = width // 2
        return [(0, width, 1), (0, half, 1), (half, width, 1), (0, width, 2), (1, width, 2)][draw.integers(5)]

    def same_size():
        a = part()
        while True:
            b, c = part(), part()
            if len({len(range(*p)) for p in (a, b, c)}) == 1:
                return a, b, c

    alu, unary = ("add", "subtract", "multiply", "maximum", "minimum"), ("square", "exp", "copy", "relu", "sigmoid")
    plan = [
        (
            int(draw.integers(6)),
            draw.integers(3, size=3).tolist(),
            same_size(),
            draw.choice(alu, 2).tolist(),
            str(draw.choice(unary)),
            float(draw.choice([0.0, 1.0, 0.5, -0.25])),
            int(draw.integers(2)),
            int(draw.integers(3)),
        )
        for _ in range(24)
    ]

    def kernel(x):
        outs = [nl.ndarray((rows, width), nl.float32, nl.shared_hbm) for _ in types]
        sums_out = nl.ndarray((rows, 3), nl.float32, nl.shared_hbm)
        tiles = [nl.ndarray((rows, width), t) for t in types]
        numbers = [nl.ndarray((rows, 1), t) for t in types]
        for i, (t, n) in enumerate(zip(tiles, numbers)):
            nisa.dma_copy(t, x[i])
            nisa.tensor_reduce(n, nl.maximum, t, 1)
        for kind, which, places, ops, function, number, flag, scalar in plan:
            a, b, c = (tiles[w][:, slice(*p)] for w, p in zip(which, places))
            f, g = (getattr(nl, o) for o in ops)
            s = numbers[scalar] if flag else number
            if kind == 0:
                nisa.tensor_tensor(a, b, c, f)
            elif kind == 1:
                nisa.tensor_scalar(a, b, f, s, op1=g, operand1=number, reverse1=bool(flag))
            elif kind == 2:
                nisa.scalar_tensor_tensor(a, b, f, s, g, c)
            elif kind == 3:
                nisa.activation_reduce(a, getattr(nl, function), b, nl.add, numbers[scalar], scale=number)
            elif kind == 4:
                nisa.tensor_copy(a, b)
            else:
                nisa.tensor_reduce(numbers[scalar], nl.minimum, b, 1, negate=bool(flag))
            nisa.tensor_scalar(a, a, nl.minimum, 4.0, op1=nl.maximum, operand1=-4.0)
            nisa.tensor_scalar(numbers[scalar], numbers[scalar], nl.minimum, 4.0, op1=nl.maximum, operand1=-4.0)
        for o, t in zip(outs, tiles):
            nisa.dma_copy(o, t)
        for i, n in enumerate(numbers):
            nisa.dma_copy(sums_out[:, i : i + 1], n)
        return (*outs, sums_out)

    x = draw.standard_normal((3, rows, width)).astype(F32)
    for traced, stepped in zip(nki.jit(kernel)(x), nki.simulate(kernel)(x)):
        np.testing.assert_array_equal(as_bits(traced), as_bits(stepped))


@pytest.mark.parametrize("seed", range(30))
def test_random_runs(seed):
    """Instructions on a few tiles, of which some are read later and some are not, by ones that also go into one pass:
    the bits of single steps, and of NumPy."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([40, 1024, 1500]))
    run = {nl.add: np.add, nl.subtract: np.subtract, nl.multiply: np.multiply}
    linear = (nl.add, nl.subtract)
    plan = []
    for _ in range(14):
        kind = rng.choice(["scalar", "tensor", "both", "square", "copy"])
        d, a, b = (int(i) for i in rng.integers(0, 3, 3))
        scalar = nl.multiply if rng.integers(2) else linear[rng.integers(2)]
        plan.append((kind, d, a, b, scalar, linear[rng.integers(2)]))
    kept = bool(rng.integers(2))

    def body(t, s, sums, new):
        for i, (kind, d, a, b, scalar, op) in enumerate(plan):
            if kind == "scalar":
                nisa.tensor_scalar(t[d], t[a], scalar, s)
            elif kind == "tensor":
                nisa.tensor_tensor(t[d], t[a], t[b], op)
            elif kind == "both":
                nisa.scalar_tensor_tensor(t[d], t[a], scalar, s, op, t[b])
            else:
                square = new()
                function = nl.square if kind == "square" else nl.copy
                nisa.activation_reduce(square, function, t[a], nl.add, sums[:, i : i + 1])

    def kernel(x, y, s):
        out = nl.ndarray((128, width), nl.float32, nl.shared_hbm)
        out_sums = nl.ndarray((128, len(plan)), nl.float32, nl.shared_hbm)

        def new():
            return nl.ndarray((128, width), nl.float32)

        t, sums = [new() for _ in range(3)], nl.ndarray((128, len(plan)), nl.float32)
        factor = nl.load(s)
        nisa.memset(sums, 0)
        for tile, source in zip(t, (x, y, x)):
            nisa.dma_copy(tile, source)
        body(t, factor, sums, new)
        if kept:
            nisa.tensor_tensor(t[0], t[0], t[1], nl.add)
            nisa.tensor_tensor(t[0], t[0], t[2], nl.add)
        nl.store(out, t[0])
        nl.store(out_sums, sums)
        return out, out_sums

    x, y = (rng.integers(-8, 9, (128, width)).astype(F32) for _ in range(2))
    s = rng.choice([-2, -1, 0.5, 1, 2], (128, 1)).astype(F32)
    t = [x, y, x]
    for kind, d, a, b, scalar, op in plan:
        if kind == "scalar":
            t[d] = run[scalar](t[a], s)
        elif kind == "tensor":
            t[d] = run[op](t[a], t[b])
        elif kind == "both":
            t[d] = run[op](run[scalar](t[a], s), t[b])
    traced, stepped = nki.jit(kernel)(x, y, s), nki.simulate(kernel)(x, y, s)
    np.testing.assert_array_equal(traced[0], t[0] + t[1] + t[2] if kept else t[0])
    for a, b in zip(traced, stepped):
        np.testing.assert_array_equal(as_bits(a), as_bits(b))
