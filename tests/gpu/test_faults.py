"""Tests of faults of two ranks on one GPU: hangs, aborts, deaths and shrinking.

As in `test_two_ranks`, the ranks share the GPU and communicate over loopback.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.groups.world import world as groups
from rankscope.backends.nccl import nccl4py
from tests.gpu.ranks import SLACK, aborted_meanwhile, used, world

pytestmark = pytest.mark.processes

# Seconds that the ranks of a test may run.
WAIT = 120


def begin(cupy: Any) -> tuple[Any, ProcessGroup]:
    """Return an array that was reduced once, and the default group, which is idle."""
    x = cupy.ones(1000)
    dist.all_reduce(x)
    cupy.cuda.Device().synchronize()
    return x, groups.get_group()


def hang(me: Rank) -> float:
    """Omit an op on rank 1, so that rank 0 hangs in synchronize() until the abort.

    Returns the seconds from the abort to the return of synchronize() on rank 0.
    """
    took = 0.0
    with world(me) as cupy:
        x, group = begin(cupy)
        if me.rank == 0:
            with aborted_meanwhile(group, "rank 1 never came") as began:
                work = dist.all_reduce(x, async_op=True)
                queued = dist.all_reduce(x, async_op=True)
                work.wait()
                cupy.cuda.get_current_stream().synchronize()
                took = time.monotonic() - began[0]
                for one in (work, queued):
                    with pytest.raises(dist.DistAbortedError, match="rank 1 never"):
                        one.wait()
        else:
            until(lambda: group.aborted is not None, 60)
        with pytest.raises(dist.DistAbortedError):
            dist.all_reduce(x)
        works_again(cupy)
    return took


def works_again(cupy: Any, group: ProcessGroup | None = None) -> None:
    """Rebuild `group` (default: the default group) and check an all_reduce."""
    dist.rebuild_process_group(group)
    x = cupy.ones(1000)
    dist.all_reduce(x, group=group)
    assert (x.get() == 2).all()


def test_a_hang_is_aborted_while_the_main_thread_synchronizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    took = run_ranks(2, hang, timeout=WAIT)[0]
    with capsys.disabled():
        print(f"\nabort → synchronize() is back: {took * 1e3:.0f} ms")
    assert took < 2


def two_hang(me: Rank) -> None:
    """Issue an op of a group behind a hanging op of another group, and abort it."""
    with world(me) as cupy:
        x, first = begin(cupy)
        second: Any = dist.new_group(range(me.size), group_desc="second")
        dist.all_reduce(cupy.ones(1000), group=second)
        cupy.cuda.Device().synchronize()
        taken = 0
        for round_ in range(3):
            if me.rank == 0:
                with aborted_meanwhile(second, "enough"):
                    hung = dist.all_reduce(x, async_op=True)
                    # From here on the current stream waits for the hanging op.
                    hung.wait()
                    behind = dist.all_reduce(x, group=second, async_op=True)
                    behind.wait()
                    cupy.cuda.get_current_stream().synchronize()
                    with pytest.raises(dist.DistAbortedError, match="enough"):
                        behind.wait()
                    with pytest.raises(dist.DistAbortedError, match="beside a comm"):
                        hung.wait()
            else:
                until(lambda: first.aborted and second.aborted, 60)
            for group in (first, second):
                works_again(cupy, group)
            # The GPU now holds the memory of both ranks, with two communicators each.
            dist.barrier()
            if round_ == 0:
                taken = used(cupy)
        until(lambda: used(cupy) <= taken + SLACK, 20, "memory is given back")
        dist.barrier()


def test_an_abort_takes_along_the_group_whose_op_is_in_its_way() -> None:
    run_ranks(2, two_hang, timeout=WAIT)


def told_at_the_end(me: Rank) -> None:
    """Check that destroy raises the error of an op whose wait returned no error.

    On rank 0 every call returns, one of them because of an abort.
    """
    with world(me) as cupy:
        x, group = begin(cupy)
        if me.rank == 1:
            until(lambda: group.aborted is not None, 60)
            return
        with aborted_meanwhile(group, "rank 1 never came"):
            dist.all_reduce(x)
            cupy.cuda.get_current_stream().synchronize()
        with pytest.raises(dist.DistAbortedError, match="#2.*rank 1 never came"):
            dist.destroy_process_group()
        assert not dist.is_initialized()


def test_an_error_that_came_too_late_is_told_at_the_end() -> None:
    run_ranks(2, told_at_the_end, timeout=WAIT)


def never_comes(me: Rank) -> None:
    """Check the error of rank 0 if rank 1 never joins the communicator."""
    with world(me, timeout=5) as cupy:
        if me.rank == 1:
            until(lambda: groups.get_group().aborted is not None, 60)
            return
        began = time.monotonic()
        with pytest.raises(dist.DistError, match="rank 1 of the group never joined"):
            dist.all_reduce(cupy.ones(4))
        assert time.monotonic() - began < 20


def test_a_missing_peer_at_init_is_named_and_ends() -> None:
    run_ranks(2, never_comes, timeout=WAIT)


def gives_up(me: Rank) -> None:
    """Abort on rank 0 a creation of the communicator that rank 1 has not joined."""
    with world(me) as cupy:
        group = groups.get_group()
        if me.rank == 0:
            with aborted_meanwhile(group, "enough") as began:
                with pytest.raises(dist.DistAbortedError, match="enough"):
                    dist.all_reduce(cupy.ones(4))
                assert time.monotonic() - began[0] < 2
        else:
            until(lambda: group.aborted is not None, 60)
        works_again(cupy)


def test_a_missing_peer_at_init_can_be_given_up() -> None:
    run_ranks(2, gives_up, timeout=WAIT)


def loses_its_peer(me: Rank) -> None:
    """Report the error of rank 0 after rank 1 was killed or stopped."""
    with world(me, timeout=8) as cupy:
        x = cupy.ones(1000)
        dist.all_reduce(x)
        cupy.cuda.get_current_stream().synchronize()
        me.report("ready")
        if me.rank == 1:
            time.sleep(WAIT)
            return
        me.listen(WAIT)
        with pytest.raises(dist.DistError) as caught:
            dist.all_reduce(x, async_op=True).synchronize()
        me.report(str(caught.value))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops(how: int) -> None:
    with Ranks(2, loses_its_peer, timeout=WAIT) as ranks:
        for rank in range(2):
            assert ranks.next_report(rank) == "ready"
        ranks.kill(1, how)
        ranks.tell(0, "go on")
        said = ranks.next_report(0, 60)
    # Rank 0 may issue the op before or after the death of rank 1 is detected.
    assert "all_reduce #2" in said or (how == signal.SIGKILL and "all_reduce" in said)
    assert how != signal.SIGKILL or "rank 1" in said


def shrinks(me: Rank) -> bool:
    """Omit an op on rank 1; shrink the group on rank 0 and continue with rank 0.

    Returns whether ncclCommShrink was called.
    """
    with world(me) as cupy:
        x, group = begin(cupy)
        if me.rank == 1:
            until(lambda: group.aborted is not None, 60)
            return False
        nccl = nccl4py.load().nccl
        shrink, made = nccl.shrink, []

        def counted(comm: Any, excluded: Any, *, abort: bool) -> Any:
            made.append(excluded)
            return shrink(comm, excluded, abort=abort)

        nccl.shrink = counted  # type: ignore[method-assign]
        hung = dist.all_reduce(x, async_op=True)
        left = dist.shrink_group([1], shrink_flags=dist.SHRINK_ABORT)
        y = cupy.full(1000, 5.0)
        dist.all_reduce(y, group=left)
        assert (y.get() == 5).all()
        with pytest.raises(dist.DistAbortedError, match="go on without rank 1"):
            hung.synchronize()
        return bool(made)


def test_shrink_ends_what_hangs_and_goes_on() -> None:
    assert run_ranks(2, shrinks, timeout=WAIT) == [True, False]
