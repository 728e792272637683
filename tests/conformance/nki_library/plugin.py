"""pytest plugin for a checkout of nki-library: what the public checkout lacks, ours as its simulator, the per-rank cases
that its simulation mode leaves out, and the record of results that run.py reads."""

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import sys
import time
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

# The suite's references follow API 0.3: the OCP scale.
os.environ.setdefault("TORCH_NEURON_MX_SCALE", "ocp")
# Some cases need more SBUF than there is: the vendor's compiler spills, its simulator does not look.
os.environ.setdefault("TORCH_NEURON_NKI_SPILL", "1")


def _module(name, **names):
    m = types.ModuleType(name)
    m.__dict__.update(names)
    sys.modules[name] = m


_module("test.utils.perf_analysis_private", analyze_trace=lambda *a, **k: None)
_module("test.utils.scripts.remote_lock_scripts", LockResult=object, LockStatus=object)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):  # after the suite's own, which brings in the simulator; before test files are imported
    _draw_mx_at_once()


def pytest_addoption(parser):
    parser.addoption("--record", help="file that gets one JSON line per started and per finished case")
    parser.addoption("--cases", help="file with the names of the cases to run; others are deselected")
    parser.addoption("--list-cases", help="file that gets the names of the cases that are not skipped for size")
    parser.addoption("--case-timeout", type=int, default=0, help="processor seconds that a case may take; 0: any")


# ---- per-rank cases ------------------------------------------------------------------------------------------------
def _inputs_of(kernel_input, rank):
    made = kernel_input.for_rank(rank) if hasattr(kernel_input, "for_rank") else kernel_input
    return {k.removesuffix(".must_alias_input"): v for k, v in (made or {}).items()}


def _run_ranks(orchestrator, kernel_under_test):
    """All ranks of a collective kernel on simulated cores; one output directory per rank, as on hardware."""
    import nki
    from test.utils.common_dataclasses import INF_ARTIFACT_DIR_NAME, normalize_golden_output

    compiler, kernel = kernel_under_test.compiler_input, kernel_under_test.kernel_func
    os.environ["NKI_NC_VERSION"] = compiler.platform_target.get_nc_gen()
    ranks = range(kernel_under_test.inference_args.collective_ranks)
    results = nki.simulate_ranks(
        nki.simulate(kernel)[compiler.logical_nc_config],
        [_inputs_of(kernel_under_test.kernel_input, rank) for rank in ranks],
    )
    base = os.path.join(orchestrator.fs_config.artifacts_output_directory_path, INF_ARTIFACT_DIR_NAME)
    for rank, result in zip(ranks, results):
        golden = normalize_golden_output(kernel_under_test.validation_args.golden_output, rank)
        outputs = result if isinstance(result, (list, tuple)) else [result]
        if len(outputs) != len(golden):
            raise RuntimeError(f"rank {rank} returned {len(outputs)} outputs, {len(golden)} were expected")
        folder = os.path.join(base, f"output_worker_{rank}")
        os.makedirs(folder, exist_ok=True)
        for (name, like), output in zip(golden.items(), outputs):
            np.asarray(output, dtype=like.dtype).tofile(os.path.join(folder, name))
    return base


