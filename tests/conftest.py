"""Fixtures for every test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def root() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture
def python(tmp_path):
    """Runs this Python with arguments in an empty folder: `python("-c", "...", NAME="value")`."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=500,
        )

    return run
