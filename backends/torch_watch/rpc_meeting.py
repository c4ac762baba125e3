"""The workers of an ``init_rpc`` meet in torch's store before torch's own exchange.

Torch counts the calls of ``init_rpc`` in each process and meets under that number, so
that a fresh process among others, or one whose cell failed before the call, would wait
in vain. Here the workers agree on a name of their own for each attempt.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DistStoreTimeoutError
from ..rank_sets import format_ranks
from .rpc_rendezvous import POLL

__all__ = ["meet"]


@contextmanager
def meet(
    store: Any, rank: int, size: int, timeout: float, check: Callable[[], None]
) -> Iterator[tuple[Any, dict[int, int]]]:
    """Wait for all workers; yield a store for this attempt and the global ranks.

    Parameters
    ----------
    store
        The ``PrefixStore`` that torch made for the call.
    rank, size
        The id of this worker, and the number of workers.
    timeout
        Seconds to wait for the others.
    check
        Is called again and again; raises where the caller waits no longer.

    Raises
    ------
    DistStoreTimeoutError
        Where a worker is missing after `timeout` seconds.
    """
    from torch.distributed import PrefixStore

    base = store.underlying_store
    keys = [f"rankscope/init_rpc/{worker}" for worker in range(size)]
    base.set(keys[rank], f"{uuid.uuid4().hex} {os.environ.get('RANK', rank)}")
    try:
        _await(base, keys, timeout, check)
        values = [base.get(key).decode() for key in keys]
        ranks = {worker: int(one.split()[1]) for worker, one in enumerate(values)}
        attempt = hashlib.sha1("".join(values).encode()).hexdigest()
        yield PrefixStore(f"rankscope/rpc/{attempt}", base), ranks
    finally:
        # By now all others have read it, or this worker's next attempt replaces it.
        base.delete_key(keys[rank])


def _await(
    base: Any, keys: list[str], timeout: float, check: Callable[[], None]
) -> None:
    deadline = time.monotonic() + timeout
    while not base.check(keys):
        check()
        if time.monotonic() > deadline:
            missing = [n for n, key in enumerate(keys) if not base.check([key])]
            raise DistStoreTimeoutError(
                f"init_rpc: worker {format_ranks(missing)} did not call it within "
                f"{timeout:g} s (rpc_timeout): every worker has to"
            )
        time.sleep(POLL)
