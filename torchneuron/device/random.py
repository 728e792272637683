"""Random numbers of `torch.neuron`: a Philox (seed, offset) per device, as on CUDA."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchneuron import _C
from torchneuron.device._index import Device, device_index


def _generator(device: Device = None) -> torch.Generator:
    return _C.default_generator(device_index(device))


def get_rng_state(device: Device = "neuron") -> torch.Tensor:
    """State of the device's generator: a CPU tensor of 16 bytes, seed and offset."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "neuron") -> None:
    """Sets what `get_rng_state` returned."""
    _generator(device).set_state(new_state.clone(memory_format=torch.contiguous_format))


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices' generators."""
    return [get_rng_state(i) for i in range(_C.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets what `get_rng_state_all` returned."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds every device's generator."""
    for i in range(_C.device_count()):
        _generator(i).manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device's generator with a random number."""
    _generator().seed()


def seed_all() -> None:
    """Seeds every device's generator with one random number."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    """Seed of the current device's generator."""
    return _generator().initial_seed()
