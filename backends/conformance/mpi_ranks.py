"""`Ranks` under ``mpiexec``: the ranks of one MPI job.

    results = run_mpi_ranks(4, sums, 1000)

The same functions, reports and results; the output of ``mpiexec`` itself is part
of the error when a rank fails.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

from .ranks import PROGRAM, Ranks

__all__ = ["MPIRanks", "is_open_mpi", "mpiexec", "run_mpi_ranks"]


def mpiexec() -> str | None:
    """Return the ``mpiexec`` of this Python's environment, or else of the system."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.path.exists(beside) else shutil.which("mpiexec")


@functools.cache
def is_open_mpi() -> bool:
    """Return whether `mpiexec` is Open MPI's."""
    found = mpiexec()
    if found is None:
        return False
    said = subprocess.run(
        [found, "--version"], capture_output=True, text=True, check=False
    )
    return "Open MPI" in said.stdout


class MPIRanks(Ranks):
    """N processes that one ``mpiexec`` starts, and that run one function."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._options = options
        self._pids: list[int] = []
        super().__init__(size, function, *args, timeout=timeout, env=env)

    def _launch(self) -> None:
        address = os.path.join(self._folder.name, "ranks")
        program = mpiexec()
        assert program is not None
        command = [
            *(program, "-n", str(self.size)),
            *(["--oversubscribe"] if is_open_mpi() else []),
            *self._options,
            *(sys.executable, "-m", PROGRAM, address),
        ]
        own = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # A killed mpiexec leaves its session files, which one with the same pid
            # fails on.
            "PRTE_MCA_prte_tmpdir_base": self._folder.name,
        }
        with Listener(address) as listener, open(self._log(0), "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder.name,
                start_new_session=True,
                env=self._env | own | self._given,
            )
            self._processes.append(process)
            self._meet(listener)

    def _meet(self, listener: Listener) -> None:
        pipes: dict[int, Connection] = {}
        pids: dict[int, int] = {}
        # accept() knows no timeout; the socket below it does.
        listener._listener._socket.settimeout(  # type: ignore[attr-defined]
            max(1.0, self._deadline - time.monotonic())
        )
        while len(pipes) < self.size:
            try:
                pipe = listener.accept()
            except TimeoutError:
                self._fail("mpiexec started no ranks")
            rank, pid = pipe.recv()
            pipes[rank], pids[rank] = pipe, pid
        self._pipes = [pipes[rank] for rank in range(self.size)]
        self._pids = [pids[rank] for rank in range(self.size)]
        for rank, pipe in enumerate(self._pipes):
            pipe.send(self._task(rank))

    def _log(self, rank: int) -> str:
        # mpiexec writes the output of all ranks into one stream.
        return os.path.join(self._folder.name, "log")

    @property
    def pids(self) -> list[int]:
        return self._pids

    @property
    def output(self) -> str:
        with open(self._log(0), errors="replace") as log:
            return log.read()

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self._killed.add(rank)
        os.kill(self._pids[rank], signum)

    def _await_death(self, rank: int) -> str:
        # Its exit code is known to mpiexec alone.
        return "died\n"

    def _await_exits(self) -> None:
        process = self._processes[0]
        try:
            code = process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._fail("all ranks returned, but mpiexec does not end")
        if code and not self._killed:
            self._fail(f"mpiexec ended with exit code {code}")


def run_mpi_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60
) -> list[Any]:
    """Run ``function(me, *args)`` on `size` ranks; return the results by rank."""
    with MPIRanks(size, function, *args, timeout=timeout) as ranks:
        return ranks.wait()
