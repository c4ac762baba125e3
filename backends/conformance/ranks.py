"""Run a function on N fresh processes, the ranks, and collect the results.

    def sums(me: Rank, size: int) -> list[float]:
        with me.store() as store: ...

    results = run_ranks(4, sums, 1000)          # [rank 0's, rank 1's, ...]

A rank imports the function by the name of its module, or else loads the file of
the module, so the function must stand at the top level, and the call of a script
under ``if __name__ == "__main__":``. Every process is dead
when `run_ranks` returns or raises. A caller that kills ranks or exchanges
messages with them while they run uses `Ranks` itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import psutil

from ..stores.base import Store
from ..stores.file import FileStore
from ..stores.prefix import PrefixStore
from .waiting import until

__all__ = [
    "PROGRAM",
    "Rank",
    "RankFailure",
    "Ranks",
    "loads_a_script",
    "reserve_port",
    "run_ranks",
]

#: The program of a rank: ``python -m PROGRAM DESCRIPTOR-OR-ADDRESS``.
PROGRAM = "rankscope.backends.conformance.rank_process"


# Not empty while this process, a rank, loads the script of its function.
_loading: list[None] = []


@contextlib.contextmanager
def loads_a_script() -> Iterator[None]:
    """Have `Ranks` refuse to start meanwhile: each rank would start as many."""
    _loading.append(None)
    try:
        yield
    finally:
        _loading.pop()


class RankFailure(AssertionError):
    """Ranks raised, died or exceeded the deadline; the text has every traceback."""


class Rank:
    """The place of this process among the ranks: the function's first argument."""

    def __init__(self, rank: int, size: int, folder: str, pipe: Connection) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self._pipe = pipe

    @contextlib.contextmanager
    def store(self, prefix: str = "") -> Iterator[Store]:
        """A store that all ranks share; closed at the end of the block."""
        store = FileStore(os.path.join(self.folder, "store"), self.size)
        try:
            yield PrefixStore(prefix, store) if prefix else store
        finally:
            store.close()

    def meet(self, name: str) -> None:
        """Wait for all ranks, without any group; `name` is used once."""
        # A store's file would be read anew from its begin at each meeting.
        here = Path(self.folder, "met", quote(name, safe=""))
        here.mkdir(parents=True, exist_ok=True)
        (here / str(self.rank)).touch()
        until(lambda: len(os.listdir(here)) == self.size, 30, f"all ranks at {name!r}")

    def report(self, value: Any) -> None:
        """Send `value` to the caller while running (`Ranks.next_report`)."""
        self._pipe.send(("report", value))

    def listen(self, timeout: float = 60) -> Any:
        """Return the next value that the caller sends this rank (`Ranks.tell`)."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"rank {self.rank} was sent nothing in {timeout:g} s")
        return self._pipe.recv()


class Ranks:
    """N processes that run one function; kills them at the end of its block."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if _loading:
            raise RuntimeError(
                "a rank loads the script of its function, and the script starts ranks "
                'again: put the call under if __name__ == "__main__":'
            )
        self.size = size
        self._function, self._args, self._python = function, args, python
        self._deadline = time.monotonic() + timeout
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._port = reserve_port()
        self._env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "RANKSCOPE_KEY": uuid.uuid4().hex,
        }
        self._given = dict(env or {})
        self._results: dict[int, Any] = {}
        self._errors: dict[int, str] = {}
        self._reports: list[list[Any]] = [[] for _ in range(size)]
        self._killed: set[int] = set()
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._launch()
        except BaseException:
            self.__exit__()
            raise

    def _launch(self) -> None:
        for rank in range(self.size):
            process, pipe = self._start(rank)
            self._processes.append(process)
            self._pipes.append(pipe)

    def _start(self, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        with open(self._log(rank), "ab") as log:
            process = subprocess.Popen(
                [self._python, "-m", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # A session of its own: Ctrl-C is for the caller alone.
                start_new_session=True,
                env=self._environment(rank),
            )
        theirs.close()
        ours.send(self._task(rank))
        return process, ours

    def _environment(self, rank: int) -> dict[str, str]:
        places = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.size))
        return self._env | places | sizes | self._given

    def _task(self, rank: int) -> tuple[Any, ...]:
        """Return the data with which a rank finds and calls the function."""
        name = self._function.__module__
        # Another interpreter has packages of its own.
        path = sys.path if self._python == sys.executable else [os.getcwd()]
        return (
            path,
            (name, sys.modules[name].__file__, self._function.__name__),
            (rank, self.size, self._folder.name),
            self._args,
            os.getpid(),
        )

    def _log(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"log-{rank}")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            kill_tree(process)
        for pipe in self._pipes:
            pipe.close()
        self._port.close()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank; dying of it is then no failure."""
        self._killed.add(rank)
        self._processes[rank].send_signal(signum)

    def expect_death(self, rank: int) -> None:
        """Count the end of the process of `rank`, from now on, as no failure."""
        self._killed.add(rank)

    def ends_or_reports(self, rank: int, timeout: float) -> bool:
        """Wait until `rank` ends or reports; return whether it has ended."""
        end = min(self._deadline, time.monotonic() + timeout)
        while not self._reports[rank] and not self._is_over(rank):
            if not self._receive([rank], end):
                self._fail(f"rank {rank} neither ended nor reported in time")
        return not self._reports[rank]

    def replace(self, rank: int) -> None:
        """Start a fresh process in the place of `rank`, whose process has ended."""
        kill_tree(self._processes[rank])
        self._pipes[rank].close()
        self._killed.discard(rank)
        self._results.pop(rank, None)
        self._errors.pop(rank, None)
        self._reports[rank].clear()
        self._processes[rank], self._pipes[rank] = self._start(rank)

    def tell(self, rank: int, value: Any) -> None:
        """Give `value` to the rank's `Rank.listen`."""
        self._pipes[rank].send(value)

    def next_report(self, rank: int, timeout: float | None = None) -> Any:
        """Return the next value that `rank` reports, waiting for it."""
        found = self.any_report([rank], math.inf if timeout is None else timeout)
        if found is None:
            self._fail(f"no report from rank {rank} in time")
        return found[1]

    def any_report(
        self, among: Collection[int], timeout: float
    ) -> tuple[int, Any] | None:
        """Return the next value that one of the ranks `among` reports, and its rank."""
        end = min(self._deadline, time.monotonic() + timeout)
        while True:
            for rank in among:
                if self._reports[rank]:
                    return rank, self._reports[rank].pop(0)
                if self._is_over(rank):
                    self._fail(f"rank {rank} ended without the report waited for")
            if not self._receive(list(among), end):
                return None

    def wait(self) -> list[Any]:
        """Wait for the end of all ranks; return their results (killed: ``None``)."""
        while pending := [r for r in range(self.size) if not self._is_over(r)]:
            if not self._receive(pending, self._deadline):
                self._fail(f"ranks {pending} were not done in time")
            if self._errors:
                # The others may now wait for ever: a short delay for their tracebacks.
                self._deadline = min(self._deadline, time.monotonic() + 2)
        if self._errors:
            self._fail("ranks failed")
        self._await_exits()
        return [self._results.get(rank) for rank in range(self.size)]

    def _await_exits(self) -> None:
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._fail(f"rank {rank} returned, but its process does not end")
            if process.returncode and rank not in self._killed:
                self._fail(f"rank {rank} ended with exit code {process.returncode}")

    def _await_death(self, rank: int) -> str:
        return f"died with exit code {self._processes[rank].wait()}\n"

    def _is_over(self, rank: int) -> bool:
        return rank in self._results or rank in self._errors

    def _receive(self, ranks: list[int], deadline: float) -> bool:
        """Receive at least one message; return whether there was one."""
        owners = {self._pipes[rank]: rank for rank in ranks if not self._is_over(rank)}
        ready = wait(list(owners), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = owners[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                end = self._await_death(rank)
                if rank in self._killed:
                    self._results[rank] = None
                else:
                    self._errors[rank] = end
                continue
            if kind == "report":
                self._reports[rank].append(value)
            elif kind == "result":
                self._results[rank] = value
            else:
                self._errors[rank] = value
        return bool(ready)

    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of `rank`; its output has them too."""
        log = self._log(rank)
        before = size = os.path.getsize(log)
        try:
            os.kill(self.pids[rank], signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        # The dump is complete when it has begun and grows no more.
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.05)
            last, size = size, os.path.getsize(log)
            if size > before and size == last:
                break
        with open(log, "rb") as output:
            output.seek(before)
            return output.read().decode(errors="replace")

    def _fail(self, what: str) -> NoReturn:
        if "in time" in what:
            for rank in range(self.size):
                if not self._is_over(rank):
                    self.stacks(rank)  # its output has them then
        lines = [what]
        for rank in range(self.size):
            if rank in self._results:
                continue
            lines.append(f"--- rank {rank}: {self._errors.get(rank, 'not done')}")
            output = Path(self._log(rank)).read_text(errors="replace")
            if output:
                lines.append(f"    its output:\n{output[-4000:]}")
        raise RankFailure("\n".join(lines))


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(me, *args)`` on `size` processes; return the results by rank."""
    with Ranks(size, function, *args, timeout=timeout, python=python, env=env) as ranks:
        return ranks.wait()


def reserve_port() -> socket.socket:
    """Return a socket bound to a free TCP port, which is reserved until it is closed.

    The socket never listens: a server that sets SO_REUSEADDR can bind the port beside
    it, and no process gets the port that binds port 0 or connects.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill `process` and its descendants; return when `process` has ended."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    if process.poll() is None:
        process.kill()
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
