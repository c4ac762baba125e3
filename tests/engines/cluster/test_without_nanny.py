"""Engines of this machine have no nanny; what a nanny does is done all the same."""

from __future__ import annotations

import os
import signal
from typing import Any

import ipyparallel
import psutil
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError
from rankscope.engines.cluster import installation
from rankscope.engines.cluster.installation import install_agents
from rankscope.engines.wire import ipyparallel_private as private
from rankscope.engines.wire.channel import ControlChannel
from rankscope.engines.wire.requests import GetHello

pytestmark = pytest.mark.processes

WAIT = 30


def _nannies() -> int:
    """Return the number of nannies among the descendants of this process."""
    children = psutil.Process().children(recursive=True)
    return sum("ipyparallel.engine.nanny" in one.cmdline() for one in children)


@pytest.mark.usefixtures("no_leaks")
class TestWithoutNanny:
    def test_another_client_signals_an_engine_and_is_told_of_its_end(self) -> None:
        with Cluster.start(2) as cluster:
            assert _nannies() == 0
            assert cluster._launched is not None
            files = cluster._launched.cluster.controller.connection_files
            other = ipyparallel.Client(files["client"])
            try:
                assert other.ids == [0, 1]
                # Nobody's nanny serves this, but the agent of the engine.
                other.send_signal(signal.SIGKILL, targets=[1])
                until(lambda: other.ids == [0], WAIT, "the hub's notification")
                until(lambda: cluster.status().dead == [1], WAIT, "the death")
                reason = cluster.status().ranks[1].reason
                assert reason is not None
                assert reason.startswith("rank 1 is dead: killed by SIGKILL")
                cluster.restart([1])
                until(lambda: len(other.ids) == 2, WAIT, "the new engine")
                cluster.execute("rank").result(WAIT)
            finally:
                other.close(linger=0)

    def test_a_kept_cluster_has_nannies(self) -> None:
        """Who attaches to it later may have no launcher of its engines."""
        cluster = Cluster.start(1, keep=True)
        try:
            assert _nannies() == 1
        finally:
            cluster.shutdown()

    @pytest.mark.timeout(90)
    def test_an_engine_that_ends_before_it_has_its_rank(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its answer would be waited for until the end of `start_timeout`."""
        killed = []

        def install_after_a_death(registry: Any, *args: Any, **options: Any) -> Any:
            pid = registry.client[1].apply_sync(os.getpid)
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            return install_agents(registry, *args, **options)

        monkeypatch.setattr(
            "rankscope.engines.cluster.recovery.install_agents", install_after_a_death
        )
        with pytest.raises(ClusterError) as raised:
            Cluster.start(2)
        assert str(raised.value) == (
            "engines died before they had their ranks: "
            f"pid {killed[0]} killed by SIGKILL"
        )

    def test_a_request_that_the_controller_drops_is_sent_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It drops what is for an engine whose control channel is not connected yet."""
        dropped: list[type[Any]] = []
        post = ControlChannel.post

        def drop_the_first(self: ControlChannel, uuid: str, request: Any) -> Any:
            if not dropped:
                dropped.append(type(request))
                uuid = "not connected"
            return post(self, uuid, request)

        monkeypatch.setattr(ControlChannel, "post", drop_the_first)
        with Cluster.start(1) as cluster:
            assert dropped == [GetHello]
            assert cluster.pull("rank") == {0: 0}

    def test_so_is_what_is_dropped_on_the_channel_of_the_cells(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clients: list[Any] = []
        dropped: set[str] = set()
        evaluate = private.evaluate

        def drop_the_first(client: Any, uuid: str, expression: str) -> Any:
            if clients:
                return evaluate(client, uuid, expression)
            clients.append(client)
            future: Any = evaluate(client, "not connected", expression)
            dropped.add(future.msg_id)
            return future

        monkeypatch.setattr(private, "evaluate", drop_the_first)
        monkeypatch.setattr(installation, "AGAIN_CELLS", 0.5)
        with Cluster.start(2) as cluster:
            assert cluster.pull("rank") == {0: 0, 1: 1}
            what = "the end of every other request"
            until(lambda: clients[0].outstanding <= dropped, WAIT, what)
