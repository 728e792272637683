"""Mistakes: each raises what PyTorch users expect, and the device works on."""

import io
import random

import pytest
import torch


@pytest.fixture(autouse=True)
def device_works_on():
    yield
    assert (torch.ones(3, device="neuron") + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "act",
    [
        lambda: torch.ones(2, device="neuron:99"),
        lambda: torch.ones(2).to("neuron:99"),
        lambda: torch.neuron.set_device(99),
        lambda: torch.neuron.synchronize(99),
        lambda: torch.neuron.memory_stats(99),
        lambda: torch.neuron.mem_get_info(99),
        lambda: torch.neuron.get_device_properties(99),
        lambda: torch.neuron.get_rng_state(99),
        lambda: torch.neuron.current_stream(99),
        lambda: torch.neuron.Stream(99),
        lambda: torch.Stream("neuron:99"),
        lambda: torch.Generator("neuron:99"),
        lambda: torch.accelerator.set_device_index(99),
        lambda: torch.accelerator.synchronize(99),
        lambda: torch.neuron.device(99).__enter__(),
    ],
)
def test_unknown_device(act):
    with pytest.raises(RuntimeError, match="NEURON_RT_NUM_CORES"):
        act()


@pytest.mark.parametrize(
    "act",
    [
        lambda x, g: torch.randn(3, device="neuron", generator=g),
        lambda x, g: x.normal_(generator=g),
        lambda x, g: torch.multinomial(x, 1, generator=g),
        lambda x, g: torch.randperm(3, device="neuron", generator=g),
        lambda x, g: torch.bernoulli(x, generator=g),
    ],
)
def test_generator_of_another_device(act):
    with pytest.raises(RuntimeError, match="Expected a 'neuron' device type for generator but found 'cpu'"):
        act(torch.ones(3, device="neuron"), torch.Generator())


def test_peers_that_are_not_there():
    with pytest.raises(AssertionError, match="There is no device neuron:99: this process has"):
        torch.neuron.can_device_access_peer(0, 99)


def test_bad_generator_states():
    generator = torch.Generator("neuron")
    before = generator.get_state()
    for state in (torch.zeros(3, dtype=torch.uint8), torch.Generator().get_state()):
        with pytest.raises(RuntimeError, match="16 bytes"):
            generator.set_state(state)
    with pytest.raises(TypeError, match="torch.ByteTensor"):
        torch.neuron.set_rng_state(torch.zeros(16))
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_offset(3)
    assert torch.equal(generator.get_state(), before)


def test_corrupt_checkpoints():
    file = io.BytesIO()
    torch.save({"weights": torch.randn(1000, device="neuron"), "step": 3}, file)
    good = file.getvalue()
    rng = random.Random(0)
    for _ in range(40):
        bad = bytearray(good)
        if rng.random() < 0.5:
            del bad[rng.randrange(len(bad)) :]
        else:
            for _ in range(20):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            torch.load(io.BytesIO(bytes(bad)))
        except Exception:  # noqa: S110  any Python exception will do; some damage is not seen
            pass
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(io.BytesIO(good.replace(b"neuron:0", b"neuron:9")))
    assert torch.load(io.BytesIO(good))["step"] == 3


@pytest.mark.parametrize(
    "act, error",
    [
        (lambda x: x + torch.ones(4, device="neuron"), RuntimeError),
        (lambda x: x + torch.ones(3), RuntimeError),
        (lambda x: x[5], IndexError),
        (lambda x: x[torch.tensor([5], device="neuron")], IndexError),
        (lambda x: torch.linalg.cholesky(-torch.eye(3, device="neuron")), torch.linalg.LinAlgError),
        (lambda x: x.view(2), RuntimeError),
        (lambda x: x.numpy(), TypeError),
        (lambda x: bool(x), RuntimeError),
        (lambda x: x.scatter_(0, torch.tensor([7], device="neuron"), 1.0), RuntimeError),
        (lambda x: torch.nn.functional.embedding(torch.tensor([9], device="neuron"), x[:, None]), IndexError),
    ],
)
def test_errors_of_operators(act, error):
    x = torch.ones(3, device="neuron")
    with pytest.raises(error):
        act(x)
    assert x.tolist() == [1, 1, 1]


def test_errors_in_backward_hooks_leave_the_graph_usable():
    w = torch.ones(3, device="neuron", requires_grad=True)

    def fail(_):
        raise ValueError("from a hook")

    y = w * 2
    y.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        y.sum().backward()
    seen = []
    w.register_hook(lambda g: seen.append(g) or g * 2)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    (w * 3).sum().backward()
    assert w.grad.tolist() == [6, 6, 6] and seen[0].tolist() == [3, 3, 3] and len(seen) == 2


def test_storage_without_memory_is_refused():
    t = torch.ones(16, device="neuron")
    t.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        t + 1
    with pytest.raises(RuntimeError, match="no memory"):
        torch.lgamma(t)
    t.untyped_storage().resize_(64)
    assert t.fill_(2).sum().item() == 32


def test_generator_of_the_device_is_refused_by_host_tensors():
    generator = torch.Generator("neuron")
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type"):
        torch.randn(3, generator=generator)
    with pytest.raises(RuntimeError, match="Expected a 'neuron' device type"):
        torch.randn(3, generator=torch.Generator(), device="neuron")
