"""BackendConfig: which backend serves which device type.

The grammar is that of ``torch.distributed``::

    config  := "" | backend | part {"," part}
    part    := device ":" backend

``"mpi"`` alone means MPI for every device type that MPI supports. A backend for
host memory may be named for any device type: its arrays are staged (`staging`).
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from ..devices.arrays import DEVICE_TYPES, is_device_type
from ..devices.cuda_device import device_index
from ..did_you_mean import did_you_mean
from ..interface.base import Backend
from ..interface.registry import (
    builtin_devices,
    known_backends,
    resolve,
    unavailable_reason,
)
from ..interface.staging import misplaced, staged_devices

__all__ = [
    "BackendConfig",
    "bound_index",
    "default_instead",
    "get_default_backend_for_device",
    "why_unusable",
]

GRAMMAR = (
    "expected a backend ('tcp') or device:backend pairs ('cpu:tcp,cuda:nccl'), "
    "each device once"
)

# Names of device types in other libraries.
_ALIASES = {"gpu": "cuda", "hip": "rocm", "mps": "metal", "xpu": "oneapi"}


class BackendConfig:
    """A parsed backend string; ``device_backend_map`` maps device type to name.

    Parameters
    ----------
    backend : str, optional
        ``"ucx"``, for every device type that UCX serves, or ``"cpu:tcp,cuda:nccl"``, in
        lower or upper case.
        ``None`` and ``""`` are the default: the first built-in backend of each device
        type, ``cpu:tcp``, and ``cuda:nccl`` where cupy is installed. The other backends
        are used where they are named.

    Raises
    ------
    ValueError
        The text breaks the grammar, or names an unknown backend or device type, or a
        backend for a device type that it cannot serve. The message names the part.
    TypeError
        `backend` is no text.

    Notes
    -----
    The semantics are those of ``torch.distributed.BackendConfig``. A backend is known
    if it is built in, registered, or declared by an installed package as an entry
    point of the group ``rankscope.backends``.

    Examples
    --------
    >>> config = dist.BackendConfig("cpu:tcp,cuda:nccl")
    >>> config.get_device_backend_map()
    {'cpu': 'tcp', 'cuda': 'nccl'}
    >>> dist.BackendConfig("tcp")
    BackendConfig('cpu:tcp')
    """

    def __init__(self, backend: str | None = None) -> None:
        self.device_backend_map: dict[str, str] = _parse(backend or _default())

    @classmethod
    def from_peer(cls, text: str) -> BackendConfig:
        """Return the config that is `text` on another rank, which has checked it.

        A backend need not be known here: it is looked up at the first op that needs it.

        Parameters
        ----------
        text : str
            A config as text, a part for each device type.
        """
        config = cls.__new__(cls)
        config.device_backend_map = {}
        for part in text.split(","):
            device, _, name = part.partition(":")
            config.device_backend_map[device] = name
        return config

    def get_device_backend_map(self) -> dict[str, str]:
        """Return a copy of the device types and their backends, in order of mention."""
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


def get_default_backend_for_device(device: Any) -> str:
    """Return the backend that serves `device` by default.

    The semantics are those of ``torch.distributed.get_default_backend_for_device``.

    Parameters
    ----------
    device : str or torch.device
        A device type such as ``"cuda"``, with or without an index, or what has a
        `type`.

    Raises
    ------
    ValueError
        No backend that comes with Rankscope serves the device type.

    Examples
    --------
    >>> dist.get_default_backend_for_device("cuda:1")
    'nccl'
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    for name, served in builtin_devices().items():
        if kind in served:
            return name
    raise ValueError(
        f"get_default_backend_for_device: device={device!r} has no backend of its "
        "own; expected 'cpu' or 'cuda'"
    )


def _default() -> str:
    has_cupy = "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    devices = ("cpu", "cuda") if has_cupy else ("cpu",)
    return ",".join(f"{d}:{get_default_backend_for_device(d)}" for d in devices)


def _parse(text: str) -> dict[str, str]:
    if not isinstance(text, str):
        raise TypeError(f"backend must be a str, not {type(text).__name__}; {GRAMMAR}")
    if ":" not in text:
        name = text.strip().lower()
        _check_known(name, text)
        return dict.fromkeys(_served(name) or resolve(name).devices, name)
    mapping: dict[str, str] = {}
    for part in text.split(","):
        pieces = [piece.strip().lower() for piece in part.split(":")]
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
        _check_known(name, text)
        _check_device(device, name, part, text)
        mapping[device] = name
    return mapping


def _check_known(name: str, text: str) -> None:
    # The metadata of packages is read only for names that are neither built in nor
    # registered; a package is imported at the first use of its backend.
    if name in builtin_devices() or name in Backend.registry:
        return
    known = known_backends()
    if name not in known:
        raise ValueError(
            f"backend {text!r}: unknown backend {name!r} (known: {', '.join(known)}); "
            f"{GRAMMAR}{did_you_mean(name, known)}"
        )


def _check_device(device: str, name: str, part: str, text: str) -> None:
    where = f"backend {text!r}: bad part {part.strip()!r}"
    # The device types of a package that is not imported yet are checked at first use.
    served = _served(name)
    reason = None if served is None else misplaced(device, name, served)
    if reason is not None:
        raise ValueError(f"{where}: {reason}")
    registered = (one for entry in Backend.registry.values() for one in entry.devices)
    known = {*DEVICE_TYPES, *registered, *staged_devices()}
    if device not in known and not is_device_type(device):
        meant = did_you_mean(_ALIASES.get(device, device), known)
        raise ValueError(
            f"{where}: no array is of device type {device!r}; {GRAMMAR}{meant}"
        )


def _served(name: str) -> tuple[str, ...] | None:
    """Return the device types of `name`; `None` where that would take an import."""
    if name in Backend.registry:
        return Backend.registry[name].devices
    return builtin_devices().get(name)


def bound_index(device_id: Any, config: BackendConfig, op: str) -> int | None:
    """Return the CUDA device to which `device_id` binds a group with `config`."""
    if device_id is None:
        return None
    index = device_index(device_id, op)
    if "cuda" not in config.device_backend_map:
        raise ValueError(
            f"{op}: device_id={device_id!r} is a CUDA device, the group has {config}; "
            "expected a backend for 'cuda' beside it, such as cuda:nccl"
        )
    return index


def why_unusable(backend: str | None) -> str | None:
    """Return why every backend of a config is unusable here; ``None`` if one is not.

    Of a default config, `backend` ``None`` or ``""``, the backend of host arrays is
    meant. A config with a backend that is not for host arrays, or of a package that
    is not imported yet, counts as usable: to ask such a backend may take seconds.
    """
    named = BackendConfig(backend).device_backend_map
    reasons = []
    for name in dict.fromkeys(named.values() if backend else [named["cpu"]]):
        if "cpu" not in (_served(name) or ()):
            return None
        reason = unavailable_reason(name)
        if reason is None:
            return None
        reasons.append(reason.rstrip("."))
    return "; ".join(reasons)


def default_instead(backend: str | None, how: str) -> str:
    """Return a sentence that names the default, as `how`, for config `backend`."""
    default = BackendConfig().device_backend_map["cpu"]
    if not backend or default in BackendConfig(backend).device_backend_map.values():
        return ""
    return f". The default, {default}, needs no further package: {how}"
