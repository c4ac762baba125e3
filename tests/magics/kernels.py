"""A real notebook kernel, and what a front end got for each cell."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from rankscope.engines.errors import plain
from tools.execution import WithOwnPorts

__all__ = ["TIMEOUT", "Cell", "Kernel", "bare_kernel", "running_kernel"]

#: Seconds that a cell or a start may take.
TIMEOUT = 90


@dataclass
class Cell:
    """What a front end got for one cell: (seconds since it was sent, message)."""

    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    took: float = 0.0
    status: str = ""

    @property
    def result(self) -> dict[str, Any]:
        """The mime bundle of the last expression."""
        (found,) = [c for _, kind, c in self.messages if kind == "execute_result"]
        return found["data"]

    def stream(self, name: str = "stdout") -> str:
        """What stands there in the end; `clear_output` takes away what was."""
        text = ""
        for _, kind, content in self.messages:
            if kind == "clear_output":
                text = ""
            elif kind == "stream" and content["name"] == name:
                text += content["text"]
        return plain(text)

    def seen_at(self, text: str) -> float:
        """When `text` was seen first."""
        for when, kind, content in self.messages:
            if kind == "stream" and text in content["text"]:
                return when
        raise AssertionError(f"{text!r} was never shown: {self.messages}")

    @property
    def data(self) -> list[dict[str, Any]]:
        """The mime bundles that stand there in the end."""
        shown: dict[object, dict[str, Any]] = {}
        for _, kind, content in self.messages:
            if kind == "clear_output":
                shown.clear()
            elif kind in ("display_data", "update_display_data"):
                key = content["transient"].get("display_id", len(shown))
                # An update of what another cell shows, as the board, is none of this.
                if kind == "display_data" or key in shown:
                    shown[key] = content["data"]
        return list(shown.values())

    @property
    def error(self) -> str:
        """The traceback that the cell ended with, in one line."""
        return " ".join(self.error_lines)

    @property
    def error_lines(self) -> list[str]:
        """The lines of that traceback."""
        found = [content for _, kind, content in self.messages if kind == "error"]
        return [plain(text) for c in found for text in c["traceback"]]


class Kernel:
    """A kernel and its client; call it with the lines of a cell."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.cells = 0

    def __call__(
        self,
        *lines: str,
        interrupt_at: str | None = None,
        when: Mapping[str, Callable[[], object]] | None = None,
    ) -> Cell:
        """Run a cell; with `interrupt_at`, interrupt once that text was shown.

        Each function of `when` is called once its text was shown.
        """
        return self.end(self.begin(*lines), interrupt_at=interrupt_at, when=when)

    def begin(self, *lines: str) -> str:
        """Send a cell; return the request that `end` waits for."""
        self.cells += 1
        return self.client.execute("\n".join(lines))

    def end(
        self,
        request: str,
        *,
        interrupt_at: str | None = None,
        when: Mapping[str, Callable[[], object]] | None = None,
    ) -> Cell:
        """Wait for the end of a cell; the options are those of a call."""
        waiting = dict(when or {})
        sent = time.monotonic()
        cell = Cell()
        while True:
            left = max(0, sent + TIMEOUT - time.monotonic())
            try:
                message = self.client.get_iopub_msg(timeout=left)
            except queue.Empty:
                said = f"the cell did not end: {cell.messages}"
                raise AssertionError(said) from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            now = time.monotonic() - sent
            if kind == "status" and content["execution_state"] == "idle":
                cell.took = now
                cell.status = self._take_reply(request)
                return cell
            cell.messages.append((now, kind, content))
            text = content.get("text") or content.get("data", {}).get("text/plain", "")
            for key in [key for key in waiting if key in text]:
                waiting.pop(key)()
            if interrupt_at is not None and interrupt_at in text:
                interrupt_at = None
                self.manager.interrupt_kernel()
                sent = time.monotonic()

    def _take_reply(self, request: str) -> str:
        """Read the reply, too: a kernel whose replies pile up stops to answer."""
        reply = self.client.get_shell_msg(timeout=TIMEOUT)
        while reply["parent_header"].get("msg_id") != request:
            reply = self.client.get_shell_msg(timeout=TIMEOUT)
        status: str = reply["content"]["status"]
        return status


@contextmanager
def bare_kernel(
    **options: Any,
) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """Start a kernel, with `options` for its process, and end it."""
    manager = WithOwnPorts()
    manager.start_kernel(**options)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()
        # jupyter_client's blocking calls leave their event loop open.
        ensure_event_loop().close()


@contextmanager
def running_kernel(
    *, folder: Path | None = None, **environment: str
) -> Iterator[Kernel]:
    """Start a kernel with the extension, in `folder`, and end it."""
    env = {**os.environ, **environment}
    with bare_kernel(env=env, cwd=folder) as (manager, client):
        kernel = Kernel(manager, client)
        kernel("%load_ext rankscope")
        yield kernel
