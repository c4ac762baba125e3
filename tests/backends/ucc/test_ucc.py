"""Groups over UCC: conformance, mismatches, aborts, deaths, memory that stays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.leaks import Snapshot
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.conformance import Options, Setup, check_backend
from tests.backends.conformance.runs import text
from tests.test_security import elsewhere, seen

pytestmark = [pytest.mark.usefixtures("ucc_library"), pytest.mark.processes]

OPTIONS = Options(
    timeout=60,
    report_seconds=20,
    abort_seconds=10,
    leak_seconds=30,
    sizes=(0, 1, 7, 1009, 300_000),
    running_times=2,
)


@contextlib.contextmanager
def world(timeout: float = 60) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("cpu:ucc", timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


def works_again(me: Rank) -> None:
    total = np.full(5000, me.rank + 1.0)
    dist.all_reduce(total)
    assert (total == me.size * (me.size + 1) / 2).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ops_are_exact(size: int) -> None:
    report = check_backend(Setup("ucc", options=OPTIONS), [size], levels=["exact"])
    assert not report.failed, text(report)
    assert {one.name for one in report.skipped} <= {"send_and_recv"}
    assert bool(report.skipped) == (size == 1)
    # What is skipped inside a rule are reductions of float16.
    refused = {reason for one in report.held for reason in one.skipped.values()}
    assert all("float16" in reason for reason in refused), refused


def test_it_listens_on_loopback_where_all_ranks_share_a_host() -> None:
    for found, _ in run_ranks(2, seen, "cpu:ucc"):
        assert found
        assert elsewhere(found) == []


def test_the_interface_of_gloo_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-0")
    for error in run_ranks(2, refused):
        assert "GLOO_SOCKET_IFNAME names 'no-such-0'" in error


def refused(me: Rank) -> str:
    with world(), pytest.raises(dist.DistError) as caught:
        works_again(me)
    return str(caught.value)


def test_the_contract_holds() -> None:
    report = check_backend(Setup("ucc", options=OPTIONS), [2], levels=["contract"])
    assert not report.failed, text(report)


def test_groups_recover() -> None:
    rules = ["all_reduce", "all_to_all", "recv"]
    report = check_backend(
        Setup("ucc", options=OPTIONS), [2, 4], levels=["recover"], rules=rules
    )
    assert not report.failed, text(report)
    assert not report.skipped


# -- calls that do not match -----------------------------------------------------


def _differ(me: Rank, case: str, x: np.ndarray) -> None:
    """Do on rank 1 something else than the others."""
    odd = me.rank == 1
    if case == "op" and odd:
        dist.broadcast(x, 0)
    elif case == "root":
        dist.broadcast(x, 1 if odd else 0)
    elif case == "parts":
        # Rank 1 sends 3 elements to rank 0, which expects 2.
        inputs = [np.ones(3 if odd and peer == 0 else 2) for peer in range(me.size)]
        dist.all_to_all([np.ones(2) for _ in range(me.size)], inputs)
    elif case == "barrier" and odd:
        dist.barrier()
    elif case == "dtype" and odd:
        dist.all_reduce(x.view(np.int32))
    elif case == "count" and odd:
        dist.all_reduce(x[:5])
    elif case == "reduction" and odd:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    else:
        dist.all_reduce(x)


def _mismatch(me: Rank, case: str) -> str:
    """Return the text of the error."""
    with world():
        works_again(me)
        x = np.ones(6, np.float32)
        with pytest.raises(dist.DistBackendError) as caught:
            _differ(me, case, x)
        assert (x == 1).all(), "UCC was called all the same"
        me.meet("failed")
        dist.rebuild_process_group()
        works_again(me)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("op", "rank 1: broadcast of float32, 6 elements, root 0"),
        ("root", "rank 1: broadcast of float32, 6 elements, root 1"),
        ("dtype", "rank 1: all_reduce of int32, 6 elements, SUM"),
        ("count", "rank 1: all_reduce of float32, 5 elements, SUM"),
        ("reduction", "rank 1: all_reduce of float32, 6 elements, MAX"),
        ("parts", "rank 1: all_to_all of float64, to the ranks [3, 2, 2]"),
        ("barrier", "rank 1: barrier"),
    ],
)
def test_a_mismatch_is_the_same_error_on_every_rank(case: str, told: str) -> None:
    for error in run_ranks(3, _mismatch, case):
        assert told in error
        assert "ranks 0, 2: " in error


def _mismatch_in_a_part(me: Rank) -> str:
    with world():
        part = dist.new_group([0, 2])
        if me.rank == 1:
            return ""
        x = np.ones(me.rank + 1)
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(x, group=part)
        return str(caught.value)


def test_a_mismatch_in_a_part_names_the_global_ranks() -> None:
    first, _, third = run_ranks(3, _mismatch_in_a_part)
    for error in (first, third):
        assert "rank 0: all_reduce of float64, 1 element, SUM" in error
        assert "rank 2: all_reduce of float64, 3 elements, SUM" in error


def _sizes_of_messages(me: Rank) -> str:
    with world():
        if me.rank == 0:
            dist.send(np.ones(3), 1)
        # On rank 0 a message that never comes: until the group has failed.
        work = dist.irecv(np.ones(4), 1 - me.rank)
        assert work is not None
        with pytest.raises(dist.DistError) as caught:
            work.wait()
    return str(caught.value)


def test_a_message_of_another_length_is_an_error() -> None:
    for error in run_ranks(2, _sizes_of_messages):
        assert "rank 0 sent 24 bytes where 32 were expected" in error


def _check_on_one_rank_alone(me: Rank) -> str:
    if me.rank == 1:
        os.environ["RANKSCOPE_UCC_CHECK"] = "0"
    with world(), pytest.raises(dist.DistBackendError) as caught:
        dist.barrier()
    return str(caught.value)


def test_the_comparison_is_switched_off_on_all_ranks_or_on_none() -> None:
    for error in run_ranks(2, _check_on_one_rank_alone):
        assert "RANKSCOPE_UCC_CHECK=0 is set on rank 1 alone" in error


def _unchecked(me: Rank) -> None:
    with world():
        works_again(me)
        dist.barrier()
        parts = [np.zeros(rank + 1) for rank in range(me.size)]
        dist.all_gather(parts, np.full(me.rank + 1, float(me.rank)))
        assert [part.sum() for part in parts] == [r * (r + 1) for r in range(me.size)]


def test_ops_run_without_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_UCC_CHECK", "0")
    run_ranks(3, _unchecked)


# -- what UCC lacks --------------------------------------------------------------


def _refused(me: Rank) -> None:
    with world() as group:
        with pytest.raises(TypeError, match=r"ucc backend has no .*float16.*astype"):
            dist.all_reduce(np.ones(4, np.float16))
        with pytest.raises(ValueError, match="from no rank but a named one"):
            dist.recv(np.ones(4))
        with pytest.raises(ValueError, match="tags 0 to 31999"):
            dist.isend(np.ones(4), 1 - me.rank, tag=32000)
        assert group.aborted is None
        works_again(me)


def test_what_ucc_lacks_is_refused_and_the_group_goes_on() -> None:
    run_ranks(2, _refused)


def _flags(me: Rank) -> None:
    with world():
        mine = np.array([me.rank == 0, True, False])
        for op, expected in {
            dist.ReduceOp.SUM: [True, True, False],
            dist.ReduceOp.MAX: [True, True, False],
            dist.ReduceOp.BAND: [False, True, False],
            dist.ReduceOp.PRODUCT: [False, True, False],
            dist.ReduceOp.BXOR: [True, me.size % 2 == 1, False],
        }.items():
            flags = mine.copy()
            dist.all_reduce(flags, op)
            assert flags.view(np.uint8).tolist() == expected, op


def test_bool_has_the_reductions_of_numpy() -> None:
    run_ranks(3, _flags)


def _sums(me: Rank) -> list[list[bytes]]:
    """Return the bits of sums, twice each: of few elements, and of many."""
    sums = []
    with world():
        for size in (1, 7, 1000, 1 << 16):
            drawn = np.random.default_rng(me.rank).standard_normal(size)
            twice = [drawn.astype(np.float32) for _ in range(2)]
            for x in twice:
                dist.all_reduce(x)
            sums.append([x.tobytes() for x in twice])
    return sums


def test_sums_have_the_same_bits_on_every_rank_and_in_every_run() -> None:
    for of_one_size in zip(*run_ranks(4, _sums), strict=True):
        assert len({bits for twice in of_one_size for bits in twice}) == 1


# -- aborts, deaths ----------------------------------------------------------------


def _aborts(me: Rank, cycles: int) -> None:
    """Abort ops that wait, move or are unread; then the group works again."""
    with world() as group:
        works_again(me)
        before = Snapshot.take()
        for cycle in range(cycles):
            arrays = [np.full(1 << 19, float(me.rank)) for _ in range(3)]
            works = []
            if cycle % 3 == 0 and me.rank:  # rank 0 is absent
                works = [dist.all_reduce(x, async_op=True) for x in arrays]
            elif cycle % 3 == 1 and me.rank:  # messages that rank 0 never receives
                works = [dist.isend(x, 0) for x in arrays]
                works += [dist.isend(x[:5], 0) for x in arrays]
            elif cycle % 3 == 2 and me.rank:  # messages that rank 0 never sends
                works = [dist.irecv(x, 0) for x in arrays]
            me.meet(f"issued {cycle}")
            if me.rank == 0:
                dist.abort_process_group(reason="tried")
            until(lambda: group.aborted is not None, 60, "the abort")
            frozen = [x.copy() for x in arrays]
            for work in works:
                with contextlib.suppress(dist.DistError):
                    work.wait(60)
            me.meet(f"aborted {cycle}")
            dist.rebuild_process_group()
            works_again(me)
            for x, was in zip(arrays, frozen, strict=True):
                assert (x == was).all(), f"cycle {cycle}: written to after the abort"
        # A receive in flight keeps its context, of 8 descriptors with UCX 1.22; those
        # of the other two kinds are freed.
        allowed = cycles // 3 * 10
        until(
            lambda: _more_descriptors(before) <= allowed,
            60,
            f"at most {allowed} descriptors more",
        )


def _more_descriptors(before: Snapshot) -> int:
    return len(Snapshot.take().descriptors) - len(before.descriptors)


@pytest.mark.parametrize("size", [2, 4])
def test_aborted_groups_are_rebuilt_and_their_contexts_are_freed(size: int) -> None:
    run_ranks(size, _aborts, 6, timeout=150)


def _abort_while_connecting(me: Rank) -> None:
    with world() as group:
        if me.rank == 0:
            work = dist.all_reduce(np.ones(5), async_op=True)
            dist.abort_process_group(reason="tried")
            with pytest.raises(dist.DistError, match="tried"):
                work.wait(60)
        until(lambda: group.aborted is not None, 60, "the abort")
        me.meet("aborted")
        dist.rebuild_process_group()
        works_again(me)


def test_a_group_is_aborted_before_its_ranks_have_met() -> None:
    run_ranks(2, _abort_while_connecting)


def _bereaved(me: Rank, victim: int) -> None:
    with world():
        works_again(me)
        me.report("connected")
        if me.rank == victim:
            me.listen()
        works = [dist.all_reduce(np.ones(1 << 18), async_op=True) for _ in range(3)]
        me.report("in flight")
        for work in works:
            with pytest.raises(dist.DistAbortedError, match=f"rank {victim} "):
                work.wait(60)
        left = dist.shrink_group([victim])
        total = np.full(3, me.rank + 1.0)
        dist.all_reduce(total, group=left)
        assert total[0] == 6 - (victim + 1)


def test_a_death_ends_the_ops_of_the_others() -> None:
    with Ranks(3, _bereaved, 1) as ranks:
        for rank in range(3):
            assert ranks.next_report(rank) == "connected"
        for rank in (0, 2):
            assert ranks.next_report(rank) == "in flight"
        ranks.kill(1)
        ranks.wait()
