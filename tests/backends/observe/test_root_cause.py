"""The rules on root causes, each on evidence that shows it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from rankscope.backends.groups.inquiry import AT_ITS_END
from rankscope.backends.observe.evidence import (
    Arrays,
    Evidence,
    Group,
    GroupEvidence,
    IssuedOp,
    Progress,
    RankEvidence,
    SourceLine,
    combine,
)
from rankscope.backends.observe.root_cause import find_root_causes
from rankscope.backends.observe.root_cause.facts import exceptions
from rankscope.backends.observe.root_cause.graph import (
    final_components,
    is_acyclic,
    shortest_cycle,
)
from rankscope.backends.observe.verdicts import Fault, Verdict, Waiting

WORLD = Group("world", (0, 1, 2, 3))
TP0, TP1 = Group("tp", (0, 1)), Group("tp", (2, 3))
DP0, DP1 = Group("dp", (0, 2)), Group("dp", (1, 3))
TP = {0: TP0, 1: TP0, 2: TP1, 3: TP1}
DP = {0: DP0, 2: DP0, 1: DP1, 3: DP1}


class Rank:
    """The ops of one rank, in the order of issue."""

    def __init__(self, rank: int, groups: Sequence[Group] = (), **facts: Any) -> None:
        self.rank, self.facts = rank, facts
        self.whole = True
        self.ends_sends = False
        self.ops: dict[Group, list[IssuedOp]] = {
            group: [] for group in (WORLD, *groups)
        }
        self.order = 0

    def issue(
        self,
        op: str = "all_reduce",
        group: Group = WORLD,
        *,
        done: bool = False,
        size: int = 8,
        dtype: str = "Float",
        line: int = 10,
        peer: int | None = None,
        **how: Any,
    ) -> Rank:
        p2p = peer is not None
        ops = self.ops.setdefault(group, [])
        arrays = Arrays(((size,),), ((size,),), (dtype,), (dtype,))
        self.order += 1
        ops.append(
            IssuedOp(
                op,
                sum(one.is_p2p == p2p for one in ops) + 1,
                self.order,
                "completed" if done else how.pop("state", "scheduled"),
                done,
                p2p,
                peer,
                arrays,
                line=SourceLine("/job/train.py", line),
                **how,
            )
        )
        return self

    def evidence(self) -> RankEvidence:
        groups = {
            group: GroupEvidence(
                tuple(ops),
                Progress() if self.whole else Progress(len(ops)),
                lists_all_in_flight=True,
                lists_all=self.whole,
                ends_sends=self.ends_sends,
            )
            for group, ops in self.ops.items()
        }
        return RankEvidence(self.rank, groups, recorded=True, **self.facts)


def four(**facts: Any) -> list[Rank]:
    return [Rank(rank, (TP[rank], DP[rank]), **facts) for rank in range(4)]


def look(ranks: Sequence[Rank], *more: RankEvidence) -> list[Verdict]:
    evidence = combine([*(one.evidence() for one in ranks), *more], len(ranks))
    found = find_root_causes(evidence)
    # The order in which ranks are known changes nothing.
    turned = Evidence(
        dict(reversed(list(evidence.ranks.items()))),
        evidence.groups,
        evidence.world_size,
    )
    assert [str(one) for one in find_root_causes(turned)] == [str(one) for one in found]
    return found


def only(verdicts: Sequence[Verdict]) -> Verdict:
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def test_nothing_in_flight_is_no_hang() -> None:
    ranks = four()
    for one in ranks:
        one.issue(done=True)
    assert look(ranks) == []


def test_a_missing_rank_and_what_follows_from_it() -> None:
    """Rank 1 does not come to its tensor-parallel group: data-parallel groups wait."""
    ranks = four()
    for one in ranks:
        for line in (60, 60, 60):
            if one.rank != 1 or line != 60 or one.order < 2:
                one.issue(group=TP[one.rank], line=line, done=one.order < 2)
        if one.rank > 1:
            one.ops[TP[one.rank]][-1] = Rank(9).issue(done=True).ops[WORLD][0]
    for one in ranks[2:]:
        one.ops[TP[one.rank]] = []
        one.issue(group=TP1, done=True).issue(group=DP[one.rank], line=70)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (1,))
    assert (found.group.name, found.seq, found.line) == ("tp", 3, "train.py:60")
    assert "it issued 2 of 3 all_reduces of train.py:60" in found.text
    # Groups of one name are told with their ranks, in one line.
    dp = "of groups 'dp (0,2)' and 'dp (1,3)' (train.py:70) for ranks 0–1"
    assert found.consequences == (f"ranks 2–3 wait in all_reduce #1 {dp}",)
    # For the picture: who waits for it, and where it is.
    (waits,) = (one for one in found.waits if one.group == "tp (0–1)")
    assert (waits.ranks, waits.op) == ((0,), "all_reduce #3")
    assert [one.ranks for one in found.absent] == [(1,)]
    assert "issued 2 of 3 all_reduces" in found.absent[0].where


def test_what_several_absent_ranks_issued_is_told_once() -> None:
    ranks = four()
    for one in ranks:
        one.issue(done=True)
    for one in ranks[:2]:
        one.issue()
    what = "they issued 1 of 2 all_reduces of train.py:10, and all_reduce #1 of group "
    assert what in only(look(ranks)).text


def test_of_many_absent_ranks_in_many_pieces_the_first_are_named() -> None:
    ranks = [Rank(rank) for rank in range(60)]
    wide = Group("wide", (*range(60),))
    for one in ranks:
        one.issue(group=wide, done=bool(one.rank % 3 == 0))
        if one.rank % 3:
            one.ops[wide] = [dataclasses.replace(one.ops[wide][0], seq=2)]
    found = only(look(ranks))
    assert found.culprits == (*range(0, 60, 3),)
    assert found.text.startswith("20 ranks (0, 3, 6, 9, 12, 15, …) have not entered ")


def test_a_mismatch_comes_before_everything() -> None:
    ranks = four()
    for one in ranks[:3]:
        one.issue("broadcast" if one.rank == 0 else "all_reduce")
    found = only([one for one in look(ranks) if one.fault is not Fault.MISSING_RANKS])
    assert (found.fault, found.culprits) == (Fault.OP_MISMATCH, (0,))
    assert found.op == "all_reduce"


def extra(rank: Rank, at: int, line: int, ops: int = 6) -> None:
    """Issue all but the last of `ops` from line 10, one more at number `at`."""
    for number in range(1, ops):
        if number == at:
            rank.issue(done=True, line=line)
        rank.issue(done=True)


def hang(rank: Rank) -> None:
    """Have the last op of `rank` in flight."""
    last = rank.ops[WORLD][-1]
    rank.ops[WORLD][-1] = dataclasses.replace(last, state="scheduled", retired=False)


def test_an_op_too_many_that_is_like_the_others() -> None:
    """Nothing differs but the line: rank 2 waits where the others have ended."""
    ranks = four()
    for one in ranks:
        extra(one, 3 if one.rank == 2 else 0, line=77)
    hang(ranks[2])
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.OP_MISMATCH, (2,))
    assert (found.seq, found.line) == (3, "train.py:10")
    assert found.text == (
        "rank 2 issued all_reduce #3 of group 'world' (train.py:77) while ranks 0–1, "
        "3 issued all_reduce #3 (train.py:10)"
    )
    assert found.consequences == (
        "rank 2 waits in all_reduce #6 of group 'world' (train.py:10) for ranks 0–1, 3",
    )


@pytest.mark.parametrize(
    ("odd", "facts"),
    [
        pytest.param((2, 3), {}, id="half of the ranks"),
        pytest.param((2,), {"exception": "ValueError: no"}, id="the others raise"),
    ],
)
def test_an_op_too_many_is_named_only_where_nothing_else_is_known(
    odd: tuple[int, ...], facts: dict[str, Any]
) -> None:
    ranks = [Rank(rank, **({} if rank in odd else facts)) for rank in range(4)]
    for one in ranks:
        extra(one, 3 if one.rank in odd else 0, line=77)
        if one.rank in odd:
            hang(one)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (
        Fault.MISSING_RANKS,
        tuple({0, 1, 2, 3} - {*odd}),
    )


def test_an_op_too_many_where_a_rank_has_no_records() -> None:
    ranks = four()
    for one in ranks:
        extra(one, 3 if one.rank == 2 else 0, line=77)
    hang(ranks[2])
    found = only(look([*ranks[:1], *ranks[2:]]))
    assert (found.fault, found.culprits) == (Fault.OP_MISMATCH, (2,))


@pytest.mark.parametrize(("line", "seq"), [(78, 6), (10, 7)])
def test_a_rank_that_has_left_the_lines_of_the_others_is_in_another_branch(
    line: int, seq: int
) -> None:
    """Its first op there was taken for theirs; the first ones are left out.

    Where it has come back to their lines, only that it is ahead is certain.
    """
    ranks = four()
    for one in ranks:
        extra(one, 0, line=0)
        one.issue(done=True, line=77 if one.rank == 2 else 70)
    ranks[2].issue(line=line)
    for one in ranks:
        del one.ops[WORLD][:2]
    found = only(look(ranks))
    assert (found.culprits, found.seq) == ((2,), seq)


def test_a_rank_ahead_of_all_others_has_issued_an_op_too_many() -> None:
    """Nothing differs, the line neither: its data had one batch more."""
    ranks = four()
    for one in ranks:
        one.issue(done=True)
    ranks[2].issue().issue(group=TP1)
    found = only(look(ranks))
    assert (found.fault, found.culprits, found.seq) == (Fault.OP_MISMATCH, (2,), 2)
    assert found.text == (
        "rank 2 issued all_reduce #2 of group 'world' (train.py:10), and no other rank "
        "has: all others are in no op"
    )


def test_a_rank_is_not_ahead_of_those_that_have_not_begun() -> None:
    """Rank 2 was told to have issued its first op too early."""
    ranks = four()
    ranks[2].issue()
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0, 1, 3))


def test_a_rank_that_waits_for_a_message_of_few_is_not_ahead_of_them() -> None:
    """Rank 0, a parameter server, was told to have issued an op that no other has."""
    server, *workers = ranks = four()
    for rank, one in enumerate(workers, 1):
        server.issue("recv", peer=rank, done=True)
        one.issue("send", peer=0, done=True)
    for rank, one in enumerate(workers, 1):
        server.issue("send", peer=rank, done=rank < 3)
        if rank < 3:
            one.issue("recv", peer=0, done=True)
    server.issue()
    assert only(look(ranks)).culprits == ()


def test_a_rank_ahead_in_a_group_of_two_is_told_by_groups_of_that_name() -> None:
    """Had rank 3 been late, ranks 0 and 1 would have had that op, too."""
    for late in False, True:
        ranks = four()
        for one in ranks:
            one.issue(group=TP[one.rank], done=True)
        ranks[2].issue(group=TP1)
        for one in ranks[:2] if late else ():
            one.issue(group=TP0, done=True)
        assert only(look(ranks)).culprits == ((3,) if late else (2,))


def test_a_rank_that_has_come_as_far_as_all_others_is_not_blamed() -> None:
    """Of their own pair, ranks 0 and 1 have no record; all others are in no op."""
    for late in False, True:
        ranks = [Rank(rank) for rank in range(4)]
        for one in ranks:
            for _ in range(1 if late and one.rank == 3 else 2):
                one.issue("broadcast", done=True)
        for one in ranks[2:]:
            one.issue(group=TP1, done=True)
        ranks[2].issue(group=TP1)
        found = only(look(ranks))
        assert found.culprits == ((3,) if late else ())
        assert found.fault is (Fault.MISSING_RANKS if late else Fault.UNDECIDED)


def test_a_rank_ahead_in_a_receive_is_told_by_pipelines_beside_its_own() -> None:
    for ours, theirs in ("recv", "send"), ("send", "recv"):
        for late in False, True:
            ranks = four()
            for first, second in ((0, 2), (1, 3), *[(1, 3)] * late):
                ranks[first].issue(ours, DP[first], peer=second, done=True)
                ranks[second].issue(theirs, DP[second], peer=first, done=True)
            ranks[0].issue(ours, DP0, peer=2)
            assert only(look(ranks)).culprits == ((2,) if late else (0,))


def test_a_lost_file_is_not_blamed_where_pipelines_differ() -> None:
    """Rank 1 has left out a message that rank 0 has sent in its own pipeline."""
    for left_out in False, True:
        ranks = four()
        for rank, other in (0, 2), (1, 3):
            ranks[rank].issue("recv", DP[rank], peer=other, done=True, line=5)
            if not (left_out and rank == 1):
                ranks[rank].issue("send", DP[rank], peer=other, done=True, line=6)
            ranks[rank].issue("recv", DP[rank], peer=other, done=True, line=7)
            ranks[rank].issue()
        ranks[2].issue()
        found = only(look(ranks[:3], RankEvidence(3)))
        assert found.culprits == (() if left_out else (3,))


@pytest.mark.parametrize("counted", [True, False])
def test_a_lost_file_is_not_blamed_where_a_rank_has_issued_other_ops(
    counted: bool,
) -> None:
    """Rank 1 has skipped an op that is over, and has the next one earlier than 0, 2."""
    ranks = [Rank(rank, counts_all=counted) for rank in range(3)]
    for one in ranks:
        one.order += one.rank != 1
        one.issue()
    found = only(look(ranks, RankEvidence(3)))
    assert found.culprits == (() if counted else (3,))


def test_a_lost_file_is_not_blamed_where_a_message_is_left_over() -> None:
    """Rank 2 has come past what rank 0 has sent, which rank 3 may wait for as well."""
    for sent in False, True:
        ranks = four()
        if sent:
            ranks[0].issue("send", DP0, peer=2, state="started", line=6)
        for one in ranks[:3]:
            one.issue(line=7)
        found = only(look(ranks[:3], RankEvidence(3)))
        assert found.culprits == ((0, 2) if sent else (3,))


@pytest.mark.parametrize("skips", [True, False])
def test_the_op_at_which_ranks_left_each_other_is_told_of_a_mismatch(
    skips: bool,
) -> None:
    """Rank 1 has no rows for an expert: its next op, which is alike, pairs with it."""
    ranks = four()
    for one in ranks:
        # A branch for the root, in each step, is none of it.
        for root_line in (5, 6)[: 2 - skips]:
            one.issue("broadcast", done=True, line=root_line if one.rank else 4)
        for line in (10, 11)[: 1 if skips and one.rank == 1 else 2]:
            one.issue("all_gather", done=True, line=line)
        if skips and one.rank == 1:
            one.issue("all_gather", done=True, line=20)
        one.issue("reduce" if one.rank == 1 else "all_gather", line=20)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.OP_MISMATCH, (1,))
    said = (
        "; they were at different lines before that: rank 1 issued all_gather #3 "
        "(train.py:20), ranks 0, 2–3 issued all_gather #3 (train.py:11)"
    )
    assert found.text.endswith(said) is skips
    assert ("different lines" in found.text) is skips


@pytest.mark.parametrize("counted", [True, False])
def test_who_has_issued_other_ops_than_its_like_is_at_fault_in_a_cycle(
    counted: bool,
) -> None:
    """Rank 3 has an op too many: it comes to all others one place later."""
    ranks = four(counts_all=counted)
    for one in ranks:
        one.order += one.rank == 3
        one.issue(done=True)
        one.order += one.rank in (1, 2)
        one.issue(group=(TP if one.rank in (0, 3) else DP)[one.rank])
    found = only(look(ranks))
    assert found.fault is Fault.DEADLOCK
    assert found.culprits == ((3,) if counted else (0, 1, 2, 3))


@pytest.mark.parametrize("counted", [True, False])
def test_who_has_issued_an_op_in_a_wrong_group_is_at_fault_alone(counted: bool) -> None:
    """Of the two in 'tp' no side leads; for rank 0, of 'dp', rank 2 alone waits."""
    ranks = four(counts_all=counted)
    for one in ranks:
        done = one.rank < 2
        one.issue(group=TP[one.rank], done=True)
        one.issue("all_gather", DP0 if one.rank == 2 else TP[one.rank], done=done)
        if one.rank != 3:
            one.issue("reduce_scatter", TP[one.rank], done=done)
    found = only(look(ranks))
    assert (found.fault, found.group.name) == (Fault.OP_MISMATCH, "tp")
    assert found.culprits == ((2,) if counted else (2, 3))


@pytest.mark.parametrize("whole", [True, False])
def test_stages_that_may_have_sent_run_no_program_of_the_others(whole: bool) -> None:
    """Rank 3 is in a wrong group; 2 and 3 had one more op, which is not listed."""
    ranks = four(counts_all=True)
    for one in ranks:
        one.whole = whole
        one.order += one.rank > 1
        one.issue(group=TP1 if one.rank == 3 else WORLD)
    found = only(look(ranks))
    assert found.fault is Fault.DEADLOCK
    assert found.culprits == ((2,) if whole else (3,))


def test_a_rank_of_which_others_may_have_come_as_far_is_not_certain() -> None:
    """Rank 0 may have issued an op too many: nothing tells what ranks 2 to 7 have."""
    whole = Group("world", tuple(range(8)))
    pairs = [Group("dp", (rank, rank + 1)) for rank in range(0, 8, 2)]
    for known in False, True:
        ranks = [Rank(rank, [pairs[rank // 2]]) for rank in range(8)]
        for one in ranks:
            del one.ops[WORLD]
        evidence = []
        for one in ranks:
            for _ in range(2):
                one.issue(group=pairs[one.rank // 2], done=True)
            if one.rank != 1 and (known or one.rank == 0):
                one.issue(group=pairs[one.rank // 2], done=one.rank > 1)
            found = one.evidence()
            if not known and one.rank > 1:
                nothing = GroupEvidence(lists_all_in_flight=True)
                groups = dict.fromkeys((*found.groups, whole), nothing)
                found = dataclasses.replace(found, groups=groups)
            evidence.append(found)
        verdict = only(find_root_causes(combine(evidence, 8)))
        assert verdict.culprits == ((1,) if known else ())


def test_few_ranks_ahead_of_many_are_not_certain() -> None:
    ranks = [Rank(rank) for rank in range(6)]
    wide = Group("wide", (*range(6),))
    for one in ranks[:2]:
        one.issue(group=wide)
    for one in ranks[2:]:
        one.ops[wide] = []
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.UNDECIDED, ())
    assert "either ranks 0–1 issued an op too many, or the others" in found.text


def test_a_branch_with_an_op_for_each_side_has_no_op_too_many() -> None:
    """But a rank is ahead of the others."""
    ranks = four()
    for one in ranks:
        one.issue(done=True, line=77 if one.rank == 2 else 70)
        extra(one, 0, line=0)
    ranks[2].issue()
    assert only(look(ranks)).culprits == (2,)


def test_in_a_tie_both_sides_are_named() -> None:
    ranks = four()
    for one in ranks:
        one.issue(size=8 if one.rank < 2 else 9)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (0, 1, 2, 3))


def test_a_dtype_mismatch() -> None:
    ranks = four()
    for one in ranks:
        one.issue(dtype="Half" if one.rank == 3 else "Float")
    assert only(look(ranks)).culprits == (3,)


def test_sizes_of_all_to_all_may_differ() -> None:
    ranks = four()
    for one in ranks:
        one.issue("all_to_all", size=one.rank, done=one.rank != 2)
    assert only(look(ranks)).fault is Fault.EXECUTION_HANG


def test_ops_in_another_order() -> None:
    ranks = four()
    for one in ranks:
        names = ["all_reduce", "broadcast"]
        for op in names[::-1] if one.rank == 2 else names:
            one.issue(op)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.ORDER_MISMATCH, (2,))


def test_what_is_not_known_does_not_differ() -> None:
    ranks = four()
    for one in ranks:
        one.issue(root=None if one.rank == 3 else 0)
        one.issue(reduce_op="sum" if one.rank == 3 else None)
    assert only(look(ranks)).fault is Fault.EXECUTION_HANG


def test_roots_that_are_known_differ() -> None:
    ranks = four()
    for one in ranks:
        one.issue("broadcast", root=int(one.rank == 3))
    assert only(look(ranks)).fault is Fault.ROOT_MISMATCH


def test_a_rank_that_has_not_completed_what_its_peers_have() -> None:
    ranks = four()
    for one in ranks:
        for _ in range(4):
            one.issue(done=one.rank != 2)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.EXECUTION_HANG, (2,))
    assert found.seq == 1


def test_unless_an_absent_rank_explains_it() -> None:
    """Rank 0 lags in the world, and its device waits for rank 1 in another group."""
    ranks = four()
    ranks[0].issue(group=TP0, line=5)
    for one in ranks[2:]:
        one.issue(group=TP1, line=5, done=True)
    for one in ranks:
        one.issue(done=one.rank != 0)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (1,))


def test_ranks_that_a_reduce_has_left_do_not_make_its_root_lag() -> None:
    """They have sent what they have; the root waits for a rank that is absent."""
    ranks = four()
    for one in ranks[1:]:
        one.issue("reduce", root=3, done=one.rank != 3)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0,))


@pytest.mark.parametrize(
    ("op", "root", "arrays", "culprits"),
    [
        ("reduce", 0, 1, (2,)),
        ("gather", 0, 1, (2,)),
        ("gather", None, 4, (2,)),
        ("gather", 1, 1, (0, 2)),
        ("reduce", None, 1, ()),
        # Who comes after rank 2 in its ring waits for it, or it for them.
        *((op, 1, 1, ()) for op in ("reduce", "broadcast", "scatter")),
    ],
)
def test_a_root_waits_for_what_another_rank_has_not_sent(
    op: str, root: int | None, arrays: int, culprits: tuple[int, ...]
) -> None:
    """The GPU of rank 2 has stopped; ranks 1 and 3 leave without waiting for it."""
    ranks = four()
    for one in ranks:
        one.issue(op, root=root, done=one.rank in (1, 3))
        if one.rank == 0:
            last = one.ops[WORLD][-1]
            last.arrays = last.arrays._replace(outputs=((8,),) * arrays)
    found = only(look(ranks))
    assert found.culprits == culprits
    assert found.fault is (Fault.EXECUTION_HANG if culprits else Fault.UNDECIDED)


@pytest.mark.parametrize("ends", [True, False])
def test_a_batch_that_is_over_on_all_other_sides(ends: bool) -> None:
    """The GPU of rank 2 has stopped; over gloo, it may not have waited for it yet."""
    ranks = four()
    for one in ranks:
        one.ends_sends = ends
        for op, step in (("send", 1), ("recv", -1)):
            one.issue(op, peer=(one.rank + step) % 4, done=one.rank != 2, batch=0)
        one.issue()
    found = only(look(ranks))
    assert found.culprits == ((2,) if ends else ())
    assert found.fault is (Fault.EXECUTION_HANG if ends else Fault.UNDECIDED)


@pytest.mark.parametrize("lag", [(0, 1), (0,)])
def test_an_op_in_which_all_hang_before_that_in_which_they_lag(
    lag: tuple[int, ...],
) -> None:
    """Ranks 2 and 3 have left the later one; else rank 0 alone holds the first."""
    ranks = four()
    for one in ranks:
        one.issue(group=TP[one.rank], line=5, done=one.rank > 1)
        if one.rank not in {0, 1} - {*lag}:
            one.issue("broadcast", group=DP[one.rank], done=one.rank > 1, root=2)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.EXECUTION_HANG, lag)
    assert found.group.name == ("tp" if len(lag) == 2 else "dp")


def test_an_error_that_has_ended_a_cell_is_the_cause_of_what_waits_elsewhere() -> None:
    """Rank 1 left with the error of an op that rank 0 had issued unlike it."""
    for unlike in (True, False):
        ranks = four()
        for one in ranks[:2]:
            size = 9 if unlike and one.rank == 0 else 8
            one.issue(group=TP0, size=size, state="started")
            one.ops[TP0][-1].retired = True
        ranks[1].facts = {
            "failed_in": TP0,
            "last_cell_exit": "left cell 7 with DistAbortedError at line 4 (sizes)",
        }
        ranks[3].issue(group=DP1)
        found = only(look(ranks))
        if unlike:
            assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (0, 1))
            assert found.consequences == (
                "rank 3 waits in all_reduce #1 of group 'dp (1,3)' (train.py:10) "
                "for rank 1",
            )
        else:
            assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (1,))
            assert "it left cell 7 with DistAbortedError at line 4 (sizes)" in str(
                found
            )


def test_a_death_is_the_cause_where_its_error_has_ended_who_is_awaited() -> None:
    ranks = four()
    ranks[1].issue(group=TP0, state="started").ops[TP0][-1].retired = True
    ranks[1].facts = {"failed_in": TP0, "last_cell_exit": "left cell 7"}
    ranks[3].issue(group=DP1)
    dead = RankEvidence(0, death="rank 0 is dead: killed by SIGKILL")
    found = only(look(ranks[1:], dead))
    assert (found.fault, found.culprits) == (Fault.RANK_DEAD, (0,))
    said = "rank 3 waits in all_reduce #1 of group 'dp (1,3)' (train.py:10)"
    assert str(found) == f"rank 0 is dead: killed by SIGKILL; {said}"


def test_an_innocent_rank_that_such_an_error_has_ended_is_not_named() -> None:
    ranks = four()
    for one in ranks[:3]:
        one.issue(size=9 if one.rank == 0 else 8, state="started")
        one.ops[WORLD][-1].retired = True
        one.facts = {"failed_in": WORLD, "last_cell_exit": "left cell 7"}
    ranks[3].issue(group=DP1)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (0,))
    assert "for rank 1" in found.consequences[0]


def test_an_innocent_rank_that_has_ended_in_such_an_op_is_not_named() -> None:
    """The files of a script tell that it has ended, and the op was young then."""
    ranks = four()
    for one in ranks[:3]:
        one.issue(size=9 if one.rank == 0 else 8, state="started", created_ns=1)
        line = SourceLine("/job/train.py", 10)
        one.facts = {"ended_by": (), "location": line, "read_ns": 2}
    ranks[3].issue(group=DP1)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (0,))
    assert "for rank 1" in found.consequences[0]


def test_a_receive_that_has_failed_is_compared_with_a_send_that_is_over() -> None:
    ranks = four()
    ranks[0].issue("send", peer=1, size=8, done=True)
    ranks[1].issue("recv", peer=0, size=9, state="started")
    ranks[1].ops[WORLD][-1].retired = True
    ranks[1].facts = {"failed_in": WORLD, "last_cell_exit": "left cell 7"}
    ranks[3].issue(group=DP1)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (0, 1))
    assert "for rank 1" in found.consequences[0]


def test_who_waits_in_an_op_is_of_its_group() -> None:
    """Ranks 1 and 3 are absent from two ops, in which others wait, each of a group."""
    rows = Group("rows", (1, 2, 3))
    ranks = [Rank(rank, [rows]) for rank in range(4)]
    ranks[2].issue(group=rows, line=5)
    ranks[0].issue(line=9)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (1, 3))
    assert found.text == (
        "ranks 1, 3 have not entered all_reduce #1 of group 'world' (train.py:9); "
        "rank 0 waits in it"
    )
    (rest,) = found.consequences
    assert rest.startswith("rank 2 waits in all_reduce #1 of group 'rows' (train.py:5)")


def test_two_independent_faults_are_both_named() -> None:
    ranks = four()
    ranks[0].issue(group=TP0)
    ranks[3].issue(group=TP1)
    found = only(look(ranks))
    assert found.culprits == (1, 2)
    where = "all_reduce #1 of groups 'tp (0–1)' and 'tp (2–3)'"
    assert found.text.startswith(f"ranks 1–2 have not entered {where}")


def test_a_dead_rank_is_dead() -> None:
    ranks = four()
    for one in ranks[:3]:
        one.issue()
    dead = RankEvidence(3, death="rank 3 was killed by signal 9")
    found = only(look(ranks[:3], dead))
    assert (found.fault, found.culprits) == (Fault.RANK_DEAD, (3,))
    assert "killed by signal 9" in found.text


def test_ranks_that_died_alike_are_told_together() -> None:
    ranks = four()
    ranks[0].issue()
    error = "ValueError: Global rank 0 is not part of group <ProcessGroup object"
    dead = [
        RankEvidence(
            rank, death=f"rank {rank} ended with {error} at 0x7f{rank}> at a:1"
        )
        for rank in (1, 2)
    ]
    killed = RankEvidence(3, death="rank 3 was killed by signal 9")
    found = only(look(ranks[:1], *dead, killed))
    assert found.culprits == (1, 2, 3)
    assert found.text.startswith(
        f"ranks 1–2 ended with {error}> at a:1; rank 3 was killed by signal 9; rank 0 "
    )
    assert exceptions(found.culprits, combine(dead), found.text) == []


def test_where_a_rank_is_and_what_it_handles_are_told() -> None:
    ranks = four()
    for one in ranks[1:]:
        one.issue()
    at = RankEvidence(0, location=SourceLine("/job/data.py", 77), called="`get`")
    found = only(look(ranks, at))
    assert found.fault is Fault.RANK_BUSY_ELSEWHERE
    assert ": it is at data.py:77 in `get`; ranks" in found.text
    at = dataclasses.replace(at, thread_exception="KeyError: 7 at data.py:5")
    said = "`get`, and a thread of it has ended with KeyError: 7 at data.py:5; ranks"
    assert said in only(look(ranks, at)).text
    error = RankEvidence(
        0, exception="ValueError: x", exception_line=SourceLine("a.py", 4)
    )
    found = only(look(ranks, error))
    assert found.fault is Fault.MISSING_RANKS
    assert ": it handles ValueError: x at a.py:4; ranks" in found.text


def test_a_send_that_nobody_receives() -> None:
    ranks = four()
    ranks[0].issue("send", peer=1, done=True).issue("send", peer=1)
    ranks[1].issue("recv", peer=0, done=True)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (1,))
    assert (found.op, found.seq) == ("send", 2)


def test_a_send_is_lost_with_its_rank() -> None:
    """Torch's gloo calls the send completed once its record is retired."""
    for done in (True, False):
        ranks = four()
        ranks[0].facts["has_left"] = True
        ranks[0].issue("send", peer=1, done=done, line=8)
        ranks[1].issue("recv", peer=0, line=11)
        found = only(look(ranks))
        assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0,))
        assert (
            "rank 0 has left the program before send #1 to rank 1 of group 'world' "
            "(train.py:8) was over"
        ) in str(found)
        assert "rank 1 waits in recv #1 from rank 0 (train.py:11)" in str(found)
    ranks[0].facts = {"death": "rank 0 is dead: killed by SIGKILL"}
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.RANK_DEAD, (0,))
    assert "rank 1 waits in recv #1" in str(found)


