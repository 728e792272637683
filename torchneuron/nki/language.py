"""nki.language: types, memories, tile creation, loops, and operators.

An operator is both an argument of instructions (`op=nl.add`) and a function: `nl.add(x, y)` gives a new SBUF tile.
Tiles are [P, F, ...]; binary functions take equal shapes, a number, or a [P, 1] tile on one side. dtype: of the result;
default: promoted from the inputs (floats; bool, int and float numbers count as uint8, int32, fp32; beside comparisons
and bitwise operators numbers do not count).
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np

from torchneuron import env

from .. import _core
from . import dtypes, isa, operands
from .dtypes import (  # noqa: F401
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from .errors import DataDependentError, NkiValidationError
from .ops import Op
from .session import Buffer, current, hbm, psum, sbuf, shared_hbm
from .tensor import NkiTensor, Register, allocate, ds  # noqa: F401 - nl.ds

private_hbm = hbm
bool = bool_
range = builtins.range


class NKIObject:
    """Base of classes that kernels may use. A class without __init__ takes its fields as a dataclass does, decorated or
    not; what the class sets to a plain value is a field also without a type, and a field that is not given and has no
    default is left out."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("__annotations__", {})
        plain = (builtins.bool, builtins.int, builtins.float, builtins.str, tuple, builtins.type(None))
        fields = {k: object for k, v in vars(cls).items() if not k.startswith("__") and isinstance(v, plain)}
        cls.__annotations__ = own | {k: t for k, t in fields.items() if k not in own}
        if cls.__init__ in (object.__init__, _set_fields):
            cls.__init__ = _set_fields  # in the class itself, where @dataclass leaves it


