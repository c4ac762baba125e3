"""dump_flight_recorder: the format, the file, and the verdicts of PyTorch's analyser.

The analyser gets what four processes dumped that ran collectives, rightly and
wrongly, over the backend `store`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import OpType
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.watchdog import watchdog
from rankscope.backends.groups.world import world
from rankscope.backends.observe.diagnosis import diagnose
from rankscope.backends.observe.export import local_dump, save_flight_recorder
from rankscope.backends.observe.torch_format import flight_recorder
from rankscope.backends.observe.verdicts import Fault, RankView
from rankscope.backends.post_mortem.report import examine
from rankscope.backends.work.async_errors import take_async_error
from rankscope.backends.work.flight_recorder import GroupCounters, Record, recorder
from rankscope.backends.work.state import WorkState
from tests.backends import store_backend
from tests.backends.gpu_ranks import Rank as GpuRank
from tests.backends.gpu_ranks import Ranks
from tests.backends.gpu_simulation import Simulation, use_gpu_api
from tests.backends.manual import Manual
from tools.other_environments import torch_python

# -- the format ----------------------------------------------------------------


def entries() -> list[dict[str, Any]]:
    """The dump's entries of this process."""
    return flight_recorder(**local_dump())["entries"]


def progress(entry: dict[str, Any]) -> tuple[str, bool, bool, bool]:
    return (
        entry["state"],
        entry["retired"],
        entry["time_discovered_started_ns"] is not None,
        entry["time_discovered_completed_ns"] is not None,
    )


@pytest.mark.usefixtures("group")
def test_an_entry_tells_how_far_its_op_came() -> None:
    dist.all_reduce(np.ones(3), async_op=True)
    (work,) = Manual.made[0].works
    assert progress(entries()[0]) == ("scheduled", False, False, False)
    work.mark_started()
    assert progress(entries()[0]) == ("started", False, True, False)
    assert "duration_ms" not in entries()[0]
    work.mark_completed()
    assert progress(entries()[0]) == ("completed", True, True, True)
    assert entries()[0]["duration_ms"] == work.get_duration()


@pytest.mark.usefixtures("group")
def test_what_was_aborted_is_retired_and_not_completed() -> None:
    for _ in range(3):
        dist.all_reduce(np.ones(3), async_op=True)
    Manual.made[0].works[0].mark_completed()
    Manual.made[0].works[1].mark_started()
    dist.abort_process_group(reason="enough")
    _, second, third = entries()
    assert progress(second) == ("started", True, True, False)
    assert progress(third) == ("scheduled", True, False, False)
    assert "enough" in third["error"]
    assert flight_recorder(**local_dump())["pg_status"] == {
        "0": {
            "last_enqueued_collective": 3,
            "last_started_collective": 2,
            "last_completed_collective": 1,
        }
    }


@pytest.mark.usefixtures("group")
def test_an_entry_names_the_line_of_the_user() -> None:
    dist.barrier(async_op=True)
    frame, *_ = entries()[0]["frames"]
    name = "test_an_entry_names_the_line_of_the_user"
    assert (frame["name"], frame["filename"]) == (name, __file__)
    assert "dist.barrier(" in Path(__file__).read_text().splitlines()[frame["line"] - 1]
    recorder.set_source_namer(lambda file, line: "cell 7 line 3")
    try:
        frame, *_ = entries()[0]["frames"]
    finally:
        recorder.set_source_namer(None)
    assert frame["name"] == f"{name} (cell 7 line 3)"


@pytest.mark.usefixtures("group")
def test_an_entry_of_a_helper_names_the_line_that_called_it() -> None:
    def helper() -> None:
        dist.barrier(async_op=True)

    helper()
    frame, caller = entries()[0]["frames"]
    assert (frame["name"], caller["filename"]) == ("helper", __file__)
    assert caller["line"] - frame["line"] == 2


def dump_of(*records: Record, rank: int = 0) -> dict[str, Any]:
    """The dump of a rank that recorded these, in the group "default"."""
    groups = {
        record.status.group_id: {"name": record.group, "ranks": record.status.ranks}
        for record in records
    }
    return flight_recorder(rank, groups, [record.as_dict() for record in records])


