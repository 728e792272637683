"""Signals, fork, threads and the end of a process."""

import signal
import textwrap
import time

import pytest

WAITS = {
    "operators": """
        x = torch.randn(500, 500, device="neuron")
        while True:
            x @ x
    """,
    "device": "queue_copies(); torch.neuron.synchronize()",
    "stream": "queue_copies(); torch.neuron.current_stream().synchronize()",
    "event": "queue_copies(); event = torch.Event('neuron'); event.record(); event.synchronize()",
    "item": "queue_copies(); device[0].item()",
    "other stream": """
        side = torch.neuron.Stream()
        with torch.neuron.stream(side):
            queue_copies()
        torch.neuron.current_stream().wait_stream(side)
        device[0].item()
    """,
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_during_long_work(process, wait):
    child = process(f"""
import os

host = torch.ones(1 << 24).pin_memory()
device = torch.empty(1 << 24, device="neuron")

def queue_copies():
    print("READY", flush=True)
    for _ in range(2000):
        device.copy_(host, non_blocking=True)

def work():
{textwrap.indent(textwrap.dedent(WAITS[wait]), "    ")}

try:
    {"print('READY', flush=True)" if wait == "operators" else "pass"}
    work()
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
""")
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    text, _ = child.communicate(timeout=60)
    assert text == "interrupted\n"


def test_fork(output):
    text = output("""
        import os, sys
        if os.fork() == 0:  # before the first use: the child has a device of its own
            print((torch.ones(2, device="neuron") + 1).tolist(), flush=True)
            os._exit(0)
        os.wait()
        x, pinned = torch.ones(3, device="neuron"), torch.ones(3).pin_memory()
        child = os.fork()
        if child == 0:
            for act in (
                lambda: torch.ones(2, device="neuron"),
                lambda: x + 1,
                lambda: x.cpu(),
                lambda: torch.neuron.synchronize(),
                lambda: torch.ones(3).pin_memory(),
            ):
                try:
                    act()
                    print("no error")
                except RuntimeError as error:
                    assert "forked subprocess" in str(error), error
            assert not torch.neuron.is_initialized() and torch.neuron._is_in_bad_fork()
            torch.manual_seed(0)
            assert (pinned + torch.randn(3)).shape == (3,)
            pinned.is_pinned()
            del x, pinned
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print((x + 1).tolist(), (pinned + 1).tolist())
    """)
    assert text == "[2.0, 2.0]\n[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]\n"


def test_data_loader_after_use(output):
    output("""
        from torch.utils.data import DataLoader, TensorDataset
        x = torch.ones(3, device="neuron")
        data = TensorDataset(torch.arange(40.0).view(20, 2))
        for workers in (0, 2):
            loader = DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True)
            total = 0
            for (batch,) in loader:
                assert batch.is_pinned()
                total += batch.to("neuron", non_blocking=True).sum().item()
            assert total == 780
        on_device = TensorDataset(torch.ones(4, 2, device="neuron"))
        assert len(list(DataLoader(on_device))) == 4
        try:
            list(DataLoader(on_device, num_workers=1))
        except RuntimeError as error:
            assert "forked subprocess" in str(error)
        else:
            raise AssertionError("a forked worker used the device")
    """)


def test_exit_with_pending_work_and_use_while_exiting(output):
    text = output("""
        import atexit, time
        import torchneuron._C as core

        def late():
            device = host.to("neuron", non_blocking=True)
            event = torch.Event("neuron")
            event.record()
            while not event.query():
                time.sleep(0.001)
            print("late", device.sum().item() == host.numel())

        atexit.unregister(core.shutdown)  # `late` is to run after the device was shut down
        atexit.register(late)
        atexit.register(core.shutdown)
        host = torch.ones(1 << 22).pin_memory()
        device = torch.empty(1 << 22, device="neuron")
        for _ in range(20):
            device.copy_(host, non_blocking=True)
        print("end")
    """)
    assert text == "end\nlate True\n"


def test_two_devices_four_threads(output):
    output(
        """
        import copy, gc, io, pickle, random, threading

        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to("neuron:0")
        weight = model[0].weight

        def mixed(rng):
            held = []
            streams = [torch.Stream(f"neuron:{i % 2}") for i in range(4)]
            for step in range(100):
                stream = rng.choice(streams)
                with torch.neuron.stream(stream):
                    assert torch.neuron.current_stream() == stream
                    kind = rng.randrange(5)
                    if kind == 0 or not held:
                        value, n = float(step), rng.choice([1, 100, 5000, 400000])
                        held.append((torch.full((n,), value, device=stream.device), value, stream))
                    elif kind == 1:
                        host = torch.full((300000,), float(step)).pin_memory()
                        held.append((host.to(stream.device, non_blocking=True), float(step), stream))
                    else:
                        tensor, value, made = held[rng.randrange(len(held))]
                        event = torch.Event(made.device)
                        event.record(made)
                        event.wait(stream)
                        made.synchronize()
                        if kind == 2:
                            assert bool((tensor.to(stream.device) == value).all())
                        elif kind == 3:
                            back = torch.empty(tensor.shape, pin_memory=True)
                            back.copy_(tensor, non_blocking=True)
                            torch.neuron.synchronize(tensor.device)
                            assert bool((back == value).all())
                        tensor.record_stream(stream)
                    if len(held) > 15:
                        held.clear()

        def backward(rng):
            for _ in range(20):
                model(torch.randn(8, 16, device="neuron:0")).sum().backward()

        def copies(rng):
            for _ in range(10):
                assert torch.equal(copy.deepcopy(model)[0].weight, weight)
                assert torch.equal(pickle.loads(pickle.dumps(weight)), weight)

        def exhaust(rng):
            for i in range(20):
                try:
                    torch.empty(1 << 50, device=f"neuron:{i % 2}")
                    raise AssertionError("no error")
                except torch.OutOfMemoryError:
                    pass
                assert (torch.ones(1000, device=f"neuron:{i % 2}") + 1).sum().item() == 2000

        def cycles(rng):
            for i in range(30):
                x = torch.ones(300000).pin_memory().to("neuron:1", non_blocking=True)
                x.me = x
                if i % 10 == 0:
                    gc.collect()

        def own_state(rng):
            assert torch.neuron.current_device() == 0
            torch.neuron.set_device(1)
            stream = torch.neuron.Stream()
            torch.neuron.set_stream(stream)
            assert torch.ones(2, device="neuron").device.index == 1
            assert torch.neuron.current_stream() == stream

        fresh = [torch.ones(64, device="neuron") for _ in range(300)]

        def first_use(rng):
            for x in fresh:
                assert x.sum().item() == 64

        errors = []

        def guarded(work, seed):
            try:
                work(random.Random(seed))
            except BaseException as error:
                errors.append((work.__name__, error))

        for works in ([mixed] * 4, [backward] * 3, [copies] * 2 + [exhaust, cycles], [own_state] * 4, [first_use] * 4):
            threads = [threading.Thread(target=guarded, args=(work, seed)) for seed, work in enumerate(works)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, errors
        gc.collect()
        for device in range(2):
            torch.neuron.synchronize(device)
        assert torch.neuron.memory_allocated(1) == 0, torch.neuron.memory_allocated(1)
        """,
        NEURON_RT_NUM_CORES="2",
    )


def test_devices_do_not_mix(output):
    output(
        """
        a, b = torch.ones(3, device="neuron:0"), torch.ones(3, device="neuron:1")
        for act in (
            lambda: a + b,
            lambda: torch.cat([a, b]),
            lambda: torch.where(a > 0, a, b),
            lambda: a.set_(b),
            lambda: torch.add(a, a, out=b),
            lambda: a[torch.tensor([0], device="neuron:1")],
            lambda: torch._foreach_add([a, a], [b, b]),
            lambda: torch.randn(2, device="neuron:1", generator=torch.Generator("neuron:0")),
        ):
            try:
                act()
            except RuntimeError:
                continue
            raise AssertionError("no error")
        a.copy_(b)
        leaf = torch.ones(3, device="neuron:0", requires_grad=True)
        ((leaf * 2).to("neuron:1") * 3).sum().backward()
        assert leaf.grad.device == leaf.device and leaf.grad.tolist() == [6, 6, 6]
        with torch.neuron.device(1):
            assert torch.ones(1, device="neuron").device.index == 1
        """,
        NEURON_RT_NUM_CORES="2",
    )
