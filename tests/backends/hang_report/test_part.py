"""What one rank writes of itself."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.groups.world import world
from rankscope.backends.hang_report import part
from rankscope.backends.hang_report.part import _name_of, as_it_waited, write_part
from rankscope.backends.hang_report.place import Place
from rankscope.backends.post_mortem.report import examine
from rankscope.backends.post_mortem.user_frames import Frame, position
from rankscope.backends.work.user_code import calls_of_loop, frame_of_thread


def record(number: int, state: str, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "group_id": "g",
        "backend": "gloo",
        "state": state,
        "time_created_ns": number * 1000,
        "time_ended_ns": 0 if state == "started" else number * 1000 + 500,
        "duration_ns": 500,
        **more,
    }


def states(records: list[Any]) -> list[str]:
    return [one["state"] for one in records]


def test_the_op_that_has_failed_is_the_one_in_which_the_rank_waited() -> None:
    records = [record(1, "failed"), record(2, "completed"), record(3, "failed")]
    assert states(as_it_waited(records, None)) == ["failed", "completed", "started"]
    # Of each group its last one.
    other = record(4, "completed", group_id="h")
    assert states(as_it_waited([*records, other], None))[2:] == ["started", "completed"]


def test_an_op_of_gloo_that_has_just_raised_did_not_complete() -> None:
    records = [record(1, "completed"), record(2, "completed")]
    assert states(as_it_waited(records, None)) == ["completed", "completed"]
    assert states(as_it_waited(records, 9000)) == ["completed", "started"]
    # It was over long before the error.
    assert states(as_it_waited(records, 10**11)) == ["completed", "completed"]
    # NCCL's records tell whether an op has completed.
    nccl = [record(1, "completed", backend="nccl")]
    assert states(as_it_waited(nccl, 2000)) == ["completed"]


def no_group() -> Any:
    raise ValueError("no group")


def test_an_exception_is_read_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        dict[str, int]()["batch"]
    write_part(tmp_path, 3, Place(), error=caught.value, ended=True, dump=no_group)
    facts = json.loads((tmp_path / "facts_rank_3.json").read_text())
    assert facts["exception"]["text"] == "KeyError: 'batch'"
    assert not facts["has_left"]
    assert facts["memory"]["most_resident"] > 1 << 20
    one = examine([tmp_path]).evidence.ranks[3]
    assert one.exception == "KeyError: 'batch'"
    assert one.exception_line is not None
    assert one.exception_line.file == __file__
    # Its stack would be that of the hook, not of the program.
    assert not (tmp_path / "stacks_rank_3.txt").exists()


def test_of_an_op_that_fails_in_a_finally_the_exception_before_it_is_told(
    tmp_path: Path,
) -> None:
    error = RuntimeError("Timed out waiting 25000ms for recv operation to complete")
    try:
        try:
            raise ValueError("bad sample 17")
        finally:
            raise error
    except RuntimeError:
        write_part(tmp_path, 2, Place(), error=error, failed=True, dump=no_group)
    one = examine([tmp_path]).evidence.ranks[2]
    assert one.exception == "ValueError: bad sample 17"
    write_part(tmp_path, 2, Place(), error=error, ended=True, dump=no_group)
    one = examine([tmp_path]).evidence.ranks[2]
    assert one.exception is one.death is None


def test_a_rank_whose_tasks_await_something_is_at_the_await(tmp_path: Path) -> None:
    main_thread = threading.get_ident()

    async def fetch(written: asyncio.Future[None]) -> None:
        await written

    async def main() -> None:
        loop = asyncio.get_running_loop()
        written = loop.create_future()

        def write() -> None:
            deadline = time.monotonic() + 10
            while not calls_of_loop(frame_of_thread(main_thread)):
                assert time.monotonic() < deadline
            write_part(tmp_path, 0, Place(), dump=no_group)
            loop.call_soon_threadsafe(written.set_result, None)

        writer = threading.Thread(target=write)
        writer.start()
        await fetch(written)
        writer.join()

    asyncio.run(main())
    stacks = (tmp_path / "stacks_rank_0.txt").read_text()
    place = fetch.__code__.co_firstlineno + 1
    assert f'test_part.py", line {place} in fetch\n' in stacks
    one = examine([tmp_path]).evidence.ranks[0]
    assert one.location is not None
    assert one.location.line == place


def test_of_an_error_of_a_data_loader_that_of_its_worker_is_told(
    tmp_path: Path,
) -> None:
    trace = "Original Traceback (most recent call last):\n  File ...\nKeyError: 40\n"
    error = ValueError(f"Caught KeyError in DataLoader worker process 0.\n{trace}")
    write_part(tmp_path, 1, Place(), error=error, ended=True, dump=no_group)
    assert examine([tmp_path]).evidence.ranks[1].exception == (
        "ValueError: Caught KeyError in DataLoader worker process 0: KeyError: 40"
    )


def test_a_rank_that_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "exit_line", "train.py:7")
    # Another test may have ended the groups of this process.
    monkeypatch.setattr(world, "groups_ended_at", "")
    write_part(tmp_path, 0, Place(), ended=True, dump=no_group)
    write_part(tmp_path, 1, Place(), dump=no_group)
    ranks = examine([tmp_path]).evidence.ranks
    assert ranks[0].departure == "has left the program at train.py:7"
    assert ranks[1].departure is ranks[1].left_at is None
    monkeypatch.setattr(world, "groups_ended_at", "train.py:5")
    write_part(tmp_path, 0, Place(), ended=True, dump=no_group)
    assert examine([tmp_path]).evidence.ranks[0].departure == (
        "has left the program at train.py:7 after destroy_process_group() at train.py:5"
    )


def test_a_rank_whose_meeting_fails_while_it_writes_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stacks are of the call, and so is what it waits for."""
    making = {"call": "init_process_group", "address": "node1:1", "line": None}
    write = part._write_stacks

    def fail_meanwhile(path: Path) -> None:
        monkeypatch.setattr(part, "rendezvous", lambda *_: None)
        write(path)

    monkeypatch.setattr(part, "rendezvous", lambda *_: making)
    monkeypatch.setattr(part, "_write_stacks", fail_meanwhile)
    write_part(tmp_path, 0, Place(), dump=no_group)
    assert json.loads((tmp_path / "facts_rank_0.json").read_text())["rendezvous"] == (
        making
    )


