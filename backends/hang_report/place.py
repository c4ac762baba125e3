"""Which rank of which job this process is, as far as it is known by now."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import urlsplit

from ..groups.world import world
from ..launch_variables import first_number
from .settings import ERROR_FILE, RANK, WORLD_SIZE, job_key, job_name

__all__ = ["Place"]


class Place:
    """Knows it from groups, what the program has told, and the environment."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        # Under torchrun the ranks are those that it has started, also where the script
        # has one meet the others elsewhere. Else a script may start ranks itself.
        is_torchruns = ERROR_FILE in os.environ
        self._env = dict(os.environ) if is_torchruns else os.environ
        self._rank: int | None = None
        self._size: int | None = None
        #: What the ranks of the job have in common; empty: the environment tells.
        self.job = ""
        #: Returns how the last cell of an engine ended; empty while one runs.
        self.exit_while_idle: Callable[[], str] = lambda: ""

    def tell(self, rank: int, size: int, init_method: str | None = None) -> None:
        """Note the arguments of `init_process_group`; -1: the environment tells."""
        self.assign(rank, size)
        url = urlsplit(init_method or "env://")
        self.job = "" if url.scheme == "env" else f"{url.netloc}{url.path}"

    def assign(self, rank: int, size: int) -> None:
        """Note the rank and the number of ranks; -1: the environment tells."""
        self._rank = rank if rank >= 0 else None
        self._size = size if size > 0 else None

    @property
    def rank(self) -> int | None:
        ranks = [world.rank, *(one.rank for one in world.sources), self._rank]
        known = next((one for one in ranks if one is not None), None)
        return first_number(RANK) if known is None else known

    @property
    def world_size(self) -> int | None:
        if world.size is not None or self._size is not None:
            return world.size or self._size
        return first_number(WORLD_SIZE)

    @property
    def key(self) -> str:
        """What the ranks of the job have in common on a host, and no others have."""
        return job_key(self._parent, self._env, job=self.job)

    @property
    def name(self) -> str:
        return job_name(job=self.job)

    @property
    def address(self) -> str:
        """Where the ranks meet; empty where it is not known."""
        env = os.environ
        return self.job or ":".join(
            filter(None, (env.get("MASTER_ADDR"), env.get("MASTER_PORT")))
        )
