"""The ranks as threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..groups.config import BackendConfig
from ..groups.process_group import ProcessGroup
from ..rank_sets import name_ranks
from ..stores.hash import HashStore
from ..stores.prefix import PrefixStore
from .ranks import RankFailure
from .session import GRACE, LaunchError, Setup
from .trial import MEET_TIMEOUTS, Arrays, Outcome, Rule, Trial, make_backend, try_rule

__all__ = ["Threads"]

# Seconds between two signs of progress.
_TICK = 1.0


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
        self._stores: list[HashStore] = []
        self._pool: ThreadPoolExecutor | None = None
        self._groups: list[ProcessGroup] = []
        self._number = 0

    def _start(self) -> ThreadPoolExecutor:
        first = HashStore(self.setup.options.timeout)
        self._stores = [first, *(first.clone() for _ in range(1, self.size))]
        self._pool = ThreadPoolExecutor(self.size, thread_name_prefix="conformance")
        try:
            self._make_backend(self._pool)
        except BaseException:
            self.close()
            raise
        return self._pool

    def _make_backend(self, pool: ThreadPoolExecutor) -> None:
        """Have every rank make the backend once, before any rule is tried."""

        def make(rank: int) -> None:
            with self._context(rank):
                problem = make_backend(self._trial(rank, lambda cases: None))
            if problem:
                raise LaunchError(problem)

        futures = [pool.submit(make, rank) for rank in range(self.size)]
        limit = self.setup.options.timeout + GRACE
        done, pending = wait(futures, limit, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending:
            raise LaunchError(
                f"backend {self.setup.backend!r} was not made within {limit:g} s on "
                f"{name_ranks(_not_done(futures))}"
            )

    def run(self, rule: Rule, progress: Callable[[int], None]) -> list[Outcome]:
        """Try `rule` on every rank; see `Session`."""
        pool = self._pool or self._start()
        self._number += 1
        last_sign, most = time.monotonic(), 0

        def heartbeat(cases: int) -> None:
            nonlocal last_sign, most
            last_sign, most = time.monotonic(), max(most, cases)

        def attempt(rank: int) -> Outcome:
            with self._context(rank):
                return try_rule(rule, self._trial(rank, heartbeat))

        futures = [pool.submit(attempt, rank) for rank in range(self.size)]
        limit = (MEET_TIMEOUTS + 1) * self.setup.options.timeout + GRACE
        while wait(futures, _TICK).not_done:
            progress(most)
            if time.monotonic() - last_sign > limit:
                self.close("the rule is not done in time")
                raise RankFailure(
                    f"{name_ranks(_not_done(futures))} not done after {limit:g} s "
                    "without a sign of progress"
                )
        found = [future.result() for future in futures]
        if any(outcome.status == "failed" for outcome in found):
            self.close()
        return found

    def _context(self, rank: int) -> AbstractContextManager[Any]:
        return nullcontext() if self._around is None else self._around(rank)

    def _trial(self, rank: int, heartbeat: Callable[[int], None]) -> Trial:
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

        return Trial(
            rank=rank,
            size=self.size,
            device=setup.device,
            options=setup.options,
            arrays=self._arrays(rank),
            store=prefix,
            open_group=open_group,
            close_group=close_group,
            heartbeat=heartbeat,
            own_process=False,
        )

    def close(self, reason: str = "the session ends") -> None:
        """End the threads and close what they left open."""
        for group in list(self._groups):
            group.abort(reason)
        self._groups.clear()
        pool, self._pool = self._pool, None
        stores, self._stores = self._stores, []
        for store in reversed(stores):
            store.close()
        if pool is not None:
            pool.shutdown(wait=False)


def _not_done(futures: Sequence[Future[Any]]) -> list[int]:
    return [rank for rank, future in enumerate(futures) if not future.done()]
