"""The rules of adaptive eager, from outside: what is seen is as if every operator had run when it was called."""

from __future__ import annotations

import threading

import pytest
import torch


@pytest.fixture
def same():
    """Runs a function of a device on cpu and neuron and compares what it returns."""

    def check(function):
        for want, got in zip(function("cpu"), function("neuron"), strict=True):
            torch.testing.assert_close(got.cpu(), want)

    return check


def counted(function):
    """What a function returns, and the counters of it alone."""
    torch.neuron.synchronize()
    torch.neuron.reset_fusion_stats()
    out = function()
    torch.neuron.synchronize()
    return out, torch.neuron.fusion_stats()


X = torch.linspace(-2, 3, 60 * 50).reshape(60, 50)


def test_in_place_results_are_seen_by_later_and_not_by_earlier_readers(same):
    def run(d):
        x = X.to(d, copy=True)
        before = x * 2
        x.add_(1)
        after = x * 2
        x.mul_(before)
        return x, before, after

    same(run)


def on(d, *tensors):
    """Copies on a device that has nothing to do."""
    copies = [t.to(d, copy=True) for t in tensors]
    if d != "cpu":
        torch.neuron.synchronize()
    return copies


@pytest.mark.parametrize("narrow", [torch.int8, torch.uint8])
def test_narrow_tensors_are_overwritten_after_their_last_reader(same, narrow):
    def run(d):
        x, y = on(d, (torch.arange(5000) % 7).to(narrow), (torch.arange(5000) % 5).to(narrow))
        whole = x.to(torch.int32)
        small = y <= 2
        x.fill_(1)
        negative = -whole
        del whole
        return x, small, negative

    same(run)


def test_contents_are_handed_on_before_they_are_overwritten(same):
    def run(d):
        x, y = on(d, *((torch.arange(5000) % n).to(torch.int8) for n in (7, 5)))
        whole = x.to(torch.int32)
        x.copy_(y)
        y.fill_(3)
        negative = -whole
        del whole
        return x, y, negative

    same(run)


def test_views_see_what_is_pending_in_their_base(same):
    def run(d):
        x = X.to(d, copy=True)
        y = x + 1
        y.t()[::2].mul_(3)
        z = y.view(-1) * 2
        y[3:7].zero_()
        w = y[1:] - y[:-1]
        y[:, ::2] = w[0, 0]
        return x, y, z, w

    same(run)


def test_overlapping_windows_of_one_tensor_do_not_share_a_program(same):
    def run(d):
        x = X.to(d, copy=True)
        for _ in range(3):
            a = x[1:] + 0
            x[:-1].add_(a)
            x[:, 1:].mul_(x[:, :-1] + 0.5)
        return (x,)

    same(run)


def test_chunks_of_one_tensor_share_a_program(same):
    def gates(d):
        g = X.to(d, copy=True).repeat(1, 4)
        i, f, o, c = g.chunk(4, 1)
        return (torch.sigmoid(i) * torch.tanh(c) + torch.sigmoid(f) * torch.sigmoid(o),)

    same(gates)
    gates("neuron")
    g = X.to("neuron").repeat(1, 4)
    i, f, o, c = g.chunk(4, 1)
    _, stats = counted(lambda: torch.sigmoid(i) * torch.tanh(c) + torch.sigmoid(f) * torch.sigmoid(o))
    assert stats["programs_run"] == 1


def test_dead_results_are_not_written_and_saved_ones_are():
    x = X.to("neuron").requires_grad_()
    out, stats = counted(lambda: (x * 2).exp().sum())
    # exp saves its result for the backward pass: only x * 2 is dead.
    assert stats["stores_elided"] == 1
    out.backward()
    torch.testing.assert_close(x.grad.cpu(), (X * 2).exp() * 2)


def test_memory_of_dead_results_goes_back_before_the_window_closes():
    x = torch.ones(1 << 20, device="neuron")
    torch.neuron.synchronize()
    base = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    y = x
    for _ in range(20):
        y = y * 1.5
    torch.neuron.synchronize()
    assert torch.neuron.max_memory_allocated() - base <= 3 * x.nbytes
    torch.testing.assert_close(y[0].item(), 1.5**20)


def test_inputs_stay_alive_until_they_are_read():
    x = torch.full((1 << 18,), 3.0, device="neuron")
    torch.neuron.synchronize()
    y = x + 1
    del x
    z = torch.full((1 << 18,), 7.0, device="neuron")
    assert y.sum().item() == 4 * (1 << 18) and z[0].item() == 7


def test_shapes_in_between_do_not_cut_a_chain():
    x, small = X.to("neuron"), torch.ones(8, device="neuron")

    def run():
        a = x * 2
        b = small + 1
        c = a + 1
        d = b * b
        return c.relu(), d

    run()
    (c, d), stats = counted(run)
    assert stats["programs_run"] == 2 and stats["ops_fused"] == 5
    torch.testing.assert_close(c.cpu(), (X * 2 + 1).relu())
    assert d.tolist() == [4.0] * 8


def test_views_do_not_cut_a_chain():
    x = X.to("neuron")
    _, stats = counted(lambda: ((x * 2).view(3, 20, 50) + 1).reshape(-1).relu())
    assert stats["programs_run"] == 1