def test_a_receive_is_lost_with_its_rank() -> None:
    ranks = four()
    ranks[0].issue("send", peer=1)
    ranks[1].facts["has_left"] = True
    ranks[1].issue("recv", peer=0)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (1,))
    assert "left the program before recv #1 from rank 0" in str(found)


def test_sends_and_receives_are_counted_by_pair() -> None:
    """Rank 1 has received from rank 2 meanwhile: its numbers are others."""
    ranks = four()
    ranks[1].issue("recv", peer=2, done=True).issue("recv", peer=0, size=9)
    ranks[2].issue("send", peer=1, done=True)
    ranks[0].issue("send", peer=1, size=8)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (0, 1))


def test_a_cycle_is_told_once_and_a_later_barrier_does_not_hide_it() -> None:
    for op in ("recv", "send"):
        ranks = four()
        for one in ranks[:2]:
            one.issue(op, peer=1 - one.rank, line=20 + one.rank)
        for one in ranks[2:]:
            one.issue("barrier")
        found = only(look(ranks))
        assert (found.fault, found.culprits) == (Fault.DEADLOCK, (0, 1))
        assert found.cycle == (
            Waiting((0,), f"{op} #1", "world", (1,)),
            Waiting((1,), f"{op} #1", "world", (0,)),
        )
        assert "rank 0 in " in found.text
        assert "train.py:20" in found.text
        assert "train.py:21" in found.text
        assert f"all {'receive' if op == 'recv' else 'send'} first" in found.text
        assert found.consequences == (
            "ranks 2–3 wait in barrier #1 of group 'world' (train.py:10) for ranks 0–1",
        )


