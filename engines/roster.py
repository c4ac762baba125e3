"""The roster: the seats of a cluster, who sits there, who died, what they say."""

from __future__ import annotations

import ast
import concurrent.futures
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import ipyparallel

from rankscope import __version__

from . import private
from .channel import Answers, ControlChannel
from .errors import ClusterError
from .gpus import Gpus
from .seats import Seat, death_of, how_it_ended
from .summary import unpack

__all__ = ["Roster"]

_log = logging.getLogger(__name__)

#: Seconds between two renewals of the status subscription (see agent.LEASE).
RENEWAL = 10.0
#: Seconds that the hub gets to say which engines there are.
HUB_WAIT = 2.0
#: Seconds that a launcher gets to tell how an engine ended.
EXIT_CODE_WAIT = 0.3

_INSTALL = "__import__('rankscope.engines.agent', fromlist=['install']).install({!r})"

OnDeath = Callable[[Seat], None]
OnStatus = Callable[[int, dict[str, Any]], None]


class Roster:
    """The engines behind a client, by rank.

    Deaths and status are noticed on the client's I/O thread (or a
    launcher's), whatever the notebook's main thread does. ``runs(pid)`` says
    whether a launcher here will tell how that engine ended.
    """

    def __init__(self, client: ipyparallel.Client, on_death: OnDeath) -> None:
        self.client = client
        self.channel = ControlChannel(client)
        self.seats: list[Seat] = []
        #: Which GPUs the ranks take, fresh ones as well.
        self.gpus = Gpus()
        #: What is to be told about how the ranks are seated, a line each.
        self.advice: list[str] = []
        self._by_uuid: dict[str, Seat] = {}
        self._on_death = on_death
        self._on_status: tuple[OnStatus, ...] = ()
        self._runs: Callable[[int], bool] = lambda pid: False
        self._timers: set[threading.Timer] = set()
        self._lock = threading.RLock()
        self._buried = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._header, self._unlisten = private.listen(client, self._heard)
        self._unnotify = private.on_notification(client, self._notified)
        self._keeper = threading.Thread(
            target=self._renew, name="rankscope-renewal", daemon=True
        )
        self._keeper.start()

    # -- asking ------------------------------------------------------------

    def uuids(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """The living ranks among `ranks` (``None``: all), and how to reach them."""
        wanted = None if ranks is None else set(ranks)
        return {
            seat.rank: seat.uuid
            for seat in self.seats
            if seat.alive and (wanted is None or seat.rank in wanted)
        }

    def ask(
        self,
        op: str,
        args: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        ranks: Iterable[int] | None = None,
        timeout: float = 2.0,
    ) -> Answers:
        """Ask the agents of the living ranks among `ranks`; see `ControlChannel`."""
        return self.channel.ask(self.uuids(ranks), op, args, timeout)

    def post(
        self, op: str, args: Mapping[str, Any], ranks: Iterable[int] | None = None
    ) -> dict[int, Future[Any]]:
        """Ask without waiting: for the threads that must not wait."""
        return {
            rank: self.channel.post(uuid, op, args)
            for rank, uuid in self.uuids(ranks).items()
        }

    # -- engines -----------------------------------------------------------

    def install(
        self, engine_ids: Iterable[int], timeout: float, *, attach: bool = False
    ) -> dict[int, dict[str, Any]]:
        """Install the agent on engines; return what each says of itself.

        With `attach` engines that have the agent answer at once, even if a
        cell blocks them. Raises `ClusterError` for an engine that cannot
        import this version of rankscope or does not answer.
        """
        known = private.engine_uuids(self.client)
        uuids = {number: known[number] for number in engine_ids}
        installing = {
            number: private.send(
                self.client, "shell", "execute_request", _install_request(), uuid
            )
            for number, uuid in uuids.items()
        }
        greeting = {
            number: self.channel.post(uuid, "hello", {})
            for number, uuid in uuids.items()
            if attach
        }
        deadline = time.monotonic() + timeout
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) < len(uuids):
            left = deadline - time.monotonic()
            waiting: list[Future[Any]] = []
            for number in uuids.keys() - hellos.keys():
                greeted, installed = greeting.get(number), installing[number]
                if greeted is not None and greeted.done():
                    hellos[number] = greeted.result()["content"]["result"]
                    _check_version(number, hellos[number])
                elif installed.done():
                    hellos[number] = _hello(number, installed.result())
                else:
                    waiting += [one for one in (greeted, installed) if one]
            if waiting and left <= 0:
                silent = sorted(uuids.keys() - hellos.keys())
                raise ClusterError(
                    f"engines {silent} did not answer within {timeout:g} s: is a "
                    "cell running there? Try again when it is done"
                )
            if waiting:
                concurrent.futures.wait(
                    waiting, left, concurrent.futures.FIRST_COMPLETED
                )
        for number, future in greeting.items():
            if not future.done():
                private.forget(self.client, future.msg_id)  # type: ignore[attr-defined]
                self.channel.settle(uuids[number], future)
        return hellos

    def take(self, rank: int, engine_id: int, hello: Mapping[str, Any]) -> Seat:
        """Give the seat of `rank` to an engine."""
        uuid = private.engine_uuids(self.client).get(engine_id)
        if uuid is None:
            raise ClusterError(f"engine {engine_id} died before it had its seat")
        seat = Seat(
            rank=rank,
            engine_id=engine_id,
            uuid=uuid,
            pid=hello["pid"],
            host=hello["host"],
            address=hello["address"],
            port=hello["port"],
        )
        self._place(seat)
        return seat

    def leave_empty(self, rank: int) -> None:
        """Note that the engine of `rank` was gone before anybody here looked."""
        death = f"the engine of rank {rank} is gone"
        self._place(Seat(rank, -1, "", -1, "?", "", 0, death=death))

    def _place(self, seat: Seat) -> None:
        with self._lock:
            others = [one for one in self.seats if one.rank != seat.rank]
            self.seats = sorted([*others, seat], key=lambda one: one.rank)
            self._by_uuid = {one.uuid: one for one in self.seats}

    # -- deaths ------------------------------------------------------------

    def expect_exit_codes(self, runs: Callable[[int], bool]) -> None:
        """Have `exited` told how the engines end for whose pid ``runs(pid)``."""
        self._runs = runs

    def exited(self, pid: int, exit_code: int | None) -> None:
        """A launcher says that the process `pid` ended."""
        for seat in self.seats:
            if seat.pid == pid and seat.alive:
                self.bury(seat, death_of(seat, exit_code))

    def controller_exited(self, pid: int, exit_code: int | None) -> None:
        """The controller is gone: nobody can be reached any more."""
        for seat in self.seats:
            self.bury(
                seat,
                f"the controller (pid {pid}) {how_it_ended(exit_code)}: rank "
                f"{seat.rank} cannot be reached any more; end the cluster with "
                "%dist_shutdown and start another",
            )

    def _notified(self, event: Mapping[str, Any]) -> None:
        if event["event"] != "unregister":
            return
        for seat in self.seats:
            if seat.engine_id != int(event["id"]) or not seat.alive:
                continue
            if not self._runs(seat.pid):
                self.bury(seat, death_of(seat, None))
                continue
            # Its launcher knows the signal or exit code, and tells it about now.
            timer = threading.Timer(EXIT_CODE_WAIT, self._bury_late, [seat])
            timer.daemon = True
            self._timers.add(timer)
            timer.start()

    def _bury_late(self, seat: Seat) -> None:
        if not self._closed.is_set():
            self.bury(seat, death_of(seat, None))

    def bury(self, seat: Seat, death: str) -> None:
        """Note that the engine in a seat is gone, once."""
        with self._lock:
            if not seat.alive:
                return
            seat.death = death
            self._buried.notify_all()
        self.channel.lost(seat.uuid, death)
        self._on_death(seat)
        self._tell(seat.rank, {**seat.summary, "dead": death})

    def discard(self, engine_ids: Iterable[int]) -> None:
        """Kill engines that hold no seat."""
        known = private.engine_uuids(self.client)
        for number in engine_ids:
            if number in known:
                self.channel.signal(known[number], signal.SIGKILL)

    def end(self, ranks: Iterable[int], why: str) -> None:
        """End the engines that hold `ranks`: SIGTERM, SIGKILL a second later.

        Their nannies send the signals, so it works wherever they run.
        """
        going = [self.seats[rank] for rank in ranks if self.seats[rank].alive]
        for seat in going:
            seat.leaving = why
        for signum, patience in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
            for seat in going:
                if seat.alive:
                    self.channel.signal(seat.uuid, signum)
            with self._buried:
                self._buried.wait_for(
                    lambda: not any(seat.alive for seat in going), patience
                )
        for seat in going:
            # Not heard of any more, whether it ended or not.
            self.bury(seat, why)

    # -- status ------------------------------------------------------------

    def subscribe(self, callback: OnStatus) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on news; return the cancel."""
        self._on_status = (*self._on_status, callback)

        def cancel() -> None:
            self._on_status = tuple(x for x in self._on_status if x is not callback)

        return cancel

    def listen(self, ranks: Iterable[int] | None = None) -> None:
        """Have ranks publish their status to here, from now on."""
        answers = self.ask("subscribe", {"header": self._header}, ranks)
        for rank, summary in answers.results.items():
            self.note(rank, summary)

    def refresh(self, older_than: float, timeout: float) -> None:
        """Ask the ranks whose last word is older than so many seconds."""
        now = time.monotonic()
        stale = [
            seat.rank
            for seat in self.seats
            if seat.alive and (seat.heard is None or now - seat.heard > older_than)
        ]
        if stale:
            answers = self.ask("summary", ranks=stale, timeout=timeout)
            for rank, summary in answers.results.items():
                self.note(rank, summary)

    def note(self, rank: int, summary: dict[str, Any]) -> None:
        """Take in what a rank says of itself."""
        seat = self.seats[rank]
        seat.summary, seat.heard = unpack(summary), time.monotonic()

    def _heard(self, message: private.Message) -> None:
        seat = self._by_uuid.get(message["metadata"].get("engine", ""))
        if seat is not None and seat.alive:
            self.note(seat.rank, message["content"])
            self._tell(seat.rank, message["content"])

    def _tell(self, rank: int, summary: dict[str, Any]) -> None:
        for callback in self._on_status:
            try:
                callback(rank, summary)
            except Exception:  # noqa: BLE001 - a stranger's code
                # The I/O thread serves everybody else too.
                _log.exception("a status callback failed")

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL):
            try:
                self.listen()
                self._miss()
            except OSError:
                # The controller said good-bye and the client closed itself.
                return

    def _miss(self) -> None:
        """Bury who is gone without our having been told.

        That an engine left is told once, to whom the controller reaches then.
        """
        now = time.monotonic()
        silent = [
            seat
            for seat in self.seats
            if seat.alive and (seat.heard is None or now - seat.heard > RENEWAL)
        ]
        if not silent:
            return
        future: Any = private.registered_engines(self.client)
        concurrent.futures.wait([future], HUB_WAIT)
        if not future.done():
            private.forget(self.client, future.msg_id)
            return
        known = set(future.result()["content"]["engines"].values())
        for seat in silent:
            if seat.uuid not in known:
                self.bury(seat, death_of(seat, None))

    # -- the end -----------------------------------------------------------

    def close(self) -> None:
        """Let go of the engines, and end the client and its threads."""
        self._closed.set()
        self._unnotify()
        for timer in self._timers:
            timer.cancel()
        try:
            self.ask("unsubscribe", {"msg_id": self._header["msg_id"]}, timeout=0.5)
        except OSError:
            # Closed already: the lease ends the subscription.
            pass
        self._unlisten()
        self._keeper.join()
        for timer in self._timers:
            timer.join()
        self.client.close(linger=0)


def _install_request() -> dict[str, Any]:
    return {
        "code": "",
        "silent": True,
        "store_history": False,
        # An expression leaves nothing in the user's namespace.
        "user_expressions": {"hello": _INSTALL.format(__version__)},
        "allow_stdin": False,
        "stop_on_error": False,
    }


def _hello(engine_id: int, reply: Any) -> dict[str, Any]:
    if isinstance(reply, Exception):
        raise ClusterError(f"engine {engine_id}: {reply}")
    answer = private.user_expressions(reply)["hello"]
    if answer["status"] != "ok":
        raise ClusterError(
            f"engine {engine_id} cannot use rankscope {__version__}: "
            f"{answer['ename']}: {answer['evalue']}; install the same version in the "
            "environment that the engines run in"
        )
    hello: dict[str, Any] = json.loads(ast.literal_eval(answer["data"]["text/plain"]))
    _check_version(engine_id, hello)
    return hello


def _check_version(engine_id: int, hello: Mapping[str, Any]) -> None:
    if hello["version"] != __version__:
        raise ClusterError(
            f"engine {engine_id} has rankscope {hello['version']}, the notebook "
            f"{__version__}: install the same version in both environments"
        )
