"""What a kernel may not do is an error that says so, step by step and traced: nothing is read or written elsewhere."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl
from torchneuron.nki import cli

F32 = np.float32
X = np.ones((128, 8), F32)
WAYS = pytest.mark.parametrize("way", [nki.simulate, nki.jit])


def tile(*shape, dtype=nl.float32, value=1):
    t = nl.ndarray(shape, dtype)
    nisa.memset(t, value)
    return t


def saved(t):
    out = nl.ndarray(t.shape, t.dtype, nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


U16, U32, BF16, X4 = nl.uint16, nl.uint32, nl.bfloat16, nl.float8_e4m3fn_x4
INVALID = {
    "gather: index": (lambda: nisa.local_gather(tile(128, 64), tile(128, 64), tile(16, 4, dtype=U16)), "index.*16"),
    "gather: dst": (lambda: nisa.local_gather(tile(16, 64), tile(128, 64), tile(128, 4, dtype=U16)), "dst.*16"),
    "gather: run": (
        lambda: nisa.local_gather(tile(16, 64), tile(16, 64), tile(16, 4, dtype=U16), num_elem_per_idx=3),
        "num_elem_per_idx 3",
    ),
    "n_gather: indices": (lambda: nisa.nc_n_gather(tile(128, 640), tile(128, 64), tile(128, 4, dtype=U32)), "indices"),
    "n_gather: data": (lambda: nisa.nc_n_gather(tile(128, 64), tile(32, 64), tile(128, 64, dtype=U32)), "data"),
    "topk: indices": (
        lambda: nisa.topk(tile(16, 4, dtype=BF16), tile(1, 1, dtype=U32), tile(16, 64, dtype=BF16), 1024),
        "idx_dst",
    ),
    "topk: n": (
        lambda: nisa.topk(tile(16, 4, dtype=BF16), tile(16, 4, dtype=U32), tile(16, 4, dtype=BF16), 600),
        "n 600 exceeds the 64",
    ),
    "bounds": (lambda: nisa.sequence_bounds(tile(1, 2, 1), tile(1, 1600)), "dst free size 2"),
    "shuffle: mask": (
        lambda: nisa.nc_stream_shuffle(tile(32, 16), tile(32, 16), [-100000] * 32),
        "shuffle_mask -100000",
    ),
    "shuffle: sizes": (lambda: nisa.nc_stream_shuffle(tile(32, 1600), tile(32, 16), [0] * 32), "src free size 16"),
    "quantize: dst": (
        lambda: nisa.quantize_mx(nl.ndarray((32, 4), X4), tile(128, 512, dtype=BF16), tile(128, 128, dtype=nl.uint8)),
        "dst partition dimension 32",
    ),
    "quantize: scale": (
        lambda: nisa.quantize_mx(nl.ndarray((32, 4), X4), tile(32, 16, dtype=BF16), tile(1, 1, dtype=nl.uint8)),
        "dst_scale shape",
    ),
    "transpose: identity": (
        lambda: nisa.nc_matmul(nl.ndarray((8, 100), nl.float32, nl.psum), tile(4, 8), tile(4, 100), is_transpose=True),
        "moving free size 100",
    ),
    "nonzero": (
        lambda: nisa.nonzero_with_count(tile(1, 65, dtype=nl.int32), tile(128, 64)),
        "dst partition dimension 1",
    ),
    "iota: pairs": (lambda: nisa.iota(tile(32, 512, dtype=nl.int32), [[1, 2]] * 40), "pattern has more"),
    "iota: count": (lambda: nisa.iota(tile(32, 512, dtype=nl.int32), [[1, 4]]), "pattern gives 4"),
    "affine: operator": (
        lambda: nisa.affine_select(tile(32, 16), [[1, 16]], 1, tile(32, 16), 0.0, cmp_op=nl.power),
        "cmp_op power",
    ),
    "reduce: operator": (
        lambda: nisa.activation_reduce(tile(32, 16), nl.exp, tile(32, 16), nl.power, tile(32, 1)),
        "reduce_op power",
    ),
    "indirect: partitions": (
        lambda: nisa.tensor_copy(tile(8, 8), tile(8, 64).indirect(tile(8, 4, dtype=U16, value=0), 8)),
        "groups of 16",
    ),
    "indirect: indices": (
        lambda: nisa.tensor_copy(tile(16, 1000), tile(16, 64).indirect(tile(16, 4, dtype=U16, value=0), 1000)),
        "an index for each",
    ),
    "partitions: step": (lambda: nisa.tensor_copy(tile(8, 4), tile(16, 4)[0:16:2]), "src steps 8 .*so 4"),
    "partitions: pattern": (lambda: nisa.tensor_copy(tile(8, 4), tile(16, 4).ap([[0, 8], [1, 4]])), "src steps 0 "),
    "partitions: dma": (lambda: nisa.dma_copy(tile(16, 4)[0:16:2], tile(8, 4)), "dst steps 8 "),
    "activation: reduce": (
        lambda: nisa.activation(tile(8, 4), nl.exp, tile(8, 4), reduce_op=nl.maximum),
        "activation reduce_op maximum",
    ),
    "activation: load_reduce": (
        lambda: nisa.activation(tile(8, 4), nl.exp, tile(8, 4), reduce_res=tile(8, 1), reduce_cmd="load_reduce"),
        "reduce_cmd load_reduce",
    ),
    "select: reduce": (
        lambda: nisa.select_reduce(
            tile(8, 4), tile(8, 4, dtype=nl.int16), tile(8, 4), 0.0, reduce_op=nl.add, reduce_res=tile(8, 1)
        ),
        "reduce_op add",
    ),
    "cumulative: operator": (
        lambda: nisa.tensor_scalar_cumulative(tile(8, 4), tile(8, 4), nl.add, nl.logical_and, 1.0),
        "op1 logical_and",
    ),
    "dma: hwdge": (
        lambda: nisa.dma_copy(
            tile(4, 8),
            nl.zeros((8, 8), nl.float32, nl.hbm).vector_select(0, tile(4, 1, dtype=nl.int32)),
            dge_mode=nisa.dge_mode.hwdge,
        ),
        "hwdge cannot take rows",
    ),
    "dma: engine": (
        lambda: nisa.dma_copy(tile(4, 8), tile(4, 8), engine=nisa.engine.sync, dge_mode=nisa.dge_mode.swdge),
        "engine sync needs dge_mode hwdge",
    ),
    "no pattern": (lambda: nisa.iota(tile(4, 8, dtype=nl.int32), 3), "pattern 3"),
    "no offset": (lambda: nisa.iota(tile(4, 8, dtype=nl.int32), [[1, 8]], offset=1.5), "offset 1.5"),
    "no mask": (lambda: nisa.nc_stream_shuffle(tile(32, 8), tile(32, 8), 7), "shuffle_mask 7"),
    "no value": (lambda: nisa.memset(tile(4, 8), "one"), "memset value 'one'"),
    "no memory": (lambda: nl.ndarray((4, 8), nl.float32, "sbuf"), "buffer 'sbuf'"),
    "no type": (lambda: nl.ndarray((4, 8), "float31"), "'float31' is no element type"),
    "no shape": (lambda: nl.ndarray(None, nl.float32), "shape None"),
    "no axis": (lambda: nisa.tensor_reduce(tile(4, 1), nl.add, tile(4, 8), axis=1.5), "dimension 1.5"),
    "priority": (lambda: nisa.dma_copy(tile(4, 8), tile(4, 8), priority=-1), "priority -1"),
    "no tensor": (lambda: nisa.tensor_copy(tile(4, 8), [1.0]), r"tensor_copy src \[1.0\] is no number"),
    "no tensor: matmul": (lambda: nisa.nc_matmul(None, "x", 3), "nc_matmul stationary 'x'"),
    "no number": (lambda: nisa.tensor_scalar(tile(4, 8), tile(4, 8), nl.add, "1 2"), "operand0 '1 2'"),
    "no flag": (lambda: nisa.tensor_scalar(tile(4, 8), tile(4, 8), nl.add, 1, reverse0="x"), "reverse0 'x'"),
    "no address": (lambda: nisa.memset(tile(4, 64).ap([[64, 4], [1, 5]], offset=2**70), 0), "offset 11805916"),
    "far": (lambda: nisa.memset(tile(4, 64).ap([[64, 4], [1, 5]], offset=2**62), 0), "offset 4611686018427387904"),
    "address": (lambda: nl.ndarray((4, 4), nl.float32, address=(-100000, 0)), "negative"),
    "address: bytes": (lambda: nl.ndarray((4, 4), nl.float32, address=(0, -1000)), "negative"),
    "empty": (lambda: nisa.memset(tile(4, 4)[:, 2:2], 0), "dimension 1 of 0 elements"),
    "step": (lambda: nisa.memset(tile(4, 64).ap([[64, 4], [1 << 62, 5]]), 0), "step 4611686018427387904"),
    "memset: range": (lambda: tile(4, 4, dtype=nl.uint8, value=300), "300 does not fit"),
    "memset: sign": (lambda: tile(4, 4, dtype=nl.uint8, value=-1), "-1 does not fit"),
}


@WAYS
@pytest.mark.parametrize("case", INVALID)
def test_invalid_instructions_are_refused(case, way, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    statement, message = INVALID[case]

    def kernel(x):
        statement()
        return x

    with pytest.raises(nki.NkiValidationError, match=message):
        way(kernel)(X)


@WAYS
@pytest.mark.parametrize("what", ["read", "write", "matmul", "before"])
def test_places_by_a_register_have_bounds(what, way):
    def kernel(x):
        t = nl.load(x)
        u, p = tile(128, 4), nl.ndarray((8, 4), nl.float32, nl.psum)
        r = nisa.register_alloc(-3 if what == "before" else 1000000 if what == "matmul" else 6)
        view = t[:, nl.ds(r, 4)]
        if what == "matmul":
            nisa.nc_matmul(p, t, view)
        elif what == "write":
            nisa.tensor_copy(view, u)
        else:
            nisa.tensor_copy(u, view)
        return x

    with pytest.raises(nki.NkiOutOfBoundsError, match="a register is"):
        way(kernel)(X)


@WAYS
@pytest.mark.parametrize("start", [2, -1000, 1000])
def test_dma_may_skip_places_by_a_register(start, way):
    def kernel(x, n):
        out, r = nl.ndarray((8, 8), nl.float32, nl.shared_hbm), nisa.register_alloc()
        nisa.dma_copy(out, x)
        nisa.register_load(r, nl.load(n))
        rows = out.ap([[8, 2], [1, 8]], scalar_offset=r)
        nisa.dma_copy(rows, tile(2, 8, value=5), oob_mode=nisa.oob_mode.skip)
        return out

    want = X[:8].copy()
    if start == 2:
        want[2:4] = 5
    got = way(kernel)(X[:8].copy(), np.array([[start]], np.int32))
    np.testing.assert_array_equal(got, want)


def test_places_by_a_register_are_followed_step_by_step():
    """What was not written is garbage for who reads it by a register, too; traced, only all of it is noticed."""

    def kernel(x):
        out, t = nl.ndarray((128, 8), nl.float32, nl.shared_hbm), nl.ndarray((128, 8), nl.float32)
        nisa.dma_copy(t[:, 0:4], x[:, 0:4])
        r = nisa.register_alloc(2)
        nisa.tensor_copy(t[:, nl.ds(r, 4)], t[:, nl.ds(r, 4)])
        nisa.dma_copy(out, t)
        return out

    with pytest.raises(nki.NkiUninitialisedReadError, match="element 4"):
        nki.simulate(kernel)(X)


@WAYS
@pytest.mark.parametrize(
    "statement, message",
    [
        (lambda t: t[200:328], "200:328"),
        (lambda t: nisa.memset(t.view(nl.int32), 1 << 40), "memset value"),
        (lambda t: nisa.nc_matmul(t, t, t, tile_position=(1280, 0)), "tile_position 1280"),
        (lambda t: nl.ndarray((129, 4), nl.float32), "129"),
        (lambda t: nisa.nc_matmul(t, t, t, perf_mode="triple_row"), "matmul_perf_mode 'triple_row'.*double_row"),
        (lambda t: nisa.dma_copy(t, t, oob_mode="ignore"), "oob_mode 'ignore'.*skip"),
        (lambda t: nisa.tensor_copy(t, t, engine=99), "engine 99 must be one of"),
        (lambda t: nisa.tensor_copy(t, t, engine=True), "engine True must be one of"),
        (lambda t: nisa.dma_copy(t, t, engine="dmaa"), "engine 'dmaa'"),
        (lambda t: nisa.dma_transpose(t, t, dge_mode="fast"), "dge_mode 'fast'"),
        (lambda t: nisa.sendrecv(t, t, 1, 1, 0, dma_engine="slow"), "dma_engine 'slow'"),
        (lambda t: t[1.5], "1.5 is not an integer"),
        (lambda t: t[..., ...], "2 ellipses: one at most"),
        (lambda t: t[0, 0, 0], "3 indices"),
        (lambda t: t[:, ::-1], "step -1 must be positive"),
        (lambda t: t[:, nl.ds(3, -2)], "out of bounds"),
        (lambda t: t.slice(1, 0, 8, 0), "slice step 0 must be positive"),
        (lambda t: t.reshape((128, 0, -1)), "cannot have shape"),
        (lambda t: t.reshape_dim(1, (0, -1)), "dimension 1, 8, cannot be"),
        (lambda t: t.rearrange(("p", ("a", "b")), ("p", "a"), {"a": 2}), "'b'"),
        (lambda t: t.ap([[8, 128], [1, 8]], indirect_dim=7), "dimension 7"),
        (lambda t: t.ap([[8, 128], [1]]), "pattern"),
        (lambda t: t.view(nl.int16)[:, 1:].ap([[8, 128], [1, 2]], dtype=nl.int32), "no whole number"),
        (lambda t: t.indirect([1, 2]), "index must be a tensor, not list"),
        (lambda t: nisa.tensor_copy(t, t, engine=nisa.oob_mode.skip), "engine <oob_mode.skip"),
        (lambda t: nisa.dma_copy(t, t, dge_mode=[1]), "dge_mode"),
        (lambda t: nisa.activation(t, nl.exp, t, reduce_cmd=-1), "reduce_cmd -1"),
        (lambda t: nisa.tensor_tensor(t, t, t, "plus"), "tensor_tensor op 'plus' is no operator"),
        (lambda t: nisa.activation(t, "expo", t), "activation op 'expo' is no activation function"),
        (lambda t: nisa.tensor_tensor(t, t, t, 3), "op 3 is no operator"),
    ],
)
def test_limits_that_python_checks_name_the_line(statement, message, way):
    def kernel(x):
        statement(nl.load(x))
        return x

    with pytest.raises(nki.NkiError, match=message) as caught:
        way(kernel)(X)
    e, where = caught.value, f"{__file__}:{statement.__code__.co_firstlineno}"
    assert e.location == where and where in str(e) and all((e.instruction, e.operand, e.limit))


def test_a_device_loop_runs_to_its_end():
    def kernel(x):
        for _ in nl.dynamic_range(0, nisa.register_alloc(4)):
            break
        return x

    with pytest.raises(nki.NkiValidationError, match="break"):
        nki.jit(kernel)(X)


def test_an_endless_loop_ends_with_ctrl_c():
    """In a process of its own, as the signal is for the main thread."""
    program = """
