"""``rankscope diagnose --pid`` and ``--jobs`` of jobs that load no Rankscope."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankscope.__main__ import main
from rankscope.backends.attach.process_table import read_table
from tests.running_jobs import (
    Program,
    block_of,
    line_of,
    may_read,
    refused,
)
from tests.with_torch.scripts import Torchrun, until

#: Rank 1 computes while the others wait for it; each has workers of a data loader.
HANG = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, item):
        return item

x = torch.ones(4)
batches = iter(torch.utils.data.DataLoader(Data(), num_workers=1))
next(batches)
note(f"rank {rank}")
if rank == 1:
    wait("go")
dist.all_reduce(x)  # all
dist.destroy_process_group()
note(f"sum {rank}", str(x[0].item()))
"""

#: The same without workers, and with torch's debug server.
SERVED = """
import socket
from torch.distributed.debug import start_debug_server, stop_debug_server
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
start_debug_server(port)
x = torch.ones(4)
dist.all_reduce(x)
note(f"rank {rank}")
if rank == 1:
    wait("go")
dist.all_reduce(x)
if rank == 0:
    stop_debug_server()
dist.destroy_process_group()
note(f"sum {rank}", str(x[0].item()))
"""

#: Two ranks of which nothing but their stacks tells the rank.
SPAWN = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
def train(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x = torch.ones(1)
    note(f"rank {rank}")
    if rank == 1:
        wait("go")
    dist.all_reduce(x)  # all
    dist.destroy_process_group()
    print(f"sum {x.item()}")
if __name__ == "__main__":
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    START
"""

STARTS = {
    "spawn": "mp.spawn(train, (port,), nprocs=2)",
    "fork": 'mp.start_processes(train, (port,), nprocs=2, start_method="fork")',
}


def test_the_ranks_of_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    with Torchrun(3, HANG, tmp_path, begin="") as script:
        for rank in range(3):
            script.read(f"rank {rank}")
        lines = script.script.read_text().splitlines()
        line = 1 + next(i for i, one in enumerate(lines) if one.endswith("# all"))
        readable = may_read(os.getpid())
        launcher = str(script.process.pid)

        def they_wait() -> bool:
            command = ["diagnose", "--pid", launcher, "--html", str(page)]
            # Stacks alone blame nobody.
            assert main(command) == 2
            wanted = f"ranks 0, 2 are at train.py:{line} in all_reduce of torch."
            out = capsys.readouterr().out
            assert readable or refused(out)
            return not readable or wanted in out

        until(they_wait, script)
        # The status depends on the jobs of others, too.
        assert main(["diagnose", "--jobs"]) in (1, 2)
        title, *told = block_of(capsys.readouterr().out, script.process.pid)
        # The workers of the data loaders have the ranks in their environment, too.
        assert title.startswith(f"torchrun {launcher} (")
        assert "ranks 0–2 of 3 (pid" in title
        if readable:
            assert told[0].startswith("  rank 1 is at train.py:")
            assert "train.py" in page.read_text()
        # The job goes on, and its results are right.
        script.let("go")
        assert script.finish() == 0, script.output
        assert {script.read(f"sum {rank}") for rank in range(3)} == {"3.0"}


def test_the_debug_server_gives_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("jinja2", "requests", "tabulate"):
        pytest.importorskip(package, reason="torch's debug server needs it")
    with Torchrun(2, SERVED, tmp_path, begin="") as script:
        for rank in range(2):
            script.read(f"rank {rank}")
        if not may_read(os.getpid()):
            pytest.skip("processes may not be read here: no port is known to be its")
        launcher = str(script.process.pid)

        def is_told() -> bool:
            # Rank 0 may not have come to its op yet.
            status = main(["diagnose", "--pid", launcher])
            out = capsys.readouterr().out
            if status != 1:
                return False
            told = "rank 1 has not entered all_reduce #2: it is at train.py:7"
            assert told in out
            # Between two naps it is in no call.
            return f"{told} in" in out

        until(is_told, script)
        script.let("go")
        assert script.finish() == 0, script.output
        assert {script.read(f"sum {rank}") for rank in range(2)} == {"4.0"}


@pytest.mark.parametrize("start", STARTS)
def test_the_ranks_of_torch_multiprocessing(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = SPAWN.replace("START", STARTS[start])
    with Program(tmp_path, code) as program:
        program.wait_for("rank 0", "rank 1")
        if not may_read(program.process.pid):
            pytest.skip("processes may not be read here: their ranks are not known")

        def waiting() -> bool:
            main(["diagnose", "--json", "--pid", str(program.process.pid)])
            (job,) = json.loads(capsys.readouterr().out)["jobs"]
            assert job["launcher"] == "torch.multiprocessing"
            assert job["command"][-1] == str(program.script)
            lines = {one["rank"]: one["line"] for one in job["processes"]}
            assert set(lines) == {0, 1}
            return lines[0] == line_of(program, "# all") != lines[1]

        until(waiting)
        assert program.finish("go").count("sum 2.0") == 2


def test_the_children_of_others_are_no_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
    import multiprocessing
    def work():
        note("there")
        wait("go")
    if __name__ == "__main__":
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
    """
    with Program(tmp_path, code) as program:
        program.wait_for("there")
        assert program.process.pid in read_table()
        main(["diagnose", "--jobs"])
        printed = capsys.readouterr()
        assert f" {program.process.pid}" not in printed.out + printed.err
        program.finish("go")
