"""The ranks that try rules: as processes, under ``mpiexec``, or as threads.

A session reuses its ranks from rule to rule and ends them when a rule failed; the
next rule then runs on fresh ranks.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import rankscope.backends as dist

from ..groups.config import BackendConfig
from ..groups.process_group import ProcessGroup
from ..groups.world import world
from ..stores.prefix import PrefixStore
from ..stores.tcp import TCPStore
from .mpi_ranks import MPIRanks, is_open_mpi
from .ranks import Rank, RankFailure, Ranks
from .rules import find
from .trial import Arrays, HostArrays, Options, Outcome, Rule, Trial, try_rule

__all__ = ["MPI", "LaunchError", "Processes", "Session", "Setup", "Threads", "load"]

# Seconds after their own deadline in which the ranks may still answer.
_GRACE = 15.0
# Seconds that the other ranks may take when a rule has failed on one rank.
_AFTERMATH = 3.0
_FOREVER = 1e6


class LaunchError(ValueError):
    """The ranks do not start; no rule can be tried."""


@dataclass(frozen=True)
class Setup:
    """Description of the backend under test, passed to every rank."""

    backend: str
    device: str = "cpu"
    #: ``"module"`` or ``"module:function"``: imported, called, on every rank.
    modules: tuple[str, ...] = ()
    #: ``"module:class"`` of an `Arrays`, made with ``rank=``; empty: numpy, cupy.
    arrays: str = ""
    options: Options = field(default_factory=Options)

    def register(self) -> None:
        """Import what registers the backend."""
        for name in self.modules:
            target = load(name)
            if ":" in name:
                target()

    def make_arrays(self, rank: int) -> Arrays:
        """Return the arrays of the device under test, on `rank`."""
        if self.arrays:
            return load(self.arrays)(rank=rank)
        if self.device == "cuda":
            from .device_arrays import DeviceArrays

            return DeviceArrays(rank=rank)
        return HostArrays(rank=rank)


def load(name: str) -> Any:
    """Import ``"module"``, or take ``function`` of ``"module:function"``."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


class Session(Protocol):
    """Some ranks, which try one rule after the other."""

    size: int

    def run(self, rule: Rule, progress: Callable[[int], None]) -> list[Outcome]:
        """Try `rule` on every rank; return the outcome of each.

        `progress` is called with the number of cases that held so far. Raises
        `RankFailure` if a rank died, or is not done in time.
        """

    def close(self) -> None:
        """End the ranks."""


# -- processes -----------------------------------------------------------------


