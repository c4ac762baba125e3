"""Benchmarks on a rank: measure a collective and publish each size as it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ipykernel.kernelapp import IPKernelApp

from rankscope.backends.benchmark import benchmark, usual_device
from rankscope.backends.errors import DistBackendError
from rankscope.backends.groups.api import destroy_process_group
from rankscope.backends.groups.membership import resolve_group
from rankscope.backends.groups.subgroups import new_group
from rankscope.backends.interface.registry import resolve

from ..wire import ipyparallel_private as private
from ..wire.message_types import DATA
from .availability import why_refused

__all__ = ["measure_on_rank"]


def measure_on_rank(request: dict[str, Any]) -> None:
    """Measure in the cell's group; every rank of the group calls it."""
    wanted = dict(request)
    names, device = wanted.pop("backends"), wanted.pop("device")
    own = resolve_group(None, "benchmark")
    if not names:
        served = own.config.device_backend_map
        device_type = device or usual_device(served)
        _measure(own, served.get(device_type), device_type, 0, wanted)
    for order, name in enumerate(names):
        device_type = device or usual_device(resolve(name).devices)
        config = f"{device_type}:{name}"
        group = new_group(own.ranks, own.timeout, config, group_desc=f"bench {name}")
        try:
            _measure(group, name, device_type, order, wanted)
        finally:
            destroy_process_group(group)


def _measure(
    group: Any, name: str | None, device: str, order: int, wanted: Mapping[str, Any]
) -> None:
    reason = None if name is None else why_refused(device, name)
    if reason is not None:
        raise DistBackendError(reason)
    kernel = IPKernelApp.instance().kernel
    for number, found in enumerate(benchmark(group=group, device=device, **wanted)):
        data = {"row": f"{order}/{number}", "backend": name, **asdict(found)}
        private.publish(kernel, DATA, data, kernel.get_parent("shell")["header"])
