"""Hardware targets trn1, trn2, trn3. The numbers, each with unit and source, are in data/<target>.json."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

from torchneuron import env

from .. import _core

NAMES = ("trn1", "trn2", "trn3")
_ALIASES = {"gen2": "trn1", "inf2": "trn1", "gen3": "trn2", "gen4": "trn3"}
_MODEL_FIELDS = (
    "generation", "sbuf_bytes", "dma_engines", "dma_bytes_per_ns", "dma_row_ns", "dma_row_overhead_ns", "dma_start_ns",
    "instruction_ns", "min_cycles", "access_cycles", "hbm_bytes_per_ns", "stride_bytes", "shared_ports", "pe_warm_ns",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One NeuronCore generation. values: by name, in the units of the data file."""

    name: str
    values: dict[str, float] = field(hash=False)

    @property
    def generation(self) -> int:
        """2, 3, 4 for trn1, trn2, trn3."""
        return self.values["generation"]

    @property
    def hbm_bytes(self) -> int:
        """HBM of a chip, in bytes."""
        return int(self.values["hbm_gib"] * 2**30)

    @property
    def sbuf_bytes(self) -> int:
        """SBUF bytes per partition."""
        return self.values["sbuf_bytes"]

    def model(self) -> _core.Target:
        """The target as the clock takes it."""
        t = _core.Target()
        for name in _MODEL_FIELDS:
            setattr(t, name, self.values[name])
        for engine, code in _core.ENGINES.items():
            if f"clock_{engine}" in self.values:
                t.set_clock(code, self.values[f"clock_{engine}"])
        return t


@functools.cache
def get(name: str) -> Target:
    """The target of a name or an alias (gen2, inf2, gen3, gen4). ValueError for others."""
    canonical = _ALIASES.get(name, name)
    if canonical not in NAMES:
        raise ValueError(f"no target {name!r}: {', '.join(NAMES)}")
    data = json.loads((Path(__file__).parent / "data" / f"{canonical}.json").read_text())
    return Target(canonical, {key: row["value"] for key, row in data.items()})


def sources(name: str) -> dict[str, dict]:
    """{number: {value, unit, source}} of a target."""
    return json.loads((Path(__file__).parent / "data" / f"{get(name).name}.json").read_text())


def default() -> Target:
    """The target of NEURON_PLATFORM_TARGET_OVERRIDE or NKI_NC_VERSION, else trn3 (the simulator's default)."""
    return get(env.PLATFORM_TARGET.get() or env.NC_VERSION.get() or "trn3")