def test_a_cycle_of_sends_that_are_issued_before_their_receives() -> None:
    ranks = four()
    for one in ranks:
        one.issue("send", peer=(one.rank + 1) % 4)
        one.issue("recv", peer=(one.rank - 1) % 4)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (0, 1, 2, 3))


def test_two_groups_that_two_ranks_enter_in_other_orders() -> None:
    ranks = four()
    ranks[0].issue(group=TP0)
    ranks[1].issue()
    found = only(look(ranks[:2]))
    assert found.fault in (Fault.DEADLOCK, Fault.UNDECIDED)
    one = Group("a", (0, 1))
    ranks = [Rank(0, [one]), Rank(1, [one])]
    two = Group("b", (0, 1))
    for rank in ranks:
        rank.ops = {one: [], two: []}
    ranks[0].issue(group=one)
    ranks[1].issue(group=two)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (0, 1))
    assert {one.group for one in found.cycle} == {"a", "b"}
    assert "group 'a'" in found.text
    assert "group 'b'" in found.text


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("live", [True, False])
def test_no_cycle_is_told_that_goes_by_a_send_that_may_be_over(
    whole: bool, live: bool
) -> None:
    """Where the first ops are left out, the GPU of rank 0 may have stopped instead."""
    ranks = four()
    ranks[0].issue("recv", peer=1)
    ranks[1].issue(group=TP0)
    known = combine(
        dataclasses.replace(
            one := rank.evidence(),
            groups={
                group: dataclasses.replace(found, lists_all=whole)
                for group, found in one.groups.items()
            },
        )
        for rank in ranks
    )
    evidence = dataclasses.replace(known, at_one_moment=live)
    found = only(find_root_causes(evidence))
    is_certain = whole or live
    assert found.fault is (Fault.DEADLOCK if is_certain else Fault.UNDECIDED)
    assert found.culprits == ((0, 1) if is_certain else ())


