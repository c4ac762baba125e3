"""The connection between notebook and controller fails; the store's does."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError
from tests.engines.cluster.faults import SUM, WAIT, all_in_flight, hanging
from tests.engines.cluster.wire import Wire

pytestmark = pytest.mark.processes


def connection_file(cluster: Cluster) -> Path:
    assert cluster._launched is not None
    names = cluster._launched.files()
    return Path(next(one for one in names if one.endswith("-client.json")))


@pytest.fixture
def wire(cluster: Cluster, tmp_path: Path) -> Iterator[Wire]:
    with Wire(connection_file(cluster), tmp_path) as between:
        yield between


@pytest.fixture
def far(cluster: Cluster, wire: Wire) -> Iterator[Cluster]:
    """The same ranks, seen by a notebook at the other end of the wire."""
    with Cluster.attach(connection_file=str(wire.file)) as attached:
        attached.execute("mine = rank * 100").result(WAIT)
        yield attached
        wire.mend()
    until(lambda: not any(r.state == "busy" for r in cluster.status().ranks), WAIT)
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


def states(cluster: Cluster) -> set[str]:
    return {one.state for one in cluster.status().ranks}


@pytest.mark.parametrize("how", ["silent", "cut"])
def test_a_notebook_cut_off_in_a_hang(
    cluster: Cluster, far: Cluster, wire: Wire, how: str
) -> None:
    cell = hanging(far, absent=1)
    wire.silence() if how == "silent" else wire.cut()
    until(lambda: states(far) == {"unreachable"}, WAIT, "the silence to be noticed")
    # Nothing waits without end, and everything says who does not answer.
    with pytest.raises(ClusterError, match=r"^ranks 0–3: no answer"):
        far.abort()
    with pytest.raises(ClusterError, match=r"ranks 0–3: no answer within"):
        far.rebuild()
    (verdict,) = far.diagnose()
    assert verdict.culprits == (0, 1, 2, 3)
    assert re.search(r"rank 0 \(.*\) has not answered since [\d:]{8}: ", str(verdict))
    with pytest.raises(TimeoutError, match="not done on ranks"):
        far.pull("mine", timeout=0.5)
    assert far.interrupt() == far.ranks
    assert cell.ranks_running == far.ranks
    # The ranks are none the worse for it: their own timeout would end it.
    assert all_in_flight(cluster, [0, 2, 3])

    wire.mend()
    until(lambda: "unreachable" not in states(far), WAIT, "the ranks to be heard of")
    far.abort(reason="joined again")
    # What was asked while nobody heard is heard now, the interrupt too.
    assert cell.wait(WAIT)
    far.rebuild()
    far.execute(SUM).result(WAIT)
    assert far.pull("mine", timeout=WAIT) == {0: 0, 1: 100, 2: 200, 3: 300}


def test_the_end_of_a_cell_that_nobody_heard(
    cluster: Cluster, far: Cluster, wire: Wire, pool: ThreadPoolExecutor
) -> None:
    """What was published while the wire was cut never comes: the cell ends anyway."""
    code = """
    import threading
    go = threading.Event()
    threading.Thread(target=lambda: go.wait(10)).start()
    print('here')
    while not flag.exists():
        go.wait(0.01)
    after = True
    """
    flag = wire.file.parent / "go"
    prepare = f"import pathlib; flag = pathlib.Path({str(flag)!r}); after = False"
    far.execute(prepare).result(WAIT)
    cell = far.execute(code)
    asking = pool.submit(far.pull, "mine", 1)
    until(lambda: all(cell.outputs(rank) for rank in far.ranks), WAIT, "the cell")
    wire.cut()
    flag.touch()
    until(lambda: states(cluster) == {"idle"}, WAIT, "the cell to be over")
    assert cell.ranks_running == far.ranks
    wire.mend()
    assert cell.wait(WAIT)
    assert {one.ename for one in cell.errors.values()} == {"ConnectionLost"}
    assert "whether the cell ran to its end on rank 3" in cell.errors[3].evalue
    with pytest.raises(ClusterError, match=r"answer of rank 1 was lost"):
        asking.result(WAIT)
    assert far.pull("after", timeout=WAIT) == dict.fromkeys(range(4), True)


def test_a_death_that_nobody_told(cluster: Cluster, far: Cluster, wire: Wire) -> None:
    wire.cut()
    os.kill(cluster.pids[2], signal.SIGKILL)
    until(lambda: cluster.status().dead == [2], WAIT, "the death to be noticed")
    wire.mend()
    until(lambda: far.status().dead == [2], WAIT, "the death to be found out")
    assert "rank 2 is dead: its process ended (engine 2" in str(
        far.status().ranks[2].reason
    )
    cluster.restart([2])


def test_a_rank_that_lost_its_store(cluster: Cluster) -> None:
    """A connection that was dead for half a minute is given up by both sides."""
    cluster.execute("mine = rank\n" + SUM).result(WAIT)
    server = psutil.Process(cluster.pids[0])
    listening = {
        one.laddr.port
        for one in server.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    cluster.execute(
        "import psutil, os, socket\n"
        "for one in psutil.Process().net_connections('tcp'):\n"
        f"    if one.raddr and one.raddr.port in {listening}:\n"
        "        with socket.socket(fileno=os.dup(one.fd)) as store:\n"
        "            store.shutdown(socket.SHUT_RDWR)\n",
        ranks=[2],
    ).result(WAIT)
    cluster.abort(reason="the store of rank 2 is gone")
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)
    assert cluster.pull("mine") == {rank: rank for rank in range(4)}