import signal, numpy as np, nki, nki.isa as nisa, nki.language as nl
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
def k(x):
    t, r = nl.load(x), nisa.register_alloc(1)
    for _ in nl.dynamic_range(0, nisa.register_alloc((1 << 31) - 1)):
        nisa.tensor_copy(t, t)
    return x
signal.alarm(1)
try:
    nki.jit(k)(np.ones((4, 4), np.float32))
except KeyboardInterrupt:
    print("ended")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n", done.stderr


@WAYS
def test_a_bound_of_nan_ends(way):
    def kernel(x):
        bounds = nl.ndarray((1, 2, 4), nl.float32)
        nisa.sequence_bounds(bounds, nl.load(x))
        return saved(bounds)

    ids = np.array([[np.nan, np.nan, 2, 2]], F32)
    np.testing.assert_array_equal(way(kernel)(ids), [[[0, 1, 2, 2], [1, 2, 4, 4]]])


@WAYS
def test_the_second_operand_is_read_before_the_result_is_written(way):
    def kernel(x):
        s = nl.load(x)
        nisa.tensor_scalar(s, s, nl.subtract, 1.0, reverse0=True, op1=nl.multiply, operand1=s)
        return saved(s)

    np.testing.assert_array_equal(way(kernel)(np.full((128, 1), 3, F32)), np.full((128, 1), -6, F32))


