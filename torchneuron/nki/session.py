"""What runs while a kernel's Python runs: the program being built, or the core that executes it step by step."""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable

import numpy as np

from torchneuron import env

from .. import _core
from ..perf import targets
from . import dtypes, errors

OPCODES = {i["name"]: i["opcode"] for i in _core.INSTRUCTIONS}
WRITTEN = {
    i["opcode"]: tuple(o["role"] in (0, 2) for o in i["operands"]) for i in _core.INSTRUCTIONS
}  # by operand: does the instruction write it
OPERANDS = {i["opcode"]: tuple(o["name"] for o in i["operands"]) for i in _core.INSTRUCTIONS}
PSUM_BANK_BYTES = 2048
PSUM_BYTES = 8 * PSUM_BANK_BYTES
_MOST_BYTES = 1 << 50  # of one tensor: more than any chip has, and no number of bytes overflows
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_state = threading.local()


class Buffer:
    """A memory: nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm."""

    def __init__(self, name: str, memory: str) -> None:
        self.name, self.code = name, _core.MEMORIES[memory]
        self.on_chip = memory in ("sbuf", "psum")

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __deepcopy__(self, memo: dict) -> Buffer:
        return self


sbuf, psum = Buffer("sbuf", "sbuf"), Buffer("psum", "psum")
hbm, shared_hbm = Buffer("private_hbm", "hbm"), Buffer("shared_hbm", "shared_hbm")


class Storage:
    """Memory behind tensors. shape and dtype are those it was allocated with."""

    __slots__ = (
        "id", "name", "buffer", "shape", "dtype", "row_elements", "array", "key", "written", "source", "session",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self, session: Session, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: dtypes.DType
    ) -> None:
        self.session, self.name, self.buffer, self.shape, self.dtype = session, name, buffer, shape, dtype
        self.row_elements = math.prod(shape[1:]) if buffer.on_chip else 0
        self.array: np.ndarray | None = None  # bytes of HBM
        self.key: tuple[bool, str, int] | None = None  # what names it on all cores that share it
        self.written = False
        self.source = 0  # line that allocated it


class Launch:
    """What the cores of one launch share: HBM tensors, and the baton that lets one of them run at a time."""

    def __init__(self, lnc: int = 1, ranks: int = 1) -> None:
        self.lnc, self.ranks = lnc, ranks
        self.shared: dict[tuple, tuple[np.ndarray, str]] = {}  # and where it was allocated
        self.sources: dict[tuple[str, int], int] = {}  # numbers of the kernel's lines, one for all cores
        self.places: dict[tuple[int, int], int] = {}  # the same by code object and instruction
        self.source_list: list[tuple[str, int]] = [("?", 0)]
        self.sessions: list[Session] = []
        self.waits: list[bool] = []
        self.ended: list[bool] = []
        self.turn = 0
        self.failure: BaseException | None = None
        self.condition = threading.Condition()

    def wait_turn(self, index: int) -> None:
        """Blocks until core `index` may run."""
        with self.condition:
            self.condition.wait_for(lambda: self.turn == index or self.failure)
            if self.failure:
                raise _Cancelled

    def meet(self, index: int) -> None:
        """Core `index` waits for others at its pending instruction; returns when they have met."""
        with self.condition:
            self.waits[index] = True
            self._pass_on()
            self.condition.wait_for(lambda: (self.turn == index and not self.waits[index]) or self.failure)
            if self.failure:
                raise _Cancelled

    def give_way(self, index: int) -> None:
        """Core `index` lets the others run up to their next write that all can see, then goes on."""
        with self.condition:
            self._pass_on()
            self.condition.wait_for(lambda: self.turn == index or self.failure)
            if self.failure:
                raise _Cancelled

    def end(self, index: int, failure: BaseException | None) -> None:
        with self.condition:
            self.ended[index] = True
            self.failure = self.failure or failure
            if not self.failure:
                self._pass_on()
            self.condition.notify_all()

    def _pass_on(self) -> None:
        n = len(self.sessions)
        ready = [i for i in range(n) if not self.ended[i] and not self.waits[i]]
        if not ready and not all(self.ended):
            try:
                released = _core.meet([s.core for s in self.sessions], self.waits)
            except _core.Error as e:
                self.failure = self.sessions[0].error(e, 0)
                return self.condition.notify_all()
            self.waits = [w and not r for w, r in zip(self.waits, released)]
            ready = [i for i in range(n) if not self.ended[i] and not self.waits[i]]
        if ready:
            after = [i for i in ready if i > self.turn] or ready
            self.turn = after[0]
        self.condition.notify_all()


