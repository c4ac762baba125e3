"""Ranks: operations on running ranks, however they were started."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import ipyparallel

from rankscope.backends.benchmark import parse_sizes
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.world import DEFAULT
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterError
from ..status import ClusterStatus
from ..wire import requests
from . import diagnosing, recovery
from . import variables as variables_
from .benching import Bench, BenchRequest, BenchRow
from .cells import CellRunner
from .execution import Execution
from .flight_records import FlightRecords, fetch
from .rank_slots import RankSlot, check_ranks
from .registry import EngineRegistry

__all__ = ["Chosen", "Ranks"]

#: An argument that chooses ranks; ``None``: all of them.
Chosen = Iterable[int] | int | None

#: What `Ranks.bench` measures: bytes, doubling.
DEFAULT_SIZES = "1K:64M"

#: Seconds after which `Ranks.status` requests a new summary of a rank.
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
        self._registry = EngineRegistry(client, self._died)
        self._cells = CellRunner(self._registry)

    # -- the ranks ---------------------------------------------------------

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self._registry.slots)

    world_size = n

    @property
    def ranks(self) -> list[int]:
        """All ranks, dead ones too."""
        return list(range(self.n))

    @property
    def engine_ids(self) -> dict[int, int]:
        """Rank → the id of the engine that holds it."""
        return {slot.rank: slot.engine_id for slot in self._registry.slots}

    @property
    def pids(self) -> dict[int, int]:
        """Rank → the pid of its engine, on its host."""
        return {slot.rank: slot.pid for slot in self._registry.slots}

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

        Cells of one rank run one after the other.

        Parameters
        ----------
        code
            The source of the cell.
        ranks
            ``None``: all ranks of `group`, or of the cluster.
        cell
            The number of the cell in tracebacks and source lines.
        group
            The group that ``group=None`` means inside the cell: a name or an id of a
            group of Rankscope's.

        Raises
        ------
        ClusterError
            For a rank or a group that does not exist, for a name of several groups
            that share a rank, and for a group of another library.
        """
        self._check_open()
        groups = {} if group is None else self._ids(self._find_own_groups(group))
        chosen = self._ranks_for(ranks, group, sorted(groups))
        execution = Execution(code, chosen, cell, group)
        self._cells.run(execution, groups)
        return execution

    def _ranks_for(
        self, ranks: Chosen, group: str | GroupKey | None, inside: Sequence[int]
    ) -> list[int]:
        """Return `ranks` (``None``: all) of `group`, whose ranks are `inside`."""
        if group is None:
            return check_ranks(ranks, self.n)
        chosen = check_ranks(inside if ranks is None else ranks, self.n)
        outside = [rank for rank in chosen if rank not in inside]
        if outside:
            name = group if isinstance(group, str) else group.name
            verb = "is" if len(outside) == 1 else "are"
            raise ClusterError(
                f"{name_ranks(outside)} {verb} not in group {name!r}, "
                f"which has {name_ranks(inside)}"
            )
        return chosen

    def _find_groups(self, group: str | GroupKey) -> list[GroupKey]:
        """Return the groups that `group` means; see `status.find_groups`."""
        try:
            return self._status().find_groups(group)
        except ClusterError:
            # A cell may have made the group a moment ago.
            self._registry.refresh(0.0, 1.0)
        return self._status().find_groups(group)

    def _find_own_groups(self, group: str) -> list[GroupKey]:
        """Return the groups that `group` means; refuse those of other libraries."""
        found = self._find_groups(group)
        status = self._status()
        for key in found:
            library = status.library_of(key)
            if library:
                ranks = ",".join(map(str, key.ranks))
                raise ClusterError(
                    f"group {key.name!r} is {library}'s, and a cell can have only a "
                    f"group of Rankscope's as default group: choose its ranks with -r "
                    f"{ranks} (ranks={list(key.ranks)}), and give the group to each "
                    f"call of {library}"
                )
        return found

    @staticmethod
    def _ids(groups: Iterable[GroupKey]) -> dict[int, str]:
        """Return rank → the id of the one of disjoint `groups` that has the rank."""
        return {rank: group.id for group in groups for rank in group.ranks}

    def interrupt(self, ranks: Chosen = None) -> list[int]:
        """Raise KeyboardInterrupt in the cells that run on `ranks`.

        Returns the ranks where a cell ran. Engines and side processes are not ended.
        """
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        answers = self._registry.ask(requests.Interrupt(), chosen, timeout=0.5)
        for rank in answers.errors:
            # The agent is silent.
            slot = self._registry.slots[rank]
            if slot.alive:
                self._registry.signal(slot, signal.SIGINT)
        return sorted(
            [rank for rank, ran in answers.results.items() if ran] + [*answers.errors]
        )

    def where(self, ranks: Chosen = None) -> dict[int, str]:
        """Return rank → the stack of its main thread."""
        self._check_open()
        chosen = check_ranks(ranks, self.n)
        answers = self._registry.ask(requests.GetStack(), chosen)
        dead = {
            slot.rank: str(slot.death)
            for slot in self._registry.slots
            if not slot.alive and slot.rank in chosen
        }
        return dict(sorted({**answers.results, **answers.errors, **dead}.items()))

    # -- status ------------------------------------------------------------

    def status(self, *, fresh: bool = False, timeout: float = 0.8) -> ClusterStatus:
        """Return the status of all ranks; request summaries where the last one is old.

        With `fresh` every rank gets a request. The ranks have `timeout` seconds.
        """
        if self._open:
            self._registry.refresh(0.0 if fresh else FRESH, timeout)
        return self._status()

    def glance(self, ranks: Chosen = None) -> ClusterStatus:
        """Return the last known status of `ranks` (``None``: all), without a request.

        For callbacks of `subscribe`, which must not wait.
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
                slot.status(now)
                for slot in self._registry.slots
                if ranks is None or slot.rank in ranks
            ),
        )

    def subscribe(
        self, callback: Callable[[int, dict[str, Any]], None]
    ) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on each change, on an I/O thread.

        At most 10 times a second and at least once a second per rank; once more for
        a rank that died, with the reason under ``"dead"``. Returns a function that
        ends the subscription.
        """
        self._check_open()
        return self._registry.subscribe(callback)

    # -- flight recorders and diagnosis ------------------------------------

    def flight_records(
        self, ranks: Chosen = None, *, last: int | None = None
    ) -> FlightRecords:
        """Fetch the flight recorders of `ranks`, and how their clocks differ.

        With `last` at most so many records of each rank. Works while cells block; a
        rank that did not answer is in ``errors``.
        """
        self._check_open()
        return fetch(self._registry, check_ranks(ranks, self.n), last)

    def nccl_report(self, rank: int) -> requests.NcclReport | None:
        """Return what NCCL's RAS service reports on the host of `rank`.

        Returns at once: a ``pending`` report is the last one, or empty, while the
        service is queried. ``None`` if the rank does not answer.
        """
        self._check_open()
        answers = self._registry.ask(requests.GetNcclReport(), [rank], 0.5)
        return answers.results.get(rank)

    def diagnose(self, stall: float = diagnosing.REQUESTED_STALL) -> list[Verdict]:
        """Return why ops hang; ``[]`` if none does.

        An op counts once it has been in flight for `stall` seconds. Works while cells
        block; two diagnoses in a row must give the same verdict.
        """
        self._check_open()
        return diagnosing.diagnose_confirmed(self, stall)

    def explain(self) -> list[Verdict]:
        """Return why ops hang, after one diagnosis: for the error that ends them."""
        self._check_open()
        return diagnosing.explain(self)

    def tell_ranks(self, verdicts: Sequence[Verdict]) -> None:
        """Have the errors of ops that time out say what `verdicts` found; no waiting.

        What the ranks were told before no longer holds.
        """
        self._check_open()
        found = diagnosing.causes_by_group(verdicts)
        self._registry.post(requests.NoteCauses(found))

    # -- benchmarks --------------------------------------------------------

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

        Parameters
        ----------
        op, dtype, iterations, warmup, shared
            As of `rankscope.backends.benchmark.benchmark`.
        sizes
            Bytes, or a text such as ``"1K:64M"`` (doubling), ``"1K:64M:4"`` or
            ``"4K,1M"``.
        backends
            Names, each measured in a group that is made for it; empty: `group` is
            measured as it is.
        group
            A name or an id; ``None``: the default group.
        device
            Device type of the arrays; ``None``: the one that each backend is for, as
            ``cuda`` for NCCL.
        cell
            The number of the cell in source lines.
        on_row
            Called, on an I/O thread, for each size that all ranks have finished.

        Raises
        ------
        ValueError
            For invalid arguments.
        ClusterError
            For a group that does not exist.
        """
        self._check_open()
        request = BenchRequest(
            op=op,
            sizes=parse_sizes(sizes) if isinstance(sizes, str) else list(sizes),
            backends=list(backends),
            dtype=dtype,
            device=device,
            iterations=iterations,
            warmup=warmup,
            shared=shared,
        )
        members = self._ids(self._find_groups(group or DEFAULT))
        request.check(len(members))
        execution = self.execute(request.code, group=group or DEFAULT, cell=cell)
        return Bench(execution, request.row_count, on_row)

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
        variables_.push(self._registry, variables, check_ranks(ranks, self.n), timeout)

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
        return variables_.pull(
            self._registry, names, check_ranks(ranks, self.n), timeout
        )

    # -- groups ------------------------------------------------------------

    def abort(
        self,
        group: str | GroupKey | None = None,
        reason: str = "",
        ranks: Chosen = None,
        *,
        by: str = "the notebook",
        verdicts: Sequence[Verdict] | None = None,
    ) -> dict[int, list[str]]:
        """Fail what is in flight on a group, and say on every rank why it hung.

        Parameters
        ----------
        group
            A name, an id or a key; ``None``: all groups. See `find_groups`.
        reason, by
            Why, and the author of the abort: both are part of the errors on the ranks.
        ranks
            Ranks that get the request; the others are aborted through the store.
        verdicts
            What `diagnose` found, which the errors repeat; ``None``: it is found first,
            in a moment where all ranks answer.

        Returns
        -------
        dict
            Rank → the names of the groups aborted there.

        Raises
        ------
        ClusterError
            Where there is no such group, where groups that share a rank have the
            name, and for ranks that did not answer; the others are aborted all the
            same.
        """
        self._check_open()
        groups = None if group is None else self._find_groups(group)
        ids = {} if groups is None else self._ids(groups)
        chosen = self._ranks_for(ranks, group, sorted(ids))
        if verdicts is None:
            verdicts = diagnosing.explain(self, groups)
        said, culprits = diagnosing.as_reason(reason or "Cluster.abort()", verdicts)
        answers = self._registry.ask(
            lambda rank: requests.Abort(
                [ids[rank]] if ids else None, said, by, culprits
            ),
            chosen,
        )
        for rank, aborted in answers.results.items():
            self._registry.record_summary(rank, aborted["summary"])
        return {rank: aborted["groups"] for rank, aborted in answers.all().items()}

    def rebuild(self, group: str | GroupKey | None = None) -> None:
        """Make an aborted group usable again; abort it first if it is not.

        Parameters
        ----------
        group
            A name, an id or a key; ``None``: all groups. See `find_groups`.

        Raises
        ------
        ClusterError
            Where there is no such group, where groups that share a rank have the
            name, and for dead ranks: `restart` those first.
        """
        self._check_open()
        with self._recovering:
            self._store_host = recovery.rebuild(self._registry, group, self._store_host)

    # -- deaths ------------------------------------------------------------

    def _died(self, slot: RankSlot) -> None:
        """Handle the death of an engine; runs on an I/O thread and must not wait."""
        if self._open:
            with contextlib.suppress(OSError):
                death, culprits = str(slot.death), [slot.rank]
                self._registry.post(
                    requests.Abort(None, death, "the notebook", culprits)
                )
        self._cells.engine_died(slot)
