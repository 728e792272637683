"""Sparse, quantized and nested tensors, and dense ones with special bits: the same as on CPU."""

import pytest
import torch

X = torch.tensor([[0.5, -1.0, 0.0, 2.0], [0.0, 3.0, -0.5, 0.0], [1.5, 0.0, 0.0, -2.0]])


def nested(device, grad=False):
    parts = [X.to(device), X[:2].to(device) + 1]
    return torch.nested.nested_tensor(parts, requires_grad=grad)


def quantized(device):
    return torch.quantize_per_tensor(X.to(device), 0.1, 10, torch.quint8)


def dense(t):
    if t.is_nested:
        return [p.cpu() for p in t.unbind()]
    if t.is_quantized:
        return [t.int_repr().cpu(), torch.tensor([t.q_scale(), t.q_zero_point()])]
    if t.layout == torch.strided:
        return [t.detach().cpu()]
    if t.layout == torch.sparse_coo:
        return [t._indices().cpu(), t._values().cpu(), torch.tensor(t.is_coalesced())]
    return [t.cpu().to_dense()]


CALLS = {
    # Composites stand beside these CPU kernels: without a kernel of ours they would shadow them.
    "coo is_coalesced": lambda d: torch.tensor(X.to(d).to_sparse().is_coalesced()),
    "coo sum": lambda d: X.to(d).to_sparse().sum(),
    "coo sum dim": lambda d: X.to(d).to_sparse().sum(0),
    "csr sum": lambda d: X.to(d).to_sparse_csr().sum(),
    "csr sum dim": lambda d: X.to(d).to_sparse_csr().sum(1, keepdim=True),
    "coo sin": lambda d: X.to(d).to_sparse().sin(),
    "csr sin": lambda d: X.to(d).to_sparse_csr().sin(),
    "coo zero_": lambda d: X.to(d).to_sparse().zero_(),
    "csr values": lambda d: X.to(d).to_sparse_csr().values(),
    "quantized relu": lambda d: torch.relu(quantized(d)),
    "quantized view": lambda d: quantized(d).view(4, 3),
    "quantized cat": lambda d: torch.cat([quantized(d), quantized(d)]),
    "quantized namespace": lambda d: torch.ops.quantized.add(quantized(d), quantized(d), 0.2, 5),
    "nested matmul": lambda d: nested(d).matmul(nested(d).transpose(1, 2)),
    "nested linear": lambda d: torch.nn.functional.linear(nested(d), torch.ones(2, 4, device=d)),
    "nested chunk": lambda d: nested(d).chunk(2, -1)[1],
    "nested softmax": lambda d: torch.softmax(nested(d), -1),
    "nested padded": lambda d: torch.nested.to_padded_tensor(nested(d), 7.0),
    "nested unbind backward": lambda d: torch.autograd.grad(
        ((n := nested(d, grad=True)) * 2).relu().sum(-1, keepdim=True).unbind()[0].sum(), n
    )[0],
    "nested backward": lambda d: torch.autograd.grad(
        torch.nested.to_padded_tensor((n := nested(d, grad=True)).relu(), 0.0).sum(), n
    )[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_same_as_cpu(name):
    cpu, neuron = CALLS[name]("cpu"), CALLS[name]("neuron")
    assert neuron.device.type == ("cpu" if name == "coo is_coalesced" else "neuron")
    for c, n in zip(dense(cpu), dense(neuron), strict=True):
        assert torch.equal(c, n) and c.dtype == n.dtype


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_a_tensor_given_twice_is_one(layout):
    s = getattr(X, f"to_sparse_{layout}")().to("neuron")
    assert torch.equal((s + s).to_dense().cpu(), X * 2)


def test_sparse_parts_share_memory():
    s = X.to("neuron").to_sparse()
    s._values().mul_(2)
    assert torch.equal(s.to_dense().cpu(), X * 2)
    q = quantized("neuron")
    assert q.view(-1).untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


def test_nested_moves_between_devices():
    there = nested("cpu").to("neuron")
    assert there.device.type == "neuron" and there.is_nested
    back = there.to("cpu", torch.float64)
    assert back.device.type == "cpu" and back.dtype == torch.float64
    for want, got in zip(nested("cpu").unbind(), back.unbind(), strict=True):
        assert torch.equal(want.double(), got)


def zero_tensor(device, *size):
    return torch._efficientzerotensor(size, device=device)


def test_zero_tensors_have_no_memory_and_act_as_zeros():
    ones = torch.ones(4, device="neuron")
    ones.copy_(zero_tensor("neuron", 4))
    assert ones.count_nonzero().item() == 0
    assert zero_tensor("neuron", 4).clone().cpu().tolist() == [0] * 4
    assert torch.dot(zero_tensor("neuron", 4), torch.ones(4, device="neuron")).item() == 0
    assert zero_tensor("neuron", 4).dot(ones)._is_zerotensor()
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zero_tensor("neuron", 4).copy_(ones)


@pytest.mark.parametrize("function", [torch.sgn, lambda x: torch.linalg.slogdet(x[:, :3])[1]])
def test_forward_ad_through_zero_tangents(function):
    tangents = [
        torch.func.jvp(function, (X.to(d),), (torch.ones_like(X, device=d),))[1].cpu() for d in ("cpu", "neuron")
    ]
    assert torch.equal(*tangents)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_kernels_see_requires_grad(reduce):
    """The CPU kernel keeps what backward reads only if an argument requires a gradient."""

    def gradients(device):
        a = X.to(device).to_sparse_csr().requires_grad_()
        b = torch.arange(8.0, device=device).reshape(4, 2).requires_grad_()
        torch.sparse.mm(a, b, reduce).sum().backward()
        return a.grad.to_dense().cpu(), b.grad.cpu()

    for c, n in zip(gradients("cpu"), gradients("neuron"), strict=True):
        assert torch.equal(c, n)


def test_metadata_of_nested_tensors_stays_on_the_host():
    n = nested("neuron")
    for read in (
        torch.Tensor._nested_tensor_size,
        torch.Tensor._nested_tensor_strides,
        torch.Tensor._nested_tensor_storage_offsets,
    ):
        for _ in range(3):  # a neuron tensor that took it over would free it
            assert read(n).device.type == "cpu"
            assert torch.equal(read(n), read(nested("cpu")))


def test_factories_take_the_device_asked_for():
    there = quantized("neuron")
    assert torch.empty_like(there, device="cpu").device.type == "cpu"
    assert torch.empty_like(quantized("cpu"), device="neuron").device.type == "neuron"
    assert torch.empty_like(X.to("neuron").to_sparse_csr(), device="cpu").device.type == "cpu"
    assert torch.ones_like(nested("neuron"), device="cpu").device.type == "cpu"


def test_a_kernel_may_keep_the_tensor_that_it_returns():
    library = torch.library.Library("torchneuron_test_kept", "DEF")
    library.define("kept(Tensor x) -> Tensor")
    kept = []

    def kernel(x):
        if not kept:
            kept.append(torch.arange(1000.0))
        return kept[0]

    library.impl("kept", kernel, "CPU")
    x = torch.zeros(1, device="neuron")
    for _ in range(3):
        got = torch.ops.torchneuron_test_kept.kept(x)
        assert got.device.type == "neuron" and torch.equal(got.cpu(), torch.arange(1000.0))
        del got
        torch.full((1000,), 7.0, device="neuron")  # takes the memory if it was freed
    assert torch.equal(kept[0], torch.arange(1000.0))
