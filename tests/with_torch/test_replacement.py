"""``rankscope.run`` replaces ranks of a training that die, rank 0 among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest

BEGIN = """
import os, sys, time, torch
import torch.distributed as dist
import rankscope, rankscope.torch
sys.path.insert(0, sys.argv[1])
import backend_training as training
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("rankscope")
rank, fresh = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"

def train(model, optimizer, do_step, end, victims):
    # Do the steps before `end`; kill rank `victims[step]` at a step, once.
    step, joined = 0, False
    while step < end:
        try:
            if not joined:
                step, joined = rankscope.torch.rejoin(model, optimizer), True
            if victims.get(step) == rank and not fresh:
                os.kill(os.getpid(), 9)
            do_step(step)
            step += 1
        except rankscope.DistAbortedError as error:
            print(f"step {step}: {error.reason}", error.culprits)
            rankscope.torch.rebuild(120)
            joined = False
"""


def run(folder: Path, code: str, *options: str) -> tuple[int, str, str]:
    """Run a script; return the exit status, stdout and stderr."""
    script = folder / "train.py"
    script.write_text(BEGIN + dedent(code))
    return run_script(script, str(Path(__file__).parent), options=options)


def run_script(
    script: Path | str, argument: str, *, options: Sequence[str], timeout: float = 170
) -> tuple[int, str, str]:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore::FutureWarning", "-m", "rankscope.run"),
            *(*options, str(script), argument),
        ],
        env={**os.environ, "RANKSCOPE_REPORT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def assert_told(out: str, step: int, victim: int, ranks: int) -> None:
    """Assert that all others were told of the end of `victim`, as its cause."""
    for rank in {*range(ranks)} - {victim}:
        assert re.search(
            rf"\[rank {rank}\] step {step}: rank {victim} \(process \d+ on .*\) is "
            rf"gone: killed by SIGKILL \({victim},\)",
            out,
        ), out


def test_a_training_goes_on_with_fresh_ranks(tmp_path: Path) -> None:
    """Rank 1 dies before DDP has its final buckets, and then rank 0, the first.

    Fresh ranks make the groups of the start of the script; one made later is refused
    on all of its ranks until it is made anew.
    """
    code = """
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("outer", "inner"))
    late = None
    model = training.DistributedDataParallel(training.Net(), bucket_cap_mb=0.01)
    with_graph = training.DistributedDataParallel(training.Net(), static_graph=True)
    both = torch.nn.ModuleList([model, with_graph])
    optimizer = training.adam(both)
    objects = id(model), id(model.process_group), id(pair)
    def do_step(step):
        global late
        optimizer.zero_grad()
        x = training.own(step)
        (model(x).pow(2).mean() + with_graph(x).pow(2).mean()).backward()
        optimizer.step()
        if late is None and not fresh:
            late = dist.new_group([0, 1, 2], group_desc="late")
    train(both, optimizer, do_step, 9, {1: 1, 5: 0})
    assert objects == (id(model), id(model.process_group), id(pair))
    x = torch.ones(1)
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.item() == 2
    dist.all_reduce(x, group=mesh.get_group("inner"))
    assert x.item() == 5
    if late is not None:
        try:
            dist.all_reduce(x, group=late)
        except rankscope.DistBackendError as error:
            print(f"refused: {error}")
    later = dist.new_group([0, 1, 2], group_desc="late")
    flat = torch.cat([one.detach().flatten() for one in both.parameters()])
    found = [torch.empty_like(flat) for _ in range(3)]
    dist.all_gather(found, flat, group=later)
    assert all(torch.equal(one, flat) for one in found)
    for one in model, with_graph:
        assert training.difference(one.module, 9) <= 1e-6
    dist.destroy_process_group()
    print("trained")
    """
    status, out, err = run(tmp_path, code, "-n", "3", "--max-restarts", "1")
    assert status == 0, err
    assert out.count("trained") == 3
    for step, victim in (1, 1), (5, 0):
        assert_told(out, step, victim, 3)
    assert err.count("killed by SIGKILL after") == 2
    refused = (
        "[rank 2] refused: all_reduce in group 'late' on rank 2: ranks 0–1 were "
        "started again, and have not made this group of ranks 0–2"
    )
    assert refused in out, out


def test_a_death_in_the_constructor_of_ddp_costs_the_others_no_restart(
    tmp_path: Path,
) -> None:
    """They make the model again, by no op: the fresh rank's first one is `rejoin`."""
    code = """
    model, other, step, joined = None, None, 0, False
    while step < 4:
        try:
            if model is None:
                if rank == 1 and not fresh:
                    os.kill(os.getpid(), 9)
                model = training.DistributedDataParallel(training.Net())
                other = training.DistributedDataParallel(training.Net())
                optimizer = training.adam(model)
            if not joined:
                step, joined = rankscope.torch.rejoin(model, optimizer), True
            training.do_step(model, optimizer, training.own(step))
            step += 1
        except rankscope.DistAbortedError as error:
            print(f"step {step}: {error.reason}", error.culprits)
            rankscope.torch.rebuild(120)
            joined = False
    assert training.difference(model.module, 4) <= 1e-6
    # It has not got the values of rank 0.
    try:
        other(torch.ones(1, 16))
    except rankscope.DistBackendError as error:
        print(f"refused: {error}")
    rankscope.torch.rejoin(other)
    other(torch.ones(1, 16))
    dist.destroy_process_group()
    print("trained")
    """
    status, out, err = run(tmp_path, code, "-n", "3", "--max-restarts", "1")
    assert status == 0, err
    assert_told(out, 0, 1, 3)
    assert err.count("it is started again") == 1
    assert out.count("refused: forward in group 'default' on rank") == 3, out
    assert out.count("trained") == 3


