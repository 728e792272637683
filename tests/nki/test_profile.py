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
