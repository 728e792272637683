"""Environment variables: the one table that the code reads from and `docs/environment.md` is made from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _flag(text: str) -> bool:
    if text.lower() in ("0", "false", "off", "no"):
        return False
    if text.lower() in ("1", "true", "on", "yes"):
        return True
    raise ValueError("expected 0 or 1")


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(
                f"expected {', '.join(names[:-1])} or {names[-1]}" if names[1:] else f"expected {names[0]}"
            )
        return text

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise ValueError("expected a positive whole number below 2^63")
    return int(text)


# PyTorch keeps a device index in a signed byte.
_MOST_DEVICES = 127


def _core_count(text: str) -> int:
    value = _positive(text)
    if value > _MOST_DEVICES:
        raise ValueError(f"at most {_MOST_DEVICES} devices fit in a process")
    return value


def _core_list(text: str) -> list[int]:
    """`0-3`, `1,2` -> core numbers."""
    cores: list[int] = []
    if re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    if not cores or len(set(cores)) != len(cores) or len(cores) > _MOST_DEVICES:
        raise ValueError(f"expected up to {_MOST_DEVICES} core numbers such as 0-3 or 4,5")
    return cores


# Names that torchneuron.perf.targets knows.
_TARGETS = ("trn1", "trn2", "trn3", "inf2", "gen2", "gen3", "gen4")


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what an unset or empty one means, how its text is read, and what it does."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    doc: str
    default_text: str = ""

    def get(self) -> Any:
        """Value from the environment, or the default. Raises ValueError that names the variable."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}. See docs/environment.md.") from None


NUM_CORES = Variable(
    "NEURON_RT_NUM_CORES", None, _core_count, "Number of neuron devices of this process.", "`LOCAL_WORLD_SIZE`, else 1"
)
VISIBLE_CORES = Variable(
    "NEURON_RT_VISIBLE_CORES",
    None,
    _core_list,
    "Cores this process may use, as `0-3` or `4,5`; their number is the number of devices. "
    "Wins over `NEURON_RT_NUM_CORES`.",
    "unset",
)
LOCAL_WORLD_SIZE = Variable(
    "LOCAL_WORLD_SIZE", None, _core_count, "Set by `torchrun`: the number of devices if nothing else says it.", "unset"
)
LAUNCH_BLOCKING = Variable(
    "NEURON_LAUNCH_BLOCKING",
    False,
    _flag,
    "`1`: everything runs where it is called and nothing is queued. For debugging.",
)
FUSION = Variable(
    "TORCH_NEURON_FUSION",
    True,
    _flag,
    "`0`: every fusible operator runs by itself, where it is called. Results are the same bits.",
)
STRICT = Variable(
    "TORCH_NEURON_STRICT",
    False,
    _flag,
    "`1`: an operator that Trainium would hand to the host raises NotImplementedError instead of being counted.",
)
MEMORY_BYTES = Variable(
    "TORCH_NEURON_MEMORY_BYTES",
    None,
    _positive,
    "Memory of each device in bytes.",
    "the target's 24 GiB per core, or this device's share of the machine's memory if that is less",
)
INTERFACE = Variable(
    "TORCH_NEURON_INTERFACE",
    None,
    str,
    "Network interface that collectives between hosts are confined to.",
    "the one that reaches `MASTER_ADDR`",
)
COLLECTIVE_ALGORITHM = Variable(
    "TORCH_NEURON_COLLECTIVE_ALGORITHM",
    None,
    str,
    "Overrides the choice of algorithms, as `all_reduce=ring,broadcast=tree`; docs/distributed.md lists them.",
    "by operation, size and topology",
)
HOST = Variable(
    "TORCH_NEURON_HOST",
    None,
    str,
    "Name of this host for the ranks of a job: ranks with equal names share memory.",
    "the kernel's boot, process namespace and network namespace",
)
AUTOLOAD = Variable(
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    True,
    _flag,
    "PyTorch's own switch: `0` keeps `import torch` from loading any backend; "
    "`import torchneuron.device` then loads this one.",
)

