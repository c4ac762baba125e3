"""Publication: a thread of a script's rank that shows the rank to notebooks."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

from rankscope.backends.errors import DistError
from rankscope.backends.groups.inquiry import main_thread_place
from rankscope.backends.groups.launched import is_launched
from rankscope.backends.hang_report.triggers import before_termination
from rankscope.backends.observe.stacks import ThreadStacks
from rankscope.backends.stores.base import UNKNOWN_END
from rankscope.backends.torch_watch.errors import explain
from rankscope.backends.torch_watch.watch import TorchWatch
from rankscope.backends.work.flight_recorder import recorder

from ..wire import requests
from ..wire.job_channel import ENDED, QueueReader, answer_key, end_key, status_key
from ..wire.job_file import job_files
from ..wire.rank_service import RankService, answer
from ..wire.requests import handlers_of
from ..wire.summaries import SummaryWriter
from .abort_relay import AbortRelay
from .meeting import Channel, meet
from .metrics_process import serve_metrics
from .options import JobOptions

__all__ = ["Publication"]

_log = logging.getLogger(__name__)

#: Seconds between two messages at most, while a notebook is attached.
HEARTBEAT = 1.0
#: The part of one core that publishing may take, beside `torch_watch.watch.SHARE`, and
#: the longest pause for it: a rank that is silent for longer would seem to hang.
SHARE = 1 / 800
_LONGEST_PAUSE = 1.2
#: Seconds that the end of the script may be delayed, if the channel does not answer.
END_WAIT = 0.4
#: Seconds after which it is known whether a channel that is lost ended in order, and
#: whether this script ends just now.
_TOLD = 1.0
#: Answers that are kept for the notebooks that asked: one that is gone reads none.
_ANSWERS = 32

_NO_ABORT = (
    "the script does not allow notebooks to abort: start it with "
    "RANKSCOPE_ALLOW_ABORT=1, or rankscope.torch.watch(allow_abort=True)"
)


class Publication:
    """Publishes this rank to the notebooks that attach to its job.

    Nothing is sent while none is attached. Every error ends the publication with a
    warning; the script goes on.
    """

    def __init__(self, torch: TorchWatch, options: JobOptions) -> None:
        self.options = options
        self._torch = torch
        self._channel: Channel | None = None
        self._relay: AbortRelay | None = None
        self._metrics: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()
        self._summary = SummaryWriter(_location, self._status).write
        self._answered: deque[str] = deque()
        #: Set once notebooks can see this rank, and aborts reach it.
        self.joined = threading.Event()
        self._stopped = threading.Event()
        self._rank_0_died = threading.Event()
        self._wake = threading.Event()
        # The end of the present lease (`time.monotonic`), and the least pause.
        self._until = 0.0
        self._interval = 0.0
        self._attended_until = 0.0
        self._process = os.getpid()
        service = RankService(
            self._summary,
            ThreadStacks(),
            _location,
            "" if options.allow_abort else _NO_ABORT,
        )
        self._handlers = handlers_of(service, self)
        self._thread = threading.Thread(
            target=self._run, name="rankscope-job", daemon=True
        )
        self._thread.start()
        atexit.register(self.end)

    @property
    def is_attended(self) -> bool:
        """Whether a person looks at the job just now, in a notebook or a terminal."""
        return time.monotonic() < self._attended_until

    @property
    def address(self) -> str | None:
        """``HOST:PORT`` where the job listens; ``None`` before, and on other ranks."""
        channel = self._channel
        return None if channel is None or channel.file is None else channel.file.address

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            channel = meet(self._torch, self.options, self._stopped)
            lost = set[str]()
            while channel is not None:
                try:
                    self._join(channel)
                    self._publish_while_watched(channel)
                    may_return = not self._stopped.is_set() and is_launched()
                    if not (may_return and self._rank_0_died.wait(_TOLD)):
                        return
                finally:
                    self._say_goodbye(channel)
                self._rank_0_died.clear()
                # Rank 0 has died, and its launcher may start it again.
                lost.add(channel.address)
                channel = meet(self._torch, self.options, self._stopped, lost)
        except (DistError, RuntimeError, OSError) as error:
            # At its end Python 3.12 starts no thread, before `end` is called.
            if not self._stopped.wait(_TOLD):
                _log.warning("this rank is not shown to notebooks: %s", error)
        except Exception:  # noqa: BLE001
            # The script goes on, whatever is wrong with its publication.
            _log.exception("this rank is not shown to notebooks")

    def _join(self, channel: Channel) -> None:
        store, rank = channel.store, channel.rank
        self._channel = channel
        # Before the store's own end, which the store has registered meanwhile.
        atexit.unregister(self.end)
        atexit.register(self.end)
        # That of a process of this rank which died before.
        store.delete_key(end_key(rank))
        store.last_will(
            end_key(rank), f"rank {rank} is dead ({_process()}): {UNKNOWN_END}"
        )
        self._relay = AbortRelay(store, channel.nonce, self._torch)
        QueueReader(store, f"request/{rank}", self._serve)
        store.watch_loss(self._note_death)
        store.set(status_key(rank), self._summary())
        self.joined.set()
        if channel.file is not None:
            self._announce(channel)

    def _announce(self, channel: Channel) -> None:
        assert channel.file is not None
        # Deletes those of jobs that were killed.
        job_files()
        try:
            channel.file.write()
            if self.options.metrics is not None:
                self._metrics = serve_metrics(
                    channel.file.address, self.options.metrics
                )
        except OSError as error:
            _log.warning("the job's file %s: %s", channel.file.path, error)
        before_termination.append(channel.file.remove)
        key = f" --key {channel.file.key}" if channel.nonce else ""
        with_key = "" if channel.nonce else " (with this RANKSCOPE_KEY)"
        print(
            f"rankscope: to see this job in a notebook{with_key}: "
            f"%dist_attach {channel.file.address}{key}",
            file=sys.stderr,
            flush=True,
        )

    def _publish_while_watched(self, channel: Channel) -> None:
        forget = None
        try:
            while True:
                watched = time.monotonic() < self._until
                if watched and forget is None:
                    forget = recorder.on_change(self._note_change)
                elif not watched and forget is not None:
                    forget()
                    forget = None
                self._wake.wait(HEARTBEAT if watched else None)
                self._wake.clear()
                if self._stopped.is_set() or channel.store.lost:
                    return
                if watched:
                    began = time.thread_time()
                    self._publish(channel)
                    cost = time.thread_time() - began
                    pause = min(_LONGEST_PAUSE, cost / SHARE)
                    self._stopped.wait(max(self._interval, pause))
        finally:
            if forget is not None:
                forget()

    def _publish(self, channel: Channel) -> None:
        try:
            channel.store.set(status_key(channel.rank), self._summary())
        except DistError as error:
            # Rank 0, or this process, was stopped for a while: the next one arrives. Or
            # the store is lost, which the caller looks for.
            _log.debug("no status was published: %s", error)

    def _note_death(self, message: str) -> None:
        self._rank_0_died.set()
        self._wake.set()

    def _note_change(self) -> None:
        # Mostly the event is set already, and setting it takes a lock.
        if not self._wake.is_set():
            self._wake.set()

    def _status(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "status_thread": self._thread.native_id,
            "busy": True,
            "busy_for": time.monotonic() - self._began,
        }

    # -- requests, on the store's thread for callbacks ------------------------------

    def _serve(self, message: bytes) -> None:
        assert self._channel is not None
        request = json.loads(message)
        content = answer(self._handlers, request)
        store = self._channel.store
        if store.lost:
            return
        key = answer_key(request["id"])
        store.set(key, json.dumps(content))
        self._answered.append(key)
        if len(self._answered) > _ANSWERS:
            store.delete_key(self._answered.popleft())

    @requests.PublishStatus.handler
    def _publish_status(
        self, wanted: requests.PublishStatus
    ) -> requests.EncodedSummary:
        self._interval = wanted.interval
        until = time.monotonic() + wanted.lease
        self._until = max(self._until, until)
        if wanted.attends:
            self._attended_until = max(self._attended_until, until)
        self._wake.set()
        return self._summary()

    # -- the end -------------------------------------------------------------------

    def end(self) -> None:
        """Have the thread tell that this rank's script has ended, and close everything.

        Takes at most `END_WAIT` seconds. No new thread is started: Python 3.12 does not
        at its end.
        """
        if os.getpid() != self._process or self._stopped.is_set():
            return
        atexit.unregister(self.end)
        self._stopped.set()
        self._wake.set()
        # At the end of Python a thread in torch's store would take the process down:
        # it is unwound through C++, which calls `abort`.
        self._thread.join(END_WAIT)

    def _say_goodbye(self, channel: Channel) -> None:
        try:
            if channel.file is not None:
                channel.file.remove()
            if self._metrics is not None:
                self._metrics.kill()
                self._metrics.wait()
            if self._relay is not None:
                self._relay.close()
            channel.store.set(
                end_key(channel.rank),
                f"rank {channel.rank} has ended ({_process()}): {_how_it_ended()}",
            )
            channel.store.withdraw()
        except DistError as error:
            # Rank 0 has ended before.
            _log.debug("no goodbye: %s", error)
        finally:
            channel.store.close()


def _location() -> str:
    return main_thread_place().location


def _process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _how_it_ended() -> str:
    error = getattr(sys, "last_value", None)
    if error is None:
        return ENDED
    shown = explain(error)
    text = str(shown).partition("\n")[0]
    return f"its script ended with {type(shown).__name__}: {text}"
