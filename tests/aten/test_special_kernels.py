"""Operators that the library path must not leave to a composite, or that take tensors of several devices."""

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
