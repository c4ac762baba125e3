"""Clusters come up, end, are kept, found again, and outlive nobody they should not."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.stores.process_end import process_start_time
from rankscope.engines import Cluster, ClusterError, ClusterStartError
from rankscope.engines.launch.cluster_file import ClusterFile
from rankscope.engines.launch.clusters import prepare
from rankscope.engines.status import Summary

pytestmark = pytest.mark.processes

WAIT = 30

#: A notebook kernel in small: owns a cluster, says who belongs to it, waits.
OWNER = """
import json, sys
from rankscope.engines import Cluster
cluster = Cluster.start(**json.loads(sys.argv[1]))
cluster.execute("x = rank * 10").result(30)
processes = cluster._launched.processes()
print(json.dumps({
    "id": cluster.cluster_id,
    "pids": [p.pid for p in processes],
    "controller": cluster._launched.controller_pid,
    "server": cluster._launched.fork_servers()[0].pid,
    "files": cluster._launched.files(),
}), flush=True)
sys.stdin.readline()
"""


#: Is killed at a step of the start of a cluster that is to outlive it.
SHORT_LIVED = """
import os, signal, sys
from rankscope.engines import Cluster
def progress(text):
    if text.startswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
Cluster(2, keep=True, progress=progress)
"""


#: What the controller of a killed owner does at its end.
CLEAN = """
import sys
from rankscope.engines.launch import controller_main
controller_main._clean(*sys.argv[1:])
"""


class Owner:
    """A process that owns a cluster."""

    def __init__(self, n: int = 1, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, json.dumps({"n": n, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the owner ended with {self.process.wait()}"
        self.said: dict[str, Any] = json.loads(line)
        self.born = {pid: process_start_time(pid) for pid in self.said["pids"]}

    def living(self) -> list[int]:
        """Which of the cluster's processes live."""
        return [
            pid for pid, born in self.born.items() if process_start_time(pid) == born
        ]

    def leave(self) -> None:
        """Let the owner reach its end."""
        self.process.communicate("\n", timeout=WAIT)

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.usefixtures("no_leaks")
class TestBadInput:
    def test_the_class_and_start_take_the_same_options(self) -> None:
        called, start = inspect.signature(Cluster), inspect.signature(Cluster.start)
        assert called.parameters == start.parameters

    @pytest.mark.parametrize("n", [0, -1, 1.5, "4", True, None])
    def test_a_number_of_ranks_that_is_none(self, n: Any) -> None:
        for start in (Cluster.start, Cluster):
            with pytest.raises(ClusterError, match="a whole number from 1"):
                start(n)

    def test_an_unknown_launcher(self) -> None:
        with pytest.raises(
            ClusterStartError, match=r"'quantum'.*there are .*local.*mpi"
        ):
            Cluster.start(1, engines="quantum")

    @pytest.mark.parametrize("backend", ["cpu:tcp,cpu:mpi", "cpu:", "carrier-pigeon"])
    def test_a_backend_that_cannot_be(self, backend: str) -> None:
        with pytest.raises(ValueError, match="backend"):
            Cluster.start(1, backend=backend)

    def test_mpi_without_mpiexec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda *args, **options: None)
        with pytest.raises(ClusterStartError, match="no mpiexec found"):
            Cluster.start(1, engines="mpi")

    def test_engines_that_cannot_start(self, tmp_path: Path) -> None:
        profile = Path(os.environ["IPYTHONDIR"], "profile_broken")
        profile.mkdir(parents=True)
        config = "c.LocalEngineLauncher.engine_args = ['--no-such-option=1']\n"
        profile.joinpath("ipcluster_config.py").write_text(config)
        Path(profile, "ipengine_config.py").write_text("raise SystemExit('no engine')")
        with pytest.raises(ClusterStartError, match="engines ended while") as raised:
            Cluster.start(1, profile="broken", start_timeout=WAIT)
        assert "last lines of its log" in str(raised.value)

    @pytest.mark.parametrize(
        ("launcher", "why"),
        [
            ("ssh", "SSHEngineSetLauncher has started no engine, since its config"),
            (
                "pbs",
                "starting 1 engines: there is no qsub on this host, which "
                "PBSEngineSetLauncher runs: run the notebook where jobs are submitted",
            ),
        ],
    )
    def test_a_launcher_that_starts_none(
        self,
        launcher: str,
        why: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        # ipyparallel writes what it would submit here.
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ClusterStartError, match=f"^{why}"):
            Cluster.start(1, engines=launcher)
        assert not [one for one in caplog.records if one.levelno > logging.WARNING]

    def test_too_little_time(self) -> None:
        with pytest.raises(ClusterStartError, match="not done after 0.2 s"):
            Cluster.start(2, start_timeout=0.2)

    def test_nothing_to_attach_to(self, tmp_path: Path) -> None:
        with pytest.raises(ClusterError, match="no cluster with id 'nope' runs under"):
            Cluster.attach(cluster_id="nope")
        with pytest.raises(ClusterError, match="there is no connection file"):
            Cluster.attach(connection_file=str(tmp_path / "none.json"))

    def test_a_cluster_that_was_killed_is_not_offered(self) -> None:
        security = Path(os.environ["IPYTHONDIR"], "profile_left", "security")
        security.mkdir(parents=True)
        with subprocess.Popen(["true"]) as ended:
            pass
        for name, pid in (("gone", ended.pid), ("runs", os.getpid())):
            state = {"controller": {"state": {"pid": pid}}}
            (security / f"cluster-{name}.json").write_text(json.dumps(state))
        with pytest.raises(ClusterError, match=r"_left; there are 'runs'$"):
            Cluster.attach(profile="left", cluster_id="nope")


