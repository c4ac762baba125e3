"""A controller and its engines: started, watched and ended with ipyparallel."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import IO, Any, TypeVar

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import (
    BatchSystemLauncher,
    LocalEngineLauncher,
    LocalEngineSetLauncher,
    MPIEngineSetLauncher,
)

from ..errors import ClusterError, ClusterStartError
from ..wire import ipyparallel_private as private
from .engine_launcher import ForkedEngineLauncher, ForkedEngineSetLauncher
from .engine_registration import last_log_lines, wait_for_engines
from .files import files_of, remove
from .hosts import Hosts
from .keeper_main import KEPT, hold
from .leashed import of_this_process
from .local_host import LocalHost
from .processes import is_stopped, lives, send_signal, wait_gone, with_descendants

__all__ = ["Launched"]

T = TypeVar("T")

#: Seconds between SIGTERM and SIGKILL at shutdown.
GRACE = 2.0
#: Seconds that ipyparallel gets to stop what runs elsewhere.
STOP_TIMEOUT = 60.0
#: Seconds between two looks at a job that is pending.
_POLL = 0.5

#: Launchers whose processes of this machine are all that has to be ended.
_LOCAL = (
    LocalEngineSetLauncher,
    ForkedEngineSetLauncher,
    MPIEngineSetLauncher,
)

OnExit = Callable[[int, int | None], None]
#: Called with pid, exit code (negative for a signal, ``None``: not known), the name of
#: the host (``None``: not known), and why the engine has ended where that is known.
OnEngineExit = Callable[[int, int | None, str | None, str | None], None]


class Launched:
    """An `ipyparallel.Cluster` on an event loop and thread of its own.

    ipyparallel's launchers report to the event loop they were made on. This loop
    always runs, so that the end of an engine is reported also while the notebook's
    main thread is blocked in a cell.

    If this process is killed, the cluster ends: the controller and mpiexec get a signal
    from the kernel, and the `hosts` end with the pipe to them. A `kept` one until it is
    ready.
    """

    def __init__(
        self, make: Callable[[], ipyparallel.Cluster], *, kept: bool = True
    ) -> None:
        self._kept = kept
        # What keeps the controller of hosts that are kept, beside their keepers.
        self._held: IO[bytes] | None = None
        #: What the cluster needs until its engines are there.
        self.until_started = contextlib.ExitStack()
        #: The hosts that engines are started on, by their fork servers; ``None``:
        #: ipyparallel starts them.
        self.hosts: Hosts | None = None
        self._on_exit: OnEngineExit | None = None
        self._on_controller_exit: OnExit | None = None
        # What `_on_exit` was called with, by identity: pids are given again.
        self._reported: dict[int, dict[str, Any]] = {}
        # Engines that another process started, which end with the others.
        self._adopted: list[psutil.Process] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rankscope-launcher", daemon=True
        )
        self._thread.start()
        try:
            # On the loop's thread: launchers keep the loop that they were made on.
            self.cluster = self.run(_call(make))
            self._find_hosts()
        except BaseException:
            self.close()
            raise

    def _find_hosts(self) -> None:
        """Take the hosts of a cluster that another process has kept."""
        for engine_set in self.cluster.engines.values():
            if isinstance(engine_set, ForkedEngineSetLauncher):
                self.hosts = engine_set.hosts
        if self.hosts is not None:
            self._hold()
            if self.hosts.job is not None:
                self.run(_call(self.hosts.job.watch))

    def _hold(self) -> None:
        """Keep the controller of kept hosts for as long as this process lives."""
        if self._held is None and self.controller_pid is not None:
            held = hold(self.controller_pid)
            if held is not None:
                self._held = of_this_process(os.fdopen(held, "wb", 0))

    def keep(self) -> None:
        """Have a cluster that is kept outlive this process, as it is ready now."""
        if not self._kept:
            return
        if self.hosts is not None and self.hosts.kept:
            self._hold()
            self.hosts.keep(self.controller_pid)
        elif self.controller_pid is not None:
            held = hold(self.controller_pid, KEPT)
            if held is not None:
                os.close(held)

    @property
    def thread(self) -> str:
        """The kernel's folder of the thread that starts processes.

        It lives as long as this process, or until `close`.
        """
        return f"/proc/{os.getpid()}/task/{self._thread.native_id}"

    # -- starting ----------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine of the cluster on its loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def reserve(self, progress: Callable[[str], None]) -> None:
        """Wait for the nodes of a job of Slurm, as long as that takes.

        To be called before `start`.
        """
        if self.hosts is None or self.hosts.job is None:
            return
        job = self.hosts.job
        self.run(_call(job.prepare))
        waiting = asyncio.run_coroutine_threadsafe(self.hosts.reserve(), self._loop)
        try:
            while not concurrent.futures.wait([waiting], _POLL).done:
                progress(self.run(job.pending()))
            waiting.result()
        finally:
            waiting.cancel()
        progress(f"job {job.id}: {', '.join(self.hosts.ranks)}")

    def start(
        self, n: int | None, timeout: float, progress: Callable[[str], None]
    ) -> ipyparallel.Client:
        """Start the controller and `n` engines; return a client of them.

        Without `n` as many as the hosts have.

        Raises `ClusterStartError` with the last log lines if it does not come
        up within `timeout` seconds, or sooner when a process of it has ended.
        """
        with self.until_started:
            return self._start(n, timeout, progress)

    def _start(
        self, n: int | None, timeout: float, progress: Callable[[str], None]
    ) -> ipyparallel.Client:
        deadline = time.monotonic() + timeout
        step = "connecting to the hosts"
        try:
            if isinstance(self.hosts, LocalHost):
                assert n is not None
                self.hosts.place(n)
                # It imports while the controller starts.
                self.run(self.hosts.connect(self.hosts.name))
            elif self.hosts is not None:
                progress(step)
                self._connect_hosts(self.hosts, deadline, progress)
                n = len(self.hosts.names)
            assert n is not None
            step = "starting the controller"
            progress(step)
            self.run(self.cluster.start_controller(), _left(deadline))
            step = f"starting {n} engines"
            progress(step)
            started = self.run(self._fork_or_start(range(n)), _left(deadline))
            step = "connecting to the controller"
            client = private.connect(
                lambda context: self.run(
                    self.cluster.connect_client(context=context), _left(deadline)
                )
            )
        except ClusterStartError:
            raise
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise ClusterStartError(
                f"{step}: not done after {timeout:g} s{self._silent_hosts()}"
                f"{last_log_lines(self.cluster)}"
            ) from error
        except Exception as error:
            raise ClusterStartError(
                f"{step}: {type(error).__name__}: {error}{last_log_lines(self.cluster)}"
            ) from error
        try:
            wait_for_engines(self.cluster, client, n, started, deadline, progress)
        except BaseException:
            client.close(linger=0)
            raise
        return client

    def _fork_or_start(self, ranks: Sequence[int]) -> Coroutine[Any, Any, str]:
        """Return the start of engines for `ranks`, each on the host of its rank."""
        placed: dict[str, Any] = {}
        if self.hosts is not None:
            placed = {"hosts": self.hosts, "ranks": [*ranks]}
        return self.cluster.start_engines(len(ranks), **placed)

    def _connect_hosts(
        self, hosts: Hosts, deadline: float, progress: Callable[[str], None]
    ) -> None:
        """Connect to all hosts at once, and have the controller listen towards them."""
        waiting = {
            asyncio.run_coroutine_threadsafe(hosts.connect(name), self._loop): name
            for name in hosts.ranks
        }
        errors = []
        try:
            for done in concurrent.futures.as_completed([*waiting], _left(deadline)):
                name = waiting.pop(done)
                try:
                    found = done.result()
                except ClusterStartError as error:
                    errors.append(str(error))
                    progress(f"{name}: no connection")
                else:
                    progress(f"{name}: connected (Python {found['python']})")
        except (TimeoutError, concurrent.futures.TimeoutError):
            errors.append(
                f"{', '.join(waiting.values())}: no answer in time: "
                f"{hosts.silent_hosts([*waiting.values()])}"
            )
        finally:
            for future in waiting:
                future.cancel()
        if errors:
            raise ClusterStartError("\n".join(errors))
        hosts.check()
        configured = self.cluster.controller_ip
        # Hosts cannot connect to all of its addresses.
        if configured in ("", "*", "0.0.0.0") or hosts.interface is not None:
            address = hosts.address
            self.cluster.controller_ip = self.cluster.controller_location = address

    def start_engines(
        self,
        client: ipyparallel.Client,
        ranks: Sequence[int],
        timeout: float,
        progress: Callable[[str], None],
    ) -> list[int]:
        """Start engines to replace those of `ranks`; return their ids."""
        n = len(ranks)
        before = set(client.ids)
        deadline = time.monotonic() + timeout
        progress(f"starting {n} engines")
        try:
            started = self.run(self._fork_or_start(ranks), timeout)
        except (TimeoutError, concurrent.futures.TimeoutError):
            hosts = self.hosts.names if self.hosts is not None else []
            where = sorted({hosts[rank] for rank in ranks} if hosts else ())
            on = f" on {', '.join(where)}" if where else ""
            raise ClusterStartError(
                f"starting {n} engines{on}: not done after {timeout:g} s"
                f"{self._silent_hosts()}"
            ) from None
        wait_for_engines(self.cluster, client, n, started, deadline, progress, before)
        self.keep()
        return sorted(set(client.ids) - before)

    def _silent_hosts(self) -> str:
        silent = [] if self.hosts is None else self.hosts.silent()
        return f": no answer of {', '.join(silent)}" if silent else ""

    # -- the processes of this machine -------------------------------------

    def watch(self, on_exit: OnEngineExit, on_controller_exit: OnExit) -> None:
        """Call ``on_exit(pid, exit_code, host, why)`` when an engine ends.

        Of an engine with a launcher of its own. The callback runs on this object's
        thread. Call `watch` again after engines were added.
        """
        self._on_exit = on_exit

        def watch() -> None:
            for engine_set in self.cluster.engines.values():
                # The launcher of an engine that ended is gone.
                ended = (engine_set.stop_data or {}).get("engines", {})
                for stop_data in ended.values():
                    if id(stop_data) not in self._reported:
                        self._on_engine_stop(stop_data)
            for launcher in self._engine_launchers():
                if self._on_engine_stop not in launcher.stop_callbacks:
                    launcher.on_stop(self._on_engine_stop)
            if self._on_controller_exit is None:
                self._on_controller_exit = on_controller_exit
                self.cluster.controller.on_stop(self._on_controller_stop)

        self._loop.call_soon_threadsafe(watch)

    def _on_engine_stop(self, stop_data: dict[str, Any]) -> None:
        assert self._on_exit is not None
        self._reported[id(stop_data)] = stop_data
        self._on_exit(
            stop_data["pid"],
            _exit_code(stop_data),
            stop_data.get("host"),
            stop_data.get("why"),
        )

    def _on_controller_stop(self, stop_data: dict[str, Any]) -> None:
        assert self._on_controller_exit is not None
        self._on_controller_exit(stop_data.get("pid", -1), _exit_code(stop_data))

    def _engine_launchers(self) -> list[Any]:
        """The launchers that run one engine each."""
        return [
            launcher
            for engine_set in list(self.cluster.engines.values())
            # A copy: the loop's thread removes the launcher of an engine that ended.
            for launcher in list(getattr(engine_set, "launchers", {}).values())
            if isinstance(launcher, LocalEngineLauncher)
        ]

    def fork_servers(self) -> list[psutil.Process]:
        """The processes that the engines were forked from; some may have ended.

        Of another host it is the ssh or srun to it; where it is kept its keeper.
        """
        return [] if self.hosts is None else self.hosts.processes()

    def _launchers(self) -> list[Any]:
        """Every launcher: the controller's, engine sets' and engines'."""
        cluster = getattr(self, "cluster", None)
        if cluster is None:
            return []
        controller = [] if cluster.controller is None else [cluster.controller]
        return [*controller, *cluster.engines.values(), *self._engine_launchers()]

    @property
    def controller_pid(self) -> int | None:
        """The pid of the controller, if it runs on this machine."""
        process = private.process_of(self.cluster.controller)
        return None if process is None else process.pid

    def check_controller(self) -> None:
        """Raise `ClusterError` if the controller, which is on this machine, ended."""
        process = private.process_of(self.cluster.controller)
        if process is not None and not lives(process):
            raise ClusterError(
                f"the controller (pid {process.pid}) has ended, and engines cannot "
                "start without it: %dist_shutdown, then %dist_init starts others"
            )

    def _launcher_of(self, pid: int, host: str) -> Any:
        """Return the launcher of one engine; ``None`` if there is none."""
        here = socket.gethostname()
        for launcher in self._engine_launchers():
            if launcher.pid == pid and getattr(launcher, "host", here) == host:
                return launcher
        return None

    def has_engine(self, pid: int, host: str) -> bool:
        """Whether `pid` is an engine whose exit code `watch` will report."""
        return self._launcher_of(pid, host) is not None

    def signal_engine(self, pid: int, host: str, signum: int) -> bool:
        """Send a signal to an engine by its launcher; return whether it has one."""
        launcher = self._launcher_of(pid, host)
        if launcher is not None:
            _signal(launcher, signum)
        return launcher is not None

    def kill_engines(self, but: Iterable[tuple[int, str]]) -> bool:
        """Send SIGKILL to the engines, except those of the pids and hosts `but`.

        Returns whether the engines have a launcher each.
        """
        launchers = self._engine_launchers()
        spared = [self._launcher_of(*one) for one in but]
        for launcher in launchers:
            if launcher not in spared:
                _signal(launcher, signal.SIGKILL)
        return bool(launchers)

    @property
    def has_lost_engines(self) -> bool:
        """Whether another process has the fork servers of engines."""
        return any(
            isinstance(one, ForkedEngineSetLauncher) and one.found
            for one in self.cluster.engines.values()
        )

    @property
    def uses_mpi(self) -> bool:
        """Whether mpiexec starts the engines."""
        return self.cluster.engine_launcher_class is MPIEngineSetLauncher

    @property
    def is_local(self) -> bool:
        """Whether everything that was started runs on this machine."""
        return (
            self._has_controller_here and self.cluster.engine_launcher_class in _LOCAL
        )

    @property
    def _has_controller_here(self) -> bool:
        kind = self.cluster.controller_launcher_class
        return kind.__name__ == "LocalControllerLauncher"

    def processes(self) -> list[psutil.Process]:
        """The present processes of the cluster on this machine."""
        return [*with_descendants(self._leaders()).values()]

    def _leaders(self) -> list[psutil.Process]:
        """The processes of the cluster on this machine, without their descendants."""
        found = map(private.process_of, self._launchers())
        started = [process for process in found if process is not None]
        return [*started, *self.fork_servers(), *self._adopted]

    def adopt(self, pids: Iterable[int]) -> None:
        """End these engines of this machine, too, when the cluster ends."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._adopted.append(psutil.Process(pid))

    def files(self) -> list[str]:
        """Return the files and folders to remove with the cluster."""
        return files_of(self.cluster.profile_dir, self.cluster.cluster_id)

    # -- stopping ----------------------------------------------------------

    def stop(self) -> None:
        """End controller, engines and their descendants."""
        try:
            if self.hosts is not None:
                self.run(_call(self.hosts.close))
            if self._has_controller_here:
                self._kill_local()
            # The rest is bookkeeping, and the processes of other machines.
            self.run(self._stop_both(), STOP_TIMEOUT)
        finally:
            for path in self.files():
                remove(path)
            self.close()

    async def _stop_both(self) -> None:
        """Stop controller and engines, each whatever becomes of the other."""
        cluster = self.cluster
        for name, engine_set in list(cluster.engines.items()):
            # There is no job to cancel, as where there is no program that submits it.
            if isinstance(engine_set, BatchSystemLauncher) and not engine_set.running:
                del cluster.engines[name]
        ends = await asyncio.gather(
            cluster.stop_controller(), cluster.stop_engines(), return_exceptions=True
        )
        for error in ends:
            if isinstance(error, BaseException):
                raise error

    def _kill_local(self) -> None:
        """End what runs on this machine; of engines elsewhere it is the controller."""
        controller = private.process_of(self.cluster.controller)
        leaders = {*self._leaders()} if self.is_local else {controller} - {None}
        everything = with_descendants(leaders).values()
        for process in leaders:
            # One that is stopped would not heed SIGTERM.
            stopped = process != controller and is_stopped(process.pid)
            send_signal(process, signal.SIGKILL if stopped else signal.SIGTERM)
        wait_gone(leaders, GRACE)
        # The nannies of engines would try for seconds to notify a controller that is
        # gone.
        for process in everything:
            send_signal(process, signal.SIGKILL)
        wait_gone(everything, GRACE)

    def close(self) -> None:
        """End the loop and the threads; the processes that were started go on."""
        if self._loop.is_closed():
            return
        self.until_started.close()
        if self.hosts is not None and self.hosts.kept:
            self.run(_call(self.hosts.release))
        if self._held is not None:
            self._held.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # With the loop stopped: from what these threads report at their end,
        # ipyparallel would conclude that the cluster has ended too.
        private.stop_waiting(self._launchers())
        self._loop.close()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _exit_code(stop_data: dict[str, Any]) -> int | None:
    code = stop_data.get("exit_code")
    return code if isinstance(code, int) else None


def _signal(launcher: Any, signum: int) -> None:
    """Send a signal to the engine of a launcher, which may have ended."""
    if isinstance(launcher, ForkedEngineLauncher):
        launcher.signal(signum)
    else:
        send_signal(private.process_of(launcher), signum)


async def _call(make: Callable[[], T]) -> T:
    return make()