def test_replicas_of_shards_give_fresh_ranks_theirs(tmp_path: Path) -> None:
    """HSDP, and tensor parallelism in DDP: bit by bit the training without a death."""
    code = """
    from torch.nn.functional import dropout
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    def make():
        hybrid = training.Net()
        for one in hybrid.first, hybrid.second, hybrid:
            training.fully_shard(one, mesh=mesh)
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        split = parallelize_module(
            training.Net(), mesh["shards"], plan, src_data_rank=None)
        split = training.DistributedDataParallel(split, device_mesh=mesh["replicas"])
        both = torch.nn.ModuleList([hybrid, split])
        return both, training.adam(both)
    def do_step(model, optimizer, step):
        optimizer.zero_grad()
        torch.manual_seed(step)
        x = dropout(training.batch(step))
        model[0](x[rank::4]).pow(2).mean().backward()
        model[1](x[mesh.get_local_rank("replicas")::2]).pow(2).mean().backward()
        optimizer.step()
    def values(optimizer):
        (group,) = optimizer.param_groups
        return [training.full(one.detach()) for one in group["params"]]
    both, optimizer = make()
    train(both, optimizer, lambda step: do_step(both, optimizer, step), 8, {1: 3, 5: 0})
    unbroken, its_optimizer = make()
    for step in range(8):
        do_step(unbroken, its_optimizer, step)
    for one, other in zip(values(optimizer), values(its_optimizer), strict=True):
        assert torch.equal(one, other)
    dist.destroy_process_group()
    print("trained")
    """
    status, out, err = run(tmp_path, code, "-n", "4", "--max-restarts", "1")
    assert status == 0, err
    assert out.count("trained") == 4
    # The cause is the dead rank, also where a rank waits for another one alone.
    for step, victim in (1, 3), (5, 0):
        assert_told(out, step, victim, 4)


