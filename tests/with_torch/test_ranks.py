"""Ranks of ``torch.distributed`` on a real cluster: variables, environment, groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.engines import Cluster, ClusterStartError
from tests.with_torch.cells import run, values


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Two ranks of torch, shared by the tests of this module."""
    with Cluster.start(2, torch=True, timeout=77) as started:
        yield started


def test_the_variables_of_a_cell(cluster: Cluster) -> None:
    found = values(
        cluster,
        "import numpy, torch.distributed",
        "torch.__name__",
        "dist is torch.distributed",
        "rankscope.__name__",
        "str(device)",
        "(rank, world_size)",
        "np is numpy",
        "(dist.get_rank(), dist.get_world_size(), dist.get_backend())",
        "rankscope.is_initialized()",
    )
    for rank in (0, 1):
        assert found[rank] == [
            "torch",
            True,
            "rankscope",
            "cpu",
            (rank, 2),
            True,
            (rank, 2, "gloo"),
            False,
        ]


def test_torch_was_imported_once_for_all_ranks(cluster: Cluster) -> None:
    parents = values(
        cluster,
        "import os, pathlib",
        "os.getppid()",
        "'libtorch' in pathlib.Path(f'/proc/{os.getppid()}/maps').read_text()",
    )
    assert parents[0] == parents[1]
    assert parents[0][1]


def test_the_environment_is_that_of_torchrun(cluster: Cluster) -> None:
    found = values(
        cluster,
        "import os",
        "dict(os.environ)",
        "dist.is_torchelastic_launched()",
        "dist.get_node_local_rank()",
        "torch.get_num_threads()",
    )
    for rank in (0, 1):
        env, launched, local, threads = found[rank]
        assert (launched, local, threads) == (True, rank, 1)
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": cluster.cluster_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": "256",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        }
        assert {name: env[name] for name in expected} == expected
        assert int(env["MASTER_PORT"]) > 0
        assert int(env["TORCHELASTIC_MAX_RESTARTS"]) > 0


def test_the_timeout_is_that_of_the_default_group(cluster: Cluster) -> None:
    code = "dist.distributed_c10d._get_default_group()._get_backend(device).options"
    assert values(cluster, f"{code}._timeout.total_seconds()") == {0: [77], 1: [77]}


def test_all_reduce(cluster: Cluster) -> None:
    code = "x = torch.full((3,), float(rank + 1))\ndist.all_reduce(x)"
    assert values(cluster, code, "x.tolist()") == {0: [[3.0] * 3], 1: [[3.0] * 3]}


def test_a_step_of_ddp(cluster: Cluster) -> None:
    code = """
        torch.manual_seed(rank)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    """
    found = values(cluster, code, "[p.tolist() for p in model.parameters()]")
    assert found[0] == found[1]


def test_accelerate_finds_its_ranks(cluster: Cluster) -> None:
    code = """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        kind = accelerator.distributed_type.value
        prepared = accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.backward(prepared(torch.ones(1, 2)).sum())
        total = accelerator.reduce(torch.tensor([float(rank + 1)]))
    """
    found = values(
        cluster,
        code,
        "(accelerator.process_index, accelerator.num_processes)",
        "type(prepared).__name__",
        "kind",
        "total.item()",
    )
    for rank in (0, 1):
        place, model, kind, total = found[rank]
        assert place == (rank, 2)
        assert model == "DistributedDataParallel"
        assert kind == "MULTI_CPU"
        assert total == 3.0


def test_a_group_of_rankscope_is_there_once_a_cell_asks_for_it(
    cluster: Cluster,
) -> None:
    code = """
        for _ in range(2):
            rankscope.init_process_group()
            y = np.full(2, rank + 1.0)
            rankscope.all_reduce(y)
            rankscope.destroy_process_group()
    """
    assert values(cluster, code, "y.tolist()") == {0: [[3.0, 3.0]], 1: [[3.0, 3.0]]}
    assert "default" not in cluster.status(fresh=True).groups


def test_a_program_makes_the_default_group_itself(cluster: Cluster) -> None:
    """By env://, as a script under torchrun does."""
    code = """
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo")
        z = torch.ones(1)
        dist.all_reduce(z)
    """
    assert values(cluster, code, "z.item()") == {0: [2.0], 1: [2.0]}


def test_variables_travel(cluster: Cluster) -> None:
    run(cluster, "t = rank * 10")
    assert cluster.pull("t") == {0: 0, 1: 10}


@pytest.mark.parametrize("torch", ["GLOO", "cpu:gloo,cuda", "cpu:gloo,cpu:nccl", ""])
def test_no_backends_of_torch(torch: str) -> None:
    with pytest.raises(ValueError, match="expected a backend of torch"):
        Cluster.start(2, torch=torch)


def test_an_error_of_torch_ends_the_start() -> None:
    with pytest.raises(ClusterStartError) as caught:
        Cluster.start(2, torch="nccl")
    message = str(caught.value)
    assert "making torch's default group (nccl): rank" in message
    assert "GPUs" in message or "NCCL" in message


def test_the_magics(ipython: InteractiveShell) -> None:
    with capture_output() as said:
        ipython.run_line_magic("dist_init", "-n 2 --torch gloo --timeout 60")
    try:
        assert "2 ranks ready" in said.stdout
        with capture_output() as said:
            ipython.run_cell_magic("distributed", "", "dist.get_backend()")
        assert "'gloo'" in said.stdout
        with capture_output() as said:
            ipython.run_line_magic("dist_init", "-n 2 --torch gloo --timeout 60")
        assert "already running" in said.stdout
    finally:
        ipython.run_line_magic("dist_shutdown", "")


def test_a_fresh_rank_has_torch() -> None:
    with Cluster.start(2, torch="gloo") as cluster:
        run(cluster, "kept = rank")
        cluster.restart([1])
        code = "import os\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']"
        found = values(cluster, code, "count", "torch.__name__", "device.type", "rank")
        assert found == {0: ["1", "torch", "cpu", 0], 1: ["1", "torch", "cpu", 1]}
        assert values(cluster, "globals().get('kept')") == {0: [0], 1: [None]}
        assert values(cluster, "dist.is_initialized()")[1] == [False]
        # With no rank left that has a group, the default group is made anew.
        cluster.restart()
        code = "x = torch.ones(1)\ndist.all_reduce(x)"
        count = "int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
        found = values(cluster, f"import os\n{code}", "x.item()", count)
        assert found == {0: [2.0, 2], 1: [2.0, 2]}


def test_attaching_finds_the_ranks_of_torch() -> None:
    started = Cluster.start(2, torch=True, keep=True)
    started.close()
    attached = Cluster.attach(cluster_id=started.cluster_id)
    try:
        assert values(attached, "dist.get_backend()") == {0: ["gloo"], 1: ["gloo"]}
        attached.restart()
        assert values(attached, "dist.get_backend()") == {0: ["gloo"], 1: ["gloo"]}
    finally:
        attached.shutdown()
