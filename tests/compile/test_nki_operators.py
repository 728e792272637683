"""NKI kernels in compiled graphs."""

from __future__ import annotations

import pytest
import torch

from torchneuron.compile import cache


@pytest.fixture(scope="module")
def double():
    import nki
    import nki.isa as nisa
    import nki.language as nl

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        result = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out, src=result)
        return out

    return kernel


def test_an_nki_operator_with_a_gradient(double):
    import torch_neuronx

    @torch_neuronx.nki_op("torchneuron_test::double", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return double(x)

    op.register_autograd(lambda ctx, grad: grad * 2)
    f = torch.compile(lambda x: (op(x + 1) * 3).sum(), backend="neuron", fullgraph=True)
    x = torch.arange(512.0).view(128, 4).to("neuron").requires_grad_()
    y = f(x)
    y.backward()
    assert y.item() == ((torch.arange(512.0) + 1) * 6).sum().item()
    assert torch.equal(x.grad.cpu(), torch.full((128, 4), 6.0))


def test_a_wrapped_kernel_is_not_kept_on_disk(double):
    import torch_neuronx

    f = torch.compile(lambda x: torch_neuronx.wrap_nki(double)(x) + 1, backend="neuron", fullgraph=True)
    x = torch.ones(128, 4, device="neuron")
    assert torch.equal(f(x).cpu(), torch.full((128, 4), 3.0))
    assert not list(cache.directory().glob("*/*"))
