"""What kernels give instructions (tensors, numbers, registers, names) as the core takes it, or NkiValidationErrors."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from .errors import DataDependentError, NkiValidationError
from .session import OPCODES, OPERANDS, WRITTEN, Instruction, current
from .tensor import NkiTensor, Register, integer


def emit(
    name: str, engine: int, operands: tuple, attrs: dict[str, float] | None = None, values: tuple = ()
) -> Instruction:
    """Issues an instruction on what a kernel gave as its operands: tensors, numbers, registers, or None."""
    session, opcode, packed = current(), OPCODES[name], []
    for operand, written, x in zip(OPERANDS[opcode], WRITTEN[opcode], operands):
        if isinstance(x, NkiTensor):
            storage = x.storage
            if storage.session is not session or (x.index is not None and x.index.storage.session is not session):
                raise NkiValidationError(name, operand, f"{x.name} belongs to another kernel, or another call of it")
            if written:
                storage.written = True
            x = x.access()
        elif x is not None:
            x = number(x, operand, name)
        packed.append(x)
    return session.emit(name, engine, tuple(packed), attrs, values)


def number(x: object, operand: str, instruction: str = "") -> float:
    """x as a float; NkiValidationError if it is none, DataDependentError if it is a register without a value."""
    try:
        return float(x)
    except DataDependentError:
        raise
    except (TypeError, ValueError):
        raise NkiValidationError(instruction, operand, f"{x!r} is no number") from None


def check_tensors(instruction: str, **given: object) -> None:
    """That what is looked at before the instruction is issued is tensors."""
    for operand, x in given.items():
        if not isinstance(x, NkiTensor):
            raise NkiValidationError(instruction, operand, f"must be a tensor, not {type(x).__name__}")


def code(member: object, kind: type[enum.Enum]) -> int:
    """Number of a member of `kind`; kernels also pass its name, its number, or None for the default."""
    if member is None:
        return 0
    try:
        if isinstance(member, bool):
            raise ValueError
        return (kind[member] if isinstance(member, str) else kind(member)).value
    except (KeyError, ValueError):
        known = ", ".join(kind.__members__)
        raise NkiValidationError("", kind.__name__, f"{member!r} must be one of {known}, or its number") from None


def pattern(given: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """[[step, count], ...] in one row."""
    try:
        return tuple(integer(v, "pattern") for pair in given for v in pair)
    except TypeError:
        raise NkiValidationError("", "pattern", f"{given!r} is not [[step, count], ...]") from None


def integers(values: Sequence[int], operand: str) -> tuple[int, ...]:
    """values as ints; NkiValidationError if they are none."""
    if not isinstance(values, Iterable):
        raise NkiValidationError("", operand, f"{values!r} is not a sequence of integers")
    return tuple(integer(v, operand) for v in values)


def member(value: object, operand: str, count: int, kind: str) -> int:
    """`value`, one of the integers 0 to count - 1; NkiValidationError otherwise. kind: of what it is one."""
    number = integer(value, operand)
    if not 0 <= number < count:
        raise NkiValidationError("", operand, f"{number} is no {kind}: {kind}s are the integers 0 to {count - 1}")
    return number


def members(values: object, operand: str, count: int, kind: str, own: int | None = None) -> tuple[int, ...]:
    """`values` as different integers below `count`, `own` among them if given; NkiValidationError otherwise."""
    found = tuple(member(v, operand, count, kind) for v in integers(values, operand))
    if len(set(found)) < len(found):
        raise NkiValidationError("", operand, f"{list(found)} names a {kind} twice")
    if own is not None and own not in found:
        raise NkiValidationError("", operand, f"{list(found)} does not name the {kind} itself, {own}")
    return found


def bound(x: int | Register, name: str) -> dict[str, int]:
    """A number or a register's value as attributes of an instruction."""
    if isinstance(x, Register):
        return x.bound(name)
    value = integer(x, name)
    if not -(2**31) <= value < 2**32:
        raise NkiValidationError("", name, f"{value} does not fit the 32 bits of a register")
    return {name: value}