def record(
    op: OpType,
    *shapes: tuple[int, ...],
    status: GroupCounters | None = None,
    peer: int | None = None,
    dtype: str = "f4",
    backend: str = "gloo",
    first: bool = True,
) -> Record:
    """A numbered record of an op on arrays of these shapes; in a batch of `first`."""
    status = status or GroupCounters("default", 0, 0, range(3))
    arrays = [np.empty(shape, dtype) for shape in shapes]
    made = Record(status, op, arrays, peer, 60.0, backend)
    made.number(first=first)
    return made


@pytest.mark.parametrize(
    ("op", "shapes", "name", "inputs", "outputs"),
    [
        (OpType.ALL_REDUCE, [(2, 3)], "all_reduce", [[2, 3]], [[2, 3]]),
        (OpType.BROADCAST, [()], "broadcast", [[]], [[]]),
        (OpType.REDUCE, [(4,)], "reduce", [[4]], [[4]]),
        (OpType.ALL_GATHER, [(2,)] * 4, "all_gather", [[2]], [[3, 2]]),
        (OpType.ALL_GATHER, [(6,), *[(2, 3)] * 3], "all_gather", [[6]], [[3, 2, 3]]),
        (OpType.ALL_GATHER, [(4,), (4,), (2, 2), (4,)], "all_gather", [[4]], [[12]]),
        (
            OpType.ALL_GATHER,
            [(2,), (2,), (0,), (5,)],
            "all_gather_v",
            [[2], [0], [5]],
            [[2], [0], [5]],
        ),
        (OpType.ALL_GATHER_INTO_TENSOR, [(2,), (6,)], "_all_gather_base", [[2]], [[6]]),
        (OpType.GATHER, [(2,)] * 4, "gather", [[2]], [[3, 2]]),
        (OpType.GATHER, [(2,)], "gather", [[2]], []),
        (OpType.SCATTER, [(2,)] * 4, "scatter", [[3, 2]], [[2]]),
        (OpType.SCATTER, [(2,)], "scatter", [], [[2]]),
        (OpType.REDUCE_SCATTER, [(2,)] * 4, "reduce_scatter", [[3, 2]], [[2]]),
        (
            OpType.REDUCE_SCATTER,
            [(2,), (3,), (3,), (2,)],
            "reduce_scatter_v",
            [[2], [3], [3]],
            [[2], [3], [3]],
        ),
        (
            OpType.REDUCE_SCATTER_TENSOR,
            [(6,), (2,)],
            "_reduce_scatter_base",
            [[6]],
            [[2]],
        ),
        (
            OpType.ALL_TO_ALL,
            [(1,), (2,), (3,), (2,), (2,), (2,)],
            "all_to_all",
            [[6]],
            [[3, 2]],
        ),
        (OpType.ALL_TO_ALL_SINGLE, [(5,), (7,)], "all_to_all", [[5]], [[7]]),
        (OpType.BARRIER, [], "barrier", [], []),
        (OpType.MONITORED_BARRIER, [], "all_reduce_barrier", [], []),
    ],
)
def test_ops_are_named_and_split_into_inputs_and_outputs(
    op: OpType,
    shapes: list[tuple[int, ...]],
    name: str,
    inputs: list[list[int]],
    outputs: list[list[int]],
) -> None:
    (entry,) = dump_of(record(op, *shapes))["entries"]
    assert entry["profiling_name"] == f"gloo:{name}"
    assert entry["input_sizes"] == inputs
    assert entry["output_sizes"] == outputs
    assert entry["input_dtypes"] == ["Float"] * len(inputs)
    assert entry["output_dtypes"] == ["Float"] * len(outputs)


def test_libraries_that_the_analyser_does_not_know_stand_in_a_key_of_our_own() -> None:
    one = record(OpType.BARRIER, backend="mpi")
    (entry,) = dump_of(one)["entries"]
    assert (entry["profiling_name"], entry["backend"]) == ("nccl:barrier", "mpi")


@pytest.mark.parametrize(
    ("dtype", "name"), [("f8", "Double"), ("?", "Bool"), ("c8", "ComplexFloat")]
)
def test_dtypes_have_pytorchs_names(dtype: str, name: str) -> None:
    (entry,) = dump_of(record(OpType.ALL_REDUCE, (2,), dtype=dtype))["entries"]
    assert entry["input_dtypes"] == entry["output_dtypes"] == [name]