def test_a_rank_that_runs_no_cell_is_at_no_line(tmp_path: Path) -> None:
    place = Place()
    place.exit_while_idle = lambda: "left cell 7 with KeyError at line 4"
    write_part(tmp_path, 1, place, dump=no_group)
    assert (tmp_path / "stacks_rank_1.txt").stat().st_size
    one = examine([tmp_path]).evidence.ranks[1]
    assert (one.location, one.called) == (None, None)
    assert one.last_cell_exit == "left cell 7 with KeyError at line 4"


def test_a_file_of_the_package_has_the_name_of_one() -> None:
    name = "rankscope/backends/hang_report/part.py"
    assert name in _name_of(part.__file__)
    assert _name_of(__file__) == __file__
    stack = [Frame("/usr/lib/python3.12/selectors.py", 468, "select")]
    stack += [Frame(name, 114, "main"), Frame(name, 409, "<module>", outermost=True)]
    assert position(stack) == (None, None)


def test_the_place_of_a_rank_is_read_from_its_stacks(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_part, tmp_path, 1, Place(), dump=no_group).result()
    report = examine([tmp_path])
    one = report.evidence.ranks[1]
    assert one.location is not None
    assert one.location.file.endswith("test_part.py")
    assert one.process is not None
    assert "pid" in one.process
    assert [file.problem for file in report.files] == ["", ""]