@pytest.mark.parametrize("is_sent", [True, False])
def test_who_waits_for_each_other_beside_a_rank_without_records(is_sent: bool) -> None:
    """Rank 0 has skipped a receive; of rank 3 it is not known why it is not there."""
    ranks = four()
    ranks[2].issue("send", peer=0, state="completed" if is_sent else "started")
    for one in ranks:
        one.issue()
    found = only(look(ranks[:3]))
    fault = Fault.MISSING_RANKS if is_sent else Fault.DEADLOCK
    assert (found.fault, found.culprits) == (fault, (3,) if is_sent else (0, 2))


def test_a_skipped_op_in_a_group_of_two_beside_a_rank_without_records() -> None:
    """Rank 3 has skipped an op; rank 0 waits there for rank 1, which may as well."""
    ranks = four()
    for one in (ranks[0], *ranks[2:]):
        if one.rank != 3:
            one.issue(group=TP[one.rank])
        one.issue(line=20)
    found = only(look([ranks[0], *ranks[2:]]))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (3,))


def test_a_message_that_waits_for_a_cycle_does_not_hide_who_skipped_an_op() -> None:
    """Rank 3 has; rank 0, for which it waits, is in a receive from rank 2."""
    ranks = four()
    for one in ranks:
        if one.rank != 3:
            one.issue(group=TP[one.rank], done=one.rank < 2)
    ranks[0].issue("recv", peer=2)
    for one in (ranks[1], ranks[3]):
        one.issue(line=20)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (3,))


