"""The line of an op: that of the user's own code, not of a library between."""

from __future__ import annotations

import resource
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rankscope.backends.torch_watch.frames import calling_frames, note_submitters
from rankscope.backends.work.flight_recorder import _user_places, user_frame
from rankscope.backends.work.user_code import frame_at, is_installed

PACKAGES = sysconfig.get_path("purelib")


def function_of(module: str, file: str) -> Callable[[Callable[[], Any]], Any]:
    """Return a function of `module` that calls its argument, in line 2."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile("def call(inner):\n    return inner()\n", file, "exec"), names)
    call: Callable[[Callable[[], Any]], Any] = names["call"]
    return call


GATHER = function_of("accelerate.utils", f"{PACKAGES}/accelerate/utils.py")
TORCH = function_of("torch.distributed.c10d", f"{PACKAGES}/torch/distributed/c10d.py")
MINE = function_of("train", "/home/me/train.py")
POOL = function_of("threading", f"{sysconfig.get_path('stdlib')}/threading.py")


def test_what_is_installed() -> None:
    assert is_installed(f"{PACKAGES}/torch/__init__.py")
    assert is_installed(f"{sysconfig.get_path('stdlib')}/threading.py")
    assert is_installed("/opt/other/dist-packages/x.py")
    assert is_installed("<frozen importlib._bootstrap>")
    assert not is_installed("/home/me/train.py")
    assert not is_installed("<ipython-input-3-0a1b2c>")


def test_it_is_known_where_no_descriptor_is_left() -> None:
    """Over MPI nothing else of an op needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert not is_installed.__wrapped__("/home/me/another.py")
        assert user_frame()[0] == __file__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_line_of_an_op_is_the_users() -> None:
    # The lambdas of this file are the user's code, too: the innermost one.
    assert MINE(lambda: GATHER(lambda: TORCH(user_frame)))[0] == __file__
    assert MINE(lambda: GATHER(lambda: TORCH(calling_frames)))[0][0] == __file__


def test_a_library_is_passed_over() -> None:
    assert MINE(_direct(GATHER, user_frame)) == ("/home/me/train.py", 2, "call")
    assert MINE(_direct(GATHER, _direct(TORCH, calling_frames)))[0] == (
        *("/home/me/train.py", 2, "call"),
    )


def test_a_helper_has_its_callers() -> None:
    """Libraries between them are passed over, and what is no function has none."""
    program: dict[str, Any] = {"__name__": "__main__", "mine": MINE, "gather": GATHER}
    program["frames"] = _direct(GATHER, _direct(TORCH, calling_frames))
    program["recorded"] = _direct(GATHER, _frames_of_record)
    code = (
        "def step():\n"
        "    return gather(lambda: (mine(frames), mine(recorded)))\n"
        "found = step()\n"
        "plain = frames(), recorded()\n"
    )
    exec(compile(code, "/home/me/main.py", "exec"), program)
    of_torch, ours = program["found"]
    file = "/home/me/main.py"
    assert of_torch == (
        ("/home/me/train.py", 2, "call"),
        (file, 2, "<lambda>"),
        (file, 2, "step"),
        (file, 3, "<module>"),
    )
    assert ours == of_torch[:2]
    assert program["plain"] == (((file, 4, "<module>"),),) * 2


def _frames_of_record() -> Any:
    return tuple(frame_at(*place) for place in _user_places(2))


def _direct(call: Callable[..., Any], inner: Callable[..., Any]) -> Callable[[], Any]:
    """Return ``call(inner)`` as a function without a frame of its own."""
    return partial(call, inner)


def test_a_thread_of_torch_is_where_torch_began_it() -> None:
    """All are libraries': as in a pool that saves a checkpoint."""
    save = function_of("torch.checkpoint", f"{PACKAGES}/torch/checkpoint.py")
    found: list[Any] = []
    inner = _direct(POOL, _direct(save, _direct(TORCH, _noting(found))))
    thread = threading.Thread(target=inner)
    thread.start()
    thread.join()
    assert found == [((f"{PACKAGES}/torch/checkpoint.py", 2, "call"),)]


def test_what_torch_gave_to_a_pool_has_the_line_of_who_called_torch() -> None:
    save = function_of("torch.checkpoint", f"{PACKAGES}/torch/checkpoint.py")
    found: list[Any] = []
    task = _direct(POOL, _direct(save, _direct(TORCH, _noting(found))))
    undo = note_submitters()
    try:
        with ThreadPoolExecutor(1) as pool:
            MINE(_direct(TORCH, partial(pool.submit, task))).result()
            # The same thread, for nobody who called torch.
            pool.submit(task).result()
    finally:
        undo()
    called, other = found
    assert called[0] == ("/home/me/train.py", 2, "call")
    assert other == ((f"{PACKAGES}/torch/checkpoint.py", 2, "call"),)


def _noting(found: list[Any]) -> Callable[[], None]:
    """Return a function of torch's that notes the calling frame."""
    names: dict[str, Any] = {"__name__": "torch.noting", "found": found}
    names["calling_frames"] = calling_frames
    code = "def note():\n    found.append(calling_frames())\n"
    exec(compile(code, f"{PACKAGES}/torch/noting.py", "exec"), names)
    note: Callable[[], None] = names["note"]
    return note
