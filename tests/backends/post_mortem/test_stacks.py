"""Stacks of other processes: the line of a rank's main thread, and whose it is."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
from pathlib import Path

import pytest

from rankscope.backends.post_mortem.evidence_file import RawFile, UnreadableError
from rankscope.backends.post_mortem.stacks import (
    FaulthandlerReader,
    PySpyReader,
    frames_of_main,
)
from rankscope.backends.post_mortem.user_frames import rank_in_name

PY_SPY = """\
Process 4711: /usr/bin/python3 -u train.py --epochs 3
Python v3.11.7 (/usr/bin/python3.11)

Thread 4712 (idle): "Thread-1 (pin_memory)"
    select (selectors.py:415)
    pin (data.py:9)
Thread 4711 (active+gil): "MainThread"
    wait (threading.py:331)
        Arguments:
            self: <Condition at 0x7fe1a9585f50>
    __next__ (torch/utils/data/dataloader.py:701)
    next_batch (data.py:77)
    main (train.py:88)
    <module> (train.py:120)
"""

FAULTHANDLER = """\
Timeout (0:10:00)!
Thread 0x00007ff8a1f456c0 [pin_memory] (most recent call first):
  File "/opt/env/lib/python3.12/threading.py", line 982 in run

Current thread 0x00007ff8a2ca9b80 [python] (most recent call first):
  File "/opt/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", \
line 2810 in all_reduce
  File "/opt/env/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", \
line 81 in wrapper
  File "/job/train.py", line 88 in step
  File "/job/train.py", line 120 in <module>
"""


def raw(text: str, path: str = "stacks/rank_3.txt") -> RawFile:
    return RawFile(path, text.encode("utf-8", "surrogateescape"))


def test_py_spy_text() -> None:
    assert PySpyReader().recognises(raw(PY_SPY))
    (one,) = PySpyReader().read(raw(PY_SPY))
    assert (one.rank, str(one.location)) == (3, "data.py:77")
    assert one.called == "__next__ of torch/utils/data/dataloader.py"
    assert one.process == "pid 4711"
    assert not one.recorded


def test_a_package_that_py_spy_shows_without_its_folder_is_not_the_users() -> None:
    text = PY_SPY.replace("wait (threading.py:331)", "read (pyarrow/io.py:22)")
    text = text.replace("    __next__ (torch/utils/data/dataloader.py:701)\n", "")
    (one,) = PySpyReader().read(raw(text))
    assert (str(one.location), one.called) == ("data.py:77", "read of pyarrow/io.py")


def test_a_program_without_threading_has_a_main_thread() -> None:
    """py-spy has no name of its thread: its number is that of the process."""
    text = PY_SPY.replace(': "MainThread"', "").replace(': "Thread-1 (pin_memory)"', "")
    (one,) = PySpyReader().read(raw(text))
    assert str(one.location) == "data.py:77"
    frames = [{"name": "<module>", "filename": "/job/a.py", "line": 2}]
    thread = {"pid": 7, "thread_name": None, "os_thread_id": 7, "frames": frames}
    other = {**thread, "os_thread_id": 8, "frames": []}
    file = raw(json.dumps([other, thread]))
    (one,) = PySpyReader().read(file)
    assert str(one.location) == "a.py:2"
    assert [frame.line for frame in frames_of_main(file)] == [2]
    with pytest.raises(UnreadableError, match="no main thread"):
        frames_of_main(raw(json.dumps([other])))


@pytest.mark.parametrize(
    "argument", ["--rank 5", "--rank=5", "--local_rank 1 --rank 5 --node_rank 2"]
)
def test_the_rank_of_a_command_line_counts(argument: str) -> None:
    text = PY_SPY.replace("--epochs 3", argument)
    (one,) = PySpyReader().read(raw(text))
    assert one.rank == 5


@pytest.mark.parametrize(
    "path", ["a.txt", "4711.txt", "local_rank_3.txt", "attempt_0/3/stack.txt"]
)
def test_a_rank_is_not_guessed(path: str) -> None:
    text = PY_SPY.replace("--epochs 3", "--local_rank 1")
    where = "which rank process 4711 is, which is at data.py:77 in .*: put rank_N"
    with pytest.raises(UnreadableError, match=where):
        PySpyReader().read(raw(text, path))


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("stack_rank3", 3),
        ("Rank-12.txt", 12),
        ("rank7/py-spy.txt", 7),
        ("rank_1_rank_2", None),
        ("frank_3", None),
    ],
)
def test_the_rank_of_a_name(path: str, rank: int | None) -> None:
    assert rank_in_name(path) == rank


def test_py_spy_json() -> None:
    frames = [
        ("wait", "/usr/lib/python3.11/threading.py", 331),
        ("next_batch", "/job/data.py", 77),
        ("<module>", "/job/queue.py", 120),
    ]
    threads = [
        {
            "pid": 9,
            "os_thread_id": 9,
            "thread_name": name,
            "frames": [
                {"name": function, "filename": file, "line": line}
                for function, file, line in frames
            ],
            "process_info": None,
        }
        for name in ("worker", "MainThread")
    ]
    text = json.dumps([*threads, None, {"pid": "x"}, {"pid": 9, "frames": 3}])
    assert PySpyReader().recognises(raw(text))
    (one,) = PySpyReader().read(raw(text))
    assert (str(one.location), one.called) == ("data.py:77", "wait of threading.py")
    with pytest.raises(UnreadableError, match="JSON cannot be read"):
        PySpyReader().read(raw(text[:-9]))


def test_faulthandler() -> None:
    assert FaulthandlerReader().recognises(raw(FAULTHANDLER))
    (one,) = FaulthandlerReader().read(raw(FAULTHANDLER))
    assert str(one.location) == "train.py:88"
    assert one.called == "all_reduce of torch.distributed"


def test_the_last_dump_of_a_file_counts() -> None:
    again = FAULTHANDLER.replace("line 88", "line 90")
    (one,) = FaulthandlerReader().read(raw(FAULTHANDLER + "\nsaid\n" + again))
    assert str(one.location) == "train.py:90"


def test_a_dump_that_leaves_out_threads_has_no_main_thread() -> None:
    assert FaulthandlerReader().read(raw(FAULTHANDLER + "...\n")) == []


def test_a_main_thread_that_waits_for_the_end_of_another() -> None:
    """The line is that thread's, if one alone runs code of the user."""
    waits = (
        'Thread 1 (idle): "MainThread"\n    wait (threading.py:331)\n'
        "    Thread.join (threading.py:1119)\n    <module> (train.py:120)\n"
    )
    trains = 'Thread 2 (idle): "Thread-1"\n    step (data.py:77)\n'
    (one,) = PySpyReader().read(raw(f"{trains}{waits}"))
    assert str(one.location) == "data.py:77"
    other = f"{trains}{waits}".replace("join", "x")
    for text in waits, f"{trains}{trains}{waits}", other:
        (one,) = PySpyReader().read(raw(text))
        assert str(one.location) == "train.py:120"
    pooled = waits.replace("Thread.join (threading", "result (concurrent/futures/a")
    (one,) = PySpyReader().read(raw(f"{trains}{pooled}"))
    assert str(one.location) == "data.py:77"


