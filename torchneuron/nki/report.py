"""One self-contained HTML page for a predicted timeline."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .profile import Profile

_PAGE = Path(__file__).with_name("report.html")


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
    page = _PAGE.read_text()
    for name, value in fields.items():
        page = page.replace(f"@{name}@", value)
    return page


def summary(p: Profile, roof: dict[str, float]) -> str:
    """Latency, traffic and roofline position in one sentence."""
    bound = "memory" if roof["intensity"] < roof["balance"] else "compute"
    text = (
        f"Predicted latency {p.latency_us:.2f} µs; {p.bytes_moved / 1e6:.3f} MB moved by DMA; {p.hbm_bytes / 1e6:.3f} MB "
        f"of HBM traffic: {roof['achieved_gb_s']:.0f} of {roof['attainable_gb_s']:.0f} GB/s"
    )
    if p.flops:
        text += (
            f"; {p.flops / 1e9:.3f} GFLOP on TensorE: {roof['achieved_tflops']:.2f} of {roof['attainable_tflops']:.2f} "
            f"attainable TFLOP/s at {roof['intensity']:.1f} FLOP/byte ({bound}-bound; balance {roof['balance']:.0f})"
        )
    return f"{text}." + "".join(f" Note: {note}." for note in p.notes)
