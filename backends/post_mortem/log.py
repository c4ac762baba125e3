"""Reads a log of torchrun, as a stream: the watchdog, tracebacks, ranks that ended."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from ..observe.evidence import RankEvidence
from ..rank_sets import parse_runs
from .desync import TIMEOUT, DesyncReport
from .log_groups import LogGroups
from .log_lines import (
    OP_STACK,
    Source,
    group_line,
    label_in,
    op_frame,
    split_line,
    task_in,
    work_line,
)
from .stacks import FAULT_LINE, main_thread, threads_in
from .torchelastic import Failure, FailureTable, death_by_signal
from .tracebacks import BEGINS, Raised, TracebackReader, evidence_of
from .user_frames import LONGEST, MOST, Frame, position

__all__ = ["KIND", "Log", "extract", "looks_like_log", "read_log"]

KIND = "torchrun log"

#: Bytes of a line that are read, and of lines that are looked at together.
_LINE = 1 << 16
_PART = 1 << 20
#: Lines of stacks that are kept of one source.
_STACK_LINES = 5000
#: Characters of an error that are told.
_LONGEST = 200
#: Labels of tracebacks that have begun and not ended, at most.
_MOST_LABELS = 256
#: Lines after one that tells something which are kept of a large log.
_FOLLOWING = 200

#: What makes a file a log of ranks, and a line worth to be split.
#: Not one pattern: to look for each of these is five times as fast.
_SIGNS = (
    *(b"[rank", b"ProcessGroupNCCL", b"Watchdog caught", b"Root Cause (first observed"),
    *(b"will restart worker group", b"global_world_sizes=", b"that process rank "),
    *(b"Traceback (most recent call last)", TIMEOUT.encode(), b"op.preamble.length"),
    *(b"Fatal Python error: ", b"ut of memory: Kill"),
    *(b" oom_kill event", b" oom-kill event", b"; the report is "),
    *(b"srun: ", b"*** STEP ", b" terminated with the following error:"),
    *(b"*** JOB ", b" terminated with code -", b"AL_RANK: "),
    *(b"NVRM: Xid ", b"Exception in thread ", b"Exception ignored "),
    b"he above exception",
)
_FAULT = b"(most recent call first):"
_LAUNCHERS = (
    "torch.distributed.elastic",
    "torch.multiprocessing.spawn.ProcessRaisedException",
)
_SPAWNED = re.compile(r"-- Process (\d{1,6}) terminated with the following error:")
_RESTART = re.compile(
    r"(?:Worker group |Detected \d+ new nodes ).*will restart worker group"
)
#: What Python says before a traceback that does not end the process, and between those
#: of one error.
_IN_THREAD = re.compile(r"Exception (?:in thread|ignored) ")
_CHAINED = re.compile(r"During handling of the above exc|The above exception was the ")
#: Gloo's last words where it receives more than the op of this rank takes.
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
#: The watchdog's last words where the rank's own GPU has failed, or another rank has
#: closed a connection.
_LAST_WORDS = re.compile(
    r"watchdog thread terminated with exception: "
    r"(CUDA error: .+|NCCL error: remote process exited.*)"
)
_FATAL = re.compile(
    r"Fatal Python error: (Segmentation fault|Bus error|Illegal instruction"
    r"|Floating[ -]point exception)$"
)
#: Linux, in its own log, of a process or a container that took too much memory.
_OUT_OF_MEMORY = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process (\d{1,10}) ")
#: Slurm, which does not tell of which process.
_OOM_KILL = re.compile(r"oom[_-]kill events?(?:\(s\))? in StepId=([\w.+]{1,60})\b")
#: The driver of a GPU, of an error of a process on it.
_XID = re.compile(
    r"NVRM: Xid \([^)]{1,40}\): (\d{1,4}), pid='?(\d{1,10})'?(?:, name=[^,]{1,60})?"
    r"(?:, (.{1,200}))?"
)
#: Those that only tell that a process was ended, or that memory was mended.
_XIDS_LEFT_OUT = ("43", "45", "63", "64", "92")
#: What the job has said itself, as its own line and in errors; each host says it once.
_SAID = re.compile(
    r"(?:(?<![\w.])rankscope: |^Why, as the ranks' records tell: )"
    r"(.+; the report is .+)"
)
#: The reason of an abort in an error of ours: ranks have issued an op differently.
REASON = re.compile(r"the group was aborted: (\w{1,40}: .{1,1000}?) \(at \d")
_WORLD = re.compile(r"global_world_sizes=\[(\d{1,6})[,\]]")
_MPIRUN = re.compile(
    r"noticed that process rank (\d{1,6}) with PID \d+ on node \S+ "
    r"exited on signal (\d{1,3})"
)

#: Lightning, of a process that it has started on its host, by its rank there.
_LIGHTNING = re.compile(
    r"\[rank: (\d{1,6})\] Child process with PID (\d{1,10}) terminated with code "
    r"(-\d{1,3})\b"
)
_MEMBER = re.compile(r"GLOBAL_RANK: (\d{1,6}), MEMBER: \d{1,6}/(\d{1,6})\b")
_DEVICES = re.compile(r"\bLOCAL_RANK: (\d{1,5}) - CUDA_VISIBLE_DEVICES: ")
#: Slurm, of tasks that a signal has ended which it has not sent itself.
_SRUN = re.compile(
    r"srun: error: \S+: tasks? ([\d,-]{1,200}): "
    r"(Killed|Segmentation fault|Aborted|Bus error|Out Of Memory)"
)
_SRUN_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7}
_MOST_TASKS = 10_000
#: From here on Slurm ends the tasks itself.
_STEP_ENDS = re.compile(
    r"srun: (?:Terminating|Force Terminated)"
    r"|\*\*\* (JOB|STEP) (\S{1,60})(?: .{1,300} CANCELLED AT (\S{1,30})"
    r"(?: DUE TO ([A-Z ]{1,60}[A-Z]))?)?"
)
#: A stack of a labelled task, in a file without anything else.
_TASKS_STACK = re.compile(rb"^ {0,6}\d{1,6}: (?:Current t|T)hread 0x", re.MULTILINE)
#: Open MPI 5 goes on in the next line.
_BROKEN = " exited on"


@dataclass
class _Stream:
    """The lines of one source, which those of others interrupt."""

    tracebacks: TracebackReader = field(default_factory=TracebackReader)
    raised: list[Raised] = field(default_factory=list)
    #: The last dump of faulthandler.
    stacks: list[str] = field(default_factory=list)
    in_stacks: bool = False
    #: Bytes that gloo has received, and those that it expected.
    too_long: tuple[str, str] | None = None
    #: What faulthandler has seen of a signal that is not sent on purpose.
    fatal: str = ""
    #: Exceptions that have not ended the process: of its other threads.
    in_threads: list[Raised] = field(default_factory=list)
    _is_of_thread: bool = False
    _is_next_of_thread: bool = False

    def feed(self, text: str) -> None:
        raised = self.tracebacks.feed(text)
        # The launcher's own, in a file with the name of a rank, is not that rank's.
        if raised is not None and not raised.text.startswith(_LAUNCHERS):
            (self.in_threads if self._is_of_thread else self.raised).append(raised)
        if _IN_THREAD.search(text) is not None:
            self._is_next_of_thread = True
        elif _CHAINED.search(text) is not None:
            self._is_next_of_thread = self._is_of_thread
        elif self.tracebacks.is_fresh:
            self._is_of_thread = self._is_next_of_thread
            self._is_next_of_thread = False
        if (sizes := _TOO_LONG.search(text)) is not None:
            self.too_long = sizes[1], sizes[2]
        if (fatal := _FATAL.match(text)) is not None:
            self.fatal = fatal[1]
        if FAULT_LINE.match(text):
            if not self.in_stacks:
                self.stacks = []
            self.in_stacks = True
        elif text.strip() and not text.startswith("  "):
            self.in_stacks = False
        if self.in_stacks and len(self.stacks) < _STACK_LINES:
            self.stacks.append(text)

    @property
    def is_open(self) -> bool:
        return self.tracebacks.is_open or self.in_stacks


class Log:
    """What the lines of a log have told so far; those of the last attempt alone."""

    def __init__(self, rank: int | None = None) -> None:
        #: The rank of lines that name none.
        self._rank = rank
        #: Ranks that have a line.
        self.present: set[int] = set() if rank is None else {rank}
        #: Ranks that waited until a timeout, or until a connection was lost.
        self.gave_up: dict[int, RankEvidence] = {}
        #: Ranks that gloo has ended: they received more than their op takes.
        self.too_long: set[int] = set()
        self.world_size: int | None = None
        #: Whether the tasks of Slurm are the ranks; known at the end.
        self._tasks_are_ranks = False
        self._begin()

    def _begin(self) -> None:
        self._streams: dict[Source, _Stream] = {}
        self._open: set[Source] = set()
        #: What the lines of an open traceback begin with that has a label.
        self._prefixes: dict[Source, re.Pattern[str]] = {}
        #: Which process the next traceback is of, as `torch.multiprocessing` tells.
        self._spawned: dict[Source, str] = {}
        self._locals: dict[str, set[int]] = {}
        self.groups = LogGroups()
        self.table = FailureTable()
        self._deaths: dict[int, str] = {}
        #: Ranks that the watchdog has ended as their GPUs failed → the first error.
        self._gpu_errors: dict[int, str] = {}
        #: Ranks that it has ended as another one was gone.
        self._cut_off: dict[int, Raised] = {}
        #: Tasks of Slurm that ended → why.
        self._tasks: dict[int, str] = {}
        #: How Slurm has ended the job itself, if it tells why; None: it has not.
        self.slurm_ended: str | None = None
        #: The ranks of Lightning's processes, and what each has in its host.
        self._members: set[int] = set()
        self._local_ranks: list[int] = []
        #: Its processes that ended, as their host numbers them.
        self._children: dict[int, Failure] = {}
        #: A process → the error that the driver of its GPU tells of it.
        self.xids: dict[int, str] = {}
        #: Ranks of lines that have a label, too → the tasks of those labels.
        self._labels: dict[int, set[int]] = {}
        #: The line to which the next one belongs.
        self._held = ""
        #: A process → why Linux has killed it; None: one that is not named.
        self.reasons: dict[int | None, str] = {}
        #: The ranks in some group that an op timed out on, by its name and number, in
        #: lines that name no rank of the job: those of torch before 2.2.
        self.of_groups: dict[tuple[str, int], set[int]] = {}
        #: What the job said of itself, in the order of its words.
        self.said: dict[str, None] = {}
        #: What it tells of no rank that is known.
        self.notes: list[str] = []
        #: The rank whose op's stack has begun, and its calls.
        self._op_stack: tuple[int, list[Frame]] | None = None
        #: The desync report that has begun.
        self._report: DesyncReport | None = None
        #: The rank of the last line that has one: a report stands below it.
        self._latest: int | None = self._rank

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to what has begun, as a traceback."""
        begun = self._op_stack is not None or self._report is not None
        return begun or bool(self._held or self._open) or self.table.is_open

    def feed(self, line: bytes) -> None:
        if not (self.is_open or _may_tell(line)):
            return
        # A report has a line with all ranks.
        length = LONGEST if self._report is None else _LINE
        whole = line[:length].decode("utf-8", errors="replace")
        source, text = split_line(whole)
        if source.rank is not None and (task := task_in(whole)) is not None:
            self._labels.setdefault(source.rank, set()).add(task)
        if (reason := REASON.search(text)) is not None:
            self.said[reason[1]] = None
        if self._held:
            text, self._held = f"{self._held} {text}", ""
        elif text.endswith(_BROKEN):
            self._held = text
            return
        if source.rank is None and source.local is None:
            # What stands before the lines of a table tells hosts apart.
            row = text if source.task is None else f"{source.task}: {text}"
            if self.table.feed(row):
                return
        if self._op_stack is not None and self._feed_op_stack(text):
            return
        if self._feed_report(source, text):
            return
        if _RESTART.search(text):
            self._begin()
        elif (ended := _SRUN.search(text)) is not None:
            if self.slurm_ended is None:
                self._tasks.update(dict.fromkeys(_tasks_of(ended[1]), ended[2]))
        elif (step_ends := _STEP_ENDS.search(text)) is not None:
            what, number, at, why = step_ends.groups()
            told = f"Slurm ended {what.lower()} {number} at {at}: {why}" if why else ""
            self.slurm_ended = self.slurm_ended or told
        elif (ended := _LIGHTNING.search(text)) is not None:
            local, pid, code = map(int, ended.groups())
            self._children[local] = Failure(local, f"default{local}", code, pid)
        elif (devices := _DEVICES.search(text)) is not None:
            self._local_ranks.append(int(devices[1]))
        elif (member := _MEMBER.search(text)) is not None:
            self._members.add(int(member[1]))
            self.world_size = int(member[2])
        elif (xid := _XID.search(text)) is not None:
            number, process, what = xid.groups()
            if number not in _XIDS_LEFT_OUT:
                told = f"Xid {number}, {what.rstrip('.')}" if what else f"Xid {number}"
                self.xids.setdefault(int(process), told)
        elif (said := _SAID.search(text)) is not None:
            self.said[said[1]] = None
        elif (world := _WORLD.search(text)) is not None:
            self.world_size = int(world[1])
        elif (big := _OUT_OF_MEMORY.search(text)) is not None:
            self.reasons[int(big[1])] = "Linux had no memory left for it"
        elif (step := _OOM_KILL.search(text)) is not None:
            what = f"a process of Slurm's step {step[1]}"
            self.reasons[None] = f"Linux had no memory left for {what}"
        elif (killed := _MPIRUN.search(text)) is not None:
            if self.slurm_ended is None:
                rank, number = int(killed[1]), int(killed[2])
                self._deaths[rank] = death_by_signal(rank, number)
        else:
            self._feed_rank(source, text)

    def _feed_op_stack(self, text: str) -> bool:
        """Take a line of the stack of an op that timed out, which has no rank."""
        assert self._op_stack is not None
        rank, frames = self._op_stack
        frame = op_frame(text)
        if frame is not None and len(frames) < MOST:
            frames.append(frame)
            return True
        frames[-1:] = [one._replace(outermost=True) for one in frames[-1:]]
        self.groups.add_line(rank, position(frames)[0])
        self._op_stack = None
        return False

    def _feed_report(self, source: Source, text: str) -> bool:
        """Take a line of a desync report, which stands below a line of its rank."""
        if self._report is None and TIMEOUT in text:
            self._report = DesyncReport()
            if source.rank is not None:
                self._feed_rank(source, text)
        if self._report is None:
            return False
        if self._report.feed(text):
            return True
        if self._latest is not None:
            self.groups.add_report(self._latest, self._report)
        self._report = None
        return False

    def _feed_rank(self, source: Source, text: str) -> None:
        known = group_line(text)
        rank = source.rank
        if known is not None:
            if rank is None:
                rank = known.rank
            if rank is None and known.is_default:
                rank = known.place
        if rank is None and source.local is None:
            rank = self._rank
        if rank is not None:
            self.present.add(rank)
            self._latest = rank
            if source.local is not None:
                self._locals.setdefault(source.local, set()).add(rank)
            work = work_line(text)
            if work is not None:
                self.groups.add_work(rank, work)
            if known is not None:
                self.groups.add(rank, known)
            if OP_STACK in text:
                self._op_stack = rank, []
            if (error := _LAST_WORDS.search(text)) is None:
                pass
            elif error[1].startswith("CUDA"):
                self._gpu_errors.setdefault(rank, error[1][:_LONGEST])
            else:
                self._cut_off.setdefault(rank, Raised(error[1][:_LONGEST], ()))
        elif (work := work_line(text)) is not None:
            self.of_groups.setdefault((work.op, work.seq), set()).add(work.place)
        source, text = self._without_label(source, text)
        # Torch's excepthook writes the rank before each line; what is not empty.
        stream = self._streams.setdefault(source, _Stream())
        stream.feed(text)
        if stream.is_open:
            self._open.add(source)
        else:
            self._open.discard(source)
            self._prefixes.pop(source, None)

    def _without_label(self, source: Source, text: str) -> tuple[Source, str]:
        """Return whose line it is that may belong to a traceback with a label."""
        if (spawned := _SPAWNED.match(text)) is not None:
            self._spawned[source] = f"process {spawned[1]} of mp.spawn"
        if text.rstrip().endswith(BEGINS):
            prefix = text.partition(BEGINS)[0]
            label, pattern = label_in(prefix)
            if not prefix.strip():
                label = self._spawned.pop(source, "")
            if label and len(self._prefixes) < _MOST_LABELS:
                source = source._replace(label=label)
                self._prefixes[source] = pattern
            return source, BEGINS
        for labelled, pattern in self._prefixes.items():
            if labelled._replace(label="") != source:
                continue
            if (found := pattern.match(text)) is not None:
                return labelled, text[found.end() :]
            fresh = self._streams[labelled].tracebacks.is_fresh
            if fresh and source not in self._open and TracebackReader.is_frame(text):
                # It stands before the first line alone: a message of a logger.
                self._streams[labelled] = _Stream()
                self._open.discard(labelled)
                del self._prefixes[labelled]
                self._streams.setdefault(source, _Stream()).feed(BEGINS)
                return source, text
        return source, text

    # -- the result --------------------------------------------------------------

    def _has_ranks_of_tasks(self) -> bool:
        """Whether Slurm has started the ranks: no torchrun, which numbers them anew."""
        if self.table.failures or self._locals or self._rank is not None:
            return False
        if not self._labels:
            return not self.present
        return all(tasks == {rank} for rank, tasks in self._labels.items())

    def close(self) -> None:
        """End what is open, and note the ranks of tasks."""
        self.feed(b"\n")
        self._place_children()
        for rank, stream in self._placed():
            for one in stream.in_threads:
                self.notes.append(
                    f"a thread of rank {rank} raised {one.text}, which does not end it"
                )
        self._tasks_are_ranks = self._has_ranks_of_tasks()
        if self._tasks_are_ranks:
            tasks = {one.task for one in self._streams if one.task is not None}
            self.present |= tasks | self._tasks.keys()

    def _place_children(self) -> None:
        """Note how Lightning's processes ended, unless they are of several hosts."""
        first = min(self._members, default=0)
        several = len(self._local_ranks) > len(set(self._local_ranks))
        for local, failure in self._children.items():
            # The watchdog ends with SIGABRT, too.
            gave_up = failure.exit_code == -signal.SIGABRT and self.groups.timed_out
            if several and failure.death:
                self.notes.append(
                    f"rank {local} of a host, pid {failure.pid}, "
                    f"{failure.death.partition(' ')[2].partition(' ')[2]}: the log is "
                    "of several hosts, and it does not say on which one"
                )
            elif failure.death and not gave_up:
                failure.rank += first
                self.table.failures[failure.rank] = failure

    def evidence(
        self, path: str, reasons: Mapping[int | None, str]
    ) -> list[RankEvidence]:
        """Return what the log tells of each rank; the `reasons` are of all logs."""
        found = []
        raised: dict[int, list[Raised]] = {}
        for rank, stream in self._placed():
            if stream.raised:
                raised.setdefault(rank, []).extend(stream.raised)
            processes = threads_in(stream.stacks)
            thread = processes and main_thread(processes[-1].threads)
            if thread:
                line, called = position(thread.frames)
                found.append(
                    RankEvidence(rank, location=line, called=called, source=path)
                )
        for rank, failure in self.table.failures.items():
            if failure.raised is not None and rank not in raised:
                raised[rank] = [failure.raised]
        for rank, error in self._cut_off.items():
            raised.setdefault(rank, [error])
        for rank in self._outlived(raised):
            del raised[rank]
        for rank, several in raised.items():
            one = evidence_of(rank, several, path)
            if one.exception is None:
                self.gave_up[rank] = one
            found.append(one)
        return found + list(self._ends(path, raised, reasons))

    def _outlived(self, raised: Mapping[int, Sequence[Raised]]) -> list[int]:
        """Return the ranks that lived on after what they raised, until another one's
        end had the launcher end them.

        Where those which ended by themselves had waited, a rank that hung as it left
        may be the cause.
        """
        failures = self.table.failures.items()
        alive = {rank for rank, one in failures if one.was_ended}
        if all(
            rank in self.groups.timed_out
            or any(one.is_consequence for one in raised.get(rank, ()))
            for rank, _ in failures
            if rank not in alive
        ):
            return []
        return [rank for rank in raised if rank in alive]

    def _ends(
        self, path: str, raised: Collection[int], reasons: Mapping[int | None, str]
    ) -> Iterator[RankEvidence]:
        sizes = {
            rank: stream.too_long for rank, stream in self._placed() if stream.too_long
        }
        for rank, stream in self._placed():
            if rank in self.table.failures or not (stream.fatal or stream.too_long):
                continue
            death = f"rank {rank} ended with a fatal error"
            death += f": {stream.fatal}" if stream.fatal else self._size(rank, sizes)
            yield RankEvidence(rank, death=death, source=path)
        for rank, error in self._gpu_errors.items():
            yield RankEvidence(
                rank, death=f"rank {rank} ended with {error}", source=path
            )
        for task, how in self._tasks.items() if self._tasks_are_ranks else ():
            number = _SRUN_SIGNALS.get(how)
            death = f"rank {task} was killed: Slurm says Out Of Memory"
            death = death if number is None else death_by_signal(task, number)
            if how == "Killed" and (why := reasons.get(None)) is not None:
                death += f": {why}"
            yield RankEvidence(task, death=death, source=path)
        for rank, death in self._deaths.items():
            yield RankEvidence(rank, death=death, source=path)
        for rank, failure in self.table.failures.items():
            # The watchdog ends its process with SIGABRT: it has waited.
            waited = rank in self.groups.timed_out or rank in raised
            if failure.death and not (waited and failure.exit_code == -signal.SIGABRT):
                process, death = f"pid {failure.pid}", failure.death
                why = reasons.get(failure.pid, reasons.get(None))
                if why is not None and failure.exit_code == -signal.SIGKILL:
                    death += f": {why}"
                if rank in sizes:
                    death += self._size(rank, sizes)
                yield RankEvidence(rank, death=death, process=process, source=path)

    def _size(self, rank: int, sizes: Mapping[int, tuple[str, str]]) -> str:
        """Return that gloo has ended `rank`, whose op takes less than it received."""
        self.too_long.add(rank)
        received, expected = sizes[rank]
        return f": gloo received {received} bytes, and expected {expected}"

    def _placed(self) -> Iterator[tuple[int, _Stream]]:
        """Yield the streams whose global rank is known."""
        ranks = dict(self._locals)
        for failure in self.table.failures.values():
            ranks.setdefault(failure.local, set()).add(failure.rank)
        for source, stream in self._streams.items():
            if source.rank is not None:
                yield source.rank, stream
            elif source.local is not None and len(ranks.get(source.local, ())) == 1:
                yield next(iter(ranks[source.local])), stream
            elif source.task is not None and self._tasks_are_ranks:
                yield source.task, stream
            elif source.local is None and self._rank is not None:
                yield self._rank, stream

    def unplaced(self) -> list[tuple[str, Raised]]:
        """Return the exceptions whose ranks are not known, each with its label."""
        placed = [id(stream) for _, stream in self._placed()]
        return [
            (source.label or (source.local and f"[{source.local}]") or "", raised)
            for source, stream in self._streams.items()
            if id(stream) not in placed
            for raised in stream.raised
        ]

    def placed(self) -> Iterator[tuple[int, Raised]]:
        for rank, stream in self._placed():
            for raised in stream.raised:
                yield rank, raised

    def awaited(self) -> set[int]:
        """Return the ranks that had not joined, as who waited for them says."""
        found = [one for stream in self._streams.values() for one in stream.raised]
        return {one.awaited for one in found if one.awaited is not None}


