"""BoardModel: the state of the board, and its changes since the last message.

Plain data in, plain data out: no thread, no widget, no clock of its own. It makes
the messages for the page:

``{"type": "full", "v": 7, "now": …, "head": …, "banner": …, "groups": […],
"rows": {group: {rank: cells}}}`` is the whole state. A ``"delta"`` has the changes
only: cells that changed (``None``: empty now) and ``None`` for a row that is gone.
``v`` counts the messages: a page that missed one requests the whole state. Times are
seconds on the clock of ``now``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.late_findings import LateFinding, late_lines
from rankscope.backends.observe.lateness import GroupLateness, Lateness, findings_of
from rankscope.backends.observe.verdicts import Fault, Verdict, on_group
from rankscope.engines import ClusterStatus, GroupStatus, RankStatus
from rankscope.engines.status import advice_of

from ..units import duration_text
from .banner import Banner, banner_of, verdict_cells
from .group import NO_GROUP, Group, blamed
from .late import late_cells
from .rows import Cells, as_aborted, cells, text
from .tabs import place_of, tabs_of

__all__ = ["BoardModel", "Message"]

Message = dict[str, Any]

#: Seconds by which two reports of one start may differ: the latency of a message.
JITTER = 0.5
#: The cell with when an op, and a stay at a line, began → what is the same meanwhile.
_STARTS = {"since": ("generation", "op", "seq", "limit", "mood"), "at": ("line",)}
#: Seconds without a heartbeat after which one is overdue: its period and some.
LATE = 1.25


class BoardModel:
    """The state of the board. Not thread-safe: its owner serialises the calls."""

    def __init__(self) -> None:
        self.version = 0
        self.groups: list[Group] = []
        # The name of the group that was reported first.
        self._first = ""
        self.ranks: dict[int, RankStatus] = {}
        self.verdicts: tuple[Verdict, ...] = ()
        self._late_findings: Sequence[LateFinding] = ()
        # Group → rank → its cells ``late`` and ``waits``.
        self._late_cells: dict[GroupKey, dict[int, Cells]] = {}
        self.head: dict[str, Any] = {}
        self.now = 0.0
        # Rank → when its last heartbeat came.
        self._heard: dict[int, float] = {}
        self._created = 0
        self._known: dict[GroupKey, Group] = {}
        # Rank → the groups with a row of it, by their ids.
        self._groups_of: dict[int, dict[str, Group]] = {}
        self._dirty: set[tuple[str, int]] = set()
        # The state that the pages have received.
        self._sent_rows: dict[str, dict[int, Cells]] = {}
        self._sent: dict[str, Any] = {}

    @classmethod
    def of(cls, status: ClusterStatus, lateness: Lateness | None = None) -> BoardModel:
        """Return the board of a cluster at one moment, the zero of its clock."""
        model = cls()
        model.update(status, 0.0)
        if lateness is not None:
            model.show_lateness(lateness.groups())
            model.delta()
        return model

    # -- updates ----------------------------------------------------------

    def update(
        self, status: ClusterStatus, now: float, size: int | None = None
    ) -> None:
        """Update the rows of ranks in `status` at `now`, some or all of `size`."""
        self.now = now
        for rank in status.ranks:
            self._update_rank(rank, now)
        count = size or status.world_size
        facts = [text(status.launcher, 40)]
        if status.backend:
            facts.append(text(status.backend, 60))
        if status.allocation:
            facts.append(text(status.allocation, 80))
        what = "job" if status.script else "cluster"
        facts.append(f"{what} {text(status.cluster_id, 60)}")
        self.head = {
            "title": "1 rank" if count == 1 else f"{count} ranks",
            "facts": facts,
            "state": text(status.state, 16),
            "dead": sorted(r for r, one in self.ranks.items() if not one.alive),
            "advice": [text(one, 400) for one in advice_of(self.ranks.values())],
            "script": text(status.script, 40),
            "cells": status.cells,
            "refused": {what: text(why, 400) for what, why in status.refused.items()},
        }

    def show_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        """Show these verdicts from now on, the most important first."""
        self.verdicts = tuple(verdicts)

    def show_lateness(self, groups: Sequence[GroupLateness]) -> None:
        """Show which ranks keep the others waiting from now on."""
        self._late_findings = findings_of(groups)
        self._late_cells = {group.key: late_cells(group) for group in groups}

    @property
    def late(self) -> tuple[str, ...]:
        """What is certain about ranks that keep the others waiting, in sentences."""
        there = (one for one in self._late_findings if one.group in self._known)
        return tuple(late_lines(there))

    def _update_rank(self, rank: RankStatus, now: float) -> None:
        number = rank.rank
        self.ranks[number] = rank
        if rank.heartbeat_age is not None:
            self._heard[number] = now - rank.heartbeat_age
        places: list[tuple[Group, GroupStatus | None]] = [
            (self._group(one.key), one) for one in rank.groups
        ]
        if not places:
            # A new engine, or one that has destroyed its groups, has a row too.
            places = [(self._group(GroupKey(NO_GROUP, ())), None)]
        for group, status in places:
            self._set_row(group, rank, status, now)
        here = {group.id: group for group, _ in places}
        for key, group in self._groups_of.get(number, {}).items():
            if key not in here:
                self._remove_row(group, number)
        self._groups_of[number] = here

    def _group(self, key: GroupKey) -> Group:
        found = self._known.get(key)
        if found is None:
            self._first = self._first or key.name
            found = self._known[key] = Group(
                f"g{self._created}", text(key.name, 60), key, place_of(key, self._first)
            )
            self._created += 1
            insort(self.groups, found, key=lambda one: one.place)
        return found

    def _set_row(
        self, group: Group, rank: RankStatus, status: GroupStatus | None, now: float
    ) -> None:
        number = rank.rank
        old = group.base.get(number, {})
        new = as_aborted(cells(rank, status, now), old, now)
        if status is not None:
            group.durations.add(number, status.completed)
            usual = status.oldest and group.durations.median(status.oldest)
            if usual is not None:
                usual = float(f"{usual:.2g}")
                new |= {"median": usual, "usual": duration_text(usual)}
        for since in _STARTS:
            if _same_start(old, new, since):
                new[since] = old[since]
        group.base[number] = new
        if status is not None:
            group.statuses[number] = status
            group.backend, group.timeout = status.backend, status.timeout
            group.library = text(status.library, 20)
        if new != old:
            self._dirty.add((group.id, number))

    def _remove_row(self, group: Group, rank: int) -> None:
        for table in (group.base, group.extra, group.late, group.statuses):
            table.pop(rank, None)
        self._dirty.add((group.id, rank))
        if not group.base:
            self.groups.remove(group)
            del self._known[group.key]

    def issued(self) -> int:
        """How many collectives the ranks have issued, all groups together."""
        rows = (row for group in self.groups for row in group.base.values())
        return sum(int(row.get("issued", 0)) for row in rows)

    # -- what is shown ------------------------------------------------------

    def banner(self) -> Banner:
        """Return the banner: the state of the cluster in a sentence."""
        return banner_of(self.head, self.groups, self.verdicts, self.now, self.late)

    @property
    def told(self) -> Message:
        """The banner as of the last `delta`."""
        return self._sent.get("banner", {})

    @property
    def rests(self) -> bool:
        """Whether no rank was in a cell then, or the cell hangs."""
        return self.told.get("mood") not in ("busy", "working")

    def tabs(self) -> list[dict[str, Any]]:
        """Return the data of the tabs, in order."""
        return tabs_of(self.groups, self.verdicts)

    def _holds(self, verdict: Verdict) -> bool:
        """Return whether a verdict still agrees with the status of the ranks."""
        rows = [
            group.base[rank]
            for group in self.groups
            if group.key == verdict.group
            for rank in (*verdict.culprits, *verdict.waiting, *verdict.dead)
            if rank in group.base
        ]
        if verdict.fault is Fault.RANK_DEAD or verdict.dead:
            return any(row["state"] == "dead" for row in rows)
        if verdict.fault is Fault.RANK_NOT_RESPONDING:
            return any(map(self._is_late, verdict.culprits)) or any(
                row["state"] in ("silent", "no answer") for row in rows
            )
        number = f"#{verdict.seq}"
        return any(
            row["mood"] == "working" and row.get("seq") == number for row in rows
        )

    def _is_late(self, rank: int) -> bool:
        """Return whether a heartbeat of `rank` is overdue.

        A verdict may arrive before the rank counts as silent.
        """
        heard = self._heard.get(rank)
        return heard is not None and self.now - heard > LATE

    def _compare(self) -> None:
        self.verdicts = tuple(filter(self._holds, self.verdicts))
        frozen = {
            rank
            for verdict in self.verdicts
            if verdict.fault is Fault.RANK_NOT_RESPONDING and verdict.certain
            for rank in verdict.culprits
        }
        if self.head:
            self.head = {**self.head, "frozen": sorted(frozen)}
        hangs = any(one.fault is not Fault.RANK_DEAD for one in self.verdicts)
        for group in self.groups:
            if hangs and group.last_hang is not None:
                # There is a later one, of another group.
                group.hang = None
            group.keep_hang(on_group(self.verdicts, group.key))
            late = self._late_cells.get(group.key, {})
            extra: dict[int, Cells] = {}
            for rank, found in late.items():
                # What was measured stays; nobody waits for one that is idle.
                runs = group.base.get(rank, {}).get("mood") in ("busy", "working")
                gone = () if runs else ("awaited",)
                extra[rank] = {k: found[k] for k in found if k not in gone}
            for rank, lag in group.behind(self.now).items():
                extra[rank] = {**extra.get(rank, {}), "lag": lag}
            verdicts = on_group(self.verdicts, group.key)
            if group.aborted and group.hang is not None:
                verdicts = [group.hang[0]]
            for verdict in verdicts:
                for rank, found in verdict_cells(verdict, group.aborted).items():
                    if rank in group.base and _shows(group, rank, verdict):
                        extra[rank] = {**found, **extra.get(rank, {})}
            for verdict in group.differences:
                # All have failed at once: nobody has waited.
                for rank in verdict.culprits:
                    extra[rank] = {
                        **extra.get(rank, {}),
                        **verdict_cells(verdict)[rank],
                    }
            if extra != group.extra:
                changed = extra.keys() | group.extra.keys()
                self._dirty.update((group.id, rank) for rank in changed)
                group.extra = extra

    # -- messages -----------------------------------------------------------

    def full(self) -> Message:
        """Return the whole state after the last update; deltas continue from it."""
        self.delta()
        return self.sent()

    def sent(self) -> Message:
        """Return the whole state as of the last `delta`."""
        return {
            "type": "full",
            "v": self.version,
            "now": self.now,
            **self._sent,
            "rows": {key: dict(rows) for key, rows in self._sent_rows.items()},
        }

    def delta(self) -> Message | None:
        """Return what changed since the last call; ``None`` if nothing did."""
        self._compare()
        changes: Message = {}
        for key, value in (
            ("head", self.head),
            ("banner", self.banner().as_dict()),
            ("groups", self.tabs()),
        ):
            if self._sent.get(key) != value:
                self._sent[key] = changes[key] = value
        rows = self._changed_rows()
        if rows:
            changes["rows"] = rows
        if not changes:
            return None
        self.version += 1
        return {"type": "delta", "v": self.version, "now": self.now, **changes}

    def _changed_rows(self) -> dict[str, dict[int, Cells | None]]:
        found: dict[str, dict[int, Any]] = {}
        by_id = {group.id: group for group in self.groups}
        for key, rank in self._dirty:
            sent = self._sent_rows.setdefault(key, {})
            old = sent.get(rank, {})
            group = by_id.get(key)
            if group is None or rank not in group.base:
                if sent.pop(rank, None) is not None:
                    found.setdefault(key, {})[rank] = None
                continue
            new = group.row(rank)
            changed: dict[str, Any] = {k: v for k, v in new.items() if old.get(k) != v}
            changed.update(dict.fromkeys(old.keys() - new.keys()))
            if changed:
                sent[rank] = new
                found.setdefault(key, {})[rank] = changed
        self._dirty.clear()
        for key in self._sent_rows.keys() - by_id.keys():
            del self._sent_rows[key]
        return found


def _same_start(old: Cells, new: Cells, since: str) -> bool:
    """Return whether both rows report the same start, at different times."""
    return (
        since in old
        and since in new
        and abs(float(old[since]) - float(new[since])) < JITTER
        and all(old.get(key) == new.get(key) for key in _STARTS[since])
    )


def _shows(group: Group, rank: int, verdict: Verdict) -> bool:
    """Return whether a rank's row in the tab of `group` shows its cells of a verdict.

    In the tab of another group, only those who wait in an op there, and who wait for
    each other.
    """
    in_ring = verdict.fault is Fault.DEADLOCK and rank in blamed(verdict)
    row = group.base[rank]
    waits = row["mood"] == "working" or "failed" in row
    return verdict.group == group.key or waits or in_ring