def test_a_checkpoint_is_loaded_where_a_shard_is_lost(tmp_path: Path) -> None:
    """FSDP2: an abort comes amid the load, and one later, after which none is lost."""
    code = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    def state(step):
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "step": step}
    def load():
        loads.append(dist.get_world_size())
        found = state(0)
        dcp.load(found, checkpoint_id=sys.argv[0] + ".saved")
        if fresh and len(loads) == 1:
            rankscope.torch.abort(reason="amid the load")
        set_state_dict(model, optimizer, model_state_dict=found["model"],
                       optim_state_dict=found["optimizer"])
        return found["step"]
    model = training.Net()
    for one in model.first, model.second, model:
        training.fully_shard(one)
    optimizer = training.adam(model)
    step, joined, loads, found = 0, False, [], []
    while step < 8:
        try:
            if not joined:
                step, joined = rankscope.torch.rejoin(model, optimizer, load=load), True
                found.append(step)
            if step == 4 and rank == 0 and not fresh:
                os.kill(os.getpid(), 9)
            if step == 6 and fresh and len(found) == 1:
                rankscope.torch.abort(reason="nothing is lost")
            training.do_step(model, optimizer, training.own(step))
            step += 1
            if step == 3:
                dcp.save(state(step), checkpoint_id=sys.argv[0] + ".saved")
        except rankscope.DistAbortedError as error:
            rankscope.torch.rebuild(120)
            joined = False
    assert training.difference(model, 8) <= 1e-6
    print("trained, from", *found, "loads", len(loads))
    dist.destroy_process_group()
    """
    status, out, err = run(tmp_path, code, "-n", "2", "--max-restarts", "1")
    assert status == 0, err
    assert "[rank 0] trained, from 3 6 loads 2" in out
    assert "[rank 1] trained, from 0 3 6 loads 2" in out


def test_ranks_that_make_their_groups_anew_meet_the_fresh_one(tmp_path: Path) -> None:
    """As under torchrun: all load a checkpoint, and DDP's constructor has its ops."""
    code = """
    saved = sys.argv[0] + ".saved"
    step = 0
    while step < 4:
        model = training.DistributedDataParallel(training.Net(), bucket_cap_mb=0.01)
        optimizer = training.adam(model)
        try:
            if step or fresh:
                model.module.load_state_dict(torch.load(saved))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                step = 2
            while step < 4:
                if step == 2 and rank == 0 and not fresh:
                    torch.save(model.module.state_dict(), saved)
                    os.kill(os.getpid(), 9)
                training.do_step(model, optimizer, training.own(step))
                step += 1
        except rankscope.DistAbortedError as error:
            print(error.reason)
            dist.destroy_process_group()
            dist.init_process_group("rankscope")
    found = [torch.empty(1) for _ in range(2)]
    total = sum(one.detach().sum() for one in model.parameters()).reshape(1)
    dist.all_gather(found, total)
    assert torch.equal(*found)
    dist.destroy_process_group()
    print("trained")
    """
    status, out, err = run(tmp_path, code, "-n", "2", "--max-restarts", "1")
    assert status == 0, err
    assert out.count("trained") == 2
    assert re.search(r"\[rank 1\] rank 0 \(process \d+ on .*\) is gone", out), out


def test_the_others_go_on_without_a_rank_that_is_not_started_again(
    tmp_path: Path,
) -> None:
    """First a rank is replaced, then it is lost, and then another one, the first."""
    code = """
    model = training.DistributedDataParallel(training.Net(), bucket_cap_mb=0.01)
    optimizer = training.adam(model)
    number = int(os.environ["RANK"])
    step, joined = 0, False
    while step < 8:
        try:
            if not joined:
                step, joined = rankscope.torch.rejoin(model, optimizer), True
            if (step, number) in {(3, 1), (5, 0)} or (step, number, fresh) == (1, 1, 0):
                os.kill(os.getpid(), 9)
            training.do_step(model, optimizer, training.own(step))
            step += 1
        except rankscope.DistAbortedError as error:
            if number == 2 and step == 3:
                try:
                    rankscope.torch.rebuild(60)
                except rankscope.DistBackendError as refused:
                    print(f"refused: {refused}", refused.culprits)
            lost = rankscope.torch.shrink(timeout=60)
            print("lost", lost, dist.get_rank(), dist.get_world_size())
            joined = False
    assert training.difference(model.module, 8) <= 1e-6
    dist.destroy_process_group()
    print("trained")
    """
    options = "-n", "3", "--max-restarts", "1", "--min-ranks", "1"
    status, out, err = run(tmp_path, code, *options)
    assert status == 0, err
    assert [one for one in out.splitlines() if one.startswith("[rank 2]")] == [
        "[rank 2] lost [] 2 3",
        "[rank 2] refused: rank 2 waits for all ranks to go on together, and rank 1 "
        "failed and will not be started again: the ranks that live call "
        "rankscope.torch.shrink() in the place of rebuild(); a rank that was started "
        "again cannot join them (1,)",
        "[rank 2] lost [1] 1 2",
        "[rank 2] lost [0] 0 1",
        "[rank 2] trained",
    ]
    assert "[rank 0] lost [1] 0 2" in out
    assert (
        "it is not started again, as --max-restarts is 1: ranks 0, 2 may go on" in err
    )
    assert "it is not started again, as rank 1 is lost: rank 2 may go on" in err


