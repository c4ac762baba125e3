"""The coalescing manager, batches of sends and receives, and op hooks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import OpType, ReduceOp, WorkState
from rankscope.backends.work.flight_recorder import recorder
from tests.backends.manual import Manual


def ids() -> list[tuple[str, int, int, int]]:
    """(op, collective_seq_id, p2p_seq_id, op_id) of everything recorded."""
    return [
        (r.op_type.value, r.collective_seq_id, r.p2p_seq_id, r.op_id)
        for r in recorder.records()
    ]


def kinds() -> list[OpType]:
    return [call[0] for call in Manual.made[0].calls]


def test_ops_are_issued_once_at_the_end_of_the_block(group: dist.ProcessGroup) -> None:
    arrays = [np.full(n, float(n)) for n in (1, 2, 3)]
    with dist.coalescing_manager(async_ops=True) as manager:
        for array in arrays:
            assert dist.all_reduce(array) is None
        assert Manual.made[0].works == []
        assert recorder.records() == []
    assert kinds() == [OpType.ALL_REDUCE]
    flat = Manual.made[0].calls[0][1]
    assert flat.tolist() == [1, 2, 2, 3, 3, 3]
    assert ids() == [("all_reduce", 1, 0, i) for i in (1, 2, 3)]
    assert "3 coalesced all_reduce #1" in repr(manager.works[0])
    flat *= 10
    Manual.made[0].works[0].mark_completed()
    assert manager.wait()
    assert [array[0] for array in arrays] == [10, 20, 30]
    assert {r.state for r in recorder.records()} == {WorkState.COMPLETED}
    assert group.summary().in_flight == 0


def test_without_async_ops_the_end_of_the_block_waits(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Manual.all_reduce

    def at_once(self: Manual, tensor: Any, op: ReduceOp) -> dist.Work:
        work = plain(self, tensor, op)
        work.mark_completed()
        return work

    monkeypatch.setattr(Manual, "all_reduce", at_once)
    with dist.coalescing_manager() as manager:
        dist.all_reduce(np.ones(2))
        dist.all_reduce(np.ones(2))
    assert manager.is_completed()


def test_mixed_ops_keep_their_order_and_runs_are_fused(
    group: dist.ProcessGroup,
) -> None:
    x = np.ones(4)
    with dist.coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(x.copy())
        dist.all_reduce(x.copy(), ReduceOp.MAX)
        dist.barrier()
        dist.isend(x, 1)
        dist.irecv(x.copy(), 2)
        dist.all_reduce(x.copy())
    assert kinds() == [
        OpType.ALL_REDUCE,
        OpType.ALL_REDUCE,
        OpType.BARRIER,
        OpType.SEND,
        OpType.RECV,
        OpType.ALL_REDUCE,
    ]
    assert len(manager.works) == 5
    assert ids() == [
        ("all_reduce", 1, 0, 1),
        ("all_reduce", 1, 0, 2),
        ("all_reduce", 1, 0, 3),
        ("barrier", 1, 0, 4),
        ("send", 1, 1, 5),
        ("recv", 1, 1, 6),
        ("all_reduce", 1, 1, 7),
    ]
    for work in Manual.made[0].works:
        assert not manager.is_completed()
        work.mark_completed()
    assert manager.wait(5)
    assert dist.all_reduce(np.ones(0), async_op=True).sequence_number == 2


def test_gathers_are_fused_and_unpacked(group: dist.ProcessGroup) -> None:
    inputs = [np.arange(2.0), np.arange(3.0)]
    outputs = [np.zeros(8), np.zeros(12)]
    work = dist.all_gather_into_tensor_coalesced(outputs, inputs, async_op=True)
    assert kinds() == [OpType.ALL_GATHER]
    Manual.made[0].works[0].mark_completed()
    assert work is not None
    assert work.wait(5)
    for output, tensor in zip(outputs, inputs, strict=True):
        np.testing.assert_array_equal(output, np.tile(tensor, 4))


def test_reduce_scatters_are_fused_packed_by_rank_and_averaged(
    group: dist.ProcessGroup,
) -> None:
    inputs = [np.arange(8.0), np.arange(12.0)]
    outputs = [np.zeros(2), np.zeros(3)]
    work = dist.reduce_scatter_tensor_coalesced(
        outputs, inputs, ReduceOp.AVG, async_op=True
    )
    assert kinds() == [OpType.ALL_REDUCE]
    flat = Manual.made[0].calls[0][1]
    assert flat.reshape(4, 5)[1].tolist() == [2, 3, 3, 4, 5]
    Manual.made[0].works[0].mark_completed()
    assert work is not None
    assert work.wait(5)
    assert outputs[0].tolist() == [0, 0.25]
    assert outputs[1].tolist() == [0, 0.25, 0.5]


def test_dtypes_are_kept_apart(group: dist.ProcessGroup) -> None:
    arrays = [np.ones(2, "f4"), np.ones(3, "i8"), np.ones(4, "f4")]
    work = dist.all_reduce_coalesced(arrays, async_op=True)
    sizes = [(call[1].dtype.name, call[1].size) for call in Manual.made[0].calls]
    assert sizes == [("float32", 6), ("int64", 3)]
    for one in Manual.made[0].works:
        one.mark_completed()
    assert work is not None
    assert work.wait(5)


def test_an_op_of_the_block_may_be_waited_for_after_it(
    group: dist.ProcessGroup,
) -> None:
    x, y = np.ones(2), np.ones(2)
    with dist.coalescing_manager(async_ops=True):
        inside = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        assert inside is not None
        with pytest.raises(dist.DistBackendError, match="wait after the block"):
            inside.wait()
        with pytest.raises(dist.DistBackendError, match="wait after the block"):
            dist.send(x, 1)
    Manual.made[0].works[0].mark_completed()
    assert inside.wait(5)
    assert inside.sequence_number == 1


def test_an_exception_in_the_body_issues_nothing(group: dist.ProcessGroup) -> None:
    with pytest.raises(KeyError), dist.coalescing_manager():  # noqa: PT012
        inside = dist.all_reduce(np.ones(2), async_op=True)
        raise KeyError("mine")
    assert Manual.made[0].works == []
    assert recorder.records() == []
    assert inside is not None
    with pytest.raises(dist.DistBackendError, match="nothing was issued"):
        inside.wait()
    work = dist.all_reduce(np.ones(2), async_op=True)
    assert work is not None
    assert work.sequence_number == 1


def test_bad_input_in_the_body_issues_nothing(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):  # noqa: SIM117, PT012
        with dist.coalescing_manager():
            dist.all_reduce(np.ones(2))
            dist.all_reduce(np.ones(8)[::2])
    assert Manual.made[0].works == []


def test_an_empty_block_is_a_completed_batch(group: dist.ProcessGroup) -> None:
    with dist.coalescing_manager() as manager:
        pass
    assert manager.is_completed()
    assert manager.wait(0)
    with dist.coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(np.ones(0))
        dist.all_reduce(np.ones(0))
    assert manager.wait(5)
    assert Manual.made[0].works == []


def test_the_works_of_a_block_in_a_block_are_over_with_their_ops(
    group: dist.ProcessGroup,
) -> None:
    with dist.coalescing_manager(async_ops=True):
        two = dist.all_reduce_coalesced([np.ones(2), np.ones(3)], async_op=True)
        assert dist.all_reduce_coalesced([np.ones(4)]) is None
        with dist.coalescing_manager(async_ops=True) as inner:
            dist.all_reduce(np.ones(5), ReduceOp.MAX)
        assert two is not None
        assert not two.is_completed()
        with pytest.raises(dist.DistBackendError, match="wait after the block"):
            two.wait()
    first, second = Manual.made[0].works
    first.mark_completed()
    assert two.wait(5)
    assert not inner.is_completed()
    second.mark_completed()
    assert inner.wait(5)


def test_a_block_in_a_block_that_raises_leaves_out_its_own_ops(
    group: dist.ProcessGroup,
) -> None:
    with dist.coalescing_manager(async_ops=True):
        dist.all_reduce(np.ones(2))
        # The second array fails, after the first is taken.
        with pytest.raises(TypeError, match="tensor is a str"):
            dist.all_reduce_coalesced([np.ones(3), "not an array"])
    assert kinds() == [OpType.ALL_REDUCE]
    assert Manual.made[0].calls[0][1].size == 2


def test_a_block_in_a_block_joins_it(group: dist.ProcessGroup) -> None:
    with dist.coalescing_manager(async_ops=True) as outer:
        dist.all_reduce(np.ones(1))
        with dist.coalescing_manager() as inner:
            dist.all_reduce(np.ones(1))
        assert Manual.made[0].works == []
    assert len(inner.works) == 1
    assert kinds() == [OpType.ALL_REDUCE]
    Manual.made[0].works[0].mark_completed()
    assert outer.wait(5)


def test_blocks_on_two_groups_are_apart(group: dist.ProcessGroup) -> None:
    other = dist.new_group([0, 1], group_desc="other")
    with dist.coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(np.ones(1))
        dist.all_reduce(np.ones(1), group=other, async_op=True)
        assert len(Manual.made) == 2
        assert [len(backend.works) for backend in Manual.made] == [0, 1]
    assert [len(backend.works) for backend in Manual.made] == [1, 1]
    assert len(manager.works) == 1


def test_an_abort_reaches_the_whole_batch(group: dist.ProcessGroup) -> None:
    with dist.coalescing_manager(async_ops=True) as manager:
        inside = dist.all_reduce(np.ones(1), async_op=True)
        dist.all_reduce(np.ones(1))
        dist.isend(np.ones(1), 1)
    dist.abort_process_group(reason="stop")
    with pytest.raises(dist.DistAbortedError, match="stop"):
        manager.wait(5)
    assert inside is not None
    with pytest.raises(dist.DistAbortedError, match="2 coalesced all_reduce #1"):
        inside.wait(5)
    assert {r.state for r in recorder.records()} == {WorkState.ABORTED}


def test_a_batch_of_sends_and_receives(group: dist.ProcessGroup) -> None:
    x, y = np.ones(2), np.zeros(2)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1, tag=3), dist.P2POp(dist.irecv, y, group_peer=1)]
    )
    assert [call[0] for call in Manual.made[0].calls] == [OpType.SEND, OpType.RECV]
    assert ids() == [("send", 0, 1, 1), ("recv", 0, 1, 2)]
    for one in Manual.made[0].works:
        one.mark_completed()
    assert all(work.wait(5) for work in works)
    assert [work.op_type for work in works] == [OpType.SEND, OpType.RECV]
    assert works[1].source_rank() == 1


def test_a_p2p_op_knows_both_ranks_of_its_peer(group: dist.ProcessGroup) -> None:
    pair = dist.new_group([0, 3], group_desc="pair")
    x = np.ones(2)
    by_global = dist.P2POp(dist.isend, x, 3, pair)
    by_group = dist.P2POp(dist.irecv, x, group=pair, group_peer=1)
    for op in (by_global, by_group):
        assert (op.peer, op.group_peer, op.group) == (3, 1, pair)
    assert repr(by_global) == "<P2POp isend 3 in 'pair', tag 0>"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "peer is missing"),
        ({"peer": 1, "group_peer": 1}, ValueError, "not both"),
        ({"peer": 7}, ValueError, "peer=7; expected a rank in the group"),
        ({"peer": 0}, ValueError, "this rank itself"),
        ({"peer": 1, "tensor": [1.0]}, TypeError, "tensor is a list"),
        ({"peer": 1, "tag": -1}, ValueError, "tag=-1"),
        ({"peer": 1, "group": "pair"}, TypeError, "group is a str"),
    ],
)
def test_a_bad_p2p_op_is_refused_where_it_is_made(
    group: dist.ProcessGroup, arguments: dict, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"P2POp.*{match}"):
        dist.P2POp(dist.isend, **{"tensor": np.ones(2), **arguments})


def test_a_bad_batch_is_refused(group: dist.ProcessGroup) -> None:
    other = dist.new_group([0, 1], group_desc="other")
    x = np.ones(2)
    with pytest.raises(ValueError, match="expected isend or irecv"):
        dist.P2POp(dist.all_reduce, x, 1)
    with pytest.raises(ValueError, match="at least one P2POp"):
        dist.batch_isend_irecv([])
    with pytest.raises(ValueError, match="different groups"):
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.isend, x, 1, group=other)]
        )
    assert Manual.made == []


# -- hooks -------------------------------------------------------------------


def test_hooks_see_the_op_before_and_after(group: dist.ProcessGroup) -> None:
    seen: list[tuple[Any, ...]] = []
    hook = dist.add_op_hook(
        pre=lambda op: seen.append(("pre", op.group, op.op_type, op.sizes, op.seq)),
        post=lambda op, work: seen.append(("post", op.seq, work.state)),
    )
    try:
        work = dist.all_reduce(np.ones((2, 3)), async_op=True)
        assert work is not None
        work.mark_completed()
        with dist.coalescing_manager(async_ops=True):
            dist.all_reduce(np.ones(1))
        Manual.made[0].works[-1].mark_completed()
    finally:
        hook.remove()
    dist.all_reduce(np.ones(0))
    assert seen == [
        ("pre", "default", OpType.ALL_REDUCE, [(2, 3)], -1),
        ("post", 1, WorkState.COMPLETED),
        ("pre", "default", OpType.ALL_REDUCE, [(1,)], -1),
        ("post", 2, WorkState.COMPLETED),
    ]


def test_a_hook_may_veto_and_nothing_is_issued(group: dist.ProcessGroup) -> None:
    def veto(op: Any) -> None:
        raise PermissionError(f"no {op.op_type.value} here")

    hook = dist.add_op_hook(pre=veto, group="default")
    try:
        with pytest.raises(PermissionError, match="no all_reduce here"):
            dist.all_reduce(np.ones(2))
        other = dist.new_group([0, 1], group_desc="other")
        assert dist.all_reduce(np.ones(2), group=other, async_op=True) is not None
    finally:
        hook.remove()
    assert group.status.collective_seq == 0
    with pytest.raises(ValueError, match="pre, post or both"):
        dist.add_op_hook()
    for bad in ({"pre": 3}, {"post": "x"}, {"pre": print, "group": group}):
        with pytest.raises(TypeError, match=f"add_op_hook: {[*bad][-1]}="):
            dist.add_op_hook(**bad)


def test_a_post_hook_that_fails_is_logged_and_the_op_stands(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(op: Any, work: dist.Work) -> None:
        raise ZeroDivisionError

    hook = dist.add_op_hook(post=broken)
    try:
        work = dist.all_reduce(np.ones(2), async_op=True)
        assert work is not None
        with caplog.at_level(logging.ERROR):
            work.mark_completed()
    finally:
        hook.remove()
    assert work.is_success()
    assert "post hook failed after all_reduce #1" in caplog.text


def test_timing_is_switched_per_group_and_fixed_per_work(
    group: dist.ProcessGroup,
) -> None:
    before = dist.all_reduce(np.ones(2), async_op=True)
    dist.enable_timing(group, False)
    without = dist.all_reduce(np.ones(2), async_op=True)
    dist.enable_timing(None, True)
    after = dist.all_reduce(np.ones(2), async_op=True)
    for work in Manual.made[0].works:
        work.mark_started()
        work.mark_completed()
    assert before is not None
    assert without is not None
    assert after is not None
    assert before.get_duration() is not None
    assert without.get_duration() is None
    assert after.get_duration() is not None