@WAYS
def test_gather_and_scatter_in_one_instruction(way):
    def kernel(x, i, j):
        out = tile(16, 8, value=0)
        nisa.tensor_copy(out.indirect(nl.load(j), 8), nl.load(x).indirect(nl.load(i), 8))
        return saved(out)

    rng = np.random.default_rng(0)
    x = rng.integers(0, 99, (16, 8)).astype(F32)
    i, j = (np.zeros((16, 1), np.uint16) for _ in range(2))
    i[:8, 0], j[:8, 0] = rng.permutation(8), rng.permutation(8)
    want = np.zeros_like(x)
    want[:, j[:8, 0]] = x[:, i[:8, 0]]
    np.testing.assert_array_equal(way(kernel)(x, i, j), want)


@WAYS
def test_a_matmul_by_a_register_overwrites_what_it_meets_first(way):
    def kernel(x):
        t, p = nl.load(x), nl.ndarray((8, 16), nl.float32, nl.psum)
        nl.fori_loop(0, 2, lambda i: nisa.nc_matmul(p[:, nl.ds(i * 8, 8)], t, t))
        return saved(nl.copy(p))

    np.testing.assert_array_equal(way(kernel)(X), np.full((8, 16), 128, F32))


@WAYS
def test_a_product_beside_zeros_stays_when_another_uses_it(way):
    """It holds values if all is well; the second product has 0 beside it."""

    def kernel(x, y, z):
        a, f = nl.ndarray((128, 64), nl.float32), tile(128, 64)
        nisa.dma_copy(a[0:64], x)
        nisa.nc_matmul(p := nl.ndarray((64, 64), nl.float32, nl.psum), a, nl.load(y))
        nisa.tensor_copy(f[0:64], p)
        nisa.nc_matmul(q := nl.ndarray((64, 32), nl.float32, nl.psum), f, nl.load(z))
        return saved(nl.copy(q)), saved(f[0:64])

    x, y, z = np.ones((64, 64), F32), np.ones((128, 64), F32), np.ones((128, 32), F32)
    y[64:] = 0
    for beside in (1, 0):
        z[:64] = beside
        product, first = way(kernel)(x, y, z)
        assert np.unique(first) == [64] and np.unique(product) == [64 + 64 * 64 * beside]


