"""Predicted timelines: engines, order, capacity, documents, page and trace."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl
from torchneuron import _core
from torchneuron.perf import targets

F32 = np.float32


@nki.jit
def scaled_sum(x, y):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    for i in range(x.shape[0] // 128):
        a, b = nl.ndarray((128, x.shape[1]), x.dtype), nl.ndarray((128, x.shape[1]), x.dtype)
        nisa.dma_copy(a, x[i * 128 : (i + 1) * 128])
        nisa.dma_copy(b, y[i * 128 : (i + 1) * 128])
        nisa.tensor_tensor(a, a, b, nl.add)
        nisa.activation(a, nl.exp, a, scale=0.5)
        nisa.dma_copy(out[i * 128 : (i + 1) * 128], a)
    return out


def arrays(rows, columns=512):
    return np.zeros((rows, columns), F32), np.zeros((rows, columns), F32)


def test_costs_are_those_of_the_published_formulas():
    p = nki.profile(scaled_sum, target="trn2")(*arrays(128))
    by_name = {e.name: e for e in p.instructions}
    vector, scalar = targets.get("trn2").values["clock_vector"], targets.get("trn2").values["clock_scalar"]
    add, act = by_name["tensor_tensor"], by_name["activation"]
    assert add.end - add.start == pytest.approx(2 * 512 / vector / 1e3)  # two fp32 inputs: 2N cycles
    assert act.end - act.start == pytest.approx(512 / scalar / 1e3)
    assert by_name["tensor_tensor"].start >= max(e.end for e in p.instructions[:2])
    assert act.start >= add.end and p.instructions[-1].start >= act.end
    assert p.bytes_moved == 3 * 128 * 512 * 4


def test_transfers_and_engines_overlap():
    one, four = (nki.profile(scaled_sum, target="trn2")(*arrays(128 * n)) for n in (1, 4))
    assert one.latency_us < four.latency_us < 4 * one.latency_us
    for p in (one, four):
        assert all(0 <= share <= 1 for share in p.engines.values())
        for engine in ("vector", "scalar"):
            events = [e for e in p.instructions if e.engine == engine]
            assert all(a.end <= b.start + 1e-9 for a, b in zip(events, events[1:]))
        assert p.critical_path[-1].end == pytest.approx(p.latency_us)
        starts = targets.get("trn2").values["dma_start_ns"] / 1e3  # of the first transfer
        assert p.critical_path[0].start <= starts + 1e-9
        assert all(a.end <= b.end for a, b in zip(p.critical_path, p.critical_path[1:]))


def test_each_core_has_its_own_timeline():
    @nki.jit
    def second_works(x):
        t = nl.ndarray((128, 64), nl.float32)
        nisa.memset(t, 1.0)
        for _ in range(10 * nl.program_id(0)):
            nisa.tensor_scalar(t, t, nl.add, 1.0)
        nisa.core_barrier(x, (0, 1))
        return x

    one, two = (nki.profile(second_works[2], target="trn2", core=c)(np.zeros((128, 64), F32)) for c in (0, 1))
    assert len(two.instructions) == len(one.instructions) + 10 and two.latency_us > one.latency_us
    with pytest.raises(ValueError, match="no core 1"):
        nki.profile(second_works, core=1)


def test_sbuf_over_time():
    p = nki.profile(scaled_sum, target="trn2")(*arrays(128 * 3))
    assert max(live for _, live in p.sbuf) >= 2 * 2048 and p.sbuf[-1][1] == 0
    assert [t for t, _ in p.sbuf] == sorted(t for t, _ in p.sbuf)


def test_faster_dma_and_16_bit_modes():
    big = arrays(512, 4096)
    trn1, trn2, trn3 = (nki.profile(scaled_sum, target=t)(*big).latency_us for t in targets.NAMES)
    assert trn1 > trn2 > trn3

    def k(x):
        t = nl.ndarray(x.shape, x.dtype)
        nisa.memset(t, 0)
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        return x

    def busy(dtype, target):
        x = np.zeros((128, 1024), dtype)
        (e,) = (e for e in nki.profile(k, target=target)(x).instructions if e.name == "tensor_scalar")
        return e.end - e.start

    assert busy(F32, "trn2") == pytest.approx(4 * busy("bfloat16", "trn2"))
    assert busy(F32, "trn1") == pytest.approx(busy("bfloat16", "trn1"))


def busy_ns(target, body, dtype=F32, free=1024, partitions=128):
    """What the last instruction of body(t, u, v, x) takes: three tiles in SBUF, x in HBM."""

    @nki.jit
    def kernel(x):
        tiles = [nl.ndarray((partitions, free), x.dtype) for _ in range(3)]
        for t in tiles:
            nisa.memset(t, 0)
        body(*tiles, x)
        return x

    last = nki.profile(kernel, target=target)(np.zeros((partitions, free), dtype)).instructions[-1]
    return (last.end - last.start) * 1e3


def cycles(target, engine, *args, **kwargs):
    return busy_ns(target, *args, **kwargs) * targets.get(target).values[f"clock_{engine}"]


@pytest.mark.parametrize("target", targets.NAMES)
def test_vector_costs_by_generation(target):
    """N cycles for one input, 2 N for two; the 16-bit modes are trn2's (Trainium2 architecture guide)."""
    n, fast = 1024, target != "trn1"

    def add(t, u, v, x):
        nisa.tensor_tensor(t, u, v, nl.add)

    def larger(t, u, v, x):
        nisa.tensor_tensor(t, u, v, nl.maximum)

    def copy(t, u, v, x):
        nisa.tensor_copy(t, u, engine=nisa.vector_engine)

    def every_other(t, u, v, x):
        nisa.tensor_copy(t[:, 0:512], u[:, 0:1024:2], engine=nisa.vector_engine)

    def fused(t, u, v, x):
        nisa.scalar_tensor_tensor(t, u, nl.subtract, 1.0, nl.multiply, v)

    def sums(t, u, v, x):
        nisa.tensor_reduce(t[:, 0:1], nl.add, u, axis=1)

    for body, fp32, bf16 in (
        (add, 2 * n, n), (larger, 2 * n, n if fast else 2 * n), (copy, n, n / 4 if fast else n),
        (every_other, n / 2, n / 4 if fast else n / 2), (fused, 2 * n, n), (sums, n, n / 2),
    ):  # fmt: skip
        assert cycles(target, "vector", body) == pytest.approx(fp32), body.__name__
        assert cycles(target, "vector", body, "bfloat16") == pytest.approx(bf16), body.__name__


