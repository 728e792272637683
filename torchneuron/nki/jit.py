"""@nki.jit and nki.simulate: kernels as callables on arrays."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from torchneuron import env

from .. import _core
from ..perf import targets
from . import arrays, dtypes, errors
from . import session as sessions
from .session import Launch, Session, hbm, shared_hbm
from .tensor import NkiTensor, allocate


def _tensor_of(session: Session, given: arrays.Input) -> NkiTensor:
    """A caller's array as an HBM tensor of a session."""
    size = int(np.prod(given.shape, dtype=np.int64)) * given.dtype.itemsize
    if size and given.memory is not None:
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(given.pointer))
    else:
        raw = np.empty(0, np.uint8)
    session.keep.append(given)
    buffer = hbm if session.launch.lnc == 1 else shared_hbm
    return allocate(given.shape, given.dtype, buffer, f"input{len(session.keep) - 1}", array=raw)


@dataclasses.dataclass
class Traced:
    """A kernel traced for one signature: a program per core and where its arguments and results are."""

    programs: list[_core.Program]
    inputs: list[list[int]]  # per core: storage of each array argument
    written: list[int]  # arguments that the kernel writes
    # Per core: HBM storages (id, bytes, whether they are 0 at first, shared key or None).
    internal: list[list[tuple[int, int, bool, object]]]
    constants: list[list[tuple[int, np.ndarray]]]  # per core: storages with values of their own
    changed: list[set[int]]  # of those the ones that the kernel writes or returns
    result: object  # the kernel's result with Output or an argument's number in place of tensors
    sessions: list[Session]


@dataclasses.dataclass(frozen=True)
class _Argument:
    """In a result: the caller's array number `index`, or what `view` shows of it."""

    index: int
    view: arrays.Output | None = None


def _map_result(value: object, f: Callable[[object], object]) -> object:
    if isinstance(value, (NkiTensor, arrays.Output, _Argument)):
        return f(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_result(v, f) for v in value)
    if isinstance(value, dict):
        return {k: _map_result(v, f) for k, v in value.items()}
    return value


def _result_of(inputs: list[int], t: NkiTensor) -> object:
    """What stands for a returned tensor; inputs: storages of the arguments."""
    if t.storage.id not in inputs:
        return arrays.Output(t)
    return _Argument(inputs.index(t.storage.id), None if t.is_whole() else arrays.Output(t))


@contextlib.contextmanager
def _results_of(kernel: Kernel) -> Iterator[None]:
    """Errors about what a kernel returned name the kernel."""
    try:
        yield
    except errors.NkiError as e:
        code = inspect.unwrap(kernel.func).__code__
        e.location = f"{code.co_filename}:{code.co_firstlineno}"
        e.args = (f"{e} ({kernel.__name__}, {e.location})",)
        raise


def _result_storages(result: object, inputs: Iterable[NkiTensor]) -> set[int]:
    """Storages that the caller sees: returned tensors and written arguments."""
    found = {t.storage.id for t in inputs if t.storage.written}
    _map_result(result, lambda t: found.add(t.storage.id))
    return found


