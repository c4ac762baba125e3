"""Python stacks of the threads of this process: now, or sampled for some seconds."""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from ..thread_start import start_thread
from ..work.user_code import calls_of_loop

__all__ = ["MAIN", "Frame", "Stack", "StackSampler", "Stacks", "ThreadStacks"]

#: The name of the main thread.
MAIN = "MainThread"
#: The names of Rankscope's own threads begin so.
_OWN = "rankscope-"
#: Packages that start threads in an engine, also later: zmq's garbage collector.
_JUPYTER = ("IPython", "ipykernel", "ipyparallel", "zmq")
_PACKAGE = f"{__name__.partition('.')[0]}."
#: Looks of a sampler whose time is kept.
_COURSE = 2_000
#: Characters of a source line that are kept.
_LONGEST = 160


class Frame(NamedTuple):
    """One call: where it stands, and in which function."""

    #: ``Cell In[7]``, or the path of a file.
    place: str
    line: int
    function: str
    #: The source line; empty where it is not known.
    text: str
    #: Whether the code is Rankscope's.
    internal: bool
    #: The first line of the function, which distinguishes two of one name.
    begins: int = 0


class Stack(NamedTuple):
    """The calls of one thread, the innermost last; none in an idle main thread."""

    thread: str
    frames: tuple[Frame, ...]


#: The id of each call's code and its line, the innermost last.
_Key = tuple[tuple[int, int], ...]


class ThreadStacks:
    """How to look at the threads of this process.

    `name_cell` returns ``Cell In[7]`` for the file name of a cell, ``None`` for other
    files. The stack of the main thread begins with its outermost cell; without one the
    thread is idle unless it `is_busy`, and then has the calls that are `suspended`, if
    any, the innermost last: those of a cell that awaits something are on no stack.
    Threads whose idents are `quiet` are left out, as Rankscope's own are, unless all
    are requested.
    """

    def __init__(
        self,
        name_cell: Callable[[str], str | None] = lambda file: None,
        is_busy: Callable[[], bool] = lambda: True,
        quiet: Collection[int] = (),
        suspended: Callable[[], Sequence[FrameType]] = tuple,
    ) -> None:
        self.name_cell = name_cell
        self.suspended = suspended
        self.is_busy = is_busy
        self.quiet = frozenset(quiet)

    def now(self, every: bool = False) -> list[Stack]:
        """Return the stacks, the main thread's first; with `every`, of all threads."""
        look = _Look(self, every)
        found = [Stack(name, look.resolve(key)) for name, key in look.threads()]
        return sorted(found, key=lambda one: one.thread != MAIN)


