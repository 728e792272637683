"""@nki.jit and nki.simulate: kernels as callables on arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from torchneuron import env

from .. import _core
from ..perf import targets
from . import arrays, dtypes, errors
from . import session as sessions
from .session import Launch, Session, Storage, hbm, shared_hbm
from .tensor import NkiTensor, allocate

# What tracing reads of the environment.
_TRACE_READS = (env.MX_SCALE, env.DMA_TRANSPOSE_ON_PE, env.NKI_SPILL)


def _tensor_of(session: Session, given: arrays.Input, number: int) -> NkiTensor:
    """The caller's array `number` as an HBM tensor of a session."""
    size = int(np.prod(given.shape, dtype=np.int64)) * given.dtype.itemsize
    if size and given.memory is not None:
        raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(given.pointer))
    else:
        raw = np.empty(0, np.uint8)
    session.keep.append(given)
    buffer = hbm if session.launch.lnc == 1 else shared_hbm
    return allocate(given.shape, given.dtype, buffer, f"input{number}", array=raw)


@dataclasses.dataclass
class HbmBuffer:
    """HBM that a launch needs: with values, 0 at first (`cleared`) or with anything in it."""

    size: int
    cleared: bool
    values: np.ndarray | None = None


@dataclasses.dataclass
class TracedCore:
    """One core's program, and what is behind its HBM storages."""

    session: Session
    inputs: list[int]  # storage of each array argument
    buffers: list[tuple[int, int]]  # storage, number of a buffer of the launch
    constants: list[tuple[int, np.ndarray]]  # storage, values that nothing writes


@dataclasses.dataclass
class Traced:
    """A kernel traced for one signature."""

    firsts: list[int]  # for each array argument the first one that is the same memory
    cores: list[TracedCore] = dataclasses.field(default_factory=list)
    buffers: list[HbmBuffer] = dataclasses.field(default_factory=list)
    written: list[int] = dataclasses.field(default_factory=list)  # arguments, by their firsts, that the kernel writes
    result: object = None  # the kernel's result with Output or _Argument in place of tensors


@dataclasses.dataclass(frozen=True)
class _Argument:
    """In a result: the caller's array number `index`, or what `view` shows of it."""

    index: int
    view: arrays.Output | None = None


def _map_result(value: object, f: Callable[[object], object]) -> object:
    if isinstance(value, (NkiTensor, arrays.Output, _Argument)):
        return f(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_result(v, f) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map_result(v, f) for v in value)
    if isinstance(value, dict):
        return {k: _map_result(v, f) for k, v in value.items()}
    return value


def _result_of(inputs: list[int], for_torch: bool, t: NkiTensor) -> arrays.Output | _Argument:
    """What stands for a returned tensor; inputs: storages of the arguments."""
    if t.storage.id not in inputs:
        return arrays.Output(t, for_torch)
    return _Argument(inputs.index(t.storage.id), None if t.is_whole() else arrays.Output(t, for_torch))


@contextlib.contextmanager
def _at_kernel(func: Callable, operand: str = "") -> Iterator[None]:
    """Errors inside name the kernel, and its first line."""
    try:
        yield
    except errors.NkiError as e:
        code = inspect.unwrap(func).__code__
        e.instruction, e.location = code.co_name, f"{code.co_filename}:{code.co_firstlineno}"
        e.operand = operand or e.operand
        raise


def _check_types(func: Callable, found: list[object]) -> None:
    """NkiValidationError if an array has a type that NKI has not."""
    for i, x in enumerate(found):
        with _at_kernel(func, f"argument {i}"):
            dtypes.dtype(x.dtype)


def _returned(func: Callable, result: object, inputs: list[NkiTensor], for_torch: bool) -> object:
    """A kernel's result with what stands for its tensors; NkiValidationError if one cannot be returned."""
    with _at_kernel(func):
        return _map_result(result, functools.partial(_result_of, [t.storage.id for t in inputs], for_torch))


def _check_written(launch: Launch, func: Callable, result: object, inputs: list[NkiTensor]) -> None:
    """NkiUninitialisedReadError if a tensor that the first core made and returns is written by no core."""
    given = {id(t.storage) for t in inputs}

    def check(t: NkiTensor) -> None:
        own, session = t.storage, t.storage.session
        if t.on_chip or not t.size or own.written or id(own) in given or own.id in session.constants:
            return
        if any(s.read_values for s in launch.sessions):  # another path may write it
            return
        key = own.key
        if key is None or not any(
            s.written for other in launch.sessions for s in other.storages if isinstance(s, Storage) and s.key == key
        ):
            raise errors.NkiUninitialisedReadError(
                inspect.unwrap(func).__name__,
                own.name,
                "is returned, and nothing writes it",
                session.locate(own.source),
            )

    _map_result(result, check)


