"""Launcher: starts the ranks of a script on this host, and replaces one that died.

The stores in which the ranks meet are served here, and by a process beside it: they
outlive each of the ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.backends.bounded_get import bounded_get
from rankscope.backends.groups.launched import ENDED, LOST
from rankscope.backends.launch_variables import STORE
from rankscope.backends.rank_sets import name_ranks, tell_ranks
from rankscope.backends.stores.base import LAUNCHER as SERVED_BY_LAUNCHER
from rankscope.backends.stores.process_end import is_stopped
from rankscope.backends.stores.tcp import TCPStore

from ..wire.torch_environment import TorchOptions, torchrun_variables
from .rank_process import LAUNCHER, RankProcess, say

__all__ = ["Launcher", "Script"]

#: Seconds that ranks get to end after a signal, before they are killed.
GRACE = 5.0

#: Seconds between two looks for ranks that are stopped.
LOOK = 5.0

_HOST = "127.0.0.1"

#: Characters of the last line of a rank that failed, in the launcher's own last line.
_LAST_WORDS = 200


@dataclass(frozen=True)
class Script:
    """What the ranks run: the path of a script, or the name of a module."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False
    #: The port for the metrics of the job, if they are to be served.
    metrics: int | None = None

    def command(self) -> list[str]:
        module = ["-m"] if self.is_module else []
        metrics = [] if self.metrics is None else ["--metrics", str(self.metrics)]
        run = [sys.executable, "-m", "rankscope.torch", *metrics, *module]
        return [*run, "--", self.name, *self.arguments]


