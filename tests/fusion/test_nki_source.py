"""Fused programs printed as NKI source: on the simulator, step by step and traced, they run to the same bits."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchneuron import _core
from torchneuron.nki import source
from torchneuron.perf import targets

sys.path.insert(0, str(Path(__file__).parent))
from nki_sources import check, watched  # noqa: E402

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int8, torch.uint8, torch.bool)
EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-40, -1e-40, 1.4e-45, 88.7, 89.5, -104.0, 1e30, -1e30, 3e38,
    float("inf"), -float("inf"), float("nan"), 2.0**31, -(2.0**31), 2.0**31 - 128, 8388607.5, -8388608.5, 3e5, 65520.0,
    1e-8, 3.0, -3.0, 7.25,
]  # fmt: skip
INTEGERS = [0, 1, -1, 2, 7, -7, 127, -128, 255, 1000, -(2**31), 2**31 - 1, -(2**31) + 1, 16777217, -16777217]

# Calls by lane operation that they show.
UNARY = (
    "neg abs sign sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p tanh sigmoid erf erfc sin cos tan asin acos "
    "atan sinh cosh floor ceil trunc round frac logical_not isnan isinf relu"
).split()
BINARY = (
    "add sub mul div maximum minimum fmax fmin floor_divide remainder fmod copysign eq ne lt le gt ge logical_and "
    "logical_or logical_xor pow atan2"
).split()
INTEGER_BINARY = "add sub mul maximum minimum eq ne lt le gt ge logical_and bitwise_and bitwise_or bitwise_xor".split()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def integers(*shape: int, low: int = -(2**31), high: int = 2**31 - 1) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int64).int()


def many(dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.tensor(EDGES), randn(2000), randn(500, seed=1) * 1000]).to(dtype)


def pairs(values: list, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor(values)
    both = torch.cartesian_prod(t, t).to(dtype)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


# ---- lane operations -------------------------------------------------------------------------------------------------
def test_every_lane_operation_has_a_form():
    assert {"copy", *source.OPERATIONS, *source.REDUCTIONS} - {"gather"} == _core.LANE_OPS.keys()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(name, dtype):
    check(getattr(torch, name), many(dtype), steps=dtype == torch.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary_functions(name, dtype):
    check(getattr(torch, name), *pairs(EDGES, dtype), steps=dtype == torch.float32)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers(dtype):
    a, b = pairs(INTEGERS, dtype)
    for name in INTEGER_BINARY:
        if (dtype, name) != (torch.bool, "sub"):
            check(getattr(torch, name), a, b, steps=False)
    for name in "bitwise_not logical_not exp".split() + "neg abs sign".split() * (dtype != torch.bool):
        check(getattr(torch, name), a, steps=False)


@pytest.mark.parametrize("to", (*FLOATS, *INTS), ids=str)
@pytest.mark.parametrize("dtype", (*FLOATS, *INTS), ids=str)
def test_casts(dtype, to):
    if dtype != to:
        values = torch.tensor(INTEGERS).to(dtype) if dtype in INTS else many(dtype)
        check(lambda x: x.to(to), values, steps=False)


def merged(*names: str):
    """Programs of two steps in all orders, which the program merges into one."""
    f = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
    first, second = (f[n] for n in names)
    return [lambda a, b, c: second(first(a, b), c), lambda a, b, c: second(c, first(a, b))]


@pytest.mark.parametrize(
    "names", [(a, b) for a in ("add", "sub", "mul") for b in ("add", "sub", "mul", "div")], ids="-".join
)
def test_merged_operations(names):
    a, b = pairs(EDGES, torch.float32)
    for function in merged(*names):
        check(function, a, b, b.roll(7), steps=False)


@pytest.mark.parametrize("name", "silu gelu mish softplus elu hardswish hardsigmoid leaky_relu relu6".split())
def test_activations(name):
    check(getattr(F, name), many(torch.float32))
    check(lambda x, y: getattr(F, name)(x) * y, randn(900), randn(900, seed=1))


# Operations that no operator of PyTorch becomes as yet, against NumPy.
def by_hand(op: str, kind: str, *inputs: np.ndarray) -> np.ndarray:
    """Runs a program of one operation on integers: a map of elements, or a reduction of rows."""
    rows, columns = inputs[0].shape if kind == "reduce" else (inputs[0].size, 1)
    extent = "row" if kind == "reduce" else "full"
    n = len(inputs)
    sizes = [a.size for a in inputs] + [rows]
    program = source.Program(
        ("test",), rows, columns, kind == "reduce",
        tuple(source.Access("int32", "full" if i < n else extent, i, i, 0, ((size, 1),)) for i, size in enumerate(sizes)),
        tuple(("access", "full", i) for i in range(n)) + (("step", extent, n),),
        (*(source.Step("load", "copy", "full", i, (), i) for i in range(n)),
         source.Step(kind, op, extent, n, tuple(range(n)), 0), source.Step("store", "copy", extent, None, (n,), n)),
        (), (),
    )  # fmt: skip
    return source.print_source(program).kernel()(*(a.reshape(-1) for a in inputs))


def test_division_of_integers():
    a, b = (np.array(x) for x in zip(*itertools.product(INTEGERS, [i for i in INTEGERS if i])))
    wide = {"ifloor_div": a // b, "iremainder": a % b, "ifmod": np.fmod(a, b), "itrunc_div": (a - np.fmod(a, b)) // b}
    for op, want in wide.items():
        got = by_hand(op, "map", a.astype(np.int32), b.astype(np.int32))
        np.testing.assert_array_equal(got, want.astype(np.int32), err_msg=op)


@pytest.mark.parametrize("columns", [1, 40, 5000])
def test_largest_and_smallest_of_integers(columns):
    x = integers(130, columns).numpy()
    x[3] = -(2**31)
    np.testing.assert_array_equal(by_hand("iamax", "reduce", x), x.max(-1))
    np.testing.assert_array_equal(by_hand("iamin", "reduce", x), x.min(-1))


# ---- places ----------------------------------------------------------------------------------------------------------
POINTWISE = {
    "bias": (lambda x, b: (x + b).relu(), randn(70, 300), randn(300)),
    "a number a row": (lambda x, b: x * b[:, None], randn(70, 300), randn(70)),
    "broadcasts": (lambda x, b, c: x * b + c, randn(3, 50, 7, 11), randn(50, 1, 11), randn(3, 1, 7, 1)),
    "transposed": (lambda x, y: x.t() + y, randn(60, 90), randn(90, 60)),
    "strided": (lambda x: x[:, ::3].exp(), randn(33, 100)),
    "shifted": (lambda x: x[1:] - x[:-1], randn(1009)),
    "many prime": (lambda x: x * 2, randn(100003)),
    "no dimension": (lambda x: x * 3, randn()),
    "a number of the device": (lambda x, s: x * s[0], randn(129), randn(1)),
    "channels last": (
        lambda x, b: F.silu(x) + b,
        randn(2, 16, 9, 9).to(memory_format=torch.channels_last),
        randn(1, 16, 1, 1),
    ),
    "permuted": (lambda x: x.permute(2, 0, 1).contiguous(), randn(12, 13, 14)),
    "borders that cross": (
        lambda x, y, z, w: (x + y).view(30, 4) * (z + w),
        *(randn(12, 10), randn(12, 1), randn(30, 4), randn(30, 1)),
    ),
    "six dimensions": (
        lambda x, y, z: x.permute(1, 0, 3, 2, 5, 4) * y + z,
        *(randn(3, 2, 3, 4, 5, 2), randn(2, 1, 4, 1, 2, 1), randn(1, 3, 1, 3, 1, 5)),
    ),
    "small inner dimensions": (lambda x, y: x * y, randn(200, 3, 2, 2), randn(200, 1, 2, 1)),
    "several results": (lambda x: (x.exp(), x.sigmoid(), x > 0), randn(500)),
    "types": (
        lambda x, i, m: torch.where(m, x * i, x.bfloat16().float()),
        *(randn(500), integers(500, low=-99, high=99), randn(500) > 0),
    ),
    "numbers": (lambda x: (x * 0.1 + 3).clamp(-1, 1.5), randn(777)),
    "integer numbers": (lambda x: (x + 123456789).bitwise_xor(0x55555555).clamp(-(10**8), 10**8), integers(777)),
    "zeros of two types": (lambda x, i: (F.relu(x), i.zero_()), randn(50), integers(50)),
    "in place": (lambda x, y: x.mul_(2).add_(y), randn(300), randn(300)),
    "a part in place": (lambda x, y: x[1:].mul_(y), randn(30, 20), randn(20)),
    "out of a part": (lambda x, y: torch.add(x[:, :5], 1, out=y[:, 2:7]), randn(30, 20), randn(30, 9)),
    "lists": (lambda *x: torch._foreach_mul(list(x), 1.5), randn(300), randn(7, 5), randn(1)),
    "concatenation": (lambda x, y: torch.cat([x.exp(), y], 1), randn(20, 70), randn(20, 40)),
    "dropout": (lambda x: F.dropout(x, 0.3), randn(70, 300)),
    "uniform": (lambda x: x.uniform_(-1, 1), randn(1003)),
    "bernoulli": (lambda x: x.bernoulli_(0.3), randn(1003)),
}  # fmt: skip


@pytest.mark.parametrize("case", POINTWISE)
def test_pointwise(case):
    function, *inputs = POINTWISE[case]
    check(function, *inputs)


@pytest.mark.parametrize("seed", [0, 67280421310721, 2**32 - 1, 2**63 - 1])
def test_random_numbers_of_any_seed(seed):
    torch.manual_seed(seed)
    check(lambda x: x.uniform_(-1, 1), randn(300))


# ---- rows ------------------------------------------------------------------------------------------------------------
ROWS = {
    "sum": lambda x: x.sum(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "mean of squares": lambda x: (x * x).mean(-1, keepdim=True),
    "in place": lambda x: x.sub_(x.amax(-1, keepdim=True)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)),
    "var": lambda x: x.var(-1),
}


@pytest.mark.parametrize("columns", [2, 31, 33, 1000, 4097, 9000, 40000])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, columns):
    check(ROWS[name], randn(5, columns), steps=columns < 5000)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_types_and_edges(name, dtype):
    x = randn(len(EDGES) + 3, 300)
    x[range(len(EDGES)), range(len(EDGES))] = torch.tensor(EDGES)
    x[-1], x[-2] = -0.0, -float("inf")
    check(ROWS[name], x.to(dtype), steps=False)


def gradients(function):
    """The results of the backward pass, too."""

    def both(x, *others):
        leaves = [t.requires_grad_() for t in (x, *others) if t.is_floating_point()]
        y = function(x, *others)
        return [t.detach() for t in (y, *torch.autograd.grad(y.square().sum(), leaves))]

    return both


LABELS = torch.arange(70) * 7 % 300
LAYERS = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (300,), w, b), randn(70, 300), randn(300), randn(300, seed=1)),
    "rms norm": (lambda x, w: F.rms_norm(x, (300,), w), randn(70, 300), randn(300)),
    "group norm": (lambda x: F.group_norm(x, 4), randn(3, 16, 9, 9)),
    "softmax": (lambda x: x.softmax(-1), randn(70, 300)),
    "masked softmax": (lambda x: x.masked_fill(x > 2, -float("inf")).softmax(-1), randn(70, 300)),
    "cross entropy": (lambda x: F.cross_entropy(x, LABELS.to("neuron")), randn(70, 300)),
    "silu, bias": (lambda x, b: F.silu(x + b), randn(700, 30), randn(30)),
    "binary cross entropy": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        *(randn(70, 300), randn(70, 300, seed=1)),
    ),
    "mse": (F.mse_loss, randn(70, 300), randn(70, 300, seed=1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients(name):
    function, *inputs = LAYERS[name]
    LABELS.to("neuron")
    check(gradients(function), *inputs, steps=False)


@pytest.mark.parametrize("columns", [100, 5000])
def test_losses_of_long_rows(columns):
    x, labels = randn(40, columns), torch.arange(40) * 97 % columns
    check(lambda x, y: F.cross_entropy(x, y), x, labels, steps=False)
    check(lambda x, y: F.nll_loss(x, y, reduction="none"), x.bfloat16(), labels, steps=False)


@pytest.mark.parametrize("name", ["sum", "amax", "amin"])
def test_columns(name):
    for shape in ((1, 70), (33, 70), (1100, 5), (100, 3000)):
        check(lambda x: getattr(x * 2, name)(0), randn(*shape), steps=False)
    check(lambda x: getattr(x, name)((0, 2, 3)), randn(3, 16, 9, 9).to(memory_format=torch.channels_last), steps=False)


def test_optimizers():
    def sgd(p, g, m):
        m.mul_(0.9).add_(g)
        p.add_(m, alpha=-0.01)

    def adamw(*tensors):
        parameters, gradients, first, second, steps = (list(tensors[i::5]) for i in range(5))
        torch._fused_adamw_(parameters, gradients, first, second, [], steps, lr=1e-3, beta1=0.9, beta2=0.999,
                            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip

    check(sgd, randn(300), randn(300, seed=1), randn(300, seed=2))
    tensors = [randn(n, seed=k).abs() if k else randn(n) for n in (300, 7) for k in range(4)]
    check(adamw, *tensors[:4], torch.tensor(3.0), *tensors[4:], torch.tensor(9.0))


def test_random_programs(root):
    command = [sys.executable, root / "tests/fusion/nki_sources.py", "--first", "2000000", "--count", "25"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(re.search(r"'checked': (\d+)", done.stdout).group(1)) > 50


# ---- what is printed -------------------------------------------------------------------------------------------------
def test_tiles_fit_the_smallest_target(monkeypatch):
    """Programs of many live tiles, and of rows that no partition can hold, are traced for trn1: its limits are
    checked."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    assert targets.default().name == "trn1"

    def wide(*x):  # all of them are live when the last one is needed
        products = [a * b for a, b in zip(x, x[1:])]
        return sum((p * q for p, q in zip(products, reversed(products))), x[0].exp())

    check(wide, *(randn(9000, seed=i) for i in range(24)), steps=False)

    def wide_rows(*x):
        y = wide(*x)
        return (y - y.amax(-1, keepdim=True)).softmax(-1)

    check(wide_rows, *(randn(3, 6000, seed=i) for i in range(12)), steps=False)
    check(lambda x: x.softmax(-1), randn(2, 60000), steps=False)
    for name in "expm1 log1p log2 log10 erfc asin acos sinh cosh".split():
        check(getattr(torch, name), randn(300000), steps=False)
    check(torch.atan2, randn(300000), randn(300000, seed=1), steps=False)
    check(lambda x: F.dropout(x, 0.4), randn(300000), steps=False)


