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


def test_planes_by_number():
    """Indices that lie along dims of their own, as upsampling to the nearest neighbour writes them."""
    x = torch.randn(3, 8, 5, 6)
    rows, columns = torch.tensor([0, 0, 4, -1, 2, 2]), torch.tensor([5, 5, 0, 1, -6, 1, 1])
    for f in (lambda t, r, c: t[:, :, r[:, None], c], lambda t, r, c: t[:, c[:, None], r], lambda t, r, c: t[..., c],
              lambda t, r, c: t[:, r[:, None, None], r[:, None], c], lambda t, r, c: t[:, :, r, c[:6]],
              lambda t, r, c: torch.ops.aten._unsafe_index(t, [None, None, r[:, None], c]),
              lambda t, r, c: t[:, :, r[:, None], c[None, :]], lambda t, r, c: t[:, :, r[:1, None], c],
              lambda t, r, c: t.narrow(2, 1, 1)[:, :, r[:2, None] * 0, c], lambda t, r, c: t[:, :1].contiguous()[:, c * 0]):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
            t = (x * 50).to(torch.float32).clamp(0, 200).to(dtype)
            got, want = f(t.to("neuron"), rows.to("neuron"), columns.to("neuron")), f(t, rows, columns)
            assert got.shape == want.shape and torch.equal(got.cpu(), want)
    with pytest.raises(IndexError):
        x.to("neuron")[:, :, (rows + 3).to("neuron")[:, None], columns.to("neuron")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_upsampling_to_the_nearest_neighbour(dtype):
    up = torch.nn.functional.interpolate
    for h, w in ((5, 7), (1, 6), (16, 16), (33, 20)):
        x = torch.randn(2, 9, h, w).to(dtype)
        for layout in (torch.contiguous_format, torch.channels_last):
            y = x.contiguous(memory_format=layout)
            for how in ({"scale_factor": 2.0}, {"scale_factor": (3.0, 1.0)}, {"scale_factor": 1.7}, {"size": (7, 12)},
                        {"size": (3, 3)}, {"scale_factor": 0.4} if min(h, w) > 4 else {"size": (1, 1)},
                        {"scale_factor": 2.3, "recompute_scale_factor": True}):  # fmt: skip
                got, want = up(y.to("neuron"), **how), up(y, **how)
                assert got.stride() == want.stride() and torch.equal(got.cpu(), want), how
    x = torch.randn(2, 3, 4, 5)
    leaves = [x.clone().to(d).requires_grad_() for d in ("cpu", "neuron")]
    for leaf in leaves:
        up(leaf * 2, scale_factor=2.0).pow(2).sum().backward()
    torch.testing.assert_close(leaves[1].grad.cpu(), leaves[0].grad)
