"""Kernels in functions that are compiled, and as operators, do what they do when they are called."""

import collections
import copy

import numpy as np
import pytest
import torch
import torch_neuronx

import torchneuron.device  # noqa: F401
import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl

Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def made(x, factor=1.0):
    """factor * x as a tensor of its own."""
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.multiply, factor)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nl.store(out, t)
    return out


def twice(x):
    out = made(x)
    return out, [out, out[0:1]]


def parts(x):
    out = made(x)
    return out[0:1], out[1:3], out.permute((1, 0))


# What a kernel returns, and what is done with it, which must not tell compiled functions from others.
RESULTS = {
    "tensor": (made, lambda x, r: r + 1),
    "1-tuple": (lambda x: (made(x),), lambda x, r: (type(r), r)),
    "list": (lambda x: [made(x), made(x, 2.0)], lambda x, r: (type(r), r)),
    "nested": (lambda x: (made(x), [made(x, 2.0), (3, None, "a")], 1.5), lambda x, r: r),
    "dict": (lambda x: {"a": made(x), 2: [made(x, 2.0)]}, lambda x, r: r),
    "named tuple": (lambda x: Pair(made(x), made(x, 2.0)), lambda x, r: (type(r), r.first, r.second)),
    "nothing": (lambda x: None, lambda x, r: (r, x + 1)),
    "number": (lambda x: 3, lambda x, r: x * r),
    "argument": (lambda x: x, lambda x, r: (r.add_(1), x)),
    "argument and tensor": (lambda x: (made(x), x), lambda x, r: (r[1].mul_(2), r[0], x)),
    "view of the argument": (lambda x: x[1:3], lambda x, r: (r.add_(1), x + 0)),
    "strided view of the argument": (lambda x: x[1:3, ::2], lambda x, r: (r + 1, r.stride())),
    "another type": (lambda x: x.view(nl.int32)[1:2], lambda x, r: r + 1),
    "permuted": (lambda x: made(x).permute((1, 0)), lambda x, r: (r, r.stride(), r + 1)),
    "sliced": (lambda x: made(x)[1:3, ::2], lambda x, r: (r, r.stride())),
    "one tensor twice": (twice, lambda x, r: (r[0].add_(1), r[1])),
    "parts of one tensor": (parts, lambda x, r: (r, r[2].stride(), r[0] + r[1])),
    "constant": (lambda x: (nl.shared_constant(np.eye(4, dtype=np.float32)), x), lambda x, r: r[0].add_(1)),
}


def values(r):
    return torch.utils._pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, r)


def assert_same(got, expected):
    got, expected = (torch.utils._pytree.tree_flatten(values(r)) for r in (got, expected))
    assert got[1] == expected[1]
    for a, b in zip(got[0], expected[0]):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("way", ["compiled", "compiled, transposed", "dynamic", "wrapped"])
@pytest.mark.parametrize("case", RESULTS)
def test_results_keep_their_structure_and_their_memory(case, way):
    kernel, use = nki.jit(RESULTS[case][0]), RESULTS[case][1]

    def run(f):
        x = torch.arange(24.0, device="neuron").view(4, 6)
        x = x.view(6, 4).t() if "transposed" in way else x
        return f(x * 1 if way != "wrapped" else x)

    def f(x):
        return use(x, kernel(x))

    wrapped = torch_neuronx.wrap_nki(kernel)
    other = {"wrapped": lambda x: use(x, wrapped(x))}.get(way) or torch.compile(
        f, backend="neuron", fullgraph=True, dynamic=way == "dynamic"
    )
    expected = run(f)
    for _ in range(2):
        assert_same(run(other), expected)


def test_results_that_graphs_have_not_are_refused():
    kernel = nki.jit(lambda x: (made(x), nl.float32))
    assert kernel(torch.ones(2, 2))[1] is nl.float32
    with pytest.raises(Exception, match="strides"):
        reverse = nki.jit(lambda x: made(x).ap([[-2, 2], [1, 2]], offset=2))
        torch.compile(lambda x: reverse(x) + 1, backend="neuron")(torch.ones(2, 2, device="neuron"))
    with pytest.raises(Exception, match="<lambda> returns <object"):
        kernel = nki.jit(lambda x: (made(x), object()))
        torch.compile(lambda x: kernel(x)[0], backend="neuron")(torch.ones(2, 2, device="neuron"))


@pytest.mark.parametrize("compiled", [False, True])
def test_values_that_differ_are_calls_of_their_own(compiled):
    kernel = nki.jit(lambda x, c: made(x, {bool: 2.0, int: 3.0}.get(type(c), c)))
    wrapped = torch_neuronx.wrap_nki(kernel)
    x = torch.ones(2, 2, device="neuron")
    for value, expected in [(1, 3.0), (True, 2.0), (1.0, 1.0), (0.0, 0.0), (-0.0, -0.0)]:
        torch._dynamo.reset()  # whose guards take 0.0 for -0.0
        f = torch.compile(lambda x, v=value: kernel(x, v), backend="neuron") if compiled else wrapped
        result = f(x) if compiled else f(x, value)
        assert torch.equal(1 / result.cpu(), 1 / torch.full((2, 2), expected)), value


def test_objects_that_change_are_calls_of_their_own():
    class Factor:
        def __init__(self, value):
            self.value = value

    wrapped = torch_neuronx.wrap_nki(lambda x, c: made(x, c.value))
    changing, results = Factor(2.0), []
    for rows, value in [(2, 2.0), (2, 3.0), (3, 2.0), (3, 4.0)]:
        changing.value = value
        results += [wrapped(torch.ones(rows, 1), c)[0, 0].item() for c in (changing, Factor(2.0))]
    assert results == [2, 2, 3, 2, 2, 2, 4, 2]


