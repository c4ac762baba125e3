"""Ranks that mpiexec starts: one MPI job, which no single rank can leave and join."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.backends.conformance.mpi_ranks import is_open_mpi, mpiexec
from rankscope.backends.conformance.waiting import until
from rankscope.backends.stores.process_end import process_start_time
from rankscope.engines import Cluster, ClusterError
from rankscope.engines.launch.files import session_folder
from tests.engines.launch.test_fork_launcher import STARTS

WAIT = 60

pytestmark = [
    pytest.mark.processes,
    pytest.mark.mpi,
    pytest.mark.skipif(
        mpiexec() is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpiexec and mpi4py",
    ),
]

CHECK = """
from mpi4py import MPI
assert MPI.COMM_WORLD.Get_rank() == rank
assert MPI.COMM_WORLD.Get_size() == world_size
x = np.full(10, rank + 1.0)
dist.all_reduce(x)
assert (x == sum(range(1, world_size + 1))).all()
"""

SUM = """
x = np.full(10, 2.0)
dist.all_reduce(x, group={})
assert (x == 4).all()
"""


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    with Cluster.start(3, engines="mpi", backend="cpu:mpi") as started:
        folder = session_folder(started.cluster_id)
        assert folder.exists() == is_open_mpi()
        yield started
    assert not folder.exists()


def test_ranks_are_those_of_the_mpi_job(cluster: Cluster) -> None:
    cluster.execute(CHECK).result(WAIT)


def test_an_interrupt_reaches_the_ranks(cluster: Cluster) -> None:
    cell = cluster.execute("import threading\nthreading.Event().wait()", cell=3)
    until(lambda: [one.cell for one in cluster.status().ranks] == [3, 3, 3], WAIT)
    assert cluster.interrupt() == [0, 1, 2]
    assert cell.wait(WAIT)
    assert {one.ename for one in cell.errors.values()} == {"KeyboardInterrupt"}


def test_a_killed_rank_and_a_fresh_job(cluster: Cluster) -> None:
    code = "import threading\nif rank == 1: threading.Event().wait()\n" + CHECK
    cell = cluster.execute(code, cell=4)
    until(lambda: cluster.status().ranks[0].groups[0].in_flight, WAIT)
    os.kill(cluster.pids[1], signal.SIGKILL)
    assert cell.wait(WAIT)
    assert cell.errors[1].ename == "EngineDied"
    if is_open_mpi():
        assert "rank 1" in cell.errors[0].evalue
        message = r"%dist_restart all .* ranks 0, 2 can go on in a group of their own"
        advice = r"Start all ranks .*%dist_restart all "
        survivors = f"some = dist.new_group([0, 2])\n{SUM.format('some')}\nx[0]"
        cluster.execute(survivors, ranks=[0, 2]).result(WAIT)
    else:
        # Other MPIs take the whole job along.
        assert {one.ename for one in cell.errors.values()} == {"EngineDied"}
        message = "%dist_restart all"
        advice = "every engine is gone; start them again with %dist_restart"
    with pytest.raises(ClusterError, match=message):
        cluster.restart([1])
    # What the rebuild advises is what the next command does.
    with pytest.raises(ClusterError, match=advice):
        cluster.rebuild()
    cluster.restart()
    cluster.rebuild()
    cluster.execute(CHECK).result(WAIT)


#: A notebook that is killed once its ranks are there; its processes' pids in a file.
KILLED = """
import os, pathlib, signal, sys
from rankscope.engines import Cluster
cluster = Cluster(2, engines="mpi")
pids = [one.pid for one in cluster._launched.processes()]
cluster.execute(sys.argv[2]).result(60)
pids += [pid for one in ("daemon", "child") for pid in cluster.pull(one).values()]
pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, pids)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("no_leaks")
def test_the_job_of_a_killed_notebook_ends(tmp_path: Path) -> None:
    """The kernel ends mpiexec and the controller, which end their own in turn.

    And what ranks have started ends, also where that has left them.
    """
    written = tmp_path / "pids"
    command = [sys.executable, "-c", KILLED, str(written), STARTS]
    owner = subprocess.run(command, check=False)
    assert owner.returncode == -signal.SIGKILL
    pids = [*map(int, written.read_text().split())]
    assert len(pids) >= 8
    until(lambda: not any(map(process_start_time, pids)), WAIT, "all to end")