def test_sends_and_receives_name_both_sides_by_their_ranks_in_the_group() -> None:
    status = GroupCounters("some", 5, 0, [2, 5, 7])
    found = dump_of(
        record(OpType.SEND, (2,), status=status, peer=2),
        record(OpType.RECV, (2,), status=status, peer=0),
        record(OpType.RECV, (2,), status=status),
        rank=5,
    )
    names = [entry["profiling_name"] for entry in found["entries"]]
    assert names == ["gloo:send 1->2", "gloo:recv 1<-0", "gloo:recv 1<--1"]
    assert [entry["is_p2p"] for entry in found["entries"]] == [True] * 3
    assert found["entries"][0]["input_sizes"] == [[2]]
    assert found["entries"][0]["output_sizes"] == [[2]]


@pytest.mark.usefixtures("group")
def test_who_sent_to_a_receive_from_anybody_is_known_once_it_is_over() -> None:
    dist.irecv(np.ones(3))
    assert entries()[0]["profiling_name"] == "nccl:recv 0<--1"
    Manual.made[0].works[0].mark_completed(2)
    assert entries()[0]["profiling_name"] == "nccl:recv 0<-2"


def test_what_is_no_collective_is_left_out() -> None:
    """The analyser exits at an op that it does not know."""
    kept, key = record(OpType.ALL_REDUCE, (2,)), GroupKey("tp", (0, 1))
    other = {
        **kept.as_dict(),
        "group": key.name,
        "group_id": key.id,
        "op": "new_group",
        "state": "started",
    }
    status = kept.status
    groups = {
        status.group_id: {"name": status.name, "ranks": status.ranks},
        key.id: {"name": key.name, "ranks": key.ranks},
    }
    dump = flight_recorder(0, groups, [other, kept.as_dict()])
    assert [one["profiling_name"] for one in dump["entries"]] == ["gloo:all_reduce"]
    assert list(dump["pg_config"]) == [dump["entries"][0]["process_group"][0]]


def test_generations_sends_and_groups_of_one_name_are_process_groups_of_their_own() -> (
    None
):
    found = dump_of(
        record(OpType.BARRIER),
        record(OpType.SEND, (2,), peer=1),
        record(OpType.BARRIER, status=GroupCounters("default", 0, 2, range(3))),
        record(OpType.BARRIER, status=GroupCounters("tp", 0, 0, [0, 2], "tp/5e")),
        record(OpType.BARRIER, status=GroupCounters("tp", 0, 0, [0, 1], "tp/8d")),
    )
    assert found["pg_config"] == {
        name: {"name": name, "desc": description, "ranks": ranks}
        for name, description, ranks in [
            ("default", "default_pg", "[0, 1, 2]"),
            ("default p2p", "default_pg", "[0, 1, 2]"),
            ("default (generation 2)", "default_pg", "[0, 1, 2]"),
            ("tp/5e", "tp", "[0, 2]"),
            ("tp/8d", "tp", "[0, 1]"),
        ]
    }
    assert [entry["pg_id"] for entry in found["entries"]] == [0, 1, 2, 3, 4]
    for entry in found["entries"]:
        name, description = entry["process_group"]
        assert found["pg_config"][name]["desc"] == description


def test_ops_of_one_kind_in_a_batch_are_one_entry() -> None:
    status = GroupCounters("default", 0, 0, range(3))
    batch = [
        record(op, *shapes, status=status, first=number == 0)
        for number, (op, shapes) in enumerate(
            [
                (OpType.ALL_REDUCE, [(1,)]),
                (OpType.ALL_REDUCE, [(2,)]),
                (OpType.BARRIER, []),
                (OpType.ALL_REDUCE, [(3,)]),
            ]
        )
    ]
    alone = record(OpType.ALL_REDUCE, (4,), status=status)
    found = dump_of(*batch, alone)["entries"]
    assert [
        (one["profiling_name"], one["collective_seq_id"], one["op_id"]) for one in found
    ] == [
        ("gloo:allreduce_coalesced", 1, 2),
        ("gloo:barrier", 1, 3),
        ("gloo:allreduce_coalesced", 1, 4),
        ("gloo:all_reduce", 2, 5),
    ]
    assert found[0]["input_sizes"] == found[0]["output_sizes"] == [[1], [2]]
    assert found[0]["input_dtypes"] == ["Float", "Float"]


