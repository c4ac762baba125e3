"""Ranks: what one does with ranks that run, however they were started."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import ipyparallel

from rankscope.backends.benchmark import check_benchmark, parse_sizes
from rankscope.backends.diagnosis import Verdict
from rankscope.backends.world import DEFAULT

from . import benching, diagnosing, recovery
from . import rings as rings_
from . import variables as variables_
from .benching import Bench, BenchRow
from .cells import CellRunner
from .errors import ClusterError
from .execution import Execution
from .rings import Rings
from .roster import Roster
from .seats import Seat, check_ranks
from .status import ClusterStatus

__all__ = ["Chosen", "Ranks"]

#: Ranks to do something with; ``None``: all of them.
Chosen = Iterable[int] | int | None

#: What `Ranks.bench` measures: bytes, doubling.
DEFAULT_SIZES = "1K:64M"

#: Seconds after which a rank's last summary is not believed without asking.
FRESH = 1.5


class Ranks:
    """The ranks behind a client: cells, status, variables, groups.

    Every method may be called from any thread, but those of the callbacks.
    """

    def __init__(
        self,
        client: ipyparallel.Client,
        *,
        cluster_id: str,
        profile: str,
        launcher: str,
        backend: str | None,
        timeout: float | None,
    ) -> None:
        #: ipyparallel's id of the cluster.
        self.cluster_id = cluster_id
        #: The directory of the IPython profile that the cluster runs under.
        self.profile = profile
        self.launcher = launcher
        #: Of the default group: its config and timeout in seconds.
        self.backend = backend
        self.timeout = timeout
        self._client = client
        self._store_host: int | None = None
        # One rebuild or restart at a time.
        self._recovering = threading.Lock()
        self._open = True
        self._roster = Roster(client, self._died)
        self._cells = CellRunner(self._roster)

    # -- who is there ------------------------------------------------------

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
        ranks: Chosen = None,
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

    def _ranks_for(self, ranks: Chosen, group: str | None) -> list[int]:
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
        groups = self._groups()
        if group not in groups:
            # Made a moment ago, perhaps.
            self._roster.refresh(0.0, 1.0)
            groups = self._groups()
        if group not in groups:
            raise ClusterError(
                f"no group called {group!r}; there is "
                f"{', '.join(map(repr, groups)) or 'none'}"
            )
        return groups[group]

    def interrupt(self, ranks: Chosen = None) -> list[int]:
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

    def where(self, ranks: Chosen = None) -> dict[int, str]:
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

    def status(self, *, fresh: bool = False, timeout: float = 0.8) -> ClusterStatus:
        """What is known by now; a rank not heard of lately is asked.

        With `fresh` every rank is asked. They get `timeout` seconds to answer.
        """
        if self._open:
            self._roster.refresh(0.0 if fresh else FRESH, timeout)
        return self._status()

    def glance(self, ranks: Chosen = None) -> ClusterStatus:
        """What is known by now of `ranks` (``None``: all), asking nobody.

        For who is told of changes by `subscribe` and wants to see them.
        """
        return self._status(None if ranks is None else set(check_ranks(ranks, self.n)))

    def _status(self, ranks: Set[int] | None = None) -> ClusterStatus:
        now = time.monotonic()
        return ClusterStatus(
            cluster_id=self.cluster_id,
            profile=self.profile,
            launcher=self.launcher,
            backend=self.backend or "",
            state="running" if self._open else "stopped",
            ranks=tuple(
                seat.status(now)
                for seat in self._roster.seats
                if ranks is None or seat.rank in ranks
            ),
        )

    def _groups(self) -> dict[str, list[int]]:
        return self._status().groups

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

    # -- what they did -----------------------------------------------------

    def rings(self, ranks: Chosen = None, *, last: int | None = None) -> Rings:
        """Fetch the flight recorders of `ranks`, and how their clocks differ.

        With `last` only so many records of each. Works while cells block;
        what could not be had is in ``errors``.
        """
        self._check_open()
        return rings_.fetch(self._roster, check_ranks(ranks, self.n), last)

    def diagnose(self, stall: float = diagnosing.ASKED_STALL) -> list[Verdict]:
        """Say why ops hang; ``[]`` if none does.

        An op counts once it has been in flight for `stall` seconds. Works
        while cells block; a verdict is what two looks agree on.
        """
        self._check_open()
        return diagnosing.look_twice(self, stall)

    # -- how fast they are -------------------------------------------------

    def bench(
        self,
        op: str = "all_reduce",
        sizes: str | Sequence[int] = DEFAULT_SIZES,
        *,
        backends: Sequence[str] = (),
        group: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        iterations: int = 20,
        warmup: int = 5,
        shared: bool = True,
        cell: int | None = None,
        on_row: Callable[[BenchRow], None] | None = None,
    ) -> Bench:
        """Measure a collective as nccl-tests does; return at once.

        `sizes` are bytes, or a text such as ``"1K:64M"`` (doubling),
        ``"1K:64M:4"`` or ``"4K,1M"``. `backends` are compared with each other,
        each in a group of its own made for the occasion; by default `group`
        (the default group) is measured as it is. Arrays are on `device`; with
        ``None`` each backend gets those it is for, NCCL the GPU's. The other
        arguments are those of `rankscope.backends.benchmark.benchmark`, which
        says what they mean.

        Raises `ValueError` for arguments that make no sense and `ClusterError`
        for a group that is not there.
        """
        self._check_open()
        chosen = parse_sizes(sizes) if isinstance(sizes, str) else list(sizes)
        members = self._ranks_for(None, group or DEFAULT)
        check_benchmark(op, chosen, dtype, len(members), iterations, warmup)
        benching.check_backends(backends, device)
        request = {
            "op": op,
            "sizes": chosen,
            "backends": list(backends),
            "dtype": dtype,
            "device": device,
            "iterations": iterations,
            "warmup": warmup,
            "shared": shared,
        }
        return benching.start(self, request, group or DEFAULT, cell, on_row)

    # -- variables ---------------------------------------------------------

    def push(
        self,
        variables: Mapping[str, Any],
        ranks: Chosen = None,
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
        ranks: Chosen = None,
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
        self, group: str | None = None, reason: str = "", ranks: Chosen = None
    ) -> dict[int, list[str]]:
        """Fail what is in flight on a group (``None``: all), at once.

        Returns rank → the groups aborted there. Raises `ClusterError` naming
        the ranks that did not answer; the others are aborted all the same.
        """
        self._check_open()
        chosen = self._ranks_for(ranks, group)
        args = {"group": group, "reason": reason or "Cluster.abort()"}
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

    # -- deaths ------------------------------------------------------------

    def _died(self, seat: Seat) -> None:
        """An engine is gone: on an I/O thread, so nothing here waits."""
        if self._open:
            with contextlib.suppress(OSError):
                reason = str(seat.death)
                self._roster.post("abort", {"group": None, "reason": reason})
        self._cells.engine_died(seat)