def _set_fields(self: NKIObject, *args: object, **kwargs: object) -> None:
    """The __init__ of NKIObjects."""
    cls = type(self)
    names = list(dict.fromkeys(k for c in reversed(cls.__mro__) for k in c.__dict__.get("__annotations__", ())))
    given = dict(zip(names, args)) | kwargs
    if len(args) > len(names) or any(k not in names for k in kwargs):
        unknown = [k for k in kwargs if k not in names] or list(args[len(names) :])
        raise TypeError(f"{cls.__name__}.__init__() got unexpected arguments {unknown}; its fields are {names}")
    described = getattr(cls, "__dataclass_fields__", {})
    for name in names:
        field = described.get(name, getattr(cls, name, dataclasses.MISSING))
        if not isinstance(field, dataclasses.Field):
            value = field
        else:
            made = field.default_factory is not dataclasses.MISSING and name not in given
            value = field.default_factory() if made else field.default
        value = given.get(name, value)
        if value is not dataclasses.MISSING:
            object.__setattr__(self, name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


class _TileSize:
    """nl.tile_size: limits of tiles on the current target (elements unless the name says bytes)."""

    pmax = _core.PARTITIONS
    psum_num_banks = property(
        lambda self: 7 if env.DMA_TRANSPOSE_ON_PE.get() and _target().generation >= 3 else _core.PSUM_BANKS
    )
    psum_bank_fmax_bytes = _core.PSUM_BANK_BYTES
    psum_bank_fmax = psum_fmax = _core.PSUM_BANK_BYTES // 4
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 4
    sbuf_size_bytes = property(lambda self: _target().sbuf_bytes * _core.PARTITIONS)
    sbuf_fmax_bytes = total_available_sbuf_size = property(lambda self: _usable_sbuf())
    sbuf_fmax = property(lambda self: _usable_sbuf() // 4)


def _target() -> object:
    from ..perf import targets
    from .session import active

    session = active()
    return session.target if session else targets.default()


def _usable_sbuf() -> int:
    """Bytes per partition that kernels may use: 16 KiB are the system's (public kernels use capacity - 16384 - 8)."""
    return _target().sbuf_bytes - 16384 - 8


tile_size = _TileSize()


def par_dim(size: int) -> int:
    """`size`: older kernels mark the partition dimension of a shape so."""
    return size


# ---- creation ------------------------------------------------------------------------------------------------------
def ndarray(
    shape: Sequence[int],
    dtype: object,
    buffer: Buffer = sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """A tensor whose elements nothing has written. address: (first partition, byte offset within the partition)."""
    return allocate(shape, dtype, buffer or sbuf, name, address)


def zeros(shape: Sequence[int], dtype: object, buffer: Buffer = sbuf, name: str = "") -> NkiTensor:
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: object, buffer: Buffer = sbuf, name: str = "") -> NkiTensor:
    return full(shape, 1, dtype, buffer, name)


def full(shape: Sequence[int], fill_value: float, dtype: object, buffer: Buffer = sbuf, name: str = "") -> NkiTensor:
    """A tensor of one value. In HBM it is filled by copies of an SBUF tile."""
    t = ndarray(shape, dtype, buffer, name)
    if t.on_chip:
        isa.memset(t, fill_value)
        return t
    row = full((1, builtins.min(t.size, 2048)), fill_value, dtype)
    for part in _parts(t, row.shape[1]):
        isa.dma_copy(part, row[:, : part.size])
    return t


def _parts(t: NkiTensor, width: int) -> Iterator[NkiTensor]:
    """The elements of an HBM tensor, `width` at a time."""
    flat = t.reshape((t.size,))
    for start in builtins.range(0, t.size, width):
        yield flat[start : builtins.min(start + width, t.size)]


def zeros_like(x: NkiTensor, dtype: object = None, buffer: Buffer | None = None, name: str = "") -> NkiTensor:
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: object = None, buffer: Buffer | None = None, name: str = "") -> NkiTensor:
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def rand(shape: Sequence[int], dtype: object, buffer: Buffer = sbuf, name: str = "") -> NkiTensor:
    """Uniform in [0, 1)."""
    t = ndarray(shape, dtype, buffer, name)
    if not t.on_chip:
        for part in _parts(t, 2048):
            isa.dma_copy(part, rand((1, part.size), dtype))
        return t
    isa.rng(t)
    if t.dtype not in (float32, tfloat32) and not dtypes.is_integer(t.dtype):  # rounding may have given 1
        isa.tensor_scalar(t, t, minimum, 1 - float(ml_dtypes.finfo(dtypes.numpy_dtype(t.dtype)).eps) / 2)
    return t


def random_seed(seed: NkiTensor | int) -> None:
    """Seeds the generators from a [1, 1] tile or a number."""
    isa.set_rng_seed(seed if isinstance(seed, NkiTensor) else full((1, 1), seed, int32))


def shared_constant(constant: np.ndarray | str) -> NkiTensor:
    """An HBM tensor with the values of an array or a .npy file."""
    array = np.ascontiguousarray(np.load(constant) if isinstance(constant, (str, os.PathLike)) else constant)
    data = np.frombuffer(array.tobytes(), np.uint8).copy()
    t = allocate(array.shape, dtypes.dtype(array.dtype), shared_hbm, array=data)
    current().constants.add(t.storage.id)
    return t


def shared_identity_matrix(n: int, dtype: object = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """The n x n identity (n <= 128) in a new SBUF tile, or in dst."""
    t = dtypes.dtype(dtype) if dst is None else dst.dtype
    tile = ndarray((n, n), t) if dst is None else dst
    isa.dma_copy(tile, shared_constant(np.eye(n).astype(dtypes.numpy_dtype(t))))
    return tile


# ---- movement ------------------------------------------------------------------------------------------------------
def load(src: NkiTensor, dtype: object = None, **legacy: object) -> NkiTensor:
    """A new SBUF tile with the elements of an HBM tensor."""
    shape = src.shape if src.ndim > 1 else (1, *src.shape)
    t = ndarray(shape, dtype or src.dtype)
    isa.dma_copy(t, src)
    return t


def store(dst: NkiTensor, value: NkiTensor | float, **legacy: object) -> None:
    """HBM dst = an SBUF tile, or a number."""
    if not isinstance(value, NkiTensor):
        value = full(dst.shape if dst.ndim > 1 else (1, *dst.shape), value, dst.dtype)
    isa.dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: object = None) -> NkiTensor:
    """A new SBUF tile [N, M] from HBM src [M, N]."""
    t = ndarray((src.shape[1], src.shape[0]), src.dtype)
    isa.dma_transpose(t, src)
    return t if dtype is None or dtypes.dtype(dtype) == src.dtype else copy(t, dtype)


def transpose(x: NkiTensor, dtype: object = None) -> NkiTensor:
    """A new PSUM tile [F, P] from x [P, F]."""
    t = ndarray((x.free_size, x.shape[0]), x.dtype, psum)
    isa.nc_transpose(t, x, isa.engine.tensor)
    if dtype is None or dtypes.dtype(dtype) == x.dtype:
        return t
    cast = ndarray(t.shape, dtype, psum)
    isa.tensor_copy(cast, t)
    return cast


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: builtins.bool = False) -> NkiTensor:
    """A new PSUM tile x.T @ y (transpose_x: x is [K, M]) or x @ y (x is [M, K]); y [K, N]."""
    if not transpose_x:
        turned = transpose(x)
        x = ndarray(turned.shape, x.dtype)
        isa.tensor_copy(x, turned)
    t = ndarray((x.free_size, y.free_size), float32, psum)
    isa.nc_matmul(t, x, y)
    return t


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: object = None) -> NkiTensor:
    """A new tile: element i of a partition is data[p].flat[indices[p, i]]. axis: 0; the free one of a 2-D tile."""
    if axis != 0 and not (data.ndim == 2 and data._dim(axis) == 1):
        raise NkiValidationError("gather_flattened", "axis", f"{axis}: the free axes of {data.shape} count as one")
    t = ndarray(indices.shape, dtype or data.dtype)
    operands.emit("gather_flattened", 0, (t, data, indices))
    return t


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: object = None) -> NkiTensor:
    """x with its dimensions of size 1 repeated: a view; a broadcast partition dimension or another dtype make a new
    SBUF tile."""
    view = x
    while view.ndim < len(shape):
        view = view.expand_dim(1 if view.on_chip else 0)
    for d, n in enumerate(shape):
        if d and view.shape[d] != n:
            view = view.broadcast(d, n)
    if view.shape[0] != shape[0]:
        if view.shape[0] != 1:
            raise NkiValidationError("broadcast_to", "shape", f"{tuple(shape)} is none that {x.shape} broadcasts to")
        t = ndarray(shape, dtype or x.dtype)
        _broadcast_row(t, view)
        return t
    if dtype is not None and dtypes.dtype(dtype) != x.dtype:
        t = ndarray(shape, dtype)
        isa.tensor_copy(t, view)
        return t
    return view


