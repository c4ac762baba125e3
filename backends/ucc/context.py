"""Context: the connections of one group over UCC, which meet through the store."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_void_p
from typing import Any

from . import ucc
from .environment import in_environment
from .library import UCCLibrary

__all__ = ["AllGather", "Context"]

# Seconds between two looks at a team that is being made.
_LOOK = 2e-4

_OK, _IN_PROGRESS = ucc.CONSTANTS["UCC_OK"], ucc.CONSTANTS["UCC_INPROGRESS"]
_FAILED = ucc.CONSTANTS["UCC_ERR_NO_MESSAGE"]

#: Returns what every rank has given under a name, by rank; blocks until all have.
AllGather = Callable[[str, bytes], Sequence[bytes]]


class _Gathering(threading.Thread):
    """One all-gather of the set-up, on a thread; UCC asks whether it is over."""

    def __init__(self, gather: AllGather, name: str, own: bytes, target: int) -> None:
        super().__init__(name="rankscope-ucc-set-up", daemon=True)
        self._gather, self._key, self._own, self._target = gather, name, own, target
        self._found: Sequence[bytes] = ()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._found = self._gather(self._key, self._own)
        except Exception as error:  # noqa: BLE001 - raised by Context, in its own words
            self.error = error

    def test(self) -> int:
        """Return the status; write the result, which UCC's memory is there for."""
        if self.is_alive():
            return _IN_PROGRESS
        if self.error is not None:
            return _FAILED
        found = b"".join(self._found)
        ctypes.memmove(self._target, found, len(found))
        return _OK


class _OutOfBand:
    """The all-gather that UCC calls for its set-up, over `gather`."""

    def __init__(
        self,
        gather: AllGather,
        name: str,
        rank: int,
        size: int,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._gather, self._name = gather, name
        # Called before the ranks meet for the first time.
        self._on_first = on_first
        self._numbers = itertools.count(1)
        self._gatherings: dict[int, _Gathering] = {}
        self._ended = False
        self.error: Exception | None = None
        # UCC copies the struct; what it points to must live as long as the context.
        self.struct = ucc.OutOfBand(
            ucc.AllGather(self._start),
            ucc.RequestCall(self._test),
            ucc.RequestCall(self._free),
            None,
            size,
            rank,
        )

    def meet_again(self, gather: AllGather | None, name: str) -> None:
        """Have later calls use `gather`; ``None``: refuse them, and UCC goes on."""
        self._ended = gather is None
        if gather is not None:
            self._gather, self._name = gather, name

    def _start(
        self, own: int, target: int, size: int, info: int | None, request: Any
    ) -> int:
        self._on_first()
        if self._ended:
            return _FAILED
        number = next(self._numbers)
        gathering = _Gathering(
            self._gather, f"{self._name}/{number}", ctypes.string_at(own, size), target
        )
        self._gatherings[number] = gathering
        gathering.start()
        request[0] = number
        return _OK

    def _test(self, request: int) -> int:
        gathering = self._gatherings[request]
        status = gathering.test()
        if gathering.error is not None:
            self.error = gathering.error
        return status

    def _free(self, request: int) -> int:
        self._gatherings.pop(request, None)
        return _OK


class Context:
    """A context of UCC and its team, which has the ranks of one group.

    Making one blocks until every rank makes its own. Raises `UCCError`, or what
    `gather` raises.

    Parameters
    ----------
    gather : the all-gather through which the ranks meet.
    name : its name, the same on every rank and that of no other context.
    settings : of UCX, without ``UCX_`` before the name.
    """

    def __init__(
        self,
        library: UCCLibrary,
        gather: AllGather,
        rank: int,
        size: int,
        name: str,
        settings: Mapping[str, str],
    ) -> None:
        self.library, self.size, self.name = library, size, name
        reading = contextlib.ExitStack()
        self._bands = [
            # UCC has read the variables when its ranks exchange their addresses.
            _OutOfBand(gather, "context", rank, size, reading.close),
            _OutOfBand(gather, "team", rank, size),
        ]
        self.context, self.team = c_void_p(), c_void_p()
        try:
            with reading:
                reading.enter_context(in_environment(settings))
                self._make_context(self._bands[0].struct)
            self._make_team(self._bands[1].struct, rank)
        except Exception as error:
            for band in self._bands:
                if band.error is not None:
                    raise band.error from error
            raise

    def _make_context(self, band: ucc.OutOfBand) -> None:
        library, config = self.library, c_void_p()
        parameters = ucc.ContextParameters(
            mask=ucc.CONSTANTS["UCC_CONTEXT_PARAM_FIELD_OOB"], oob=band
        )
        library.call("ucc_context_config_read", library.handle, None, byref(config))
        try:
            library.call(
                "ucc_context_create",
                library.handle,
                byref(parameters),
                config,
                byref(self.context),
            )
        finally:
            library.ucc_context_config_release(config)

    def _make_team(self, band: ucc.OutOfBand, rank: int) -> None:
        library, constants = self.library, ucc.CONSTANTS
        parameters = ucc.TeamParameters(
            mask=constants["UCC_TEAM_PARAM_FIELD_EP"]
            | constants["UCC_TEAM_PARAM_FIELD_EP_RANGE"]
            | constants["UCC_TEAM_PARAM_FIELD_OOB"],
            ep=rank,
            ep_range=constants["UCC_COLLECTIVE_EP_RANGE_CONTIG"],
            oob=band,
        )
        library.call(
            "ucc_team_create_post",
            byref(self.context),
            1,
            byref(parameters),
            byref(self.team),
        )
        while library.call("ucc_team_create_test", self.team) == _IN_PROGRESS:
            self.progress()
            time.sleep(_LOOK)

    def progress(self) -> None:
        """Advance what is in flight."""
        status = self.library.ucc_context_progress(self.context)
        if status < 0:
            self.library.check("ucc_context_progress", status)

    def destroy(self, gather: AllGather | None) -> None:
        """Free team and context.

        UCC waits until its messages have left this rank, for which a peer may have to
        take some; with `gather` every rank advances until all are done, and without it
        this one does not return where a peer never takes them.
        """
        for band in self._bands:
            band.meet_again(gather, f"freed/{self.name}")
        library = self.library
        while library.call("ucc_team_destroy", self.team) == _IN_PROGRESS:
            self.progress()
            time.sleep(_LOOK)
        library.call("ucc_context_destroy", self.context)