def test_a_main_thread_that_is_through_its_program_has_left_it() -> None:
    end = 'Thread 1 (idle): "MainThread"\n    _shutdown (threading.py:1583)\n'
    (one,) = PySpyReader().read(raw(f'Thread 2 (idle): "T"\n    step (a.py:7)\n{end}'))
    assert (one.location, one.has_left) == (None, True)
    (one,) = PySpyReader().read(raw(PY_SPY))
    assert one.has_left is None


def test_a_rank_that_somebody_wrote_above_its_stack() -> None:
    (one,) = FaulthandlerReader().read(raw("RANK=6\n" + FAULTHANDLER, "stack.txt"))
    assert one.rank == 6


def test_the_debug_servers_file_of_all_ranks() -> None:
    text = (
        "PARTIAL DATA: 2/3 workers responded\n  Rank 2: timed out\n\n"
        f"=== Rank 0: http://h:1/handler/dump_traceback? ===\n{FAULTHANDLER}\n"
        "=== Rank 2: http://h:3/handler/dump_traceback? ===\nError: 408\n"
        "=== Rank 1: http://h:2/handler/dump_traceback? ===\n"
        f"{FAULTHANDLER.replace('line 88', 'line 90')}"
    )
    found = FaulthandlerReader().read(raw(text, "stacks_20261125_081200.txt"))
    lines = {one.rank: str(one.location) for one in found}
    assert lines == {0: "train.py:88", 1: "train.py:90"}
    text = text.replace(FAULTHANDLER, PY_SPY)
    found = PySpyReader().read(raw(text, "pyspy_dump_20261125_081200.txt"))
    assert {one.rank: one.process for one in found}[0] == "pid 4711"


def test_without_a_line_of_the_user() -> None:
    text = FAULTHANDLER.replace("/job/", "/opt/env/lib/python3.12/site-packages/own/")
    (one,) = FaulthandlerReader().read(raw(text))
    assert str(one.location) == "distributed_c10d.py:2810"


def test_what_python_itself_dumps(tmp_path: Path) -> None:
    path = tmp_path / "rank_2"
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with path.open("w") as file:
            here = sys._getframe().f_lineno + 1
            faulthandler.dump_traceback(file)
    finally:
        done.set()
        thread.join()
    (one,) = FaulthandlerReader().read(RawFile(str(path), path.read_bytes()))
    assert one.location is not None
    # The tests' own threads: the main one may be in a library, but for this line.
    assert (one.rank, one.location.line) == (2, here)


@pytest.mark.parametrize("cut", range(0, len(FAULTHANDLER), 7))
def test_a_file_that_was_cut(cut: int) -> None:
    for text in (FAULTHANDLER[:cut], PY_SPY[:cut], FAULTHANDLER[cut:]):
        for reader in (FaulthandlerReader(), PySpyReader()):
            if reader.recognises(raw(text)):
                reader.read(raw(text))


def test_bytes_that_are_no_text() -> None:
    data = b"\xff\xfe\n" + FAULTHANDLER.replace("step", "st\udcffep").encode(
        "utf-8", "surrogateescape"
    )
    (one,) = FaulthandlerReader().read(RawFile("rank_1", data))
    assert one.location is not None
    assert one.location.function == "st\ufffdep"