PLATFORM_TARGET = Variable(
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    None,
    _one_of(*_TARGETS),
    "The Trainium that NKI kernels are checked and timed for: `trn1`, `trn2` or `trn3`. `NKI_NC_VERSION` (`gen2` to "
    "`gen4`) says the same to NKI code.",
    "`trn3`",
)
NC_VERSION = Variable(
    "NKI_NC_VERSION",
    None,
    _one_of(*_TARGETS),
    "See `NEURON_PLATFORM_TARGET_OVERRIDE`, which wins.",
    "unset",
)
NKI_SIMULATOR = Variable("NKI_SIMULATOR", False, _flag, "`1`: NKI kernels run step by step in Python.")
NKI_PRECISE_FP = Variable(
    "NKI_PRECISE_FP", True, _flag,
    "`0`: NKI kernels that run step by step keep on-chip tensors of 8- and 16-bit floats in fp32, to tell rounding "
    "from mistakes.",
)  # fmt: skip
DMA_TRANSPOSE_ON_PE = Variable(
    "NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", False, _flag, "`true`: transposing DMA runs on the tensor engine (trn2, trn3)."
)
NKI_SPILL = Variable(
    "TORCH_NEURON_NKI_SPILL", False, _flag,
    "`1`: an NKI kernel that needs more SBUF or PSUM at once than there is gets a warning instead of an error, as the "
    "vendor's compiler would spill what it placed itself.",
)  # fmt: skip
MX_SCALE = Variable(
    "TORCH_NEURON_MX_SCALE",
    "",
    _one_of("ocp"),
    "`ocp`: MX block scales as the OCP specification and NKI before 0.5 have them, without headroom for rounding.",
    "with headroom",
)
SIMD = Variable(
    "NEURON_SIMD",
    None,
    _one_of("baseline", "avx2", "avx512"),
    "Vector instructions of the software NeuronCore: `baseline`, `avx2` or `avx512`. Results do not depend on it.",
    "the best that the machine has",
)

CACHE_DIR = Variable(
    "TORCH_NEURON_CACHE_DIR",
    os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "torchneuron"),
    str,
    "Folder of what `torch.compile` keeps between processes; docs/compile.md. Read at each compilation.",
    "`$XDG_CACHE_HOME/torchneuron`, else `~/.cache/torchneuron`",
)

VARIABLES = [
    NUM_CORES,
    VISIBLE_CORES,
    LOCAL_WORLD_SIZE,
    LAUNCH_BLOCKING,
    FUSION,
    STRICT,
    MEMORY_BYTES,
    INTERFACE,
    COLLECTIVE_ALGORITHM,
    HOST,
    PLATFORM_TARGET,
    NC_VERSION,
    NKI_SIMULATOR,
    NKI_PRECISE_FP,
    NKI_SPILL,
    DMA_TRANSPOSE_ON_PE,
    MX_SCALE,
    SIMD,
    CACHE_DIR,
    AUTOLOAD,
]


def check() -> None:
    """Raises ValueError for the first variable that says what it cannot say."""
    for variable in VARIABLES:
        variable.get()


def device_count() -> int:
    """Number of neuron devices that the environment asks for."""
    if (cores := VISIBLE_CORES.get()) is not None:
        return len(cores)
    return NUM_CORES.get() or LOCAL_WORLD_SIZE.get() or 1


def markdown() -> str:
    """The table as Markdown, for `docs/environment.md`."""
    rows = ["| Variable | Default | Meaning |", "|---|---|---|"]
    for v in VARIABLES:
        default = v.default_text or (f"`{int(v.default)}`" if isinstance(v.default, bool) else f"`{v.default}`")
        rows.append(f"| `{v.name}` | {default} | {v.doc} |")
    return "\n".join(rows) + "\n"
