"""That each rule of the conformance suite can fail, and fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import rankscope as dist
from rankscope import OpType, ReduceOp, Work
from rankscope.backends.conformance import exact, recover, surface
from rankscope.backends.conformance.calls import OPS as CALLS
from rankscope.backends.conformance.suite import LEVELS, RULES
from rankscope.backends.groups.watchdog import watchdog
from rankscope.conformance import (
    Options,
    Processes,
    Report,
    Setup,
    Threads,
    check_backend,
)
from tests.backends.conformance import broken_backends
from tests.backends.conformance.broken_backends import (
    BROKEN,
    CORRUPTED,
    HALVES,
    Bereaved,
    LeaksProcesses,
    Reordering,
)
from tests.backends.conformance.runs import SMALL, impatient, text
from tests.backends.store_backend import StoreBackend

MODULES = ("tests.backends.conformance.broken_backends:register",)


@pytest.fixture(scope="module", autouse=True)
def _no_watchdog() -> Iterator[None]:
    """Groups of ranks that are threads are watched by this process."""
    yield
    watchdog.stop()


@pytest.fixture
def broken() -> Iterator[None]:
    """The broken backends, registered; what they left is freed."""
    names = set(dist.Backend.registry)
    broken_backends.register()
    yield
    while broken_backends.LEFT:
        broken_backends.LEFT.pop()()
    for name in set(dist.Backend.registry) - names:
        del dist.Backend.registry[name]


# -- exact ---------------------------------------------------------------------


def made_of(op: OpType) -> set[str]:
    """The ops that the base class makes of `op`: a wrong result shows in them too."""
    direct = {one for one in OpType if one.spec.fallback == op.value}
    return {one.value for one in direct}.union(*map(made_of, direct))


ONE_DTYPE = replace(SMALL, sizes=(7,), reducible=(CORRUPTED,), movable=(CORRUPTED,))


@pytest.mark.parametrize("op", broken_backends.OPS, ids=str)
def test_a_wrong_result_of_an_op_fails_its_exact_rule_and_no_other(
    broken: None, op: OpType
) -> None:
    report = check_backend(
        Setup(f"corrupts_{op.value}", options=ONE_DTYPE),
        rules=[rule.name for rule in exact.RULES],
        levels=["exact"],
        session=Threads,
    )
    own = "send_and_recv" if op.is_p2p else op.value
    failed = {one.name for one in report.failed}
    assert failed == {own} | made_of(op), text(report)
    assert len(report.held) == len(exact.RULES) - len(failed)
    for one in report.failed:
        fault = "left barrier" if op is OpType.BARRIER else "elements differ"
        assert "rank" in one.text
        assert fault in one.text


def test_wrong_results_show_in_no_rule_of_another_level(broken: None) -> None:
    """Nor in those of what Rankscope makes of ops; *recover* has a test below."""
    report = check_backend(
        Setup("corrupts_all", options=SMALL),
        rules=[
            *(rule.name for rule in surface.RULES),
            *(rule.name for rule in RULES if rule.level == "contract"),
        ],
        levels=["exact", "contract"],
        session=Threads,
    )
    assert not report.failed, text(report)
    assert not report.skipped


# -- contract, and exact in other ways ---------------------------------------------

# Few ops hang: each that does is a rebuild.
FEW_OPS = replace(SMALL, ops=("all_reduce", "all_gather", "broadcast", "barrier"))


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in BROKEN if kind is not LeaksProcesses),
        pytest.param(LeaksProcesses, marks=pytest.mark.processes),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_broken_backend_fails_its_rule_and_no_other(
    broken: None, kind: type[StoreBackend]
) -> None:
    (level,) = {name.partition(":")[0] for name in BROKEN[kind]}
    failing = {name.partition(": ")[2] for name in BROKEN[kind]}
    options = FEW_OPS if level == "contract" else SMALL
    other = {rule.name for rule in RULES if rule.level == level} - failing

    def tried(rules: set[str], options: Options) -> Report:
        setup = Setup(kind.__name__.lower(), options=options)
        return check_backend(
            setup, rules=sorted(rules), levels=[level], session=Threads
        )

    report = tried(failing, impatient(options))
    assert {one.name for one in report.failed} == failing, text(report)
    for one in report.failed:
        assert "rank" in one.text
    report = tried(other, options)
    assert {one.name for one in report.held} == other, text(report)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
def test_what_breaks_the_contract_shows_in_no_rule_of_exact(
    broken: None, half: type[StoreBackend]
) -> None:
    report = check_backend(
        Setup(half.__name__.strip("_").lower(), options=SMALL),
        levels=["exact"],
        session=Threads,
    )
    assert not report.failed, text(report)
    assert not report.skipped


class NoAllReduce(StoreBackend):
    """Has no reductions to try the order with."""

    def all_reduce(self, tensor: Any, op: ReduceOp) -> Work:
        self._missing("all_reduce")


class SumAndMax(StoreBackend):
    reduce_ops = frozenset({ReduceOp.SUM, ReduceOp.MAX})


@pytest.mark.parametrize("base", [NoAllReduce, SumAndMax])
@pytest.mark.parametrize("reorders", [False, True])
def test_the_order_is_tried_with_what_the_backend_has(
    broken: None, base: type[StoreBackend], reorders: bool
) -> None:
    made = type("Made", (base, Reordering), {}) if reorders else base
    dist.Backend.register_backend("made", made, devices="cpu")
    report = check_backend(
        Setup("made", options=SMALL), rules=["runs in order"], session=Threads
    )
    (result,) = report.results
    assert result.status == ("failed" if reorders else "held"), text(report)
    if reorders:
        what = {NoAllReduce: "broadcasts of one array", SumAndMax: "SUM and then MAX"}
        assert what[base] in result.text


class ConnectsWhenMade(StoreBackend):
    """Its creator waits for all ranks, as that of many libraries does."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        store.set(f"here/{rank}", b"")
        store.wait([f"here/{other}" for other in range(size)], 3)


