"""Job files: where the jobs of this user listen, with their keys."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rankscope.backends.stores.process_end import stat_fields

from .runtime_files import RuntimeFile, runtime_path

__all__ = ["JobFile", "is_out_of_reach", "job_files"]

#: Addresses at which only processes of the same host connect.
_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class JobFile(RuntimeFile):
    """How to attach to a job of this user."""

    PREFIX: ClassVar[str] = "rankscope-job-"

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
        return runtime_path(f"{self.PREFIX}{self.node}-{self.port}.json")

    @property
    def _stale(self) -> bool:
        if self.node != socket.gethostname():
            return False
        try:
            # A zombie, as a launcher leaves it for others who ask how it has ended.
            return stat_fields(self.pid)[0] in (b"Z", b"X")
        except OSError:
            return True


def is_out_of_reach(address: str, node: str) -> bool:
    """Return whether what listens at `address` of host `node` is only for that."""
    return address.startswith(_LOOPBACK) and node != socket.gethostname()


def job_files() -> list[JobFile]:
    """Return this user's jobs in reach, the newest first; delete dead files."""
    found = []
    for job in JobFile.load_all():
        if job._stale:
            job.remove()
        elif not is_out_of_reach(job.host, job.node):
            found.append(job)
    return found
