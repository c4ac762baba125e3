"""RankProcess: a process of a rank that the launcher starts, its output and its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rankscope.backends import parent_end
from rankscope.backends.stores.process_end import describe_exit_code
from rankscope.backends.thread_start import start_thread

__all__ = ["LAUNCHER", "RankProcess", "end_with_launcher", "say"]

#: The variable with the pid of a rank's launcher, for the rank alone.
LAUNCHER = "RANKSCOPE_LAUNCHER_PID"

#: Seconds that output is read after the end of a rank: a child of it may hold the pipe.
_OUTPUT_WAIT = 5.0
# What Rankscope says of a job that runs: no words of a rank that failed.
_OF_THE_JOB = (b"rankscope: to see this job ", b"rankscope: the metrics of ")
# A progress bar goes back to the start of its line.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")

_writing = threading.Lock()


def say(text: str) -> None:
    """Write a line of the launcher, if it can be written."""
    # Without the lock: whoever reads stdout, as less, may have paused.
    with contextlib.suppress(OSError):
        print(f"rankscope.run: {text}", file=sys.stderr, flush=True)


def end_with_launcher() -> None:
    """Have the kernel kill this process, a rank, when its launcher has ended."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is not None:
        parent_end.end_with(int(launcher))


class RankProcess:
    """A process of rank `rank`, in a session of its own; `on_end(self)` at its end.

    Only the main thread makes one: the kernel counts the end of the thread as that of
    the launcher. `log` gets what the rank writes, too. The process is not reaped before
    `close`: until then others can read how it has ended.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        on_end: Callable[[RankProcess], object],
    ) -> None:
        self.rank = rank
        #: How it has ended, as `subprocess` says it; ``None``: it has not.
        self.exit_code: int | None = None
        #: The last line with a text of what it wrote to stderr.
        self.last_words = ""
        self._began = time.monotonic()
        self._on_end = on_end
        self._log = None if log is None else log.open("ab", buffering=0)
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._readers = [
            start_thread(f"run-{rank}", self._forward, source, target)
            for source, target in (
                (self._process.stdout, sys.stdout),
                (self._process.stderr, sys.stderr),
            )
        ]
        self._waiter = start_thread(f"run-{rank}", self._await_end)

    def _await_end(self) -> None:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status
        self.seconds = time.monotonic() - self._began
        self.exit_code = status if ended.si_code == os.CLD_EXITED else -status
        self._on_end(self)

    def _forward(self, source: IO[bytes], target: Any) -> None:
        """Write what the rank writes, by lines that begin with the rank."""
        begin = f"[rank {self.rank}] ".encode()
        held, log = b"", self._log
        while True:
            read = os.read(source.fileno(), 1 << 16)
            held += read
            lines = _LINE.findall(held)
            held = _LINE.sub(b"", held)
            if not read and held:
                lines.append(held + b"\n")
            words = [one for one in lines if not one.startswith(_OF_THE_JOB)]
            if target is sys.stderr and (told := b"".join(words).strip()):
                self.last_words = told.splitlines()[-1].decode(errors="replace")
            if log is not None:
                try:
                    # By lines, too: stdout and stderr have one log.
                    log.write(b"".join(lines))
                except OSError as error:
                    # Whatever becomes of it, the rank must not block.
                    log = None
                    say(f"the log of rank {self.rank} is not written on: {error}")
            # Its reader, as head, may have ended, or the disk be full.
            with _writing, contextlib.suppress(OSError):
                target.buffer.write(b"".join(begin + line for line in lines))
                target.flush()
            if not read:
                source.close()
                return

    def describe(self) -> str:
        """Return ``rank 2 (pid 41): killed by SIGKILL after 12.3 s``."""
        assert self.exit_code is not None
        how = describe_exit_code(self.exit_code)
        return f"rank {self.rank} (pid {self.pid}): {how} after {self.seconds:.1f} s"

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process and its children, if there are any left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def drain(self) -> None:
        """Wait a moment until all that the ended process wrote is written."""
        deadline = time.monotonic() + _OUTPUT_WAIT
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill and reap what is left of the process, once: the pid may go to others."""
        if self._process.returncode is not None:
            return
        self.send_signal(signal.SIGKILL)
        # Reaped before, it would be unknown there.
        self._waiter.join()
        self._process.wait()
        self.drain()
        if self._log is not None:
            self._log.close()
