"""Jobs that hang, made up: what the page of a report shows in the tests."""

from __future__ import annotations

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.evidence import (
    Evidence,
    Group,
    GroupEvidence,
    IssuedOp,
    Progress,
    RankEvidence,
    SourceLine,
)
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.backends.post_mortem.evidence_file import EvidenceFile
from rankscope.backends.post_mortem.report import Report

__all__ = ["EVIL", "eight", "many", "nothing"]

#: A name of a group that somebody chose to run a script, and to be long.
EVIL = "<script>document.title='owned'</script>\x1b[31m\u202e" + "tensor_parallel_" * 12

_STEP = SourceLine("/job/train.py", 88, "train_step")
_LOADER = SourceLine("/job/data.py", 77, "next_batch")
_SECOND = 1_000_000_000


def _ops(last: int, hangs: bool, op: str, line: SourceLine) -> tuple[IssuedOp, ...]:
    """Return the ops up to `last`, of which the last one hangs."""
    return tuple(
        IssuedOp(
            op,
            seq,
            order=seq,
            state="started" if hangs and seq == last else "completed",
            retired=not (hangs and seq == last),
            line=line,
            created_ns=seq * _SECOND,
            started_ns=seq * _SECOND,
        )
        for seq in range(max(1, last - 9), last + 1)
    )


def _rank(
    rank: int, group: Group, last: int, hangs: bool, op: str = "all_reduce"
) -> RankEvidence:
    known = GroupEvidence(
        _ops(last, hangs, op, _STEP), Progress(last, last, last - hangs), True
    )
    return RankEvidence(
        rank,
        {group: known},
        recorded=True,
        process=f"pid {4000 + rank} on node{rank // 8:02}",
        read_ns=(last + 600) * _SECOND,
        source=f"dumps/nccl_trace_rank_{rank}",
    )


def _missing(
    rank: int, group: Group, text: str, consequences: tuple[str, ...]
) -> Verdict:
    waiting = tuple(one for one in group.ranks if one != rank)
    key = GroupKey(group.name, group.ranks)
    return Verdict(
        Fault.MISSING_RANKS,
        key,
        (rank,),
        waiting,
        "all_reduce",
        13,
        text,
        consequences=consequences,
    )


def eight() -> Report:
    """Return a job of 8 ranks: rank 5 is in its data loader, the others wait."""
    group = Group("default_pg", tuple(range(8)), "0")
    ranks = {n: _rank(n, group, 13, True) for n in range(8) if n != 5}
    ranks[5] = RankEvidence(
        5,
        _rank(5, group, 12, False).groups,
        recorded=True,
        location=_LOADER,
        called="wait of threading.py",
        process="pid 4005 on node00",
        source="dumps/nccl_trace_rank_5",
    )
    files = [
        EvidenceFile(f"dumps/nccl_trace_rank_{n}", "flight recorder", (n,))
        for n in range(8)
    ]
    files += [
        EvidenceFile("stacks/rank5.txt", "py-spy stacks", (5,)),
        EvidenceFile(
            "torchrun.log",
            "torchrun log",
            (0, 1, 2, 3, 4, 6, 7),
            "it has no line of rank 5: it may be cut",
        ),
        EvidenceFile("notes.md", "not known", (), "nothing that is known"),
    ]
    finding = _missing(
        5,
        group,
        "rank 5 has not entered all_reduce #13 of default_pg (train.py:88): it is at "
        "data.py:77 in wait of threading.py; ranks 0–4, 6–7 wait in it",
        (),
    )
    return Report((finding,), tuple(files), Evidence(ranks, (group,), 8))


def many(count: int = 1024) -> Report:
    """Return a large job: a tp group for each 8 ranks, and all of it waits.

    Rank 517 raised, 3 ranks left no file, and one group has a name that is an attack.
    """
    world = Group("default_pg", tuple(range(count)), "0")
    groups = [world]
    ranks: dict[int, RankEvidence] = {}
    for first in range(0, count, 8):
        name = EVIL if first == 512 else "tp"
        tp = Group(name, tuple(range(first, first + 8)), f"tp{first}")
        groups.append(tp)
        for rank in tp.ranks:
            late = rank == 517
            here = _rank(rank, tp, 210 - late, not late and first == 512)
            waits = _rank(rank, world, 42, first != 512, "reduce_scatter_tensor")
            ranks[rank] = RankEvidence(
                rank,
                {**here.groups, **waits.groups},
                recorded=True,
                process=here.process,
                read_ns=here.read_ns,
                source=here.source,
            )
    gone = ranks[517]
    ranks[517] = RankEvidence(
        517,
        gone.groups,
        recorded=True,
        exception="ValueError: batch 210 has the shape <b>(0, 4096)</b>",
        exception_line=SourceLine("/job/model/attention.py", 311, "forward"),
        process=gone.process,
    )
    for rank in (9, 640, 641):
        del ranks[rank]
    files = [
        EvidenceFile(f"dumps/nccl_trace_rank_{n}", "flight recorder", (n,))
        for n in ranks
    ]
    files.append(
        EvidenceFile(
            "dumps/nccl_trace_rank_9", "flight recorder", (9,), "its pickle is cut"
        )
    )
    finding = _missing(
        517,
        next(one for one in groups if one.name == EVIL),
        f"rank 517 has not entered all_reduce #210 of {EVIL[:40]} (train.py:88): it "
        "has raised ValueError at attention.py:311",
        (
            "ranks 512–516, 518–519 wait for it in all_reduce #210 (train.py:88)",
            "1,013 ranks wait in default_pg reduce_scatter_tensor #42 (train.py:88)",
        ),
    )
    evidence = Evidence(ranks, tuple(groups), count)
    return Report((finding,), tuple(files), evidence)


def nothing() -> Report:
    """Return a healthy job of two ranks."""
    group = Group("default_pg", (0, 1), "0")
    ranks = {n: _rank(n, group, 13, False) for n in range(2)}
    return Report((), (), Evidence(ranks, (group,), 2))
