"""Waiting for engines to register, and what the logs say where they do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import ipyparallel
from ipyparallel.cluster.launcher import SSHEngineSetLauncher

from ..errors import ClusterStartError, plain
from ..wire import ipyparallel_private as private

__all__ = ["last_log_lines", "wait_for_engines"]

#: Lines of a log that go into an error message.
LOG_LINES = 20


def wait_for_engines(
    cluster: ipyparallel.Cluster,
    client: ipyparallel.Client,
    n: int,
    started: str,
    deadline: float,
    progress: Callable[[str], None],
    before: Iterable[int] = (),
) -> None:
    """Wait until the `n` engines of the set `started` are registered."""
    known = set(before)
    here: set[int] = set()
    registered = threading.Event()
    cancel = private.on_notification(client, lambda event: registered.set())
    try:
        while True:
            registered.clear()
            now_here = set(client.ids) - known
            if now_here != here:
                here = now_here
                progress(f"{len(here)} of {n} engines are registered")
            if len(here) >= n:
                return
            _raise_if_ended(cluster, n, len(here), started)
            if time.monotonic() > deadline:
                raise ClusterStartError(
                    f"only {len(here)} of {n} engines came up in time"
                    f"{last_log_lines(cluster, started)}"
                )
            if not registered.wait(0.2):
                private.update_engines(client, registered.set)
    finally:
        cancel()


def _raise_if_ended(
    cluster: ipyparallel.Cluster, n: int, here: int, started: str
) -> None:
    engine_set = cluster.engines[started]
    ended = (engine_set.stop_data or {}).get("engines")
    if engine_set.state == "after" or ended:
        why = {one["why"]: None for one in (ended or {}).values() if one.get("why")}
        raise ClusterStartError(
            f"engines ended while they started ({here} of {n} came up)"
            f"{''.join(f': {one}' for one in why)}{last_log_lines(cluster, started)}"
        )
    if isinstance(engine_set, SSHEngineSetLauncher) and not engine_set.engines:
        raise ClusterStartError(
            "SSHEngineSetLauncher has started no engine, since its configuration names "
            "no host: --hosts a:4,b:4 starts ranks by ssh, and needs no configuration"
        )
    controller = cluster.controller
    if controller is not None and controller.state == "after":
        raise ClusterStartError(
            f"the controller ended: {controller.stop_data}{last_log_lines(cluster)}"
        )


def last_log_lines(cluster: ipyparallel.Cluster, started: str | None = None) -> str:
    """Return the last lines that the controller and an engine set logged."""
    found = []
    if cluster.controller is not None:
        found.append(("controller", cluster.controller.get_output()))
    engine_set = cluster.engines.get(started)
    if engine_set is not None:
        # Of the engines that ended, if any: their logs have the reason.
        outputs = dict(getattr(engine_set, "outputs", {})) or {
            number: one.get_output()
            for number, one in getattr(engine_set, "launchers", {}).items()
        }
        if not outputs and engine_set.output_file:
            outputs["set"] = engine_set.get_output()
        found += [(f"engine {number}", text) for number, text in outputs.items()]
    words = ""
    for name, text in found:
        lines = plain(text or "").strip().splitlines()[-LOG_LINES:]
        if lines:
            words += f"\n--- {name}, last lines of its log\n" + "\n".join(lines)
    return words
