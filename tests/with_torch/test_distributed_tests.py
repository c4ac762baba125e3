"""PyTorch's own DistributedTest over the backend ``rankscope``, in gloo's place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from rankscope.backends.ucx import library

SCRIPT = Path(__file__).with_name("distributed_tests.py")

#: Tests of many ops and of DDP that take little time.
SELECTION = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split_complex",
    "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_gather_object",
    "test_get_future",
    "test_get_rank_size_group",
    "test_grads_same_across_ranks_with_no_sync",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]

#: What passes over gloo and not over the backend, and why.
EXCEPTIONS = {
    "test_get_backend": "compares the name of the backend",
    "test_monitored_barrier_gloo": "torch refuses it by the name of the backend",
    "test_monitored_barrier_gloo_rank_0_timeout": "gives a timeout of 0 s",
    "test_monitored_barrier_gloo_subgroup": "torch refuses it by the name",
    "test_barrier_timeout_full_group": "looks for gloo's words",
    "test_barrier_timeout_global": "looks for gloo's words",
}


#: Where `make environment` installs UCX; torch's environment has none.
INSTALLED = ".venv/lib/python*/site-packages/libucx/lib"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def ucx_folder() -> str:
    """Return where UCX's libraries are; skip the test where they are nowhere."""
    root = Path(__file__).parents[2]
    found = library.folder() or next(root.glob(INSTALLED), None)
    if found is None:
        pytest.skip("UCX is installed nowhere: make environment")
    return str(found)


def run(backend: str, size: int, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return how the tests ended over `backend` with `size` ranks: the worst end."""
    env = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MEETING_PORT": str(free_port()),
    }
    if backend.endswith("ucx"):
        env[library.VARIABLE] = ucx_folder()
    command = [sys.executable, str(SCRIPT), backend]
    files = [folder / f"outcomes-{rank}" for rank in range(size)]
    with (folder / "log").open("w") as log:
        processes = [
            subprocess.Popen(
                [*command, str(file), *names],
                env={**env, "RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank, file in enumerate(files)
        ]
        try:
            for process in processes:
                process.wait(timeout=400)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    outcomes = [json.loads(file.read_text()) for file in files]
    assert {len(one) for one in outcomes} == {len(outcomes[0])}
    # "failed" < "passed" < "skipped"
    return {name: min(one[name][0] for one in outcomes) for name in outcomes[0]}


@pytest.mark.parametrize(
    ("transport", "size", "names"),
    [("tcp", 2, SELECTION), ("ucx", 4, SELECTION[::4])],
)
def test_a_selection_passes(
    tmp_path: Path, transport: str, size: int, names: list[str]
) -> None:
    outcomes = run(f"rankscope:{transport}", size, tmp_path, names)
    assert outcomes == dict.fromkeys(names, "passed")


@pytest.fixture(scope="module", params=[2, 4])
def passing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[str]]:
    """A number of ranks, and the tests that pass over torch's gloo with it."""
    ends = run("gloo", request.param, tmp_path_factory.mktemp("gloo"), ())
    found = [name for name, end in ends.items() if end == "passed"]
    assert len(found) >= 90
    return request.param, found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_all_pass_that_pass_over_gloo(
    passing: tuple[int, list[str]], tmp_path: Path, transport: str
) -> None:
    size, found = passing
    # Those of EXCEPTIONS keep the other ranks, too.
    names = [name for name in found if name not in EXCEPTIONS]
    outcomes = run(f"rankscope:{transport}", size, tmp_path, names)
    assert outcomes == dict.fromkeys(names, "passed")
