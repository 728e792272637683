"""A part of `python -m torchneuron.conformance`: each entry in one data type, with few samples."""

import pytest
import torch

from torchneuron.conformance.check import Case, Checker
from torchneuron.conformance.kinds import SUITES
from torchneuron.conformance.report import read_exclusions

KINDS = {
    "operator": ("forward", "backward"),
    "module": ("module forward", "module backward"),
    "optimizer": ("optimizer step",),
}
EXCLUSIONS = read_exclusions()
CHECKER = Checker(limit=3)


def representative():
    """Cases of each entry in float32, or the first data type that CPU has."""
    found = []
    for suite_name, kinds in KINDS.items():
        suite = SUITES[suite_name]
        for name, entry in suite.entries().items():
            dtypes = sorted(str(d).removeprefix("torch.") for d in suite.dtypes(entry))
            if not dtypes:  # an entry for accelerators alone
                continue
            dtype = "float32" if "float32" in dtypes else dtypes[0]
            found += [
                Case(suite_name, name, dtype, kind)
                for kind in kinds
                if suite.kinds[kind].applies(entry, getattr(torch, dtype))
            ]
    return found


@pytest.mark.parametrize("case", representative(), ids=lambda c: f"{c.name}-{c.kind}".replace(" ", "_"))
def test_case(case):
    outcome = CHECKER.run(case)
    if outcome.status == "unsupported":
        pytest.skip(outcome.detail)
    if outcome.status == "passed" and any(e.matches(case) for e in EXCLUSIONS):
        pytest.skip("excluded for another sample")
    if outcome.status != "passed" and any(e.matches(case) for e in EXCLUSIONS):
        pytest.xfail(outcome.detail)
    assert outcome.status == "passed", outcome.detail