def _broadcast_row(dst: NkiTensor, row: NkiTensor) -> None:
    """Every partition of dst = the one of row: a product with ones on TensorE; a shuffle of what that cannot take."""
    if row.buffer is not sbuf or row.dtype not in (float32, bfloat16, float16) or not row.is_contiguous():
        row = row if row.dtype == dst.dtype else copy(row, dst.dtype)
        for first in range(0, dst.shape[0], 32):
            isa.nc_stream_shuffle(dst[first : builtins.min(first + 32, dst.shape[0])], row, [0] * 32)
        return
    ones = ndarray((1, dst.shape[0]), row.dtype)
    isa.memset(ones, 1.0, engine=isa.gpsimd_engine)
    flat, source = dst.reshape((dst.shape[0], -1)), row.reshape((1, -1))
    for first in range(0, source.shape[1], 512):
        part = source[:, first : builtins.min(first + 512, source.shape[1])]
        product = ndarray((dst.shape[0], part.shape[1]), float32, psum)
        isa.nc_matmul(product, ones, part)
        isa.activation(flat[:, first : first + part.shape[1]], copy, product)


# ---- loops and programs --------------------------------------------------------------------------------------------
def affine_range(start: int, stop: int | None = None, step: int = 1) -> builtins.range:
    """range(start, stop, step); the loop unrolls."""
    return builtins.range(start) if stop is None else builtins.range(start, stop, step)


sequential_range = static_range = affine_range


def dynamic_range(start: int | Register, stop: int | Register | None = None, step: int = 1) -> Iterator[Register]:
    """A loop that the device runs; the index is a register that cannot be written. step: a positive number."""
    if stop is None:
        start, stop = 0, start
    if not isinstance(step, int) or step <= 0:
        raise NkiValidationError("dynamic_range", "step", f"{step!r} must be a positive integer")
    session = current()
    attrs = {"step": step, **operands.bound(start, "start"), **operands.bound(stop, "stop")}
    index = Register(session.program.add_register(), frozen=True)
    if session.step:
        for i in builtins.range(int(start), int(stop), step):
            session.core.set_reg(index.id, i)
            yield index
        return
    if isinstance(stop, Register):
        attrs |= isa.register_alloc(stop).bound("stop")  # the loop may change the kernel's
    elif not isinstance(start, Register) and start >= stop:
        return
    session.emit("loop_begin", 0, (), {"reg": index.id, **attrs})
    yield index
    session.emit("loop_end", 0, (), {})


def fori_loop(
    lower: int | Register, upper: int | Register, body_fun: Callable[[Register], None], step: int = 1
) -> None:
    """body_fun(i) for i in lower .. upper, on the device."""
    for i in dynamic_range(lower, upper, step):
        body_fun(i)


