"""Gives way to the vendor's `torch_neuronx`: a package of that name beside this file, or later on sys.path, wins."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_other = importlib.machinery.PathFinder.find_spec(
    __name__, [p for p in sys.path if os.path.abspath(p or os.curdir) != _here]
)
if _other is not None and _other.origin and os.path.basename(_other.origin) == "__init__.py":
    _module = importlib.util.module_from_spec(_other)
    sys.modules[__name__] = _module
    _other.loader.exec_module(_module)
else:
    from torchneuron._names import provide

    provide(__name__)
