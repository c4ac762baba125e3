"""Suspension of a group: its backends free device memory while no op is issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import DistBackendError, DistError
from ..interface.base import Backend
from .generation import Generation

__all__ = ["memory_stats", "resume", "suspend"]


def suspend(current: Generation) -> None:
    """Suspend the backends of `current` that can be; every rank has to call it."""
    where = current.spec.describe()
    with current.suspend_lock:
        with current.issue_lock:
            current.raise_if_aborted(None)
            if current.suspended:
                raise DistBackendError(
                    f"suspend: {where} is suspended already", **current.spec.identity()
                )
            able = _able(current, "suspend")
            # From here on no op gets a number.
            current.suspended = dict(able)
        _run(current, "suspend", list(able.values()), lambda one: one.suspend())


def resume(current: Generation) -> None:
    """Resume what `suspend` has suspended; every rank has to call it."""
    with current.suspend_lock:
        current.raise_if_aborted(None)
        if not current.suspended:
            raise DistBackendError(
                f"resume: {current.spec.describe()} is not suspended",
                **current.spec.identity(),
            )
        backends = list(current.suspended.values())
        _run(current, "resume", backends, lambda one: one.resume())
        current.suspended = {}


def memory_stats(current: Generation) -> dict[str, int]:
    """Return the sums of the memory statistics of the backends that have them."""
    current.raise_if_aborted(None)
    sums: dict[str, int] = {}
    for backend in _able(current, "memory_stats").values():
        for name, value in backend.memory_stats().items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _able(current: Generation, call: str) -> dict[str, Backend]:
    """Return the backends that can be suspended; raise an error if there is none."""
    able: dict[str, Backend] = {}
    lacking = []
    for device, name in current.spec.config.device_backend_map.items():
        backend = current.backends.get(device)
        if backend is None:
            lacking.append(f"no op has used {device}:{name} yet")
        elif lacks := backend.suspend_lacks():
            lacking.append(lacks)
        else:
            able[device] = backend
    if not able:
        raise NotImplementedError(
            f"{call} of {current.spec.describe()}: {'; '.join(lacking)}"
        )
    return able


def _run(
    current: Generation,
    name: str,
    backends: Sequence[Backend],
    call: Callable[[Backend], None],
) -> None:
    """Make `call` on `backends`; abort the group if that fails."""
    spec = current.spec
    try:
        for backend in backends:
            call(backend)
    except BaseException as error:
        # Another rank may have what this one lacks: none can go on.
        ended = current.aborted is not None
        said = str(error) or type(error).__name__
        culprits = spec.culprits_of(error)
        current.abort(f"{name}() failed: {said}", culprits=culprits)
        if ended:
            current.raise_if_aborted(None)
        if not isinstance(error, DistError):
            raise
        made = error.prefixed(f"{name} of {spec.describe()}", **spec.identity())
        made.culprits = culprits
        raise made from error
