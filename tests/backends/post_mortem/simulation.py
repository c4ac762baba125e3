"""Runs the programs of a job's ranks until nothing can move any more.

Each rank has a host, which issues ops ahead of its GPU up to a bound, and a GPU,
which runs them: in order on one communicator, and after the ops that the stream
waits for. A collective completes when all members run it and agree; the n-th send
of a pair meets the n-th receive. The result does not depend on the order of events.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from tests.backends.post_mortem.training_job import Job, Op

__all__ = ["Issued", "Simulation"]

#: A collective's slot is (group, number), that of a pair (group, from, to, number).
Slot = tuple[int, ...]


@dataclass(eq=False)
class Issued:
    """An op that a rank has issued: times are ns since the start of the job."""

    op: Op
    rank: int
    slots: tuple[Slot, ...]
    seq: int
    p2p_seq: int
    created: int
    after: tuple[Issued, ...]
    started: int | None = None
    completed: int | None = None
    #: The GPU has stopped: the host never sees this op complete.
    hidden: bool = False
    then: list[Issued] = field(default_factory=list)

    @property
    def seen_complete(self) -> bool:
        return self.completed is not None and not self.hidden


class Simulation:
    """The state of all ranks; `run` brings it to its end."""

    def __init__(self, job: Job, seed: int, ahead: int) -> None:
        self.job, self.ahead = job, ahead
        self.programs = [list(program) for program in job.programs]
        world = len(self.programs)
        self.issued: list[list[Issued]] = [[] for _ in range(world)]
        self.slots: dict[Slot, dict[int, Issued]] = defaultdict(dict)
        #: For each rank: the index of the op from which on its GPU is stopped, and
        #: how many ops after it still reach the peers.
        self.gpu_stop: dict[int, tuple[int, int]] = {}
        self._random = random.Random(seed)
        self._slow = [self._random.choice((1, 1, 1, 3)) for _ in range(world)]
        self._numbers: list[dict[Hashable, int]] = [
            defaultdict(int) for _ in range(world)
        ]
        self._last: list[dict[Hashable, Issued]] = [{} for _ in range(world)]
        self._todo: list[Issued] = []

    def run(self) -> None:
        active = True
        while active:
            active = False
            for rank in range(len(self.programs)):
                while self._issue(rank):
                    active = True
            while self._todo:
                self._start(self._todo.pop())

    def left(self, rank: int) -> list[Op]:
        """Return the ops of the program that `rank` has not issued."""
        return self.programs[rank][len(self.issued[rank]) :]

    def reached_end(self, rank: int) -> bool:
        """Return whether `rank` has issued its program and waits for no op of it."""
        waits = self._waits(rank)
        return not self.left(rank) and all(one.seen_complete for one in waits)

    def _waits(self, rank: int) -> list[Issued]:
        """Return what the host waits for before its next op."""
        mine, last = self.issued[rank], self._last[rank]
        full = [mine[-self.ahead]] if len(mine) >= self.ahead else []
        return full + [last[key] for key in ("host",) if key in last]

    def _issue(self, rank: int) -> bool:
        mine, program, waits = self.issued[rank], self.programs[rank], self._waits(rank)
        if len(mine) == len(program) or not all(one.seen_complete for one in waits):
            return False
        op, last, numbers = program[len(mine)], self._last[rank], self._numbers[rank]
        times = [one.completed or 0 for one in waits]
        times += [mine[-1].created] if mine else []
        pause = self._random.randrange(5_000, 60_000) * self._slow[rank]
        created = max(times, default=0) + pause
        kind: Hashable = ("p2p", op.group.uid) if op.parts else op.group.uid
        numbers[kind] += 1
        comms: list[Hashable] = [op.group.uid]
        slots: list[Slot] = [(op.group.uid, numbers[kind])]
        if op.parts:
            slots = []
            for part in op.parts:
                ends = (rank, part.peer) if part.kind == "send" else (part.peer, rank)
                numbers[op.group.uid, ends] += 1
                slots.append((op.group.uid, *ends, numbers[op.group.uid, ends]))
            if not op.batch:
                comms = [(op.group.uid, *sorted((rank, op.parts[0].peer)))]
        after = tuple({last[key] for key in ("stream", *comms) if key in last})
        seqs = numbers[op.group.uid], numbers["p2p", op.group.uid]
        one = Issued(op, rank, tuple(slots), *seqs, created, after)
        if rank in self.gpu_stop:
            first, reach = self.gpu_stop[rank]
            one.hidden = len(mine) >= first
            if len(mine) >= first + reach:
                one.after = (one,)  # it never starts
        for key in (*comms, *["stream"] * op.blocks_stream, *["host"] * op.blocks_host):
            last[key] = one
        for earlier in one.after:
            earlier.then.append(one)
        for slot in slots:
            self.slots[slot][rank] = one
        mine.append(one)
        self._todo.append(one)
        return True

    def _start(self, one: Issued) -> None:
        if one.started is None:
            if any(earlier.completed is None for earlier in one.after):
                return
            ends = [earlier.completed or 0 for earlier in one.after]
            one.started = max(one.created, *ends, 0) + 20_000
        partners = {one}
        for slot in one.slots:
            partners.update(self.slots[slot].values())
        for each in partners:
            if each.completed is None and each.started is not None:
                self._complete(each)

    def _complete(self, one: Issued) -> None:
        latest = 0
        for slot in one.slots:
            there = self.slots[slot]
            members = len(one.op.group.ranks) if len(slot) == 2 else 2
            starts = [each.started for each in there.values()]
            if len(there) < members or None in starts or self.mismatch(slot):
                return
            latest = max(latest, *(start for start in starts if start is not None))
        one.completed = latest + 30_000
        self._todo += one.then

    def mismatch(self, slot: Slot) -> str:
        """Return how the ops of a slot differ: "" if they agree."""
        there = list(self.slots[slot].values())
        if len(slot) == 2:
            return next(filter(None, (there[0].op.differs(o.op) for o in there)), "")
        sizes = {part.numel for one in there for part in _parts_of(one, slot)}
        return "size mismatch" if len(sizes) > 1 else ""

    def waiting_for(self, rank: int) -> list[tuple[int, Issued]]:
        """Return who waits for `rank` in an op that it has not issued, and the op."""
        found = []
        for slot, there in self.slots.items():
            members = self.job.groups[slot[0]].ranks if len(slot) == 2 else slot[1:3]
            if rank in members and rank not in there:
                found += [(who, one) for who, one in there.items()]
        return found


def _parts_of(one: Issued, slot: Slot) -> list:
    return [
        part for part, mine in zip(one.op.parts, one.slots, strict=True) if mine == slot
    ]
