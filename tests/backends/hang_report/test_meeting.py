"""Where the ranks of a host meet: a private folder that goes with the last rank."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from rankscope.backends.hang_report.meeting import Meeting
from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.reports import LOOK, Reports, Wish
from rankscope.backends.hang_report.waiting import Waiting
from rankscope.backends.stores.process_end import is_stopped


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user in a temporary folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"rankscope-report-{os.getuid()}"


def test_the_folder_is_of_this_user_alone_and_goes_with_the_last_rank(
    parent: Path,
) -> None:
    meeting = Meeting("job", 3)
    meeting.tell({"signal": 57})
    assert parent.stat().st_mode & 0o777 == 0o700
    assert meeting.known()[3].items() > {"signal": 57, "pid": os.getpid()}.items()
    assert meeting.living() == [3]
    meeting.tell({"signal": None})
    assert meeting.known()[3]["signal"] is None
    meeting.close()
    assert not parent.exists()


def test_of_several_that_put_a_file_one_counts(parent: Path) -> None:
    meeting = Meeting("job", 0)
    assert meeting.get("request_1") is None
    assert meeting.put("request_1", {"rank": 0})
    assert not meeting.put("request_1", {"rank": 1})
    assert meeting.get("request_1") == {"rank": 0}
    meeting.close()


def test_what_dead_ranks_have_left_is_known_until_the_job_ends(parent: Path) -> None:
    meeting = Meeting("job", 0)
    # Nobody holds the lock of this file.
    (meeting.folder / "rank_1").write_text('{"pid": 4711}')
    assert set(meeting.known()) == {0, 1}
    assert meeting.living() == [0]
    meeting.close()
    assert not parent.exists()


def test_jobs_that_were_killed_leave_nothing_to_the_next(parent: Path) -> None:
    for key in ("job", "another"):
        (parent / key).mkdir(parents=True)
        (parent / key / "rank_0").write_text('{"pid": 4711}')
        (parent / key / "request_1").write_text("{}")
    parent.chmod(0o700)
    meeting = Meeting("job", 1)
    assert meeting.get("request_1") is None
    assert set(meeting.known()) == {1}
    assert [one.name for one in parent.iterdir()] == ["job"]
    meeting.close()


def test_a_folder_that_others_may_read_is_refused(parent: Path) -> None:
    parent.mkdir()
    parent.chmod(0o755)
    with pytest.raises(PermissionError, match="of this user alone"):
        Meeting("job", 0)
    parent.rmdir()
    parent.symlink_to(parent.parent)
    with pytest.raises(OSError, match="rankscope-report"):
        Meeting("job", 0)


def test_a_second_process_of_a_rank_hears_of_the_first_one(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(file: int, how: int) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    meeting = Meeting("job", 1)
    open_before = os.listdir("/proc/self/fd")
    # A process sees none of its own locks.
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", locked)
        with pytest.raises(BlockingIOError) as caught:
            Meeting("job", 1)
    assert caught.value.strerror == f"process {os.getpid()} is rank 1 of the same job"
    assert os.listdir("/proc/self/fd") == open_before
    meeting.close()


def test_a_look_from_outside_is_no_report(parent: Path, tmp_path: Path) -> None:
    """It suppresses no later one, and what is to be written is gone with who looks."""
    meeting = Meeting("job", 0)
    reports = Reports(tmp_path / "kept", meeting, Waiting(), Place(), lambda text: None)
    folders = [tmp_path / "look", tmp_path / "gone"]
    folders[0].mkdir()
    for number, folder in enumerate(folders, 1):
        asked = {
            "folder": str(folder),
            "rank": -4711,
            "reason": LOOK,
            "at": time.time(),
        }
        assert meeting.put(f"request_{number}", asked)
        request = reports.pending()
        assert request is not None
        reports.take_part(request, Wish(""))
    assert reports.pending() is None
    assert not reports.are_told(Wish("stall"))
    # Nobody reads it: no process holds the lock of such a rank.
    assert not folders[0].exists()
    assert not folders[1].exists()
    meeting.close()


@pytest.mark.processes
def test_a_process_that_is_stopped_cannot_write() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)