def _tasks_of(text: str) -> list[int]:
    """Return the tasks of ``0,4-7``; none of what Slurm does not write."""
    try:
        runs = parse_runs(text, "tasks")
    except ValueError:
        return []
    return [task for run in runs for task in run[:_MOST_TASKS]]


def read_log(file: IO[bytes], rank: int | None = None) -> Log:
    """Return what a log tells; `rank` is that of the whole file, if it is of one."""
    log = Log(rank)
    for lines in _parts(file):
        if log.is_open or _may_tell(lines):
            for line in io.BytesIO(lines):
                log.feed(line)
    log.close()
    return log


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    """Yield whole lines, many at once: most parts of a log tell nothing."""
    while part := file.read(_PART):
        yield part + file.readline(_LINE)


def looks_like_log(data: bytes) -> bool:
    """Return whether a line is of a rank or of its launcher."""
    if b"\0" in data[:4096]:
        return False
    return any(sign in data for sign in _SIGNS) or bool(_TASKS_STACK.search(data))


def _may_tell(lines: bytes) -> bool:
    for sign in _SIGNS:
        if sign in lines:
            return True
    return _FAULT in lines or FailureTable.may_begin(lines)


def extract(file: IO[bytes], most: int) -> bytes:
    """Return the lines of a large log that may tell something, and those after them."""
    kept, size, following = [], 0, 0
    for lines in _parts(file):
        if not following and not _may_tell(lines):
            continue
        for line in io.BytesIO(lines):
            if _may_tell(line):
                following = _FOLLOWING
            if following and size < most:
                following -= 1
                kept.append(line[:_LINE])
                size += len(kept[-1])
    return b"".join(kept)
