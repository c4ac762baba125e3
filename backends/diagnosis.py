"""Diagnosis: why a collective hangs, from what every rank's recorder says.

Pure functions over plain data. A `RankView` is what is known of one rank at
one moment; :func:`diagnose` looks at all of a group's and returns verdicts,
the one that explains most first. One look may catch ranks on their way, so a
`SecondLook` lets only pass what two looks in a row agree on.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .work import OpType

__all__ = ["Fault", "RankView", "SecondLook", "Verdict", "diagnose", "name_ranks"]

Entry = Mapping[str, Any]

_IN_FLIGHT = ("scheduled", "started")

# Ops whose contribution has one size on all ranks, and where in `sizes` it is.
_SAME_SIZE = {
    OpType.ALL_REDUCE.value: 0,
    OpType.BROADCAST.value: 0,
    OpType.REDUCE.value: 0,
    OpType.ALL_GATHER_INTO_TENSOR.value: 0,
    OpType.REDUCE_SCATTER_TENSOR.value: 0,
    OpType.GATHER.value: 0,
    OpType.SCATTER.value: -1,
}


class Fault(enum.Enum):
    """What kind of trouble a verdict names."""

    RANK_DEAD = "rank dead"
    RANK_NOT_RESPONDING = "rank not responding"
    OP_MISMATCH = "op mismatch"
    ORDER_MISMATCH = "order mismatch"
    ROOT_MISMATCH = "root mismatch"
    DTYPE_MISMATCH = "dtype mismatch"
    SIZE_MISMATCH = "size mismatch"
    RANK_BUSY_ELSEWHERE = "rank busy elsewhere"
    MISSING_RANKS = "missing ranks"
    EXECUTION_HANG = "execution hang"


@dataclass(frozen=True)
class RankView:
    """One rank at one moment, by its own clock."""

    rank: int
    #: Its flight-recorder entries (`Record.as_dict`), oldest first; those of
    #: other groups and generations do no harm.
    records: Sequence[Entry] = ()
    #: ``time.time_ns`` of that rank when the records were read.
    now_ns: int = 0
    #: Why its engine is dead, if it is.
    death: str | None = None
    #: Seconds for which it has not answered, if it does not.
    silent_for: float | None = None
    #: Where its main thread is, e.g. ``cell 7 line 3``; empty if it is idle.
    place: str = ""
    #: How it left its last cell, e.g. ``left cell 7 with ValueError at line 4``.
    left: str = ""


@dataclass(frozen=True)
class Verdict:
    """One explanation: who is to blame, who waits, and where."""

    fault: Fault
    group: str
    #: The ranks that cause it (all that wait, for an execution hang).
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    op: str
    seq: int
    text: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two looks agree."""
        return self.fault, self.group, self.culprits, self.op, self.seq

    def __str__(self) -> str:
        return self.text


def diagnose(
    group: str,
    ranks: Sequence[int],
    generation: int,
    views: Mapping[int, RankView],
    stall: float,
) -> list[Verdict]:
    """Say why ops of `group` do not complete; ``[]`` if all is well.

    `ranks` are the group's (global) ranks; `views` has what is known of each.
    An op counts as stalled when it has been in flight for `stall` seconds.
    Death is reported at once, whether or not anybody waits.
    """
    case = _Case(group, list(ranks), generation, views, stall)
    verdicts = [*case.dead(), *case.silent()]
    explained = {rank for verdict in verdicts for rank in verdict.culprits}
    if case.collective is not None:
        verdicts += case.mismatches() or case.absences(explained)
        if not verdicts:
            verdicts.append(case.execution_hang())
    elif case.point_to_point:
        verdicts += case.unmatched(explained)
    return verdicts


