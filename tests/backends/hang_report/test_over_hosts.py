"""What ranks on several hosts leave in the job's store, and what the last one reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.hang_report import last_line, reporter
from rankscope.backends.hang_report.last_line import LAST_OVER_HOSTS, OverHosts
from rankscope.backends.hang_report.meeting import Meeting
from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.reporter import Reporter
from rankscope.backends.hang_report.settings import Settings
from rankscope.backends.observe.joint_ops import slim
from rankscope.backends.stores.hash import HashStore
from tests.backends.observe.late_runs import Run

#: Of ranks 2 and 3, ms.
AHEAD = 3000.0


class Counting(HashStore):
    """A store that counts the bytes of the values."""

    nbytes = 0

    def set(self, key: str, value: bytes | str) -> None:
        self.nbytes += len(value)
        super().set(key, value)


def late(rank: int) -> Run:
    """Four ranks on two hosts, whose clocks differ by seconds."""
    run = Run(4, heavy=0.1, clocks={2: AHEAD, 3: AHEAD})
    return run.steps(LAST_OVER_HOSTS + 1, lambda n, one: 21 if one == rank else 1)


def leave(
    store: HashStore, run: Run, ranks: range = range(4), size: int = 4
) -> dict[int, OverHosts]:
    """Have ranks leave one after the other; return what each has found."""
    found = {rank: OverHosts() for rank in ranks}
    for rank, one in found.items():
        dump = run.dumps()[rank]
        ops = {**dump, "records": [*map(slim, dump["records"])]}
        one.leave(store, rank, size, "ab"[rank // 2], ops, serves=False)
    return found


@pytest.mark.parametrize("rank", [1, 2])
def test_who_comes_last_says_who_was_late_on_whichever_host(rank: int) -> None:
    store = Counting()
    found = leave(store, late(rank))
    assert [one.line for one in found.values()][:3] == [""] * 3
    line = found[3].line
    assert line.startswith(
        f"late rank: rank {rank} is last to enter all_reduce at cell 7 line 9, "
    )
    assert "the others wait 20 ms each time" in line
    assert "(the clocks of the hosts agree within " in line
    assert store.nbytes / 4 < 4096
    # The same processes make groups once more over the same store.
    assert leave(store, late(0))[3].line.startswith("late rank: rank 0 ")


def test_nothing_is_said_where_nothing_is_certain_or_a_rank_has_died() -> None:
    quiet = Run(4, heavy=0.1, clocks={2: AHEAD, 3: AHEAD}).steps(LAST_OVER_HOSTS + 1)
    assert {one.line for one in leave(HashStore(), quiet).values()} == {""}
    found = leave(HashStore(), late(1), range(3))
    assert {one.line for one in found.values()} == {""}


def test_ranks_of_a_large_job_leave_less() -> None:
    store, run = Counting(), late(1)
    leave(store, run, range(1), 1024)
    assert store.nbytes < 1200


def test_who_serves_the_store_waits_for_the_others_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, ops = HashStore(), late(1).dumps()[0]
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    monkeypatch.setattr(last_line, "SERVER_WAIT", 0.01)
    one = OverHosts()
    one.leave(store, 0, 2, "a", ops, serves=True)
    assert one.has_left
    assert naps
    # The other one has read all of them while this one waited.
    naps.clear()
    monkeypatch.setattr(last_line, "SERVER_WAIT", 60.0)
    store.set("rankscope/last_ops/2/read", "1")
    one.leave(store, 0, 2, "a", ops, serves=True)
    assert not naps


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reporters of two of four ranks, on one host; their threads do not run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        "rankscope.backends.hang_report.meeting._remove_unless_used",
        lambda folder: None,
    )
    made = []
    for rank in range(2):
        one = Reporter(Settings(tmp_path), Place())
        one._joined = type("Joined", (), {"meeting": Meeting("job", rank)})()
        monkeypatch.setattr(one._thread, "is_alive", lambda: True)
        # On this thread at once.
        monkeypatch.setattr(
            one, "_wake", lambda one=one: one._calls and one._calls.pop(0)()
        )
        made.append(one)
    yield made
    for one in made:
        one._joined.meeting.close()
        os.close(one._read)
        os.close(one._write)


class Failing(HashStore):
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Broken pipe\nand pages of more")


def last_lines(ranks: list[Reporter]) -> list[str]:
    return [one._last_line(one._joined.meeting) for one in ranks]


@pytest.mark.parametrize(
    ("store", "why"),
    [
        (None, "the job's store has ended"),
        (Failing(), "the job's store has failed: Broken pipe"),
    ],
)
def test_a_host_says_once_that_it_does_not_know(
    ranks: list[Reporter], store: HashStore | None, why: str
) -> None:
    for rank, one in enumerate(ranks):
        assert one.is_over_hosts(4)
        assert not one.is_over_hosts(2)
        assert one.leave_groups(store, rank, 4, serves=False)
    said = f"late rank: not known: ranks are on several hosts, and {why}"
    assert last_lines(ranks) == [said, ""]


def test_a_store_that_does_not_answer_holds_nobody(
    ranks: list[Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "STORE_WAIT", 0.01)
    monkeypatch.setattr(ranks[0], "_wake", lambda: None)
    assert not ranks[0].leave_groups(HashStore(), 0, 4, serves=False)
    assert "has not answered within 0.01 s" in last_lines(ranks[:1])[0]


def test_a_rank_that_fails_leaves_nothing(ranks: list[Reporter]) -> None:
    store = HashStore()
    try:
        raise ValueError("no data")
    except ValueError:
        assert ranks[0].leave_groups(store, 0, 4, serves=False)
    assert store.num_keys() == 0
    assert last_lines(ranks[:1]) == [""]
