"""The backend ``rankscope`` of torch.distributed: its ops, trainings and errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d
from torch.distributed import Work as c10d_work

import rankscope.torch
from rankscope import (
    DistBackendError,
    DistStoreTimeoutError,
    DistTimeoutError,
    OpType,
    Work,
)
from rankscope.backends.groups import arrival
from rankscope.backends.groups.world import world
from rankscope.backends.launch_variables import STORE
from rankscope.backends.stores.base import RANK_0
from rankscope.backends.torch_backend import (
    meeting,
    private,
    registering,
    tensors,
)
from rankscope.backends.torch_backend.options import Options
from rankscope.backends.torch_backend.work import (
    TorchWork,
    _waited_as_one,
    wait_for_batches,
)
from tests.with_torch.backend_training import TRAININGS
from tests.with_torch.ranks import Ranks

PREAMBLE = """
import datetime
import signal
import torch
import torch.distributed as dist
import rankscope.torch
from rankscope.backends.groups.world import world
from rankscope.backends.observe.export import local_dump
from rankscope.backends.work.flight_recorder import recorder
from torch.distributed import distributed_c10d
import backend_training as training

def last_op():
    return recorder.records()[-1]

def raised(call):
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")
"""

INIT = """
dist.init_process_group(
    "cpu:rankscope", init_method="file://" + folder + "/store", rank=rank,
    world_size=world_size, timeout=datetime.timedelta(seconds=60),
)
"""
NO_REPORT = {"RANKSCOPE_REPORT": "0"}


@contextlib.contextmanager
def begun(size: int, *texts: str) -> Iterator[Ranks]:
    """Yield ranks that have made the default group, and run `texts`."""
    with Ranks(size, PREAMBLE, NO_REPORT) as ranks:
        for text in (INIT, *texts):
            ranks.run(text)
        yield ranks


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with begun(request.param) as ranks:
        yield ranks
        ranks.run("dist.destroy_process_group(); assert world.groups() == []")


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_ends_as_in_one_process(ranks: Ranks, name: str) -> None:
    ranks.run(
        f"train, tolerance = training.TRAININGS[{name!r}]\n"
        "found = train()\n"
        "assert found <= tolerance, found"
    )


COLLECTIVES = {
    "all_reduce": """
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [world_size * (world_size + 1) / 2] * 3
    """,
    "max": """
        x = torch.tensor([rank, -rank])
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert x.tolist() == [world_size - 1, 0]
    """,
    "premul_sum": """
        x = torch.ones(2)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        assert x.tolist() == [world_size / 2] * 2
    """,
    "methods": """
        pg, own = dist.group.WORLD, torch.full((2,), float(rank))
        x = torch.ones(2)
        pg.allreduce([x], dist.ReduceOp.SUM).wait()
        pg.broadcast(x, root=1).wait()
        assert x.tolist() == [world_size] * 2
        options = distributed_c10d.ReduceOptions()
        options.rootRank, options.reduceOp = 1, dist.ReduceOp.MAX
        x = own.clone()
        work = pg.reduce([x], options)
        assert work.result()[0] is x
        assert rank != 1 or x.tolist() == [world_size - 1] * 2
        sizes = (2, 1, ())
        lists = [[torch.zeros(one) for one in sizes] for _ in range(world_size)]
        pg.allgather_coalesced(lists, [own, own[:1], own[0]]).wait()
        assert [one[1].item() for one in lists] == list(range(world_size))
        parts = [torch.zeros(2) for _ in range(world_size)]
        work = pg.allgather([parts], [own])
        assert work.result()[0][1] is parts[1]
        assert [int(one[0]) for one in parts] == list(range(world_size))
        future = pg.gather([parts] if rank == 1 else [], [own + 1], 1).get_future()
        assert future.wait() == (parts if rank == 1 else []), rank
        pg.alltoall(parts, [own + r for r in range(world_size)]).wait()
        assert int(parts[1][0]) == rank + 1
        many = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
        pg.allreduce_coalesced(many).wait()
        assert many[1].tolist() == [world_size] * 3
        assert pg.barrier(distributed_c10d.BarrierOptions()).wait()
        pg.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=True)
        for bad in [x, x], None:
            error = raised(lambda: pg.allreduce(bad))
            assert isinstance(error, (TypeError, ValueError)), error
    """,
    "compiled": """
        # A graph breaks at an op that torch does not trace: ours has to be left alone.
        torch._dynamo.reset()
        frames = torch._dynamo.utils.counters["frames"]
        frames.clear()
        def step(x):
            y = x * 2
            dist.broadcast(y, 0)
            return y + 1
        traced = torch.compile(step, backend="eager")
        assert traced(torch.full((2,), float(rank))).tolist() == [1, 1]
        # Before the op, and behind it; older versions of torch trace its function, too.
        assert frames["total"] <= 3, frames
    """,
    "rooted": """
        x = torch.ones(2)
        dist.reduce(x, 1)
        assert x.tolist() == ([world_size] * 2 if rank == 1 else [1, 1])
        x = torch.full((2,), float(rank))
        dist.broadcast(x, 1)
        assert x.tolist() == [1, 1]
        out = [torch.zeros(1) for _ in range(world_size)] if rank == 0 else None
        dist.gather(torch.tensor([float(rank)]), out, dst=0)
        assert rank or [int(one) for one in out] == list(range(world_size))
        x = torch.zeros(1)
        dist.scatter(x, [torch.tensor([5.0 + one]) for one in range(world_size)]
                     if rank == 0 else None, src=0)
        assert x.item() == 5 + rank
    """,
    "gathers": """
        out = [torch.zeros(2) for _ in range(world_size)]
        dist.all_gather(out, torch.full((2,), float(rank)))
        assert [one.tolist() for one in out] == [[r, r] for r in range(world_size)]
        out = torch.zeros(2 * world_size)
        dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
        assert out.view(world_size, 2)[:, 0].tolist() == list(range(world_size))
        out = torch.zeros(1)
        dist.reduce_scatter_tensor(out, torch.arange(float(world_size)))
        assert out.item() == world_size * rank
        dist.reduce_scatter(out, [torch.ones(1) * r for r in range(world_size)])
        assert out.item() == world_size * rank
    """,
    "all_to_all": """
        out = torch.zeros(world_size)
        dist.all_to_all_single(out, torch.arange(float(world_size)) + 10 * rank)
        assert out.tolist() == [rank + 10 * r for r in range(world_size)]
        rows = torch.full((sum(range(world_size)), 2), float(rank))
        out = torch.zeros(rank * world_size, 2)
        dist.all_to_all_single(out, rows, [rank] * world_size, list(range(world_size)))
        assert out[:, 0].tolist() == [r for r in range(world_size) for _ in range(rank)]
        out = [torch.zeros(1) for _ in range(world_size)]
        parts = [torch.tensor([10.0 * rank + r]) for r in range(world_size)]
        dist.all_to_all(out, parts)
        assert [int(one) for one in out] == [10 * r + rank for r in range(world_size)]
    """,
    "coalesced": """
        parts = [torch.ones(size) for size in range(4)]
        with distributed_c10d._coalescing_manager(async_ops=True) as batch:
            for part in parts:
                dist.all_reduce(part)
        batch.wait()
        assert all(bool((part == world_size).all()) for part in parts)
        with distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            for part in parts:
                dist.broadcast(part, 0)
        wholes = [torch.zeros(world_size), torch.zeros(2 * world_size)]
        with distributed_c10d._coalescing_manager():
            for whole in wholes:
                part = torch.ones(whole.numel() // world_size)
                dist.all_gather_into_tensor(whole, part)
        assert all(bool((whole == 1).all()) for whole in wholes)
    """,
    "coalesced_beside_a_message": """
        from concurrent.futures import ThreadPoolExecutor
        def pass_on():
            x, next_one = torch.zeros(1), (rank + 1) % world_size
            sent = dist.isend(torch.ones(1), next_one)
            dist.recv(x, (rank - 1) % world_size)
            return sent.wait(), x.item()
        part = torch.full((3,), float(rank))
        with distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            dist.broadcast(part, 1)
            with ThreadPoolExecutor() as threads:
                assert threads.submit(pass_on).result(60) == (True, 1)
        assert part.tolist() == [1] * 3
    """,
    "messages": """
        x = torch.zeros(1)
        if rank == 0:
            senders = sorted(dist.recv(x) for _ in range(world_size - 1))
            assert senders == list(range(1, world_size))
        else:
            dist.send(x, 0)
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        ops = [dist.P2POp(dist.isend, torch.tensor([float(rank)]), after, tag=1),
               dist.P2POp(dist.irecv, x, before, tag=1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert x.item() == before
    """,
    "objects": """
        found = [None] * world_size
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": r} for r in range(world_size)]
        found = ["x" * 5000 if rank == 0 else None]
        dist.broadcast_object_list(found, 0)
        assert found == ["x" * 5000]
    """,
    "sparse": """
        x = torch.sparse_coo_tensor([[rank, 0]], [[1.0, 2.0], [3.0, 4.0]], (8, 2))
        whole = x.to_dense()
        dist.all_reduce(x)
        dist.all_reduce(whole)
        assert torch.equal(x.to_dense(), whole)
    """,
    "sparse_shapes": """
        x = torch.sparse_coo_tensor([[0]], [[1.0]], (8, 1))
        longer = torch.sparse_coo_tensor([[0]], [[1.0]], (9, 1))
        for odd in longer, x.to_dense().to_sparse():
            error = raised(lambda: dist.all_reduce(odd if rank == 1 else x.clone()))
            assert isinstance(error, ValueError), error
            assert "rank 0 has shape (8, 1), of which 1 sparse dim" in str(error), error
            assert f"rank 1 has shape {tuple(odd.shape)}, of which" in str(error), error
    """,
    "futures": """
        x = torch.ones(2)
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [2 * world_size] * 2
        assert torch.futures.collect_all([future]).wait()[0].value()[0] is x
    """,
    "dtypes": """
        names = ("uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
                 "complex64 complex128").split()
        for name in names:
            x = torch.ones(3, dtype=getattr(torch, name))
            dist.all_reduce(x)
            assert bool((x == world_size).all()), x
        x = torch.tensor([rank == 0, False])
        dist.all_reduce(x)
        assert x.tolist() == [True, False]
        for name in (*names, "bool", "float8_e4m3fn"):
            x = torch.full((2,), float(rank == 0)).to(getattr(torch, name))
            dist.broadcast(x, 0)
            assert x.to(torch.float32).tolist() == [1, 1]
    """,
    "strides": """
        x = torch.ones(4, 6).t()
        dist.all_reduce(x)
        assert bool((x == world_size).all())
        x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        dist.all_reduce(x)
        assert bool((x == world_size).all())
    """,
    "orders_of_memory": """
        # Elements stay in their places: read in order, or refused where written.
        n = world_size
        x = torch.arange(6.0 * n).view(3, 2 * n).t()
        def check(write, made, expected):
            out = torch.zeros(made)
            write(out)
            assert torch.equal(out, expected), (out, expected)
            other = torch.zeros(made[::-1]).t()
            error = raised(lambda: write(other))
            assert "Tensors must be contiguous that are written" in str(error), error
        def gathered_together(out):
            with distributed_c10d._coalescing_manager():
                dist.all_gather_into_tensor(out, x)
        def scattered_together(out):
            with distributed_c10d._coalescing_manager():
                dist.reduce_scatter_tensor(out, x)
        own = n * x[2 * rank : 2 * rank + 2]
        check(lambda out: dist.reduce_scatter_tensor(out, x), (2, 3), own)
        check(scattered_together, (2, 3), own)
        every = torch.cat([x] * n)
        check(lambda out: dist.all_gather_into_tensor(out, x), every.shape, every)
        check(gathered_together, every.shape, every)
        def passed(out):
            left, right = (rank - 1) % n, (rank + 1) % n
            if out.is_contiguous():
                sent = dist.isend(x, right)
            dist.recv(out, left)
            sent.wait()
        check(passed, (2 * n, 3), x)
        outs = [[torch.zeros(2 * n, 3)] for _ in range(n)]
        error = raised(lambda: dist.all_gather_coalesced(outs, [x]))
        assert "lie in memory in different orders" in str(error), error
    """,
    "groups": """
        halves = [[r for r in range(world_size) if r % 2 == half] for half in range(2)]
        mine = [dist.new_group(half, group_desc="half") for half in halves][rank % 2]
        x = torch.ones(1)
        dist.all_reduce(x, group=mine)
        assert x.item() == len(halves[rank % 2])
        assert last_op().group == "half"
        dist.destroy_process_group(mine)
        assert [one.group_desc for one in world.groups()].count("half") == 0
    """,
    "timeouts": """
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=40))
        dist.barrier()
        assert last_op().timeout == 40
        options = distributed_c10d.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=30)
        dist.group.WORLD.allreduce([torch.ones(1)], options).wait()
        assert last_op().timeout == 30
    """,
    "profile": """
        with torch.profiler.profile() as profile:
            dist.barrier()
        assert "rankscope:barrier" in {one.name for one in profile.events()}
    """,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_op_does_what_torchs_does(ranks: Ranks, name: str) -> None:
    ranks.run(dedent(COLLECTIVES[name]))


def test_a_group_is_split(ranks: Ranks) -> None:
    """From torch 2.15 on: an older one splits the groups of accelerators alone."""
    if private.release < (2, 15):
        ranks.run(
            "error = raised(lambda: dist.split_group(split_ranks=[[0, 1]]))\n"
            "assert isinstance(error, RuntimeError), error"
        )
        return
    ranks.run(
        "parts = [list(range(1, world_size)), [0]]\n"
        "part = dist.split_group(split_ranks=parts, group_desc='part')\n"
        "mine = parts[0 if rank else 1]\n"
        "x = torch.ones(3)\n"
        "dist.all_reduce(x, group=part)\n"
        "assert x.tolist() == [len(mine)] * 3\n"
        "assert dist.get_process_group_ranks(part) == mine\n"
        "assert last_op().group == 'part'\n"
        "swapped = dist.split_group(split_ranks=[[1, 0]])\n"
        "if rank > 1:\n"
        "    assert swapped is dist.GroupMember.NON_GROUP_MEMBER\n"
        "else:\n"
        "    assert dist.get_rank(swapped) == 1 - rank\n"
        "    dist.broadcast(x, 1, group=swapped)\n"
        "    dist.destroy_process_group(swapped)\n"
        "inner = dist.split_group(part, [list(range(len(mine)))])\n"
        "dist.barrier(group=inner)\n"
        "dist.destroy_process_group(inner)\n"
        "dist.destroy_process_group(part)\n"
        "assert 'part' not in [one.group_desc for one in world.groups()]"
    )


def test_a_group_beside_another_backend_does_the_ops_of_cpu_tensors(
    ranks: Ranks,
) -> None:
    """From torch 2.14 on; an older one says what is needed, and makes nothing."""
    if private.release < (2, 14):
        ranks.run(
            "both = 'cpu:rankscope,cuda:gloo'\n"
            "error = raised(lambda: dist.new_group(backend=both))\n"
            "assert 'rankscope beside gloo needs torch 2.14 or newer' in str(error)"
        )
        return
    ranks.run(
        "both = 'cpu:rankscope,cuda:gloo'\n"
        "mixed = dist.new_group(backend=both, group_desc='mixed')\n"
        "x = torch.ones(3)\n"
        "dist.all_reduce(x, group=mixed)\n"
        "assert x.tolist() == [world_size] * 3\n"
        "assert last_op().group == 'mixed'\n"
        "work = dist.all_reduce(x, group=mixed, async_op=True)\n"
        "work.wait()\n"
        "with distributed_c10d._coalescing_manager(mixed, torch.device('cpu')):\n"
        "    dist.broadcast(x, 0, group=mixed)\n"
        "model = training.DistributedDataParallel(\n"
        "    training.Net(), bucket_cap_mb=0.01, process_group=mixed)\n"
        "assert training.train(model, training.adam(model)) <= 1e-5\n"
        "error = raised(rankscope.torch.shrink)\n"
        "assert 'a part of a group of torch with other backends' in str(error)\n"
        "mixed.abort()\n"
        "error = raised(lambda: dist.all_reduce(x, group=mixed))\n"
        "assert type(error).__name__ == 'DistAbortedError', error\n"
        "rankscope.torch.rebuild()\n"
        "x.fill_(1)\n"
        "dist.all_reduce(x, group=mixed)\n"
        "assert x.tolist() == [world_size] * 3\n"
        f"if {private.release >= (2, 15)}:\n"
        "    error = raised(lambda: dist.split_group(mixed, [[0]]))\n"
        "    assert 'in none of split_ranks' in str(error), error\n"
        "    parts = [[0, world_size - 1], [*range(1, world_size - 1)]]\n"
        "    parts = [one for one in parts if one]\n"
        "    part = dist.split_group(mixed, parts, group_desc='part')\n"
        "    dist.all_reduce(x, group=part)\n"
        "    assert x.tolist() == [2 * world_size] * 3\n"
        "    assert last_op().group == 'part'\n"
        "    dist.destroy_process_group(part)\n"
        "dist.destroy_process_group(mixed)\n"
        "assert 'mixed' not in [one.group_desc for one in world.groups()]"
    )


def test_the_entry_point_of_the_package_registers_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch loads and calls it from 2.14 on; the name is what it looks for."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (name,) = re.findall(
        r'entry-points."torch.distributed.backends"\]\n(\w+) = "[^"]+"', text
    )
    (value,) = re.findall(r'distributed.backends"\]\n\w+ = "([^"]+)"', text)
    # What registering adds goes again: another test compares torch's own names.
    known: dict[str, Any] = {}
    monkeypatch.setattr(distributed_c10d.Backend, "_plugins", known)
    monkeypatch.setattr(distributed_c10d.Backend, name.upper(), "", raising=False)
    EntryPoint(name, value, "torch.distributed.backends").load()()
    assert known[name.upper()].extended_api


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "release", (2, 6))
    with pytest.raises(DistBackendError, match=r"needs torch 2\.7 or newer"):
        registering._create(None, None)


BAD_CALLS = [
    ("torch.ones(4, 4)[:, 1]", "ValueError", "must be contiguous"),
    ("torch.empty(2, device='meta')", "ValueError", "tensors on the CPU"),
    ("torch.ones(2, 2).to_sparse_csr()", "ValueError", "torch.sparse_coo"),
    ("torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.quint8)", "TypeError", ""),
]


def test_a_rank_that_comes_back_alone_is_told_how_the_others_meet_it() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(DistBackendError, match="rank 0 did not come to it") as caught:
        meeting._meet(store, 1, 2, 10.0, Options())
    assert "once all of them call destroy_process_group()" in str(caught.value)
    assert caught.value.culprits == (0,)


def test_rank_0_waits_until_the_others_have_found_its_store() -> None:
    """A script that fails at once tells it on each rank; rank 1 waited for 30 min."""
    late = (
        "from rankscope.backends.torch_backend import meeting\n"
        "come, join = threading.Event(), meeting._init\n"
        "meeting._init = lambda *given: (come.wait(), join(*given))\n"
    )
    with Ranks(2, PREAMBLE, NO_REPORT) as ranks:
        ranks.start({0: INIT, 1: late + INIT})
        ranks.wait_until(0, "world.store and world.store.check(['arrived/0'])")
        ranks.ask(1, "come.set()")
        assert ranks.finish() == {}
        ranks.run("dist.destroy_process_group()")


def test_a_child_of_a_launched_rank_has_a_meeting_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rank may be that of its parent, as where torch.multiprocessing spawns it."""
    names = {STORE: "127.0.0.1:1/a job/2", "TORCHELASTIC_RUN_ID": "a job"}
    for name, value in {**names, "MASTER_PORT": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    meeting._meet(HashStore(), 0, 1, 10.0, Options())
    assert world.store is not None
    assert world.store.server == RANK_0
    world.destroy()


def test_a_text_alone_is_neither_group_nor_reason() -> None:
    with pytest.raises(TypeError, match="positional"):
        rankscope.torch.abort("this rank gives up")  # type: ignore[call-arg]


def test_rank_0_waits_for_the_others_and_tells_late_ones_that_it_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script may destroy its groups without an op, and a late rank find no store."""
    monkeypatch.setattr(arrival, "_GOODBYE", 0.1)
    store = HashStore()
    with pytest.raises(DistStoreTimeoutError, match="rank 0: rank 1 of 2") as caught:
        meeting._meet(store, 0, 2, 0.3, Options())
    assert caught.value.culprits == (1,)
    assert world.default is None
    with pytest.raises(DistBackendError, match="rank 0 could not make") as told:
        meeting._meet(store, 1, 2, 30.0, Options())
    assert "rank 1 of 2 did not come within 0.3 s" in str(told.value)


@pytest.mark.parametrize(("tensor", "kind", "says"), BAD_CALLS)
def test_a_tensor_that_cannot_be_used_is_refused_before_a_byte_moves(
    ranks: Ranks, tensor: str, kind: str, says: str
) -> None:
    ranks.run(
        f"before = recorder.count\n"
        f"error = raised(lambda: dist.all_reduce({tensor}))\n"
        f"assert type(error).__name__ == {kind!r}, error\n"
        f"assert {says!r} in str(error), error\n"
        "assert 'all_reduce in group \\'default\\' on rank' in str(error), error\n"
        "assert recorder.count == before"
    )


def test_nothing_is_copied(ranks: Ranks) -> None:
    ranks.run(
        "from rankscope.backends.torch_backend.tensors import memory\n"
        "x = torch.zeros(3)\n"
        "memory(x, 'test')[1] = 7\n"
        "assert x.tolist() == [0, 7, 0]"
    )


def test_an_op_that_torch_waits_for_at_once_is_done_by_its_caller(ranks: Ranks) -> None:
    ranks.run(
        """
x = torch.ones(2)
dist.broadcast(x, 0)
assert last_op().waited_ns == last_op().created_ns
parts = torch.empty(2 * world_size)
dist.all_gather_into_tensor(parts, x)
assert last_op().waited_ns == last_op().created_ns
work = dist.all_reduce(x, async_op=True)
assert last_op().waited_ns != last_op().created_ns
work.wait()
        """
    )


def test_the_line_of_an_op_of_ddp_is_the_users(ranks: Ranks) -> None:
    ranks.run(
        "model = training.DistributedDataParallel(training.Net())\n"
        "loss = model(training.own(0)).sum()\n"
        "loss.backward()\n"
        "file, line, _ = last_op().frames[0]\n"
        "assert (file[:4], line) == ('cell', 3), last_op().frames"
    )


def test_an_op_of_fsdp2_names_the_hook_that_issues_it(ranks: Ranks) -> None:
    """And not the function that torch wraps its hooks in."""
    ranks.run(
        "model = training.Net()\n"
        "training.fully_shard(model.first)\n"
        "training.fully_shard(model)\n"
        "recorder.clear()\n"
        "model(training.own(0)).sum().backward()\n"
        "names = {one.issuer for one in recorder.records()}\n"
        "assert 'FSDPState._pre_backward' in names, names\n"
        "assert not any('wrapper' in one for one in names), names"
    )


def test_the_watch_of_torchs_groups_leaves_those_of_the_backend_alone(
    ranks: Ranks,
) -> None:
    ranks.run(
        "rankscope.torch.watch(publish=False)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "assert {one.library for one in world.summary()} == {''}, world.summary()"
    )


def test_pg_options_are_checked(ranks: Ranks) -> None:
    ranks.run(
        "error = raised(lambda: dist.new_group(pg_options='ucx'))\n"
        "assert isinstance(error, TypeError)\n"
        "assert \"Options(transport='ucx')\" in str(error), error"
    )


def test_tensors_in_several_orders_of_memory_are_refused() -> None:
    rows = torch.ones(3, 4)
    columns = torch.ones(4, 3).t()
    with pytest.raises(ValueError, match=r"gather in x: tensors of shape \(3, 4\)"):
        tensors.require_one_order([columns, [rows, rows]], "gather in x")
    tensors.require_one_order([columns, [columns, columns], None], "gather in x")
    # The stride of a dimension of one element tells nothing.
    tensors.require_one_order([torch.ones(1, 4), torch.ones(4, 1).t()], "gather in x")


# -- pipelines of torch 2.7 ----------------------------------------------------------


def batch(*works: Work | None) -> list[Any]:
    """Return the Works that torch 2.7 gets of a batch; ``None``: of another backend."""
    made = [c10d_work() if one is None else TorchWork(one) for one in works]
    received: list[Any] = _waited_as_one(lambda _: made)([])
    return received


def test_who_waits_for_the_last_of_a_batch_waits_for_all() -> None:
    first, last = Work(OpType.RECV), Work(OpType.RECV)
    works = batch(first, last)
    last.mark_completed()
    with pytest.raises(DistTimeoutError):
        works[-1].wait(timedelta(milliseconds=1))
    assert works[-1].is_completed()
    first.mark_completed()
    assert works[-1].wait()


def test_who_waits_for_the_last_of_a_batch_gets_the_error_of_another() -> None:
    first, last = Work(OpType.RECV), Work(OpType.RECV)
    works = batch(first, last)
    last.mark_completed()
    first.mark_failed(DistBackendError("recv #1 failed"))
    with pytest.raises(DistBackendError, match="recv #1 failed"):
        works[-1].wait()


def test_a_batch_of_another_backend_is_left_alone() -> None:
    assert batch() == []
    assert type(batch(None, None)[-1]) is c10d_work


@pytest.mark.parametrize(("release", "replaced"), [((2, 7), True), ((2, 8), False)])
def test_batches_are_replaced_where_pipelines_wait_for_the_last_op(
    release: tuple[int, int], replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(private, "release", release)
    monkeypatch.setattr(private, "replace", lambda _, name, __: names.append(name))
    wait_for_batches.__wrapped__()
    assert names == ["batch_isend_irecv"] * replaced
