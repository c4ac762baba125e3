"""What ranks issued differently in one op: its kind, dtype, size, root, splits, tag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...rank_sets import group_by
from ..evidence import Group, IssuedOp
from ..verdicts import Fault
from .pairs import Match
from .scene import GroupScene
from .splits import Disagreement, disagreements, those_at_fault

__all__ = [
    "Difference",
    "completed_differences",
    "difference_of_pair",
    "extra_op",
    "first_difference",
    "parting",
]

#: The side of an op whose element counts are equal on all ranks. Not all_to_all, whose
#: ranks may split as they like.
_EQUAL_INPUTS = frozenset(
    (
        *("all_reduce", "broadcast", "reduce", "gather", "barrier"),
        *("all_gather", "all_gather_into_tensor"),
    )
)
_EQUAL_OUTPUTS = frozenset(("scatter", "reduce_scatter", "reduce_scatter_tensor"))


@dataclass(frozen=True)
class Difference:
    """One op of a group that ranks issued differently."""

    fault: Fault
    group: Group
    seq: int
    #: The ranks at fault: fewer than the others, or all where no side has most ranks.
    culprits: tuple[int, ...]
    #: What each rank issued, as it differs: ``all_reduce``, ``Float``, ``640``.
    values: Mapping[int, Any]
    ops: Mapping[int, IssuedOp]
    #: Which send belongs to which receive is not certain.
    weak: bool = False
    #: What ranks of an all-to-all send and others do not expect.
    splits: tuple[Disagreement, ...] = ()

    @property
    def op(self) -> IssuedOp:
        """The op as the ranks that are not at fault issued it."""
        rest = [rank for rank in self.ops if rank not in self.culprits]
        return self.ops[min(rest or self.ops)]


def _numel(sizes: Sequence[Sequence[int]] | None) -> tuple[int, ...] | None:
    """Return the number of elements of each array."""
    return None if sizes is None else tuple(prod(size) for size in sizes)


def _size(op: IssuedOp) -> tuple[int, ...] | None:
    if op.equal_sizes is not None:
        return op.equal_sizes
    if op.op in _EQUAL_INPUTS:
        return _numel(op.arrays.inputs)
    if op.op in _EQUAL_OUTPUTS:
        return _numel(op.arrays.outputs)
    return None


def _dtype(op: IssuedOp) -> tuple[str, ...] | None:
    # Of a scatter, the root alone has inputs.
    read, written = op.arrays.input_dtypes, op.arrays.output_dtypes
    return written or read if op.op in _EQUAL_OUTPUTS else read or written


_TRAITS: dict[Fault, Callable[[IssuedOp], Any]] = {
    Fault.OP_MISMATCH: lambda op: op.op,
    Fault.ROOT_MISMATCH: lambda op: op.root,
    Fault.REDUCE_OP_MISMATCH: lambda op: op.reduce_op,
    Fault.DTYPE_MISMATCH: _dtype,
    Fault.SIZE_MISMATCH: _size,
}
#: Those with which an op may complete.
_UNNOTICED = {
    fault: _TRAITS[fault] for fault in (Fault.REDUCE_OP_MISMATCH, Fault.DTYPE_MISMATCH)
}


def first_difference(scene: GroupScene, stale: Iterable[int]) -> Difference | None:
    """Return the first collective that may not be over and that ranks issued unlike."""
    left_out = set(stale)
    listed = {rank: at for rank, at in scene.at.items() if rank not in left_out}
    for seq in sorted({seq for rank in listed for seq in scene.open[rank]}):
        found = {rank: ops for rank, at in listed.items() if (ops := at.get(seq))}
        difference = _compare(scene, seq, found, _TRAITS) or _of_splits(
            scene, seq, found
        )
        if difference is not None:
            return difference
    return None


def completed_differences(scene: GroupScene) -> list[Difference]:
    """Return the completed collectives whose dtype or reduction differed.

    A library that compares nothing has computed nonsense there. What is not listed is
    not known.
    """
    at: dict[int, dict[int, list[IssuedOp]]] = {}
    for rank, numbered in scene.at.items():
        for op in numbered.ops:
            if op.state == "completed":
                at.setdefault(op.seq, {}).setdefault(rank, []).append(op)
    found = []
    for seq, ops in sorted(at.items()):
        # Of a rank whose op is another one, nothing follows for the others.
        if len({one.op for batch in ops.values() for one in batch}) == 1:
            difference = _compare(scene, seq, ops, _UNNOTICED)
            if difference is not None:
                found.append(difference)
    return found


def extra_op(scene: GroupScene, below: int) -> Difference | None:
    """Return the collective, numbered `below` that, with which few ranks left the rest.

    The first one that was not issued from one line, among those that each rank with
    records lists: these ranks issued it from a line that no other rank has. Either it
    is one too many: they have the line of the others, too, and the numbers of all their
    later ops are one too high. Or they have no line of the others any more: they are in
    another branch. They wait where the others have come to the end.
    """
    ranks = sorted(scene.known)
    seqs = {rank: [op.seq for op in scene.at[rank].ops] for rank in ranks}
    first = max((min(found, default=below) for found in seqs.values()), default=below)
    if any({*range(first, below)} - {*found} for found in seqs.values()):
        return None
    listed = {
        rank: [op for op in scene.at[rank].ops if first <= op.seq < below]
        for rank in ranks
    }
    places = {rank: [_place(op) for op in ops] for rank, ops in listed.items()}
    # The ops of a batch share a number: it is the place in the lists that counts.
    at_once = enumerate(zip(*places.values(), strict=False))
    at = next((number for number, found in at_once if len({*found}) > 1), None)
    if at is None or (at == 0 and first > 1):
        return None
    values = {rank: found[at] for rank, found in places.items()}
    ops = {rank: found[at] for rank, found in listed.items()}
    culprits = _odd(values, len(ranks))
    others = [rank for rank in ranks if rank not in culprits]
    theirs = {values[rank] for rank in others}
    own = {values[rank] for rank in culprits}
    usual = {_place(op) for rank in others for op in scene.at[rank].ops}
    seq = ops[ranks[0]].seq
    is_apart = all(scene.issued[rank] < below for rank in others) and all(
        _place(op) not in usual
        for rank in culprits
        for op in scene.at[rank].ops
        if op.seq >= seq
    )
    if (
        2 * len(culprits) >= len(ranks)
        or len(theirs) > 1
        or () in theirs | own
        or len({op.seq for op in ops.values()}) > 1
        or not (is_apart or all(theirs < {*places[rank]} for rank in culprits))
        or not all(own.isdisjoint(places[rank]) for rank in others)
    ):
        return None
    return Difference(Fault.OP_MISMATCH, scene.group, seq, culprits, values, ops)


def parting(difference: Difference, scene: GroupScene) -> dict[int, IssuedOp]:
    """Return the op before in which two sides left each other, for a rank of each.

    From it on all ranks of a side issued each op from one line, and the other side from
    another one. One side issues ops from both lines: else a branch for a root is right.
    Empty: there is none.
    """
    sides = [*group_by(difference.values, difference.values.__getitem__).values()]
    if difference.op.is_p2p or len(sides) != 2:
        return {}
    found: dict[int, IssuedOp] = {}
    for seq in range(difference.seq - 1, 0, -1):
        listed = [[scene.at[rank].get(seq) for rank in ranks] for ranks in sides]
        places = [
            {_place(ops[0]) if len(ops) == 1 else () for ops in side} for side in listed
        ]
        if any(len(one) != 1 or () in one for one in places) or places[0] == places[1]:
            break
        ranks = [side[0] for side in sides]
        if any(
            places[1 - at] & {_place(op) for op in scene.at[rank].ops}
            for at, rank in enumerate(ranks)
        ):
            found = {rank: scene.at[rank].get(seq)[0] for rank in ranks}
    return found


def _place(op: IssuedOp) -> tuple[str, ...]:
    """Return the line that issued an op, with those that called its function."""
    return () if op.line is None else tuple(map(str, (op.line, *op.line.callers)))


def _compare(
    scene: GroupScene,
    seq: int,
    ops: Mapping[int, Sequence[IssuedOp]],
    traits: Mapping[Fault, Callable[[IssuedOp], Any]],
) -> Difference | None:
    for fault, trait in traits.items():
        values = {
            rank: value
            for rank, batch in ops.items()
            if None not in (value := tuple(trait(op) for op in batch))
        }
        if len(set(values.values())) < 2:
            continue
        culprits = _odd(values, len(scene.group.ranks))
        if fault in (Fault.OP_MISMATCH, Fault.SIZE_MISMATCH) and _reordered(
            scene, seq, culprits, [rank for rank in values if rank not in culprits]
        ):
            fault = Fault.ORDER_MISMATCH
        first = {rank: batch[0] for rank, batch in ops.items() if rank in values}
        return Difference(fault, scene.group, seq, culprits, values, first)
    return None


def _of_splits(
    scene: GroupScene, seq: int, ops: Mapping[int, Sequence[IssuedOp]]
) -> Difference | None:
    first = {rank: batch[0] for rank, batch in ops.items() if batch[0].splits}
    found = tuple(disagreements(first, scene.group.ranks)) if first else ()
    if not found:
        return None
    culprits = those_at_fault(found)
    return Difference(
        Fault.SPLIT_MISMATCH, scene.group, seq, culprits, {}, first, splits=found
    )


def _odd(values: Mapping[int, Any], size: int) -> tuple[int, ...]:
    """Return the ranks whose value is not that of most; all, if no value leads.

    Where half of the ranks or more left no records, it leads only if it is far ahead.
    """
    ranked = Counter(values.values()).most_common(2)
    (usual, most), (_, second) = ranked
    if most == second or (2 * len(values) <= size and most < 3 * second):
        return tuple(sorted(values))
    return tuple(sorted(one for one, value in values.items() if value != usual))


def _reordered(
    scene: GroupScene, seq: int, culprits: Sequence[int], others: Sequence[int]
) -> bool:
    """Return whether the culprits issue what the others do, in another order."""
    if not others:
        culprits, others = culprits[:1], culprits[1:]
    ours = _ahead(scene, min(culprits), seq)
    for other in others:
        theirs = _ahead(scene, other, seq)
        # One op more each: with the first two in turn, or a later one moved ahead.
        for length in range(2, min(len(ours), len(theirs)) + 1):
            if Counter(ours[:length]) == Counter(theirs[:length]):
                return ours[0] != theirs[0]
    return False


def _ahead(scene: GroupScene, rank: int, seq: int) -> list[tuple[Any, ...]]:
    """Return what `rank` issued from a number on, as far as nothing is left out."""
    found: list[tuple[Any, ...]] = []
    while len(found) < 32 and (ops := scene.at[rank].get(seq + len(found))):
        found.append(tuple((op.op, _dtype(op), _size(op)) for op in ops))
    return found


def difference_of_pair(match: Match, certain: bool) -> Difference | None:
    """Return how a send and its receive differ, if they do; both are at fault."""
    send, receive = match.send, match.receive
    sent = _numel(send.arrays.inputs) or _numel(send.arrays.outputs)
    received = _numel(receive.arrays.outputs) or _numel(receive.arrays.inputs)
    kinds = send.arrays.input_dtypes or send.arrays.output_dtypes
    wanted = receive.arrays.output_dtypes or receive.arrays.input_dtypes
    # Where the tags are not known, they are None: NCCL has none.
    tag, taken = (None if one.tag is None else (one.tag,) for one in (send, receive))
    for fault, one, other in (
        (Fault.TAG_MISMATCH, tag, taken),
        (Fault.DTYPE_MISMATCH, kinds, wanted),
        (Fault.SIZE_MISMATCH, sent, received),
    ):
        if one and other and one != other:
            return Difference(
                fault,
                match.group,
                send.seq,
                tuple(sorted((match.sender, match.receiver))),
                {match.sender: (one,), match.receiver: (other,)},
                {match.sender: send, match.receiver: receive},
                weak=not certain and fault is not Fault.TAG_MISMATCH,
            )
    return None
