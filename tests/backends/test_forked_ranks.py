"""A rank that is forked has all that one started for it alone has."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest

from rankscope.backends.conformance.ranks import Rank, RankFailure, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until

pytestmark = pytest.mark.processes


def _open() -> dict[str, str]:
    """Return the open descriptors; none while the thread end-with-caller looks."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        found[name] = ""
        # That of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    links = [*found.values()]
    looks = any(re.fullmatch(r"/proc/\d+/stat", link) for link in links)
    return {} if looks or links.count("") > 1 else found


def _surroundings(me: Rank) -> dict[str, object]:
    return {
        "variables": (os.environ["RANK"], os.environ["LOCAL_RANK"]),
        "set": os.environ.get("RANKSCOPE_TEST_SET"),
        "folder": os.getcwd(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        "leads a session": os.getsid(0) == os.getpid(),
        "open": until(_open),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "forked": "tests.forks" in (sys.modules["__main__"].__doc__ or ""),
    }


@pytest.mark.usefixtures("no_leaks")
def test_it_has_the_surroundings_of_this_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_TEST_SET", "now")
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(2, _surroundings)
    for rank, found in enumerate((first, second)):
        assert found["forked"]
        assert found["variables"] == (str(rank), str(rank))
        assert found["set"] == "now"
        assert found["folder"] == str(tmp_path)
        assert found["descriptors"] == resource.getrlimit(resource.RLIMIT_NOFILE)
        assert found["leads a session"]
        assert found["threads"] == ["MainThread", "end-with-caller"]
    # Its output, its pipe and the folder that is listed; nothing of the rank before.
    assert len(first["open"]) == len(second["open"]) == 5


def _end(me: Rank, how: str) -> None:
    print(f"rank {me.rank} ends", flush=True)
    if how == "exit":
        os._exit(5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("kill", -signal.SIGKILL)])
def test_its_end_and_its_output_are_known(how: str, code: int) -> None:
    with pytest.raises(RankFailure) as error:
        run_ranks(1, _end, how)
    assert f"died with exit code {code}\n" in str(error.value)
    assert "rank 0 ends" in str(error.value)


def _wait(me: Rank) -> None:
    me.report(os.getpid())
    me.listen()


@pytest.mark.usefixtures("no_leaks")
def test_one_that_runs_is_killed_at_the_end_of_the_block() -> None:
    with Ranks(2, _wait) as ranks:
        assert [ranks.next_report(rank) for rank in (0, 1)] == ranks.pids
