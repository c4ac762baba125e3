"""DebugSession: the debugger of a rank, with its prompt in the notebook."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from IPython.core.error import StdinNotImplementedError

from rankscope.engines import Cluster, ClusterError

from ..output.render import Renderer
from ..output.stream import OutputStream
from .cell import TICK

__all__ = ["DebugSession"]

#: Seconds that a rank gets to show its first prompt, to take a line, and to end.
PATIENCE = 10.0
#: The command that leaves the debugger.
QUIT = "q"


class DebugSession:
    """One debugger on `rank`; see `Ranks.debug`.

    ``serve()`` is called between two waits, for other work of the main thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        renderer: Renderer,
        *,
        serve: Callable[[], None],
    ) -> None:
        self._cluster, self._rank = cluster, rank
        self._serve = serve
        self._leaving = False
        self._prompts: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._execution = cluster.debug(rank)
        self._execution.on_data(lambda rank, data: self._prompts.put(data))
        self._stream = OutputStream(self._execution, renderer)

    def run(self) -> None:
        """Serve the prompts until the debugger is left.

        An interrupt at a prompt leaves it, one while a command runs ends the command.
        Raises `ClusterError` for a rank that has no failed frame, that does not answer,
        or that died.
        """
        try:
            self._serve_prompts()
        except BaseException:
            if not self._execution.done:
                # Whatever was wrong here, the rank is not to wait for a line for ever.
                self._cluster.interrupt([self._rank])
            raise
        self._stream.close()
        for error in self._execution.errors.values():
            raise ClusterError(error.evalue)

    def _serve_prompts(self) -> None:
        # Until when the rank has to take a line, show its first prompt, or end.
        leave_by: float | None = time.monotonic() + PATIENCE
        taken: Future[Any] | None = None
        while not self._stream.done:
            try:
                prompt = self._next_prompt()
                if prompt is not None:
                    taken = self._answer(prompt)
                    leave_by = time.monotonic() + PATIENCE
                elif taken is not None and taken.done() and not self._leaving:
                    # The command may take as long as it likes.
                    taken = leave_by = None
            except KeyboardInterrupt:
                self._cluster.interrupt([self._rank])
                leave_by = time.monotonic() + PATIENCE
            if leave_by is not None and time.monotonic() > leave_by:
                raise ClusterError(
                    f"rank {self._rank} did not answer for {PATIENCE:g} s; "
                    f"%dist_restart {self._rank} replaces it, and its variables"
                )

    def _next_prompt(self) -> dict[str, Any] | None:
        """Show what was printed; return a prompt that came after it."""
        try:
            prompt = self._prompts.get_nowait()
        except queue.Empty:
            self._stream.pump(TICK)
            self._serve()
            return None
        self._stream.pump(0.0)
        return prompt

    def _answer(self, prompt: dict[str, Any]) -> Future[Any]:
        """Have a person answer; the Future is done when the rank has the line."""
        if "refusal" in prompt:
            raise ClusterError(prompt["refusal"])
        why = None
        try:
            line = input(prompt["prompt"])
        except (KeyboardInterrupt, EOFError):
            line = QUIT
        except StdinNotImplementedError:
            line, why = QUIT, "nobody can type here: this front end takes no input"
        taken = self._cluster.answer_prompt(self._rank, prompt["number"], line)
        if why is not None:
            raise ClusterError(why)
        self._leaving = line.strip() in (QUIT, "quit", "exit")
        return taken
