"""A controller and its engines: started and ended with ipyparallel."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import IO, Any, TypeVar

import ipyparallel
from ipyparallel.cluster.launcher import BatchSystemLauncher

from rankscope.backends.thread_start import start_thread

from ..errors import ClusterStartError
from ..wire import ipyparallel_private as private
from .engine_launcher import ForkedEngineSetLauncher
from .engine_registration import last_log_lines, wait_for_engines
from .files import folder_error, remove
from .host_names import joined_errors, joined_names
from .hosts import Hosts
from .keeper_main import KEPT, hold
from .launched_processes import LaunchedProcesses
from .leashed import of_this_process
from .local_host import LocalHost
from .processes import is_stopped, send_signal, wait_gone, with_descendants

__all__ = ["Launched"]

T = TypeVar("T")

#: Seconds between SIGTERM and SIGKILL at shutdown.
GRACE = 2.0
#: Seconds that ipyparallel gets to stop what runs elsewhere.
STOP_TIMEOUT = 60.0
#: Seconds between two looks at a job that is pending.
_POLL = 0.5


class Launched(LaunchedProcesses):
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
        super().__init__(asyncio.new_event_loop())
        self._thread = start_thread("launcher", self._loop.run_forever)
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
        """The kernel's folder of the thread that starts processes, until `close`."""
        return f"/proc/{os.getpid()}/task/{self._thread.native_id}"

    # -- starting ----------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def reserve(self, progress: Callable[[str], None]) -> None:
        """Wait for the nodes of a job of Slurm, as long as that takes."""
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
        """Start the controller and `n` engines (or the hosts'); return a client."""
        with self.until_started:
            if self.hosts is not None and not self.hosts.is_local:
                looks = asyncio.run_coroutine_threadsafe(
                    self.hosts.give_up_unreachable(), self._loop
                )
                self.until_started.callback(looks.cancel)
            return self._start(n, timeout, progress)

    def _start(
        self, n: int | None, timeout: float, progress: Callable[[str], None]
    ) -> ipyparallel.Client:
        deadline = time.monotonic() + timeout
        step = "connecting to the hosts"
        try:
            if isinstance(self.hosts, LocalHost):
                assert n is not None
                self.hosts.ranks = {self.hosts.name: n}
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
            if isinstance(error, FileNotFoundError) and "/" not in str(error.filename):
                raise ClusterStartError(
                    f"{step}: there is no {error.filename} on this host, which "
                    f"{self.cluster.engine_launcher_class.__name__} runs: run the "
                    "notebook where jobs are submitted from, as on a login node"
                ) from error
            raise folder_error(error, self.cluster.profile_dir) or ClusterStartError(
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
        errors: dict[str, str] = {}
        try:
            for done in concurrent.futures.as_completed([*waiting], _left(deadline)):
                name = waiting.pop(done)
                try:
                    found = done.result()
                except ClusterStartError as error:
                    errors[name] = str(error).removeprefix(f"{name}: ")
                    said = "no connection"
                else:
                    said = f"connected (Python {found['python']})"
                left = joined_names([*waiting.values()])
                progress(f"{name}: {said}{left and f'; waiting for {left}'}")
        except (TimeoutError, concurrent.futures.TimeoutError):
            for name in waiting.values():
                errors[name] = f"no answer in time: {hosts.silent_hosts([name])}"
        finally:
            for future in waiting:
                future.cancel()
        if errors:
            in_order = {name: errors[name] for name in hosts.ranks if name in errors}
            raise ClusterStartError(joined_errors(in_order))
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
        servers = {} if self.hosts is None else self.hosts.servers
        silent = [name for name, one in servers.items() if one.owes_answer]
        if self.hosts is None or not silent:
            return ""
        return f": no answer of {', '.join(silent)}: {self.hosts.silent_hosts(silent)}"

    # -- stopping ----------------------------------------------------------

    def stop(self) -> None:
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


async def _call(make: Callable[[], T]) -> T:
    return make()
