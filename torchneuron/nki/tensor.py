"""NkiTensor: a typed view of memory, and registers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from . import dtypes, errors
from .session import Buffer, Storage, current

NONE, ROWS, ELEMENTS = 0, 1, 2  # how an access is indexed (Access::Indexing)
MAX_DIMS = 6


def integer(value: object, operand: str) -> int:
    """`value` as an int; NkiValidationError if it is none, DataDependentError if it is a register without a value."""
    try:
        return operator.index(value)
    except errors.DataDependentError:
        raise
    except TypeError:
        raise errors.NkiValidationError("", operand, f"{value!r} is not an integer") from None


class Register:
    """A 32-bit register of the core's sequencers, or scale * register + offset.

    + and - of registers and numbers and * with a number are computed by the device. Step by step a register has a value
    (int(r), `if r`, comparisons, other operators); traced it has none: TypeError.
    """

    __slots__ = ("id", "scale", "offset", "frozen", "session")

    def __init__(self, id: int, scale: int = 1, offset: int = 0, frozen: bool = False) -> None:
        self.id, self.scale, self.offset, self.frozen = id, scale, offset, frozen
        self.session = current()
        if not (-(2**31) <= scale < 2**31 and -(2**31) <= offset < 2**31):
            raise errors.NkiValidationError("register", "", f"* {scale} + {offset} does not fit its 32 bits")

    def bound(self, name: str) -> dict[str, int]:
        """The value as attributes of an instruction."""
        if self.session is not current():
            raise errors.NkiValidationError("", name, f"{self!r} belongs to another kernel")
        return {f"{name}_reg": self.id, f"{name}_scale": self.scale, name: self.offset}

    def _value(self) -> int:
        if not self.session.step:
            raise errors.DataDependentError("the value of a register is known only when the kernel runs")
        self.session.read_values = True
        return self.session.core.reg(self.id) * self.scale + self.offset

    def __index__(self) -> int:
        return self._value()

    __int__ = __index__

    def __bool__(self) -> bool:
        return self._value() != 0

    def __add__(self, other: int | Register) -> Register:
        if isinstance(other, Register):
            return _sum(self.bound("start"), other.bound("stop"))
        return Register(self.id, self.scale, self.offset + integer(other, "summand"), True)

    __radd__ = __add__

    def __neg__(self) -> Register:
        return self * -1

    def __sub__(self, other: int | Register) -> Register:
        return self + -other

    def __rsub__(self, other: int) -> Register:
        return -self + other

    def __mul__(self, other: int | Register) -> Register:
        factor = int(other) if isinstance(other, Register) else integer(other, "factor")
        return Register(self.id, self.scale * factor, self.offset * factor, True)

    __rmul__ = __mul__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        scale, offset = ("" if self.scale == 1 else f"*{self.scale}"), (f"+{self.offset}" if self.offset else "")
        return f"VirtualRegister(r{self.id}{scale}{offset})"


def _by_value(name: str) -> None:
    """Gives Register an operator that needs its value, and perhaps the other side's."""
    function = getattr(operator, f"__{name}__")

    def method(self: Register, other: object) -> object:
        return function(int(self), int(other) if isinstance(other, Register) else other)

    setattr(Register, f"__{name}__", method)


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "floordiv", "truediv", "mod", "and", "or", "xor", "lshift", "rshift"):
    _by_value(_name)


def _sum(start: dict[str, int], stop: dict[str, int]) -> Register:
    """A new register with the sum of two."""
    session = current()
    r = Register(session.program.add_register(), frozen=True)
    session.emit("register_move", 0, (), {"reg": r.id, **start, **stop})
    return r


_FIRST = "on chip the partition dimension stays first"
_ROWS = "takes rows (dimension 0) of an HBM tensor"


class ds:
    """A slice of `size` elements from `start`; start may be a register."""

    __slots__ = ("start", "size")

    def __init__(self, start: int | Register, size: int) -> None:
        self.start, self.size = start, size


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


