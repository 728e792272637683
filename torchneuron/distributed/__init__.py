"""torch.distributed on neuron: the backend named `neuron`, which `init_process_group()` also takes if no name is given.

Importing torch registers it; the shared memory, threads and network of a process are made with its first process group.
"""

from __future__ import annotations

import atexit
from typing import Any


def _create(options: Any, _: Any) -> Any:
    """Makes the backend of a new process group from c10d's DistributedBackendOptions."""
    from torchneuron import _C

    return _C.ProcessGroupNeuron(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
    )


def register() -> None:
    """Makes `neuron` a backend of torch.distributed, for neuron and CPU tensors."""
    # Here, because this module may be what imports torch, which then calls this function.
    import torch.distributed as dist

    from torchneuron import _C
    from torchneuron.device import _patches

    if not dist.is_available():
        return
    _patches.default_backend_of_process_groups(dist.distributed_c10d)
    dist.Backend.register_backend("neuron", _create, extended_api=True, devices=["neuron", "cpu"])
    atexit.register(_C.stop_collectives)
