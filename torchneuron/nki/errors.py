"""Errors of kernels. Every one names the instruction, what is wrong and the kernel's line."""

from __future__ import annotations

import re
from collections.abc import Callable

from .. import _core


class NkiError(Exception):
    """Base of all errors of kernels. instruction, operand, limit and location (file:line) say which, what and where, as
    far as they are known ("" otherwise); the text consists of them, in this order."""

    def __init__(self, instruction: str, operand: str, limit: str, location: str = "") -> None:
        super().__init__(instruction, operand, limit, location)
        self.instruction, self.operand, self.limit, self.location = instruction, operand, limit, location

    def __str__(self) -> str:
        text = " ".join(part for part in (self.instruction, self.operand, self.limit) if part)
        return f"{text} ({self.location})" if self.location else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


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


def with_places(text: str, locate: Callable[[int], str]) -> str:
    """The core's text with file:line in place of `@n`."""
    return re.sub(r"@(\d+)", lambda m: "at " + locate(int(m.group(1))), text)


def translate(error: _core.Error, locate: Callable[[int], str], source: int | None = None) -> NkiError:
    """The public error for one of the core; source is the failing instruction's line, if the error does not know it."""
    source = source or error.source
    kind = _TRANSLATION.get(type(error), NkiError)
    return kind(error.instruction, error.operand, with_places(error.limit, locate), locate(source) if source else "")
