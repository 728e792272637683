"""Registers as values, loops and places, against Python's integers: step by step and traced give the same."""

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32
WAYS = pytest.mark.parametrize("way", [nki.simulate, nki.jit])
X = np.arange(8 * 8, dtype=np.int32).reshape(8, 8)


def saved(t):
    out = nl.ndarray(t.shape, t.dtype, nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


def number(value=0):
    t = nl.ndarray((1, 1), nl.int32)
    nisa.memset(t, value)
    return t


def kept(register):
    t = number()
    nisa.register_store(t, register)
    return saved(t)


def moved(source):
    r = nisa.register_alloc(0)
    nisa.register_move(r, source)
    return r


VALUES = {
    "store": (lambda a, b: a * 2 + 1, 7),
    "move": (lambda a, b: moved(a + 4), 7),
    "alloc": (lambda a, b: nisa.register_alloc(a - 1), 2),
    "sum": (lambda a, b: a + b, 5),
    "scaled sum": (lambda a, b: (a * 3 + 1) + (b * -2 + 5), 11),
    "difference": (lambda a, b: a - b, 1),
    "from a number": (lambda a, b: 10 - a, 7),
    "negative": (lambda a, b: -a, -3),
    "of the host": (lambda a, b: nisa.register_alloc((a // b) + (a % b) + (a > b) + (a == 3) * 10), 13),
}


@WAYS
@pytest.mark.parametrize("name", VALUES)
def test_arithmetic(name, way):
    compute, want = VALUES[name]

    def kernel(x):
        return kept(compute(nisa.register_alloc(3), nisa.register_alloc(2)))

    assert way(kernel)(X).item() == want


@WAYS
@pytest.mark.parametrize("value, want", [(2.5, 2), (3.5, 4), (-2.6, -3), (1e20, 2**31 - 1), (-1e20, -(2**31))])
def test_a_register_from_a_float_rounds_to_nearest_even_and_saturates(value, want, way):
    def kernel(x):
        r = nisa.register_alloc()
        nisa.register_load(r, nl.load(x))
        return kept(r)

    assert way(kernel)(np.array([[value]], F32)).item() == want


LOOPS = {
    "stop": (lambda r: nl.dynamic_range(0, r + 2), [0, 1, 2, 3, 4]),
    "start": (lambda r: nl.dynamic_range(r * 2, 9), [6, 7, 8]),
    "both": (lambda r: nl.dynamic_range(r - 1, r * 3, 3), [2, 5, 8]),
    "none": (lambda r: nl.dynamic_range(r, r - 1), []),
    "numbers": (lambda r: nl.dynamic_range(5, 5), []),
}


@WAYS
@pytest.mark.parametrize("name", LOOPS)
def test_bounds_of_loops(name, way):
    loop, want = LOOPS[name]

    def kernel(x):
        last, trips = number(-1), number()
        for i in loop(nisa.register_alloc(3)):
            nisa.register_store(last, i)
            nisa.tensor_scalar(trips, trips, nl.add, 1)
        return saved(last), saved(trips)

    last, trips = way(kernel)(X)
    assert (last.item(), trips.item()) == (want[-1] if want else -1, len(want))


@WAYS
def test_a_loop_takes_its_bounds_when_it_begins(way):
    def kernel(x):
        trips, stop = number(), nisa.register_alloc(5)
        for _ in nl.dynamic_range(0, stop):
            nisa.tensor_scalar(trips, trips, nl.add, 1)
            nisa.register_move(stop, 2)
        return saved(trips)

    assert way(kernel)(X).item() == 5


@WAYS
def test_while_counts_with_arithmetic(way):
    def kernel(x):
        trips = number()

        def body(r):
            nisa.tensor_scalar(trips, trips, nl.add, 1)
            return r - 1

        nl.while_loop(nisa.register_alloc(3), body)
        return saved(trips)

    assert way(kernel)(X).item() == 3


PLACES = {
    "two registers": (lambda x, a, b: x[nl.ds(a, 2), nl.ds(b, 3)], X[3:5, 2:5]),
    "one after the other": (lambda x, a, b: x[nl.ds(a, 2)][:, nl.ds(b, 3)], X[3:5, 2:5]),
    "twice the same": (lambda x, a, b: x[nl.ds(a, 2), nl.ds(a, 3)], X[3:5, 3:6]),
    "index and range": (lambda x, a, b: x[a + 1, nl.ds(b * 2, 3)], X[4:5, 4:7]),
    "select": (lambda x, a, b: x[:, nl.ds(b, 3)].select(0, a), X[3:4, 2:5]),
    "narrow type": (lambda x, a, b: x[nl.ds(a, 2)].view(nl.int16), X.view(np.int16)[3:5]),
    "column as narrow type": (lambda x, a, b: x[:, nl.ds(b, 2)].view(nl.int16), X.view(np.int16)[:, 4:8]),
    "pattern": (lambda x, a, b: x[nl.ds(a, 2)].ap([[8, 2], [2, 4]], offset=1), X[3:5, 1::2]),
    "pattern and offset": (lambda x, a, b: x[:, nl.ds(b, 2)].ap([[8, 2], [1, 2]], scalar_offset=a), None),
}


@WAYS
@pytest.mark.parametrize("name", PLACES)
def test_places(name, way):
    view, want = PLACES[name]

    def kernel(x):
        v = view(x, nisa.register_alloc(3), nisa.register_alloc(2))
        t = nl.ndarray(v.shape if v.ndim > 1 else (1, *v.shape), v.dtype)
        nisa.dma_copy(t, v)
        return saved(t)

    if want is None:  # the offset counts elements of a row of the view: 2
        want = np.lib.stride_tricks.as_strided(X.ravel()[2 + 3 * 2 :], (2, 2), (32, 4))
    np.testing.assert_array_equal(way(kernel)(X.copy()), want)


@WAYS
@pytest.mark.parametrize(
    "statement, message",
    [
        (lambda x, r: nisa.register_alloc(1 << 40), "32 bits"),
        (lambda x, r: r * (1 << 33), "32 bits"),
        (lambda x, r: r + 1.5, "1.5 is not an integer"),
        (lambda x, r: nisa.register_load(r, nl.load(x)), "64 elements; a register holds one"),
        (lambda x, r: nl.while_loop(r, lambda _: None), "None is not an integer"),
        (lambda x, r: nl.fori_loop(0, 2.5, lambda _: None), "2.5"),
    ],
)
def test_what_no_register_holds_is_refused(statement, message, way):
    def kernel(x):
        statement(x, nisa.register_alloc(3))
        return x

    with pytest.raises((nki.NkiValidationError, TypeError), match=message):
        way(kernel)(X)


@WAYS
def test_registers_and_tiles_of_another_call_are_refused(way):
    left = []

    def first(x):
        left[:] = [nisa.register_alloc(3), nl.load(x)]
        return x

    def reads_register(x):
        return kept(left[0])

    def reads_tile(x):
        return saved(left[1])

    way(first)(X)
    for kernel in (reads_register, reads_tile):
        with pytest.raises(nki.NkiValidationError, match="belongs to another"):
            way(kernel)(X)


@WAYS
@pytest.mark.parametrize("trips", [0, 1])
def test_what_only_a_loop_without_a_trip_writes_is_not_read(trips, way):
    def kernel(x, n):
        t, r = nl.ndarray((1, 8), nl.int32), nisa.register_alloc()
        nisa.register_load(r, nl.load(n))
        nl.fori_loop(0, r, lambda i: nisa.dma_copy(t, x[nl.ds(i + 5, 1)]))
        u = nl.ndarray((1, 8), nl.int32)
        nisa.tensor_scalar(u, t, nl.add, 1)
        return saved(u)

    run = way(kernel)
    n = np.array([[trips]], np.int32)
    if trips:
        np.testing.assert_array_equal(run(X, n), X[5:6] + 1)
        return
    with pytest.raises(nki.NkiUninitialisedReadError, match="tensor_scalar data reads uninitialised") as caught:
        run(X, n)
    assert f"{__file__}:" in str(caught.value)


@WAYS
def test_what_a_loop_without_a_trip_would_write_may_be_written_elsewhere(way):
    """Only the bytes that are read count."""

    def kernel(x, n):
        t, r = nl.ndarray((2, 8), nl.int32), nisa.register_alloc()
        nisa.dma_copy(t[:, 0:4], x[0:2, 0:4])
        nisa.register_load(r, nl.load(n))
        nl.fori_loop(0, r, lambda i: nisa.dma_copy(t[:, 4:8], x[nl.ds(i, 2), 4:8]))
        u = nl.ndarray((2, 4), nl.int32)
        nisa.tensor_copy(u, t[:, 0:4])
        return saved(u)

    np.testing.assert_array_equal(way(kernel)(X, np.zeros((1, 1), np.int32)), X[:2, :4])


@WAYS
@pytest.mark.parametrize("at", [0, 4])
def test_what_nothing_wrote_is_not_read_by_a_register(at, way):
    def kernel(x, n):
        t, u, r = nl.ndarray((2, 8), nl.int32), nl.ndarray((2, 4), nl.int32), nisa.register_alloc()
        nisa.dma_copy(t[:, 0:4], x[0:2, 0:4])
        nisa.register_load(r, nl.load(n))
        nisa.tensor_copy(u, t[:, nl.ds(r, 4)])
        return saved(u)

    n = np.array([[at]], np.int32)
    if at == 0:
        np.testing.assert_array_equal(way(kernel)(X, n), X[:2, :4])
        return
    with pytest.raises(nki.NkiUninitialisedReadError, match="tensor_copy src reads uninitialised"):
        way(kernel)(X, n)


SIZES = {
    "shape": lambda r: nl.ndarray((1, r), nl.int32),
    "value": lambda r: nisa.memset(number(), r),
    "offset": lambda r: nisa.iota(number(), [[1, 1]], offset=r),
    "slice": lambda r: number()[:, 0 : r - 2],
}


@pytest.mark.parametrize("name", SIZES)
def test_what_needs_the_value_of_a_register_runs_step_by_step(name):
    def kernel(x):
        SIZES[name](nisa.register_alloc(3))
        return x

    if name == "slice":  # which has a form for registers
        with pytest.raises(nki.NkiValidationError, match="nl.ds"):
            nki.jit(kernel)(X)
        return
    np.testing.assert_array_equal(nki.jit(kernel)(X), X)


BEYOND = {
    "columns of HBM": (lambda x, t, r: nisa.dma_copy(t[0:8, 0, :], x[0:8, nl.ds(r, 8)]), 60),
    "below": (lambda x, t, r: nisa.dma_copy(t[0:8, 0, :], x[8:16, nl.ds(r - 61, 8)]), 60),
    "columns on chip": (lambda x, t, r: nisa.tensor_copy(t[:, 0, :], t[:, 1, nl.ds(r, 8)]), 1),
    "one element": (lambda x, t, r: nisa.tensor_copy(t[:, 0, 0:1], t[:, 0, r]), 8),
    "by a factor": (lambda x, t, r: nisa.tensor_copy(t[:, 0, 0:2], t[:, 0, nl.ds(2 * r + 1, 2)]), 3),
    "select": (lambda x, t, r: nisa.dma_copy(t[0:1, 0, 0:1], x.select(1, r)[0:1]), 64),
    "two registers": (lambda x, t, r: nisa.tensor_copy(t[:, 0, 0:4], t[:, r - 2, nl.ds(r, 4)]), 13),
    "a view's view": (lambda x, t, r: nisa.tensor_copy(t[:, 0, 0:2], t[:, :, 2:6][:, 0, nl.ds(r, 2)]), 3),
    "another type": (
        lambda x, t, r: nisa.tensor_copy(t.view(nl.int16)[:, 0, 0:2], t[:, 1, nl.ds(r, 2)].view(nl.int16)[:, 0:2]), 7,
    ),
}  # fmt: skip


@WAYS
@pytest.mark.parametrize("name", BEYOND)
def test_registers_stay_in_the_dimension_that_they_index(name, way):
    """Also where the place is inside of the tensor; the last value before is allowed."""
    statement, value = BEYOND[name]

    def kernel(x, n):
        t, r = nl.ndarray((8, 8, 8), nl.float32), nisa.register_alloc()
        nisa.memset(t, 0)
        nisa.register_load(r, nl.load(n))
        statement(x, t, r)
        out = nl.ndarray((8, 64), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, t.reshape((8, 64)))
        return out

    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    number = lambda v: np.array([[v]], np.int32)
    with pytest.raises(nki.NkiOutOfBoundsError, match="a register is") as e:
        way(kernel)(x, number(value))
    assert e.value.operand in ("src", "dst") and e.value.location.startswith(f"{__file__}:")
    inside = {"below": 61, "two registers": 4}.get(name, value - 1 if value != 60 else 56)
    way(kernel)(x, number(inside))


@WAYS
def test_rows_beyond_by_a_register_may_be_skipped(way):
    def kernel(x, n):
        out, r = nl.ndarray((8, 8), nl.float32, nl.shared_hbm), nisa.register_alloc()
        t = nl.ndarray((8, 8), nl.float32)
        nisa.memset(t, 5)
        nisa.register_load(r, nl.load(n))
        nisa.dma_copy(t, x[0:8, nl.ds(r, 8)], oob_mode=nisa.oob_mode.skip)
        nisa.dma_copy(out, t)
        return out

    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    np.testing.assert_array_equal(way(kernel)(x, np.array([[56]], np.int32)), x[0:8, 56:64])
    assert (way(kernel)(x, np.array([[60]], np.int32)) == 5).all()
