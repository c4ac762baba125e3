"""Diagnosis: why a collective hangs, from the flight recorders of all ranks.

Pure functions over plain data. :func:`diagnose` compares the `RankView` of each rank of
a group and returns verdicts; the verdict that explains most is the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from . import group_cycle
from .messages import delivered, diagnose_messages
from .mismatches import TRAITS, describe_mismatch
from .records import Record as Entry
from .records import position, sequence_number, where
from .splits import describe_disagreements, disagreements, those_at_fault
from .verdicts import Fault, RankView, Verdict

__all__ = ["completed_unlike", "diagnose"]

#: Dead ranks of which each has a clause, with its process.
MOST = 4

_IN_FLIGHT = ("scheduled", "started")
_UNEXPLAINED = (
    "its process is stopped or holds the GIL, e.g. inside a CUDA call, or its host is "
    "out of reach"
)


def diagnose(
    group: GroupKey,
    generation: int,
    views: Mapping[int, RankView],
    stall: float,
) -> list[Verdict]:
    """Return why ops of `group` do not complete; ``[]`` if there is no fault.

    `views` has a `RankView` of each rank of the group. An op is stalled when it has
    been in flight for `stall` seconds. A dead rank is reported at once, even if no
    other rank waits for it.
    """
    case = _Case(group, generation, views, stall)
    verdicts = [*case.dead(), *case.silent()]
    explained = {rank for verdict in verdicts for rank in verdict.culprits}
    if case.collective is not None:
        verdicts += case.mismatches() or case.absences(explained)
        if not verdicts:
            verdicts.append(case.execution_hang())
    elif case.point_to_point:
        verdicts += diagnose_messages(
            group,
            case.point_to_point,
            case.entries,
            case.views,
            explained,
            case.whereabouts,
        )
    return verdicts


def completed_unlike(
    group: GroupKey, generation: int, views: Mapping[int, RankView]
) -> list[Verdict]:
    """Return verdicts on completed collectives whose dtype or reduction differed.

    A library that compares nothing has computed nonsense there. What is no longer in
    the records of a rank is not known.
    """
    case = _Case(group, generation, views, 0.0)
    at: dict[tuple[int, int], dict[int, Entry]] = {}
    for rank, entries in case.entries.items():
        for entry in entries:
            if not entry["is_p2p"] and entry["state"] == "completed":
                at.setdefault(position(entry), {}).setdefault(rank, entry)
    found = []
    for place in sorted(at):
        case.there = at[place]
        # Of a rank whose op is another one, nothing follows for the others.
        if len({entry["op"] for entry in case.there.values()}) == 1:
            found += case.mismatches(Fault.DTYPE_MISMATCH, Fault.REDUCE_OP_MISMATCH)
    return found


class _Case:
    """One group, the ops that its ranks have issued, and the stuck op."""

    def __init__(
        self,
        group: GroupKey,
        generation: int,
        views: Mapping[int, RankView],
        stall: float,
    ) -> None:
        ranks = group.ranks
        self.group = group
        self.ranks = ranks
        self.views = {rank: views.get(rank, RankView(rank)) for rank in ranks}
        self.everyone = {**views, **self.views}
        self.entries = {
            rank: [
                entry
                for entry in view.records
                if entry["group_id"] == group.id and entry["generation"] == generation
            ]
            for rank, view in self.views.items()
        }
        self._over = delivered(group, self.entries)
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
        #: The `position` of the first collective in which a rank is stuck.
        self.collective = min(map(position, collectives.values()), default=None)
        #: The ranks that are stuck in that collective.
        self.waiting = {
            rank: entry
            for rank, entry in collectives.items()
            if position(entry) == self.collective
        }
        #: Every rank's entry of that collective; of a batch, the first one.
        self.there = {
            rank: entry
            for rank in ranks
            if (entry := self._at(rank, self.collective)) is not None
        }

    def _stuck(self, rank: int, stall: float) -> Entry | None:
        """Return the oldest op in flight of `rank`, if it is `stall` seconds old."""
        view = self.views[rank]
        for entry in self.entries[rank]:
            if entry["state"] in _IN_FLIGHT and id(entry) not in self._over:
                begun = entry["time_started_ns"] or entry["time_created_ns"]
                return entry if view.now_ns - begun >= stall * 1e9 else None
        return None

    def _at(self, rank: int, place: tuple[int, int] | None) -> Entry | None:
        for entry in self.entries[rank]:
            if entry["is_p2p"] or place is None:
                continue
            # Who leaves out an op that is not counted has the next one in its place.
            uncounted = place[1] > 0 and position(entry) > place
            if uncounted or position(entry) == place:
                return entry
        return None

    def _beyond(self, rank: int) -> bool:
        """Return whether `rank` issued the collective; its entry may be overwritten."""
        last = max(map(position, self.entries[rank]), default=(0, 0))
        return self.collective is not None and last >= self.collective

    # -- text ----------------------------------------------------------------

    def _verdict(
        self,
        fault: Fault,
        culprits: Iterable[int],
        text: str,
        entry: Entry | None = None,
        *,
        certain: bool = False,
    ) -> Verdict:
        stuck = self.waiting or self.point_to_point
        example = entry or next(iter(stuck.values()), None)
        at_fault = tuple(sorted(culprits))
        return Verdict(
            fault,
            self.group,
            at_fault,
            tuple(sorted(set(stuck) - set(at_fault))),
            example["op"] if example else "",
            sequence_number(example) if example else 0,
            text,
            certain,
        )

    def _they_wait(self, culprits: Iterable[int] = ()) -> str:
        """Return ``ranks 0–1, 3 wait in cell 7 line 5 all_reduce #14``, or ``""``."""
        others = {
            rank: entry
            for rank, entry in (self.waiting or self.point_to_point).items()
            if rank not in set(culprits)
        }
        if not others:
            return ""
        verb = "wait" if len(others) > 1 else "waits"
        return f"{name_ranks(others)} {verb} in {where(others.values())}"

    def _name(self, rank: int) -> str:
        process = self.views[rank].process
        return f"rank {rank} ({process})" if process else f"rank {rank}"

    def whereabouts(self, rank: int, several: bool = False) -> str:
        """Return where `rank` is instead; of `several` ranks that are at one place."""
        view = self.views[rank]
        if view.location:
            inside = f" in {view.called}" if view.called else ""
            place = f"{view.location}{self._op_elsewhere(rank) or inside}"
            return f"{'they are' if several else 'it is'} at {place}"
        if view.last_cell_exit:
            return f"{'they' if several else 'it'} {view.last_cell_exit}"
        ended = "their cells have ended" if several else "its cell has ended"
        return f"{ended}, or none ran there"

    def _not_entered(self, ranks: Iterable[int]) -> str:
        """Return where absent ranks are; those at one place share a clause."""
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            alike.setdefault(self.whereabouts(rank), []).append(rank)
        clauses = []
        for members in alike.values():
            several = len(members) > 1
            verb = "have" if several else "has"
            place = self.whereabouts(members[0], several)
            clauses.append(f"{name_ranks(members)} {verb} not entered: {place}")
        return "; ".join(clauses)

    def _op_elsewhere(self, rank: int) -> str:
        """Return the oldest op that `rank` has in flight in another group, for a text.

        A rank that is blocked in an op of another group cannot enter the op of this
        one: two groups may wait for each other.
        """
        view = self.views[rank]
        entry = next(
            (
                entry
                for entry in view.records
                if entry["group_id"] != self.group.id and entry["state"] in _IN_FLIGHT
            ),
            None,
        )
        if entry is None:
            return ""
        same_name = entry["group"] == self.group.name
        op = (
            f"`{entry['op']}` #{sequence_number(entry)} of "
            f"{'another ' * same_name}group {entry['group']!r}"
        )
        here = view.location.startswith(entry["frame"]["source"])
        return f" in {op}" if here else f", with {op} in flight"

    # -- verdicts ------------------------------------------------------------

    def dead(self) -> list[Verdict]:
        """Return one verdict for all dead ranks."""
        gone = [rank for rank in self.ranks if self.views[rank].death is not None]
        if not gone:
            return []
        deaths = [str(self.views[rank].death) for rank in gone]
        if len(gone) > MOST:
            deaths = [f"{name_ranks(gone)} are dead", *deaths[: MOST - 1], "…"]
        how = "; ".join(deaths)
        text = _sentence(how, self._they_wait(gone))
        return [self._verdict(Fault.RANK_DEAD, gone, text, certain=True)]

    def silent(self) -> list[Verdict]:
        """Return one verdict for all live ranks that do not answer."""
        quiet = {
            rank: self.views[rank].silent_for
            for rank in self.ranks
            if self.views[rank].silent_for is not None
            and self.views[rank].death is None
        }
        if not quiet:
            return []
        # Ranks whose processes are not known share a clause.
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, seconds in quiet.items():
            view = self.views[rank]
            what = f"not answered for {seconds:.1f} s: {view.silence or _UNEXPLAINED}"
            alike.setdefault((what, view.process), []).append(rank)
        how = "; ".join(
            f"{self._name(ranks[0])} has {what}"
            if len(ranks) == 1
            else f"{name_ranks(ranks)} have {what}"
            for (what, _), ranks in alike.items()
        )
        text = _sentence(how, self._they_wait(quiet))
        certain = all(self.views[rank].silence for rank in quiet)
        return [self._verdict(Fault.RANK_NOT_RESPONDING, quiet, text, certain=certain)]

    def mismatches(self, *faults: Fault) -> list[Verdict]:
        """Return verdicts for ranks that issued different ops under one number.

        With `faults`, only of these kinds.
        """
        for fault in faults or TRAITS:
            trait = TRAITS[fault]
            values = {rank: trait(entry) for rank, entry in self.there.items()}
            if fault is Fault.REDUCE_OP_MISMATCH:
                # Not every rank's record has it.
                values = {rank: one for rank, one in values.items() if one is not None}
            if len(set(values.values())) > 1:
                return [self._mismatch(fault, values)]
        unequal = [] if faults else disagreements(self.there, self.ranks)
        if not unequal:
            return []
        odd = those_at_fault(unequal)
        text = describe_disagreements(unequal, self.there)
        return [self._verdict(Fault.SPLIT_MISMATCH, odd, text, self.there[odd[0]])]

    def _mismatch(self, fault: Fault, values: Mapping[int, Any]) -> Verdict:
        # The value of most ranks is the usual one (in a tie, that of the lowest
        # rank); the ranks with another value are at fault.
        counts = Counter(values.values())
        usual = max(counts, key=lambda v: (counts[v], -min(_with(values, v))))
        odd = [rank for rank, value in values.items() if value != usual]
        if fault is Fault.OP_MISMATCH and self._same_ops(
            odd[0], _with(values, usual)[0]
        ):
            fault = Fault.ORDER_MISMATCH
        # Those at fault first, if most ranks agree; else in the order of the ranks.
        most = counts[usual] > max(n for v, n in counts.items() if v != usual)
        sides = [
            _with(values, value)
            for value in sorted(
                counts, key=lambda v: (most and v == usual, min(_with(values, v)))
            )
        ]
        text = describe_mismatch(fault, sides, self.there, self.ranks)
        if fault is Fault.ORDER_MISMATCH:
            text += "; they issued the same ops in different orders"
        return self._verdict(fault, odd, text, self.there[_with(values, usual)[0]])

    def _same_ops(self, one: int, other: int) -> bool:
        """Return whether two ranks issue the same ops from here on in another order."""

        def ahead(rank: int) -> Counter[str]:
            return Counter(
                entry["op"]
                for entry in self.entries[rank]
                if not entry["is_p2p"]
                and self.collective is not None
                and position(entry) >= self.collective
            )

        return ahead(one) == ahead(other)

    def absences(self, explained: Iterable[int]) -> list[Verdict]:
        """Return verdicts for ranks that have not entered: busy, or past their cell."""
        known = set(explained)
        absent = [
            rank
            for rank in self.ranks
            if rank not in self.there and not self._beyond(rank) and rank not in known
        ]
        busy = [rank for rank in absent if self.views[rank].location]
        missing = [rank for rank in absent if not self.views[rank].location]
        verdicts = []
        for fault, ranks in (
            (Fault.RANK_BUSY_ELSEWHERE, busy),
            (Fault.MISSING_RANKS, missing),
        ):
            if ranks:
                text = _sentence(self._not_entered(ranks), self._they_wait())
                cycles = (group_cycle.find_cycle(rank, self.everyone) for rank in ranks)
                cycle = next(filter(None, cycles), None)
                if cycle is not None:
                    text = f"{text}; {group_cycle.describe(cycle)}"
                verdicts.append(self._verdict(fault, ranks, text))
        return verdicts

    def execution_hang(self) -> Verdict:
        """Return the verdict for an op that all ranks entered and that does not end."""
        entry = next(iter(self.waiting.values()))
        place = where(self.there.values())
        started = [r for r, e in self.there.items() if e["state"] == "started"]
        text = (
            f"all ranks have entered {place}, and it does not complete on "
            f"{name_ranks(self.waiting)}"
        )
        if started and len(started) < len(self.waiting):
            text += f"; it has started on {name_ranks(started)} alone"
        return self._verdict(Fault.EXECUTION_HANG, self.waiting, text, entry)


def _sentence(fact: str, consequence: str) -> str:
    return f"{fact}; {consequence}" if consequence else fact


def _with(values: Mapping[int, Any], value: Any) -> list[int]:
    return sorted(rank for rank, other in values.items() if other == value)
