"""One line of a torchrun log: whose it is, and what the watchdog of NCCL says in it.

In ``[rank13]:`` the rank is the world's; in ``[PG ID 5 PG GUID 5(tp) Rank 1]`` and in
``[Rank 1] Watchdog …`` it is the group's; ``[default3]:``, of torchrun's ``--tee``, has
a local rank. The forms are those of torch 2.3 to 2.13.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .user_frames import Frame

__all__ = [
    "OP_STACK",
    "GroupLine",
    "Source",
    "WorkLine",
    "function_of",
    "group_line",
    "host_in",
    "label_in",
    "op_frame",
    "split_line",
    "task_in",
    "work_line",
]

#: Characters in which the prefixes of a line stand, those of a launcher included.
_PREFIXES = 300
_ESCAPES = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_RANK = re.compile(r"\[rank(\d{1,6})\]: ?")
_TEE = re.compile(r"((?: *[^ ]+ ){0,3}?)\[([A-Za-z_][\w.-]*?)(\d{1,6})\]:")
_TASK = re.compile(r" {0,6}(\d{1,6}):(?: |$)")
_TIME = re.compile(r"\d\d:\d\d")
#: From here on a prefix tells of a message, not of who writes it.
_LABEL_ENDS = re.compile(
    r"(?:^| )\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|stdout|stderr)\b"
)

_GROUP = (
    r"\[PG (?:ID \d+ PG GUID )?(?P<id>[^\s()\]]+)(?:\((?P<name>[^\]]*?)\))? "
    r"Rank (?P<place>\d{1,6})\]"
)
_STATUS = re.compile(
    _GROUP
    + r".*?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18})(?: \(\w+\))?,? "
    r"(?:last started (?:NCCL )?work: (?P<started>-?\d{1,18})(?: \(\w+\))?,? )?"
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): "
    r"(\d{1,18})"
)
_INIT = re.compile(
    _GROUP + r".* initialization options: size: (?P<size>\d{1,6}), "
    r"global rank: (?P<rank>\d{1,6})"
)
_ANY_GROUP = re.compile(_GROUP)
_WORK = re.compile(
    r"\[Rank (\d{1,6})\] Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(\d{1,18}), OpType=(\w+)(?:, NumelIn=(\d{1,18}), NumelOut=(\d{1,18}))?"
    r"(?:, Timeout\(ms\)=(\d{1,18}))?\)"
)

_OP_FRAME = re.compile(r"#\d{1,4} (.*) from (.*):(\d{1,9})$")

#: The line before the stack of an op that timed out, of whose rank it is.
OP_STACK = "Stack trace of the failed collective:"

#: c10d's names of the types of ops → its functions.
_FUNCTIONS = {
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "RECVANYSOURCE": "recv",
}


class Source(NamedTuple):
    """Whose output a line is: as far as its prefixes tell."""

    #: The global rank.
    rank: int | None = None
    #: Role and local rank, as in ``default3``, after what tells hosts apart.
    local: str | None = None
    #: The task that ``srun --label`` has put before a line without the other two.
    task: int | None = None
    #: What the program itself has put before each line of a traceback.
    label: str = ""


class GroupLine(NamedTuple):
    """What a line says of one rank in one group; numbers below 0: none yet."""

    id: str
    #: ``default_pg``; empty in older versions, or where a group has no description.
    name: str
    #: The rank in the group, and its global rank, if the line has it.
    place: int
    rank: int | None = None
    size: int | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    #: The number of the op that timed out.
    failed: int | None = None

    @property
    def is_default(self) -> bool:
        """Whether it is the group of all ranks, whose places are the global ranks."""
        return self.name == "default_pg" or (self.id == "0" and not self.name)


class WorkLine(NamedTuple):
    """An op that timed out on one rank; its group is not in the line."""

    place: int
    seq: int
    op: str
    elements: tuple[int, int] | None
    timeout: float | None


def split_line(line: str) -> tuple[Source, str]:
    """Return whose line it is, and the line without prefixes and colours."""
    line = _ESCAPES.sub("", line.rstrip("\r\n"))
    # A bar of progress overwrites itself.
    line = line.rpartition("\r")[2]
    start = line[:_PREFIXES]
    found = _RANK.search(start)
    tee = _TEE.match(start)
    local = None
    # Other words in brackets are rather of the program where something is before them.
    if tee is not None and (tee[2] == "default" or not tee[1]) and tee[2] != "rank":
        local = f"{host_in(tee[1])}{tee[2]}{tee[3]}"
    if found is not None:
        return Source(int(found[1]), local), line[found.end() :]
    if tee is not None and local:
        return Source(None, local), line[tee.end() :]
    task = task_in(line)
    if task is not None:
        return Source(task=task), line.partition(": ")[2]
    return Source(), line


def task_in(line: str) -> int | None:
    """Return the task that ``srun --label`` has put before a line; None: no label."""
    found = _TASK.match(line)
    return None if found is None else int(found[1])


def label_in(prefix: str) -> tuple[str, re.Pattern[str]]:
    """Return whose lines a prefix marks, and what the others of them begin with.

    Each has a time of its own: ``(Worker_TP1 pid=7) ERROR 11-27 09:12:01 [core.py:7]``.
    """
    words = re.split(r"(\s+)", prefix)
    pattern = "".join(r"\S+" if _TIME.search(one) else re.escape(one) for one in words)
    return _LABEL_ENDS.split(host_in(prefix))[0].strip(" :|-"), re.compile(pattern)


def host_in(prefix: str) -> str:
    """Return what a launcher has put before a line, without times: ``1: ``."""
    return "".join(f"{one} " for one in prefix.split() if not _TIME.search(one))


def work_line(text: str) -> WorkLine | None:
    """Return what a line of the watchdog says of an op that timed out."""
    found = _WORK.search(text)
    if found is None:
        return None
    place, seq, op, count, result, timeout = found.groups()
    elements = None if count is None else (int(count), int(result))
    seconds = None if timeout is None else int(timeout) / 1000
    return WorkLine(int(place), int(seq), function_of(op), elements, seconds)


def function_of(op: str) -> str:
    """Return the function of an op, as c10d names its type."""
    return _FUNCTIONS.get(op, op.lower())


def op_frame(text: str) -> Frame | None:
    """Return a call of the stack of an op: ``#2 step from /job/train.py:88``."""
    found = _OP_FRAME.match(text)
    return found and Frame(found[2], int(found[3]), found[1])


def group_line(text: str) -> GroupLine | None:
    """Return what a line says of a rank in a group, if it names a group."""
    found = _STATUS.search(text) or _INIT.search(text) or _ANY_GROUP.search(text)
    if found is None:
        return None
    values = found.groupdict()
    failed = _FAILED.search(text)

    def number(name: str) -> int | None:
        value = values.get(name)
        return None if value is None else int(value)

    return GroupLine(
        values["id"],
        values["name"] or "",
        int(values["place"]),
        number("rank"),
        number("size"),
        number("enqueued"),
        number("started"),
        number("completed"),
        failed and int(failed[1]),
    )