@pytest.mark.usefixtures("no_leaks")
class TestTheEnd:
    def test_the_last_picture_is_of_the_end(self) -> None:
        with Cluster.start(1) as cluster:
            cluster.execute("dist.all_reduce(np.ones(2))").result(WAIT)
        (group,) = cluster.glance().ranks[0].groups
        assert not group.in_flight
        assert group.completed is not None

    def test_everything_is_gone(self) -> None:
        said: list[str] = []
        cluster = Cluster(2, progress=said.append)
        assert said[0] == "starting the controller"
        assert said[-1] == "2 ranks are ready"
        launched = cluster._launched
        assert launched is not None
        born = {one.pid: process_start_time(one.pid) for one in launched.processes()}
        assert len(born) >= 6  # controller, schedulers, two engines
        running = cluster.execute("import threading\nthreading.Event().wait()")
        cluster.shutdown()
        assert [
            pid for pid, when in born.items() if process_start_time(pid) == when
        ] == []
        assert [path for path in launched.files() if Path(path).exists()] == []
        assert running.done
        assert running.errors[1].ename == "ClusterShutDown"
        cluster.shutdown()
        with pytest.raises(ClusterError, match="is shut down: start another"):
            cluster.execute("1")
        assert cluster.status().state == "stopped"

    def test_an_owner_that_ends_takes_its_cluster_along(self) -> None:
        owner = Owner()
        owner.leave()
        assert owner.living() == []
        assert [path for path in owner.said["files"] if Path(path).exists()] == []

    def test_a_controller_that_a_profile_names_ends_with_its_owner(self) -> None:
        profile = Path(os.environ["IPYTHONDIR"], "profile_own")
        profile.mkdir(parents=True)
        command = [sys.executable, "-B", "-m", "ipyparallel.controller"]
        profile.joinpath("ipcluster_config.py").write_text(
            f"c.LocalControllerLauncher.controller_cmd = {command}"
        )
        owner = Owner(profile="own")
        controller = psutil.Process(owner.said["controller"])
        assert controller.cmdline()[: len(command)] == command
        owner.kill()
        until(lambda: not owner.living(), WAIT, "controller and engines to end")

    @pytest.mark.parametrize("first", ["controller", "server"])
    def test_an_owner_that_is_killed_with_another_process(self, first: str) -> None:
        owner = Owner(2)
        left = [path for path in owner.said["files"] if Path(path).exists()]
        assert {Path(path).suffix for path in left} == {".json", ".log"}
        os.kill(owner.said[first], signal.SIGKILL)
        owner.kill()
        until(lambda: not owner.living(), WAIT, "controller and engines to end")
        if first == "controller":
            # It removes the files otherwise, and so does the next start.
            prepare("local", None, None, keep=False).close()
        assert [path for path in left if Path(path).exists()] == []
        assert not ClusterFile.load_all()

    def test_a_killed_owner_takes_its_cluster_along_and_no_other(self) -> None:
        owner = Owner()
        assert len(owner.living()) == len(owner.born) >= 4
        with Cluster.start(2) as cluster:
            assert cluster.cluster_id != owner.said["id"]
            waiting = "x = 1\nimport threading\nthreading.Event().wait(0.5)\nx"
            cell = cluster.execute(waiting)
            owner.kill()
            cell.result(WAIT)
            until(lambda: not owner.living(), WAIT, "the other cluster to end")
            assert [path for path in owner.said["files"] if Path(path).exists()] == []
            (file,) = ClusterFile.load_all()
            assert file.cluster_id == cluster.cluster_id
            again = cluster.execute("x + rank").result(WAIT)
            assert again.outputs(1)[0]["data"]["text/plain"] == "2"
            assert cluster.status().dead == []

            child = os.fork()
            if child == 0:
                # It has every descriptor and atexit function of ours, and
                # must not end its parent's cluster.
                cluster._at_exit()
                os._exit(0)
            os.waitpid(child, 0)
            cluster.execute("rank").result(WAIT)


