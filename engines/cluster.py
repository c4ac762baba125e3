"""Cluster: ranks on engines, and everything a notebook does with them."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import ipyparallel

from rankscope.backends import BackendConfig

from . import launch, private, recovery
from .errors import ClusterError
from .gpus import Gpus, parse_devices
from .launched import Launched
from .ranks import Chosen, Ranks
from .seats import check_ranks

__all__ = ["Cluster"]

Progress = Callable[[str], None]

#: Seconds that the ranks get to say where they are before they are ended.
LAST_LOOK = 0.3
#: Seconds that a controller gets to say that it will end.
HUB_WAIT = 5.0


class Cluster(Ranks):
    """`n` ranks, each an ipyparallel engine that keeps its variables.

    Made by :meth:`start` or :meth:`attach`. Usable from any thread. As a
    context manager it ends what was started here; an attached cluster, and
    one started with ``keep=True``, runs on.
    """

    def __init__(
        self,
        client: ipyparallel.Client,
        launched: Launched | None,
        *,
        owned: bool,
        **options: Any,
    ) -> None:
        #: Whether the cluster ends with this object's process.
        self.owned = owned
        self._launched = launched
        self._process = os.getpid()
        self._ending = threading.Lock()
        super().__init__(client, **options)
        atexit.register(self._at_exit)

    # -- making one --------------------------------------------------------

    @classmethod
    def start(
        cls,
        n: int,
        *,
        engines: str | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        keep: bool = False,
        profile: str | None = None,
        cluster_id: str | None = None,
        devices: str | int | Sequence[int] = (),
        share_gpu: bool = False,
        start_timeout: float = 120,
        progress: Progress | None = None,
    ) -> Cluster:
        """Start a controller and `n` engines, with one default group over them.

        `engines` is a launcher of ipyparallel's: ``local``, ``mpi``, ``ssh``,
        ``slurm``, ...; ``None`` is ``mpi`` for a `backend` (the default one,
        too) that names MPI, whose ranks must come from mpiexec, else ``local``.
        `backend` and `timeout` (seconds) are the default
        group's, as in ``init_process_group``. With `keep` the cluster stays
        when this process ends, and `attach` finds it again. The ranks of a host
        take its GPUs in turn as their current devices; `devices` names those to
        take, as in ``[0, 2]`` or ``"0,2-3"``. NCCL refuses ranks that share a
        GPU; with `share_gpu` they may, over loopback sockets: for learning on a
        machine with one GPU, nothing measured there says anything of NCCL.
        `progress` is called with a line of text at each step.

        Raises `ValueError` for a `backend` or `devices` that cannot be, and
        `ClusterStartError`, with the last lines of the logs, if the
        cluster is not there after `start_timeout` seconds or cannot come up;
        nothing is left running then.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ClusterError(f"n={n!r}: the number of ranks, a whole number from 1")
        # Rather now than on every engine, seconds later.
        config = BackendConfig(backend)
        try:
            gpus = Gpus(parse_devices(devices), share_gpu)
        except ValueError as error:
            raise ValueError(f"devices={devices!r}: {error}") from None
        if engines is None:
            uses_mpi = "mpi" in config.device_backend_map.values()
            engines = "mpi" if uses_mpi else "local"
        private.check()
        say = progress or _silent
        deadline = time.monotonic() + start_timeout
        launched = launch.prepare(engines, profile, cluster_id, guarded=not keep)
        self = None
        try:
            client = launched.start(n, start_timeout, say)
            self = cls(
                client,
                launched,
                owned=not keep,
                cluster_id=launched.cluster.cluster_id,
                profile=launched.cluster.profile_dir,
                launcher=engines,
                backend=backend,
                timeout=timeout,
            )
            self._watch_launched()
            self._roster.gpus = gpus
            say("making the default group")
            self._store_host = recovery.seat_all(
                self._roster, sorted(client.ids), backend, timeout, deadline
            )
            self._roster.listen()
            launched.guard()
        except BaseException:
            if self is not None:
                self.shutdown()
            else:
                launched.stop()
            raise
        say(f"{n} ranks are ready")
        return self

    @classmethod
    def attach(
        cls,
        *,
        profile: str | None = None,
        cluster_id: str | None = None,
        connection_file: str | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        attach_timeout: float = 30,
        progress: Progress | None = None,
    ) -> Cluster:
        """Attach to a cluster that runs: ``ipcluster start``'s, or a kept one.

        It is found by `connection_file`, or by `cluster_id` in `profile`;
        with neither, the one of ``ipcluster start``, or the only one there
        is. Where Rankscope was before, ranks, groups and variables are as
        they were; else the agents are installed and the default group is made
        with `backend` and `timeout`. The cluster outlives this process.

        Raises `ClusterError` if it is not there, has no engines, or engines
        do not answer within `attach_timeout` seconds.
        """
        private.check()
        say = progress or _silent
        say("looking for the cluster")
        found = launch.find(profile, cluster_id, connection_file, attach_timeout)
        self = cls(
            found.client,
            found.launched,
            owned=False,
            cluster_id=found.cluster_id,
            profile=found.profile_dir,
            launcher="attached",
            backend=backend,
            timeout=timeout,
        )
        try:
            if found.launched is not None:
                self._watch_launched()
            say(f"asking {len(found.client.ids)} engines")
            self._store_host = recovery.find_or_seat(
                self._roster, backend, timeout, time.monotonic() + attach_timeout
            )
            self._roster.listen()
        except BaseException:
            self.close()
            raise
        say(f"{self.n} ranks are ready")
        return self

    def _watch_launched(self) -> None:
        assert self._launched is not None
        self._roster.expect_exit_codes(self._launched.runs)
        self._launched.watch(self._roster.exited, self._roster.controller_exited)

    @property
    def advice(self) -> str:
        """What there is to say about how the ranks were seated; mostly nothing.

        A line for each thing, such as a backend that was named and cannot be used.
        """
        return "\n".join(self._roster.advice)

    @property
    def closed(self) -> bool:
        """Whether `shutdown` or `close` was called."""
        return not self._open

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"<Cluster {self.cluster_id!r}: {self.n} ranks ({self.launcher}){state}>"

    # -- a new engine ------------------------------------------------------

    def restart(
        self,
        ranks: Chosen = None,
        *,
        start_timeout: float = 120,
        progress: Progress | None = None,
    ) -> None:
        """Give `ranks` (``None``: all), dead or alive, fresh engines.

        The other ranks keep their variables; their groups are aborted, since
        members of them are gone, and the fresh ranks have the same groups:
        `rebuild` makes them usable. Raises `ClusterError` for a cluster that
        was attached to by nothing but its controller's connection file, and
        for some ranks of an MPI job only, if a group uses MPI.
        """
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        launched = self._launched
        if launched is None:
            raise ClusterError(
                "restart: this cluster's launchers are not known here, only its "
                "controller: start engines as it was started, then attach again"
            )
        if len(chosen) < self.n and self.restarts_together:
            alive = [rank for rank in self.ranks if self._roster.seats[rank].alive]
            others = (
                f"; ranks {alive} can go on in a group of their own, "
                f"dist.new_group({alive})"
                if 1 < len(alive) < self.n
                else ""
            )
            raise ClusterError(
                "an MPI job takes in no fresh rank: %dist_restart all "
                f"(Cluster.restart()) starts all ranks anew{others}"
            )
        say = progress or _silent
        deadline = time.monotonic() + start_timeout
        which = ", ".join(map(str, chosen))
        why = f"rank{'s' if len(chosen) > 1 else ''} {which} restarted"
        with self._recovering:
            exported = recovery.export_groups(self._roster, chosen)
            self._roster.end(chosen, why)
            numbers = launched.start_engines(
                self._client, len(chosen), start_timeout, say
            )
            self._watch_launched()
            try:
                self._store_host = recovery.reseat(
                    self._roster,
                    chosen,
                    numbers,
                    deadline,
                    exported,
                    self._store_host,
                    why,
                    self.backend,
                    self.timeout,
                )
            except BaseException:
                held = self.engine_ids.values()
                self._roster.discard(one for one in numbers if one not in held)
                raise
            finally:
                launched.guard()
        say(f"rank{'s' if len(chosen) > 1 else ''} {which} ready")

    @property
    def restarts_together(self) -> bool:
        """Whether ranks can only be restarted all at once, as those of an MPI job."""
        groups = (group for one in self.status().ranks for group in one.groups)
        return any("mpi" in group.backend for group in groups)

    # -- the end -----------------------------------------------------------

    def shutdown(self) -> None:
        """End everything: cells, engines, controller, side processes, threads."""
        with self._ending:
            if not self._open:
                return
            # What a saved notebook will show: not the middle of the last op.
            self._roster.refresh(0.0, LAST_LOOK)
            self._open = False
        atexit.unregister(self._at_exit)
        self._cells.abandon("ClusterShutDown", "the cluster was shut down")
        # Each step whatever becomes of the one before it.
        with contextlib.ExitStack() as steps:
            if self._launched is not None:
                steps.callback(self._launched.stop)
            steps.callback(self._roster.close)
            if self._launched is None:
                self._roster.end(self.ranks, "the cluster was shut down")
                concurrent.futures.wait([private.shutdown_hub(self._client)], HUB_WAIT)

    def close(self) -> None:
        """Let go of the cluster and leave it running."""
        with self._ending:
            if not self._open:
                return
            self._open = False
        atexit.unregister(self._at_exit)
        with contextlib.ExitStack() as steps:
            if self._launched is not None:
                steps.callback(self._launched.close)
            self._roster.close()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            # A child that the notebook forked owns nothing.
            return
        if self.owned:
            self.shutdown()
        else:
            self.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._at_exit()


def _silent(text: str) -> None:
    """The progress of somebody who does not want to hear about it."""
