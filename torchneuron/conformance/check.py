"""Runs one case: the samples of an entry in one data type, used in one way, on CPU and on the device."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchneuron.conformance.compare import Inexact, Mismatch, compare, copy_to, no_less_exact
from torchneuron.conformance.kinds import SUITES, Kind, Sample, reset_seeds, spread

# Contents are whatever the memory held.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
                 "resize_as_"}  # fmt: skip

# The wider types in which results count as exact. CPU itself rounds here and there otherwise: its vector code rounds
# once, its code for the rest of a row after each step; and some samples blow a last place up (differences of sums that
# are nearly equal). Who is as near to the exact result as CPU is not wrong.
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

# Arguments (by position) that must be on the host on every device.
HOST_ARGUMENTS = {"tensor_split": {1}, "_refs.tensor_split": {1}}


@dataclass(frozen=True)
class Case:
    """One entry of a database, one data type (None: it has none), one kind of use."""

    suite: str
    name: str
    dtype: str | None
    kind: str


@dataclass
class Outcome:
    """What became of a case.

    `status`: passed, failed, crashed, timeout, or unsupported (CPU itself raises on every sample, or there is none).
    `samples`: compared; `rounded`: of these, equal within rounding only; `errors`: of these, the same error as on CPU.
    """

    status: str
    samples: int = 0
    rounded: int = 0
    errors: int = 0
    random: int = 0
    detail: str = ""

    def record(self, case: Case, seconds: float) -> dict[str, Any]:
        """As a line of the results file."""
        return asdict(case) | asdict(self) | {"seconds": round(seconds, 3)}


def cases(suites: list[str]) -> list[Case]:
    """All cases of the named suites."""
    found = []
    for suite_name in suites:
        suite = SUITES[suite_name]
        for name, entry in suite.entries().items():
            for kind in suite.untyped:
                if suite.kinds[kind].applies(entry, None):
                    found.append(Case(suite_name, name, None, kind))
            for dtype in sorted(suite.dtypes(entry), key=str):
                for kind, about in suite.kinds.items():
                    if kind not in suite.untyped and about.applies(entry, dtype):
                        found.append(Case(suite_name, name, str(dtype).removeprefix("torch."), kind))
    return found


class Checker:
    """Runs cases on `device`. Databases are read once, and the samples of an entry are made once for all its kinds."""

    def __init__(self, device: str = "neuron", limit: int | None = None) -> None:
        self.device = device
        self.limit = limit
        self.entries: dict[str, dict[str, Any]] = {}
        self.owner: tuple[str, str, str | None] | None = None
        self.made: dict[Any, list[Sample]] = {}

    def run(self, case: Case) -> Outcome:
        """The outcome of one case; exceptions of the device are part of it."""
        suite = SUITES[case.suite]
        if case.suite not in self.entries:
            self.entries[case.suite] = suite.entries()
        entry, kind = self.entries[case.suite][case.name], suite.kinds[case.kind]
        try:
            samples = spread(self._samples(case, entry, kind), self.limit or kind.limit)
        except Exception as error:
            return Outcome("unsupported", detail=f"CPU has no samples: {_say(error)}")
        outcome, refused = Outcome("passed"), ""
        comparison = _Comparison(self.device, case, entry, kind, outcome)
        for number, sample in enumerate(samples):
            try:
                refused = comparison.of(sample) or refused
            except Mismatch as error:
                outcome.status = "failed"
                outcome.detail = f"sample {number}: {error}"
                return outcome
        if outcome.samples == outcome.errors and not (outcome.errors and case.kind == "errors"):
            return Outcome("unsupported", detail=f"CPU itself raises: {refused}" if samples else "no samples")
        return outcome

    def _samples(self, case: Case, entry: Any, kind: Kind) -> list[Sample]:
        """All samples of a case. Nobody changes them but in copies."""
        owner = (case.suite, case.name, case.dtype)
        if self.owner != owner:
            self.owner, self.made = owner, {}
        if kind.samples not in self.made:
            reset_seeds()
            self.made[kind.samples] = list(kind.samples(entry, getattr(torch, case.dtype) if case.dtype else None))
        return self.made[kind.samples]


@dataclass
class _Comparison:
    """Compares the two devices on the samples of a case and counts in `outcome`."""

    device: str
    case: Case
    entry: Any
    kind: Kind
    outcome: Outcome

    def of(self, sample: Sample) -> str:
        """Compares one sample: raises Mismatch, or returns what CPU raised."""
        on_cpu, before, random = self.attempt(sample, "cpu")
        if isinstance(on_cpu, Exception) and sample.error and not isinstance(on_cpu, sample.error.error_type):
            return _say(on_cpu)  # the database says another error than CPU raises: it is not about CPU
        if not isinstance(on_cpu, Exception) and sample.error:
            return "CPU raises no error"
        torch.neuron.manual_seed(0)
        on_device, after, drawn = self.attempt(sample, self.device)
        self.outcome.samples += 1
        if drawn:
            raise Mismatch("the host's random generator was used")
        if isinstance(on_cpu, Exception):
            self.outcome.errors += 1
            self.same_error(on_cpu, on_device, sample)
            return _say(on_cpu)
        if isinstance(on_device, Exception):
            raise Mismatch(f"raises {_say(on_device)}")
        known = not random and self.case.name.removeprefix("_refs.") not in UNINITIALISED
        cpu, dev, aliasing = (before, on_cpu), (after, on_device), self.kind.aliasing
        try:
            exact = compare(cpu, dev, self.device, values=known, aliasing=aliasing)
        except Inexact:
            if not self.no_less_exact(sample, cpu, dev):
                raise
            compare(cpu, dev, self.device, values=False, aliasing=aliasing)  # all but the values
            exact = False
        self.outcome.rounded += not exact
        self.outcome.random += random
        if random:
            self.same_distribution(sample, on_cpu, on_device)
        return ""

    def attempt(self, sample: Sample, device: str) -> tuple[Any, Any, bool]:
        """The result or the error, the sample as it is afterwards, and whether the host's generator was used."""
        tree = copy_to(sample.tree, device)
        leaves = tree_leaves(tree)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if host := HOST_ARGUMENTS.get(self.case.name):
            args, kwargs = tree
            tensors = [x for i, x in enumerate(args) if i not in host]
            tree = tuple(copy_to(sample.tree[0][i], "cpu") if i in host else a for i, a in enumerate(args)), kwargs
        # A factory that is not told a device makes its tensor on the default one.
        tells = tensors or any(isinstance(x, (torch.device, str, torch.nn.Module)) for x in leaves)
        torch.default_generator.manual_seed(0)
        state = torch.get_rng_state()
        try:
            torch.set_default_device(None if tells else device)
            result = self.kind.recipe(self.entry, Sample(tree, sample.about))
        except Exception as error:
            result = error
        finally:
            torch.set_default_device(None)
        return result, tensors, not torch.equal(state, torch.get_rng_state())

    def no_less_exact(self, sample: Sample, cpu: Any, dev: Any) -> bool:
        """Whether the device is as near as CPU to what CPU makes of the sample in wider types."""

        def widen(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.dtype not in WIDER:
                return x
            return x.detach().to(WIDER[x.dtype]).requires_grad_(x.requires_grad)

        if not any(isinstance(x, torch.Tensor) and x.dtype in WIDER for x in tree_leaves(sample.tree)):
            return False
        exact, arguments, _ = self.attempt(Sample(tree_map(widen, sample.tree), sample.about), "cpu")
        return not isinstance(exact, Exception) and no_less_exact(cpu, dev, (arguments, exact))

    def same_error(self, on_cpu: Exception, on_device: Any, sample: Sample) -> None:
        """Raises Mismatch unless both raised the same type and, if the database has one, the text it wants."""
        if not isinstance(on_device, Exception):
            raise Mismatch(f"raises nothing; CPU raises {_say(on_cpu)}")
        if type(on_device) is not type(on_cpu):
            raise Mismatch(f"raises {_say(on_device)}; CPU raises {_say(on_cpu)}")
        if sample.error:
            pattern = sample.error.error_regex
            if re.search(pattern, str(on_cpu)) and not re.search(pattern, str(on_device)):
                raise Mismatch(f"says {_say(on_device)}; CPU says {_say(on_cpu)}")

    def same_distribution(self, sample: Sample, on_cpu: Any, first: Any) -> None:
        """The same seed gives the same numbers again, and their mean is that of CPU's numbers."""
        torch.neuron.manual_seed(0)
        again = self.attempt(sample, self.device)[0]
        if isinstance(again, Exception):
            raise Mismatch(f"raises {_say(again)} when called again")
        try:
            exact = compare(_to_cpu(first), _to_cpu(again), "cpu")
        except Mismatch as error:
            raise Mismatch(f"not the same under the same seed: {error}") from None
        if not exact:
            raise Mismatch("not the same bits under the same seed")
        cpu, dev = _numbers(on_cpu), _numbers(first)
        if len(cpu) != len(dev) or len(cpu) < 500:
            return
        spread_of_mean = ((cpu.var() / len(cpu) + dev.var() / len(dev)) ** 0.5).item()
        if abs(cpu.mean() - dev.mean()).item() > 8 * spread_of_mean + 1e-6:
            raise Mismatch(f"mean of {len(dev)} random numbers is {dev.mean():.4}, on CPU {cpu.mean():.4}")


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _to_cpu(tree: Any) -> Any:
    return [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in tree_leaves(tree)]


def _numbers(tree: Any) -> torch.Tensor:
    """All finite numbers of dense results as one vector."""
    parts = [
        x.detach().cpu().resolve_conj()
        for x in tree_leaves(tree)
        if isinstance(x, torch.Tensor) and x.layout == torch.strided
    ]
    flat = [(torch.view_as_real(p) if p.is_complex() else p).reshape(-1).double() for p in parts if not p.is_quantized]
    numbers = torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64)
    return numbers[numbers.isfinite()]
