"""nki.isa: one function per instruction. `dst` is written; tensors are NkiTensors, "scalar" operands are numbers or
[P, 1] tiles. Limits and dtypes of operands are those of the instruction table (docs/isa.md); violations raise
NkiValidationError with the kernel's line. Every function returns a handle whose ordering hints have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from torchneuron import env

from .. import _core
from . import dtypes, operands, ops
from . import isa_constants as constants
from .errors import NkiValidationError
from .isa_constants import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from .operands import check_tensors, emit
from .session import Instruction, current, psum
from .tensor import NkiTensor, Register, integer

FP32_MIN = float(np.finfo(np.float32).min)

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, sync_engine, unknown_engine = engine.gpsimd, engine.sync, engine.unknown

_OVERWRITE, _ADD, _AUTOMATIC = 0, 1, 2  # Accumulate


# ---- hardware ------------------------------------------------------------------------------------------------------
def get_nc_version() -> nc_version:
    """The NeuronCore generation that kernels are built for."""
    return nc_version(current().target.generation)


def get_nc_sub_version() -> int:
    """Revision within a generation; there is one."""
    return 0


# ---- movement ------------------------------------------------------------------------------------------------------
def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
    **legacy: object,
) -> Instruction:
    """dst = src in element order, between HBM and SBUF; differing types go through fp32.

    Rows that an indirect side places outside its tensor raise (oob_mode.error) or stay untouched (skip). Rows by a
    vector offset are not for dge_mode.hwdge; engine sync and scalar are for it only.
    """
    check_tensors("dma_copy", dst=dst, src=src)
    if priority is not None and integer(priority, "priority") < 0:
        raise NkiValidationError("dma_copy", "priority", f"{priority} is negative")
    queue, mode = (
        operands.code(engine, constants.engine),
        constants.dge_mode(operands.code(dge_mode, constants.dge_mode)),
    )
    if mode is constants.dge_mode.hwdge and (dst.index is not None or src.index is not None):
        raise NkiValidationError("dma_copy", "dge_mode", "hwdge cannot take rows by a vector offset: swdge can")
    if queue in (_core.ENGINES["sync"], _core.ENGINES["scalar"]) and mode in (
        constants.dge_mode.swdge, constants.dge_mode.none
    ):  # fmt: skip
        raise NkiValidationError(
            "dma_copy", "engine", f"{constants.engine(queue).name} needs dge_mode hwdge, not {mode.name}"
        )
    if mode is constants.dge_mode.hwdge and dst.dtype != src.dtype:
        raise NkiValidationError("dma_copy", "dge_mode", f"hwdge does not convert {src.dtype} to {dst.dtype}")
    return emit(
        "dma_copy",
        0,
        (dst, src),
        {"oob_mode": operands.code(oob_mode, constants.oob_mode), "dge_mode": mode.value},
    )


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: object,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> Instruction:
    """dst = sum of up to 16 srcs in fp32, of dst's element count. An indirect dst adds rows up in order."""
    if ops.alu(reduce_op) != _core.ALU_OPS["add"]:
        raise NkiValidationError("dma_compute", "reduce_op", "must be add")
    if scales is not None and any(s != 1.0 for s in scales):
        raise NkiValidationError("dma_compute", "scales", "must be 1.0")
    if not 1 <= len(srcs) <= 16:
        raise NkiValidationError("dma_compute", "srcs", f"must be 1 to 16 tensors, not {len(srcs)}")
    attrs = {"oob_mode": operands.code(oob_mode, constants.oob_mode)}
    if len(srcs) <= 2:
        return emit("dma_compute", 0, (dst, *srcs), attrs)
    from .language import ndarray
    from .session import hbm

    total = ndarray(dst.shape, dtypes.float32, hbm)  # the fp32 sum that the DMA engines carry along
    emit("dma_compute", 0, (total, srcs[0], srcs[1]), attrs)
    for s in srcs[2:-1]:
        emit("dma_compute", 0, (total, total, s), attrs)
    return emit("dma_compute", 0, (dst, total, srcs[-1]), attrs)


