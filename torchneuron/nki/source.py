"""Fused programs as NKI source that runs to the same bits.

A program is a list of lane operations on a space of rows and columns (csrc/core/tile_program.h). `OPERATIONS` says what
each of them is in NKI; `print_source` writes the loops around them: blocks of up to 128 rows on the partitions, columns
in the free dimension. Rows that fit into SBUF are loaded once; longer ones take a pass for each reduction that depends
on another, in pieces of the length that reductions are defined by.
"""

from __future__ import annotations

import ast
import functools
import math
import re
import struct
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _core

# Meaning of what a lane operation's text needs of its inputs:
SCALARS = "scalars"  # tiles, [P, 1] tiles and numbers, at least one of them a tile; fp32
TILES = "tiles"  # tiles of one shape
CHOICE = "choice"  # a tile, then two tiles of its shape or fp32 numbers


@dataclass(frozen=True)
class Operation:
    """What a lane operation is in NKI. text: of its inputs {0}, {1}, {2}."""

    text: str
    inputs: str = SCALARS
    tiles: int = 0  # live at once beside inputs and result, where it is not seen in the text


def _comparison(name: str, inputs: str = SCALARS) -> Operation:
    return Operation(f"nl.{name}({{0}}, {{1}}, dtype=nl.int32)", inputs)


def _exact(name: str) -> Operation:
    return Operation(f"nl.{name}({{0}}, {{1}})", TILES)


# By lane operation; `first` and `second` of those that the program merged are rounded one after the other.
OPERATIONS: dict[str, Operation] = {
    "add": Operation("nl.add({0}, {1})"),
    "sub": Operation("nl.subtract({0}, {1})"),
    "mul": Operation("nl.multiply({0}, {1})"),
    "div": Operation("nl.divide({0}, {1})"),
    "maximum": Operation("nl.maximum({0}, {1})"),
    "minimum": Operation("nl.minimum({0}, {1})"),
    "fmax": Operation("other_if_nan(nl.maximum, {0}, {1})", TILES, 3),
    "fmin": Operation("other_if_nan(nl.minimum, {0}, {1})", TILES, 3),
    "pow": Operation("nl.power({0}, {1})", TILES),
    "fmod": Operation("nl.fmod({0}, {1})"),
    "remainder": Operation("nl.mod({0}, {1})"),
    "floor_div": Operation("floor_divide({0}, {1})", TILES, 8),
    "atan2": Operation("atan2({0}, {1})", TILES, 8),
    "copysign": Operation("copysign({0}, {1})", TILES, 3),
    "eq": _comparison("equal"),
    "ne": _comparison("not_equal"),
    "lt": _comparison("less"),
    "le": _comparison("less_equal"),
    "gt": _comparison("greater"),
    "ge": _comparison("greater_equal"),
    "iadd": _exact("add"),
    "isub": _exact("subtract"),
    "imul": _exact("multiply"),
    "imaximum": _exact("maximum"),
    "iminimum": _exact("minimum"),
    "ieq": _comparison("equal", TILES),
    "ine": _comparison("not_equal", TILES),
    "ilt": _comparison("less", TILES),
    "ile": _comparison("less_equal", TILES),
    "igt": _comparison("greater", TILES),
    "ige": _comparison("greater_equal", TILES),
    "iand": _exact("bitwise_and"),
    "ior": _exact("bitwise_or"),
    "ixor": _exact("bitwise_xor"),
    "mul_add": Operation("nl.add(nl.multiply({0}, {1}), {2})"),
    "mul_sub": Operation("nl.subtract(nl.multiply({0}, {1}), {2})"),
    "mul_rsub": Operation("nl.subtract({2}, nl.multiply({0}, {1}))"),
    "mul_mul": Operation("nl.multiply(nl.multiply({0}, {1}), {2})"),
    "add_mul": Operation("nl.multiply(nl.add({0}, {1}), {2})"),
    "add_add": Operation("nl.add(nl.add({0}, {1}), {2})"),
    "sub_mul": Operation("nl.multiply(nl.subtract({0}, {1}), {2})"),
    "sub_add": Operation("nl.add(nl.subtract({0}, {1}), {2})"),
    "select": Operation("nl.where({0}, {1}, {2})", CHOICE, 1),
    "neg": Operation("nl.negative({0})"),
    "abs": Operation("nl.abs({0})"),
    "sign": Operation("nl.subtract(nl.greater({0}, 0.0), nl.less({0}, 0.0))"),
    "sqrt": Operation("nl.sqrt({0})"),
    "rsqrt": Operation("nl.rsqrt({0})"),
    "reciprocal": Operation("nl.reciprocal({0})"),
    "exp": Operation("nl.exp({0})"),
    "exp2": Operation("nl.power(2.0, {0})"),
    "expm1": Operation("expm1({0})", TILES, 5),
    "log": Operation("nl.log({0})"),
    "log2": Operation("log2({0})", TILES, 7),
    "log10": Operation("log10({0})", TILES, 7),
    "log1p": Operation("log1p({0})", TILES, 7),
    "tanh": Operation("nl.tanh({0})"),
    "sigmoid": Operation("nl.sigmoid({0})"),
    "erf": Operation("nl.erf({0})"),
    "erfc": Operation("erfc({0})", TILES, 12),
    "sin": Operation("nl.sin({0})"),
    "cos": Operation("nl.cos({0})"),
    "tan": Operation("nl.tan({0})"),
    "asin": Operation("asin({0})", TILES, 6),
    "acos": Operation("acos({0})", TILES, 7),
    "atan": Operation("nl.arctan({0})"),
    "sinh": Operation("sinh({0})", TILES, 6),
    "cosh": Operation("cosh({0})", TILES, 3),
    "floor": Operation("nl.floor({0})"),
    "ceil": Operation("nl.ceil({0})"),
    "trunc": Operation("nl.trunc({0})"),
    "round": Operation("round_half_even({0})", TILES, 5),
    "isnan": Operation("nl.not_equal({0}, {0}, dtype=nl.int32)", TILES),
    "isinf": Operation('nl.equal(nl.abs({0}), float("inf"), dtype=nl.int32)'),
    "ineg": Operation("negate({0})", TILES, 1),
    "iabs": Operation("nl.maximum({0}, negate({0}))", TILES, 1),
    "isign": Operation("nl.subtract(nl.greater({0}, 0), nl.less({0}, 0))", TILES),
    "inot": Operation("nl.invert({0})", TILES),
    "iszero": Operation("nl.equal({0}, 0)", TILES),
    "iremainder": Operation("remainder_integers({0}, {1})", TILES, 10),
    "ifmod": Operation("divide_integers({0}, {1})[1]", TILES, 10),
    "ifloor_div": Operation("floor_divide_integers({0}, {1})", TILES, 10),
    "itrunc_div": Operation("divide_integers({0}, {1})[0]", TILES, 10),
    "to_float": Operation("nl.copy({0}, dtype=nl.float32)", TILES),
    "to_int": Operation("to_int({0})", TILES, 5),
    "nonzero": Operation("nl.not_equal({0}, 0.0, dtype=nl.int32)"),
    "inonzero": Operation("nl.not_equal({0}, 0)", TILES),
    "round_bf16": Operation("nl.copy(nl.copy({0}, dtype=nl.bfloat16), dtype=nl.float32)", TILES),
    "round_f16": Operation("nl.copy(nl.copy({0}, dtype=nl.float16), dtype=nl.float32)", TILES),
    "wrap_i8": Operation("nl.subtract(nl.bitwise_xor(nl.bitwise_and({0}, 255), 128), 128)", TILES),
    "wrap_u8": Operation("nl.bitwise_and({0}, 255)", TILES),
    "div_add": Operation("nl.divide({2}, nl.add({0}, {1}))"),
    "exp_neg": Operation("nl.exp(nl.negative({0}))"),
    "exp_sub": Operation("nl.exp(nl.subtract({0}, {1}))"),
    "swish": Operation("nl.divide({0}, nl.add(nl.exp(nl.negative({0})), {1}))"),
    "swish_mul": Operation("nl.multiply(nl.divide({0}, nl.add(nl.exp(nl.negative({0})), {1})), {2})"),
    "uniform_bits": Operation("uniform_bits({seed}, {offset}, {element}, {pitch}, {shape})", TILES, 18),
}


