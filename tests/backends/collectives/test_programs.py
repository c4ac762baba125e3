"""Random programs: collectives over groups and backends, against numpy.

A program is a list of steps, the same on every rank; a rank that is not in a
step's group goes on to the next. Every rank works out by itself what it must
hold in the end. The ranks live through all programs, as a notebook's do.
"""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rankscope.backends import unavailable_reason
from rankscope.backends.conformance import calls
from rankscope.backends.conformance.mpi_ranks import MPIRanks, mpiexec
from rankscope.backends.conformance.ranks import Rank, Ranks
from rankscope.backends.conformance.reference import data, reduced

pytestmark = pytest.mark.processes

WORLD = 4
MEMBERS = ([0, 1, 2, 3], [0, 1], [2, 3], [1, 2, 3], [0, 3])
BACKENDS = [
    "tcp",
    *(["mpi"] if mpiexec() else []),
    *([] if unavailable_reason("ucx") else ["ucx"]),
    "store",
]
DTYPES = ("int32", "int64", "uint8", "float32", "float64", "float16")
# A ring of sends and receives stands for those.
OPS = (*(op for op in calls.OPS if op != "recv"), "ring")
PROGRAMS = 200


@dataclass(frozen=True)
class Step:
    """One op; `size` is what one rank gives to one other, `root` a place.

    `backend` modulo the number of backends is the place of its own.
    """

    op: str
    members: int
    backend: int
    dtype: str
    size: int
    reduction: str
    root: int
    async_op: bool
    salt: int


STEPS = st.builds(
    Step,
    op=st.sampled_from(OPS),
    members=st.integers(0, len(MEMBERS) - 1),
    backend=st.integers(0, 59),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0, 1, 3, 64, 1009, 40_000]),
    reduction=st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"]),
    root=st.integers(0, 3),
    async_op=st.booleans(),
    salt=st.integers(0, 1 << 30),
)


# -- on a rank -------------------------------------------------------------------

Check = Callable[[], None]


class Program:
    """Runs the steps of one program on this rank."""

    def __init__(self, groups: list[list[Any]], me: int) -> None:
        self.groups = groups
        self.me = me
        self.pending: list[tuple[Any, Check]] = []

    def run(self, steps: list[Step]) -> None:
        for number, step in enumerate(steps):
            if self.me in MEMBERS[step.members]:
                self.step(step)
            if number % 3 == 2:
                self.settle()
        self.settle()

    def settle(self) -> None:
        """Wait for what is in flight, not always in the order of its issue."""
        random.Random(len(self.pending)).shuffle(self.pending)
        for works, check in self.pending:
            for work in works:
                work.wait()
            check()
        self.pending.clear()

    def step(self, step: Step) -> None:
        import rankscope as dist

        ranks = MEMBERS[step.members]
        place, count = ranks.index(self.me), len(ranks)
        groups = self.groups[step.members]
        group = groups[step.backend % len(groups)]
        op = dist.ReduceOp[step.reduction]
        root = step.root % count
        options = {"group": group, "async_op": step.async_op}

        def held(rank: int, parts: int = 1) -> np.ndarray:
            return data(rank, step.size * parts, step.dtype, step.salt)

        def array(values: np.ndarray) -> np.ndarray:
            return values.copy()

        def blank(parts: int = 1) -> np.ndarray:
            return array(np.full(step.size * parts, 99, step.dtype))

        def total(values: list[np.ndarray]) -> np.ndarray:
            return reduced(op, values)

        def parts_of(rank: int) -> list[np.ndarray]:
            return (
                np.split(held(rank, count), count)
                if step.size
                else [held(rank)] * count
            )

        if step.op == "all_reduce":
            x = array(held(self.me))
            work = dist.all_reduce(x, op, **options)
            found, wanted = [x], [total([held(rank) for rank in ranks])]
        elif step.op == "reduce":
            x = array(held(self.me))
            work = dist.reduce(x, ranks[root], op, **options)
            there = place == root
            sums = total([held(rank) for rank in ranks])
            found, wanted = [x], [sums if there else held(self.me)]
        elif step.op == "broadcast":
            x = array(held(self.me))
            work = dist.broadcast(x, ranks[root], **options)
            found, wanted = [x], [held(ranks[root])]
        elif step.op == "all_gather":
            found = [blank() for _ in ranks]
            work = dist.all_gather(found, array(held(self.me)), **options)
            wanted = [held(rank) for rank in ranks]
        elif step.op == "all_gather_into_tensor":
            x = blank(count)
            work = dist.all_gather_into_tensor(x, array(held(self.me)), **options)
            found, wanted = [x], [np.concatenate([held(rank) for rank in ranks])]
        elif step.op == "gather":
            found = [blank() for _ in ranks] if place == root else []
            into = found if place == root else None
            work = dist.gather(array(held(self.me)), into, ranks[root], **options)
            wanted = [held(rank) for rank in ranks] if place == root else []
        elif step.op == "scatter":
            x = blank()
            given = [array(one) for one in parts_of(self.me)] if place == root else None
            work = dist.scatter(x, given, ranks[root], **options)
            found, wanted = [x], [parts_of(ranks[root])[place]]
        elif step.op == "reduce_scatter":
            x = blank()
            given = [array(one) for one in parts_of(self.me)]
            work = dist.reduce_scatter(x, given, op, **options)
            found, wanted = [x], [total([parts_of(rank)[place] for rank in ranks])]
        elif step.op == "reduce_scatter_tensor":
            x = blank()
            given_flat = array(held(self.me, count))
            work = dist.reduce_scatter_tensor(x, given_flat, op, **options)
            found, wanted = [x], [total([parts_of(rank)[place] for rank in ranks])]
        elif step.op == "all_to_all":
            found = [blank() for _ in ranks]
            given = [array(one) for one in parts_of(self.me)]
            work = dist.all_to_all(found, given, **options)
            wanted = [parts_of(rank)[place] for rank in ranks]
        elif step.op == "all_to_all_single":
            x = blank(count)
            work = dist.all_to_all_single(x, array(held(self.me, count)), **options)
            found, wanted = [x], [np.concatenate([parts_of(r)[place] for r in ranks])]
        elif step.op == "ring":
            x = blank()
            after, before = ranks[(place + 1) % count], ranks[place - 1]
            ring = [
                dist.P2POp(dist.isend, array(held(self.me)), after, group),
                dist.P2POp(dist.irecv, x, before, group),
            ]
            works = dist.batch_isend_irecv(ring)
            self.later(works, [x], [held(before)], step)
            return
        else:
            assert step.op == "barrier", f"no step of a program runs {step.op}"
            work = dist.barrier(**options)
            found, wanted = [], []
        self.later([work] if step.async_op else [], found, wanted, step)

    def later(
        self, works: list[Any], found: list[Any], wanted: list[Any], step: Step
    ) -> None:
        def check() -> None:
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=str(step))

        self.pending.append((works, check))


