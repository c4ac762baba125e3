"""The rank slots of a cluster: the engine of each rank, and its last summary."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.backends.observe.records import Record
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.stores.process_end import describe_exit_code

from ..errors import ClusterError
from ..status import NOTHING_REPORTED, RankStatus, Summary
from ..wire.gpu_environment import Gpus
from ..wire.requests import GpuAnswer, TorchAnswer
from ..wire.torch_environment import TorchOptions, torchrun_variables

__all__ = ["RankSlot", "check_ranks", "describe_exit", "environment", "note_gpus"]

#: Seconds without a summary after which a rank is shown as unreachable.
SILENCE = 5.0

#: What of a summary does not hold any more once the rank is dead. The last line that it
#: was at does.
_DEAD: dict[str, Any] = {
    "busy": False,
    "cell": None,
    "busy_for": None,
    "line_for": None,
    "joining_for": None,
    "memory": None,
    "cpu": None,
    "gpu_memory": None,
}


@dataclass
class RankSlot:
    """A rank and the engine that has it now."""

    rank: int
    #: Negative where there is no engine.
    engine_id: int = -1
    uuid: str = ""
    pid: int = -1
    host: str = "?"
    address: str = ""
    #: A port that was free on the engine's host, for MASTER_PORT.
    port: int = 0
    #: Why this process ends the engine, if it does: a sentence that names the rank.
    end_reason: str | None = None
    #: Why the rank is dead: a sentence that names it. ``None`` for a living rank.
    death: str | None = None
    #: The same without the rank, for messages that name it.
    death_cause: str | None = None
    #: The exit code of its process; ``None``: it has ended none, or is not known.
    exit_code: int | None = None
    #: The records that it sent before a library ended it.
    last_records: Sequence[Record] = ()
    #: What ranks issued unlike, because of which a library ended it.
    crash_causes: tuple[Verdict, ...] = ()
    #: Whether those are being looked for.
    unexplained: bool = False
    #: UUID of its GPU, and whether it may share it; empty: none, or not known.
    gpu_uuid: str = ""
    may_share_gpu: bool = False
    summary: Summary = NOTHING_REPORTED
    #: Why the last summary cannot be read; ``None`` where it can.
    unreadable: str | None = None
    #: When the summary arrived, ``time.monotonic()``.
    summary_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether no death of the engine was reported."""
        return self.death is None

    @property
    def reason(self) -> str | None:
        """How the rank died, and why, where that was found."""
        return None if self.death is None else f"{self.death}{self._diagnosis}"

    @property
    def reason_without_rank(self) -> str:
        """The same for messages that name the rank."""
        return f"{self.death_cause}{self._diagnosis}"

    @property
    def culprits(self) -> list[int]:
        """The ranks whose fault its death is, as `reason` has it: else its own."""
        found = {rank for one in self.crash_causes for rank in one.culprits}
        return sorted(found or {self.rank})

    @property
    def _diagnosis(self) -> str:
        why = "; ".join(dict.fromkeys(one.text for one in self.crash_causes))
        return f"; diagnosis: {why}" if why else ""

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def silent_for(self) -> float | None:
        """The seconds since the last summary arrived; ``None``: there was none."""
        return None if self.summary_at is None else time.monotonic() - self.summary_at

    def is_silent(self, seconds: float) -> bool:
        """Whether no summary has arrived within so many seconds."""
        silent = self.silent_for
        return silent is None or silent > seconds

    def exit_cause(self, exit_code: int | None) -> str:
        """Return the cause of death of an engine that ended (``None``: unknown)."""
        how = describe_exit(exit_code)
        if exit_code is None and not self.is_here:
            # Nobody has seen its process end: the controller may have given it up.
            silent = self.silent_for or 0.0
            last = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
            how = (
                f"not heard of for {silent:.0f} s (last at {last}): its host does not "
                "answer, or its process has ended"
                if silent > SILENCE
                else f"{how}, or its controller had no heartbeat of it"
            )
        return f"{how} (engine {self.engine_id}, pid {self.pid} on {self.host})"

    def record(self, summary: Summary | ValueError) -> None:
        """Note a summary that arrives now, or why one cannot be read."""
        self.summary_at = time.monotonic()
        if isinstance(summary, Summary):
            self.summary, self.unreadable = summary, None
        else:
            self.summary = Summary(number=self.summary.number)
            self.unreadable = f"its status cannot be read ({summary})"

    def status(self, now: float) -> RankStatus:
        """Return the status of the rank at `now` (``time.monotonic()``)."""
        age = None if self.summary_at is None else now - self.summary_at
        reported = vars(self.summary)
        if not self.alive:
            state = "dead"
            # Such a rank runs no cell, whatever its last summary was.
            reported = {**reported, **_DEAD}
        elif age is None or age > SILENCE:
            state = "unreachable"
        else:
            state = "busy" if self.summary.busy else "idle"
        return RankStatus(
            **{**reported, "pid": self.pid, "host": self.host},
            rank=self.rank,
            engine_id=None if self.engine_id < 0 else self.engine_id,
            state=state,
            reason=self.reason or self.unreadable,
            death=self.death,
            crash_causes=self.crash_causes,
            heartbeat_age=age,
        )


