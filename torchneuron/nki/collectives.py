"""nki.collectives: communication between ranks. A launch has one rank unless nki.simulate is given more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import _core
from . import dtypes, isa, operands, ops
from .errors import NkiValidationError
from .session import Instruction, current, psum
from .tensor import NkiTensor

_CHANNELS = 4  # of a whole node
_REDUCTIONS = [_core.ALU_OPS[op] for op in ("add", "maximum", "minimum")]
# dst's size along the collective dimension by src's and the number of ranks (None: any), and the operand that is cut
# into equal parts, one for each rank.
_SIZES = {
    "all_reduce": (lambda size, n: size, None),
    "all_gather": (lambda size, n: size * n, None),
    "reduce_scatter": (lambda size, n: size // n, "src"),
    "all_to_all": (lambda size, n: size, "src"),
    "all_gather_v": (None, "dst"),
    "all_to_all_v": (None, "dst"),
    "collective_permute": (lambda size, n: size, None),
}


class ReplicaGroup:
    """Lists of ranks; a rank communicates with the others of its list. They are looked at where they are used."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = groups

    def of(self, rank: int, count: int) -> tuple[int, ...]:
        """The ranks of `rank`'s list, in order, of a launch of `count`. NkiValidationError if it is in none, or if a
        rank does not exist or is named twice."""
        operand = "replica_group"
        try:
            lists = [operands.integers(g, operand) for g in self.groups]
        except TypeError:
            raise NkiValidationError("", operand, f"{self.groups!r} is no ReplicaGroup or lists of ranks") from None
        operands.members([r for g in lists for r in g], operand, count, "rank", own=rank)
        return next(g for g in lists if rank in g)


def rank_id(name: str | None = None) -> int:
    """Number of this rank."""
    return current().rank


def _ranks() -> int:
    """How many ranks there can be: for its time alone a kernel needs no others."""
    session = current()
    return session.launch.ranks if session.runs else 1 << 31


