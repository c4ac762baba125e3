"""Programs that are forked from a process with their imports.

Fork servers and controllers import ipyparallel: of 2 s of CPU for a cluster of four
ranks 1.4, and the tests of a run start about a hundred. Where there is torch, it is
imported, too, for another 1.3 s of each fork server and of each rank of
`tests.with_torch.ranks`. Those of the tests `COLD`, which try a start itself or the end
of a controller, start as they do for a user, and so do kept ones.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ipyparallel.cluster import launcher

from rankscope.engines.agent import fork_server, torch_ranks
from rankscope.engines.launch import controller_main, leashed
from tests.forks import Server, early

__all__ = ["forked_programs", "preload", "run"]

#: Parts of their names.
COLD = (
    *("test_fork_launcher.py", "test_lifecycle.py"),
    *("test_a_dead_controller", "test_the_watch_waits_for_the_import_of_torch"),
)


@contextlib.contextmanager
def forked_programs(*modules: ModuleType) -> Iterator[None]:
    """Have clusters, and those that start programs, fork them from one server.

    Each of `modules` has ``Popen``, and starts its own file.
    """
    server = Server(__name__)
    files = [one.__file__ for one in modules]

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        program = _program(command, files, server.pid)
        if program is None or early(options.get("env") or os.environ) != server.early:
            return subprocess.Popen(command, **options)
        return server.popen(program, **options)

    patched: list[Any] = [leashed, launcher, *modules]
    for one in patched:
        one.Popen = popen
    try:
        yield
    finally:
        for one in patched:
            one.Popen = subprocess.Popen
        server.close()


def _program(
    command: Sequence[str], files: Sequence[str | None], server: int
) -> list[str] | None:
    """Return what `run` takes of a command; ``None`` if it is to start by itself."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if any(name in test for name in COLD) or command[0] != sys.executable:
        return None
    if [*command[1:]] == ["-m", fork_server.__name__]:
        return [fork_server.__file__]
    if command[1] in files:
        return [*command[1:]]
    if command[1] != controller_main.__file__ or command[3]:
        return None
    # It ends with its parent, which is the server.
    return [command[1], f"/proc/{server}/task/{server}", *command[3:]]


# -- in the server -------------------------------------------------------------


def preload() -> None:
    """Import what the programs need."""
    importlib.import_module("ipyparallel.controller.app")
    fork_server.preload()
    if find_spec("torch") is not None:
        torch_ranks.preload()
        # A rank's first model of DDP imports it: another second.
        importlib.import_module("torch._dynamo")


def run(program: list[str]) -> None:
    """Be one of the programs."""
    sys.argv = program
    # As ``python -m`` has it, or ``python FILE``.
    is_module = program[0] == fork_server.__file__
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(program[0])
    if is_module:
        fork_server.main()
    else:
        runpy.run_path(program[0], run_name="__main__")
