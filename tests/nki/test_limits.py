"""Violated limits are typed errors that name instruction, operand, limit and the kernel's line."""

import inspect
import warnings

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32
WAYS = pytest.mark.parametrize("way", [nki.simulate, nki.jit])
X = np.zeros((128, 64), F32)


def sb(*shape, dtype=nl.float32, value=1):
    t = nl.ndarray(shape, dtype, nl.sbuf)
    nisa.memset(t, value)
    return t


def ps(*shape, dtype=nl.float32):
    t = nl.ndarray(shape, dtype, nl.psum)
    nisa.memset(t, 1)
    return t


# what is wrong: (statement in the kernel, target, pattern of the message)
WRONG = {
    "partitions": (lambda x: nl.ndarray((129, 4), nl.float32), "trn2", "partition.*129.*128"),
    "on-chip rank": (lambda x: nl.ndarray((4,), nl.float32), "trn2", "2 dimensions"),
    "matmul result in SBUF": (lambda x: nisa.nc_matmul(sb(4, 4), sb(8, 4), sb(8, 4)), "trn2", "nc_matmul dst.*sbuf"),
    "matmul input in PSUM": (lambda x: nisa.nc_matmul(ps(4, 4), ps(8, 4), sb(8, 4)), "trn2", "stationary.*psum"),
    "matmul free size on trn2": (
        lambda x: nisa.nc_matmul(ps(4, 513), sb(8, 4), sb(8, 513)),
        "trn2",
        "moving.*513.*512",
    ),
    "matmul across banks": (
        lambda x: nisa.nc_matmul(ps(128, 1024)[:, 256:768], sb(8, 128), sb(8, 512)),
        "trn2",
        "nc_matmul dst.*1024 to 3071.*bank",
    ),
    "address in PSUM": (lambda x: nl.ndarray((8, 4), nl.float32, nl.psum, address=(0, 1000)), "trn2", "1000.*bank"),
    "partitions at an address": (
        lambda x: nl.ndarray((96, 4), nl.float32, nl.sbuf, address=(64, 0)),
        "trn2",
        "partitions 64 to 159.*128",
    ),
    "matmul stationary size": (lambda x: nisa.nc_matmul(ps(128, 4), sb(8, 129), sb(8, 4)), "trn2", "stationary.*129"),
    "matmul partitions": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4), sb(9, 4)),
        "trn2",
        "moving partition dimension 9",
    ),
    "matmul shapes": (lambda x: nisa.nc_matmul(ps(4, 5), sb(8, 4), sb(8, 4)), "trn2", "dst shape"),
    "matmul mixed types": (lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4), sb(8, 4, dtype=nl.bfloat16)), "trn2", "dtype"),
    "matmul of integers": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4, dtype=nl.int8), sb(8, 4, dtype=nl.int8)),
        "trn2",
        "integers",
    ),
    "bf16 accumulation before trn3": (
        lambda x: nisa.nc_matmul(ps(4, 4, dtype=nl.bfloat16), sb(8, 4), sb(8, 4)),
        "trn2",
        "dst dtype",
    ),
    "tile size": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4), sb(8, 4), tile_position=(0, 0), tile_size=(48, 32)),
        "trn2",
        "tile_size 48",
    ),
    "tile position": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4), sb(8, 4), tile_position=(16, 0), tile_size=(32, 32)),
        "trn2",
        "tile_position 16",
    ),
    "MX before trn3": (
        lambda x: nisa.quantize_mx(
            sb(32, 4, dtype=nl.float8_e4m3fn_x4, value=0), sb(32, 16, dtype=nl.bfloat16), sb(4, 4, dtype=nl.uint8)
        ),
        "trn2",
        "generation",
    ),
    "DMA from PSUM": (lambda x: nisa.dma_copy(sb(4, 4), ps(4, 4)), "trn2", "dma_copy src.*psum"),
    "DMA sizes": (lambda x: nisa.dma_copy(sb(4, 5), x[0:4, 0:4]), "trn2", "elements"),
    "shapes": (lambda x: nisa.tensor_tensor(sb(4, 5), sb(4, 5), sb(4, 6), nl.add), "trn2", "data2 free size 6"),
    "partition counts": (lambda x: nisa.tensor_copy(sb(4, 5), sb(5, 5)), "trn2", "src partition dimension 5"),
    "both inputs in PSUM": (lambda x: nisa.tensor_tensor(sb(4, 4), ps(4, 4), ps(4, 4), nl.add), "trn2", "PSUM"),
    "GpSimd and PSUM": (lambda x: nisa.tensor_copy(sb(4, 4), ps(4, 4), engine=nisa.engine.gpsimd), "trn2", "GpSimdE"),
    "engine": (lambda x: nisa.tensor_copy(sb(4, 4), sb(4, 4), engine=nisa.engine.tensor), "trn2", "engine"),
    "bitwise on floats": (
        lambda x: nisa.tensor_tensor(sb(4, 4), sb(4, 4), sb(4, 4), nl.bitwise_and),
        "trn2",
        "bitwise",
    ),
    "bitwise then arithmetic": (
        lambda x: nisa.tensor_scalar(
            sb(4, 4, dtype=nl.int32), sb(4, 4, dtype=nl.int32), nl.bitwise_and, 1, op1=nl.add, operand1=1
        ),
        "trn2",
        "mixes",
    ),
    "ScalarE: maximum": (
        lambda x: nisa.tensor_scalar(sb(4, 4), sb(4, 4), nl.maximum, 1.0, engine=nisa.engine.scalar),
        "trn2",
        "engine scalar computes multiply, add, and both in this order, not maximum",
    ),
    "ScalarE: add and multiply": (
        lambda x: nisa.tensor_scalar(
            sb(4, 4), sb(4, 4), nl.add, 1.0, op1=nl.multiply, operand1=2.0, engine=nisa.engine.scalar
        ),
        "trn2",
        "not add and multiply",
    ),
    "not a reduction": (
        lambda x: nisa.tensor_reduce(sb(4, 1), nl.equal, sb(4, 4), 1),
        "trn2",
        "op equal is not supported",
    ),
    "reduction axis": (lambda x: nisa.tensor_reduce(sb(4, 1), nl.add, sb(4, 4), 0), "trn2", "axis"),
    "start partition": (lambda x: nisa.tensor_copy(sb(128, 4)[16:32], sb(16, 4)), "trn2", "start partition 16"),
    "scalar operand": (
        lambda x: nisa.tensor_scalar(sb(4, 4), sb(4, 4), nl.add, sb(4, 2)),
        "trn2",
        "operand0.*one element",
    ),
    "bn_stats size": (lambda x: nisa.bn_stats(sb(4, 6), sb(4, 513)), "trn2", "513.*512"),
    "bn_aggr triples": (lambda x: nisa.bn_aggr(sb(4, 2), sb(4, 7)), "trn2", "multiple of 3"),
    "max8 size": (lambda x: nisa.max8(sb(4, 8), sb(4, 7)), "trn2", "at least 8"),
    "transpose size": (lambda x: nisa.nc_transpose(sb(33, 32), sb(32, 33), nisa.engine.vector), "trn2", "32"),
    "transpose dtype": (lambda x: nisa.nc_transpose(ps(4, 4, dtype=nl.bfloat16), sb(4, 4)), "trn2", "dtype"),
    "shuffle mask": (lambda x: nisa.nc_stream_shuffle(sb(32, 4), sb(32, 4), [0] * 31), "trn2", "31"),
    "memset type": (lambda x: nisa.memset(nl.ndarray((4, 4), nl.int32), 1.5), "trn2", "memset"),
    "activate2 before trn3": (
        lambda x: nisa.activate2(sb(4, 4), nl.exp, sb(4, 4), 1.0, 0.0, nl.multiply, nl.add),
        "trn2",
        "generation",
    ),
    "activate2 operators": (
        lambda x: nisa.activate2(sb(4, 4), nl.exp, sb(4, 4), 1.0, 0.0, nl.add, nl.add),
        "trn3",
        "operators",
    ),
    "copy on ScalarE": (lambda x: nisa.tensor_copy(sb(4, 4), sb(4, 4), nisa.engine.scalar), "trn1", "before trn2"),
    "reciprocal with bias": (
        lambda x: nisa.activation(sb(4, 4), nl.reciprocal, sb(4, 4), bias=sb(4, 1)),
        "trn1",
        "bias of reciprocal",
    ),
    "bias is a number": (
        lambda x: nisa.activation(sb(4, 4), nl.exp, sb(4, 4), bias=1.0),
        "trn1",
        "bias must be a tensor",
    ),
    "rows of a tile": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(32, 4), sb(32, 4), tile_position=(32, 0), tile_size=(32, 32)),
        "trn1",
        "32 rows",
    ),
    "double row": (
        lambda x: nisa.nc_matmul(
            ps(4, 4), sb(8, 2, 4, dtype=nl.float8_e5m2), sb(8, 2, 4, dtype=nl.float8_e5m2), perf_mode="double_row"
        ),
        "trn1",
        "double_row is not supported before trn2",
    ),
    "matmul of e4m3fn": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4, dtype=nl.float8_e4m3fn), sb(8, 4, dtype=nl.float8_e4m3fn)),
        "trn2",
        "float8_e4m3fn is not supported before trn3",
    ),
    "matmul of both e4m3": (
        lambda x: nisa.nc_matmul(ps(4, 4), sb(8, 4, dtype=nl.float8_e4m3fn), sb(8, 4, dtype=nl.float8_e4m3)),
        "trn3",
        "cannot be mixed",
    ),
    "odd columns of mx": (
        lambda x: nisa.nc_matmul_mx(
            ps(7, 8),
            sb(32, 7, dtype=nl.float8_e5m2_x4, value=0),
            sb(32, 8, dtype=nl.float8_e5m2_x4, value=0),
            sb(4, 7, dtype=nl.uint8),
            sb(4, 8, dtype=nl.uint8),
        ),
        "trn3",
        "stationary free size 7 must be even",
    ),
    "types of hwdge": (
        lambda x: nisa.dma_copy(sb(128, 64, dtype=nl.bfloat16), x, dge_mode=nisa.dge_mode.hwdge),
        "trn2",
        "does not convert",
    ),
    "transpose of hwdge": (
        lambda x: nisa.dma_transpose(sb(64, 128), x, dge_mode=nisa.dge_mode.hwdge),
        "trn2",
        "hwdge cannot transpose",
    ),
    "power on VectorE": (
        lambda x: nisa.tensor_tensor(sb(4, 4), sb(4, 4), sb(4, 4), nl.power, nisa.engine.vector),
        "trn2",
        "no power",
    ),
    "comparison of affine_select": (
        lambda x: nisa.affine_select(sb(4, 4), [[1, 4]], 1, sb(4, 4), 0.0, nl.add),
        "trn2",
        "cmp_op add",
    ),
    "rows of sequence_bounds": (lambda x: nisa.sequence_bounds(sb(2, 2, 4), sb(2, 4)), "trn2", "segment_ids partition"),
    "indices of nc_n_gather": (
        lambda x: nisa.nc_n_gather(sb(4, 4), sb(4, 4), sb(4, 4, dtype=nl.int32, value=0)),
        "trn2",
        "must be uint32",
    ),
    "square root of PSUM": (lambda x: nl.rsqrt(ps(4, 4)), "trn2", "psum"),
    "dma_compute operator": (lambda x: nisa.dma_compute(sb(4, 4), [sb(4, 4)], nl.multiply), "trn2", "add"),
}


