"""A job under torchrun that nobody looks at: it says itself why it hangs, once."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.__main__ import main
from rankscope.backends.hang_report.triggers import OLD
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines.wire.job_file import JobFile
from tests.with_torch.scripts import DEADLINE, WATCH, Torchrun, until

_SAID = re.compile(r"^rankscope: (?!to see).*; the report is (\S+)$", re.MULTILINE)
#: Its value must be in no file of a report.
_SECRET = {"MY_API_TOKEN": "hunter2"}


class Job(Torchrun):
    """A script under ``-m rankscope.torch`` that writes reports into `folder`."""

    def __init__(
        self,
        count: int,
        code: str,
        folder: Path,
        *,
        after: float = 60.0,
        begin: str = "",
        env: Mapping[str, str] = {},
    ) -> None:
        self.reports = folder / "reports"
        (folder / "tmp").mkdir()
        own = {
            "RANKSCOPE_REPORT": str(self.reports),
            "RANKSCOPE_REPORT_AFTER": str(after),
            # Where the ranks of a host meet.
            "TMPDIR": str(folder / "tmp"),
        }
        super().__init__(
            count,
            code,
            folder,
            begin=begin,
            module="rankscope.torch",
            env={**own, **_SECRET, **env},
        )

    def __enter__(self) -> Job:
        return self

    def line(self, comment: str) -> int:
        """Return the number of the line that ends with a comment."""
        lines = self.script.read_text().splitlines()
        return 1 + next(i for i, one in enumerate(lines) if one.endswith(comment))

    def report(self) -> dict[str, Any]:
        """Return the verdict, once the job has said it; as a terminal reads it."""
        until(lambda: _SAID.search(self.output) is not None, self)
        (folder,) = self.reports.iterdir()
        assert _SAID.findall(self.output) == [str(folder)]
        told: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
        (verdict,) = told["verdicts"]
        assert verdict["text"] in self.output
        for path in folder.iterdir():
            assert b"hunter2" not in path.read_bytes(), path
        assert (folder / "report.html").stat().st_size
        assert sum(one.stat().st_size for one in folder.iterdir()) < 1 << 20
        return {**verdict, "world_size": told["world_size"], "folder": str(folder)}


def left(folder: Path) -> list[Path]:
    """Return what a job has left where its ranks meet."""
    return list((folder / "tmp").glob("rankscope-report-*"))


def test_a_rank_that_holds_the_gil(tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "fifo")
    code = """
    import ctypes
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        # It returns as soon as somebody opens the other end.
        ctypes.PyDLL(None).open(os.fsencode(folder / "fifo"), os.O_RDONLY)  # held
    dist.all_reduce(x)  # waits
    """
    with Job(2, code, tmp_path, after=2.5) as job:
        found = job.report()
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
        assert job.finish() == 0, job.output
        assert found["kind"] == Fault.RANK_BUSY_ELSEWHERE.value
        assert found["culprits"] == [1]
        assert (found["op"], found["sequence_number"]) == ("all_reduce", 2)
        assert found["line"] == f"train.py:{job.line('# waits')}"
        told = " ".join([found["text"], *found["consequences"]])
        assert f"train.py:{job.line('# held')}" in told
        assert found["world_size"] == 2
    assert main(["diagnose", found["folder"], "--json"]) == 1
    again = json.loads(capsys.readouterr().out)["verdicts"]
    assert [one["text"] for one in again] == [found["text"]]
    # It ended well after that, and nothing else is left.
    assert left(tmp_path) == []
    assert len(_SAID.findall(job.output)) == 1


def test_a_rank_that_fails_while_others_wait(tmp_path: Path) -> None:
    code = """
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        raise ValueError("sample 17 is corrupt")  # fails
    dist.all_reduce(x)  # waits
    """
    with Job(2, code, tmp_path) as job:
        assert job.finish() != 0
        found = job.report()
        assert found["culprits"] == [1]
        told = " ".join([found["text"], *found["consequences"]])
        assert "ValueError: sample 17 is corrupt" in told
        assert f"train.py:{job.line('# fails')}" in told
    assert left(tmp_path) == []


def test_the_error_of_an_op_has_the_verdict(tmp_path: Path) -> None:
    code = """
    import traceback
    from datetime import timedelta
    group = dist.new_group(timeout=timedelta(seconds=4), group_desc="dp")
    x = torch.ones(4)
    if rank == 1:
        wait("go")
    try:
        dist.all_reduce(x, group=group)  # waits
    except RuntimeError as error:
        note(f"error.{rank}", "".join(traceback.format_exception(error)))
    wait("end")
    """
    # The stall is reported before, and not once more with the error.
    with Job(2, code, tmp_path, after=2.5) as job:
        error = job.read("error.0")
        found = job.report()
        assert "Timed out waiting 4000ms" in error
        assert found["text"] in error
        assert found["folder"] in error
        assert found["kind"] == Fault.RANK_BUSY_ELSEWHERE.value
        assert (found["culprits"], found["group"]) == ([1], "dp")
        assert found["line"] == f"train.py:{job.line('# waits')}"
        # What follows from it is told by the same report.
        job.let("go")
        assert found["text"] in job.read("error.1")
        job.let("end")
        assert job.finish() == 0, job.output
        assert len(_SAID.findall(job.output)) == 1


def test_a_launcher_ends_the_job(tmp_path: Path) -> None:
    code = """
    x = torch.ones(4)
    note(f"in.{rank}")
    if rank == 1:
        wait("never")
    dist.all_reduce(x)
    """
    with Job(2, code, tmp_path) as job:
        job.read("in.0")
        job.read("in.1")
        began = time.monotonic()
        # A job that has waited for less may have been fine.
        until(lambda: time.monotonic() - began > OLD + 0.5, job)
        assert len(JobFile.load_all()) == 1
        job.process.send_signal(signal.SIGTERM)
        job.finish()
        # Rank 0 has run no `atexit` function: the file, with its key, is deleted.
        assert JobFile.load_all() == []
        found = job.report()
        assert found["kind"] == Fault.RANK_BUSY_ELSEWHERE.value
        assert found["culprits"] == [1]
        # The ranks ended by the signal, as they do without a report.
        assert "SIGKILL" not in job.output
    assert left(tmp_path) == []


def test_a_size_mismatch_that_ends_a_rank_in_gloo(tmp_path: Path) -> None:
    code = """
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(20 if rank == 0 else 18))  # differs
    """
    with Job(2, code, tmp_path) as job:
        assert job.finish() != 0
        found = job.report()
        assert found["kind"] == Fault.SIZE_MISMATCH.value
        assert (found["op"], found["sequence_number"]) == ("all_reduce", 2)
        assert found["line"] == f"train.py:{job.line('# differs')}"
        assert "20" in found["text"]
        assert "18" in found["text"]
        assert "(SIGABRT)" in job.output
    assert left(tmp_path) == []


def test_a_rank_that_does_not_come_to_init_process_group(tmp_path: Path) -> None:
    begin = """
