"""One self-contained HTML page for a predicted timeline."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .profile import Profile

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --fg: #1d2430; --bg: #fff; --muted: #667085; --line: #d8dde6; }
@media (prefers-color-scheme: dark) { :root { --fg: #e7eaf0; --bg: #15181d; --muted: #98a2b3; --line: #343a46; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 24px; max-width: 1400px; }
h1 { font-size: 20px; margin: 0 0 4px; } p { margin: 4px 0 16px; color: var(--muted); }
table { border-collapse: collapse; margin: 0 0 20px; } td, th { padding: 3px 14px 3px 0; text-align: left; }
th { font-weight: 600; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
canvas { width: 100%; display: block; border: 1px solid var(--line); border-radius: 6px; }
h2 { font-size: 15px; margin: 20px 0 6px; } #tip { min-height: 20px; color: var(--muted); }
.bar { display: inline-block; height: 9px; background: #3d7bd9; border-radius: 2px; vertical-align: middle; }
</style></head><body>
<h1>@TITLE@</h1><p>@SUMMARY@</p>
<table><tr><th>engine</th><th>utilisation</th><th></th></tr>@ENGINES@</table>
<h2>Timeline</h2><div id="tip">Wheel zooms, drag moves, hover names an instruction. Outlined: critical path.</div>
<canvas id="time" height="260"></canvas>
<h2>SBUF in use (bytes per partition)</h2><canvas id="sbuf" height="120"></canvas>
<h2>Longest instructions</h2>
<table><tr><th>instruction</th><th>engine</th><th>start µs</th><th>µs</th><th>line</th></tr>@LONGEST@</table>
<script>
const data = @DATA@;
const colours = {tensor: "#d9534f", vector: "#3d7bd9", scalar: "#e0a030", gpsimd: "#5aa469", dma: "#8a63d2", sync: "#888"};
const engines = [...new Set(data.events.map(e => e[1]))];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
let from = 0, to = data.latency, drag = null;
const time = document.getElementById("time"), sbuf = document.getElementById("sbuf");
function fit(c) { const r = devicePixelRatio || 1, w = c.clientWidth, h = +c.getAttribute("height");
  if (c.width !== w * r) { c.width = w * r; c.height = h * r; c.style.height = h + "px"; }
  const g = c.getContext("2d"); g.setTransform(r, 0, 0, r, 0, 0); g.clearRect(0, 0, w, h); return [g, w, h]; }
const left = 64, x = (t, w) => left + (t - from) / (to - from) * (w - left - 8);
function axis(g, w, h) { g.fillStyle = css("--muted"); g.font = "11px system-ui"; g.strokeStyle = css("--line");
  const step = Math.pow(10, Math.floor(Math.log10((to - from) / 4)));
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) { const p = x(t, w);
    g.beginPath(); g.moveTo(p, 0); g.lineTo(p, h - 16); g.stroke();
    if ((to - from) / step < 14 || Math.round(t / step) % 5 === 0) g.fillText(+t.toPrecision(6) + " µs", p + 2, h - 4); } }
function draw() { let [g, w, h] = fit(time); axis(g, w, h); const rows = engines.length, rh = (h - 20) / rows;
  engines.forEach((e, i) => { g.fillStyle = css("--fg"); g.fillText(e, 6, i * rh + rh / 2 + 4); });
  for (const e of data.events) { const a = x(e[2], w), b = x(e[3], w); if (b < left || a > w) continue;
    const y = engines.indexOf(e[1]) * rh + 3, c0 = Math.max(a, left), c1 = Math.max(c0 + 0.6, b);
    g.fillStyle = colours[e[1]] || "#888"; g.globalAlpha = e[5] ? 1 : 0.72; g.fillRect(c0, y, c1 - c0, rh - 6);
    g.globalAlpha = 1; if (e[5]) { g.strokeStyle = css("--fg"); g.strokeRect(c0 + .5, y + .5, Math.max(0, c1 - c0 - 1), rh - 7); } }
  [g, w, h] = fit(sbuf); axis(g, w, h); const top = Math.max(data.capacity, 1); g.fillStyle = "#5aa469";
  data.sbuf.forEach((s, i) => { const next = i + 1 < data.sbuf.length ? data.sbuf[i + 1][0] : data.latency;
    const a = Math.max(left, x(s[0], w)), b = x(next, w); if (b > left) g.fillRect(a, (h - 18) * (1 - s[1] / top), b - a, (h - 18) * s[1] / top); });
  g.fillStyle = css("--fg"); g.fillText((top / 1024).toFixed(0) + " KiB", 6, 12); }
time.onwheel = ev => { ev.preventDefault(); const w = time.clientWidth, t = from + (ev.offsetX - left) / (w - left - 8) * (to - from);
  const k = ev.deltaY > 0 ? 1.25 : 0.8; from = Math.max(0, t - (t - from) * k); to = Math.min(data.latency, t + (to - t) * k); draw(); };
time.onmousedown = ev => drag = [ev.offsetX, from, to];
addEventListener("mouseup", () => drag = null);
time.onmousemove = ev => { const w = time.clientWidth, span = to - from;
  if (drag) { const d = (drag[0] - ev.offsetX) / (w - left - 8) * span; from = Math.max(0, Math.min(data.latency - span, drag[1] + d)); to = from + span; draw(); return; }
  const t = from + (ev.offsetX - left) / (w - left - 8) * span, rh = (+time.getAttribute("height") - 20) / engines.length;
  const engine = engines[Math.floor(ev.offsetY / rh)], hit = data.events.find(e => e[1] === engine && e[2] <= t && t <= e[3]);
  document.getElementById("tip").textContent = hit ? `${hit[0]} on ${hit[1]}: ${hit[2].toFixed(3)} to ${hit[3].toFixed(3)} µs, ${hit[4]}` : "\\u00a0"; };
addEventListener("resize", draw); draw();
</script></body></html>
"""


