"""Flight Recorder dumps of all ranks as evidence: what ids, names and counters mean."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..groups.world import DEFAULT
from ..observe.evidence import Group, GroupEvidence, IssuedOp, Progress, RankEvidence
from .flight_rank import RankDump

__all__ = ["KIND", "evidence_of_dumps"]

KIND = "flight recorder"

#: Torch's descriptions of groups that have none.
_UNNAMED = ("", "undefined")
_DEFAULT = ("0", "default_pg")

#: Ends the name of what our own records have of a group's sends and receives.
_OUR_P2P = " p2p"
#: The id of a group in our own records, with its generation unless that is the first.
_GENERATION = re.compile(r"(.*?)(?: \(generation (\d+)\))?(?: p2p)?", re.DOTALL)
#: Of a group in which a rank has issued nothing.
_UNUSED = GroupEvidence(
    progress=Progress(0, 0, 0),
    lists_all_in_flight=True,
    lists_all=True,
    over_is_completed=True,
    ends_sends=True,
)

_Name = tuple[str, str]
_Kinds = tuple[str, ...]


def evidence_of_dumps(
    dumps: Mapping[int, RankDump],
) -> tuple[list[RankEvidence], tuple[Group, ...], int | None]:
    """Return what the dumps of ranks tell, the groups they name, and the world size."""
    job = _Job(dumps)
    # Nobody waits in the ops of a group that a rank has rebuilt.
    newest = _newest(job.groups.values())

    def evidence(rank: int) -> RankEvidence:
        found = job.evidence(rank)
        groups = {one: its for one, its in found.groups.items() if one in newest}
        return replace(found, groups=groups)

    groups = tuple(one for one in dict.fromkeys(job.groups.values()) if one in newest)
    return [evidence(rank) for rank in sorted(dumps)], groups, job.world_size


class _Job:
    def __init__(self, dumps: Mapping[int, RankDump]) -> None:
        self.dumps = dumps
        sizes = _sizes(dumps.values())
        self.world_size = max([*sizes, *(rank + 1 for rank in dumps)], default=None)
        #: Whether a dump names a group of all of these ranks.
        self._is_world_named = self.world_size in sizes
        #: A group by name, description and ranks, so that there is one object of it.
        self.groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        #: The groups of each rank by torch's name and description.
        self.named: dict[int, dict[_Name, Group]] = {
            rank: self._groups_of(rank) for rank in sorted(dumps)
        }
        #: How many ranks name a group, and the groups of each rank, as others tell.
        self._naming = Counter(
            name
            for found in self.named.values()
            for name in {_shared_name(group) for group in found.values()}
        )
        self._members: dict[int, list[Group]] = {}
        for group in self.groups.values():
            for rank in group.ranks if group.complete else ():
                self._members.setdefault(rank, []).append(group)
        self._votes: dict[tuple[Group, _Kinds], Counter[int]] = {}
        #: The groups that have an entry, those with one in flight, and those with sends
        #: or receives.
        self._listed: set[Group] = set()
        self._in_flight: set[Group] = set()
        self._p2p: set[Group] = set()
        for rank, dump in dumps.items():
            for number, name in dump.ids.items():
                group = self.named[rank][name]
                key = group, self._kinds(rank)
                self._votes.setdefault(key, Counter())[number] += 1
            self._listed |= {self.named[rank][name] for name in dump.ops}
            self._in_flight |= {
                self.named[rank][name]
                for name, ops in dump.ops.items()
                if not all(op.retired for op in ops)
            }
            self._p2p |= {self.named[rank][name] for name in dump.p2p}
        self._counts_p2p = _counts_p2p(dumps.values())

    def _kinds(self, rank: int) -> _Kinds:
        """Return the descriptions of the groups of a rank."""
        config = self.dumps[rank].dump.config
        return tuple(sorted(text for text, _ in config.values()))

    def _groups_of(self, rank: int) -> dict[_Name, Group]:
        dump = self.dumps[rank]
        config = dump.dump.config
        found: dict[_Name, Group] = {}
        for name, (text, ranks) in config.items():
            if name or len(config) > 1:
                shown = "" if dump.torchcomms else text
                found[name, text] = self._group(name, shown, ranks)
        _, nameless = config.get("", ("", None))
        for name, text in dump.ops:
            if (name, text) not in found:
                ranks = config[name][1] if name in config else None
                alone = len(dump.ops) == 1 or _is_default(name, text)
                if ranks is None and alone:
                    ranks = nameless
                found[name, text] = self._group(name, text, ranks)
        if nameless and not found:
            found[_DEFAULT] = self._group(*_DEFAULT, nameless)
        return found

    def _mentioned(self, name: str, text: str) -> tuple[int, ...]:
        """Return the ranks that have ops in a group whose ranks no dump tells."""
        return tuple(
            sorted(rank for rank, one in self.dumps.items() if (name, text) in one.ops)
        )

    def _group(self, name: str, text: str, ranks: tuple[int, ...] | None) -> Group:
        complete = True
        if not ranks and _is_default(name, text) and self.world_size:
            ranks = tuple(range(self.world_size))
            complete = self._is_world_named
        elif not ranks:
            ranks, complete = self._mentioned(name, text), False
        key = name, text, ranks
        if key not in self.groups:
            shown = text if text not in _UNNAMED else name or "default_pg"
            if name.split(" ")[0] == DEFAULT and text == "default_pg":
                # It is our own, which has torch's description for tools of torch.
                shown = DEFAULT
            self.groups[key] = Group(shown, ranks, name, complete)
        return self.groups[key]

    def evidence(self, rank: int) -> RankEvidence:
        """Return what is known of one rank."""
        dump = self.dumps[rank]
        status = self._status_by_name(rank)
        progress = {
            name: self._progress(dump, name, group, status.get(name))
            for name, group in self.named[rank].items()
        }
        cut_off = dump.dump.is_cut_off
        if cut_off and sum(map(_has_in_flight, dump.dump.status.values())) > 1:
            # Nothing tells which op it waits in first.
            return RankEvidence(rank, source=dump.dump.path)
        overrun = cut_off or _is_overrun(dump, progress)
        groups = {}
        for name, group in self.named[rank].items():
            vague = dump.vague or self._is_vague(group)
            ops: Sequence[IssuedOp] = dump.ops.get(name, [])
            if overrun:
                # Counters alone tell which collective is the first one in flight.
                counted = progress[name].completed is not None
                ops = [op for op in ops if counted and not op.is_p2p]
            groups[group] = GroupEvidence(
                tuple(ops),
                progress[name],
                lists_all_in_flight=not overrun,
                lists_all=dump.whole,
                lists_all_p2p=name in dump.whole_p2p and not overrun,
                over_is_completed=not vague,
                ends_sends=not (vague or dump.gloo),
            )
        if dump.whole and not (dump.vague or dump.problem):
            groups.update(dict.fromkeys(self._unused(rank), _UNUSED))
        return RankEvidence(
            rank,
            groups,
            recorded=not dump.problem,
            overrun=overrun,
            counts_all=dump.counts_all,
            read_ns=dump.read_ns,
            active_ns=dump.active_ns,
            source=dump.dump.path,
        )

    def _unused(self, rank: int) -> list[Group]:
        """Return the groups of `rank` that only the dumps of others name.

        A group is named from its first op on. Not one that the rank may name otherwise,
        nor one that is over: this may be a fresh process, which was never in it.
        """
        own = set(self.named[rank].values())
        alone = {one.ranks for one in own if self._naming[_shared_name(one)] == 1}
        return [
            group
            for group in self._members.get(rank, ())
            if group in self._in_flight
            and group not in own
            and group.ranks not in alone
        ]

    def _progress(
        self,
        dump: RankDump,
        name: _Name,
        group: Group,
        status: tuple[int | None, int | None, int | None] | None,
    ) -> Progress:
        if status is None or group not in self._listed:
            # Without an entry, it may be sends and receives that are counted.
            return Progress()
        if name[0].endswith(_OUR_P2P):
            # The numbers of its entries are those of the group's collectives.
            return Progress()
        enqueued, started, completed = (
            None if one is None else max(one, 0) for one in status
        )
        if group in self._p2p and self._counts_p2p:
            # One counter holds the numbers of both kinds.
            last = dump.last.get(name)
            if last is not None and enqueued == last[1] and last[2]:
                return Progress(last[0])
            return Progress()
        if dump.vague or self._is_vague(group):
            return Progress(enqueued)
        return Progress(enqueued, started, completed)

    def _is_vague(self, group: Group) -> bool:
        return any(self.dumps[rank].vague for rank in group.ranks if rank in self.dumps)

    # -- the ids of process groups -------------------------------------------------

    def _status_by_name(
        self, rank: int
    ) -> dict[_Name, tuple[int | None, int | None, int | None]]:
        """Return the counters of a rank by the name of the group.

        Their keys are ids that only entries map to names. Where a group has no entry:
        the ids count the groups as they were made, as do names that are numbers; and
        ranks that are in groups of the same kinds have the same id for a group.
        """
        dump = self.dumps[rank]
        status = dump.dump.status
        ids = dict(dump.ids)
        names = [one for one in self.named[rank] if one not in ids.values()]
        keys = sorted(key for key in status if key not in ids)
        if 0 in keys:
            default = next((one for one in names if _is_default(*one)), None)
            if default is not None:
                ids[0] = default
        names = [one for one in names if one not in ids.values()]
        keys = [key for key in keys if key not in ids]
        if not keys:
            return self._counters(rank, ids)
        if 0 not in status:
            names = [one for one in names if not _is_default(*one)]
        ordered = _by_number(names)
        if ordered is not None and len(ordered) == len(keys):
            candidate = {**ids, **dict(zip(keys, ordered, strict=True))}
            if _ascending(candidate):
                ids = candidate
                keys = []
        self._vote(rank, ids, names, keys)
        return self._counters(rank, ids)

    def _counters(
        self, rank: int, ids: Mapping[int, _Name]
    ) -> dict[_Name, tuple[int | None, int | None, int | None]]:
        status = self.dumps[rank].dump.status
        found = {name: status[key] for key, name in ids.items() if key in status}
        if status and ids.keys() >= status.keys():
            # A group gets its counters with its first op: the others had none.
            for name in self.named[rank]:
                found.setdefault(name, (0, 0, 0))
        return found

    def _vote(
        self,
        rank: int,
        ids: dict[int, _Name],
        names: Iterable[_Name],
        keys: Sequence[int],
    ) -> None:
        """Add to `ids` what the other ranks of a group call it, if all agree."""
        claims: dict[int, list[_Name]] = {}
        for name in names:
            votes = self._votes.get((self.named[rank][name], self._kinds(rank)))
            if votes is not None and len(votes) == 1:
                claims.setdefault(next(iter(votes)), []).append(name)
        for key, claimed in claims.items():
            if key in keys and key not in ids and len(claimed) == 1:
                ids[key] = claimed[0]
        left = [name for name in names if name not in ids.values()]
        unknown = [key for key in keys if key not in ids]
        if len(left) == len(unknown) == 1:
            ids[unknown[0]] = left[0]


def _has_in_flight(counters: tuple[int | None, int | None, int | None]) -> bool:
    enqueued, _, completed = counters
    return max(completed or 0, 0) < max(enqueued or 0, 0)


def _is_overrun(dump: RankDump, progress: Mapping[_Name, Progress]) -> bool:
    """Return whether the ring was too small for what is in flight.

    The collective after the last completed one has no entry, but later ones have.
    """
    if dump.whole:
        return False
    for name, ops in dump.ops.items():
        done = progress[name].completed
        going = (op.seq for op in ops if not op.is_p2p and op.state != "completed")
        first = min(going, default=None)
        if done is not None and first is not None and first > done + 1:
            return True
    return False


def _newest(groups: Iterable[Group]) -> set[Group]:
    """Return the groups without generations before the newest one of each."""
    generations: dict[str, dict[int, list[Group]]] = {}
    for group in groups:
        base, number = _GENERATION.fullmatch(group.id).groups()  # type: ignore[union-attr]
        generations.setdefault(base, {}).setdefault(int(number or 0), []).append(group)
    return {group for of_one in generations.values() for group in of_one[max(of_one)]}


def _shared_name(group: Group) -> tuple[str, tuple[int, ...]]:
    """Return what our collectives, and our sends and receives, of a group share."""
    return group.id.removesuffix(_OUR_P2P), group.ranks


def _by_number(names: Sequence[_Name]) -> list[_Name] | None:
    if not all(name.isdigit() for name, _ in names):
        return None
    return sorted(names, key=lambda one: int(one[0]))


def _ascending(ids: Mapping[int, _Name]) -> bool:
    numbers = [int(ids[key][0]) for key in sorted(ids) if ids[key][0].isdigit()]
    return numbers == sorted(numbers)


def _is_default(name: str, text: str) -> bool:
    return text == "default_pg" or (name in ("0", "default") and text in _UNNAMED)


def _sizes(dumps: Iterable[RankDump]) -> set[int]:
    """Return the sizes of the world as far as the groups of each dump tell."""
    return {
        max(ranks) + 1
        for one in dumps
        for _, ranks in one.dump.config.values()
        if ranks
    }


def _counts_p2p(dumps: Iterable[RankDump]) -> bool:
    """Return whether the counters count sends and receives, too.

    Torch's do. What else writes the format may count collectives alone: the last
    entries tell which.
    """
    for dump in dumps:
        for number, name in dump.ids.items():
            collective, p2p, is_p2p = dump.last.get(name, (0, 0, False))
            enqueued = dump.dump.status.get(number, (None, None, None))[0]
            if is_p2p and enqueued is not None and collective != p2p:
                if enqueued == p2p:
                    return True
                if max(enqueued, 0) == collective:
                    return False
    return True
