"""Patches of torch: the only file for them. Each names what is missing, the upstream issue, and when it may go."""

from __future__ import annotations


def apply() -> None:
    """Applies the patches that this torch needs."""
