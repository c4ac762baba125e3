"""Ranks that do not call alike: each hears of it, and none hangs."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.mpi_ranks import MPIRanks, mpiexec
from rankscope.backends.conformance.ranks import Rank, Ranks
from rankscope.backends.conformance.waiting import until
from tests.backends.backends import MESSAGING_BACKENDS

pytestmark = pytest.mark.processes

WORLD = 3
# The ranks of the group: rank 1 of it, which calls otherwise, is rank 2 of all.
MEMBERS, OTHER = [0, 2, 1], 2
SIZES = "the arrays' sizes( or dtypes)? differ between ranks"


@dataclass(frozen=True)
class Case:
    """A call that `differs` on one rank, and what all ranks are told."""

    call: Callable[[bool, int, dist.ProcessGroup], object]
    told: str
    #: Whether no message comes that would tell: the timeout of the group does.
    waits: bool = False


def parts(count: int = 2, first: int = 2) -> list[np.ndarray]:
    return [np.ones(count if place else first) for place in range(WORLD)]


def reduced(
    one: np.ndarray, other: np.ndarray
) -> Callable[[bool, int, dist.ProcessGroup], object]:
    return lambda differs, rank, group: dist.all_reduce(
        (other if differs else one).copy(), group=group
    )


CASES = {
    "size": Case(reduced(np.ones(4), np.ones(5)), SIZES),
    "large size": Case(reduced(np.ones(1 << 17), np.ones(1 << 18)), SIZES),
    # Their algorithms differ: there need not be a message that the other one expects.
    "size of another algorithm": Case(
        reduced(np.ones(4), np.ones(1 << 20)),
        SIZES
        + "|with 1048576 elements, ranks? .* with 4 elements"
        + "|with 4 elements, ranks? .* with 1048576 elements",
        True,
    ),
    "dtype of the same size": Case(
        reduced(np.ones(4, "i4"), np.ones(4, "f4")),
        r"all_reduce: dtype (float32 on rank 2, int32 on|int32 on rank \d, float32)",
    ),
    "dtype of another size": Case(
        reduced(np.ones(4, "f8"), np.ones(4, "f4")),
        r"all_reduce: dtype (float32 on rank 2, float64|float64 on rank \d, float32)"
        f"|more than .*{SIZES}",
    ),
    "reduction": Case(
        lambda differs, rank, group: dist.all_reduce(
            np.ones(4),
            dist.ReduceOp.MAX if differs else dist.ReduceOp.SUM,
            group=group,
        ),
        r"all_reduce: reduce op (MAX on rank 2, SUM|SUM on rank \d, MAX on rank 2)",
    ),
    "op": Case(
        lambda differs, rank, group: (
            dist.barrier(group=group)
            if differs
            else dist.all_reduce(np.ones(4), group=group)
        ),
        "rank 2 issued barrier #1 .* while ranks 0–1 issued all_reduce #1"
        r"|(all_reduce|barrier): rank \d has called (all_reduce|barrier) in its place",
        True,
    ),
    "number of calls": Case(
        # The messages of a broadcast are with rank 1 before it has called anything.
        lambda differs, rank, group: [
            dist.broadcast(np.ones(4), OTHER, group=group) if differs else None,
            dist.barrier(group=group),
        ],
        "barrier: rank 2 has called 1 collective more than rank [01]: the ranks call "
        r"them in different orders|barrier: rank [01] has called 1 collective less"
        # Where the messages of a broadcast wait for the other ranks.
        "|rank 2 issued broadcast #1 .* while ranks 0–1 issued barrier #1"
        "|barrier: rank 2 has called broadcast in its place"
        r"|broadcast: rank \d has called barrier in its place",
        True,
    ),
    "root of a broadcast": Case(
        lambda differs, rank, group: dist.broadcast(
            np.ones(4), 1 if differs else 0, group=group
        ),
        r"root (1 on rank 2, 0 on rank|0 on rank \d, 1 on rank 2)|has not entered"
        "|rank 2 issued broadcast #1 .* with root 1, ranks 0–1 with root 0",
        True,
    ),
    # Each is a sender, and none reads what the others send.
    "root of each its own": Case(
        lambda differs, rank, group: [
            dist.broadcast(np.ones(4), rank, group=group),
            dist.barrier(group=group),
            dist.broadcast(np.ones(4), 0, group=group),
        ],
        r"before: broadcast: root \d on rank \d, \d on rank \d; its values",
    ),
    "root of a reduce": Case(
        lambda differs, rank, group: dist.reduce(
            np.ones(4), OTHER if differs else 0, group=group
        ),
        r"root (2 on rank 2, 0 on rank|0 on rank \d, 2 on rank 2)"
        "|with root 2, ranks 0–1 with root 0",
        True,
    ),
    "root of a gather": Case(
        lambda differs, rank, group: dist.gather(
            np.ones(4),
            parts(4, 4) if rank in ((OTHER,) if differs else (0,)) else None,
            OTHER if differs else 0,
            group=group,
        ),
        r"root (2 on rank 2, 0 on rank|0 on rank \d, 2 on rank 2)"
        "|with root 2, ranks 0–1 with root 0",
        True,
    ),
    "tag": Case(
        lambda differs, rank, group: (
            dist.recv(np.ones(4), 0, tag=2, group=group)
            if differs
            else dist.send(np.ones(4), OTHER, tag=1, group=group)
            if rank == 0
            else None
        ),
        "tag 1.*tag 2|tag 2.*tag 1|tag=1|has not issued",
        True,
    ),
    "longer message": Case(
        lambda differs, rank, group: (
            dist.recv(np.ones(4), 0, group=group)
            if differs
            else dist.send(np.ones(5), OTHER, group=group)
            if rank == 0
            else None
        ),
        f"recv: rank 0 sent (40 bytes where 32|more than the 32 .*) were .*{SIZES}",
    ),
    "shorter message": Case(
        lambda differs, rank, group: (
            dist.recv(np.ones(4), 0, group=group)
            if differs
            else dist.send(np.ones(3), OTHER, group=group)
            if rank == 0
            else None
        ),
        f"recv: rank 0 sent 24 bytes where 32 were expected: {SIZES}",
    ),
    "splits": Case(
        lambda differs, rank, group: dist.all_to_all_single(
            np.ones(6),
            np.ones(6),
            [2, 2, 2],
            [1, 2, 3] if differs else [2, 2, 2],
            group,
        ),
        f"all_to_all_single: rank 2 sent (8 bytes|24 bytes|more than).*{SIZES}",
    ),
    "parts": Case(
        lambda differs, rank, group: dist.all_to_all(
            parts(), parts(2, 3 if differs else 2), group
        ),
        f"all_to_all: rank 2 sent (24 bytes where 16|more than the 16 .*{SIZES})",
    ),
}


# -- on a rank -------------------------------------------------------------------


def live(me: Rank, backend: str) -> None:
    """Go through the cases that the test names, until it names none."""
    dist.init_process_group(backend, timeout=60)
    while (name := me.listen(170)) is not None:
        try:
            me.report(told(me, CASES[name]))
        except Exception:  # noqa: BLE001 - the test shows it
            me.report(traceback.format_exc())
    dist.destroy_process_group()


def told(me: Rank, case: Case) -> tuple[str, list[str]]:
    """Return why the group was aborted here, and what its ops have raised."""
    group = dist.new_group(MEMBERS, timeout=2 if case.waits else 60, sort_ranks=False)
    assert isinstance(group, dist.ProcessGroup)
    raised = []
    # A rank that comes late would be told as one that has not entered.
    dist.barrier()
    try:
        case.call(me.rank == OTHER, me.rank, group)
    except dist.DistError as error:
        raised.append(str(error))
    until(lambda: group.aborted is not None, 60, "the end of the group")
    why = str(group.aborted)
    try:
        dist.barrier(group=group)
    except dist.DistError as error:
        raised.append(str(error))
    dist.rebuild_process_group(group)
    x = np.full(5000, me.rank + 1.0)
    dist.all_reduce(x, group=group)
    assert (x == 6).all()
    dist.destroy_process_group(group)
    return why, raised


# -- the tests -------------------------------------------------------------------


MPI = pytest.param("mpi", marks=pytest.mark.skipif(mpiexec() is None, reason="no MPI"))


@pytest.fixture(scope="module", params=[*MESSAGING_BACKENDS, MPI])
def ranks(
    _module_leaves_nothing: None, request: pytest.FixtureRequest
) -> Iterator[Ranks]:
    """Three ranks that go through cases until they are told ``None``."""
    kind = MPIRanks if request.param == "mpi" else Ranks
    with kind(WORLD, live, request.param, timeout=170) as started:
        yield started
        for rank in range(WORLD):
            started.tell(rank, None)
        started.wait()


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_do_not_call_alike_are_told(ranks: Ranks, name: str) -> None:
    for rank in range(WORLD):
        ranks.tell(rank, name)
    heard = [ranks.next_report(rank, 60) for rank in range(WORLD)]
    assert not any(isinstance(one, str) for one in heard), "\n".join(map(str, heard))
    for rank, (why, raised) in enumerate(heard):
        assert re.search(CASES[name].told, why), why
        # The call itself, where it is not over before, or else the next one.
        for said in raised:
            assert re.search(rf" (#\d+ of|in) group .* on rank {rank}\b", said), said
            assert re.search(CASES[name].told, said), said
            assert "make it usable again with rebuild_process_group()" in said
