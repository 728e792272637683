"""torchneuron nki lint: each rule of the kernel language once broken and once kept."""

import textwrap
from pathlib import Path

import pytest

from torchneuron.nki import cli
from torchneuron.nki.lint import lint

HEAD = "import nki\nimport nki.language as nl\nimport nki.isa as nisa\n"
KERNEL = "@nki.jit\ndef kernel(x{parameters}):\n{body}    return x\n"

BROKEN = {
    "x is None": "is not` are refused",
    "x is not None": "is not` are refused",
    "[i for i in (1, 2) if i is 1]": "is not` are refused",
    "{1, 2}": "sets",
    "sum(i for i in range(3))": "generators",
    "1j": "complex",
    "{1: 2}": "keys",
    "try:\n        pass\n    finally:\n        pass": "exceptions",
    "with open('f') as f:\n        pass": "no_reorder",
    "import os": "imports",
    "del x": "`del`",
    "raise ValueError('x')": "`raise`",
    "nl.divide(x, x)": "no engine has nl.divide",
}
KEPT = (
    "x == None",
    "with nl.no_reorder():\n        pass",
    "a = {'k': 1}; b = [i for i in range(3)]; c = (1, 2.0, 'x', None, True)",
    "f = lambda y: y + 1",
    "assert x.shape[0] <= 128, f'{x.shape} is too large'",
    "while nisa.register_alloc(0):\n        pass",
)


def source(body="", parameters="", head=HEAD):
    return head + KERNEL.format(parameters=parameters, body=textwrap.indent(body + "\n", "    ") if body else "")


@pytest.mark.parametrize("body", BROKEN)
def test_refused(body):
    found = lint(source(body.replace("\n    ", "\n")))
    assert len(found) == 1 and BROKEN[body] in found[0].message and found[0].line == 6


@pytest.mark.parametrize("body", KEPT)
def test_kept(body):
    assert not lint(source(body.replace("\n    ", "\n")))


@pytest.mark.parametrize("parameters", [", *, scale=1", ", sizes=[1]", ", sizes: list[int]"])
def test_parameters(parameters):
    assert len(lint(source(parameters=parameters))) == 1


def test_what_a_kernel_uses_is_looked_at_and_the_rest_is_not():
    helpers = """
class Plain:
    pass
class Config(nl.NKIObject):
    pass
def helper(y):
    return Plain() if y is None else Config()
def unused(y):
    return y is None
"""
    found = lint(source("helper(x)", head=HEAD + helpers))
    assert [f.line for f in found] == [5, 10]  # the class, the comparison in helper


def test_command(tmp_path: Path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(source())
    bad.write_text(source("x is None"))
    assert cli.main(["lint", str(good)]) == 0 and not capsys.readouterr().out
    assert cli.main(["lint", str(good), str(bad)]) == 1
    assert capsys.readouterr().out.startswith(f"{bad}:6:5: ")


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x is None\nk = nki.jit(f)",
        "def f(x):\n    return x is None\nnki.simulate(f)(1)",
        "class A:\n    @nki.jit\n    def f(self, x):\n        return x is None",
        "class A:\n    def f(self, x):\n        return x is None\n    def g(self):\n        return nki.jit(self.f)",
        "def make():\n    @nki.jit(mode='simulation')\n    def f(x):\n        return x is None\n    return f",
    ],
)
def test_kernels_are_found_however_they_are_made(text):
    assert [f.message[:4] for f in lint(text)] == ["`is`"]


def test_other_functions_are_plain_python():
    assert not lint("def f(x):\n    return x is None\nf(1)\n@torch_neuronx.nki_op('a::b')\ndef g(x):\n    return f(x)")
