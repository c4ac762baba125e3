"""Arguments of a `DeviceMesh`: the checks, before any group is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..devices.arrays import is_device_type
from ..quantities import as_int

__all__ = ["as_backends", "as_mesh", "as_names", "check_device"]


def check_device(device_type: str) -> None:
    """Raise `ValueError` unless `device_type` is a device type, without an index."""
    if not isinstance(device_type, str) or not is_device_type(device_type):
        raise ValueError(
            f"DeviceMesh: device_type={device_type!r}; expected a device type without "
            "an index, such as 'cpu' or 'cuda'"
        )


def as_mesh(mesh: Any) -> Any:
    """Return `mesh` as an array of integers, each once; `TypeError` or `ValueError`."""
    ranks = np.array(mesh)
    if ranks.dtype.kind not in "iu":
        raise TypeError(
            f"DeviceMesh: mesh has dtype {ranks.dtype}; expected an array of integers, "
            "the global ranks"
        )
    if not ranks.ndim or not ranks.size or len(np.unique(ranks)) < ranks.size:
        raise ValueError(
            f"DeviceMesh: mesh={ranks.tolist()}; expected at least one dimension and "
            "one rank, and each rank once"
        )
    return ranks


def as_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    """Return the names of `ndim` dimensions, all different; `ValueError` otherwise."""
    if names is None:
        return None
    given = (names,) if isinstance(names, str) else tuple(names)
    if len(given) != ndim or len(set(given)) < ndim or not all(given):
        raise ValueError(
            f"DeviceMesh: mesh_dim_names={given}; expected {ndim} different names, one "
            "for each dimension"
        )
    return given


def as_backends(
    override: Mapping[int | str, Any] | None, ndim: int, names: tuple[str, ...] | None
) -> list[str | None]:
    """Return the backend string that `override` has for each dimension, or ``None``."""
    backends: list[str | None] = [None] * ndim
    for key, value in (override or {}).items():
        known = [*range(ndim), *(names or ())]
        if key not in known:
            raise ValueError(
                f"DeviceMesh: backend_override has {key!r}; expected one of {known}"
            )
        dim = names.index(key) if isinstance(key, str) and names else as_int(key, "key")
        backend = value[0] if isinstance(value, tuple) else value
        if not isinstance(backend, str):
            raise TypeError(
                f"DeviceMesh: backend_override[{key!r}] is {value!r}; expected a "
                "backend string, or a pair of it and options"
            )
        backends[dim] = backend
    return backends