class NkiTensor:
    """A view: element (i0, i1, ...) of dtype is at offset + sum of strides[k] * i_k elements of the storage.

    On chip dimension 0 runs over partitions. A view may also move with a register (reg, reg_stride) or take its rows or
    elements from a tensor of indices.
    """

    __slots__ = (
        "storage", "dtype", "shape", "strides", "offset", "reg", "reg_stride", "indexing", "index", "index_stride",
        "index_limit", "reach", "_packed",
    )  # fmt: skip

    def __init__(
        self,
        storage: Storage,
        dtype: dtypes.DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        reg: int = -1,
        reg_stride: int = 0,
        indexing: int = NONE,
        index: NkiTensor | None = None,
        index_stride: int = 0,
        index_limit: int = 0,
        reach: tuple[int, int] | None = None,
    ) -> None:
        self.storage, self.dtype, self.shape, self.strides, self.offset = storage, dtype, shape, strides, offset
        self.reg, self.reg_stride = reg, reg_stride
        self.indexing, self.index, self.index_stride, self.index_limit = indexing, index, index_stride, index_limit
        self.reach = reach  # elements that the register may add
        self._packed = None

    # ---- facts
    @property
    def buffer(self) -> Buffer:
        return self.storage.buffer

    @property
    def base_tensor(self) -> NkiTensor:
        """The tensor that this is a view of, as it was made: all of it, in its own shape and type."""
        s = self.storage
        return NkiTensor(s, s.dtype, s.shape, row_major(s.shape))

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def on_chip(self) -> bool:
        return self.storage.buffer.on_chip

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        return math.prod(self.shape[1:])

    def is_whole(self) -> bool:
        """All of the tensor that it is a view of, as that was made."""
        s = self.storage
        same = (self.shape, self.dtype, self.strides, self.offset) == (s.shape, s.dtype, row_major(s.shape), 0)
        return same and not self.is_indirect()

    def is_contiguous(self) -> bool:
        """Row-major without gaps; on chip within each partition."""
        first = 1 if self.on_chip else 0
        expected = row_major(self.shape)
        return all(s == e for s, e, n in zip(self.strides[first:], expected[first:], self.shape[first:]) if n != 1)

    def is_indirect(self) -> bool:
        return self.indexing != NONE or self.reg >= 0

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] in elements."""
        return [[s, n] for s, n in zip(self.strides, self.shape)]

    def __repr__(self) -> str:
        text = f"NkiTensor({self.name!r}, shape={self.shape}, dtype={self.dtype}, buffer={self.buffer!r}"
        if self.storage.session.step and not self.is_indirect():
            return f"{text})\n{self.numpy()}"
        return text + ")"

    def numpy(self) -> np.ndarray:
        """A copy of the values. Only step by step: TypeError while tracing."""
        session = self.storage.session
        if not session.step:
            raise errors.DataDependentError("a tensor's values are known only when the kernel runs")
        session.read_values = True
        t = dtypes.numpy_dtype(self.dtype)
        address, pitch = session.core.memory(self.storage.id)
        rows = self.storage.shape[0] if self.on_chip else 1
        raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (rows * pitch)).from_address(address))
        offset, strides = self.offset * t.itemsize, [s * t.itemsize for s in self.strides]
        if self.on_chip:
            row = self.storage.row_elements * self.storage.dtype.itemsize
            offset = offset // row * pitch + offset % row
            strides[0] = pitch
        return np.ndarray(self.shape, t, raw.data, offset, strides).copy()

    # ---- what an instruction gets
    def access(self) -> tuple:
        """The access as the core takes it."""
        packed = self._packed
        if packed is None:
            if len(self.shape) > MAX_DIMS:
                raise errors.NkiValidationError(
                    "", self.name, f"has {len(self.shape)} dimensions, an operand has at most {MAX_DIMS}"
                )
            packed = (self.storage.id, self.dtype.code, self.offset, tuple(zip(self.strides, self.shape)))
            if self.is_indirect():
                packed += (
                    self.reg,
                    self.reg_stride,
                    self.indexing,
                    self.index_stride,
                    self.index_limit,
                    None if self.index is None else self.index.access(),
                    self.reach,
                )
            self._packed = packed
        return packed

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> NkiTensor:
        shape, strides, offset = tuple(shape), tuple(strides), self.offset if offset is None else offset
        same = (shape, strides, offset) == (self.shape, self.strides, self.offset)
        rows = shape[:1] == self.shape[:1] and strides[:1] == self.strides[:1]
        if not same and (self.indexing == ELEMENTS or (self.indexing == ROWS and not rows)):
            raise errors.NkiValidationError(
                "", self.name, "by an index stays as it is: take a part of the index, or a view before it"
            )
        return NkiTensor(
            self.storage, self.dtype, shape, strides, offset,
            self.reg, self.reg_stride, self.indexing, self.index, self.index_stride, self.index_limit, self.reach,
        )  # fmt: skip

    def _retyped(self, new: dtypes.DType, shape: Sequence[int], strides: Sequence[int], offset: int) -> NkiTensor:
        """A view of this one's elements as another type; offset in its elements."""
        if self.indexing == ELEMENTS and new.itemsize != self.dtype.itemsize:
            raise errors.NkiValidationError("", self.name, f"by indirect() cannot be seen as {new}")
        return NkiTensor(
            self.storage, new, tuple(shape), tuple(strides), offset,
            self.reg, self._count_of(new, self.reg_stride, "a register's step"),
            self.indexing, self.index, self._count_of(new, self.index_stride, "a row") if self.indexing == ROWS else
            self.index_stride, self.index_limit,
            self.reach and tuple(n * self.dtype.itemsize // new.itemsize for n in self.reach),
        )  # fmt: skip

    def _count_of(self, new: dtypes.DType, elements: int, what: str) -> int:
        """So many elements of this type in elements of another."""
        count, rest = divmod(elements * self.dtype.itemsize, new.itemsize)
        if rest:
            raise errors.NkiValidationError(
                "", self.name, f"as {new}: {what}, {elements} elements of {self.dtype}, is no whole number of those"
            )
        return count

    def _dim(self, dim: int) -> int:
        d = integer(dim, "dimension")
        if not -self.ndim <= d < self.ndim:
            raise errors.NkiOutOfBoundsError("", self.name, f"of {self.ndim} dimensions has no dimension {d}")
        return d % self.ndim

    # ---- indexing
    def __getitem__(self, key: object) -> NkiTensor:
        keys = key if isinstance(key, tuple) else (key,)
        ellipses = [i for i, k in enumerate(keys) if k is Ellipsis]
        if len(ellipses) > 1:
            raise errors.NkiValidationError("index", self.name, f"has {len(ellipses)} ellipses: one at most")
        if ellipses:
            at = ellipses[0]
            fill = self.ndim - (len(keys) - 1)
            keys = keys[:at] + (slice(None),) * fill + keys[at + 1 :]
        if len(keys) > self.ndim:
            raise errors.NkiOutOfBoundsError("index", self.name, f"of {self.ndim} dimensions has {len(keys)} indices")
        shape, strides, offset = [], [], self.offset
        moves: list[tuple[Register, int, int]] = []  # and elements per unit, its largest value
        chip = self.on_chip
        for d, n in enumerate(self.shape):
            k = keys[d] if d < len(keys) else slice(None)
            stride = self.strides[d]
            if isinstance(k, slice):
                if isinstance(k.start, Register) or isinstance(k.stop, Register):
                    raise errors.NkiValidationError(
                        "index", self.name, "by a slice of unknown size: take nl.ds(register, size)"
                    )
                start, stop, step = _bounds(k, n, d, self)
                count = max(0, -(-(stop - start) // step))
                offset += start * stride
                shape.append(count)
                strides.append(stride * step)
                continue
            if isinstance(k, ds):
                size = integer(k.size, "nl.ds size")
                if isinstance(k.start, Register):
                    moves.append((k.start, stride, n - size))
                else:
                    start = integer(k.start, "nl.ds start")
                    if start < 0 or size < 0 or start + size > n:
                        raise errors.NkiOutOfBoundsError(
                            "index",
                            self.name,
                            f"slice {start}:{start + size} is out of bounds for dimension {d} of size {n}",
                        )
                    offset += start * stride
                if not 0 <= size <= n:
                    raise errors.NkiOutOfBoundsError(
                        "index", self.name, f"nl.ds of size {size} is out of bounds for dimension {d} of size {n}"
                    )
                shape.append(size)
                strides.append(stride)
                continue
            keep = chip and (d == 0 or (d == self.ndim - 1 and len(shape) < 2))
            if isinstance(k, NkiTensor):
                k = load_register(k)
            if isinstance(k, Register):
                moves.append((k, stride, n - 1))
            else:
                i = integer(k, "index")
                if not -n <= i < n:
                    raise errors.NkiOutOfBoundsError(
                        "index", self.name, f"{i} is out of bounds for dimension {d} of size {n}"
                    )
                offset += (i % n) * stride
            if keep:
                shape.append(1)
                strides.append(stride)
        if not shape:
            shape, strides = [1], [1]
        view = self._view(shape, strides, offset)
        for register, stride, largest in moves:
            view._move(register, stride, largest)
        return view

    def _move(self, by: Register, stride: int, largest: int | None = None) -> None:
        """Moves this view by a register's value, which is 0 to `largest` if given, times so many elements."""
        bound, first = by.bound("stop"), self.reg < 0
        if largest is None:
            self.reach = None
        elif first or self.reach:
            ends = sorted((-by.offset * stride * first, (largest - by.offset * first) * stride))
            self.reach = (ends[0], ends[1]) if first else (self.reach[0] + ends[0], self.reach[1] + ends[1])
        if first:
            self.reg, self.reg_stride, self.offset = by.id, by.scale * stride, self.offset + by.offset * stride
            return
        both = {"start_reg": self.reg, "start_scale": self.reg_stride}
        self.reg, self.reg_stride = (
            _sum(both, {k: v if k == "stop_reg" else v * stride for k, v in bound.items()}).id,
            1,
        )

    def __setitem__(self, key: object, value: object) -> None:
        from . import isa

        isa.assign(self[key], value)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> object:
        raise TypeError("NkiTensor is not iterable: index it")

    # ---- views
    def reshape(self, *shape: int | Sequence[int]) -> NkiTensor:
        """The same elements in row-major order in another shape (ValueError if no view of the memory can do it)."""
        new = tuple(int(n) for n in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape))
        if new.count(-1) == 1:
            known = math.prod(n for n in new if n != -1)
            new = tuple(self.size // max(1, known) if n == -1 else n for n in new)
        if not new or min(new) < 0 or math.prod(new) != self.size:
            raise errors.NkiValidationError("reshape", self.name, f"of shape {self.shape} cannot have shape {new}")
        if self.on_chip and new[0] != self.shape[0]:
            raise errors.NkiValidationError(
                "reshape", self.name, f"on chip keeps the partition dimension {self.shape[0]}, not {new[0]}"
            )
        first = 1 if self.on_chip else 0
        strides = self.strides[:first] + _reshaped_strides(self.shape[first:], self.strides[first:], new[first:])
        return self._view(new, strides)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Splits one dimension; one of the new sizes may be -1."""
        d, n = self._dim(dim), self.shape[self._dim(dim)]
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = n // max(1, math.prod(s for s in sizes if s != -1))
        if not sizes or min(sizes) < 0 or math.prod(sizes) != n:
            raise errors.NkiValidationError("reshape_dim", self.name, f"dimension {d}, {n}, cannot be {tuple(shape)}")
        inner = [s * self.strides[d] for s in row_major(sizes)]
        return self._view(
            (*self.shape[:d], *sizes, *self.shape[d + 1 :]), (*self.strides[:d], *inner, *self.strides[d + 1 :])
        )

    def flatten_dims(self, start: int, end: int) -> NkiTensor:
        """Merges dimensions start to end (inclusive), which must be contiguous with each other."""
        s, e = self._dim(start), self._dim(end)
        n = math.prod(self.shape[s : e + 1])
        stride = _reshaped_strides(self.shape[s : e + 1], self.strides[s : e + 1], (n,))
        return self._view(
            (*self.shape[:s], n, *self.shape[e + 1 :]), (*self.strides[:s], *stride, *self.strides[e + 1 :])
        )

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dimensions in another order; on chip the first stays."""
        order = [self._dim(d) for d in dims]
        if sorted(order) != list(range(self.ndim)):
            raise errors.NkiValidationError(
                "permute", "dims", f"{tuple(dims)} is no permutation of {self.ndim} dimensions"
            )
        if self.on_chip and order[0] != 0:
            raise errors.NkiValidationError("permute", self.name, _FIRST)
        return self._view([self.shape[d] for d in order], [self.strides[d] for d in order])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """A dimension of size 1 repeated."""
        d = self._dim(dim)
        if self.shape[d] != 1:
            raise errors.NkiValidationError("broadcast", self.name, f"dimension {d} has size {self.shape[d]}, not 1")
        if self.on_chip and d == 0:
            raise errors.NkiValidationError(
                "broadcast", self.name, "on chip the partition dimension cannot be broadcast"
            )
        shape, strides = list(self.shape), list(self.strides)
        shape[d], strides[d] = size, 0
        return self._view(shape, strides)

    def expand_dim(self, dim: int) -> NkiTensor:
        """A new dimension of size 1 before `dim`."""
        d = dim % (self.ndim + 1)
        if self.on_chip and d == 0:
            raise errors.NkiValidationError("expand_dim", self.name, _FIRST)
        stride = self.strides[d] * self.shape[d] if d < self.ndim else 1
        return self._view((*self.shape[:d], 1, *self.shape[d:]), (*self.strides[:d], stride, *self.strides[d:]))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Without a dimension of size 1."""
        d = self._dim(dim)
        if self.shape[d] != 1:
            raise errors.NkiValidationError("squeeze_dim", self.name, f"dimension {d} has size {self.shape[d]}, not 1")
        if self.on_chip and d == 0:
            raise errors.NkiValidationError("squeeze_dim", self.name, "on chip the partition dimension cannot go")
        return self._view((*self.shape[:d], *self.shape[d + 1 :]), (*self.strides[:d], *self.strides[d + 1 :]))

    def rearrange(
        self, src_pattern: Sequence, dst_pattern: Sequence, fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Splits, permutes and merges by names: tuples of names, groups as nested tuples."""
        sizes = dict(fixed_sizes or {})
        if len(src_pattern) != self.ndim:
            raise errors.NkiValidationError(
                "rearrange", "src_pattern", f"has {len(src_pattern)} parts, not {self.ndim}"
            )
        strides: dict[str, int] = {}
        for part, n, stride in zip(src_pattern, self.shape, self.strides):
            names = (part,) if isinstance(part, str) else tuple(part)
            unknown = [x for x in names if x not in sizes]
            known = math.prod(sizes[x] for x in names if x in sizes)
            if len(unknown) > 1:
                raise errors.NkiValidationError("rearrange", "fixed_sizes", f"has not the sizes of {unknown}")
            if unknown:
                sizes[unknown[0]] = n // max(1, known)
            if math.prod(sizes[x] for x in names) != n:
                raise errors.NkiValidationError(
                    "rearrange", "src_pattern", f"{names} has {math.prod(sizes[x] for x in names)} elements, not {n}"
                )
            for x, s in zip(names, row_major([sizes[x] for x in names])):
                strides[x] = s * stride
        shape, out = [], []
        kept = {x for part in dst_pattern for x in ((part,) if isinstance(part, str) else part)}
        if wrong := sorted(x for x in kept ^ strides.keys() if sizes.get(x) != 1):
            raise errors.NkiValidationError("rearrange", "dst_pattern", f"{wrong} must be in both patterns")
        for part in dst_pattern:
            names = (part,) if isinstance(part, str) else tuple(part)
            n = math.prod(sizes[x] for x in names)
            group = _reshaped_strides([sizes[x] for x in names], [strides[x] for x in names], (n,))
            shape.append(n)
            out.append(group[0])
        if self.on_chip and (out[0] != self.strides[0] or shape[0] != self.shape[0]):
            raise errors.NkiValidationError("rearrange", self.name, _FIRST)
        return self._view(shape, out)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start to end of one dimension."""
        d = self._dim(dim)
        if step < 1:
            raise errors.NkiValidationError("slice", "step", f"{step} must be positive")
        if not 0 <= start <= end <= self.shape[d]:
            raise errors.NkiOutOfBoundsError(
                "slice", self.name, f"{start}:{end} is out of bounds for dimension {d} of size {self.shape[d]}"
            )
        shape, strides = list(self.shape), list(self.strides)
        shape[d], strides[d] = -(-(end - start) // step), strides[d] * step
        return self._view(shape, strides, self.offset + start * self.strides[d])

    def select(self, dim: int, index: int | Register | NkiTensor) -> NkiTensor:
        """One element of a dimension, which goes away."""
        d = self._dim(dim)
        rest = (self.shape[:d] + self.shape[d + 1 :], self.strides[:d] + self.strides[d + 1 :])
        if self.on_chip and d == 0:
            raise errors.NkiValidationError("select", self.name, "on chip the partition dimension cannot go")
        if isinstance(index, NkiTensor):
            index = load_register(index)
        if isinstance(index, Register):
            view = self._view(*rest)
            view._move(index, self.strides[d], self.shape[d] - 1)
            return view
        index = integer(index, "index")
        if not -self.shape[d] <= index < self.shape[d]:
            raise errors.NkiOutOfBoundsError(
                "select", self.name, f"index {index} is out of bounds for dimension {d} of size {self.shape[d]}"
            )
        return self._view(*rest, self.offset + (index % self.shape[d]) * self.strides[d])

    def vector_select(self, dim: int, offsets: NkiTensor) -> NkiTensor:
        """Rows of an HBM tensor named by offsets [P, 1]; the result has P rows."""
        if self.on_chip or dim != 0:
            raise errors.NkiValidationError("vector_select", self.name, _ROWS)
        view = self._view((_index(offsets).size, *self.shape[1:]), self.strides)
        view.indexing, view.index, view.index_stride, view.index_limit = ROWS, offsets, self.strides[0], self.shape[0]
        return view

    def _as(self, dtype: object) -> dtypes.DType:
        """The type of a view of these bytes."""
        new = dtypes.dtype(dtype)
        if not isinstance(self.dtype, dtypes.Wide) or isinstance(new, dtypes.Wide):
            return new
        if new != self.dtype:
            raise errors.NkiValidationError(
                "", self.name, f"is kept in fp32 (NKI_PRECISE_FP=0) and has no {self.dtype} bytes to see as {new}"
            )
        return self.dtype

    def view(self, dtype: object) -> NkiTensor:
        """The same bytes as another type; the last dimension scales."""
        new = self._as(dtype)
        old_size, new_size = self.dtype.itemsize, new.itemsize
        if old_size == new_size:
            return self._retyped(new, self.shape, self.strides, self.offset)
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            raise errors.NkiValidationError("view", self.name, f"as {new} needs a contiguous last dimension")
        strides = [self._count_of(new, s, "a step") for s in self.strides[:-1]]
        last = self._count_of(new, self.shape[-1], "the last dimension")
        offset = self._count_of(new, self.offset, "the start")
        return self._retyped(new, (*self.shape[:-1], last), (*strides, 1), offset)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: NkiTensor | Register | int | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: object = None,
    ) -> NkiTensor:
        """A raw access pattern [[step, count], ...] over the storage, in elements of `dtype`.

        offset: None takes the view's, a number adds to it. scalar_offset adds its value times the elements of
        dimension indirect_dim. vector_offset [P, 1]: row p starts at vector_offset[p] times the elements of a row. On
        chip pattern[0] takes each partition: its step is the elements of a partition of the storage, or of this view.
        """
        if self.indexing != NONE:
            raise errors.NkiValidationError("ap", self.name, "by an index has no pattern: it comes before the index")
        new = self.dtype if dtype is None else self._as(dtype)
        try:
            strides, shape = zip(*((integer(s, "step"), integer(n, "size")) for s, n in pattern))
        except (TypeError, ValueError):
            raise errors.NkiValidationError("ap", "pattern", f"{pattern!r} must be [[step, size], ...]") from None
        if self.on_chip and strides[0] * new.itemsize == self.free_size * self.dtype.itemsize:
            # Published kernels count the row of the view, which may be a part of its storage's.
            strides = (self.storage.row_elements * self.storage.dtype.itemsize // new.itemsize, *strides[1:])
        base = self._count_of(new, self.offset, "the start")
        view = self._retyped(new, shape, strides, base + (0 if offset is None else integer(offset, "offset")))
        d = self._dim(indirect_dim)
        elements = math.prod(self.shape[d + 1 :])
        if scalar_offset is not None:
            step = self._count_of(new, elements, "a step of scalar_offset")
            if isinstance(scalar_offset, NkiTensor):
                scalar_offset = load_register(scalar_offset)
            if isinstance(scalar_offset, Register):
                view._move(scalar_offset, step)
            else:
                view.offset += integer(scalar_offset, "scalar_offset") * step
        if vector_offset is not None:
            if d != 0 or self.on_chip:
                raise errors.NkiValidationError("ap", "vector_offset", _ROWS)
            row = self._count_of(new, self.strides[0] if self.shape[0] > 1 else elements, "a row")
            view.indexing, view.index, view.index_stride = ROWS, _index(vector_offset), row
            view.index_limit = self.shape[0]
        return view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Elements of each partition named by index [P, K]; element i of a group of 16 partitions is at
        index[i % 16, i // 16]. The result is [P, num_elem]."""
        if self.free_size > 1 and self.strides[1:] != row_major(self.shape[1:]):
            raise errors.NkiValidationError("indirect", self.name, "has gaps in its partitions")
        n = num_elem or 16 * _index(index).free_size
        view = self._view((self.shape[0], int(n)), (self.strides[0], 1))
        view.indexing, view.index, view.index_stride, view.index_limit = ELEMENTS, index, 16, self.free_size
        return view


def _index(x: object) -> NkiTensor:
    if not isinstance(x, NkiTensor):
        raise errors.NkiValidationError("", "index", f"must be a tensor, not {type(x).__name__}")
    return x


def load_register(t: NkiTensor) -> Register:
    """A register with the value of a one-element tensor."""
    from . import isa

    r = Register(current().program.add_register())
    isa.register_load(r, t)
    return r


def _bounds(k: slice, n: int, d: int, t: NkiTensor) -> tuple[int, int, int]:
    step = 1 if k.step is None else integer(k.step, "step")
    if step <= 0:
        raise errors.NkiValidationError("index", t.name, f"step {step} must be positive")
    start = 0 if k.start is None else integer(k.start, "start")
    stop = n if k.stop is None else integer(k.stop, "stop")
    start, stop = start + n if start < 0 else start, stop + n if stop < 0 else stop
    if start < 0 or start > n or stop > n:
        raise errors.NkiOutOfBoundsError(
            "index", t.name, f"slice {k.start}:{k.stop} is out of bounds for dimension {d} of size {n}"
        )
    return start, max(start, stop), step


def _reshaped_strides(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Strides that give the same elements in shape `new`; ValueError if there are none."""
    old = [(n, s) for n, s in zip(shape, strides) if n != 1]
    out, i, j = [], 0, 0
    merged: list[tuple[int, int]] = []  # maximal runs of dimensions contiguous with each other
    for n, s in old:
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    new = list(new)
    out = [1] * len(new)
    for size, stride in merged:
        group = [j]
        count = 1
        while j < len(new) and count < size:
            count *= new[j]
            group.append(j)
            j += 1
        if count != size:
            raise errors.NkiValidationError(
                "", "shape", f"{tuple(new)} is no view of shape {tuple(shape)}, strides {tuple(strides)}"
            )
        s = stride * size
        for g in group[1:]:
            s //= new[g]
            out[g] = s
        i += 1
    return tuple(out)


def allocate(
    shape: Sequence[int],
    dtype: object,
    buffer: Buffer,
    name: str = "",
    address: tuple[int, int] | None = None,
    array: np.ndarray | None = None,
) -> NkiTensor:
    """A new tensor of the current session."""
    session = current()
    if not isinstance(buffer, Buffer):
        raise errors.NkiValidationError("", "buffer", f"{buffer!r} must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm")
    if not isinstance(shape, (int, Iterable)):
        raise errors.NkiValidationError("", "shape", f"{shape!r} is no sequence of sizes")
    sizes = tuple(integer(n, "shape") for n in ((shape,) if isinstance(shape, int) else shape))
    t = dtypes.stored(dtype, wide=session.wide and buffer.on_chip)
    if any(n < 0 for n in sizes):
        raise errors.NkiValidationError("", "shape", f"{sizes} has a negative size")
    if buffer.on_chip:
        if len(sizes) < 2:
            raise errors.NkiValidationError("", "shape", f"{sizes} has less than the 2 dimensions of on-chip tensors")
        if sizes[0] > 128:
            raise errors.NkiValidationError(
                "", "shape", f"{sizes}: Size of partition dimension {sizes[0]} exceeds architecture limitation of 128"
            )
    storage = session.new_storage(sizes, t, buffer, name, address, array)
    return NkiTensor(storage, t, sizes, row_major(sizes))
