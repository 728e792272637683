"""Kernels on torch tensors: results are where the arguments are, in the order of their stream, in every way to run."""

import sys

import pytest
import torch

import torchneuron.device  # noqa: F401
import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl
from torchneuron.compile import cache
from torchneuron.compile.plan import Plan, Step

DEVICES = ("cpu", "neuron")


@nki.jit
def plus_one(x):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    t = nl.load(x)
    nisa.tensor_scalar(t, t, nl.add, 1.0)
    nl.store(out, t)
    return out


@nki.jit
def add_first(x):
    """x[0, 0] + 1 into x itself; its Python needs the value, so it runs step by step."""
    t = nl.load(x)
    r = nisa.register_alloc()
    i = nl.ndarray((1, 1), nl.int32)
    nisa.tensor_copy(i, t[0:1, 0:1])
    nisa.register_load(r, i)
    nisa.tensor_scalar(t, t, nl.add, float(int(r) + 1))
    nl.store(x, t)
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["traced", "step", "simulator", "two cores"])
def test_results_are_where_the_arguments_are(device, way, monkeypatch):
    if way == "simulator":
        monkeypatch.setenv("NKI_SIMULATOR", "1")
    kernel = {"step": nki.simulate(plus_one), "two cores": plus_one[2]}.get(way, plus_one)
    x = torch.arange(12.0, device=device).view(3, 4)
    y = kernel(x)
    assert y.device == x.device and torch.equal(y.cpu(), torch.arange(1.0, 13).view(3, 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
def test_arguments_change_in_place(device, transposed):
    base = torch.full((3, 4), 2.0, device=device)
    x = base.t() if transposed else base
    y = add_first(x)
    assert y.device == x.device and y.shape == x.shape
    for t in (base, y):
        assert t.cpu().unique().tolist() == [5.0]


@nki.jit
def first_rows(x):
    """The first half of x's rows, at their place."""
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    n = x.shape[0] // 2 // nl.num_programs()
    rows = nl.ds(nl.program_id(0) * n, n)
    nl.store(out[rows], nl.load(x[rows]))
    return out


@nki.jit
def scattered(x):
    """The same by their numbers, which are known when the kernel runs only."""
    n, columns = x.shape[0] // 2, x.shape[1]
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    numbers, t = nl.ndarray((n, 1), nl.int32), nl.load(x[:n])
    nisa.iota(numbers, [[0, 1]], channel_multiplier=1)
    nisa.dma_copy(out.ap([[columns, n], [1, columns]], vector_offset=numbers), t)
    return out


@pytest.mark.parametrize(
    "device, way",
    [("cpu", "traced"), ("cpu", "step"), ("neuron", "traced"), ("neuron", "step"), ("neuron", "compiled")],
)
@pytest.mark.parametrize("kernel", [first_rows, first_rows[2], scattered], ids=["rows", "two cores", "scatter"])
def test_what_a_kernel_does_not_write_is_0(device, way, kernel):
    run = {"traced": kernel, "step": nki.simulate(kernel)}.get(way) or torch.compile(
        lambda x: kernel(x) + 0, backend="neuron", fullgraph=True
    )
    x = torch.rand(64, 40, device=device)
    expected = torch.cat([x[:32], torch.zeros_like(x[32:])]).cpu()
    for _ in range(3):
        used = [torch.full((64, 40), 7.0, device=device) for _ in range(8)]
        del used  # what is free now holds 7
        assert torch.equal(run(x).cpu(), expected)


def test_launches_follow_their_stream():
    x = torch.zeros(64, 8, device="neuron")
    with torch.neuron.stream(torch.neuron.Stream()):
        y = x
        for _ in range(10):
            y = plus_one(y * 2) + 1
        assert y.cpu().unique().tolist() == [2.0**11 - 2]


def test_compiled_graphs_keep_a_kernel_whole():
    graphs = []

    def see(graph, inputs):
        graphs.append(list(graph.graph.nodes))
        return graph

    def f(x):
        return plus_one[2](x * 2) - 1

    x = torch.arange(8.0, device="neuron").view(2, 4)
    torch.compile(f, backend=see, fullgraph=True)(x)
    assert [n.target for n in graphs[0]].count(torch.ops.torchneuron.nki) == 1
    compiled = torch.compile(f, backend="neuron", fullgraph=True)
    compiled(x)
    torch.neuron.reset_fusion_stats()
    assert torch.equal(compiled(x).cpu(), f(x).cpu())
    assert torch.neuron.fusion_stats()["executables_run"] == 1


def python_calls(f):
    """Names of the Python functions of this package, and of PyTorch's custom operators, that f() calls."""
    seen = []

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and ("torchneuron" in code.co_filename or "custom_op" in code.co_filename):
            seen.append(code.co_name)

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("cores", [1, 2])
def test_a_compiled_graph_launches_kernels_without_python(cores):
    """After the first run with a signature; the kernel's own Python runs when it is traced only."""
    traced = []

    @nki.jit
    def halves(x, scale):
        """scale * x by its rows, one half a core; and x itself."""
        traced.append(x.shape)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        n = x.shape[0] // nl.num_programs()
        t = nl.load(x[nl.program_id(0) * n : (nl.program_id(0) + 1) * n])
        nisa.tensor_scalar(t, t, nl.multiply, scale)
        nl.store(out[nl.program_id(0) * n : (nl.program_id(0) + 1) * n], t)
        return out, x

    f = torch.compile(lambda x: halves[cores](x.t(), 3.0)[0] + halves[cores](x.t(), 5.0)[1], backend="neuron")
    x = torch.arange(32.0, device="neuron").view(8, 4)
    assert torch.equal(f(x).cpu(), 4 * x.cpu().t())
    runs = len(traced)
    results = []
    assert not python_calls(lambda: results.append(f(x)))
    assert torch.equal(results[0].cpu(), 4 * x.cpu().t()) and len(traced) == runs
    y = torch.ones(8, 6, device="neuron")  # another signature is traced once
    assert torch.equal(f(y).cpu(), torch.full((6, 8), 4.0))


def test_a_kernel_that_fails_in_a_compiled_graph_names_its_line():
    @nki.jit
    def gather(x, rows):
        out = nl.ndarray((4, x.shape[1]), x.dtype, nl.shared_hbm)
        index, t = nl.load(rows), nl.ndarray((4, x.shape[1]), x.dtype)
        nisa.dma_copy(t, x.ap([[x.shape[1], 4], [1, x.shape[1]]], vector_offset=index))
        nl.store(out, t)
        return out

    f = torch.compile(lambda x, rows: gather(x, rows) + 1, backend="neuron")
    x = torch.arange(12.0, device="neuron").view(6, 2)
    rows = torch.tensor([[5], [0], [3], [2]], dtype=torch.int32, device="neuron")
    expected = x.cpu()[[5, 0, 3, 2]] + 1
    for _ in range(2):
        assert torch.equal(f(x, rows).cpu(), expected)
    with pytest.raises(nki.NkiOutOfBoundsError) as caught:
        f(x, rows + 4)
    line = gather.func.__code__.co_firstlineno + 4
    assert caught.value.location.endswith(f"test_devices.py:{line}") and caught.value.operand == "src"
    assert torch.equal(f(x, rows).cpu(), expected)


def test_plans_with_kernels_stay_in_their_process():
    """A plan on disk would name a kernel by a number that only this process knows."""
    plan = Plan(0, 0, [], [Step("kernel", "torchneuron::nki", [[], 0], [])], [])
    with pytest.raises(cache.Unencodable, match="kernel"):
        cache.encode(plan)


def test_compiled_graphs_refuse_writes_that_are_not_declared():
    @nki.jit
    def clear(x):
        t = nl.ndarray(x.shape, x.dtype)
        nisa.memset(t, 0)
        nl.store(x, t)
        return x

    x = torch.ones(2, 4, device="neuron")
    with pytest.raises(Exception, match="clear argument 0 .*is written.*mutates_args"):
        torch.compile(lambda x: clear(x) + 1, backend="neuron", fullgraph=True)(x)
    assert x.cpu().unique().tolist() == [1.0]


def test_prints_of_a_kernel_need_no_trace(capsys):
    @nki.jit
    def shown(x):
        t = nl.load(x)
        nl.device_print("tile", t)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nl.store(out, t)
        return out

    x = torch.ones(2, 2, device="neuron")
    assert torch.equal(torch.compile(lambda x: shown(x) * 3, backend="neuron", fullgraph=True)(x).cpu(), x.cpu() * 3)
    assert capsys.readouterr().out.count("tile [[1. 1.]") == 1
    assert len(nki.profile(shown, target="trn2")(x).instructions) == 2
    assert not capsys.readouterr().out


def test_dynamic_graphs_trace_a_kernel_for_each_size():
    f = torch.compile(lambda x: plus_one(x) * 2, backend="neuron", dynamic=True, fullgraph=True)
    for rows in (4, 5, 6):
        assert torch.equal(f(torch.ones(rows, 4, device="neuron")).cpu(), torch.full((rows, 4), 4.0))