def test_what_the_ranks_have_to_agree_on_is_read_again(tmp_path: Path) -> None:
    """Root, reduce op, tag and splits, for which PyTorch's format has no keys."""
    status = GroupCounters("default", 0, 0, range(3))
    reduce = {**record(OpType.REDUCE, (4,), status=status, peer=1).as_dict()}
    receive = {**record(OpType.RECV, (4,), status=status, peer=2).as_dict()}
    shapes = [(1,), (2,), (3,), (2,), (2,), (2,)]
    exchange = record(OpType.ALL_TO_ALL, *shapes, status=status).as_dict()
    records = [{**reduce, "reduce_op": "max"}, {**receive, "tag": 7}, exchange]
    groups = {status.group_id: {"name": "default", "ranks": [4, 5, 6]}}
    dump = flight_recorder(4, groups, records)
    save_flight_recorder(dump, f"{tmp_path}{os.sep}", 4)
    found = examine([tmp_path]).evidence.rank(4).groups.values()
    ops = {op.op: op for one in found for op in one.ops}
    assert (ops["reduce"].root, ops["reduce"].reduce_op) == (5, "max")
    assert (ops["recv"].peer, ops["recv"].tag, ops["recv"].root) == (6, 7, None)
    assert ops["all_to_all"].splits == ([2, 2, 2], [1, 2, 3])
    assert ops["all_to_all"].reduce_op is ops["all_to_all"].root is None
    # Also of one that is over here: it may not be on another rank. Not of all.
    over = {**exchange, "state": "completed"}
    for later, is_recent in (31, True), (32, False):
        first = flight_recorder(4, groups, [over, *[receive] * later])["entries"][0]
        assert ("parts" in first) is is_recent


def test_monitored_barriers_that_torch_does_not_count_are_told_apart(
    tmp_path: Path,
) -> None:
    """Each has the number of the collective before it, and spoils no other op."""

    key = GroupKey("default", (0, 1))

    def views(last: int) -> dict[int, RankView]:
        """Rank 0 has issued `last` ops, rank 1 one less."""
        found, begin = {}, time.time_ns() - 10**11
        for rank, count in enumerate((last, last - 1)):
            status = GroupCounters("default", rank, 0, range(2), key.id)
            records = []
            ops = [OpType.ALL_REDUCE, *[OpType.MONITORED_BARRIER] * 2] * 2
            for place, op in enumerate(ops[:count]):
                one = record(op, *[(4,)] * (op is OpType.ALL_REDUCE), status=status)
                state = "started" if place == last - 1 else "completed"
                uncounted = (0, 1, 2, 0, 3, 4)[place]
                records.append(
                    {
                        **one.as_dict(),
                        "collective_seq_id": 1 + place // 3,
                        "record_id": place,
                        "uncounted_id": uncounted,
                        "state": state,
                        "time_created_ns": (began := begin + place),
                        "time_started_ns": began,
                    }
                )
            found[rank] = RankView(rank, records, time.time_ns())
        return found

    names = ["monitored_barrier", "monitored_barrier", "all_reduce #2"]
    for last, name in enumerate(names, 2):
        ranks = views(last)
        (live,) = diagnose({key: 0}, ranks, 5)
        folder = tmp_path / str(last)
        folder.mkdir()
        for rank, view in ranks.items():
            groups = {key.id: {"name": "default", "ranks": [0, 1]}}
            dump = flight_recorder(rank, groups, view.records)
            save_flight_recorder(dump, f"{folder}{os.sep}", rank)
        (read,) = examine([folder]).verdicts
        for verdict in (live, read):
            assert verdict.fault is Fault.MISSING_RANKS
            assert verdict.culprits == (1,)
            assert f"rank 1 has not entered {name} (" in verdict.text


# -- the file ------------------------------------------------------------------