_TRANSPOSITIONS = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> Instruction:
    """dst = src with axes (1, 0), (2, 1, 0) or (3, 1, 2, 0), by rank; dst in SBUF, same dtype. src's rows may be
    gathered by a vector offset first."""
    check_tensors("dma_transpose", dst=dst, src=src)
    order = tuple(axes) if axes is not None else _TRANSPOSITIONS.get(src.ndim)
    if order != _TRANSPOSITIONS.get(src.ndim):
        raise NkiValidationError("dma_transpose", "axes", f"{order} of {src.ndim} dimensions are not supported")
    expected = tuple(src.shape[a] for a in order)
    if dst.shape != expected and dst.size != src.size:
        raise NkiValidationError("dma_transpose", "dst", f"shape {dst.shape} is not {expected}")
    mode = constants.dge_mode(operands.code(dge_mode, constants.dge_mode))
    if mode is constants.dge_mode.hwdge:
        _check_hardware_transpose(src)
    return emit(
        "dma_transpose",
        0,
        (dst, src),
        {
            "oob_mode": operands.code(oob_mode, constants.oob_mode),
            "dge_mode": mode.value,
        },
        order,
    )


def _check_hardware_transpose(src: NkiTensor) -> None:
    """What descriptors made by hardware transpose."""
    rows, columns = src.shape[0], src.shape[-1]
    fits = rows == 16 if src.ndim == 2 else rows in (1, 2, 4, 8, 16) and rows * src.shape[-2] % 16 == 0
    if src.dtype.itemsize != 2 or columns > 128 or not fits:
        raise NkiValidationError(
            "dma_transpose", "dge_mode",
            f"hwdge cannot transpose {src.shape} of {src.dtype}: elements of 2 bytes, last dimension up to 128, first "
            "16 (2-D) or 1 to 16 that make with the last but one a multiple of 16",
        )  # fmt: skip


def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown, name: str | None = None, dtype: object = None
) -> Instruction:
    """dst = src: bit-exact for one dtype, else through fp32. dtype: accepted as older kernels pass it, unused."""
    return emit("tensor_copy", operands.code(engine, constants.engine), (dst, src))


def memset(dst: NkiTensor, value: float, engine: engine = engine.unknown, name: str | None = None) -> Instruction:
    """dst = value. An integer dst takes an integer value; packed types take 0 only."""
    check_tensors("memset", dst=dst)
    number = operands.number(value, "value")
    if dtypes.is_integer(dst.dtype):
        limits = np.iinfo(np.uint8 if dst.dtype == dtypes.bool_ else str(dst.dtype))
        if not (number.is_integer() and limits.min <= number <= limits.max):
            raise NkiValidationError("memset", "value", f"{value} does not fit dtype {dst.dtype}")
    if dtypes.is_packed(dst.dtype) and value != 0:
        raise NkiValidationError("memset", "value", f"of {dst.dtype} must be 0")
    return emit("memset", operands.code(engine, constants.engine), (dst,), {"value": number})