def test_numbers_of_dynamic_graphs_are_fixed_for_a_kernel():
    kernel = nki.jit(lambda x, c: made(x, c * 2))
    f = torch.compile(
        lambda x, c: (kernel(x, c), kernel(x, x.shape[0])), backend="neuron", fullgraph=True, dynamic=True
    )
    for rows, c in [(2, 3), (3, 4), (2, 2.5), (2, 3.5), (3, -0.0)]:
        x = torch.ones(rows, 2, device="neuron")
        assert_same(f(x, c), (x * (c * 2), x * (rows * 2)))


def test_tensors_in_containers_are_arguments():
    def add(pair, more, scale=1.0):
        total = made(pair[0], scale)
        t = nl.load(total)
        for other in (pair[1], *more["list"]):
            nisa.tensor_tensor(t, t, nl.load(other), nl.add)
        nl.store(total, t)
        return total

    kernel = nki.jit(add)
    x = torch.ones(2, 2, device="neuron")
    for f in (kernel, torch_neuronx.wrap_nki(kernel)):
        for g in (f, torch.compile(lambda *a, f=f, **k: f(*a, **k), backend="neuron", fullgraph=True)):
            for i in range(2):
                got = g((x + i, x), {"list": [x * 2, x]}, scale=4.0)
                assert torch.equal(got.cpu(), torch.full((2, 2), 4.0 * (1 + i) + 4))


def test_arguments_that_no_graph_has_are_refused():
    class Holder:
        pass

    holder = Holder()
    holder.x = torch.ones(2, 2)
    wrapped = torch_neuronx.wrap_nki(lambda x: made(x.x if isinstance(x, Holder) else x))
    for given in (np.ones((2, 2), np.float32), holder):
        with pytest.raises(nki.NkiError, match="NumPy arrays, or tensors in other objects"):
            wrapped(given)


def by_register(add):
    def kernel(x):
        """Its Python needs the value of a register."""
        r = nisa.register_alloc(add)
        t = nl.load(x)
        nisa.tensor_scalar(t, t, nl.add, float(int(r)))
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nl.store(out, t)
        return (out,) if add == 1 else [out]

    return nki.jit(kernel)


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_compiled_functions_call_kernels_that_run_step_by_step(device):
    one, two = by_register(1), by_register(2)
    f = torch.compile(lambda x: (one(x * 2), two(x * 2)[0] * 3), backend="neuron")
    for n in (2, 3):
        first, second = f(torch.ones(n, 2, device=device))
        assert type(first) is tuple and first[0].cpu().unique().tolist() == [3.0]
        assert second.cpu().unique().tolist() == [12.0]
    x = torch.ones(2, 2, device=device)
    assert type(torch_neuronx.wrap_nki(two)(x)) is list


def test_compiled_functions_read_negated_views():
    kernel = nki.jit(made)
    f = torch.compile(lambda x: (kernel(x), kernel(torch._neg_view(x))), backend="neuron")
    x = torch.arange(4.0, device="neuron").view(2, 2)
    for given in (x, torch._neg_view(x)):
        assert_same(f(given), (given, -given))


def add_one(x):
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.add, 1.0)
    nl.store(x, t)
    return x


WRITES = nki.jit(add_one)


@torch_neuronx.nki_op("nki_graphs::undeclared", mutates_args=())
def undeclared(x: torch.Tensor) -> torch.Tensor:
    WRITES(x)
    return x.clone()


@torch_neuronx.nki_op("nki_graphs::own", mutates_args=())
def own(x: torch.Tensor) -> torch.Tensor:
    return WRITES(x.clone())


@torch_neuronx.nki_op("nki_graphs::first", mutates_args={"x"})
def first(x: torch.Tensor, y: torch.Tensor, which: int) -> None:
    WRITES((x, y)[which])


@torch_neuronx.nki_op("nki_graphs::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return nki.jit(lambda x: made(x).permute((1, 0)))(x)


@pytest.mark.parametrize("way", ["eager", "step", "compiled"])
def test_operators_write_what_they_declare_only(way, monkeypatch):
    if way == "step":
        monkeypatch.setenv("NKI_SIMULATOR", "1")
    run = torch.compile(lambda f, *a: f(*a), backend="neuron") if way == "compiled" else lambda f, *a: f(*a)
    x, y = (torch.ones(2, 2, device="neuron") for _ in range(2))
    with pytest.raises(Exception, match="add_one argument 0 .*is written.*undeclared.*mutates_args"):
        run(undeclared, x)
    with pytest.raises(Exception, match="add_one argument 0 .*is written.*first.*mutates_args"):
        run(first, x, y, 1)
    with pytest.raises(Exception, match="add_one argument 0 .*compiled graph.*mutates_args"):
        torch_neuronx.wrap_nki(WRITES)(x)
    if way != "step":
        assert x.cpu().unique().tolist() == y.cpu().unique().tolist() == [1.0]
    x = torch.ones(2, 2, device="neuron")
    version = x._version
    run(first, x, x[0:1], 0)
    assert x.cpu().unique().tolist() == [2.0] and x._version > version
    assert run(own, x).cpu().unique().tolist() == [3.0] and x.cpu().unique().tolist() == [2.0]


def test_fake_results_have_the_strides_of_real_ones():
    torch.library.opcheck(turned, (torch.rand(2, 8),))
    torch.library.opcheck(own, (torch.rand(2, 8),))
    torch.library.opcheck(first, (torch.rand(2, 8), torch.rand(2, 8), 0))


def test_a_copy_of_a_kernel_is_itself():
    assert copy.deepcopy({"kernel": WRITES})["kernel"] is WRITES
