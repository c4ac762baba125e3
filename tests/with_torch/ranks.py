"""Real processes of torch.distributed over gloo, told what to run from a test.

Each rank has two threads: the main thread executes the snippets of `Ranks.start`, and
a control thread answers `Ranks.ask` also while the main thread hangs in an op.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Queue
from subprocess import Popen
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.summary import GroupStatus
from rankscope.backends.observe.diagnosis import diagnose
from rankscope.backends.observe.verdicts import RankView, Verdict, on_group

#: Seconds after which a rank that does not answer fails the test.
DEADLINE = 120.0

PREAMBLE = """
import torch
import torch.distributed as dist
from rankscope.backends.torch_watch.watch import watch
from rankscope.backends.groups.world import world
from rankscope.backends.observe.export import local_dump
watch()
"""

RENDEZVOUS = """
where = "file://" + folder + "/{store}"
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
"""


class Ranks:
    """`count` ranks, each a process; ``with Ranks(2) as ranks``."""

    def __init__(
        self, count: int, preamble: str = PREAMBLE, env: Mapping[str, str] = {}
    ) -> None:
        self.count = count
        self._stores = 0
        self._folder = tempfile.TemporaryDirectory(prefix="rankscope-torch-")
        self._ends: list[tuple[Connection, Connection]] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = Pipe()
            control, its_control = Pipe()
            passed = [theirs.fileno(), its_control.fileno()]
            self._processes.append(
                Popen(
                    [
                        *(sys.executable, __file__),
                        *map(str, (*passed, rank, count, self._folder.name)),
                    ],
                    pass_fds=passed,
                    env={**os.environ, **env},
                )
            )
            theirs.close()
            its_control.close()
            self._ends.append((ours, control))
        self.run(preamble)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for ours, control in self._ends:
            ours.close()
            control.close()
        self._folder.cleanup()

    def start(self, code: str | Mapping[int, str]) -> None:
        """Execute `code` on the main thread of the ranks; do not wait for its end."""
        for rank, text in self._per_rank(code):
            self._ends[rank][0].send(text)

    def finish(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Wait until `ranks` have executed what was started; return their errors."""
        errors = {}
        for rank in range(self.count) if ranks is None else ranks:
            error = self._receive(self._ends[rank][0], rank)
            if error:
                errors[rank] = error
        return errors

    def run(self, code: str | Mapping[int, str]) -> None:
        """Execute `code` on the main thread of the ranks; an error fails the test."""
        self.start(code)
        errors = self.finish([rank for rank, _ in self._per_rank(code)])
        assert not errors, errors

    def init(self) -> None:
        """Make torch's default group, in a fresh store."""
        self._stores += 1
        self.run(RENDEZVOUS.format(store=f"store{self._stores}"))

    def ask(self, rank: int, expression: str) -> Any:
        """Return the value of `expression`, evaluated on a rank's control thread."""
        control = self._ends[rank][1]
        control.send(expression)
        ok, value = self._receive(control, rank)
        assert ok, value
        return value

    def groups(self, rank: int) -> dict[str, GroupStatus]:
        """Return the status of a rank's groups by name."""
        found = self.ask(rank, "world.summary()")
        return {one.name: one for one in found}

    def wait_until(self, rank: int, expression: str) -> None:
        """Wait until `expression` is true on the control thread of `rank`."""
        deadline = time.monotonic() + DEADLINE
        while not self.ask(rank, expression):
            assert time.monotonic() < deadline, f"rank {rank}: never {expression}"
            time.sleep(0.02)

    def wait_for_ops(
        self, group: str, ranks: Iterable[int], op: str | None = None
    ) -> None:
        """Wait until each of `ranks` has an op in flight in `group`."""
        for rank in ranks:
            self.wait_until(
                rank,
                f"any(one.name == {group!r} and one.oldest is not None and "
                f"one.oldest.op == ({op!r} or one.oldest.op) "
                "for one in world.summary())",
            )

    def diagnose(self, group: str, stall: float = 0.0) -> list[Verdict]:
        """Return the verdicts on `group`, from what the ranks tell right now."""
        views, keys = {}, set[GroupKey]()
        for rank in range(self.count):
            dump, now_ns, location = self.ask(
                rank, "(local_dump(), time.time_ns(), location())"
            )
            views[rank] = RankView(
                rank,
                dump["records"],
                now_ns=now_ns,
                location=location,
            )
            keys |= {
                GroupKey(one["name"], tuple(one["ranks"]))
                for one in dump["groups"].values()
            }
        found = diagnose(dict.fromkeys(keys, 0), views, stall)
        (key,) = (one for one in keys if one.name == group)
        return on_group(found, key)

    def _per_rank(self, code: str | Mapping[int, str]) -> list[tuple[int, str]]:
        if isinstance(code, str):
            return [(rank, code) for rank in range(self.count)]
        return list(code.items())

    def _receive(self, end: Connection, rank: int) -> Any:
        assert end.poll(DEADLINE), f"rank {rank} does not answer"
        return end.recv()


def _main(ours: int, control: int, rank: int, count: int, folder: str) -> None:
    space: dict[str, Any] = {
        "rank": rank,
        "world_size": count,
        "folder": folder,
        "time": time,
        "os": os,
        "threading": threading,
        "location": _location,
    }
    work: Queue[str] = Queue()
    commands = Connection(ours)
    threading.Thread(
        target=_serve, args=(Connection(control), space), daemon=True
    ).start()
    threading.Thread(target=_receive, args=(commands, work), daemon=True).start()
    number = 0
    while True:
        text = work.get()
        number += 1
        try:
            exec(compile(text, f"cell{number}", "exec"), space)
        except Exception:  # noqa: BLE001 - the error is the answer
            commands.send(traceback.format_exc())
        else:
            commands.send("")


def _receive(commands: Connection, work: Queue[str]) -> None:
    while True:
        try:
            work.put(commands.recv())
        except EOFError:
            os._exit(0)


def _serve(control: Connection, space: dict[str, Any]) -> None:
    while True:
        try:
            expression = control.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, eval(expression, space)
        except Exception:  # noqa: BLE001 - the error is the answer
            answer = False, traceback.format_exc()
        control.send(answer)


def _location() -> str:
    """Return where the main thread is in a snippet, as the agent says it."""
    identity = threading.main_thread().ident
    assert identity is not None
    frame = sys._current_frames().get(identity)
    while frame is not None:
        if frame.f_code.co_filename.startswith("cell"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    _numbers = [int(one) for one in sys.argv[1:5]]
    _main(_numbers[0], _numbers[1], _numbers[2], _numbers[3], sys.argv[5])
