"""Each pass by itself: what it does to a graph, what it leaves alone, and that values stay."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchneuron.compile.passes import PASSES, run_passes

aten = torch.ops.aten


def trace(f, *inputs):
    return make_fx(f, tracing_mode="symbolic" if any(isinstance(i, int) for i in inputs) else "fake")(*inputs)


def operators(graph):
    return [n.target for n in graph.graph.nodes if n.op == "call_function"]


def run(name, graph, *inputs):
    """Operators before and after a pass and dead code; checks that the results are the same bits."""
    before = operators(graph)
    expected = graph(*inputs)
    PASSES[name](graph.graph)
    PASSES["dead_code"](graph.graph)
    graph.graph.lint()
    graph.recompile()
    got = graph(*inputs)
    for e, g in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(got)):
        assert torch.equal(e, g) and e.stride() == g.stride()
    return before, operators(graph)


X = torch.arange(24.0).view(4, 6)


def test_dead_code_goes():
    graph = trace(lambda x: x + 1, X)
    with graph.graph.inserting_before(next(n for n in graph.graph.nodes if n.op == "output")):
        dead = graph.graph.call_function(aten.sin.default, (next(iter(graph.graph.nodes)),))
        graph.graph.call_function(aten.cos.default, (dead,))
    graph.recompile()
    assert run("dead_code", graph, X)[1] == [aten.add.Tensor]


def test_dead_code_keeps_writes_and_random_numbers():
    def f(x):
        x.add_(1)
        torch.rand(3)
        return x.sin()

    graph = make_fx(f, tracing_mode="fake")(X)
    PASSES["dead_code"](graph.graph)
    assert aten.add_.Tensor in operators(graph) and aten.rand.default in operators(graph)


def test_common_subexpressions_run_once():
    before, after = run("common_subexpressions", trace(lambda x: (x.sin() + 1) * (x.sin() + 1), X), X)
    assert len(before) == 5 and len(after) == 3


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x + 1, x + 1),  # the caller gets two tensors
        lambda x: (x + 1).view(-1)[:2] + (x + 1.0).view(-1)[:2],  # 1 and 1.0 may promote differently
        lambda x: (x * 0.0) + (x * -0.0),
        lambda x: torch.rand_like(x) + torch.rand_like(x),
        lambda x: torch.empty(2).zero_() + torch.empty(2).fill_(1),
        lambda x: (x.view(-1), x.view(-1)),
    ],
)
def test_what_is_not_common(f):
    graph = trace(f, X)
    count = [t for t in operators(graph) if not t.is_view] if hasattr(aten.add.Tensor, "is_view") else operators(graph)
    PASSES["common_subexpressions"](graph.graph)
    left = [t for t in operators(graph) if t in count]
    assert len(left) == len(count)


def test_a_write_separates_subexpressions():
    def f(x):
        a = x.sin()
        x.add_(1)
        return a + x.sin()

    graph = make_fx(f, tracing_mode="fake")(X)
    PASSES["common_subexpressions"](graph.graph)
    assert operators(graph).count(aten.sin.default) == 2


def test_constants_are_folded():
    def f(x):
        mask = torch.ones(4, 6).tril().logical_not()
        return x.masked_fill(mask, float("-inf"))

    _, after = run("constant_folding", trace(f, X), X)
    assert after == [aten.masked_fill.Scalar]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x, torch.full((3,), 2.0)),  # the caller may write to it
        lambda x: (x, torch.full((3,), 2.0)[1:]),
        lambda x: x + torch.rand(6),
        lambda x: x + torch.ones(1 << 19, 1)[:4],  # two MiB
        lambda x: x + torch.empty(6),
    ],
)
def test_what_is_not_folded(f):
    graph = trace(f, X)
    before = operators(graph)
    PASSES["constant_folding"](graph.graph)
    assert before[0] in operators(graph) or before[1] in operators(graph)


def test_sizes_are_not_constants():
    graph = trace(lambda x, n: x + torch.ones(n), torch.ones(5), 5)
    PASSES["constant_folding"](graph.graph)
    assert aten.ones.default in operators(graph)


def test_a_functional_copy_of_the_same_layout_goes():
    _, after = run("layout", trace(lambda x: aten.copy(x[0], x[1] * 2) + 1, X), X)
    assert after == [aten.select.int, aten.mul.Tensor, aten.add.Tensor]
    before, after = run("layout", trace(lambda x: aten.copy(x[0], x[1, 0]) + 1, X), X)
    assert aten.copy.default in after


def test_needless_copies_go():
    f = lambda x: (x + 1).contiguous().clone().to(torch.float32, copy=True) * 2
    before, after = run("layout", trace(f, X), X)
    assert aten.clone.default in before and after == [aten.add.Tensor, aten.mul.Tensor]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.clone(),  # the caller gets a tensor of his own
        lambda x: ((y := x + 1), y.clone()),
        lambda x: x.t().clone(memory_format=torch.contiguous_format) + 1,  # other strides
        lambda x: x.to(torch.float64) + 1,
    ],
)
def test_copies_that_matter_stay(f):
    graph = trace(f, X)
    before, after = run("layout", graph, X)
    assert before == after


def test_a_copy_of_what_is_written_later_stays():
    def f(x):
        y = x.clone()
        x.add_(1)
        return y + 1

    graph = make_fx(f, tracing_mode="fake")(X)
    PASSES["layout"](graph.graph)
    assert aten.clone.default in operators(graph)


@pytest.mark.parametrize(
    "f, left",
    [
        (lambda x: x.t().t() + 1, [aten.add.Tensor]),
        (lambda x: x.view(-1).view(2, 12).view(4, 6) * 2, [aten.mul.Tensor]),
        (lambda x: x.view(-1).view(2, 12) * 2, [aten.view.default, aten.mul.Tensor]),
        (lambda x: x.detach().expand(4, 6).unsqueeze(0).squeeze(0) * 2, [aten.mul.Tensor]),
        (lambda x: x.transpose(0, 1).permute(1, 0)[0:4] * 2, [aten.mul.Tensor]),
        (lambda x: (x + 1).t().t(), [aten.add.Tensor]),
    ],
)
def test_views_fold(f, left):
    graph = trace(f, X)
    run("views", graph, X)
    PASSES["dead_code"](graph.graph)
    assert operators(graph) == left


@pytest.mark.parametrize("f", [lambda x: x.t().t(), lambda x: ((y := x + 1), y.t().t()), lambda x: x.view(-1)])
def test_views_that_the_caller_gets_stay(f):
    graph = trace(f, X)
    run("views", graph, X)
    assert any(t in (aten.t.default, aten.view.default, aten.detach.default) for t in operators(graph))


def test_gradients_of_unbind_are_stacked():
    def f(a, b, c):
        put = lambda t, i: aten.select_backward(t, [4, 3, 6], 1, i)
        return put(a, 2) + put(b, 0) + put(c, 1)

    inputs = [torch.randn(4, 6) for _ in range(3)]
    _, after = run("patterns", trace(f, *inputs), *inputs)
    assert after == [aten.stack.default]


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: (
            aten.select_backward(a, [3, 4, 6], 0, 1) + aten.select_backward(b, [3, 4, 6], 0, 0)
        ),  # one is missing
        lambda a, b: (
            aten.select_backward(a, [2, 4, 6], 0, 1) + aten.select_backward(b, [2, 4, 6], 0, 1)
        ),  # one is twice
        lambda a, b: aten.select_backward(a, [2, 4, 6], 0, 1) + b,
    ],
)
def test_other_gradients_are_not_stacked(f):
    inputs = [torch.randn(4, 6) for _ in range(2)]
    before, after = run("patterns", trace(f, *inputs), *inputs)
    assert before == after


CACHE = torch.zeros(8, 4)


def written(f, *inputs):
    """The operators that a functional graph has after the pass, and what it returned and left in its first input,
    checked against the same without the pass."""

    def functional(*args):
        out, new = f(*args)
        args[0].copy_(new)
        return out

    results, graphs = [], []
    for passes in ((), ("reinplace", "dead_code")):
        graph = make_fx(functional, tracing_mode="fake")(*inputs)
        for name in passes:
            PASSES[name](graph.graph)
        graph.graph.lint()
        graph.recompile()
        own = [i.clone() for i in inputs]
        results.append((graph(*own), own[0]))
        graphs.append(graph)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    return operators(graphs[1])


I = torch.tensor([1, 3])
ROWS = torch.randn(2, 4)


@pytest.mark.parametrize(
    "f, left",
    [
        (lambda c, r, i: (r + 1, aten.index_put(c, [i], r)), [aten.add.Tensor, aten.index_put_.default]),
        (lambda c, r, i: (r + 1, aten.slice_scatter(c, r, 0, 2, 4)), [aten.add.Tensor, aten.slice.Tensor, aten.copy_.default]),
        (lambda c, r, i: ((n := aten.index_put(c, [i], r)).sum(0), aten.select_scatter(n, r[0], 0, 5)),
         [aten.index_put_.default, aten.sum.dim_IntList, aten.select.int, aten.select.int, aten.copy_.default]),
        (lambda c, r, i: (r + 1, aten.view(aten.index_put(aten.view(c, [4, 8]), [i], r.view(-1)), [8, 4])),
         [aten.add.Tensor, aten.view.default, aten.view.default, aten.index_put_.default]),
    ],
)  # fmt: skip
def test_parts_of_an_input_are_written_in_place(f, left):
    after = written(f, CACHE, ROWS, I)
    assert after == left


@pytest.mark.parametrize(
    "f",
    [
        lambda c, r, i: (c.sum(0), aten.index_put(c, [i], r) + 1),  # what goes in is not what was written
        lambda c, r, i: ((n := aten.index_put(c, [i], r)), n),  # the caller gets it, too
        lambda c, r, i: ((n := aten.index_put(c, [i], r)).sum() + c.sum(), n),  # the old one is needed
        lambda c, r, i: ((v := c.view(-1)) + (n := aten.index_put(c, [i], r)).view(-1) + v, n),
        lambda c, r, i: (r, aten.index_put(c, [i], c[:2])),  # reads where it writes
    ],
)
def test_what_is_not_written_in_place(f):
    assert aten.index_put.default in written(f, CACHE, ROWS, I)


def test_a_temporary_is_written_in_place():
    graph = trace(lambda r, i: aten.index_put(torch.zeros(8, 4), [i], r) * 2, ROWS, I)
    _, after = run("reinplace", graph, ROWS, I)
    assert aten.index_put_.default in after and aten.index_put.default not in after


def test_a_constant_is_not_written_in_place():
    graph = make_fx(lambda r, i: aten.index_put(CACHE, [i], r) * 2)(ROWS, I)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = CACHE
    _, after = run("reinplace", graph, ROWS, I)
    assert aten.index_put.default in after


def test_all_passes_together_and_none():
    f = lambda x: (x.t().t() + x.sin().clone() + x.sin()) * torch.ones(6).mul(2)
    graph, untouched = trace(f, X), trace(f, X)
    run_passes(graph)
    run_passes(untouched, frozenset())
    assert len(operators(graph)) == 4 < len(operators(untouched))
    graph.recompile()
    assert torch.equal(graph(X), f(X))


def step(p, q, g, h):
    """What AOTAutograd makes of `_foreach_lerp_` on a list of two."""
    difference = torch._foreach_sub([g, h], [p, q])
    weights = [torch.full_like(d, 0.1) for d in difference]
    new = torch._foreach_addcmul([p, q], weights, difference)
    p.copy_(new[0])
    q.copy_(new[1])
    return []


def test_copies_of_a_list_are_one_operator():
    inputs = [torch.arange(6.0) * k for k in (1, 2, 3, 4)]
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    expected = [t.clone() for t in inputs]
    step(*expected)
    _, after = run("lists", graph, *[t.clone() for t in inputs])
    assert aten._foreach_copy_.default in after and aten.copy_.default not in after
    assert aten._foreach_mul.Scalar in after and aten.full_like.default not in after
    got = [t.clone() for t in inputs]
    graph(*got)
    assert all(torch.equal(e, g) for e, g in zip(expected, got))


@pytest.mark.parametrize(
    "end",
    [
        lambda p, q, new: (p.copy_(new[0]), p.copy_(new[1])),  # the order counts
        lambda p, q, new: (p.copy_(new[0]), q.copy_(p)),  # the second reads what the first wrote
        lambda p, q, new: (p.copy_(new[0]), q.t().copy_(new[1].t())),  # another layout
    ],
)
def test_copies_that_depend_on_each_other_stay(end):
    def f(p, q):
        new = torch._foreach_add([p, q], 1)
        end(p, q, new)
        return []

    inputs = [X, X * 2]
    graph = make_fx(f, tracing_mode="fake")(*[t.clone() for t in inputs])
    expected, got = ([t.clone() for t in inputs] for _ in range(2))
    f(*expected)
    PASSES["lists"](graph.graph)
    graph.recompile()
    graph(*got)
    assert aten._foreach_copy_.default not in operators(graph)
    assert all(torch.equal(e, g) for e, g in zip(expected, got))


def test_sums_of_products_in_bfloat16_stay():
    inputs = [t.bfloat16() for t in (X, X * 2, X * 3, X * 4)]
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    assert aten._foreach_addcmul.Scalar in run("lists", graph, *inputs)[1]
