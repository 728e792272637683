"""Operators that instructions take (`op=nl.add`) and that are also functions on tiles (`nl.add(x, y)`)."""

from __future__ import annotations

from collections.abc import Callable

from .. import _core
from .errors import NkiValidationError

_ALIASES = {"max": "maximum", "amax": "maximum", "min": "minimum", "amin": "minimum", "sum": "add", "prod": "multiply",
            "true_divide": "divide", "bitwise_not": "invert", "absolute": "abs", "negative": "negative"}  # fmt: skip


class Op:
    """An operator: its number among ALU operators and activation functions (None: not one), callable on tiles."""

    def __init__(self, name: str, body: Callable, alu: str | None = None, function: str | None = None) -> None:
        self.name = self.__name__ = name
        self.alu = _core.ALU_OPS.get(alu or name)
        self.function = _core.FUNCTIONS.get(function or name)
        self.body = self.__wrapped__ = body  # whose signature is this one's
        self.__doc__ = body.__doc__

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __deepcopy__(self, memo: dict) -> Op:
        return self

    def __reduce__(self) -> str:
        return self.name


def _name(op: object) -> str:
    name = op if isinstance(op, str) else getattr(op, "__name__", None) or getattr(op, "name", None)
    if name is None:
        raise NkiValidationError("", "op", f"{op!r} is no operator")
    return _ALIASES.get(name, name)


def alu(op: object) -> int:
    """Number of an ALU operator: an Op, a NumPy function or ufunc, or a name. NkiValidationError for others; None:
    bypass."""
    if op is None:
        return _core.ALU_OPS["bypass"]
    code = op.alu if isinstance(op, Op) else _core.ALU_OPS.get(_name(op))
    if code is None:
        raise NkiValidationError("", "op", f"{op!r} is no operator of instructions")
    return code


def function(op: object) -> int:
    """Number of an activation function."""
    code = op.function if isinstance(op, Op) else _core.FUNCTIONS.get(_name(op))
    if code is None:
        raise NkiValidationError("", "op", f"{op!r} is no activation function")
    return code


ARITHMETIC, BITWISE, EXTENSION = 0, 1, 2


def is_bitwise(code: int) -> bool:
    return _core.alu_class(code) == BITWISE


def inputs(code: int) -> int:
    return _core.alu_inputs(code)