def while_loop(init: Register, body_fun: Callable[[Register], Register]) -> None:
    """While the register is not zero: register = body_fun(register), on the device."""
    session = current()
    r = isa.register_alloc(0)
    isa.register_move(r, init)
    if session.step:
        while int(r):
            isa.register_move(r, body_fun(r))
        return
    session.emit("while_begin", 0, (), {"reg": r.id})
    isa.register_move(r, body_fun(r))
    session.emit("while_end", 0, (), {})


class no_reorder:
    """with nl.no_reorder(): the vendor's scheduler keeps the order; here order is kept anyway."""

    def __enter__(self) -> no_reorder:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def program_id(axis: int = 0) -> int:
    """Number of this core in its launch."""
    return current().program_id if axis == 0 else 0


def num_programs(axes: int = 0) -> int:
    """Cores of the launch."""
    return current().launch.lnc


def program_ndim() -> int:
    """1 in a launch with a grid (kernel[n]), else 0."""
    return int(current().grid)


def is_hbm(buffer: Buffer) -> builtins.bool:
    return buffer in (hbm, shared_hbm)


def is_sbuf(buffer: Buffer) -> builtins.bool:
    return buffer is sbuf


def is_psum(buffer: Buffer) -> builtins.bool:
    return buffer is psum


def is_on_chip(buffer: Buffer) -> builtins.bool:
    return buffer.on_chip


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Prints a tensor's values when the kernel runs; kernels that do so run step by step."""
    session = current()
    if session.step:
        print(print_prefix, tensor.numpy())
    elif session.runs:
        raise DataDependentError("device_print needs a kernel that runs step by step")


# ---- operators -----------------------------------------------------------------------------------------------------
def _number_dtype(x: object) -> dtypes.DType:
    return uint8 if isinstance(x, (builtins.bool, np.bool_)) else int32 if isinstance(x, (int, np.integer)) else float32


def _dtype_of(x: object) -> dtypes.DType:
    return x.dtype if isinstance(x, NkiTensor) else _number_dtype(x)


def _result(shape: Sequence[int], dtype: dtypes.DType) -> NkiTensor:
    return ndarray(shape, dtype)


def _tiles_type(*operands: object) -> dtypes.DType:
    """Promoted from those that are tiles; from all if none is."""
    tiles = [x for x in operands if isinstance(x, NkiTensor)] or operands
    return functools.reduce(dtypes.promote, map(_dtype_of, tiles))


def _binary(name: str, numbers_count: builtins.bool = True) -> Op:
    def body(x: NkiTensor | float, y: NkiTensor | float, dtype: object = None) -> NkiTensor:
        if not isinstance(x, NkiTensor) and not isinstance(y, NkiTensor):
            raise TypeError(f"nl.{name} needs a tile")
        if dtype is not None:
            out_type = dtypes.dtype(dtype)
        else:
            out_type = dtypes.promote(_dtype_of(x), _dtype_of(y)) if numbers_count else _tiles_type(x, y)
        swap = not isinstance(x, NkiTensor) or (isinstance(y, NkiTensor) and x.free_size == 1 != y.free_size)
        data, other = (y, x) if swap else (x, y)
        out = _result(data.shape, out_type)
        scalar = not isinstance(other, NkiTensor) or (other.free_size == 1 and data.free_size != 1)
        if scalar:
            isa.tensor_scalar(out, data, op, other, reverse0=swap, engine=_engine_of(op, data))
        else:
            isa.tensor_tensor(out, x, y, op)
        return out

    body.__doc__ = f"{name} of two tiles, or of a tile and a number or [P, 1] tile."
    op = Op(name, body)
    return op


def _engine_of(op: Op, data: NkiTensor) -> isa.engine:
    return isa.engine.gpsimd if op.name == "power" and data.buffer is not psum else isa.engine.unknown