def describe_exit(exit_code: int | None) -> str:
    """Return ``killed by SIGKILL`` and the like (``None``: unknown)."""
    if exit_code is None:
        return "its process ended"
    return describe_exit_code(exit_code)


def note_gpus(
    slots: Sequence[RankSlot], answers: Mapping[int, GpuAnswer | TorchAnswer]
) -> list[str]:
    """Note the ranks' GPUs, by UUID: each rank may see one GPU alone; return advice."""
    for rank, answer in answers.items():
        # A rank of torch has cupy's answer before; torch alone may know the GPU.
        slots[rank].gpu_uuid = answer["uuid"] or slots[rank].gpu_uuid
        slots[rank].may_share_gpu = answer["may_share"]
    living = [slot for slot in slots if slot.alive and slot.gpu_uuid]
    uses = Counter(slot.gpu_uuid for slot in living)
    sharing = [
        slot.rank
        for slot in living
        if uses[slot.gpu_uuid] > 1 and not slot.may_share_gpu
    ]
    if not sharing:
        return []
    return [
        f"{name_ranks(sharing)} have to share GPUs, which NCCL refuses; "
        "--share-gpu allows it, slowly, for learning"
    ]


def environment(
    slots: Sequence[RankSlot], gpus: Gpus, torch: TorchOptions | None = None
) -> dict[int, dict[str, str]]:
    """Return rank → the variables that other frameworks read, such as ``RANK``."""
    hosts: dict[str, list[int]] = {}
    for slot in slots:
        hosts.setdefault(slot.host, []).append(slot.rank)
    first = slots[0]
    found = {
        slot.rank: {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(len(slots)),
            "LOCAL_RANK": str(hosts[slot.host].index(slot.rank)),
            "LOCAL_WORLD_SIZE": str(len(hosts[slot.host])),
            "GROUP_RANK": str([*hosts].index(slot.host)),
            "MASTER_ADDR": "127.0.0.1" if len(hosts) == 1 else first.address,
            "MASTER_PORT": str(first.port),
            **gpus.environment(slot.rank),
        }
        for slot in slots
    }
    if torch is not None:
        for slot in slots:
            env = found[slot.rank]
            env.update(torchrun_variables(torch, env, len(hosts)))
    return found


def check_ranks(ranks: Iterable[int] | int | None, size: int) -> list[int]:
    """Return `ranks` (``None``: all) as a sorted list without repeats."""
    if ranks is None:
        return list(range(size))
    chosen = [ranks] if isinstance(ranks, int) else list(ranks)
    wrong = [rank for rank in chosen if not _is_rank(rank, size)]
    if wrong:
        raise ClusterError(
            f"there is no rank {wrong[0]!r}; this cluster has {name_ranks(range(size))}"
        )
    if not chosen:
        raise ClusterError("ranks is empty: name at least one rank, or None for all")
    return sorted(set(chosen))


def _is_rank(rank: object, size: int) -> bool:
    return isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < size