class Processes:
    """Ranks that are processes of this host; dead ones are replaced."""

    replaces_dead = True

    def __init__(self, setup: Setup, size: int) -> None:
        self.setup, self.size = setup, size
        self._ranks: Ranks | None = None
        self._store: TCPStore | None = None
        self._number = 0

    def _start(self, port: int, key: bytes) -> Ranks:
        return Ranks(
            self.size,
            serve,
            *(self.setup, port, key, self.replaces_dead),
            timeout=_FOREVER,
        )

    def run(self, rule: Rule, progress: Callable[[int], None]) -> list[Outcome]:
        """Try `rule` on every rank; see `Session`."""
        if self._ranks is None:
            key = uuid.uuid4().bytes
            # Not on a rank: the store outlives each of them.
            self._store = TCPStore("127.0.0.1", 0, None, True, key=key)
            self._ranks = self._start(self._store.port, key)
            self._await_start(self._ranks)
        ranks, last = self._ranks, self.size - 1
        self._number += 1
        task = (self._number, rule.level, rule.name)
        if rule.kills:
            ranks.expect_death(last)
        outcomes = {}
        try:
            for rank in range(self.size):
                ranks.tell(rank, (*task, False))
            if rule.kills and self._died(ranks, last):
                outcomes[last] = Outcome("held")
                if self.replaces_dead:
                    ranks.replace(last)
                    ranks.next_report(last, self.setup.options.timeout + _GRACE)
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

    def _await_start(self, ranks: Ranks) -> None:
        try:
            for rank in range(self.size):
                ranks.next_report(rank, self.setup.options.timeout + _GRACE)
        except RankFailure as error:
            self.close()
            raise LaunchError(f"the ranks do not start: {error}") from error

    def _died(self, ranks: Ranks, rank: int) -> bool:
        """Wait until `rank` ends or reports; return whether it has ended."""
        return ranks.ends_or_reports(rank, self.setup.options.timeout + _GRACE)

    def _collect(
        self,
        ranks: Ranks,
        outcomes: dict[int, Outcome],
        progress: Callable[[int], None],
    ) -> None:
        """Wait for the outcome of every rank that has none yet."""
        limit = 3 * self.setup.options.timeout + _GRACE
        while pending := [r for r in range(self.size) if r not in outcomes]:
            failed = any(one.status == "failed" for one in outcomes.values())
            try:
                rank, value = ranks.any_report(pending, _AFTERMATH if failed else limit)
            except RankFailure:
                if not failed:
                    raise
                for rank in pending:
                    outcomes[rank] = Outcome("failed", "not done", consequence=True)
                return
            if isinstance(value, Outcome):
                outcomes[rank] = value
            else:
                progress(value)

    def close(self) -> None:
        """End the ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.__exit__()
        store, self._store = self._store, None
        if store is not None:
            store.close()


class MPI(Processes):
    """Ranks that one ``mpiexec`` starts; it replaces none that died."""

    replaces_dead = False

    def _start(self, port: int, key: bytes) -> Ranks:
        # With ULFM the other ranks outlive one that is killed.
        options = ("--with-ft", "ulfm") if is_open_mpi() else ()
        return MPIRanks(
            self.size,
            serve,
            *(self.setup, port, key, self.replaces_dead),
            timeout=_FOREVER,
            options=options,
        )


def serve(me: Rank, setup: Setup, port: int, key: bytes, replaces_dead: bool) -> None:
    """Try the rules that the caller names, on this rank."""
    options = setup.options
    setup.register()
    arrays = setup.make_arrays(me.rank)
    claims: dict[str, str | None] = {}
    store = TCPStore(
        "127.0.0.1", port, None, False, options.timeout, key=key, reports_deaths=True
    )
    me.report("ready")
    while (task := me.listen(_FOREVER)) is not None:
        number, level, name, again = task
        prefix = PrefixStore(str(number), store)

        def open_group(part: str, prefix: PrefixStore = prefix) -> ProcessGroup:
            dist.init_process_group(
                f"{setup.device}:{setup.backend}",
                store=PrefixStore(f"group/{part}", prefix),
                rank=me.rank,
                world_size=me.size,
                timeout=options.timeout,
            )
            return world.get_group()

        trial = Trial(
            rank=me.rank,
            size=me.size,
            backend=setup.backend,
            device=setup.device,
            options=options,
            arrays=arrays,
            store=prefix,
            open_group=open_group,
            close_group=lambda group: dist.destroy_process_group(),
            heartbeat=me.report,
            claims=claims,
            replaces_dead=replaces_dead,
            again=again,
        )
        me.report(try_rule(find(level, name), trial))


# -- threads -------------------------------------------------------------------


class Threads:
    """Ranks that are threads of this process: fast, and open to a debugger.

    `around` makes the context in which the thread of a rank runs, `arrays` its
    arrays; by default those of `setup`.
    """

    def __init__(
        self,
        setup: Setup,
        size: int,
        arrays: Callable[[int], Arrays] | None = None,
        around: Callable[[int], Any] | None = None,
    ) -> None:
        self.setup, self.size = setup, size
        self._arrays, self._around = arrays or setup.make_arrays, around
        self._claims: list[dict[str, str | None]] = [{} for _ in range(size)]
        self._stores: list[TCPStore] = []
        self._pool: ThreadPoolExecutor | None = None
        self._groups: list[ProcessGroup] = []
        self._number = 0

    def _start(self) -> ThreadPoolExecutor:
        key = uuid.uuid4().bytes
        timeout, port = self.setup.options.timeout, 0
        for rank in range(self.size):
            store = TCPStore("127.0.0.1", port, None, rank == 0, timeout, key=key)
            port = store.port
            self._stores.append(store)
        self._pool = ThreadPoolExecutor(self.size, thread_name_prefix="conformance")
        return self._pool

    def run(self, rule: Rule, progress: Callable[[int], None]) -> list[Outcome]:
        """Try `rule` on every rank; see `Session`."""
        pool = self._pool or self._start()
        self._number += 1
        last_sign = time.monotonic()

        def heartbeat(cases: int) -> None:
            nonlocal last_sign
            last_sign = time.monotonic()
            progress(cases)

        futures = [
            pool.submit(self._try, rule, rank, heartbeat) for rank in range(self.size)
        ]
        limit = 3 * self.setup.options.timeout + _GRACE
        while wait(futures, 0.5).not_done:
            if time.monotonic() - last_sign > limit:
                self._abort("the rule is not done in time")
                raise RankFailure(
                    f"ranks {_not_done(futures)} were not done within {limit:g} s"
                )
        found = [future.result() for future in futures]
        if any(outcome.status == "failed" for outcome in found):
            self.close()
        return found

    def _try(self, rule: Rule, rank: int, heartbeat: Callable[[int], None]) -> Outcome:
        if self._around is None:
            return self._try_here(rule, rank, heartbeat)
        with self._around(rank):
            return self._try_here(rule, rank, heartbeat)

    def _try_here(
        self, rule: Rule, rank: int, heartbeat: Callable[[int], None]
    ) -> Outcome:
        setup = self.setup
        prefix = PrefixStore(str(self._number), self._stores[rank])

        def open_group(part: str) -> ProcessGroup:
            made = ProcessGroup(
                "default",
                range(self.size),
                rank,
                BackendConfig(f"{setup.device}:{setup.backend}"),
                PrefixStore(f"group/{part}", prefix),
                setup.options.timeout,
            )
            self._groups.append(made)
            return made

        def close_group(group: ProcessGroup) -> None:
            group.shutdown()
            self._groups.remove(group)

        trial = Trial(
            rank=rank,
            size=self.size,
            backend=setup.backend,
            device=setup.device,
            options=setup.options,
            arrays=self._arrays(rank),
            store=prefix,
            open_group=open_group,
            close_group=close_group,
            heartbeat=heartbeat,
            claims=self._claims[rank],
            own_process=False,
        )
        outcome = try_rule(rule, trial)
        if outcome.status == "failed" and trial.current is not None:
            # The other ranks end with this one: no process can be killed here.
            trial.current.abort(f"the rule failed: {outcome.text.splitlines()[0]}")
        return outcome

    def _abort(self, reason: str) -> None:
        for group in list(self._groups):
            group.abort(reason)
        self.close()

    def close(self) -> None:
        """End the threads and close what they left open."""
        for group in list(self._groups):
            group.abort("the session ends")
        self._groups.clear()
        pool, self._pool = self._pool, None
        stores, self._stores = self._stores, []
        for store in reversed(stores):
            store.close()
        if pool is not None:
            pool.shutdown(wait=False)


def _not_done(futures: Sequence[Future[Outcome]]) -> list[int]:
    return [rank for rank, future in enumerate(futures) if not future.done()]
