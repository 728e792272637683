"""Memory of the device as a user sees it: exhaustion and recovery, storages, cycles, pinned memory."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

MIB = 1 << 20


@pytest.fixture
def small_device(output):
    """Runs a snippet on a device of 64 MiB."""
    return lambda code: output(code, TORCH_NEURON_MEMORY_BYTES=str(64 * MIB))


def test_out_of_memory_everywhere_then_works_on(small_device):
    text = small_device("""
        import copy, gc, io
        from torch import nn
        MIB = 1 << 20
        half = torch.ones(9 * MIB, device="neuron")  # 36 MiB of 64
        host = torch.ones(9 * MIB)
        leaf = half.detach().requires_grad_()
        file = io.BytesIO()
        torch.save({"w": host}, file)
        file.seek(0)
        module = nn.Linear(1, 1).to("neuron")
        module.big = nn.Parameter(half)
        places = {
            "factory": lambda: torch.zeros(9 * MIB, device="neuron"),
            "copy from host": lambda: host.to("neuron"),
            "operator": lambda: half + 1,
            "out=": lambda: torch.exp(half, out=torch.empty(0, device="neuron")),
            "inside an operator": lambda: half.sort(),
            "resize_": lambda: torch.empty(1, device="neuron").resize_(9 * MIB),
            "storage": lambda: torch.UntypedStorage(36 * MIB, device="neuron"),
            "storage resize": lambda: torch.UntypedStorage(1, device="neuron").resize_(36 * MIB),
            "backward": lambda: (leaf * leaf[:1]).sum().backward(),
            "clone": lambda: half.clone(),
            "deepcopy": lambda: copy.deepcopy(module),
            "load": lambda: torch.load(file, map_location="neuron"),
            "too big for any": lambda: torch.empty(1 << 50, device="neuron"),
        }
        for name, act in places.items():
            gc.collect()
            before = torch.neuron.memory_allocated()
            try:
                act()
            except torch.OutOfMemoryError as error:
                assert "TORCH_NEURON_MEMORY_BYTES" in str(error), error
            else:
                raise AssertionError(f"{name}: no error")
            gc.collect()
            assert torch.neuron.memory_allocated() == before, name
            assert half[-1].item() == 1 and (half[:100] + 1).sum().item() == 200, name
        module = leaf = half = None
        gc.collect()
        assert torch.ones(15 * MIB, device="neuron")[-1].item() == 1
        print("done")
    """)
    assert text.endswith("done\n")


def test_queued_copies_give_memory_back_before_out_of_memory(small_device):
    small_device("""
        MIB = 1 << 20
        host = torch.ones(4 * MIB).pin_memory()
        for _ in range(30):
            host.to("neuron", non_blocking=True)  # 16 MiB each, held until the copy is done
        kept = torch.ones(12 * MIB, device="neuron")
        assert kept.sum().item() == 12 * MIB
    """)


def test_synchronize_frees_what_finished_copies_held():
    host = torch.ones(MIB).pin_memory()
    torch.neuron.synchronize()
    before = torch.neuron.memory_allocated()
    host.to("neuron", non_blocking=True)
    torch.neuron.synchronize()
    assert torch.neuron.memory_allocated() == before


def test_untyped_storage():
    empty = torch.UntypedStorage(device="neuron")
    assert empty.nbytes() == 0 and empty.device == torch.device("neuron", 0)
    storage = torch.UntypedStorage(16, device="neuron")
    storage.fill_(3)
    bytes_ = torch.tensor([], dtype=torch.uint8, device="neuron").set_(storage)
    bytes_.add_(1)
    assert storage.tolist() == [4] * 16 == storage.cpu().tolist()
    storage.resize_(32)
    assert storage.nbytes() == 32 and bytes_.untyped_storage().nbytes() == 32 and bytes_.tolist() == [4] * 16
    assert copy.deepcopy(storage).device == storage.device
    with pytest.raises(torch.OutOfMemoryError):
        storage.resize_(1 << 60)
    assert storage.nbytes() == 32 and storage[0] == 4


def test_storage_resized_to_nothing_and_back():
    parameter = torch.randn(60, device="neuron")
    expected = parameter.cpu()
    view = parameter.view(6, 10)
    before = torch.neuron.memory_allocated()
    parameter.untyped_storage().resize_(0)
    assert torch.neuron.memory_allocated() < before and parameter.shape == (60,)
    parameter.untyped_storage().resize_(240)
    parameter.copy_(expected)
    assert torch.equal(view.cpu().flatten(), expected)


def test_resize_and_set_on_views():
    x = torch.arange(12.0, device="neuron")
    view = x[3:9]
    view.resize_(20)
    assert view[:9].tolist() == x[3:].tolist() and x.untyped_storage().nbytes() == 23 * 4
    other = torch.empty(0, device="neuron").set_(x.untyped_storage(), 2, (2, 3), (3, 1))
    other.add_(100)
    assert x[2:8].tolist() == [102, 103, 104, 105, 106, 107]
    x.set_()
    assert x.shape == (0,) and x.device.type == "neuron"
    for source in (torch.ones(3), torch.ones(3).untyped_storage()):
        with pytest.raises(RuntimeError, match="devices must match"):
            other.set_(source)
    with pytest.raises(RuntimeError, match="devices must match"):
        torch.ones(3).set_(other)
    with pytest.raises(RuntimeError, match="requires? grad"):
        torch.ones(3, device="neuron", requires_grad=True).resize_(9)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.as_strided((2,), (-1,)),
        lambda x: x.as_strided((200,), (1,)),
        lambda x: torch.empty_strided((2,), (-1,), device="neuron"),
        lambda x: torch.empty(-1, device="neuron"),
        lambda x: torch.empty(0, device="neuron").set_(x.untyped_storage(), 0, (2,), (-1,)),
        lambda x: x[::-1],
    ],
)
def test_impossible_geometry_is_refused(act):
    x = torch.ones(12, device="neuron")
    with pytest.raises((RuntimeError, ValueError)):
        act(x)
    assert x.sum().item() == 12


def test_tensors_of_no_bytes():
    empty = torch.empty(0, 3, device="neuron")
    assert empty.data_ptr() == 0 and empty.sum(0).tolist() == [0, 0, 0]
    assert (torch.ones(2, 0, device="neuron") @ empty).tolist() == [[0, 0, 0], [0, 0, 0]]
    empty.copy_(torch.empty(0, 3))
    empty.record_stream(torch.neuron.current_stream())
    file = io.BytesIO()
    torch.save(empty, file)
    file.seek(0)
    loaded = torch.load(file)
    for same in (empty.cpu(), empty.clone(), torch.cat([empty, empty]), copy.deepcopy(empty), loaded):
        assert same.shape == (0, 3)
    assert loaded.device == empty.device
    assert torch.empty(0).pin_memory().shape == (0,)


def test_more_than_two_to_the_31_elements():
    x = torch.empty(2**31 + 7, dtype=torch.uint8, device="neuron")  # pages that are not touched cost nothing
    x[-4:].fill_(9)
    x[2**31] = 5
    assert x[2**31 : 2**31 + 3].tolist()[0] == 5 and x[-5:].cpu().tolist()[1:] == [9] * 4
    assert x[-8:].clone().numel() == 8
    assert torch.zeros(1, device="neuron").expand(2**33)[-1].item() == 0


def test_cycles_are_collected():
    class Holder:
        pass

    gc.collect()
    before = torch.neuron.memory_allocated()
    for _ in range(3):
        holder = Holder()
        holder.tensor = torch.ones(MIB, device="neuron")
        holder.tensor.holder = holder
        del holder
    gc.collect()
    assert torch.neuron.memory_allocated() == before


def test_pinned_memory():
    x = torch.arange(1000.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned[10:].is_pinned() and not x.is_pinned() and torch.equal(pinned, x)
    assert not torch.ones(3, device="neuron").is_pinned()
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(3, device="neuron").pin_memory()
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(3, device="neuron", pin_memory=True)


def test_record_stream_delays_reuse():
    side = torch.neuron.Stream()
    host = torch.ones(4 * MIB).pin_memory()
    with torch.neuron.stream(side):
        target = torch.empty(4 * MIB, device="neuron")
    x = torch.ones(4 * MIB, device="neuron")
    with torch.neuron.stream(side):
        target.copy_(host, non_blocking=True)
    x.record_stream(side)
    del x
    torch.zeros(4 * MIB, device="neuron")
    side.synchronize()
    assert target.sum().item() == 4 * MIB


def test_module_moves_keep_parameters_and_gradients():
    module = nn.Linear(2, 2)
    ids = [id(p) for p in module.parameters()]
    module.weight.grad = torch.ones(2, 2)
    module.to("neuron")
    assert [id(p) for p in module.parameters()] == ids
    assert module.weight.grad.device.type == "neuron"
    with pytest.raises(RuntimeError, match="device type 'cpu'"):
        module.bias.grad = torch.ones(2)


def test_snapshots_say_which_line_allocated():
    memory = torch.neuron.memory
    memory._record_memory_history()
    try:
        block = torch.empty(12_345_678, dtype=torch.uint8, device="neuron")
        snapshot = memory._snapshot()
        memory._record_memory_history(context=None)
        unnamed = torch.empty(1_234_567, dtype=torch.uint8, device="neuron")
        without = memory._snapshot()
    finally:
        memory._record_memory_history(None)
    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["requested_size"] == block.nbytes]
    events = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["size"] == block.nbytes]
    for frames in (blocks[0]["frames"], events[0]["frames"]):
        assert (frames[0]["filename"], frames[0]["name"]) == (__file__, "test_snapshots_say_which_line_allocated")
        assert frames[0]["line"] == test_snapshots_say_which_line_allocated.__code__.co_firstlineno + 4
    events = [e for e in without["device_traces"][0] if e["size"] == unnamed.nbytes]
    assert len(events) == 1 and events[0]["frames"] == []
