"""Sends and receives: which belong together, and who has not issued its side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..evidence import Group, GroupEvidence, IssuedOp
from .scene import GroupScene, Wait

__all__ = ["Match", "Pairs"]


@dataclass(frozen=True)
class Match:
    """A send in one group and the receive that belongs to it."""

    group: Group
    sender: int
    send: IssuedOp
    receiver: int
    receive: IssuedOp


class Pairs:
    """The sends and receives of one group.

    Torch numbers them per group and rank, not per pair: the k-th send of a rank to
    another belongs to the k-th receive of that one from it. Where records are lost, the
    first ones that are in flight belong together.
    """

    def __init__(self, scene: GroupScene) -> None:
        self.group = scene.group
        self.known: Mapping[int, GroupEvidence] = scene.known
        #: Ops by rank, peer and whether it is a send, in the order of issue.
        self._ops: dict[tuple[int, int, bool], list[IssuedOp]] = {}
        #: The first op in flight of each rank and peer; of a batch, all of its ops.
        self._heads: dict[tuple[int, int], list[IssuedOp]] = {}
        for rank, evidence in scene.known.items():
            for op in evidence.ops:
                if op.is_p2p and op.peer is not None:
                    key = (rank, op.peer, op.op == "send")
                    self._ops.setdefault(key, []).append(op)
                    if op.in_flight:
                        heads = self._heads.setdefault((rank, op.peer), [])
                        if not heads or _together(heads[0], op):
                            heads.append(op)

    def waits(self, stale: Collection[int]) -> tuple[list[Wait], list[Match]]:
        """Return what each rank waits in, and the pairs of which both sides wait."""
        waits, matches = [], []
        heads = (
            (rank, peer, op) for (rank, peer), ops in self._heads.items() for op in ops
        )
        for rank, peer, op in heads:
            if rank in stale:
                continue
            if peer in stale or peer not in self.known:
                waits.append(Wait(rank, self.group, op.seq, op, unknown=(peer,)))
                continue
            other = self._other_side(rank, peer, op)
            if other is None:
                known = self.known[peer]
                sure = known.lists_all_in_flight or known.lists_all
                wait = Wait(
                    rank,
                    self.group,
                    op.seq,
                    op,
                    absent=(peer,) if sure else (),
                    unknown=() if sure else (peer,),
                    unsure=not (known.lists_all and self.known[rank].lists_all),
                )
                waits.append(wait)
                continue
            ahead = () if other.in_flight else (peer,)
            waits.append(Wait(rank, self.group, op.seq, op, ahead=ahead, other=other))
            matches.append(self._match(rank, op, peer, other))
        return waits, matches

    def _other_side(self, rank: int, peer: int, op: IssuedOp) -> IssuedOp | None:
        sends = op.op == "send"
        ours = self._ops[rank, peer, sends]
        theirs = self._ops.get((peer, rank, not sends), [])
        if op.tag is not None:
            ours = [one for one in ours if one.tag == op.tag]
            theirs = [one for one in theirs if one.tag in (op.tag, None)]
        if self.known[rank].lists_all and self.known[peer].lists_all:
            place = next(number for number, one in enumerate(ours) if one is op)
            return theirs[place] if place < len(theirs) else None
        return next((one for one in theirs if one.in_flight), None)

    def _match(self, rank: int, op: IssuedOp, peer: int, other: IssuedOp) -> Match:
        if op.op == "send":
            return Match(self.group, rank, op, peer, other)
        return Match(self.group, peer, other, rank, op)


def _together(first: IssuedOp, op: IssuedOp) -> bool:
    """Return whether two ops are of one batch, whose ops run at the same time."""
    return first.batch is not None and first.batch == op.batch