class Kernel:
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
        lnc = sizes[-1] if sizes else 1
        if isinstance(lnc, bool) or not isinstance(lnc, (int, np.integer)) or lnc not in self.variants:
            raise errors.NkiValidationError(f"{self.__name__}[{grid!r}]: a launch has 1 or 2 cores")
        return self.variants[lnc]

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if sessions.active() is not None:  # a kernel inside a kernel is a function
            return self.func(*args, **kwargs)
        torch = arrays._torch()
        if torch is not None:
            if torch.compiler.is_dynamo_compiling():
                from .torch_ops import wrap_nki

                return wrap_nki(self)(*args, **kwargs)
            if arrays.holds_fake(args) or arrays.holds_fake(kwargs):
                return self._infer(args, kwargs)
        if self.step or env.NKI_SIMULATOR.get():
            return self.run_steps(args, kwargs)
        traced = self.trace(args, kwargs)
        return self.run_steps(args, kwargs) if traced is None else self.launch(traced, args, kwargs)

    def _infer(self, args: tuple, kwargs: dict) -> object:
        """Results for fake tensors: shapes and types from tracing."""
        try:
            traced = self.trace(args, kwargs) or self._trace(args, kwargs, targets.default(), runs=False)
        except errors.DataDependentError as e:
            raise errors.NkiError(
                f"the shapes of {self.__name__}'s results are not known before it runs: {e}. In a compiled graph make "
                'it an operator, torch_neuronx.nki_op("namespace::name"), and tell its shapes by register_fake'
            ) from e
        tensors: list[object] = []
        arrays.replace((args, kwargs), tensors.append)

        def result(r: object) -> object:
            if isinstance(r, _Argument):
                return tensors[r.index] if r.view is None else arrays.as_fake(r.view, tensors[r.index])
            return arrays.as_fake(r, tensors[0])

        with _results_of(self):
            return _map_result(traced.result, result)

    # ---- step by step
    def run_steps(self, args: tuple, kwargs: dict, target: targets.Target | None = None) -> object:
        """Runs every instruction when its line runs."""
        return run_steps(self, [(args, kwargs)], target)[0]

    # ---- traced
    def trace(
        self, args: tuple, kwargs: dict, target: targets.Target | None = None, same: tuple[int, ...] = ()
    ) -> Traced | None:
        """The program for these arguments, from the cache or made now; None: the kernel must run step by step.

        same: for each array the first one with its memory, where the program depends on it.
        """
        target = target or targets.default()
        try:
            settings = (target.name, env.MX_SCALE.get(), env.DMA_TRANSPOSE_ON_PE.get())
            key = (settings, same, arrays.key(args), arrays.key(kwargs))
        except arrays.Unhashable:
            key = None
        if key is not None and key in self.cache:
            return self.cache[key]
        try:
            traced = self._trace(args, kwargs, target, same)
        except errors.DataDependentError:
            traced = None
        if key is not None:
            self.cache[key] = traced
        return traced

    def _trace(
        self, args: tuple, kwargs: dict, target: targets.Target, same: tuple[int, ...] = (), runs: bool = True
    ) -> Traced:
        """runs=False: for shapes and time only, so that what a kernel prints does not matter."""
        launch = Launch(self.lnc)
        traced = Traced([], [], [], [], [], [], None, [])
        for core in range(self.lnc):
            session = Session(False, target, launch, core, grid=self.grid)
            session.runs = runs
            launch.sessions.append(session)
            tensors: list[NkiTensor] = []

            def swap(x: object, session: Session = session, tensors: list = tensors) -> NkiTensor:
                first = same[len(tensors)] if same else len(tensors)
                known = first < len(tensors)
                tensors.append(tensors[first] if known else _tensor_of(session, _shape_only(x)))
                return tensors[-1]

            def body(session: Session = session, swap: Callable = swap) -> object:
                return self.func(*arrays.replace(args, swap), **arrays.replace(kwargs, swap))

            result = sessions.run(session, body)
            session.finish(_result_storages(result, tensors))
            session.program.seal(self.lnc > 1)
            ids = [t.storage.id for t in tensors]
            traced.inputs.append(ids)
            internal, constants = [], []
            keys = {storage: key for key, storage in session.shared_keys.items()}
            for s in session.storages:
                if s.buffer.on_chip or s.id in ids:
                    continue
                if s.id in session.constants:
                    constants.append((s.id, s.array))
                    continue
                key = keys.get(s.id)
                cleared = key is not None or not session.program.all_written(s.id)
                internal.append((s.id, s.array.size, cleared, key))
            traced.internal.append(internal)
            traced.constants.append(constants)
            seen = _result_storages(result, tensors)
            traced.changed.append({i for i, _ in constants if i in seen or session.storages[i].written})
            traced.programs.append(session.program)
            traced.sessions.append(session)
            written = [i for i, t in enumerate(tensors) if t.storage.written]
            traced.written = sorted({*traced.written, *written})
            if core == 0:
                with _results_of(self):
                    traced.result = _map_result(result, functools.partial(_result_of, ids))
            for s in session.storages:  # what was traced holds no data
                if s.id not in session.constants:
                    s.array = None
        if self.lnc > 1:
            sessions.warn_of_races(launch)
        return traced

    def launch(self, traced: Traced, args: tuple, kwargs: dict) -> object:
        """Runs a traced kernel on arrays."""
        given: list[arrays.Input] = []
        arrays.inputs((args, kwargs), given)
        for i in traced.written:
            given[i].check_writable(i)
        if traced.written:
            same = arrays.aliases(given)
            if same != tuple(range(len(given))) and len(set(traced.inputs[0])) == len(given):
                again = self.trace(args, kwargs, traced.sessions[0].target, same)
                return self.run_steps(args, kwargs) if again is None else self.launch(again, args, kwargs)
            if pair := arrays.overlap(given, traced.written):
                if any(given[i].is_copy for i in pair):
                    raise errors.NkiValidationError(
                        f"arguments {pair[0]} and {pair[1]} of {self.__name__} (of the arrays, from 0) share a part of "
                        "their memory, which it writes, and one is not contiguous: pass a copy of one"
                    )
                return self.run_steps(args, kwargs)
        like = given[0].array if given else None
        shared: dict[object, tuple[object, int]] = {}
        cores, memories, keep = [], {}, []
        for core, program in enumerate(traced.programs):
            c = _core.Core(program, core, 0)
            for storage, x in zip(traced.inputs[core], given):
                c.bind(storage, x.pointer)
            for storage, size, cleared, key in traced.internal[core]:
                memory = shared.get(key) if key is not None else None
                if memory is None:
                    memory = arrays.new_memory(like, size, cleared)
                    if key is not None:
                        shared[key] = memory
                keep.append(memory)
                c.bind(storage, memory[1])
                if core == 0:
                    memories[storage] = memory[0]
            for storage, array in traced.constants[core]:
                if storage not in traced.changed[core]:
                    c.bind(storage, array.ctypes.data)
                    continue
                memory = arrays.new_memory(like, array.nbytes, False)
                ctypes.memmove(memory[1], array.ctypes.data, array.nbytes)
                keep.append(memory)
                c.bind(storage, memory[1])
                if core == 0:
                    memories[storage] = memory[0]
            cores.append(c)
        try:
            _core.run(cores)
        except _core.Error as e:
            raise traced.sessions[0].error(e, 0) from None
        for x in {id(given[i]): given[i] for i in traced.written}.values():
            x.written()

        def result(r: object) -> object:
            if isinstance(r, arrays.Output):
                return arrays.as_result(r, memories[r.storage], like)
            x = given[r.index]
            return x.array if r.view is None else arrays.as_result(r.view, arrays.bytes_of(x), x.array)

        with _results_of(self):
            return _map_result(traced.result, result)

    def plain_launch(self, args: tuple, kwargs: dict) -> dict | None:
        """The launch on these torch tensors as numbers, for who runs it without Python. None if it has to be called.

        cores: address of each core's program, storage of each tensor, (storage, buffer) pairs, (storage, address) pairs
        of constants; buffers: bytes and whether they are 0 at first; results: which argument, or buffer, torch dtype,
        sizes, strides and offset in elements; keep: the owner of what the addresses point to.
        """
        if self.step or env.NKI_SIMULATOR.get():
            return None
        traced = self.trace(args, kwargs)
        if traced is None or traced.written or any(traced.changed):
            return None
        results = traced.result if isinstance(traced.result, (list, tuple)) else [traced.result]
        if not all(isinstance(r, arrays.Output) or (isinstance(r, _Argument) and r.view is None) for r in results):
            return None
        made: list[tuple[int, bool]] = []
        shared: dict[object, int] = {}
        cores, first = [], {}
        for core, program in enumerate(traced.programs):
            buffers = []
            for storage, size, cleared, key in traced.internal[core]:
                number = shared.get(key) if key is not None else None
                if number is None:
                    number = len(made)
                    made.append((size, cleared))
                    if key is not None:
                        shared[key] = number
                buffers.append((storage, number))
            first = first or dict(buffers)
            constants = [(storage, array.ctypes.data) for storage, array in traced.constants[core]]
            cores.append(
                {
                    "program": program.address,
                    "inputs": traced.inputs[core],
                    "buffers": buffers,
                    "constants": constants,
                }
            )
        return {"cores": cores, "buffers": made, "results": [_plain(r, first) for r in results], "keep": traced}