@pytest.mark.parametrize("trace", [False, True], ids=["step", "traced"])
@pytest.mark.parametrize("name", WRONG)
def test_limit(name, trace, monkeypatch):
    statement, target, pattern = WRONG[name]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)

    def k(x):
        statement(x)
        return x

    with pytest.raises(nki.NkiValidationError, match=f"(?i){pattern}") as caught:
        (nki.jit if trace else nki.simulate)(k)(X)
    e = caught.value
    assert e.instruction and e.limit and e.location.startswith(__file__), vars(e)
    assert e.operand or "generation" in e.limit, vars(e)


def test_the_error_knows_its_parts():
    def k(x):
        a, b = sb(4, 5), sb(4, 6)
        nisa.tensor_tensor(a, a, b, nl.add)
        return x

    with pytest.raises(nki.NkiValidationError) as e:
        nki.simulate(k)(X)
    line = inspect.getsourcelines(k)[1] + 2
    assert e.value.instruction == "tensor_tensor" and e.value.operand == "data2"
    assert "6" in e.value.limit and e.value.location.endswith(f"test_limits.py:{line}")


def test_uninitialised_reads_name_both_lines():
    def k(x):
        t = nl.ndarray((128, 64), nl.float32)
        nisa.memset(t[0:64, 0:32], 0)
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.dma_copy(x, t)
        return x

    start = inspect.getsourcelines(k)[1]
    for way in (nki.simulate, nki.jit):
        with pytest.raises(nki.NkiUninitialisedReadError) as e:
            way(k)(X)
        assert f":{start + 3}" in str(e.value) and f":{start + 2}" in str(e.value), e.value


