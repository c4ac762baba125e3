"""NCCL on engines: devices, and aborts while the main thread sits on the device.

Where there is no GPU, `tests.backends.gpu_simulation` stands in for it, on the
engine; each rank is then a group of its own.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends import unavailable_reason
from rankscope.backends.conformance.waiting import until
from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.interface import registry as plugins
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import Cluster, ClusterError, ExecutionError, StallWatch
from rankscope.engines.agent import availability, gpus
from rankscope.engines.agent.availability import why_refused
from rankscope.engines.agent.gpus import choose_device, may_share
from rankscope.engines.launch import preconditions
from rankscope.engines.observe.rank_slots import RankSlot, note_gpus
from rankscope.engines.wire.gpu_environment import Gpus, parse_devices
from rankscope.engines.wire.requests import GpuAnswer
from tests.backends.nccl.ras_service import Server, rank, report, service

ROOT = Path(__file__).resolve().parents[3]

SIMULATED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.backends.gpu_simulation import Simulation, use_gpu_api
simulation = Simulation()
use_gpu_api(lambda: simulation.api)
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


WITH_NVML = """
import threading
from rankscope.backends.devices.gpu_memory import GpuUse
from rankscope.engines.agent import agent, gpus
nvml_answers = threading.Event()
nvml_answers.set()
gpus.PERIOD, gpus.KEPT = 0.1, 1.0

class Nvml:
    def __init__(self, index):
        pass
    def read(self):
        nvml_answers.wait()
        return GpuUse(13 << 30, 80 << 30, 12 << 30)

gpus.GpuMemory = Nvml
agent.installed()._gpu = gpus.Gpu(0, "Simulated", lambda: None, lambda: None)
"""


@pytest.fixture(scope="module")
def simulated(_module_leaves_nothing: None) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Without a GPU here no rank would be started for such a group.
        patch.setattr(preconditions, "has_driver", lambda: True)
        cluster = Cluster.start(2, backend="cuda:nccl")
    with cluster:
        assert not cluster.execute(SIMULATED).result(60).errors
        yield cluster


@pytest.mark.processes
def test_the_board_hears_of_the_communicator(simulated: Cluster) -> None:
    (group,) = [
        one
        for one in simulated.status(fresh=True).ranks[1].groups
        if one.name == "alone"
    ]
    assert group.devices == {"cuda": "nccl (device 0: running)"}


@pytest.mark.processes
def test_the_status_has_what_a_rank_holds_on_its_gpu(simulated: Cluster) -> None:
    """Rank 1 has a GPU; when NVML does not answer, the status goes on without it."""
    assert not simulated.execute(WITH_NVML, ranks=[1]).result(60).errors

    def look() -> list[tuple[str, int | None]]:
        ranks = simulated.status(fresh=True).ranks
        return [(one.gpu, one.gpu_memory) for one in ranks]

    used = "GPU 0 · Simulated · 13.0 of 80.0 GiB"
    until(lambda: look() == [("", None), (used, 12 << 30)], 30)
    simulated.execute("nvml_answers.clear()", ranks=[1]).result(60)
    until(lambda: look() == [("", None), ("GPU 0 · Simulated", None)], 30)
    status = simulated.status(fresh=True).ranks[1]
    assert status.state == "idle"
    assert (status.heartbeat_age or 0) < 1
    simulated.execute("nvml_answers.set()", ranks=[1]).result(60)
    until(lambda: look() == [("", None), (used, 12 << 30)], 30)


@pytest.mark.processes
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


@pytest.mark.processes
def test_the_verdict_has_what_nccl_reports(simulated: Cluster) -> None:
    pid = simulated.pids[1]
    server = Server(service(True, lambda: json.dumps(report([rank(0, pid, 2)], []))))
    try:
        host, port = server.address
        simulated.execute(f"import os\nos.environ['NCCL_RAS_ADDR'] = '{host}:{port}'")
        cell = simulated.execute(HANG, ranks=[1])
        verdict = until(
            lambda: next(
                (one for one in simulated.diagnose() if one.group.name == "alone"), None
            )
        )
        assert verdict.fault is Fault.EXECUTION_HANG
        assert str(verdict) == (
            f"{verdict.text}. NCCL's own report (RAS): every rank has launched "
            "AllReduce 2"
        )
        told: list[list[Verdict]] = []
        watch = StallWatch(simulated, told.append, stall=0.5)
        until(lambda: told and told[-1][0].report == verdict.report)
        watch.close()
    finally:
        server.close()
    # Without a service, the verdict is the same without the report.
    until(lambda: [one.report for one in simulated.diagnose()] == [""])
    simulated.abort("alone", "seen", ranks=[1])
    assert cell.wait(20)
    simulated.execute("simulation.hangs.clear()", ranks=[1]).result(20)
    simulated.rebuild("alone")


@pytest.mark.processes
def test_a_config_with_nccl_costs_nothing_without_a_gpu(simulated: Cluster) -> None:
    code = """