@pytest.mark.usefixtures("no_leaks")
class TestKeepAndAttach:
    @pytest.fixture
    def kept(self) -> Iterator[Owner]:
        owner = Owner(2, keep=True, cluster_id="kept")
        yield owner
        for pid in owner.living():
            os.kill(pid, signal.SIGKILL)

    def test_a_kept_cluster_is_found_as_it_was(self, kept: Owner) -> None:
        kept.kill()
        with pytest.raises(ClusterStartError, match="'kept' runs already: attach"):
            Cluster.start(1, cluster_id="kept")
        with Cluster.attach(cluster_id="kept") as cluster:
            assert not cluster.owned
            assert cluster.pull("x") == {0: 0, 1: 10}
            groups = cluster.status().ranks[1].groups
            assert [(one.name, one.ranks) for one in groups] == [("default", (0, 1))]
            cluster.execute("x += 1").result(WAIT)
        assert len(kept.living()) == len(kept.born)

        # Once more, while a cell blocks the ranks, and to the end this time.
        with Cluster.attach() as cluster:
            go_on = "import threading\nthreading.Event().wait()"
            cluster.execute(go_on)
            until(lambda: _busy(cluster), WAIT, "the ranks to block")
        cluster = Cluster.attach(attach_timeout=WAIT)
        assert _busy(cluster)
        assert cluster.interrupt() == [0, 1]
        assert cluster.pull("x") == {0: 1, 1: 11}
        cluster.restart([1])
        assert cluster.pull("x", 0) == {0: 1}
        cluster.shutdown()
        until(lambda: not kept.living(), WAIT, "the cluster to end")

    @pytest.mark.parametrize("step", ["starting 2 engines", "2 of 2", "making"])
    def test_one_whose_owner_is_killed_before_it_is_ready_ends(self, step: str) -> None:
        """The check for leaks looks that nothing of it is left."""
        owner = subprocess.run([sys.executable, "-c", SHORT_LIVED, step], check=False)
        assert owner.returncode == -signal.SIGKILL

    def test_one_known_by_nothing_but_its_connection_file(self, kept: Owner) -> None:
        kept.kill()
        files = [Path(one) for one in kept.said["files"]]
        (clusters,) = (one for one in files if one.name.startswith("cluster-"))
        (clients,) = (one for one in files if one.name.endswith("-client.json"))
        clusters.unlink()
        cluster = Cluster.attach(connection_file=str(clients))
        assert cluster.cluster_id == "kept"
        assert cluster.pull("x") == {0: 0, 1: 10}
        with pytest.raises(ClusterError, match="launchers are not known here"):
            cluster.restart([0])
        os.kill(cluster.pids[1], signal.SIGKILL)
        until(lambda: cluster.status().dead == [1], WAIT, "the death to be noticed")
        assert cluster.status().ranks[1].reason == (
            f"rank 1 is dead: its process ended (engine 1, pid {cluster.pids[1]} on "
            f"{cluster.status().ranks[1].host})"
        )
        cluster.close()
        # Who comes later finds an empty seat.
        cluster = Cluster.attach(connection_file=str(clients))
        assert cluster.status().dead == [1]
        assert cluster.execute("rank").wait(WAIT)
        cluster.shutdown()
        until(lambda: not kept.living(), WAIT, "the cluster to end")

    def test_a_cluster_that_never_heard_of_rankscope(self) -> None:
        # Where a test before has made an application of Jupyter, its logger would be
        # taken, and at the level of that one threads would read the processes' output.
        log = logging.getLogger("tests.bare")
        log.setLevel(logging.CRITICAL)
        bare = ipyparallel.Cluster(n=1, cluster_id="bare", log=log)
        with bare as client:
            path = bare.controller.connection_files["client"]
            with Cluster.attach(connection_file=path) as cluster:
                cell = cluster.execute("dist.get_world_size() * 3")
                cell.result(WAIT)
                assert cell.outputs(0)[0]["data"]["text/plain"] == "3"
                engine = cluster.pids[0]
            assert client[:].apply_sync(os.getpid) == [engine]

            # How the controller of a killed owner ends what does not run here.
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    CLEAN,
                    bare.profile_dir,
                    "bare",
                    bare.cluster_file,
                ],
                check=True,
            )
            assert process_start_time(engine) is None
            assert not Path(path).exists()
            client.close(linger=0)


