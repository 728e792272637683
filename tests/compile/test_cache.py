"""The disk cache: entries survive torn files, concurrent writers and other people's bytes; artifacts travel."""

from __future__ import annotations

import multiprocessing
import os
import pickle

import pytest
import torch

from torchneuron.compile import cache
from torchneuron.compile.plan import Plan, Slot, Step


def files():
    return sorted(p for p in cache.directory().glob("*/*") if p.is_file())


def compiled(x):
    torch._dynamo.reset()
    mask = lambda: torch.ones(4, 4, device="neuron").tril()
    return torch.compile(lambda t: (t.sin() * 2.5e-3 + mask()).softmax(-1), backend="neuron", fullgraph=True)(x)


@pytest.fixture
def hits(monkeypatch):
    """Names of entries that were found."""
    found = []
    load = cache.load

    def note(name):
        plan = load(name)
        if plan:
            found.append(name)
        return plan

    monkeypatch.setattr(cache, "load", note)
    return found


def test_the_second_compilation_finds_the_first(hits):
    x = torch.randn(4, 4).to("neuron")
    first = compiled(x)
    assert not hits and len(files()) == 1
    assert torch.equal(compiled(x).cpu(), first.cpu()) and len(hits) == 1


def test_another_shape_type_or_setting_is_another_entry(hits):
    for x in (torch.ones(4, 4), torch.ones(3, 4, 4), torch.ones(4, 4).bfloat16(), torch.ones(4, 4).t()[:, :]):
        compiled(x.to("neuron"))
    f = lambda t: t.sin() + 1
    for options in ({}, {"passes": ["dead_code"]}):
        torch._dynamo.reset()
        torch.compile(f, backend="neuron", options=options)(torch.ones(3, device="neuron"))
    assert not hits and len(files()) >= 5


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "pickle", "other version", "not json"])
def test_a_broken_entry_is_made_again(damage, hits):
    x = torch.randn(4, 4).to("neuron")
    expected = compiled(x)
    (path,) = files()
    content = path.read_bytes()
    ran = path.with_suffix(".ran")
    bad = {
        "torn": content[: len(content) // 2],
        "flipped": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        "empty": b"",
        "pickle": pickle.dumps(_Evil(str(ran))),
        "other version": content.replace(b"plan 1", b"plan 0"),
        "not json": cache._MAGIC + __import__("hashlib").sha256(b"x").digest() + b"x",
    }[damage]
    path.write_bytes(bad)
    assert torch.equal(compiled(x).cpu(), expected.cpu())
    assert not hits and not ran.exists() and path.read_bytes() == content


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_NEURON_CACHE_DIR", str(tmp_path / "file"))
    compiled(torch.ones(4, 4, device="neuron"))


def test_the_cache_can_be_turned_off():
    torch.compile(lambda t: t + 1, backend="neuron", options={"cache": False})(torch.ones(3, device="neuron"))
    assert not files()


def _write(name, size, rounds):
    plan = Plan(1, 1, [], [Step("scalar", "add", [Slot(0), i], [0]) for i in range(size)], [Slot(0)])
    for _ in range(rounds):
        cache.write(name, cache.encode(plan))


def test_concurrent_writers_and_readers():
    context = multiprocessing.get_context("fork")
    name = "ab" + "0" * 62
    writers = [context.Process(target=_write, args=(name, size, 60)) for size in (10, 200)]
    for w in writers:
        w.start()
    seen = set()
    while any(w.is_alive() for w in writers):
        plan = cache.load(name)
        if plan:
            seen.add(len(plan.steps))
    for w in writers:
        w.join()
        assert w.exitcode == 0
    assert seen <= {10, 200} and len(cache.load(name).steps) in (10, 200)
    assert [p.name for p in files()] == [name]


def test_a_plan_reads_back_as_it_was():
    args = [
        Slot(0),
        1,
        -0.0,
        1e-45,
        float("inf"),
        True,
        None,
        "text",
        [Slot(0), [2, 3.5]],
        torch.bfloat16,
        torch.channels_last,
        torch.strided,
        torch.device("neuron", 0),
        1 + 2j,
    ]
    constant = torch.arange(6.0).view(2, 3).t()[1:]
    step = Step(
        "operator",
        "aten::x",
        args,
        [2, 3],
        "y",
        kwargs={"k": [Slot(1)]},
        bridged=True,
        device=0,
        dtypes=[torch.int64],
        drops=[0],
        where="w",
    )
    plan = Plan(
        1,
        4,
        [(1, constant.to("neuron")), (2, torch.zeros(0)), (3, torch.tensor(2.5).expand(4))],
        [step],
        [Slot(2), None],
    )
    again = cache.decode(cache.encode(plan))
    show = lambda p: repr([(vars(s)) for s in p.steps] + p.outputs)
    assert show(again) == show(plan) and (again.inputs, again.slots) == (1, 4)
    for (s, t), (r, u) in zip(plan.constants, again.constants):
        assert s == r and torch.equal(t.cpu(), u.cpu()) and t.stride() == u.stride() and t.device == u.device
    assert again.steps[0].args[2].hex() == (-0.0).hex()


def test_calls_of_python_and_large_constants_are_not_kept():
    with pytest.raises(cache.Unencodable):
        cache.encode(Plan(0, 0, [], [Step("python", "f", [], [], function=print)], []))
    with pytest.raises(cache.Unencodable):
        cache.encode(Plan(0, 1, [(0, torch.zeros(1 << 20))], [], []))


def test_artifacts_travel(python, tmp_path):
    common = """
import sys, logging, torch
from torchneuron.compile import cache
f = torch.compile(lambda t: (t.sin() * 2).softmax(-1), backend="neuron")
"""
    save = (
        common
        + """
f(torch.ones(4, 4, device="neuron"))
data, info = torch.compiler.save_cache_artifacts()
open(sys.argv[1], "wb").write(data)
print(len(info.artifacts["neuron"]))
"""
    )
    load = (
        common
        + """
torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
real, hits = cache.load, []
cache.load = lambda name: hits.append(p := real(name)) or p
f(torch.ones(4, 4, device="neuron"))
print(sum(h is not None for h in hits))
"""
    )
    file = tmp_path / "artifacts"
    for code, folder in ((save, "a"), (load, "b")):
        out = python("-c", code, file, TORCH_NEURON_CACHE_DIR=str(tmp_path / folder))
        assert out.returncode == 0, out.stderr
        assert out.stdout.strip() == "1"


def test_a_foreign_artifact_is_refused(caplog):
    from torchneuron.compile.artifact import PlanArtifact

    PlanArtifact("abc", b"nonsense").populate_cache()
    PlanArtifact("../../abc", cache.encode(Plan(0, 0, [], [], []))).populate_cache()
    assert not files() and "not used" in caplog.text
