"""Ranks whose launchers may be known here: they are restarted, and ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ipyparallel

from rankscope.backends.groups.remedies import ANOTHER_JOB
from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterError
from ..launch import preconditions
from ..launch.cluster_file import Announcement, ClusterFile, is_elsewhere
from ..launch.launched import Launched
from ..launch.slurm import SlurmJob
from ..observe.observed_ranks import FRESH
from ..wire import ipyparallel_private as private
from ..wire.launchers import needs_launcher
from ..wire.requests import Interrupt
from . import recovery
from .ranks import Chosen, Ranks
from .torch_start import Progress

__all__ = ["LaunchedRanks", "Progress", "silent"]

#: Seconds that ranks get before they are ended: to answer, and to heed an interrupt.
#: Of more processes than cores, one answered after 0.3 s now and then, and its row
#: showed for good what it was at before.
LAST_ANSWER, INTERRUPT_WAIT = 2.0, 0.3
#: Seconds that a controller gets to acknowledge its shutdown.
HUB_WAIT = 5.0


class LaunchedRanks(Ranks):
    """The ranks of a `Cluster` that runs, with what has started their engines."""

    # The job of Slurm of ranks whose hosts are not known here.
    _job: SlurmJob | None = None

    def _connect(
        self,
        client: ipyparallel.Client,
        launched: Launched | None,
        *,
        owned: bool,
        **options: Any,
    ) -> None:
        """Become the object over engines that run; `options` are those of `Ranks`."""
        #: Whether the cluster ends with this object's process.
        self.owned = owned
        self._launched = launched
        self._announcement = Announcement(options["cluster_id"], options["profile"])
        super().__init__(client, announcement=self._announcement, **options)
        self._registry.find_end_of_job = self._find_end_of_job

    def _announce(self) -> None:
        """Have the command line find this cluster, with its present ranks."""
        launched = self._launched
        file = ClusterFile.of(
            self.cluster_id,
            self.profile,
            None if launched is None else launched.controller_pid,
            self._registry.slots,
            self._registry.torch,
            "" if self.slurm_job is None else self.slurm_job.id,
        )
        self._announcement.update(file)

    @property
    def ended(self) -> str | None:
        """Why another process stopped the cluster; ``None`` if none did."""
        return self._announcement.ended

    def _find_end_of_job(self) -> str:
        return "" if self.slurm_job is None else self.slurm_job.find_end()

    def _watch_launched(self) -> None:
        assert self._launched is not None
        self._registry.use_launchers(
            self._launched.has_engine, self._launched.signal_engine
        )
        self._launched.watch(
            self._registry.on_engine_exit, self._registry.on_controller_exit
        )

    @property
    def advice(self) -> str:
        """Advice about hosts, GPUs and backends, one line each; often empty.

        For example a backend that was named and cannot be used.
        """
        hosts = None if self._launched is None else self._launched.hosts
        differences = [] if hosts is None else hosts.differences
        return "\n".join([*differences, *self._registry.advice])

    @property
    def slurm_job(self) -> SlurmJob | None:
        """The job of Slurm whose nodes the ranks are on; ``None`` where it is none."""
        hosts = None if self._launched is None else self._launched.hosts
        return self._job if hosts is None or hosts.job is None else hosts.job

    @property
    def allocation(self) -> str:
        """The job, and the time that is left of it, in words; empty without one."""
        return "" if self.slurm_job is None else self.slurm_job.text

    @property
    def refused(self) -> Mapping[str, str]:
        job = self.slurm_job
        if job is None or not (job.ended or job.suspended):
            return {}
        why = f"{job.ended}: {ANOTHER_JOB} starts another" if job.ended else job.text
        return {"rebuild": why, "restart": why}

    # -- a new engine ------------------------------------------------------

    def restart(
        self,
        ranks: Chosen = None,
        *,
        start_timeout: float = 120,
        progress: Progress | None = None,
    ) -> None:
        """Replace the engines of `ranks`, dead or alive; without `ranks`, of all.

        The engines are fresh: all variables of `ranks` are lost. The other ranks keep
        theirs; their groups are aborted, since members of them are gone, and the fresh
        ranks have the same groups: `rebuild` makes them usable.

        ``%dist_restart`` without ranks replaces the dead ranks alone, which here is
        ``cluster.restart(cluster.status().dead)``.

        Parameters
        ----------
        ranks : int or iterable of int, optional
            The ranks, at least one; ``None``: all, those that are alive too.
        start_timeout, progress : optional
            As for the class.

        Raises
        ------
        ClusterError
            It is closed; there is no such rank; the controller has ended; the cluster
            was attached to by nothing but its controller's connection file; only some
            ranks of an MPI job are given, and a group uses MPI; `ranks` is empty; or
            the start failed.
        """
        chosen = self._chosen(ranks)
        launched = self._launched
        if "restart" in self.refused:
            # The fork servers may live on for as long as Slurm gives them to end.
            raise ClusterError(self.refused["restart"])
        if launched is None:
            raise ClusterError(
                "restart: this cluster's launchers are not known here, only its "
                "controller: "
                + (
                    "restart them in a notebook on its host, by %dist_attach there"
                    if is_elsewhere(self.cluster_id, self.profile)
                    else "start engines as before, then attach again"
                )
            )
        launched.check_controller()
        # What it was given for mpiexec is in no file.
        by_mpi = self.launcher == "attached" and launched.uses_mpi
        elsewhere = not all(slot.is_here for slot in self._registry.slots)
        if launched.hosts is None and (
            launched.has_lost_engines or (by_mpi and elsewhere)
        ):
            raise ClusterError(
                "restart: only the notebook that started these ranks can start others "
                "on their hosts; %dist_shutdown --all, then %dist_init starts all anew"
            )
        preconditions.check_folder()
        if len(chosen) < self.n and self.restarts_together:
            alive = [rank for rank in self.ranks if self._registry.slots[rank].alive]
            others = (
                f"; {name_ranks(alive)} can go on in a group of their own, "
                f"dist.new_group({alive})"
                if 1 < len(alive) < self.n
                else ""
            )
            raise ClusterError(
                "an MPI job cannot replace single ranks: %dist_restart all "
                f"(Cluster.restart()) restarts all ranks{others}"
            )
        report = progress or silent
        deadline = time.monotonic() + start_timeout
        why = f"{name_ranks(chosen)} restarted"
        self._take_over()
        with self._recovering:
            exported = recovery.export_groups(self._registry, chosen)
            slots = self._registry.slots
            self._announcement.note_restart([slots[rank].uuid for rank in chosen])
            self._registry.terminate(chosen, why)
            numbers = launched.start_engines(
                self._client, chosen, start_timeout, report
            )
            self._watch_launched()
            try:
                recovery.reassign(
                    self._registry, chosen, numbers, deadline, exported, why, report
                )
            except BaseException:
                held = self.engine_ids.values()
                without_rank = [one for one in numbers if one not in held]
                if launched.kill_engines(but=[(one.pid, one.host) for one in slots]):
                    self._registry.unregister(without_rank)
                else:
                    self._registry.kill(without_rank)
                raise
            self._announce()
        report(f"{name_ranks(chosen)} ready")

    @property
    def restarts_together(self) -> bool:
        """Whether ranks can only be restarted all at once, as those of an MPI job."""
        backends = {
            group.backend for one in self.status().ranks for group in one.groups
        }
        return any(map(needs_launcher, backends))

    def _take_over(self) -> list[int]:
        # Their engines end with those that were started here.
        found = super()._take_over()
        if found and self._launched is not None:
            slots = [self._registry.slots[rank] for rank in found]
            self._launched.adopt(one.pid for one in slots if one.is_here)
        return found

    # -- the end -----------------------------------------------------------

    def shutdown(self, reason: str = "", *, fresh: bool = True) -> None:
        """End everything: cells, engines, controller, side processes, threads.

        Cells that run get a `KeyboardInterrupt`. An attached cluster is ended, too,
        whoever else uses it: ``%dist_shutdown`` detaches from it instead, as `close`
        does.

        Parameters
        ----------
        reason : str, optional
            What a notebook that uses the cluster, too, says from then on.
        fresh : bool, default True
            Whether every rank gets a request for its last status, which `glance` then
            returns; ``False`` where nobody looks at it.
        """
        with self._ending:
            if not self._open:
                return
            # What another notebook has just restarted ends, too.
            with contextlib.suppress(OSError):
                self._take_over()
            self._announcement.end(reason)
            if fresh:
                self._registry.refresh_last(LAST_ANSWER)
            self._note_end()
        self._cells.abandon("ClusterShutDown", "the cluster was shut down")
        # Every step runs, also where an earlier one raises.
        with contextlib.ExitStack() as steps:
            launched = self._launched
            if launched is not None:
                steps.callback(launched.stop)
            steps.callback(self._registry.close, unsubscribe=False)
            if self._job is not None:
                self._job.stop_watching()
            self._interrupt_cells()
            if launched is None or launched.has_lost_engines:
                self._registry.terminate(self.ranks, "the cluster was shut down")
            if launched is None:
                concurrent.futures.wait([private.shutdown_hub(self._client)], HUB_WAIT)

    def _interrupt_cells(self) -> None:
        """Interrupt what runs: an engine does not heed SIGTERM before its cell ends."""
        able = map(self._registry.slots.__getitem__, self._registry.able())
        busy = [
            one.rank for one in able if one.summary.busy and not one.is_silent(FRESH)
        ]
        if busy:
            # By a request: of two signals in a row, another thread than the main one
            # may take both. A client that has closed itself sends none.
            with contextlib.suppress(OSError):
                self._registry.ask(Interrupt(), busy, INTERRUPT_WAIT)

    def _disconnect(self) -> None:
        with contextlib.ExitStack() as steps:
            if self._launched is not None:
                steps.callback(self._launched.close)
            if self._job is not None:
                self._job.stop_watching()
            self._registry.close()

    def _leave(self, *, fresh: bool) -> None:
        if self.owned:
            self.shutdown(fresh=fresh)
        else:
            self.close()


def silent(text: str) -> None:
    """Discard a line of progress."""
