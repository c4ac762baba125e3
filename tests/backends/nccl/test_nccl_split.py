"""Communicators made out of others: new_group by split, shrink_group by shrink."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.groups.spec import Origin
from rankscope.backends.groups.world import World
from rankscope.backends.nccl.split import CommSplit, _vote
from rankscope.backends.nccl.stream import NCCLStream
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation

CONFIG = BackendConfig("cuda:nccl")


class Worlds(Ranks):
    """Ranks whose group is the default one of a world of their own."""

    def begin(self, size: int, timeout: float = 30) -> Worlds:
        self.start(size, timeout)
        self.worlds: list[World] = []
        for rank, store in zip(self.ranks, self.stores, strict=True):
            world = World()
            rank.pg.shutdown()
            rank.pg = world.init(CONFIG, store, rank.rank, size, timeout, False)
            self.worlds.append(world)
        return self

    def new_groups(self, timeout: float = 30) -> list[ProcessGroup]:
        """A group of all ranks, as `new_group` makes it."""
        return [
            _group(
                world.new_group(
                    rank.pg.ranks, None, CONFIG, timeout, Origin(rank.pg.built_backend)
                )
            )
            for world, rank in zip(self.worlds, self.ranks, strict=True)
        ]

    def calls(self, name: str) -> int:
        return sum(call == name for call, _ in self.simulation.calls)

    def close(self) -> None:
        for world in self.worlds:
            for group in world.groups():
                group.shutdown()
        super().close()


def _group(made: Any) -> ProcessGroup:
    assert isinstance(made, ProcessGroup)
    return made


@pytest.fixture
def worlds(simulation: Simulation, tmp_path: Path) -> Iterator[Worlds]:
    made = Worlds(simulation, tmp_path)
    yield made
    made.close()


def total(r: Rank, group: ProcessGroup) -> float:
    x = r.array([r.rank + 1.0])
    dist.all_reduce(x, group=group)
    r.synchronize()
    return float(x[0])


def everywhere(groups: list[ProcessGroup]) -> Callable[[Rank], float]:
    return lambda r: total(r, groups[r.rank])


def test_a_group_of_all_ranks_is_split_off(worlds: Worlds) -> None:
    worlds.begin(3)
    worlds(lambda r: total(r, r.pg))
    for number in (1, 2):
        groups = worlds.new_groups()
        assert worlds(everywhere(groups)) == [6.0] * 3
        assert worlds.calls("split") == 3 * number
    assert worlds.calls("init") == 3
    # The old one goes on, and an abort of the new one leaves it alone.
    groups[0].abort("enough")
    until(lambda: all(group.aborted for group in groups))
    assert worlds(lambda r: total(r, r.pg)) == [6.0] * 3
    # A later generation may have other processes.
    for group in groups:
        group.rebuild()
    assert worlds(everywhere(groups)) == [6.0] * 3
    assert (worlds.calls("init"), worlds.calls("split")) == (6, 6)


def test_a_fresh_id_where_the_old_one_was_never_used(worlds: Worlds) -> None:
    groups = worlds.begin(2).new_groups()
    assert worlds(everywhere(groups)) == [3.0] * 2
    assert (worlds.calls("init"), worlds.calls("split")) == (2, 0)


def test_a_fresh_id_where_one_rank_is_at_something(worlds: Worlds) -> None:
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups()
    done = threading.Event()

    def body(r: Rank) -> float:
        if r.rank == 0:
            # Rank 1 comes to this one when it has done the other.
            work = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
            got = total(r, groups[0])
            assert not work.is_completed()
            done.set()
            work.wait()
            return got
        got = total(r, groups[1])
        assert done.wait(20)
        dist.all_reduce(r.array([1.0]), group=r.pg)
        return got

    assert worlds(body) == [3.0] * 2
    assert (worlds.calls("init"), worlds.calls("split")) == (4, 0)
    worlds(lambda r: r.synchronize())


def test_a_fresh_id_for_other_options(worlds: Worlds) -> None:
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups()

    def body(r: Rank) -> float:
        with dist.nccl_options(max_ctas=2):
            return total(r, groups[r.rank])

    assert worlds(body) == [3.0] * 2
    assert worlds.calls("split") == 0


def test_ops_of_the_old_one_wait_while_the_new_one_is_made(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups()
    split, begun = simulation.nccl.split, threading.Event()
    go = threading.Event()

    def slow(comm: Any, rank: int) -> Any:
        begun.set()
        assert go.wait(20)
        return split(comm, rank)

    simulation.nccl.split = slow  # type: ignore[method-assign]

    def body(r: Rank) -> None:
        new = dist.all_reduce(r.array([1.0]), group=groups[r.rank], async_op=True)
        assert begun.wait(20)
        old = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        go.set()
        new.wait(20)
        old.wait(20)

    worlds(body)
    assert worlds.calls("split") == 2


def test_a_rank_that_dies_in_between_ends_both(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(2, timeout=1)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups(timeout=1)
    split = simulation.nccl.split
    gone = threading.Event()

    def dies(comm: Any, rank: int) -> Any:
        if rank == 1:
            assert gone.wait(30)
            raise dist.DistBackendError("it is dead")
        return split(comm, rank)

    simulation.nccl.split = dies  # type: ignore[method-assign]

    def body(r: Rank) -> None:
        if r.rank == 1:
            dist.all_reduce(r.array([1.0]), group=groups[1], async_op=True)
            return
        with pytest.raises(dist.DistError, match="was not ready after 1 s"):
            dist.all_reduce(r.array([1.0]), group=groups[0])
        # Nothing else ends what NCCL is at.
        until(lambda: r.pg.aborted is not None)
        assert "a communicator derived from it was aborted" in str(r.pg.aborted)

    worlds(body)
    gone.set()
    simulation.nccl.split = split  # type: ignore[method-assign]

    def again(r: Rank) -> float:
        groups[r.rank].rebuild()
        return total(r, groups[r.rank])

    assert worlds(again) == [3.0] * 2


def test_an_op_held_back_by_a_split_is_timed_out(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 does not vote: the old group does not wait as long as the new one."""
    worlds.begin(2, timeout=1)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups(timeout=600)
    reserve, held, votes = NCCLStream.reserve, threading.Event(), threading.Event()

    def slow(stream: NCCLStream, options: Any, *, abort: bool) -> bool:
        if stream.comm.rank == 1:
            assert votes.wait(60)
            return reserve(stream, options, abort=abort)
        reserved = reserve(stream, options, abort=abort)
        held.set()
        return reserved

    monkeypatch.setattr(NCCLStream, "reserve", slow)

    def body(r: Rank) -> None:
        # As new_group does after an init_process_group with a device_id.
        groups[r.rank].connect(r.rank)
        if r.rank == 0:
            assert held.wait(30)
            old = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
            with pytest.raises(dist.DistTimeoutError, match="1 s after it began"):
                old.synchronize()
            # The store tells the other rank of the abort.
            until(lambda: all(one.pg.aborted for one in worlds.ranks), 30)
            votes.set()
        # The new one begins anew, as the old one was aborted.
        assert total(r, groups[r.rank]) == 3.0

    try:
        worlds(body)
    finally:
        votes.set()
    assert worlds.calls("split") == 0


