"""What one dump tells of its rank, in the form of evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import attrgetter

from ..observe.evidence import Arrays, IssuedOp
from ..observe.records import Record
from ..observe.torch_format import OPS
from ..rank_sets import group_by
from .evidence_file import only
from .flight_dump import Dump
from .flight_entry import Entry, splits
from .late_ops import late_records

__all__ = ["RankDump", "condense", "end_batches_of_one", "note_empty_ones"]

_NOT_COMPARED = (
    "its ops cannot be compared: their numbers count over all groups, and entries are "
    "left out"
)

#: Torch's names of ops, and ours.
_NAMES = {name: op.value for name, op in OPS.items()}

#: Nanoseconds between the last time of a dump and the time of its file, above which
#: the file is rather a copy.
_COPIED = 3600 * 10**9

#: A process group as entries name it: name and description.
_Name = tuple[str, str]
_Ranks = tuple[int, ...] | None


@dataclass
class RankDump:
    """One dump without its entries: what is needed of them is in `ops`."""

    dump: Dump
    ops: dict[_Name, list[IssuedOp]] = field(default_factory=dict)
    #: The process groups that entries name, by their ids.
    ids: dict[int, _Name] = field(default_factory=dict)
    #: Of each process group, the numbers of its last entry: collective and p2p. Not of
    #: a dump that is cut off, which lacks it.
    last: dict[_Name, tuple[int, int, bool]] = field(default_factory=dict)
    #: The process groups that have sends or receives, those that are not listed, too.
    p2p: set[_Name] = field(default_factory=set)
    #: The process groups in which it has issued batches, and those in which it has
    #: sent or received outside of one.
    batched: set[_Name] = field(default_factory=set)
    unbatched: set[_Name] = field(default_factory=set)
    #: Those of which every send and receive is listed.
    whole_p2p: set[_Name] = field(default_factory=set)
    #: Where in `ops` a send or receive is that is in flight, or of a batch that is
    #: over: the entry of the batch, which alone tells, is left out.
    unsure: dict[_Name, list[int]] = field(default_factory=dict)
    #: Every entry that the rank ever made is there.
    whole: bool = False
    #: What has retired is left out, as torch does where it dumps at a timeout.
    active_only: bool = False
    #: Its entries do not tell whether an op succeeded: those of gloo and torchcomms.
    vague: bool = False
    #: It has ops of gloo: torch's, or those that our watch has recorded of them.
    gloo: bool = False
    #: It is written by torchcomms, whose groups have the backend as description.
    torchcomms: bool = False
    #: The ids of its entries count all that torch has recorded, from the start.
    counts_all: bool = False
    #: Why its ops cannot be compared with those of other ranks; empty: they can.
    problem: str = ""
    #: The ranks that it may be of, as its content tells; None: it does not.
    candidates: frozenset[int] | None = None
    oldest_ns: int = 0
    newest_ns: int = 0
    #: When it was written, and when its last op was issued or ended, as torch notes it.
    written_ns: int | None = None
    active_ns: int | None = None
    #: Ops that have completed have their times.
    times: bool = False
    #: Its last ops, for who was late: see `late_ops`.
    late: list[Record] = field(default_factory=list)

    @property
    def read_ns(self) -> int | None:
        """When it was written, as it tells or the time of its file may."""
        if self.written_ns is not None:
            return self.written_ns
        modified = self.dump.modified_ns
        if modified is None or not self.newest_ns:
            return None
        return modified if 0 <= modified - self.newest_ns < _COPIED else None


def condense(dump: Dump, times: bool = False) -> RankDump:
    """Return what is needed of a dump; its entries are dropped.

    With `times`, ops that have completed keep their times.
    """
    entries = sorted(dump.entries, key=attrgetter("record_id"))
    created = [one.created_ns for one in entries] or [0]
    self = RankDump(dump, oldest_ns=min(created), newest_ns=max(created), times=times)
    self.late = late_records(entries)
    _note_times(self, entries)
    gloos = [one for one in entries if one.kind.library == "gloo"]
    self.gloo = bool(gloos)
    # Our own records tell more than torch's of gloo.
    self.vague = any(one.ours is None for one in gloos)
    groups = group_by(entries, attrgetter("kind.group"))
    counts_over_groups = _counts_over_groups(dump, entries)
    one_by_one = not (self.gloo or counts_over_groups)
    is_late = one_by_one and any(map(_begins_late, groups.values()))
    _completeness(self, entries, is_late)
    self.counts_all = one_by_one and not any(map(_is_counted_anew, entries))
    alone = _outside_of_batches(entries) if self.active_only or self.whole else set()
    self.unbatched = {one.kind.group for one in entries if one.record_id in alone}
    if counts_over_groups:
        self.torchcomms = self.vague = True
        if self.whole:
            groups = {name: _counted(listed) for name, listed in groups.items()}
        elif len(dump.config) > 1 or any(one.kind.is_p2p for one in entries):
            self.problem = _NOT_COMPARED
            groups = {}
    own = _config_candidates(dump)
    for name, listed in groups.items():
        ranks = _ranks_of(dump, name)
        final = listed[-1]
        self.ids[final.pg_id] = name
        if not dump.is_cut_off:
            numbers = final.collective_seq_id, final.p2p_seq_id
            self.last[name] = (*numbers, final.kind.is_p2p)
        ops, place = _ops(self, listed, ranks, alone)
        self.ops[name] = ops
        if final.p2p_seq_id or any(op.is_p2p for op in ops):
            self.p2p.add(name)
            found = {one.p2p_seq_id for one in listed if one.kind.is_p2p}
            last = final.p2p_seq_id
            # Counted first: a damaged file may have any number.
            lists_all = len(found) == last and found == {*range(1, last + 1)}
            if lists_all and final.ours is None:
                self.whole_p2p.add(name)
        if place is not None and ranks is not None and place < len(ranks):
            own = {ranks[place]} if own is None else own & {ranks[place]}
    self.candidates = None if own is None else frozenset(own)
    dump.entries = []
    return self


def _note_times(self: RankDump, entries: Iterable[Entry]) -> None:
    """Note when torch has seen ops end: as it dumped, those that have not retired."""
    torchs = [one for one in entries if one.ours is None]
    ended = [one for one in torchs if one.ended_ns]
    tracked = (one.ended_ns or 0 for one in ended if not one.kind.retired)
    written = max(tracked, default=0)
    times = [one.ended_ns or 0 for one in ended], [one.created_ns for one in torchs]
    active = max(chain(*times), default=0)
    self.written_ns, self.active_ns = written or None, max(active, 0) or None


def end_batches_of_one(dumps: Sequence[RankDump]) -> None:
    """Take single sends and receives as over where their kind of group has batches.

    A rank that batches what it sends does so each time, and a batch that is in flight
    has an entry of its own. Where nothing shows whether it does, what is listed may be
    over. A collective is over if the counters have passed it.
    """
    counts = [{name: _p2p_counts(one, name) for name in one.unsure} for one in dumps]
    batched = {name[1] for one in dumps for name in one.batched}
    # Once it is over, what is sent outside of a batch is not listed any more.
    batched |= {
        name[1]
        for one, done in zip(dumps, counts, strict=True)
        for name, places in one.unsure.items()
        if (count := done[name]) is not None
        and count > one.last[name][0]
        and any(one.ops[name][place].seq == done[name] for place in places)
    }
    unbatched = {name[1] for one in dumps for name in one.unbatched}
    p2p = {name[1] for one in dumps for name in one.p2p}
    for one, done in zip(dumps, counts, strict=True):
        numbers = {name: number for number, name in one.ids.items()}
        for name, places in one.unsure.items():
            completed = one.dump.status.get(numbers[name], (None, None, None))[2]
            for place in places:
                op, count = one.ops[name][place], done[name]
                if not op.is_p2p:
                    # Counters hold the numbers of sends and receives, too.
                    passed = completed is not None and completed >= op.seq
                    is_over = passed and name[1] not in p2p
                elif count is not None and count < op.seq:
                    is_over = False
                elif name[1] in batched and name[1] not in unbatched:
                    is_over = one.active_only or count is not None
                else:
                    is_over = False
                    if name[1] not in unbatched or name[1] in batched:
                        one.ops[name][place] = replace(op, may_be_over=True)
                if is_over:
                    one.ops[name][place] = _over(op)
                    one.active_only, one.whole = True, False


def _p2p_counts(one: RankDump, name: _Name) -> int | None:
    """Return the number of the last send, receive or batch that has completed.

    None: the counters of the group do not tell. They are those of sends and receives
    if one of these was the last op; the last one that has completed may be another.
    """
    number = next(number for number, other in one.ids.items() if other == name)
    enqueued, _, completed = one.dump.status.get(number, (None, None, None))
    collective, p2p, is_p2p = one.last.get(name, (0, 0, False))
    of_either = completed is None or 0 < completed <= collective
    return completed if is_p2p and enqueued == p2p and not of_either else None


def note_empty_ones(dumps: Sequence[RankDump]) -> None:
    """Give the dumps without an entry the problem that other dumps of the job have."""
    if any(one.problem for one in dumps):
        for one in dumps:
            if not one.ops and not one.dump.status:
                one.problem = _NOT_COMPARED


def _counts_over_groups(dump: Dump, entries: Sequence[Entry]) -> bool:
    """Return whether one number counts the ops of all groups: torchcomms' do."""
    return (
        not dump.status
        and len({one.collective_seq_id - one.record_id for one in entries}) == 1
        and not any(one.p2p_seq_id for one in entries)
    )


