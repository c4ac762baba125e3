"""Ranks that write no reports yet: found among the processes of this host.

A script on our own groups joins the others in `init_process_group`. Where a rank does
not come to it, its environment says which one it is, and py-spy where it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

from ..attach.jobs import ancestors
from ..attach.launchers import VARIABLES, stated_rank
from ..attach.process_table import Process, read_table
from ..attach.py_spy import PySpyError, dump, find_py_spy
from .part import STACKS, write_facts

__all__ = ["add_unjoined"]

#: Stacks that are read: each takes a twentieth of a second, and the ranks wait.
_MOST = 16


def add_unjoined(folder: Path, ranks: Collection[int]) -> None:
    """Add what is known of those of `ranks` whose processes are on this host."""
    found = _processes(ranks)
    for number, (rank, process) in enumerate(sorted(found.items())):
        problems = []
        try:
            if number < _MOST:
                stacks = dump(find_py_spy(), process.pid)
                (folder / f"{STACKS}{rank}.txt").write_bytes(stacks)
        except PySpyError as error:
            problems.append(f"its stacks: {error}")
        facts = {
            "host": socket.gethostname(),
            "pid": process.pid,
            "has_ended": False,
            "problems": problems,
        }
        write_facts(folder, rank, facts)


def _processes(ranks: Collection[int]) -> dict[int, Process]:
    own = stated_rank(
        {name: os.environ[name] for name in VARIABLES & os.environ.keys()}
    )
    table = read_table()
    found: dict[int, Process] = {}
    for process in sorted(table.values(), key=lambda one: (one.started, one.pid)):
        stated = process.stated
        if own is None or stated is None or stated.rank not in ranks:
            continue
        if not process.is_python or process.user != os.getuid():
            continue
        alike = (stated.launcher, stated.job) == (own.launcher, own.job)
        # The workers of a data loader have the environment of their rank.
        above = (one for one in ancestors(process, table) if one.is_python)
        inherited = any(one.stated == stated for one in above)
        if alike and not inherited and (own.job or process.parent == os.getppid()):
            found.setdefault(stated.rank, process)
    return found
