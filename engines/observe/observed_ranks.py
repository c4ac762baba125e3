"""ObservedRanks: what can be seen of running ranks, and the abort of their groups."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, TypeVar

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.late_findings import late_lines
from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.observe.verdicts import Verdict, in_one
from rankscope.backends.rank_sets import name_ranks, tell_ranks

from ..errors import ClusterError, group_by_message
from ..status import ClusterStatus, Groups, Summary, name_groups, no_hang
from ..wire import requests
from . import diagnosing, lateness
from .flight_records import TIMEOUT, FlightRecords, fetch
from .profiling import LONGEST, RATE, Profile, RankStacks, Sampling, stacks_of
from .rank_registry import RankRegistry
from .rank_slots import check_ranks

__all__ = ["Chosen", "ObservedRanks"]

#: An argument that chooses ranks; ``None``: all of them.
Chosen = Iterable[int] | int | None

R = TypeVar("R", bound="ObservedRanks")

#: Seconds after which `ObservedRanks.status` requests a new summary of a rank.
FRESH = 1.5


class ObservedRanks:
    """Ranks whose status, flight records and verdicts can be had.

    Every method may be called from any thread, but those of the callbacks. A method of
    ranks or groups raises `ClusterError` if there is no such one, and all but `close`,
    `shutdown`, `glance` and `status` do once this object is closed. Arguments of many:

    - `ranks`: an int, or several; by default all.
    - `rank`: one of them.
    - `group`: a name, an id, or a `GroupKey` or several; by default all groups.
    - `timeout`: seconds that the ranks get to answer; ``None``: no limit.
    - `every`: whether threads of Jupyter and of Rankscope are shown, too.
    - `verdicts`: what `diagnose` found.
    """

    #: What the errors of a closed object say.
    _closed_because: ClassVar[str] = (
        "this cluster is shut down: start another with Cluster.start (%dist_init)"
    )
    #: The script that the ranks run; empty where they are engines.
    _script_name: str = ""

    def __init__(
        self,
        registry: RankRegistry,
        *,
        cluster_id: str,
        profile: str,
        launcher: str,
        backend: str | None,
    ) -> None:
        #: ipyparallel's id of the cluster, or the address of a job.
        self.cluster_id = cluster_id
        #: The directory of the IPython profile that the cluster runs under.
        self.profile = profile
        self.launcher = launcher
        #: Config of the default group.
        self.backend = backend
        self._open = True
        self._detached = False
        self._ending = threading.Lock()
        self._process = os.getpid()
        # The status at the end: a rank that ends with the rest is not shown as dead.
        self._last: ClusterStatus | None = None
        self._registry = registry
        #: Whether ranks are asked to abort groups.
        self.aborting = False
        # The ids of the groups whose hang the ranks were told.
        self._told: Set[str] = frozenset()
        atexit.register(self._at_exit)

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
    def pids(self) -> dict[int, int]:
        """Rank → the pid of its engine, on its host."""
        return {slot.rank: slot.pid for slot in self._registry.slots}

    @property
    def refused(self) -> Mapping[str, str]:
        """What cannot be done to these ranks → why; see `ClusterStatus.refused`."""
        return {}

    @property
    def allocation(self) -> str:
        """What their nodes are taken from; see `ClusterStatus.allocation`."""
        return ""

    @property
    def ended(self) -> str | None:
        """Why the ranks have ended by themselves, or another process has ended them."""
        return None

    @property
    def closed(self) -> bool:
        """Whether `shutdown` or `close` was called, or the ranks have `ended`."""
        return not self._open or self.ended is not None

    @property
    def detached(self) -> bool:
        """Whether it is closed, and has left the ranks running."""
        return self._detached

    def _sent_cells(self) -> str | None:
        """Return the numbers of this client's cells; see `ClusterStatus.cells`."""
        return None

    def _check_open(self) -> None:
        if not self._open:
            raise ClusterError(self._closed_because)
        if self.ended is not None:
            of = f"{self._script_name}: " if self._script_name else ""
            raise ClusterError(f"{of}{self.ended}")

    def _chosen(self, ranks: Chosen) -> list[int]:
        """Return `ranks` (``None``: all); refuse once this object is closed."""
        self._check_open()
        return check_ranks(ranks, self.n)

    def _ranks_for(
        self, ranks: Chosen, group: Groups | None, inside: Sequence[int]
    ) -> list[int]:
        """Return `ranks` (``None``: all) of `group`, whose ranks are `inside`."""
        if group is None:
            return check_ranks(ranks, self.n)
        chosen = check_ranks(inside if ranks is None else ranks, self.n)
        outside = [rank for rank in chosen if rank not in inside]
        if outside:
            keys = [group] if isinstance(group, (str, GroupKey)) else group
            names = name_groups(k if isinstance(k, str) else k.name for k in keys)
            outsiders = tell_ranks(outside, f"is not in {names}")
            raise ClusterError(f"{outsiders}, which has {name_ranks(inside)}")
        return chosen

    def _find_groups(self, group: Groups) -> list[GroupKey]:
        """Return the groups that `group` means; see `status.find_groups`."""
        try:
            return self._status().find_groups(group)
        except ClusterError:
            # A cell may have made the group a moment ago.
            self._registry.refresh(0.0, 1.0)
        return self._status().find_groups(group)

    @staticmethod
    def _ids(groups: Iterable[GroupKey]) -> dict[int, str]:
        """Return rank → the id of the one of disjoint `groups` that has the rank."""
        return {rank: group.id for group in groups for rank in group.ranks}

    def where(self, ranks: Chosen = None) -> dict[int, str]:
        """Return rank → the stack of its main thread."""
        found = self.stacks(ranks)
        return {
            rank: found.main_text(rank)
            for rank in sorted({*found.stacks, *found.errors})
        }

    def stacks(self, ranks: Chosen = None, *, every: bool = False) -> RankStacks:
        """Return where `ranks` are now: the Python stacks of their threads.

        Works while cells block.

        Returns
        -------
        RankStacks
            The stacks by rank; ``main_text(rank)`` is that of a main thread as lines.
        """
        return stacks_of(self._registry, self._chosen(ranks), every)

    def sample(
        self,
        seconds: float,
        ranks: Chosen = None,
        *,
        rate: float = RATE,
        every: bool = False,
        on_progress: Callable[[float], None] | None = None,
    ) -> Profile:
        """Sample where `ranks` are for some seconds, while their cells run.

        Parameters
        ----------
        seconds : float
            A `KeyboardInterrupt` ends the sampling earlier; the result is that of the
            time until then.
        rate : float, default 100
            Looks a second.
        on_progress : callable, optional
            Called with the seconds so far.

        Returns
        -------
        Profile
            How often each line was seen; the ranks that did not answer are in
            ``errors``.

        Raises
        ------
        ValueError
            `seconds` is not above 0 and at most 3600, or `rate` not at most 1000.
        ClusterError
            It is closed, there is no such rank, or none of the ranks answers.
        """
        sampling = Sampling(self._registry, self._chosen(ranks), seconds, rate, every)
        return sampling.wait(on_progress)

    def start_sampling(
        self, ranks: Chosen = None, *, seconds: float = LONGEST
    ) -> Sampling:
        """Begin to sample where `ranks` are, while their cells run; do not wait.

        Parameters
        ----------
        seconds : float, default 3600
            After these it ends in any case.

        Returns
        -------
        Sampling
            ``take()`` ends it, and returns what was seen, as `sample` does.

        Raises
        ------
        ClusterError
            As `sample`.
        """
        return Sampling(self._registry, self._chosen(ranks), seconds)

    # -- status ------------------------------------------------------------

    def status(
        self, *, fresh: bool | Collection[int] = False, timeout: float = 0.8
    ) -> ClusterStatus:
        """Return the status of all ranks.

        A rank whose last summary is older than 1.5 s gets a request for a new one.

        Parameters
        ----------
        fresh : bool or collection of int, default False
            Whether every rank gets the request, or which ranks get it in any case.
        timeout : float, default 0.8
            Seconds that the ranks have.

        Returns
        -------
        ClusterStatus
            The status; of a rank that did not answer, the last known. Once this object
            is closed, that of the moment before.
        """
        if not self.closed:
            also = range(self.n) if fresh is True else fresh or ()
            self._registry.refresh(FRESH, timeout, also)
        return self._status()

    def glance(self, ranks: Chosen = None) -> ClusterStatus:
        """Return the last known status of `ranks`, without a request.

        For callbacks of `subscribe`, which must not wait.

        Raises
        ------
        ClusterError
            There is no such rank.
        """
        return self._status(None if ranks is None else set(check_ranks(ranks, self.n)))

    def _status(self, ranks: Set[int] | None = None) -> ClusterStatus:
        last = self._last
        if last is not None:
            chosen = (one for one in last.ranks if ranks is None or one.rank in ranks)
            return replace(last, ranks=tuple(chosen))
        now = time.monotonic()
        return ClusterStatus(
            cluster_id=self.cluster_id,
            profile=self.profile,
            launcher=self.launcher,
            backend=self.backend or "",
            state="stopped" if self.closed else "running",
            script=self._script_name,
            allocation=self.allocation,
            refused=self.refused,
            cells=self._sent_cells(),
            ranks=tuple(
                slot.status(now)
                for slot in self._registry.slots
                if ranks is None or slot.rank in ranks
            ),
        )

    def follow(self, interval: float = 0.0) -> None:
        """Have ranks that were attached to ``briefly`` send their status from now on.

        Others send it already. A script's ranks do, too, as often as their number
        allows.

        Parameters
        ----------
        interval : float, default 0
            Seconds between two statuses of a rank at least; 0: as often as it changes.

        Raises
        ------
        ClusterError
            It is closed.
        """
        self._check_open()
        self._registry.follow(interval)

    def subscribe(self, callback: Callable[[int, Summary], None]) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on each change, on an I/O thread.

        At most 10 times a second and at least once a second per rank; once more for
        a rank that died, with the reason in its ``dead``.

        Parameters
        ----------
        callback : callable
            It must not wait.

        Returns
        -------
        callable
            Ends the subscription.
        """
        self._check_open()
        return self._registry.subscribe(callback)

    # -- flight recorders and diagnosis ------------------------------------

    def flight_records(
        self, ranks: Chosen = None, *, last: int | None = None, timeout: float = TIMEOUT
    ) -> FlightRecords:
        """Fetch the flight recorders of `ranks`, and how their clocks differ.

        Works while cells block.

        Parameters
        ----------
        last : int, optional
            At most so many records of each rank; ``None``: all.
        timeout : float, default 5
            Seconds to wait for ranks that do not answer.

        Returns
        -------
        FlightRecords
            The records; a rank that did not answer is in ``errors``.
        """
        return fetch(self._registry, self._chosen(ranks), last, timeout)

    def nccl_report(self, rank: int) -> requests.NcclReport | None:
        """Return what NCCL's RAS service reports on the host of `rank`.

        Returns at once: a ``pending`` report is the last one, or empty, while the
        service is queried.

        Returns
        -------
        dict or None
            ``pending``; ``error``, why there is no report; and ``communicators``, a
            dict for each. ``None`` if the rank does not answer.

        Raises
        ------
        ClusterError
            It is closed, or `rank` does not exist.
        """
        request = requests.GetNcclReport()
        answers = self._registry.ask(request, self._chosen(rank), 0.5)
        return answers.results.get(rank)

    def diagnose(self, stall: float = diagnosing.REQUESTED_STALL) -> list[Verdict]:
        """Return why ops hang; ``[]`` if none does.

        Works while cells block; two diagnoses in a row must give the same verdict.

        Parameters
        ----------
        stall : float, default 0.5
            Seconds from which on an op in flight counts.

        Returns
        -------
        list of Verdict
            Each names its culprits, sequence number and source lines; as text, a
            sentence.
        """
        self._check_open()
        return diagnosing.diagnose_confirmed(self, stall)

    def no_hang(self) -> str:
        """Return what a diagnosis without a verdict says.

        That nothing hangs, which groups are aborted, which ops failed last, and of
        which completed ops the dtype or the reduction differed between ranks: their
        results are wrong. Then, a line each, which ranks keep the others waiting, and
        where they are meanwhile, if they still do: that takes a second.
        """
        self._check_open()
        status, found = self.status(), Lateness()
        records = lateness.take(self, found)
        said = no_hang(status, *diagnosing.past_faults(status, records))
        findings = lateness.watched(self, found)
        return "\n".join([said, *late_lines(findings)])

    def lateness(self, since: float | None = None, *, ended: bool = False) -> Lateness:
        """Return which ranks keep the others waiting in collectives that complete.

        Works while cells block. The last ops count, at most 200 of each rank.

        Parameters
        ----------
        since : float, optional
            The ``time.time()`` from which on the ranks enter ops that count.
        ended : bool, default False
            Whether what they ran is over: then all of its ops count, also of lines
            that they have left, and not the last ones of each line by themselves.

        Returns
        -------
        Lateness
            ``findings()`` are certain, each a sentence as text; ``groups()`` has how
            often each rank was late, and how long it waited.
        """
        self._check_open()
        found = Lateness(ended=ended)
        timeout = lateness.ENDED_ANSWER if ended else lateness.ANSWER
        lateness.take(self, found, since_ns=int((since or 0.0) * 1e9), timeout=timeout)
        return found

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
        told, self._told = self._told, found.keys()
        # What an abort has ended need not be taken back: the ops have their errors.
        hung = [
            one.rank
            for one in self._status().ranks
            for group in one.groups
            if group.key.id in told and (group.library or group.state != "aborted")
        ]
        self._registry.post(requests.NoteCauses(found), None if found else hung)

    # -- groups ------------------------------------------------------------

    def abort(
        self,
        group: Groups | None = None,
        reason: str = "",
        ranks: Chosen = None,
        *,
        by: str = "the notebook",
        verdicts: Sequence[Verdict] | None = None,
    ) -> dict[int, list[str]]:
        """Fail what is in flight on a group, and say on every rank why it hung.

        Parameters
        ----------
        reason : str, optional
            Why; part of the errors on the ranks.
        ranks : int or iterable of int, optional
            Ranks that get the request; the others are aborted through the store.
        by : str, default "the notebook"
            The author of the abort; part of the errors, too.
        verdicts : sequence of Verdict, optional
            What `diagnose` found, which the errors repeat; ``None``: it is found first,
            in a moment where all ranks answer.

        Returns
        -------
        dict of int to list of str
            Rank → the names of the groups aborted there.

        Raises
        ------
        ClusterError
            It is closed; there is no such group or rank; groups that share a rank have
            the name; a script does not allow it; or ranks did not answer, and the
            others are aborted all the same.
        """
        if "abort" in self.refused:
            raise ClusterError(self.refused["abort"])
        self._check_open()
        groups = None if group is None else self._find_groups(group)
        inside = sorted({rank for key in groups or () for rank in key.ranks})
        chosen = self._ranks_for(ranks, group, inside)
        if verdicts is None:
            verdicts = diagnosing.explain(self, groups)
        reason = reason or f"{type(self).__name__}.abort()"
        if groups is None:
            return self._abort(None, chosen, by, reason, verdicts)
        found: dict[int, list[str]] = {}
        errors: list[ClusterError] = []
        # Each error names the cause of its own group.
        for keys, those in diagnosing.by_cause(groups, verdicts):
            members = {rank for key in keys for rank in key.ranks}
            some = sorted(members.intersection(chosen))
            try:
                done = self._abort(keys, some, by, reason, those) if some else {}
            except ClusterError as error:
                errors.append(error)
                continue
            for rank, names in done.items():
                found.setdefault(rank, []).extend(names)
        if errors:
            raise errors[0]
        return found

    def _abort(
        self,
        groups: Sequence[GroupKey] | None,
        ranks: Sequence[int],
        by: str,
        reason: str,
        verdicts: Iterable[Verdict],
    ) -> dict[int, list[str]]:
        """Abort `groups`, or all, on `ranks`, which hang because of `verdicts`."""
        there = {one.rank: one.groups for one in self._status().ranks}
        diagnosis, culprits = in_one(verdicts)

        def wanted(rank: int) -> requests.Abort:
            ids = None
            if groups is not None:
                ids = [key.id for key in groups if rank in key.ranks]
            return requests.Abort(ids, reason, by, culprits, diagnosis=diagnosis)

        self.aborting = True
        try:
            answers = self._registry.ask(wanted, ranks)
            for rank, aborted in answers.results.items():
                self._registry.record_summary(rank, aborted["summary"])
        finally:
            self.aborting = False
        for rank in self._ended_by_abort(list(answers.errors)):
            # Its program has ended by the error that the abort gave it.
            del answers.errors[rank]
            known = [one for one in there[rank] if groups is None or one.key in groups]
            names = [one.name for one in known]
            answers.results[rank] = requests.Aborted(groups=names, summary="")
        if answers.errors and answers.results:
            raise ClusterError(
                f"{group_by_message(answers.errors)}; what was in flight on "
                f"{name_ranks(answers.results)} is aborted"
            )
        return {rank: aborted["groups"] for rank, aborted in answers.all().items()}

    def _ended_by_abort(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` that have ended since they were asked to abort."""
        return []

    # -- the end -----------------------------------------------------------

    def _note_end(self, *, detached: bool = False) -> None:
        """Be closed from now on, and keep the present status."""
        self._detached = detached
        self._open = False
        self._last = self._status()
        atexit.unregister(self._at_exit)

    def close(self) -> None:
        """Disconnect, and leave the ranks running.

        It is what ``%dist_shutdown`` does with ranks that were attached.
        """
        with self._ending:
            if not self._open:
                return
            self._note_end(detached=True)
        self._disconnect()

    def _disconnect(self) -> None:
        raise NotImplementedError

    def _leave(self, *, fresh: bool) -> None:
        """End what this process has started; leave the rest running."""
        self.close()

    def _at_exit(self) -> None:
        # A process that the notebook forked owns no ranks. Nobody can look at a last
        # status.
        if os.getpid() == self._process:
            self._leave(fresh=False)

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._process:
            self._leave(fresh=True)