def test_an_abort_of_the_old_one_after_the_vote_begins_the_new_one_anew(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups()
    reserve = NCCLStream.reserve

    def aborted(stream: NCCLStream, options: Any, *, abort: bool) -> bool:
        reserved = reserve(stream, options, abort=abort)
        if stream.comm.rank == 1:
            worlds.ranks[0].pg.abort("enough")
            until(lambda: all(one.pg.aborted for one in worlds.ranks))
        return reserved

    monkeypatch.setattr(NCCLStream, "reserve", aborted)
    assert worlds(everywhere(groups)) == [3.0] * 2
    assert [group.aborted for group in groups] == [None] * 2
    assert "enough" in str(worlds.ranks[1].pg.aborted)


def test_an_abort_during_the_split_begins_the_new_one_anew(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups()
    split = simulation.nccl.split

    def aborted(comm: Any, rank: int) -> Any:
        made = split(comm, rank)
        if rank == 1:
            # The communicator's mutex is held here: the abort comes after the call.
            threading.Thread(target=worlds.ranks[1].pg.abort, args=["enough"]).start()
            until(lambda: all(one.pg.aborted for one in worlds.ranks))
        return made

    simulation.nccl.split = aborted  # type: ignore[method-assign]
    assert worlds(everywhere(groups)) == [3.0] * 2
    assert [group.aborted for group in groups] == [None] * 2


def test_a_rank_that_never_comes_to_a_split_holds_back_nothing(
    worlds: Worlds,
) -> None:
    """Ops and the abort of the old group do not wait for the new one."""
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups(timeout=600)
    with worlds.simulation.cuda.device(0):
        groups[0].connect(0)
    assert worlds(lambda r: total(r, r.pg)) == [3.0] * 2
    worlds.ranks[0].pg.abort("enough")
    until(lambda: all(r.pg.aborted for r in worlds.ranks))
    assert [group.aborted for group in groups] == [None] * 2
    # Without the old one, a late rank can still join.
    assert worlds(everywhere(groups)) == [3.0] * 2
    assert worlds.calls("split") == 0


def test_shrink_to_the_ranks_that_are_well(worlds: Worlds) -> None:
    """Rank 1 never comes: the others end what hangs, and go on without it."""
    worlds.begin(3)
    worlds(lambda r: dist.barrier(group=r.pg))

    def body(r: Rank) -> float | None:
        if r.rank == 1:
            until(lambda: r.pg.aborted is not None)
            assert "its ranks 0, 2 go on without rank 1" in str(r.pg.aborted)
            return None
        hung = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        hung.wait()
        until(lambda: bool(hung.started_ns) or hung.is_completed())
        began = time.monotonic()
        left = worlds.worlds[r.rank].shrink(r.pg, [1], abort=True)
        assert time.monotonic() - began < 20
        assert (left.group_desc, left.ranks) == ("default without 1", [0, 2])
        got = total(r, left)
        for waits in (hung.wait, hung.synchronize):
            with pytest.raises(dist.DistAbortedError, match="shrink_group"):
                waits()
        with pytest.raises(dist.DistAbortedError):
            dist.all_reduce(r.array([1.0]), group=r.pg)
        return got

    assert worlds(body) == [4.0, None, 4.0]
    assert (worlds.calls("init"), worlds.calls("shrink")) == (3, 2)
    until(lambda: {("abort", 0), ("abort", 2)} <= set(worlds.simulation.calls))


def test_shrink_leaves_a_group_that_is_well_as_it_is(worlds: Worlds) -> None:
    worlds.begin(3)
    worlds(lambda r: dist.barrier(group=r.pg))

    def body(r: Rank) -> float | None:
        if r.rank == 0:
            return None
        return total(r, worlds.worlds[r.rank].shrink(r.pg, [0], abort=False))

    assert worlds(body) == [None, 5.0, 5.0]
    assert (worlds.calls("init"), worlds.calls("shrink")) == (3, 2)
    assert worlds(lambda r: total(r, r.pg)) == [6.0] * 3


@pytest.mark.parametrize("why", ["aborted", "never used", "an old library"])
def test_shrink_begins_anew_where_there_is_nothing_to_shrink(
    worlds: Worlds, simulation: Simulation, why: str
) -> None:
    worlds.begin(3)
    if why != "never used":
        worlds(lambda r: dist.barrier(group=r.pg))
    if why == "aborted":
        worlds.ranks[0].pg.abort("it hung")
        until(lambda: all(r.pg.aborted for r in worlds.ranks))
    simulation.nccl.can_shrink = why != "an old library"

    def body(r: Rank) -> float | None:
        if r.rank == 2:
            return None
        left = worlds.worlds[r.rank].shrink(r.pg, [2], abort=True)
        got = total(r, left)
        until(lambda: r.pg.aborted is not None)
        return got

    assert worlds(body) == [3.0, 3.0, None]
    assert worlds.calls("shrink") == 0


# -- what goes wrong in between -----------------------------------------------------


def test_a_late_release_leaves_a_rebuilt_group_alone(worlds: Worlds) -> None:
    worlds.begin(3)
    worlds(lambda r: dist.barrier(group=r.pg))
    # Rank 2 never comes to it.
    worlds.worlds[0].shrink(worlds.ranks[0].pg, [1], abort=True)
    for world in worlds.worlds:
        world.rebuild(None)
    assert worlds(lambda r: total(r, r.pg)) == [6.0] * 3
    assert [r.pg.aborted for r in worlds.ranks] == [None] * 3


def test_a_failure_on_one_rank_is_told_to_all_and_nothing_is_kept(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(3)
    worlds(lambda r: dist.barrier(group=r.pg))
    shrink, made = simulation.nccl.shrink, []

    def fails(comm: Any, excluded: Any, *, abort: bool) -> Any:
        if comm.rank == 2:
            raise dist.DistBackendError("no memory left")
        made.append(shrink(comm, excluded, abort=abort))
        return made[-1]

    simulation.nccl.shrink = fails  # type: ignore[method-assign]
    # Nobody waits for anything in the new group.
    left = [
        worlds.worlds[place].shrink(worlds.ranks[place].pg, [1], abort=False)
        for place in (0, 2)
    ]
    until(lambda: all(group.aborted for group in left))
    until(lambda: all(r.pg.aborted for r in worlds.ranks))
    assert "no memory left" in str(worlds.ranks[0].pg.aborted)
    until(lambda: all(comm.freed for comm in made))


def test_what_was_made_is_freed_after_its_parent_however_late(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(2)
    worlds(lambda r: dist.barrier(group=r.pg))
    groups = worlds.new_groups()
    split = simulation.nccl.split
    made: list[Any] = []
    parent_abort = simulation.abort_waits[0] = threading.Event()

    def fails(comm: Any, rank: int) -> Any:
        if rank == 1:
            until(lambda: bool(made))
            raise dist.DistBackendError("no memory left")
        made.append(split(comm, rank))
        return made[-1]

    simulation.nccl.split = fails  # type: ignore[method-assign]
    for group, r in zip(groups, worlds.ranks, strict=True):
        with simulation.cuda.device(r.rank):
            group.connect(r.rank)
    until(lambda: all(r.pg.aborted for r in worlds.ranks))
    devices = worlds.ranks[0].pg.summary
    until(lambda: "abort does not return" in devices().devices["cuda"])
    assert not made[0].freed
    parent_abort.set()
    until(lambda: made[0].freed)


def test_a_stuck_call_does_not_keep_shrink_from_ending_the_group(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(3)
    worlds(lambda r: dist.barrier(group=r.pg))
    stuck = simulation.calls_stuck[0] = threading.Event()

    def body(r: Rank) -> None:
        if r.rank == 0:
            with pytest.raises(dist.DistAbortedError, match="go on without rank 1"):
                dist.all_reduce(r.array([1.0]), group=r.pg)
        if r.rank == 2:
            until(lambda: simulation.calls[-1] == ("all_reduce", 0))
            for place in (0, 2):
                worlds.worlds[place].shrink(worlds.ranks[place].pg, [1], abort=True)
            until(lambda: all(one.pg.aborted for one in worlds.ranks))
            stuck.set()

    worlds(body)


def test_a_group_that_is_destroyed_while_it_is_made_leaves_the_old_one_alone(
    worlds: Worlds, simulation: Simulation
) -> None:
    worlds.begin(3)
    worlds(lambda r: dist.barrier(group=r.pg))
    shrink, begun = simulation.nccl.shrink, threading.Event()

    def slow(comm: Any, excluded: Any, *, abort: bool) -> Any:
        begun.set()
        if comm.rank == 2:
            time.sleep(0.2)
        return shrink(comm, excluded, abort=abort)

    simulation.nccl.shrink = slow  # type: ignore[method-assign]
    left = [
        worlds.worlds[place].shrink(worlds.ranks[place].pg, [1], abort=False)
        for place in (0, 2)
    ]
    assert begun.wait(20)
    for group in left:
        group.shutdown()
    assert worlds(lambda r: total(r, r.pg)) == [6.0] * 3


# -- the meeting ---------------------------------------------------------------------


class Stream:
    """A parent's stream that can be reserved, over a communicator ready at once."""

    def __init__(self, simulation: Simulation, rank: int, size: int) -> None:
        self.comm: Any = self
        self.mutex, self.name = threading.Lock(), "parent"
        unique_id = b"parent"
        self.handle = simulation.nccl.init(size, rank, unique_id, {})
        self.poll = lambda: simulation.nccl.ready(self.handle)

    def reserve(self, options: Any, *, abort: bool) -> bool:
        return True

    def release(self) -> None:
        pass

    def abort_group(self, reason: str) -> None:
        raise AssertionError(reason)


class CountingStore(dist.FileStore):
    """Counts the requests of its rank."""

    requests = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "add", "check", "compare_set", "wait"):
            self.requests += 1
        return super().__getattribute__(name)


def derived(
    simulation: Simulation, path: Path, ordinals: list[int | None]
) -> tuple[list[Any], list[int]]:
    """Derive a communicator on each rank; return it, and the requests per rank."""
    size = len(ordinals)
    stores = [CountingStore(str(path / f"store-{size}"), size) for _ in ordinals]

    def derive(rank: int) -> Any:
        ordinal = ordinals[rank]
        parent: Any = None if ordinal is None else Stream(simulation, rank, size)
        split = CommSplit(parent, ordinal or 0, (), False, lambda: None)
        deadline = time.monotonic() + 30
        made = split.derive(simulation.api, stores[rank], rank, size, {}, deadline)
        assert not split.deriving
        return made

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(derive, range(size)))
    requests = [store.requests for store in stores]
    for store in stores:
        store.close()
    return made, requests


def test_the_requests_of_a_meeting_grow_linearly(
    simulation: Simulation, tmp_path: Path
) -> None:
    """One store serves all ranks: with n requests of each it would get n squared."""
    _, few = derived(simulation, tmp_path, [0] * 3)
    made, many = derived(simulation, tmp_path, [0] * 24)
    assert None not in made
    # The ranks that complete a meeting announce it, in two requests.
    assert max(many) <= max(few) + 4
    assert sum(many) <= 8 * sum(few) + 4


def test_a_vote_against_a_split_does_not_wait_for_the_other_votes(
    simulation: Simulation, tmp_path: Path
) -> None:
    """Until the vote is decided, the ranks hold back ops of the parent."""
    stores = [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(2)]
    deadline = time.monotonic() + 30
    # Rank 2 never votes.
    for store, ordinal in zip(stores, [None, 0], strict=True):
        assert not _vote(store, "votes", ordinal, 3, deadline)
    for store in stores:
        store.close()


@pytest.mark.parametrize("ordinals", [[0, None, 0], [0, 0, 1], [None, None, None]])
def test_no_rank_derives_where_the_votes_differ(
    simulation: Simulation, tmp_path: Path, ordinals: list[int | None]
) -> None:
    made, _ = derived(simulation, tmp_path, ordinals)
    assert made == [None] * 3
    assert ("split", 0) not in simulation.calls
