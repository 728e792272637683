"""Judges the results with the exclusions and writes `docs/conformance.md`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchneuron.conformance.check import Case
from torchneuron.conformance.kinds import SUITES

EXCLUSIONS = Path(__file__).with_name("exclusions.json")
BAD = ("failed", "crashed", "timeout")


@dataclass(frozen=True)
class Exclusion:
    """Cases that are known not to pass, and why. An absent field matches everything."""

    suite: str
    name: str
    reason: str
    kinds: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def matches(self, case: Case) -> bool:
        """Whether `case` is excluded by this entry."""
        return (
            (self.suite, self.name) == (case.suite, case.name)
            and (not self.kinds or case.kind in self.kinds)
            and (not self.dtypes or case.dtype in self.dtypes)
        )


def read_exclusions(path: Path = EXCLUSIONS) -> list[Exclusion]:
    """The exclusions of the file."""
    entries = json.loads(path.read_text())
    return [Exclusion(**{k: tuple(v) if isinstance(v, list) else v for k, v in e.items()}) for e in entries]


class Verdict:
    """Each case's status after the exclusions: passed, failed, excluded, unsupported, not run, or stale."""

    def __init__(self, cases: list[Case], records: dict[Case, dict[str, Any]], exclusions: list[Exclusion]) -> None:
        self.records = records
        self.status: dict[Case, str] = {}
        self.excluded: dict[Exclusion, list[Case]] = {e: [] for e in exclusions}
        by_name: dict[tuple[str, str], list[Exclusion]] = {}
        for e in exclusions:
            by_name.setdefault((e.suite, e.name), []).append(e)
        for case in cases:
            status = records[case]["status"] if case in records else "not run"
            entry = next((e for e in by_name.get((case.suite, case.name), ()) if e.matches(case)), None)
            if entry:
                self.excluded[entry].append(case)
            if status in BAD:
                status = "excluded" if entry else "failed"
            elif status == "passed" and entry:
                status = "stale"
            self.status[case] = status

    def of(self, status: str) -> list[Case]:
        """The cases with a status."""
        return [c for c, s in self.status.items() if s == status]

    def unused(self) -> list[Exclusion]:
        """Exclusions that match no case."""
        return [e for e, cases in self.excluded.items() if not cases]

    def problems(self) -> list[str]:
        """What must not be: failures, exclusions of what passes, exclusions of nothing."""
        lines = [f"failed: {_say(c)}: {self.records[c]['detail']}" for c in self.of("failed")]
        lines += [f"stale exclusion, it passes now: {_say(c)}" for c in self.of("stale")]
        return lines + [f"exclusion of nothing: {e.suite} {e.name}" for e in self.unused()]


def _say(case: Case) -> str:
    return " ".join([case.suite, case.name, case.dtype or "", case.kind])


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(x) for x in row) + " |" for row in rows]) + "\n"


def markdown(verdict: Verdict) -> str:
    """The report."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    samples: dict[tuple[str, str], Counter[str]] = {}
    for case, status in verdict.status.items():
        key = (case.suite, case.kind)
        counts.setdefault(key, Counter())[status] += 1
        if status == "passed":
            record = verdict.records[case]
            for what in ("samples", "rounded", "errors", "random"):
                samples.setdefault(key, Counter())[what] += record[what]
    total = sum((counts[k] for k in counts), Counter())
    ran = total["passed"] + total["failed"] + total["excluded"] + total["stale"]
    share = 100 * total["passed"] / ran if ran else 0.0
    rows = []
    for suite in SUITES:
        for kind in SUITES[suite].kinds:
            c, s = counts.get((suite, kind), Counter()), samples.get((suite, kind), Counter())
            rows.append([f"{suite}: {kind}", c["passed"], c["failed"] + c["stale"], c["excluded"], c["unsupported"],
                         c["not run"], s["samples"], s["rounded"], s["random"], s["errors"]])  # fmt: skip
    names = Counter(suite for suite, _ in {(c.suite, c.name) for c in verdict.of("passed")})
    rounded = sorted({c.name for c in verdict.of("passed") if verdict.records[c]["rounded"]})
    excluded = [
        [
            f"`{e.name}`: {', '.join(e.kinds or ['all kinds'])}; {', '.join(e.dtypes or ['all types'])}",
            len(cases),
            e.reason,
        ]
        for e, cases in verdict.excluded.items()
    ]
    failed = [[f"`{_say(c)}`", verdict.records[c]["detail"].replace("|", "\\|")] for c in verdict.of("failed")]
    parts = [
        "# Conformance\n",
        "Written by `python -m torchneuron.conformance`; do not edit. The suite of NKI kernels: "
        "[nki-conformance.md](nki-conformance.md).\n",
        f"PyTorch {torch.__version__.split('+')[0]}. PyTorch's own databases of operators (`op_db`), Python references "
        "(`python_ref_db`), modules (`module_db`) and optimizers (`optim_db`) on `neuron` against CPU. A **case** is "
        "one entry, one data type and one kind of use. It passes if for each sample neuron gives the values, data "
        "types, strides, shared storages, changes of arguments and type of error that CPU gives, and draws nothing "
        "from the host's random generator. Random results must repeat under one seed and have CPU's mean and "
        "metadata. A value that differs by more than rounding must be as near to CPU's result for the same sample in "
        "float64 as CPU's own is.\n",
        f"**{total['passed']} of {ran} cases passed ({share:.2f} %)**, {total['excluded']} excluded "
        f"({100 * total['excluded'] / max(ran, 1):.2f} %), {total['failed'] + total['stale']} failed, "
        f"{total['not run']} not run. They cover "
        + ", ".join(f"{names[s]} {s}s" for s in SUITES)
        + f". In {total['unsupported']} more there is nothing to compare: CPU always raises, or there is no sample.\n",
        "## By kind\n",
        _table(["Kind", "Passed", "Failed", "Excluded", "Nothing to compare", "Not run", "Samples", "within rounding",
                "random", "same error"], rows),
        "Samples are those of passed cases. All but those *within rounding* and *random* are equal bit for bit.\n",
        f"Equal within rounding only, in some sample: {', '.join(f'`{n}`' for n in rounded) or 'none'}.\n",
        "## Exclusions\n",
        "From `torchneuron/conformance/exclusions.json`. An exclusion that passes is an error.\n",
        _table(["What", "Cases", "Why"], excluded) if excluded else "None.\n",
    ]  # fmt: skip
    if failed:
        parts += ["## Failed\n", _table(["Case", "What"], failed)]
    return "\n".join(parts)
