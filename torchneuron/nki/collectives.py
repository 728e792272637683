"""nki.collectives: communication between ranks. A launch has one rank unless nki.simulate is given more."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core
from . import ops
from .errors import NkiValidationError
from .session import Instruction, current
from .tensor import NkiTensor


class ReplicaGroup:
    """Lists of ranks; a rank communicates with the others of its list."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [list(g) for g in groups]

    def of(self, rank: int) -> list[int]:
        """The ranks of `rank`'s list, in order. ValueError if it is in none."""
        for g in self.groups:
            if rank in g:
                return g
        raise ValueError(f"rank {rank} is in no group of {self.groups}")


def rank_id(name: str | None = None) -> int:
    """Number of this rank."""
    return current().rank


def _collective(
    name: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], group: Sequence[int], attrs: dict | None = None,
    metadata: NkiTensor | None = None,
) -> Instruction:  # fmt: skip
    if len(srcs) != len(dsts):
        raise NkiValidationError(f"{name} has {len(srcs)} sources and {len(dsts)} destinations")
    session = current()
    result = Instruction(name)
    for src, dst in zip(srcs, dsts):
        if src.on_chip != dst.on_chip:
            raise NkiValidationError(f"{name} cannot mix HBM and SBUF tensors")
        dst.storage.written = True
        operands = (dst.access(), src.access(), metadata.access() if metadata is not None else None)
        result = session.emit(name, 0, operands, attrs or {}, tuple(group))
    return result


def all_reduce(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, op: object,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = op over the ranks' src; add, minimum, maximum."""
    return _collective("all_reduce", srcs, dsts, replica_group.of(rank_id()), {"op0": ops.alu(op)})


def all_gather(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = the ranks' src concatenated along collective_dim (0 in HBM; 0 or 1 in SBUF)."""
    return _collective("all_gather", srcs, dsts, replica_group.of(rank_id()), {"offset": collective_dim})


def reduce_scatter(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int, op: object,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = this rank's part, along collective_dim, of op over the ranks' src."""
    attrs = {"offset": collective_dim, "op0": ops.alu(op)}
    return _collective("reduce_scatter", srcs, dsts, replica_group.of(rank_id()), attrs)


def all_to_all(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """Part j of dst = rank j's part for this rank."""
    return _collective("all_to_all", srcs, dsts, replica_group.of(rank_id()), {"offset": collective_dim})


def all_gather_v(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
    recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """all_gather with rows send_counts, send_displs, recv_counts (written), recv_displs in metadata_tensor (uint32)."""
    attrs = {"reverse0": recv_counts_known, "reverse1": has_rdispls}
    return _collective("all_gather_v", srcs, dsts, replica_group.of(rank_id()), attrs, metadata_tensor)


def all_to_all_v(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
    recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """all_to_all with rows send_counts, send_displs, recv_counts (written), recv_displs in metadata_tensor (uint32)."""
    attrs = {"reverse0": recv_counts_known, "reverse1": has_rdispls}
    return _collective("all_to_all_v", srcs, dsts, replica_group.of(rank_id()), attrs, metadata_tensor)


def collective_permute(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], source_target_pairs: Sequence[tuple[int, int]],
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each target = src of its source."""
    pairs = tuple(r for pair in source_target_pairs for r in pair)
    return _collective("collective_permute", srcs, dsts, pairs)


def _ring(group: Sequence[int]) -> list[tuple[int, int]]:
    return [(r, group[(i + 1) % len(group)]) for i, r in enumerate(group)]


def collective_permute_implicit(
    srcs_by_channel: Sequence[Sequence[NkiTensor]], dsts_by_channel: Sequence[Sequence[NkiTensor]],
    replica_group: ReplicaGroup, channel_ids: Sequence[int] = (0,), priority: int | None = None,
    name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each rank's successor in the ring = its src."""
    pairs = _ring(replica_group.of(rank_id()))
    result = Instruction("collective_permute")
    for srcs, dsts in zip(srcs_by_channel, dsts_by_channel):
        result = collective_permute(srcs, dsts, pairs)
    return result


def collective_permute_implicit_reduce(
    srcs0_by_channel: Sequence[Sequence[NkiTensor]], srcs1_by_channel: Sequence[Sequence[NkiTensor]],
    dsts_by_channel: Sequence[Sequence[NkiTensor]], replica_group: ReplicaGroup, op: object,
    channel_ids: Sequence[int] = (0,), priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each rank's successor in the ring = its src0 op src1."""
    from . import language as nl

    if ops.alu(op) != _core.ALU_OPS["add"]:
        raise NkiValidationError("collective_permute_implicit_reduce op must be add")
    from . import isa

    reduced_by_channel = []
    for srcs0, srcs1 in zip(srcs0_by_channel, srcs1_by_channel):
        reduced = [nl.ndarray(s.shape, s.dtype, s.buffer) for s in srcs0]
        for out, a, b in zip(reduced, srcs0, srcs1):
            if a.on_chip:
                isa.tensor_tensor(out, a, b, op)
            else:
                isa.dma_compute(out, [a, b], op)
        reduced_by_channel.append(reduced)
    return collective_permute_implicit(reduced_by_channel, dsts_by_channel, replica_group, channel_ids)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> int:
    """The rank whose data this rank holds after iteration_id steps around the ring."""
    group = replica_group.of(rank_id())
    return group[(group.index(rank_id()) - iteration_id) % len(group)]
