"""The ranks of PyTorch's own DistributedTest, in runs that lines of stdin ask for.

Each line is a run in JSON: the backend, the folder for the outcomes of each rank, the
environment, the names of tests. Without a name, all run of
``torch.testing._internal.distributed.distributed_test``, one after the other in one
process for each rank. The ranks are forked from this process: the import of that module
takes longer than many a run. With ``rankscope:TRANSPORT`` as backend its groups stand
in the place of gloo's, as the tests ask for gloo by name.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

#: The module reads it, too, when it is imported.
SIZE = int(os.environ["WORLD_SIZE"])
#: Seconds that an op of a test may take: one that fails on a rank keeps the other.
TIMEOUT = 6.0


def main() -> None:
    # A package that torch's tests import, and of which these use no more.
    sys.modules["expecttest"] = package = types.ModuleType("expecttest")
    vars(package)["TestCase"] = unittest.TestCase
    os.environ["BACKEND"] = "gloo"
    os.environ["RANKSCOPE_REPORT"] = "0"
    importlib.import_module("torch.testing._internal.distributed.distributed_test")
    for line in sys.stdin:
        for pid in [fork(rank, *json.loads(line)) for rank in range(SIZE)]:
            os.waitpid(pid, 0)
        print("over", flush=True)


def fork(
    rank: int, backend: str, folder: str, environment: dict[str, str], names: list[str]
) -> int:
    """Return the pid of a rank, whose output goes to the folder's log."""
    if pid := os.fork():
        return pid
    try:
        log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment, RANK=str(rank), TEMP_DIR=folder)
        be_rank(rank, backend, Path(folder), names)
    except BaseException:  # noqa: BLE001 - no rank goes on with the lines of stdin
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def be_rank(rank: int, backend: str, folder: Path, names: list[str]) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    results = folder / f"outcomes-{rank}"
    for name in "barrier", "test_dir":
        (folder / name).mkdir(exist_ok=True)
    meeting = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MEETING_PORT"]),
        SIZE,
        is_master=rank == 0,
        timeout=timedelta(seconds=120),
    )
    name, _, transport = backend.partition(":")
    if name == "rankscope":
        put_in_place_of_gloo(transport)
    barriers = iter(range(10**9))

    def meet(*args: Any, seconds: float = 2 * TIMEOUT, **kwargs: Any) -> None:
        """Wait for the other ranks, without a group."""
        key = f"barrier/{next(barriers)}"
        meeting.add(key, 1)
        deadline = time.monotonic() + seconds
        while meeting.add(key, 0) < SIZE:
            if time.monotonic() > deadline:
                raise TimeoutError("the other rank is not in the same test any more")
            time.sleep(0.001)

    distributed_test.Barrier.sync = meet

    bases = (
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    )
    tests = type("Tests", bases, {})

    outcomes = {}
    every = unittest.TestLoader().getTestCaseNames(tests)
    for number, name in enumerate(names or every):
        # Another rank may still wait in a test that has failed here.
        meet(seconds=10 * TIMEOUT)
        began = time.monotonic()
        try:
            outcome = run(tests, rank, name, folder / f"init-{number}")
        except unittest.SkipTest as reason:
            outcome = f"skipped: {reason}"
        except SystemExit as code:
            outcome = f"skipped: {code}"
        except BaseException:  # noqa: BLE001 - the next test follows
            outcome = f"failed: {traceback.format_exc()}"
        outcomes[name] = outcome, time.monotonic() - began
        # A failed test leaves its groups, and the ranks differ in the numbers of
        # their barriers.
        barriers = iter(range((number + 1) * 10**6, 10**9))
        if dist.is_initialized():
            dist.destroy_process_group()
        # By which torch names groups; a group that could not be made counts.
        dist.distributed_c10d._world.group_count = 0
        results.write_text(json.dumps(outcomes))


def run(tests: Any, rank: int, name: str, file: Path) -> str:
    import torch
    import torch.distributed as dist

    test = tests(name)
    test.rank, test.file_name = rank, str(file)
    method = getattr(test, name)
    # Decided before there is a group: a skipped test takes no time.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        world_size=SIZE,
        rank=rank,
        timeout=timedelta(seconds=TIMEOUT),
    )
    # The next line may leave the group, which the other rank has yet to connect to.
    test._barrier()
    torch.manual_seed(1234)
    method = getattr(method, "__wrapped__", method)
    method() if hasattr(method, "__self__") else method(test)
    test._barrier()
    dist.destroy_process_group()
    return "passed"


def put_in_place_of_gloo(transport: str) -> None:
    """Have torch make groups of rankscope where gloo is asked for."""
    from torch.distributed import distributed_c10d

    import rankscope.torch

    options = rankscope.torch.Options(transport=transport)
    original = distributed_c10d._new_process_group_helper

    def make(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **more: Any):
        if str(backend) != "gloo":
            return original(size, rank, ranks, backend, *args, **more)
        ours = distributed_c10d.Backend("rankscope")
        more["backend_options"] = options
        return original(size, rank, ranks, ours, *args, **more)

    distributed_c10d._new_process_group_helper = make


if __name__ == "__main__":
    main()