class _Words:
    """A packed output. Where a reference has another type of the same size, it means the bytes: so they come from
    hardware."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.view(dtype)


def _extend_simulation():
    from test.utils import simulation_setup, test_orchestrator

    simulate = simulation_setup.simulate_kernel
    simulation_setup.simulate_kernel = lambda *args: [
        _Words(x) if str(getattr(x, "dtype", "")).endswith("_x4") else x for x in simulate(*args)
    ]
    orchestrator = test_orchestrator.Orchestrator
    single = orchestrator._run_simulator_inference

    def run(self, kernel_under_test):
        if kernel_under_test.inference_args.collective_ranks <= 1:
            return single(self, kernel_under_test)
        try:
            return _run_ranks(self, kernel_under_test)
        except Exception as e:
            raise test_orchestrator.InferenceException(str(e)) from e

    orchestrator._run_simulator_inference = run
    orchestrator._compiled_kernel = None  # read but never set in simulation mode


# ---- inputs --------------------------------------------------------------------------------------------------------
def _draw_mx_at_once():
    """The suite draws MX weights block by block in Python, minutes for a case: here all blocks at once, with the same
    distribution."""
    from neuron_dtypes import static_cast
    from test.integration.nkilib.utils import tensor_generators
    from test.utils import mx_utils

    block_by_block = tensor_generators.generate_stabilized_mx_data

    def generate(mx_dtype, shape, val_range=1.0):
        if val_range == 0:
            return block_by_block(mx_dtype, shape, val_range)
        largest, blocks = mx_utils.get_mx_fp_max(mx_dtype), (shape[0] // 8, shape[1] // 4)
        values = np.random.uniform(-largest, largest, (blocks[0], 8, blocks[1], 4))
        # One element of each block has the largest exponent, so that quantising the values again gives the same scale.
        row, column = np.ogrid[: blocks[0], : blocks[1]]
        peak = np.random.choice([-1, 1], blocks) * np.random.uniform(1, 1.5, blocks)
        at = row, np.random.randint(0, 7, blocks), column, np.random.randint(0, 3, blocks)
        values[at] = peak * 2.0 ** mx_utils.get_mx_max_exp(mx_dtype)
        packed = static_cast(values.reshape(shape).astype(np.float32), mx_dtype)
        top = min(255, int(np.log2(val_range / largest) + 127))
        scale = np.random.randint(max(0, top - 10), top + 1, blocks, np.uint8)
        return mx_utils.dequantize_mx_golden(packed, scale), packed, scale

    tensor_generators.generate_stabilized_mx_data = generate


class _InPieces(np.random.Generator):
    """Draws large arrays piece by piece in fp32, the type that the suite makes of them next: the same numbers without
    twice the memory, which is cold besides."""

    _PIECE, _LARGE = 1 << 18, 1 << 24  # elements

    def _draw(self, draw, a, b, size):
        if size is None or np.ndim(a) or np.ndim(b) or np.prod(size, dtype=np.int64) < self._LARGE:
            return draw(a, b, size)
        out = np.empty(size, np.float32)
        flat = out.reshape(-1)
        for i in range(0, flat.size, self._PIECE):
            piece = flat[i : i + self._PIECE]
            piece[:] = draw(a, b, piece.size)
        return out

    def normal(self, loc=0.0, scale=1.0, size=None):
        return self._draw(super().normal, loc, scale, size)

    def uniform(self, low=0.0, high=1.0, size=None):
        return self._draw(super().uniform, low, high, size)


def _draw_in_pieces():
    generator = np.random.default_rng
    np.random.default_rng = lambda seed=None: _InPieces(generator(seed).bit_generator)


def _forget_block_tables():
    """The suite keeps the block tables that it draws: what a case draws would depend on the cases before it."""
    if utils := sys.modules.get("test.integration.nkilib.core.attention.test_attention_tkg_utils"):
        utils.generate_active_blocks_array.cache_clear()


def _refer_once():
    """The attention block's test asks its reference twice, once for shapes alone: most of its time."""
    test = sys.modules.get("test.integration.nkilib.experimental.transformer.test_attention_block_tkg")
    if test is None:
        return
    reference, last = test._golden_ref_via_torch, {}

    def digest(value):
        return zlib.crc32(np.ascontiguousarray(value).view(np.uint8)) if isinstance(value, np.ndarray) else repr(value)

    def once(kernel_input, lnc):
        key = lnc, *sorted((name, digest(value)) for name, value in kernel_input.items())
        if key not in last:
            last.clear()
            last[key] = reference(kernel_input, lnc)
        return dict(last[key])

    test._golden_ref_via_torch = once


# ---- choosing and recording cases ----------------------------------------------------------------------------------
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    from test.utils.simulation_setup import _LARGE_SHAPE_PATTERNS

    _extend_simulation()
    _refer_once()
    _draw_in_pieces()
    names = {i.nodeid for i in items if not i.get_closest_marker("slow_simulation")}
    names = {n for n in names if not any(p in n.split("::", 1)[1] for p in _LARGE_SHAPE_PATTERNS)}
    if config.getoption("--list-cases"):
        Path(config.getoption("--list-cases")).write_text("".join(f"{n}\n" for n in sorted(names)))
    if config.getoption("--cases"):
        names &= set(Path(config.getoption("--cases")).read_text().splitlines())
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in names])
    items[:] = [i for i in items if i.nodeid in names]
    gc.freeze()  # thousands of cases live as long as the process


class Timeout(BaseException):
    """A case took longer than --case-timeout."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    config = item.config
    if not config.getoption("--record"):
        return (yield)
    item.reports = []
    seed = zlib.crc32(item.nodeid.encode())  # the suite draws inputs without a seed of its own
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _forget_block_tables()
    _write(config, {"case": item.nodeid, "started": True})
    start = time.process_time()
    with _limit(config.getoption("--case-timeout")):
        result = yield
    failed = [r for r in item.reports if r.failed]
    skipped = [r for r in item.reports if r.skipped]
    record = {"case": item.nodeid, "outcome": "failed" if failed else "skipped" if skipped else "passed"}
    if failed:
        record["cause"] = _cause(str(failed[0].longrepr))
    elif skipped:
        record["cause"] = str(skipped[0].longrepr[-1])
    record["seconds"] = round(time.process_time() - start, 2)
    ctypes.CDLL(None).malloc_trim(0)  # run.py has the allocator keep what is freed: for this case's other arrays alone
    _write(config, record)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if hasattr(item, "reports"):
        item.reports.append(report)
    return report


def _write(config, record):
    with open(config.getoption("--record"), "a") as f:
        f.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def _limit(seconds):
    def late(*_):
        raise Timeout(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _cause(text):
    """The end of a failure's traceback: enough to tell causes apart."""
    return "\n".join(text.strip().splitlines()[-12:])[-1500:]