@pytest.mark.parametrize(("sent", "told"), [(2, True), (1, False)])
def test_a_ring_in_which_all_have_issued_as_much_is_a_cycle(
    sent: int, told: bool
) -> None:
    """Where one more message was sent than received, a GPU may have stopped instead."""
    ring = Group("ring", (0, 1, 2, 3))
    ranks = []
    for rank in ring.ranks:
        one = Rank(rank).issue("recv", ring, peer=(rank - 1) % 4)
        done = 2 if rank else sent
        ops = (dataclasses.replace(one.ops[ring][0], seq=done + 1),)
        known = GroupEvidence(ops, lists_all_in_flight=True)
        ranks.append(RankEvidence(rank, {ring: known}, recorded=True))
    found = only(find_root_causes(combine(ranks, 4)))
    assert found.fault is (Fault.DEADLOCK if told else Fault.UNDECIDED)
    assert found.culprits == (ring.ranks if told else ())


def test_who_is_in_one_op_of_a_cycle_is_told_together() -> None:
    """Half of the ranks enter two groups in the other order; rank 1 at its own line."""
    one, two = Group("a", (0, 1, 2, 3)), Group("b", (0, 1, 2, 3))
    for own_line in (False, True):
        ranks = [Rank(rank, [one, two]) for rank in range(4)]
        for rank in ranks:
            line = 7 if own_line and rank.rank == 1 else 4
            rank.issue(group=one if rank.rank < 2 else two, line=line)
        found = only(look(ranks))
        assert (found.fault, found.culprits) == (Fault.DEADLOCK, (0, 1, 2, 3))
        if own_line:
            assert found.cycle == (
                Waiting((0,), "all_reduce #1", "a", (2, 3)),
                Waiting((2, 3), "all_reduce #1", "b", (0,)),
            )
            continue
        assert found.cycle == (
            Waiting((0, 1), "all_reduce #1", "a", (2, 3)),
            Waiting((2, 3), "all_reduce #1", "b", (0, 1)),
        )
        assert str(found) == (
            "ranks 0–3 wait for each other: "
            "ranks 0–1 in all_reduce #1 of group 'a' (train.py:4) for ranks 2–3, "
            "ranks 2–3 in all_reduce #1 of group 'b' (train.py:4) for ranks 0–1; "
            "issue the ops in one order on all ranks"
        )


