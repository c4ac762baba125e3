"""A program in a terminal of its own, and what is to be read there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType

__all__ = ["Terminal"]

#: What moves the cursor and sets colours.
_CONTROL = re.compile(r"\x1b(?:\[[0-9;?<>=]*[a-zA-Z]|[()][A-B0-2]|[=>])")


class Terminal:
    """Runs `command` in a terminal of `columns` × `lines`; kills it at the end."""

    def __init__(
        self, command: Sequence[str], columns: int = 120, lines: int = 30
    ) -> None:
        self._ours, theirs = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env={**os.environ, "TERM": "xterm-256color"},
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._read = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """All that was written, without what moves the cursor and sets colours."""
        return _CONTROL.sub("", self._read.decode(errors="replace"))

    def until(self, text: str, seconds: float) -> None:
        """Read until `text` was written since the last `press`."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} is not in {self.text[-4000:]}"
            if select.select([self._ours], [], [], left)[0]:
                self._take()

    def press(self, keys: str) -> None:
        """Type `keys`."""
        self._read = b""
        os.write(self._ours, keys.encode())

    def end(self, seconds: float) -> int:
        """Return the exit status of the program, which ends by itself."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-4000:]
            # It may wait for a reader.
            if select.select([self._ours], [], [], 0.05)[0]:
                self._take()
        return self.process.returncode

    def _take(self) -> None:
        try:
            self._read += os.read(self._ours, 1 << 16)
        except OSError:
            # Linux's answer once the program has closed its side.
            time.sleep(0.05)
