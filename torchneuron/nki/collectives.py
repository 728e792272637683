"""nki.collectives: communication between ranks. A launch has one rank unless nki.simulate is given more."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core
from . import isa, operands, ops
from .errors import NkiValidationError
from .session import Instruction, current
from .tensor import NkiTensor


class ReplicaGroup:
    """Lists of ranks; a rank communicates with the others of its list. NkiValidationError if a rank is named twice."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [list(operands.integers(g, "ReplicaGroup ranks")) for g in groups]
        ranks = [r for g in self.groups for r in g]
        if len(set(ranks)) < len(ranks) or min(ranks, default=0) < 0:
            raise NkiValidationError(f"ReplicaGroup {self.groups} names a rank twice, or a negative one")

    def of(self, rank: int) -> list[int]:
        """The ranks of `rank`'s list, in order. NkiValidationError if it is in none."""
        for g in self.groups:
            if rank in g:
                return g
        raise NkiValidationError(f"rank {rank} is in no group of {self.groups}")


def rank_id(name: str | None = None) -> int:
    """Number of this rank."""
    return current().rank


def _own(group: ReplicaGroup | Sequence[Sequence[int]]) -> list[int]:
    """The ranks that this one communicates with."""
    return _known((group if isinstance(group, ReplicaGroup) else ReplicaGroup(group)).of(rank_id()))


def _known(ranks: list[int]) -> list[int]:
    session = current()
    if session.step and (unknown := [r for r in ranks if r >= session.launch.ranks]):
        raise NkiValidationError(f"there is no rank {unknown[0]}: the launch has {session.launch.ranks}")
    return ranks


# How many parts dst and src consist of, of those that a rank sends another: as a function of the number of ranks.
_PARTS = {
    "all_reduce": lambda n: (1, 1), "all_gather": lambda n: (n, 1), "reduce_scatter": lambda n: (1, n),
    "all_to_all": lambda n: (n, n), "collective_permute": lambda n: (1, 1),
}  # fmt: skip


def _collective(
    name: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], group: Sequence[int], attrs: dict | None = None,
    metadata: NkiTensor | None = None, dim: int = 0,
) -> Instruction:  # fmt: skip
    if isinstance(srcs, NkiTensor) or isinstance(dsts, NkiTensor):
        raise NkiValidationError(f"{name} srcs and dsts are lists of tensors")
    if len(srcs) != len(dsts):
        raise NkiValidationError(f"{name} has {len(srcs)} sources and {len(dsts)} destinations")
    result = Instruction(name)
    for src, dst in zip(srcs, dsts):
        operands.check_tensors(name, src=src, dst=dst)
        if src.on_chip != dst.on_chip:
            raise NkiValidationError(f"{name} cannot mix HBM and SBUF tensors")
        if src.dtype != dst.dtype:
            raise NkiValidationError(f"{name} dst dtype {dst.dtype} differs from src's {src.dtype}")
        if isinstance(dim, bool) or dim not in ((0, 1) if src.on_chip else (0,)):
            raise NkiValidationError(f"{name} collective_dim {dim!r} must be 0" + " or 1" * src.on_chip)
        if metadata is not None:
            operands.check_tensors(name, metadata_tensor=metadata)
            if metadata.size != 4 * len(group):
                raise NkiValidationError(
                    f"{name} metadata_tensor shape {metadata.shape} is not (4, {len(group)}): counts and displacements"
                )
        if name in _PARTS:
            to, of = _PARTS[name](len(group))
            if src.shape[dim] % of or dst.size * of != src.size * to:
                raise NkiValidationError(
                    f"{name} dst shape {dst.shape} does not go with src shape {src.shape} on {len(group)} ranks"
                )
        result = operands.emit(name, 0, (dst, src, metadata), {**(attrs or {}), "offset": dim}, tuple(group))
    return result


def all_reduce(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, op: object,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = op over the ranks' src; add, minimum, maximum."""
    return _collective("all_reduce", srcs, dsts, _own(replica_group), {"op0": ops.alu(op)})


def all_gather(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = the ranks' src concatenated along collective_dim (0 in HBM; 0 or 1 in SBUF)."""
    return _collective("all_gather", srcs, dsts, _own(replica_group), dim=collective_dim)


def reduce_scatter(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int, op: object,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = this rank's part, along collective_dim, of op over the ranks' src."""
    return _collective("reduce_scatter", srcs, dsts, _own(replica_group), {"op0": ops.alu(op)}, dim=collective_dim)


def all_to_all(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """Part j of dst = rank j's part for this rank."""
    return _collective("all_to_all", srcs, dsts, _own(replica_group), dim=collective_dim)


def all_gather_v(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
    recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """all_gather with rows send_counts, send_displs, recv_counts (written), recv_displs in metadata_tensor (uint32)."""
    attrs = {"reverse0": recv_counts_known, "reverse1": has_rdispls}
    return _collective("all_gather_v", srcs, dsts, _own(replica_group), attrs, metadata_tensor)


def all_to_all_v(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
    recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """all_to_all with rows send_counts, send_displs, recv_counts (written), recv_displs in metadata_tensor (uint32)."""
    attrs = {"reverse0": recv_counts_known, "reverse1": has_rdispls}
    return _collective("all_to_all_v", srcs, dsts, _own(replica_group), attrs, metadata_tensor)


def collective_permute(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], source_target_pairs: Sequence[tuple[int, int]],
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each target = src of its source. Ranks in no pair take no part; no rank is a source or a target twice."""
    pairs = [operands.integers(pair, "collective_permute source_target_pairs") for pair in source_target_pairs]
    sources, targets = [p[0] for p in pairs if len(p) == 2], [p[-1] for p in pairs if len(p) == 2]
    if min(len(set(sources)), len(set(targets))) < len(pairs):
        raise NkiValidationError(f"collective_permute source_target_pairs {pairs} are not pairs of different ranks")
    if rank_id() not in _known([*sources, *targets]):
        return Instruction("collective_permute")
    return _collective("collective_permute", srcs, dsts, tuple(r for pair in pairs for r in pair))


def _ring(group: Sequence[int]) -> list[tuple[int, int]]:
    return [(r, group[(i + 1) % len(group)]) for i, r in enumerate(group)]


def collective_permute_implicit(
    srcs_by_channel: Sequence[Sequence[NkiTensor]], dsts_by_channel: Sequence[Sequence[NkiTensor]],
    replica_group: ReplicaGroup, channel_ids: Sequence[int] = (0,), priority: int | None = None,
    name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each rank's successor in the ring = its src."""
    pairs = _ring(_own(replica_group))
    result = Instruction("collective_permute")
    if len(srcs_by_channel) != len(dsts_by_channel):
        raise NkiValidationError(
            f"collective_permute has {len(srcs_by_channel)} channels of sources, {len(dsts_by_channel)} of destinations"
        )
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
    if [len(c) for c in srcs0_by_channel] != [len(c) for c in srcs1_by_channel]:
        raise NkiValidationError("collective_permute_implicit_reduce srcs0 and srcs1 differ in number")
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
    group = _own(replica_group)
    return group[(group.index(rank_id()) - iteration_id) % len(group)]
