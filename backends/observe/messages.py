"""Sends and receives that hang: what the peer has not issued, or issued otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from ..work.op_type import OpType
from .records import Record, sequence_number, where
from .verdicts import Fault, RankView, Verdict

__all__ = ["delivered", "diagnose_messages"]

#: Verdicts on sends and receives of which each has a sentence.
MOST = 3

_IN_FLIGHT = ("scheduled", "started")
_ABSENT = (Fault.MISSING_RANKS, Fault.RANK_BUSY_ELSEWHERE)


def delivered(group: GroupKey, entries: Mapping[int, Sequence[Record]]) -> set[int]:
    """Return the ``id`` of each record of a send whose message has been received.

    Nobody may have waited for such a send, and torch's gloo then never says that it is
    over: it is in flight in the records, and nothing waits for it.
    """
    found = set()
    for rank, own in entries.items():
        sends = [one for one in own if one["op"] == OpType.SEND.value]
        if not any(one["state"] in _IN_FLIGHT for one in sends):
            continue
        first = next((one for one in own if one["is_p2p"]), None)
        if first is None or sequence_number(first) > 1:
            # The ring has lost older ones: which receive is whose is not known.
            continue
        # Sends to one rank are received in order, those of one tag among themselves.
        received: Counter[tuple[int, int | None]] = Counter()
        for send in sends:
            place = send["peer"]
            channel = place, send.get("tag")
            number = received[channel]
            received[channel] += 1
            matching = [
                one
                for one in entries.get(group.ranks[place], ())
                if one["op"] == OpType.RECV.value
                and one["peer"] == group.ranks.index(rank)
                and _same_tag(one, send)
            ]
            if (
                send["state"] in _IN_FLIGHT
                and number < len(matching)
                and matching[number]["state"] == "completed"
            ):
                found.add(id(send))
    return found


def diagnose_messages(
    group: GroupKey,
    stuck: Mapping[int, Record],
    entries: Mapping[int, Sequence[Record]],
    views: Mapping[int, RankView],
    explained: Iterable[int],
    whereabouts: Callable[[int], str],
) -> list[Verdict]:
    """Return verdicts for sends and receives that do not complete.

    Parameters
    ----------
    stuck
        The oldest op in flight of each rank that is stuck in a send or receive.
    entries
        The records of each rank in the group.
    explained
        Ranks of which other verdicts say why they are not there.
    whereabouts
        Returns where a rank is instead.
    """
    case = _Messages(group, stuck, entries)
    known = set(explained)
    found: dict[Any, Verdict] = {}
    for rank, entry in stuck.items():
        if entry["peer"] is None:
            text = f"rank {rank} waits in {where([entry])} for any rank to send"
            found[rank] = case.verdict(Fault.MISSING_RANKS, [rank], text, entry)
            continue
        peer = group.ranks[entry["peer"]]
        if peer in known:
            continue
        other = case.counterpart(rank, entry, peer)
        if other is not None:
            mismatch = case.mismatch(rank, entry, peer, other)
            if mismatch is not None:
                # Both sides are in it: one verdict for the two.
                found[frozenset((rank, peer))] = mismatch
                continue
        wanted = _wanted(entry)
        doing = f"rank {rank} waits in {where([entry])} {_direction(entry)} rank {peer}"
        if case.is_matched(rank, entry, peer):
            text = f"{doing}, which has the matching {wanted} in flight"
            fault, culprits = Fault.EXECUTION_HANG, [rank, peer]
        else:
            text = (
                f"rank {peer} has not issued the matching {wanted}: "
                f"{whereabouts(peer)}, while {doing}"
            )
            busy = bool(views[peer].location)
            fault = Fault.RANK_BUSY_ELSEWHERE if busy else Fault.MISSING_RANKS
            culprits = [peer]
        found[rank] = case.verdict(fault, culprits, text, entry)
    return _fold(case, list(found.values()), stuck)


def _fold(
    case: _Messages, verdicts: list[Verdict], stuck: Mapping[int, Record]
) -> list[Verdict]:
    """Return the verdicts that explain the others, and of many alike the first ones.

    In a pipeline each rank waits for the one before: the first is the cause. In a ring
    in which all receive first, there is no cause but the ring: one verdict.
    """
    if len(verdicts) <= MOST:
        return verdicts
    causes = [
        one
        for one in verdicts
        if one.fault not in _ABSENT or not stuck.keys() >= set(one.culprits)
    ]
    ring = [] if causes else case.ring()
    if ring:
        return [case.ring_verdict(ring, verdicts[0].fault)]
    left = causes or verdicts
    if len(left) <= MOST:
        return left
    *first, last = left[:MOST]
    text = f"{last.text}; and {len(left) - MOST} more wait like this"
    return [*first, replace(last, text=text)]


class _Messages:
    def __init__(
        self,
        group: GroupKey,
        stuck: Mapping[int, Record],
        entries: Mapping[int, Sequence[Record]],
    ) -> None:
        self._group = group
        self._stuck = stuck
        self._entries = entries

    def verdict(
        self, fault: Fault, culprits: Sequence[int], text: str, entry: Record
    ) -> Verdict:
        at_fault = tuple(sorted(culprits))
        waiting = tuple(sorted(set(self._stuck) - set(at_fault)))
        number = sequence_number(entry)
        return Verdict(fault, self._group, at_fault, waiting, entry["op"], number, text)

    def ring(self) -> list[int]:
        """Return stuck ranks each of which waits for the next, the last for the first.

        The first that is found; empty if there is none.
        """
        for start in self._stuck:
            path: dict[int, None] = {}
            rank: int | None = start
            while rank is not None and rank not in path:
                path[rank] = None
                rank = self._peer(rank)
            if rank is not None:
                ranks = list(path)
                return ranks[ranks.index(rank) :]
        return []

    def _peer(self, rank: int) -> int | None:
        """Return the rank that `rank` is stuck with, if that is stuck too."""
        place = self._stuck[rank]["peer"]
        peer = None if place is None else self._group.ranks[place]
        return peer if peer in self._stuck else None

    def ring_verdict(self, ring: Sequence[int], fault: Fault) -> Verdict:
        """Return the verdict on ranks that wait for each other; see `ring`."""
        first = min(ring)
        entry = self._stuck[first]
        peer = f"{_direction(entry)} rank {self._peer(first)}"
        text = (
            f"{name_ranks(ring)} wait for each other in a ring: rank {first} waits in "
            f"{where([entry])} {peer}, and so on; "
            f"one of them must issue its {_wanted(entry)} first"
        )
        return self.verdict(fault, ring, text, entry)

    def _issued(self, rank: int, op: str, peer: int) -> list[Record]:
        """Return the sends or receives of `rank` to or from `peer`."""
        place = self._group.ranks.index(peer)
        return [
            entry
            for entry in self._entries[rank]
            if entry["op"] == op and entry["peer"] in (place, None)
        ]

    def is_matched(self, rank: int, entry: Record, peer: int) -> bool:
        """Return whether `peer` has issued as many of what matches as `rank`."""
        ours = self._issued(rank, entry["op"], peer)
        theirs = self._issued(peer, _wanted(entry), rank)
        return len([one for one in theirs if _same_tag(one, entry)]) >= len(
            [one for one in ours if _same_tag(one, entry)]
        )

    def counterpart(self, rank: int, entry: Record, peer: int) -> Record | None:
        """Return what `peer` has in flight with `rank`, of the same tag if any is."""
        pending = [
            one
            for one in self._issued(peer, _wanted(entry), rank)
            if one["state"] in _IN_FLIGHT
        ]
        alike = [one for one in pending if _same_tag(one, entry)]
        return next(iter(alike or pending), None)

    def mismatch(
        self, rank: int, entry: Record, peer: int, other: Record
    ) -> Verdict | None:
        """Return a verdict if the two ends differ in tag, size or dtype."""
        ends = [(rank, entry), (peer, other)]
        if entry["op"] != OpType.SEND.value:
            ends.reverse()
        (sender, sent), (receiver, received) = ends
        if not _same_tag(sent, received):
            fault = Fault.TAG_MISMATCH
            traits = [f"with tag {one['tag']}" for one in (sent, received)]
        elif _count(sent) != _count(received):
            fault = Fault.SIZE_MISMATCH
            traits = [f"{_count(one)} elements" for one in (sent, received)]
        else:
            return None
        text = (
            f"rank {sender} sends {traits[0]} to rank {receiver} in {where([sent])}, "
            f"which receives {traits[1]} in {where([received])}"
        )
        return self.verdict(fault, [sender, receiver], text, sent)


def _wanted(entry: Record) -> str:
    """Return the op that matches a send or a receive."""
    sending = entry["op"] == OpType.SEND.value
    return OpType.RECV.value if sending else OpType.SEND.value


def _direction(entry: Record) -> str:
    return "to" if entry["op"] == OpType.SEND.value else "from"


def _same_tag(one: Record, other: Record) -> bool:
    # NCCL has no tags, it matches in order; of torch's ops the tag may not be known.
    if "nccl" in (one["backend"], other["backend"]):
        return True
    tags = (one.get("tag"), other.get("tag"))
    return None in tags or tags[0] == tags[1]


def _count(entry: Record) -> int | None:
    return prod(entry["sizes"][0]) if entry["sizes"] else None