def _unary(name: str, function: str | None = None, alu: str | None = None) -> Op:
    def body(x: NkiTensor, dtype: object = None) -> NkiTensor:
        if name == "rsqrt" and x.buffer is psum:
            raise NkiValidationError("rsqrt", "x", "is in psum: GpSimdE, which computes it, has no access to it")
        out = _result(x.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
        current().emit(
            "activation",
            0,
            (out.access(), x.access(), None, 1.0, None),
            {"function": _core.FUNCTIONS[function or name]},
        )
        return out

    body.__doc__ = f"{name} of a tile, element by element."
    return Op(name, body, alu, None if function else name)


add, subtract, multiply, divide = _binary("add"), _binary("subtract"), _binary("multiply"), _binary("divide")
maximum, minimum, abs_max, abs_min = _binary("maximum"), _binary("minimum"), _binary("abs_max"), _binary("abs_min")
power, mod, fmod = _binary("power"), _binary("mod"), _binary("fmod")
equal, not_equal, less, less_equal, greater, greater_equal = (
    _binary(n, False) for n in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
)
logical_and, logical_or, logical_xor = _binary("logical_and"), _binary("logical_or"), _binary("logical_xor")
bitwise_and, bitwise_or, bitwise_xor, left_shift, right_shift = (
    _binary(n, False) for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
)

abs, square, exp, log, sqrt, tanh = (_unary(n) for n in ("abs", "square", "exp", "log", "sqrt", "tanh"))
sigmoid, relu, gelu, gelu_dx, silu, silu_dx = (
    _unary(n) for n in ("sigmoid", "relu", "gelu", "gelu_dx", "silu", "silu_dx")
)
gelu_apprx_sigmoid, gelu_apprx_tanh = _unary("gelu_apprx_sigmoid"), _unary("gelu_apprx_tanh")
gelu_apprx_sigmoid_dx = _unary("gelu_apprx_sigmoid_dx")
softplus, mish, erf, erf_dx, arctan, sign = (_unary(n) for n in ("softplus", "mish", "erf", "erf_dx", "arctan", "sign"))
ceil, floor, trunc, negative, logical_not = (_unary(n) for n in ("ceil", "floor", "trunc", "negative", "logical_not"))
cos, tan = _unary("cos", "cos_reduced"), _unary("tan", "tan_reduced")
prelu = _unary("prelu")
rsqrt, reciprocal = _unary("rsqrt"), _unary("reciprocal")


def _sin(x: NkiTensor, dtype: object = None) -> NkiTensor:
    """sine of a tile; any argument (as an activation function, sin is right on [-pi, pi])."""
    return _reduced_sin(x, dtype)


_reduced_sin = _unary("sin_reduced", "sin_reduced")
sin = Op("sin", _sin)


def _invert(x: NkiTensor, dtype: object = None) -> NkiTensor:
    """Bitwise complement of an integer tile."""
    out = _result(x.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
    isa.tensor_scalar(out, x, invert, 0)
    return out


invert = Op("invert", _invert)


def _copy(x: NkiTensor, dtype: object = None) -> NkiTensor:
    """A new SBUF tile with x's elements; bit-exact for the same dtype."""
    out = _result(x.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
    isa.tensor_copy(out, x)
    return out


copy = Op("copy", _copy, alu="bypass")
bypass = Op("bypass", _copy, function="copy")


# ---- reductions ----------------------------------------------------------------------------------------------------
def _trailing(x: NkiTensor, axis: int | Sequence[int], function: str) -> list[int]:
    """The axes to reduce, in order: the last ones, without the partition dimension."""
    axes = sorted(x._dim(a) for a in ((axis,) if isinstance(axis, int) else axis))
    if not axes or axes != list(builtins.range(builtins.max(axes[0], 1), x.ndim)):
        raise NkiValidationError(function, "axis", f"{axis} must be trailing free axes of {x.shape}")
    return axes


def _along(x: NkiTensor, reduced: NkiTensor, op: Op, out: NkiTensor) -> None:
    """out = x op what a reduction of x kept, every value with the elements that it is of."""
    if reduced.free_size == 1:
        isa.tensor_scalar(out, x, op, reduced)
        return
    for d in builtins.range(1, x.ndim):
        if reduced.shape[d] != x.shape[d]:
            reduced = reduced.broadcast(d, x.shape[d])
    isa.tensor_tensor(out, x, reduced, op)


def _reduction(name: str, op: str) -> Op:
    def body(
        x: NkiTensor, axis: int | Sequence[int], dtype: object = None, keepdims: builtins.bool = False
    ) -> NkiTensor:
        axes = _trailing(x, axis, name)
        kept = x.shape[: axes[0]]
        shape = kept + (1,) * len(axes) if keepdims or len(kept) < 2 else kept
        if len(shape) > 2 and not keepdims and len(kept) < 2:
            shape = (*kept, 1)
        out = _result(shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
        isa.tensor_reduce(out, op, x, axes, keepdims=keepdims)
        return out

    body.__doc__ = f"{name} over trailing free axes; the result is [P, ...], [P, 1] where nothing is left."
    return Op(name, body, alu=op)


sum, prod, max, min = (
    _reduction("sum", "add"), _reduction("prod", "multiply"), _reduction("max", "maximum"), _reduction("min", "minimum")
)  # fmt: skip


def mean(x: NkiTensor, axis: int | Sequence[int], dtype: object = None, keepdims: builtins.bool = False) -> NkiTensor:
    """Mean over trailing free axes."""
    axes = _trailing(x, axis, "mean")
    total = sum(x, axes, dtype=float32, keepdims=keepdims)
    out = _result(total.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
    isa.tensor_scalar(out, total, multiply, 1.0 / math.prod(x.shape[a] for a in axes))
    return out


def var(x: NkiTensor, axis: int | Sequence[int], dtype: object = None, keepdims: builtins.bool = False) -> NkiTensor:
    """Population variance over trailing free axes; the reduced dimensions stay, of size 1."""
    axes = _trailing(x, axis, "var")
    centred = ndarray(x.shape, float32)
    _along(x, mean(x, axes, dtype=float32, keepdims=True), subtract, centred)
    return mean(square(centred), axes, dtype=dtype or x.dtype, keepdims=True)


def all(x: NkiTensor, axis: int | Sequence[int], dtype: object = None) -> NkiTensor:
    """1 where every element along trailing free axes is not zero, else 0."""
    return _all(x, axis, dtype or x.dtype)


_all = _reduction("all", "logical_and")


def softmax(x: NkiTensor, axis: int | Sequence[int] = -1, dtype: object = None) -> NkiTensor:
    """Softmax over trailing free axes."""
    axes = _trailing(x, axis, "softmax")
    out = _result(x.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
    e = ndarray(x.shape, float32)
    if len(axes) == x.ndim - 1:
        highest, total = ndarray((x.shape[0], 1), float32), ndarray((x.shape[0], 1), float32)
        isa.tensor_reduce(highest, maximum, x, axes, negate=True)
        isa.activation_reduce(e, exp, x, add, total, bias=highest)
    else:
        _along(x, max(x, axes, dtype=float32, keepdims=True), subtract, e)
        isa.activation(e, exp, e)
        total = sum(e, axes, keepdims=True)
    isa.reciprocal(total, total)
    _along(e, total, multiply, out)
    return out


def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: int,
    n: int,
    epsilon: float = 1e-6,
    dtype: object = None,
    compute_dtype: object = None,
) -> NkiTensor:
    """x / sqrt(sum of squares over trailing free axes / n + epsilon) * w."""
    axes = _trailing(x, axis, "rms_norm")
    t = dtypes.dtype(compute_dtype) if compute_dtype is not None else float32
    out = _result(x.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
    squares = ndarray(x.shape, t)
    if len(axes) == x.ndim - 1:
        total = ndarray((x.shape[0], 1), float32)
        isa.activation_reduce(squares, square, x, add, total)
    else:
        isa.activation(squares, square, x)
        total = sum(squares, axes, dtype=float32, keepdims=True)
    isa.tensor_scalar(total, total, multiply, 1.0 / n, op1=add, operand1=epsilon)
    isa.activation(total, rsqrt, total)
    scaled = ndarray(x.shape, t)
    _along(x, total, multiply, scaled)
    isa.tensor_tensor(out, scaled, broadcast_to(w, x.shape), multiply)
    return out


def where(condition: NkiTensor, x: NkiTensor | float, y: NkiTensor | float, dtype: object = None) -> NkiTensor:
    """x where condition is not zero (1.0), y where it is zero. Numbers do not count for the type of the result."""
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    out = _result(tile.shape, dtypes.dtype(dtype) if dtype is not None else _tiles_type(x, y))
    for value, predicate in ((y, None), (x, condition)):
        if predicate is None:
            isa.tensor_copy(out, value) if isinstance(value, NkiTensor) else isa.memset(out, value)
            continue
        mask = ndarray(condition.shape, uint8)
        isa.tensor_scalar(mask, condition, not_equal, 0.0)
        isa.tensor_copy_predicated(out, value, mask)
    return out


def dropout(x: NkiTensor, rate: NkiTensor | float, dtype: object = None) -> NkiTensor:
    """x with elements zeroed with probability rate."""
    out = _result(x.shape, dtypes.dtype(dtype) if dtype is not None else x.dtype)
    source = x if out.dtype == x.dtype else copy(x, out.dtype)
    isa.dropout(out, source, rate)
    return out