while os.environ["RANK"] == "1" and not (folder / "go").exists():
    time.sleep(0.01)  # late
"""
    code = "dist.barrier()\ndist.destroy_process_group()\n"
    with Job(2, code, tmp_path, after=2.5, begin=begin) as job:
        found = job.report()
        job.let("go")
        assert job.finish() == 0, job.output
        assert found["kind"] == Fault.MISSING_RANKS.value
        assert (found["culprits"], found["op"]) == ([1], "init_process_group")
        assert f"train.py:{job.line('# late')}" in found["text"]
        assert re.search(r"localhost:\d+|127\.0\.0\.1:\d+", found["text"])
    assert left(tmp_path) == []


def test_a_job_that_ends_well_writes_nothing_but_who_was_late(tmp_path: Path) -> None:
    code = """
    import multiprocessing
    dist.all_reduce(torch.ones(4))
    # A worker that is ended, as a DataLoader's: the signal is not the rank's.
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    worker.terminate()
    worker.join()
    assert worker.exitcode == -15, worker.exitcode
    dist.all_reduce(torch.ones(4))
    for step in range(45):
        time.sleep(0.05 if rank == 1 else 0.005)
        dist.all_reduce(torch.ones(4))  # late
    dist.destroy_process_group()
    """
    with Job(2, code, tmp_path) as job:
        assert job.finish() == 0, job.output
        assert not job.reports.exists()
        assert _SAID.search(job.output) is None
        # What is said at the end of the last rank.
        said = re.findall(r"^rankscope: late .*", job.output, re.MULTILINE)
        line = f"all_reduce at train.py:{job.line('# late')}, "
        assert len(said) == 1
        assert said[0].startswith(
            f"rankscope: late rank: rank 1 is last to enter {line}"
        )
    assert left(tmp_path) == []


def test_ranks_that_do_not_meet_say_who_was_late_through_torchs_store(
    tmp_path: Path,
) -> None:
    begin = """
os.environ["TMPDIR"] = str(folder / os.environ["RANK"])
os.mkdir(os.environ["TMPDIR"])
"""
    code = """
    for step in range(70):
        time.sleep(0.03 if rank == 1 else 0.003)
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    """
    env = {"RANKSCOPE_REPORT": str(tmp_path / "reports")}
    with Torchrun(2, code, tmp_path, begin=begin + WATCH, env=env) as job:
        assert job.process.wait(DEADLINE) == 0, job.output
    (said,) = re.findall(r"^rankscope: (late .*)", job.output, re.MULTILINE)
    assert said.startswith("late rank: rank 1 is last to enter all_reduce at train.py:")


def test_ranks_that_all_fail_write_nothing(tmp_path: Path) -> None:
    code = """
    raise ValueError("no such data set")
    """
    with Job(2, code, tmp_path) as job:
        assert job.finish() != 0
        assert not job.reports.exists()
        assert _SAID.search(job.output) is None
    assert left(tmp_path) == []


def test_reports_can_be_switched_off(tmp_path: Path) -> None:
    code = """
    os.chdir(folder)
    if rank == 1:
        raise ValueError("nobody is told")
    dist.all_reduce(torch.ones(4))
    """
    with Job(2, code, tmp_path, env={"RANKSCOPE_REPORT": "0"}) as job:
        assert job.finish() != 0
        assert _SAID.search(job.output) is None
        assert not (tmp_path / "rankscope-report").exists()
    assert left(tmp_path) == []