def test_shapes_and_numbers_are_data():
    def run(n, k):
        x = torch.ones(n, 7, device="neuron")
        return ((x * k + n).softmax(-1) - k).sum(-1).tolist()

    run(3, 0.5)
    _, stats = counted(lambda: [run(n, n / 3) for n in range(4, 20)])
    assert stats["programs_built"] <= 2


def test_threads_that_record_on_one_stream_see_each_other():
    x = X.to("neuron") * 1
    results = []

    def work(k):
        y = x * k
        y.add_(1)
        results.append((k, y))

    y = x + 1
    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    z = y * 2
    for t in threads:
        t.join()
    torch.testing.assert_close(z.cpu(), (X + 1) * 2)
    for k, y in results:
        torch.testing.assert_close(y.cpu(), X * k + 1)


def test_streams_and_events():
    s = torch.Stream("neuron")
    x = X.to("neuron")
    y = x + 1
    event = torch.Event("neuron")
    event.record()
    with s:
        s.wait_event(event)
        z = y * 2
    s.synchronize()
    torch.testing.assert_close(z.cpu(), (X + 1) * 2)
    assert event.query()


def test_errors_are_raised_where_the_call_is_and_leave_the_window_alone():
    x = X.to("neuron")
    y = x * 2
    with pytest.raises(RuntimeError, match="size"):
        y + torch.ones(3, device="neuron")
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(3, dtype=torch.int32, device="neuron").mul_(1.5)
    torch.testing.assert_close(y.cpu(), X * 2)


def test_out_arguments(same):
    def run(d):
        x = X.to(d, copy=True)
        out, wide, empty = torch.empty_like(x), torch.empty(60, 100, device=d).zero_(), torch.empty(0, device=d)
        torch.add(x, 1, out=out)
        torch.mul(x, out, out=wide[:, ::2])
        torch.exp(x, out=empty)
        half = torch.empty(60, 50, dtype=torch.bfloat16, device=d)
        torch.sub(x, 1, out=half)
        return out, wide, empty, half

    same(run)


def test_long_windows_close_by_themselves():
    x = torch.ones(16, device="neuron")
    y = x
    for _ in range(1000):
        y = y + 1
    assert y.tolist() == [1001.0] * 16


def test_storages_that_are_resized_or_exchanged(same):
    def run(d):
        x = X.to(d, copy=True)
        y = x + 1
        y.resize_(10, 10)
        z = y * 2
        z.data = x
        w = z * 3
        w.set_(y)
        return y, z, w

    same(run)


PROGRAM = """
import hashlib, random, sys, torch
seed = int(sys.argv[1]); r = random.Random(seed); torch.manual_seed(seed); h = hashlib.sha256()
shapes = [(6, 8), (8,), (6, 1), (1,), (48,)]
dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool]
def fresh():
    t = torch.randn(r.choice(shapes)) * 3
    return t.to(r.choice(dtypes)).to('neuron')
for _ in range(40):
    pool = [fresh() for _ in range(4)]
    for _ in range(r.randint(1, 25)):
        a, b = r.choice(pool), r.choice(pool)
        try:
            k = r.randrange(14)
            if k == 0: c = a + b
            elif k == 1: c = a * r.choice([2, -1, 0.5])
            elif k == 2: c = torch.where(a > b, a, b)
            elif k == 3: c = a.add_(b)
            elif k == 4: c = a.softmax(-1)
            elif k == 5: c = a.sum(-1, keepdim=True)
            elif k == 6: c = a.t()
            elif k == 7: c = a[1:]
            elif k == 8: c = a.reshape(-1)
            elif k == 9: c = a.to(r.choice(dtypes))
            elif k == 10: c = torch.sigmoid(a) - b
            elif k == 11: c = a.mul_(r.choice([2, 0.25]))
            elif k == 12: a[..., ::2] = 1; c = a
            else: c = a.amax(-1)
        except (RuntimeError, IndexError, TypeError):
            continue
        pool[r.randrange(len(pool))] = c
    for t in pool: h.update(t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print(h.hexdigest())
"""


def test_random_programs_give_the_same_bits_with_and_without_fusion(python):
    for seed in range(3):
        outputs = {}
        for setting in ("0", "1"):
            result = python("-c", PROGRAM, seed, TORCH_NEURON_FUSION=setting)
            assert result.returncode == 0, result.stderr[-2000:]
            outputs[setting] = result.stdout
        assert outputs["0"] == outputs["1"], seed


def test_optimizer_steps_are_a_few_programs():
    parameters = [torch.nn.Parameter(torch.ones(n, 8, device="neuron")) for n in range(1, 31)]
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.step()
    _, stats = counted(optimizer.step)
    assert stats["programs_run"] <= 2 and stats["library_calls"] == 0


def test_programs_are_printed_on_request(python):
    code = "import torch; x = torch.ones(64, device='neuron'); y = (x * 3 + 1).relu(); torch.neuron.synchronize()"
    result = python("-c", code, TORCH_LOGS="+neuron")
    assert result.returncode == 0
    assert "mul add relu" in result.stderr and "mul_add" in result.stderr
