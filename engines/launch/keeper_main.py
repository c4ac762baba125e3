"""Keeps a process that ends with its stdin for a cluster that outlives its notebook.

`leashed` starts this file by its path with the options ``-I -S``, before the command
that it runs: an ssh, srun or salloc. What comes on stdin goes to the command, and what
the command prints to stdout. Two lines are for this process:

``{"keep": pid}``
    From now on the end of stdin is that of a notebook, and not of the ranks. The stdin
    of the command ends with the process `pid` of this host, the cluster's controller,
    which this process holds until the command has ended.
``{"keep": null}``
    The command ends with stdin again, as it does in the beginning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time

__all__ = ["HELD", "KEEP", "KEPT", "hold"]

#: What a line for this process begins with.
KEEP = b'{"keep":'
#: Seconds between the end of the command's stdin, SIGTERM and SIGKILL: a salloc whose
#: job is pending heeds SIGTERM alone.
GRACE = 4.0
#: What a controller is told: that it has holders, or that it needs none.
HELD, KEPT = b"held\n", b"kept\n"
#: Seconds that a controller gets to read it.
HEARD = 5.0


def hold(controller: int, word: bytes = HELD) -> int | None:
    """Hold a controller by its stdin until the result is closed; ``None``: it ended."""
    with contextlib.suppress(OSError):
        held = os.open(f"/proc/{controller}/fd/0", os.O_WRONLY | os.O_CLOEXEC)
        os.write(held, word)
        deadline = time.monotonic() + HEARD
        while _unread(held) and time.monotonic() < deadline:
            time.sleep(0.005)
        return held
    return None


def _unread(pipe: int) -> bool:
    """Return whether what was written to a pipe is not read yet."""
    # What is no pipe, as the null device, keeps nothing.
    with contextlib.suppress(OSError):
        return fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"
    return False


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    keeper = _Keeper(
        subprocess.Popen(
            sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: keeper.child.terminate())
    keeper.serve()
    code = keeper.child.wait()
    if code < 0:
        if -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


class _Keeper:
    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        assert child.stdin is not None
        assert child.stdout is not None
        self._stdin, self._printed = child.stdin, child.stdout.fileno()
        self._received = b""
        # A descriptor of the controller, once the cluster is kept.
        self._controller: int | None = None
        self._held: int | None = None
        self._owner_ended = False
        # When the child gets the next of these signals.
        self._next = 0.0
        self._signals = [signal.SIGTERM, signal.SIGKILL]

    def serve(self) -> None:
        """Serve until the child has ended."""
        while True:
            poll = select.poll()
            poll.register(self._printed, select.POLLIN)
            if not self._owner_ended:
                poll.register(0, select.POLLIN)
            if self._controller is not None:
                poll.register(self._controller, select.POLLIN)
            wait = None
            if self._stdin.closed and self._signals:
                wait = 1000 * max(0.0, self._next - time.monotonic())
            ready = dict(poll.poll(wait))
            if 0 in ready:
                self._listen()
            if self._controller in ready:
                self._keep(None)
                self._owner_ended = True
            if self._owner_ended and self._controller is None:
                self._end_child()
            if self._printed in ready and not self._pass_on():
                break

    def _listen(self) -> None:
        """Handle what the owner has sent."""
        chunk = os.read(0, 65536)
        self._owner_ended = not chunk
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            if line.startswith(KEEP):
                self._keep(**json.loads(line))
            elif not self._stdin.closed:
                # A child that has ended needs no message.
                with contextlib.suppress(BrokenPipeError):
                    self._stdin.write(line + b"\n")

    def _keep(self, keep: int | None) -> None:
        for one in (self._controller, self._held):
            if one is not None:
                os.close(one)
        self._controller = self._held = None
        # Of a controller that has ended already the owner has the leash as before.
        with contextlib.suppress(ProcessLookupError):
            if keep is not None:
                self._controller = os.pidfd_open(keep)
                self._held = hold(keep)

    def _pass_on(self) -> bool:
        """Pass on what the child has printed; return whether there may be more."""
        chunk = os.read(self._printed, 65536)
        line = chunk
        # Nobody reads it when the owner has ended.
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(1, line) :]
        return bool(chunk)

    def _end_child(self) -> None:
        """End the child's stdin; the child, if that did not end it."""
        now = time.monotonic()
        if not self._stdin.closed:
            self._stdin.close()
        elif self._signals and now >= self._next:
            self.child.send_signal(self._signals.pop(0))
        else:
            return
        self._next = now + GRACE


if __name__ == "__main__":
    main()
