"""Element types of NKI. A type is its name, a str, as the public API has it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .. import _core
from .errors import NkiValidationError


class DType(str):
    """An element type; equal to its name and to the NumPy dtype of that name. Usable as a NumPy dtype, but for
    `tfloat32`: NumPy has the narrow floats from ml_dtypes, the packed types from this package."""

    __slots__ = ()

    @property
    def code(self) -> int:
        """Number of the type in the software NeuronCore."""
        return _core.DTYPES[_ALIASES.get(self, str(self))]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _core.DTYPE_SIZES[_ALIASES.get(self, str(self))]

    @property
    def name(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"nl.{str(self)}"


class Wide(DType):
    """A narrow float by name that is kept in fp32 (NKI_PRECISE_FP=0)."""

    __slots__ = ()

    @property
    def code(self) -> int:
        return _core.DTYPES["float32"]

    @property
    def itemsize(self) -> int:
        return _core.DTYPE_SIZES["float32"]


_ALIASES = {"bool": "bool_", "float8e4": "float8_e4m3", "float8e5": "float8_e5m2"}

bool_ = DType("bool")
int8, int16, int32 = DType("int8"), DType("int16"), DType("int32")
uint8, uint16, uint32 = DType("uint8"), DType("uint16"), DType("uint32")
float16, bfloat16, tfloat32, float32 = DType("float16"), DType("bfloat16"), DType("tfloat32"), DType("float32")
float8_e4m3, float8_e4m3fn, float8_e5m2 = DType("float8_e4m3"), DType("float8_e4m3fn"), DType("float8_e5m2")
float8_e8m0fnu = DType("float8_e8m0fnu")
float8_e4m3fn_x4, float8_e5m2_x4 = DType("float8_e4m3fn_x4"), DType("float8_e5m2_x4")
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4")

ALL = (
    bool_, int8, int16, int32, uint8, uint16, uint32, float16, bfloat16, tfloat32, float32,
    float8_e4m3, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4,
)  # fmt: skip
_BY_NAME = {str(t): t for t in ALL} | {alias: DType(name) for alias, name in _ALIASES.items() if name != "bool_"}
_BY_NAME["bool_"] = bool_


def dtype(value: object) -> DType:
    """The NKI type for a DType, a name, a NumPy dtype or a torch dtype. NkiValidationError if there is none."""
    if isinstance(value, DType):
        return value
    name = value if isinstance(value, str) else str(value)
    found = _BY_NAME.get(name.rsplit(".", 1)[-1])
    if found is None and not name.startswith("torch."):
        try:
            found = _BY_NAME.get(np.dtype(value).name)
        except TypeError:
            pass
    if found is None:
        raise NkiValidationError("", "dtype", f"{value!r} is no element type of NKI")
    return found


def stored(value: object, wide: bool) -> DType:
    """The type for a new tensor: wide keeps narrow floats in fp32."""
    t = dtype(str(value) if isinstance(value, Wide) else value)
    return Wide(t) if wide and t in _NARROW else t


def numpy_dtype(t: DType) -> np.dtype:
    """The NumPy dtype that holds elements of t."""
    return np.dtype(np.float32 if isinstance(t, Wide) or t == tfloat32 else str(t))


_INTS = {int8: (8, True), int16: (16, True), int32: (32, True), uint8: (8, False), uint16: (16, False),
         uint32: (32, False), bool_: (8, False)}  # fmt: skip
_FP8 = (float8_e4m3, float8_e4m3fn, float8_e5m2)
_PACKED = (float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4)
_NARROW = (float16, bfloat16, *_FP8)


def is_integer(t: DType) -> bool:
    return t in _INTS


def is_packed(t: DType) -> bool:
    """Is an element a word of four?"""
    return t in _PACKED


def promote(a: DType, b: DType) -> DType:
    """Result type of an nl.* operation on two types.

    Integers give way to floats; of two floats the wider wins, fp16 with bf16 gives fp32, two different fp8 give bf16;
    integers of different sign go to the next wider signed type, 32-bit ones to fp32.
    """
    if a == b:
        return a
    if is_integer(a) != is_integer(b):
        return b if is_integer(a) else a
    if not is_integer(a):
        if a.itemsize != b.itemsize:
            return a if a.itemsize > b.itemsize else b
        return {1: bfloat16, 2: float32}.get(a.itemsize, float32)
    (wa, sa), (wb, sb) = _INTS[a], _INTS[b]
    if sa == sb:
        return a if wa >= wb else b
    signed, unsigned = (wa, wb) if sa else (wb, wa)
    width = signed if signed > unsigned else unsigned * 2
    return {16: int16, 32: int32}.get(width, float32)


np.dtype(ml_dtypes.bfloat16)  # the names of ml_dtypes resolve from here on
