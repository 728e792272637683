"""`torchneuron nki` on files and arguments that are not as they should be: what, where, what to do, and no traceback of
this package."""

import pytest

KERNEL = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def kernel(x):
    out, t = nl.ndarray(x.shape, x.dtype, nl.shared_hbm), nl.load(x)
    nisa.dma_copy(out, t)
    return RESULT
"""
GOOD = KERNEL.replace("RESULT", "out")
ONES = "np.ones((2, 2), np.float32)"

# name: (file's text or bytes, arguments, exit code, what is printed)
CASES = {
    "syntax": ("def f(:", "run", 1, "cannot be read as Python: invalid syntax"),
    "null bytes": (b"x = 1\0", "run", 1, "cannot be read as Python"),
    "binary": (b"\x7fELF\xff\xfe\x00", "run", 1, "cannot be read as Python"),
    "no kernel": ("x = 1", "run -i 2x2", 1, "has the kernels (none)"),
    "one kernel, two names": (GOOD + "\nother = kernel", "run -i 2x2", 0, "output 0: shape (2, 2)"),
    "nothing": (KERNEL.replace("RESULT", "None"), "run -i 2x2", 0, "the kernel returns nothing"),
    "dict": (KERNEL.replace("RESULT", "{'a': out}"), "run -i 2x2", 0, "output a: shape (2, 2)"),
    "nested": (KERNEL.replace("RESULT", "(out, [out])"), "run -i 2x2", 0, "output 1, 0: shape (2, 2)"),
    "raises": ("raise RuntimeError('boom')", "run", 1, "line 1, in <module>"),
    "imports": ("import no_such_module_at_all", "run", 1, "No module named"),
    "exits": ("import sys; sys.exit(3)", "run", 1, "ends the program when it is imported (SystemExit: 3)"),
    "no inputs": (GOOD, "run", 1, "--input, or define a function example_inputs()"),
    "inputs: number": (GOOD + "\ndef example_inputs(): return 5", "run", 1, "returns int"),
    "inputs: list": (GOOD + "\nexample_inputs = [1]", "run", 1, "define a function example_inputs()"),
    "inputs: array": (GOOD + f"\ndef example_inputs(): return {ONES}", "run", 0, "shape (2, 2)"),
    "inputs: names": (GOOD + f"\ndef example_inputs(): return dict(x={ONES})", "run", 0, "shape (2, 2)"),
    "inputs: raise": (GOOD + "\ndef example_inputs(): raise KeyError('k')", "run", 1, "in example_inputs"),
    "too large": (GOOD, "run -i 200x2", 1, "partition dimension 200"),
    "core": (GOOD, "profile -i 2x2 --core 1", 2, "two with --lnc 2"),
    "no folder": (GOOD, "profile -i 2x2 --target trn2 --html nowhere/x.html", 1, "nowhere/x.html cannot be written"),
    "values": (
        GOOD.replace("return", "int(nisa.register_alloc(1))\n    return"), "profile -i 2x2", 1, "depends on values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_files_and_arguments(name, tmp_path, python):
    text, arguments, code, told = CASES[name]
    (tmp_path / "k.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    command, *rest = arguments.split()
    done = python("-m", "torchneuron", "nki", command, "k.py", *rest)
    printed = done.stdout + done.stderr
    assert done.returncode == code and told in printed, printed
    assert "torchneuron/" not in printed.replace("\\", "/")


def test_a_directory_and_no_file(tmp_path, python):
    (tmp_path / "k.py").mkdir()
    for name in ("k.py", "none.py"):
        done = python("-m", "torchneuron", "nki", "run", name)
        assert done.returncode == 1 and f"no Python file {name}" in done.stderr


def test_a_file_may_have_the_name_of_a_module(tmp_path, python):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "numpy.py").write_text(GOOD)
    done = python("-m", "torchneuron", "nki", "run", "files/numpy.py", "-i", "2x2:bfloat16")
    assert done.returncode == 0 and "dtype bfloat16" in done.stdout, done.stderr


def test_a_terminal_without_greek_letters(tmp_path, python, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "k.py").write_text(GOOD)
    done = python("-m", "torchneuron", "nki", "profile", "k.py", "-i", "2x2", "--target", "trn2")
    assert done.returncode == 0 and "latency ?s" in done.stdout, done.stderr