def _as_results(result: object, given: list[arrays.Input], like: object, memory: Callable[[int], object]) -> object:
    """The result of `_returned` with arrays like `like`. memory: the bytes of a storage of the first core."""

    def one(r: arrays.Output | _Argument) -> object:
        if isinstance(r, arrays.Output):
            return arrays.as_result(r, memory(r.storage), like)
        x = given[r.index]
        return x.array if r.view is None else arrays.as_result(r.view, arrays.bytes_of(x.memory), x.array)

    return _map_result(result, one)


def _result_storages(result: object, inputs: Iterable[NkiTensor]) -> set[int]:
    """Storages that the caller sees: returned tensors and written arguments."""
    found = {t.storage.id for t in inputs if t.storage.written}
    _map_result(result, lambda t: found.add(t.storage.id))
    return found


def _run(session: Session, func: Callable, given: list[arrays.Input], args: tuple, kwargs: dict) -> tuple:
    """The kernel's result in a session and the tensors that it got for the arrays `given`: one for each Input."""
    tensors: list[NkiTensor] = []

    def swap(x: object) -> NkiTensor:
        n = len(tensors)
        first = given.index(given[n])
        tensors.append(_tensor_of(session, given[n], n) if first == n else tensors[first])
        return tensors[n]

    # In the session, whose errors get the kernel's line.
    result = sessions.run(session, lambda: func(*arrays.replace(args, swap), **arrays.replace(kwargs, swap)))
    session.finish(_result_storages(result, tensors))
    return result, tensors


