"""Engines that are forked from one process are as those that are started one by one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest
from traitlets.config import Config

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterStartError
from rankscope.engines.launch import clusters
from rankscope.engines.wire import ipyparallel_private as private

WAIT = 30

#: Leaves what a process draws once, and what it inherits, in variables.
LOOK = """
import multiprocessing, os, random, signal, sys, tempfile, threading, uuid
drawn = [
    random.random(), np.random.rand(), uuid.uuid4().hex, uuid.uuid1().hex,
    os.path.basename(tempfile.mktemp()),
    bytes(multiprocessing.current_process().authkey),
]
pid, parent, session = os.getpid(), os.getppid(), os.getsid(0)
argv, folder, title = sys.argv, os.getcwd(), open("/proc/self/comm").read().strip()
stdin = os.readlink("/proc/self/fd/0")
dispositions = [
    repr(signal.getsignal(one))
    for one in (signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
]
product = float((np.ones((300, 300)) @ np.ones((300, 300))).sum())
main = sys.modules["__main__"].__dict__ is globals()
"""
NAMES = ("argv", "folder", "stdin", "dispositions", "product", "main")

#: Starts a process, and one that has left its parent, and its session.
STARTS = """
import subprocess
echo = ["sh", "-c", "setsid sleep 600 >&- 2>&- & echo $!"]
daemon = int(subprocess.check_output(echo))
child = subprocess.Popen(["sleep", "600"]).pid
"""

#: Imports what the fork server imports, and prints what must not be there.
PRELOAD = """
import importlib, os, sys, threading
from rankscope.engines.agent import fork_server
for name in ("ipyparallel.engine.app", *fork_server.PRELOADED):
    importlib.import_module(name)
fork_server.preload_backends()
fork_server.rehearse_error()
import stack_data
assert stack_data.style_with_executing_node.cache_info().currsize
import asyncio, tornado.ioloop, zmq
opened = []
for number in os.listdir("/proc/self/fd"):
    try:
        opened.append(os.readlink("/proc/self/fd/" + number))
    except FileNotFoundError:
        pass
maps = open("/proc/self/maps").read()
print(threading.active_count(), zmq.Context._instance, asyncio._get_running_loop(),
      tornado.ioloop.IOLoop.current(instance=False),
      [one for one in opened if "anon_inode" in one or "socket" in one],
      [one for one in ("libcuda", "libnccl", "libmpi", "pygloo") if one in maps],
      [one for one in ("cupy", "mpi4py", "torch", "nccl") if one in sys.modules])
"""


@pytest.fixture(scope="module")
def spawned() -> dict[str, object]:
    """What an engine finds that was started as ipyparallel does."""
    with Cluster.start(1, engines="spawn") as cluster:
        assert cluster._launched is not None
        (server,) = cluster._launched.fork_servers()
        (pid,) = cluster.pids.values()
        assert "ipyparallel.engine" in psutil.Process(pid).cmdline()
        assert psutil.Process(pid).ppid() == server.pid
        cluster.execute(LOOK).result(WAIT)
        return {name: cluster.pull(name, 0)[0] for name in NAMES}


@pytest.mark.usefixtures("no_leaks")
class TestForkedEngines:
    @pytest.mark.processes
    def test_each_is_a_process_of_its_own(self, spawned: dict[str, object]) -> None:
        with Cluster.start(3) as cluster:
            assert cluster._launched is not None
            (server,) = cluster._launched.fork_servers()
            cluster.execute(LOOK).result(WAIT)
            drawn = cluster.pull("drawn")
            for values in zip(*drawn.values(), strict=True):
                assert len(set(values)) == 3, values
            assert set(cluster.pull("parent").values()) == {server.pid}
            assert cluster.pull("session") == cluster.pull("pid") == cluster.pids
            assert set(cluster.pull("title").values()) == {"ipengine"}
            for name in NAMES:
                for rank, value in cluster.pull(name).items():
                    assert value == spawned[name], (rank, name)
            # A log file for each, which errors at the start are read from.
            logs = Path(cluster.profile, "log").glob(f"ipengine-{cluster.cluster_id}-*")
            assert len(list(logs)) == 3
            # Both kinds of an end are known by their number.
            cluster.execute("import os\nos._exit(3)", ranks=[1])
            cluster.execute("os.abort()", ranks=[2])
            until(lambda: cluster.status().dead == [1, 2], WAIT, "both deaths")
            reasons = [str(one.reason) for one in cluster.status().ranks]
            assert reasons[1].startswith("rank 1 is dead: exit code 3 (")
            assert reasons[2].startswith("rank 2 is dead: killed by SIGABRT")

    @pytest.mark.processes
    def test_engines_end_with_a_killed_server(self) -> None:
        with Cluster.start(2) as cluster:
            assert cluster._launched is not None
            (server,) = cluster._launched.fork_servers()
            os.kill(cluster.pids[1], signal.SIGKILL)
            until(lambda: cluster.status().dead == [1], WAIT, "the death")
            cluster.restart([1])
            first, second = cluster._launched.fork_servers()
            assert first == server
            assert second.pid == psutil.Process(cluster.pids[1]).ppid()
            server.kill()
            until(lambda: cluster.status().dead == [0], WAIT, "the end of its engine")
            reason = cluster.status().ranks[0].reason
            assert "the process that forks the ranks has ended (killed by SIG" in str(
                reason
            )
            assert cluster._launched.fork_servers() == [second]
            # Its only engine ends, and the server with it.
            os.kill(cluster.pids[1], signal.SIGTERM)
            until(lambda: not second.is_running(), WAIT, "the second server")
            cluster.restart()
            cluster.execute("dist.barrier()").result(WAIT)

    @pytest.mark.processes
    @pytest.mark.parametrize("engines", ["local", "spawn"])
    def test_what_a_rank_has_started_ends_with_the_ranks(self, engines: str) -> None:
        """Also what has left its parent, and its session."""
        with Cluster.start(1, engines=engines) as cluster:
            cluster.execute(STARTS).result(WAIT)
            pids = [cluster.pull(name, 0)[0] for name in ("daemon", "child")]
            started = [psutil.Process(pid) for pid in pids]
        assert [one for one in started if lives(one)] == []

    @pytest.mark.processes
    def test_engines_that_register_while_the_client_connects(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their announcements came before the subscription, and were lost."""
        connect = private.connect

        def connect_and_miss_all(make: Callable[..., Any]) -> Any:
            client = connect(make)
            handlers = client._notification_handlers
            handlers["registration_notification"] = lambda message: None
            return client

        monkeypatch.setattr(private, "connect", connect_and_miss_all)
        with Cluster.start(2, start_timeout=WAIT) as cluster:
            cluster.execute("rank").result(WAIT)

    @pytest.mark.processes
    def test_a_server_that_cannot_start(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(
            "rankscope.engines.launch.fork_servers.MODULE", "rankscope.nowhere"
        )
        with pytest.raises(ClusterStartError) as raised:
            Cluster.start(1)
        said = "its fork server ended with 1: `"
        assert f"{said}{sys.executable} -m rankscope doctor` has" in str(raised.value)
        assert "No module named rankscope.nowhere" in str(raised.value)
        # No engine is waited for that was never forked.
        assert "could not all be ended" not in caplog.text


@pytest.mark.processes
def test_nothing_is_open_before_the_fork() -> None:
    """No thread, ZeroMQ context, event loop or socket, and no library of a backend."""
    found = subprocess.run(
        [sys.executable, "-c", PRELOAD],
        env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "1 None None None [] [] []\n"


@pytest.mark.parametrize("section", ["EngineLauncher", "LocalEngineSetLauncher"])
@pytest.mark.parametrize(
    "options",
    [{"engine_cmd": ["nice", "python"]}, {"environment": {"OMP_NUM_THREADS": "1"}}],
)
def test_a_profile_with_its_own_command_gets_plain_processes(
    section: str, options: dict[str, object]
) -> None:
    config = Config({section: options})
    plain = ipyparallel.Cluster(config=config, load_profile=False)
    assert not clusters._can_fork(plain)
    plain = ipyparallel.Cluster(config=Config(), load_profile=False)
    assert clusters._can_fork(plain)