@dataclass(frozen=True)
class Reduction:
    """What a reduction is in NKI. short: of rows of up to 4,096 columns, long: of any; merge: of what pieces gave."""

    short: str
    long: str
    merge: str
    tiles: int = 0


REDUCTIONS: dict[str, Reduction] = {
    **{
        lane: Reduction(f"nl.{name}({{0}}, axis=1, keepdims=True)", *(f"by_pieces(nl.{name}, {{0}})",) * 2)
        for lane, name in (("sum", "sum"), ("amax", "max"), ("amin", "min"))
    },
    "iamax": Reduction(*("largest({0})",) * 3, 4),
    "iamin": Reduction(*("smallest({0})",) * 3, 5),
    "gather": Reduction(*("gather({0}, {1}, {column})",) * 2, "either({0})", 4),
}
# Of columns: the operator that adds rows up, and how a value goes in and comes out.
ACCUMULATIONS = {
    "sum": ("nl.add", "{0}", "{0}"),
    "amax": ("nl.maximum", "{0}", "{0}"),
    "amin": ("nl.maximum", "nl.negative({0})", "nl.negative({0})"),
}

# Functions of nl that the API has and that Neuron devices refuse: they run in simulators alone.
SIMULATOR_ONLY = ("divide", "fmod", "mod")

PARTITIONS = 128
PIECE = 4096  # columns that one reduction step takes (kReduceChunk)
CHUNK = 32  # rows that one accumulation step takes (Accumulation::kRows)
MIN_CYCLES = 64  # of an instruction, as a number of columns
FLAT_COLUMNS = 2048  # of a tile of a program without rows
SBUF_BYTES = 172 * 1024  # of a partition that tiles may take: what trn1, the smallest, leaves to kernels
MAX_DIMS = 5  # of an access pattern: a partition and four free ones


class NoNkiForm(NotImplementedError):
    """A step of a program has no form in NKI that gives the same bits."""


# ---- a program as it was recorded ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One line of a program."""

    kind: str
    op: str
    extent: str
    out: int | None
    inputs: tuple[int, ...]
    access: int


@dataclass(frozen=True)
class Access:
    """Where a value comes from or goes to: (size, stride) from slow to fast, in elements."""

    dtype: str
    extent: str
    storage: int
    address: int  # of the storage, when the program ran
    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def integer(self) -> bool:
        return not self.dtype.startswith(("float", "bfloat"))

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + sum((n - 1) * stride for n, stride in self.dims) + 1


