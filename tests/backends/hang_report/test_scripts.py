"""Plain scripts on our own groups: they say themselves why they hang, once."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.attach.jobs import jobs_of_user
from rankscope.backends.attach.process_table import read_table
from rankscope.backends.attach.read import look
from rankscope.backends.conformance.waiting import until
from rankscope.backends.hang_report.rank_parts import rank_parts
from rankscope.backends.observe.verdicts import Fault
from tests.backends.hang_report.script import DEADLINE, SAID, Script

pytestmark = pytest.mark.processes


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Any]:
    made: list[Script] = []

    def start(count: int, code: str, after: float = 60.0, **more: Any) -> Script:
        made.append(Script(tmp_path, count, code, after, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_an_op_that_times_out(scripts: Any) -> None:
    script = scripts(
        3,
        """
        dist.init_process_group(timeout=2)
        dist.all_reduce(x)
        if rank == 1:
            import threading
            thread = threading.Thread(target=lambda: [][0])  # ends
            thread.start()
            thread.join()
            wait("go")  # elsewhere
            dist.barrier()
        dist.all_reduce(x)  # waits
        """,
    )
    found = script.report()
    thread = "a thread of it has ended with IndexError: list index out of range at "
    assert thread + script.line("# ends") in found["text"]
    assert found["kind"] == Fault.RANK_BUSY_ELSEWHERE.value
    assert (found["culprits"], found["sequence_number"]) == ([1], 2)
    assert found["line"] == script.line("# waits")
    assert found["text"].count(script.line("# elsewhere")) <= 1
    script.let("go")
    assert script.finish() == [1, 1, 1]
    # The error of each rank that waited says the same, and where the report is.
    for rank in (0, 2):
        assert "DistTimeoutError" in script.log(rank)
        assert found["text"] in script.log(rank)
        assert "the report is reports/" in script.log(rank)


def test_sizes_that_differ(scripts: Any) -> None:
    """All ranks fail at once: nobody waits any more."""
    script = scripts(
        2,
        """
        dist.init_process_group()
        dist.all_reduce(np.ones(4 + rank))  # sizes
        """,
    )
    found = script.report()
    assert found["kind"] == Fault.SIZE_MISMATCH.value
    assert (found["culprits"], found["sequence_number"]) == ([0, 1], 1)
    assert found["line"] == script.line("# sizes")
    assert script.finish() == [1, 1]
    for rank in range(2):
        assert "DistAbortedError" in script.log(rank)
        assert found["text"] in script.log(rank)


def test_sends_that_wait_for_each_other(scripts: Any) -> None:
    script = scripts(
        2,
        """
        dist.init_process_group()
        dist.recv(np.zeros(4), src=1 - rank)  # both
        """,
        after=2.0,
    )
    found = script.report()
    assert found["kind"] == Fault.DEADLOCK.value
    assert script.line("# both") in found["text"]
    assert "wait for each other" in found["text"]
    assert "default_pg" not in found["text"]
    for one in script.ranks:
        one.terminate()
    # The signal ends them as it would without the report, which is not made again.
    assert script.finish() == [-signal.SIGTERM] * 2
    assert len(SAID.findall(script.output)) == 1


def test_a_rank_that_fails_while_others_wait(scripts: Any) -> None:
    script = scripts(
        3,
        """
        dist.init_process_group()
        if rank == 1:
            # At once: its thread has hardly begun.
            raise ValueError("sample 17 is corrupt")  # fails
        dist.all_reduce(x)  # waits
        """,
    )
    assert script.finish() == [1, 1, 1]
    found = script.report()
    assert (found["kind"], found["culprits"]) == (Fault.RANK_DEAD.value, [1])
    said = "rank 1 ended with ValueError: sample 17 is corrupt at "
    assert said + script.line("# fails") in found["text"]


def test_a_rank_that_is_killed(scripts: Any) -> None:
    script = scripts(
        3,
        """
        dist.init_process_group()
        dist.all_reduce(x)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x)  # waits
        """,
    )
    assert script.finish() == [1, 1, -signal.SIGKILL]
    found = script.report()
    assert (found["kind"], found["culprits"]) == (Fault.RANK_DEAD.value, [2])
    assert "rank 2 is dead: killed by SIGKILL" in found["text"]
    assert script.line("# waits") in found["text"]


def test_a_rank_that_does_not_come_to_init_process_group(scripts: Any) -> None:
    script = scripts(
        2,
        """
        if rank == 1:
            wait("go")  # elsewhere
        dist.init_process_group()  # waits
        dist.destroy_process_group()
        """,
        after=2.0,
    )
    found = script.report()
    assert (
        f"rank 0 of 2 waits in init_process_group ({script.line('# waits')})"
        in (found["text"])
    )
    if "and where is not known" in found["text"]:
        # py-spy may not read it here.
        assert found["kind"] == Fault.UNDECIDED.value
        assert f"; rank 1 runs (pid {script.ranks[1].pid} on " in found["text"]
    else:
        assert (found["kind"], found["culprits"]) == (Fault.MISSING_RANKS.value, [1])
        assert "; rank 1 has not come to it: it is at train.py:" in found["text"]
    script.let("go")
    assert script.finish() == [0, 0]


def test_survivors_that_go_on_write_nothing(scripts: Any) -> None:
    script = scripts(
        3,
        """
        dist.init_process_group()
        dist.all_reduce(x)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(x)
        except dist.DistError:
            rest = dist.shrink_group([2])
            dist.all_reduce(x, group=rest)
        dist.destroy_process_group()
        """,
    )
    assert script.finish() == [0, 0, -signal.SIGKILL]
    assert not script.reports.exists()
    assert script.output == ""


def test_an_abort_in_c_where_the_program_has_faulthandler(scripts: Any) -> None:
    script = scripts(
        2,
        """
        import ctypes, faulthandler
        dist.init_process_group()
        faulthandler.enable()
        dist.all_reduce(x)
        if rank == 1:
            ctypes.CDLL(None).abort()  # aborts
        dist.all_reduce(x)
        """,
    )
    assert script.finish() == [1, -signal.SIGABRT]
    found = script.report()
    assert (found["kind"], found["culprits"]) == (Fault.RANK_DEAD.value, [1])
    # The stacks are where the program wants them.
    line = script.line("# aborts")
    said = f"rank 1 is dead: ended by SIGABRT with its main thread at {line}; "
    assert said in found["text"]
    assert "Fatal Python error: Aborted" in script.log(1)


@pytest.mark.parametrize(
    ("crash", "signal_name"),
    [
        ("os.abort()", "SIGABRT"),  # it holds the GIL
        ("ctypes.CDLL(None).abort()", "SIGABRT"),
        ("ctypes.string_at(0)", "SIGSEGV"),
    ],
)
def test_a_crash_has_its_signal_and_line(
    scripts: Any, crash: str, signal_name: str
) -> None:
    script = scripts(
        2,
        f"""
        import ctypes
        dist.init_process_group()
        dist.all_reduce(x)
        if rank == 1:
            {crash}  # crashes
        dist.all_reduce(x)
        """,
    )
    assert script.finish() == [1, -signal.Signals[signal_name]]
    found = script.report()
    assert (found["kind"], found["culprits"]) == (Fault.RANK_DEAD.value, [1])
    line = script.line("# crashes")
    assert f"rank 1 is dead: ended by {signal_name} at {line}; " in found["text"]


def test_the_end_of_a_watched_script_is_quiet(scripts: Any) -> None:
    script = scripts(2, "import rankscope.torch\nrankscope.torch.watch()\n")
    assert script.finish() == [0, 0]
    # Python 3.12 starts no thread then.
    assert script.output == ""


def test_who_looks_from_outside_is_told_what_the_ranks_record(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripts(
        2,
        """
        dist.init_process_group()
        if rank:
            wait("go")  # elsewhere
        dist.barrier()  # waits
        """,
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    pids = [one.pid for one in script.ranks]
    here = script.line("# waits")

    def is_told() -> bool:
        jobs = jobs_of_user(read_table(), os.geteuid())
        ours = [job for job in jobs if job.members[0].process.pid in pids]
        (one,) = look(ours, None, sources=[rank_parts])
        text = one.as_text()
        return (
            f"rank 1 has not entered barrier #1 ({here})" in text
            and "; rank 0 waits in it\n  read: ranks 0–1 of 2\n" in text
        )

    until(is_told, DEADLINE)
    script.let("go")
    # They leave nothing where they met.
    assert script.finish() == [0, 0]
    assert not script.reports.exists()


def test_ranks_that_do_not_meet_say_who_was_late_through_the_store(
    scripts: Any,
) -> None:
    script = scripts(
        2,
        """
        dist.init_process_group()
        for step in range(70):
            time.sleep(0.03 if rank == 1 else 0.003)
            dist.all_reduce(x)  # late
        dist.destroy_process_group()
        """,
        apart=True,
    )
    assert script.finish() == [0, 0]
    (said,) = re.findall(r"^rankscope: (late .*)", script.output, re.MULTILINE)
    line = script.line("# late")
    assert said.startswith(f"late rank: rank 1 is last to enter all_reduce at {line}, ")
