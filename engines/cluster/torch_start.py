"""Starting ``torch.distributed`` on ranks: import, variables, default group."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterStartError
from ..launch.preconditions import INSTALL_TORCH
from ..observe.rank_slots import note_gpus
from ..wire import ipyparallel_private as private
from ..wire.ipyparallel_private import call_of
from ..wire.requests import TorchAnswer
from .registry import EngineRegistry

__all__ = ["init_group", "load"]

#: Seconds between two looks for dead ranks.
_POLL = 0.2

Progress = Callable[[str], None]


def load(
    registry: EngineRegistry, ranks: Sequence[int], deadline: float, report: Progress
) -> dict[int, TorchAnswer]:
    """Have the main threads of `ranks` import torch; return what they answer."""
    report("importing torch")
    hosting = _store_host(registry, ranks)
    host = None if hosting is None else registry.address_of(hosting)
    answers: dict[int, TorchAnswer] = {
        rank: json.loads(value)
        for rank, value in _evaluate(
            registry,
            "load",
            {rank: (host if rank == hosting else None,) for rank in ranks},
            "importing torch",
            deadline,
        ).items()
    }
    _check(answers)
    advice = note_gpus(registry.slots, answers)
    registry.advice += [line for line in advice if line not in registry.advice]
    if hosting is not None:
        registry.torch_store = hosting, answers[hosting]["port"]
    return answers


def init_group(
    registry: EngineRegistry,
    answers: Mapping[int, TorchAnswer],
    deadline: float,
    report: Progress,
) -> None:
    """Make torch's default group on the ranks that gave `answers` to `load`.

    Where they are fresh ranks among others, it is left to the rebuild of the groups,
    unless a group of Rankscope does its ops: that group they have.
    """
    options = registry.torch
    assert options is not None
    size = len(registry.slots)
    if len(answers) < size and not options.over_rankscope:
        return
    report("making torch's default group")
    assert registry.torch_store is not None
    hosting, port = registry.torch_store
    host = registry.address_of(hosting)
    with_gpus = all(answer["gpus"] for answer in answers.values())
    backend = options.backend or ("cpu:gloo,cuda:nccl" if with_gpus else "gloo")
    _evaluate(
        registry,
        "init_group",
        {rank: (backend, registry.timeout, host, port, rank, size) for rank in answers},
        f"making torch's default group ({backend})",
        deadline,
    )


def _store_host(registry: EngineRegistry, ranks: Sequence[int]) -> int | None:
    """Return which of `ranks` has to open a store for torch; ``None``: none of them."""
    if len(ranks) == len(registry.slots):
        return ranks[0]
    assert registry.torch is not None
    if not registry.torch.over_rankscope:
        return None
    # The host is fresh, or another notebook knows it.
    known = registry.torch_store
    return ranks[0] if known is None or known[0] in ranks else None


def _check(answers: Mapping[int, TorchAnswer]) -> None:
    for rank, answer in answers.items():
        if answer["missing"]:
            raise ClusterStartError(f"rank {rank}: {answer['missing']}")
    versions = {answer["version"] for answer in answers.values()}
    if len(versions) > 1:
        listed = ", ".join(f"rank {r}: {a['version']}" for r, a in answers.items())
        raise ClusterStartError(
            f"the ranks have different versions of torch ({listed}): install the same "
            "version on all hosts"
        )


def _evaluate(
    registry: EngineRegistry,
    function: str,
    calls: Mapping[int, tuple[Any, ...]],
    step: str,
    deadline: float,
) -> dict[int, Any]:
    """Return rank → the value of its call of `engines.agent.torch_ranks.FUNCTION`."""
    uuids = registry.uuids(calls)
    waiting = {
        private.evaluate(
            registry.client, uuids[rank], call_of("torch_ranks", function, *arguments)
        ): rank
        for rank, arguments in calls.items()
        if rank in uuids
    }
    values: dict[int, Any] = {}
    while len(values) < len(calls):
        for slot in registry.slots:
            if slot.rank in calls and slot.death is not None:
                raise ClusterStartError(f"{step}: {slot.death}")
        left = deadline - time.monotonic()
        if left <= 0:
            silent = sorted(calls.keys() - values.keys())
            raise ClusterStartError(f"{step}: {name_ranks(silent)} not done in time")
        done, _ = concurrent.futures.wait(
            waiting, min(left, _POLL), concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
            rank = waiting.pop(future)
            reply = future.result()
            if isinstance(reply, Exception):
                raise ClusterStartError(f"{step}: rank {rank}: {reply}")
            try:
                values[rank] = private.evaluated(reply)
            except private.EvaluationError as error:
                missing = re.match("ModuleNotFoundError.*torch", str(error))
                remedy = f"; {INSTALL_TORCH}, on every host" if missing else ""
                raise ClusterStartError(
                    f"{step}: rank {rank}: {error}{remedy}"
                ) from None
    return values
