"""Sends and receives: which belong together, and who has not issued its side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

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
        #: What each rank waits in unless it is over on both sides: see `may_be_over`.
        self.doubtful: list[Wait] = []
        #: The ops in flight of each rank and peer.
        self._pending: dict[tuple[int, int], list[IssuedOp]] = {}
        #: The batches of each rank that have several ops.
        self._wide: set[tuple[int, int]] = set()
        #: The last op of each rank, peer and direction, if it has failed.
        self._failed: dict[tuple[int, int, bool], IssuedOp] = {}
        #: Receives in flight that take a message of any rank, and what is in flight to
        #: or from a rank that its source, a log, does not name.
        self._from_any: list[tuple[int, IssuedOp]] = []
        for rank, evidence in scene.known.items():
            self._wide |= {
                (rank, one.batch)
                for one, other in pairwise(evidence.ops)
                if one.batch is not None and one.batch == other.batch
            }
            for op in evidence.ops:
                if not op.is_p2p:
                    continue
                from_any = op.peer is None and op.op == "recv"
                if op.in_flight and (from_any or op.lacks_peer):
                    self._from_any.append((rank, op))
                elif op.peer is not None:
                    key = (rank, op.peer, op.op == "send")
                    self._ops.setdefault(key, []).append(op)
                    if op.retired and op.state == "started":
                        self._failed[key] = op
                    else:
                        self._failed.pop(key, None)
                    if op.in_flight:
                        self._pending.setdefault((rank, op.peer), []).append(op)

    def stale(self) -> Iterator[int]:
        """Yield ranks of which others have received more than they have sent.

        Their records are older than those of the others.
        """
        for (receiver, sender, sends), ops in self._ops.items():
            known = self.known.get(sender)
            if sends or known is None or not known.lists_all:
                continue
            received = sum(op.state == "completed" for op in ops)
            if received > len(self._ops.get((sender, receiver, True), ())):
                yield sender

    def waits(
        self, stale: Collection[int], gone: Collection[int]
    ) -> tuple[list[Wait], list[Match]]:
        """Return what each rank waits in, and the pairs of which no side is over.

        Of a pair that has failed, one side may be over. What ranks that are `gone` had
        sent is lost where the receiver still waits.
        """
        waits: list[Wait] = []
        matches: list[Match] = []
        for (rank, peer), ops in self._pending.items():
            if rank in stale:
                continue
            head: IssuedOp | None = None
            for op in ops:
                # Of a batch all ops; else the first one.
                if head is None or _together(head, op):
                    wait = self._wait(rank, peer, op, stale)
                    if wait is None:
                        continue
                    if wait.other is not None:
                        matches.append(self._match(rank, op, peer, wait.other))
                    if _is_doubtful(wait):
                        self.doubtful.append(wait)
                        continue
                    if wait.other is not None and peer in gone:
                        wait = replace(wait, absent=(peer,), ahead=())
                    head = head or op
                    waits.append(wait)
        for (rank, peer, _), op in self._failed.items():
            if {rank, peer}.isdisjoint(stale) and peer in self.known:
                other = self._other_side(rank, peer, op)
                if other is not None:
                    matches.append(self._match(rank, op, peer, other))
        for rank, op in self._from_any:
            if rank not in stale:
                others = tuple(one for one in self.group.ranks if one != rank)
                waits.append(Wait(rank, self.group, op.seq, op, any_of=others))
        return waits, matches

    def _wait(
        self, rank: int, peer: int, op: IssuedOp, stale: Collection[int]
    ) -> Wait | None:
        """Return for whom an op waits; None if its message has been received."""
        group, seq = self.group, op.seq
        if peer in stale or peer not in self.known:
            return Wait(rank, group, seq, op, unknown=(peer,))
        other = self._other_side(rank, peer, op)
        if other is None:
            known = self.known[peer]
            sure = known.lists_all_in_flight or known.lists_all
            both = known.lists_all and self.known[rank].lists_all
            return Wait(
                rank,
                group,
                seq,
                op,
                absent=(peer,) if sure else (),
                unknown=() if sure else (peer,),
                stray=self._stray(rank, peer, op) if both else None,
                unsure=not both,
            )
        received = op.op == "send" and other.state == "completed"
        if received and not self.known[rank].ends_sends:
            # Nobody may have waited for it: torch's gloo then never says that it is
            # over.
            return None
        ahead = () if other.in_flight else (peer,)
        unsure = self._may_have_met((rank, op), (peer, other))
        return Wait(rank, group, seq, op, ahead=ahead, other=other, unsure=unsure)

    def _other_side(self, rank: int, peer: int, op: IssuedOp) -> IssuedOp | None:
        sends = op.op == "send"
        ours = self._ops[rank, peer, sends]
        theirs = self._ops.get((peer, rank, not sends), [])
        if op.tag is not None:
            ours = [one for one in ours if one.tag == op.tag]
            alike = [one for one in theirs if one.tag in (op.tag, None)]
            if not any(one.in_flight for one in alike):
                # What is in flight there has another tag, for which nobody waits here.
                wanted = {one.tag for one in self._ops[rank, peer, sends]}
                unlike = [one for one in theirs if one.in_flight]
                odd = next((one for one in unlike if one.tag not in wanted), None)
                if odd is not None:
                    return odd
            theirs = alike
        if self._lists(rank) and self._lists(peer):
            place = next(number for number, one in enumerate(ours) if one is op)
            return theirs[place] if place < len(theirs) else None
        return next((one for one in theirs if one.in_flight), None)

    def _lists(self, rank: int) -> bool:
        """Return whether every send and receive of `rank` is listed."""
        return self.known[rank].lists_all or self.known[rank].lists_all_p2p

    def _may_have_met(self, *sides: tuple[int, IssuedOp]) -> bool:
        """Return whether a send and its receive in flight may have met others.

        A batch is in flight until all of its ops are over. Where records are lost, it
        is not known which ones belong together.
        """
        return not all(self._lists(rank) for rank, _ in sides) and any(
            (rank, op.batch) in self._wide for rank, op in sides
        )

    def _stray(self, rank: int, peer: int, op: IssuedOp) -> IssuedOp | None:
        """Return what `peer` has sent with a tag that no receive of `rank` has."""
        if op.op != "recv" or op.tag is None:
            return None
        wanted = {one.tag for one in self._ops[rank, peer, False]}
        sent = self._ops.get((peer, rank, True), ())
        return next((one for one in sent if one.tag not in {*wanted, None}), None)

    def _match(self, rank: int, op: IssuedOp, peer: int, other: IssuedOp) -> Match:
        if op.op == "send":
            return Match(self.group, rank, op, peer, other)
        return Match(self.group, peer, other, rank, op)


def _is_doubtful(wait: Wait) -> bool:
    """Return whether what a rank waits in may be over, on the other side, too."""
    sides = [one for one in (wait.op, wait.other) if one is not None]
    return not wait.absent and any(one.may_be_over for one in sides)


def _together(first: IssuedOp, op: IssuedOp) -> bool:
    """Return whether two ops are of one batch, whose ops run at the same time."""
    return first.batch is not None and first.batch == op.batch