def test_uninitialised_hbm_and_never_written():
    def k(x):
        h = nl.ndarray((4, 4), nl.float32, nl.hbm)
        t = nl.ndarray((4, 4), nl.float32)
        nisa.dma_copy(t, h)
        return x

    with pytest.raises(nki.NkiUninitialisedReadError, match="allocated.*nothing writes"):
        nki.simulate(k)(X)


def test_copies_and_transposes_carry_what_is_written():
    def k(x, part):
        t, u = nl.ndarray((128, 64), nl.float32), nl.ndarray((128, 64), nl.float32)
        nisa.memset(t[0:64], 0)
        nisa.tensor_copy(u, t)
        p = nl.ndarray((64, 128), nl.float32, nl.psum)
        nisa.nc_transpose(p, u)
        v = nl.ndarray((64, part), nl.float32)
        nisa.tensor_scalar(v, p[:, 0:part], nl.add, 1.0)
        nisa.dma_copy(x[0:64, 0:part], v[:, 0:part])
        return x

    wide = np.zeros((128, 128), F32)
    nki.simulate(k)(wide, 64)
    with pytest.raises(nki.NkiUninitialisedReadError, match="partition 0, element 64"):
        nki.simulate(k)(wide, 65)


def half_written(then):
    """A kernel that doubles a tile of which only rows 0 to 63 are written; then(out, tile) makes the result."""

    def k(x):
        out = nl.ndarray((128, 64), nl.float32, nl.shared_hbm)
        t = nl.ndarray((128, 64), nl.float32)
        nisa.memset(t[0:64], 1.0)
        nisa.tensor_scalar(t, t, nl.multiply, 2.0)
        then(out, t)
        return out

    return k


