"""PyTorch's own DistributedTest over the backend ``rankscope``, in gloo's place."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
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


class Ranks:
    """The process that forks the ranks of each run: its import takes seconds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**os.environ, "WORLD_SIZE": str(size)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ranks that hang end with it.
            start_new_session=True,
        )

    def run(self, backend: str, folder: Path, names: Iterable[str]) -> dict[str, str]:
        """Return how the tests ended over `backend`: the worst end on all ranks."""
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "MEETING_PORT": str(free_port()),
        }
        if backend.endswith("ucx"):
            env[library.VARIABLE] = ucx_folder()
        request = json.dumps([backend, str(folder), env, [*names]])
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(request, file=self.process.stdin, flush=True)
        assert select.select([self.process.stdout], [], [], 400)[0]
        assert self.process.stdout.readline() == "over\n"
        files = [folder / f"outcomes-{rank}" for rank in range(self.size)]
        outcomes = [json.loads(file.read_text()) for file in files]
        assert {len(one) for one in outcomes} == {len(outcomes[0])}
        # "failed" < "passed" < "skipped"
        return {name: min(one[name][0] for one in outcomes) for name in outcomes[0]}

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def ranks(
    _module_leaves_nothing: None, request: pytest.FixtureRequest
) -> Iterator[Ranks]:
    """As many ranks as the parameter says."""
    with contextlib.closing(Ranks(request.param)) as made:
        yield made


@pytest.mark.parametrize(
    ("transport", "ranks", "names"),
    [("tcp", 2, SELECTION), ("ucx", 4, SELECTION[::4])],
    indirect=["ranks"],
)
def test_a_selection_passes(
    tmp_path: Path, transport: str, ranks: Ranks, names: list[str]
) -> None:
    outcomes = ranks.run(f"rankscope:{transport}", tmp_path, names)
    assert outcomes == dict.fromkeys(names, "passed")


@pytest.fixture(scope="module")
def passing(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tests that pass over torch's gloo with that number of ranks."""
    ends = ranks.run("gloo", tmp_path_factory.mktemp("gloo"), ())
    found = [name for name, end in ends.items() if end == "passed"]
    assert len(found) >= 90
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_all_pass_that_pass_over_gloo(
    ranks: Ranks, passing: list[str], tmp_path: Path, transport: str
) -> None:
    # Those of EXCEPTIONS keep the other ranks, too.
    names = [name for name in passing if name not in EXCEPTIONS]
    outcomes = ranks.run(f"rankscope:{transport}", tmp_path, names)
    assert outcomes == dict.fromkeys(names, "passed")
