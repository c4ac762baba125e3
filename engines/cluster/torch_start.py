"""Starting ``torch.distributed`` on ranks: import, variables, default group."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope.backends.install import pip_install
from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterStartError
from ..wire import ipyparallel_private as private
from ..wire.engine_code import call_of
from ..wire.requests import TorchAnswer
from .rank_slots import note_gpus
from .registry import EngineRegistry

__all__ = ["INSTALL", "start"]

#: The remedy where torch is missing.
INSTALL = pip_install("torch")
#: Seconds between two looks for dead ranks.
_POLL = 0.2

Progress = Callable[[str], None]


def start(
    registry: EngineRegistry,
    ranks: Sequence[int],
    deadline: float,
    report: Progress,
) -> None:
    """Have the main threads of `ranks` import torch, and make its default group.

    The group is made where `ranks` are all ranks; fresh ranks among others get theirs
    when the groups are rebuilt.

    Raises `ClusterStartError` where torch is missing, or a rank is dead, or the group
    is not there before `deadline`; the error of the first rank that failed is part of
    the message.
    """
    options = registry.torch
    assert options is not None
    report("importing torch")
    everyone = len(ranks) == len(registry.slots)
    host = registry.address_of(0)
    hosting = ranks[0] if everyone else None
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
    if not everyone:
        return
    report("making torch's default group")
    with_gpus = all(answer["gpus"] for answer in answers.values())
    backend = options.backend or ("cpu:gloo,cuda:nccl" if with_gpus else "gloo")
    port = answers[ranks[0]]["port"]
    size = len(registry.slots)
    _evaluate(
        registry,
        "init_group",
        {rank: (backend, registry.timeout, host, port, rank, size) for rank in ranks},
        f"making torch's default group ({backend})",
        deadline,
    )


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
    """Return rank → the value of its call of `engines.agent.torch_ranks.FUNCTION`.

    `calls` has the arguments of each rank.
    """
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
                remedy = f"; {INSTALL}, on every host" if missing else ""
                raise ClusterStartError(
                    f"{step}: rank {rank}: {error}{remedy}"
                ) from None
    return values