def product(out, t):
    p, one = nl.ndarray((64, 64), nl.float32, nl.psum), sb(128, 64)
    nisa.nc_matmul(p, t, one)
    nisa.tensor_copy(t[0:64], p)
    nisa.dma_copy(out[0:64], t[0:64])


def row_sums(out, t):
    s = sb(128, 1)
    nisa.tensor_reduce(s, nl.add, t, 1)
    nisa.dma_copy(out[:, 0:1], s)


REACHES = {
    "copy": lambda out, t: nisa.dma_copy(out, t),
    "bad row alone": lambda out, t: nisa.dma_copy(out[64:65], t[64:65]),
    "matmul over all rows": product,
    "shuffle of bad rows": lambda out, t: (
        nisa.nc_stream_shuffle(t[0:32], t[64:96], [0] * 32),
        nisa.dma_copy(out[0:32], t[0:32]),
    ),
    "row sums": row_sums,
    "scalar operand": lambda out, t: (
        nisa.tensor_scalar(u := sb(128, 64), u, nl.add, t[:, 3:4]),
        nisa.dma_copy(out, u),
    ),
}
DOES_NOT_REACH = {
    "good rows": lambda out, t: nisa.dma_copy(out[0:64], t[0:64]),
    "written later": lambda out, t: (nisa.memset(t[64:128], 0), nisa.dma_copy(out, t)),
    "matmul over good rows": lambda out, t: (
        nisa.nc_matmul(p := nl.ndarray((64, 64), nl.float32, nl.psum), t[0:64], sb(64, 64)),
        nisa.tensor_copy(t[0:64], p),
        nisa.dma_copy(out[0:64], t[0:64]),
    ),
    "shuffled from good rows": lambda out, t: (
        nisa.nc_stream_shuffle(u := sb(128, 64), t[0:64][0:1], [0] * 32),
        nisa.nc_stream_shuffle(t, t, [*range(32)]),
        nisa.dma_copy(out[0:64], t[0:64]),
        nisa.dma_copy(out[64:128], u[0:64]),
    ),
    "selected away": lambda out, t: (
        nisa.affine_select(u := sb(128, 64), [[0, 64]], -1, t, 0.0, nl.greater, 64),
        nisa.dma_copy(out, u),
    ),
}


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
@pytest.mark.parametrize("then", REACHES)
def test_what_is_computed_from_nothing_may_not_reach_a_result(then, way):
    with pytest.raises(nki.NkiUninitialisedReadError, match=r"tensor_scalar data.*partition 64, element 0.*result"):
        way(half_written(REACHES[then]))(X)


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
@pytest.mark.parametrize("then", DOES_NOT_REACH)
def test_what_no_result_depends_on_is_a_warning(then, way):
    with pytest.warns(nki.NkiUninitialisedReadWarning, match="partition 64.*no result"):
        way(half_written(DOES_NOT_REACH[then]))(X)