@dataclass(frozen=True)
class Program:
    """A fused program and the shapes and numbers of one run."""

    operators: tuple[str, ...]
    rows: int
    columns: int
    has_rows: bool
    accesses: tuple[Access, ...]
    values: tuple[tuple[str, str, int], ...]  # where from, extent, which
    steps: tuple[Step, ...]
    constants: tuple[int, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, operators: Iterable[str], structure: dict[str, Any], run: tuple[Any, ...]) -> Program:
        """From what torchneuron._C tells of a program (csrc/bindings/fusion.cpp)."""
        rows, columns, places, numbers, memory = run
        accesses = tuple(
            Access(dtype, extent, storage, address, offset, dims)
            for (dtype, extent), (storage, offset, dims), address in zip(structure["accesses"], places, memory)
        )
        return cls(
            tuple(operators), rows, columns, structure["has_rows"], accesses, tuple(structure["values"]),
            tuple(Step(*s) for s in structure["steps"]), tuple(structure["constants"]), tuple(numbers),
        )  # fmt: skip

    @property
    def writes(self) -> bool:
        """Whether it leaves anything behind."""
        return self.rows * self.columns > 0 and any(s.kind == "store" for s in self.steps)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for programs with the same source."""
        places = tuple((a.storage, a.offset, a.dims) for a in self.accesses)
        return self.operators, self.rows, self.columns, self.values, self.steps, self.constants, places


# ---- how accesses lie in rows and columns ----------------------------------------------------------------------------
def _borders(dims: Sequence[tuple[int, int]]) -> set[int]:
    """Element counts after which a place's slower dims go on."""
    counts, n = set(), 1
    for size, _ in reversed(dims):
        counts.add(n)
        n *= size
    return counts


def _is_chain(borders: set[int], n: int) -> bool:
    """Whether each border divides the next, and the last one n."""
    ordered = [*sorted(borders), n]
    return all(b % a == 0 for a, b in zip(ordered, ordered[1:]))