#: The end of a script whose model `rejoin` is to refuse.
REFUSED = """
    try:
        rankscope.torch.rejoin(model, optimizer)
    except ValueError as error:
        print(f"refused: {error}")
    dist.destroy_process_group()
    """


def test_tensor_parallelism_in_ddp_is_refused_after_a_shrink(tmp_path: Path) -> None:
    """On the ranks whose own mesh is whole, too; it trained on with wrong values."""
    code = """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(
        training.Net(), mesh["shards"], plan, src_data_rank=None)
    model = training.DistributedDataParallel(model, device_mesh=mesh["replicas"])
    optimizer = training.adam(model)
    try:
        if rank == 0:
            os.kill(os.getpid(), 9)
        training.do_step(model, optimizer, training.batch(0))
        dist.barrier()
    except rankscope.DistAbortedError:
        assert rankscope.torch.shrink(timeout=60) == [0]
    """
    options = "-n", "4", "--min-ranks", "3"
    status, out, err = run(tmp_path, code + REFUSED, *options)
    assert status == 0, err
    assert len(re.findall(r"refused: .*, which has lost ranks: no such", out)) == 3, out


def test_a_pipeline_is_refused_after_a_shrink_that_took_a_stage(tmp_path: Path) -> None:
    """On the ranks whose own pipeline is whole, too; one of them went on alone."""
    code = """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    index = mesh.get_local_rank("stages")
    model = training.DistributedDataParallel(
        torch.nn.Linear(4, 4), process_group=mesh.get_group("replicas"))
    stage = training.PipelineStage(
        model, index, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda x, _: x.pow(2).mean())
    optimizer, x = training.adam(model), torch.ones(4, 4)
    try:
        if rank == 0:
            os.kill(os.getpid(), 9)
        schedule.step(*([x] if index == 0 else []), target=x)
        dist.barrier()
    except RuntimeError:
        assert rankscope.torch.shrink(timeout=60) == [0]
    """
    imports = "from torch.distributed.pipelining import Schedule1F1B\n"
    options = "-n", "4", "--min-ranks", "3"
    status, out, err = run(tmp_path, imports + dedent(code + REFUSED), *options)
    assert status == 0, err
    refused = "refused: rejoin: stage 1 of a pipeline has a group that has lost ranks "
    assert out.count(refused + "(1 of 2 are left)") == 3, out


def test_a_fresh_rank_that_does_not_rejoin_is_named(tmp_path: Path) -> None:
    code = """
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), 9)
    try:
        dist.all_reduce(x)
    except rankscope.DistAbortedError:
        rankscope.torch.rebuild(120)
        rankscope.torch.rejoin(torch.nn.Linear(2, 2))
    """
    status, _, err = run(tmp_path, code, "-n", "2", "--max-restarts", "1")
    assert status == 1
    assert (
        "all_reduce: rank 1 was started again, and the others wait for it in "
        "rankscope.torch.rejoin(model, optimizer)" in err
    )
    assert "failed: rank 1 (pid " in err.splitlines()[-1]


@pytest.mark.soak
def test_many_aborts_and_deaths_leave_the_ranks_equal_and_nothing_behind(
    tmp_path: Path,
) -> None:
    """Some in the first two steps, before DDP has its final buckets."""
    options = "-n", "3", "--max-restarts", "10", "-m"
    module = "tests.with_torch.survive_faults"
    status, out, err = run_script(module, str(tmp_path), options=options, timeout=400)
    assert status == 0, err
    names = [one.name.partition("-")[0] for one in tmp_path.iterdir()]
    assert (names.count("abort"), names.count("death")) == (50, 10)
    assert err.count("it is started again") == 10
    (difference,) = re.findall(r"\[rank 2\] difference (\S+)", out)
    assert float(difference) <= 1e-6
    (held,) = re.findall(r"\[rank 2\] errors \d+ held ([\d ]+)", out)
    numbers = [int(one) for one in held.split()]
    first, last = numbers[:4], numbers[4:]
    # Descriptors and KiB of rank 2, and of the launcher, from step 100 on: it has the
    # 11 descriptors by which notebooks see it, or waits for those of a fresh rank 0.
    limits = [16, 24 << 10, 4, 8 << 10]
    assert all(b - a <= limit for a, b, limit in zip(first, last, limits, strict=True))
