"""Ranks that are forked from a process which has imported what they need.

A rank imports numpy, rankscope and, with the test's module, pytest: 0.4 s of CPU, and
the tests start about a thousand of them.

`Ranks` of another interpreter, with variables of its own, or in the tests of the
conformance suite start as they do for a user.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from rankscope.backends.conformance.ranks import Ranks
from tests.forks import Server, early

__all__ = ["forked_ranks", "preload", "run"]

#: What the modules of the tests import. Nothing of it may start a thread or open a
#: descriptor that a rank would hold.
PRELOADED = (
    "pytest",
    "rankscope.backends.collectives.coalescing",
    "rankscope.backends.collectives.monitored_barrier",
    "rankscope.backends.collectives.objects",
    "rankscope.backends.conformance.rank_process",
    "rankscope.backends.conformance.checker",
    "rankscope.backends.conformance.exact",
    "rankscope.backends.conformance.mpi_ranks",
    "rankscope.backends.conformance.surface",
    "rankscope.backends.groups.subgroups",
    "tests.backends.backends",
    "tests.backends.whole_surface",
)

#: The number of a rank's end of the pipe.
_PIPE = 3

#: Its tests try how `Ranks` starts a process.
_COLD = "tests.backends.conformance."


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Have `Ranks` fork their processes in the block, from one server."""
    server = Server(__name__)
    before = Ranks._start
    Ranks._start = _starter(server, before)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Ranks._start = before  # type: ignore[method-assign]
        server.close()


_Start = Callable[[Ranks, int], tuple["subprocess.Popen[bytes]", Connection]]


def _starter(server: Server, otherwise: _Start) -> _Start:
    def start(self: Ranks, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        if not _may_fork(self) or early(os.environ) != server.early:
            return otherwise(self, rank)
        ours, theirs = Pipe()
        with open(self._log(rank), "ab") as log, theirs:
            own = {_PIPE: theirs.fileno(), 1: log.fileno(), 2: log.fileno()}
            forked = server.fork(None, self._environment(rank), own)
        ours.send(self._task(rank))
        return forked, ours

    return start


#: What `Ranks` sets by itself.
_USUAL = {
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANKSCOPE_KEY",
}


def _may_fork(ranks: Ranks) -> bool:
    return (
        ranks._python == sys.executable
        and set(ranks._given) <= _USUAL
        and ranks._function.__module__.startswith("tests.")
        and not ranks._function.__module__.startswith(_COLD)
    )


# -- in the server -------------------------------------------------------------


def preload() -> None:
    """Import what ranks need."""
    for name in PRELOADED:
        # What is missing here is missed where a test needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run(_: None) -> None:
    """Be a rank."""
    from rankscope.backends.conformance.rank_process import serve

    serve(Connection(_PIPE))
