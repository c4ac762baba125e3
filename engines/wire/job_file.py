"""Job files: where the jobs of this user listen, with their keys.

A job writes one into Jupyter's runtime folder, readable by its user alone, as a kernel
does with its connection file, and deletes it at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from jupyter_core.paths import jupyter_runtime_dir, secure_write

__all__ = ["JobFile", "job_files"]

_PREFIX = "rankscope-job-"


@dataclass(frozen=True)
class JobFile:
    """How to attach to a job of this user."""

    host: str
    port: int
    key: str
    #: The script, as the job was started with it.
    script: str
    #: The process that listens, and the name of its host.
    pid: int
    node: str

    @property
    def address(self) -> str:
        """``HOST:PORT``, as `%dist_attach` takes it."""
        return f"{self.host}:{self.port}"

    @property
    def path(self) -> Path:
        """The file."""
        name = f"{_PREFIX}{self.node}-{self.port}.json"
        return Path(jupyter_runtime_dir()) / name

    def write(self) -> None:
        """Write the file, with mode 0600; raises `OSError`."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with secure_write(str(self.path)) as file:
            json.dump(asdict(self), file)

    def remove(self) -> None:
        """Delete the file, if it is there."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    @property
    def _stale(self) -> bool:
        """Whether the process has ended without removing the file."""
        if self.node != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def job_files() -> list[JobFile]:
    """Return the jobs of this user that run, the newest first.

    The files of jobs that were killed are deleted.
    """
    found = []
    for path in Path(jupyter_runtime_dir()).glob(f"{_PREFIX}*.json"):
        try:
            job = JobFile(**json.loads(path.read_text(encoding="utf-8")))
            age = path.stat().st_mtime
        except (OSError, ValueError, TypeError):
            # It is being written or deleted, or is none of ours.
            continue
        if job._stale:
            job.remove()
        else:
            found.append((age, job))
    return [job for _, job in sorted(found, key=lambda one: -one[0])]
