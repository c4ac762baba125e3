"""Starting and stopping controller and engines, with ipyparallel's launchers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import LocalProcessLauncher
from traitlets import TraitError
from traitlets.config import Config

from . import private
from .errors import ClusterStartError
from .guardian import Guardian

__all__ = ["Launched", "launcher_names"]

T = TypeVar("T")

# ipyparallel would print these into the notebook; whoever wants them adds a
# handler.
_log = logging.getLogger("rankscope.engines.launch")
_log.propagate = False
_log.addHandler(logging.NullHandler())

#: Milliseconds between two beats of the hub, which lets a new engine in only
#: after a beat: with its default of 3,000 a start takes seconds longer.
HEARTBEAT = 250
#: Beats an engine may miss: half a minute, as ipyparallel has it.
MISSES = 120
#: Seconds between SIGTERM and SIGKILL at shutdown.
GRACE = 2.0
#: Lines of a log that go into an error message.
LOG_LINES = 20

_CONTROLLER_ARGS: dict[str, object] = {
    "HeartMonitor.period": HEARTBEAT,
    "HeartMonitor.max_heartmonitor_misses": MISSES,
    # The hub would keep every cell's code, arrays and outputs for ever.
    "IPController.db_class": "NoDB",
    # Messages carry the key of the ranks' store: encrypt, not only sign.
    "IPController.enable_curve": True,
}

OnExit = Callable[[int, int | None], None]


def launcher_names() -> list[str]:
    """Return the names that ``engines=`` takes here."""
    found = entry_points(group="ipyparallel.engine_launchers")
    return sorted({one.name for one in found})


class Launched:
    """An `ipyparallel.Cluster` on an event loop and thread of its own.

    ipyparallel's launchers report to the event loop they were made on. One
    that always runs, and is not the notebook's, makes the end of an engine
    known while the notebook's main thread waits in a cell.
    """

    def __init__(self, cluster: ipyparallel.Cluster) -> None:
        self.cluster = cluster
        self._on_exit: OnExit | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rankscope-launcher", daemon=True
        )
        self._thread.start()

    # -- making one --------------------------------------------------------

    @classmethod
    def prepare(
        cls,
        engines: str,
        profile: str | None,
        cluster_id: str | None,
    ) -> Launched:
        """Make a cluster that is not started yet.

        Raises `ClusterStartError` for a launcher or profile that is not there.
        """
        config = Config()
        # One engine at a time, 0.1 s apart, is the default.
        config.LocalEngineSetLauncher.delay = 0
        if engines.lower() == "mpi":
            _configure_mpi(config)
        options: dict[str, Any] = {
            "engines": engines,
            "cluster_id": cluster_id or f"rankscope-{secrets.token_hex(6)}",
            "config": config,
            "log": _log,
            "delay": 0,
            # Ending it is our part: see Cluster.shutdown and the guardian.
            "shutdown_atexit": False,
        }
        if profile is not None:
            options["profile"] = profile
        try:
            cluster = ipyparallel.Cluster(**options)
        except TraitError as error:
            raise ClusterStartError(
                f"engines={engines!r}: no such launcher here; there are "
                f"{', '.join(launcher_names())}"
            ) from error
        given = " ".join(cluster.controller_args)
        cluster.controller_args = [
            *(f"--{k}={v}" for k, v in _CONTROLLER_ARGS.items() if k not in given),
            *cluster.controller_args,
        ]
        return cls(cluster)

    # -- starting ----------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine of the cluster on its loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` on the loop's thread after `seconds`."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)

    def start(
        self,
        n: int,
        timeout: float,
        progress: Callable[[str], None],
        guardian: Guardian | None,
    ) -> ipyparallel.Client:
        """Start the controller and `n` engines; return a client that sees them all.

        Raises `ClusterStartError` with the last log lines if it does not come
        up within `timeout` seconds, or sooner when it is clear that it won't.
        """
        deadline = time.monotonic() + timeout
        try:
            progress("starting the controller")
            self.run(self.cluster.start_controller(), timeout)
            self._guard(guardian)
            progress(f"starting {n} engines")
            self.run(self.cluster.start_engines(n), timeout)
            self._guard(guardian)
            client = self.run(self.cluster.connect_client(), timeout)
        except Exception as error:
            raise ClusterStartError(
                f"the cluster did not start: {type(error).__name__}: {error}"
                f"{self.last_words()}"
            ) from error
        try:
            self.wait_for_engines(client, n, deadline, progress)
        except BaseException:
            client.close(linger=0)
            raise
        return client

    def _guard(self, guardian: Guardian | None) -> None:
        if guardian is not None:
            guardian.watch([one.pid for one in self.processes()], self.files())

    def start_engines(
        self,
        client: ipyparallel.Client,
        n: int,
        timeout: float,
        progress: Callable[[str], None],
    ) -> list[int]:
        """Start `n` more engines; return their ids."""
        before = set(client.ids)
        deadline = time.monotonic() + timeout
        progress(f"starting {n} engines")
        self.run(self.cluster.start_engines(n), timeout)
        self.wait_for_engines(client, n, deadline, progress, before)
        return sorted(set(client.ids) - before)

    def wait_for_engines(
        self,
        client: ipyparallel.Client,
        n: int,
        deadline: float,
        progress: Callable[[str], None],
        before: Iterable[int] = (),
    ) -> None:
        """Wait until the client sees `n` engines beside those `before`."""
        known = set(before)
        here: set[int] = set()
        came = threading.Event()
        cancel = private.on_notification(client, lambda event: came.set())
        try:
            while True:
                came.clear()
                now_here = set(client.ids) - known
                if now_here != here:
                    here = now_here
                    progress(f"{len(here)} of {n} engines are there")
                if len(here) >= n:
                    return
                self._raise_if_hopeless(n, len(here))
                if time.monotonic() > deadline:
                    raise ClusterStartError(
                        f"only {len(here)} of {n} engines came up in time"
                        f"{self.last_words()}"
                    )
                came.wait(0.2)
        finally:
            cancel()

    def _raise_if_hopeless(self, n: int, here: int) -> None:
        for engine_set in self.cluster.engines.values():
            ended = (engine_set.stop_data or {}).get("engines")
            if engine_set.state == "after" or (ended and here < n):
                raise ClusterStartError(
                    f"engines ended while they started ({here} of {n} came up)"
                    f"{self.last_words()}"
                )
        controller = self.cluster.controller
        if controller is not None and controller.state == "after":
            raise ClusterStartError(
                f"the controller ended: {controller.stop_data}{self.last_words()}"
            )

    def last_words(self) -> str:
        """The last lines that controller and engines logged, for a message."""
        found = []
        controller = self.cluster.controller
        if controller is not None:
            found.append(("controller", controller.get_output()))
        for engine_set in self.cluster.engines.values():
            members = getattr(engine_set, "launchers", {})
            outputs = {**getattr(engine_set, "outputs", {})}
            outputs.update({key: one.get_output() for key, one in members.items()})
            if not outputs and getattr(engine_set, "output_file", ""):
                outputs["set"] = engine_set.get_output()
            found += [(f"engine {key}", text) for key, text in outputs.items()]
        words = ""
        for name, text in found:
            lines = (text or "").strip().splitlines()[-LOG_LINES:]
            if lines:
                words += f"\n--- {name}, last lines of its log\n" + "\n".join(lines)
        return words

    # -- the processes of this machine -------------------------------------

    def watch(self, on_exit: OnExit) -> None:
        """Call ``on_exit(pid, exit_code)`` when an engine of this machine ends.

        It runs on this object's thread; ``exit_code`` is negative for a
        signal. To be called again when engines were added.
        """
        self._on_exit = on_exit

        def watch() -> None:
            for launcher in self._engine_launchers():
                if self._notice not in launcher.stop_callbacks:
                    launcher.on_stop(self._notice)

        self._loop.call_soon_threadsafe(watch)

    def _notice(self, stop_data: dict[str, Any]) -> None:
        code = stop_data.get("exit_code")
        assert self._on_exit is not None
        self._on_exit(stop_data["pid"], code if isinstance(code, int) else None)

    def _engine_launchers(self) -> list[LocalProcessLauncher]:
        """The launchers that run one engine each, on this machine."""
        return [
            launcher
            for engine_set in self.cluster.engines.values()
            for launcher in getattr(engine_set, "launchers", {}).values()
            if type(launcher).__name__ == "LocalEngineLauncher"
        ]

    def runs(self, pid: int) -> bool:
        """Whether `pid` is an engine whose end this object hears of itself."""
        return any(launcher.pid == pid for launcher in self._engine_launchers())

    @property
    def is_local(self) -> bool:
        """Whether everything that was started runs on this machine."""
        return type(self.cluster.controller).__name__.startswith("Local") and all(
            type(one).__name__ in ("LocalEngineSetLauncher", "MPIEngineSetLauncher")
            for one in self.cluster.engines.values()
        )

    def processes(self) -> list[psutil.Process]:
        """The processes of this machine that the cluster consists of, by now."""
        launchers: list[Any] = [self.cluster.controller, *self._engine_launchers()]
        launchers += self.cluster.engines.values()
        found: dict[int, psutil.Process] = {}
        for launcher in launchers:
            process = None if launcher is None else private.process_of(launcher)
            if process is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (process, *process.children(recursive=True)):
                    found.setdefault(one.pid, one)
        return list(found.values())

    def files(self) -> list[str]:
        """The files that must not stay behind."""
        controller = self.cluster.controller
        connection = controller.connection_files.values() if controller else ()
        # The hub writes its engines down, to no use, and leaves the file there.
        log_dir = Path(self.cluster.profile_dir, "log")
        engines = log_dir / f"engines{self.cluster.cluster_id}.json"
        return [self.cluster.cluster_file, *connection, str(engines)]

    # -- stopping ----------------------------------------------------------

    def stop(self, others: Iterable[int] = ()) -> None:
        """End controller and engines, and the processes `others`, for good."""
        mine = {one.pid: one for one in self.processes()}
        for pid in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                mine.setdefault(pid, psutil.Process(pid))
        leaders = {
            process.pid
            for launcher in (self.cluster.controller, *self._engine_launchers())
            if launcher is not None
            and (process := private.process_of(launcher)) is not None
        }
        leading = [mine[pid] for pid in leaders if pid in mine]
        for process in leading:
            _signal(process, signal.SIGTERM)
        _wait_gone(leading, GRACE)
        # The controller's schedulers end with it. The engines' nannies would
        # wait for seconds to tell a controller that is gone.
        for process in mine.values():
            _signal(process, signal.SIGKILL)
        _wait_gone(mine.values(), GRACE)
        try:
            # What is left is bookkeeping, and what runs elsewhere.
            self.run(self.cluster.stop_cluster(), None if not self.is_local else 5.0)
        finally:
            for path in self.files():
                Path(path).unlink(missing_ok=True)
            self.close()

    def kill(self, pid: int) -> None:
        """End one engine of this machine: SIGTERM, SIGKILL a second later."""
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            return
        _signal(process, signal.SIGTERM)
        if not _wait_gone([process], 1.0):
            _signal(process, signal.SIGKILL)
            _wait_gone([process], GRACE)

    def close(self) -> None:
        """End the loop and its thread; what was started runs on."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _signal(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _wait_gone(processes: Iterable[psutil.Process], timeout: float) -> bool:
    """Wait until all `processes` ended, at most `timeout` seconds; say whether."""
    deadline = time.monotonic() + timeout
    living = list(processes)
    # Not psutil.wait_procs: it waits for each in turn, and for ever for a
    # zombie whose parent does not ask.
    while living := [one for one in living if _lives(one)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _configure_mpi(config: Config) -> None:
    """Find mpiexec, and set what Open MPI needs to run and to survive a death."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    mpiexec = shutil.which("mpiexec", path=path)
    if mpiexec is None:
        raise ClusterStartError(
            "engines='mpi': no mpiexec found beside this Python or on PATH; install "
            "one with: pip install 'rankscope[mpi]'"
        )
    config.MPILauncher.mpi_cmd = [mpiexec]
    said = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, check=False
    ).stdout
    if "Open MPI" not in said and "OpenRTE" not in said:
        return
    config.MPILauncher.mpi_args = ["--oversubscribe", "--with-ft", "ulfm"]
    config.MPILauncher.environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
