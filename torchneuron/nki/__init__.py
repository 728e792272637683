"""NKI, the Neuron Kernel Interface (API 0.6), on the software NeuronCore. Also importable as `nki`."""

from . import collectives, dtypes, isa, language, typing
from .errors import (
    NkiCapacityError,
    NkiDeadlockError,
    NkiError,
    NkiOutOfBoundsError,
    NkiRaceWarning,
    NkiSpillWarning,
    NkiUninitialisedReadError,
    NkiUninitialisedReadWarning,
    NkiValidationError,
)
from .jit import Kernel, jit, simulate, simulate_ranks
from .profile import Profile, profile
from .tensor import NkiTensor

isa.NkiValidationError = NkiValidationError
dtype = dtypes
cpu_simulate = simulate  # name before API 0.5

__all__ = [
    "Kernel", "NkiCapacityError", "NkiDeadlockError", "NkiError", "NkiOutOfBoundsError", "NkiRaceWarning",
    "NkiSpillWarning", "NkiTensor",
    "NkiUninitialisedReadError", "NkiUninitialisedReadWarning", "NkiValidationError", "Profile", "collectives", "dtype",
    "isa", "jit", "language", "profile", "simulate", "simulate_ranks", "typing",
]  # fmt: skip
