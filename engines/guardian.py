"""The guardian: a small process that ends a cluster whose notebook was killed.

ipyparallel's controller and engines run on when their owner is gone, and a
killed owner can stop nobody. The guardian holds the read end of a pipe whose
other end is the owner's alone. End of file without a good-bye, or the owner's
death, and it ends what it was told to watch. It runs as a plain file, without
site-packages, so that it starts in milliseconds and needs nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

__all__ = ["Guardian", "birth"]

#: Seconds between SIGTERM and SIGKILL.
GRACE = 2.0
#: Seconds that ipyparallel gets to stop what is not on this machine.
STOP_TIMEOUT = 15.0


def birth(pid: int) -> int | None:
    """When process `pid` started, in clock ticks; ``None`` if it is not there.

    With it a pid that was given to somebody else meanwhile is told apart. A
    zombie is not there.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in parentheses, may hold anything: count from its end.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Guardian:
    """The owner's handle: tell it what to watch, and to let go at the end."""

    def __init__(self, stop_file: str | None = None) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        # Its own session: signals to the notebook's process group, and a
        # terminal that hangs up, must not take the guardian along.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self.pid = self._process.pid
        if stop_file is not None:
            self._say({"stop": [sys.executable, stop_file]})

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def watch(self, pids: list[int], files: list[str]) -> None:
        """Add processes of this machine to end, and files to remove."""
        born = [(pid, birth(pid)) for pid in pids]
        self._say(
            {"pids": [pair for pair in born if pair[1] is not None], "files": files}
        )

    def let_go(self) -> None:
        """End the guardian: everything it watches is gone, or is to stay."""
        assert self._process.stdin is not None
        try:
            self._say({"bye": True})
            self._process.stdin.close()
        except BrokenPipeError:
            # Somebody killed it. Nothing is lost: we are here to clean up.
            pass
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- in the guardian's process ---------------------------------------------


class _Watch:
    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.pids: dict[int, int] = {}
        self.files: list[str] = []
        self.stop: list[str] | None = None
        self.released = False

    def run(self) -> None:
        buffer = b""
        poll = select.poll()
        poll.register(0, select.POLLIN | select.POLLHUP)
        try:
            # Beside the pipe: a child that the owner forked may hold its end.
            owner = os.pidfd_open(self.owner)
        except OSError:
            owner = -1
        else:
            poll.register(owner, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if 0 in ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    return
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self.note(json.loads(line))
            elif owner in ready:
                return

    def note(self, message: dict[str, Any]) -> None:
        self.pids.update(message.get("pids", ()))
        self.files += message.get("files", ())
        self.stop = message.get("stop", self.stop)
        self.released = self.released or bool(message.get("bye"))

    def end_all(self) -> None:
        """Terminate, then kill; what they started goes with them."""
        if self.stop is not None:
            self.stop_elsewhere(self.stop)
        self.pids.update(_descendants(self.pids))
        deadline = time.monotonic() + GRACE
        self.signal(signal.SIGTERM)
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.pids.update(_descendants(self.pids))
        self.signal(signal.SIGKILL)
        for path in self.files:
            try:
                os.remove(path)
            except FileNotFoundError:
                pass

    def stop_elsewhere(self, command: list[str]) -> None:
        executable, cluster_file = command
        code = (
            "import sys; from ipyparallel import Cluster; "
            "Cluster.from_file(sys.argv[1]).stop_cluster_sync()"
        )
        try:
            subprocess.run(
                [executable, "-c", code, cluster_file],
                timeout=STOP_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            # What is on this machine is ended below whatever happened here.
            pass

    def living(self) -> list[int]:
        return [pid for pid, born in self.pids.items() if birth(pid) == born]

    def signal(self, signum: int) -> None:
        for pid in self.living():
            try:
                os.kill(pid, signum)
            except OSError:
                pass


def _descendants(pids: dict[int, int]) -> dict[int, int]:
    """Processes whose parents are among `pids`, at any depth, with their births."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found: dict[int, int] = {}
    waiting = [pid for pid, born in pids.items() if birth(pid) == born]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            born = birth(child)
            if born is not None and child not in found and child not in pids:
                found[child] = born
                waiting.append(child)
    return found


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    watch = _Watch(int(sys.argv[1]))
    watch.run()
    if not watch.released:
        watch.end_all()


if __name__ == "__main__":
    main()
