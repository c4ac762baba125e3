"""The end of a cluster, with a rank that does not answer: nobody waits for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankscope.__main__ import main
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, ExecutionError
from rankscope.engines.cluster import registry
from rankscope.engines.cluster.registry import EngineRegistry
from rankscope.engines.launch import launched
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.wire import ipyparallel_private as private
from rankscope.engines.wire.answers import Answers
from rankscope.engines.wire.channel import ControlChannel
from rankscope.engines.wire.requests import GetSummary, Request, Subscribe, Unsubscribe

pytestmark = pytest.mark.usefixtures("no_leaks")

WAIT = 60
#: Seconds that no test may wait.
FOR_EVER = 3600.0

SUBSCRIPTIONS = """
from rankscope.engines.agent import agent
print(" ".join(agent.installed()._publisher.subscriptions))
"""

CELL = """
import pathlib, threading
try:
    pathlib.Path({begun!r}).touch()
    threading.Event().wait()
except BaseException as error:
    pathlib.Path({left!r}).write_text(type(error).__name__)
    raise
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request[Any]]:
    """What the ranks of any cluster are asked, and waited for."""
    requests: list[Request[Any]] = []
    ask = EngineRegistry.ask

    def asking(self: EngineRegistry, request: Any, *args: Any, **kw: Any) -> Any:
        requests.append(request)
        return ask(self, request, *args, **kw)

    monkeypatch.setattr(EngineRegistry, "ask", asking)
    return requests


def stop(cluster: Cluster, rank: int) -> psutil.Process:
    """Stop the engine of a rank."""
    process = psutil.Process(cluster.pids[rank])
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, WAIT, "the stop")
    return process


@pytest.fixture
def stopped() -> Iterator[Cluster]:
    """A cluster of two ranks, of which rank 1 is stopped."""
    with Cluster.start(2) as cluster:
        process = stop(cluster, 1)
        yield cluster
    assert not lives(process)


@pytest.mark.processes
def test_engines_that_end_are_told_nothing(asked: list[Request[Any]]) -> None:
    with Cluster.start(1) as cluster:
        asked.clear()
        cluster.shutdown(fresh=False)
    assert asked == []


@pytest.mark.processes
def test_no_last_status_is_requested_that_nobody_can_look_at(
    asked: list[Request[Any]],
) -> None:
    """At the end of a process, and by ``rankscope stop``."""
    with Cluster.start(1) as cluster:
        asked.clear()
        cluster._at_exit()
        assert cluster.closed
        assert asked == []
    cluster = Cluster.start(1, keep=True)
    cluster.close()
    assert main(["stop", cluster.cluster_id]) == 0
    assert GetSummary() not in asked


def end_by_a_guest() -> None:
    with Cluster.start(1) as cluster:
        Cluster.attach(cluster_id=cluster.cluster_id).shutdown("a guest ended it")
        until(lambda: cluster.ended is not None, WAIT, "the end of the cluster")


@pytest.mark.processes
def test_nothing_is_kept_for_a_controller_that_is_gone() -> None:
    """A socket lives on while it has messages, and has a descriptor of its own."""
    end_by_a_guest()
    process = psutil.Process()
    before = process.num_fds()
    end_by_a_guest()
    until(lambda: process.num_fds() <= before, WAIT, "the end of the sockets")


@pytest.mark.processes
def test_engines_that_live_on_publish_no_more(asked: list[Request[Any]]) -> None:
    with Cluster.start(1) as cluster:
        before = cluster.execute(SUBSCRIPTIONS).result(WAIT).outputs(0)
        guest = Cluster.attach(cluster_id=cluster.cluster_id)
        during = cluster.execute(SUBSCRIPTIONS).result(WAIT).outputs(0)
        assert len(during[0]["text"].split()) == 2
        asked.clear()
        guest.close()
        assert [type(one) for one in asked] == [Unsubscribe]
        assert cluster.execute(SUBSCRIPTIONS).result(WAIT).outputs(0) == before


