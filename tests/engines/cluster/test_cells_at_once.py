"""Cells that several clients of one cluster send at the same time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError

pytestmark = pytest.mark.processes

ROUNDS = 25
#: Wrong if the all_reduces of two cells are paired.
SUM = (
    "x = np.full(10, rank + 1.0 + {k} * 100); dist.all_reduce(x)\n"
    "assert (x == 6 + 300 * {k}).all(), x[0]"
)


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    with Cluster(3, timeout=20) as started:
        yield started


@contextlib.contextmanager
def attached(cluster: Cluster) -> Iterator[Cluster]:
    guest = Cluster.attach(cluster_id=cluster.cluster_id)
    try:
        yield guest
    finally:
        guest.close()


def issue(clients: list[Cluster], ranks: list[list[int] | None]) -> list[object]:
    """Have each of `clients` issue cells on a thread of its own; return what failed."""
    failed: list[object] = []
    begin = threading.Barrier(len(clients))

    def run(client: Cluster, k: int, chosen: list[int] | None) -> None:
        begin.wait()
        code = SUM if chosen is None else "x = rank"
        for _ in range(ROUNDS):
            try:
                cell = client.execute(code.format(k=k), ranks=chosen)
                if not cell.wait(30):
                    failed.append((k, "hang", cell.ranks_running))
                failed.extend((k, error) for error in cell.errors.values())
            except ClusterError as error:
                failed.append((k, error))

    threads = [
        threading.Thread(target=run, args=(client, k, chosen))
        for k, (client, chosen) in enumerate(zip(clients, ranks, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_three_threads_of_one_client(cluster: Cluster) -> None:
    assert issue([cluster] * 3, [None] * 3) == []


def test_each_client_knows_which_cells_are_its_own(cluster: Cluster) -> None:
    """Places of others are no lines of its notebook."""
    with attached(cluster) as guest:
        for client, number in ((cluster, 3), (guest, 8), (cluster, 4), (cluster, 6)):
            client.execute("x = rank", cell=number).result(30)
        assert [one.glance().cells for one in (cluster, guest)] == ["3-4,6", "8"]
        # On one rank another cell has the number, and is the last one there.
        guest.execute("x = 1", cell=4, ranks=1).result(30)

        def known() -> list[str | None]:
            return [one.glance().cells for one in (cluster, guest)]

        until(lambda: known() == ["3,6", "8"], 30)


def test_three_clients(cluster: Cluster) -> None:
    with attached(cluster) as second, attached(cluster) as third:
        assert issue([cluster, second, third], [None] * 3) == []


def test_clients_whose_cells_share_some_ranks(cluster: Cluster) -> None:
    with attached(cluster) as second, attached(cluster) as third:
        assert issue([cluster, second, third, second], [None, [1, 2], [0], None]) == []


def test_who_has_the_ranks_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.engines.cluster.cells.TURN", 0.5)
    with attached(cluster) as guest:
        cell = cluster.execute(
            "import time\nwhile not globals().get('stop'): time.sleep(0.01)", cell=7
        )
        with pytest.raises(
            ClusterError, match=r"ranks 0–2 run cell 7 of .*, for \d+ s"
        ):
            guest.execute("y = 1")
        # Another rank's cell is not the owner's business, and nothing was sent.
        cluster.interrupt()
        assert cell.wait(20)
        guest.execute("assert 'y' not in globals(); y = 2").result(20)
        cluster.execute("assert y == 2").result(20)


def test_a_client_that_was_killed_holds_nothing() -> None:
    code = (
        "from rankscope.engines import Cluster; import time\n"
        "c = Cluster(2, keep=True); c.execute('x = 1').result()\n"
        "print(c.cluster_id, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        cluster_id = owner.stdout.readline().decode().strip()
        owner.kill()
        owner.wait()
        guest = Cluster.attach(cluster_id=cluster_id)
        begin = time.monotonic()
        guest.execute("dist.barrier(); assert x == 1").result(20)
        assert time.monotonic() - begin < 10
        guest.shutdown()
    finally:
        owner.kill()
        owner.stdout.close()
