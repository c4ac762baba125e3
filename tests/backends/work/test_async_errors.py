"""What a script on a GPU hears that went on with garbage; see `async_errors`.

The GPU is the simulation's, each script a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment

pytestmark = pytest.mark.processes


HANGS = """
import rankscope as dist
from tests.backends.gpu_simulation import Simulation, use_gpu_api

simulation = Simulation()
use_gpu_api(lambda: simulation.api)
dist.init_process_group("cuda:nccl", timeout=60)
x = simulation.array([1.0, 2.0], 0)
dist.all_reduce(x)
simulation.synchronize(0)
simulation.hangs.add(0)
# Not before: on a busy machine the first op may take as long.
dist.group.WORLD.set_timeout(0.5)
dist.all_reduce(x)
simulation.synchronize(0)
print("came back")
"""


def run(script: str, folder: Path) -> tuple[int, str, str]:
    script = script.replace(
        "init_process_group(",
        f"init_process_group(init_method='file://{folder / 'store'}', backend=",
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(RANK="0", WORLD_SIZE="1"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""])
def test_a_script_that_went_on_with_garbage_fails(tmp_path: Path, end: str) -> None:
    code, out, err = run(HANGS + end, tmp_path)
    # Python's own, of an exception and of an exit that did not go well.
    assert code == (1 if end else 120)
    assert "came back" in out
    assert "all_reduce #2 of group 'default' on rank 0" in err
    assert "was not done 0.5 s after it began" in err
    assert ("results of this script are garbage" in err) == (not end)


def test_a_script_that_fails_skips_no_exit_handler(tmp_path: Path) -> None:
    first = """
import atexit, sys
atexit.register(lambda: print("last words", flush=True))
hook, stdout = sys.unraisablehook, sys.stdout
atexit.register(
    lambda: print(sys.unraisablehook is hook and sys.stdout is stdout, flush=True)
)
"""
    code, out, err = run(first + HANGS, tmp_path)
    assert code == 120
    assert out.split() == ["came", "back", "True", "last", "words"]
    assert "Exception ignored" not in err


@pytest.mark.parametrize(
    "hears",
    [
        "dist.all_reduce(x)",
        "work.wait()",
        "work.synchronize()",
    ],
)
def test_a_script_that_heard_of_it_may_go_on(tmp_path: Path, hears: str) -> None:
    script = HANGS.replace(
        "dist.all_reduce(x)\nsimulation.synchronize(0)\nprint",
        "work = dist.all_reduce(x, async_op=True)\n"
        "work.wait()\nsimulation.synchronize(0)\nprint",
    )
    told = f"""
from rankscope.backends.conformance.waiting import until
until(lambda: not dist.group.WORLD.status.in_flight)
try:
    {hears}
except dist.DistError as error:
    print("heard", type(error).__name__)
simulation.hangs.clear()
dist.destroy_process_group()
"""
    code, out, err = run(script + told, tmp_path)
    assert (code, err) == (0, "")
    assert "heard Dist" in out


def test_a_destroy_that_is_interrupted_frees_what_there_is(tmp_path: Path) -> None:
    script = HANGS.replace("set_timeout(0.5)", "set_timeout(60)").replace(
        "simulation.synchronize(0)\nprint", "print"
    )
    interrupted = """
import _thread, threading
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    dist.destroy_process_group()
except KeyboardInterrupt:
    print("interrupted")
assert ("abort", 0) in simulation.calls
assert not dist.is_initialized()
"""
    code, out, err = run(script + interrupted, tmp_path)
    assert "interrupted" in out, err
    assert "Traceback" not in err
    assert code == 120


def test_a_rebuild_is_an_answer(tmp_path: Path) -> None:
    recovers = """
dist.rebuild_process_group()
simulation.hangs.clear()
dist.all_reduce(x)
simulation.synchronize(0)
dist.destroy_process_group()
"""
    code, _, err = run(HANGS + recovers, tmp_path)
    assert (code, err) == (0, "")