def _busy(cluster: Cluster) -> bool:
    return all(one.state == "busy" for one in cluster.status().ranks)


@pytest.mark.usefixtures("no_leaks")
def test_the_end_of_the_controller_is_told() -> None:
    with Cluster.start(1) as cluster:
        cell = cluster.execute("import threading\nthreading.Event().wait()")
        assert cluster._launched is not None
        controller = cluster._launched.cluster.controller.process
        told = threading.Event()

        def hear(rank: int, summary: Summary) -> None:
            if summary.dead:
                told.set()

        cluster.subscribe(hear)
        psutil.Process(controller.pid).kill()
        assert cell.wait(WAIT)
        assert "the controller" in cell.errors[0].evalue
        assert "killed by SIGKILL" in cell.errors[0].evalue
        assert told.wait(WAIT)


@pytest.mark.parametrize("engines", ["local", "spawn"])
@pytest.mark.parametrize("step", ["starting 8 engines", "of 8 engines are registered"])
def test_an_interrupt_ends_a_start_and_what_it_started(engines: str, step: str) -> None:
    before = set(psutil.Process().children(recursive=True))

    def progress(text: str) -> None:
        if step in text:
            # As Ctrl-C does, while the main thread waits.
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Cluster(8, engines=engines, progress=progress)
    until(lambda: set(psutil.Process().children(recursive=True)) <= before, WAIT)


def test_a_folder_that_is_gone_is_refused_before_a_rank_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with Cluster(2) as cluster:
        cluster.execute("x = 5").result(WAIT)
        folder.rmdir()
        for start in (lambda: cluster.restart([1]), lambda: Cluster(2)):
            with pytest.raises(ClusterStartError, match="current folder.* is gone"):
                start()
        cluster.execute("dist.barrier(); assert x == 5").result(WAIT)
        monkeypatch.chdir(tmp_path)
        cluster.restart([1])
        cluster.rebuild()
        cluster.execute("dist.barrier()").result(WAIT)
