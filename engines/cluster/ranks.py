"""Ranks: operations on running ranks, however they were started."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ipyparallel

from rankscope.backends.benchmark import parse_sizes
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.world import DEFAULT
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.rank_sets import format_ranks, parse_runs
from rankscope.backends.thread_start import start_thread

from ..errors import ClusterError
from ..launch.cluster_file import Announcement
from ..observe.crash import causes_of_crash
from ..observe.observed_ranks import Chosen, ObservedRanks
from ..observe.rank_slots import RankSlot
from ..status import Groups
from ..wire import requests
from ..wire.ipyparallel_private import call_of
from ..wire.message_types import CELL_VALUE
from . import recovery
from . import variables as variables_
from .benching import Bench, BenchRow, code_of
from .cells import CellRunner
from .execution import Execution
from .introspection import Introspection
from .registry import EngineRegistry

__all__ = ["Chosen", "Ranks"]

_DEBUG = call_of("agent", "debug")

#: What `Ranks.bench` measures: bytes, doubling.
DEFAULT_SIZES = "1K:64M"


class Ranks(ObservedRanks):
    """The ranks behind a client: cells, status, variables, groups."""

    def __init__(
        self,
        client: ipyparallel.Client,
        *,
        backend: str | None,
        timeout: float | None,
        announcement: Announcement,
        **options: str,
    ) -> None:
        self._registry: EngineRegistry
        self._registry = EngineRegistry(client, self._died, announcement)
        super().__init__(self._registry, backend=backend, **options)
        #: Of the default group, in seconds.
        self.timeout = timeout
        self._client = client
        self._registry.backend, self._registry.timeout = backend, timeout
        # One rebuild or restart at a time.
        self._recovering = threading.Lock()
        self._registry.take_over = self._take_over
        self._cells = CellRunner(self._registry)
        self._numbers: set[int] = set()
        #: Completions, help and names for who types a cell.
        self.introspection = Introspection(self._registry)

    # -- the ranks ---------------------------------------------------------

    @property
    def engine_ids(self) -> dict[int, int]:
        """Rank → the id of the engine that holds it."""
        return {slot.rank: slot.engine_id for slot in self._registry.slots}

    # -- cells -------------------------------------------------------------

    def execute(
        self,
        code: str,
        *,
        ranks: Chosen = None,
        cell: int | None = None,
        group: str | None = None,
        keep_value: bool = False,
    ) -> Execution:
        """Run a cell on `ranks` and return at once.

        Cells of one rank run one after the other.

        Parameters
        ----------
        code : str
            The source of the cell.
        ranks : int or iterable of int, optional
            ``None``: all ranks of `group`, or of the cluster.
        cell : int, optional
            The number of the cell in tracebacks and source lines.
        group : str, optional
            The group that ``group=None`` means inside the cell: a name or an id of a
            group of Rankscope's.
        keep_value : bool, default False
            Whether the ranks keep the value of the cell's last expression, for
            `values`.

        Returns
        -------
        Execution
            What runs: ``result()`` waits for it, and raises the `ExecutionError` of a
            cell that failed.

        Raises
        ------
        ClusterError
            It is closed; there is no such rank or group; groups that share a rank have
            the name; or the group is another library's. On a rank that is dead the cell
            fails with ``EngineDied``.
        """
        self._check_open()
        self._take_over()
        groups = {} if group is None else self._ids(self._find_own_groups(group))
        chosen = self._ranks_for(ranks, group, sorted(groups))
        if cell is not None:
            self._numbers.add(cell)
        execution = Execution(code, chosen, cell, group, keep_value)
        self._cells.run(execution, groups)
        return execution

    def _sent_cells(self) -> str:
        me = self._registry.this_client["session"]
        others = {
            text
            for slot in self._registry.slots
            for session, text in slot.summary.senders.items()
            if session != me
        }
        taken = [run for text in others for run in parse_runs(text, "cell")]
        # A copy: a cell may begin meanwhile.
        mine = self._numbers.copy()
        own = (one for one in mine if not any(one in run for run in taken))
        return format_ranks(own)

    def values(
        self, execution: Execution, *, timeout: float | None = None
    ) -> dict[int, Any]:
        """Return rank → the value of the last expression of a cell that has ended.

        ``None`` where the cell ends with something else than an expression, or with a
        semicolon.

        Parameters
        ----------
        execution : Execution
            A cell with ``keep_value=True``, the last such cell of its ranks.

        Raises
        ------
        ValueError
            The ranks kept no value.
        TimeoutError
            The ranks were not free within `timeout`.
        ClusterError
            It is closed, a rank is dead, or a value cannot be pickled.
        """
        if not execution.keep_value:
            raise ValueError("the ranks kept no value: execute(…, keep_value=True)")
        self._check_open()
        return variables_.pull(
            self._registry, CELL_VALUE, execution.ranks, timeout, label="the value"
        )

    def _find_own_groups(self, group: str) -> list[GroupKey]:
        """Return the groups that `group` means; refuse those of other libraries."""
        found = self._find_groups(group)
        status = self._status()
        for key in found:
            library = status.library_of(key)
            if library:
                ranks = format_ranks(key.ranks)
                raise ClusterError(
                    f"group {key.name!r} is {library}'s, and a cell can have only a "
                    f"group of Rankscope's as default group: choose its ranks with -r "
                    f"{ranks} (ranks={list(key.ranks)}), and give the group to each "
                    f"call of {library}"
                )
        return found

    def interrupt(
        self, ranks: Chosen = None, execution: Execution | None = None
    ) -> list[int]:
        """Raise KeyboardInterrupt in the cells that run on `ranks`.

        Engines and side processes are not ended.

        Parameters
        ----------
        execution : Execution, optional
            The cell that is meant: on a rank where it is over, nothing is interrupted.

        Returns
        -------
        list of int
            The ranks where a cell ran.
        """
        chosen = self._chosen(ranks)
        wanted = requests.Interrupt(None if execution is None else execution.key)
        answers = self._registry.ask(wanted, chosen, timeout=0.5)
        for rank in answers.errors:
            # The agent is silent.
            slot = self._registry.slots[rank]
            if slot.alive and (execution is None or rank in execution.ranks_running):
                self._registry.signal(slot, signal.SIGINT)
        return sorted(
            [rank for rank, ran in answers.results.items() if ran] + [*answers.errors]
        )

    def end_init(self, ranks: Chosen, reason: str, culprits: Sequence[int]) -> None:
        """End the `init_process_group` that cells wait in on `ranks`.

        It raises `DistAbortedError` there.

        Parameters
        ----------
        reason : str
            Why ranks will not come; part of the error.
        culprits : sequence of int
            Those ranks.

        Raises
        ------
        ClusterError
            It is closed, or there is no such rank.
        """
        self._registry.ask(
            requests.EndInit(reason, culprits), self._chosen(ranks), timeout=0.5
        )

    # -- debugging ---------------------------------------------------------

    def debug(self, rank: int) -> Execution:
        """Open the frame in which the last failed cell of `rank` raised.

        Returns at once. The execution ends when the debugger is left.

        Returns
        -------
        Execution
            Its data are ``{"prompt": …, "number": …}``, which `answer_prompt` answers,
            or ``{"refusal": …}`` where no cell has failed.
        """
        return self.execute(_DEBUG, ranks=[rank])

    def answer_prompt(self, rank: int, number: int, line: str) -> Future[Any]:
        """Give the debugger of `rank` the line for a prompt.

        Parameters
        ----------
        number : int
            The number of the prompt.
        line : str
            The answer.

        Returns
        -------
        concurrent.futures.Future
            Done when the rank has the line, or is dead.

        Raises
        ------
        ClusterError
            It is closed, or the rank is dead or does not exist.
        """
        [rank] = self._chosen(rank)
        slot = self._registry.slots[rank]
        if not slot.alive:
            raise ClusterError(str(slot.reason))
        return self._registry.post(requests.AnswerPrompt(number, line), [rank])[rank]

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
        cell: int | None = None,
        on_row: Callable[[BenchRow], None] | None = None,
    ) -> Bench:
        """Measure a collective as nccl-tests does; return at once.

        Parameters
        ----------
        op : str, default "all_reduce"
            The collective.
        sizes : str or sequence of int, default "1K:64M"
            Bytes, or a text such as ``"1K:64M"`` (doubling), ``"1K:64M:4"`` or
            ``"4K,1M"``.
        backends : sequence of str, optional
            Names, each measured in a group that is made for it; empty: `group` is
            measured as it is.
        group : str, optional
            A name or an id; ``None``: the default group.
        dtype : str, default "float32"
            The dtype of the arrays.
        device : str, optional
            Device type of the arrays; ``None``: the one that each backend is for, as
            ``cuda`` for NCCL.
        iterations, warmup : int, default 20 and 5
            How often the op runs, and how often before that without being measured.
        cell : int, optional
            The number of the cell in source lines.
        on_row : callable, optional
            Called, on an I/O thread, for each size that all ranks have finished.

        Returns
        -------
        Bench
            What runs: ``result()`` waits for it.

        Raises
        ------
        ValueError
            For invalid arguments.
        ClusterError
            It is closed; there is no such group, or groups that share a rank have the
            name.
        """
        self._check_open()
        found = parse_sizes(sizes) if isinstance(sizes, str) else list(sizes)
        code = code_of(
            len(self._ids(self._find_groups(group or DEFAULT))),
            op=op,
            sizes=found,
            backends=backends,
            dtype=dtype,
            device=device,
            iterations=iterations,
            warmup=warmup,
        )
        execution = self.execute(code, group=group or DEFAULT, cell=cell)
        return Bench(execution, len(found) * max(1, len(backends)), on_row)

    # -- variables ---------------------------------------------------------

    def push(
        self,
        variables: Mapping[str, Any],
        ranks: Chosen = None,
        *,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Set variables on `ranks`; arrays travel without a copy where possible.

        Waits until the ranks are free.

        Parameters
        ----------
        variables : dict of str to object
            The values, by the names of the variables.
        progress : callable, optional
            Called about five times a second with the bytes that have gone and with all
            bytes, while large values go.

        Raises
        ------
        TypeError
            A value cannot be pickled.
        TimeoutError
            The ranks were not free within `timeout`.
        ClusterError
            It is closed, there is no such rank, a rank is dead, or the connection to
            one was lost.
        """
        chosen = self._chosen(ranks)
        variables_.push(self._registry, variables, chosen, timeout, progress)

    def pull(
        self,
        names: str | list[str],
        ranks: Chosen = None,
        *,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[int, Any]:
        """Return rank → value of a variable, or rank → {name: value} for a list.

        Parameters
        ----------
        names : str or list of str
            The name of a variable, or several.
        progress : callable, optional
            As for `push`.

        Raises
        ------
        TimeoutError
            The ranks were not free within `timeout`.
        ClusterError
            It is closed; there is no such rank; a rank is dead; or the connection to
            one was lost. A `PullError`, whose ``values`` has the other values, if a
            rank lacks a name, or a value cannot be pickled there or made here.
        """
        chosen = self._chosen(ranks)
        return variables_.pull(
            self._registry, names, chosen, timeout, progress=progress
        )

    # -- groups ------------------------------------------------------------

    def rebuild(self, group: Groups | None = None) -> list[str]:
        """Make an aborted group usable again; abort it first if it is not.

        Returns
        -------
        list of str
            Sentences on what the ranks' programs must make anew, since it cannot use
            a group of torch after its rebuild; mostly empty.

        Raises
        ------
        ClusterError
            It is closed; there is no such group; groups that share a rank have the
            name; ranks are dead: `restart` those first; or their job has ended.
        """
        self._check_open()
        if "rebuild" in self.refused:
            raise ClusterError(self.refused["rebuild"])
        self._take_over()
        with self._recovering:
            return recovery.rebuild(self._registry, group)

    # -- deaths ------------------------------------------------------------

    def _take_over(self) -> list[int]:
        """Take over dead ranks that another notebook on these engines restarted."""
        # Not those that a restart of this one is about to place.
        if not self._recovering.acquire(blocking=False):
            return []
        try:
            found = recovery.find_restarted(self._registry)
            if found:
                self._registry.start_status(found)
        finally:
            self._recovering.release()
        return found

    def _died(self, slot: RankSlot) -> None:
        """Handle the death of an engine; runs on an I/O thread and must not wait."""
        if self._open and slot.unexplained:
            start_thread("death", self._explain_death, slot)
        else:
            slot.unexplained = False
            self._tell_death(slot)

    def _explain_death(self, slot: RankSlot) -> None:
        """Find why a library ended the process of a rank, and tell the others."""
        found: list[Verdict] = []
        try:
            with contextlib.suppress(ClusterError, OSError):
                found = causes_of_crash(self._registry, slot)
        finally:
            self._registry.note_causes(slot, found)
            self._tell_death(slot)

    def _tell_death(self, slot: RankSlot) -> None:
        # A crash takes seconds to explain: the rank may have been restarted meanwhile.
        if self._open and self._registry.slots[slot.rank] is slot:
            with contextlib.suppress(OSError):
                about = str(slot.reason), "the notebook", slot.culprits, [slot.rank]
                self._registry.post(requests.Abort(None, *about))
        self._cells.engine_died(slot)