@pytest.mark.parametrize(
    "rule", [rule.name for rule in RULES if rule.level == "contract"]
)
def test_a_creator_may_wait_for_all_ranks(broken: None, rule: str) -> None:
    dist.Backend.register_backend("made", ConnectsWhenMade, devices="cpu")
    report = check_backend(
        Setup("made", options=FEW_OPS), rules=[rule], session=Threads
    )
    assert not report.failed, text(report)
    assert report.held


@pytest.mark.processes
def test_every_rule_of_the_contract_has_a_backend_that_breaks_it() -> None:
    broken = {name for names in BROKEN.values() for name in names}
    contract = {
        f"{rule.level}: {rule.name}" for rule in RULES if rule.level == LEVELS[1]
    }
    assert contract <= broken
    halves = {base for half in HALVES for base in half.__mro__}
    of_contract = {
        kind
        for kind, names in BROKEN.items()
        if any(name.startswith("contract") for name in names)
    }
    assert of_contract - halves == {broken_backends.LeaksProcesses}


# -- recover -------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.processes  # where no session is named
@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
def test_an_op_that_does_not_recover_fails_its_rule_and_no_other(
    half: type[Bereaved],
) -> None:
    """The backend breaks half of the contract too, which does not show."""
    report = check_backend(
        Setup(half.__name__.strip("_").lower(), modules=MODULES, options=SMALL),
        levels=["recover"],
    )
    broken = {op.value for op in HALVES[half]} - {"send"}  # tried with recv
    assert {one.name for one in report.failed} == broken, text(report)
    assert len(report.held) == len(recover.RULES) - len(broken)
    for one in report.failed:
        assert "the library needs a restart" in one.text


def test_every_op_that_a_rule_of_recover_is_about_does_not_recover_somewhere() -> None:
    ops = [op.value for half in HALVES.values() for op in half]
    assert sorted(ops) == sorted(op.value for op in broken_backends.OPS)
    assert {rule.name for rule in recover.RULES} == {*CALLS} == {*ops} - {"send"}


@pytest.mark.processes
def test_a_failed_session_is_followed_by_a_fresh_one(broken: None) -> None:
    setup = Setup(
        "wrongroot",
        modules=MODULES,
        options=SMALL,
    )
    rules = ["reduce", "broadcast"]
    report = check_backend(setup, rules=rules, levels=["exact"], session=Processes)
    assert [(one.name, one.status) for one in report.results] == [
        ("reduce", "failed"),
        ("broadcast", "held"),
    ]
