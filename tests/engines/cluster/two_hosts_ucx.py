"""UCX over TCP between two hosts, which are namespaces of one machine: a program.

Run by `two_hosts.steps_of`: ranks 0 and 1 are on the first host, ranks 2 and 3 on the
second, which shares no memory with it.
"""

from __future__ import annotations

import time
from typing import Any

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, ExecutionError
from rankscope.widgets import StatusTable
from tests.engines.cluster.cable import Cable
from tests.engines.cluster.two_hosts import (
    DELAY,
    WAIT,
    Hosts,
    four_ranks,
    silent,
    stream,
    tell,
)

#: Elements of float64: a frame, some, and one message in many parts.
SIZES = (1, 1000, 200_000)

#: Every collective that moves arrays, checked on every rank, in `group`.
OPS = """
n, ones = {n}, np.ones({n})
x = ones * (rank + 1)
dist.all_reduce(x, group=group)
assert (x == 10).all()
x = ones * rank
dist.broadcast(x, 2, group=group)
assert (x == 2).all()
parts = [np.zeros(n) for _ in range(4)]
dist.all_gather(parts, ones * rank, group=group)
assert [part[-1] for part in parts] == [0, 1, 2, 3]
dist.all_to_all(parts, [ones * (10 * rank + to) for to in range(4)], group=group)
assert [part[-1] for part in parts] == [rank, 10 + rank, 20 + rank, 30 + rank]
mine = np.zeros(n)
dist.reduce_scatter(mine, [ones * to for to in range(4)], group=group)
assert (mine == 4 * rank).all()
"""

INFO = """
info = dist.ucx_info()
found = {"settings": info.settings, "connections": info.connections}
"""

#: A group over UCX with other settings; `found` is what `ucx_info` says of it.
OTHER = """
import os
os.environ.pop("GLOO_SOCKET_IFNAME", None)
os.environ.update({settings})
group = dist.new_group(group_desc={name!r}, backend="cpu:ucx")
"""


def main() -> None:
    hosts = Hosts(separate=True)
    with four_ranks(hosts, backend="cpu:ucx", interfaces=True) as cluster:
        cluster.execute("group = None").result(WAIT)
        use(cluster)
        cut(cluster, hosts.cable)
        choose(cluster)
    hosts.close()


def collectives(cluster: Cluster) -> None:
    """Run every collective at every size; the ranks check the results."""
    for n in SIZES:
        cluster.execute(OPS.format(n=n)).result(WAIT)


def found(cluster: Cluster) -> dict[int, Any]:
    """What `ucx_info` says on each rank."""
    cluster.execute(INFO).result(WAIT)
    return cluster.pull("found", timeout=WAIT)


def use(cluster: Cluster) -> None:
    """The interface is that of GLOO_SOCKET_IFNAME."""
    began = time.monotonic()
    collectives(cluster)
    status = cluster.status(fresh=True)
    tell(
        "use",
        seconds=time.monotonic() - began,
        hosts=[one.host for one in status.ranks],
        info=found(cluster),
        transports=[dict(one.groups[0].transports) for one in status.ranks],
        table=str(StatusTable(status)),
    )


def cut(cluster: Cluster, cable: Cable) -> None:
    """Each side ends in time; an abort ends an op; all is right once joined."""
    cable.delay = DELAY
    cluster.execute(OPS.format(n=1000)).result(WAIT)
    cable.delay = 0.0
    cell = stream(cluster)
    cable.up = False
    began = time.monotonic()
    until(lambda: set(cell.ranks_running) <= {2, 3}, WAIT, "ranks 0, 1 to end")
    ended = time.monotonic() - began
    until(lambda: silent(cluster) == [2, 3], WAIT, "silence")
    try:
        cluster.abort(reason="nobody there")
        said = ""
    except ClusterError as error:
        said = str(error)
    tell("down", ended=ended, abort=said)
    cable.up = True
    assert cell.wait(WAIT), "the other host's ranks have not ended"
    until(lambda: not silent(cluster), WAIT, "a status of the other host")
    caught = cluster.pull("caught", timeout=WAIT)
    cluster.rebuild()
    collectives(cluster)

    hanging = cluster.execute(
        "aborted = None\n"
        "try:\n"
        "    if rank != 3: dist.all_reduce(np.ones(200_000))\n"
        "except dist.DistError as error:\n"
        "    aborted = str(error)"
    )
    until(
        lambda: all(one.groups[0].in_flight for one in cluster.status().ranks[:3]),
        WAIT,
        "three ranks in the op",
    )
    began = time.monotonic()
    cluster.abort(reason="seen enough")
    assert hanging.wait(WAIT), "an op has not ended"
    aborted = time.monotonic() - began
    reasons = cluster.pull("aborted", [0, 1, 2], timeout=WAIT)
    cluster.rebuild()
    collectives(cluster)
    tell("up", caught=caught, aborted=aborted, reasons=reasons)


def choose(cluster: Cluster) -> None:
    """UCX_TLS and UCX_NET_DEVICES hold for the groups that are made from then on."""
    devices = '{"UCX_NET_DEVICES": "cable-a" if rank < 2 else "cable-b"}'
    for name, settings in {
        "net": devices,
        "tls": '{"UCX_TLS": "tcp,self"}',
    }.items():
        code = OTHER.format(settings=settings, name=name)
        cluster.execute(code).result(WAIT)
        collectives(cluster)
        tell(name, info=found(cluster))
    # What the other host does not have.
    wrong = OTHER.format(settings='{"UCX_NET_DEVICES": "cable-a"}', name="wrong")
    cell = cluster.execute(wrong + "dist.all_reduce(np.ones(1), group=group)")
    try:
        cell.result(WAIT)
        said = ""
    except ExecutionError as error:
        said = str(error)
    tell("wrong", said=said)


if __name__ == "__main__":
    main()