class SecondLook:
    """Keeps back what only one look has seen; death needs no second one."""

    def __init__(self) -> None:
        self._before: set[tuple[Any, ...]] = set()

    def confirm(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """Return the verdicts of this look that the last one had too."""
        seen = list(verdicts)
        before, self._before = self._before, {verdict.key for verdict in seen}
        return [
            verdict
            for verdict in seen
            if verdict.key in before or verdict.fault is Fault.RANK_DEAD
        ]


class _Case:
    """One group, what its ranks have issued, and the op that is stuck."""

    def __init__(
        self,
        group: str,
        ranks: list[int],
        generation: int,
        views: Mapping[int, RankView],
        stall: float,
    ) -> None:
        self.group = group
        self.ranks = ranks
        self.views = {rank: views.get(rank, RankView(rank)) for rank in ranks}
        self.entries = {
            rank: [
                entry
                for entry in view.records
                if entry["group"] == group and entry["generation"] == generation
            ]
            for rank, view in self.views.items()
        }
        stuck = {rank: self._stuck(rank, stall) for rank in ranks}
        collectives = {
            rank: entry
            for rank, entry in stuck.items()
            if entry is not None and not entry["is_p2p"]
        }
        self.point_to_point = {
            rank: entry
            for rank, entry in stuck.items()
            if entry is not None and entry["is_p2p"]
        }
        #: The number of the first collective that somebody is stuck in.
        self.collective: int | None = min(
            (entry["collective_seq_id"] for entry in collectives.values()), default=None
        )
        #: The ranks that are stuck in it.
        self.waiting = {
            rank: entry
            for rank, entry in collectives.items()
            if entry["collective_seq_id"] == self.collective
        }
        #: Every rank's entry of that collective; of a batch, the first one.
        self.there = {
            rank: entry
            for rank in ranks
            if (entry := self._at(rank, self.collective)) is not None
        }

    def _stuck(self, rank: int, stall: float) -> Entry | None:
        """The oldest op in flight of `rank`, if it has been for `stall` seconds."""
        view = self.views[rank]
        for entry in self.entries[rank]:
            if entry["state"] in _IN_FLIGHT:
                begun = entry["time_started_ns"] or entry["time_created_ns"]
                return entry if view.now_ns - begun >= stall * 1e9 else None
        return None

    def _at(self, rank: int, seq: int | None) -> Entry | None:
        for entry in self.entries[rank]:
            if entry["collective_seq_id"] == seq and not entry["is_p2p"]:
                return entry
        return None

    def _beyond(self, rank: int) -> bool:
        """Whether `rank` has issued the collective, though its entry may be gone."""
        numbers = [e["collective_seq_id"] for e in self.entries[rank]]
        return (
            self.collective is not None and max(numbers, default=0) >= self.collective
        )

    # -- words ---------------------------------------------------------------

    def _verdict(
        self,
        fault: Fault,
        culprits: Iterable[int],
        text: str,
        entry: Entry | None = None,
    ) -> Verdict:
        stuck = self.waiting or self.point_to_point
        example = entry or next(iter(stuck.values()), None)
        guilty = tuple(sorted(culprits))
        return Verdict(
            fault,
            self.group,
            guilty,
            tuple(sorted(set(stuck) - set(guilty))),
            example["op"] if example else "",
            _number(example) if example else 0,
            text,
        )

    def _they_wait(self, guilty: Iterable[int] = ()) -> str:
        """``ranks 0, 1, 3 wait in cell 7 line 5 all_reduce #14``, or nothing."""
        others = {
            rank: entry
            for rank, entry in (self.waiting or self.point_to_point).items()
            if rank not in set(guilty)
        }
        if not others:
            return ""
        verb = "wait" if len(others) > 1 else "waits"
        return f"{name_ranks(others)} {verb} in {_where(others.values())}"

    def _whereabouts(self, rank: int) -> str:
        view = self.views[rank]
        if view.place:
            return f"it is at {view.place}"
        if view.left:
            return f"it {view.left}"
        return "its cell has ended, or none ran there"

    # -- verdicts ------------------------------------------------------------

    def dead(self) -> list[Verdict]:
        """One verdict for all dead ranks."""
        gone = [rank for rank in self.ranks if self.views[rank].death is not None]
        if not gone:
            return []
        how = "; ".join(
            f"rank {rank} is dead ({self.views[rank].death})" for rank in gone
        )
        text = _sentence(how, self._they_wait(gone))
        return [self._verdict(Fault.RANK_DEAD, gone, text)]

    def silent(self) -> list[Verdict]:
        """One verdict for all ranks that live and do not answer."""
        quiet = {
            rank: self.views[rank].silent_for
            for rank in self.ranks
            if self.views[rank].silent_for is not None
            and self.views[rank].death is None
        }
        if not quiet:
            return []
        how = "; ".join(
            f"rank {rank} has not answered for {seconds:.0f} s (stopped, or its host "
            "is out of reach)"
            for rank, seconds in quiet.items()
        )
        text = _sentence(how, self._they_wait(quiet))
        return [self._verdict(Fault.RANK_NOT_RESPONDING, quiet, text)]

    def mismatches(self) -> list[Verdict]:
        """The ranks are at the same number, but not in the same op."""
        checks: list[tuple[Fault, Callable[[Entry], Any]]] = [
            (Fault.OP_MISMATCH, lambda entry: entry["op"]),
            (Fault.ROOT_MISMATCH, lambda entry: entry["peer"]),
            (Fault.DTYPE_MISMATCH, _dtype),
            (Fault.SIZE_MISMATCH, _count),
        ]
        for fault, trait in checks:
            values = {rank: trait(entry) for rank, entry in self.there.items()}
            if len(set(values.values())) > 1:
                return [self._mismatch(fault, values)]
        return []

    def _mismatch(self, fault: Fault, values: Mapping[int, Any]) -> Verdict:
        # The fewest are the odd ones out; among equals, those without the
        # lowest rank.
        counts = Counter(values.values())
        usual = max(counts, key=lambda v: (counts[v], -min(_with(values, v))))
        odd = [rank for rank, value in values.items() if value != usual]
        if fault is Fault.OP_MISMATCH and self._same_ops(
            odd[0], _with(values, usual)[0]
        ):
            fault = Fault.ORDER_MISMATCH
        sides = []
        for value in sorted(counts, key=lambda v: (v == usual, str(v))):
            ranks = _with(values, value)
            entry = self.there[ranks[0]]
            verb = "is" if len(ranks) == 1 else "are"
            where = _where(self.there[rank] for rank in ranks)
            sides.append(
                f"{name_ranks(ranks)} {verb} at {where}{self._trait(fault, entry)}"
            )
        text = " while ".join([sides[0], ", ".join(sides[1:])])
        if fault is Fault.ORDER_MISMATCH:
            text += "; they issued the same ops in different orders"
        return self._verdict(fault, odd, text, self.there[_with(values, usual)[0]])

    def _trait(self, fault: Fault, entry: Entry) -> str:
        """What is different about `entry`, where its op and line do not say it."""
        if fault is Fault.ROOT_MISMATCH:
            return f" with root {self._root(entry)}"
        if fault is Fault.DTYPE_MISMATCH:
            return f" of {_dtype(entry)}"
        if fault is Fault.SIZE_MISMATCH:
            return f" of {_count(entry)} elements"
        return ""

    def _same_ops(self, one: int, other: int) -> bool:
        """Whether two ranks have the same ops from here on, in another order."""

        def ahead(rank: int) -> Counter[str]:
            return Counter(
                entry["op"]
                for entry in self.entries[rank]
                if not entry["is_p2p"]
                and self.collective is not None
                and entry["collective_seq_id"] >= self.collective
            )

        return ahead(one) == ahead(other)

    def _root(self, entry: Entry) -> str:
        peer = entry["peer"]
        return "none" if peer is None else f"rank {self.ranks[peer]}"

    def absences(self, explained: Iterable[int]) -> list[Verdict]:
        """Ranks that have not entered: busy with something else, or gone from it."""
        known = set(explained)
        absent = [
            rank
            for rank in self.ranks
            if rank not in self.there and not self._beyond(rank) and rank not in known
        ]
        busy = [rank for rank in absent if self.views[rank].place]
        missing = [rank for rank in absent if not self.views[rank].place]
        verdicts = []
        for fault, ranks in (
            (Fault.RANK_BUSY_ELSEWHERE, busy),
            (Fault.MISSING_RANKS, missing),
        ):
            if ranks:
                how = "; ".join(
                    f"rank {rank} has not entered: {self._whereabouts(rank)}"
                    for rank in ranks
                )
                text = _sentence(how, self._they_wait())
                verdicts.append(self._verdict(fault, ranks, text))
        return verdicts

    def execution_hang(self) -> Verdict:
        """All have entered the same op, and it does not complete."""
        entry = next(iter(self.waiting.values()))
        where = _where(self.there.values())
        started = [r for r, e in self.there.items() if e["state"] == "started"]
        text = (
            f"all ranks have entered {where}, and it does not complete on "
            f"{name_ranks(self.waiting)}"
        )
        if started and len(started) < len(self.waiting):
            text += f"; it has started on {name_ranks(started)} alone"
        return self._verdict(Fault.EXECUTION_HANG, self.waiting, text, entry)

    def unmatched(self, explained: Iterable[int]) -> list[Verdict]:
        """Sends and receives whose other side has not come."""
        known = set(explained)
        verdicts = []
        for rank, entry in self.point_to_point.items():
            if entry["peer"] is None:
                text = f"rank {rank} waits in {_where([entry])} for any rank to send"
                verdicts.append(self._verdict(Fault.MISSING_RANKS, [rank], text, entry))
                continue
            peer = self.ranks[entry["peer"]]
            if peer in known:
                continue
            sending = entry["op"] == OpType.SEND.value
            wanted = OpType.RECV.value if sending else OpType.SEND.value
            ours = self._issued(rank, entry["op"], peer)
            theirs = self._issued(peer, wanted, rank)
            doing = (
                f"rank {rank} waits in {_where([entry])} {'to' if sending else 'from'}"
            )
            if theirs >= ours:
                text = f"{doing} rank {peer}, which has the matching {wanted} in flight"
                fault, culprits = Fault.EXECUTION_HANG, [rank, peer]
            else:
                text = (
                    f"rank {peer} has not issued the matching {wanted}: "
                    f"{self._whereabouts(peer)}, while {doing} rank {peer}"
                )
                busy = bool(self.views[peer].place)
                fault = Fault.RANK_BUSY_ELSEWHERE if busy else Fault.MISSING_RANKS
                culprits = [peer]
            verdicts.append(self._verdict(fault, culprits, text, entry))
        return verdicts

    def _issued(self, rank: int, op: str, peer: int) -> int:
        place = self.ranks.index(peer)
        return sum(
            entry["op"] == op and entry["peer"] in (place, None)
            for entry in self.entries[rank]
        )


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0, 1, 3`` or ``ranks 0–63``."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], -1]:
        if number == previous + 1:
            previous = number
            continue
        if previous - start >= 2:
            parts.append(f"{start}–{previous}")
        else:
            parts += [str(n) for n in range(start, previous + 1)]
        start = previous = number
    return f"ranks {', '.join(parts)}"


def _sentence(fact: str, consequence: str) -> str:
    return f"{fact}; {consequence}" if consequence else fact


def _number(entry: Entry) -> int:
    return entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]


def _where(entries: Iterable[Entry]) -> str:
    """``cell 7 line 5 `all_reduce` #14``; several places, if they differ."""
    places: dict[str, None] = {}
    for entry in entries:
        text = f"{entry['frame']['source']} `{entry['op']}` #{_number(entry)}"
        places.setdefault(text)
    return " or ".join(places)


def _with(values: Mapping[int, Any], value: Any) -> list[int]:
    return sorted(rank for rank, other in values.items() if other == value)


def _dtype(entry: Entry) -> str:
    return entry["dtypes"][0] if entry["dtypes"] else ""


def _count(entry: Entry) -> int | None:
    place = _SAME_SIZE.get(entry["op"])
    if place is None or not entry["sizes"]:
        return None
    count = 1
    for extent in entry["sizes"][place]:
        count *= extent
    return count
