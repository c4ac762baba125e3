"""Kernels whose ports nothing else takes before they listen at them."""

from __future__ import annotations

import contextlib
from typing import Any

from jupyter_client.manager import KernelManager

from rankscope.engines.launch.ports import reserved_ports

__all__ = ["WithOwnPorts"]

#: The ports of a kernel, as its manager calls them.
_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


class WithOwnPorts(KernelManager):
    """Reserves the ports of its kernel.

    By itself a manager chooses ports of the range that connections get theirs from,
    and the kernel listens a second later: "Address already in use" on a busy machine.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._reserved = contextlib.ExitStack()
        ports = self._reserved.enter_context(reserved_ports(len(_PORTS)))
        # Too few are free: as by itself.
        self.cache_ports = self.cache_ports and not ports
        for name, port in zip(_PORTS, ports, strict=False):
            setattr(self, name, port)

    async def _async_cleanup_resources(self, restart: bool = False) -> None:
        await super()._async_cleanup_resources(restart=restart)
        if not restart:
            self._reserved.close()
