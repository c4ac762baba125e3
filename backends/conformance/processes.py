"""The ranks as processes of this host, or as those of one ``mpiexec``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

import rankscope.backends as dist

from ..groups.process_group import ProcessGroup
from ..groups.world import world
from ..stores.prefix import PrefixStore
from ..stores.tcp import TCPStore
from .frames import where_stuck
from .mpi_ranks import MPIRanks, is_open_mpi
from .ranks import Rank, RankFailure, Ranks
from .session import GRACE, LaunchError, Setup
from .trial import MEET_TIMEOUTS, Outcome, Rule, Trial, make_backend, try_rule

__all__ = ["MPI", "Processes", "serve"]

# Seconds that the other ranks may take when a rule has failed on one rank.
_AFTERMATH = 3.0
# Seconds between two signs of progress.
_TICK = 1.0
_FOREVER = 1e6
# The first task of all ranks; the others name a rule.
_MAKE_BACKEND = "make the backend"


class Processes:
    """Ranks that are processes of this host; dead ones are replaced."""

    replaces_dead = True

    def __init__(self, setup: Setup, size: int) -> None:
        self.setup, self.size = setup, size
        self._ranks: Ranks | None = None
        self._store: TCPStore | None = None
        self._number = 0

    def _start(self, *args: Any) -> Ranks:
        return Ranks(self.size, serve, *args, timeout=_FOREVER)

    def run(self, rule: Rule, progress: Callable[[int], None]) -> list[Outcome]:
        """Try `rule` on every rank; see `Session`."""
        if self._ranks is None:
            key = uuid.uuid4().bytes
            # Not on a rank: the store outlives each of them.
            self._store = TCPStore("127.0.0.1", 0, None, True, key=key)
            place = (self._store.port, key)
            self._ranks = self._start(self.setup, *place, self.replaces_dead)
            try:
                self._make_backend(self._ranks)
            except BaseException:
                self.close()
                raise
        ranks, last = self._ranks, self.size - 1
        self._number += 1
        task = (self._number, rule)
        if rule.kills:
            ranks.expect_death(last)
        outcomes = {}
        try:
            for rank in range(self.size):
                ranks.tell(rank, (*task, False))
            limit = self.setup.options.timeout + GRACE
            if rule.kills and ranks.ends_or_reports(last, limit):
                outcomes[last] = Outcome("held")
                if self.replaces_dead:
                    ranks.replace(last)
                    ranks.next_report(last, limit)
                    ranks.tell(last, (*task, True))
                    del outcomes[last]
            self._collect(ranks, outcomes, progress)
        except BaseException:
            self.close()
            raise
        found = [outcomes[rank] for rank in range(self.size)]
        failed = any(outcome.status == "failed" for outcome in found)
        if failed or (rule.kills and not self.replaces_dead):
            self.close()
        return found

    def _make_backend(self, ranks: Ranks) -> None:
        """Have every rank make the backend once, before any rule is tried."""
        try:
            self._await(ranks, "the ranks have not started")
            for rank in range(self.size):
                ranks.tell(rank, _MAKE_BACKEND)
            self._await(ranks, f"backend {self.setup.backend!r} was not made")
        except RankFailure as error:
            raise LaunchError(f"the ranks do not start: {error}") from error

    def _await(self, ranks: Ranks, otherwise: str) -> None:
        """Wait until every rank reports no problem; raises `LaunchError`."""
        limit = self.setup.options.timeout + GRACE
        pending = set(range(self.size))
        while pending:
            found = ranks.any_report(pending, limit)
            if found is None:
                where = [f"rank {r}: not done{w}" for r, w in _stuck(ranks, pending)]
                raise LaunchError(
                    "\n".join([f"{otherwise} within {limit:g} s", *where])
                )
            rank, problem = found
            if problem:
                raise LaunchError(problem)
            pending.discard(rank)

    def _collect(
        self,
        ranks: Ranks,
        outcomes: dict[int, Outcome],
        progress: Callable[[int], None],
    ) -> None:
        """Wait for the outcome of every rank that has none yet."""
        limit, cases, failed = self._limit, 0, False
        deadline = time.monotonic() + limit
        while pending := [r for r in range(self.size) if r not in outcomes]:
            try:
                found = ranks.any_report(pending, _TICK)
            except RankFailure:
                # A rank that died. Why the rule failed is known without it.
                if not failed:
                    raise
                deadline = 0.0
                found = None
            if found is None:
                progress(cases)
                if time.monotonic() > deadline:
                    since = (
                        "the rule failed on another rank"
                        if failed
                        else "its last sign of progress"
                    )
                    for rank, where in _stuck(ranks, pending):
                        text = f"not done {limit:g} s after {since}{where}"
                        outcomes[rank] = Outcome("failed", text)
                    return
                continue
            rank, value = found
            if isinstance(value, Outcome):
                outcomes[rank] = value
                failed = failed or value.status == "failed"
                limit = _AFTERMATH if failed else self._limit
            else:
                cases = max(cases, value)
                progress(cases)
            deadline = time.monotonic() + limit

    @property
    def _limit(self) -> float:
        # Longer than a rank waits for the others, whose error is the better one.
        return (MEET_TIMEOUTS + 1) * self.setup.options.timeout + GRACE

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.__exit__()
        store, self._store = self._store, None
        if store is not None:
            store.close()


class MPI(Processes):
    """Ranks that one ``mpiexec`` starts; it replaces none that died."""

    replaces_dead = False

    def _start(self, *args: Any) -> Ranks:
        # With ULFM the other ranks outlive one that is killed.
        options = ("--with-ft", "ulfm") if is_open_mpi() else ()
        return MPIRanks(self.size, serve, *args, timeout=_FOREVER, options=options)


def _stuck(ranks: Ranks, pending: Collection[int]) -> list[tuple[int, str]]:
    """Return each of the ranks, with the lines that say where it is."""
    found = [(rank, where_stuck(ranks.stacks(rank))) for rank in pending]
    return [(rank, f", and is\n{text}" if text else "") for rank, text in found]


def serve(me: Rank, setup: Setup, port: int, key: bytes, replaces_dead: bool) -> None:
    """Try the rules that the caller names, on this rank."""
    options = setup.options
    try:
        setup.register()
        arrays = setup.make_arrays(me.rank)
    except LaunchError as error:
        me.report(str(error))
        return
    store = TCPStore(
        "127.0.0.1", port, None, False, options.timeout, key=key, reports_deaths=True
    )
    me.report("")

    def trial(number: int, again: bool = False) -> Trial:
        prefix = PrefixStore(str(number), store)

        def open_group(part: str) -> ProcessGroup:
            dist.init_process_group(
                f"{setup.device}:{setup.backend}",
                store=PrefixStore(f"group/{part}", prefix),
                rank=me.rank,
                world_size=me.size,
                timeout=options.timeout,
            )
            return world.get_group()

        return Trial(
            rank=me.rank,
            size=me.size,
            device=setup.device,
            options=options,
            arrays=arrays,
            store=prefix,
            open_group=open_group,
            close_group=lambda group: dist.destroy_process_group(),
            heartbeat=me.report,
            replaces_dead=replaces_dead,
            again=again,
        )

    while (task := me.listen(_FOREVER)) is not None:
        if task == _MAKE_BACKEND:
            me.report(make_backend(trial(0)))
        else:
            number, rule, again = task
            me.report(try_rule(rule, trial(number, again)))
