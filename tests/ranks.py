"""Run a test's function on N fresh processes, the ranks, and collect what they say.

    def sums(me: Rank, size: int) -> list[float]:
        with me.store() as store: ...

    results = run_ranks(4, sums, 1000)          # [rank 0's, rank 1's, ...]

The function is found again by file and name, so it must stand at the top level
of its module. Every process is dead when `run_ranks` returns or raises. A test
that kills ranks or talks to them while they run uses `Ranks` itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from rankscope.backends.store import Store

__all__ = ["Rank", "RankFailure", "Ranks", "run_ranks"]

_ROOT = Path(__file__).resolve().parent.parent


class RankFailure(AssertionError):
    """Ranks raised, died or were not done in time; the text holds all of it."""


class Rank:
    """This process's place among the ranks: what the function is given first."""

    def __init__(self, rank: int, size: int, folder: str, pipe: Connection) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self._pipe = pipe

    @contextlib.contextmanager
    def store(self, prefix: str = "") -> Iterator[Store]:
        """A store that all ranks share; closed at the end of the block."""
        from rankscope.backends.file_store import FileStore
        from rankscope.backends.prefix_store import PrefixStore

        store = FileStore(os.path.join(self.folder, "store"), self.size)
        try:
            yield PrefixStore(prefix, store) if prefix else store
        finally:
            store.close()

    def report(self, value: Any) -> None:
        """Send `value` to the test while running (`Ranks.next_report`)."""
        self._pipe.send(("report", value))

    def listen(self, timeout: float = 60) -> Any:
        """Return the next value that the test tells this rank (`Ranks.tell`)."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the test told rank {self.rank} nothing in {timeout} s")
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
        self.size = size
        self._deadline = time.monotonic() + timeout
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._results: dict[int, Any] = {}
        self._errors: dict[int, str] = {}
        self._reports: list[list[Any]] = [[] for _ in range(size)]
        self._killed: set[int] = set()
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        address, port = "127.0.0.1", _free_port()
        key = uuid.uuid4().hex
        for rank in range(size):
            ours, theirs = Pipe()
            with open(self._log(rank), "wb") as log:
                process = subprocess.Popen(
                    [python, __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    cwd=_ROOT,
                    # A session of its own: Ctrl-C on the tests is ours to handle.
                    start_new_session=True,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(_ROOT),
                        "RANK": str(rank),
                        "WORLD_SIZE": str(size),
                        "LOCAL_RANK": str(rank),
                        "LOCAL_WORLD_SIZE": str(size),
                        "MASTER_ADDR": address,
                        "MASTER_PORT": str(port),
                        "RANKSCOPE_KEY": key,
                        **(env or {}),
                    },
                )
            theirs.close()
            file = sys.modules[function.__module__].__file__
            ours.send((rank, size, self._folder.name, file, function.__name__, args))
            self._pipes.append(ours)
            self._processes.append(process)

    def _log(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"log-{rank}")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _kill_tree(process)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank; dying of it is then no failure."""
        self._killed.add(rank)
        self._processes[rank].send_signal(signum)

    def tell(self, rank: int, value: Any) -> None:
        """Give `value` to the rank's `Rank.listen`."""
        self._pipes[rank].send(value)

    def next_report(self, rank: int, timeout: float | None = None) -> Any:
        """Return the next value that `rank` reports, waiting for it."""
        end = self._deadline
        if timeout is not None:
            end = min(end, time.monotonic() + timeout)
        while not self._reports[rank]:
            if rank in self._results or rank in self._errors:
                self._fail(f"rank {rank} ended without the report waited for")
            if not self._receive([rank], end):
                self._fail(f"no report from rank {rank} in time")
        return self._reports[rank].pop(0)

    def wait(self) -> list[Any]:
        """Wait for the end of all ranks; return their results (killed: ``None``).

        Raises `RankFailure` with every traceback, and the output of the ranks
        concerned, if a rank raised, died unasked or is not done by the deadline.
        """
        while pending := [r for r in range(self.size) if not self._is_over(r)]:
            if not self._receive(pending, self._deadline):
                self._fail(f"ranks {pending} were not done in time")
            if self._errors:
                # The others may now wait for ever: a moment for their tracebacks.
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
        """Take in one message at least; say whether there was one."""
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

    def _fail(self, what: str) -> None:
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
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


def serve(pipe: Connection) -> None:
    """Be a rank: the program of the processes that `Ranks` starts."""
    rank, size, folder, file, name, args = pipe.recv()
    try:
        spec = importlib.util.spec_from_file_location("ranks_test_module", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, name)(Rank(rank, size, folder, pipe), *args)
        pipe.send(("result", result))
    except BaseException:  # noqa: BLE001 - every end of the rank is reported
        pipe.send(("error", traceback.format_exc()))
        sys.exit(1)


if __name__ == "__main__":
    # As `tests.ranks`, so that a test module's own import finds this `Rank`.
    from tests.ranks import serve as be_a_rank

    be_a_rank(Connection(int(sys.argv[1])))