def _plain(result: arrays.Output | _Argument, buffers: dict[int, int]) -> dict:
    if isinstance(result, _Argument):
        return {"argument": result.index}
    return {
        "argument": -1,
        "buffer": buffers[result.storage],
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
    results: list[object] = [None] * len(ranks)
    given: list[list[arrays.Input]] = [[] for _ in ranks]
    prepared = []
    for rank, (args, kwargs) in enumerate(ranks):
        prepared.append(arrays.inputs((args, kwargs), given[rank]))

    bodies = []
    for rank in range(len(ranks)):
        for core in range(kernel.lnc):
            session = Session(True, target, launch, core, rank, kernel.grid)
            session.index = len(launch.sessions)
            launch.sessions.append(session)

            def body(session: Session = session, rank: int = rank, core: int = core) -> None:
                tensors: dict[int, NkiTensor] = {}

                def swap(x: object) -> object:
                    if isinstance(x, arrays.Input):
                        if id(x) not in tensors:
                            tensors[id(x)] = t = _tensor_of(session, x)
                            number = next(i for i, g in enumerate(given[rank]) if g is x)
                            t.storage.before_write = functools.partial(x.check_writable, number)
                        return tensors[id(x)]
                    return x

                args, kwargs = prepared[rank]
                out = kernel.func(*_swap_inputs(args, swap), **_swap_inputs(kwargs, swap))
                session.finish(_result_storages(out, tensors.values()))
                for x in {id(x): x for x in given[rank]}.values():
                    if id(x) in tensors and tensors[id(x)].storage.written:
                        x.written()
                if core == 0:
                    by_storage = {t.storage.id: x for i, t in tensors.items() for x in given[rank] if id(x) == i}
                    like = given[rank][0].array if given[rank] else None

                    def result(t: NkiTensor) -> object:
                        source = by_storage.get(t.storage.id)
                        if source is not None and t.is_whole():
                            return source.array
                        view = arrays.Output(t)
                        if source is None:
                            return lambda: arrays.as_result(view, t.storage.array, like)
                        return lambda: arrays.as_result(view, arrays.bytes_of(source), source.array)

                    with _results_of(kernel):
                        results[rank] = _map_result(out, result)

            bodies.append(body)
    launch.waits = [False] * len(bodies)
    launch.ended = [False] * len(bodies)
    if len(bodies) == 1:
        sessions.run(launch.sessions[0], bodies[0])
    else:
        _run_together(launch, bodies)
    if kernel.lnc > 1:
        sessions.warn_of_races(launch)
    with _results_of(kernel):
        return [_finish(r) for r in results]


def _finish(value: object) -> object:
    """Results as arrays: made when every core has ended, so that all have written."""
    if isinstance(value, (list, tuple)):
        return type(value)(_finish(v) for v in value)
    if isinstance(value, dict):
        return {k: _finish(v) for k, v in value.items()}
    return value() if callable(value) else value


def _swap_inputs(value: object, swap: Callable[[object], object]) -> object:
    if isinstance(value, arrays.Input):
        return swap(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_swap_inputs(v, swap) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_swap_inputs(v, swap) for v in value)
    if isinstance(value, dict):
        return {k: _swap_inputs(v, swap) for k, v in value.items()}
    fields = getattr(value, "__dict__", None)
    if fields and any(
        isinstance(v, (arrays.Input, list, tuple, dict)) or hasattr(v, "__dict__") for v in fields.values()
    ):
        if not callable(value) and not isinstance(value, type):
            import copy

            clone = copy.copy(value)
            for k, v in fields.items():
                object.__setattr__(clone, k, _swap_inputs(v, swap))
            return clone
    return value


def _run_together(launch: Launch, bodies: list[Callable[[], None]]) -> None:
    def work(index: int) -> None:
        failure = None
        try:
            launch.wait_turn(index)
            sessions.run(launch.sessions[index], bodies[index])
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