def _own(group: ReplicaGroup | Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that this one communicates with."""
    return (group if isinstance(group, ReplicaGroup) else ReplicaGroup(group)).of(rank_id(), _ranks())


def _reduction(op: object, srcs: Sequence[NkiTensor]) -> dict[str, int]:
    """The operator of a collective as an attribute."""
    if ops.alu(op) not in _REDUCTIONS:
        raise NkiValidationError("", "op", f"{op!r} must be add, maximum or minimum")
    for src in _tensors("srcs", srcs):
        if dtypes.is_packed(src.dtype):
            raise NkiValidationError("", "src", f"dtype {src.dtype} has no sum and no order")
    return {"op0": ops.alu(op)}


def _tensors(operand: str, tensors: Sequence[NkiTensor]) -> Sequence[NkiTensor]:
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, NkiTensor) for t in tensors):
        raise NkiValidationError("", operand, "must be a list of tensors")
    if len(tensors) > 1 and any(t.on_chip for t in tensors):
        raise NkiValidationError("", operand, "must be one tensor in SBUF; several can only be in HBM")
    return tensors


def _check(opcode: str, src: NkiTensor, dst: NkiTensor, ranks: int, dim: int) -> None:
    """Limits of one pair of tensors."""
    if src.on_chip != dst.on_chip:
        raise NkiValidationError("", "dst", f"is in {dst.buffer!r}, src in {src.buffer!r}: they cannot be mixed")
    for operand, t in (("src", src), ("dst", dst)):
        if t.buffer is psum or (t.on_chip and opcode == "all_to_all"):
            raise NkiValidationError("", operand, f"cannot be in {t.buffer!r}")
    if src.dtype != dst.dtype:
        raise NkiValidationError("", "dst", f"dtype {dst.dtype} differs from src's {src.dtype}")
    if isinstance(dim, bool) or dim not in ((0, 1) if src.on_chip else (0,)):
        raise NkiValidationError("", "collective_dim", f"{dim!r} must be 0 in HBM, 0 or 1 in SBUF")
    grow, cut = _SIZES[opcode]
    sizes = {o: [t.shape[0], math.prod(t.shape[1:])] for o, t in (("src", src), ("dst", dst))}
    if cut and (whole := sizes[cut][dim] if grow else math.prod(sizes[cut])) % ranks:
        raise NkiValidationError("", cut, f"of {whole} along collective_dim has no equal part for {ranks} ranks")
    if grow:
        want = sizes["src"]
        want[dim] = grow(want[dim], ranks)
        if sizes["dst"] != want if src.on_chip else math.prod(sizes["dst"]) != math.prod(want):
            text = f"shape {dst.shape} does not hold the {want[0]} x {want[1]} elements that {ranks} ranks give"
            raise NkiValidationError("", "dst", text)


def _collective(
    name: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], ranks: Sequence[int], attrs: dict | None = None,
    metadata: NkiTensor | None = None, dim: int = 0, values: Sequence[int] = (),
) -> Instruction:  # fmt: skip
    """One collective for each pair of tensors. values: of the instruction, if not the ranks."""
    srcs, dsts = _tensors("srcs", srcs), _tensors("dsts", dsts)
    if len(srcs) != len(dsts):
        raise NkiValidationError("", "dsts", f"are {len(dsts)} tensors, srcs are {len(srcs)}")
    result = Instruction(name)
    for src, dst in zip(srcs, dsts):
        _check(name, src, dst, len(ranks), dim)
        result = operands.emit(name, 0, (dst, src, metadata), {**(attrs or {}), "offset": dim}, tuple(values or ranks))
    return result


def all_reduce(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, op: object,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst = op over the ranks' src; add, minimum, maximum."""
    return _collective("all_reduce", srcs, dsts, _own(replica_group), _reduction(op, srcs))


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
    return _collective("reduce_scatter", srcs, dsts, _own(replica_group), _reduction(op, srcs), dim=collective_dim)


def all_to_all(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """Part j of dst = rank j's part for this rank. HBM."""
    return _collective("all_to_all", srcs, dsts, _own(replica_group), dim=collective_dim)


def _variable(
    name: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup,
    metadata: NkiTensor, recv_counts_known: bool, has_rdispls: bool,
) -> Instruction:  # fmt: skip
    ranks = _own(replica_group)
    if not isinstance(metadata, NkiTensor) or metadata.size != 4 * len(ranks):
        text = f"must be a tensor of (4, {len(ranks)}): counts and displacements, a number for each rank"
        raise NkiValidationError("", "metadata_tensor", text)
    attrs = {"reverse0": recv_counts_known, "reverse1": has_rdispls}
    return _collective(name, srcs, dsts, ranks, attrs, metadata)


def all_gather_v(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
    recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """all_gather with rows send_counts, send_displs, recv_counts (written), recv_displs in metadata_tensor (uint32)."""
    return _variable("all_gather_v", srcs, dsts, replica_group, metadata_tensor, recv_counts_known, has_rdispls)


def all_to_all_v(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
    recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """all_to_all with rows send_counts, send_displs, recv_counts (written), recv_displs in metadata_tensor (uint32)."""
    return _variable("all_to_all_v", srcs, dsts, replica_group, metadata_tensor, recv_counts_known, has_rdispls)


def collective_permute(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], source_target_pairs: Sequence[tuple[int, int]],
    priority: int | None = None, name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each target = src of its source. Ranks in no pair take no part; no rank is a source or a target twice."""
    operand = "source_target_pairs"
    if not isinstance(source_target_pairs, Sequence):
        raise NkiValidationError("", operand, f"{source_target_pairs!r} must be a list of (source, target)")
    for pair in source_target_pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise NkiValidationError("", operand, f"{pair!r} must be (source, target)")
    for ends in zip(*source_target_pairs):
        operands.members(ends, operand, _ranks(), "rank")
    flat = [r for pair in source_target_pairs for r in pair]
    if rank_id() not in flat:
        return Instruction("collective_permute")
    return _collective("collective_permute", srcs, dsts, [rank_id()], values=flat)


def _ring(group: Sequence[int]) -> list[tuple[int, int]]:
    return [(r, group[(i + 1) % len(group)]) for i, r in enumerate(group)]


def _check_channels(channel_ids: Sequence[int], **tensors: Sequence[Sequence[NkiTensor]]) -> None:
    """That there is a list of tensors for each channel."""
    operands.members(channel_ids, "channel_ids", _CHANNELS, "channel")
    for operand, by_channel in tensors.items():
        if not isinstance(by_channel, (list, tuple)) or len(by_channel) != len(channel_ids):
            text = f"must be a list of tensors for each of the {len(channel_ids)} channel_ids"
            raise NkiValidationError("", operand, text)


def collective_permute_implicit(
    srcs_by_channel: Sequence[Sequence[NkiTensor]], dsts_by_channel: Sequence[Sequence[NkiTensor]],
    replica_group: ReplicaGroup, channel_ids: Sequence[int] = (0,), priority: int | None = None,
    name: str | None = None,
) -> Instruction:  # fmt: skip
    """dst of each rank's successor in the ring = its src."""
    _check_channels(channel_ids, srcs_by_channel=srcs_by_channel, dsts_by_channel=dsts_by_channel)
    pairs = _ring(_own(replica_group))
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
        raise NkiValidationError("", "op", f"{op!r} must be add")
    _check_channels(channel_ids, srcs0_by_channel=srcs0_by_channel, srcs1_by_channel=srcs1_by_channel)
    reduced_by_channel = []
    for srcs0, srcs1 in zip(srcs0_by_channel, srcs1_by_channel):
        if len(_tensors("srcs0", srcs0)) != len(_tensors("srcs1", srcs1)):
            raise NkiValidationError("", "srcs1", f"are {len(srcs1)} tensors, srcs0 are {len(srcs0)}")
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
    operands.member(channel_id, "channel_id", _CHANNELS, "channel")
    steps = operands.member(iteration_id, "iteration_id", 1 << 31, "step")
    group = _own(replica_group)
    return group[(group.index(rank_id()) - steps) % len(group)]
