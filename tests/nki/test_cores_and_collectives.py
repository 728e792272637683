"""Launches on two cores, rendezvous, and collectives between ranks."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.collectives as ncc
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32
WAYS = [nki.simulate, nki.jit]


def load(a):
    t = nl.ndarray(a.shape, a.dtype)
    nisa.dma_copy(t, a)
    return t


@pytest.mark.parametrize("way", WAYS)
def test_sendrecv_swaps(way, rng):
    @nki.jit
    def k(x):
        o = nl.ndarray((2, *x.shape[1:]), x.dtype, nl.shared_hbm)
        me = nl.program_id(0)
        mine, theirs = load(x[me : me + 1]), nl.ndarray((1, x.shape[1]), x.dtype)
        nisa.sendrecv(mine, theirs, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
        nisa.dma_copy(o[me : me + 1], theirs)
        return o

    x = rng.standard_normal((2, 9)).astype(F32)
    np.testing.assert_array_equal(way(k)[2](x), x[::-1])


@pytest.mark.parametrize("way", WAYS)
def test_a_barrier_that_one_core_misses_is_an_error(way):
    @nki.jit
    def k(x):
        o = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.core_barrier(o, (0, 1))
        nisa.dma_copy(o, load(x))
        return o

    with pytest.raises(nki.NkiDeadlockError, match=r"core 0.*core_barrier|core 0.*test_cores|wait.*core 1 has ended"):
        way(k)[2](np.zeros((4, 4), F32))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["sbuf", "shared_hbm"])
def test_a_barrier_orders_what_cores_write(way, place):
    """Core 1 reads what core 0 wrote before the barrier, whatever tensor the barrier names."""

    def k(x):
        middle, o = (nl.ndarray(x.shape, x.dtype, nl.shared_hbm) for _ in range(2))
        t = load(x)
        if nl.program_id(0) == 0:
            nisa.dma_copy(middle, t)
        nisa.core_barrier(t if place == "sbuf" else middle, (0, 1))
        if nl.program_id(0) == 1:
            nisa.dma_copy(o, load(middle))
        return o

    x = np.arange(16, dtype=F32).reshape(4, 4)
    np.testing.assert_array_equal(way(k)[2](x), x)


def line_of(word):
    """file:line of the line in this file that ends with the comment `word`."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text.endswith("# " + word):
            return f"test_cores_and_collectives.py:{number}"
    raise AssertionError(word)