def test_scalar_engine_has_a_16_bit_mode_on_trn3():
    def copy(t, u, v, x):
        nisa.tensor_copy(t, u, engine=nisa.scalar_engine)

    def activation(t, u, v, x):
        nisa.activation(t, nl.copy, u)

    for target, factor in (("trn2", 1), ("trn3", 2)):
        assert cycles(target, "scalar", copy, "bfloat16") == pytest.approx(1024 / factor)
        assert cycles(target, "scalar", copy) == pytest.approx(1024)
        assert cycles(target, "scalar", activation, "bfloat16") == pytest.approx(1024)


@pytest.mark.parametrize("target", targets.NAMES)
def test_rsqrt_on_gpsimd_takes_four_times_as_long(target):
    def on_gpsimd(t, u, v, x):
        nisa.tensor_scalar(t, u, nl.rsqrt, 0.0, engine=nisa.gpsimd_engine)

    def on_scalar(t, u, v, x):
        nisa.activation(t, nl.rsqrt, u)

    assert busy_ns(target, on_gpsimd) == pytest.approx(4 * busy_ns(target, on_scalar))


@pytest.mark.parametrize(
    ("step", "dtype", "factor"), [(4, F32, 1), (5, F32, 2), (8, "bfloat16", 1), (9, "bfloat16", 2)]
)
def test_strides_of_more_than_16_bytes_halve_the_rate(step, dtype, factor):
    n = 1024 // step

    def one_input(t, u, v, x):
        nisa.activation(t[:, 0:n], nl.copy, u[:, 0 : n * step : step])

    def two_inputs(t, u, v, x):
        nisa.tensor_tensor(t[:, 0:n], u[:, 0 : n * step : step], v[:, 0:n], nl.maximum)

    def slow_anyway(t, u, v, x):
        nisa.reciprocal(t[:, 0:n], u[:, 0 : n * step : step])

    assert cycles("trn1", "scalar", one_input, dtype) == pytest.approx(factor * n)
    assert cycles("trn1", "vector", two_inputs, dtype) == pytest.approx(factor * 2 * n)
    assert cycles("trn1", "vector", slow_anyway, dtype) == pytest.approx(8 * n)


