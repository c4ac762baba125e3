"""Variables to and from the ranks, through ipyparallel's own views."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ipyparallel

from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterError, PullError, group_by_message
from ..wire import ipyparallel_private as private
from ..wire.rank_variables import LARGE, close_files, get_variable, set_variables
from ..wire.values import MemoryFile, pack, read_memory_file, size_of, unpack
from .rank_slots import deaths
from .registry import EngineRegistry

__all__ = ["pull", "push"]

#: Seconds between two checks for an answer that was lost.
PERIOD = 3.0


def push(
    registry: EngineRegistry,
    variables: Mapping[str, Any],
    ranks: Sequence[int],
    timeout: float | None,
) -> None:
    """Set `variables` on `ranks`; wait at most `timeout` seconds for the answers."""
    what = f"push of {', '.join(variables)}"
    frames = {name: pack(value) for name, value in variables.items()}
    every = [frame for some in frames.values() for frame in some]
    names, counts = list(frames), [len(some) for some in frames.values()]
    file = None
    if size_of(every) >= LARGE and all(_is_here(registry, rank) for rank in ranks):
        file = MemoryFile.write(every)
    view = _view(registry, ranks)
    if file is not None:
        try:
            result = view.apply_async(set_variables, names, counts, file)
            answers = _get(registry, result, what, ranks, timeout)
        finally:
            file.close()
    if file is None or "unshared" in answers:
        result = view.apply_async(set_variables, names, counts, None, *every)
        answers = _get(registry, result, what, ranks, timeout)
    errors = {rank: text for rank, text in zip(ranks, answers, strict=True) if text}
    if errors:
        raise ClusterError(f"{what}: {group_by_message(errors)}")


def pull(
    registry: EngineRegistry,
    names: str | Sequence[str],
    ranks: Sequence[int],
    timeout: float | None,
    label: str = "",
) -> dict[int, Any]:
    """Return rank → value, or rank → {name: value} where `names` is a list.

    Errors have `label` in the place of the name.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    found: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    errors: dict[int, list[str]] = {}
    shared = [rank for rank in ranks if _is_here(registry, rank)]
    view = _view(registry, ranks)
    for name in wanted:
        what = f"pull of {label or name}"
        result = view.apply_async(get_variable, name, len(shared) == len(ranks))
        answers = _get(registry, result, what, ranks, timeout)
        for rank, (kind, why, file, *frames) in zip(ranks, answers, strict=True):
            try:
                found[rank][name] = _value(label or name, kind, why, file, frames)
            except ClusterError as error:
                errors.setdefault(rank, []).append(str(error))
        files = [answer[2] for answer in answers if answer[2] is not None]
        if files:
            view.apply_async(close_files, *(file.token for file in files))
    if errors:
        texts = {rank: "; ".join(some) for rank, some in errors.items()}
        what = f"pull of {label or ', '.join(wanted)}"
        raise PullError(f"{what}: {group_by_message(texts)}", found)
    if isinstance(names, str):
        return {rank: one[names] for rank, one in found.items()}
    return dict(found)


def _value(
    name: str, kind: str, why: str, file: MemoryFile | None, frames: list[Any]
) -> Any:
    """Return the value of a rank; raise `ClusterError` if there is none."""
    if why:
        raise ClusterError(why)
    if file is not None:
        read = read_memory_file(file)
        if read is None:
            raise ClusterError(f"the memory of process {file.pid} cannot be read")
        frames = read
    try:
        return unpack(frames, vars(sys.modules["__main__"]))
    except Exception as error:
        module, _, cls = kind.rpartition(".")
        where = "the cells of the ranks" if module == "__main__" else f"module {module}"
        raise ClusterError(
            f"{name} is a {cls} of {where}, which cannot be made here "
            f"({type(error).__name__}: {error}): define or import it here, too, or "
            f"pull what it has, as in y = vars({name})"
        ) from error


def _is_here(registry: EngineRegistry, rank: int) -> bool:
    return registry.slots[rank].host == socket.gethostname()


def _view(registry: EngineRegistry, ranks: Sequence[int]) -> Any:
    _check_alive(registry, ranks)
    return registry.client.direct_view(
        [registry.slots[rank].engine_id for rank in ranks]
    )


def _check_alive(registry: EngineRegistry, ranks: Sequence[int]) -> None:
    dead = deaths(registry.slots, ranks)
    if dead:
        raise ClusterError("; ".join(dead.values()))


def _get(
    registry: EngineRegistry,
    result: Any,
    what: str,
    ranks: Sequence[int],
    timeout: float | None,
) -> list[Any]:
    _wait(registry, result, what, ranks, timeout)
    values: list[Any] = result.get(0, return_exceptions=True)
    errors = {
        rank: f"{value.ename}: {value.evalue}"
        for rank, value in zip(ranks, values, strict=True)
        if isinstance(value, ipyparallel.error.RemoteError)
    }
    if errors:
        raise ClusterError(f"{what}: {group_by_message(errors)}")
    return values


def _wait(
    registry: EngineRegistry,
    result: Any,
    what: str,
    ranks: Sequence[int],
    timeout: float | None,
) -> None:
    """Wait for `result`; raise `TimeoutError`, or `ClusterError` if it was lost.

    A message that is sent while the connection to the controller is down is lost. A
    rank that answers a later probe has handled the request: its answer was lost.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    probes: dict[int, Future[Any]] = {}
    while True:
        left = max(0.0, deadline - time.monotonic())
        if result.wait(min(PERIOD, left)):
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
