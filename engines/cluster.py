"""Cluster: ranks on engines, and everything a notebook does with them."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import ipyparallel

from . import private, recovery
from .errors import ClusterError
from .execution import Execution, RankError
from .guardian import Guardian
from .launch import Launched
from .roster import Roster
from .seats import Seat, check_ranks
from .status import ClusterStatus

__all__ = ["Cluster"]

Progress = Callable[[str], None]
Ranks = Iterable[int] | int | None

#: Seconds after which a rank's last summary is not believed without asking.
FRESH = 1.5


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
        self._executions: set[Execution] = set()
        self._store_host: int | None = None
        self._leaving: dict[int, str] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._open = True
        self._roster = Roster(client, self._died)
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

        Raises `ClusterStartError`, with the last lines of the logs, if the
        cluster is not there after `start_timeout` seconds or cannot come up;
        nothing is left running then.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ClusterError(f"n={n!r}: the number of ranks, a whole number from 1")
        private.check()
        say = progress or _silent
        deadline = time.monotonic() + start_timeout
        launched = Launched.prepare(engines, profile, cluster_id)
        guardian = None if keep else Guardian()
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
        self._launched.watch(self._roster.exited)

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
        chosen = self._ranks_for(ranks, group)
        execution = Execution(code, chosen, cell, group)
        with self._lock:
            self._executions.add(execution)
        execution.on_done(self._forget_execution)
        request = {
            "code": code,
            "silent": False,
            # The numbers are the notebook's: IPython would complain about
            # two cells with the same one.
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        metadata = {"rankscope": {"cell": cell, "group": group}}
        for rank in chosen:
            self._send_cell(execution, self._roster.seats[rank], request, metadata)
        return execution

    def _send_cell(
        self,
        execution: Execution,
        seat: Seat,
        request: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> None:
        if seat.alive:
            future: Any = private.send(
                self._client,
                "shell",
                "execute_request",
                request,
                seat.uuid,
                metadata=metadata,
                on_iopub=lambda message: execution.receive(seat.rank, message),
            )
            future.add_done_callback(
                lambda done: _after_reply(execution, seat.rank, done)
            )
        if not seat.alive:
            # Also if it died while the request was on its way.
            execution.finish(seat.rank, _engine_died(seat))

    def _forget_execution(self, execution: Execution) -> None:
        with self._lock:
            self._executions.discard(execution)

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

    def status(self) -> ClusterStatus:
        """What is known by now; a rank not heard of lately is asked, for 0.8 s."""
        if self._open:
            self._roster.refresh(FRESH, 0.8)
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
        view = self._view(ranks)
        view.push(dict(variables), block=False).get(_forever(timeout))

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
        chosen = check_ranks(ranks, self.n)
        view = self._view(chosen)
        wanted = [names] if isinstance(names, str) else list(names)
        try:
            values = view.pull(wanted, block=False).get(_forever(timeout))
        except ipyparallel.error.CompositeError as error:
            raise ClusterError(f"pull({names!r}): {error}") from error
        found = {
            rank: dict(zip(wanted, got, strict=True))
            for rank, got in zip(chosen, values, strict=True)
        }
        if isinstance(names, str):
            return {rank: one[names] for rank, one in found.items()}
        return dict(found)

    def _view(self, ranks: Ranks) -> Any:
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        dead = [one for one in self._roster.seats if one.rank in chosen and one.death]
        if dead:
            raise ClusterError("; ".join(str(one.death) for one in dead))
        return self._client.direct_view([self.engine_ids[rank] for rank in chosen])

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
        return self._roster.ask("abort", args, chosen).all()

    def rebuild(self, group: str | None = None) -> None:
        """Make an aborted group (``None``: all groups) usable again.

        What is in flight on it is aborted first. Raises `ClusterError` naming
        dead ranks: `restart` those first.
        """
        self._check_open()
        with self._lock:
            self._store_host = recovery.rebuild(self._roster, group, self._store_host)

    # -- deaths ------------------------------------------------------------

    def _died(self, seat: Seat) -> None:
        """An engine is gone: on an I/O thread, so nothing here waits."""
        reason = self._leaving.get(seat.rank) or str(seat.death)
        if self._open:
            with contextlib.suppress(OSError):
                self._roster.post("abort", {"group": None, "reason": reason})
        with self._lock:
            executions = list(self._executions)
        for execution in executions:
            if seat.rank in execution.ranks:
                execution.finish(seat.rank, _engine_died(seat))

    # -- the end -----------------------------------------------------------

    def shutdown(self) -> None:
        """End everything: cells, engines, controller, side processes, threads."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        atexit.unregister(self._at_exit)
        for execution in list(self._executions):
            for rank in execution.ranks_running:
                execution.finish(
                    rank,
                    RankError(rank, "ClusterShutDown", "the cluster was shut down"),
                )
        pids = self._local_pids()
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


def _after_reply(execution: Execution, rank: int, done: Future[Any]) -> None:
    """The rank replied: it is done when its last output is there too."""
    reply = done.result()
    future: Any = done
    if isinstance(reply, ipyparallel.error.EngineError):
        # Its death is told by the roster, which knows more about it.
        private.finish_output(future)
        return
    error = None
    if isinstance(reply, ipyparallel.error.RemoteError):
        trace = tuple((reply.traceback or "").splitlines())
        error = RankError(rank, reply.ename, reply.evalue, trace, execution.cell)
    elif isinstance(reply, Exception):
        error = RankError(rank, type(reply).__name__, str(reply), (), execution.cell)
    future.output.add_done_callback(lambda output: execution.finish(rank, error))


def _engine_died(seat: Seat) -> RankError:
    return RankError(seat.rank, "EngineDied", str(seat.death))


def _silent(text: str) -> None:
    """The progress of somebody who does not want to hear about it."""


def _left(deadline: float) -> float:
    return deadline - time.monotonic()


def _forever(timeout: float | None) -> float:
    """ipyparallel's way to say how long to wait."""
    return -1 if timeout is None else timeout