def render(p: Profile) -> str:
    """The page of a profile."""
    critical = {id(e) for e in p.critical_path}
    roof = p.roofline()
    longest = sorted(p.instructions, key=lambda e: e.start - e.end)[:15]
    data = {
        "latency": p.latency_us or 1.0,
        "events": [
            [e.name, e.engine, round(e.start, 4), round(e.end, 4), e.location, int(id(e) in critical)]
            for e in p.instructions
        ],
        "sbuf": [[round(t, 4), live] for t, live in p.sbuf],
        "capacity": p.sbuf_bytes,
    }
    fields = {
        "TITLE": html.escape(f"{p.kernel} on {p.target}"),
        "SUMMARY": html.escape(summary(p, roof)),
        "ENGINES": "".join(
            f'<tr><td>{name}</td><td class="n">{share:.1%}</td>'
            f'<td><span class="bar" style="width:{300 * min(1, share):.0f}px"></span></td></tr>'
            for name, share in p.engines.items()
            if share > 0
        ),
        "LONGEST": "".join(
            f'<tr><td>{e.name}</td><td>{e.engine}</td><td class="n">{e.start:.3f}</td>'
            f'<td class="n">{e.end - e.start:.3f}</td><td>{html.escape(e.location)}</td></tr>'
            for e in longest
        ),
        "DATA": json.dumps(data).replace("</", "<\\/"),
    }
    page = _PAGE
    for name, value in fields.items():
        page = page.replace(f"@{name}@", value)
    return page


def summary(p: Profile, roof: dict[str, float]) -> str:
    """Latency, traffic and roofline position in one sentence."""
    bound = "memory" if roof["intensity"] < roof["balance"] else "compute"
    return (
        f"Predicted latency {p.latency_us:.2f} µs; {p.bytes_moved / 1e6:.3f} MB moved by DMA; "
        f"{p.flops / 1e9:.3f} GFLOP on TensorE: {roof['achieved_tflops']:.2f} of {roof['attainable_tflops']:.2f} "
        f"attainable TFLOP/s at {roof['intensity']:.1f} FLOP/byte ({bound}-bound; balance {roof['balance']:.0f})."
    )
