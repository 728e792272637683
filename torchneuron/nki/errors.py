"""Errors of kernels. Every one names the instruction, what is wrong and the kernel's line."""

from __future__ import annotations

import re
from collections.abc import Callable

from .. import _core


class NkiError(Exception):
    """Base of all errors of this package. instruction, operand, limit and location (file:line) say which and where, as
    far as they are known."""

    instruction = operand = limit = location = ""


class NkiValidationError(NkiError, ValueError):
    """A limit of the hardware is violated, or an instruction does not know what it is asked for."""


class NkiOutOfBoundsError(NkiError, IndexError):
    """An access lies outside its tensor."""


class NkiUninitialisedReadError(NkiError):
    """A read of memory that nothing has written; the message has the reading line and the line that wrote last."""


class NkiUninitialisedReadWarning(UserWarning):
    """A computation on memory that nothing has written, on which no result depends."""


class NkiRaceWarning(UserWarning):
    """Two cores touch the same bytes of HBM, one of them writes, and no barrier or exchange orders them; the message
    has both lines. What either core finds there is chance on Trainium."""


class NkiCapacityError(NkiError):
    """More SBUF or PSUM is live at once than the core has."""


class NkiSpillWarning(UserWarning):
    """What would be an NkiCapacityError without TORCH_NEURON_NKI_SPILL=1."""


class NkiDeadlockError(NkiError):
    """Cores wait for each other for ever."""


class DataDependentError(TypeError):
    """A traced kernel asked for a value that exists only when it runs; such kernels run step by step."""


_TRANSLATION = {
    _core.ValidationError: NkiValidationError,
    _core.OutOfBounds: NkiOutOfBoundsError,
    _core.UninitialisedRead: NkiUninitialisedReadError,
    _core.CapacityError: NkiCapacityError,
    _core.Deadlock: NkiDeadlockError,
}


def locate(error: NkiError, package: str) -> None:
    """Gives an error that was raised in Python the kernel's line, the last one outside the package's folder in its
    traceback, and the instruction that was called there."""
    if error.location:
        return
    step, called = error.__traceback__, ""
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(package):
            error.location, called = f"{code.co_filename}:{step.tb_lineno}", ""
        elif error.location and not called:
            called = code.co_name
        step = step.tb_next
    error.instruction = error.instruction or called
    if error.location and not str(error).endswith(f"({error.location})"):
        error.args = (f"{error} ({error.location})",)


def with_places(text: str, locate: Callable[[int], str]) -> str:
    """The core's text with file:line in place of `@n`."""
    return re.sub(r"@(\d+)", lambda m: "at " + locate(int(m.group(1))), text)


def translate(error: _core.Error, locate: Callable[[int], str], source: int | None = None) -> NkiError:
    """The public error for one of the core; source is the failing instruction's line."""
    text = with_places(str(error), locate)
    where = locate(source) if source else ""
    result = _TRANSLATION.get(type(error), NkiError)(f"{text} ({where})" if where else text)
    at = re.search(r"\(at (\S+:\d+)\)$", text)  # what runs later names the line itself
    result.location = where or (at.group(1) if at else "")
    if isinstance(result, NkiValidationError):
        result.instruction, result.operand, result.limit = error.instruction, error.operand, error.limit
    elif isinstance(result, NkiOutOfBoundsError):
        result.limit = text.partition(": ")[2]
        if subject := re.match(r"(\w+) (\w+) is out of bounds", text):
            result.instruction, result.operand = subject.groups()
    elif isinstance(result, NkiCapacityError):
        result.limit = text
    return result
