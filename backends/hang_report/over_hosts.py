"""What the ranks of a job on several hosts tell each other as they leave its groups.

The store of the job has it, once, and nothing before: each rank leaves its last ops
there, a few KB, and the one that comes last reads those of all. Ranks of one host have
a folder for that: see `last_line`.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from ..observe.joint_ops import share_of
from .last_line import sentence_of

__all__ = ["LAST", "SERVER_WAIT", "KeyValues", "OverHosts"]

#: The newest records that a rank leaves in the store: fewer in a large job.
LAST = 120
#: Seconds that a rank which serves the store waits for the others to come.
SERVER_WAIT = 1.0

_KEY = "rankscope/last_ops"


class KeyValues(Protocol):
    """What a store of ours and one of torch have in common."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class OverHosts:
    """What this rank has found as it left its groups."""

    def __init__(self) -> None:
        #: Whether its ops came to the others.
        self.has_left = False
        #: Who kept the others waiting; empty: nobody for sure, or another rank tells.
        self.line = ""
        #: Why they did not; empty where they did, or nothing was to be left.
        self.unknown = ""

    def leave(
        self,
        store: KeyValues,
        rank: int,
        size: int,
        host: str,
        ops: Mapping[str, Any],
        *,
        serves: bool,
    ) -> None:
        """Leave the last ops of this rank; read those of all, if it comes last.

        `ops` has ``groups`` and ``records`` as `last_ops` returns them. With `serves`
        the store ends with this rank, which waits for the others for `SERVER_WAIT`
        seconds. Raises what `store` raises.
        """
        # A process may make groups once more over the same store.
        key = f"{_KEY}/{store.add(f'{_KEY}/{rank}', 1)}"
        last = share_of(size, LAST)
        left = {**ops, "records": ops["records"][-last:], "host": host}
        store.set(f"{key}/{rank}", zlib.compress(json.dumps(left).encode(), 9))
        is_last = store.add(f"{key}/count", 1) == size
        self.has_left = True
        if is_last:
            found = {
                one: json.loads(zlib.decompress(store.get(f"{key}/{one}")))
                for one in range(size)
            }
            hosts = {one: told["host"] for one, told in found.items()}
            self.line = sentence_of(found, hosts)
            store.set(f"{key}/read", "1")
        elif serves:
            deadline = time.monotonic() + SERVER_WAIT
            while not store.check([f"{key}/read"]) and time.monotonic() < deadline:
                time.sleep(0.01)
