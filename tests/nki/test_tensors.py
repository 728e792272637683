"""Tensor views against NumPy's, step by step: the values a view shows are those of the same NumPy view."""

import pickle

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32


def on_chip(x, body):
    """body(SBUF tensor with the values of x), run in a kernel; returns what body returns."""
    result = []

    def k(a):
        t = nl.ndarray(a.shape, a.dtype)
        nisa.dma_copy(t, a)
        result.append(body(t))
        return a

    nki.simulate(k)(x)
    return result[0]


def in_hbm(x, body):
    result = []

    def k(a):
        result.append(body(a))
        return a

    nki.simulate(k)(x)
    return result[0]


X = np.arange(8 * 6 * 10, dtype=F32).reshape(8, 6, 10)

CHIP_VIEWS = {
    "slice": (lambda t: t[2:5, 1:6:2, ::3], lambda x: x[2:5, 1:6:2, ::3]),
    "negative": (lambda t: t[-3:-1, -2:, :], lambda x: x[-3:-1, -2:, :]),
    "ellipsis": (lambda t: t[..., 4:6], lambda x: x[..., 4:6]),
    "integer on partitions keeps the dimension": (lambda t: t[3], lambda x: x[3:4]),
    "integer on a free dimension drops it": (lambda t: t[:, 2], lambda x: x[:, 2]),
    "two integers keep two dimensions": (lambda t: t[1, 2, 3], lambda x: x[1:2, 2, 3:4]),
    "ds": (lambda t: t[nl.ds(1, 4), :, nl.ds(2, 3)], lambda x: x[1:5, :, 2:5]),
    "chain": (lambda t: t[2:][:, 1:][:, :, 5:], lambda x: x[2:, 1:, 5:]),
    "reshape": (lambda t: t.reshape((8, 3, 2, 10)), lambda x: x.reshape(8, 3, 2, 10)),
    "reshape of a slice": (lambda t: t[:, 2:4].reshape((8, 20)), lambda x: x[:, 2:4].reshape(8, 20)),
    "reshape_dim": (lambda t: t.reshape_dim(2, (-1, 5)), lambda x: x.reshape(8, 6, 2, 5)),
    "flatten_dims": (lambda t: t.flatten_dims(1, 2), lambda x: x.reshape(8, 60)),
    "permute": (lambda t: t.permute((0, 2, 1)), lambda x: x.transpose(0, 2, 1)),
    "broadcast": (lambda t: t[:, 0:1].broadcast(1, 4), lambda x: np.broadcast_to(x[:, 0:1], (8, 4, 10))),
    "expand_dim": (lambda t: t.expand_dim(1), lambda x: x[:, None]),
    "squeeze_dim": (lambda t: t[:, 1:2].squeeze_dim(1), lambda x: x[:, 1]),
    "slice method": (lambda t: t.slice(2, 1, 9, 2), lambda x: x[:, :, 1:9:2]),
    "select": (lambda t: t.select(1, -1), lambda x: x[:, -1]),
    "rearrange": (
        lambda t: t.rearrange(("p", ("a", "b"), "c"), ("p", "c", ("a", "b")), {"a": 3}),
        lambda x: x.transpose(0, 2, 1),
    ),
    "view": (lambda t: t.view(nl.bfloat16)[:, :, 1::2], lambda x: (x.view(np.uint16)[:, :, 1::2]).view("bfloat16")),
    "ap": (
        lambda t: t.ap([[60, 8], [7, 3], [2, 4]], 5),
        lambda x: np.stack(
            [[[x.reshape(8, 60)[p, 5 + 7 * i + 2 * j] for j in range(4)] for i in range(3)] for p in range(8)]
        ),
    ),
}


@pytest.mark.parametrize("name", CHIP_VIEWS)
def test_views_on_chip(name):
    view, reference = CHIP_VIEWS[name]
    got = on_chip(X, lambda t: view(t).numpy())
    want = reference(X)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


def test_views_in_hbm():
    np.testing.assert_array_equal(in_hbm(X, lambda t: t[3].numpy()), X[3])
    np.testing.assert_array_equal(in_hbm(X, lambda t: t[1, 2, 3].numpy()), X[1, 2, 3:4])
    np.testing.assert_array_equal(in_hbm(X, lambda t: t.permute((2, 0, 1)).numpy()), X.transpose(2, 0, 1))
    np.testing.assert_array_equal(in_hbm(X, lambda t: t.reshape((48, 10))[5:7].numpy()), X.reshape(48, 10)[5:7])
    np.testing.assert_array_equal(in_hbm(X, lambda t: t.select(0, 2).numpy()), X[2])