class Kernel(arrays.Opaque):
    """A kernel function on arrays; kernel[n] is the kernel on n cores.

    Called on NumPy arrays or torch tensors it returns the same kind. It is traced once per signature (shapes, types and
    other arguments) into a program; kernels whose Python depends on values run step by step. Arguments that the kernel
    writes change in place. func: the Python function.
    """

    def __init__(
        self,
        func: Callable,
        lnc: int = 1,
        grid: bool = False,
        step: bool = False,
        variants: dict[int, Kernel] | None = None,
    ) -> None:
        self.func, self.lnc, self.grid, self.step = func, lnc, grid, step
        self.cache: dict[object, Traced | None] = {}
        # Made here, so that Dynamo, which cannot make kernels, finds them.
        self.variants = {} if variants is None else variants
        if variants is None:
            self.variants.update({n: Kernel(func, n, True, step, self.variants) for n in (1, 2)})
        functools.update_wrapper(self, func)

    def __getitem__(self, grid: int | Sequence[int]) -> Kernel:
        sizes = grid if isinstance(grid, (tuple, list)) else (grid,)
        if not all(type(n) is int or isinstance(n, np.integer) for n in sizes) or math.prod(sizes) not in self.variants:
            raise errors.NkiValidationError(self.__name__, "grid", f"{grid!r} must be 1 or 2 cores")
        return self.variants[math.prod(sizes)]

    def with_schedule(self, schedule: Iterable[tuple[str, str | Sequence[str]]]) -> Kernel:
        """The kernel. Ordering hints, (consumer, producers) by the instructions' names, change nothing that can be
        observed."""
        return self

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self if instance is None else functools.partial(self, instance)

    def __deepcopy__(self, memo: dict) -> Kernel:
        return self

    def __call__(self, *args: object, **kwargs: object) -> object:
        if sessions.active() is not None:  # a kernel inside a kernel is a function
            return self.func(*args, **kwargs)
        torch = arrays._torch()
        if torch is not None:
            if torch.compiler.is_dynamo_compiling():
                from .torch_ops import wrap_nki

                return wrap_nki(self)(*args, **kwargs)
        found = arrays.found(args, kwargs)
        if any(map(arrays.is_fake, found)):
            return self._infer(args, kwargs, found)
        if self.step or env.NKI_SIMULATOR.get():
            return self.run_steps(args, kwargs)
        traced = self.trace(args, kwargs)
        if traced is not None and traced.written and len(found) > 1:
            traced = self._trace_shared(traced, found, args, kwargs)
        return self.run_steps(args, kwargs) if traced is None else self.launch(traced, found)

    def _trace_shared(self, traced: Traced, found: list[object], args: tuple, kwargs: dict) -> Traced | None:
        """The program where arguments are the same memory, one of which it writes. None if they share some of it in
        another way, which only steps, one after the other, see as it is."""
        firsts = arrays.firsts(found)
        for i in {firsts[i] for i in traced.written}:
            if any(arrays.share_memory(found[i], found[j]) for j in set(firsts) if i != j):
                return None
        return self.trace(args, kwargs, firsts=firsts)

    def _infer(self, args: tuple, kwargs: dict, found: list[object]) -> object:
        """Results for fake tensors: shapes and types from tracing."""
        traced = self.trace(args, kwargs) or self._trace(args, kwargs, targets.default(), runs=False)
        for i in traced.written:
            arrays.check_writable(found[i], i, self.__name__)
        numbers = dict(traced.cores[0].buffers)
        like = next(filter(arrays.is_fake, found))
        memories = [like.new_empty(b.size, dtype=arrays.torch_dtype(dtypes.uint8)) for b in traced.buffers]
        given = [arrays.as_fake_input(x) for x in found]
        return _as_results(traced.result, given, like, lambda storage: memories[numbers[storage]])

    # ---- step by step
    def run_steps(self, args: tuple, kwargs: dict, target: targets.Target | None = None) -> object:
        """Runs every instruction when its line runs."""
        return run_steps(self, [(args, kwargs)], target)[0]

    # ---- traced
    def trace(
        self, args: tuple, kwargs: dict, target: targets.Target | None = None, firsts: list[int] | None = None
    ) -> Traced | None:
        """The program for these arguments, from the cache or made now; None: the kernel must run step by step.

        firsts: for each array the first one that is the same memory (None: they are all different).
        """
        target = target or targets.default()
        try:
            key = (target.name, *(v.get() for v in _TRACE_READS), firsts and tuple(firsts), arrays.key((args, kwargs)))
        except arrays.Unhashable:
            key = None
        if key is not None and key in self.cache:
            return self.cache[key]
        try:
            traced = self._trace(args, kwargs, target, firsts=firsts)
        except errors.DataDependentError:
            traced = None
        if key is not None:
            self.cache[key] = traced
        return traced

    def _trace(
        self, args: tuple, kwargs: dict, target: targets.Target, runs: bool = True, firsts: list[int] | None = None
    ) -> Traced:
        """runs=False: for shapes and time only, so that what a kernel prints does not matter."""
        launch = Launch(self.lnc)
        found = arrays.found(args, kwargs)
        _check_types(self.func, found)
        firsts = firsts or list(range(len(found)))
        shapes = [_shape_only(x) for x in found]
        traced = Traced(firsts=firsts)
        numbers: dict[object, int] = {}  # buffers that cores share
        for core in range(self.lnc):
            session = Session(False, target, launch, core, grid=self.grid)
            session.runs = runs
            launch.sessions.append(session)
            result, tensors = _run(session, self.func, [shapes[i] for i in firsts], args, kwargs)
            session.program.seal(self.lnc > 1)
            inputs = [t.storage.id for t in tensors]
            seen = _result_storages(result, tensors)
            buffers, constants = [], []
            for s in session.storages:
                if s.buffer.on_chip or s.id in inputs:
                    continue
                constant = s.id in session.constants
                if constant and not s.written and s.id not in seen:
                    constants.append((s.id, s.array))
                    continue
                shared = self.lnc > 1 and s.key is not None
                number = numbers.setdefault(s.key if shared else (core, s.id), len(traced.buffers))
                if number == len(traced.buffers):
                    cleared = shared or not session.program.all_written(s.id)
                    traced.buffers.append(HbmBuffer(s.array.size, cleared, s.array if constant else None))
                buffers.append((s.id, number))
            traced.cores.append(TracedCore(session, inputs, buffers, constants))
            written = {firsts[i] for i, t in enumerate(tensors) if t.storage.written}
            traced.written = sorted(written.union(traced.written))
            if core == 0:
                first = result, tensors
                traced.result = _returned(self.func, *first, bool(found) and arrays.is_torch(found[0]))
            for s in session.storages:  # what was traced holds no data
                if s.id not in session.constants:
                    s.array = None
        _check_written(launch, self.func, *first)
        if self.lnc > 1:
            sessions.warn_of_races(launch)
        return traced

    def launch(self, traced: Traced, found: list[object]) -> object:
        """Runs a traced kernel on its arrays."""
        for i in traced.written:
            arrays.check_writable(found[i], i, self.__name__)
        given: list[arrays.Input] = []
        for i, first in enumerate(traced.firsts):
            given.append(arrays.as_input(found[i]) if first == i else given[first])
        like = found[0] if found else None
        memories = [arrays.new_memory(like, b.size, b.cleared, b.values) for b in traced.buffers]
        cores = []
        for core, t in enumerate(traced.cores):
            cores.append(_core.Core(t.session.program, core, 0))
            for storage, x in zip(t.inputs, given):
                cores[core].bind(storage, x.pointer)
            for storage, number in t.buffers:
                cores[core].bind(storage, memories[number][1])
            for storage, values in t.constants:
                cores[core].bind(storage, values.ctypes.data)
        try:
            _core.run(cores)
        except _core.Error as e:
            raise traced.cores[0].session.error(e, 0) from None
        for i in traced.written:
            given[i].finish_write()
        numbers = dict(traced.cores[0].buffers)
        return _as_results(traced.result, given, like, lambda storage: memories[numbers[storage]][0])

    def plain_launch(self, args: tuple, kwargs: dict) -> dict | None:
        """The launch on these torch tensors as numbers, for who runs it without Python. None if it has to be called.

        cores: address of each core's program, storage of each tensor, (storage, buffer) pairs, (storage, address) pairs
        of constants; buffers: bytes and whether they are 0 at first; results, but for arguments: which buffer, torch
        dtype, sizes, strides and offset in elements; keep: the owner of what the addresses point to.
        """
        if self.step or env.NKI_SIMULATOR.get():
            return None
        traced = self.trace(args, kwargs)
        if traced is None or traced.written or any(b.values is not None for b in traced.buffers):
            return None
        results: list[arrays.Output] = []
        if not _collect(traced.result, results):
            return None
        cores = [
            {
                "program": t.session.program.address,
                "inputs": t.inputs,
                "buffers": t.buffers,
                "constants": [(storage, values.ctypes.data) for storage, values in t.constants],
            }
            for t in traced.cores
        ]
        numbers = dict(traced.cores[0].buffers)
        return {
            "cores": cores,
            "buffers": [(b.size, b.cleared) for b in traced.buffers],
            "results": [_plain(r, numbers[r.storage]) for r in results],
            "keep": traced,
        }