import sys
pg = dist.new_group(backend="cpu:tcp,cuda:nccl")
x = np.ones(2)
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
    asked = Gpus(devices)
    assert [choose_device(env(r, 4, asked), count) for r in range(4)] == expected


def test_ranks_that_have_to_share_are_found() -> None:
    assert not may_share(env(0, 2, Gpus()))
    assert may_share(env(0, 2, Gpus(share=True)))


def advice_on(*uuids: str, shares: bool = False, dead: int | None = None) -> list[str]:
    """Return the advice for ranks of one host that have GPUs of these UUIDs."""
    slots = [
        RankSlot(rank, rank, f"e{rank}", 4000, "node", "127.0.0.1", 1)
        for rank in range(len(uuids))
    ]
    if dead is not None:
        slots[dead].death = f"rank {dead} is dead"
    answers: dict[int, GpuAnswer] = {
        rank: {"uuid": uuid, "may_share": shares} for rank, uuid in enumerate(uuids)
    }
    first = note_gpus(slots, answers)
    # A fresh rank alone is asked; the GPUs of the others are known.
    assert note_gpus(slots, {0: answers[0]}) == first
    return first


def test_ranks_share_a_gpu_if_its_uuid_is_the_same() -> None:
    # A launcher may show each rank one GPU, as device 0.
    assert advice_on("a", "b") == []
    (line,) = advice_on("a", "a", "b")
    assert line.startswith("ranks 0–1 have to share GPUs, which NCCL refuses; ")
    assert advice_on("a", "a", shares=True) == []
    # Without a GPU, or where its UUID is not known.
    assert advice_on("", "") == []
    assert advice_on("a", "a", dead=1) == []


def test_a_device_that_is_not_there() -> None:
    message = "^--devices 0,7: there is no device 7, its host has devices 0 to 1$"
    with pytest.raises(ClusterError, match=message):
        choose_device(env(0, 2, Gpus((0, 7))), 2)


def test_where_there_is_no_gpu_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "unavailable_reason", lambda name: f"no {name}: get it")
    with pytest.raises(ClusterError, match="has no GPU that can be used: no nccl: get"):
        choose_device(env(0, 2, Gpus((0,))), 0)
    monkeypatch.setattr(gpus, "unavailable_reason", lambda name: None)
    with pytest.raises(ClusterError, match="has no GPU that can be used$"):
        choose_device(env(0, 2, Gpus((0,))), 0)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((), ()),
        ([], ()),
        (3, (3,)),
        ([2, 0], (2, 0)),
        (range(3), (0, 1, 2)),
        ("2,0", (2, 0)),
        ("4,0-2", (4, 0, 1, 2)),
    ],
)
def test_devices_are_read(devices: Any, expected: tuple[int, ...]) -> None:
    assert parse_devices(devices) == expected


BAD_DEVICES: list[tuple[Any, str]] = [
    ([-1], "'-1' is not a GPU; write GPUs like 0 or 0,2-3"),
    ("x", "'x' is not a GPU"),
    ("", "an empty part is not a GPU"),
    ([0.5], "'0.5' is not a GPU"),
    ([True], "'True' is not a GPU"),
    (None, "'None' is not a GPU"),
    ([0, 0], "GPU 0 is given twice: name it once"),
    ("0-2,1", "GPU 1 is given twice"),
    ("2-0", "the run 2-0 is empty; write 0-2"),
    ("0-99999999999999999999", "no host has a GPU 99999999999999999999"),
]


