"""What a rank reports while somebody looks at its job, or where it cannot write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import DistAbortedError
from rankscope.backends.hang_report import meeting as meeting_module
from rankscope.backends.hang_report import reports as reports_module
from rankscope.backends.hang_report.conclusion import Conclusion, add_absent_ranks
from rankscope.backends.hang_report.host_rank import HostRank
from rankscope.backends.hang_report.meeting import Meeting
from rankscope.backends.hang_report.part import write_part
from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.reporter import Reporter
from rankscope.backends.hang_report.reports import LOOK, Reports, Request, Wish
from rankscope.backends.hang_report.settings import Settings
from rankscope.backends.hang_report.waiting import Waiting


@pytest.mark.parametrize("attended", [True, False])
@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (Wish("stall"), True),
        (Wish("overdue"), True),
        (Wish("error", DistAbortedError("by who looks")), True),
        # They end what there is to look at.
        (Wish("error", RuntimeError("Connection closed by peer")), False),
        (Wish("exception", ValueError()), False),
        (Wish("crash"), False),
    ],
)
def test_who_looks_needs_no_report_of_what_is_to_be_seen(
    tmp_path: Path, wish: Wish, told: bool, attended: bool
) -> None:
    reporter = Reporter(Settings(tmp_path), Place(), lambda: attended)
    try:
        assert reporter._is_told(wish) is (told and attended)
    finally:
        os.close(reporter._read)
        os.close(reporter._write)


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """The place of rank 0, in a temporary folder of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    found = Meeting("job", 0)
    yield found
    found.close()


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "/full")


class Hangs(Waiting):
    """A rank that has waited for a minute."""

    def since(self) -> float | None:
        return time.time() - 60