@pytest.mark.processes
def test_a_stopped_engine_that_lives_on_publishes_no_more_once_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request leaves, though nobody waits for the answer."""
    with Cluster.start(2) as cluster:
        before = cluster.execute(SUBSCRIPTIONS).result(WAIT).outputs(1)
        guest = Cluster.attach(cluster_id=cluster.cluster_id)
        process = stop(cluster, 1)
        monkeypatch.setattr(registry, "DETACH_WAIT", FOR_EVER)
        guest.close()
        process.resume()

        def now() -> list[Any]:
            return cluster.execute(SUBSCRIPTIONS).result(WAIT).outputs(1)

        until(lambda: now() == before, WAIT, "the end of the subscription")


@pytest.mark.processes
def test_a_stopped_rank_is_asked_nothing(
    monkeypatch: pytest.MonkeyPatch, stopped: Cluster
) -> None:
    requests: list[tuple[Any, list[int]]] = []
    ask = EngineRegistry.ask

    def asking(
        self: EngineRegistry, request: Any, ranks: Any = None, timeout: float = 2.0
    ) -> Answers[Any]:
        requests.append((request, sorted(self.uuids(ranks))))
        return ask(self, request, ranks, timeout)

    monkeypatch.setattr(EngineRegistry, "ask", asking)
    stopped.shutdown()
    assert requests == [(GetSummary(), [0])]


@pytest.mark.processes
@pytest.mark.parametrize("engines", ["local", "spawn"])
def test_a_stopped_engine_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, engines: str
) -> None:
    cluster = Cluster.start(2, engines=engines)
    process = stop(cluster, 1)
    monkeypatch.setattr(launched, "GRACE", FOR_EVER)
    cluster.shutdown(fresh=False)
    assert not lives(process)


@pytest.mark.processes
def test_a_stopped_engine_is_replaced_at_once(
    monkeypatch: pytest.MonkeyPatch, stopped: Cluster
) -> None:
    sent: list[tuple[int, int]] = []
    send = EngineRegistry.signal

    def sending(self: EngineRegistry, slot: RankSlot, signum: int) -> None:
        sent.append((slot.rank, signum))
        send(self, slot, signum)

    monkeypatch.setattr(EngineRegistry, "signal", sending)
    stopped._registry.terminate([0, 1], "both are replaced")
    assert sent[:2] == [(0, signal.SIGTERM), (1, signal.SIGKILL)]
    assert (1, signal.SIGTERM) not in sent


@pytest.mark.processes
@pytest.mark.parametrize("engines", ["local", "spawn"])
def test_a_cell_that_runs_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: str
) -> None:
    """While it runs, its engine does not heed SIGTERM."""
    begun, left = tmp_path / "begun", tmp_path / "left"
    cluster = Cluster.start(1, engines=engines)
    cluster.execute(CELL.format(begun=str(begun), left=str(left)))
    until(begun.exists, WAIT, "the cell to begin")
    assert cluster.status(fresh=True).ranks[0].state == "busy"
    monkeypatch.setattr(launched, "GRACE", FOR_EVER)
    cluster.shutdown(fresh=False)
    assert left.read_text() == "KeyboardInterrupt"


@pytest.mark.processes
def test_a_sigterm_is_told_as_the_cause(tmp_path: Path) -> None:
    """ipyparallel ended such an engine by an error of its event loop: exit code 1."""
    left = tmp_path / "left"
    with Cluster.start(2) as cluster:
        leave = f"atexit.register(pathlib.Path({str(left)!r}).touch)"
        code = f"import atexit, pathlib; {leave}"
        cluster.execute(code, ranks=[1]).result(WAIT)
        went_on = tmp_path / "went on"
        cell = cluster.execute(
            "import os, signal\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
            "dist.barrier()\n"
            f"if rank == 1: pathlib.Path({str(went_on)!r}).touch()"
        )
        # On a loaded machine the death is heard of before the reply.
        with contextlib.suppress(ExecutionError):
            cell.result(WAIT)
        assert went_on.exists()
        until(lambda: cluster.status().dead == [1], WAIT, "the death")
        reason = str(cluster.status().ranks[1].reason)
        assert reason.startswith("rank 1 is dead: killed by SIGTERM (")
    assert left.exists()


@pytest.mark.processes
def test_a_renewal_that_waits_for_a_silent_rank_ends(
    monkeypatch: pytest.MonkeyPatch, stopped: Cluster
) -> None:
    """Every ten seconds it would have delayed the end by up to two."""
    waits = threading.Event()
    ask = EngineRegistry.ask

    def asking(
        self: EngineRegistry, request: Any, ranks: Any = None, timeout: float = 2.0
    ) -> Answers[Any]:
        if isinstance(request, Subscribe):
            timeout = FOR_EVER
            waits.set()
        return ask(self, request, ranks, timeout)

    monkeypatch.setattr(EngineRegistry, "ask", asking)
    monkeypatch.setattr(registry, "RENEWAL", 0.01)
    # The thread that is there has begun its ten seconds.
    renewal = stopped._registry._renewal = threading.Thread(
        target=stopped._registry._renew, daemon=True
    )
    renewal.start()
    assert waits.wait(WAIT)
    stopped.shutdown(fresh=False)
    assert not renewal.is_alive()


@pytest.mark.processes
def test_who_waits_for_an_answer_hears_of_the_end(stopped: Cluster) -> None:
    answers: Future[Answers[Any]] = Future()

    def wait() -> None:
        answers.set_result(stopped._registry.ask(GetSummary(), [1], FOR_EVER))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: any(stopped._registry.channel._pending.values()), WAIT)
    stopped.shutdown(fresh=False)
    waiting.join()
    assert answers.result().errors == {1: "this cluster is closed"}


def test_a_request_that_is_sent_at_the_end_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has found the client open, and is noted after all others have failed."""
    channel = ControlChannel(None)

    def send(*args: Any) -> Future[Any]:
        channel.close("this cluster is closed")
        return Future()

    monkeypatch.setattr(private, "send", send)
    reply = channel.post("engine", GetSummary())
    with pytest.raises(ClusterError, match="this cluster is closed"):
        reply.result(0)
