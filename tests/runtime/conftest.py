"""Snippets in processes of their own: for what needs two devices, a signal, a fork or the end of a process."""

import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def output(python):
    """`output(code, NAME="value")` runs a snippet to its end, which must be clean, and returns what it printed."""

    def run(code, **environment):
        done = python("-c", "import torch\n" + textwrap.dedent(code), **environment)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


# A shell's background jobs, and so the tests that run in one, ignore Ctrl-C: the snippet does not.
LISTEN = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.fixture
def process(tmp_path):
    """`process(code)` starts a snippet and returns it once it has printed READY."""
    started = []

    def start(code):
        child = subprocess.Popen(
            [sys.executable, "-c", LISTEN + "import torch\n" + textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        started.append(child)
        for line in child.stdout:
            if line == "READY\n":
                return child
        raise AssertionError(f"exit {child.wait()} before it was ready")

    yield start
    for child in started:
        child.kill()
        child.wait()