def test_dma_that_sums_runs_at_half_rate_before_trn3():
    """On trn3 near SBUF at a copy's (Trainium3 architecture guide: read-add-write); other sums as before."""

    def copy(t, u, v, x):
        nisa.dma_copy(t, x)

    def in_sbuf(t, u, v, x):
        nisa.dma_compute(t, [t, x], nl.add)

    def copy_in_hbm(t, u, v, x):
        nisa.dma_copy(nl.ndarray(x.shape, x.dtype, nl.shared_hbm), x)

    def in_hbm(t, u, v, x):
        nisa.dma_compute(nl.ndarray(x.shape, x.dtype, nl.shared_hbm), [x, t], nl.add)

    for target, factor in (("trn1", 2), ("trn2", 2), ("trn3", 1)):
        assert busy_ns(target, in_sbuf) == pytest.approx(factor * busy_ns(target, copy))
        assert busy_ns(target, in_hbm) == pytest.approx(2 * busy_ns(target, copy_in_hbm))


def test_dma_transposes_at_most_at_90_and_50_percent_of_a_copys_rate():
    def copy(t, u, v, x):
        nisa.dma_copy(t, x)

    def from_hbm(t, u, v, x):
        nisa.dma_transpose(t, x)

    def from_sbuf(t, u, v, x):
        nisa.dma_transpose(t, u)

    time, hbm, sbuf = (busy_ns("trn2", body, "bfloat16", 128) for body in (copy, from_hbm, from_sbuf))
    assert time <= 0.9 * hbm * (1 + 1e-9) and time <= 0.5 * sbuf * (1 + 1e-9) and hbm < sbuf


@pytest.mark.parametrize("target", targets.NAMES)
def test_matmul_passes(target):
    """Four for fp32; two in transpose mode from trn2 on."""

    def kernel(transpose, dtype):
        def body(t, u, v, x):
            out = nl.ndarray((128, 128), dtype if transpose else nl.float32, nl.psum)
            nisa.nc_matmul(out, t, u, is_transpose=transpose)

        return cycles(target, "tensor", body, dtype, 128)

    cold = 1 if target == "trn1" else 2  # its first instructions run at half the rate
    assert kernel(False, "bfloat16") == pytest.approx(128 * cold)
    assert kernel(False, "float32") == pytest.approx(4 * 128 * cold)
    if target != "trn1":
        assert kernel(True, "float32") == pytest.approx(2 * 128 * cold)


def test_topk_costs_as_published():
    def body(t, u, v, x):
        nisa.topk(t[:, 0:64], nl.ndarray((128, 64), nl.uint32), u, n=4096)

    assert cycles("trn2", "gpsimd", body, "bfloat16") == pytest.approx(4 * 4096 + 64)


def test_gathers_and_transposes_cost_as_published():
    def gather(t, u, v, x):
        index = nl.ndarray((128, 8), nl.uint16)
        nisa.memset(index, 0)
        nisa.local_gather(t[:, 0:512], u, index, num_elem_per_idx=4)

    def on_vector(t, u, v, x):
        nisa.nc_transpose(t[0:32, 0:32], u[0:32, 0:32], engine=nisa.vector_engine)

    def on_tensor(t, u, v, x):
        nisa.nc_transpose(nl.ndarray((100, 128), x.dtype, nl.psum), u[:, 0:100], engine=nisa.tensor_engine)

    speed = ((28 + 4 * 4) / (4 * 4)) / min(4 / 2, 4)
    assert cycles("trn2", "gpsimd", gather, "bfloat16") == pytest.approx(150 + 512 / speed)
    assert cycles("trn1", "vector", on_vector) == pytest.approx(64)
    assert cycles("trn1", "tensor", on_tensor, "bfloat16") == pytest.approx(128)


