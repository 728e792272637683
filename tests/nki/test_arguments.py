"""Arguments of kernels: arrays that share memory, constants, what autograd follows, and values that are no arrays."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

import torchneuron.device  # noqa: F401
import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

F32 = np.float32
WAYS = pytest.mark.parametrize("way", [nki.simulate, nki.jit])
DEVICES = pytest.mark.parametrize("device", ["cpu", "neuron"])


def saved(t):
    out = nl.ndarray(t.shape, t.dtype, nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


def shifted(a, b):
    """b[i + 1] = a[i] + 1, four rows at a time."""
    for i in (0, 4):
        t = nl.load(a[i : i + 4])
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nl.store(b[i + 1 : i + 5], t)
    return b


def shifted_reference(a, b):
    for i in (0, 4):
        b[i + 1 : i + 5] = a[i : i + 4] + 1


def plus_one(x):
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.add, 1.0)
    nl.store(x, t)
    return x


# What of one array [20, 6] the two arguments are.
VIEWS = {
    "same": (lambda x: x[:9], lambda x: x[:9]),
    "rows apart": (lambda x: x[:9], lambda x: x[2:11]),
    "other order": (lambda x: x[3:12], lambda x: x[:9]),
    "disjoint": (lambda x: x[:9], lambda x: x[9:18]),
    "same, strided": (lambda x: x[:9, ::2], lambda x: x[:9, ::2]),
    "disjoint, strided": (lambda x: x[:9, ::2], lambda x: x[:9, 1::2]),
}


@WAYS
@pytest.mark.parametrize("kind", ["numpy", "cpu", "neuron"])
@pytest.mark.parametrize("case", VIEWS)
def test_arguments_may_share_memory(case, kind, way):
    """Instructions see what those before them wrote, through whichever argument."""
    start = np.arange(120, dtype=F32).reshape(20, 6)
    views, expected = VIEWS[case], start.copy()
    shifted_reference(*(view(expected) for view in views))
    kernel = way(shifted)
    for _ in range(2):
        x = start.copy() if kind == "numpy" else torch.from_numpy(start.copy()).to(kind)
        a, b = (view(x) for view in views)
        assert kernel(a, b) is b or case == "same" or case == "same, strided"
        assert np.array_equal(x if kind == "numpy" else x.cpu(), expected)
    apart = (start[:9].copy(), start[:9].copy())  # the program for arrays that share nothing
    expected = start[:9].copy()
    shifted_reference(start[:9], expected)
    assert np.array_equal(kernel(*apart), expected) and np.array_equal(apart[0], start[:9])


@WAYS
def test_copies_of_arguments_that_share_memory_are_refused(way):
    def add_into(a, b):
        t = nl.load(a)
        nl.store(b, t)
        return saved(t)

    x = np.arange(40, dtype=F32).reshape(4, 10)
    with pytest.raises(
        nki.NkiValidationError, match="add_into argument 1 .* is written and shares memory with argument 0"
    ):
        way(add_into)(x[:, 0:9:2], x[:, 1:6])
    assert np.array_equal(x, np.arange(40, dtype=F32).reshape(4, 10))
    fixed = x.view()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="shares memory"):
        way(add_into)(fixed, x)


@WAYS
@DEVICES
def test_negated_views_are_read_and_written_negated(device, way):
    x = torch.arange(6.0, device=device).view(2, 3)
    view = torch._neg_view(x)
    assert view.is_neg() and way(plus_one)(view) is view
    assert torch.equal(view.cpu(), 1 - torch.arange(6.0).view(2, 3))
    assert torch.equal(x.cpu(), torch.arange(6.0).view(2, 3) - 1)


@WAYS
@pytest.mark.parametrize("kind", ["numpy", "cpu", "neuron"])
@pytest.mark.parametrize("cores", [1, 2])
def test_constants_are_fresh_in_every_launch(kind, way, cores):
    def counted(x):
        """What a kernel writes to a constant, and what its caller does, is gone in the next launch."""
        written, returned = (nl.shared_constant(np.eye(2, dtype=F32)) for _ in range(2))
        t = nl.load(written)
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nl.store(written, t)
        return written, returned

    kernel = way(nki.jit(counted)[cores])
    x = np.ones((1, 1), F32) if kind == "numpy" else torch.ones(1, 1, device=kind)
    for _ in range(3):
        written, returned = kernel(x)
        assert np.array_equal(written if kind == "numpy" else written.cpu(), np.eye(2) + 1)
        assert np.array_equal(returned if kind == "numpy" else returned.cpu(), np.eye(2))
        returned += 5


@WAYS
@DEVICES
def test_autograd_sees_that_a_kernel_writes(device, way):
    kernel = way(plus_one)
    w = torch.full((2, 2), 3.0, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad .* argument 0"):
        kernel(w)
    with pytest.raises(RuntimeError, match="argument 0 .* requires grad, and kernels have no gradient"):
        kernel(w * 1)
    assert w.cpu().unique().tolist() == [3.0] and w._version == 0
    y = w * 1.0
    loss = (y * y).sum()
    with torch.no_grad():
        assert kernel(y) is y
        kernel(w.t())
    assert y._version == 1 and w._version == 1 and w.cpu().unique().tolist() == [4.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        assert kernel(torch.ones(2, 2, device=device)).cpu().unique().tolist() == [2.0]


@dataclasses.dataclass
class Config(nl.NKIObject):
    a: float

    def __post_init__(self):
        self.b = self.a


class Slots:
    __slots__ = ("b",)

    def __init__(self, b):
        self.b = b


class Callee:
    def __init__(self, b):
        self.b = b

    def __call__(self):
        return self.b


def with_b(value, b):
    value.b = b
    return value


def returning(b):
    return lambda: b


CONFIG, SLOTS, CALLEE = Config(2.0), Slots(2.0), Callee(2.0)
# Two values and what a kernel makes a number of them with: it must see that they differ.
DIFFERENT = {
    "int, bool": (1, True, lambda c: len(type(c).__name__)),
    "int, float": (1, 1.0, lambda c: len(type(c).__name__)),
    "zeros": (0.0, -0.0, lambda c: np.copysign(1, c)),
    "NumPy zeros": (F32(0.0), F32(-0.0), lambda c: np.copysign(1, c)),
    "NumPy types": (np.int32(1), F32(1), lambda c: isinstance(c, np.integer)),
    "in a tuple": ((1, (0.0,)), (1, (-0.0,)), lambda c: np.copysign(1, c[1][0])),
    "no field": (with_b(Config(1.0), 2.0), with_b(Config(1.0), 3.0), lambda c: c.b),
    "slots": (Slots(2.0), Slots(3.0), lambda c: c.b),
    "changed": (lambda: with_b(CONFIG, 2.0), lambda: with_b(CONFIG, 3.0), lambda c: c().b),
    "slots, changed": (lambda: with_b(SLOTS, 2.0), lambda: with_b(SLOTS, 3.0), lambda c: c().b),
    "callable, changed": (lambda: with_b(CALLEE, 2.0), lambda: with_b(CALLEE, 3.0), lambda c: c()()),
    "partial": (functools.partial(float, "2"), functools.partial(float, "3"), lambda c: c()),
    "closure": (returning(2.0), returning(3.0), lambda c: c()),
    "method": (Callee(2.0).__call__, Callee(3.0).__call__, lambda c: c()),
    "array in a closure": (returning(np.ones(2)), returning(np.zeros(2)), lambda c: c().sum()),
    "types": (nl.float8_e5m2, nl.bfloat16, lambda c: len(str(c))),
    "NumPy's types": (np.dtype(nl.float8_e5m2), np.dtype(nl.float8_e4m3), lambda c: int(str(c)[-1])),
    "dict": ({"a": 1}, {"a": True}, lambda c: len(type(c["a"]).__name__)),
    "set": ({1, 4}, {1, 5}, sum),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_values_that_differ_are_traced_apart(case):
    first, second, number = DIFFERENT[case]

    @nki.jit
    def kernel(x, value):
        t = nl.load(x)
        nisa.tensor_scalar(t, t, nl.multiply, float(number(value)))
        return saved(t)

    x, results = np.ones((2, 2), F32), []
    for value in (first, second):
        value = value() if "changed" in case else value
        given = (lambda v=value: v) if "changed" in case else value
        results.append((kernel(x, given)[0, 0], float(number(given))))
    assert results[0][1] != results[1][1]
    assert all(got == expected for got, expected in results)


@pytest.mark.parametrize(
    "make",
    [
        lambda: saved,
        lambda: Config,
        lambda: Config(1.0),
        lambda: Slots(1.0),
        lambda: nl.add,
        lambda: np.exp,
        lambda: nki.isa.engine.vector,
        lambda: returning(2.0),
        lambda: functools.partial(saved, 1),
        lambda: {"a": [Config(1.0), np.dtype("float32")], "b": torch.float32},
        lambda: SHARED,
        lambda: np.float32(1),
        lambda: nl.sbuf,
        lambda: range(3),
    ],
)
def test_values_that_are_the_same_share_a_trace(make):
    traced = []

    @nki.jit
    def kernel(x, value):
        traced.append(value)
        return saved(nl.load(x))

    for _ in range(3):
        kernel(np.ones((2, 2), F32), make())
    assert len(traced) == 1


SHARED = nki.jit(plus_one)


def test_what_cannot_be_told_is_traced_again():
    @nki.jit
    def kernel(x, values):
        t = nl.load(x)
        nisa.tensor_scalar(t, t, nl.multiply, next(values))
        return saved(t)

    values = (float(i) for i in range(2, 5))
    assert [kernel(np.ones((2, 2), F32), values)[0, 0] for _ in range(3)] == [2, 3, 4]
    assert not kernel.cache


def test_arrays_in_slots_are_arguments():
    @nki.jit
    def kernel(held):
        return saved(nl.load(held.b))

    for value in (1.0, 2.0):
        x = np.full((2, 2), value, F32)
        assert np.array_equal(kernel(Slots(x)), x)
    assert len(kernel.cache) == 1


def test_the_environment_that_tracing_reads_is_part_of_the_key(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")

    @nki.jit
    def scales(x):
        t, out, scale = nl.load(x), nl.ndarray((32, 4), nl.float8_e4m3fn_x4), nl.ndarray((4, 4), nl.uint8)
        nisa.quantize_mx(out, t, scale)
        return saved(scale)

    x = np.full((32, 16), 3.0, nl.bfloat16)
    default = scales(x)
    monkeypatch.setenv("TORCH_NEURON_MX_SCALE", "ocp")
    assert np.array_equal(scales(x), nki.simulate(scales)(x)) and not np.array_equal(scales(x), default)


@pytest.mark.parametrize("grid", ["2", None, 2.0, 0, 3, -1, (2, 2), [1.0]])
def test_grids_are_1_or_2_cores(grid):
    with pytest.raises(nki.NkiValidationError, match="plus_one.*1 or 2 cores"):
        SHARED[grid]
    assert SHARED[(1, 2)] is SHARED[2] and SHARED[np.int64(2)] is SHARED[2]


@WAYS
def test_torch_results_have_no_negative_strides(way):
    def reversed_rows(x):
        n, m = x.shape
        return saved(nl.load(x)).ap([[-m, n], [1, m]], offset=(n - 1) * m)

    x = np.arange(6, dtype=F32).reshape(2, 3)
    assert np.array_equal(way(reversed_rows)(x), x[::-1])
    with pytest.raises(nki.NkiValidationError, match="reversed_rows t2 .*strides") as caught:
        way(reversed_rows)(torch.from_numpy(x))
    assert caught.value.location.endswith(f"test_arguments.py:{reversed_rows.__code__.co_firstlineno}")