def _collect(result: object, outputs: list[arrays.Output]) -> bool:
    """Appends the tensors of a result that the kernel made. False if one of them shares memory with another one, or if
    there is a view of an argument: an operator's results share none."""
    returned: list[arrays.Output | _Argument] = []
    _map_result(result, returned.append)
    outputs += [r for r in returned if isinstance(r, arrays.Output)]
    views = any(isinstance(r, _Argument) and r.view is not None for r in returned)
    return not views and len({r.storage for r in outputs}) == len(outputs)


def _plain(result: arrays.Output, buffer: int) -> dict:
    return {
        "buffer": buffer,
        "dtype": arrays.torch_dtype(result.dtype),
        "sizes": list(result.shape),
        "strides": list(result.strides),
        "offset": result.offset,
    }


def _shape_only(x: object) -> arrays.Input:
    """An argument for tracing: shape and type, and memory that is never touched."""
    return arrays.Input(None, arrays.sizes(x), dtypes.dtype(x.dtype), 0, None, False)


def run_steps(kernel: Kernel, ranks: Sequence[tuple[tuple, dict]], target: targets.Target | None = None) -> list:
    """Runs a kernel step by step on every rank's arguments, kernel.lnc cores each; returns the ranks' results.

    Cores run one at a time and change where they wait for each other.
    """
    target = target or targets.default()
    launch = Launch(kernel.lnc, len(ranks))
    _check_types(kernel.func, [x for args, kwargs in ranks for x in arrays.found(args, kwargs)])
    given = [_step_inputs(arrays.found(args, kwargs)) for args, kwargs in ranks]
    ended: list[tuple[object, list[NkiTensor]] | None] = [None] * (len(ranks) * kernel.lnc)
    bodies = []
    for rank, (args, kwargs) in enumerate(ranks):
        for core in range(kernel.lnc):
            session = Session(True, target, launch, core, rank, kernel.grid)
            session.index = len(launch.sessions)
            launch.sessions.append(session)

            def body(session: Session = session, rank: int = rank, args: tuple = args, kwargs: dict = kwargs) -> None:
                ended[session.index] = _run(session, kernel.func, given[rank], args, kwargs)

            bodies.append(body)
    launch.waits = [False] * len(bodies)
    launch.ended = [False] * len(bodies)
    if len(bodies) == 1:
        bodies[0]()
    else:
        _run_together(launch, bodies)
    if kernel.lnc > 1:
        sessions.warn_of_races(launch)
    for result, tensors in ended[:: kernel.lnc]:
        _check_written(launch, kernel.func, result, tensors)
    return [
        _finish(kernel.func, given[rank], ended[rank * kernel.lnc : (rank + 1) * kernel.lnc])
        for rank in range(len(ranks))
    ]