@WAYS
def test_unwritten_rows_beside_a_product_that_is_right(way):
    """The product holds values, so they count: the rows beside it do harm."""

    def kernel(x, y):
        a, f, g = nl.ndarray((128, 64), nl.float32), tile(128, 64, value=0), nl.ndarray((128, 32), nl.float32)
        nisa.dma_copy(a[0:64], x)
        nisa.nc_matmul(p := nl.ndarray((64, 64), nl.float32, nl.psum), a, nl.load(y))
        nisa.tensor_copy(f[64:128], p)
        nisa.memset(g[0:64], 1)
        nisa.nc_matmul(q := nl.ndarray((32, 64), nl.float32, nl.psum), g, f)
        return saved(nl.copy(q))

    x, y = np.ones((64, 64), F32), np.ones((128, 64), F32)
    y[64:] = 0
    with pytest.raises(nki.NkiUninitialisedReadError, match="partition 64"):
        way(kernel)(x, y)


@WAYS
def test_what_is_written_perhaps_is_0_otherwise(way):
    def loop(n, x):
        out = nl.ndarray((128, 64), nl.float32, nl.shared_hbm)
        r, t = nisa.register_alloc(), nl.load(x)
        nisa.register_load(r, nl.load(n))
        nl.fori_loop(0, r, lambda i: nisa.dma_copy(out, t))
        return out

    def skipping(rows, x):
        out = nl.ndarray((64, 64), nl.float32, nl.shared_hbm)
        rows = x.ap([[64, 64], [1, 64]], vector_offset=nl.load(rows))
        nisa.dma_copy(out, rows, oob_mode=nisa.oob_mode.skip)
        return out

    loop, skipping, x = way(loop), way(skipping), torch.ones(128, 64)
    for _ in range(3):
        used = [torch.full((n, 64), 7.0) for n in (128, 64) * 8]
        del used  # what is free now holds 7
        assert not loop(torch.zeros(1, 1, dtype=torch.int32), x).any()
        assert not skipping(torch.full((64, 1), 1000, dtype=torch.int32), x).any()


