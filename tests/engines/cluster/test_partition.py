"""A network between two hosts that is slow, lossy, cut, and there again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cluster import two_hosts

pytestmark = [pytest.mark.processes, pytest.mark.soak]

#: A program that starts what does not end by itself, as the daemons of Slurm.
DAEMON = """
import os, signal, subprocess, sys
subprocess.run(["sh", "-c", "setsid sleep 600 &"])
print("runs", flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), 9)
signal.pause()
"""


@pytest.fixture(scope="module")
def seen(_module_leaves_nothing: None) -> Iterator[dict[str, Any]]:
    """What the program saw at each step, by step; it runs once."""
    if why := two_hosts.why_not():
        pytest.skip(why)
    before = _interfaces()
    reported = two_hosts.steps_of(two_hosts.__file__)
    steps: dict[str, Any] = {one["step"]: one for one in reported}
    steps["poor"] = [one for one in reported if one["step"] == "poor"]
    yield steps
    # Those of the hosts went with them.
    assert _interfaces() == before


def _interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


@pytest.mark.parametrize("whom", ["program", "unshare", "tests"])
@pytest.mark.usefixtures("no_leaks")
def test_all_ends_with_what_is_killed(whom: str, tmp_path: Path) -> None:
    """The program, what runs it, as by a limit of time, or the tests themselves."""
    if why := two_hosts.why_not():
        pytest.skip(why)
    program = tmp_path / "program.py"
    program.write_text(DAEMON)
    command = two_hosts.command_of(str(program), *(("kill",) * (whom == "program")))
    if whom == "tests":
        code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        command = [sys.executable, "-c", code, *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "runs\n"
        if whom != "program":
            running.kill()
        # The end of all that had it.
        assert running.stdout.read() == ""


def test_ranks_on_both_hosts_work_together(seen: dict[str, Any]) -> None:
    assert seen["start"]["hosts"] == ["host-a", "host-a", "host-b", "host-b"]


def test_large_values_go_over_connections_of_their_own(seen: dict[str, Any]) -> None:
    assert seen["large"] == {"step": "large", "equal": [True] * 4, "moved": [4, 4]}


def test_delay_and_loss_slow_down_and_change_nothing(seen: dict[str, Any]) -> None:
    # Every rank checked its sums itself.
    assert [one["n"] for one in seen["poor"]] == [1, 1000, 200_000]
    assert all(one["seconds"] > two_hosts.DELAY for one in seen["poor"])
    assert seen["carried"]["carried"] > 1000
    assert seen["carried"]["lost"] > 0


def test_a_slow_link_is_told_and_no_rank_is_blamed_for_it(
    seen: dict[str, Any],
) -> None:
    *silent, told = seen["slow link"]["told"]
    assert not any(one["found"] for one in silent)
    assert told["found"] == [["late to leave", [2]]]
    assert "what comes in is slow, not the work between" in told["said"]
    assert ", the clocks of the hosts agree within " in told["said"]
    hidden = seen["slow link"]["hidden"]
    assert hidden["found"] == []
    assert "once all are in, all_reduce of 15.6 KiB takes " in hidden["said"]


def test_a_cut_ends_every_wait_and_names_the_op(seen: dict[str, Any]) -> None:
    """Also on the side that the notebook cannot reach."""
    down, up = seen["down"], seen["up"]
    assert set(down["caught"]) == {"0", "1"}
    assert down["caught"].items() <= up["caught"].items()
    assert down["ended"] < two_hosts.TIMEOUT + 5
    ends, at = {}, set()
    for rank, said in up["caught"].items():
        where = (
            rf"all_reduce #(\d+) of group 'default' on rank {rank} \(cell 9 line 4\)"
        )
        found = re.match(rf"(\w+): {where}", said)
        assert found, said
        ends[int(rank)] = found[1]
        at.add(int(found[2]))
        assert "%dist_rebuild" in said
    # The cut may have come when some had one op done that others had not.
    assert max(at) - min(at) <= 1
    # One rank of each side was first and told the other, or both were.
    for side in ((0, 1), (2, 3)):
        kinds = {ends[rank] for rank in side}
        assert kinds <= {"DistTimeoutError", "DistAbortedError"}
        assert "DistTimeoutError" in kinds


def test_the_notebook_says_who_is_out_of_reach(seen: dict[str, Any]) -> None:
    down = seen["down"]
    assert down["unheard"] < two_hosts.TIMEOUT + 10
    assert down["abort"] == (
        "ranks 2–3: no answer within 2 s (on host-b); what was in flight on ranks 0–1 "
        "is aborted"
    )
    assert "group 'default' cannot be rebuilt: rank 2: no answer" in down["rebuild"]
    assert any(
        re.search(r"ranks 2–3 have not answered since [\d:]+: no rank of host-b", one)
        for one in down["verdicts"]
    )


def test_a_rebuild_is_all_it_takes_once_they_are_joined(seen: dict[str, Any]) -> None:
    assert seen["rebuilt"]["mine"] == {str(rank): rank * 100 for rank in range(4)}