def _step_inputs(found: list[object]) -> list[arrays.Input]:
    """The arrays as kernel memory; those that are the same memory, seen in the same way, are one Input."""
    given: list[arrays.Input] = []
    for i, first in enumerate(arrays.firsts(found)):
        given.append(arrays.as_input(found[i], step=True) if first == i else given[first])
    return given


def _finish(func: Callable, given: list[arrays.Input], cores: list[tuple[object, list[NkiTensor]]]) -> object:
    """What a rank's kernel has written and its result, when all its cores have ended."""
    written = {given.index(given[i]) for _, tensors in cores for i, t in enumerate(tensors) if t.storage.written}
    for i in sorted(written):
        arrays.check_writable(given[i].array, i, func.__name__)
        for j, x in enumerate(given):
            if x is not given[i] and (x.is_copy or given[i].is_copy) and arrays.share_memory(x.array, given[i].array):
                raise errors.NkiValidationError(
                    func.__name__, f"argument {i}",
                    f"(of the arrays, from 0) is written and shares memory with argument {j}; they must be contiguous "
                    "and writable then: pass a copy of one of them",
                )  # fmt: skip
    for i in written:
        given[i].finish_write()
    out, tensors = cores[0]
    like = given[0].array if given else None
    memories: dict[int, object] = {}

    def keep(t: NkiTensor) -> None:
        if t.storage.id not in memories and not t.on_chip:
            memories[t.storage.id] = arrays.memory_like(t.storage.array, like)

    _map_result(out, keep)
    return _as_results(_returned(func, out, tensors, arrays.is_torch(like)), given, like, memories.__getitem__)


def _run_together(launch: Launch, bodies: list[Callable[[], None]]) -> None:
    def work(index: int) -> None:
        failure = None
        try:
            launch.wait_turn(index)
            bodies[index]()
        except sessions._Cancelled:
            pass
        except BaseException as e:  # noqa: BLE001 - handed to the caller
            failure = e
        launch.end(index, failure)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, len(bodies))]
    for t in threads:
        t.start()
    work(0)
    for t in threads:
        t.join()
    if launch.failure:
        raise launch.failure


def jit(fn: Callable | None = None, **kwargs: object) -> Callable:
    """Makes a kernel of a function. The vendor's options (kwargs) are accepted; mode="simulation" runs step by step."""
    if fn is None:
        return functools.partial(jit, **kwargs)
    if isinstance(fn, Kernel):
        return fn
    return Kernel(fn, step=kwargs.get("mode") == "simulation")


def simulate_ranks(kernel: Kernel | Callable, ranks: Sequence[Sequence[object] | Mapping[str, object]]) -> list:
    """Runs the kernel step by step on several ranks, which nki.collectives connect. ranks: each rank's arguments, by
    position or by name; returns each rank's result. kernel[2]: two cores per rank."""
    return run_steps(simulate(kernel), [((), dict(r)) if isinstance(r, Mapping) else (tuple(r), {}) for r in ranks])


def simulate(kernel: Kernel | Callable) -> Callable:
    """The kernel, run step by step: print, breakpoint and nl.device_print see values; limits, bounds, capacity and
    uninitialised reads are checked. NumPy in, NumPy out; torch in, torch out."""
    if not isinstance(kernel, Kernel):
        kernel = Kernel(inspect.unwrap(kernel))
    return Kernel(kernel.func, kernel.lnc, kernel.grid, step=True)
