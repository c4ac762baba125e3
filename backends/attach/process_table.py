"""The processes of this host, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from .launchers import VARIABLES, Stated, is_python, launcher_of, stated_rank

__all__ = ["Process", "read_table"]


@dataclass(frozen=True)
class Process:
    """One process, as it was when the table was read."""

    pid: int
    parent: int
    command: tuple[str, ...] = ()
    #: What ``ps -o comm`` shows.
    name: str = ""
    #: The file of its program; empty where that may not be read.
    program: str = ""
    user: int = 0
    #: When it was started, in seconds since 1970.
    started: float = 0.0
    #: Those of `VARIABLES` that it was started with. What else is in its environment
    #: may be secret, and is not kept.
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_python(self) -> bool:
        """Whether a Python interpreter runs in it, by the name of its program."""
        names = (self.program, *self.command[:1])
        return any(is_python(one) for one in names) and not self.launcher

    @property
    def launcher(self) -> str:
        # slurmstepd writes its step into its title: `slurmstepd: [1234.0]`.
        title = self.command[0].split()[:1] if len(self.command) == 1 else ()
        return launcher_of(self.command) or launcher_of(title)

    @property
    def stated(self) -> Stated | None:
        return stated_rank(self.variables)


_FACTS = (
    *("pid", "ppid", "status", "cmdline", "name", "exe", "uids", "create_time"),
    "environ",
)


def read_table() -> dict[int, Process]:
    """Return every process that runs on this host but this one, by its pid."""
    table = {}
    # A fact that this user may not read is None.
    for one in psutil.process_iter(_FACTS):
        facts = one.info
        pid = facts["pid"]
        # One that has ended, and whose parent has not asked how, shows what it was not.
        if pid == os.getpid() or facts["status"] == psutil.STATUS_ZOMBIE:
            continue
        uids = facts["uids"]
        table[pid] = Process(
            pid,
            facts["ppid"] or 0,
            tuple(facts["cmdline"] or ()),
            facts["name"] or "",
            facts["exe"] or "",
            uids.real if uids is not None else -1,
            facts["create_time"] or 0.0,
            {
                name: value
                for name, value in (facts["environ"] or {}).items()
                if name in VARIABLES
            },
        )
    return table
