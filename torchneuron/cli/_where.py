"""The line of the user's code that led to a call."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import torchneuron

# Never the user's: PyTorch, this package, the import system.
_INTERNAL = (*torch.__path__, str(Path(torchneuron.__file__).parent), "<frozen ")
# The user's only if nothing better is on the stack: installed packages and the standard library.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

Place = tuple[str, int]


def is_internal(file: str) -> bool:
    """Whether `file` is part of PyTorch, of this package or of the import system."""
    return file.startswith(_INTERNAL)


def describe(places: Iterable[Place]) -> str:
    """The innermost of `places` (innermost first) that is the user's, as `file:line`; empty if none is."""
    places = [place for place in places if not is_internal(place[0])]
    own = [place for place in places if not place[0].startswith(_INSTALLED)]
    for file, line in own or places:
        path = Path(file)
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
    return ""


def stack() -> Iterator[Place]:
    """The callers of the function that asks, innermost first."""
    frame = sys._getframe(2)
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def caller() -> str:
    """The user's line that led here."""
    return describe(list(stack()))


def forward_of_backward() -> str:
    """In the backward pass: the user's line that the running node was recorded by (needs anomaly mode)."""
    node = torch._C._current_autograd_node()
    lines = node.metadata.get("traceback_", []) if node else []
    found = [re.match(r'\s*File "(.+?)", line (\d+)', line) for line in lines]
    return describe((m[1], int(m[2])) for m in reversed(found) if m)
