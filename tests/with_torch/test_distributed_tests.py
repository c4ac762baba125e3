"""PyTorch's own DistributedTest over the backend ``rankscope``, in gloo's place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def run(backend: str, folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """Return how the tests ended over `backend` with two ranks: the worse end."""
    folder = folder / backend
    folder.mkdir()
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MEETING_PORT": str(free_port()),
    }
    command = [sys.executable, str(SCRIPT), backend]
    files = [folder / f"outcomes-{rank}" for rank in range(2)]
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
                process.wait(timeout=180)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    first, second = (json.loads(file.read_text()) for file in files)
    assert list(first) == list(second)
    # "failed" < "passed" < "skipped"
    return {name: min(first[name][0], second[name][0]) for name in first}


def test_a_selection_passes(tmp_path: Path) -> None:
    outcomes = run("rankscope", tmp_path, SELECTION)
    assert outcomes == dict.fromkeys(SELECTION, "passed")


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_all_pass_that_pass_over_gloo(tmp_path: Path) -> None:
    theirs, ours = run("gloo", tmp_path), run("rankscope", tmp_path)
    passed = {name for name, end in theirs.items() if end == "passed"}
    assert len(passed) >= 90
    assert passed - set(EXCEPTIONS) <= {
        name for name, end in ours.items() if end == "passed"
    }
