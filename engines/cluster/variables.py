"""Variables to and from the ranks, through ipyparallel's own views."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

import ipyparallel

from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterError, PullError, group_by_message
from ..wire import ipyparallel_private as private
from ..wire.rank_variables import LARGE, close_files, get_variables, set_variables
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
    view, file = _view(registry, ranks), None
    if size_of(every) >= LARGE and _are_here(registry, ranks):
        file = MemoryFile.write(every)
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
    what = f"pull of {label or ', '.join(wanted)}"
    view, shared = _view(registry, ranks), _are_here(registry, ranks)
    answers = _get(
        registry,
        view.apply_async(get_variables, wanted, shared),
        what,
        ranks,
        timeout,
    )
    files = [answer[1] for answer in answers if answer[1] is not None]
    found: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    errors: dict[int, str] = {}
    for rank, (facts, file, *frames) in zip(ranks, answers, strict=True):
        read = frames if file is None else read_memory_file(file)
        if read is None:
            errors[rank] = f"the memory of process {file.pid} cannot be read"
            continue
        rest, missing = iter(read), []
        for name, (kind, why, count) in zip(wanted, facts, strict=True):
            own = list(islice(rest, count))
            try:
                found[rank][name] = _value(name, label or name, kind, why, own)
            except ClusterError as error:
                missing.append(str(error))
        if missing:
            errors[rank] = "; ".join(missing)
    if files:
        view.apply_async(close_files, *(file.token for file in files))
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


def _are_here(registry: EngineRegistry, ranks: Sequence[int]) -> bool:
    return all(registry.slots[rank].is_here for rank in ranks)


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
