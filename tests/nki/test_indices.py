"""Rows and elements that a tensor of indices names, against NumPy's, step by step and traced."""

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

WAYS = pytest.mark.parametrize("way", [nki.simulate, nki.jit])
X = np.arange(16 * 12, dtype=np.int32).reshape(16, 12)
ROWS = np.array([[3], [1], [7], [5]], np.int32)

VIEWS = {
    "rows": (lambda x, i: x.vector_select(0, i), X[ROWS[:, 0]]),
    "columns of rows": (lambda x, i: x.vector_select(0, i)[:, 3:7], X[ROWS[:, 0], 3:7]),
    "rows of columns": (lambda x, i: x[2:, 1:7].vector_select(0, i), X[2:][ROWS[:, 0], 1:7]),
    "rows in a narrow type": (lambda x, i: x.vector_select(0, i).view(nl.int16), X.view(np.int16)[ROWS[:, 0]]),
    "split rows": (lambda x, i: x.vector_select(0, i).reshape((4, 3, 4)), X[ROWS[:, 0]].reshape(4, 3, 4)),
    "all rows of it": (lambda x, i: x.vector_select(0, i)[0:4], X[ROWS[:, 0]]),
    "pattern": (lambda x, i: x.ap([[12, 4], [2, 5]], offset=1, vector_offset=i), X[ROWS[:, 0], 1:10:2]),
    "pattern of columns": (lambda x, i: x[:, 2:].ap([[12, 4], [1, 5]], vector_offset=i), X[ROWS[:, 0], 2:7]),
    "pattern in a narrow type": (
        lambda x, i: x.ap([[24, 4], [1, 6]], vector_offset=i, dtype=nl.int16),
        X.view(np.int16)[ROWS[:, 0], :6],
    ),
    "pattern after a register": (
        lambda x, i: x[nl.ds(nisa.register_alloc(2), 8)].ap([[12, 4], [1, 12]], vector_offset=i),
        X[2:][ROWS[:, 0]],
    ),
}


@WAYS
@pytest.mark.parametrize("name", VIEWS)
def test_views_by_an_index(name, way):
    view, want = VIEWS[name]

    def kernel(x, rows):
        t = nl.ndarray(want.shape, want.dtype.name)
        nisa.dma_copy(t, view(x, nl.load(rows)))
        out = nl.ndarray(want.shape, t.dtype, nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    np.testing.assert_array_equal(way(kernel)(X.copy(), ROWS), want)


WRONG = {
    "floats": (lambda x, i: x.vector_select(0, nl.load(i, nl.float32)), "index dtype float32"),
    "too few": (lambda x, i: x.ap([[12, 8], [1, 12]], vector_offset=nl.load(i)), "4 elements, fewer than the 8 rows"),
    "part of the rows": (lambda x, i: x.vector_select(0, nl.load(i))[1:3], "a part of the index"),
    "one of the rows": (lambda x, i: x.vector_select(0, nl.load(i))[2], "a part of the index"),
    "turned": (lambda x, i: x.vector_select(0, nl.load(i)).permute((1, 0)), "a part of the index"),
    "other rows": (lambda x, i: x.vector_select(0, nl.load(i)).reshape((8, 6)), "a part of the index"),
    "pattern over it": (lambda x, i: x.vector_select(0, nl.load(i)).ap([[12, 4], [1, 12]]), "comes before"),
    "index by an index": (
        lambda x, i: x.vector_select(0, i.vector_select(0, nl.load(i))), "itself taken by an index",
    ),
    "on chip": (lambda x, i: nl.load(x).ap([[12, 4], [1, 12]], vector_offset=nl.load(i)), "of an HBM tensor"),
    "columns": (lambda x, i: x.ap([[12, 4], [1, 12]], vector_offset=nl.load(i), indirect_dim=1), "of an HBM tensor"),
}  # fmt: skip


@WAYS
@pytest.mark.parametrize("use", ["copy", "scatter", "compute", "transpose"])
@pytest.mark.parametrize("name", WRONG)
def test_what_an_index_cannot_do_is_refused(name, use, way):
    view, message = WRONG[name]

    def kernel(x, rows):
        v = view(x, rows)
        t = nl.ndarray((v.shape[0], v.free_size), x.dtype)
        nisa.memset(t, 0)
        if use == "copy":
            nisa.dma_copy(t, v)
        elif use == "scatter":
            nisa.dma_copy(v, t)
        elif use == "compute":
            nisa.dma_compute(v, [v, t], nl.add)
        else:
            nisa.dma_transpose(nl.ndarray((v.free_size, v.shape[0]), x.dtype), v)
        return x

    with pytest.raises(nki.NkiValidationError, match=message) as caught:
        way(kernel)(X.copy(), ROWS)
    assert f"{__file__}:" in str(caught.value)


@WAYS
def test_sums_of_rows_that_divide_differently(way):
    def kernel(x):
        out = nl.ndarray((8, 24), x.dtype, nl.shared_hbm)
        nisa.dma_compute(out, [x, nl.load(x)], nl.add)
        return out

    x = X.astype(np.float32)
    np.testing.assert_array_equal(way(kernel)(x), 2 * x.reshape(8, 24))
