"""The start of torch's RPC: workers meet; an interrupted start leaves nothing."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

from ..errors import DistError
from .private.rpc import RpcNames
from .rpc_calls import RpcCall, RpcLog, this_rank
from .rpc_meeting import meet
from .rpc_rendezvous import Rendezvous, check_wanted
from .rpc_waits import Wait

__all__ = ["RpcBeginning"]

#: Seconds that the thread of an `init_rpc` which was given up may take to end.
_LEAVE = 2.0


class RpcBeginning:
    """The wrappers of ``init_rpc`` and of what it calls.

    Parameters
    ----------
    names
        The private names of torch's RPC.
    log
        Where the calls are noted.
    apart
        Calls a function on a thread of its own, so that the wait can be ended.
    set_ranks
        Is called with the global ranks by worker id.
    """

    def __init__(
        self,
        names: RpcNames,
        log: RpcLog,
        apart: Callable[[RpcCall, Callable[[Wait], Any]], Any],
        set_ranks: Callable[[dict[int, int]], None],
    ) -> None:
        self._names = names
        self._log = log
        self._apart = apart
        self._set_ranks = set_ranks
        self._rendezvous = Rendezvous()
        # Held by the thread of an `init_rpc`, also where it was given up.
        self._under_way = threading.Lock()
        # The wait of that `init_rpc`.
        self._wait = Wait()

    def tcp_store(self, original: Any) -> Any:
        """Return what torch's rendezvous calls in the place of ``TCPStore``."""
        return self._rendezvous.wrap(original)

    def init_rpc(self, original: Any) -> Any:
        """Return what is called in the place of ``init_rpc``."""

        @functools.wraps(original)
        def init_rpc(*args: Any, **named: Any) -> Any:
            self._end_earlier()
            given = inspect.signature(original).bind_partial(*args, **named).arguments
            size = given.get("world_size")
            if size and not self._names.running:
                # Until the ranks of all workers are known, the ids are taken for them.
                self._set_ranks({worker: worker for worker in range(size)})

            def begin(wait: Wait) -> Any:
                with self._under_way, self._rendezvous.endable(wait):
                    check_wanted(wait)
                    self._wait = wait
                    return original(*args, **named)

            return self._apart(self._log.begin("init_rpc"), begin)

        return init_rpc

    def _end_earlier(self) -> None:
        """Wait until the thread of an earlier `init_rpc` has ended; fail if it stays.

        One that waits for other workers sees within a moment that none waits for it.
        """
        if not self._under_way.acquire(timeout=_LEAVE):
            raise DistError(
                f"init_rpc on {this_rank()}: an earlier call, which was interrupted "
                "or aborted, is still in torch's exchange of addresses with the other "
                "workers, and ends with it, or after rpc_timeout: call init_rpc again "
                "then, or %dist_restart the ranks that called it"
            )
        self._under_way.release()

    def init_backend(self, original: Any) -> Any:
        """Return what ``init_rpc`` calls once it has its store."""

        @functools.wraps(original)
        def init_backend(
            backend: Any,
            store: Any,
            name: str,
            rank: int,
            size: int | None,
            options: Any,
        ) -> Any:
            if not size:
                # Workers come and go: their ids are taken for their ranks.
                result = original(backend, store, name, rank, size, options)
                infos = self._names.api._get_current_rpc_agent().get_worker_infos()
                self._set_ranks({info.id: info.id for info in infos})
                return result
            # Torch numbers its exchanges in each process: a fresh one begins anew.
            self._names.api._all_gather_sequence_id.clear()
            self._names.api._all_gather_sequence_id_to_states.clear()
            # Torch has the worker that hosts the store wait for longer.
            timeout = max(options.rpc_timeout or math.inf, self._rendezvous.patience)
            wait = self._wait
            with meet(store, rank, size, timeout, lambda: check_wanted(wait)) as met:
                ours, ranks = met
                self._set_ranks(ranks)
                return original(backend, ours, name, rank, size, options)

        return init_backend