def test_of_a_next_op_those_are_awaited_who_are_in_the_group() -> None:
    """Each rank of a mesh is in the op of another dimension than its peers."""
    ranks = four()
    for one in ranks:
        one.issue(group=(TP if one.rank in (0, 3) else DP)[one.rank])
    found = only(look(ranks))
    assert found.fault is Fault.DEADLOCK
    for step in found.cycle:
        assert step.awaited
        group = TP if step.group.startswith("tp") else DP
        assert {*step.awaited} <= {*group[step.ranks[0]].ranks} - {*step.ranks}


def test_all_in_and_nothing_differs() -> None:
    ranks = four()
    for one in ranks:
        one.issue(state="started")
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.EXECUTION_HANG, (0, 1, 2, 3))


def test_the_rank_on_which_an_op_has_not_started_holds_the_others() -> None:
    ranks = four()
    for one in ranks:
        one.issue(state="scheduled" if one.rank == 2 else "started")
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.EXECUTION_HANG, (2,))
    assert "has started on ranks 0–1, 3, not on rank 2, whose GPU" in found.text


def test_where_nothing_tells_of_a_start_all_are_named() -> None:
    ranks = four()
    for one in ranks:
        one.issue(state="unknown" if one.rank == 2 else "started")
    assert only(look(ranks)).culprits == (0, 1, 2, 3)