@pytest.mark.usefixtures("group")
def test_the_file_is_named_for_the_folder_or_prefix_and_the_rank(
    tmp_path: Path,
) -> None:
    dist.barrier(async_op=True)
    folder = tmp_path / "traces"
    expected = folder / "comm_lib_trace_rank_0"
    assert dist.dump_flight_recorder(f"{folder}/") == expected
    assert dist.dump_flight_recorder(folder) == expected
    assert dist.dump_flight_recorder(folder / "mine_") == folder / "mine_0"
    assert {file.name for file in folder.iterdir()} == {expected.name, "mine_0"}
    with expected.open("rb") as file:
        assert pickle.load(file) == flight_recorder(**local_dump())


@pytest.mark.usefixtures("group")
def test_a_prefix_that_hides_the_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not end with a digit, as '.*run7_'"):
        dist.dump_flight_recorder(tmp_path / "traces" / "run7")
    assert not (tmp_path / "traces").exists()


@pytest.mark.usefixtures("group")
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = dist.dump_flight_recorder(f"{tmp_path}/traces/")
    before = file.read_bytes()
    dist.barrier(async_op=True)

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        dist.dump_flight_recorder(file.parent)
    assert [file] == list(file.parent.iterdir())
    assert file.read_bytes() == before


def test_without_a_rank_there_is_nothing_to_dump(tmp_path: Path) -> None:
    recorder.clear()
    with pytest.raises(ValueError, match="call init_process_group"):
        dist.dump_flight_recorder(tmp_path)


@pytest.mark.usefixtures("group")
def test_the_ring_can_be_dumped_after_the_end_of_the_groups(tmp_path: Path) -> None:
    dist.barrier(async_op=True)
    Manual.made[0].works[0].mark_completed()
    before = flight_recorder(**local_dump())
    assert json.loads(json.dumps(local_dump())) == local_dump()
    world.destroy()
    assert flight_recorder(**local_dump()) == before
    assert dist.dump_flight_recorder(tmp_path).exists()


@pytest.mark.usefixtures("group")
def test_a_group_without_an_op_is_named_too() -> None:
    """Who does not come to its first op is known from that."""
    assert list(flight_recorder(**local_dump())["pg_config"]) == ["default"]
    dist.barrier(async_op=True)
    found = flight_recorder(**local_dump())
    assert list(found["pg_config"]) == ["default"]
    assert len(found["entries"]) == 1


@pytest.mark.usefixtures("group")
def test_sends_and_receives_can_be_left_out(tmp_path: Path) -> None:
    dist.barrier(async_op=True)
    dist.isend(np.ones(3), 1)
    file = dist.dump_flight_recorder(tmp_path, point_to_point=False)
    dump = pickle.loads(file.read_bytes())
    assert [one["profiling_name"] for one in dump["entries"]] == ["nccl:barrier"]
    assert list(dump["pg_config"]) == ["default"]


# -- PyTorch's analyser --------------------------------------------------------

F4 = np.float32