@pytest.mark.parametrize(("target", "shared"), [("trn1", True), ("trn2", False), ("trn3", False)])
def test_engines_take_turns_at_the_memories_of_trn1(target, shared):
    """VectorE and GpSimdE in SBUF, VectorE and ScalarE in PSUM (NeuronCore-v2; lifted from v3 on)."""

    def overlap(body, first, second):
        @nki.jit
        def kernel(x):
            body(*(nl.ndarray((128, 512), nl.float32) for _ in range(2)))
            return x

        p = nki.profile(kernel, target=target)(np.zeros((1, 1), F32))
        one, other = ([e for e in p.instructions if e.engine == name] for name in (first, second))
        return any(a.start < b.end and b.start < a.end for a in one for b in other)

    def in_sbuf(a, b):
        nisa.memset(a, 1.0, engine=nisa.vector_engine)
        nisa.memset(b, 1.0, engine=nisa.gpsimd_engine)

    def in_psum(a, b):
        p, q = (nl.ndarray((128, 512), nl.float32, nl.psum) for _ in range(2))
        nisa.memset(a, 1.0, engine=nisa.gpsimd_engine)
        nisa.activation(p, nl.copy, a)
        for _ in range(4):
            nisa.memset(q, 1.0, engine=nisa.vector_engine)

    def beside_psum(a, b):
        nisa.memset(a, 1.0, engine=nisa.gpsimd_engine)
        nisa.memset(nl.ndarray((128, 512), nl.float32, nl.psum), 1.0, engine=nisa.vector_engine)

    def both_in_sbuf(a, b):
        nisa.memset(a, 1.0, engine=nisa.vector_engine)
        nisa.activation(b, nl.copy, a)
        for _ in range(4):
            nisa.memset(nl.ndarray((128, 512), nl.float32), 1.0, engine=nisa.vector_engine)

    assert overlap(in_sbuf, "vector", "gpsimd") == (not shared)
    assert overlap(in_psum, "vector", "scalar") == (not shared)
    assert overlap(beside_psum, "vector", "gpsimd") and overlap(both_in_sbuf, "vector", "scalar")


def test_every_cost_has_a_source():
    assert {targets.get(t).values["min_cycles"] for t in targets.NAMES} == {64}  # as docs/isa.md prints
    for i in _core.INSTRUCTIONS:
        assert i["costs"] and not i["costs"][-1]["conditions"], i["name"]
        for c in i["costs"]:
            assert len(c["source"]) > 8 and "/" not in c["source"] and ".md" not in c["source"], (i["name"], c)


