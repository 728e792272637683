"""nki.isa.constants: enumerations of instruction arguments, with the values of the public API."""

from __future__ import annotations

from enum import Enum

engine = Enum("engine", {"unknown": 0, "tensor": 1, "scalar": 2, "gpsimd": 3, "dma": 4, "vector": 5, "sync": 6})
reduce_cmd = Enum("reduce_cmd", {"idle": 0, "reset": 1, "reduce": 2, "reset_reduce": 3, "load_reduce": 4})
dge_mode = Enum("dge_mode", {"unknown": 0, "swdge": 1, "hwdge": 2, "none": 3})
oob_mode = Enum("oob_mode", {"error": 0, "skip": 1})
matmul_perf_mode = Enum("matmul_perf_mode", {"none": 0, "double_row": 1})
dma_engine = Enum("dma_engine", {"dma": 1, "gpsimd_dma": 2})


class nc_version(Enum):
    """NeuronCore generations; ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: nc_version) -> bool:
        return self.value < other.value

    def __le__(self, other: nc_version) -> bool:
        return self.value <= other.value

    def __gt__(self, other: nc_version) -> bool:
        return self.value > other.value

    def __ge__(self, other: nc_version) -> bool:
        return self.value >= other.value
