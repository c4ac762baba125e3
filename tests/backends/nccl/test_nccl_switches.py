"""Switches and options of the NCCL backend: NaN check, blocking wait, priority."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.devices.arrays import Float8, Float8Array
from rankscope.backends.nccl import options
from rankscope.backends.nccl.nan_check import refuse_nan
from rankscope.backends.work.op_type import OpType
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation

NAN = float("nan")


# -- NaN check -----------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["RANKSCOPE", "TORCH"])
def test_an_input_with_a_nan_is_refused_before_the_op_starts(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setenv(f"{prefix}_NCCL_NAN_CHECK", "1")

    def body(r: Rank) -> None:
        dist.all_reduce(r.array([1.0, 2.0]), group=r.pg)
        if r.rank == 1:
            before = len(simulation.calls)
            message = (
                "all_reduce #2 of group 'g' on rank 1.*: the input on this rank has a "
                r"NaN \(shape \(2,\), float64\); the op was not started. .*NAN_CHECK"
            )
            with pytest.raises(dist.DistBackendError, match=message) as caught:
                dist.all_reduce(r.array([1.0, NAN]), group=r.pg)
            assert (caught.value.rank, caught.value.op) == (1, "all_reduce")
            assert caught.value.sequence_number == 2
            assert ("all_reduce", 1) not in simulation.calls[before:]
        r.synchronize()

    ranks.start(2)(body)


def test_without_the_switch_a_nan_is_a_value(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        x = r.array([1.0, NAN])
        dist.all_reduce(x, group=r.pg)
        r.synchronize()
        assert np.isnan(x[1])

    ranks.start(2)(body)


def test_what_an_op_only_writes_may_have_nans(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_NCCL_NAN_CHECK", "1")

    def body(r: Rank) -> None:
        def nans(count: int = 2) -> Any:
            return r.array([NAN] * count)

        def ones(count: int = 2) -> Any:
            return r.array([1.0] * count)

        first = r.rank == 0
        dist.broadcast(ones() if first else nans(), 0, group=r.pg)
        dist.all_gather([nans(), nans()], ones(), group=r.pg)
        dist.all_gather_into_tensor(nans(4), ones(), group=r.pg)
        dist.gather(ones(), [nans(), nans()] if first else None, 0, group=r.pg)
        dist.scatter(nans(), [ones(), ones()] if first else None, 0, group=r.pg)
        dist.reduce_scatter(nans(), [ones(), ones()], group=r.pg)
        dist.reduce_scatter_tensor(nans(), ones(4), group=r.pg)
        dist.all_to_all([nans(), nans()], [ones(), ones()], group=r.pg)
        dist.all_to_all_single(nans(4), ones(4), group=r.pg)
        with dist.coalescing_manager(r.pg):
            dist.all_gather_into_tensor(nans(4), ones(), group=r.pg)
            dist.all_gather_into_tensor(nans(2), ones(1), group=r.pg)
        dist.barrier(group=r.pg)
        if first:
            dist.send(ones(), 1, group=r.pg)
        else:
            dist.recv(nans(), 0, group=r.pg)
        r.synchronize()

    ranks.start(2)(body)


@pytest.mark.parametrize(
    ("kind", "bad", "text"),
    [
        (OpType.BROADCAST, 0, "the input"),
        (OpType.REDUCE, 0, "the input"),
        (OpType.SEND, 0, "the input"),
        (OpType.GATHER, 0, "the input"),
        (OpType.ALL_GATHER, 3, "the input"),
        (OpType.SCATTER, 2, "input 1 (of 3)"),
        (OpType.REDUCE_SCATTER, 3, "input 2 (of 3)"),
        (OpType.ALL_TO_ALL, 3, "input 1 (of 2)"),
        (OpType.ALL_GATHER_INTO_TENSOR, 2, "input 0 (of 2)"),
        (OpType.REDUCE_SCATTER_TENSOR, 2, "input 0 (of 2)"),
        (OpType.ALL_REDUCE, 1, "input 1 (of 4)"),
    ],
)
def test_every_input_is_looked_at(
    simulation: Simulation, kind: OpType, bad: int, text: str
) -> None:
    arrays = [simulation.array([1.0], 0) for _ in range(4)]
    if kind in (OpType.BROADCAST, OpType.REDUCE, OpType.SEND):
        del arrays[1:]
    refuse_nan(simulation.cuda, kind, arrays)
    arrays[bad][0] = NAN
    with pytest.raises(dist.DistBackendError, match=f"^{re.escape(text)} on this rank"):
        refuse_nan(simulation.cuda, kind, arrays)


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "complex64"])
def test_every_float_dtype_is_looked_at(simulation: Simulation, name: str) -> None:
    inf = float("inf")
    good = simulation.array([0.0, -1.0, np.finfo(name).max, inf, -inf], 0, name)
    refuse_nan(simulation.cuda, OpType.SEND, [good])
    for nan in (NAN, -NAN):
        bad = simulation.array([1.0, nan], 0, name)
        with pytest.raises(dist.DistBackendError, match=rf"\(2,\), {name}\)"):
            refuse_nan(simulation.cuda, OpType.SEND, [bad])


def test_an_imaginary_part_may_be_a_nan(simulation: Simulation) -> None:
    bad = simulation.array([complex(1, NAN)], 0, "complex128")
    with pytest.raises(dist.DistBackendError, match="complex128"):
        refuse_nan(simulation.cuda, OpType.SEND, [bad])


@pytest.mark.parametrize(
    ("name", "bits", "good", "bad"),
    [
        # The largest number or infinity with both signs; the first and the last NaN.
        ("bfloat16", "uint16", [0, 0x7F80, 0xFF80], [0x7F81, 0xFFFF]),
        ("float8_e5m2", "uint8", [0, 0x7C, 0xFC], [0x7D, 0xFF]),
        ("float8_e4m3fn", "uint8", [0, 0x7E, 0xFE], [0x7F, 0xFF]),
    ],
)
def test_dtypes_that_numpy_lacks_are_looked_at(
    simulation: Simulation, name: str, bits: str, good: list[int], bad: list[int]
) -> None:
    def array(values: list[int]) -> Float8Array:
        return Float8Array(simulation.array(values, 0, bits), Float8(name))

    refuse_nan(simulation.cuda, OpType.SEND, [array(good)])
    for value in bad:
        with pytest.raises(dist.DistBackendError, match=name):
            refuse_nan(simulation.cuda, OpType.SEND, [array([0, value])])


def test_integers_have_no_nan(simulation: Simulation) -> None:
    refuse_nan(simulation.cuda, OpType.SEND, [simulation.array([-1], 0, "int32")])
    refuse_nan(simulation.cuda, OpType.SEND, [simulation.array([], 0, "float32")])


def test_the_check_waits_for_what_computes_the_input(
    simulation: Simulation,
) -> None:
    x = simulation.array([1.0], 0)
    go = threading.Event()

    def compute() -> None:
        go.wait(10)
        x[0] = NAN

    simulation.compute(0, compute)
    threading.Timer(0.1, go.set).start()
    with pytest.raises(dist.DistBackendError, match="has a NaN"):
        refuse_nan(simulation.cuda, OpType.SEND, [x])


def test_nothing_is_searched_while_a_graph_is_captured(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_NCCL_NAN_CHECK", "1")

    def body(r: Rank) -> None:
        simulation.captured.add(simulation.cuda.current_streams(0)[0])
        with pytest.raises(dist.DistBackendError, match="graph is being captured"):
            dist.all_reduce(r.array([NAN]), group=r.pg)

    ranks.start(1)(body)


# -- blocking wait -------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["RANKSCOPE", "TORCH"])
def test_wait_can_be_made_to_block_the_host(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setenv(f"{prefix}_NCCL_BLOCKING_WAIT", "1")
    go = threading.Event()

    def body(r: Rank) -> None:
        dist.all_reduce(r.array([1.0]), group=r.pg)
        simulation.compute(r.rank, lambda: (go.wait(30), None)[1])
        work = r.all_reduce()
        if r.rank == 0:
            threading.Timer(0.1, go.set).start()
        assert work.wait()
        # Without the switch, wait() returns before.
        assert go.is_set()
        assert work.is_completed()

    ranks.start(2)(body)


def test_a_blocking_wait_ends_at_the_timeout(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_NCCL_BLOCKING_WAIT", "1")

    def body(r: Rank) -> None:
        dist.all_reduce(r.array([1.0]), group=r.pg)
        if r.rank == 0:
            with pytest.raises(dist.DistTimeoutError, match="all_reduce #2"):
                dist.all_reduce(r.array([1.0]), group=r.pg)
        else:
            until(lambda: r.pg.aborted is not None)

    ranks.start(2, timeout=1)(body)


# -- options -------------------------------------------------------------------------


def test_a_stream_of_high_priority(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    new_stream = simulation.cuda.new_stream

    def noted(*, high_priority: bool = False) -> int:
        made.append(high_priority)
        return new_stream(high_priority=high_priority)

    simulation.cuda.new_stream = noted  # type: ignore[method-assign]

    def body(r: Rank) -> None:
        with dist.nccl_options(high_priority=True):
            dist.all_reduce(r.array([1.0]), group=r.pg)
        assert r.pg.built_backend("cuda")._options == {}

    ranks.start(1)(body)
    assert made == [True]


@pytest.mark.parametrize(
    ("chosen", "value", "expected"),
    [
        ({}, None, False),
        ({}, "1", True),
        ({"high_priority": True}, "0", True),
        ({"high_priority": False}, "1", False),
    ],
)
def test_the_option_comes_before_the_switch(
    monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, Any],
    value: str | None,
    expected: bool,
) -> None:
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", value)
    assert options.take_high_priority(chosen) is expected
    assert chosen == {}


def test_a_switch_of_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("", False), ("On ", True), ("no", False)):
        monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", value)
        assert options.switch("NAN_CHECK") is expected
    monkeypatch.setenv("RANKSCOPE_NCCL_NAN_CHECK", "maybe")
    message = r"^RANKSCOPE_NCCL_NAN_CHECK=maybe: expected 1 or 0 \(the default\)$"
    with pytest.raises(dist.DistBackendError, match=message):
        options.switch("NAN_CHECK")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"min_cta": 1},
            "there is no 'min_cta'; did you mean min_ctas?; there are",
        ),
        ({"zzz": 1}, "there is no 'zzz'; there are cga_cluster_size, collnet"),
        (
            {"split_share": True},
            "split_share is not offered: communicators would sh",
        ),
        ({"blocking": True}, "RANKSCOPE_NCCL_USE_COMM_NONBLOCKING is for that"),
        ({"graph_usage_mode": 3}, "graph_usage_mode=3; expected 0 to 2"),
        ({"num_rma_ctx": 0}, "num_rma_ctx=0; expected at least 1"),
    ],
)
def test_names_of_options_are_checked(chosen: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(ValueError, match=re.escape(message)),
        dist.nccl_options(**chosen),
    ):
        pass