def _sizes(borders: Iterable[int], n: int) -> list[int]:
    """Sizes of dims, slow to fast, that have these borders."""
    ordered = [*sorted({1, *borders}), n]
    return [b // a for a, b in zip(ordered, ordered[1:])][::-1]


def _strides(dims: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """A place's strides in finer dims."""
    found, step = [], 1
    for size in reversed(sizes):
        within, n = 0, 1
        for own, stride in reversed(dims):
            if n <= step < n * own:
                within = stride * (step // n)
            n *= own
        found.append(within if size > 1 else 0)
        step *= size
    return found[::-1]


def _merged(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size) pairs, slow to fast, in as few dims as the strides allow."""
    found: list[tuple[int, int]] = []
    for stride, n in dims:
        if n == 1:
            continue
        if found and found[-1][0] == stride * n:
            found[-1] = (stride, found[-1][1] * n)
        else:
            found.append((stride, n))
    return found


@dataclass(frozen=True)
class Blocks:
    """How rows are cut into blocks of at most 128: loops over the first dims, a slice of the next one, all of the
    rest."""

    sizes: tuple[int, ...]

    @property
    def sliced(self) -> int:
        """Which dim is sliced."""
        at = len(self.sizes) - 1
        while at > 0 and math.prod(self.sizes[at:]) <= PARTITIONS:
            at -= 1
        return at

    @property
    def inner(self) -> int:
        """Rows of one element of the sliced dim."""
        return math.prod(self.sizes[self.sliced + 1 :])

    @property
    def slice(self) -> int:
        """Elements of the sliced dim that a block has."""
        return min(self.sizes[self.sliced], PARTITIONS // self.inner)

    @property
    def count(self) -> int:
        return math.prod(self.sizes[: self.sliced]) * -(-self.sizes[self.sliced] // self.slice)


@dataclass
class Space:
    """Rows and columns with their dims, and the accesses that do not lie in them: these go by way of a copy."""

    rows: int
    columns: int
    row_sizes: list[int]
    column_sizes: list[int]
    width: int  # columns of a tile
    copied: set[int]


def _divisors(n: int) -> Iterator[int]:
    for d in range(1, math.isqrt(n) + 1):
        if n % d == 0:
            yield d
            yield n // d


def _flat_space(program: Program, width: int) -> Space:
    """Rows and columns for a program without: the cheapest tiles that all accesses can be cut into."""
    n = program.rows
    chain, copied = {1}, set()
    for i, a in enumerate(program.accesses):
        wider = chain | _borders(a.dims)
        if _is_chain(wider, n):
            chain = wider
        else:
            copied.add(i)
    ordered = [*sorted(chain), n]
    best = None
    for low, high in zip(ordered, ordered[1:]) if n > 1 else [(1, 1)]:
        for d in _divisors(high // low):
            columns = low * d
            if columns > width and low > 1:
                continue  # a slice of the columns would not be one pattern
            rows = _sizes({b // columns for b in chain if b >= columns}, n // columns)
            tile = min(columns, width)
            cost = Blocks(tuple(rows)).count * -(-columns // width) * max(MIN_CYCLES, tile)
            if best is None or (cost, -columns) < best[0]:
                best = (cost, -columns), columns, rows
    _, columns, rows = best
    return Space(n // columns, columns, rows, _sizes({b for b in chain if b < columns}, columns),
                 min(columns, width), copied)  # fmt: skip


def _row_space(program: Program, width: int) -> Space:
    """The rows and columns that a program has."""
    rows, columns = program.rows, program.columns
    accumulates = any(s.kind == "accumulate" for s in program.steps)
    row_chain, column_chain, copied = {1}, {1}, set()
    for i, a in enumerate(program.accesses):
        borders = _borders(a.dims)
        own_rows, own_columns = row_chain, column_chain
        if a.extent == "row":
            own_rows = row_chain | borders
        elif a.extent == "column":
            own_columns = column_chain | borders
        else:
            own_rows = row_chain | {b // columns for b in borders if b > columns}
            own_columns = column_chain | {b for b in borders if b < columns}
            if any(b > columns and b % columns for b in borders):
                copied.add(i)
                continue
        if (
            not _is_chain(own_rows, rows)
            or not _is_chain(own_columns, columns)
            or (accumulates and own_rows != {1})
            or (columns > width and own_columns != {1})
        ):
            copied.add(i)
            continue
        row_chain, column_chain = own_rows, own_columns
    return Space(rows, columns, _sizes(row_chain, rows), _sizes(column_chain, columns), min(columns, width), copied)


# ---- text ------------------------------------------------------------------------------------------------------------
def _sum(*terms: tuple[str, int], constant: int = 0) -> str:
    """The text of constant + sum of variable * factor."""
    parts = [v if factor == 1 else f"{v} * {factor}" for v, factor in terms if factor and v != "0"]
    return " + ".join([*parts, *([str(constant)] if constant or not parts else [])])


def _float_text(bits: int) -> str:
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


@functools.cache
def _functions() -> dict[str, str]:
    """The text of each function that printed programs may call."""
    text = Path(__file__).with_name("source_functions.py").read_text()
    return {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef)}  # fmt: skip


def _functions_for(body: str) -> list[str]:
    """The functions that a text calls, and those that they call, as in their file."""
    needed: set[str] = set()
    open_texts = [body]
    while open_texts:
        names = set(re.findall(r"(?<![.\w])(\w+)", open_texts.pop())) & _functions().keys() - needed
        needed |= names
        open_texts += [_functions()[name] for name in names]
    return [text for name, text in _functions().items() if name in needed]


@dataclass(frozen=True)
class Memory:
    """A kernel's operand: `size` elements of a storage from `offset` on."""

    name: str
    dtype: str
    storage: int
    address: int  # of the storage, when the program ran
    offset: int
    size: int
    argument: bool  # else the kernel makes it
    result: bool


@dataclass(frozen=True)
class Source:
    """The NKI source of a fused program."""

    name: str
    text: str
    memories: tuple[Memory, ...]
    numbers: tuple[tuple[str, float | int], ...]  # arguments after the memories, as of the run that was printed

    def kernel(self) -> Callable[..., Any]:
        """The kernel: takes the memories that are arguments, flat, and the numbers; returns the results."""
        space: dict[str, Any] = {"__name__": self.name}
        exec(compile(self.text, f"<{self.name}>", "exec"), space)  # noqa: S102 - the text is our own
        return space["kernel"]


@dataclass
class Named:
    """How a value is called in the text. form: number, row (a [P, 1] tile) or full."""

    text: str
    form: str


@dataclass(frozen=True)
class Block:
    """How the text calls the place of a tile. Counts and indices are names or numbers."""

    rows: str
    columns: str
    column: str  # the first
    row: tuple[tuple[str, int], ...]  # the first: a sum of index * factor
    loops: tuple[str, ...]  # indices of the dims that are looped over, and of the sliced one
    sliced: str  # elements of the sliced dim


class Printer:
    """Writes one program."""

    def __init__(self, program: Program) -> None:
        self.p = program
        self.lanes = self._lanes()
        self.names: dict[int, Named] = {}
        self.copies: dict[int, int] = {}  # values that are other values
        self.used: dict[int, str] = {}  # what each number is used as
        self.constants: dict[tuple[str, str], str] = {}  # (text, type) -> name of a [128, 1] tile
        self.lines: list[str] = []
        self.depth = 1
        self.widest = self._live_tiles()
        width = FLAT_COLUMNS if not program.has_rows else program.columns
        while self._bytes(width) > SBUF_BYTES and width > 64:
            width = PIECE if width > PIECE else 1 << (width - 1).bit_length() - 1
        self.space = (_row_space if program.has_rows else _flat_space)(program, width)
        self.blocks = Blocks(tuple(self.space.row_sizes))
        self.memories = self._memories()
        anywhere = Block("", "", "", (), ("",) * len(self.space.row_sizes), "")
        for i in range(len(program.accesses)):
            if len(self._place(i, anywhere)[1]) > MAX_DIMS:
                self.space.copied.add(i)

    # ---- what the text depends on
    def _is_number(self, v: int) -> bool:
        return self.p.values[v][0] in ("scalar", "constant")

    def _lane_of_access(self, access: int) -> str:
        return "i32" if self.p.accesses[access].integer else "f32"

    def _lanes(self) -> list[str]:
        """f32 or i32 of each value; numbers are what each use of them wants."""
        self.lanes = ["any"] * len(self.p.values)
        for _ in range(2):  # selections among numbers take the type of who uses them
            for s in self.p.steps:
                if s.out is not None and self.lanes[s.out] == "any":
                    self.lanes[s.out] = self._lane_of_result(s)
                for k, v in enumerate(s.inputs):
                    if self.lanes[v] == "any" and not self._is_number(v):
                        self.lanes[v] = self._lane_of_use(s, k)
        return self.lanes

    def _lane_of_result(self, s: Step) -> str:
        if s.kind == "load":
            return self._lane_of_access(s.access)
        if s.kind in ("map", "reduce", "accumulate") and _core.LANE_OPS[s.op][2] != "any":
            return _core.LANE_OPS[s.op][2]
        same = s.inputs[1:] if s.op == "select" else s.inputs[:1]
        return next((self.lanes[v] for v in same if not self._is_number(v) and self.lanes[v] != "any"), "any")

    def _lane_of_use(self, s: Step, k: int) -> str:
        """What a step takes its input k as."""
        if s.kind == "store":
            return self._lane_of_access(s.access)
        if k == 0 and s.op == "select" or k == 1 and s.kind in ("gather", "scatter"):
            return "i32"
        if s.kind in ("map", "reduce", "accumulate") and _core.LANE_OPS[s.op][1] != "any":
            return _core.LANE_OPS[s.op][1]
        return self.lanes[s.out]

    def _live_tiles(self) -> int:
        """The most tiles of full extent that are live at once."""
        last = {v: i for i, s in enumerate(self.p.steps) for v in s.inputs}
        live, most = set(), 1
        for i, s in enumerate(self.p.steps):
            if s.extent == "full" and s.out is not None:
                live.add(s.out)
            row = OPERATIONS.get(s.op) if s.kind == "map" else REDUCTIONS.get(s.op if s.kind == "reduce" else s.kind)
            extra = 2 if s.kind == "scatter" else 0
            if isinstance(row, Operation):
                extra = max(row.tiles, row.text.count("nl.") - 1)
            elif row:
                extra = row.tiles
            most = max(most, len(live) + extra)
            live -= {v for v in s.inputs if last[v] == i}
        return most

    def _bytes(self, width: int) -> int:
        """Bytes of a partition that tiles of this width take."""
        sums = sum(s.kind == "reduce" for s in self.p.steps) if width < self.p.columns and self.p.has_rows else 0
        return 4 * (self.widest * width + sums * (min(self.p.columns, PIECE) * (width < PIECE) + 16))

    def _memories(self) -> dict[tuple[int, str], Memory]:
        loads = {s.access for s in self.p.steps if s.kind == "load"}
        stores = {s.access for s in self.p.steps if s.kind == "store"}
        groups: dict[tuple[int, str], list[int]] = {}
        for i, a in enumerate(self.p.accesses):
            groups.setdefault((a.storage, a.dtype), []).append(i)
        found = {}
        for key, members in groups.items():
            all_of = [self.p.accesses[i] for i in members]
            low, high = min(a.offset for a in all_of), max(a.end for a in all_of)
            dense = len(all_of) == 1 and math.prod(n for n, _ in all_of[0].dims) == high - low
            found[key] = Memory(
                f"m{len(found)}", all_of[0].dtype, key[0], all_of[0].address, low, high - low,
                bool(loads & set(members)) or not dense, bool(stores & set(members)),
            )  # fmt: skip
        return found

    # ---- values
    def _value(self, s: Step, k: int) -> Named:
        """Input k of a step."""
        v = s.inputs[k]
        v = self.copies.get(v, v)
        if not self._is_number(v):
            return self.names[v]
        kind, _, index = self.p.values[v]
        lane = self._lane_of_use(s, k)
        if kind == "constant":
            bits = self.p.constants[index]
            return Named(_float_text(bits) if lane == "f32" else str(_signed(bits)), "number")
        if s.op != "uniform_bits" and self.used.setdefault(index, lane) != lane:
            raise NoNkiForm(f"number s{index} is used both as fp32 and as an integer by {' '.join(self.p.operators)}")
        return Named(f"s{index}", "number")

    def _tile(self, v: Named, lane: str, full: bool, at: Block) -> str:
        """A value as a tile."""
        text = v.text
        if v.form == "number":
            dtype = "nl.float32" if lane == "f32" else "nl.int32"
            name = self.constants.setdefault((text, dtype), f"k{len(self.constants)}")
            text = f"{name}[0:{at.rows}]"
        return f"{text}.broadcast(1, {at.columns})" if full and v.form != "full" and at.columns != "1" else text

    def _input(self, s: Step, k: int, full: bool, at: Block) -> str:
        """Input k of a step as a tile."""
        return self._tile(self._value(s, k), self._lane_of_use(s, k), full, at)

    def _map(self, s: Step, at: Block) -> None:
        if s.op == "copy":
            self.copies[s.out] = self.copies.get(s.inputs[0], s.inputs[0])
            return
        row = OPERATIONS[s.op]
        # The words of a seed are numbers of its own, not tiles.
        values = [] if s.op == "uniform_bits" else [self._value(s, k) for k in range(len(s.inputs))]
        full = any(v.form == "full" for v in values)
        texts = []
        for k, number in enumerate(values):
            lane = self._lane_of_use(s, k)
            if row.inputs == SCALARS:
                alone = len(values) == 1 or re.search(r"\(\{0\}\)", row.text) or values[1].form == "number"
                tile = k == 0 and number.form == "number" and alone
            else:
                tile = row.inputs == TILES or k == 0 or lane != "f32" or number.form != "number"
            texts.append(self._tile(number, lane, full and row.inputs != SCALARS, at) if tile else number.text)
        more = {}
        if s.op == "uniform_bits":
            if self.p.rows * self.p.columns > 2**32:
                raise NoNkiForm(f"uniform_bits counts elements in 32 bits, and there are more: step v{s.out}")
            full = s.extent == "full"
            words = [f"s{self.p.values[s.inputs[0]][2] + i}" for i in range(4)]
            columns = self.space.columns if full else 1
            more = {
                "seed": _tuple(words[:2]), "offset": _tuple(words[2:]), "pitch": columns,
                "element": _sum(*((v, n * columns) for v, n in at.row), (at.column, 1 if full else 0)),
                "shape": f"({at.rows}, {at.columns if full else 1})",
            }  # fmt: skip
        self._let(s.out, row.text.format(*texts, **more), full)

    def _let(self, v: int, text: str, full: bool) -> None:
        self._write(f"v{v} = {text}")
        self.names[v] = Named(f"v{v}", "full" if full else "row")

    def _write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # ---- memory
    def _place(self, access: int, at: Block) -> tuple[str, list[tuple[int, str]], bool]:
        """Name and offset, and the pattern [(stride, count), ...] of an access in a block, partitions first; and
        whether it has one element for each row."""
        a, space = self.p.accesses[access], self.space
        memory = self.memories[a.storage, a.dtype]
        name, base, dims = memory.name, a.offset - memory.offset, a.dims
        rows = [] if a.extent == "column" else space.row_sizes
        columns = [] if a.extent == "row" else space.column_sizes
        if access in space.copied:
            name, base, dims = f"a{access}", 0, ((math.prod([*rows, *columns]), 1),)
        strides = _strides(dims, [*rows, *columns])
        row_strides, column_strides = strides[: len(rows)], strides[len(rows) :]
        terms: list[tuple[str, int]] = []
        pattern: list[tuple[int, str]] = []
        if rows:
            terms += [(v, stride) for v, stride in zip(at.loops, row_strides)]
            cut = self.blocks.sliced
            inner = _merged(zip(row_strides[cut + 1 :], rows[cut + 1 :]))
            pattern = [(row_strides[cut], at.sliced), *((stride, str(n)) for stride, n in inner)]
            if len(inner) == 1 and row_strides[cut] == inner[0][0] * inner[0][1]:
                pattern = [(inner[0][0], at.rows)]
        else:
            pattern = [(0, "1")]
        constant = a.extent == "full" and not any(column_strides)
        if a.extent == "row" or constant:
            pattern.append((1, "1"))
        elif len(columns) == 1:
            terms.append((at.column, column_strides[0]))
            pattern.append((column_strides[0], at.columns))
        else:
            pattern += [(stride, str(n)) for stride, n in _merged(zip(column_strides, columns))]
        offset = _sum(*terms, constant=base)
        text = ", ".join(f"[{stride}, {n}]" for stride, n in pattern)
        return f"{name}.ap(pattern=[{text}], offset={offset})", pattern, a.extent == "row" or constant

    def _load(self, s: Step, at: Block) -> None:
        a = self.p.accesses[s.access]
        place, pattern, thin = self._place(s.access, at)
        lane = "int32" if a.integer else "float32"
        columns = "1" if thin else at.columns
        if len(pattern) == 2:
            self._let(s.out, f"nl.load({place}{'' if a.dtype == lane else f', dtype=nl.{lane}'})", not thin)
            return
        self._let(s.out, f"nl.ndarray(({at.rows}, {columns}), dtype=nl.{lane}, buffer=nl.sbuf)", not thin)
        self._write(f"nisa.dma_copy(dst=v{s.out}, src={place})")

    def _store(self, s: Step, at: Block) -> None:
        place, _, _ = self._place(s.access, at)
        self._write(f"nl.store({place}, {self._input(s, 0, s.extent != 'row', at)})")

    # ---- steps
    def _reduction(self, s: Step) -> Reduction:
        return REDUCTIONS[s.op if s.kind == "reduce" else s.kind]

    def _reduced(self, s: Step, at: Block) -> list[str]:
        """The inputs of a reduction as tiles."""
        return [self._input(s, k, True, at) for k in range(len(s.inputs))]

    def _step(self, s: Step, at: Block) -> None:
        """A step of a block whose rows are whole, or one that is no reduction."""
        if s.kind == "load":
            self._load(s, at)
        elif s.kind == "store":
            self._store(s, at)
        elif s.kind == "map":
            self._map(s, at)
        elif s.kind == "scatter":
            tiles = [self._input(s, k, True, at) for k in range(2)]
            self._let(s.out, f"scatter({tiles[0]}, {tiles[1]}, {at.column})", True)
        elif s.kind == "accumulate":
            op, text, _ = ACCUMULATIONS[s.op]
            tile = text.format(self._input(s, 0, True, at))
            self._write(f"add_rows({op}, {tile}, c{s.out}, {_sum(*at.row)}, {at.column})")
        else:
            row = self._reduction(s)
            text = row.short if self.space.columns <= PIECE else row.long
            self._let(s.out, text.format(*self._reduced(s, at), column="0"), False)

    # ---- loops
    def _for(self, index: str, n: int, step: int) -> str:
        """A loop over 0, step, ...; returns its index, which is 0 if there is nothing to loop over."""
        if n <= step:
            return "0"
        self._write(f"for {index} in range({f'0, {n}, {step}' if step > 1 else n}):")
        self.depth += 1
        return index

    def _count(self, name: str, step: int, n: int, index: str) -> str:
        """How many of n there are from index on, at most `step`."""
        if n % step == 0 or n < step:
            return str(min(n, step))
        self._write(f"{name} = min({step}, {n} - {index})")
        return name

    def _columns(self, at: Block, first: str, last: int, width: int, of: int) -> Block:
        """A loop over the columns of a row or of a piece of one, which begins at `first`."""
        if first == "0":
            column = self._for("column", last, width)
        else:
            self._write(f"for column in range({first}, min({first} + {last}, {of}), {width}):")
            self.depth += 1
            column = "column"
        columns = self._count("f", width, of, column)
        return Block(at.rows, columns, column, at.row, at.loops, at.sliced)

    def _body(self) -> None:
        steps = [s for s in self.p.steps if s.extent != "column" or s.kind == "accumulate"]
        b, loops, row = self.blocks, [], []
        for d in range(b.sliced):
            loops.append(self._for(f"i{d}", b.sizes[d], 1))
            row.append((loops[-1], math.prod(b.sizes[d + 1 :])))
        index = self._for("row" if len(b.sizes) == 1 else f"i{b.sliced}", b.sizes[b.sliced], b.slice)
        sliced = self._count("p" if b.inner == 1 else "q", b.slice, b.sizes[b.sliced], index)
        row.append((index, b.inner))
        rows = sliced if b.inner == 1 else str(int(sliced) * b.inner) if sliced.isdigit() else "p"
        if rows == "p" != sliced:
            self._write(f"p = {sliced} * {b.inner}")
        at = Block(rows, str(self.space.columns), "0", tuple(row), (*loops, index), sliced)
        if self.space.width >= self.space.columns:
            for s in steps:
                self._step(s, at)
        elif self.p.has_rows:
            self._passes(steps, at)
        else:
            at = self._columns(at, "0", self.space.columns, self.space.width, self.space.columns)
            for s in steps:
                self._step(s, at)
        self.depth = 1

    def _passes(self, steps: list[Step], at: Block) -> None:
        """Long rows: a pass over their columns for the reductions that need no other, one for those that need these,
        and so on. What passes need of each column they compute again."""
        level, makers = dict.fromkeys(range(len(self.p.values)), 0), {s.out: s for s in steps if s.out is not None}
        ends = [s for s in steps if s.kind in ("reduce", "gather")]
        for s in steps:
            if s.out is not None:
                level[s.out] = max((level[v] for v in s.inputs), default=0) + (s in ends)
        last = [s for s in steps if s.kind == "accumulate" or (s.kind == "store" and s.extent == "full")]
        final = max([0, *(level[v] for s in [*ends, *last] for v in s.inputs)])
        row_steps = [s for s in steps if s.extent == "row" and s not in ends and s.kind != "store"]
        depth = self.depth
        for k in range(final + 1):
            for s in [s for s in row_steps if level[s.out] <= k]:
                self._step(s, at)
                row_steps.remove(s)
            here = [s for s in ends if max(level[v] for v in s.inputs) == k]
            targets = here + (last if k == final else [])
            if not targets:
                continue
            needed, open_values = set(), [v for s in targets for v in s.inputs]
            while open_values:
                s = makers.get(open_values.pop())
                if s and s.extent == "full" and s not in needed:
                    needed.add(s)
                    open_values += s.inputs
            self._pass([s for s in steps if s in needed or s in targets], here, at)
            self.depth = depth
            for s in here:
                self._let(s.out, self._reduction(s).merge.format(f"parts{s.out}"), False)
        for s in [*row_steps, *(s for s in steps if s.kind == "store" and s.extent == "row")]:
            self._step(s, at)

    def _pass(self, steps: list[Step], reductions: list[Step], at: Block) -> None:
        n, width = self.space.columns, self.space.width
        piece = min(n, PIECE)
        for s in reductions:
            dtype = "int32" if self.lanes[s.out] == "i32" else "float32"
            self._write(f"parts{s.out} = nl.ndarray(({at.rows}, {-(-n // piece)}), dtype=nl.{dtype}, buffer=nl.sbuf)")
        in_pieces = bool(reductions) and width < piece
        first, length, depth = "0", str(n), self.depth
        if in_pieces:  # tiles are narrower than what a reduction takes: its input is gathered first
            first = self._for("piece", n, piece)
            length = self._count("length", piece, n, first)
            for s in reductions:
                dtype = "int32" if self._lane_of_use(s, 0) == "i32" else "float32"
                self._write(f"piece{s.out} = nl.ndarray(({at.rows}, {length}), dtype=nl.{dtype}, buffer=nl.sbuf)")
            depth = self.depth
        block = self._columns(at, first, piece if in_pieces else n, width, n)
        for s in steps:
            if s not in reductions:
                self._step(s, block)
            elif in_pieces:
                slot = _sum((block.column, 1)) + (f" - {first}" if first != "0" else "")
                tile = self._reduced(s, block)[0]
                self._write(f"nisa.tensor_copy(dst=piece{s.out}[:, nl.ds({slot}, {block.columns})], src={tile})")
            else:
                text = self._reduction(s).short.format(*self._reduced(s, block), column=block.column)
                self._write(f"nisa.tensor_copy(dst=parts{s.out}[:, nl.ds({block.column} // {piece}, 1)], src={text})")
        self.depth = depth
        if in_pieces:
            whole = Block(at.rows, length, first, at.row, at.loops, at.sliced)
            for s in reductions:
                tiles = [f"piece{s.out}", *self._reduced(s, whole)[1:]]
                text = self._reduction(s).short.format(*tiles, column=first)
                self._write(f"nisa.tensor_copy(dst=parts{s.out}[:, nl.ds({first} // {piece}, 1)], src={text})")

    def _column_steps(self) -> None:
        """What follows when all rows have been added up."""
        steps = [s for s in self.p.steps if s.extent == "column"]
        if not steps:
            return
        for s in steps:
            if s.kind == "accumulate":
                self._write(f"c{s.out} = fold_rows({ACCUMULATIONS[s.op][0]}, c{s.out})")
        width = min(self.space.columns, FLAT_COLUMNS)
        if len(self.space.column_sizes) > 1:
            width = self.space.columns
        at = self._columns(Block("1", "", "0", (("0", 1),), (), ""), "0", self.space.columns, width, self.space.columns)
        for s in steps:
            if s.kind == "accumulate":
                place = f"c{s.out}[0:1, nl.ds({at.column}, {at.columns})]"
                self._let(s.out, ACCUMULATIONS[s.op][2].format(f"nl.load({place})"), True)
            else:
                self._step(s, at)
        self.depth = 1

    def _copies(self, stores: bool) -> None:
        """Accesses in another order than the space's go by way of HBM."""
        written = {s.access for s in self.p.steps if s.kind == "store"}
        for i in sorted(self.space.copied):
            a = self.p.accesses[i]
            memory = self.memories[a.storage, a.dtype]
            dims = ", ".join(f"[{stride}, {n}]" for n, stride in a.dims)
            place = f"{memory.name}.ap(pattern=[{dims}], offset={a.offset - memory.offset})"
            if not stores:
                n = math.prod(n for n, _ in a.dims)
                self._write(f"a{i} = nl.ndarray(({n},), dtype=nl.{a.dtype}, buffer=nl.hbm)")
            if stores and i in written:
                self._write(f"nisa.dma_copy(dst={place}, src=a{i})")
            elif not stores and i not in written:
                self._write(f"nisa.dma_copy(dst=a{i}, src={place})")

    # ---- the file
    def source(self) -> Source:
        """The whole text."""
        self._body()
        self._column_steps()
        self._copies(stores=True)
        results = [m.name for m in self.memories.values() if m.result]
        self._write(f"return {', '.join(results)}")
        body, self.lines = self.lines, []
        for m in self.memories.values():
            if not m.argument:
                self._write(f"{m.name} = nl.ndarray(({m.size},), dtype=nl.{m.dtype}, buffer=nl.shared_hbm)")
        for (text, dtype), name in self.constants.items():
            self._write(f"{name} = nl.full(({PARTITIONS}, 1), {text}, dtype={dtype}, buffer=nl.sbuf)")
        for s in self.p.steps:
            if s.kind == "accumulate":
                shape = f"({-(-self.p.rows // CHUNK)}, {self.p.columns})"
                self._write(f"c{s.out} = nl.ndarray({shape}, dtype=nl.float32, buffer=nl.hbm)")
        self._copies(stores=False)
        body = self.lines + body
        memories = tuple(self.memories.values())
        numbers = self._numbers()
        arguments = ", ".join([*(m.name for m in memories if m.argument), *(name for name, _ in numbers)])
        functions = _functions_for("\n".join(body))
        parts = [
            self._head(memories, numbers, "\n".join([*functions, *body])),
            "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n",
            *(f"\n{text}\n" for text in functions),
            "\n@nki.jit\n" + f"def kernel({arguments}):\n" + "\n".join(body) + "\n",
            self._main(memories, numbers),
        ]
        return Source(_name(self.p), "\n".join(parts), memories, numbers)

    def _numbers(self) -> tuple[tuple[str, float | int], ...]:
        words = {self.p.values[s.inputs[0]][2] + i for s in self.p.steps if s.op == "uniform_bits" for i in range(4)}
        found: list[tuple[str, float | int]] = []
        for index, bits in enumerate(self.p.numbers):
            if index in words:
                found.append((f"s{index}", bits))
            elif self.used.get(index) == "i32":
                found.append((f"s{index}", _signed(bits)))
            else:
                found.append((f"s{index}", struct.unpack("<f", struct.pack("<I", bits))[0]))
        return tuple(found)

    def _head(self, memories: Sequence[Memory], numbers: Sequence[tuple[str, Any]], text: str) -> str:
        p = self.p
        space = f"{p.rows:,} rows of {p.columns:,} columns" if p.has_rows else f"{p.rows:,} elements"
        lines = [f'"""A fused program of TorchNeuron: {len(p.steps)} steps on {space}.', ""]
        lines += _wrapped("PyTorch's operators: " + ", ".join(p.operators) + ".")
        if refused := [f"nl.{f}" for f in SIMULATOR_ONLY if re.search(rf"\bnl\.{f}\b", text)]:
            lines += ["", *_wrapped(f"Simulators run it; Neuron devices refuse {', '.join(refused)}.")]
        lines.append("")
        for m in memories:
            role = ("read and written" if m.argument else "made here") if m.result else "read"
            lines.append(f"{m.name}: {m.size:,} elements of {m.dtype}, {role}")
        for name, value in numbers:
            lines.append(f"{name}: a number, {value!r} when the program ran")
        return "\n".join(lines) + '\n"""\n'

    def _main(self, memories: Sequence[Memory], numbers: Sequence[tuple[str, Any]]) -> str:
        lines = ['\nif __name__ == "__main__":', "    import torch", "", "    torch.manual_seed(0)"]
        for m in memories:
            if m.argument:
                lines.append(f"    {m.name} = {_random(m, self.p.columns)}")
        for name, value in numbers:
            text = repr(value) if math.isfinite(value) else f'float("{value}")'
            lines.append(f"    {name} = {text}")
        arguments = ", ".join([*(m.name for m in memories if m.argument), *(name for name, _ in numbers)])
        names = _tuple([f'"{m.name}"' for m in memories if m.result])
        lines += [
            f"    results = kernel({arguments})",
            f"    for name, result in zip({names}, results if isinstance(results, tuple) else (results,)):",
            '        print(name, tuple(result.shape), result.dtype, result[:8].tolist())',
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118)


def _random(m: Memory, columns: int) -> str:
    """The text of random elements."""
    if m.dtype == "bool_":
        return f"torch.randint(0, 2, ({m.size},)).bool()"
    if m.dtype.startswith(("float", "bfloat")):
        cast = "" if m.dtype == "float32" else f".to(torch.{m.dtype})"
        return f"torch.randn({m.size}){cast}"
    return f"torch.randint(0, {min(max(columns, 2), 100)}, ({m.size},), dtype=torch.{m.dtype})"


def _name(p: Program) -> str:
    """A name for a file: the operators, as far as there is room, and the shape."""
    names = re.sub(r"\W+", "_", "_".join(dict.fromkeys(p.operators))).strip("_")[:60].rstrip("_")
    return f"{names}_{p.rows}x{p.columns}" if p.has_rows else f"{names}_{p.rows}"


def print_source(program: Program) -> Source:
    """The NKI source of a program. NoNkiForm if a step has no form there."""
    return Printer(program).source()
