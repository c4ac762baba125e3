"""Groups of some of the ranks, and numbers and times of every kind, as rank 0 of 4."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import rankscope as dist

X = np.ones(4)


def test_a_stranger_gets_the_one_object_that_stands_for_it(
    group: dist.ProcessGroup,
) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert dist.new_group([1, 3]) is outside
    assert dist.new_group([2]) is outside
    assert pickle.loads(pickle.dumps(outside)) is outside
    assert copy.deepcopy(outside) is outside
    assert isinstance(outside, dist.NonGroupMember)
    assert not outside
    assert dist.get_rank(outside) == dist.get_world_size(outside) == -1
    dist.destroy_process_group(outside)
    for ask in (
        lambda: dist.get_group_rank(outside, 0),
        lambda: dist.get_global_rank(outside, 0),
        lambda: dist.get_process_group_ranks(outside),
        lambda: dist.get_backend_config(outside),
        lambda: dist.new_subgroups(1, outside),
    ):
        with pytest.raises(ValueError, match="rank 0 is not in the group"):
            ask()


Y = np.arange(4.0)
ROW = [np.zeros(2)]

#: Each op, as a stranger calls it; what it returns.
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda g: dist.all_reduce(X, group=g),
    "broadcast": lambda g: dist.broadcast(X, 1, g, async_op=True),
    "reduce": lambda g: dist.reduce(X, 1, group=g),
    "all_gather": lambda g: dist.all_gather([X, Y], X, g),
    "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(Y, X, g),
    "all_gather_coalesced": lambda g: dist.all_gather_coalesced([ROW, ROW], ROW, g),
    "all_gather_single": lambda g: dist.all_gather_single(Y, X, g),
    "all_reduce_coalesced": lambda g: dist.all_reduce_coalesced(ROW, group=g),
    "gather": lambda g: dist.gather(X, None, 1, g),
    "scatter": lambda g: dist.scatter(X, None, 1, g),
    "reduce_scatter": lambda g: dist.reduce_scatter(Y, [X, X], group=g),
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(Y, X, group=g),
    "all_to_all": lambda g: dist.all_to_all([X], [Y], g),
    "all_to_all_single": lambda g: dist.all_to_all_single(X, Y, group=g),
    "barrier": lambda g: dist.barrier(g),
    "monitored_barrier": lambda g: dist.monitored_barrier(g, timeout=1),
    "send": lambda g: dist.send(X, 1, g),
    "isend": lambda g: dist.isend(X, 1, g),
    "recv": lambda g: dist.recv(X, 1, g),
    "irecv": lambda g: dist.irecv(X, 1, g),
    "all_gather_object": lambda g: dist.all_gather_object([None], 1, g),
    "broadcast_object_list": lambda g: dist.broadcast_object_list([None], 1, g),
    "gather_object": lambda g: dist.gather_object(1, None, 1, g),
    "scatter_object_list": lambda g: dist.scatter_object_list([None], None, 1, g),
    "send_object_list": lambda g: dist.send_object_list([1], 1, g),
    "recv_object_list": lambda g: dist.recv_object_list([None], 1, g),
}


@pytest.mark.parametrize("op", CALLS)
def test_an_op_of_a_stranger_warns_and_does_nothing(
    group: dist.ProcessGroup, op: str
) -> None:
    outside = dist.new_group([1, 3])
    before = X.copy(), Y.copy()
    with pytest.warns(UserWarning, match="does nothing on rank 0") as warned:
        returned = CALLS[op](outside)
    assert returned == -1 if op in ("recv", "recv_object_list") else returned is None
    # At the line of the caller, so that Python shows each line once.
    assert warned[0].filename == __file__
    np.testing.assert_array_equal([X, Y], before)
    assert group.status.collective_seq == group.status.p2p_seq == 0


def test_a_batch_of_a_stranger_is_empty(group: dist.ProcessGroup) -> None:
    outside = dist.new_group([1, 3])
    with pytest.warns(UserWarning, match="all_reduce does nothing on rank 0"):  # noqa: SIM117
        with dist.coalescing_manager(outside, async_ops=True) as manager:
            dist.all_reduce(X, group=outside)
    assert manager.wait()
    assert manager.works == []
    assert "NON_GROUP_MEMBER" in repr(manager)
    with pytest.raises(ValueError, match="rank 0 is not in the group"):
        dist.P2POp(dist.isend, X, 1, outside)


def test_the_order_of_ranks_is_kept_where_it_is_asked_for(
    group: dist.ProcessGroup,
) -> None:
    back = dist.new_group([3, 0, 1], sort_ranks=False)
    forth = dist.new_group([3, 0, 1])
    assert isinstance(back, dist.ProcessGroup)
    assert isinstance(forth, dist.ProcessGroup)
    assert (back.ranks, back.rank(), back.group_desc) == ([3, 0, 1], 1, "ranks 3,0,1")
    assert (forth.ranks, forth.rank()) == ([0, 1, 3], 0)
    assert back.group_name != forth.group_name
    assert dist.get_global_rank(back, 0) == 3


def test_neighbours_become_groups(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    two: Any = np.int32(2)
    mine, everyone = dist.new_subgroups(
        two, timeout=timedelta(seconds=7), group_desc="tp"
    )
    assert (mine.ranks, mine.timeout, mine.group_desc) == ([0, 1], 7, "tp")
    assert everyone == [mine, outside]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    host, _ = dist.new_subgroups()
    assert host.ranks == [0, 1, 2, 3]
    # Of the ranks of a group, in its order.
    odd = dist.new_group([3, 0], sort_ranks=False)
    pair, _ = dist.new_subgroups(2, odd)
    assert pair.ranks == [0, 3]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        dist.new_subgroups()


def test_lists_become_groups(group: dist.ProcessGroup) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    mine, everyone = dist.new_subgroups_by_enumeration([[1, 3], [2, 0]])
    assert mine is not None
    assert mine.ranks == [0, 2]
    assert everyone == [outside, mine]
    assert dist.new_subgroups_by_enumeration([[3]]) == (None, [outside])


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a size that does not divide": (
        lambda: dist.new_subgroups(3),
        ValueError,
        "group_size=3; expected a divisor of 4",
    ),
    "a size of nothing": (lambda: dist.new_subgroups(0), ValueError, "group_size=0"),
    "a size that is no integer": (
        lambda: dist.new_subgroups(2.0),  # type: ignore[arg-type]
        TypeError,
        "group_size is 2.0, a float; expected an integer",
    ),
    "lists that overlap": (
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
        ValueError,
        "no rank in two",
    ),
    "no list": (
        lambda: dist.new_subgroups_by_enumeration([]),
        ValueError,
        "none of them empty",
    ),
    "a list of strangers": (
        lambda: dist.new_subgroups_by_enumeration([[0, 4]]),
        ValueError,
        "each from 0 to 3",
    ),
    "new_group of floats": (
        lambda: dist.new_group([0, 1.0]),  # type: ignore[list-item]
        TypeError,
        r"ranks\[1\] is 1.0, a float",
    ),
    "a root that is a string": (
        lambda: dist.broadcast(X, "0"),  # type: ignore[arg-type]
        TypeError,
        "src is '0', a str; expected an integer",
    ),
    "a tag that is a float": (
        lambda: dist.isend(X, 1, tag=1.0),  # type: ignore[arg-type]
        TypeError,
        "tag is 1.0, a float",
    ),
    "a barrier without time": (
        lambda: dist.barrier(timeout=timedelta(0)),
        ValueError,
        "timeout=0; expected more than 0 seconds",
    ),
    "a group that is a name": (
        lambda: dist.destroy_process_group("default"),  # type: ignore[arg-type]
        TypeError,
        "group is a str; expected a ProcessGroup",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_wrong_argument_makes_no_group_and_no_op(
    group: dist.ProcessGroup, case: str
) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()
    assert dist.get_pg_count() == 1
    assert group.status.collective_seq == 0


def test_integers_of_numpy_are_ranks_and_tags(group: dist.ProcessGroup) -> None:
    one: Any = np.int64(1)
    pair = dist.new_group(np.array([0, 1]), timeout=np.float32(0.5))  # type: ignore[arg-type]
    assert isinstance(pair, dist.ProcessGroup)
    assert pair.ranks == [0, 1]
    assert [type(rank) for rank in pair.ranks] == [int, int]
    assert pair.timeout == 0.5
    assert dist.get_group_rank(pair, one) == 1
    assert dist.get_global_rank(pair, one) == 1
    works = [
        dist.isend(X, one, group, tag=one),
        dist.isend(X, group_dst=one, tag=one),
        dist.irecv(X, group_src=one),
    ]
    split = dist.split_group(split_ranks=np.array([[0, 1], [2, 3]]), backend="manual")  # type: ignore[arg-type]
    assert split is not None
    assert str(split.config) == "cpu:manual,cuda:manual"
    for work in works:
        work.mark_completed()


def test_a_barrier_has_a_time_of_its_own(group: dist.ProcessGroup) -> None:
    work = dist.barrier(async_op=True, timeout=timedelta(seconds=0.2))
    assert work is not None
    with pytest.raises(dist.DistTimeoutError, match="0.2 s"):
        work.wait()


def test_what_the_launcher_says(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    five: Any = np.int64(5)
    assert dist.get_node_local_rank(five) == 5
    with pytest.raises(RuntimeError, match="did not set LOCAL_RANK"):
        dist.get_node_local_rank()
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert dist.get_node_local_rank(5) == 3
    assert dist.is_torchelastic_launched()
    assert dist.default_pg_timeout == timedelta(minutes=30)
    assert not dist.is_ucc_available()
    assert not dist.is_xccl_available()
