"""The ranks of one contender: processes that run blocks of ops on request."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["ContenderFailed", "MPIRanks", "Ranks", "started"]

WORKER = Path(__file__).with_name("worker.py")


class ContenderFailed(RuntimeError):
    """A rank died, raised or did not answer in time; the text says which and why."""


class Ranks:
    """`size` processes that run one contender; idle ones block on their input."""

    def __init__(self, name: str, size: int, python: str = sys.executable) -> None:
        self.name = name
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._processes: list[subprocess.Popen[str]] = []
        #: The request pipe and the answer pipe of each rank.
        self._channels: list[tuple[IO[str], IO[str]]] = []
        try:
            self._start(python)
            self._answers(60)
        except BaseException:
            self.close()
            raise

    def _start(self, python: str) -> None:
        for rank in range(self.size):
            place = (str(rank), str(self.size), self._folder.name)
            with open(self._log(rank), "w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    # -I: the modules beside the worker are not importable
                    # there, so none can stand in a library's way.
                    [python, "-I", WORKER, self.name, *place],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    bufsize=1,
                    start_new_session=True,
                    env=os.environ | {"RANKSCOPE_KEY": self._folder.name},
                )
            self._processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            self._channels.append((process.stdin, process.stdout))

    def _log(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"log-{rank}")

    def ask(self, timeout: float = 120, **request: Any) -> list[dict[str, Any]]:
        """Send `request` to every rank; return their answers, by rank."""
        line = json.dumps(request) + "\n"
        for rank, (requests, _) in enumerate(self._channels):
            try:
                requests.write(line)
                requests.flush()
            except BrokenPipeError:
                self._fail(rank, "is gone")
        return self._answers(timeout)

    def times(self, iterations: int, variant: str = "") -> list[float]:
        """Run `iterations` ops; return the seconds of each, the mean over the ranks."""
        return self.costs(iterations, variant)[0]

    def costs(self, iterations: int, variant: str) -> tuple[list[float], float]:
        """Return `times`, and the seconds of CPU of one op, the mean over the ranks.

        The CPU is that of the rank's process and its children, all threads.
        """
        answers = self.ask(do="run", iterations=iterations, variant=variant)
        each = zip(*(answer["times"] for answer in answers), strict=True)
        times = [sum(ranks) / len(ranks) / 1e9 for ranks in each]
        used = sum(answer["cpu"] for answer in answers) / len(answers) / 1e9
        return times, used / iterations

    def prepare(self, nbytes: int, variant: str = "") -> None:
        """Allocate arrays of `nbytes` on every rank, and check the result of one op."""
        self.ask(do="prepare", bytes=nbytes, variant=variant)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, (_, answered) in enumerate(self._channels):
                selector.register(answered, selectors.EVENT_READ, rank)
            while len(answers) < self.size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    rank = next(r for r in range(self.size) if r not in answers)
                    self._fail(rank, f"did not answer in {timeout:g} s")
                for key, _ in ready:
                    # An answer is one short line, written at once.
                    line = self._channels[key.data][1].readline()
                    if not line:
                        self._fail(key.data, "died")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.size)]

    def _fail(self, rank: int, what: str) -> None:
        log = Path(self._log(rank)).read_text(encoding="utf-8", errors="replace")
        last = log.strip().splitlines()[-1:] or ["its log is empty"]
        raise ContenderFailed(f"{self.name}: rank {rank} {what}: {last[0]}")

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            for pipe in channel:
                pipe.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


class MPIRanks(Ranks):
    """`Ranks` under ``mpiexec``, which passes input to rank 0 only: by sockets."""

    def _start(self, python: str) -> None:
        program = Path(python).with_name("mpiexec")
        if not program.exists():
            raise ContenderFailed(f"{self.name}: no mpiexec beside {python}")
        address = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(60)
            with open(self._log(0), "w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    [
                        *(program, "-n", str(self.size), "--oversubscribe"),
                        *("--bind-to", "none"),  # the worker pins itself
                        *(python, "-I", WORKER, self.name, "-", str(self.size)),
                        *(self._folder.name, address),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                    env=os.environ
                    | {
                        "RANKSCOPE_KEY": self._folder.name,
                        "PRTE_MCA_prte_tmpdir_base": self._folder.name,
                        "OMPI_ALLOW_RUN_AS_ROOT": "1",
                        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    },
                )
            self._processes.append(process)
            channels: dict[int, tuple[IO[str], IO[str]]] = {}
            while len(channels) < self.size:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._fail(0, "was not started in 60 s")
                with connection:
                    # A file would take in more, where no selector sees it.
                    rank = connection.recv(4, socket.MSG_WAITALL)
                    pipes = connection.makefile("w"), connection.makefile("r")
                channels[int(rank)] = pipes
        self._channels = [channels[rank] for rank in range(self.size)]

    def _log(self, rank: int) -> str:
        # mpiexec merges the output of all ranks into one stream.
        return super()._log(0)


@contextlib.contextmanager
def started(
    pythons: Mapping[str, str], size: int, left_out: Callable[[str], None]
) -> Iterator[dict[str, Ranks]]:
    """Have `size` ranks of each contender, by its Python, within the block.

    `left_out` is called with the reason where one does not start.
    """
    contenders: dict[str, Ranks] = {}
    try:
        for name, python in pythons.items():
            try:
                kind = MPIRanks if name == "bare-mpi" else Ranks
                contenders[name] = kind(name, size, python)
            except ContenderFailed as error:
                left_out(f"{size} ranks: {error}")
        yield contenders
    finally:
        for ranks in contenders.values():
            ranks.close()
