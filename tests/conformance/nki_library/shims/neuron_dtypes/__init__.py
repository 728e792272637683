"""Stand-in for a private package that nki-library's tests import: element types and casts."""

import ml_dtypes
import nki.language as nl
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float8_e5m2_x4, float8_e4m3fn_x4 = np.dtype(nl.float8_e5m2_x4), np.dtype(nl.float8_e4m3fn_x4)
float4_e2m1fn_x4 = np.dtype(nl.float4_e2m1fn_x4)
_PACKED = {
    "float8_e5m2_x4": (float8_e5m2_x4, float8_e5m2),
    "float8_e4m3fn_x4": (float8_e4m3fn_x4, float8_e4m3fn),
    "float4_e2m1fn_x4": (float4_e2m1fn_x4, np.dtype(ml_dtypes.float4_e2m1fn)),
}


def _packed(d):
    """(packed dtype, lane dtype) of an x4 type given as dtype or name, else None."""
    for name, pair in _PACKED.items():
        if name in str(d):
            return pair
    return None


def _dtype(d):
    packed = _packed(d)
    if packed:
        return packed[0]
    try:
        return np.dtype(d)
    except TypeError:
        return np.dtype(getattr(ml_dtypes, str(d)))


def _unpack(x, lane):
    raw = np.ascontiguousarray(x).view(np.uint32 if lane.itemsize == 1 and "float4" not in lane.name else np.uint16)
    if "float4" in lane.name:
        nibbles = np.stack([raw >> s & 15 for s in (0, 4, 8, 12)], -1).astype(np.uint8)
        return nibbles.reshape(*x.shape[:-1], -1).view(lane)
    return raw.view(lane)


def _pack(x, packed, lane):
    v = np.ascontiguousarray(np.asarray(x, np.float32).astype(lane))
    if "float4" in lane.name:
        n = v.view(np.uint8).reshape(*v.shape[:-1], -1, 4).astype(np.uint16)
        return (n[..., 0] | n[..., 1] << 4 | n[..., 2] << 8 | n[..., 3] << 12).astype(np.uint16).view(packed)
    return v.view(np.uint32).view(packed)


def static_cast(x, dtype):
    """x as dtype; packed types widen to, or pack from, four elements of the last dimension."""
    x = np.asarray(x)
    source, target = _packed(x.dtype), _packed(dtype)
    if source and target:
        return x
    if source:
        return _unpack(x, source[1]).astype(_dtype(dtype))
    if target:
        return x.view(target[0]) if x.dtype in (np.uint32, np.uint16) else _pack(x, *target)
    return x.astype(_dtype(dtype))


def sizeinbytes(d):
    return _dtype(d).itemsize


def finfo(d):
    return ml_dtypes.finfo(_dtype(d))


def is_float_type(d):
    return "float" in str(d)
