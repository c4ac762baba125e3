"""BackendConfig: which backend serves which device type.

The grammar is that of ``torch.distributed``::

    config  := "" | backend | part {"," part}
    part    := device ":" backend

``"gloo"`` alone means gloo for every device type gloo supports.
"""

from __future__ import annotations

import importlib.util
import sys

from .backend import Backend, builtin_devices

__all__ = ["GRAMMAR", "BackendConfig"]

GRAMMAR = (
    "expected a backend ('gloo') or device:backend pairs ('cpu:gloo,cuda:nccl'), "
    "each device once"
)


class BackendConfig:
    """A parsed backend string; ``device_backend_map`` maps device type to name.

    `backend` is ``None`` or ``""`` for the defaults of what is installed:
    ``cpu:gloo``, or ``cpu:mpi`` where pygloo has no wheel, and ``cuda:nccl``
    where cupy is installed. Anything that breaks the grammar or names a
    backend nobody registered raises `ValueError` naming the offending part.
    Semantics of ``torch.distributed.BackendConfig``.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.device_backend_map: dict[str, str] = _parse(backend or _default())

    def get_device_backend_map(self) -> dict[str, str]:
        """The mapping from device type to backend name, in order of mention."""
        return dict(self.device_backend_map)

    def __str__(self) -> str:
        return ",".join(f"{d}:{b}" for d, b in self.device_backend_map.items())

    def __repr__(self) -> str:
        return f"BackendConfig({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BackendConfig):
            return NotImplemented
        return self.device_backend_map == other.device_backend_map

    def __hash__(self) -> int:
        return hash(str(self))


def gloo_has_wheels() -> bool:
    """Whether pygloo is installed, which it can only be where it has wheels."""
    return importlib.util.find_spec("pygloo") is not None


def _default() -> str:
    cpu = "cpu:gloo" if gloo_has_wheels() else "cpu:mpi"
    has_cupy = "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    return f"{cpu},cuda:nccl" if has_cupy else cpu


def _parse(text: str) -> dict[str, str]:
    if not isinstance(text, str):
        raise TypeError(f"backend must be a str, not {type(text).__name__}; {GRAMMAR}")
    if ":" not in text:
        name = text.strip()
        return dict.fromkeys(_devices_of(name, text), name)
    mapping: dict[str, str] = {}
    for part in text.split(","):
        pieces = [piece.strip() for piece in part.split(":")]
        if len(pieces) != 2 or not all(pieces):
            raise ValueError(f"backend {text!r}: bad part {part!r}; {GRAMMAR}")
        device, name = pieces
        if device in mapping:
            raise ValueError(
                f"backend {text!r}: device {device!r} is given twice "
                f"({mapping[device]} and {name}); {GRAMMAR}"
            )
        if not device.isidentifier():
            raise ValueError(f"backend {text!r}: bad device {device!r}; {GRAMMAR}")
        _devices_of(name, text)
        mapping[device] = name
    return mapping


def _devices_of(name: str, text: str) -> tuple[str, ...]:
    devices = builtin_devices().get(name)
    if devices is None and name in Backend.registry:
        devices = Backend.registry[name].devices
    if devices is None:
        known = ", ".join(sorted({*builtin_devices(), *Backend.registry}))
        raise ValueError(
            f"backend {text!r}: unknown backend {name!r} (known: {known}); {GRAMMAR}"
        )
    return devices
