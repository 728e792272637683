"""Calls of kernels: arguments that share memory, what a trace is kept for, autograd's rules, structures of arguments and
results; the same from NumPy, torch on the CPU and the device, in a compiled graph."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

import torchneuron.device  # noqa: F401
import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl
from torchneuron.nki import torch_ops

F32 = np.float32
WAYS = pytest.mark.parametrize("way", [nki.simulate, nki.jit])
DEVICES = pytest.mark.parametrize("device", ["cpu", "neuron"])


def saved(t):
    out = nl.ndarray(t.shape, t.dtype, nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


def scaled(x, factor):
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.multiply, float(factor))
    return saved(t)


# ---- arguments that share memory -------------------------------------------------------------------------------------
def shifted(a, b):
    """b's rows 1 to 8 = a's rows 0 to 7, plus one, in two tiles: with a and b the same, the second reads the first."""
    for i in (0, 4):
        t = nl.ndarray((4, 8), nl.float32)
        nisa.dma_copy(t, a[i : i + 4])
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.dma_copy(b[i + 1 : i + 5], t)
    return b


def want_shifted(a, b):
    for i in (0, 4):
        b[i + 1 : i + 5] = a[i : i + 4] + 1


SHARING = {
    "the same": lambda m: (m[0:9, 0:8], m[0:9, 0:8]),
    "rows of one": lambda m: (m[0:9], m[2:11]),
    "nothing of one": lambda m: (m[0:9], m[11:20]),
}


@WAYS
@pytest.mark.parametrize("kind", ["numpy", "cpu", "neuron"])
@pytest.mark.parametrize("name", SHARING)
def test_arguments_may_share_memory(name, kind, way):
    base = np.random.default_rng(0).standard_normal((20, 8)).astype(F32)
    want = base.copy()
    want_shifted(*SHARING[name](want))
    memory = base.copy() if kind == "numpy" else torch.from_numpy(base.copy()).to(kind)
    way(shifted)(*SHARING[name](memory))
    np.testing.assert_array_equal(memory if kind == "numpy" else memory.cpu().numpy(), want)


@WAYS
def test_an_array_with_gaps_may_be_given_twice(way):
    memory = np.zeros((9, 16), F32)
    want = memory.copy()
    want_shifted(want[:, ::2], want[:, ::2])
    way(shifted)(memory[:, ::2], memory[:, ::2])
    np.testing.assert_array_equal(memory, want)


def test_arrays_with_gaps_that_share_a_part_are_refused():
    memory = np.zeros((9, 24), F32)
    with pytest.raises(nki.NkiValidationError, match="arguments 1 and 0 of shifted.*pass a copy"):
        nki.jit(shifted)(memory[:, 0:16:2], memory[:, 4:20:2])
    nki.jit(shifted)(memory[:, 0:16:2], memory[:, 1:17:2])  # which lie between each other


# ---- memory of all cores ---------------------------------------------------------------------------------------------
@WAYS
@pytest.mark.parametrize("name", ["", "both"])
def test_shared_tensors_are_the_same_on_all_cores(name, way):
    def kernel(x):
        columns = 8 + 8 * nl.program_id()
        return saved(nl.load(x)) if columns == 0 else nl.ndarray((2, columns), nl.float32, nl.shared_hbm, name=name)

    with pytest.raises(nki.NkiValidationError, match="128 bytes here and 64 on another core") as caught:
        way(kernel)[2](np.ones((2, 2), F32))
    assert str(caught.value).count(f"{__file__}:") == 2  # both allocations


@WAYS
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


@WAYS
def test_constants_are_new_in_each_launch(way):
    def kernel(x):
        c = nl.shared_constant(np.eye(2, dtype=F32))
        t = nl.load(c)
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.dma_copy(c, t)
        return c

    run = way(kernel)
    for _ in range(3):
        np.testing.assert_array_equal(run(np.ones((2, 2), F32)), np.eye(2) + 1)


# ---- what a trace is kept for ----------------------------------------------------------------------------------------
@dataclasses.dataclass
class Config:
    a: int

    def __post_init__(self):
        self.b = self.a * 2


class Slotted:
    __slots__ = ("v",)

    def __init__(self, v):
        self.v = v


class Callable:
    def __init__(self, v):
        self.v = v

    def __call__(self):
        return self.v


def config(b):
    c = Config(1)
    c.b = b
    return c


def closure(v):
    return lambda: v


KEYS = {
    "signs of zero": ([F32(0.0), F32(-0.0), 0.0, -0.0], lambda c: np.copysign(1, c)),
    "types of one": ([1, True, 1.0, np.int32(1), F32(1)], lambda c: len(type(c).__name__)),
    "attributes": ([config(2), config(9)], lambda c: c.b),
    "slots": ([Slotted(2), Slotted(3)], lambda c: c.v),
    "callables": ([Callable(2), Callable(3)], lambda c: c()),
    "closures": ([closure(2), closure(3)], lambda c: c()),
    "partials": ([functools.partial(int, "2"), functools.partial(int, "3")], lambda c: c()),
    "methods": ([Callable(2).__call__, Callable(3).__call__], lambda c: c()),
    "keys": ([{1: 2.0}, {True: 2.0}, {1: 3.0}], lambda c: len(repr(c)) * next(iter(c.values()))),
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_arguments_that_differ_have_programs_of_their_own(name, wrapped):
    values, meaning = KEYS[name]

    def kernel(x, c):
        return scaled(x, meaning(c))

    run = torch_ops.wrap_nki(kernel) if wrapped else nki.jit(kernel)
    for _ in range(2):
        for c in values:
            assert run(torch.ones(2, 2), c).unique().tolist() == [meaning(c)]


@pytest.mark.parametrize("make", [Slotted, Callable, lambda v: [Slotted(v)]])
def test_an_argument_that_changed_is_another(make):
    def kernel(x, c):
        return scaled(x, (c[0] if isinstance(c, list) else c).v)

    run, c, x = nki.jit(kernel), make(2), np.ones((2, 2), F32)
    assert run(x, c)[0, 0] == 2
    (c[0] if isinstance(c, list) else c).v = 3
    assert run(x, c)[0, 0] == 3


def test_a_trace_depends_on_the_settings_that_it_reads(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")

    def kernel(x):
        t, q, s = nl.load(x), nl.ndarray((32, 4), nl.float8_e4m3fn_x4), nl.ndarray((4, 4), nl.uint8)
        nisa.quantize_mx(q, t, s)
        return saved(s)

    run, x = nki.jit(kernel), np.full((32, 16), 3.0, nl.bfloat16)
    first = run(x)[0, 0]
    monkeypatch.setenv("TORCH_NEURON_MX_SCALE", "ocp")
    assert run(x)[0, 0] == first - 1


# ---- autograd --------------------------------------------------------------------------------------------------------
def doubled_in_place(x):
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.multiply, 2.0)
    nisa.dma_copy(x, t)
    return x


@WAYS
@DEVICES
def test_writes_count_as_operators_in_place(device, way):
    w = torch.ones(2, 2, device=device, requires_grad=True)
    x = torch.full((2, 2), 3.0, device=device)
    y = w * x
    before = x._version
    way(doubled_in_place)(x)
    assert x._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@WAYS
@DEVICES
def test_what_requires_grad_is_not_written_behind_autograd(device, way):
    w = torch.ones(2, 2, device=device, requires_grad=True)
    for x, what in ((w, "a leaf Variable that requires grad"), (w * 1, "a tensor that requires grad")):
        with pytest.raises(RuntimeError, match=what):
            way(doubled_in_place)(x)
        with torch.no_grad():
            way(doubled_in_place)(x)
        assert x.unique().tolist() == [2.0]
    with torch.inference_mode():
        x = torch.ones(2, 2, device=device)
        way(doubled_in_place)(x)
        assert x.unique().tolist() == [2.0]


@DEVICES
def test_operators_say_what_they_write(device):
    def body(x: torch.Tensor) -> None:
        nki.jit(doubled_in_place)(x)

    silent = torch_ops.nki_op("test_calls::silent", body)
    says = torch_ops.nki_op("test_calls::says", body, mutates_args={"x"})
    x = torch.ones(2, 2, device=device)
    with pytest.raises(nki.NkiError, match="test_calls::silent writes its argument x"):
        silent(x)
    says(x)
    assert x.unique().tolist() == [4.0]


@WAYS
@DEVICES
def test_negated_views_are_read_as_they_are_seen(device, way):
    z = torch.complex(torch.zeros(2, 3), torch.arange(6.0).view(2, 3)).to(device)
    x = z.conj().imag
    assert x.is_neg()
    assert torch.equal(way(scaled)(x, 1.0).cpu(), x.resolve_neg().cpu())
    way(doubled_in_place)(x)
    assert torch.equal(z.imag.cpu(), 2 * torch.arange(6.0).view(2, 3))


# ---- structures ------------------------------------------------------------------------------------------------------
RESULTS = {
    "tensor": lambda t: t,
    "one": lambda t: (t,),
    "list": lambda t: [t, t],
    "nested": lambda t: {"a": t, "b": (t, [t])},
    "none": lambda t: (),
}


def shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {k: shapes(v) for k, v in value.items()}
    return type(value)(shapes(v) for v in value)


@DEVICES
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_results_keep_their_structure(name, compiled, device):
    kernel = nki.jit(lambda x: RESULTS[name](saved(nl.load(x))))
    torch._dynamo.reset()
    run = torch.compile(lambda x: kernel(x + 1), backend="neuron") if compiled else torch_ops.wrap_nki(kernel)
    assert shapes(run(torch.ones(2, 3, device=device))) == shapes(RESULTS[name](torch.ones(2, 3)))


@pytest.mark.parametrize("give", [lambda x: (x, x + 1), lambda x: [x, x + 1], lambda x: {0: x, 1: x + 1}])
@pytest.mark.parametrize("compiled", [False, True])
def test_arguments_may_be_in_tuples_lists_and_dicts(give, compiled):
    kernel = nki.jit(lambda xs, scale: scaled(xs[1], scale))
    torch._dynamo.reset()
    run = torch.compile(lambda x: kernel(give(x), 3), backend="neuron") if compiled else torch_ops.wrap_nki(kernel)
    x = torch.ones(2, 3, device="neuron")
    assert (run(x) if compiled else run(give(x), 3)).unique().tolist() == [6.0]


def test_a_wrapped_kernel_takes_numpy_arrays_too():
    np.testing.assert_array_equal(torch_ops.wrap_nki(scaled)(np.ones((2, 2), F32), 3), np.full((2, 2), 3))


VIEWS = {
    "turned": lambda t: saved(nl.load(t)).permute((1, 0)),
    "columns": lambda t: saved(nl.load(t))[:, 1:3],
    "of the argument": lambda t: t[:, 1:3],
    "the argument": lambda t: t,
    "repeated": lambda t: saved(nl.load(t))[0:1].broadcast(0, 3),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_have_the_same_strides_without_data(name):
    kernel = nki.jit(lambda x: VIEWS[name](x))
    x = torch.arange(8.0, device="neuron").view(2, 4)
    real, fake = kernel(x), kernel(x.to("meta"))
    assert real.stride() == fake.stride() and real.shape == fake.shape
    torch._dynamo.reset()
    got = torch.compile(lambda x: kernel(x).reshape(-1) + 1, backend="neuron")(x)
    assert torch.equal(got.cpu(), real.cpu().reshape(-1) + 1)


BAD_RESULTS = {
    "backwards": (lambda x: saved(nl.load(x)).ap([[-4, 2], [1, 4]], offset=4), "no negative strides"),
    "on chip": (lambda x: nl.load(x), "returns HBM tensors"),
    "outside": (lambda x: saved(nl.load(x)).ap([[4, 3], [1, 4]]), "elements 0 to 11 of .*, which has 8"),
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
    assert f"(kernel, {__file__}:{kernel.__code__.co_firstlineno})" in str(caught.value)


def test_a_kernel_that_asks_for_values_says_what_a_compiled_graph_needs():
    @nki.jit
    def kernel(x):
        return scaled(x, int(nisa.register_alloc(3)))

    with pytest.raises(nki.NkiError, match="shapes of kernel's results are not known.*register_fake"):
        kernel(torch.ones(2, 2, device="meta"))


@pytest.mark.parametrize("grid", [0, 3, -1, "2", True, None, 2.0])
def test_a_launch_has_one_or_two_cores(grid):
    with pytest.raises(nki.NkiValidationError, match=r"scaled\[.*1 or 2 cores"):
        nki.jit(scaled)[grid]
