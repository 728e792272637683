"""Padding with a number against PyTorch CPU: large tensors, whose borders alone are filled, and small ones."""

import pytest
import torch
import torch.nn.functional as F

SHAPES = [(200, 300), (4, 8, 40, 40), (20000,), (3, 130, 130), (5, 7)]
PADS = [(1, 1), (1, 0, 0, 2), (0, 0, 3, 1), (2, 3, 1, 1), (-1, 2), (1, 1, 1, 1, 2, 2), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_strides(shape, dtype):
    x = (torch.randn(shape) * 5).to(dtype)
    for pad in PADS:
        if len(pad) > 2 * len(shape):
            continue
        want, got = F.pad(x, pad, value=1), F.pad(x.to("neuron"), pad, value=1)
        assert got.dtype == want.dtype and got.stride() == want.stride()
        assert torch.equal(got.cpu(), want), pad


def test_channels_last_and_transposed():
    x = torch.randn(2, 8, 64, 64)
    for view in (x.to(memory_format=torch.channels_last), x.transpose(2, 3), x[:, :, ::2]):
        want, got = F.pad(view, (1, 2, 3, 4)), F.pad(view.to("neuron"), (1, 2, 3, 4))
        assert got.stride() == want.stride() and torch.equal(got.cpu(), want)


def test_gradients():
    gradients = []
    for device in ("cpu", "neuron"):
        x = torch.linspace(-1, 1, 60000).reshape(200, 300).to(device).requires_grad_()
        (F.pad(x, (1, 2, 3, -4), value=2.0) ** 2).sum().backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


def test_too_many_numbers():
    with pytest.raises(RuntimeError, match="padding"):
        F.pad(torch.zeros(20000, device="neuron"), (1, 1, 1, 1))
