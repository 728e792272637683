"""Operators that the library path must not leave to a composite, or that take tensors of several devices."""

import pytest
import torch

X = torch.linspace(-4, 4, 64).reshape(8, 8)


def same(function):
    cpu, neuron = function("cpu"), function("neuron")
    assert neuron.device.type == "neuron"
    torch.testing.assert_close(neuron.cpu(), cpu)
    assert cpu.stride() == neuron.stride()


def test_backward_kernels_beside_implicit_composites():
    for op in (torch.ops.aten.silu_backward, torch.ops.aten.mish_backward):
        with torch.no_grad():
            same(lambda d, op=op: op(torch.ones_like(X, device=d), X.to(d)))
    same(lambda d: torch.native_channel_shuffle(X.to(d).reshape(1, 4, 4, 4), 2))


def test_mode_out():
    def mode(device):
        values = torch.empty(0, device=device)
        indices = torch.empty(0, dtype=torch.int64, device=device)
        torch.mode(X.to(device).round(), 1, out=(values, indices))
        return torch.stack([values, indices.float()])

    same(mode)


def test_composites_that_call_a_kernel_table():
    z = torch.complex(X, X.t().contiguous())
    same(lambda d: z.to(d, copy=True).conj_physical_())
    same(lambda d: torch.svd(z.to(d)).V)
    same(lambda d: torch.kaiser_window(12, device=d))


def test_convolution_workspaces():
    """oneDNN takes its buffers from the CPU allocator by address, also while library kernels allocate on the device."""
    image, kernel = torch.randn(2, 8, 9, 9), torch.randn(4, 8, 3, 3)

    def gradient(device):
        k = kernel.clone().to(device).requires_grad_()
        torch.nn.functional.conv2d(image.to(device), k, padding=1).square().sum().backward()
        return k.grad

    same(gradient)
    same(lambda d: torch.nn.functional.conv_transpose2d(image.to(d), kernel.transpose(0, 1).contiguous().to(d)))


def test_foreach_copy_between_devices():
    host = [X.clone(), X[0].clone()]
    there = [torch.zeros_like(t, device="neuron") for t in host]
    torch._foreach_copy_(there, host)
    back = [torch.zeros_like(t) for t in host]
    torch._foreach_copy_(back, there)
    assert all(torch.equal(a, b) for a, b in zip(host, back))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(7, 64), (7, 3, 40), (7, 1), (7,), (7, 0), (0, 64)])
def test_rows_by_number(dtype, shape):
    """`x[rows]` copies whole rows; whatever is unusual is PyTorch's kernel."""
    x = torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randint(-9, 9, shape).to(dtype)
    d = x.to("neuron")
    for rows in (torch.tensor([3, 0, -1, 6, -7, 3]), torch.tensor([[1, 2], [-2, 0]]), torch.tensor([], dtype=torch.long),
                 torch.tensor(4), torch.tensor([1, 2], dtype=torch.int32), torch.arange(6)[::2]):  # fmt: skip
        if x.numel() or not rows.numel():
            got, want = d[rows.to("neuron")], x[rows]
            assert got.stride() == want.stride() and torch.equal(got.cpu(), want)


def test_rows_of_views_and_several_indices():
    x, rows = torch.randn(7, 6, 64), torch.tensor([0, -1, 3])
    d, r = x.to("neuron"), rows.to("neuron")
    for f in (lambda t, r: t.transpose(0, 1)[r], lambda t, r: t[1:][r], lambda t, r: t[::2][r], lambda t, r: t[r, r],
              lambda t, r: t[:, r], lambda t, r: t[r, ..., r], lambda t, r: t[..., None][r]):  # fmt: skip
        assert torch.equal(f(d, r).cpu(), f(x, rows))


@pytest.mark.parametrize("row", [7, -8])
def test_rows_that_are_not_there(row):
    x = torch.randn(7, 64)
    with pytest.raises(IndexError) as expected:
        x[torch.tensor([0, row])]
    with pytest.raises(IndexError) as got:
        x.to("neuron")[torch.tensor([0, row]).to("neuron")]
    assert str(got.value) == str(expected.value)


def test_rows_see_pending_work_and_pass_gradients():
    x = torch.randn(50, 32)
    rows = torch.randint(-50, 50, (400,))
    leaves = [x.clone().to(d).requires_grad_() for d in ("cpu", "neuron")]
    for leaf in leaves:
        ((leaf * 2 + 1)[rows.to(leaf.device)] * 3).sum().backward()
    torch.testing.assert_close(leaves[1].grad.cpu(), leaves[0].grad)
    f = lambda x, r: (x * 2)[r] + 1
    g = torch.compile(f, backend="neuron", fullgraph=True)
    assert torch.equal(g(x.to("neuron"), rows.to("neuron")).cpu(), f(x, rows))
