"""The debugger on a rank: it looks at the error that ended the rank's last failed cell.

It runs on the main thread, as a cell that the notebook sends. What a person types comes
over the control channel, as every request does: nothing listens for it.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from IPython.core.debugger import Pdb
from IPython.core.error import UsageError

__all__ = ["PostMortem", "Prompts", "end_traceback", "linked", "links_of"]

#: Seconds between two checks for an interrupt while a person thinks.
TICK = 0.2


class Prompts:
    """Lines that a person types, for the main thread of this rank."""

    def __init__(
        self,
        publish: Callable[[Mapping[str, Any]], None],
        is_heard: Callable[[], bool] = lambda: True,
    ) -> None:
        self._publish = publish
        self._is_heard = is_heard
        self._number = 0
        self._answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def ask(self, prompt: str) -> str:
        """Have the notebook show `prompt`; return the line. `EOFError`: it is gone."""
        self._number += 1
        # What was printed belongs above the prompt.
        sys.stdout.flush()
        self._publish({"prompt": prompt, "number": self._number})
        while True:
            try:
                number, line = self._answers.get(timeout=TICK)
            except queue.Empty:
                # Back in Python, where an interrupt is raised.
                if not self._is_heard():
                    raise EOFError("the notebook is gone") from None
                continue
            if number == self._number:
                return line

    def answer(self, number: int, line: str) -> None:
        """Take the line for the prompt with that number; on the control thread."""
        self._answers.put((number, line))


class _Debugger(Pdb):
    """Names cells as all messages do, not by the files of IPython."""

    def __init__(self, name_cell: Callable[[str], str | None], stdin: Any) -> None:
        super().__init__(stdin=stdin, stdout=sys.stdout)
        self._name_cell = name_cell

    def format_stack_entry(
        self, frame_lineno: tuple[FrameType, int], lprefix: str = ": "
    ) -> str:
        text = str(super().format_stack_entry(frame_lineno, lprefix))
        filename = self.canonic(frame_lineno[0].f_code.co_filename)
        return text.replace(filename, self._name_cell(filename) or filename)


class PostMortem:
    """What ended the last cell that failed on this rank, and the debugger on it."""

    def __init__(
        self,
        publish: Callable[[Mapping[str, Any]], None],
        is_heard: Callable[[], bool],
        name_cell: Callable[[str], str | None],
    ) -> None:
        self._publish = publish
        self._name_cell = name_cell
        self.prompts = Prompts(publish, is_heard)
        self._failure: BaseException | None = None
        #: Whether the present cell only looks at the end of an earlier one.
        self.opened = False

    def note(self, error: BaseException | None) -> None:
        """Keep the error of a cell, but of no mistyped magic: IPython raised it."""
        if error is not None and not isinstance(error, UsageError):
            self._failure = error

    def open(self, rank: int) -> None:
        """Open the frame in which the error was raised, until a person leaves it."""
        self.opened = True
        error = self._failure
        if error is None:
            self._publish({"refusal": f"no cell has failed on rank {rank}"})
            return

        def readline() -> str:
            try:
                return self.prompts.ask(f"rank {rank} ipdb> ") + "\n"
            except (KeyboardInterrupt, EOFError):
                return ""

        debugger = _Debugger(self._name_cell, SimpleNamespace(readline=readline))
        # The notebook shows the prompt where it takes the line.
        debugger.use_rawinput = False
        debugger.prompt = ""
        print(f"{type(error).__name__}: {error}")
        debugger.reset()
        shown = end_traceback(
            error.__traceback__, lambda file: bool(self._name_cell(file))
        )
        debugger.interaction(None, shown)  # type: ignore[no-untyped-call]


def end_traceback(
    traceback: TracebackType | None, is_cell: Callable[[str], bool]
) -> TracebackType | None:
    """Return a traceback from the cell to the last frame that is not ours."""
    links = links_of(traceback)
    files = [link.tb_frame.f_code.co_filename for link in links]
    # Of a traceback without a cell the last frame.
    first = next((place for place, file in enumerate(files) if is_cell(file)), -1)
    del links[:first]
    while len(links) > 1 and _is_ours(links[-1].tb_frame):
        links.pop()
    return linked(links)


def links_of(traceback: TracebackType | None) -> list[TracebackType]:
    """Return the links of a traceback, the outermost first."""
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def linked(links: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback of some `links` of another one, which stays as it is."""
    found = None
    for link in reversed(links):
        found = TracebackType(found, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return found


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("rankscope.")