class Launcher:
    """`size` ranks of `script`; a rank that fails is started again up to `restarts`
    times. Then it is lost: the others go on if at least `least` ranks are left, and are
    ended if not.
    """

    def __init__(
        self,
        size: int,
        script: Script,
        *,
        restarts: int = 0,
        least: int | None = None,
        port: int = 0,
        log_folder: Path | None = None,
    ) -> None:
        self._size, self._script, self._restarts = size, script, restarts
        self._least = size if least is None else least
        self._lost: list[int] = []
        self._log_folder = log_folder
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        # Ranks and signals, as they end and come.
        self._events: queue.SimpleQueue[RankProcess | int] = queue.SimpleQueue()
        self._ranks: dict[int, RankProcess] = {}
        self._ended: list[RankProcess] = []
        self._restarted = dict.fromkeys(range(size), 0)
        # Rank → since when it is stopped, and when that is said next.
        self._stopped: dict[int, tuple[float, float]] = {}
        self._run_id = secrets.token_hex(4)
        self._listening = socket.create_server((_HOST, port), backlog=4 * size + 16)
        self._torch_store: subprocess.Popen[bytes] | None = None
        self._store = TCPStore(
            _HOST, 0, is_master=True, reports_deaths=True, server=SERVED_BY_LAUNCHER
        )

    def run(self) -> int:
        """Run the ranks to their end; return the exit status. On the main thread."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._signals())
            undo.callback(self._close)
            if importlib.util.find_spec("torch") is not None:
                self._serve_torch()
            for rank in range(self._size):
                self._start(rank)
            return self._watch()

    # -- starting ------------------------------------------------------------

    def _serve_torch(self) -> None:
        listening = self._listening.fileno()
        self._torch_store = subprocess.Popen(
            [
                *(sys.executable, "-m", "rankscope.engines.script.torch_store"),
                str(listening),
            ],
            stdin=subprocess.PIPE,
            pass_fds=[listening],
            start_new_session=True,
        )

    def _start(self, rank: int) -> None:
        log = None
        if self._log_folder is not None:
            log = self._log_folder / f"rank-{rank}.log"
        self._ranks[rank] = RankProcess(
            rank, self._script.command(), self._environment(rank), log, self._events.put
        )

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank: the variables that torchrun sets, and ours.

        ``TORCHELASTIC_RESTART_COUNT`` is that of the rank: how often it was replaced.
        """
        size = str(self._size)
        made = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": "0",
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._listening.getsockname()[1]),
            LAUNCHER: str(os.getpid()),
            # A pipe is no terminal, and what a dead rank held back would be lost.
            "PYTHONUNBUFFERED": "1",
        }
        of_job = f"{self._run_id}/{made['MASTER_PORT']}"
        made[STORE] = f"{_HOST}:{self._store.port}/{of_job}"
        options = TorchOptions(run_id=self._run_id, restarts=self._restarted[rank])
        made |= torchrun_variables(options, made, hosts=1)
        # Here torch's store is the launcher's, and the number has an end.
        made["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        made["TORCHELASTIC_MAX_RESTARTS"] = str(self._restarts)
        if self._size > 1:
            # As torchrun does: the ranks share the cores.
            made["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return {**os.environ, **made}

    # -- watching -------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        chosen = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {
            signum: signal.signal(signum, lambda number, _: self._events.put(number))
            for signum in chosen
            # nohup, and a shell that starts it in the background, ignore some.
            if signal.getsignal(signum) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _watch(self) -> int:
        while True:
            event = self._next_event()
            if isinstance(event, int):
                return self._interrupted(event)
            rank = event.rank
            del self._ranks[rank]
            self._ended.append(event)
            if event.exit_code == 0:
                self._store.set(ENDED.format(rank), b"1")
                if not self._ranks:
                    return 0
                continue
            why_not = self._why_not_replaced(rank)
            if why_not and not self._lose(event, why_not):
                return self._failed(event, why_not)
            if why_not:
                continue
            # Children that it has left may hold what the fresh one needs. Of those that
            # ended before it nobody asks any more how.
            event.send_signal(signal.SIGKILL)
            for one in [one for one in self._ended if one.rank == rank][:-1]:
                one.close()
                self._ended.remove(one)
            self._restarted[rank] += 1
            count = f"{self._restarted[rank]} of {self._restarts}"
            say(f"{event.describe()}; it is started again ({count})")
            self._start(rank)

    def _next_event(self) -> RankProcess | int:
        while True:
            try:
                return self._events.get(timeout=LOOK)
            except queue.Empty:
                self._tell_stopped()
                self._tell_store_ended()

    def _tell_store_ended(self) -> None:
        """Say once that torch's store has ended: its ranks would wait in silence."""
        store = self._torch_store
        if store is not None and store.returncode is None and store.poll() is not None:
            say(
                f"the process with torch's store has ended ({store.returncode}): no "
                "rank meets others in init_process_group any more; Ctrl-C ends all "
                "ranks"
            )

    def _tell_stopped(self) -> None:
        """Say which ranks are stopped, and again after twice as long each time."""
        now = time.monotonic()
        for rank, process in self._ranks.items():
            if not is_stopped(process.pid):
                self._stopped.pop(rank, None)
                continue
            # From the second look on: a profiler stops a process for a moment.
            since, due = self._stopped.setdefault(rank, (now, now + LOOK))
            if now >= due:
                self._stopped[rank] = since, now + (now - since)
                say(
                    f"rank {rank} (pid {process.pid}) has been stopped for "
                    f"{now - since:.0f} s (SIGSTOP, or a debugger): kill -CONT "
                    f"{process.pid} continues it, Ctrl-C ends all ranks"
                )

    def _lose(self, event: RankProcess, why_not: str) -> bool:
        """Have the others go on without a rank that failed, if enough are left."""
        over = sum(one.exit_code == 0 for one in self._ended)
        if not self._ranks or len(self._ranks) + over < self._least:
            return False
        self._lost.append(event.rank)
        self._store.set(LOST.format(event.rank), b"1")
        left = name_ranks(sorted(self._ranks))
        say(f"{event.describe()}; {why_not}: {left} may go on")
        return True

    def _why_not_replaced(self, rank: int) -> str:
        """Return why a rank that failed is not started again; empty: it is."""
        if self._lost:
            return f"it is not started again, as {tell_ranks(self._lost, 'is lost')}"
        if not self._restarts:
            return "no rank is started again, as --max-restarts is 0"
        if self._restarted[rank] == self._restarts:
            return f"it is not started again, as --max-restarts is {self._restarts}"
        over = sorted({one.rank for one in self._ended if one.exit_code == 0})
        if over:
            return f"it is not started again, as {name_ranks(over)} ended before"
        return ""

    def _failed(self, cause: RankProcess, why_not: str) -> int:
        """End the other ranks; return the exit status of the one that failed."""
        others = sorted(self._ranks)
        if others:
            say(f"{cause.describe()}; {why_not}: SIGTERM to {name_ranks(others)}")
            self._end_ranks(signal.SIGTERM)
        for one in (*self._ranks.values(), *self._ended):
            one.close()
        assert cause.exit_code is not None
        more = ""
        # Of a rank that was killed they would be no reason.
        if cause.exit_code > 0 and cause.last_words:
            more = f"; its last line on stderr: {cause.last_words[:_LAST_WORDS]}"
        if self._log_folder is not None:
            more += f"; its output is in {self._log_folder / f'rank-{cause.rank}.log'}"
        say(f"failed: {cause.describe()}{more}")
        return _status(cause.exit_code)

    def _interrupted(self, signum: int) -> int:
        name = signal.Signals(signum).name
        say(f"{name}: {name_ranks(sorted(self._ranks))}: SIGKILL after {GRACE:g} s")
        self._end_ranks(signum)
        return _status(-signum)

    def _end_ranks(self, signum: int) -> None:
        """Send the ranks a signal; kill them after `GRACE`, or at a further signal."""
        for one in self._ranks.values():
            one.send_signal(signum)
        deadline = time.monotonic() + GRACE
        while self._ranks:
            left = deadline - time.monotonic()
            try:
                event = bounded_get(self._events, left)
            except queue.Empty:
                break
            if isinstance(event, int):
                break
            del self._ranks[event.rank]
            self._ended.append(event)
        if self._ranks:
            say(f"{name_ranks(sorted(self._ranks))} did not end: SIGKILL")
        # All at once: `close` waits for each.
        for one in self._ranks.values():
            one.send_signal(signal.SIGKILL)

    def _close(self) -> None:
        for one in (*self._ranks.values(), *self._ended):
            one.close()
        if self._torch_store is not None:
            self._torch_store.kill()
            self._torch_store.wait()
            assert self._torch_store.stdin is not None
            self._torch_store.stdin.close()
        self._listening.close()
        self._store.withdraw()
        self._store.close()


def _status(exit_code: int) -> int:
    """Return the exit status for that of a process, as a shell says it."""
    return 128 - exit_code if exit_code < 0 else exit_code