def test_programs_of_a_block_are_gathered_once():
    x = randn(100).to("neuron")
    x + 1  # before the block
    with torch.neuron.fused_programs() as programs:
        for k in range(3):
            y = torch.sigmoid(x) * x + k  # numbers are arguments
            y.tolist()
        with torch.neuron.fused_programs() as inner:
            x.softmax(-1)
    x + 2
    assert [(p.operators, p.runs) for p in programs] == [(["sigmoid", "mul", "add"], 3), (["softmax"], 1)]
    assert [p.operators for p in inner] == [["softmax"]]
    printed = programs[0].source
    names = Counter(node.func.attr for node in ast.walk(ast.parse(printed.text)) if isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute))  # fmt: skip
    assert names["sigmoid"] == 1 and names["store"] == 1
    want = (torch.sigmoid(x) * x + 0).cpu()
    assert torch.equal(printed.kernel()(x.cpu(), *(v for _, v in printed.numbers)), want)


def test_compiled_programs_are_gathered():
    f = torch.compile(lambda x: (x.exp() + 1).log(), backend="neuron")
    x = randn(64, 64).to("neuron")
    with torch.neuron.fused_programs() as programs:
        f(x)
    assert any("exp" in p.operators and p.source for p in programs)


def test_a_file_runs_alone(tmp_path):
    with watched() as programs:
        F.layer_norm(randn(6, 50).to("neuron"), (50,))
    file = tmp_path / "kernel.py"
    file.write_text(source.print_source(programs[0][0]).text)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("m") and "float32" in done.stdout
    assert "kernel" in runpy.run_path(str(file), run_name="kernel")
