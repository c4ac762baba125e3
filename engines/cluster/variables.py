"""Variables to and from the ranks, through ipyparallel's own views."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

import ipyparallel

from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.tcp.connector import wants_encryption

from ..errors import ClusterError, PullError, group_by_message
from ..wire import ipyparallel_private as private
from ..wire.rank_variables import LARGE, UNREACHED, get_variables, set_variables
from ..wire.values import pack, size_of, unpack
from .registry import EngineRegistry
from .value_server import ValueServer

__all__ = ["pull", "push"]

#: Called with the bytes that have gone, and all bytes.
Progress = Callable[[int, int], None]

#: Seconds between two checks for an answer that was lost.
PERIOD = 3.0
#: Seconds that the cause of a rank's death may come after its death.
DEATH_WAIT = 2.0
#: Seconds between two reports of progress.
TICK = 0.2


def push(
    registry: EngineRegistry,
    variables: Mapping[str, Any],
    ranks: Sequence[int],
    timeout: float | None,
    progress: Progress | None = None,
) -> None:
    what = f"push of {', '.join(variables)}"
    frames = {name: pack(value) for name, value in variables.items()}
    every = [frame for some in frames.values() for frame in some]
    names, counts = list(frames), [len(some) for some in frames.values()]
    answers: Mapping[int, str] = dict.fromkeys(ranks, UNREACHED)
    if size_of(every) >= LARGE:
        with _served(registry, ranks, every) as server:
            if server is not None:
                call = set_variables, names, counts, server.port
                tick = _ticking(server, progress)
                answers = _call(registry, ranks, call, what, timeout, tick)
    left = [rank for rank in ranks if answers[rank] == UNREACHED]
    if left:
        by_message = set_variables, names, counts, None, *every
        answers = {**answers, **_call(registry, left, by_message, what, timeout)}
    errors = {rank: text for rank, text in answers.items() if text}
    if errors:
        raise ClusterError(f"{what}: {group_by_message(errors)}")


def pull(
    registry: EngineRegistry,
    names: str | Sequence[str],
    ranks: Sequence[int],
    timeout: float | None,
    label: str = "",
    progress: Progress | None = None,
) -> dict[int, Any]:
    """Return rank → value, or rank → {name: value} where `names` is a list."""
    wanted = [names] if isinstance(names, str) else list(names)
    what = f"pull of {label or ', '.join(wanted)}"
    received = dict[int, list[Any]]()
    with _served(registry, ranks) as server:
        port = None
        if server is not None:
            received, port = server.received, server.port
        call, tick = (get_variables, wanted, port), _ticking(server, progress)
        answers = _call(registry, ranks, call, what, timeout, tick)
    left = [rank for rank, (_, place, *_) in answers.items() if place == UNREACHED]
    if left:
        answers |= _call(registry, left, (get_variables, wanted), what, timeout)
    found: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    errors: dict[int, str] = {}
    for rank, (facts, place, *frames) in answers.items():
        rest, missing = iter(frames if place is None else received.pop(place)), []
        for name, (kind, why, count) in zip(wanted, facts, strict=True):
            own = list(islice(rest, count))
            try:
                found[rank][name] = _value(name, label or name, kind, why, own)
            except ClusterError as error:
                missing.append(str(error))
        if missing:
            errors[rank] = "; ".join(missing)
    if errors:
        raise PullError(f"{what}: {group_by_message(errors)}", found)
    if isinstance(names, str):
        return {rank: one[names] for rank, one in found.items()}
    return dict(found)


def _value(name: str, label: str, kind: str, why: str, frames: list[Any]) -> Any:
    """Return the value of a rank; raise `ClusterError` if there is none."""
    if not kind:
        raise ClusterError(f"there is no variable {name!r}")
    if why:
        raise ClusterError(f"{label} {why}")
    try:
        return unpack(frames, vars(sys.modules["__main__"]))
    except Exception as error:
        module, _, cls = kind.rpartition(".")
        where = "the cells of the ranks" if module == "__main__" else f"module {module}"
        raise ClusterError(
            f"{label} is a {cls} of {where}, which cannot be made here "
            f"({type(error).__name__}: {error}): define or import it here, too, or "
            f"pull what it has, as in y = vars({label})"
        ) from error


@contextlib.contextmanager
def _served(
    registry: EngineRegistry, ranks: Sequence[int], frames: Sequence[Any] | None = None
) -> Iterator[ValueServer | None]:
    """Serve a push of `frames`, or a pull, in the block; ``None``: messages have to do.

    Between hosts a value is as well protected as the messages that would go in its
    place, or better. Within one it is not encrypted: its network is nobody else's.
    """
    far = [one for one in map(registry.slots.__getitem__, ranks) if not one.is_here]
    encrypted = bool(registry.client.curve_serverkey) or wants_encryption()
    server = ValueServer.towards(
        far[0].address if far else "127.0.0.1",
        len(ranks),
        bool(far) and encrypted,
        frames,
    )
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def _ticking(
    server: ValueServer | None, progress: Progress | None
) -> Callable[[], None]:
    def tick() -> None:
        if server is not None:
            server.check()
            if progress is not None:
                progress(server.moved, server.total)

    return tick


def _check_alive(registry: EngineRegistry, ranks: Sequence[int]) -> None:
    dead = registry.deaths(ranks)
    if dead:
        raise ClusterError("; ".join(dead.values()))


def _call(
    registry: EngineRegistry,
    ranks: Sequence[int],
    call: Sequence[Any],
    what: str,
    timeout: float | None,
    tick: Callable[[], None] = lambda: None,
) -> dict[int, Any]:
    """Return rank → its answer to a call; call `tick` while it waits."""
    _check_alive(registry, ranks)
    engines = [registry.slots[rank].engine_id for rank in ranks]
    result = registry.client.direct_view(engines).apply_async(*call)
    _wait(registry, result, what, ranks, timeout, tick)
    values: list[Any] = result.get(0, return_exceptions=True)
    answers = dict(zip(ranks, values, strict=True))
    errors = {
        rank: f"{value.ename}: {value.evalue}"
        for rank, value in answers.items()
        if isinstance(value, ipyparallel.error.RemoteError)
    }
    if errors:
        # The cause of a death may come a moment later.
        gone = [rank for rank in errors if answers[rank].ename == "EngineError"]
        registry.await_deaths([registry.slots[rank] for rank in gone], DEATH_WAIT)
        _check_alive(registry, gone)
        raise ClusterError(f"{what}: {group_by_message(errors)}")
    return answers


def _is_done(result: Any, seconds: float, tick: Callable[[], None]) -> bool:
    until = time.monotonic() + seconds
    while True:
        done: bool = result.wait(min(TICK, max(0.0, until - time.monotonic())))
        tick()
        if done or time.monotonic() >= until:
            return done


def _wait(
    registry: EngineRegistry,
    result: Any,
    what: str,
    ranks: Sequence[int],
    timeout: float | None,
    tick: Callable[[], None],
) -> None:
    """Wait for `result`; raise `TimeoutError`, or `ClusterError` if it was lost.

    A message that is sent while the connection to the controller is down is lost. A
    rank that answers a later probe has handled the request: its answer was lost.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    probes: dict[int, Future[Any]] = {}
    while True:
        left = max(0.0, deadline - time.monotonic())
        if _is_done(result, min(PERIOD, left), tick):
            return
        if left <= PERIOD:
            raise TimeoutError(
                f"{what}: not done on {name_ranks(ranks)} within {timeout:g} s; a rank "
                "answers when the cell that runs there is done"
            )
        _check_alive(registry, ranks)
        answered = [rank for rank, probe in probes.items() if probe.done()]
        if len(answered) == len(ranks) and not result.wait(1.0):
            raise ClusterError(
                f"{what}: the connection to the controller failed meanwhile, and the "
                f"answer of {name_ranks(ranks)} was lost: try again"
            )
        for rank in ranks:
            slot = registry.slots[rank]
            if rank in answered or slot.summary.busy:
                continue
            if rank in probes:
                private.discard_request(registry.client, probes[rank].msg_id)  # type: ignore[attr-defined]
            probes[rank] = private.probe(registry.client, slot.uuid)
