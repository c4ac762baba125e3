"""Installing the agent on engines, and checking that the versions agree."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import ipyparallel

from rankscope import __version__

from ..errors import ClusterError
from ..launch.processes import is_stopped
from ..wire import ipyparallel_private as private
from ..wire.ipyparallel_private import call_of
from ..wire.requests import GetHello, Hello
from .registry import EngineRegistry

__all__ = ["install_agents"]

#: Seconds between two looks for engines that ended.
PERIOD = 0.2
#: Seconds after which an engine that did not answer gets the request again. The
#: controller drops what is for an engine whose channel is not connected yet, and tells
#: nobody; a request on the channel of the cells may also wait for an engine's imports.
AGAIN, AGAIN_CELLS = 1.0, 5.0


def install_agents(
    registry: EngineRegistry,
    engine_ids: Iterable[int],
    deadline: float,
    *,
    attach: bool = False,
    known: Mapping[str, Hello] = MappingProxyType({}),
) -> dict[int, Hello]:
    """Install the agent on engines; return the description of each engine by its id.

    Until `deadline`, for at least 1 s. With `attach` an engine may have the agent,
    which describes it at once, also while a cell blocks the engine. `known` are
    descriptions by the identity of the engine, for those that are stopped, and for
    those that do not answer in time, as one that holds the GIL.
    """
    client, channel = registry.client, registry.channel
    uuids = private.engine_uuids(client)
    uuids = {number: uuids[number] for number in engine_ids}
    install = call_of("agent", "install", __version__)
    installing = {
        number: [private.evaluate(client, uuid, install)]
        for number, uuid in uuids.items()
    }
    greeting = {
        number: channel.post(uuid, GetHello())
        for number, uuid in uuids.items()
        if attach
    }
    began = time.monotonic()
    timeout, again = max(1.0, deadline - began), began + AGAIN_CELLS
    deadline = began + timeout
    hellos = {
        number: known[uuid]
        for number, uuid in uuids.items()
        if uuid in known and is_stopped(known[uuid]["pid"], known[uuid]["host"])
    }
    while len(hellos) < len(uuids):
        now = time.monotonic()
        left = deadline - now
        if now > again and not attach:
            again = now + 2 * (now - began)
            for number in uuids.keys() - hellos.keys():
                installing[number].append(
                    private.evaluate(client, uuids[number], install)
                )
        waiting: list[Future[Any]] = []
        for number in uuids.keys() - hellos.keys():
            greeted = greeting.get(number)
            installed = _first_done(client, installing[number])
            if greeted is not None and greeted.done():
                hellos[number] = greeted.result()["content"]["result"]
                _check_version(number, hellos[number])
            elif installed is not None:
                hellos[number] = _hello(number, installed.result())
            else:
                waiting += installing[number]
                waiting += [greeted] if greeted else []
        if waiting and left <= 0:
            silent = sorted(uuids.keys() - hellos.keys())
            if all(uuids[number] in known for number in silent):
                hellos.update((number, known[uuids[number]]) for number in silent)
                break
            raise ClusterError(
                f"engines {silent} did not answer within {timeout:g} s: is a "
                "cell running there? Try again when it is done"
            )
        if waiting:
            registry.check_none_ended()
            concurrent.futures.wait(
                waiting, min(left, PERIOD), concurrent.futures.FIRST_COMPLETED
            )
    for number, future in greeting.items():
        if not future.done():
            channel.drop(uuids[number], future)
    if not attach:
        _reach(registry, uuids, deadline)
    return hellos


def _first_done(
    client: ipyparallel.Client, requests: Sequence[Future[Any]]
) -> Future[Any] | None:
    """Return the first request that was answered; drop those before it.

    An engine answers in turn: what it got before would be answered by now.
    """
    for place, request in enumerate(requests):
        if request.done():
            for dropped in requests[:place]:
                private.discard_request(client, dropped.msg_id)  # type: ignore[attr-defined]
            return request
    return None


def _reach(registry: EngineRegistry, uuids: Mapping[int, str], deadline: float) -> None:
    """Wait until the control channels are there, beside those of the cells."""
    channel, missing = registry.channel, set(uuids)
    while missing:
        asked = {number: channel.post(uuids[number], GetHello()) for number in missing}
        concurrent.futures.wait(asked.values(), AGAIN)
        missing = {number for number in missing if not asked[number].done()}
        for number in missing:
            channel.drop(uuids[number], asked[number])
        registry.check_none_ended()
        if missing and time.monotonic() >= deadline:
            raise ClusterError(
                f"engines {sorted(missing)} do not answer on the control channel: the "
                "controller does not reach them. Try again"
            )


def _hello(engine_id: int, reply: Any) -> Hello:
    if isinstance(reply, Exception):
        raise ClusterError(f"engine {engine_id}: {reply}")
    try:
        hello: Hello = json.loads(private.evaluated(reply))
    except private.EvaluationError as error:
        raise ClusterError(
            f"engine {engine_id} cannot use rankscope {__version__}: {error}; install "
            "the same version in the environment that the engines run in"
        ) from None
    _check_version(engine_id, hello)
    return hello


def _check_version(engine_id: int, hello: Hello) -> None:
    if hello["version"] != __version__:
        raise ClusterError(
            f"engine {engine_id} has rankscope {hello['version']}, the notebook "
            f"{__version__}: install the same version in both environments"
        )