@pytest.mark.parametrize(("devices", "message"), BAD_DEVICES)
def test_what_is_no_device_is_named(devices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_devices(devices)


@pytest.mark.processes
@pytest.mark.parametrize(("devices", "message"), BAD_DEVICES)
def test_a_cluster_refuses_them_before_it_starts(devices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"devices={devices!r}: {message}")):
        Cluster.start(1, devices=devices)


def test_a_variable_that_makes_no_sense_is_named() -> None:
    wrong = {"RANK": "0", "LOCAL_RANK": "0", "RANKSCOPE_DEVICES": "0,x"}
    message = "the variable RANKSCOPE_DEVICES='0,x': 'x' is not a GPU; write GPUs like"
    with pytest.raises(ClusterError, match=re.escape(message)):
        choose_device(wrong, 2)


@pytest.mark.parametrize("said", ["", "0", "false", "No", " off "])
def test_sharing_is_not_meant_by_a_no(said: str) -> None:
    assert not may_share({**env(0, 2, Gpus()), "RANKSCOPE_SHARE_GPU": said})
    assert may_share({**env(0, 2, Gpus()), "RANKSCOPE_SHARE_GPU": "yes"})


# -- which backends --------------------------------------------------------------


def test_what_was_not_named_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "why_refused", lambda device, name: "no")
    assert availability.refused(None) == []
    assert availability.refused("cpu:gloo,cuda:nccl") == [
        ("cpu", "gloo", "no"),
        ("cuda", "nccl", "no"),
    ]


def test_cupy_is_left_alone_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: str, name: str) -> str:
        raise AssertionError("it would import cupy")

    monkeypatch.setattr(availability, "find_spec", lambda module: module)
    monkeypatch.setattr(availability, "has_driver", lambda: False)
    monkeypatch.setattr(availability, "why_refused", load)
    ((device, name, why),) = availability.refused("nccl")
    assert (device, name) == ("cuda", "nccl")
    assert "no driver of a GPU" in why


def test_a_package_is_not_imported_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "declared", lambda: {"theirs": []})
    assert why_refused("cuda", "theirs") is not None
    assert availability.refused("cuda:theirs") == []


def test_an_answer_that_takes_long_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(availability, "CHECK_TIMEOUT", 0.01)
    monkeypatch.setattr(availability, "_check", lambda named: over.wait(10) and [])
    assert availability.refused("cpu:gloo") == []
    over.set()


@pytest.mark.skipif(find_spec("cupy") is not None, reason="cupy is installed")
def test_why_a_backend_is_refused() -> None:
    install = pip_install(with_extra("cuda13"))
    assert install in str(why_refused("cuda", "nccl"))
    assert install in str(why_refused("cuda", "tcp"))
    assert why_refused("cpu", "tcp") is None


@pytest.mark.processes
@pytest.mark.skipif(unavailable_reason("nccl") is None, reason="NCCL can be used")
def test_a_backend_that_was_named_and_cannot_be_used(simulated: Cluster) -> None:
    reason = unavailable_reason("nccl")
    assert simulated.advice == (
        f"nccl cannot be used on ranks 0–1: {reason}; cuda arrays will be refused"
    )
    # Arrays of the GPU are what it would be measured with.
    bench = simulated.bench("all_reduce", [1024])
    with pytest.raises(ExecutionError, match=re.escape(str(reason))) as caught:
        bench.result(20)
    assert {one.evalue for one in caught.value.errors.values()} == {reason}
    bench = simulated.bench("all_reduce", [1024], device="cpu")
    with pytest.raises(ExecutionError, match="has no backend for device 'cpu', it is"):
        bench.result(20)


def test_sharing_tells_nccl_that_the_hosts_differ() -> None:
    one, two = (Gpus(share=True).environment(rank) for rank in (0, 1))
    assert one["NCCL_HOSTID"] != two["NCCL_HOSTID"]
    # A network plugin (AWS's, Google's) would come before the sockets.
    assert one["NCCL_NET"] == "Socket"
    assert one["NCCL_SOCKET_IFNAME"] == "lo"
    assert one["NCCL_MNNVL_ENABLE"] == "0"


@pytest.mark.processes
def test_devices_that_no_host_has_end_the_start() -> None:
    # One sentence, without the names of requests and of types.
    message = "^rank 0: --devices 63: there is no device 63, its host has"
    with pytest.raises(ClusterError, match=message):
        Cluster.start(1, devices=[63])
