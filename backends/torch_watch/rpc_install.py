"""The wrappers in torch's RPC: they note each call, and make each wait abortable."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DistAbortedError, DistNetworkError
from ..groups.abort_reason import AbortReason
from .errors import explain_as
from .private.rpc import RpcNames
from .replacing import Wrapper, replace
from .rpc_beginning import RpcBeginning
from .rpc_calls import RpcCall, RpcLog, this_rank
from .rpc_waits import Wait, call_apart, wait_for

__all__ = ["RpcWrappers"]

#: What torch's errors say where a connection to a worker ended, or could not be made.
_SIGNS = ("eof (this error", "tensorpipe/transport/", "tensorpipe/channel/")

#: The functions of torch by which an RRef calls a method of its value.
_OF_RREF = ("_local_invoke", "_local_invoke_async_execution", "_invoke_rpc")


class RpcWrappers:
    """Puts the wrappers into torch, and takes them out.

    Parameters
    ----------
    names
        The private names of torch's RPC.
    log
        Where the calls are noted.
    on_ranks
        Is called with the global ranks by worker id, when RPC is initialized, or is
        about to be.
    """

    def __init__(
        self,
        names: RpcNames,
        log: RpcLog,
        on_ranks: Callable[[dict[int, int]], None],
    ) -> None:
        self._names = names
        self._log = log
        self._on_ranks = on_ranks
        self._ranks: dict[int, int] = {}
        self._beginning = RpcBeginning(names, log, self._apart, self._set_ranks)
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Put the wrappers into torch."""
        names = self._names
        beginning = self._beginning
        self._replace(names.rpc, "init_rpc", beginning.init_rpc)
        self._replace(names.rpc, "_init_rpc_backend", beginning.init_backend)
        self._replace(names.api, "_invoke_rpc", self._invoke)
        original = names.api.remote
        self._replace(names.api, "remote", self._remote)
        if names.rpc.remote is original:
            self._replace(names.rpc, "remote", self._remote)
        self._replace(names.internal, "_run_function", self._run_function)
        self._replace(names.rendezvous, "TCPStore", beginning.tcp_store)
        self._replace(names.future, "wait", self._wait)
        self._replace(names.rref, "to_here", self._to_here)
        self._replace(names.autograd, "backward", self._backward)
        self._replace(names.agent, "join", self._shutdown_step)
        self._replace(names.agent, "shutdown", self._shutdown_step)
        self._replace(names.api.AllGatherStates, "__init__", self._new_states)

    def remove(self) -> None:
        """Put torch's own names back, unless others have replaced them since."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, wrap: Wrapper) -> None:
        self._undo.append(replace(owner, name, wrap))

    # -- waits ---------------------------------------------------------------

    @contextmanager
    def _waiting(self, call: RpcCall | None) -> Iterator[Wait]:
        """Have an abort end the wait of the block, with our error."""
        wait = Wait()
        self._log.add_wait(wait, call)
        try:
            yield wait
            if wait.aborted is not None:
                raise _aborted(call, wait)
        except BaseException as error:
            wait.given_up = True
            if call is not None:
                self._log.end(call, error)
            raise
        finally:
            self._log.remove_wait(wait)

    def _apart(self, call: RpcCall, function: Callable[[Wait], Any]) -> Any:
        """Call `function`, which blocks in C++, so that the wait can be ended."""
        try:
            with self._waiting(call) as wait:
                result = call_apart(lambda: function(wait), wait)
            value = result()
        except BaseException as error:
            self._fail(call, error)
            raise
        self._log.end(call)
        return value

    def _fail(self, call: RpcCall, error: BaseException) -> None:
        self._log.end(call, error)
        text = str(error)
        if text.startswith("On WorkerInfo") or not any(one in text for one in _SIGNS):
            return
        rank = "" if call.peer is None else f" (rank {call.peer})"
        explain_as(
            error,
            DistNetworkError(
                f"{call.title}{rank} on {this_rank()}: the connection to the worker "
                "ended, or could not be made: its process is dead, or it has shut RPC "
                "down; %dist_status shows which. To go on: "
                "rpc.shutdown(graceful=False) on the living ranks, %dist_restart for "
                "the dead one, then rpc.init_rpc(…) on all",
                op=call.op,
                culprits=() if call.peer is None else (call.peer,),
            ),
        )

    def _wait(self, original: Any) -> Any:
        @functools.wraps(original)
        def wait(future: Any) -> Any:
            call = self._log.of_future(future)
            main = threading.current_thread() is threading.main_thread()
            if (call is None and not main) or future.done():
                return self._finish(call, original, future)
            if call is not None:
                self._log.note_wait(call)
            with self._waiting(call) as waiting:
                wait_for(future, waiting)
            return self._finish(call, original, future)

        return wait

    def _finish(self, call: RpcCall | None, original: Any, future: Any) -> Any:
        try:
            value = original(future)
        except BaseException as error:
            if call is not None:
                self._fail(call, error)
            raise
        if call is not None:
            self._log.end(call)
        return value

    # -- calls ---------------------------------------------------------------

    def _begin(self, op: str, to: Any, func: Any, args: Any) -> RpcCall:
        worker, peer = self._worker(to)
        return self._log.begin(op, worker, peer, _name_of(func, args))

    def _worker(self, to: Any) -> tuple[str, int | None]:
        """Return the name and the global rank of a worker, as far as they are known."""
        try:
            info = self._names.api._to_worker_info(to)
        except (RuntimeError, ValueError):
            # No such worker: torch's own call raises that.
            return str(to), None
        return info.name, self._ranks.get(info.id)

    def _invoke(self, original: Any) -> Any:
        @functools.wraps(original)
        def invoke(to: Any, func: Any, mode: Any, *args: Any, **named: Any) -> Any:
            given = args[0] if args else named.get("args")
            call = self._begin(f"rpc_{mode.value}", to, func, given)
            try:
                future = original(to, func, mode, *args, **named)
            except BaseException as error:
                self._fail(call, error)
                raise
            self._log.attach(call, future)
            return future

        return invoke

    def _remote(self, original: Any) -> Any:
        @functools.wraps(original)
        def remote(to: Any, func: Any, *args: Any, **named: Any) -> Any:
            given = args[0] if args else named.get("args")
            call = self._begin("remote", to, func, given)
            try:
                rref = original(to, func, *args, **named)
            except BaseException as error:
                self._fail(call, error)
                raise
            # The value of an RRef that came from elsewhere has no such future: torch
            # ends the process where it is asked for one.
            future = rref._get_future()
            self._log.attach(call, future)
            self._log.keep(rref, call, future)
            return rref

        return remote

    def _to_here(self, original: Any) -> Any:
        @functools.wraps(original)
        def to_here(rref: Any, *args: Any, **named: Any) -> Any:
            made, future = self._log.of_rref(rref) or (None, None)
            call = self._log.begin(
                "to_here",
                rref.owner_name(),
                self._ranks.get(rref.owner().id),
                "" if made is None else made.function,
            )
            if future is None and not self._names.in_autograd_context():
                return self._apart(call, lambda _: original(rref, *args, **named))
            try:
                if future is not None and not future.done():
                    with self._waiting(call) as waiting:
                        wait_for(future, waiting)
                # A context of autograd belongs to its thread.
                value = original(rref, *args, **named)
            except BaseException as error:
                self._fail(call, error)
                raise
            self._log.end(call)
            return value

        return to_here

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **named: Any) -> Any:
            call = self._log.begin("backward")
            return self._apart(call, lambda _: original(*args, **named))

        return backward

    # -- calls of others -----------------------------------------------------

    def _run_function(self, original: Any) -> Any:
        @functools.wraps(original)
        def run_function(python_udf: Any) -> Any:
            func, args = (getattr(python_udf, name, None) for name in ("func", "args"))
            served = self._log.serve(_name_of(func, args))
            result = None
            try:
                result = original(python_udf)
            finally:
                pending = isinstance(result, self._names.future) and not result.done()
                self._log.leave(served, returned=pending)
            if pending:
                result.add_done_callback(lambda _: self._log.end_serving(served))
            return result

        return run_function

    # -- start and end -------------------------------------------------------

    def _set_ranks(self, ranks: dict[int, int]) -> None:
        self._ranks = ranks
        self._on_ranks(ranks)

    def _shutdown_step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(agent: Any, *args: Any, **named: Any) -> Any:
            call = self._log.begin("shutdown")
            return self._apart(call, lambda _: original(agent, *args, **named))

        return step

    def _new_states(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(states: Any) -> None:
            original(states)
            states.proceed_signal = _Proceed(self.wait_for_workers)

        return init

    def wait_for_workers(self, proceed: _Proceed, timeout: float | None) -> None:
        """Wait until all workers have come to a shutdown; fail where one is gone."""
        # Torch's `init_rpc` exchanges devices in the same way.
        beginning = self._log.wait_of("init_rpc") is not None
        call = self._log.begin("init_rpc" if beginning else "shutdown")
        with self._waiting(call) as wait:
            proceed.on_set(wait.end)
            api = self._names.api
            agent = api._get_current_rpc_agent()
            own = agent.get_worker_info().id
            for info in agent.get_worker_infos():
                if info.id != own:
                    self._ping(info, wait)
            wait.block(timeout)
        self._log.end(call)

    def _ping(self, info: Any, wait: Wait) -> None:
        """Abort `wait` if the process of a worker does not answer any more."""

        def check(future: Any) -> None:
            try:
                future.value()
            except RuntimeError as error:
                wait.abort(
                    AbortReason(
                        f"{info.name} is gone ({error}): its process is dead, or has "
                        "called rpc.shutdown(graceful=False)",
                        this_rank(),
                        culprits=(self._ranks.get(info.id, info.id),),
                    )
                )

        api = self._names.api
        call = api._invoke_rpc_builtin(info, "aten::zeros", api.UNSET_RPC_TIMEOUT, [1])
        call.add_done_callback(check)


class _Proceed(threading.Event):
    """The signal for which torch waits in a shutdown, with a wait of ours."""

    def __init__(
        self, wait_for_workers: Callable[[_Proceed, float | None], None]
    ) -> None:
        super().__init__()
        self._wait_for_workers = wait_for_workers
        self._callbacks: list[Callable[[], None]] = []

    def on_set(self, callback: Callable[[], None]) -> None:
        """Call `callback` at `set`, or now if that has been."""
        self._callbacks.append(callback)
        if self.is_set():
            callback()

    def set(self) -> None:
        """Let the shutdown go on."""
        super().set()
        for callback in self._callbacks:
            callback()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`; fail where a worker is gone."""
        if not self.is_set():
            self._wait_for_workers(self, timeout)
        return self.is_set()


def _aborted(call: RpcCall | None, wait: Wait) -> DistAbortedError:
    reason = wait.aborted
    assert reason is not None
    what = "a wait for RPCs" if call is None else call.title
    return DistAbortedError(
        f"{what} on {this_rank()} was aborted: {reason}",
        op=None if call is None else call.op,
        culprits=tuple(reason.culprits),
        reason=reason.text,
    )


def _name_of(func: Any, args: Any) -> str:
    """Return the name of a function that an RPC runs."""
    name = getattr(func, "__qualname__", None) or getattr(func, "name", None)
    if name in _OF_RREF and args and len(args) > 1:
        return str(args[1])
    return str(name or type(func).__name__)