class _Look:
    """Looks at threads, once or often; knows the code that it has seen."""

    def __init__(self, threads: ThreadStacks, every: bool) -> None:
        self._threads = threads
        self._every = every
        # By id, which stays the code's own while it is here: to hash a code object
        # takes as long as to walk a stack. The code, its cell's name, and whether it is
        # Rankscope's, as the name of its module says.
        self._codes: dict[int, tuple[CodeType, str | None, bool]] = {}

    def threads(self) -> Iterator[tuple[str, _Key]]:
        """Yield the name of each thread and what `resolve` needs for its stack."""
        threads = {one.ident: one for one in threading.enumerate()}
        main, this = threading.main_thread(), threading.get_ident()
        for ident, frame in sys._current_frames().items():
            thread = threads.get(ident)
            if thread is main:
                yield MAIN, self._main(frame)
            elif ident == this:
                # It only looks.
                continue
            elif self._every or not (
                ident in self._threads.quiet or _is_jupyters(thread)
            ):
                name = f"thread {ident}" if thread is None else thread.name
                yield name, tuple(self._walk(frame))

    def resolve(self, key: _Key) -> tuple[Frame, ...]:
        """Return the calls of a stack that `threads` yielded."""
        found = []
        for number, line in key:
            code, cell, internal = self._codes[number]
            text = linecache.getline(code.co_filename, line).strip()[:_LONGEST]
            name = getattr(code, "co_qualname", code.co_name)
            place, begins = cell or code.co_filename, code.co_firstlineno
            found.append(Frame(place, line, name, text, internal, begins))
        return tuple(found)

    def _main(self, frame: FrameType) -> _Key:
        calls = self._walk(frame)
        for place, (number, _) in enumerate(calls):
            if self._codes[number][1] is not None:
                return tuple(calls[place:])
        if not self._threads.is_busy():
            return ()
        return tuple(self._key(one) for one in self._threads.suspended()) or tuple(
            calls
        )

    def _walk(self, frame: FrameType | None) -> list[tuple[int, int]]:
        calls = [self._key(one) for one in reversed(calls_of_loop(frame))]
        waits = bool(calls)
        while frame is not None:
            # What the loop itself calls says nothing of the task.
            waits = waits and frame.f_code.co_name != "run_until_complete"
            if not waits:
                calls.append(self._key(frame))
            frame = frame.f_back
        calls.reverse()
        return calls

    def _key(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        number = id(code)
        if number not in self._codes:
            module = frame.f_globals.get("__name__") or ""
            cell = self._threads.name_cell(code.co_filename)
            self._codes[number] = code, cell, module.startswith(_PACKAGE)
        # An instruction may stand for no line.
        return number, frame.f_lineno or code.co_firstlineno


def _is_jupyters(thread: threading.Thread | None) -> bool:
    """Whether it is a thread of Rankscope, or of a class of Jupyter's libraries."""
    if thread is None:
        return False
    package = type(thread).__module__.partition(".")[0]
    return package in _JUPYTER or thread.name.startswith(_OWN)


class Stacks(NamedTuple):
    """What a sampler saw."""

    #: Seconds that it looked for.
    seconds: float
    #: How often it could look: a call that holds the GIL keeps it waiting.
    looks: int
    #: Stack → the seconds that its thread spent there.
    weights: list[tuple[Stack, float]]
    #: Of the last looks: when (``time.time_ns``), and which of `weights` has the stack
    #: of the main thread.
    course: list[tuple[int, int]]


class StackSampler:
    """A thread that looks at the others `rate` times a second, for `seconds`.

    A stack is given the time since the look before, so that a call which holds the GIL,
    and keeps the sampler waiting, has its time nevertheless.
    """

    def __init__(
        self, stacks: ThreadStacks, seconds: float, rate: float, every: bool = False
    ) -> None:
        self._look = _Look(stacks, every)
        self._seconds = seconds
        self._interval = 1.0 / rate
        self._weights: dict[tuple[str, _Key], float] = {}
        self._course: deque[tuple[int, tuple[str, _Key]]] = deque(maxlen=_COURSE)
        self._looks = 0
        self._took = 0.0
        self._stop = threading.Event()
        self._thread = start_thread("sampler", self._run)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Stacks:
        """End the sampling and return what was seen."""
        self._stop.set()
        self._thread.join()
        weights = [
            (Stack(name, self._look.resolve(key)), weight)
            for (name, key), weight in self._weights.items()
        ]
        places = {key: place for place, key in enumerate(self._weights)}
        course = [(at, places[key]) for at, key in self._course]
        return Stacks(self._took, self._looks, weights, course)

    def _run(self) -> None:
        began = last = time.perf_counter()
        due = began
        stopped = False
        while not stopped and last - began < self._seconds:
            due = max(due + self._interval, last)
            # Also at the end: the last stretch is somebody's, too.
            stopped = self._stop.wait(max(0.0, min(due, began + self._seconds) - last))
            now = time.perf_counter()
            for key in self._look.threads():
                self._weights[key] = self._weights.get(key, 0.0) + now - last
                if key[0] == MAIN:
                    self._course.append((time.time_ns(), key))
            self._looks += 1
            last = now
        self._took = last - began
