"""NCCL on engines: devices, and aborts while the main thread sits on the device.

Where there is no GPU, `tests.backends.gpu_simulation` stands in for it, on the
engine; each rank is then a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.engines import Cluster, ClusterError
from rankscope.engines.gpus import Gpus, choose_device, must_share
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]

SIMULATED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rankscope.backends import nccl_seam
from tests.backends.gpu_simulation import Simulation
simulation = Simulation()
nccl_seam.use(lambda: simulation.seam)
alone = dist.new_group([rank], backend="cuda:nccl", group_desc="alone")
x = simulation.array([1.0, 2.0], 0)
dist.all_reduce(x, group=alone)
simulation.synchronize(0)
"""

HANG = """
simulation.hangs.add(0)
dist.all_reduce(x, group=alone)
print('the device goes on', flush=True)
simulation.synchronize(0)
print('what comes after')
"""


@pytest.fixture(scope="module")
def simulated(_module_leaves_nothing: None) -> Iterator[Cluster]:
    with Cluster.start(2) as cluster:
        assert not cluster.execute(SIMULATED).result(60).errors
        yield cluster


def test_the_board_hears_of_the_communicator(simulated: Cluster) -> None:
    (group,) = [
        one
        for one in simulated.status(fresh=True).ranks[1].groups
        if one.name == "alone"
    ]
    assert group.devices == {"cuda": "nccl (device 0: running)"}


def test_an_abort_ends_a_main_thread_that_synchronizes(simulated: Cluster) -> None:
    cell = simulated.execute(HANG, ranks=[0])

    def hangs() -> bool:
        (group,) = [
            one
            for one in simulated.status(fresh=True).ranks[0].groups
            if one.name == "alone"
        ]
        return group.oldest is not None and group.oldest.state == "started"

    until(hangs)
    simulated.abort("alone", "the device hangs", ranks=[0])
    cell.wait(20)
    # It went to its end on garbage, and says so.
    error = cell.errors[0]
    assert error.ename == "DistAbortedError"
    assert "the device hangs" in error.evalue
    cell = simulated.execute("simulation.hangs.clear()\n1", ranks=[0]).result(20)
    assert not cell.errors
    simulated.rebuild("alone")
    again = simulated.execute(
        "dist.all_reduce(x, group=alone)\nsimulation.synchronize(0)\nalone.generation",
        ranks=[0],
    ).result(20)
    assert not again.errors


def test_a_config_with_nccl_costs_nothing_without_a_gpu(simulated: Cluster) -> None:
    code = """
import sys
pg = dist.new_group(backend="cpu:gloo,cuda:nccl" if dist.is_gloo_available()
                    else "cuda:nccl")
x = np.ones(2)
if dist.is_gloo_available():
    dist.all_reduce(x, group=pg)
'cupy' in sys.modules
"""
    cell = simulated.execute(code).result(30)
    assert not cell.errors


# -- which GPU -------------------------------------------------------------------


def env(local_rank: int, local_size: int, gpus: Gpus) -> dict[str, str]:
    return {
        "RANK": str(local_rank + 4),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        **gpus.environment(local_rank + 4),
    }


@pytest.mark.parametrize(
    ("devices", "count", "expected"),
    [
        ((), 4, [0, 1, 2, 3]),
        ((), 2, [0, 1, 0, 1]),
        ((2, 0), 3, [2, 0, 2, 0]),
        ((), 0, [None] * 4),
    ],
)
def test_ranks_take_devices_in_turn(
    devices: tuple[int, ...], count: int, expected: list[int | None]
) -> None:
    gpus = Gpus(devices)
    assert [choose_device(env(r, 4, gpus), count) for r in range(4)] == expected


def test_ranks_that_have_to_share_are_found() -> None:
    assert must_share(env(0, 2, Gpus()), 1)
    assert must_share(env(0, 2, Gpus((1,))), 4)
    assert not must_share(env(0, 2, Gpus(share=True)), 1)
    assert not must_share(env(0, 2, Gpus()), 2)
    assert not must_share(env(0, 2, Gpus()), 0)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"rank 4: --devices 0,7: device 7 is not"):
        choose_device(env(0, 2, Gpus((0, 7))), 2)


def test_sharing_tells_nccl_that_the_hosts_differ() -> None:
    one, two = (Gpus(share=True).environment(rank) for rank in (0, 1))
    assert one["NCCL_HOSTID"] != two["NCCL_HOSTID"]
    assert one["NCCL_SOCKET_IFNAME"] == "lo"


def test_devices_that_no_host_has_end_the_start() -> None:
    with pytest.raises(ClusterError, match="--devices 63: device 63 is not there"):
        Cluster.start(1, devices=[63])
