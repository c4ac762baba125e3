"""Who waits for a rank that raised, and which groups a cell has cost."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.backends.groups.key import GroupKey
from rankscope.engines import GroupStatus, RankStatus
from rankscope.magics.cells.abort_waiting import (
    aborted,
    in_flight,
    out_of_step,
    stuck_on,
)
from tests.widgets.statuses import cluster, group, op, rank

DEFAULT = group().key


def waiting(seq: int = 15, elapsed: float = 2.0, **fields: Any) -> GroupStatus:
    name = fields.pop("op", "all_reduce")
    peer = fields.pop("peer", None)
    oldest = op(name, seq, elapsed=elapsed, peer=peer)
    return group(enqueued=op(name, seq), in_flight=1, oldest=oldest, **fields)


def stuck(*ranks: RankStatus, failed: set[int], running: set[int]) -> list[Any]:
    return [
        (one.group.name, one.ranks, one.absent)
        for one in stuck_on(cluster(*ranks), failed, running, grace=1.0)
    ]


def test_ranks_wait_in_vain_for_one_that_raised_before_the_collective() -> None:
    ranks = [rank(0, waiting()), rank(1, waiting()), rank(2, group())]
    assert stuck(*ranks, failed={2}, running={0, 1}) == [("default", (0, 1), 2)]


def test_nobody_waits_before_the_grace_is_over() -> None:
    ranks = [rank(0, waiting(elapsed=0.5)), rank(2, group())]
    assert stuck(*ranks, failed={2}, running={0}) == []


def test_an_op_that_the_failed_rank_had_entered_will_complete() -> None:
    raised = group(enqueued=op(seq=15), in_flight=1, oldest=op(seq=15, elapsed=9.0))
    ranks = [rank(0, waiting()), rank(2, raised)]
    assert stuck(*ranks, failed={2}, running={0}) == []


def test_a_rank_that_never_issued_anything_is_missed_too() -> None:
    ranks = [rank(0, waiting(seq=0)), rank(2, group(enqueued=None))]
    assert stuck(*ranks, failed={2}, running={0}) == [("default", (0,), 2)]


def test_a_rank_that_raised_before_it_made_the_group_enters_none_of_its_ops() -> None:
    tp = waiting(seq=1, name="tp", ranks=(0, 2))
    assert stuck(rank(0, tp), rank(2), failed={2}, running={0}) == [("tp", (0,), 2)]
    # Its death ends the group.
    dead = rank(2, state="dead")
    assert stuck(rank(0, tp), dead, failed={2}, running={0}) == []


def test_a_group_without_the_failed_rank_goes_on() -> None:
    tp = waiting(name="tp", ranks=(0, 1))
    ranks = [rank(0, group(), tp), rank(1, group(), tp), rank(2, group())]
    assert stuck(*ranks, failed={2}, running={0, 1}) == []


def test_an_aborted_group_is_not_aborted_again() -> None:
    ranks = [rank(0, waiting(state="aborted")), rank(2, group())]
    assert stuck(*ranks, failed={2}, running={0}) == []


@pytest.mark.parametrize(("peer", "in_vain"), [(2, True), (None, True), (1, False)])
def test_a_receiver_waits_in_vain_for_its_own_peer_only(
    peer: int | None, in_vain: bool
) -> None:
    ranks = [rank(0, waiting(op="recv", peer=peer)), rank(1, group()), rank(2, group())]
    expected = [("default", (0,), 2)] if in_vain else []
    assert stuck(*ranks, failed={2}, running={0, 1}) == expected


def test_the_peer_of_a_receive_is_a_rank_of_its_group() -> None:
    """Its rank 1 is rank 2 of the world here."""
    far = waiting(op="recv", peer=1, name="pp", ranks=(1, 2))
    ranks = [rank(1, far), rank(2, group(name="pp", ranks=(1, 2)))]
    assert stuck(*ranks, failed={2}, running={1}) == [("pp", (1,), 2)]


def test_a_dead_rank_is_left_to_the_cluster() -> None:
    ranks = [rank(0, waiting()), rank(2, group(), state="dead")]
    assert stuck(*ranks, failed={2}, running={0}) == []


def test_groups_with_something_in_flight_on_these_ranks() -> None:
    tp = waiting(name="tp", ranks=(0, 1))
    status = cluster(rank(0, group(), tp), rank(1, group(), tp), rank(2, group()))
    assert in_flight(status, [0]) == [GroupKey("tp", (0, 1))]
    assert in_flight(status, [2]) == []


def test_groups_that_are_aborted() -> None:
    status = cluster(rank(0, group(state="aborted")), rank(1, group()))
    assert aborted(status, [0]) == [DEFAULT]
    assert aborted(status, [1]) == []


def test_a_group_is_out_of_step_when_its_ranks_issued_unequal_numbers() -> None:
    status = cluster(rank(0, group(enqueued=op(seq=15))), rank(1, group()))
    assert out_of_step(status, [1]) == [DEFAULT]
    assert out_of_step(cluster(rank(0, group()), rank(1, group())), [0]) == []


def test_p2p_numbers_differ_rightly() -> None:
    status = cluster(rank(0, group(enqueued=op("send", 3))), rank(1, group()))
    assert out_of_step(status, [0, 1]) == []


def test_disjoint_groups_of_one_name_are_not_compared() -> None:
    low, high = group("dp", (0,)), group("dp", (1,), enqueued=op(seq=99))
    assert out_of_step(cluster(rank(0, low), rank(1, high)), [0, 1]) == []


def test_groups_of_one_name_that_share_a_rank_are_told_apart() -> None:
    first = group("tp", (0, 1), in_flight=1)
    second = group("tp", (0, 2), state="aborted")
    status = cluster(rank(0, first, second), rank(1, first), rank(2, second))
    assert in_flight(status, [0]) == [GroupKey("tp", (0, 1))]
    assert aborted(status, [0]) == [GroupKey("tp", (0, 2))]


def test_a_group_has_all_its_ranks_as_soon_as_one_tells_of_it() -> None:
    even = group("even", (0, 2))
    status = cluster(rank(0, group()), rank(1, group()), rank(2, group(), even))
    assert status.groups == {"default": [0, 1, 2, 3], "even": [0, 2]}
