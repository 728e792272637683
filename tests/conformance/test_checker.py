"""The checker itself: it must see each kind of difference, and survive what it runs."""

import itertools
import json
import os
import time

import pytest
import torch

from torchneuron.conformance import run as runner
from torchneuron.conformance.check import Case, Checker
from torchneuron.conformance.compare import Mismatch, compare, copy_to, no_less_exact
from torchneuron.conformance.kinds import SUITES, Kind, Sample, Suite
from torchneuron.conformance.report import Exclusion, Verdict, markdown, read_exclusions

X = torch.arange(12.0).reshape(3, 4)


def test_copy_keeps_geometry_and_sharing():
    base = torch.randn(4, 6, dtype=torch.complex64)
    tree = (base, base[1:, ::2].t(), base.conj(), base.imag, torch.device("cpu"), X.to_sparse(), X.to_sparse_csr())
    copied = copy_to(tree, "neuron")
    assert compare(tree, copied, "neuron")
    assert copied[4] == torch.device("neuron")
    copied[0].zero_()
    assert copied[1].abs().sum().item() == 0
    assert base.abs().sum().item() != 0


DIFFERENT = {
    "values": (X, X + 1),
    "sign of a conjugate": (X, -X),
    "dtype": (X, X.double()),
    "shape": (X, X[:2]),
    "stride": (X, X.t().contiguous().t()),
    "offset": (X[1:], X[1:].clone()),
    "grad": (X, X.clone().requires_grad_()),
    "layout": (X, X.to_sparse()),
    "sparse values": (X.to_sparse(), (X * 2).to_sparse()),
    "coalesced": (X.to_sparse(), X.to_sparse()._coalesced_(False)),
    "number of results": ((X, X), (X,)),
    "Python values": ((1, 2.0), (1, 3.0)),
    "Python types": (1, 1.0),
    "not a number": (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_sees_difference(name):
    want, got = DIFFERENT[name]
    compare(want, copy_to(want, "neuron"), "neuron")
    with pytest.raises(Mismatch):
        compare(want, copy_to(got, "neuron"), "neuron")


def test_sees_missing_alias_and_wrong_device():
    shared = (X, X[0])
    with pytest.raises(Mismatch, match="storages"):
        compare(shared, (X.to("neuron"), X[0].to("neuron")), "neuron")
    with pytest.raises(Mismatch, match="is on cpu"):
        compare(X, X, "neuron")


def test_rounding_is_not_equality():
    assert compare(X, X.to("neuron"), "neuron")
    assert not compare(X, torch.nextafter(X, X + 1).to("neuron"), "neuron")


@pytest.fixture
def suite(monkeypatch):
    """A database of one kind whose entries are plain functions of a tensor."""

    def make(**entries):
        kind = Kind(lambda e, d: True, lambda e, d: [Sample(((X,), {}))], lambda e, s: e(*s.tree[0]))
        made = Suite(lambda: entries, lambda e: [torch.float32], {"forward": kind})
        monkeypatch.setitem(SUITES, "made", made)
        return lambda name: Checker().run(Case("made", name, "float32", "forward"))

    return make


def on_neuron(then, otherwise=lambda x: x + 1):
    return lambda x: then(x) if x.device.type == "neuron" else otherwise(x)


def raises(error):
    def function(x):
        raise error

    return function


def test_outcomes(suite):
    calls = itertools.count(1)
    check = suite(
        right=lambda x: x + 1,
        wrong=on_neuron(lambda x: x + 2),
        host_generator=on_neuron(lambda x: x + 1 + torch.rand(1).mul(0).item()),
        random=lambda x: torch.rand_like(x),
        unseeded=on_neuron(lambda x: x * next(calls), lambda x: torch.rand_like(x)),
        argument_changed=on_neuron(lambda x: x.add_(1)),
        raises=on_neuron(raises(ValueError("no"))),
        both_raise=raises(ValueError("no")),
        other_error=on_neuron(raises(ValueError("no")), raises(RuntimeError("no"))),
        no_error=on_neuron(lambda x: x, raises(RuntimeError("no"))),
    )
    status = {name: check(name).status for name in SUITES["made"].entries()}
    assert [n for n, s in status.items() if s == "passed"] == ["right", "random"]
    assert [n for n, s in status.items() if s == "unsupported"] == ["both_raise"]
    assert check("random").random == 1


def test_exclusions_are_judged():
    cases = [Case("operator", n, "float32", "forward") for n in ("good", "bad", "known", "stale", "absent")]
    status = {"good": "passed", "bad": "failed", "known": "crashed", "stale": "passed"}
    records = {
        c: {"status": status[c.name], "detail": "why", "samples": 1, "rounded": 0, "errors": 0, "random": 0}
        for c in cases
        if c.name in status
    }
    entries = [Exclusion("operator", n, "reason") for n in ("known", "stale", "nothing")]
    verdict = Verdict(cases, records, entries)
    assert list(verdict.status.values()) == ["passed", "failed", "excluded", "stale", "not run"]
    assert len(verdict.problems()) == 3
    text = markdown(verdict)
    assert "1 of 4 cases passed (25.00 %)" in text and "1 not run" in text


def test_exclusions_file_names_known_entries():
    for e in read_exclusions():
        entry = SUITES[e.suite].entries()[e.name]
        dtypes = {str(d).removeprefix("torch.") for d in SUITES[e.suite].dtypes(entry)}
        assert set(e.kinds) <= set(SUITES[e.suite].kinds) and set(e.dtypes) <= dtypes and e.reason


class _Unkind:
    """Stands for the checker in a worker: one case kills the process, one never ends."""

    def __init__(self, limit=None):
        pass

    def run(self, case):
        if case.name == "dies":
            os.abort()
        if case.name == "hangs":
            time.sleep(1000)
        return Checker().run(case)


def _work_unkind(pipe, limit, log):
    runner.Checker = _Unkind
    _work(pipe, limit, log)


_work = runner._work


def test_runner_survives_crash_and_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_work", _work_unkind)
    names = ["dies", "add", "hangs", "mul"]
    results = tmp_path / "results.jsonl"
    runner.run([Case("operator", n, "float32", "forward") for n in names], results, workers=1, limit=2, timeout=60)
    with results.open("a") as f:
        f.write('{"suite": "oper')  # torn by a full disk
    found = {c.name: r["status"] for c, r in runner.read_results(results).items()}
    assert found == {"dies": "crashed", "add": "passed", "hangs": "timeout", "mul": "passed"}
    assert json.loads(results.read_text().splitlines()[0])["detail"]


def test_who_is_as_near_to_the_exact_result_as_cpu_is_not_wrong():
    exact = torch.tensor([1.0, 2.0, float("inf"), float("nan")], dtype=torch.float64)
    cpu = exact.half() * torch.tensor([1.004, 1, 1, 1], dtype=torch.half)
    near, far, other = exact.half(), cpu.clone(), exact.half()
    far[1], other[2] = 2.05, 3.0
    assert no_less_exact(cpu, near, exact)
    assert not no_less_exact(cpu, far, exact)
    assert not no_less_exact(cpu, other, exact)
    assert not no_less_exact(torch.tensor(1), torch.tensor(2), torch.tensor(1))
