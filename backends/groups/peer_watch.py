"""PeerWatch: the messages of one generation of a group through the store."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..errors import DistError, DistNetworkError, DistNetworkTimeoutError
from ..stores.base import RANK_0, Store
from ..thread_start import run_bounded, start_thread
from .abort_reason import STORE, AbortReason, Departure, describe_death
from .remedies import after_death, after_store_loss
from .row import PATIENCE, Row
from .spec import GroupSpec

__all__ = ["PeerWatch"]

_log = logging.getLogger(__name__)


class PeerWatch:
    """The store keys of one generation that concern its life, and their watches.

    A death, or a departure for good, concerns all later generations, too: the notices
    are in `group_store`, which these share. The callbacks are called on threads of the
    store and must not use it; ``on_abort(reason, publish)``: `publish` is whether the
    ranks have yet to agree on the reason.
    """

    def __init__(
        self,
        spec: GroupSpec,
        store: Store,
        group_store: Store,
        on_abort: Callable[[AbortReason, bool], None],
        on_build: Callable[[str], None],
        on_inquiry: Callable[[int], None],
        on_departure: Callable[[Departure], None],
    ) -> None:
        self._spec, self._store, self._group_store = spec, store, group_store
        place = spec.describe()
        self._left = Row(store, "left", place)
        self._left_for_good = Row(group_store, "left", place)
        self._inquiries = Row(store, "inquiry", place)
        self._on_abort, self._on_build = on_abort, on_build
        self._on_inquiry, self._on_departure = on_inquiry, on_departure
        self._lock = threading.Lock()
        self._closed = False
        self._cancels: list[Callable[[], None]] = []

    def start(self) -> None:
        """Watch the other ranks from now on, and leave a death notice for them."""
        spec, store = self._spec, self._store
        if spec.size == 1:
            return
        self._keep(store.watch("abort", self._peer_aborted))
        self._keep(self._group_store.watch("death", self._peer_died))
        self._inquiries.watch(lambda number, _: self._on_inquiry(number), self._keep)
        for row in (self._left, self._left_for_good):
            row.watch(self._peer_left, self._keep)
        # If the store reports deaths at all.
        if 0 in spec.ranks or store.server != RANK_0:
            self._keep(store.watch_loss(self._store_lost))
        self.publish_death_notice(describe_death(spec.global_rank))
        for device in spec.config.device_backend_map:
            build = partial(self._peer_builds, device)
            self._keep(store.watch(f"build/{device}", build))

    def close(self) -> None:
        """Cancel the watches."""
        with self._lock:
            self._closed = True
            cancels, self._cancels = self._cancels, []
        for cancel in cancels:
            cancel()

    def _keep(self, cancel: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._cancels.append(cancel)
                return
        cancel()

    # -- messages to the other ranks ----------------------------------------

    def publish(
        self, key: str, reason: AbortReason, agree: Callable[[AbortReason | None], None]
    ) -> None:
        """Report an ``"abort"``, or the ``"loss"`` of a connection; returns at once.

        ``agree(first)`` is called with the reason of the rank that was first to report
        it, ``None`` if the store does not say, on a thread of its own.
        """
        if self._spec.size == 1:
            agree(None)
            return
        # The dead rank may be the store's host: never wait for an answer.
        if not self._in_background(key, lambda: agree(self._publish(key, reason))):
            agree(None)

    def _in_background(
        self, what: str, target: Callable[..., object], *args: object
    ) -> bool:
        """Start a thread; return whether Python still does: not 3.12 at its end."""
        try:
            start_thread(f"{what}-{self._spec.name}", target, *args)
        except RuntimeError:
            return False
        return True

    def _publish(self, key: str, reason: AbortReason) -> AbortReason | None:
        """Set `key` unless a rank has; return what it holds, ``None`` on failure."""
        try:
            held = self._store.compare_set(key, b"", reason.to_json())
        except DistError as error:
            # Whoever loses the store aborts because of that: so do the other ranks.
            lost = isinstance(error, DistNetworkError)
            # A store that only does not answer goes on later, for the others.
            lost = lost and not isinstance(error, DistNetworkTimeoutError)
            _log.log(
                logging.DEBUG if lost else logging.WARNING,
                "%s: could not publish the %s to the other ranks: %s",
                self._spec.describe(),
                key,
                error,
            )
            return None
        return AbortReason.from_json(held)

    def publish_death_notice(self, text: str) -> None:
        """Set the reason that ends the group elsewhere when this process is gone."""
        # Without a time: the death is later.
        culprits = [self._spec.global_rank]
        notice = json.dumps({"text": text, "by": STORE, "culprits": culprits})
        self._group_store.last_will("death", notice)

    def publish_build(self, device: str) -> None:
        """Have the other ranks build the backend of `device`."""
        self._store.set(f"build/{device}", b"1")

    def publish_departure(self, departure: Departure, *, for_good: bool) -> None:
        """Tell the other ranks that this one leaves, `for_good` or this generation."""
        row = self._left_for_good if for_good else self._left
        row.append(departure.to_json())

    def publish_departure_at_end(self, departure: Departure) -> None:
        """Tell the other ranks that this one left, once its process has ended."""
        if self._left_for_good.append_at_end(departure.to_json()):
            # It is no death.
            self._group_store.last_will("death", b"")
        else:
            self.publish_departure(departure, for_good=True)

    def forget_generation(self) -> None:
        """Drop its keys, once every rank has begun a later generation."""
        self._in_background("forget", self._leave, "rebuilt", self._store)

    def forget(self) -> None:
        """Drop what the store has of the group, once every rank has destroyed it.

        A rank that still has the group, or is started in the place of one that died,
        may read all of it: its keys stay until then.
        """
        what = f"forget-{self._spec.name}"
        run_bounded(what, lambda: self._leave("destroyed", self._group_store), PATIENCE)

    def _leave(self, how: str, store: Store) -> None:
        """Clear `store` if all ranks of this generation have left it in this way."""
        try:
            if store is self._group_store:
                store.last_will("death", b"")
            if self._store.add(how, 1) == self._spec.size:
                store.clear()
        except DistError as error:
            _log.debug("%s: its keys stay: %s", self._spec.describe(), error)

    def await_departures(self, timeout: float) -> None:
        """Wait until every rank of the group has left, up to `timeout` seconds."""
        try:
            self._group_store.wait([f"left/{self._spec.size}"], timeout)
        except DistError as error:
            _log.debug("%s: not all left: %s", self._spec.describe(), error)

    # -- messages of the other ranks ----------------------------------------

    def _peer_left(self, _number: int, value: bytes) -> None:
        departure = Departure.from_json(value)
        if departure.rank != self._spec.global_rank:
            self._on_departure(departure)

    def _peer_aborted(self, value: bytes) -> None:
        self._on_abort(AbortReason.from_json(value), False)

    def _peer_died(self, value: bytes) -> None:
        died = AbortReason.from_json(value)
        # Others may have begun an abort, of which this rank has not heard.
        self._on_abort(replace(died, remedy=after_death()), True)

    def _store_lost(self, message: str) -> None:
        culprits = (0,) if self._store.server == RANK_0 else ()
        reason = AbortReason(
            message, STORE, culprits=culprits, remedy=after_store_loss()
        )
        self._on_abort(reason, False)

    def _peer_builds(self, device: str, value: bytes) -> None:
        # Not on the store's thread: building talks to the store.
        self._in_background("build", self._on_build, device)