@WAYS
@pytest.mark.parametrize("make", [np.copy, torch.from_numpy], ids=["numpy", "torch"])
def test_views_of_arguments_are_results(make, way):
    a = np.arange(16, dtype=F32).reshape(4, 4)
    for view, want in (
        (lambda x: x[1:3], a[1:3]),
        (lambda x: x.permute((1, 0)), a.T),
        (lambda x: x.view(nl.int32), a.view(np.int32)),
        (lambda x: x.reshape((2, 8)), a.reshape(2, 8)),
        (lambda x: x, a),
    ):
        np.testing.assert_array_equal(np.asarray(way(view)(make(a))), want)


@WAYS
def test_results_are_in_hbm_at_fixed_places(way):
    def by_register(x):
        r = nisa.register_alloc(1)
        return x.select(0, r)

    with pytest.raises(nki.NkiValidationError, match="HBM"):
        way(lambda x: nl.load(x))(X)
    with pytest.raises(nki.NkiValidationError, match="fixed places"):
        way(by_register)(X)


def add_one(x):
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.add, 1.0)
    nl.store(x, t)
    return x


@WAYS
def test_arguments_that_cannot_be_written(way):
    a = np.ones((4, 4), F32)
    a.setflags(write=False)
    with pytest.raises(ValueError, match="argument 0.*read-only"):
        way(add_one)(a)
    with pytest.raises(ValueError, match="no elements"):
        way(add_one)(np.ones((4, 0), F32))


