"""One rule on one rank: the group, the arrays and the outcome."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import DistAbortedError, DistError, DistStoreTimeoutError
from ..groups.process_group import ProcessGroup
from ..rank_sets import name_ranks
from ..stores.base import Store
from .frames import is_foreign, is_rule
from .reference import MOVABLE, REDUCIBLE

__all__ = [
    "MEET_TIMEOUTS",
    "Arrays",
    "DeviceArrays",
    "HostArrays",
    "Options",
    "Outcome",
    "Rule",
    "Rules",
    "Trial",
    "Unclaimed",
    "describe",
    "make_backend",
    "try_rule",
]

_Body = TypeVar("_Body", bound="Callable[..., None]")

# The functions that compare, whose caller is the line to report.
_COMPARE = ("raises", "same")
# A rank shows that it is alive this often while it works through many cases.
_HEARTBEAT = 1.0
# The key of a rule that has failed on a rank.
_FAILED = "failed"
#: Timeouts of an op that a rank waits for the others between two parts of a rule.
MEET_TIMEOUTS = 2


class Unclaimed(Exception):
    """The backend does not claim what the rule is about; the text says so."""


class Consequence(AssertionError):
    """The rule cannot go on here, since another rank failed or hangs."""


class Arrays(Protocol):
    """How arrays of one device type are made, written and read."""

    #: Whether ``Work.wait()`` blocks the host until the result is there; on a
    #: device it orders a stream behind the op.
    wait_blocks_host: bool

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return an array with undefined content."""

    def write(self, array: Any, values: npt.ArrayLike) -> None:
        """Set the content of `array`."""

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Return the content of `array` on the host, after every op on it."""


class HostArrays:
    """numpy arrays."""

    wait_blocks_host = True

    def __init__(self, rank: int = 0) -> None:
        """Take the rank, as each class of arrays: host memory is the same for all."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with undefined content."""
        return np.empty(shape, np.dtype(dtype))

    def write(self, array: Any, values: npt.ArrayLike) -> None:
        """Set the content of `array`."""
        array[...] = values

    def read(self, array: Any) -> npt.NDArray[Any]:
        return array


