"""BoardModel: what the board shows, and what of it changed since the last look.

Plain data in, plain data out: no thread, no widget, no clock of its own. The
messages it makes are what travels to the page:

``{"type": "full", "v": 7, "now": …, "head": …, "banner": …, "groups": […],
"rows": {group: {rank: cells}}}`` is everything; in a ``"delta"`` what did not
change is missing, cells are those that changed (``None``: empty now) and a row
that is gone is ``None``. ``v`` counts the messages: a page that missed one
asks for everything. Times are seconds on the clock that ``now`` tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.backends.diagnosis import Fault, Verdict
from rankscope.engines import ClusterStatus, GroupStatus, RankStatus

from .board_banner import Banner, banner_of, verdict_cells
from .board_rows import Cells, cells, text
from .ranks import format_ranks, name_ranks
from .units import elapsed_text

__all__ = ["NO_GROUP", "BoardModel", "Group", "Message"]

Message = dict[str, Any]

#: The name of the tab with the ranks that have no group.
NO_GROUP = "no group"

#: Seconds after which a rank that is behind the others is said to be.
STANDSTILL = 1.0
#: Seconds by which two reports of one start may differ: a message's way here.
JITTER = 0.5

_MOODS = ("error", "warning", "working", "busy", "calm")


@dataclass
class Group:
    """A tab of the board: one group, with a row for each of its ranks."""

    id: str
    name: str
    ranks: tuple[int, ...]
    backend: str = ""
    timeout: float = 0.0
    #: What its ranks said of themselves.
    base: dict[int, Cells] = field(default_factory=dict)
    #: What follows from comparing them: ``lag``, ``verdict``, ``blame``.
    extra: dict[int, Cells] = field(default_factory=dict)
    #: Rank → the number it was seen behind with, and since when.
    late: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: Rank → why the group was aborted there.
    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def aborted(self) -> bool:
        """Whether it was aborted on any rank."""
        return any(row["state"] == "aborted" for row in self.base.values())

    def row(self, rank: int) -> Cells:
        """All cells of a rank."""
        return {**self.base[rank], **self.extra.get(rank, {})}

    def rows(self) -> dict[int, Cells]:
        """All rows, in the order of the ranks."""
        return {rank: self.row(rank) for rank in sorted(self.base)}

    def info(self, label: str) -> dict[str, Any]:
        """What its tab says."""
        rows = self.base.values()
        moods = {str(row["mood"]) for row in rows}
        generation = max((int(row.get("generation", 0)) for row in rows), default=0)
        facts = []
        if self.name != NO_GROUP:
            facts = [name_ranks(self.ranks), text(self.backend, 60)]
            if self.timeout < math.inf:
                facts.append(f"timeout {elapsed_text(self.timeout)}")
        if generation:
            facts.append(f"generation {generation}")
        return {
            "id": self.id,
            "name": self.name,
            "label": label,
            "ranks": list(self.ranks),
            "size": len(self.base),
            "mood": next((mood for mood in _MOODS if mood in moods), "calm"),
            "facts": facts,
            "aborted": self.aborted,
            "flight": sum(bool(row.get("queue")) for row in rows),
            "dead": sorted(r for r, row in self.base.items() if row["state"] == "dead"),
        }

    def behind(self, now: float) -> dict[int, int]:
        """Rank → how many collectives it is behind the one that is ahead.

        Only those that have not moved since they were first seen behind, for
        `STANDSTILL` seconds: ranks in step are never seen at one number, since
        they are seen one by one.
        """
        issued = {
            rank: int(row["issued"])
            for rank, row in self.base.items()
            if "issued" in row and row["state"] not in ("dead", "aborted")
        }
        front = max(issued.values(), default=0)
        for rank in self.base:
            number = issued.get(rank, front)
            if number >= front:
                self.late.pop(rank, None)
            elif self.late.get(rank, (None,))[0] != number:
                self.late[rank] = (number, now)
        return {
            rank: front - number
            for rank, (number, since) in self.late.items()
            if now - since >= STANDSTILL
        }


class BoardModel:
    """The state of the board. Not thread-safe: its owner serialises the calls."""

    def __init__(self) -> None:
        self.version = 0
        self.groups: list[Group] = []
        self.ranks: dict[int, RankStatus] = {}
        self.verdicts: tuple[Verdict, ...] = ()
        self.head: dict[str, Any] = {}
        self.now = 0.0
        self._made = 0
        self._known: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._dirty: set[tuple[str, int]] = set()
        # What the page has.
        self._sent_rows: dict[str, dict[int, Cells]] = {}
        self._sent: dict[str, Any] = {}

    # -- taking in ----------------------------------------------------------

    def take(self, status: ClusterStatus, now: float, size: int | None = None) -> None:
        """Take in the ranks of `status` (some, or all) as they are at `now`.

        `size` is the number of ranks of the cluster, if `status` has only some.
        """
        self.now = now
        for rank in status.ranks:
            self._take(rank, now)
        count = size or status.world_size
        facts = [text(status.launcher, 40)]
        if status.backend:
            facts.append(text(status.backend, 60))
        facts.append(f"cluster {text(status.cluster_id, 60)}")
        self.head = {
            "title": "1 rank" if count == 1 else f"{count} ranks",
            "facts": facts,
            "state": text(status.state, 16),
            "dead": sorted(r for r, one in self.ranks.items() if not one.alive),
        }

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Show these verdicts from now on, the one that explains most first."""
        self.verdicts = tuple(verdicts)

    def _take(self, rank: RankStatus, now: float) -> None:
        number = rank.rank
        self.ranks[number] = rank
        places: list[tuple[Group, GroupStatus | None]] = [
            (self._group(one.name, one.ranks), one) for one in rank.groups
        ]
        if not places:
            # A fresh engine, or one that destroyed its groups: seen all the same.
            places = [(self._group(NO_GROUP, ()), None)]
        for group, status in places:
            self._place(group, rank, status, now)
        here = {group.id for group, _ in places}
        for group in list(self.groups):
            if group.id not in here and number in group.base:
                self._leave(group, number)

    def _group(self, name: str, ranks: Sequence[int]) -> Group:
        # Disjoint groups may share a name: what tells them apart is their ranks.
        key = (text(name, 60), tuple(ranks))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Group(f"g{self._made}", *key)
            self._made += 1
            self.groups.append(found)
            # The ranks without a group are the last tab.
            self.groups.sort(key=lambda one: one.name == NO_GROUP)
        return found

    def _place(
        self, group: Group, rank: RankStatus, status: GroupStatus | None, now: float
    ) -> None:
        number = rank.rank
        old = group.base.get(number, {})
        new = cells(rank, status, now)
        if _same_start(old, new):
            new["since"] = old["since"]
        group.base[number] = new
        if status is not None:
            group.backend, group.timeout = status.backend, status.timeout
            if status.state == "aborted":
                group.reasons[number] = text(status.reason or "no reason given", 400)
            else:
                group.reasons.pop(number, None)
        if new != old:
            self._dirty.add((group.id, number))

    def _leave(self, group: Group, rank: int) -> None:
        for table in (group.base, group.extra, group.late, group.reasons):
            table.pop(rank, None)
        self._dirty.add((group.id, rank))
        if not group.base:
            self.groups.remove(group)
            del self._known[group.name, group.ranks]

    # -- what is shown ------------------------------------------------------

    def banner(self) -> Banner:
        """The sentence that says how things are."""
        return banner_of(self.head, self.groups, self.verdicts, self.now)

    def tabs(self) -> list[dict[str, Any]]:
        """What the tabs say, in order."""
        names = [group.name for group in self.groups]
        return [
            group.info(
                group.name
                if names.count(group.name) == 1
                else f"{group.name} ({format_ranks(group.ranks)})"
            )
            for group in self.groups
        ]

    def _holds(self, verdict: Verdict) -> bool:
        """Whether a verdict still fits what the ranks say.

        An op that is over, or was aborted, needs no explanation any more,
        whoever gave it.
        """
        rows = [
            group.base[rank]
            for group in self.groups
            if group.name == verdict.group
            for rank in (*verdict.culprits, *verdict.waiting)
            if rank in group.base
        ]
        if verdict.fault is Fault.RANK_DEAD:
            return any(row["state"] == "dead" for row in rows)
        if verdict.fault is Fault.RANK_NOT_RESPONDING:
            return any(row["state"] in ("silent", "no answer") for row in rows)
        number = f"#{verdict.seq}"
        return any(
            row["mood"] == "working" and row.get("seq") == number for row in rows
        )

    def _compare(self) -> None:
        """Work out again what follows from comparing ranks."""
        self.verdicts = tuple(filter(self._holds, self.verdicts))
        for group in self.groups:
            extra: dict[int, Cells] = {
                rank: {"lag": lag} for rank, lag in group.behind(self.now).items()
            }
            for verdict in self.verdicts:
                if verdict.group != group.name:
                    continue
                for rank, said in verdict_cells(verdict).items():
                    if rank in group.base:
                        extra[rank] = {**said, **extra.get(rank, {})}
            if extra != group.extra:
                changed = extra.keys() | group.extra.keys()
                self._dirty.update((group.id, rank) for rank in changed)
                group.extra = extra

    # -- messages -----------------------------------------------------------

    def full(self) -> Message:
        """Everything, as of the last `take` and `judge`; deltas go on from here."""
        self.delta()
        return {
            "type": "full",
            "v": self.version,
            "now": self.now,
            **self._sent,
            "rows": {key: dict(rows) for key, rows in self._sent_rows.items()},
        }

    def delta(self) -> Message | None:
        """What changed since the last call; ``None`` if nothing did."""
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


def _same_start(old: Cells, new: Cells) -> bool:
    """Whether `new` tells of the same start as `old`, heard at another moment."""
    if "since" not in old or "since" not in new:
        return False
    same = ("generation", "op", "seq", "limit", "mood")
    return abs(float(old["since"]) - float(new["since"])) < JITTER and all(
        old.get(key) == new.get(key) for key in same
    )