@WAYS
def test_arrays_of_the_other_byte_order(way):
    a = np.ones((4, 4), ">f4")
    way(add_one)(a)
    np.testing.assert_array_equal(a, np.full((4, 4), 2))


def test_the_sign_of_zero_is_part_of_a_signature():
    def kernel(x, s):
        t = nl.load(x)
        nisa.tensor_scalar(t, t, nl.multiply, s)
        return saved(t)

    k = nki.jit(kernel)
    assert not np.signbit(k(X, 0.0)).any() and np.signbit(k(X, -0.0)).all()


def test_accumulators_start_anew_with_each_launch():
    def kernel(x):
        outs = []
        for i in range(8):  # parts that share nothing
            t, r = nl.load(x), nl.ndarray((128, 1), nl.float32)
            nisa.activation(t, nl.copy, t, reduce_op=nl.add, reduce_res=r, reduce_cmd=nisa.reduce_cmd.reduce)
            outs.append(saved(r))
        return tuple(outs)

    k = nki.jit(kernel)
    first = [np.unique(r).tolist() for r in k(X)]
    assert [np.unique(r).tolist() for r in k(X)] == first


def test_packed_words_are_no_numbers():
    word = np.zeros(1, nl.float8_e4m3fn_x4)[0]
    for convert in (float, complex, np.float64, math.sqrt):
        with pytest.raises(TypeError):
            convert(word)
    words = np.array([3, 1, 2], nl.float8_e4m3fn_x4)
    assert [int(w) for w in np.sort(words)] == [1, 2, 3]
    records = np.zeros(3, [("f", nl.float8_e4m3fn_x4)])
    assert len(np.sort(records)) == len(np.unique(records)) + 2 == 3


@pytest.mark.parametrize("given", ["128x", "128x512:foo", "abc"])
def test_inputs_that_the_command_cannot_read(given, tmp_path):
    kernel = tmp_path / "k.py"
    kernel.write_text("import nki\n@nki.jit\ndef k(x):\n    return x\n")
    with pytest.raises(SystemExit, match=given):
        cli.main(["run", str(kernel), "-i", given])


def test_lint_of_what_is_no_python(tmp_path):
    binary = tmp_path / "x.bin"
    binary.write_bytes(bytes(range(256)))
    for file in (binary, tmp_path, tmp_path / "none.py"):
        with pytest.raises(SystemExit, match=file.name):
            cli.main(["lint", str(file)])


@WAYS
@pytest.mark.parametrize("buffer", [nl.hbm, nl.shared_hbm, nl.sbuf, nl.psum])
@pytest.mark.parametrize("columns", [1 << 45, 1 << 62, 1 << 80])
def test_tensors_that_no_memory_holds(columns, buffer, way):
    def kernel(x):
        nl.ndarray((128, columns), nl.float32, buffer)
        return x

    with pytest.raises(nki.NkiCapacityError, match="bytes: no chip has so many"):
        way(kernel)(X)


BAD_RESULTS = {
    "backwards": (lambda x: saved(nl.load(x)).ap([[-4, 2], [1, 4]], offset=4), "strides .*which PyTorch has not"),
    "on chip": (lambda x: nl.load(x), "returns HBM tensors"),
    "outside": (lambda x: saved(nl.load(x)).ap([[4, 3], [1, 4]]), "elements 0 to 11 are returned, it has 8"),
    "before": (lambda x: x.ap([[4, 2], [1, 4]], offset=-1), "elements -1 to 6"),
}


@WAYS
@pytest.mark.parametrize("name", BAD_RESULTS)
def test_results_that_are_no_tensors_name_the_kernel(name, way):
    statement, message = BAD_RESULTS[name]

    def kernel(x):
        return statement(x)

    with pytest.raises(nki.NkiError, match=message) as caught:
        way(kernel)(torch.ones(2, 4))
    e = caught.value
    assert (e.instruction, e.location) == ("kernel", f"{__file__}:{kernel.__code__.co_firstlineno}") and e.operand