def warn_of_races(launch: Launch) -> None:
    """Warns of the first race between the two cores of a rank, when both have run or have been traced."""
    for a, b in zip(launch.sessions[::2], launch.sessions[1::2]):
        same = [(s, b.shared_keys[k]) for k, s in a.shared_keys.items() if k in b.shared_keys]
        race = _core.find_race(a.program, b.program, same)
        if race is None:
            continue
        name, byte, *uses = race
        texts = [
            f"{instruction} of core {core} {'writes' if writes else 'reads'} it at {session.locate(source)}"
            for core, session, (instruction, writes, source) in zip((0, 1), (a, b), uses)
        ]
        warnings.warn(
            f"cores race for byte {byte} of {name}: {', '.join(texts)}; no core_barrier or sendrecv is between them",
            errors.NkiRaceWarning,
            stacklevel=3,
        )


class _Cancelled(BaseException):
    """Another core of the launch has failed."""


class Session:
    """One core's run of a kernel's Python.

    step: every instruction runs when it is issued. Otherwise instructions are appended to `program`.
    """

    def __init__(
        self, step: bool, target: targets.Target, launch: Launch, program_id: int = 0, rank: int = 0, grid: bool = False
    ) -> None:
        self.step, self.target, self.launch = step, target, launch
        self.program_id, self.rank, self.grid = program_id, rank, grid
        self.runs = True  # False: traced for its shapes or its time only
        self.wide = step and not env.NKI_PRECISE_FP.get()
        self.program = _core.Program(target.generation)
        if launch.lnc > 1:
            self.program.follow_shared()
        self.core = _core.Core(self.program, program_id, rank)
        self.storages: list[weakref.ref[Storage] | Storage] = []
        self.sources, self.places, self.source_list = launch.sources, launch.places, launch.source_list
        self.last_source = 0
        self.shared_names: dict[tuple[bool, str], int] = {}  # how many tensors in shared_hbm have a name
        self.keep: list[object] = []
        self.shared_keys: dict[object, int] = {}  # storages in shared_hbm by what names them on all cores
        self.constants: set[int] = set()  # storages that a kernel made with values
        self.index = 0
        self.hbm_bytes = 0
        self.read_values = False  # what it does depends on values

    # ---- places in the kernel's text
    def source(self) -> int:
        """Number of the innermost line outside this package."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
            frame = frame.f_back
        place = (id(frame.f_code), frame.f_lasti)  # a line's number takes Python a search
        number = self.places.get(place)
        if number is None:
            self.keep.append(frame.f_code)
            key = (frame.f_code.co_filename, frame.f_lineno)
            number = self.places[place] = self.sources.setdefault(key, len(self.source_list))
            if number == len(self.source_list):
                self.source_list.append(key)
        self.last_source = number
        return number

    def locate(self, source: int) -> str:
        """file:line of a number made by `source`."""
        return "{}:{}".format(*self.source_list[source])

    def error(self, error: _core.Error, source: int) -> errors.NkiError:
        return errors.translate(error, self.locate, source)

    # ---- memory
    def new_storage(
        self,
        shape: tuple[int, ...],
        dtype: dtypes.DType,
        buffer: Buffer,
        name: str = "",
        address: tuple[int, int] | None = None,
        array: np.ndarray | None = None,
    ) -> Storage:
        """Allocates memory; array: bytes of an HBM tensor that the caller gives (initialised)."""
        source = self.source()
        storage = Storage(self, name or f"t{len(self.storages)}", buffer, shape, dtype)
        storage.source, itemsize = source, dtype.itemsize
        external = external_array = array is not None
        if buffer.on_chip:
            partitions, row_bytes = shape[0], storage.row_elements * itemsize
        else:
            partitions, row_bytes = 1, math.prod(shape) * itemsize
            external = external or (buffer is shared_hbm and self.launch.lnc * self.launch.ranks > 1)
        if partitions * row_bytes > _MOST_BYTES:
            raise errors.NkiCapacityError(
                "", storage.name, f"of shape {shape} has {partitions * row_bytes} bytes: no chip has so many"
            )
        if not buffer.on_chip:
            self.hbm_bytes += row_bytes
            if self.hbm_bytes > self.target.hbm_bytes:
                raise errors.NkiCapacityError(
                    "", storage.name,
                    f"of shape {shape} exceeds HBM: {self.hbm_bytes} bytes in all, a chip has {self.target.hbm_bytes}",
                )  # fmt: skip
        partition_start, offset = address if address is not None else (0, -1)
        if address is not None and buffer.on_chip:
            self._check_address(storage, partition_start, offset, partitions, row_bytes)
        storage.id = self.program.add_storage(
            storage.name, buffer.code, partitions, row_bytes, offset, partition_start, external, source
        )
        if buffer.on_chip:
            if self.step:
                self._check_memory(lambda: self.core.allocate(storage.id), storage)
                weakref.finalize(storage, _release, self.core, storage.id)
        else:
            storage.key = self._shared_key(buffer, name, external_array)
            if storage.key is not None:
                self.shared_keys[storage.key] = storage.id
            if array is None:
                array = self._check_memory(lambda: self._hbm(row_bytes, storage, source), storage)
            storage.array = array
            self.core.bind(storage.id, array.ctypes.data)
        self.storages.append(weakref.ref(storage) if buffer.on_chip and self.step else storage)
        if not self.step and buffer.on_chip:
            self.program.append(OPCODES["allocate"], _core.ENGINES["sync"], (), {"reg": storage.id}, (), source)
        return storage

    def _check_memory(self, allocate: Callable[[], object], storage: Storage) -> object:
        try:
            return allocate()
        except MemoryError:
            raise errors.NkiCapacityError(
                "", storage.name, f"of shape {storage.shape} does not fit this machine's memory"
            ) from None

    def _check_address(self, storage: Storage, partition: int, offset: int, partitions: int, row_bytes: int) -> None:
        """That a place which the kernel chose exists."""
        memory, capacity = ("PSUM", PSUM_BYTES) if storage.buffer is psum else ("SBUF", self.target.sbuf_bytes)
        if partition < 0 or offset < 0:
            raise errors.NkiValidationError("", storage.name, f"address ({partition}, {offset}) is negative")
        if partition + partitions > 128:
            raise errors.NkiValidationError(
                "", storage.name, f"partitions {partition} to {partition + partitions - 1} are more than {memory}'s 128"
            )
        if storage.buffer is psum and offset % PSUM_BANK_BYTES:
            raise errors.NkiValidationError(
                "", storage.name, f"PSUM address {offset} is not at a bank, a multiple of {PSUM_BANK_BYTES} bytes"
            )
        if offset + row_bytes > capacity and not self.wide:
            raise errors.NkiCapacityError(
                "", storage.name,
                f"lies at bytes {offset} to {offset + row_bytes - 1} of a partition: {memory} capacity exceeded, the "
                f"limit is {capacity}",
            )  # fmt: skip

    def _shared_key(self, buffer: Buffer, name: str, given: bool) -> tuple[bool, str, int] | None:
        """What names a new tensor on all cores: whose it is, its name, and how many of that name came before it. None:
        it is this core's own, as constants are."""
        if buffer is not shared_hbm or self.launch.lnc * self.launch.ranks == 1 or (given and not name):
            return None
        count = self.shared_names.get((given, name), 0)
        self.shared_names[given, name] = count + 1
        return (given, name, count)

    def _hbm(self, size: int, storage: Storage, source: int) -> np.ndarray:
        """Memory of a tensor that the kernel makes: 0 where it writes nothing."""
        if storage.key is None:
            return new_bytes(size, True)
        with self.launch.condition:
            array, where = self.launch.shared.setdefault(
                (self.rank, storage.key), (new_bytes(size, True), self.locate(source))
            )
        if array.size != size:
            raise errors.NkiValidationError(
                "", storage.name,
                f"of shape {storage.shape} has {size} bytes here and {array.size} on another core ({where}): in "
                "shared_hbm tensors of one name, or as many without one, are one on all cores",
            )  # fmt: skip
        return array

    def finish(self, results: Iterable[int]) -> None:
        """At the kernel's end: raises if more was live at once than fits, or if a result (a storage) was computed from
        what nothing wrote; warns if anything else was."""
        if not self.wide:  # what is kept in fp32 takes more than it would
            self._check_capacity()
        if self.program.loop_depth:
            raise errors.NkiValidationError("", "", "a device loop was left by break or return: it runs to its end")
        try:
            self.program.check_results(sorted(results))
        except _core.Error as e:
            raise self.error(e, 0) from None
        if not self.program.proves_unwritten_rows and (unused := self.program.first_read()):
            text = errors.with_places(unused, self.locate)
            warnings.warn(f"{text}; no result depends on it", errors.NkiUninitialisedReadWarning, stacklevel=2)

    def _check_capacity(self) -> None:
        try:
            self.program.check_capacity(self.target.sbuf_bytes)
        except _core.Error as e:
            if not env.NKI_SPILL.get():
                raise self.error(e, 0) from None
            warnings.warn(f"{self.error(e, 0)}; the compiler would spill", errors.NkiSpillWarning, stacklevel=3)

    # ---- instructions
    def emit(
        self, name: str, engine: int, operands: tuple, attrs: dict[str, float] | None = None, values: tuple = ()
    ) -> Instruction:
        """Issues one instruction. operands: access tuples, numbers or None, in the order of the table."""
        source = self.source()
        opcode = OPCODES[name]
        try:
            if self.step:
                if self.core.step(opcode, engine, operands, attrs or {}, values, source):
                    self.launch.meet(self.index)
                elif len(self.launch.sessions) > 1 and self._writes_shared(opcode, operands):
                    self.launch.give_way(self.index)
            else:
                self.program.append(opcode, engine, operands, attrs or {}, values, source)
        except _core.Error as e:
            raise self.error(e, source) from None
        return Instruction(name)

    def _writes_shared(self, opcode: int, operands: tuple) -> bool:
        """Does the instruction write HBM that the launch's cores share?"""
        shared = self.shared_keys.values()
        return any(w and type(o) is tuple and o[0] in shared for w, o in zip(WRITTEN[opcode], operands))


def _release(core: _core.Core, storage: int) -> None:
    core.release(storage)


def new_bytes(size: int, cleared: bool) -> np.ndarray:
    """Memory, aligned to a cache line; not cleared: it holds anything."""
    raw = (np.zeros if cleared else np.empty)(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


class Instruction:
    """Handle of an issued instruction; ordering hints on it change nothing that can be observed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def depends_on(self, *producers: Instruction) -> Instruction:
        """Ordering hint for the vendor's scheduler."""
        return self


def current() -> Session:
    """The session of the kernel that runs in this thread. RuntimeError outside of kernels."""
    session = getattr(_state, "session", None)
    if session is None:
        raise RuntimeError("NKI operations run inside kernels: call a function decorated with @nki.jit")
    return session


def active() -> Session | None:
    return getattr(_state, "session", None)


def run(session: Session, body: Callable[[], object]) -> object:
    """body() with `session` as this thread's session."""
    previous = getattr(_state, "session", None)
    _state.session = session
    try:
        return body()
    except errors.NkiError as e:
        errors.locate(e, _PACKAGE)
        raise
    finally:
        _state.session = previous
