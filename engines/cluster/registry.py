"""The registry of a cluster's engines: which rank each has, deaths and status."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import ipyparallel

from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.thread_start import start_thread

from ..errors import ClusterError
from ..launch.cluster_file import Announcement, this_client
from ..launch.processes import is_stopped
from ..observe.crash import CRASHES
from ..observe.rank_registry import RankRegistry
from ..observe.rank_slots import RankSlot, describe_exit
from ..wire import ipyparallel_private as private
from ..wire.channel import ControlChannel
from ..wire.gpu_environment import Gpus
from ..wire.requests import Client, GetSummary, Hello, Request, Subscribe, Unsubscribe
from ..wire.torch_environment import TorchOptions

__all__ = ["EngineRegistry", "interval_of"]

_log = logging.getLogger(__name__)

#: Seconds between two renewals of the status subscription (see agent.publisher.LEASE).
RENEWAL = 10.0
#: Seconds that the hub gets to list its engines.
HUB_WAIT = 2.0
#: Seconds that a launcher gets to report the exit code of an engine.
EXIT_CODE_WAIT = 0.3
#: Seconds for which a status waits for why a library has ended a rank.
EXPLANATION_WAIT = 2.0
#: Seconds that the engines get to take note that a client detaches.
DETACH_WAIT = 0.5

#: Seconds between two statuses of a rank for each rank there is, as each takes time
#: here; at most, so that no rank counts as silent.
RANK_INTERVAL, MOST_INTERVAL = 0.002, 1.0

OnDeath = Callable[[RankSlot], None]


def interval_of(ranks: int) -> float:
    """Return the seconds between two statuses of a rank, where there are `ranks`."""
    return min(MOST_INTERVAL, RANK_INTERVAL * ranks)


class EngineRegistry(RankRegistry):
    """The engines behind a client, by rank.

    Deaths and status messages are handled on the client's I/O thread, or the
    launchers' thread, whatever the notebook's main thread does. `on_death` is called
    on either, with the slot of each engine that is gone.
    """

    def __init__(
        self,
        client: ipyparallel.Client,
        on_death: OnDeath,
        announcement: Announcement,
    ) -> None:
        super().__init__()
        self.client = client
        self.channel = ControlChannel(client)
        #: Config and timeout in seconds of the default group.
        self.backend: str | None = None
        self.timeout: float | None = None
        #: The rank that hosts the store; ``None`` if it is dead or silent.
        self.store_host: int | None = None
        #: This process, as the ranks know who sends a cell.
        self.this_client: Client = {
            "session": client.session.session,
            "who": this_client(),
        }
        #: This process, if it has the ranks for itself: see `agent.reservations`.
        self.owner: Client | None = None
        #: The GPUs of the ranks, also of those that are started later.
        self.gpus = Gpus()
        #: How the ranks use torch; ``None``: cells begin without it.
        self.torch: TorchOptions | None = None
        #: The rank that hosts the store of torch's default group, and its port, if this
        #: process has started it.
        self.torch_store: tuple[int, int] | None = None
        #: The last generation of each group, by its id, that a rebuild has begun: a
        #: later group may have the id, and its keys in the store.
        self.generations: dict[str, int] = {}
        #: Advice about GPUs and backends of the ranks, one line each.
        self.advice: list[str] = []
        self._by_uuid: dict[str, RankSlot] = {}
        self._on_death = on_death
        self._reports_exit: Callable[[int, str], bool] = lambda pid, host: False
        self._send_signal: Callable[[int, str, int], bool] = lambda *of_engine: False
        self._announcement = announcement
        #: Returns why the job that the ranks are in has ended, if it has.
        self.find_end_of_job: Callable[[], str] = str
        #: Takes over dead ranks that another process restarted.
        self.take_over: Callable[[], object] = lambda: None
        # pid -> exit code of engines that ended before they had a rank.
        self._ended: dict[int, int | None] = {}
        self._timers: set[threading.Timer] = set()
        self._lock = threading.RLock()
        self._deaths = threading.Condition(self._lock)
        self._closed = threading.Event()
        #: Seconds between two statuses of a rank at least.
        self.status_interval = 0.0
        self._header, self._unlisten = private.listen(client, self._on_status_message)
        self._unnotify = private.on_notification(client, self._on_engine_event)
        self._renewal = start_thread("renewal", self._renew)

    # -- requests ----------------------------------------------------------

    def uuids(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return rank → identity of its engine, for the living of `ranks`."""
        return {slot.rank: slot.uuid for slot in self._living(ranks)}

    @property
    def _receiver(self) -> threading.Thread | None:
        return private.io_thread(self.client)

    def _post(self, slot: RankSlot, request: Request[Any]) -> Future[Any]:
        return self.channel.post(slot.uuid, request)

    def _give_up(self, slot: RankSlot, future: Future[Any]) -> None:
        self.channel.drop(slot.uuid, future)

    def address_of(self, rank: int) -> str:
        """Return the address at which all ranks reach `rank`."""
        hosts = {slot.host for slot in self.slots}
        return "127.0.0.1" if len(hosts) == 1 else self.slots[rank].address

    def able(self) -> list[int]:
        """Return the ranks that can answer: none is dead or, on this host, stopped."""
        return [
            slot.rank
            for slot in self.slots
            if slot.alive and not is_stopped(slot.pid, slot.host)
        ]

    # -- engines -----------------------------------------------------------

    def assign(self, rank: int, engine_id: int, hello: Hello) -> RankSlot:
        uuid = private.engine_uuids(self.client).get(engine_id)
        if uuid is None:
            raise ClusterError(f"engine {engine_id} died before it had its rank")
        slot = RankSlot(
            rank=rank,
            engine_id=engine_id,
            uuid=uuid,
            pid=hello["pid"],
            host=hello["host"],
            address=hello["address"],
            port=hello["port"],
        )
        self._place(slot)
        self.check_none_ended()
        return slot

    def vacate(self, rank: int) -> None:
        """Make a slot for a rank whose engine ended before this client attached."""
        cause = "its engine had ended already; its exit code is not known"
        death = f"rank {rank} is dead: {cause}"
        self._place(RankSlot(rank, death=death, death_cause=cause))

    def _place(self, slot: RankSlot) -> None:
        with self._lock:
            others = [one for one in self.slots if one.rank != slot.rank]
            self.slots = sorted([*others, slot], key=lambda one: one.rank)
            self._by_uuid = {one.uuid: one for one in self.slots}

    # -- deaths ------------------------------------------------------------

    def use_launchers(
        self,
        reports_exit: Callable[[int, str], bool],
        send_signal: Callable[[int, str, int], bool],
    ) -> None:
        """Use the launchers of the engines: `Launched.has_engine`, `signal_engine`."""
        with self._lock:
            # A pid of before may be given to an engine that is new.
            self._ended.clear()
        self._reports_exit = reports_exit
        self._send_signal = send_signal

    def signal(self, slot: RankSlot, signum: int) -> None:
        """Send a signal to the engine of a slot: directly, else through its nanny."""
        if not self._send_signal(slot.pid, slot.host, signum):
            self.channel.signal(slot.uuid, signum)

    def on_engine_exit(
        self,
        pid: int,
        exit_code: int | None,
        host: str | None = None,
        why: str | None = None,
    ) -> None:
        """Handle a launcher's report that the process `pid` of `host` ended.

        A launcher of ipyparallel names no host; `why` is said without an exit code.
        """
        with self._lock:
            slots = [slot for slot in self.slots if slot.pid == pid]
            # Another host may have a process of this pid, too.
            if host is None:
                slots = [slot for slot in slots if slot.is_here] or slots
            else:
                slots = [slot for slot in slots if slot.host == host]
            if not slots:
                self._ended[pid] = exit_code
        for slot in slots:
            if slot.alive:
                self._mark_ended(slot, exit_code, why)
            # Afterwards: the hub's notification comes without the exit code.
            self.unregister([slot.engine_id])

    def check_none_ended(self) -> None:
        """Raise `ClusterError` if a fresh engine ended before it had its rank."""
        with self._lock:
            ended = list(self._ended.items())
        if ended:
            raise ClusterError(
                "engines died before they had their ranks: "
                + ", ".join(f"pid {pid} {describe_exit(code)}" for pid, code in ended)
            )

    def unregister(self, engine_ids: Iterable[int]) -> None:
        """Report engines that ended to the hub, which tells all clients."""
        for number in engine_ids:
            try:
                private.unregister(self.client, number)
            except OSError:
                # The client is closed: the cluster ends.
                return

    def on_controller_exit(self, pid: int, exit_code: int | None) -> None:
        """Handle the end of the controller: no engine can be reached any more."""
        stopped = self._announcement.find_end()
        for slot in self.slots:
            if stopped:
                self.mark_dead(slot, stopped)
                continue
            cause = (
                f"the controller is dead: {describe_exit(exit_code)} (pid {pid}); end "
                "the cluster with %dist_shutdown and start another"
            )
            self.mark_dead(slot, f"rank {slot.rank} cannot be reached: {cause}", cause)

    def _on_engine_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] != "unregister":
            return
        for slot in self.slots:
            if slot.engine_id != int(event["id"]) or not slot.alive:
                continue
            if not self._reports_exit(slot.pid, slot.host):
                self._mark_ended(slot, None)
                continue
            # The launcher reports the signal or exit code at about the same time.
            timer = threading.Timer(EXIT_CODE_WAIT, self._mark_dead_late, [slot])
            timer.daemon = True
            self._timers.add(timer)
            timer.start()

    def _mark_dead_late(self, slot: RankSlot) -> None:
        if not self._closed.is_set():
            self._mark_ended(slot, None)

    def _mark_ended(
        self, slot: RankSlot, exit_code: int | None, why: str | None = None
    ) -> None:
        """Record that the engine of a slot ended (exit code ``None``: unknown)."""
        on_purpose = slot.end_reason or self._announcement.find_end()
        if on_purpose:
            self.mark_dead(slot, on_purpose)
            return
        why = why or self._announcement.find_restart(slot.uuid)
        cause, slot.exit_code = why or slot.exit_cause(exit_code), exit_code
        slot.unexplained = -(exit_code or 0) in CRASHES
        self.mark_dead(slot, f"rank {slot.rank} is dead: {cause}", cause)

    def mark_dead(self, slot: RankSlot, death: str, cause: str | None = None) -> None:
        """Record that the engine of a slot is gone; later calls do nothing."""
        with self._lock:
            if not slot.alive:
                return
            slot.death, slot.death_cause = death, cause or death
            self._deaths.notify_all()
        self.channel.fail_pending(slot.uuid, death)
        self._on_death(slot)
        self._call_subscribers(slot)

    def note_causes(self, slot: RankSlot, found: Iterable[Verdict]) -> None:
        """Note why a library has ended a rank, as far as it was `found`."""
        slot.crash_causes = tuple(found)
        with self._lock:
            slot.unexplained = False
            self._deaths.notify_all()
        if slot.crash_causes:
            self._call_subscribers(slot)

    def await_deaths(self, slots: Iterable[RankSlot], patience: float) -> None:
        ending = list(slots)
        with self._deaths:
            self._deaths.wait_for(
                lambda: not any(slot.alive for slot in ending), patience
            )

    def kill(self, engine_ids: Iterable[int]) -> None:
        """Send SIGKILL to engines that have no rank."""
        known = private.engine_uuids(self.client)
        for number in engine_ids:
            if number in known:
                self.channel.signal(known[number], signal.SIGKILL)

    def terminate(self, ranks: Iterable[int], why: str) -> None:
        """End the engines of `ranks`: SIGTERM, then SIGKILL a second later."""
        ending = [self.slots[rank] for rank in ranks if self.slots[rank].alive]
        for slot in ending:
            slot.end_reason = why
        for signum, patience in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
            for slot in ending:
                if slot.alive:
                    # One that is stopped would not heed SIGTERM.
                    stopped = is_stopped(slot.pid, slot.host)
                    self.signal(slot, signal.SIGKILL if stopped else signum)
            self.await_deaths(ending, patience)
        for slot in ending:
            # An engine that survived the signals counts as gone, too.
            self.mark_dead(slot, why)

    # -- status ------------------------------------------------------------

    def start_status(self, ranks: Iterable[int] | None = None) -> None:
        interval = max(self.status_interval, interval_of(len(self.slots)))
        wanted = Subscribe(self._header, interval)
        self._record_all(self.ask(wanted, ranks))

    def follow(self, interval: float) -> None:
        self.status_interval = interval
        self.start_status()

    def refresh(
        self, older_than: float, timeout: float, also: Collection[int] = ()
    ) -> None:
        self.take_over()
        super().refresh(older_than, timeout, also)
        with self._deaths:
            self._deaths.wait_for(
                lambda: not any(slot.unexplained for slot in self.slots),
                EXPLANATION_WAIT,
            )

    def refresh_last(self, timeout: float) -> None:
        """Request the last summaries of ranks that are about to be ended."""
        self._record_all(self.ask(GetSummary(), self.able(), timeout))

    def _on_status_message(self, message: private.Message) -> None:
        slot = self._by_uuid.get(message["metadata"].get("engine", ""))
        if slot is not None and slot.alive:
            self.record_summary(slot.rank, message["content"]["summary"])
            slot.last_records = message["content"].get("records", ())
            self._call_subscribers(slot)

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL):
            try:
                self.take_over()
                self.start_status()
                self._find_missed_deaths()
            except OSError:
                # The controller announced its end, and the client has ended.
                return

    def _find_missed_deaths(self) -> None:
        """Mark silent engines dead that the controller does not list any more.

        The controller announces the end of an engine once; the announcement is lost
        while the connection to the controller is down. It learns of none where all
        processes of their hosts end with a job.
        """
        silent = [slot for slot in self._living(None) if slot.is_silent(RENEWAL)]
        if not silent:
            return
        if why := self.find_end_of_job():
            for slot in silent:
                self._mark_ended(slot, None, why)
            return
        future: Any = private.registered_engines(self.client)
        concurrent.futures.wait([future], HUB_WAIT)
        if not future.done():
            private.discard_request(self.client, future.msg_id)
            return
        known = set(future.result()["content"]["engines"].values())
        for slot in silent:
            if slot.uuid not in known:
                self._mark_ended(slot, None)

    # -- the end -----------------------------------------------------------

    def _unsubscribe(self) -> None:
        request, able = Unsubscribe(self._header["msg_id"]), self.able()
        # Sent first: the answers of the others show that it has left.
        self.post(request, [one.rank for one in self.slots if one.rank not in able])
        self.ask(request, able or None, DETACH_WAIT)

    def close(self, *, unsubscribe: bool = True) -> None:
        """End the client and the threads; the engines go on.

        They are told first to publish no more to this client, and their answers are
        awaited, as the client discards what it has not sent; not where they end, too
        (`unsubscribe` is ``False``).
        """
        self._closed.set()
        self._unnotify()
        for timer in self._timers:
            timer.cancel()
        # Of a client that is closed already the lease ends the subscription.
        with contextlib.suppress(OSError):
            if unsubscribe:
                self._unsubscribe()
        self._unlisten()
        self.client.close(linger=0)
        # Now that no reply can arrive: the renewal may wait for that of a silent rank.
        self.channel.close("this cluster is closed")
        self._renewal.join()
        for timer in self._timers:
            timer.join()
