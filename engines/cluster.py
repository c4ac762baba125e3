"""Cluster: ranks on engines, and everything a notebook does with them."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import ipyparallel

from rankscope.backends import BackendConfig

from . import launch, private, recovery
from . import variables as variables_
from .cells import CellRunner
from .errors import ClusterError
from .execution import Execution
from .guardian import Guardian
from .launched import Launched
from .roster import Roster
from .seats import Seat, check_ranks
from .status import ClusterStatus

__all__ = ["Cluster"]

Progress = Callable[[str], None]
Ranks = Iterable[int] | int | None

#: Seconds after which a rank's last summary is not believed without asking.
FRESH = 1.5
#: Seconds that a controller gets to say that it will end.
HUB_WAIT = 5.0


class Cluster:
    """`n` ranks, each an ipyparallel engine that keeps its variables.

    Made by :meth:`start` or :meth:`attach`. Usable from any thread. As a
    context manager it ends what was started here; an attached cluster, and
    one started with ``keep=True``, runs on.
    """

    def __init__(
        self,
        client: ipyparallel.Client,
        launched: Launched | None,
        guardian: Guardian | None,
        *,
        owned: bool,
        launcher: str,
        backend: str | None,
        timeout: float | None,
    ) -> None:
        #: Whether the cluster ends with this object's process.
        self.owned = owned
        self.launcher = launcher
        self.backend = backend
        self.timeout = timeout
        self._client = client
        self._launched = launched
        self._guardian = guardian
        self._store_host: int | None = None
        # One rebuild or restart at a time.
        self._recovering = threading.Lock()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._open = True
        self._roster = Roster(client, self._died)
        self._cells = CellRunner(self._roster)
        atexit.register(self._at_exit)

    # -- making one --------------------------------------------------------

    @classmethod
    def start(
        cls,
        n: int,
        *,
        engines: str = "local",
        backend: str | None = None,
        timeout: float | None = None,
        keep: bool = False,
        profile: str | None = None,
        cluster_id: str | None = None,
        start_timeout: float = 120,
        progress: Progress | None = None,
    ) -> Cluster:
        """Start a controller and `n` engines, with one default group over them.

        `engines` is a launcher of ipyparallel's: ``local``, ``mpi``, ``ssh``,
        ``slurm``, ... `backend` and `timeout` (seconds) are the default
        group's, as in ``init_process_group``. With `keep` the cluster stays
        when this process ends, and `attach` finds it again. `progress` is
        called with a line of text at each step.

        Raises `ValueError` for a `backend` that cannot be, and
        `ClusterStartError`, with the last lines of the logs, if the
        cluster is not there after `start_timeout` seconds or cannot come up;
        nothing is left running then.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ClusterError(f"n={n!r}: the number of ranks, a whole number from 1")
        # Rather now than on every engine, seconds later.
        BackendConfig(backend)
        private.check()
        say = progress or _silent
        deadline = time.monotonic() + start_timeout
        launched = launch.prepare(engines, profile, cluster_id)
        guardian = None if keep else Guardian(launched.stop_file)
        self = None
        try:
            client = launched.start(n, start_timeout, say, guardian)
            self = cls(
                client,
                launched,
                guardian,
                owned=not keep,
                launcher=engines,
                backend=backend,
                timeout=timeout,
            )
            self._watch_launched()
            say("making the default group")
            self._seat(sorted(client.ids), deadline)
            recovery.new_groups(self._roster, backend, timeout)
            self._roster.listen()
            self._guard()
        except BaseException:
            if self is not None:
                self.shutdown()
            else:
                launched.stop()
                if guardian is not None:
                    guardian.let_go()
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
        client, launched = launch.find(
            profile, cluster_id, connection_file, attach_timeout
        )
        self = cls(
            client,
            launched,
            None,
            owned=False,
            launcher="attached",
            backend=backend,
            timeout=timeout,
        )
        try:
            if launched is not None:
                self._watch_launched()
            say(f"asking {len(client.ids)} engines")
            self._find_ranks(time.monotonic() + attach_timeout)
            self._roster.listen()
        except BaseException:
            self.close()
            raise
        say(f"{self.n} ranks are ready")
        return self

    def _find_ranks(self, deadline: float) -> None:
        numbers = sorted(self._client.ids)
        if not numbers:
            raise ClusterError("the cluster has no engines: start some, attach again")
        hellos = self._roster.install(numbers, _left(deadline), attach=True)
        if any(hello["seat"] for hello in hellos.values()):
            self._store_host = recovery.find_seats(self._roster, hellos)
        else:
            self._seat(numbers, deadline)
            recovery.new_groups(self._roster, self.backend, self.timeout)

    def _seat(self, engine_ids: list[int], deadline: float) -> None:
        """Seat fresh engines on all ranks, in the order of their ids."""
        hellos = self._roster.install(engine_ids, max(1.0, _left(deadline)))
        for rank, number in enumerate(engine_ids):
            self._roster.take(rank, number, hellos[number])
        recovery.seat(self._roster, self.ranks)
        self._store_host = recovery.open_store(self._roster)

    def _watch_launched(self) -> None:
        assert self._launched is not None
        self._roster.expect_exit_codes(self._launched.runs)
        self._launched.watch(self._roster.exited, self._roster.controller_exited)

    def _guard(self) -> None:
        """Tell the guardian every process there is by now."""
        if self._guardian is not None and self._launched is not None:
            pids = {one.pid for one in self._launched.processes()}
            pids |= set(self._local_pids())
            self._guardian.watch(sorted(pids), self._launched.files())

    def _local_pids(self) -> list[int]:
        """Engines and nannies, if all run on this machine."""
        if self._launched is None or not self._launched.is_local:
            return []
        seats = self._roster.seats
        nannies = [one.nanny for one in seats if one.nanny is not None]
        return [one.pid for one in seats if one.alive] + nannies

    # -- who is there ------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        """ipyparallel's id of the cluster."""
        return self._launched.cluster.cluster_id if self._launched else ""

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self._roster.seats)

    world_size = n

    @property
    def ranks(self) -> list[int]:
        """All ranks, dead ones too."""
        return list(range(self.n))

    @property
    def engine_ids(self) -> dict[int, int]:
        """Rank → the id of the engine that holds it."""
        return {seat.rank: seat.engine_id for seat in self._roster.seats}

    @property
    def pids(self) -> dict[int, int]:
        """Rank → the pid of its engine, on its host."""
        return {seat.rank: seat.pid for seat in self._roster.seats}

    @property
    def closed(self) -> bool:
        """Whether `shutdown` or `close` was called."""
        return not self._open

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"<Cluster {self.cluster_id!r}: {self.n} ranks ({self.launcher}){state}>"

    def _check_open(self) -> None:
        if not self._open:
            raise ClusterError(
                "this cluster is shut down: start another with Cluster.start "
                "(%dist_init)"
            )

    # -- cells -------------------------------------------------------------

    def execute(
        self,
        code: str,
        *,
        ranks: Ranks = None,
        cell: int | None = None,
        group: str | None = None,
    ) -> Execution:
        """Run a cell on `ranks` and return at once.

        With `group` the default for `ranks` is that group's ranks, and inside
        the cell ``group=None`` means that group. `cell` is the number that
        tracebacks and source lines show. A cell waits for the one before it
        on the same rank.

        Raises `ClusterError` for a rank or group that is not there.
        """
        self._check_open()
        execution = Execution(code, self._ranks_for(ranks, group), cell, group)
        self._cells.run(execution)
        return execution

    def _ranks_for(self, ranks: Ranks, group: str | None) -> list[int]:
        if group is None:
            return check_ranks(ranks, self.n)
        inside = self._group_ranks(group)
        chosen = check_ranks(inside if ranks is None else ranks, self.n)
        outside = [rank for rank in chosen if rank not in inside]
        if outside:
            raise ClusterError(
                f"ranks {outside} are not in group {group!r}, which has ranks {inside}"
            )
        return chosen

    def _group_ranks(self, group: str) -> list[int]:
        self._roster.refresh(0.0, 1.0)
        groups = self.status().groups
        if group not in groups:
            raise ClusterError(
                f"no group called {group!r}; there is "
                f"{', '.join(map(repr, groups)) or 'none'}"
            )
        return groups[group]

    def interrupt(self, ranks: Ranks = None) -> list[int]:
        """Raise KeyboardInterrupt in the cells that run on `ranks`.

        Returns the ranks where a cell ran. Engines and side processes live on.
        """
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        answers = self._roster.ask("interrupt", ranks=chosen, timeout=0.5)
        for rank in answers.errors:
            # The agent is silent: its nanny can do it from outside.
            seat = self._roster.seats[rank]
            if seat.alive:
                self._roster.channel.signal(seat.uuid, signal.SIGINT)
        return sorted(
            [rank for rank, ran in answers.results.items() if ran] + [*answers.errors]
        )

    def where(self, ranks: Ranks = None) -> dict[int, str]:
        """Return what the main thread of each rank is doing, as a stack."""
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        answers = self._roster.ask("where", ranks=chosen)
        dead = {
            seat.rank: str(seat.death)
            for seat in self._roster.seats
            if not seat.alive and seat.rank in chosen
        }
        return dict(sorted({**answers.results, **answers.errors, **dead}.items()))

    # -- status ------------------------------------------------------------

    def status(self, *, fresh: bool = False) -> ClusterStatus:
        """What is known by now; a rank not heard of lately is asked, for 0.8 s.

        With `fresh` every rank is asked.
        """
        if self._open:
            self._roster.refresh(0.0 if fresh else FRESH, 0.8)
        now = time.monotonic()
        return ClusterStatus(
            cluster_id=self.cluster_id,
            profile=self.profile,
            launcher=self.launcher,
            backend=self.backend or "",
            state="running" if self._open else "stopped",
            ranks=tuple(seat.status(now) for seat in self._roster.seats),
        )

    @property
    def profile(self) -> str:
        """The directory of the IPython profile that the cluster runs under."""
        return self._launched.cluster.profile_dir if self._launched else ""

    def subscribe(
        self, callback: Callable[[int, dict[str, Any]], None]
    ) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on each change, on an I/O thread.

        At most 10 times a second and at least once a second per rank; a rank
        that died is told once more, with the reason under ``"dead"``. Returns
        a function that ends it.
        """
        self._check_open()
        return self._roster.subscribe(callback)

    # -- variables ---------------------------------------------------------

    def push(
        self,
        variables: Mapping[str, Any],
        ranks: Ranks = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Set variables on `ranks`; arrays travel without a copy where possible.

        Waits until the ranks are free, at most `timeout` seconds
        (`TimeoutError`).
        """
        self._check_open()
        variables_.push(self._roster, variables, check_ranks(ranks, self.n), timeout)

    def pull(
        self,
        names: str | list[str],
        ranks: Ranks = None,
        *,
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """Return rank → value of a variable, or rank → {name: value} for a list.

        Raises `ClusterError` naming the ranks that lack a name.
        """
        self._check_open()
        return variables_.pull(self._roster, names, check_ranks(ranks, self.n), timeout)

    # -- groups ------------------------------------------------------------

    def abort(
        self, group: str | None = None, reason: str = "", ranks: Ranks = None
    ) -> dict[int, list[str]]:
        """Fail what is in flight on a group (``None``: all), at once.

        Returns rank → the groups aborted there. Raises `ClusterError` naming
        the ranks that did not answer; the others are aborted all the same.
        """
        self._check_open()
        chosen = self._ranks_for(ranks, group)
        said = reason or "aborted from the notebook"
        args = {"group": group, "reason": said}
        answers = self._roster.ask("abort", args, chosen)
        self._roster.refresh(0.0, 1.0)
        return answers.all()

    def rebuild(self, group: str | None = None) -> None:
        """Make an aborted group (``None``: all groups) usable again.

        What is in flight on it is aborted first. Raises `ClusterError` naming
        dead ranks: `restart` those first.
        """
        self._check_open()
        with self._recovering:
            self._store_host = recovery.rebuild(self._roster, group, self._store_host)
        self._roster.refresh(0.0, 1.0)

    def restart(
        self,
        ranks: Ranks = None,
        *,
        start_timeout: float = 120,
        progress: Progress | None = None,
    ) -> None:
        """Give `ranks` (``None``: all), dead or alive, fresh engines.

        The other ranks keep their variables; their groups are aborted, since
        members of them are gone, and the fresh ranks have the same groups:
        `rebuild` makes them usable. Raises `ClusterError` for a cluster that
        was attached to by nothing but its controller's connection file.
        """
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        launched = self._launched
        if launched is None:
            raise ClusterError(
                "restart: this cluster's launchers are not known here, only its "
                "controller: start engines as it was started, then attach again"
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
            try:
                self._watch_launched()
                hellos = self._roster.install(numbers, max(1.0, _left(deadline)))
                for rank, number in zip(chosen, numbers, strict=True):
                    self._roster.take(rank, number, hellos[number])
                recovery.seat(self._roster, chosen)
                self._store_host = recovery.join_store(
                    self._roster, chosen, self._store_host
                )
                recovery.resume_groups(
                    self._roster, chosen, exported, why, self.backend, self.timeout
                )
                self._roster.listen(chosen)
            except BaseException:
                held = self.engine_ids.values()
                self._roster.discard(one for one in numbers if one not in held)
                raise
            finally:
                self._guard()
        say(f"rank{'s' if len(chosen) > 1 else ''} {which} ready")

    # -- deaths ------------------------------------------------------------

    def _died(self, seat: Seat) -> None:
        """An engine is gone: on an I/O thread, so nothing here waits."""
        if self._open:
            with contextlib.suppress(OSError):
                reason = str(seat.death)
                self._roster.post("abort", {"group": None, "reason": reason})
        self._cells.engine_died(seat)

    # -- the end -----------------------------------------------------------

    def shutdown(self) -> None:
        """End everything: cells, engines, controller, side processes, threads."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        atexit.unregister(self._at_exit)
        self._cells.abandon("ClusterShutDown", "the cluster was shut down")
        pids = self._local_pids()
        if self._launched is None:
            self._roster.end(self.ranks, "the cluster was shut down")
            concurrent.futures.wait([private.shutdown_hub(self._client)], HUB_WAIT)
        self._roster.close()
        if self._launched is not None:
            self._launched.stop(pids)
        if self._guardian is not None:
            self._guardian.let_go()

    def close(self) -> None:
        """Let go of the cluster and leave it running."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        atexit.unregister(self._at_exit)
        self._roster.close()
        if self._launched is not None:
            self._launched.close()
        if self._guardian is not None:
            self._guardian.let_go()

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


def _left(deadline: float) -> float:
    return deadline - time.monotonic()
