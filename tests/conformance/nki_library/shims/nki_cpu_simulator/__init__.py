"""nki-library's simulation mode looks for this package: it is whatever `nki` resolves to."""

import importlib
import sys
import types
from types import SimpleNamespace

import nki


class NKIFrontend:
    """The vendor's front end, as far as trace-only tests use it: compile() runs the kernel once."""

    def compile(self, kernel, inputs=None, target=None, lnc=1, **options):
        nki.simulate(kernel)[lnc](**(inputs or {}))
        return SimpleNamespace(module=None)


class ParserFrontend(NKIFrontend):
    pass


def _module(name, **names):
    m = types.ModuleType(name)
    m.__dict__.update(names)
    m.__path__ = []
    sys.modules[name] = m
    return m


nki.compiler = _module("nki.compiler")
nki.compiler.frontend = _module("nki.compiler.frontend", NKIFrontend=NKIFrontend, ParserFrontend=ParserFrontend)
nki.builtin = _module("nki.builtin")
nki.cpu_simulate = nki.simulate
for sub in ("language", "isa", "isa.constants", "typing", "dtype", "tensor", "collectives"):
    importlib.import_module("nki." + sub)
for name, module in list(sys.modules.items()):
    if name == "nki" or name.startswith("nki."):
        sys.modules["nki_cpu_simulator." + name] = module
nki.language.dtypes = sys.modules["nki.dtype"]
sys.modules["nki_cpu_simulator.nki.language.dtypes"] = sys.modules["nki.dtype"]
