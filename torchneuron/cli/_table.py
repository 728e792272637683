"""Tables for a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = None) -> str:
    """Aligned columns; numbers to the right; the last column is wrapped to `width`, by default the terminal's."""
    rows = [tuple(row) for row in rows]
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [head, *texts]) for i in range(len(head))]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(head))]
    indent = sum(widths[:-1]) + 2 * (len(head) - 1)
    room = max((width or shutil.get_terminal_size((120, 0)).columns) - indent, 30)
    lines = []
    rule = ["-" * w for w in (*widths[:-1], min(widths[-1], room))]
    for line in [list(head), rule, *texts]:
        first, *more = textwrap.wrap(line[-1], room) or [""]
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right)]
        cells[-1] = first.rjust(widths[-1]) if right[-1] else first
        lines.append("  ".join(cells).rstrip())
        lines += [" " * indent + rest for rest in more]
    return "\n".join(lines)
