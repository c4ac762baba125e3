"""One random fault in one random job, and what the dumps can tell of it.

What they cannot tell apart is not asked for: the truth then has several answers, or
"not known" is one. A fault of which nothing can be seen is drawn again.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tests.backends.post_mortem.dump_files import Form
from tests.backends.post_mortem.simulation import Issued, Simulation
from tests.backends.post_mortem.training_job import Layout, Op, make_job
from tests.backends.post_mortem.truth import (
    CYCLE,
    EXECUTION,
    GONE,
    MISMATCH,
    MISSING,
    Truth,
)

__all__ = ["CUT_OFF", "FAULTS", "MORE_FAULTS", "DrawAgainError", "Drawn"]

#: A barrier has no size, and the sizes of an all_to_all differ as they like.
_SIZELESS = ("all_reduce_barrier", "all_to_all")
#: A pickle that names a class, which no reader of dumps may load.
_REFUSED = pickle.dumps(Exception("not a dump"))
_DAMAGED = b"\x80\x02}q\x00("
#: Stands for the first half of the rank's own dump.
CUT_OFF = b"half"


class DrawAgainError(Exception):
    """The fault has no place in this job, or nothing of it can be seen."""


class Drawn:
    """A job, the form of its dumps, and (made by `FAULTS`) its run and truth."""

    def __init__(self, seed: str, fault: str, more: bool = False) -> None:
        self.random, self.fault = random.Random(seed), fault
        #: Whether jobs have experts and chunks, too.
        self.more = more
        self.form = self._form()
        self.job = make_job(self._layout())
        ahead = self.random.choice((1, 1, 3, 8, 64, 1024))
        if self.form.kind == "gloo":
            ahead = 1
        elif fault.startswith("gpu"):
            ahead = max(ahead, 3)
        self.run = Simulation(self.job, self.random.randrange(1 << 30), ahead)
        self.programs, self.world = self.run.programs, range(self.job.layout.world)
        #: Ranks without a dump, and what there is instead.
        self.absent: set[int] = set()
        self.instead: dict[int, bytes] = {}
        self.truth = Truth()
        (FAULTS | MORE_FAULTS)[fault](self)
        if not self.form.ring:
            self._fill_ring()

    def _form(self) -> Form:
        pick = self.random.choice
        kind = pick(
            ["full"] * 4
            + ["active"] * 2
            + ["json"] * 2
            + ["gloo"] * (self.fault in _GLOO)
        )
        active, gloo = kind == "active", kind == "gloo"
        names = (
            "nccl_trace_rank_{rank}",
            "nccl_trace_rank_{host}_{rank}",
            "{host}_{rank}",
            "_dump_{rank}",
        )
        away = [self.random.randrange(-4_000_000_000, 4_000_000_000) for _ in range(8)]
        return Form(
            kind,
            "2.10" if gloo else pick(("2.4", "2.9", "2.10", "2.10")),
            "rank_{rank}.json" if kind == "json" else pick(names),
            frames=not active and pick((True, True, True, gloo)),
            library_frames=gloo or pick((True, False)),
            timing=not active and pick((True, True, False)),
            p2p_in_status=pick((True, False)),
            ring=pick((0, 2000, 2000)),
            empty_sizes=pick((True, False)),
            clocks=pick(((0,), (0,), tuple(away))),
        )

    def _layout(self) -> Layout:
        pick, gloo, fault = self.random.choice, self.form.kind == "gloo", self.fault
        while True:
            layout = Layout(
                tp=pick((1, 2, 2, 4, 8)),
                cp=pick((2, 2, 3, 4) if fault == "cycle" else (1, 1, 1, 2, 3)),
                dp=pick((1, 2, 2, 3, 4)),
                pp=1
                if gloo
                else pick((2, 2, 3, 4) if fault in _PIPELINE else (1, 1, 2, 2, 4)),
                steps=pick((2, 2, 3)),
                microbatches=pick((1, 2, 3, 4)),
                layers=pick((1, 1, 2)),
                pipeline=pick(("batch", "batch", "blocking", "isend")),
                pipeline_on_default=pick((True, False, False)),
                syncs=not fault.startswith("gpu") and pick((True, False)),
                ring=not gloo and (fault == "cycle" or pick((True, False, False))),
                overlap=pick((True, False, False)),
                style=pick(range(60)),
            )
            if 4 <= layout.world <= pick((8, 16, 16, 16, 16, 32, 64)):
                break
        if self.more:
            layout = replace(layout, experts=pick((False, True)))
        if self.more and layout.pp > 1:
            layout = replace(layout, chunks=pick((1, 2)))
        return layout

    def _fill_ring(self) -> None:
        """Make the recorder's ring so small that it has lost ops, none in flight."""
        needed = 0
        for rank in self.world:
            first = next(
                (
                    n
                    for n, one in enumerate(self.run.issued[rank])
                    if not one.seen_complete
                ),
                None,
            )
            last = self.run.issued[rank][first:] if first is not None else []
            needed = max(needed, sum(len(one.op.parts) + 1 for one in last))
        self.form = replace(self.form, ring=needed + self.random.randrange(4, 40))

    # What a fault changes, before the run.

    def place(self, wanted: Callable[[Op], bool] = lambda op: True) -> tuple[int, int]:
        """Draw a rank and one of the ops in the later part of its program."""
        early = self.random.choice((3, 4, 100))
        for _ in range(100):
            rank = self.random.choice(self.world)
            program = self.programs[rank]
            index = self.random.randrange(len(program) // early, len(program))
            if wanted(program[index]):
                return rank, index
        raise DrawAgainError

    def lose_a_file(self, guilty: Iterable[int]) -> None:
        """Lose files of innocent ranks now and then, which proves nothing."""
        innocent = [*{*self.world} - {*guilty}]
        if not self.absent and innocent and self.random.random() < 0.15:
            for rank in self.random.sample(innocent, 1 + len(innocent) // 8):
                self.absent.add(rank)
                self.instead[rank] = self.random.choice((b"", _DAMAGED, _REFUSED))

    # What can be seen, after the run.

    def waiting(self, rank: int) -> list[Issued]:
        """Return the ops that show in which others wait for `rank`."""
        gloo = self.form.kind == "gloo"
        return [
            one
            for who, one in self.run.waiting_for(rank)
            if who not in self.absent and not (gloo and one.op.parts)
        ]

    def pending(self, rank: int) -> list[Issued]:
        return [one for one in self.run.issued[rank] if not one.seen_complete]

    def ring_of(self, rank: int) -> set[int]:
        """Return the ranks that wait for `rank` and for which it waits."""
        waits: dict[int, set[int]] = {one: set() for one in self.world}
        for slot, there in self.run.slots.items():
            members = self.job.groups[slot[0]].ranks if len(slot) == 2 else slot[1:3]
            late = {m for m in members if m not in there or there[m].started is None}
            for who, one in there.items():
                if one.completed is None:
                    waits[who] |= late - {who}

        def reached(start: int) -> set[int]:
            found: set[int] = set()
            todo = [start]
            while todo:
                new = waits[todo.pop()] - found
                found |= new
                todo += new
            return found

        return {rank} | {one for one in reached(rank) if rank in reached(one)}

    # The truth.

    def stopped(self, ranks: Sequence[int], kinds: frozenset[str]) -> None:
        """Set the truth for ranks that stopped: those that others wait for."""
        seen = [rank for rank in ranks if self.waiting(rank)]
        waits = [one for rank in seen for one in self.waiting(rank)]
        if not seen:
            raise DrawAgainError
        if self.form.kind == "gloo":
            # The members of a group are known by the ops that they had before.
            unseen = self.absent and len(self.job.groups) > 1
            if unseen or min(one.seq for one in waits) == 1:
                raise DrawAgainError
        self.truth.name(one.op for one in waits)
        # An op in flight does not tell whether its rank waits for it in Python, and
        # of a rank without a dump nothing tells that it does not wait for another.
        busy = {r for r in seen if self.pending(r) and r not in self.absent}
        sure = {*seen} - busy - self.absent or {*seen} - busy
        self.truth.add(kinds, {*seen} - busy or seen, ranks)
        if sure:
            self.truth.add(kinds, sure, ranks)
            return
        for rank in busy:
            self.truth.add(CYCLE | kinds, {rank}, self.ring_of(rank) | {*ranks})
        self.truth.unknown = True

    def mismatched(self, ranks: Iterable[int], kinds: frozenset[str]) -> bool:
        """Set the truth from the first collective in which `ranks` differ."""
        ranks = {*ranks}
        for slot, there in self.run.slots.items():
            odd = [rank for rank in there if rank in ranks]
            rest = [rank for rank in there if rank not in ranks | self.absent]
            if len(slot) > 2 or not odd or not rest or not self.run.mismatch(slot):
                continue
            self.truth.name(one.op for one in there.values())
            if len(rest) > len(odd):
                self.truth.add(kinds, odd)
            else:  # neither side is the majority of those who are there
                self.truth.add(kinds, odd, odd)
                self.truth.add(kinds, (), self.job.groups[slot[0]].ranks)
                self.truth.unknown = True
            return True
        return False

    def out_of_step(self, rank: int, members: Iterable[int]) -> None:
        """Set the truth for a rank that is elsewhere than its peers in `members`."""
        here = [*self.waiting(rank), *self.pending(rank)]
        if not here:
            raise DrawAgainError
        self.truth.name(one.op for one in here)
        kinds = MISSING | CYCLE | MISMATCH
        self.truth.add(kinds, {rank})
        if self.pending(rank) or not self.waiting(rank):
            # Seen from outside, each of a cycle waits for the next.
            self.truth.add(CYCLE, {rank}, self.ring_of(rank))
            self.truth.unknown = self.form.kind == "active" or not self.waiting(rank)
            if len({*members}) == 2:  # either of two may be the one out of step
                self.truth.add(kinds, (), members)
                self.truth.unknown = True


def _stop(drawn: Drawn) -> None:
    """Stop a rank in Python before an op: it hangs, is killed, or has left."""
    rank, index = drawn.place()
    del drawn.programs[rank][index:]
    drawn.run.run()
    if drawn.fault == "killed" or (
        drawn.fault == "left" and drawn.random.random() < 0.5
    ):
        drawn.absent.add(rank)
    drawn.lose_a_file({rank})
    drawn.stopped([rank], MISSING if drawn.fault == "stop" else GONE)


def _two(drawn: Drawn) -> None:
    """Stop two ranks, neither of which waits for the other."""
    places = dict(drawn.place() for _ in range(2))
    for rank, index in places.items():
        del drawn.programs[rank][index:]
    drawn.run.run()
    if drawn.random.random() < 0.3:
        drawn.absent.add(min(places))
    stopped = [
        rank for rank in places if drawn.run.reached_end(rank) and drawn.waiting(rank)
    ]
    if len(stopped) < 2:
        raise DrawAgainError
    drawn.stopped(stopped, GONE if drawn.absent else MISSING)


def _stage(drawn: Drawn) -> None:
    """Have all ranks of a pipeline stage late at the same op."""
    rank, index = drawn.place()
    late = [one for one in drawn.world if drawn.job.stage(one) == drawn.job.stage(rank)]
    for one in late:
        del drawn.programs[one][index:]
    drawn.run.run()
    drawn.stopped(late, MISSING)


def _gpu(drawn: Drawn) -> None:
    """Stop a rank's GPU in an op that its peers complete."""
    rank, index = drawn.place(lambda op: not op.parts)
    drawn.run.gpu_stop[rank] = index, drawn.random.choice((1, 1, 2, 5, 1000))
    if drawn.job.layout.pipeline_on_default:  # or the status counts two things
        drawn.form = replace(drawn.form, p2p_in_status=False)
    drawn.run.run()
    stuck = [one for one in drawn.pending(rank) if one.completed and not one.op.parts]
    if not stuck:
        raise DrawAgainError
    drawn.lose_a_file({rank, *stuck[0].op.group.ranks})
    drawn.truth.name(one.op for one in stuck)
    drawn.truth.add(EXECUTION, [rank])


def _gpu_before(drawn: Drawn) -> None:
    """Stop a rank's GPU before an op that all enter and nobody completes."""
    rank, index = drawn.place(lambda op: not op.parts)
    drawn.run.gpu_stop[rank] = index, 0
    op = drawn.programs[rank][index]
    drawn.run.run()
    there = [one for one in drawn.pending(rank) if one.op is op]
    if not there or len(drawn.run.slots[there[0].slots[0]]) < len(op.group.ranks):
        raise DrawAgainError
    drawn.truth.name([op])
    drawn.truth.add(EXECUTION, [rank])
    drawn.truth.add(EXECUTION, (), drawn.world)
    drawn.truth.add(MISSING, [rank])  # it comes to none of its later ops
    drawn.truth.unknown = True


def _mismatch(drawn: Drawn) -> None:
    """Let a rank, or up to half of a group, issue another op, size or dtype."""
    some = drawn.fault.startswith("some")
    how = (
        drawn.random.choice(sorted(MISMATCH - {"order mismatch"}))
        if some
        else drawn.fault
    )
    few = 3 if some else 0
    rank, index = drawn.place(
        lambda op: (
            not op.parts
            and len(op.group.ranks) > few
            and (how == "op mismatch" or op.name not in _SIZELESS)
        )
    )
    op, program = drawn.programs[rank][index], drawn.programs[rank]
    extra = drawn.random.choice((1, 8, op.numel))

    def other(op: Op) -> Op:
        if how == "op mismatch":
            name = "all_reduce" if op.name == "broadcast" else "broadcast"
            return replace(op, name=name, line=op.line + 4)
        if how == "size mismatch":
            return replace(op, numel=op.numel + extra)
        return replace(op, dtype="Double" if op.dtype == "Half" else "Half")

    odd = [rank]
    if some:
        members = op.group.ranks
        odd = drawn.random.sample(members, drawn.random.randint(1, len(members) // 2))
    number = sum(one.group == op.group and not one.parts for one in program[:index])
    for one in odd:
        own = drawn.programs[one]
        places = [
            i for i, it in enumerate(own) if it.group == op.group and not it.parts
        ]
        own[places[number]] = other(own[places[number]])
    drawn.run.run()
    drawn.lose_a_file(odd)
    if not drawn.mismatched(odd, frozenset({how})):
        raise DrawAgainError


def _skip(drawn: Drawn) -> None:
    """Let a rank skip a collective, a send or a receive."""
    p2p = drawn.fault == "skip p2p"
    rank, index = drawn.place(lambda op: bool(op.parts) == p2p)
    op = drawn.programs[rank].pop(index)
    drawn.run.run()
    if not drawn.mismatched([rank], MISMATCH | MISSING | CYCLE):
        drawn.out_of_step(
            rank, {rank, *(p.peer for p in op.parts)} if p2p else op.group.ranks
        )


def _swap(drawn: Drawn) -> None:
    """Let a rank issue two neighbouring ops in the other order."""
    rank, index = drawn.place(lambda op: not op.parts)
    program = drawn.programs[rank]
    if index + 1 == len(program):
        raise DrawAgainError
    one, other = program[index], program[index + 1]
    same = drawn.fault == "order in a group"
    common = {*one.group.ranks} & {*other.group.ranks}
    if other.parts or (one.group == other.group) != same or len(common) < 2:
        raise DrawAgainError
    if same and not one.differs(other):
        raise DrawAgainError
    program[index : index + 2] = other, one
    drawn.run.run()
    if not drawn.mismatched([rank], MISMATCH):
        drawn.out_of_step(rank, common)


def _p2p_size(drawn: Drawn) -> None:
    """Let a rank send or expect another number of elements."""
    rank, index = drawn.place(lambda op: bool(op.parts))
    op = drawn.programs[rank][index]
    part = drawn.random.choice(op.parts)
    new = replace(part, numel=part.numel + drawn.random.choice((8, part.numel)))
    parts = tuple(new if one is part else one for one in op.parts)
    drawn.programs[rank][index] = replace(op, parts=parts)
    drawn.run.run()
    if not any(drawn.run.mismatch(slot) for slot in drawn.run.slots if len(slot) > 2):
        raise DrawAgainError
    drawn.truth.name([op])
    for must in ({rank, part.peer}, ()):
        drawn.truth.add(frozenset({"size mismatch"}), must, {rank, part.peer})


def _cycle(drawn: Drawn) -> None:
    """Let all ranks of a ring send first, or receive first."""
    rank, index = drawn.place(lambda op: op.file == "ring.py")
    first, group = (
        drawn.random.choice(("send", "recv")),
        drawn.programs[rank][index].group,
    )
    for one in group.ranks:
        own = drawn.programs[one]
        at = index - 1 if own[index - 1].file == "ring.py" else index
        if {own[at].name, own[at + 1].name} != {"send", "recv"}:
            raise DrawAgainError
        own[at : at + 2] = sorted(own[at : at + 2], key=lambda op: op.name != first)
    drawn.run.run()
    if any(not drawn.pending(one) for one in group.ranks):
        raise DrawAgainError
    drawn.truth.name(drawn.pending(one)[0].op for one in group.ranks)
    drawn.truth.add(CYCLE, group.ranks)


def _healthy(drawn: Drawn) -> None:
    """Dump a job that does not hang, when it pauses or, each rank a little later."""
    drawn.run.run()
    if drawn.fault == "healthy":
        drawn.lose_a_file(())
        return
    end = min(mine[-1].created for mine in drawn.run.issued)
    now = drawn.random.randrange(end // 3, end)
    skew = drawn.random.choice((300_000, 3_000_000, 30_000_000))
    cuts = {rank: now + drawn.random.randrange(skew) for rank in drawn.world}
    drawn.form = replace(drawn.form, cuts=cuts, kind="full", ring=2000)
    for there in drawn.run.slots.values():
        young = [
            w
            for w, one in there.items()
            if one.created <= cuts[w] < (one.completed or 0)
        ]
        late = [w for w, one in there.items() if one.created > cuts[w]]
        for rank in late if young else ():
            if not _is_older(drawn, rank, cuts):
                raise DrawAgainError
    # An op that all are in: that it is young, the files do not tell.
    drawn.truth.unknown = True
    drawn.truth.add(EXECUTION, (), drawn.world)


def _is_older(drawn: Drawn, rank: int, cuts: dict[int, int]) -> bool:
    """Return whether others have completed an op that a dump does not have yet."""
    return any(
        (one.completed or 0) <= cuts[who]
        for there in drawn.run.slots.values()
        if rank in there and there[rank].created > cuts[rank]
        for who, one in there.items()
    )


def _cut_off(drawn: Drawn) -> None:
    """Stop a rank whose dump is cut off: it died while it wrote."""
    rank, index = drawn.place()
    del drawn.programs[rank][index:]
    drawn.run.run()
    drawn.absent.add(rank)
    drawn.instead[rank] = CUT_OFF
    drawn.stopped([rank], GONE)


def _host_lost(drawn: Drawn) -> None:
    """Stop a rank, and lose the dumps of one host with others."""
    rank, index = drawn.place()
    del drawn.programs[rank][index:]
    hosts = {drawn.form.host(one) for one in drawn.world} - {drawn.form.host(rank)}
    if not hosts:
        raise DrawAgainError
    lost = drawn.random.choice(sorted(hosts))
    drawn.run.run()
    drawn.absent |= {one for one in drawn.world if drawn.form.host(one) == lost}
    drawn.stopped([rank], MISSING)
    # A rank that is lost may be in an earlier op for which nobody else waits.
    drawn.truth.unknown = True


def _early(drawn: Drawn) -> None:
    """Stop a rank, and dump another one before the job hung."""
    rank, index = drawn.place()
    del drawn.programs[rank][index:]
    drawn.run.run()
    early = drawn.random.choice([one for one in drawn.world if one != rank])
    mine = drawn.run.issued[early]
    if not mine:
        raise DrawAgainError
    cuts = dict.fromkeys(drawn.world, 1 << 61)
    cuts[early] = drawn.random.randrange(mine[-1].created + 1)
    drawn.form = replace(drawn.form, cuts=cuts, kind="full", ring=2000)
    drawn.stopped([rank], MISSING)
    late = [one for one in mine if one.created > cuts[early]]
    if any(who != early for who, _ in drawn.run.waiting_for(rank)):
        # Who has completed a collective that the dump does not have yet proves it.
        proven = any(
            who != early and one.completed is not None
            for it in late
            if not it.op.parts
            for who, one in drawn.run.slots[it.slots[0]].items()
        )
        if proven or not late:
            drawn.truth.unknown = True
            return
    drawn.truth.unknown = True
    drawn.truth.add(MISSING | EXECUTION, (), {rank, early})


def _two_kinds(drawn: Drawn) -> None:
    """Let one rank issue another dtype, and another one stop or its GPU stop."""
    rank, index = drawn.place(
        lambda op: not op.parts and len(op.group.ranks) > 2 and op.name not in _SIZELESS
    )
    op = drawn.programs[rank][index]
    drawn.programs[rank][index] = replace(
        op, dtype="Double" if op.dtype == "Half" else "Half"
    )
    other, later = drawn.place()
    if other == rank:
        raise DrawAgainError
    del drawn.programs[other][later:]
    drawn.run.run()
    if not drawn.mismatched([rank], MISMATCH | MISSING | CYCLE):
        raise DrawAgainError
    if not drawn.waiting(other) or not drawn.run.reached_end(other):
        raise DrawAgainError
    drawn.truth.name(one.op for one in drawn.waiting(other))
    kinds = MISMATCH | MISSING | CYCLE
    for answer in [*drawn.truth.answers]:
        drawn.truth.add(kinds, answer.must | {other}, answer.may)
    drawn.truth.add(kinds, {other})


def _gpu_and_stop(drawn: Drawn) -> None:
    """Stop the GPU of one rank, and another rank in Python."""
    rank, index = drawn.place(lambda op: not op.parts)
    drawn.run.gpu_stop[rank] = index, 1
    if drawn.job.layout.pipeline_on_default:  # or the status counts two things
        drawn.form = replace(drawn.form, p2p_in_status=False)
    other, later = drawn.place()
    if other == rank:
        raise DrawAgainError
    del drawn.programs[other][later:]
    drawn.run.run()
    stuck = [one for one in drawn.pending(rank) if one.completed and not one.op.parts]
    if not stuck or not drawn.waiting(other) or not drawn.run.reached_end(other):
        raise DrawAgainError
    drawn.truth.name(one.op for one in (*stuck, *drawn.waiting(other)))
    kinds = EXECUTION | MISSING
    for ranks in {rank, other}, {rank}, {other}:
        drawn.truth.add(kinds, ranks)


FAULTS: dict[str, Callable[[Drawn], None]] = {
    "stop": _stop,
    "killed": _stop,
    "left": _stop,
    "two stop": _two,
    "stage late": _stage,
    "gpu": _gpu,
    "gpu, all in": _gpu_before,
    "op mismatch": _mismatch,
    "size mismatch": _mismatch,
    "dtype mismatch": _mismatch,
    "some mismatch": _mismatch,
    "skip": _skip,
    "skip p2p": _skip,
    "order in a group": _swap,
    "order of groups": _swap,
    "p2p size": _p2p_size,
    "cycle": _cycle,
    "healthy": _healthy,
    "healthy, skew": _healthy,
}
#: Drawn beside the others from seed 100,000 on: those before keep their cases.
MORE_FAULTS: dict[str, Callable[[Drawn], None]] = {
    "cut off": _cut_off,
    "host lost": _host_lost,
    "early dump": _early,
    "two kinds": _two_kinds,
    "gpu and stop": _gpu_and_stop,
}
_GLOO = {
    "stop",
    "killed",
    "left",
    "two stop",
    "op mismatch",
    "size mismatch",
    "dtype mismatch",
    "some mismatch",
    "skip",
    "healthy",
}
_PIPELINE = {"stage late", "skip p2p", "p2p size"}