def test_instruction_document_states_the_clocks_costs(root):
    """Against the published formulas."""
    text = (root / "docs/isa.md").read_text()
    rows = dict(re.findall(r"^## (\w+).*?\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    for name, *formulas in (
        ("activation", "max(64, N) + 64", "max(64, N)"), ("tensor_scalar_reduce", "max(64, N) + 64"),
        ("tensor_copy_predicated", "max(64, N)", "max(64, 2 N)"), ("tensor_tensor_scan", "max(64, 2 N)"),
        ("tensor_tensor", "max(64, N)` if an input in PSUM", "`max(64, 2 N)` (NKI"), ("scalar_tensor_tensor", "max(64, N)", "max(64, 2 N)"),
        ("tensor_reduce", "max(64, 0.5 N)", "max(64, N)"), ("memset", "max(64, 0.5 N)", "max(64, N)"),
        ("reciprocal", "max(64, 8 N)"), ("iota", "max(64, N) + 150"), ("nc_matmul", "4 max(min(64, S), M)"),
        ("topk", "4 n + K"), ("dma_copy", "DMA"), ("dma_transpose", "2 DMA", "1.11 DMA"), ("dma_compute", "DMA", "2 DMA"),
        ("loop_begin", "0"),
    ):  # fmt: skip
        cost = rows[name][rows[name].index("* cost") :]
        places = [cost.find(f) for f in formulas]
        assert min(places) >= 0 and places == sorted(places), (name, cost)


def test_targets_scale_one_curve_of_row_times():
    """The saturation curve over bytes per partition is published once, without a rate."""
    trn2 = targets.get("trn2").values
    for target in ("trn1", "trn3"):
        t = targets.get(target).values
        for key in ("dma_row_ns", "dma_row_overhead_ns"):
            assert t[key] == round(trn2[key] * trn2["dma_bytes_per_ns"] / t["dma_bytes_per_ns"]), (target, key)
            assert "derived" in targets.sources(target)[key]["source"]


def test_every_number_of_a_target_has_a_source():
    for name in targets.NAMES:
        for key, row in targets.sources(name).items():
            assert row["source"] and {"value", "unit", "source"} == set(row), (name, key)
    with pytest.raises(ValueError, match="trn1, trn2, trn3"):
        targets.get("trn9")


def test_trace_and_page(tmp_path):
    p = nki.profile(scaled_sum, target="trn3")(*arrays(256))
    p.save_perfetto(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(p.instructions)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {e.engine for e in p.instructions}
    p.save_html(tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert "scaled_sum on trn3" in page and not re.search(r"@[A-Z]+@", page)
    assert "http://" not in page and "https://" not in page


def test_page_draws_in_a_browser(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    nki.profile(scaled_sum, target="trn3")(*arrays(256)).save_html(tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    probe = """<script>const g = document.getElementById("time").getContext("2d"),
      d = g.getImageData(0, 0, g.canvas.width, g.canvas.height).data;
      document.title = "painted " + d.filter((v, i) => i % 4 === 3 && v).length;</script></body>"""
    (tmp_path / "t.html").write_text(page.replace("</body>", probe))
    run = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
         f"file://{tmp_path / 't.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    painted = re.search(r"<title>painted (\d+)</title>", run.stdout)
    assert painted and int(painted.group(1)) > 1000, run.stderr[-2000:]


KERNEL = """
import numpy as np, nki, nki.isa as nisa, nki.language as nl

@nki.jit
def twice(x):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    t = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(t, x)
    nisa.tensor_scalar(t, t, nl.multiply, 2.0)
    nisa.dma_copy(out, t)
    return out

def example_inputs():
    return (np.arange(6, dtype=np.float32).reshape(2, 3),)
"""


def test_command_line(tmp_path, python):
    (tmp_path / "k.py").write_text(KERNEL)
    ran = python("-m", "torchneuron", "nki", "run", "k.py")
    assert ran.returncode == 0 and "[ 6.  8. 10.]" in ran.stdout, ran.stderr
    assert all(f"\n{t}: Predicted latency" in ran.stdout for t in targets.NAMES)
    told = python("-m", "torchneuron", "nki", "profile", "k.py", "-i", "128x512:bfloat16", "--html", "t.html",
                  "--perfetto", "t.json")  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert all(t in told.stdout for t in targets.NAMES) and "of 612 GB/s" in told.stdout
    assert (tmp_path / "t.html").exists() and json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    wrong = python("-m", "torchneuron", "nki", "run", "k.py", "--kernel", "thrice")
    assert wrong.returncode != 0 and "twice" in wrong.stderr


@pytest.mark.parametrize("document", ["isa", "fidelity"])
def test_generated_documents_are_current(root, python, document):
    run = python("-m", "torchneuron", "nki", document)
    assert (root / f"docs/{document}.md").read_text() == run.stdout, "run `make docs`"


def _repeated(body, trips, device_loop):
    """A kernel that runs body(x, out, t, i) for i below each of the trips, nested, in Python's loops or the device's."""

    def kernel(x):
        out, t = nl.ndarray(x.shape, x.dtype, nl.shared_hbm), nl.ndarray((128, x.shape[1]), x.dtype)
        nisa.memset(t, 0)

        def run(level, i):
            if level == len(trips):
                return body(x, out, t, i)
            count = trips[level](i) if callable(trips[level]) else trips[level]
            if device_loop:
                nl.fori_loop(0, count, lambda j: run(level + 1, j))
            else:
                for j in range(count):
                    run(level + 1, j)
            return None

        run(0, None)
        nisa.dma_copy(out[0:128], t)
        return out

    return kernel


def _adds(x, out, t, i):
    nisa.tensor_scalar(t, t, nl.add, 1.0)
    nisa.activation(t, nl.exp, t)


def _moves(x, out, t, i):
    u = t[0:1]
    nisa.dma_copy(u, x[nl.ds(i, 1)])
    nisa.tensor_scalar(u, u, nl.add, 1.0)
    nisa.dma_copy(out[nl.ds(i, 1)], u)


LOOPS = {
    "one": (_adds, [40]),
    "none": (_adds, [0]),
    "places": (_moves, [40]),
    "nested": (_adds, [5, 7]),
    "triangle": (_adds, [6, lambda i: i + 1]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_device_loops_take_the_time_of_their_trips(name):
    """As the same kernel with its loops unrolled by Python."""
    body, trips = LOOPS[name]
    x = np.zeros((256, 512), np.float32)
    looped, unrolled = (nki.profile(_repeated(body, trips, way), target="trn2")(x) for way in (True, False))
    assert not looped.notes
    assert looped.latency_us == pytest.approx(unrolled.latency_us, rel=1e-6)
    assert looped.engines == pytest.approx(unrolled.engines, rel=1e-6)
    assert looped.bytes_moved == unrolled.bytes_moved
    assert [e.name for e in looped.instructions] == [e.name for e in unrolled.instructions]
    assert max(t for t, _ in looped.sbuf) == pytest.approx(max(t for t, _ in unrolled.sbuf))


@pytest.mark.parametrize("trips", [[20_000], [200, 100]])
def test_long_loops_are_extrapolated(trips):
    x = np.zeros((256, 512), np.float32)
    looped, unrolled = (nki.profile(_repeated(_adds, trips, way), target="trn2")(x) for way in (True, False))
    assert looped.latency_us == pytest.approx(unrolled.latency_us, rel=1e-3)
    assert looped.engines == pytest.approx(unrolled.engines, rel=1e-3)
    assert sum(e.times for e in looped.instructions) == len(unrolled.instructions)
    assert len(looped.instructions) < len(unrolled.instructions) / 3
    assert f"makes {trips[0]} trips" in " ".join(looped.notes)


def test_a_million_trips_are_quickly_told():
    p = nki.profile(_repeated(_moves, [1_000_000], True), target="trn2")(np.zeros((1 << 20, 64), np.float32))
    assert p.bytes_moved == 2 * 1_000_000 * 64 * 4 + 128 * 64 * 4 and len(p.instructions) < 20_000


def test_loops_whose_trips_depend_on_values_are_noted(tmp_path):
    @nki.jit
    def kernel(x):
        out, t, r = nl.ndarray(x.shape, x.dtype, nl.shared_hbm), nl.load(x), nisa.register_alloc()
        nisa.register_load(r, t[0:1, 0:1])
        nl.fori_loop(0, r, lambda i: nisa.tensor_scalar(t, t, nl.add, 1))
        nisa.dma_copy(out, t)
        return out

    p = nki.profile(kernel, target="trn2")(np.zeros((8, 8), np.int32))
    (note,) = p.notes
    assert "depend on values: 1 are counted" in note and f"{__file__}:" in note
    p.save_html(tmp_path / "p.html")
    assert "depend on values" in (tmp_path / "p.html").read_text()


def test_traffic_is_of_hbm():
    """Copies within SBUF are moved by DMA and are no traffic of HBM."""

    def kernel(x):
        a, b = nl.load(x), nl.ndarray(x.shape, x.dtype)
        for _ in range(4):
            nisa.dma_copy(b, a)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, b)
        return out

    p = nki.profile(kernel)(np.zeros((128, 512), np.float32))
    assert (p.hbm_bytes, p.bytes_moved) == (2 * 128 * 512 * 4, 6 * 128 * 512 * 4)
    assert p.roofline()["achieved_gb_s"] == pytest.approx(p.hbm_bytes / p.latency_us / 1e3)


@pytest.mark.parametrize("dtype,rate", [(nl.float32, "fp32"), (nl.bfloat16, "bf16"), (nl.float8_e5m2, "fp8")])
@pytest.mark.parametrize("target", targets.NAMES)
def test_peak_of_the_roofline_is_that_of_the_types(dtype, rate, target):
    def kernel(x):
        a, p = nl.ndarray((128, 128), dtype), nl.ndarray((128, 128), nl.float32, nl.psum)
        nisa.memset(a, 1)
        nisa.nc_matmul(p, a, a)
        return x

    profile = nki.profile(kernel, target=target)(np.zeros((2, 2), np.float32))
    want = targets.get(target).values[f"tflops_{rate}"]
    assert profile.roofline()["attainable_tflops"] == pytest.approx(want)  # no traffic


def test_the_command_says_which_targets_a_kernel_is_not_for(tmp_path, python):
    kernel = """
import numpy as np
import nki, nki.isa as nisa, nki.language as nl
@nki.jit
def kernel(x):
    t = nl.load(x)
    nisa.exponential(t, t)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nl.store(out, t)
    return out
"""
    (tmp_path / "k.py").write_text(kernel)
    told = python("-m", "torchneuron", "nki", "profile", "k.py", "-i", "8x8")
    assert told.returncode == 0 and "\ntrn3: Predicted" in told.stdout, told.stderr
    assert "\ntrn1: exponential target of generation 2" in told.stdout and "\ntrn2: exponential" in told.stdout
    assert python("-m", "torchneuron", "nki", "profile", "k.py", "-i", "8x8", "--target", "trn1").returncode == 1
