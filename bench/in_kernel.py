"""The measurements that need a notebook kernel; they run inside one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import ipyparallel as ipp
from IPython.core.getipython import get_ipython

from rankscope.magics import current_cluster

__all__ = ["empty_cells", "start_up"]

ENGINES = 4


def empty_cells(rounds: int, cells: int) -> None:
    """Print the seconds of empty `%%distributed` and `%%px` cells, by round."""
    shell: Any = get_ipython()
    shell.run_line_magic("load_ext", "rankscope")
    shell.run_line_magic("dist_init", f"-n {ENGINES}")
    # The very same engines, through ipyparallel's own magic.
    cluster = current_cluster()
    assert cluster is not None
    with ipp.Client(
        cluster_id=cluster.cluster_id, profile_dir=cluster.profile
    ) as client:
        client.wait_for_engines(ENGINES)
        client[:].activate()
        cases: dict[str, Callable[[], Any]] = {
            "distributed": lambda: shell.run_cell_magic("distributed", "", "pass"),
            "px": lambda: shell.run_cell_magic("px", "--block", "pass"),
        }
        times: dict[str, list[list[float]]] = {name: [] for name in cases}
        for case in cases.values():
            case()
        for _ in range(rounds):
            for name, case in cases.items():
                times[name].append([_seconds(case) for _ in range(cells)])
    shell.run_line_magic("dist_shutdown", "")
    _report(times)


def start_up(rounds: int) -> None:
    """Print the seconds from nothing to the first result on all engines, by round."""
    shell: Any = get_ipython()
    shell.run_line_magic("load_ext", "rankscope")

    def ours() -> None:
        shell.run_line_magic("dist_init", f"-n {ENGINES}")
        shell.run_cell_magic(
            "distributed", "", "x = np.ones(1000)\ndist.all_reduce(x)\n"
        )

    def bare() -> ipp.Cluster:
        cluster = ipp.Cluster(n=ENGINES)
        client = cluster.start_and_connect_sync()
        client[:].apply_sync(os.getpid)
        return cluster

    times: dict[str, list[list[float]]] = {"dist_init": [], "bare": []}
    for _ in range(rounds):
        times["dist_init"].append([_seconds(ours)])
        shell.run_line_magic("dist_shutdown", "")
        start = time.perf_counter()
        cluster = bare()
        times["bare"].append([time.perf_counter() - start])
        cluster.stop_cluster_sync()
    _report(times)


def _seconds(case: Callable[[], Any]) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def _report(times: dict[str, list[list[float]]]) -> None:
    print("TIMES " + json.dumps(times))
