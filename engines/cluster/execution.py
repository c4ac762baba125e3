"""Execution: one cell on some ranks, while the cell runs and afterwards."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope.backends.rank_sets import name_ranks

from ..errors import ExecutionError, RankError, unpack_details
from ..wire import message_types
from ..wire.print_marks import MARKED, without_marks

__all__ = ["Execution", "Output"]

_log = logging.getLogger(__name__)

#: A Jupyter output: ``output_type`` is ``stream``, ``display_data``,
#: ``update_display_data``, ``execute_result``, ``clear_output`` or ``error``.
Output = dict[str, Any]

_OUTPUTS = (
    "stream",
    "display_data",
    "update_display_data",
    "execute_result",
    "clear_output",
    "error",
)


class Execution:
    """A cell that runs, or ran, on `ranks`.

    Outputs arrive on the I/O thread of the cluster's client while the cell
    runs. Every method may be called from any thread. A `timeout` is the seconds to wait
    at most.
    """

    def __init__(
        self,
        code: str,
        ranks: Sequence[int],
        cell: int | None,
        group: str | None,
        keep_value: bool = False,
    ) -> None:
        self.code = code
        self.ranks = list(ranks)
        self.cell = cell
        self.group = group
        #: Whether the ranks keep the value of the last expression, to be fetched.
        self.keep_value = keep_value
        #: What the ranks know the cell by.
        self.key = uuid.uuid4().hex
        self.began = time.time()
        #: Rank → seconds it took, once it is done.
        self.durations: dict[int, float] = {}
        self._outputs: dict[int, list[Output]] = {rank: [] for rank in self.ranks}
        # Of threads and children that outlive the cell on their rank.
        self._late: list[tuple[int, Output]] = []
        self._heard: set[int] = set()
        self._late_callbacks: list[Callable[[int, Output], None]] = []
        self._errors: dict[int, RankError] = {}
        self._details: dict[int, dict[str, Any]] = {}
        #: The ranks whose status came with their error: that after the cell.
        self.reported = self._details.keys()
        self._running = set(self.ranks)
        self._callbacks: list[Callable[[int, Output], None]] = []
        self._data: list[tuple[int, dict[str, Any]]] = []
        self._data_callbacks: list[Callable[[int, dict[str, Any]], None]] = []
        self._done_callbacks: list[Callable[[Execution], None]] = []
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)

    # -- calls of the user ---------------------------------------------------------

    def outputs(self, rank: int) -> list[Output]:
        """Return the output of `rank` so far.

        That of a thread or a child which outlives the cell comes after the cell's own.

        Parameters
        ----------
        rank : int
            The rank.

        Returns
        -------
        list of dict
            Jupyter's outputs: ``output_type`` is ``stream``, whose ``text`` was
            printed, ``execute_result``, ``display_data`` or ``error``, among others.
        """
        with self._lock:
            return [
                {key: value for key, value in output.items() if key != MARKED}
                for output in self._all_outputs(rank)
            ]

    def _all_outputs(self, rank: int) -> list[Output]:
        late = [output for whose, output in self._late if whose == rank]
        return self._outputs[rank] + late

    def on_output(
        self, callback: Callable[[int, Output], None], *, replay: bool = True
    ) -> None:
        """Call ``callback(rank, output)`` for each output, on the I/O thread.

        Parameters
        ----------
        callback : callable
            It must not wait.
        replay : bool, default True
            Whether the callback first gets all earlier outputs, on the calling thread,
            so that it misses none.
        """
        with self._lock:
            if replay:
                for rank in self.ranks:
                    for output in self._all_outputs(rank):
                        callback(rank, output)
            self._callbacks.append(callback)

    def on_late_output(self, callback: Callable[[int, Output], None]) -> None:
        """Call ``callback(rank, output)`` for what comes after the end on `rank`.

        A thread or a child that the cell started may print on. The callback first gets
        what has come already, on the calling thread; the rest follows on the I/O
        thread.

        Parameters
        ----------
        callback : callable
            It must not wait.
        """
        with self._lock:
            for rank, output in self._late:
                callback(rank, output)
            self._late_callbacks.append(callback)

    def on_data(self, callback: Callable[[int, dict[str, Any]], None]) -> None:
        """Call ``callback(rank, data)`` for data that the cell sends beside its output.

        The callback first gets all earlier data, on the calling thread; the rest
        follows on the I/O thread.

        Parameters
        ----------
        callback : callable
            It must not wait.
        """
        with self._lock:
            for rank, data in self._data:
                callback(rank, data)
            self._data_callbacks.append(callback)

    def on_done(self, callback: Callable[[Execution], None]) -> None:
        """Call ``callback(execution)`` once all ranks are done, from any thread.

        Parameters
        ----------
        callback : callable
            It must not wait.
        """
        with self._lock:
            if self._running:
                self._done_callbacks.append(callback)
                return
        callback(self)

    @property
    def done(self) -> bool:
        """Whether every rank is done, or dead."""
        return not self._running

    @property
    def ranks_running(self) -> list[int]:
        """The ranks that the cell still runs on."""
        with self._lock:
            return sorted(self._running)

    @property
    def errors(self) -> dict[int, RankError]:
        """Rank → error, for the ranks that failed so far."""
        with self._lock:
            return {rank: self._errors[rank] for rank in sorted(self._errors)}

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for every rank; return whether all are done.

        ``False``: `timeout` passed, and the cell runs on.
        """
        with self._ended:
            return self._ended.wait_for(lambda: not self._running, timeout)

    def result(self, timeout: float | None = None) -> Execution:
        """Wait for the end and return this object; raise the error if a rank failed.

        Raises
        ------
        ExecutionError
            A rank failed; its ``errors`` has the error of each that did.
        TimeoutError
            `timeout` passed; the message names the ranks that are not done, and has
            the errors of those that failed. The cell runs on.
        """
        done, errors = self.wait(timeout), self.errors
        failed = ExecutionError(errors) if errors else None
        if not done:
            raise TimeoutError(
                f"after {timeout:g} s the cell still runs on "
                f"{name_ranks(self.ranks_running)}" + (f"; {failed}" if failed else "")
            ) from failed
        if failed:
            raise failed
        return self

    def __repr__(self) -> str:
        running = self.ranks_running
        if running:
            state = f"running on {name_ranks(running)}"
        else:
            state = f"failed on {name_ranks(self.errors)}" if self._errors else "done"
        number = "" if self.cell is None else f"cell {self.cell} "
        return f"<Execution: {number}on {name_ranks(self.ranks)}, {state}>"

    # -- calls of the cluster --------------------------------------------

    def receive(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a message that `rank` published under the cell."""
        kind = message["header"]["msg_type"]
        if kind == message_types.ERROR:
            with self._lock:
                self._details[rank] = unpack_details(message["content"])
            return
        if kind == message_types.DATA:
            self._receive_data(rank, dict(message["content"]))
            return
        if kind not in _OUTPUTS:
            return
        output: Output = {"output_type": kind, **message["content"]}
        if kind == "stream":
            output = without_marks(output)
        with self._lock:
            if rank in self._running:
                self._outputs[rank].append(output)
                callbacks = list(self._callbacks)
            elif rank not in self._heard or kind == "error":
                return
            else:
                self._late.append((rank, output))
                callbacks = list(self._late_callbacks)
            if kind == "error":
                what = (output["ename"], output["evalue"], output["traceback"])
                self._errors[rank] = RankError(rank, *what, self.cell)
        _call(callbacks, rank, output)

    def _receive_data(self, rank: int, data: dict[str, Any]) -> None:
        with self._lock:
            if rank not in self._running:
                return
            self._data.append((rank, data))
            callbacks = list(self._data_callbacks)
        _call(callbacks, rank, data)

    def finish(
        self, rank: int, error: RankError | None = None, *, heard: bool = False
    ) -> None:
        """Mark `rank` done, with an `error` if the rank published none itself.

        `heard`: the rank lives, and what outlives the cell there may print on.
        """
        with self._lock:
            if rank not in self._running:
                return
            if heard:
                self._heard.add(rank)
            if error is not None:
                self._errors.setdefault(rank, error)
            if rank in self._errors:
                details = self._details.get(rank, {})
                self._errors[rank] = self._errors[rank].replaced(**details)
            self.durations[rank] = time.time() - self.began
            self._running.discard(rank)
            if self._running:
                return
            callbacks, self._done_callbacks = self._done_callbacks, []
            self._ended.notify_all()
        _call(callbacks, self)


def _call(callbacks: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for callback in callbacks:
        try:
            callback(*arguments)
        except Exception:  # noqa: BLE001 - code of a user
            # The I/O thread must go on: it serves every cell and rank.
            _log.exception("a callback of a cell failed")