def everything(me: Rank, group: dist.ProcessGroup) -> None:
    """One of each collective, batches, object collectives, and a rebuild."""
    rank, size = me.rank, me.size
    x = np.ones(8, F4)

    def ones(size: int) -> Any:
        return np.ones(size, F4)

    def parts(*sizes: int) -> list[Any]:
        return [ones(size) for size in sizes]

    even, uneven = [4] * size, [n + 1 for n in range(size)]
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 1, group)
    dist.reduce(x, 2, group=group)
    dist.all_gather(parts(*even), ones(4), group=group)
    dist.all_gather(parts(*uneven), ones(rank + 1), group=group)
    dist.all_gather_into_tensor(np.ones((size, 8), F4), x, group)
    dist.gather(x, parts(*[8] * size) if rank == 1 else None, 1, group)
    dist.scatter(x, parts(*[8] * size) if rank == 1 else None, 1, group)
    dist.reduce_scatter(ones(4), parts(*even), group=group)
    dist.reduce_scatter(ones(rank + 1), parts(*uneven), group=group)
    dist.reduce_scatter_tensor(ones(2), x, group=group)
    dist.all_to_all(parts(*even), parts(*even), group)
    dist.all_to_all(
        parts(*(n + 2 * rank for n in range(size))),
        parts(*(2 * n + rank for n in range(size))),
        group,
    )
    dist.all_to_all_single(np.ones(8, F4), x, group=group)
    dist.barrier(group)
    dist.monitored_barrier(group)
    dist.all_gather_object([None] * size, "x" * rank, group)
    dist.all_reduce(np.ones((2, 0), F4), group=group)
    dist.all_reduce(np.ones((), np.int64), group=group)
    dist.all_reduce_coalesced(parts(1, 2, 3), group=group)
    dist.all_gather_into_tensor_coalesced(
        parts(4, 8), parts(4 // size, 8 // size), group
    )
    dist.rebuild_process_group(group)
    dist.all_reduce(x, group=group)


def subgroups(me: Rank, group: dist.ProcessGroup) -> None:
    """Groups that share a name, with ranks in common and without."""
    pair = dist.new_group([me.rank // 2 * 2, me.rank // 2 * 2 + 1], group_desc="pair")
    for _ in range(2 + me.rank // 2):
        dist.all_reduce(np.ones(3, F4), group=pair)
    if me.rank % 2:
        dist.recv(np.ones(3, F4), me.rank - 1, pair)
    else:
        dist.send(np.ones(3, F4), me.rank + 1, pair)
    for first in range(3):
        ranks = [first, first + 1]
        if me.rank in ranks:
            overlap = dist.new_group(ranks, group_desc="overlap")
            dist.all_reduce(np.ones(3 + first, F4), group=overlap)
    dist.all_reduce(np.ones(3, F4), group=group)


def sends_between(me: Rank, group: dist.ProcessGroup) -> None:
    """Sends and receives with the numbers of the collectives beside them."""
    for _ in range(3):
        if me.rank == 0:
            dist.send(np.ones(3, F4), 1, group)
        elif me.rank == 1:
            dist.recv(np.ones(3, F4), 0, group)
        dist.all_reduce(np.ones(3, F4), group=group)


def missing(me: Rank, group: dist.ProcessGroup) -> None:
    """Rank 3 stays away from the third all_reduce."""
    for _ in range(2):
        dist.all_reduce(np.ones(3, F4), group=group)
    if me.rank != 3:
        dist.all_reduce(np.ones(3, F4), group=group, async_op=True)


def differing(me: Rank, group: dist.ProcessGroup, op: Callable[[], Any]) -> None:
    dist.all_reduce(np.ones(3, F4), group=group)
    work = op()
    until(work.is_completed)


def wrong_op(me: Rank, group: dist.ProcessGroup) -> None:
    """Rank 2 broadcasts."""
    x = np.ones(3, F4)
    if me.rank == 2:
        differing(me, group, lambda: dist.broadcast(x, 2, group, async_op=True))
    else:
        differing(me, group, lambda: dist.all_reduce(x, group=group, async_op=True))


def wrong_size(me: Rank, group: dist.ProcessGroup) -> None:
    """Rank 1 reduces five elements instead of four."""
    x = np.ones(5 if me.rank == 1 else 4, F4)
    differing(me, group, lambda: dist.all_reduce(x, group=group, async_op=True))


def wrong_dtype(me: Rank, group: dist.ProcessGroup) -> None:
    """Rank 0 reduces another type."""
    x = np.ones(4, np.float64 if me.rank == 0 else F4)
    differing(me, group, lambda: dist.all_reduce(x, group=group, async_op=True))


SCENARIOS = (
    everything,
    subgroups,
    sends_between,
    missing,
    wrong_op,
    wrong_size,
    wrong_dtype,
)


def run_scenarios(me: Rank, folder: str) -> None:
    """Each in a group of its own, dumped into a folder of its own."""
    store_backend.register()
    dist.init_process_group("store")
    for scenario in SCENARIOS:
        recorder.clear()
        name = scenario.__name__
        group = dist.new_group(group_desc=name)
        assert isinstance(group, dist.ProcessGroup)
        scenario(me, group)
        dist.dump_flight_recorder(os.path.join(folder, name, ""))
        dist.barrier()
        dist.abort_process_group(group, "the scenario is over")
    dist.destroy_process_group()


def nccl_dumps(scenario: str, folder: Path) -> None:
    """Dump what three ranks recorded over NCCL on simulated GPUs.

    The ranks are threads: the records of all of them are in one flight recorder, which
    numbers the records of each process.
    """
    recorder.clear()
    simulation = Simulation()
    use_gpu_api(lambda: simulation.api)
    ranks = Ranks(simulation, folder).start(3, name=scenario)
    try:
        ranks(nccl_missing if scenario == "nccl_missing" else nccl_everything)
        everything = recorder.records()
        for rank in range(3):
            mine = [one.as_dict() for one in everything if one.status.rank == rank]
            records = [{**one, "record_id": n} for n, one in enumerate(mine)]
            groups = {mine[0]["group_id"]: {"name": scenario, "ranks": [0, 1, 2]}}
            dump = flight_recorder(rank, groups, records)
            save_flight_recorder(dump, str(folder / scenario) + os.sep, rank)
    finally:
        ranks.ranks[0].pg.abort("the scenario is over")
        ranks.close()
        simulation.close()
        use_gpu_api(None)
        watchdog.stop()
        take_async_error()


def nccl_everything(me: GpuRank) -> None:
    """Ops of one call and of several, and a batch, which ends as one."""

    def ones(count: int = 3) -> Any:
        return me.array(np.ones(count, F4))

    pg = me.pg
    dist.all_reduce(ones(), group=pg)
    dist.broadcast(ones(), 1, pg)
    dist.all_gather([ones() for _ in range(3)], ones(), group=pg)
    dist.all_gather_into_tensor(ones(9), ones(), pg)
    dist.reduce_scatter_tensor(ones(1), ones(), group=pg)
    dist.all_to_all_single(ones(), ones(), group=pg)
    dist.barrier(pg)
    with dist.coalescing_manager(pg):
        for count in range(1, 4):
            dist.all_reduce(ones(count), group=pg)
    me.synchronize()
    until(lambda: not pg.status.in_flight)


def nccl_missing(me: GpuRank) -> None:
    """Rank 1 stays away from the second all_reduce, which hangs on the device."""
    dist.all_reduce(me.array([1.0]), group=me.pg)
    me.synchronize()
    until(lambda: not me.pg.status.in_flight)
    if me.rank != 1:
        work = me.all_reduce()
        until(lambda: work.state is WorkState.STARTED)


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What PyTorch's own dumps look like, and its verdict on each scenario."""
    reasons: list[str] = []
    python = torch_python(print, reasons.append)
    if python is None:
        pytest.skip("; ".join(reasons))
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(4, run_scenarios, str(folder))
    script = Path(__file__).with_name("fr_trace.py")
    folders = [folder / scenario.__name__ for scenario in SCENARIOS]
    for name in ("nccl_everything", "nccl_missing"):
        nccl_dumps(name, folder)
        folders.append(folder / name)
    done = subprocess.run(
        [python, script, *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # gloo of the reference greets on standard output.
    return json.loads(done.stdout.splitlines()[-1])


def without_hash(group: str) -> str:
    """The name in a group's id, with what follows the id."""
    return re.sub("/[0-9a-f]{8}", "", group)


def unmatched(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in found if not one["matched"]]


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(1800)  # the first one may have to download PyTorch
def test_the_analyser_finds_every_collective_matched(analysed: dict[str, Any]) -> None:
    found = analysed["everything"]
    assert unmatched(found) == []
    assert {without_hash(one["group"]) for one in found} == {
        "everything",
        "everything (generation 1)",
    }
    ops = [one["op"].removeprefix("nccl:") for one in found]
    assert len(ops) == 23
    assert {"all_gather_v", "allreduce_coalesced", "all_to_all"} < set(ops)


@pytest.mark.processes
@pytest.mark.soak
def test_the_analyser_keeps_groups_apart(analysed: dict[str, Any]) -> None:
    found = analysed["subgroups"]
    assert unmatched(found) == []
    groups = [one["group"] for one in found]
    assert sorted(
        (without_hash(group), groups.count(group)) for group in {*groups}
    ) == [
        *[("overlap", 1)] * 3,
        *(("pair", 2), ("pair", 3)),
        *[("pair p2p", 1)] * 2,
        ("subgroups", 1),
    ]


@pytest.mark.processes
@pytest.mark.soak
def test_sends_do_not_spoil_the_verdict_on_collectives(
    analysed: dict[str, Any],
) -> None:
    # It takes a send in a group of four for a collective that two ranks missed.
    found = [one for one in analysed["sends_between"] if "p2p" not in one["group"]]
    assert len(found) == 3
    assert unmatched(found) == []


@pytest.mark.processes
@pytest.mark.soak
def test_the_analyser_names_the_missing_rank(analysed: dict[str, Any]) -> None:
    (wrong,) = unmatched(analysed["missing"])
    assert (wrong["op"], wrong["seq"]) == ("nccl:all_reduce", 3)
    assert wrong["missing"] == [3]


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize(
    ("scenario", "culprit", "error"),
    [
        ("wrong_op", 2, "COLLECTIVE_TYPE_MISMATCH.*'(broadcast|all_reduce)'"),
        ("wrong_size", 1, "SIZE_OR_SYNTAX_MISMATCH.*'\\[\\[[45]\\]\\]'"),
        ("wrong_dtype", 0, "COLLECTIVE_DTYPE_MISMATCH.*Double"),
    ],
)
def test_the_analyser_names_the_rank_that_differs(
    analysed: dict[str, Any], scenario: str, culprit: int, error: str
) -> None:
    (wrong,) = unmatched(analysed[scenario])
    assert wrong["seq"] == 2
    ranks = {int(rank) for rank in wrong["culprits"]}
    # It holds all others to the rank whose file the system lists first.
    assert ranks in ({culprit}, set(range(4)) - {culprit})
    for said in wrong["culprits"].values():
        assert re.search(error, said)


@pytest.mark.processes
@pytest.mark.soak
def test_the_analyser_takes_the_dumps_of_nccl_groups(
    analysed: dict[str, Any],
) -> None:
    found = analysed["nccl_everything"]
    assert unmatched(found) == []
    assert [one["op"] for one in found] == [
        "nccl:all_reduce",
        "nccl:broadcast",
        "nccl:all_gather",
        "nccl:_all_gather_base",
        "nccl:_reduce_scatter_base",
        "nccl:all_to_all",
        "nccl:barrier",
        "nccl:allreduce_coalesced",
    ]
    (wrong,) = unmatched(analysed["nccl_missing"])
    assert (wrong["op"], wrong["seq"]) == ("nccl:all_reduce", 2)
    assert wrong["missing"] == [1]


def test_a_duration_is_that_of_the_device(tmp_path: Path) -> None:
    nccl_dumps("nccl_everything", tmp_path)
    for file in sorted((tmp_path / "nccl_everything").iterdir()):
        dump = pickle.loads(file.read_bytes())
        assert len(dump["entries"]) == 8
        for entry in dump["entries"]:
            assert entry["state"] == "completed"
            assert entry["duration_ms"] >= 0


@pytest.mark.processes
@pytest.mark.soak
def test_the_analyser_knows_all_names(analysed: dict[str, Any]) -> None:
    # Those two are types of Works, never of records.
    for op in set(OpType) - {OpType.COALESCED, OpType.UNKNOWN}:
        if op.is_p2p:
            continue
        batch = [record(op, (2,)), record(op, (2,), (3,), (4,))]
        for found in (dump_of(batch[0]), dump_of(*batch), dump_of(batch[1])):
            name = found["entries"][0]["profiling_name"].removeprefix("gloo:")
            assert name in analysed["collectives"]


@pytest.mark.processes
@pytest.mark.soak
def test_our_dumps_have_the_fields_and_types_of_pytorchs(
    analysed: dict[str, Any],
) -> None:
    reference = analysed["reference"]
    mine = dump_of(record(OpType.ALL_REDUCE, (3,)))

    def check(found: dict[str, Any], what: str, *without: str) -> None:
        types = {key: type(value).__name__ for key, value in found.items()}
        expected = {k: v for k, v in reference[what].items() if k not in without}
        assert {key: types.get(key) for key in expected} == expected

    assert mine["version"] == reference["version"]
    check(mine, "dump")
    check(mine["pg_config"]["default"], "pg_config")
    check(mine["pg_status"]["0"], "pg_status")
    check(mine["entries"][0], "entry", "thread_id", "thread_name")
    check(mine["entries"][0]["frames"][0], "frame")