def test_a_ring_of_batches_in_which_one_has_not_started() -> None:
    """Rank 2 is one batch further: those of its neighbours have started, too."""
    ranks = four()
    for one in ranks:
        state = "started" if one.rank else "scheduled"
        batches: list[dict[str, Any]] = [{"state": state, "batch": 1}]
        if one.rank == 2:
            batches.insert(0, {"done": True, "batch": 0})
        for how in batches:
            one.issue("send", peer=(one.rank + 1) % 4, **how)
            one.issue("recv", peer=(one.rank - 1) % 4, **how)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.EXECUTION_HANG, (0,))


def test_all_of_a_ring_of_batches_wait_for_the_one_that_left_no_records() -> None:
    """Both sides are in each message between the others, and none of them hangs."""
    ring = Group("ring", tuple(range(6)))
    ranks = [Rank(rank, (ring,)) for rank in range(1, 6)]
    for one in ranks:
        one.issue("send", ring, peer=(one.rank + 1) % 6, batch=0)
        one.issue("recv", ring, peer=(one.rank - 1) % 6, batch=0)
    found = only(look(ranks, RankEvidence(0)))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0,))


def test_who_has_come_further_shows_that_a_rank_was_read_earlier() -> None:
    ranks = four()
    for one in ranks:
        for _ in range(2 + 3 * (one.rank > 0)):
            one.issue(done=True)
    ranks[0].issue()
    assert look(ranks) == []


def test_a_young_op_does_not_hang() -> None:
    ranks = four(read_ns=10_000_000_000)
    for one in ranks[1:]:
        one.issue(created_ns=9_500_000_000)
    assert look(ranks) == []
    old = four(read_ns=10_000_000_000)
    for one in old[1:]:
        one.issue(created_ns=1_000_000_000)
    assert only(look(old)).culprits == (0,)


def test_final_components_of_long_chains_and_cycles() -> None:
    chain = {rank: [rank + 1] for rank in range(5000)}
    assert final_components(chain) == [(5000,)]
    assert final_components({0: [1], 1: [0], 2: [0]}) == [(0, 1)]
    assert final_components({0: [1, 3], 1: [2], 2: [1]}) == [(1, 2), (3,)]


def test_what_has_no_cycle() -> None:
    edges = {0: [1, 2], 1: [2], 2: [0]}
    assert not is_acyclic([0, 1, 2], edges)
    assert is_acyclic([0, 1], edges)
    assert is_acyclic([], edges)


def test_the_shortest_cycle() -> None:
    edges = {0: [1], 1: [2], 2: [0, 3], 3: [2]}
    assert sorted(shortest_cycle([0, 1, 2, 3], edges)) == [2, 3]
    assert shortest_cycle([0, 1, 2], {0: [1], 1: [2], 2: [0]}) == [0, 1, 2]


def test_a_dump_that_lacks_what_others_have_received_is_older() -> None:
    """Rank 0 has not sent what rank 1 has received: it has gone on since then."""
    ranks = four()
    ranks[0].issue("send", peer=1, done=True)
    ranks[1].issue("recv", peer=0, done=True).issue("recv", peer=0, done=True)
    ranks[1].issue("recv", peer=0)
    culprits = {rank for one in look(ranks) for rank in one.culprits}
    assert culprits == set()


def test_a_rank_behind_and_one_absent_beside_an_idle_one_are_no_hang() -> None:
    """Dumps from different moments: rank 1 would wait if the job hung."""
    ranks = four()
    for one in ranks:
        one.issue(done=one.rank != 0)
    ranks[2].issue(group=TP1)
    assert {rank for one in look(ranks) for rank in one.culprits} == set()


def test_a_dead_rank_is_named_beside_one_that_is_behind() -> None:
    ranks = four()
    for one in ranks[:3]:
        one.issue(done=one.rank != 0)
    ranks[2].issue(group=TP1)
    dead = RankEvidence(3, death="rank 3 was killed by signal 9")
    found = look(ranks[:3], dead)
    assert (Fault.RANK_DEAD, (3,)) in [(one.fault, one.culprits) for one in found]


def test_without_an_idle_rank_both_are_named() -> None:
    ranks = four()
    for one in ranks:
        one.issue(done=one.rank != 0)
    ranks[1].issue(group=TP0)
    ranks[2].issue(group=TP1)
    assert {rank for one in look(ranks) for rank in one.culprits} == {0, 3}


