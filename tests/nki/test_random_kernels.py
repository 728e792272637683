"""Random kernels of loops, registers, views and moves: traced and step by step they give what the same statements give on
NumPy arrays."""

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

ROWS, COLUMNS, TILES = 16, 24, 3


class Random:
    """Statements as functions of the machine that they run on (Device or Host) and the values of the loops around them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def upto(self, n):
        return int(self.rng.integers(n + 1))

    def number(self, most, loops):
        """An expression from 0 to `most`: (constant, factor, which of the loops), the loop's trips being known."""
        if not loops or self.upto(2) == 0:
            return (self.upto(most), 0, 0)
        which = self.upto(len(loops) - 1)
        last = max(1, loops[which] - 1)
        factor = self.upto(most // last)
        return (self.upto(most - factor * last), factor, which)

    def place(self, rows, columns, loops):
        """Where rows x columns elements lie in a tensor."""
        step = self.pick(1, 1, 2) if 2 * columns <= COLUMNS else 1
        row = self.number(ROWS - rows, loops)
        return row, rows, self.number(COLUMNS - (columns - 1) * step - 1, loops), columns, step

    def statement(self, depth, loops):
        kind = (
            self.pick("loop", "add", "sum", "move", "load", "store") if depth < 3 else self.pick("add", "sum", "load")
        )
        if kind == "loop":
            trips = self.upto(3)
            body = [self.statement(depth + 1, [*loops, trips]) for _ in range(1 + self.upto(2))]
            by_register = bool(self.upto(1))
            return lambda m, i: m.loop(trips, by_register, lambda j: [s(m, [*i, j]) for s in body])
        columns = 1 + self.upto(7)
        a, b = (self.upto(TILES - 1) for _ in range(2))
        # Whole columns: partitions of two operands begin at the same place.
        p, q = (((0, 0, 0), ROWS, *self.place(ROWS, columns, loops)[2:]) for _ in range(2))
        if kind == "add":
            value = float(self.upto(9))
            return lambda m, i: m.add(m.view(a, p, i), value)
        if kind == "sum":
            return lambda m, i: m.sum(m.view(a, p, i), m.view(b, q, i))
        if kind == "move":
            return lambda m, i: m.copy(m.view(a, p, i), m.view(b, q, i))
        rows = 1 + self.upto(ROWS - 1)
        inner, outer = self.place(rows, columns, loops), self.place(rows, columns, loops)
        if kind == "load":
            return lambda m, i: m.move(m.view(a, inner, i), m.view("x", outer, i))
        return lambda m, i: m.move(m.view("out", outer, i), m.view(a, inner, i))


class Host:
    def __init__(self, x):
        self.tensors = {"x": x, "out": np.zeros_like(x), **{i: np.full_like(x, i) for i in range(TILES)}}

    def value(self, e, i):
        return e[0] + (e[1] * i[e[2]] if e[1] else 0)

    def view(self, name, place, i):
        row, rows, column, columns, step = place
        r, c = self.value(row, i), self.value(column, i)
        return self.tensors[name][r : r + rows, c : c + (columns - 1) * step + 1 : step]

    def loop(self, trips, by_register, body):
        for j in range(trips):
            body(j)

    def add(self, a, value):
        a += np.float32(value)

    def sum(self, a, b):
        a[...] = a + b.copy()

    def copy(self, a, b):
        a[...] = b.copy()

    move = copy


class Device(Host):
    def __init__(self, x):
        self.tensors = {"x": x, "out": nl.zeros(x.shape, x.dtype, nl.shared_hbm)}
        self.tensors |= {i: nl.full(x.shape, i, x.dtype) for i in range(TILES)}

    def view(self, name, place, i):
        row, rows, column, columns, step = place
        r, c = self.value(row, i), self.value(column, i)
        view = self.tensors[name][nl.ds(r, rows), nl.ds(c, (columns - 1) * step + 1)]
        return view[:, ::step]

    def loop(self, trips, by_register, body):
        nl.fori_loop(0, nisa.register_alloc(trips) if by_register else trips, body)

    def add(self, a, value):
        nisa.tensor_scalar(a, a, nl.add, value)

    def sum(self, a, b):
        nisa.tensor_tensor(a, a, b, nl.add)

    def copy(self, a, b):
        nisa.tensor_copy(a, b)

    def move(self, a, b):
        nisa.dma_copy(a, b)


@pytest.mark.parametrize("seed", range(60))
def test_random_kernels(seed):
    random = Random(seed)
    statements = [random.statement(0, []) for _ in range(12)]
    x = random.rng.integers(-8, 9, (ROWS, COLUMNS)).astype(np.float32)
    host = Host(x)
    for s in statements:
        s(host, [])

    def kernel(x):
        device = Device(x)
        for s in statements:
            s(device, [])
        results = []
        for i in range(TILES):
            results.append(nl.ndarray(x.shape, x.dtype, nl.shared_hbm))
            nisa.dma_copy(results[-1], device.tensors[i])
        return [device.tensors["out"], *results]

    for way in (nki.simulate, nki.jit):
        for name, got in zip(["out", *range(TILES)], way(kernel)(x)):
            np.testing.assert_array_equal(got, host.tensors[name], err_msg=f"{way.__name__}: {name}")


N = 9
OVERLAPS = {
    "hbm": lambda x, r: (nisa.dma_copy, x[1:N, :], x[0 : N - 1, :]),
    "hbm, to a register": lambda x, r: (nisa.dma_copy, x[nl.ds(r, N - 1), :], x[0 : N - 1, :]),
    "hbm, from a register": lambda x, r: (nisa.dma_copy, x[1:N, :], x[nl.ds(r - 1, N - 1), :]),
    "hbm, both": lambda x, r: (nisa.dma_copy, x[nl.ds(r, N - 1), :], x[nl.ds(r - 1, N - 1), :]),
    "hbm, sums": lambda x, r: (nisa.dma_compute, x[1:N, :], x[0 : N - 1, :]),
    "hbm, sums by registers": lambda x, r: (nisa.dma_compute, x[nl.ds(r, N - 1), :], x[0 : N - 1, :]),
    "sbuf": lambda x, r: (nisa.tensor_copy, x[:, 1:N], x[:, 0 : N - 1]),
    "sbuf, to a register": lambda x, r: (nisa.tensor_copy, x[:, nl.ds(r, N - 1)], x[:, 0 : N - 1]),
    "sbuf, from a register": lambda x, r: (nisa.tensor_copy, x[:, 1:N], x[:, nl.ds(r - 1, N - 1)]),
    "sbuf, by dma": lambda x, r: (nisa.dma_copy, x[:, nl.ds(r, N - 1)], x[:, 0 : N - 1]),
}


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
@pytest.mark.parametrize("name", OVERLAPS)
def test_what_overlaps_its_source_is_read_first(name, way):
    def kernel(x):
        r = nisa.register_alloc(1)
        if name.startswith("hbm"):
            y = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
            nisa.dma_copy(y, x)
        else:
            y = nl.load(x)
        move, to, source = OVERLAPS[name](y, r)
        if move is nisa.dma_compute:
            move(to, [source, source], nl.add)
        else:
            move(to, source)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, y)
        return out

    x = np.arange(N * N, dtype=np.float32).reshape(N, N)
    want = x.copy()
    if name.startswith("hbm"):
        want[1:] = x[:-1] * (2 if "sums" in name else 1)
    else:
        want[:, 1:] = x[:, :-1]
    np.testing.assert_array_equal(way(kernel)(x), want)