def poison():
    """A kernel that leaves NaN where later ones have what they never write."""

    def k(x):
        for _ in range(16):
            nisa.memset(t := nl.ndarray((128, 2048), nl.float32), np.nan)
            nisa.tensor_copy(t, t)
        return x

    for way in (nki.simulate, nki.jit):
        way(k)(X)


def matmul_mx(p, a, b):
    """p = the product of what quantize_mx makes of two tiles."""
    types = nl.float8_e4m3fn_x4, nl.uint8
    (qa, scale_a), (qb, scale_b) = ([nl.ndarray((128, v.shape[1] // 4), t) for t in types] for v in (a, b))
    nisa.quantize_mx(qa, a, scale_a)
    nisa.quantize_mx(qb, b, scale_b)
    nisa.nc_matmul_mx(p, qa, qb, scale_a, scale_b)


def padded(kind, pad):
    """A kernel whose matmul goes over 128 partitions, though only 96 of the first factor are written. The second one
    has 0 there: by pad, a memset, or as it is given."""

    def k(x, y):
        out = nl.ndarray((32, 40), nl.float32, nl.shared_hbm)
        p = nl.ndarray((32, 40), nl.float32, nl.psum)
        a, b = (nl.ndarray((128, v.shape[1]), v.dtype) for v in (x, y))
        nisa.dma_copy(a[0:96], x)
        if pad:
            nisa.memset(b[96:128], 0)
        nisa.dma_copy(b[0 : y.shape[0]], y)
        nisa.tensor_scalar(a, a, nl.multiply, 2.0)
        if kind == "mx":
            matmul_mx(p, a, b)
        elif kind == "moving":
            nisa.nc_matmul(t := nl.ndarray((40, 32), nl.float32, nl.psum), b, a)
            nisa.nc_transpose(p, nl.copy(t))
        else:
            nisa.nc_matmul(p, a, b)
            nisa.nc_matmul(p, a, b, accumulate=True)
            nisa.nc_matmul(p, a, b, accumulate=False)
        nl.store(out, nl.copy(p))
        return out

    return k


def half_padded(kind):
    """The same, but the second factor has only its first 24 columns, and only they are given back."""

    def k(x, y):
        lanes = 4 if kind == "mx" else 1
        out = nl.ndarray((32, 24), nl.float32, nl.shared_hbm)
        p = nl.ndarray((32, 40), nl.float32, nl.psum)
        a, b = (nl.ndarray((128, v.shape[1]), v.dtype) for v in (x, y))
        nisa.dma_copy(a[0:96], x)
        nisa.dma_copy(b[:, 0 : 24 * lanes], y[:, 0 : 24 * lanes])
        nisa.tensor_scalar(a, a, nl.multiply, 2.0)
        if kind == "mx":
            matmul_mx(p, a, b)
        else:
            nisa.nc_matmul(p, a, b)
        nl.store(out, nl.copy(p[:, 0:24]))
        return out

    return k


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
@pytest.mark.parametrize("kind", ["stationary", "moving", "mx"])
def test_unwritten_rows_of_a_matmul_do_no_harm_beside_zeros(kind, way, rng, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    lanes = 4 if kind == "mx" else 1
    x, y = (rng.integers(-4, 5, (96, n * lanes)).astype("bfloat16") for n in (32, 40))
    want = np.einsum("kml,knl->mn", *(v.astype(F32).reshape(96, -1, lanes) for v in (2 * x, y)))
    poison()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nki.NkiUninitialisedReadWarning)  # a computation reads them, too
        np.testing.assert_array_equal(way(padded(kind, True))(x, y), want)
        zeros = np.zeros((32, y.shape[1]), y.dtype)
        run = way(padded(kind, False))
        np.testing.assert_array_equal(run(x, np.concatenate([y, zeros])), want)
        if kind != "moving":  # some columns of the other factor are not written either: the other columns are right
            columns = half_padded(kind)
            np.testing.assert_array_equal(way(columns)(x, np.concatenate([y, zeros])), want[:, :24])
    zeros[5, 7] = 1  # the same program, other values
    with pytest.raises(nki.NkiUninitialisedReadError, match="partition 96, element 0 was never written.*result"):
        run(x, np.concatenate([y, zeros]))


def test_a_tile_made_again_is_uninitialised_again():
    def k(x):
        for i in range(2):
            t = nl.ndarray((4, 4), nl.float32)
            if i == 0:
                nisa.memset(t, 0)
            nisa.tensor_scalar(t, t, nl.add, 1.0)
        return x

    with pytest.raises(nki.NkiUninitialisedReadError):
        nki.jit(k)(X)


def fill_psum(banks):
    def k(x):
        tiles = [ps(128, 512) for _ in range(banks)]
        t = sb(128, 512)
        for p in tiles:
            nisa.tensor_tensor(t, t, p, nl.add)
        return x

    return k


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
def test_capacity(way):
    way(fill_psum(8))(X)
    with pytest.raises(nki.NkiCapacityError, match="PSUM capacity exceeded"):
        way(fill_psum(9))(X)

    def reuse(x):  # one after the other: only one is live
        for _ in range(40):
            t = sb(128, 16384)
            nisa.tensor_scalar(t, t, nl.add, 1.0)
        return x

    way(reuse)(X)


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
def test_what_does_not_fit_may_spill(way, monkeypatch):
    monkeypatch.setenv("TORCH_NEURON_NKI_SPILL", "1")
    with pytest.warns(nki.NkiSpillWarning, match="PSUM capacity exceeded.*would spill"):
        way(fill_psum(9))(X)


@pytest.mark.parametrize("way", [nki.simulate, nki.jit])
def test_an_address_beyond_the_memory(way, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")

    def k(x, buffer, offset):
        nl.ndarray((8, 4), nl.float32, buffer, address=(0, offset))
        return x

    way(k)(X, nl.sbuf, 224 * 1024 - 16)
    way(k)(X, nl.psum, 7 * 2048)
    for buffer, offset in ((nl.sbuf, 224 * 1024 - 12), (nl.psum, 8 * 2048)):
        with pytest.raises(nki.NkiCapacityError, match=r"(SBUF|PSUM) capacity exceeded.*test_limits.py"):
            way(k)(X, buffer, offset)


def test_two_cores_have_their_own_limits():
    @nki.jit
    def k(x):
        t = sb(128, 30000)
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        return x

    nki.simulate(k[2])(X)


def test_stores_outside_a_tensor_are_refused_when_built():
    def k(x):
        t = sb(4, 4)
        nisa.dma_copy(x.ap([[64, 4], [1, 4]], 128 * 64), t)
        return x

    with pytest.raises(nki.NkiOutOfBoundsError, match="dma_copy dst") as e:
        nki.simulate(k)(X)
    assert (e.value.instruction, e.value.operand) == ("dma_copy", "dst") and "bytes 32768" in e.value.limit
    assert "test_limits.py" in e.value.location


def test_gather_index_out_of_bounds():
    def k(x):
        i = sb(128, 2, dtype=nl.uint32, value=64)
        t = nl.ndarray((128, 64), nl.float32)
        nisa.dma_copy(t, x)
        nisa.nc_n_gather(nl.ndarray((128, 2), nl.float32), t, i)
        return x

    with pytest.raises(nki.NkiOutOfBoundsError, match="64"):
        nki.simulate(k)(X)


def test_nothing_runs_outside_kernels():
    with pytest.raises(RuntimeError, match="inside kernels"):
        nl.ndarray((4, 4), nl.float32)


@WAYS
def test_more_hbm_than_a_chip_has(way):
    def k(x):
        nl.ndarray((1 << 20, 1 << 20), nl.float32, nl.shared_hbm)
        return x

    with pytest.raises(nki.NkiCapacityError, match="exceeds HBM") as e:
        way(k)(X)
    assert e.value.operand and e.value.instruction and e.value.location.startswith(__file__)


@WAYS
def test_a_result_that_nothing_writes(way):
    def k(x):
        return nl.ndarray((4, 4), nl.float32, nl.shared_hbm)

    with pytest.raises(nki.NkiUninitialisedReadError, match="is returned, and nothing writes it") as e:
        way(k)(X)
    assert e.value.instruction == "k" and e.value.location == f"{__file__}:{k.__code__.co_firstlineno + 1}"


def too_much(memory):
    def k(x):
        kept = [nl.ndarray((128, 8192), nl.float32, memory) for _ in range(9)]
        for t in kept:
            nisa.memset(t, 0)
        for t in kept:
            nisa.tensor_copy(t, t)
        return x

    return k


def waits(x):
    if nl.program_id(0) == 0:
        nisa.core_barrier(x, (0, 1))
    return x


def reads_garbage(x):
    out, t = nl.ndarray((128, 64), nl.float32, nl.shared_hbm), sb(128, 32)
    u = nl.ndarray((128, 64), nl.float32)
    nisa.tensor_copy(u[:, 0:32], t)
    nisa.dma_copy(out, u)
    return out


def gathers(x):
    out, index = nl.ndarray((8, 8), nl.float32), sb(8, 8, dtype=nl.uint32, value=77)
    nisa.nc_n_gather(out, nl.load(x[0:8, 0:8]), index)
    saved = nl.ndarray((8, 8), nl.float32, nl.shared_hbm)
    nisa.dma_copy(saved, out)
    return saved


@WAYS
@pytest.mark.parametrize(
    "kernel,cores,error",
    [
        (too_much(nl.sbuf), 1, nki.NkiCapacityError),
        (waits, 2, nki.NkiDeadlockError),
        (reads_garbage, 1, nki.NkiUninitialisedReadError),
        (gathers, 1, nki.NkiOutOfBoundsError),
    ],
)
def test_every_error_names_instruction_operand_limit_and_line(kernel, cores, error, way):
    with pytest.raises(error) as caught:
        way(kernel)[cores](X)
    e = caught.value
    assert e.instruction and e.operand and e.limit and e.location.startswith(f"{__file__}:"), vars(e)
    assert e.location in str(e) and str(e).startswith(f"{e.instruction} {e.operand} ")


@WAYS
def test_a_type_that_nki_has_not(way):
    def k(x, y):
        return x

    with pytest.raises(nki.NkiValidationError, match="int64.*no element type") as e:
        way(k)(X, X.astype(np.int64))
    assert (e.value.instruction, e.value.operand) == ("k", "argument 1")
    assert e.value.location == f"{__file__}:{k.__code__.co_firstlineno}"
