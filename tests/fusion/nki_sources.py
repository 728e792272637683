"""Runs calls on the device and what their fused programs print as on the simulator, and compares the bits.

python tests/fusion/nki_sources.py --count 1000       the same with random programs (programs.py)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import threading
from collections import Counter
from pathlib import Path

import torch

import torchneuron.nki as nki
from torchneuron import _C
from torchneuron.nki import source

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; one NaN is like another."""
    if a.dtype.is_floating_point:
        both = a.isnan() & b.isnan()
        a, b = a.masked_fill(both, 0), b.masked_fill(both, 0)
    word = WORDS[a.element_size()]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def snapshot(program: source.Program) -> dict[int, torch.Tensor]:
    """The first bytes of the storages that a program has used, by address."""
    sizes: Counter[int] = Counter()
    for a in program.accesses:
        sizes[a.address] = max(sizes[a.address], a.end * getattr(torch, a.dtype.rstrip("_")).itemsize)
    return {
        address: torch.frombuffer(bytearray((ctypes.c_uint8 * size).from_address(address)), dtype=torch.uint8)
        for address, size in sizes.items()
    }


class Memory:
    """The device's memory, by the address of a storage, as printed programs change it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.storages: dict[int, torch.Tensor] = {}
        for t in tensors:
            self.storages[t.untyped_storage().data_ptr()] = _bytes(t)

    def know(self, storages: dict[int, torch.Tensor]) -> None:
        """Takes the bytes of storages that are not known yet."""
        for address, data in storages.items():
            known = self.storages.get(address, data[:0])
            self.storages[address] = torch.cat([known, data[known.numel() :]])

    def elements(self, m: source.Memory) -> torch.Tensor:
        """A view of what a kernel's operand is."""
        dtype = getattr(torch, m.dtype.rstrip("_"))
        first, last = m.offset * dtype.itemsize, (m.offset + m.size) * dtype.itemsize
        storage = self.storages.get(m.address, torch.empty(0, dtype=torch.uint8))
        if storage.numel() < last:
            grown = torch.zeros(last, dtype=torch.uint8)
            grown[: storage.numel()] = storage
            storage = self.storages[m.address] = grown
        return storage[first:last].view(dtype)

    def run(self, printed: source.Source, step: bool) -> None:
        """Runs a printed program; step: instruction by instruction, else traced."""
        kernel = printed.kernel()
        arguments = [self.elements(m).clone() for m in printed.memories if m.argument]
        arguments += [value for _, value in printed.numbers]
        if not step:
            assert kernel.trace(tuple(arguments), {}) is not None, "the kernel can be traced"
        results = (nki.simulate(kernel) if step else kernel)(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        for m, result in zip([m for m in printed.memories if m.result], results, strict=True):
            into = self.elements(m)
            raw = result if isinstance(result, torch.Tensor) else torch.from_numpy(result.view(f"i{result.itemsize}"))
            into.view(WORDS[into.element_size()]).copy_(raw.view(WORDS[into.element_size()]))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    storage = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).cpu().clone()


@contextlib.contextmanager
def watched():
    """The programs that run inside the block, in order, each with what was in memory when its window had run."""
    programs: list[tuple[source.Program, dict[int, torch.Tensor]]] = []

    def ran(calls, structure, runs):
        for run in runs:
            program = source.Program.of((name for name, _ in calls), structure, run)
            if program.writes:
                programs.append((program, snapshot(program)))

    torch.neuron.synchronize()
    _C.set_structure_observer(ran)
    try:
        yield programs
    finally:
        torch.neuron.synchronize()
        _C.set_structure_observer(None)


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.device.type == "neuron" else []
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def check(function, *inputs, steps: bool = True) -> list[source.Program]:
    """Whether what function(*inputs) leaves on the device is what its printed programs leave; returns these."""
    moved = [t.to("neuron") if isinstance(t, torch.Tensor) else t for t in inputs]
    torch.neuron.synchronize()
    torch.neuron.reset_fusion_stats()
    memories = [Memory(tensors_of(moved)) for _ in range(1 + steps)]
    with watched() as programs:
        results = function(*moved)
    assert torch.neuron.fusion_stats()["library_calls"] == 0, "all that happened was in fused programs"
    assert programs, "something was fused"
    left = tensors_of(results) + tensors_of(moved)
    for step, memory in enumerate(memories):
        for program, after in programs:
            memory.know(after)
            memory.run(source.print_source(program), bool(step))
        for t in left:
            want = _bytes(t).view(t.dtype)
            got = memory.storages[t.untyped_storage().data_ptr()].view(t.dtype)
            assert equal_bits(got, want), f"{[p.operators for p, _ in programs]}: {different(got, want)}"
    return [p for p, _ in programs]


