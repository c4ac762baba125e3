"""What one rank writes into a report: its records, its stacks and facts about it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..groups.inquiry import current_exception, message_of
from ..groups.world import world
from ..observe.export import local_dump, save_flight_recorder
from ..observe.torch_format import flight_recorder
from ..work.flight_recorder import recorder
from ..work.user_code import calls_of_loop, frame_of_thread, is_installed
from .place import Place
from .settings import facts_of
from .waiting import rendezvous

__all__ = [
    "DUMP",
    "FACTS",
    "STACKS",
    "as_it_waited",
    "told_of",
    "write_facts",
    "write_part",
]

#: The beginnings of the names of a rank's files.
DUMP, FACTS, STACKS = "flight_recorder_rank_", "facts_rank_", "stacks_rank_"
#: The version of the form of facts.
VERSION = 1

_PACKAGE = __name__.partition(".")[0]
_LINE_OF_STACK = re.compile(r'File "([^"\n]+)"')
#: Frames of a traceback, and characters of a text, that are kept.
_FRAMES = 100
_LONGEST = 1000
#: An exception and those before it, each raised while the one before was handled.
_MOST_HANDLED = 5
#: Nanoseconds from the end of an op to the error that it raises, at most.
_JUST = 2 * 10**9
#: Nanoseconds from an abort to the report of it, at most.
_ABORTED = 10 * 10**9


def write_part(
    folder: Path,
    rank: int,
    place: Place,
    *,
    error: BaseException | None = None,
    ended: bool = False,
    in_flight: bool = False,
    failed: bool = False,
    final: bool = False,
    death: str = "",
    dump: Callable[[], Mapping[str, Any]] = local_dump,
) -> None:
    """Write this rank's part; the facts come last, so that a peer knows it is whole.

    - `error`: raised by an op, or what ends the rank; None: what its main thread
      handles, if it does.
    - `ended`: whether the main thread has come to its end, by `error` or without it.
    - `in_flight`: whether the rank waits in an op.
    - `failed`: whether the op in which it waited has failed just now.
    - `final`: whether the job ends now: the youngest op in flight hangs, too.
    - `death`: how its process is about to end, as a clause with the rank.
    - `dump`: returns what `local_dump` does.
    """
    problems = []
    recorded = False
    waited = failed or not ended
    # First: the call may fail while the other files are written.
    making = _making(place.address, error if ended else None) if waited else None
    try:
        _write_records(folder, dump(), failed)
        recorded = True
    except ValueError:
        # It is in no group yet, or in none any more.
        pass
    except Exception as problem:  # noqa: BLE001 - the other files are to be written
        problems.append(f"its records: {problem!r}")
    if not ended:
        try:
            _write_stacks(folder / f"{STACKS}{rank}.txt")
        except (OSError, RuntimeError) as problem:
            problems.append(f"its stacks: {problem!r}")
    gone = [one.past.get("ended_at") for one in world.sources if one.rank is None]
    gone.append(world.groups_ended_at)
    left = ended and error is None
    facts = {
        "written_ns": time.time_ns(),
        "world_size": place.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "script": sys.argv[0] if sys.argv else "",
        "waits": in_flight,
        "final": final,
        "has_ended": ended,
        "has_left": left,
        "left_at": (left and world.line_at_end()) or None,
        "groups_ended_at": next(filter(None, gone), None),
        "death": death or None,
        "last_cell_exit": place.exit_while_idle() or None,
        "recorded": recorded,
        "rendezvous": making,
        "exception": _exception(error, ended),
        "thread_exception": world.thread_exception or None,
        "memory": _memory(),
        "versions": _versions(),
        "environment": facts_of(),
        "problems": problems,
    }
    write_facts(folder, rank, facts)


def write_facts(folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
    # Its readers take long to import: not at the start of a rank.
    from ..post_mortem.rank_facts import FORM

    unfinished = folder / f".{FACTS}{rank}.{os.getpid()}"
    whole = {FORM: VERSION, "rank": rank, **facts}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(folder / f"{FACTS}{rank}.json")


def _making(address: str, error: BaseException | None) -> dict[str, Any] | None:
    making = rendezvous(address, error)
    if making is not None and making["line"] is not None:
        making["line"][0] = _name_of(making["line"][0])
    return making


def _write_stacks(path: Path) -> None:
    with path.open("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
        told = _with_awaits(text)
        named = _LINE_OF_STACK.sub(lambda it: f'File "{_name_of(it[1])}"', told)
        if named != text:
            file.seek(0)
            file.truncate()
            file.write(named)


def _with_awaits(text: str) -> str:
    """Return the stacks with the calls of the task that the main thread waits for."""
    main = threading.main_thread().ident or 0
    calls = "".join(
        f'  File "{one.f_code.co_filename}", line {one.f_lineno} '
        f"in {one.f_code.co_name}\n"
        for one in reversed(calls_of_loop(frame_of_thread(main)))
    )
    head = re.compile(rf"^.*[Tt]hread 0x0*{main:x}\b.*\n", re.MULTILINE)
    return head.sub(lambda it: it[0] + calls, text, count=1)


def _name_of(file: str) -> str:
    """Return ``cell 7`` for the file of a cell, and other files as they are.

    Those of this package, where it is no installed one, as ``rankscope/engines/…``: no
    reader takes them for the user's.
    """
    cell = recorder.name_source((file, 1, "")).partition(" line ")[0]
    return cell if cell.startswith("cell ") else _name_in_package(file)


# A file is in many frames, and there are thousands of modules.
@cache
def _name_in_package(file: str) -> str:
    # The packages of a checkout are mapped from folders of other names.
    for name, module in [] if is_installed(file) else list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and name.count(".") < 2:
            # The second folder of the package itself is the whole checkout.
            for folder in [*getattr(module, "__path__", ())][:1]:
                if file.startswith(f"{folder}/"):
                    return f"{name.replace('.', '/')}{file[len(folder) :]}"
    return file


def _write_records(folder: Path, mine: Mapping[str, Any], failed: bool) -> None:
    records = as_it_waited(mine["records"], time.time_ns() if failed else None)
    records = [
        {
            **one,
            "frame": _named(one["frame"]),
            "callers": [_named(caller) for caller in one.get("callers", ())],
        }
        for one in records
    ]
    form = flight_recorder(mine["rank"], mine["groups"], records)
    save_flight_recorder(form, folder / DUMP, mine["rank"])


def _named(frame: Mapping[str, Any]) -> Mapping[str, Any]:
    name = _name_of(frame["file"])
    if name == frame["file"]:
        return frame
    return {**frame, "file": name, "source": f"{name}:{frame['line']}"}


def as_it_waited(
    records: Sequence[Mapping[str, Any]], failed_ns: int | None
) -> list[Mapping[str, Any]]:
    """Return `records` as they were before the op failed in which the rank waited.

    That is the last one of its group, if it has failed, and each that ended just now
    with its group; else, for an error at `failed_ns`, the last one of all: torch's gloo
    does not record that one failed which no Python code issued.
    """
    now = time.time_ns()
    last = {one["group_id"]: one for one in records}
    failed = [one for one in last.values() if one["state"] in ("failed", "timed_out")]
    failed += [
        one
        for one in records
        if one["state"] in ("aborted", "timed_out")
        and now - one["time_ended_ns"] < _ABORTED
        and one.get("generation") == last[one["group_id"]].get("generation")
    ]
    newest = max(records, key=lambda one: int(one["time_created_ns"]), default=None)
    if not failed and failed_ns is not None and newest is not None:
        just = failed_ns - newest["time_ended_ns"] < _JUST
        failed = [newest] if newest["backend"] == "gloo" and just else []
    return [
        {**one, "state": "started", "time_ended_ns": 0, "duration_ns": None}
        if any(one is other for other in failed)
        else one
        for one in records
    ]


def _exception(error: BaseException | None, ended: bool) -> dict[str, Any] | None:
    """Return the exception with those that were handled when it was raised."""
    if error is None and not ended:
        error = current_exception()
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < _MOST_HANDLED:
        chain.append(error)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    told = [found for one in chain if (found := told_of(one)) is not None]
    return {**told[0], "handled": told[1:]} if told else None


def told_of(error: BaseException) -> dict[str, Any] | None:
    """Return an exception as facts tell it: text and frames, the innermost first."""
    with contextlib.suppress(Exception):
        kind, text = type(error), message_of(error)
        name = kind.__qualname__
        if kind.__module__ not in ("builtins", "__main__"):
            name = f"{kind.__module__}.{name}"
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        return {
            "text": f"{name}: {text}"[:_LONGEST] if text else name,
            # The ranks because of which an op of ours has failed.
            "culprits": list(getattr(error, "culprits", ())),
            "frames": [
                [_name_of(one.filename), one.lineno or 0, one.name]
                for one in reversed(frames)
            ],
        }
    return None


def _memory() -> dict[str, int]:
    """Return resident bytes of this process, now and at most."""
    scale = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    found = {"most_resident": most}
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["resident"] = pages * resource.getpagesize()
    return found


def _versions() -> dict[str, str]:
    # `platform.platform` starts a process.
    here = os.uname()
    system = f"{here.sysname} {here.release} {here.machine}"
    found = {"python": platform.python_version(), "system": system}
    for name in ("torch", "numpy", "rankscope"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