@pytest.mark.parametrize("way", WAYS)
def test_a_race_names_both_lines(way):
    """Core 1 reads what core 0 writes. With a barrier between them, nothing is said."""

    def k(x, barrier):
        middle, o = (nl.ndarray(x.shape, x.dtype, nl.shared_hbm) for _ in range(2))
        t = load(x)
        if nl.program_id(0) == 0:
            nisa.dma_copy(middle, t)  # race: write
        if barrier:
            nisa.core_barrier(middle, (0, 1))
        if nl.program_id(0) == 1:
            nisa.dma_copy(t, middle)  # race: read
            nisa.dma_copy(o, t)
        return o

    x = np.arange(16, dtype=F32).reshape(4, 4)
    with pytest.warns(nki.NkiRaceWarning) as caught:
        way(k)[2](x, False)
    (text,) = (str(w.message) for w in caught if w.category is nki.NkiRaceWarning)
    assert re.search(
        f"core 0 writes it at .*{line_of('race: write')}, .*core 1 reads it at .*{line_of('race: read')}", text
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(way(k)[2](x, True), x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_only_bytes_that_both_touch_race(way, axis, shift):
    """Every second row or column is a core's; shifted by one, they are the other one's too."""

    def k(x):
        o, me = nl.ndarray(x.shape, x.dtype, nl.shared_hbm), nl.program_id(0)
        part = slice(0 if me == 0 or shift else 1, 8, 2)
        t = load(x[part] if axis == 0 else x[:, part])
        nisa.dma_copy(o[part] if axis == 0 else o[:, part], t)
        rest = slice(1, 8, 2)
        if shift and me == 0:  # nobody else writes them
            nisa.dma_copy(o[rest] if axis == 0 else o[:, rest], load(x[rest] if axis == 0 else x[:, rest]))
        return o

    x = np.arange(64, dtype=F32).reshape(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(way(k)[2](x), x)
    assert [w.category for w in caught] == [nki.NkiRaceWarning] * shift


@pytest.mark.parametrize("way", WAYS)
def test_an_exchange_orders_what_cores_write(way):
    def k(x):
        o, me = nl.ndarray(x.shape, x.dtype, nl.shared_hbm), nl.program_id(0)
        t, other = load(x), nl.ndarray(x.shape, x.dtype)
        if me == 0:
            nisa.dma_copy(o, t)
        nisa.sendrecv(t, other, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
        if me == 1:
            nisa.dma_copy(o, other)
        return o

    x = np.arange(16, dtype=F32).reshape(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(way(k)[2](x), x)


def test_errors_of_one_core_reach_the_caller():
    @nki.jit
    def k(x):
        if nl.program_id(0) == 1:
            raise KeyError("core 1")
        nisa.core_barrier(x, (0, 1))
        return x

    with pytest.raises(KeyError, match="core 1"):
        nki.simulate(k)[2](np.zeros((4, 4), F32))


def test_grid_facts():
    seen = []

    @nki.jit
    def k(x):
        seen.append((nl.program_id(0), nl.num_programs(), nl.program_ndim()))
        return x

    x = np.zeros((2, 2), F32)
    nki.simulate(k)(x)
    nki.simulate(k)[2](x)
    assert seen == [(0, 1, 0), (0, 2, 1), (1, 2, 1)]
    with pytest.raises(ValueError, match="1 or 2"):
        k[3]


def ranks(kernel, inputs, *rest):
    return nki.simulate_ranks(kernel, [(x, *rest) for x in inputs])


@pytest.mark.parametrize("memory", ["hbm", "sbuf"])
@pytest.mark.parametrize("op,f", [("add", np.add), ("maximum", np.maximum), ("minimum", np.minimum)])
def test_all_reduce(rng, memory, op, f):
    def k(x):
        o = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        group = ncc.ReplicaGroup([[0, 1], [2, 3]])
        if memory == "hbm":
            ncc.all_reduce([x], [o], group, getattr(nl, op))
        else:
            t, r = load(x), nl.ndarray(x.shape, x.dtype)
            ncc.all_reduce([t], [r], group, getattr(nl, op))
            nisa.dma_copy(o, r)
        return o

    xs = [rng.standard_normal((8, 5)).astype(F32) for _ in range(4)]
    for r, got in enumerate(ranks(k, xs)):
        np.testing.assert_array_equal(got, f(xs[r // 2 * 2], xs[r // 2 * 2 + 1]))


@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_and_reduce_scatter(rng, dim):
    n, group = 3, ncc.ReplicaGroup([[0, 1, 2]])

    def gather(x):
        shape = [6, 9]
        shape[dim] *= n
        o, t = nl.ndarray(shape, x.dtype, nl.shared_hbm), nl.ndarray(shape, x.dtype)
        ncc.all_gather([load(x)], [t], group, dim)
        nisa.dma_copy(o, t)
        return o

    def scatter(x):
        shape = [6, 9]
        shape[dim] //= n
        o, t = nl.ndarray(shape, x.dtype, nl.shared_hbm), nl.ndarray(shape, x.dtype)
        ncc.reduce_scatter([load(x)], [t], group, dim, nl.add)
        nisa.dma_copy(o, t)
        return o

    xs = [rng.integers(-9, 9, (6, 9)).astype(F32) for _ in range(n)]
    for got in ranks(gather, xs):
        np.testing.assert_array_equal(got, np.concatenate(xs, dim))
    for r, got in enumerate(ranks(scatter, xs)):
        np.testing.assert_array_equal(got, np.split(sum(xs), n, dim)[r])


def test_all_to_all(rng):
    group = ncc.ReplicaGroup([[0, 1, 2]])

    def k(x):
        o = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        ncc.all_to_all([x], [o], group, 0)
        return o

    xs = [rng.standard_normal((6, 4)).astype(F32) for _ in range(3)]
    for r, got in enumerate(ranks(k, xs)):
        np.testing.assert_array_equal(got, np.concatenate([x[2 * r : 2 * r + 2] for x in xs]))


def test_variable_collectives(rng):
    group = ncc.ReplicaGroup([[0, 1]])
    send = np.array([[3, 2], [1, 4]], np.uint32)  # rank r sends send[r, j] elements to rank j

    def to_all(x, m):
        o = nl.zeros((10,), x.dtype, nl.shared_hbm)
        ncc.all_to_all_v([x], [o], group, m)
        return o, m

    def gather(x, m):
        o = nl.zeros((10,), x.dtype, nl.shared_hbm)
        ncc.all_gather_v([x], [o], group, m)
        return o

    xs = [rng.standard_normal(6).astype(F32) for _ in range(2)]
    metas = [np.stack([send[r], [0, send[r, 0]], [0, 0], [0, 0]]).astype(np.uint32) for r in range(2)]
    for r, (got, meta) in enumerate(nki.simulate_ranks(to_all, list(zip(xs, [m.copy() for m in metas])))):
        want = np.zeros(10, F32)
        for j in range(2):
            at = metas[j][1, r]
            want[5 * j : 5 * j + send[j, r]] = xs[j][at : at + send[j, r]]
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(meta[2], send[:, r])
    for got in nki.simulate_ranks(gather, list(zip(xs, [m.copy() for m in metas]))):
        want = np.zeros(10, F32)
        for j in range(2):
            at = metas[j][1, j]
            want[5 * j : 5 * j + send[j, j]] = xs[j][at : at + send[j, j]]
        np.testing.assert_array_equal(got, want)


def test_permutes(rng):
    group = ncc.ReplicaGroup([[0, 1, 2]])

    def permute(x):
        o = nl.zeros(x.shape, x.dtype, nl.shared_hbm)
        ncc.collective_permute([x], [o], [(0, 2), (2, 1)])
        return o

    def ring(x):
        o = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        s = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        ncc.collective_permute_implicit([[x]], [[o]], group)
        ncc.collective_permute_implicit_reduce([[x]], [[o]], [[s]], group, nl.add)
        owner = ncc.collective_permute_implicit_current_processing_rank_id(1, group)
        assert owner == (ncc.rank_id() - 1) % 3
        return o, s

    xs = [rng.integers(-9, 9, (4, 3)).astype(F32) for _ in range(3)]
    got = ranks(permute, xs)
    np.testing.assert_array_equal(got[2], xs[0])
    np.testing.assert_array_equal(got[1], xs[2])
    for r, (o, s) in enumerate(ranks(ring, xs)):
        before, second = xs[(r - 1) % 3], xs[(r - 2) % 3]
        np.testing.assert_array_equal(o, before)
        np.testing.assert_array_equal(s, before + second)


@pytest.mark.parametrize("way", WAYS)
def test_errors_of_the_second_core_name_its_line(way):
    def kernel(x):
        t, r = nl.load(x), nisa.register_alloc(100)
        if nl.program_id() == 0:
            nisa.tensor_copy(t, t)
        else:
            nisa.tensor_copy(t[:, 0:2], t[:, nl.ds(r, 2)])
        return x

    with pytest.raises(nki.NkiOutOfBoundsError) as caught:
        way(kernel)[2](np.ones((8, 8), F32))
    assert f"{__file__}:{kernel.__code__.co_firstlineno + 5}" in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["", "both"])
def test_shared_tensors_are_the_same_on_all_cores(name, way):
    def kernel(x):
        columns = 8 + 8 * nl.program_id()
        return nl.ndarray((2, columns), nl.float32, nl.shared_hbm, name=name)

    with pytest.raises(nki.NkiValidationError, match="128 bytes here and 64 on another core") as caught:
        way(kernel)[2](np.ones((2, 2), F32))
    assert str(caught.value).count(f"{__file__}:") == 2  # both allocations


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cores", [1, 2])
def test_one_name_twice_is_two_tensors(cores, way):
    def kernel(x):
        small, large = (nl.ndarray((2, n), nl.float32, nl.shared_hbm, name="same") for n in (8, 4000))
        if nl.program_id() == 0:
            nl.store(small, 7.0)
            nl.store(large, 1.0)
        return small, large

    small, large = way(kernel)[cores](np.ones((2, 2), F32))
    assert (small == 7).all() and (large == 1).all() and large.shape == (2, 4000)
