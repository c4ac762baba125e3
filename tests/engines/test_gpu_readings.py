"""The memory of a rank's GPU: read beside the status, which never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.devices.gpu_memory import GpuUse
from rankscope.engines.agent import gpus
from rankscope.engines.agent.gpus import Gpu, GpuReadings

GIB = 1 << 30
THREAD = "rankscope-gpu-memory"


class Memory:
    """NVML's account of a GPU; `answers` keeps it back while it is cleared."""

    def __init__(self, use: GpuUse | None, cost: float = 0.0) -> None:
        self.use, self.cost, self.reads = use, cost, 0
        self.answers = threading.Event()
        self.answers.set()

    def read(self) -> GpuUse | None:
        self.reads += 1
        began = time.thread_time()
        while time.thread_time() - began < self.cost:
            pass
        assert self.answers.wait(60)
        return self.use


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpus, "PERIOD", 0.0)
    monkeypatch.setattr(gpus, "REST_FACTOR", 0.0)
    yield
    until(lambda: not _threads(), 30, "the readings to end")


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == THREAD]


def _nothing() -> int | None:
    return None


def test_the_first_reading_comes_a_moment_later() -> None:
    use = GpuUse(13 * GIB, 80 * GIB, 12 * GIB)
    readings = GpuReadings(
        Memory(use).read, lambda: pytest.fail("NVML lists the process")
    )
    assert readings.latest() is None
    until(lambda: readings.latest() == use, 30)


@pytest.mark.parametrize(
    ("nvml", "pool", "found"),
    [
        (GpuUse(13, 80, None), 3, GpuUse(13, 80, 3)),
        (GpuUse(13, 80, None), None, GpuUse(13, 80, None)),
        (None, 3, GpuUse(None, None, 3)),
        (None, None, GpuUse(None, None, None)),
    ],
)
def test_the_pool_of_arrays_stands_in_for_nvml(
    nvml: GpuUse | None, pool: int | None, found: GpuUse
) -> None:
    readings = GpuReadings(Memory(nvml).read, lambda: pool)
    until(lambda: readings.latest() == found, 30)


@pytest.mark.parametrize("error", [RuntimeError("lost"), ImportError("no bindings")])
def test_a_pool_that_fails_leaves_what_nvml_says(error: Exception) -> None:
    def fail() -> int | None:
        raise error

    readings = GpuReadings(Memory(GpuUse(13, 80)).read, fail)
    until(lambda: readings.latest() == (13, 80, None), 30)


def test_a_gpu_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    use = GpuUse(13, 80, 12)
    memory = Memory(use)
    readings = GpuReadings(memory.read, _nothing)
    until(lambda: readings.latest() == use, 30)
    until(lambda: not _threads(), 30)
    memory.answers.clear()
    before = memory.reads
    try:
        # The last reading is shown for a while, and one thread waits.
        assert readings.latest() == use
        until(lambda: memory.reads == before + 1, 30)
        assert {readings.latest() for _ in range(100)} == {use}
        assert (memory.reads, _threads()) == (before + 1, [THREAD])
        monkeypatch.setattr(gpus, "KEPT", 0.0)
        assert readings.latest() is None
    finally:
        memory.answers.set()
    monkeypatch.undo()
    until(lambda: readings.latest() == use, 30)


def test_a_summary_is_of_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may come at any moment, and the next."""
    found = iter([None, GpuUse(13 * GIB, 80 * GIB, 12 * GIB), GpuUse(own=3)])
    gpu = Gpu(0, "Simulated", _nothing, _nothing)
    monkeypatch.setattr(gpu._readings, "latest", lambda: next(found))
    used = "GPU 0 · Simulated · 13.0 of 80.0 GiB"
    assert [gpu.summary() for _ in range(3)] == [
        ("GPU 0 · Simulated", None),
        (used, 12 * GIB),
        ("GPU 0 · Simulated", 3),
    ]


def test_a_reading_that_costs_time_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a second: 50 ms are followed by 50 s without one."""
    monkeypatch.setattr(gpus, "REST_FACTOR", 1000.0)
    memory = Memory(GpuUse(13, 80, 12), cost=0.05)
    readings = GpuReadings(memory.read, _nothing)
    readings.latest()
    until(lambda: readings.latest() is not None, 30)
    for _ in range(1000):
        readings.latest()
    assert memory.reads == 1