def different(got: torch.Tensor, want: torch.Tensor) -> str:
    at = [i for i in range(len(want)) if not equal_bits(got[i : i + 1], want[i : i + 1])]
    return f"{len(at)} of {len(want)} differ, {got[at[:4]].tolist()} is not {want[at[:4]].tolist()} at {at[:4]}"


class Soak:
    """Checks the programs of every window when it has run: operands that the window does not write are still what they
    were, the others are known if the window made them."""

    def __init__(self) -> None:
        self.windows: dict[int, list[tuple[source.Program, dict[int, torch.Tensor]]]] = {}  # by thread
        self.counts: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.failures: list[str] = []
        self.step = False

    def ran(self, calls, structure, runs) -> None:
        programs = [source.Program.of((name for name, _ in calls), structure, run) for run in runs]
        window = self.windows.setdefault(threading.get_ident(), [])
        window += [(p, snapshot(p)) for p in programs if p.writes]

    def closed(self, why: str, programs: list) -> None:
        window = self.windows.pop(threading.get_ident(), [])
        if threading.active_count() > 1:  # the other one may have changed the memory by now
            self.counts["another thread"] += 1
            return
        try:
            self.compare(window)
        except Exception as error:  # noqa: BLE001 - goes into the report
            self.failures.append(f"{type(error).__name__}: {error} in {[p.operators for p, _ in window]}")

    def compare(self, window: list[tuple[source.Program, dict[int, torch.Tensor]]]) -> None:
        memory, known = Memory([]), set()
        sources = []
        for p, _ in window:
            try:
                sources.append(source.print_source(p))
            except source.NoNkiForm as error:
                self.missing[str(error).split(" ")[0]] += 1
                self.counts["not printable"] += 1
                return
        written = {m.address for s in sources for m in s.memories if m.result}
        for s, (_, after) in zip(sources, window):
            if any(m.argument and m.address in written and m.address not in known for m in s.memories):
                self.counts["in place"] += 1
                return
            memory.know(after)
            self.step = not self.step
            memory.run(s, self.step)
            known |= {m.address for m in s.memories if m.result}
        actual = Memory([])
        for s, (_, after) in zip(sources, window):
            actual.storages |= after
            for m in [m for m in s.memories if m.result]:
                got, want = memory.elements(m), actual.elements(m)
                if not equal_bits(got, want):
                    raise AssertionError(f"{m.name} of {s.name}: {different(got, want)}\n{s.text}")
            self.counts["checked"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import programs

    soak = Soak()
    _C.set_structure_observer(soak.ran)
    _C.set_fusion_observer(lambda: 0, soak.closed)
    for number in range(arguments.first, arguments.first + arguments.count):
        failures = len(soak.failures)
        programs.Program(number, Counter()).run()
        for failure in soak.failures[failures:]:
            print(f"program {number}: {failure}")
    torch.neuron.synchronize()
    _C.set_fusion_observer(None, None)
    _C.set_structure_observer(None)
    print(f"{len(soak.failures)} differ; {dict(soak.counts)}; without a form: {dict(soak.missing)}")
    return bool(soak.failures)


if __name__ == "__main__":
    sys.exit(main())