class DeviceArrays:
    """cupy's arrays, on the device with the number of the rank."""

    wait_blocks_host = False

    def __init__(self, rank: int = 0) -> None:
        try:
            import cupy
        except ImportError:
            raise Unclaimed("cupy is not installed") from None
        self._cupy = cupy
        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return self._cupy.empty(shape, np.dtype(dtype))

    def write(self, array: Any, values: npt.ArrayLike) -> None:
        array[...] = self._cupy.asarray(values)

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Return the content of `array`, after every op on the current stream."""
        found: npt.NDArray[Any] = array.get()
        return found


@dataclass(frozen=True)
class Options:
    """Extent of the trials, and limits in seconds."""

    #: Seconds that an op may take.
    timeout: float = 20.0
    #: Seconds from an abort to the end of every wait on the same rank.
    abort_seconds: float = 1.0
    #: Seconds within which a start, an end and a callback are reported, and a call
    #: returns while a rank is absent.
    report_seconds: float = 5.0
    #: Seconds within which descriptors, threads and processes of a group are gone.
    leak_seconds: float = 10.0
    #: Elements of the arrays of the exact level.
    sizes: tuple[int, ...] = (0, 1, 7, 1009, 100_003)
    #: Dtypes that are reduced.
    reducible: tuple[str, ...] = REDUCIBLE
    #: Dtypes that are moved.
    movable: tuple[str, ...] = MOVABLE
    #: Whether ops are called with ``async_op=True``; ``None``: every second one.
    async_op: bool | None = None
    #: Ops that are tried; empty: all.
    ops: tuple[str, ...] = ()
    #: Elements of the arrays of ops that are aborted while they hang.
    hung_count: int = 1000
    #: Bytes of the arrays of ops that are aborted while they run.
    running_bytes: int = 8 << 20
    #: How often an op is aborted while it runs.
    running_times: int = 4
    #: Cycles of abort and rebuild over which nothing may leak.
    cycles: int = 10

    def includes(self, op: str) -> bool:
        """Return whether `op` is tried; ``send`` and ``recv`` go together."""
        names = {"send", "recv"} if op in ("send", "recv") else {op}
        return not self.ops or not names.isdisjoint(self.ops)


@dataclass(kw_only=True, eq=False)
class Trial:
    """The place of a rank in one rule.

    `group` is open while the body of a rule runs. A body that closes or replaces
    it leaves in `current` what is to be closed at the end, or ``None``.
    """

    rank: int
    size: int
    device: str
    options: Options
    arrays: Arrays
    store: Store
    open_group: Callable[[str], ProcessGroup]
    close_group: Callable[[ProcessGroup], None]
    heartbeat: Callable[[int], None]
    #: Whether the rank is a process and not a thread.
    own_process: bool = True
    #: Whether a fresh process takes the place of a rank that was killed.
    replaces_dead: bool = True
    #: Whether this process is such a one.
    again: bool = False
    #: Op → the reason why it is not claimed, ``None`` if it is; once known.
    claims: dict[str, str | None] = field(default_factory=dict)
    cases: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    current: ProcessGroup | None = None
    last_beat: float = field(default_factory=time.monotonic)

    @property
    def group(self) -> ProcessGroup:
        """The group under test."""
        assert self.current is not None
        return self.current

    def open(self, part: str = "") -> ProcessGroup:
        """Make the group under test; `part` distinguishes several of a rule."""
        self.current = self.open_group(part)
        return self.current

    def close(self) -> None:
        """Destroy the group under test, if it is open."""
        group, self.current = self.current, None
        if group is not None:
            self.close_group(group)

    def meet(self, name: str) -> None:
        """Wait for all ranks, without the group under test."""
        self.store.set(f"meet/{name}/{self.rank}", b"")
        keys = [f"meet/{name}/{rank}" for rank in range(self.size)]
        limit = MEET_TIMEOUTS * self.options.timeout
        deadline = time.monotonic() + limit
        while True:
            try:
                return self.store.wait(keys, 0.5)
            except DistStoreTimeoutError:
                self.raise_if_failed()
                if time.monotonic() > deadline:
                    absent = [r for r, key in enumerate(keys) if not self._has(key)]
                    raise Consequence(
                        f"{name_ranks(absent)} did not arrive within {limit:g} s at "
                        f"the point {name!r} of the rule: an op or the creator of the "
                        "backend blocks there"
                    ) from None

    def _has(self, key: str) -> bool:
        return self.store.check([key])

    def raise_if_failed(self) -> None:
        """Raise `Consequence` if the rule has failed on another rank."""
        if self._has(_FAILED):
            raise Consequence("the rule failed on another rank")

    def fail(self, text: str) -> None:
        """End the waits of the other ranks: the rule has failed on this rank."""
        with contextlib.suppress(DistError):
            self.store.set(_FAILED, b"")
        group = self.current
        if group is not None:
            reason = f"the rule failed: {text.splitlines()[0]}"
            # The abort of a backend under test may hang.
            ending = threading.Thread(target=group.abort, args=[reason], daemon=True)
            ending.start()
            ending.join(self.options.abort_seconds)

    def held(self, cases: int = 1) -> None:
        """Count cases that held, and show that this rank is alive."""
        self.cases += cases
        now = time.monotonic()
        if now - self.last_beat > _HEARTBEAT:
            self.last_beat = now
            self.heartbeat(self.cases)

    def array(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.float64) -> Any:
        """Return an array of the device under test with this content."""
        host = np.asarray(values, dtype)
        made = self.arrays.empty(host.shape, host.dtype)
        self.arrays.write(made, host)
        return made


@dataclass(frozen=True)
class Rule:
    """One promise of a backend, and how it is tried."""

    level: str
    name: str
    promise: str
    body: Callable[[Trial], None]
    #: The fewest ranks that can show whether it holds.
    ranks: int = 1
    #: Whether the last rank ends its process in the course of it.
    kills: bool = False
    #: The op that it is about; ``recv`` stands for ``send`` too.
    op: str = ""
    #: Whether it is about what Rankscope makes of several ops.
    made_of_ops: bool = False

    def is_about(self, options: Options) -> bool:
        """Return whether the rule is about an op that is to be tried."""
        if not options.ops:
            return True
        return not self.made_of_ops and (not self.op or options.includes(self.op))


class Rules(list[Rule]):
    """The rules of one module, each of which stands at its body."""

    def contract(self, name: str, promise: str) -> Callable[[_Body], _Body]:
        """Add a rule of the level *contract*: the body that is decorated."""

        def add(body: _Body) -> _Body:
            self.append(Rule("contract", name, promise, body, ranks=2))
            return body

        return add


@dataclass
class Outcome:
    """What one rank found of one rule: ``"held"``, ``"failed"`` or ``"skipped"``."""

    status: str
    text: str = ""
    cases: int = 0
    #: Case that was skipped → reason.
    skipped: dict[str, str] = field(default_factory=dict)
    #: Name → measured value.
    notes: dict[str, float] = field(default_factory=dict)
    #: Whether the failure may be the effect of one on another rank.
    consequence: bool = False


def make_backend(trial: Trial) -> str:
    """Make the backend on all ranks and destroy it; return why that fails, if so."""
    try:
        trial.open("start").current.backend_for(trial.device)
        trial.meet("made")
        trial.close()
    except (DistError, Consequence) as error:
        trial.fail(str(error))
        return str(error) if error.__cause__ is None else f"{error}{_line_of(error)}"
    return ""


def try_rule(rule: Rule, trial: Trial) -> Outcome:
    """Run `rule` on this rank; what it raises is its outcome.

    A group that failed is aborted and left so: closing it may hang.
    """
    try:
        if not trial.again:
            trial.open()
        rule.body(trial)
        trial.close()
    except Unclaimed as reason:
        trial.close()
        return Outcome("skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - a failure of any kind is reported
        text = describe(error)
        trial.fail(text)
        return Outcome(
            "failed",
            text,
            trial.cases,
            trial.skipped,
            trial.notes,
            _is_consequence(error),
        )
    if not trial.cases and trial.skipped:
        return Outcome("skipped", "; ".join(sorted(set(trial.skipped.values()))))
    return Outcome("held", "", trial.cases, trial.skipped, trial.notes)


def describe(error: BaseException) -> str:
    """Return the error and the line of a backend, or of a rule, that it is from."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        text = "".join(traceback.format_exception_only(error)).strip()
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text += f"\n  caused by {type(cause).__name__}: {cause}"
    return text + _line_of(error)


def _line_of(error: BaseException) -> str:
    """Return the line of the backend, or else of the rule, that raised, if any."""
    rule = backend = ""
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        for frame in frames:
            line = f"\n  at {frame.filename}:{frame.lineno} in {frame.name}"
            if is_foreign(frame.filename):
                backend = line
            elif is_rule(frame.filename) and frame.name not in _COMPARE:
                rule = line if cause is error else rule
        cause = cause.__cause__
    return backend or rule


def _is_consequence(error: BaseException | None) -> bool:
    kinds = DistAbortedError | DistStoreTimeoutError | Consequence
    return isinstance(error, kinds) or (
        error is not None and _is_consequence(error.__cause__)
    )