def test_others_tell_which_of_two_ops_comes_first() -> None:
    """Ranks 1 and 3 wait for each other; in the other pair `dp` comes after all."""
    ranks = four()
    for one in ranks:
        one.issue(done=True, line=1)
        one.issue(group=DP[one.rank], done=True, line=2)
        if one.rank != 3:
            one.issue(line=1)
    ranks[3].issue(group=DP1, line=2)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (3,))


@pytest.mark.parametrize("op", ["all_reduce", "recv"])
def test_the_rank_that_is_in_all_cycles_is_the_culprit(op: str) -> None:
    """Rank 3 alone has left the step; the others are in three ops of it."""
    ranks = four()
    if op == "recv":
        ranks[0].issue(op, peer=2)
    else:
        ranks[0].issue(group=DP[0])
    ranks[1].issue(group=DP1)
    ranks[2].issue(group=TP1)
    ranks[3].issue("broadcast", line=88)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (3,))
    assert found.group.name in ("dp", "tp")
    assert "without rank 3 there is no cycle" in found.text


def test_where_no_rank_is_in_all_cycles_all_are_named() -> None:
    ranks = four()
    for one in ranks:
        for peer in {one.rank - 1, one.rank + 1} & {0, 1, 2, 3}:
            one.issue("recv", peer=peer)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (0, 1, 2, 3))


def test_where_no_other_rank_tells_the_order_both_are_named() -> None:
    """As an embedding group, which only the first and the last stage have."""
    ends = Group("embd", (0, 3))
    ranks = four()
    ranks[0].ops[ends] = []
    for one in ranks:
        one.issue(done=True)
        if one.rank != 3:
            one.issue()
    ranks[3].issue(group=ends)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.DEADLOCK, (0, 3))


def test_a_rank_that_has_left_ended_the_one_for_whom_others_wait() -> None:
    """Rank 2's op was refused, and is in no record: its error names rank 0."""
    three = Group("three", (0, 1, 2))
    for waits_there in (True, False):
        ranks = [Rank(rank, [three, TP1]) for rank in range(4)]
        ranks[0].facts = {"has_left": True}
        ranks[2].facts = {"ended_by": (0,), "location": SourceLine("/job/train.py", 7)}
        ranks[3].issue(group=TP1)
        if waits_there:
            ranks[1].issue(group=three, line=5)
        found = only(look(ranks))
        assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0,))
        waits = "rank 3 waits in all_reduce #1 of group 'tp' (train.py:10) for rank 2"
        if waits_there:
            assert found.text == (
                "rank 0 has not entered all_reduce #1 of group 'three' (train.py:5): "
                "it has left the program; rank 1 waits in it"
            )
            assert found.consequences == (waits,)
        else:
            assert found.text == (
                f"rank 0 has left the program; {waits}, whose error names rank 0"
            )


def test_a_rank_that_has_left_is_not_said_to_owe_the_send_of_another_one() -> None:
    """Rank 1's send was refused, since rank 0 has left, and with it the store."""
    ranks = four()
    ranks[0].facts = {"has_left": True}
    ranks[1].facts = {"ended_by": (0,), "location": SourceLine("/job/train.py", 7)}
    ranks[2].issue("recv", peer=1)
    found = only(look(ranks))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0,))
    assert found.text == (
        "rank 0 has left the program; rank 2 waits in recv #1 from rank 1 of group "
        "'world' (train.py:10) for rank 1, whose error names rank 0"
    )


def test_who_has_sent_to_a_root_does_not_show_that_a_dead_rank_has() -> None:
    ranks = four()
    for one in (ranks[0], ranks[2]):
        one.issue("gather", root=2, done=one.rank == 0)
    dead = RankEvidence(1, death="rank 1 is dead: its process has ended")
    found = only(look([ranks[0], ranks[2], ranks[3].issue("gather", done=True)], dead))
    assert (found.fault, found.culprits) == (Fault.RANK_DEAD, (1,))


def test_a_rank_that_has_left_will_not_come_to_what_needs_all() -> None:
    """Its records do not tell whether it was in the op."""
    ranks = four()
    ranks[1].issue(group=TP0)
    left = RankEvidence(0, recorded=True, has_left=True)
    found = only(look(ranks[1:], left))
    assert (found.fault, found.culprits) == (Fault.MISSING_RANKS, (0,))


def test_a_message_of_another_tag_than_is_received() -> None:
    """It is gone from the sender, which has ended or waits for the receiver in turn."""
    for facts, blamed in (
        ({"last_cell_exit": f"left cell 7 {AT_ITS_END}"}, (0, 1)),
        ({"has_left": True}, (0, 1)),
        ({}, (0, 1)),
        # It may send what is wanted once it goes on.
        ({"location": SourceLine("/job/data.py", 7)}, (0,)),
        ({"last_cell_exit": "left cell 7 with KeyError at line 4"}, (0,)),
    ):
        ranks = four()
        ranks[0].facts = facts
        ranks[0].issue("send", peer=1, tag=5, done=True)
        ranks[1].issue("recv", peer=0, tag=0)
        if not facts:
            for one in (ranks[0], *ranks[2:]):
                one.issue("barrier")
        found = only(look(ranks))
        assert found.culprits == blamed
        if len(blamed) == 2:
            assert found.fault is Fault.TAG_MISMATCH
            assert "with tag 5 while rank 1 issued recv #1 from rank 0" in str(found)


def test_a_send_in_flight_with_another_tag_than_the_default() -> None:
    for sent, wanted in (5, 0), (0, 5):
        ranks = four()
        ranks[0].issue("send", peer=1, tag=sent)
        ranks[1].issue("recv", peer=0, tag=wanted)
        found = only(look(ranks))
        assert (found.fault, found.culprits) == (Fault.TAG_MISMATCH, (0, 1))


def test_a_message_that_a_later_receive_takes_is_no_other_tag() -> None:
    ranks = four()
    ranks[0].issue("send", peer=1, tag=5, done=True).issue(done=False)
    ranks[1].issue("recv", peer=0, tag=7)
    ranks[1].issue("recv", peer=0, tag=5)
    for one in ranks[2:]:
        one.issue()
    assert only(look(ranks)).fault is Fault.DEADLOCK