def _rank(me: Rank, backends: list[str]) -> None:
    import rankscope as dist
    from tests.backends import store_backend

    store_backend.register()
    with me.store() as store:
        dist.init_process_group(
            backends[-1], store=store, rank=me.rank, world_size=me.size, timeout=60
        )
        groups = [
            [dist.new_group(members, backend=backend) for backend in backends]
            for members in MEMBERS
        ]
        while (steps := me.listen(120)) is not None:
            try:
                Program(groups, me.rank).run(steps)
            except Exception:  # noqa: BLE001 - the test shows it, with its program
                me.report(traceback.format_exc())
            else:
                me.report("")
        dist.destroy_process_group()


# -- the test --------------------------------------------------------------------


@contextlib.contextmanager
def running(backends: list[str]) -> Iterator[Ranks]:
    """Four ranks that run programs until they are told ``None``."""
    kind = MPIRanks if "mpi" in backends else Ranks
    with kind(WORLD, _rank, backends, timeout=170) as started:
        yield started
        for rank in range(WORLD):
            started.tell(rank, None)
        started.wait()


@pytest.fixture(scope="module")
def ranks(_module_leaves_nothing: None) -> Iterator[Ranks]:
    """Ranks with groups of each backend."""
    with running(BACKENDS) as started:
        yield started


@pytest.fixture(scope="module")
def ucx_ranks(_module_leaves_nothing: None) -> Iterator[Ranks]:
    """Ranks all of whose groups are over UCX."""
    with running(["cpu:ucx"]) as started:
        yield started


PROGRAM = given(steps=st.lists(STEPS, min_size=1, max_size=12))
SETTINGS = settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    # What comes after a failure would fail too: the ranks are out of step.
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.soak
@PROGRAM
@SETTINGS
def test_random_programs_give_what_numpy_gives(ranks: Ranks, steps: list[Step]) -> None:
    run(ranks, steps)


@pytest.mark.skipif(unavailable_reason("ucx") is not None, reason="needs UCX")
@PROGRAM
@SETTINGS
def test_random_programs_over_ucx_alone(ucx_ranks: Ranks, steps: list[Step]) -> None:
    run(ucx_ranks, steps)


def run(ranks: Ranks, steps: list[Step]) -> None:
    for rank in range(WORLD):
        ranks.tell(rank, steps)
    errors = [ranks.next_report(rank, 60) for rank in range(WORLD)]
    assert not any(errors), "\n".join(errors)
