"""AbortRelay: an abort on one rank of a script reaches all ranks, with its reason.

The reason is in the channel before the ops of the aborting rank end: a rank whose op
fails with them waits for the reason a moment (`torch_watch.errors`).
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

from rankscope.backends.errors import DistError
from rankscope.backends.groups.world import world
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.thread_start import start_thread
from rankscope.backends.torch_watch import aborting
from rankscope.backends.torch_watch.creation import known_groups, made_of
from rankscope.backends.torch_watch.groups import TorchGroup
from rankscope.backends.torch_watch.watch import TorchWatch

from ..wire.job_channel import QueueReader, append
from ..wire.job_keys import sign, verifies

__all__ = ["AbortRelay"]

_log = logging.getLogger(__name__)

_QUEUE = "abort"
#: Seconds that an abort waits for the channel before the ops are ended all the same.
_SEND_WAIT = 0.3


class AbortRelay:
    """Sends the aborts of this rank to the others, and executes theirs here."""

    def __init__(self, store: TCPStore, nonce: str, torch: TorchWatch) -> None:
        self._store, self._nonce, self._torch = store, nonce, torch
        QueueReader(store, _QUEUE, self._receive, shared=True)
        aborting.before_abort.append(self._tell)
        for group, made in known_groups():
            if made.aborted is not None:
                self._tell(group)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            aborting.before_abort.remove(self._tell)

    def _tell(self, group: Any) -> None:
        """Tell the other ranks, on a thread, of an abort, unless one of them has."""
        keys = (
            one.key
            for one in self._torch.groups()
            if isinstance(one, TorchGroup) and one.torch_group is group
        )
        key = next(keys, None)
        made = made_of(group)
        if key is None or made.aborted is None:
            return
        body = json.dumps(
            {
                "group": key.id,
                "generation": made.generation,
                "reason": made.aborted.text,
                "diagnosis": made.aborted.diagnosis,
                "by": made.aborted.by,
                "culprits": list(made.aborted.culprits),
            }
        )
        sending = start_thread("abort-relay", self._send, body)
        sending.join(_SEND_WAIT)

    def _send(self, body: str) -> None:
        about = json.loads(body)
        counter = f"aborts/{about['generation']}/{about['group']}"
        try:
            if self._store.add(counter, 1) == 1:
                signature = sign(self._nonce, body.encode())
                message = json.dumps({"body": body, "signature": signature})
                append(self._store, _QUEUE, message.encode())
        except DistError as error:
            _log.warning("the other ranks do not learn of an abort: %s", error)

    def _receive(self, message: bytes) -> None:
        told = json.loads(message)
        body: str = told["body"]
        if not verifies(self._nonce, body.encode(), told["signature"]):
            _log.warning("ignored an abort that no rank of this job has signed")
            return
        about = json.loads(body)
        world.abort(
            [about["group"]],
            about["reason"],
            by=about["by"],
            culprits=about["culprits"],
            diagnosis=about["diagnosis"],
        )