@pytest.mark.parametrize("step", [60, 20])
def test_a_pattern_on_chip_takes_each_partition(step):
    """Its step is the row of the storage, or of the view that it is taken of."""
    got = on_chip(X, lambda t: t.reshape((8, 60))[:, 10:30].ap([[step, 8], [2, 5]], offset=1).numpy())
    np.testing.assert_array_equal(got, X.reshape(8, 60)[:, 11:21:2])


def test_facts_of_a_tensor():
    def facts(t):
        v = t[:, 1:3, ::2]
        return (t.shape, t.ndim, t.size, t.strides, t.dtype, t.buffer, t.is_contiguous(), v.is_contiguous(),
                v.get_pattern(), v.offset, t.is_indirect())  # fmt: skip

    assert on_chip(X, facts) == (
        (8, 6, 10), 3, 480, (60, 10, 1), "float32", nl.sbuf, True, False, [[60, 8], [10, 2], [2, 5]], 10, False,
    )  # fmt: skip


BAD = {
    "index out of range": (lambda t: t[8], nki.NkiOutOfBoundsError),
    "slice out of range": (lambda t: t[:, 0:7], nki.NkiOutOfBoundsError),
    "ds out of range": (lambda t: t[:, nl.ds(4, 3)], nki.NkiOutOfBoundsError),
    "too many indices": (lambda t: t[0, 0, 0, 0], IndexError),
    "reshape changes the count": (lambda t: t.reshape((8, 61)), ValueError),
    "reshape moves partitions": (lambda t: t.reshape((4, 120)), ValueError),
    "reshape without a view": (lambda t: t.permute((0, 2, 1)).reshape((8, 60)), ValueError),
    "permute moves partitions": (lambda t: t.permute((1, 0, 2)), ValueError),
    "broadcast of a size above 1": (lambda t: t.broadcast(1, 12), ValueError),
    "squeeze of a size above 1": (lambda t: t.squeeze_dim(1), ValueError),
    "view that does not divide": (lambda t: t[:, :, 0:3].view(nl.bfloat16).view(nl.float32)[:, :, 9], IndexError),
    "arithmetic": (lambda t: t + t, TypeError),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_views_raise(name):
    view, error = BAD[name]
    with pytest.raises(error):
        on_chip(X, view)


def test_base_tensor_is_the_tensor_as_it_was_made():
    def body(t):
        view = t[1:4, 2, 0:4].view(nl.uint16).reshape((3, 2, 4))
        base = view.base_tensor
        assert (base.shape, base.dtype, base.buffer) == (t.shape, t.dtype, t.buffer)
        assert base.base_tensor.shape == t.base_tensor.shape == t.shape
        return base.numpy()

    np.testing.assert_array_equal(on_chip(X, body), X)


def test_assignment():
    def body(t):
        t[:, 0] = 5.0
        t[:, 1] = t[:, 2]
        return t.numpy()

    want = X.copy()
    want[:, 0], want[:, 1] = 5, X[:, 2]
    np.testing.assert_array_equal(on_chip(X, body), want)


PACKED = {"float8_e4m3fn_x4": np.uint32, "float8_e5m2_x4": np.uint32, "float4_e2m1fn_x4": np.uint16}


def test_types_equal_the_numpy_types_of_their_names():
    for n in PACKED:
        t = getattr(nl, n)
        assert [t == np.dtype(m) for m in PACKED] == [n == m for m in PACKED]
        assert [np.dtype(m) != t for m in PACKED] == [n != m for m in PACKED]
        assert np.dtype(n) in [nl.float32, t] and np.dtype(n) not in [nl.float32, nl.uint32]
        assert t == n and hash(t) == hash(n) and str(np.dtype(n)) == n
    assert nl.bfloat16 == np.dtype("bfloat16") != nl.float16 and nl.float32 != np.dtype("int32")
    assert nl.int8 != 1


@pytest.mark.parametrize("name", PACKED)
def test_packed_types_are_numpy_types(rng, name):
    """Their elements are words: copied, compared, hashed and pickled as such, without arithmetic."""
    word = PACKED[name]
    words = rng.integers(0, 2 ** (8 * np.dtype(word).itemsize), (5, 7)).astype(word)
    x = words.view(name)
    assert x.dtype == name and x.itemsize == words.itemsize
    for got, want in (
        (x.T.copy(), words.T),
        (np.concatenate([x, x], 1), np.concatenate([words, words], 1)),
        (x[::2, ::-3].copy(), words[::2, ::-3]),
        (pickle.loads(pickle.dumps(x)), words),
        (np.array(x.tolist()), words),
        (words.astype(name), words),
        (x.astype(word), words),
        (np.array(words.tolist(), name), words),
        (x.byteswap(), words.byteswap()),
    ):
        np.testing.assert_array_equal(got.view(word), want)
    assert not np.zeros(3, name).view(word).any() and (np.zeros(3, name) == np.array([0, 0, 0], name)).all()
    y = x.copy()
    y[1, 2] = int(x[1, 2]) ^ 1
    assert np.argwhere(x != y).tolist() == [[1, 2]] and np.argwhere(~(x == y)).tolist() == [[1, 2]]
    assert len({x[0, 0], x[0, 0].copy(), y[1, 2]}) == 2
    assert repr(np.array([11], name)[0]) == f"0x{11:0{2 * words.itemsize}x}"
    with pytest.raises(TypeError, match=f"{name}.*float32"):
        x.astype(np.float32)
    with pytest.raises(TypeError, match="add"):
        x + x
    with pytest.raises(OverflowError, match=f"bits of {name}"):
        x[0, 0] = 1 << (8 * words.itemsize)
    with pytest.raises(TypeError, match="float"):
        x[0, 0] = 1.5


def test_addresses_alias():
    """Two tensors at one address are one memory; the address is (first partition, byte)."""

    def body(t):
        a = nl.ndarray((32, 8), nl.float32, nl.sbuf, address=(32, 4096))
        b = nl.ndarray((64, 4), nl.uint32, nl.sbuf, address=(0, 4112))
        nisa.memset(b, 0)
        nisa.memset(a, 1.0)
        return b.numpy()

    bits = np.float32(1).view(np.uint32)
    np.testing.assert_array_equal(on_chip(X, body), np.repeat(np.array([0, bits], np.uint32), 32)[:, None].repeat(4, 1))


def test_registers_and_loops():
    @nki.jit
    def k(x):
        o = nl.ndarray((4, 1), nl.int32, nl.shared_hbm)
        t = nl.ndarray((1, 1), nl.int32)
        r = nisa.register_alloc(7)
        nisa.register_store(t, r)
        nisa.dma_copy(o[0:1], t)
        nisa.dma_copy(t, x)
        nisa.register_load(r, t)
        nisa.register_store(t, r)
        nisa.dma_copy(o[1:2], t)
        nl.fori_loop(2, 4, lambda i: nisa.dma_copy(o[i], t))
        return o

    for way in (nki.simulate(k), k):
        np.testing.assert_array_equal(way(np.array([[9]], np.int32)), [[7], [9], [9], [9]])


def test_while_loop_counts_down():
    @nki.jit
    def k(x):
        o = nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
        n, total = nl.ndarray((1, 1), nl.int32), nl.zeros((1, 1), nl.float32)
        nisa.dma_copy(n, x)
        start = nisa.register_alloc(0)
        nisa.register_load(start, n)

        def body(r):
            nisa.tensor_scalar(total, total, nl.add, 2.0)
            nisa.tensor_scalar(n, n, nl.subtract, 1.0)
            again = nisa.register_alloc(0)
            nisa.register_load(again, n)
            return again

        nl.while_loop(start, body)
        nisa.dma_copy(o, total)
        return o

    for way in (nki.simulate(k), k):
        assert way(np.array([[5]], np.int32))[0, 0] == 10


def test_the_index_of_a_loop_cannot_be_written():
    def k(x):
        for i in nl.dynamic_range(3):
            nisa.register_move(i, 0)
        return x

    with pytest.raises(AssertionError):
        nki.simulate(k)(X)


def test_kernels_that_ask_for_values_run_step_by_step(capsys):
    @nki.jit
    def k(x):
        t = nl.ndarray((1, 1), nl.int32)
        nisa.dma_copy(t, x)
        r = nisa.register_alloc(0)
        nisa.register_load(r, t)
        o = nl.ndarray((1, int(r)), nl.float32, nl.shared_hbm)
        v = nl.full((1, int(r)), 2.5, nl.float32)
        nl.device_print("v =", v)
        nisa.dma_copy(o, v)
        return o

    np.testing.assert_array_equal(k(np.array([[3]], np.int32)), [[2.5, 2.5, 2.5]])
    assert "v = [[2.5 2.5 2.5]]" in capsys.readouterr().out


def test_arguments_are_in_hbm_that_cores_share():
    seen = []

    @nki.jit
    def k(x):
        seen.append(x.buffer)
        return x

    nki.simulate(k)(np.zeros((2, 2), np.float32))
    nki.simulate(k[2])(np.zeros((2, 2), np.float32))
    assert seen == [nl.hbm, nl.shared_hbm, nl.shared_hbm]