@pytest.mark.parametrize("ends", ["verdict", "death", "nothing"])
def test_a_verdict_that_takes_long_is_waited_for_and_no_other_report_asked_for(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(reports_module, "VERDICT_WAIT", 0.0)
    living = [0, 1]
    # A process does not see its own locks.
    monkeypatch.setattr(meeting, "lives", living.__contains__)
    folder = str(tmp_path / "report")
    made = Reports(tmp_path, meeting, Hangs(), Place(), lambda text: None)
    made.take_part(Request(1, folder, 1, "stall", time.time()), Wish(""))
    assert made.last is None
    assert made.are_told(Wish("stall"))
    if ends == "verdict":
        meeting.put("result_1", Conclusion(folder, "why").__dict__)
    elif ends == "death":
        living.remove(1)
    else:
        monkeypatch.setattr(reports_module, "AFTERMATH", 0.0)
    assert made.are_told(Wish("stall")) is (ends == "verdict")
    assert made.last == (Conclusion(folder, "why") if ends == "verdict" else None)


def test_a_rank_that_sigterm_has_ended_is_told_with_its_line(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process does not see its own locks.
    monkeypatch.setattr(meeting_module, "_remove_unless_used", lambda folder: None)
    reporter = Reporter(Settings(tmp_path), Place())
    try:
        reporter._joined = HostRank(
            1, "job", tmp_path, Waiting(), Place(), lambda text: None
        )
        reporter.leave()
    finally:
        os.close(reporter._read)
        os.close(reporter._write)
    add_absent_ranks(tmp_path, meeting)
    death = json.loads((tmp_path / "facts_rank_1.json").read_text())["death"]
    assert death.startswith("rank 1 is dead: ended by SIGTERM at test_reporter.py:")


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_verdict_that_another_rank_makes_for_a_dead_one_is_waited_for(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    """A rank that crashes ends before its verdict is there."""
    monkeypatch.setattr(reports_module, "VERDICT_WAIT", 0.0)
    living = [0, 1]
    monkeypatch.setattr(meeting, "rank", 1)
    monkeypatch.setattr(meeting, "lives", living.__contains__)
    monkeypatch.setattr(meeting, "living", lambda: living)
    made = Reports(tmp_path, meeting, Hangs(), Place(), lambda text: None)
    request = Request(1, str(tmp_path / "report"), 2, "crash", time.time())
    made.take_part(request, Wish(""))
    if is_closed:
        meeting.put("closed_1", {"rank": 0})
    assert made.are_told(Wish("error"))
    living.remove(0)
    assert not made.are_told(Wish("error"))


@pytest.mark.parametrize("unfit", ["read-only", "full"])
def test_where_nothing_can_be_written_the_report_goes_elsewhere_and_says_why(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, unfit: str
) -> None:
    wanted = tmp_path / "reports"
    if unfit == "full":
        monkeypatch.setattr(reports_module, "check_room", full)
        why = f"not in {wanted}: No space left on device"
    else:
        # For root, too, no folder can be made in a file.
        wanted.touch()
        why = f"not in {wanted}: Not a directory"
    said: list[str] = []
    made = Reports(wanted, meeting, Waiting(), Place(), said.append)
    made.request(Wish("stall"))
    assert made.last is not None
    assert made.last.folder is not None
    folder = Path(made.last.folder)
    assert folder.resolve().is_relative_to(tmp_path / "tmp")
    assert (folder / "verdict.json").exists()
    assert said == [f"rankscope: {made.last}"]
    assert said[0].endswith(f"({why})")


def test_a_verdict_that_cannot_be_kept_is_said(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    made = Reports(tmp_path / "reports", meeting, Waiting(), Place(), said.append)
    write = Path.write_text

    def write_unless_verdict(self: Path, *given: Any, **named: Any) -> int:
        if "verdict" in self.name:
            full()
        return write(self, *given, **named)

    monkeypatch.setattr(Path, "write_text", write_unless_verdict)
    made.request(Wish("stall"))
    assert len(said) == 1
    assert "(not whole: [Errno 28] No space left on device" in said[0]


@pytest.mark.parametrize("reason", [LOOK, "exception"])
def test_a_part_that_nobody_wants_any_more_is_no_error(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Who asks may remove the folder while this rank writes into it."""
    made = Reports(tmp_path / "reports", meeting, Waiting(), Place(), lambda text: None)
    folder = tmp_path / "asked"
    folder.mkdir()
    asked = {"folder": str(folder), "rank": 1, "reason": reason, "at": 0.0}
    assert meeting.put("request_1", asked)
    meeting.put("result_1", {"folder": None, "text": ""})

    def write_late(folder: Path, *given: Any, **named: Any) -> None:
        shutil.rmtree(folder)
        write_part(folder, *given, **named)

    monkeypatch.setattr(reports_module, "write_part", write_late)
    request = made.pending()
    assert request is not None
    made.take_part(request, Wish(""))
    assert made.pending() is None


@pytest.fixture
def begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[str]], Reporter]]:
    """Begins the reports of rank 0, which `said` is filled by."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    begun: list[Reporter] = []

    def begin(said: list[str]) -> Reporter:
        place = Place()
        place.tell(0, 2, "tcp://127.0.0.1:1")
        one = Reporter(Settings(tmp_path / "reports"), place, say=said.append)
        begun.append(one)
        one.start()
        return one

    yield begin
    for one in begun:
        one.end()
        os.close(one._read)
        os.close(one._write)


def test_a_failed_write_is_said_once_and_tried_again(
    begin: Callable[[list[str]], Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Meeting, "put", full)
        reporter = begin(said)
        for _ in range(2):
            assert reporter.report("stall") is None
        assert said == [
            "rankscope: rank 0 can write no report: /full: No space left on device; "
            "RANKSCOPE_REPORT and TMPDIR choose the folders"
        ]
    assert reporter.report("stall") is not None


@pytest.mark.parametrize("amid_the_report", [False, True])
def test_the_ranks_meet_anew_where_their_files_were_deleted(
    tmp_path: Path,
    begin: Callable[[list[str]], Reporter],
    monkeypatch: pytest.MonkeyPatch,
    amid_the_report: bool,
) -> None:
    look = Reporter._look
    deleted: list[Path] = []

    def look_late(self: Reporter, joined: Any) -> None:
        if self._wishes and not deleted:
            deleted.append(parent)
            shutil.rmtree(parent)
        look(self, joined)

    said: list[str] = []
    reporter = begin(said)
    until(lambda: reporter._joined is not None, 10)
    (parent,) = (tmp_path / "tmp").iterdir()
    if amid_the_report:
        monkeypatch.setattr(Reporter, "_look", look_late)
    else:
        shutil.rmtree(parent)
    found = reporter.report("stall")
    assert found is not None
    assert said == [f"rankscope: {found}"]
    assert parent.exists()


#: Holds the file of a rank, as a peer does, until its stdin ends.
PEER = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_a_rank_that_gets_another_number_leaves_no_dead_one(
    begin: Callable[[list[str]], Reporter],
) -> None:
    reporter = begin([])
    until(lambda: reporter._joined is not None, 10)
    assert reporter._joined is not None
    folder = reporter._joined.meeting.folder
    held = [sys.executable, "-S", "-c", PEER, str(folder / "rank_1")]
    with subprocess.Popen(
        held, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        assert peer.stdout.readline() == "held\n"
        reporter._place.assign(2, 3)
        until(lambda: (folder / "rank_2").exists(), 10)
        assert sorted(one.name for one in folder.glob("rank_*")) == ["rank_1", "rank_2"]
        peer.stdin.close()
