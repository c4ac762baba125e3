"""Introspection: completions, help and names for a cell, as the ranks know them."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterable
from typing import Any

from ..observe.rank_slots import SILENCE
from ..wire import ipyparallel_private as private
from ..wire.answers import Answers
from ..wire.ipyparallel_private import call_of
from ..wire.requests import GetNames
from .registry import EngineRegistry

__all__ = ["PATIENCE", "Introspection"]

#: Seconds that the main thread of a rank gets to answer, and those that its agent
#: gets afterwards: a person types meanwhile, and a fifth of a second is not felt.
PATIENCE, NAMES_PATIENCE = 0.15, 0.05


class Introspection:
    """Asks ranks for completions, help and names; never waits for a cell."""

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self._names: dict[int, dict[str, str]] = {}

    def names(self, ranks: Iterable[int]) -> dict[str, str]:
        """Return the names that cells can use on `ranks`, as last known."""
        posted = self._registry.post(GetNames(), ranks)
        concurrent.futures.wait(posted.values(), NAMES_PATIENCE)
        self._names.update(Answers.of(posted).results)
        found: dict[str, str] = {}
        for rank in posted:
            found.update(self._names.get(rank, {}))
        return found

    def ask(
        self, function: str, ranks: Iterable[int], *arguments: Any
    ) -> dict[str, Any] | None:
        """Return the reply of `agent.complete` or `inspect`, of the first idle rank.

        ``None`` if there is none, and if it does not answer in `PATIENCE` seconds.
        """
        uuid = self._idle(ranks)
        if uuid is None:
            return None
        client = self._registry.client
        call = call_of("agent", function, *arguments)
        future: Any = private.evaluate(client, uuid, call)
        # Not before: a reply to a request that is forgotten is reported as an error.
        future.add_done_callback(
            lambda _: private.discard_request(client, future.msg_id)
        )
        try:
            reply = future.result(PATIENCE)
        except concurrent.futures.TimeoutError:
            return None
        if isinstance(reply, Exception):
            raise reply
        found: dict[str, Any] = json.loads(private.evaluated(reply))
        return found

    def _idle(self, ranks: Iterable[int]) -> str | None:
        """Return the engine of the first of `ranks` that runs no cell, if one does."""
        for rank in ranks:
            slot = self._registry.slots[rank]
            if slot.alive and not slot.is_silent(SILENCE) and not slot.summary.busy:
                return slot.uuid
        return None