def tensor_copy_predicated(
    dst: NkiTensor, src: NkiTensor | float, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> Instruction:
    """dst = src where predicate is not zero (reverse_pred: is zero); dst keeps its value elsewhere."""
    return emit(
        "tensor_copy_predicated", 0, (dst, src, predicate),
        {"reverse0": reverse_pred},
    )  # fmt: skip


def assign(dst: NkiTensor, value: NkiTensor | float) -> None:
    """`dst[...] = value`."""
    if not isinstance(value, NkiTensor):
        memset(dst, value)
    elif dst.on_chip and value.on_chip:
        tensor_copy(dst, value)
    else:
        dma_copy(dst, value)


# ---- TensorE -------------------------------------------------------------------------------------------------------
def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Sequence[int] = (),
    tile_size: Sequence[int] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> Instruction:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N] in fp32, dst in PSUM.

    accumulate: False overwrites, True adds, None overwrites what was not written since dst's allocation and adds to the
    rest. perf_mode double_row: fp8 operands [K, 2, M] and [K, 2, N], summed over both. is_transpose: dst =
    stationary.T bit by bit (moving is the identity).
    """
    _check_tiling("nc_matmul", tile_position, tile_size)
    return emit(
        "nc_matmul", 0, (dst, stationary, moving),
        {
            "transpose": is_transpose,
            "accumulate": _AUTOMATIC if accumulate is None else (_ADD if accumulate else _OVERWRITE),
            "perf_mode": operands.code(perf_mode, matmul_perf_mode),
        },
    )  # fmt: skip


def _check_tiling(instruction: str, position: Sequence[int] | None, size: Sequence[int] | None) -> None:
    """Tiles of the array of 128 x 128: sizes 32, 64, 128 at multiples of themselves."""
    position, size = operands.integers(position or (), "tile_position"), operands.integers(size or (), "tile_size")
    for operand, pair in (("tile_position", position), ("tile_size", size)):
        if len(pair) > 2:
            raise NkiValidationError(instruction, operand, f"{pair} must be (row, column)")
    for p in position:
        if not 0 <= p < 128:
            raise NkiValidationError(instruction, "tile_position", f"{p} must be in 0 .. 127")
    smallest = 64 if current().target.generation < 3 else 32  # rows of a tile
    if size and size[0] < smallest:
        raise NkiValidationError(instruction, "tile_size", f"{size[0]} rows are not supported before trn2")
    for p, s in zip(position, size):
        if s not in (32, 64, 128):
            raise NkiValidationError(instruction, "tile_size", f"{s} must be 32, 64 or 128")
        if p % s:
            raise NkiValidationError(instruction, "tile_position", f"{p} must be a multiple of the tile size {s}")


def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Sequence[int] | None = None,
    tile_size: Sequence[int] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> Instruction:
    """nc_matmul of packed MX types (x4): values times 2^(scale - 127), contracted over P * 4."""
    _check_tiling("nc_matmul_mx", tile_position, tile_size)
    return emit(
        "nc_matmul_mx", 0,
        (dst, stationary, moving, stationary_scale, moving_scale),
        {"accumulate": _AUTOMATIC if accumulate is None else (_ADD if accumulate else _OVERWRITE)},
    )  # fmt: skip


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> Instruction:
    """dst[F, P] = data[P, F].T, same dtype. TensorE writes PSUM, up to 128 x 128; VectorE up to 32 x 32."""
    check_tensors("nc_transpose", dst=dst, data=data)
    e = operands.code(engine, constants.engine) or (
        _core.ENGINES["tensor"] if dst.buffer is psum and data.buffer is not psum else _core.ENGINES["vector"]
    )
    return emit("nc_transpose", e, (dst, data))


# ---- elementwise ---------------------------------------------------------------------------------------------------
def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: object,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> Instruction:
    """dst = data1 op data2 in fp32. 32-bit integers (all operands, none in PSUM) go to GpSimdE, which is exact."""
    check_tensors("tensor_tensor", dst=dst, data1=data1, data2=data2)
    code, e = ops.alu(op), operands.code(engine, constants.engine)
    if e == 0:
        tensors = (dst, data1, data2)
        exact = all(t.dtype in (dtypes.int32, dtypes.uint32) for t in tensors) and not ops.is_bitwise(code)
        if (exact or code == _core.ALU_OPS["power"]) and all(t.buffer is not psum for t in tensors):
            e = _core.ENGINES["gpsimd"]
    return emit("tensor_tensor", e, (dst, data1, data2), {"op0": code})


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: object,
    operand0: NkiTensor | float,
    reverse0: bool = False,
    op1: object = None,
    operand1: NkiTensor | float | None = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> Instruction:
    """dst = (data op0 operand0) op1 operand1; operands are scalars. reverse0/1 swap the sides of op0/1."""
    return emit(
        "tensor_scalar", operands.code(engine, constants.engine),
        (dst, data, 0.0 if operand0 is None else operand0, operand1),
        {"op0": ops.alu(op0), "op1": ops.alu(op1), "reverse0": reverse0, "reverse1": reverse1},
    )  # fmt: skip


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: object,
    operand0: NkiTensor | float,
    op1: object,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
    **legacy: object,
) -> Instruction:
    """dst = (data op0 operand0) op1 operand1 with a scalar operand0 and a tile operand1."""
    return emit(
        "scalar_tensor_tensor", 0,
        (dst, data, operand0, operand1),
        {"op0": ops.alu(op0), "op1": ops.alu(op1), "reverse0": reverse0, "reverse1": reverse1},
    )  # fmt: skip


def activation(
    dst: NkiTensor,
    op: object,
    data: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
    reduce_op: object = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> Instruction:
    """dst = op(data * scale + bias). reduce_cmd adds the results of a partition to ScalarE's register, which reduce_res
    [P, 1] gets."""
    return emit(
        "activation", 0,
        (dst, data, bias, scale, reduce_res),
        {
            "function": ops.function(op),
            "reduce_op": ops.alu(reduce_op) if reduce_op is not None else _core.ALU_OPS["add"],
            "reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd),
        },
    )  # fmt: skip


def activation_reduce(
    dst: NkiTensor,
    op: object,
    data: NkiTensor,
    reduce_op: object,
    reduce_res: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
    name: str | None = None,
) -> Instruction:
    """activation that resets the register, adds its results and stores the sum in reduce_res [P, 1]."""
    return activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce)


_ACTIVATE2 = {("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
              ("subtract", "bypass"), ("bypass", "bypass")}  # fmt: skip


def activate2(
    dst: NkiTensor,
    op: object,
    data: NkiTensor,
    imm0: NkiTensor | float,
    imm1: NkiTensor | float,
    op0: object,
    op1: object,
    relu_param: NkiTensor | float = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: object = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> Instruction:
    """dst = op((data op0 imm0) op1 imm1) (trn3); relu_param is prelu's slope."""
    names = {code: text for text, code in _core.ALU_OPS.items()}
    pair = (names[ops.alu(op0)], names[ops.alu(op1)])
    if pair not in _ACTIVATE2:
        raise NkiValidationError("activate2", "op0, op1", f"{pair} are none of its pairs of operators")
    return emit(
        "activate2", 0,
        (dst, data, 0.0 if imm0 is None else imm0, 0.0 if imm1 is None else imm1, relu_param,
         reduce_res),
        {
            "function": ops.function(op), "op0": ops.alu(op0), "op1": ops.alu(op1), "reverse0": reverse0,
            "reverse1": reverse1, "reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd),
            "reduce_op": ops.alu(reduce_op) if reduce_op is not None else _core.ALU_OPS["add"],
        },
    )  # fmt: skip


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: NkiTensor | float = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_init: NkiTensor | float = 0.0,
    name: str | None = None,
) -> Instruction:
    """dst = exp(src - max_value) on VectorE (trn3), with a running sum as in activation."""
    return emit(
        "exponential", 0,
        (dst, src, max_value, reduce_res, reduce_init),
        {"reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd)},
    )  # fmt: skip


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Instruction:
    """dst = 1 / data."""
    return emit("reciprocal", 0, (dst, data))


def dropout(dst: NkiTensor, data: NkiTensor, prob: NkiTensor | float, name: str | None = None) -> Instruction:
    """dst = 0 with probability prob, else data (not rescaled)."""
    return emit("dropout", 0, (dst, data, prob))


# ---- reductions and scans ------------------------------------------------------------------------------------------
def tensor_reduce(
    dst: NkiTensor,
    op: object,
    data: NkiTensor,
    axis: int | Sequence[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = op over trailing free axes of data (the last axis must be among them, the partition axis not)."""
    check_tensors("tensor_reduce", dst=dst, data=data)
    axes = sorted(data._dim(a) for a in (axis if isinstance(axis, Iterable) else (axis,)))
    if not axes or axes[0] == 0 or axes != list(range(axes[0], data.ndim)):
        raise NkiValidationError("tensor_reduce", "axis", f"{axis} must be trailing free axes of {data.shape}")
    run = 1
    for a in axes:
        run *= data.shape[a]
    return emit(
        "tensor_reduce", 0, (dst, data),
        {"op0": ops.alu(op), "negate": negate, "count": run},
    )  # fmt: skip


def tensor_partition_reduce(dst: NkiTensor, op: object, data: NkiTensor, name: str | None = None) -> Instruction:
    """dst[1, F] = op over the partitions of data[P, F]; op add, average, max, bitwise_or, bitwise_and."""
    check_tensors("tensor_partition_reduce", dst=dst, data=data)
    if dst.shape[0] != 1 or dst.free_size != data.free_size:
        raise NkiValidationError("tensor_partition_reduce", "dst", f"shape {dst.shape} is not (1, {data.free_size})")
    return emit("tensor_partition_reduce", 0, (dst, data), {"op0": ops.alu(op)})


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: object,
    operand0: NkiTensor | float,
    reduce_op: object,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: NkiTensor | float | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = data op0 operand0; register = reduce_op over the results of a partition; reduce_res [P, 1] = register."""
    return emit(
        "tensor_scalar_reduce", 0,
        (dst, data, operand0, reduce_res, reduce_init),
        {
            "op0": ops.alu(op0), "reduce_op": ops.alu(reduce_op), "reverse0": reverse0,
            "reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd), "negate": reduce_res_negate,
        },
    )  # fmt: skip


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: object,
    op1: object,
    imm0: NkiTensor | float,
    imm1: NkiTensor | float | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> Instruction:
    """register = op1(op0(src[i], imm0), register); dst[i] = register. load_reduce starts with imm1."""
    return emit(
        "tensor_scalar_cumulative", 0, (dst, src, imm0, imm1),
        {"op0": ops.alu(op0), "op1": ops.alu(op1), "reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd)},
    )  # fmt: skip


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: NkiTensor | float,
    op0: object,
    op1: object,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst[i] = op1(op0(data0[i], dst[i-1]), data1[i]) along each partition, dst[-1] = initial; state in fp32."""
    return emit(
        "tensor_tensor_scan", 0, (dst, data0, data1, initial),
        {"op0": ops.alu(op0), "op1": ops.alu(op1), "reverse0": reverse0, "reverse1": reverse1},
    )  # fmt: skip


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: NkiTensor | float,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: object = "maximum",
    reverse_pred: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = on_true where predicate is not zero (reverse_pred: is zero), else on_false; with a running maximum."""
    return emit(
        "select_reduce", 0,
        (dst, predicate, on_true, on_false, reduce_res),
        {
            "reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd), "reduce_op": ops.alu(reduce_op),
            "reverse0": reverse_pred,
        },
    )  # fmt: skip


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: object,
    comp_op1: object,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: object = "maximum",
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> Instruction:
    """dst = on_true_tile where comp_op0(i, bound0) and comp_op1(i, bound1), i = range_start + free index; else
    on_false_value; with a running maximum."""
    return emit(
        "range_select", 0,
        (dst, on_true_tile, bound0, bound1, reduce_res),
        {
            "op0": ops.alu(comp_op0), "op1": ops.alu(comp_op1), "reduce_op": ops.alu(reduce_op),
            "reduce_cmd": operands.code(reduce_cmd, constants.reduce_cmd),
            "offset": integer(range_start, "range_start"),
            "value": operands.number(on_false_value, "on_false_value"),
        },
    )  # fmt: skip


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: object = "equal",
    offset: int = 0,
    name: str | None = None,
) -> Instruction:
    """v = offset + p * channel_multiplier + sum of index * step over pattern [[step, count], ...]; dst = on_true_tile
    where cmp_op(v, 0), else on_false_value."""
    return emit(
        "affine_select", 0, (dst, on_true_tile),
        {"op0": ops.alu(cmp_op), "offset": offset, "channel_multiplier": channel_multiplier,
         "value": operands.number(on_false_value, "on_false_value")},
        operands.pattern(pattern),
    )  # fmt: skip


def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> Instruction:
    """dst = offset + p * channel_multiplier + sum of index * step over pattern [[step, count], ...], in int32."""
    return emit(
        "iota", 0, (dst,),
        {
            "offset": integer(offset, "offset"),
            "channel_multiplier": integer(channel_multiplier, "channel_multiplier"),
        },
        operands.pattern(pattern),
    )  # fmt: skip


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Instruction:
    """dst[P, 6] = (count, mean, count * variance) of the even and of the odd elements of data[P, F <= 512]."""
    return emit("bn_stats", 0, (dst, data))


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Instruction:
    """dst[P, 2] = mean and variance of merged (count, mean, count * variance) triples."""
    return emit("bn_aggr", 0, (dst, data))


# ---- search and gather ---------------------------------------------------------------------------------------------
def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> Instruction:
    """dst[P, 8] = the 8 largest of each partition, descending."""
    return emit("max8", 0, (dst, src))


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> Instruction:
    """dst[P, 8] = first index of each of vals[P, 8] in data; equal values take later indices; all ones: missing."""
    return emit("nc_find_index8", 0, (dst, data, vals))


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> Instruction:
    """dst = data with the first match of each of vals[P, 8] replaced by imm; dst_idx [P, 8]: where."""
    return emit("nc_match_replace8", 0, (dst, data, vals, dst_idx), {"value": operands.number(imm, "imm")})


def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> Instruction:
    """In every group of 32 partitions dst[i] = src[shuffle_mask[i]]; 255 keeps dst[i]."""
    mask = operands.integers(shuffle_mask, "shuffle_mask")
    if len(mask) != 32:
        raise NkiValidationError("nc_stream_shuffle", "shuffle_mask", f"has {len(mask)} entries, not 32")
    return emit("nc_stream_shuffle", 0, (dst, src), {}, mask)


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> Instruction:
    """Each group of 16 partitions gathers runs of num_elem_per_idx elements that begin where the 16 rows of its part of
    index, read column by column, say."""
    return emit(
        "local_gather", 0, (dst, src_buffer, index),
        {"count": num_elem_per_idx, "group": num_valid_indices or 0},
    )  # fmt: skip


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> Instruction:
    """dst[p, i] = data[p, indices[p, i]]."""
    return emit("nc_n_gather", 0, (dst, data, indices))


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> Instruction:
    """Of partitions 0, 16, 32, ...: dst = indices of non-zero elements + index_offset, padding_val after them, and
    their count in the last element; dst [P, F + 1] int32."""
    attrs = {"offset": integer(index_offset, "index_offset"), "value": operands.number(padding_val, "padding_val")}
    return emit("nonzero_with_count", 0, (dst, src), attrs)


def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> Instruction:
    """dst[1, 2, n]: start and end of the run of equal ids around each element of segment_ids[1, n]; id 0: n and -1."""
    return emit("sequence_bounds", 0, (dst, segment_ids))


def topk(val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None) -> Instruction:
    """Each partition of val_dst and idx_dst: the largest values (as many as val_dst has elements there, ascending) and
    their positions of the stream of n elements in its 16 partitions, element i in partition i % 16."""
    if not 8 <= n < 65536:
        raise NkiValidationError("topk", "n", f"{n} must be in 8 .. 65535")
    return emit("topk", 0, (val_dst, idx_dst, src), {"count": n})


def quantize_mx(dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None) -> Instruction:
    """dst (x4 type) and dst_scale = MX quantisation of src [P, F]: 8 partitions by 4 elements share a power of two.

    The scale leaves one binade of headroom (API 0.5 on); TORCH_NEURON_MX_SCALE=ocp follows the OCP rule, as API 0.3.
    """
    headroom = env.MX_SCALE.get() != "ocp"
    return emit("quantize_mx", 0, (dst, src, dst_scale), {"count": headroom})


# ---- random numbers ------------------------------------------------------------------------------------------------
def rng(dst: NkiTensor, engine: engine = engine.vector, name: str | None = None) -> Instruction:
    """dst = random bits (integers) or uniform [0, 1) (floats)."""
    return emit("rng", operands.code(engine, constants.engine), (dst,))


def rand2(dst: NkiTensor, min: NkiTensor | float, max: NkiTensor | float, name: str | None = None) -> Instruction:
    """dst = uniform between min and max (trn3)."""
    return emit("rand2", 0, (dst, min, max))


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> Instruction:
    """Seeds every generator from a [1, 1] integer tile."""
    return emit("set_rng_seed", 0, (src_seeds,))


def rand_set_state(src_seeds: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None) -> Instruction:
    """State of each partition's generator of an engine = its row: 6 words on GpSimdE, 24 on VectorE."""
    return emit("rand_set_state", operands.code(engine, constants.engine), (src_seeds,))


def rand_get_state(dst: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None) -> Instruction:
    """dst row = state of the partition's generator."""
    return emit("rand_get_state", operands.code(engine, constants.engine), (dst,))


# ---- cores ---------------------------------------------------------------------------------------------------------
def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> Instruction:
    """dst = src of core recv_from_rank, which gets this core's src (send_to_rank), through one pipe."""
    queue = operands.code(dma_engine, constants.dma_engine)
    check_tensors("sendrecv", src=src, dst=dst)
    if (src.shape[0], src.free_size, src.dtype) != (dst.shape[0], dst.free_size, dst.dtype):
        raise NkiValidationError(
            "sendrecv", "dst", f"shape {dst.shape} and dtype {dst.dtype} are not src's, {src.shape} and {src.dtype}"
        )
    limit = 256 * src.dtype.itemsize  # bytes of a partition that GpSimdE's own exchange moves
    if queue == constants.dma_engine.gpsimd_dma.value and (size := src.free_size * src.dtype.itemsize) > limit:
        raise NkiValidationError(
            "sendrecv", "src", f"has {size} bytes per partition, gpsimd_dma exchanges {limit} of {src.dtype}"
        )
    cores = current().launch.lnc
    to = operands.member(send_to_rank, "send_to_rank", cores, "core")
    source = operands.member(recv_from_rank, "recv_from_rank", cores, "core")
    if to != source:
        raise NkiValidationError("sendrecv", "recv_from_rank", f"{source} is not send_to_rank {to}: two cores exchange")
    pipe = operands.member(pipe_id, "pipe_id", 1 << 31, "pipe")
    attrs = {"offset": to, "count": source, "group": pipe, "dge_mode": queue}
    return emit("sendrecv", 0, (src, dst), attrs)


def core_barrier(
    data: NkiTensor, cores: Sequence[int], engine: engine = engine.gpsimd, name: str | None = None
) -> Instruction:
    """Goes on when all `cores` have arrived; data (shared_hbm, or SBUF as published kernels have it) moves nothing.

    In a launch of one core there is nobody to wait for.
    """
    session, e = current(), operands.code(engine, constants.engine)
    if session.launch.lnc == 1:
        return Instruction("core_barrier")
    ids = operands.members(cores, "cores", session.launch.lnc, "core", session.program_id)
    return emit("core_barrier", e, (data,), {}, ids)


# ---- registers -----------------------------------------------------------------------------------------------------
def register_alloc(x: int | None = None) -> Register:
    """A new register, with value x if given."""
    r = Register(current().program.add_register())
    if isinstance(x, NkiTensor):
        register_load(r, x)
    else:
        register_move(r, 0 if x is None else x)
    return r


def _writable(dst: Register) -> int:
    assert not dst.frozen, "the index of a dynamic loop, and what is computed from registers, cannot be written"
    dst.bound("reg")  # of this kernel
    return dst.id


def register_move(dst: Register, src: int | Register) -> Instruction:
    """dst = src."""
    return emit("register_move", 0, (), {"reg": _writable(dst), **operands.bound(src, "start")})


def register_load(dst: Register, src: NkiTensor) -> Instruction:
    """dst = the element of a one-element tensor."""
    return emit("register_load", 0, (src,), {"reg": _writable(dst)})


def register_store(dst: NkiTensor, src: Register) -> Instruction:
    """The element of a one-element tensor = src."""
    return emit("register_store", 0, (dst,), operands.bound(src, "start"))