def _begins_late(entries: Sequence[Entry]) -> bool:
    """Return whether ops of a group were recorded before its first entry.

    After `torch._C._distributed_c10d._reset_fr_recording_nccl`, which torchft calls,
    the numbers of records begin anew, those of ops go on.
    """
    first = entries[0]
    return first.ours is None and first.collective_seq_id + first.p2p_seq_id > 1


def _is_counted_anew(entry: Entry) -> bool:
    """Return whether an entry has a lower id than its group alone had entries."""
    return entry.ours is not None or entry.record_id + 1 < entry.collective_seq_id


def _counted(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries of one group with the numbers that torch's recorder gives them."""
    found = []
    collective = p2p = 0
    for one in entries:
        if one.kind.is_p2p:
            p2p += 1
        else:
            collective += 1
        found.append(one._replace(collective_seq_id=collective, p2p_seq_id=p2p))
    return found


def _completeness(self: RankDump, entries: Sequence[Entry], is_late: bool) -> None:
    ids = [entry.record_id for entry in entries]
    whole = ids == list(range(len(ids))) and not is_late
    counted = any(
        (done or 0) > 0 or (issued or 0) > 0
        for issued, _, done in self.dump.status.values()
    )
    self.whole = whole and (bool(ids) or not counted) and not self.dump.is_cut_off
    retired = any(entry.kind.retired for entry in entries)
    gaps = ids != list(range(ids[0], ids[0] + len(ids))) if ids else counted
    self.active_only = not retired and (not whole or gaps or not ids)


def _config_candidates(dump: Dump) -> set[int] | None:
    """Return the ranks that all of its groups have: it is one of those."""
    known = [set(ranks) for _, ranks in dump.config.values() if ranks is not None]
    return set.intersection(*known) if known else None


def _ranks_of(dump: Dump, name: _Name) -> _Ranks:
    described = dump.config.get(name[0])
    if described is None and len(dump.config) == 1:
        # Torch's gloo names its only group nowhere but in the entries.
        described = dump.config.get("")
    return described[1] if described is not None else None


def _ops(
    self: RankDump,
    entries: Sequence[Entry],
    ranks: _Ranks,
    alone: Collection[int],
) -> tuple[list[IssuedOp], int | None]:
    """Return the ops of one group, and the rank's place in it if an entry tells.

    `alone` are the entries of sends and receives that are in no batch.
    """
    group = entries[0].kind.group
    ops: list[IssuedOp] = []
    #: The entry of each of `ops`.
    listed: list[Entry] = []
    suspects: list[int] = []
    own = None
    for position, entry in enumerate(entries):
        if entry.kind.closes:
            if _close_batch(entry, ops, listed, suspects):
                self.batched.add(group)
                continue
            if not _is_of_collectives(entries, position):
                continue
        op = _op(self, entry, ranks)
        if entry.kind.place is not None:
            own = entry.kind.place
        if not op.in_flight or op.order in alone:
            pass
        elif _is_of_batch(entries, position):
            suspects.append(len(ops))
        elif (self.active_only and not self.vague) or (self.whole and op.is_p2p):
            self.unsure.setdefault(group, []).append(len(ops))
        ops.append(op)
        listed.append(entry)
    for place in suspects:
        # The entry of the batch is left out once it has retired, or not made yet.
        if self.active_only or not _share_number(listed[place], listed[-1]):
            ops[place] = _over(ops[place])
            self.batched.add(group)
    return ops, own


def _over(op: IssuedOp) -> IssuedOp:
    return replace(op, retired=True, state="unknown")


def _share_number(one: Entry, other: Entry) -> bool:
    """Return whether two entries of a group have one number: those of a batch do."""
    return (one.collective_seq_id, one.p2p_seq_id) == (
        other.collective_seq_id,
        other.p2p_seq_id,
    )


def _is_of_batch(entries: Sequence[Entry], position: int) -> bool:
    """Return whether an entry is one of a batch: its ops have one number.

    A batch of a single op cannot be told from an op without one.
    """
    around = entries[max(position - 1, 0) : position + 2]
    return sum(_share_number(one, entries[position]) for one in around) > 1


def _outside_of_batches(entries: Sequence[Entry]) -> set[int]:
    """Return the ids of sends and receives that are in no batch.

    Around the op of a batch is another one of it, or the entry of the batch.
    """
    found = set()
    before = None
    for one, following in pairwise(entries):
        if (
            one.kind.is_p2p
            and following.record_id == one.record_id + 1
            and not any(
                other
                and other.kind.group == one.kind.group
                and _share_number(other, one)
                for other in (before, following)
            )
        ):
            found.add(one.record_id)
        before = one
    return found


def _close_batch(
    entry: Entry, ops: list[IssuedOp], listed: Sequence[Entry], suspects: list[int]
) -> bool:
    """Give the ops of a batch the state of its entry: their own never changes.

    Return whether there are any: older versions of torch list no collectives of a
    batch, and the ring may have lost them.
    """
    size = len(ops)
    for place in range(len(ops) - 1, -1, -1):
        if not _share_number(listed[place], entry):
            break
        op = ops[place]
        op.state, op.retired = entry.kind.state, entry.kind.retired
        op.started_ns, op.ended_ns = _started_ns(entry), entry.ended_ns
        op.batch = entry.record_id
        if suspects and suspects[-1] == place:
            suspects.pop()
        size = place
    return size < len(ops)


def _is_of_collectives(entries: Sequence[Entry], position: int) -> bool:
    """Return whether a batch whose ops are not listed is one of collectives."""
    entry = entries[position]
    if entry.kind.is_p2p:
        return False
    if position:
        return entry.collective_seq_id > entries[position - 1].collective_seq_id
    return not entry.p2p_seq_id


def _op(self: RankDump, entry: Entry, ranks: _Ranks) -> IssuedOp:
    kind, ours = entry.kind, entry.ours
    arrays, peer = kind.arrays, None
    if kind.peer is not None and ranks is not None and kind.peer < len(ranks):
        peer = ranks[kind.peer]
    if kind.name == "scatter" and not self.vague and ours is None:
        # Torch's NCCL passes what it receives as the input, to fit an interface.
        inputs, outputs, read, written = arrays
        arrays = Arrays(outputs, inputs, written, read)
    op = IssuedOp(
        _NAMES.get(kind.name, kind.name),
        entry.p2p_seq_id if kind.is_p2p else entry.collective_seq_id,
        entry.record_id,
        "unknown" if self.vague else kind.state,
        kind.retired,
        kind.is_p2p,
        peer,
        arrays,
        line=entry.line,
    )
    if ours is not None:
        op.op = only(str, ours.get("op")) or op.op
        op.root = only(int, ours.get("root"))
        op.reduce_op = only(str, ours.get("reduce_op"))
        op.tag = only(int, ours.get("tag"))
        op.splits = splits(ours.get("parts"), ranks)
        op.shown = only(int, ours.get("number"))
        op.counted = not only(int, ours.get("uncounted_id"))
    if op.state != "completed" or self.times:
        op.created_ns = entry.created_ns or None
        op.started_ns, op.ended_ns = _started_ns(entry), entry.ended_ns
        op.timeout = entry.timeout_ms / 1000
    return op


def _started_ns(entry: Entry) -> int | None:
    """Return when an op has started; torch notes of one in flight when it dumped."""
    is_known = entry.ours is not None or entry.kind.state != "started"
    return entry.started_ns if is_known else None
