"""A report of NCCL's RAS service, saved as text or as JSON, as evidence.

It counts what each rank has launched in each communicator, by function. The ranks are
those of the communicator: they are the job's only in the one of all processes, which
tells whose process is which rank in the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import LibraryFailure
from ..nccl.ras import RasCommunicator, RasRank, parse_report
from ..observe.evidence import Group, GroupEvidence, IssuedOp, Progress, RankEvidence
from .evidence_file import RawFile, UnreadableError

__all__ = ["RasReader"]

#: Bytes at the beginning by which a report is recognised.
_BEGINNING = 1 << 14

_JSON = re.compile(r'\s*\{\s*"nccl_version"')
#: Nodes, processes per node, GPUs per process, processes, GPUs; see "Job summary".
_TOTALS = re.compile(r"^ *[\d-]+ +[\d-]+ +[\d-]+ +(\d{1,6}) +\d+ *$", re.MULTILINE)
_FUNCTIONS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}


class RasReader:
    """Reads what ``ncclras -v`` and a client of the RAS service print."""

    kind = "NCCL RAS"

    def recognises(self, file: RawFile) -> bool:
        text = file.data[:_BEGINNING].decode("utf-8", errors="replace")
        return _JSON.match(text) is not None or (
            "Job summary" in text and "NCCL version" in text
        )

    def read(self, file: RawFile) -> list[RankEvidence]:
        """Return what the report tells of each rank of the communicator of all."""
        text = file.text()
        try:
            communicators = parse_report(text)
        except LibraryFailure as error:
            raise UnreadableError(str(error)) from error
        everyone = _of_all(communicators, _TOTALS.search(text))
        if everyone is None:
            raise UnreadableError(
                "no communicator in it has all processes: which rank of the job a rank "
                "of a communicator is, it does not say"
            )
        places = {_process(one): one.rank for one in everyone.ranks}
        found: dict[int, RankEvidence] = {}
        for one in communicators:
            members: Sequence[int] | None = range(one.size)
            if one is not everyone:
                members = _members(one, places)
            for about in _evidence(one, members, file.path) if members else ():
                known = found.setdefault(about.rank, about)
                groups = {**known.groups, **about.groups}
                found[about.rank] = replace(
                    known,
                    groups=groups,
                    death=known.death or about.death,
                    recorded=known.recorded or about.recorded,
                )
        return [found[rank] for rank in sorted(found)]


def _process(rank: RasRank) -> tuple[str, int, int]:
    return rank.host, rank.pid, rank.device


def _members(
    one: RasCommunicator, places: Mapping[tuple[str, int, int], int]
) -> list[int] | None:
    """Return the job's ranks in a communicator, None where they are not known."""
    found = [places[key] for rank in one.ranks if (key := _process(rank)) in places]
    known = len(set(found)) == one.size and all(rank.host for rank in one.ranks)
    return found if known else None


def _of_all(
    communicators: Sequence[RasCommunicator], totals: re.Match[str] | None
) -> RasCommunicator | None:
    if totals is not None:
        processes = int(totals[1])
    else:
        processes = len({_process(rank) for one in communicators for rank in one.ranks})
    found = [one for one in communicators if one.size == processes]
    # One for each device and each split of all ranks: where ranks wait, they differ.
    return max(found, key=_spread, default=None)


def _spread(communicator: RasCommunicator) -> int:
    """Return how far the ranks of a communicator are apart."""
    totals = _totals(communicator).values()
    return max(totals, default=0) - min(totals, default=0)


def _totals(communicator: RasCommunicator) -> dict[int, int]:
    """Return rank → ops launched; a report of text names some of the ranks only."""
    named = {
        one.rank: sum({**communicator.others, **one.counts}.values())
        for one in communicator.ranks
        if one.counts or one.state == "running"
    }
    lost = {one.rank for one in communicator.ranks} - named.keys()
    if communicator.others:
        rest = sum(communicator.others.values())
        for rank in set(range(communicator.size)) - lost:
            named.setdefault(rank, rest)
    return named


def _evidence(
    one: RasCommunicator, members: Sequence[int], path: str
) -> Iterator[RankEvidence]:
    """Yield what a communicator tells of `members`: the job's ranks, in its order."""
    group = Group(f"NCCL communicator {one.hash}", tuple(members), one.hash)
    totals = _totals(one)
    least = min(totals.values(), default=0)
    known = {rank.rank: rank for rank in one.ranks}
    for rank, member in enumerate(members):
        about = known.get(rank)
        dead = about is not None and about.state == "dead"
        groups: Mapping[Group, GroupEvidence] = {group: GroupEvidence()}
        if rank in totals:
            op = _first_ahead(one, known.get(rank), least, totals)
            ops = () if op is None else (op,)
            groups = {group: GroupEvidence(ops, Progress(enqueued=totals[rank]))}
        yield RankEvidence(
            member,
            groups,
            death=f"rank {member} is dead, as NCCL's RAS reports" if dead else None,
            process=f"pid {about.pid}" if about and about.pid >= 0 else None,
            recorded=rank in totals,
            source=path,
        )


def _first_ahead(
    one: RasCommunicator, rank: RasRank | None, least: int, totals: Mapping[int, int]
) -> IssuedOp | None:
    """Return the first op that a rank has launched and the last rank has not.

    Also where all have launched as many, of different functions. Of several functions,
    which one was the first is not known.
    """
    counts = [
        {**one.others, **other.counts}
        for other in one.ranks
        if other.rank in totals and (other.counts or one.others)
    ]
    if one.others:
        counts.append(dict(one.others))
    mine = {**one.others, **(rank.counts if rank else {})}
    ahead = [
        name
        for name, count in mine.items()
        if count > min(each.get(name, 0) for each in counts)
    ]
    if len(ahead) != 1:
        return None
    same = len(set(totals.values())) == 1
    return IssuedOp(
        _FUNCTIONS.get(ahead[0], ahead[0]), least + (not same), least, "unknown"
    )
