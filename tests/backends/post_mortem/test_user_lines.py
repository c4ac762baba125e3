"""Whose a line is: stacks and dumps judge the path of a file alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.backends.post_mortem import user_frames
from rankscope.backends.post_mortem.source_lines import users_line
from rankscope.backends.post_mortem.user_frames import Frame, position

USER = "/home/me/train.py"


@pytest.mark.parametrize(
    "library",
    [
        "/env/lib/python3.12/site-packages/accelerate/state.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.12/contextlib.py",
        "/usr/lib64/python3.12/contextlib.py",
        "/src/pytorch/torch/distributed/c10d_logger.py",
        "/src/pytorch/aten/src/ATen/core.cpp",
    ],
)
def test_a_librarys_line_is_not_the_users(library: str) -> None:
    line, _ = position([Frame(library, 81, "inner"), Frame(USER, 7, "step")])
    assert str(line) == "train.py:7"
    frames = [
        {"filename": library, "line": 81, "name": "inner"},
        {"filename": USER, "line": 7, "name": "step"},
    ]
    assert str(users_line(frames)) == "train.py:7"


@pytest.mark.parametrize("helper", ["exchange", "<module>"])
def test_the_users_line_has_those_that_called_its_function(helper: str) -> None:
    library = "/env/lib/python3.12/site-packages/torch/nn/modules/module.py"
    stack = [
        (library, 81, "_call_impl"),
        (USER, 7, helper),
        (library, 81, "_call_impl"),
    ]
    stack += [(USER, 21, "step"), (USER, 30, "<module>")]
    frames = [{"filename": f, "line": n, "name": name} for f, n, name in stack]
    found = users_line(frames)
    assert found is not None
    expected = [] if helper == "<module>" else ["train.py:21", "train.py:30"]
    assert [str(one) for one in found.callers] == expected
    line, _ = position([Frame(*one) for one in stack])
    assert line == found


def test_a_rank_that_waits_for_its_report_is_at_the_op() -> None:
    frames = [
        Frame("/usr/lib/python3.11/threading.py", 331, "wait"),
        Frame("/work/backends/hang_report/reporter.py", 123, "report"),
        Frame("/work/backends/torch_watch/calls.py", 230, "wait"),
        Frame(
            "/x/site-packages/torch/distributed/distributed_c10d.py", 99, "all_reduce"
        ),
        Frame("/x/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
        Frame("/job/train.py", 88, "step", outermost=True),
    ]
    line, called = position(frames)
    assert str(line) == "train.py:88"
    assert called == "all_reduce of torch.distributed"


def test_a_rank_whose_script_an_exception_has_ended_is_at_no_line() -> None:
    torch = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    assert position([Frame(torch, 1928, "_distributed_excepthook")]) == (None, None)


def test_an_op_whose_line_is_not_known_has_none() -> None:
    """Where C++ has issued an op that was over at once, our records have no file."""
    assert users_line([{"filename": "", "line": 0, "name": " ()"}]) is None


def test_a_line_of_our_checkout_is_not_the_users() -> None:
    """A log and py-spy have its paths; a report has those of the package."""
    root = Path(user_frames.__file__).parents[2]
    frames = [
        Frame("/lib/python3.11/selectors.py", 468, "EpollSelector.select"),
        Frame(f"{root}/backends/messaging/transport.py", 190, "run"),
        Frame(f"{root}/backends/collectives/reductions.py", 19, "all_reduce"),
        Frame("/job/train.py", 7, "train"),
    ]
    line, called = position(frames)
    assert (str(line), called) == ("train.py:7", "all_reduce of rankscope")
    assert position(frames[:3]) == (None, None)


def test_a_rank_that_is_in_the_debugger() -> None:
    calls = [("pdb", "interaction"), ("bdb", "Bdb.trace_dispatch")]
    frames = [Frame(f"/lib/python3.11/{name}.py", 9, call) for name, call in calls]
    line, called = position([*frames, Frame("/job/train.py", 7, "train")])
    assert (str(line), called) == ("train.py:7", "pdb, the debugger")


def test_a_rank_that_makes_a_group_is_at_the_users_call() -> None:
    frames = [
        Frame("/work/backends/torch_watch/unfinished.py", 160, "make"),
        Frame("/work/backends/torch_watch/creation.py", 124, "make"),
        Frame("/x/site-packages/torch/distributed/c10d_logger.py", 95, "wrapper"),
        Frame("/job/train.py", 9, "<module>", outermost=True),
    ]
    assert str(position(frames)[0]) == "train.py:9"


@pytest.mark.parametrize("folder", ["torch_watch", "hang_report"])
def test_a_program_in_a_folder_of_our_name_is_the_users(folder: str) -> None:
    file = f"/job/backends/{folder}/train.py"
    frames = [Frame(file, 7, "step"), Frame(USER, 9, "<module>", outermost=True)]
    assert str(position(frames)[0]) == "train.py:7"
    assert position(frames)[0].file == file
