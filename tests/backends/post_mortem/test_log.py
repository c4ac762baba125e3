"""Logs of torchrun, in the words of torch 2.3 to 2.13, as they are and damaged."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from rankscope.backends.observe.evidence import Group, RankEvidence
from rankscope.backends.observe.verdicts import Fault
from rankscope.backends.post_mortem.log import extract
from rankscope.backends.post_mortem.log_lines import group_line, split_line, work_line
from rankscope.backends.post_mortem.report import Report, examine

WORK = (
    "[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum"
    "={seq}, OpType={op}, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for "
    "600061 milliseconds before timing out."
)
#: The second line, from the oldest torch to the newest.
STATUS = {
    "2.3": "[PG 0 Rank {place}] Timeout at NCCL work: {seq}, last enqueued NCCL work: "
    "{seq}, last completed NCCL work: {done}.",
    "2.4": "[PG 0(default_pg) Rank {place}] Exception (either an error or timeout) "
    "detected by watchdog at work: {seq}, last enqueued NCCL work: {seq}, last "
    "completed NCCL work: {done}.",
    "2.6": "[PG ID 0 PG GUID 0(default_pg) Rank {place}] Exception (either an error or "
    "timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {seq}, "
    "last completed NCCL work: {done}.",
    "2.13": "[PG ID 0 PG GUID 0(default_pg) Rank {place}]  failure detected by "
    "watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}, last "
    "started work: {seq} (ALLREDUCE), last completed work: {done}",
    "2.7": "[PG ID 0 PG GUID 0(default_pg) Rank {place}]  failure detected by watchdog "
    "at work sequence id: {seq} PG status: last enqueued work: {seq}, last completed "
    "work: {done}",
}
DUMP = (
    "[PG ID 0 PG GUID 0(default_pg) Rank {place}] Received a dump signal due to a "
    "collective timeout from  rank 0 and we will try our best to dump the debug info. "
    "Last enqueued NCCL work: {done}, last completed NCCL work: {done}.This is most "
)
PREFIXES = {
    "none": "[rank{rank}]:[E1206 18:44:12.715 ProcessGroupNCCL.cpp:632] ",
    "tee": "[default{rank}]:[rank{rank}]:[E1206 18:44:12.715 X.cpp:632] ",
    "launcher": "2026-01-01T00:00:00Z \x1b[36m(W pid=4009)\x1b[0m [rank{rank}]:[E ",
}


def hung(
    ranks: range = range(4), late: int = 2, version: str = "2.7", prefix: str = "none"
) -> list[str]:
    """Return a log in which all ranks but one wait in all_reduce #13."""
    lines = []
    for rank in ranks:
        start = PREFIXES[prefix].format(rank=rank)
        facts = {"place": rank, "seq": 13, "done": 12, "op": "ALLREDUCE"}
        if rank == late:
            lines.append(start + DUMP.format(**facts))
        else:
            lines.append(start + WORK.format(**facts))
            lines.append(start + STATUS[version].format(**facts))
    return lines


def examined(tmp_path: Path, *logs: list[str] | str) -> Report:
    for number, log in enumerate(logs):
        text = log if isinstance(log, str) else "\n".join(log) + "\n"
        (tmp_path / f"host{number}.log").write_text(text)
    return examine([tmp_path])


def rank_of(report: Report, rank: int) -> RankEvidence:
    return report.evidence.ranks[rank]


@pytest.mark.parametrize("version", STATUS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_watchdogs_lines(tmp_path: Path, version: str, prefix: str) -> None:
    report = examined(tmp_path, hung(version=version, prefix=prefix))
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (2,))
    assert (verdict.op, verdict.seq) == ("all_reduce", 13)
    assert verdict.group.ranks == (0, 1, 2, 3)
    assert report.files[0].kind == "torchrun log"
    assert report.files[0].ranks == (0, 1, 2, 3)


def test_ops_that_differ(tmp_path: Path) -> None:
    lines = [line for line in hung(late=9) if "dump signal" not in line]
    lines = [
        line.replace("ALLREDUCE", "BROADCAST") if "[rank3]" in line else line
        for line in lines
    ]
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.OP_MISMATCH, (3,))


def test_the_stack_of_the_op_that_timed_out(tmp_path: Path) -> None:
    stack = (
        "Stack trace of the failed collective: \n"
        "#0 all_reduce from /opt/lib/python3.12/site-packages/torch/distributed/"
        "distributed_c10d.py:3174\n"
        "#1 wrapper from /opt/lib/python3.12/site-packages/torch/distributed/"
        "c10d_logger.py:83\n"
        "#2 step from /job/train.py:88\n"
        "#3 <module> from /job/train.py:120\n"
    )
    start = PREFIXES["none"].format(rank=0)
    lines = hung()
    report = examined(tmp_path, [*lines[:2], start + stack, *lines[2:], start + stack])
    assert "all_reduce #13 of group 'default_pg' (train.py:88)" in (
        report.verdicts[0].text
    )
    assert report.verdicts[0].line == "train.py:88"


def test_the_hosts_of_a_job_are_one_log(tmp_path: Path) -> None:
    lines = hung(range(16), late=11)
    hosts = [[line for line in lines if f"[rank{n}" in line] for n in ("1", "")]
    first = [line for line in lines if line not in hosts[0]]
    report = examined(tmp_path, hosts[0], first)
    (verdict,) = report.verdicts
    assert verdict.culprits == (11,)


def test_a_rank_without_a_line_is_no_culprit_by_itself(tmp_path: Path) -> None:
    lines = [line for line in hung() if "[rank2]" not in line]
    report = examined(tmp_path, lines)
    assert "the log has no line of rank 2: it may be cut" in report.files[0].problem
    assert [one.culprits for one in report.verdicts] == [(2,)]
    assert "left no records" in report.verdicts[0].text


def test_the_last_rank_may_be_the_one_that_is_missing(tmp_path: Path) -> None:
    """Whether there is a rank after those that have a line, the log does not say."""
    lines = [line for line in hung(late=9) if "dump signal" not in line]
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert verdict.text.startswith("ranks 0–3 wait in all_reduce #13")
    size = (
        "[rank0]:[I ProcessGroupNCCL.cpp:9] [PG ID 0 PG GUID 0(default_pg) Rank 0] "
        "ProcessGroupNCCL initialization options: size: 5, global rank: 0, TIMEOUT(ms)"
    )
    report = examined(tmp_path, [size, *lines])
    assert report.verdicts[0].culprits == (4,)


def test_group_and_global_ranks_are_kept_apart(tmp_path: Path) -> None:
    lines = []
    for place, rank in enumerate((8, 9, 10, 11)):
        start = f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1] "
        prefix = f"[PG ID 3 PG GUID 5(tp) Rank {place}] "
        if rank == 10:
            status = (
                "dump signal. Last enqueued NCCL work: 6, last completed NCCL work: 6."
            )
        else:
            work = {"place": place, "seq": 7, "op": "_ALLGATHER_BASE"}
            lines.append(start + WORK.format(**work))
            status = (
                "failure detected by watchdog at work sequence id: 7 PG status: last "
                "enqueued work: 9, last completed work: 6"
            )
        lines.append(start + prefix + status)
    report = examined(tmp_path, lines)
    # The ranks of the group before place 0 are none, and 8 is the first.
    (verdict,) = report.verdicts
    assert (verdict.culprits, verdict.group.name) == ((10,), "tp")
    assert (verdict.op, verdict.seq) == ("all_gather_into_tensor", 7)
    group = Group("tp", (8, 9, 10, 11), "5", False)
    assert rank_of(report, 8).groups[group].progress.enqueued == 9
    # Without the lines of rank 10 its place can only be its.
    report = examined(tmp_path, [line for line in lines if "[rank10]" not in line])
    assert group in report.evidence.groups


def test_members_of_a_group_that_are_not_certain(tmp_path: Path) -> None:
    lines = []
    for place, rank in ((0, 0), (2, 8)):
        start = f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1] "
        facts = {"place": place, "seq": 7, "done": 6, "op": "ALLREDUCE"}
        lines.append(start + WORK.format(**facts))
        status = STATUS["2.7"].replace("0 PG GUID 0(default_pg)", "2 PG GUID 4(dp)")
        lines.append(start + status.format(**facts))
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert verdict.text.startswith("ranks 0, 8 wait in all_reduce #7 of group 'dp'")


def test_sends_are_counted_with_collectives(tmp_path: Path) -> None:
    lines = [line.replace("ALLREDUCE", "SEND") for line in hung()]
    report = examined(tmp_path, lines)
    for one in report.evidence.ranks.values():
        for known in one.groups.values():
            assert known.progress.enqueued is None


# -- exceptions and ends ---------------------------------------------------------

TRACEBACK = """\
{p}Traceback (most recent call last):
{p}  File "/job/train.py", line 120, in <module>
{p}    main()
{p}  File "/job/{file}", line {line}, in step
{p}    dist.all_reduce(gradients)
{p}    ^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
GLOO = (
    TRACEBACK
    + """\
{p}  File "/opt/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", \
line 83, in wrapper
{p}    return func(*args, **kwargs)
{p}  File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", \
line 2810, in all_reduce
{p}    work.wait()
{p}RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting \
7000ms for recv operation to complete
"""
)
RAISED = TRACEBACK + "{p}ValueError: batch 3 is empty\n"


def of_gloo(ranks: tuple[int, ...], prefix: str = "[rank{n}]: ") -> str:
    """Return the tracebacks of ranks, whose lines alternate."""
    texts = [
        GLOO.format(p=prefix.format(n=n), file="train.py", line=88).splitlines()
        for n in ranks
    ]
    return "\n".join(line for lines in zip(*texts, strict=True) for line in lines)


def test_timeouts_of_gloo(tmp_path: Path) -> None:
    report = examined(tmp_path, of_gloo((0, 1, 3)))
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert verdict.text == (
        "ranks 0–1, 3 gave up waiting at train.py:88 in all_reduce of "
        "torch.distributed; the log has no line of rank 2: it may be cut"
    )
    assert rank_of(report, 0).exception is None


@pytest.mark.parametrize("prefix", ["[rank{n}]: ", "[default{n}]:[rank{n}]: "])
def test_an_exception_that_ended_a_rank(tmp_path: Path, prefix: str) -> None:
    raised = RAISED.format(p=prefix.format(n=2), file="data.py", line=77)
    report = examined(tmp_path, raised + of_gloo((0, 1, 3), prefix))
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (2,))
    assert verdict.text.startswith(
        "rank 2 ended with ValueError: batch 3 is empty at data.py:77; ranks 0–1, 3 "
        "gave up waiting at train.py:88"
    )


def test_many_ranks_that_ended_alike_are_one_clause(tmp_path: Path) -> None:
    raised = [
        RAISED.format(p=f"[rank{n}]: ", file="data.py", line=77) for n in range(200)
    ]
    (verdict,) = examined(tmp_path, "".join(raised) + table()).verdicts
    assert verdict.text.startswith(
        "ranks 0–10, 12–199 ended with ValueError: batch 3 is empty at data.py:77; "
        "rank 11 was killed by signal 9 (SIGKILL)"
    )


def test_an_exception_beside_the_watchdogs_lines(tmp_path: Path) -> None:
    raised = RAISED.format(p="[rank2]: ", file="data.py", line=77)
    report = examined(tmp_path, raised + "\n".join(hung()))
    assert report.verdicts[0].culprits == (2,)
    assert "ValueError: batch 3 is empty at data.py:77" in report.verdicts[0].text


def test_an_exception_of_a_local_rank_alone(tmp_path: Path) -> None:
    raised = RAISED.format(p="[default2]:", file="data.py", line=77)
    report = examined(tmp_path, raised)
    assert report.evidence.ranks == {}
    assert "it does not say on which rank" in report.files[0].problem


LABELS = {
    "vllm": "(Worker_TP{n} pid=10{n}) ERROR 11-27 16:37:0{at} [executor.py:597] ",
    "ray": "\x1b[36m(RayTrainWorker pid=10{n}, ip=10.0.0.2)\x1b[0m ",
    "kubectl": "[pod/worker-{n}/pytorch] 2026-11-27T16:37:01.{at}Z ",
    "compose": "worker-{n}  | ",
    "pdsh": "node{n}: ",
}


@pytest.mark.parametrize("program", LABELS)
def test_tracebacks_whose_lines_have_a_label(program: str, tmp_path: Path) -> None:
    lines: dict[int, list[str]] = {}
    for n in (1, 2):
        raised = RAISED.format(p="", file="data.py", line=77 + n).splitlines()
        lines[n] = [
            LABELS[program].format(n=n, at=at) + line for at, line in enumerate(raised)
        ]
    both = [line for pair in zip(*lines.values(), strict=True) for line in pair]
    report = examined(tmp_path, both)
    assert report.evidence.ranks == {}
    for n in (1, 2):
        label = split_line(LABELS[program].format(n=n, at=0))[1].split(" ERROR")[0]
        label = label.split(" 2026")[0].strip(" :|")
        assert (
            f"{label} raised ValueError: batch 3 is empty at data.py:{77 + n}"
            in report.files[0].problem
        )


def test_a_label_behind_the_rank(tmp_path: Path) -> None:
    raised = RAISED.format(p="(Worker pid=7) [rank2]: [loop] ", file="data.py", line=77)
    (verdict,) = examined(tmp_path, raised).verdicts
    assert verdict.culprits == (2,)
    assert "ended with ValueError: batch 3 is empty at data.py:77" in verdict.text


def test_a_traceback_behind_the_message_of_a_logger(tmp_path: Path) -> None:
    raised = "2026-11-27 16:37:01,123 ERROR train: failed: "
    raised += RAISED.format(p="", file="data.py", line=77)
    report = examined(tmp_path, raised)
    assert report.files[0].problem.startswith(
        "a process raised ValueError: batch 3 is empty at data.py:77: it does not say"
    )


def test_what_a_labelled_process_raised_is_told_beside_those_who_wait(
    tmp_path: Path,
) -> None:
    raised = RAISED.format(p="(Worker pid=7) ", file="data.py", line=77)
    (verdict,) = examined(tmp_path, raised + of_gloo((0, 1, 3))).verdicts
    assert verdict.culprits == ()
    assert verdict.text.startswith(
        "(Worker pid=7) raised ValueError: batch 3 is empty at data.py:77, on a rank "
        "that the log does not name; ranks 0–1, 3 gave up waiting"
    )


def test_which_process_of_spawn_raised(tmp_path: Path) -> None:
    spawn = "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 2 "
    outer = RAISED.format(p="", file="train.py", line=9).splitlines()[:-1]
    inner = RAISED.format(p="", file="data.py", line=77)
    report = examined(
        tmp_path,
        "\n".join(
            [*outer, f"{spawn}terminated with the following error:", inner, inner]
        ),
    )
    assert report.files[0].problem == (
        "process 2 of mp.spawn raised ValueError: batch 3 is empty at data.py:77: it "
        "does not say on which rank"
    )


def test_the_watchdog_of_a_rank_whose_gpu_failed(tmp_path: Path) -> None:
    error = "CUDA error: an illegal memory access was encountered"
    ended = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread "
        f"terminated with exception: {error}"
    )
    lines = [line for line in hung() if "[rank2]" not in line]
    own = PREFIXES["none"].format(rank=2) + ended
    (verdict,) = examined(tmp_path, [own, f"  what():  {ended}", *lines]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (2,))
    assert verdict.text.startswith(f"rank 2 ended with {error}; ranks 0–1, 3 wait in")


def test_ranks_that_lost_their_connection_to_another_one(tmp_path: Path) -> None:
    ended = (
        "[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread "
        "terminated with exception: NCCL error: remote process exited or there was a "
        "network error, NCCL version 2.27.3"
    )
    lines = [(PREFIXES["none"] + ended).format(rank=rank) for rank in (0, 1, 3)]
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert verdict.text == (
        "ranks 0–1, 3 gave up waiting; the log has no line of rank 2: it may be cut"
    )


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_of_nccl_that_may_be_a_consequence(
    fails: bool, tmp_path: Path
) -> None:
    error = "torch.distributed.DistBackendError: NCCL error in: x.cpp:2251, unhandled "
    lines = [
        f"{TRACEBACK.format(p=f'[rank{n}]: ', file='train.py', line=88)}[rank{n}]: "
        f"{error}system error (run with NCCL_DEBUG=INFO for details)\n"
        for n in (0, 1)
    ]
    if fails:
        lines.append(RAISED.format(p="[rank3]: ", file="data.py", line=77))
    (verdict,) = examined(tmp_path, "".join(lines)).verdicts
    assert verdict.culprits == ((3,) if fails else ())
    assert verdict.fault == (Fault.RANK_DEAD if fails else Fault.UNDECIDED)
    assert "ranks 0–1 ended with torch.distributed.DistBackendError" in verdict.text


def test_of_a_group_that_one_rank_alone_names_no_other_is_blamed(
    tmp_path: Path,
) -> None:
    lines = [line for line in hung(range(2), late=9) if "[rank1]" in line]
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())


TABLE = """\
{border}
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-25_02:12:09
  host      : node1
  rank      : 12 (local_rank: 4)
  exitcode  : -6 (pid: 812)  (SIGABRT)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 812
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_02:12:08
  host      : node1
  rank      : 11 (local_rank: 3)
  exitcode  : {code} (pid: 811) {signal}
  error_file: /tmp/torchelastic_x/attempt_0/3/error.json
  traceback : {traceback}
{border}
"""


def table(code: int = -9, signal: str = " (SIGKILL)", traceback: str = "") -> str:
    said = traceback or "Signal 9 (SIGKILL) received by PID 811"
    return TABLE.format(border="=" * 60, code=code, signal=signal, traceback=said)


@pytest.mark.parametrize(
    "before", ["Exception in thread Thread-3 (save):", "Exception ignored in: <f>"]
)
def test_an_exception_of_a_thread_does_not_end_a_rank(
    tmp_path: Path, before: str
) -> None:
    """Nor does the one that it has raised while it handled that one."""
    raised = RAISED.format(p="", file="save.py", line=7)
    again = "\nDuring handling of the above exception, another exception occurred:\n\n"
    told = f"{before}\n{raised}{again}{raised}".splitlines()
    found = examined(tmp_path, [f"[rank2]: {line}" for line in told])
    assert found.verdicts == ()
    assert "a thread of rank 2 raised ValueError" in found.files[0].problem


def test_a_rank_that_lived_until_the_end_has_handled_what_it_raised(
    tmp_path: Path,
) -> None:
    raised = RAISED.format(p="[rank11]: ", file="save.py", line=7)
    killed = "  rank      : 12 (local_rank: 4)\n  exitcode  : -9 (pid: 812)\n"
    log = raised + table(code=-15, signal="") + killed
    assert examined(tmp_path, log).verdicts[0].culprits == (12,)
    # The other one had waited for it.
    gave_up = GLOO.format(p="[rank12]: ", file="train.py", line=88)
    log = gave_up + raised + table(code=-15, signal="")
    assert examined(tmp_path, log).verdicts[0].culprits == (11,)


def test_a_table_of_which_the_lines_have_padded_names(tmp_path: Path) -> None:
    """As Docker Compose writes them."""
    log = "".join(f"worker-0  | {line}\n" for line in table().splitlines())
    assert 11 in examined(tmp_path, log).verdicts[0].culprits


def test_the_table_of_failures(tmp_path: Path) -> None:
    gave_up = GLOO.format(p="[rank12]: ", file="train.py", line=88)
    report = examined(tmp_path, gave_up + table())
    one = rank_of(report, 11)
    assert one.death == "rank 11 was killed by signal 9 (SIGKILL)"
    assert one.process == "pid 811"
    # It has waited: SIGABRT is the watchdog's.
    assert rank_of(report, 12).death is None
    assert report.verdicts[0].culprits == (11,)


def test_a_traceback_in_the_table(tmp_path: Path) -> None:
    inside = RAISED.format(p="  ", file="data.py", line=77).lstrip()
    report = examined(tmp_path, table(1, "", inside.rstrip()))
    one = rank_of(report, 11)
    assert (one.exception, str(one.exception_line)) == (
        "ValueError: batch 3 is empty",
        "data.py:77",
    )
    assert one.death is None


@pytest.mark.parametrize(
    "prefix",
    [
        *("3: ", " 3: ", "[pod/job-0/trainer] ", "\x1b[36mworker-1 | \x1b[0m"),
        *("2026-11-27T07:43:41.1234567{}Z ", "2026-11-27T07:43:41.12{}Z stderr F "),
    ],
)
def test_a_launcher_writes_something_before_each_line_of_the_table(
    prefix: str, tmp_path: Path
) -> None:
    inside = RAISED.format(p="  ", file="data.py", line=77).lstrip()
    lines = (table(1, "", inside.rstrip())).splitlines()
    # A time has no zeros at its end.
    report = examined(
        tmp_path,
        [prefix.format(number % 10 or "") + one for number, one in enumerate(lines)],
    )
    one = rank_of(report, 11)
    assert one.exception == "ValueError: batch 3 is empty"
    assert str(one.exception_line) == "data.py:77"
    assert rank_of(report, 12).death == "rank 12 was killed by signal 6 (SIGABRT)"


def test_two_hosts_that_write_their_tables_at_the_same_time(tmp_path: Path) -> None:
    """No rank has the exit code of another one."""
    first = table().splitlines()
    other = table(-11, " (SIGSEGV)").replace(": 11 (", ": 21 (").splitlines()
    mixed = [
        f"{host}: {line}"
        for rows in zip(first, other, strict=True)
        for host, line in enumerate(rows)
    ]
    report = examined(tmp_path, mixed)
    deaths = {rank: one.death or "" for rank, one in report.evidence.ranks.items()}
    assert "SIGSEGV" not in deaths.get(11, "")
    assert "SIGKILL" not in deaths.get(21, "")
    assert "SIGSEGV" in deaths[21]


@pytest.mark.parametrize("prefix", ["", "1: ", "2026-11-27T07:43:41.5Z stderr F "])
def test_the_table_names_the_ranks_of_local_ranks(prefix: str, tmp_path: Path) -> None:
    raised = RAISED.format(p=f"{prefix}[default3]:", file="data.py", line=77)
    rows = table(1, "", "To enable traceback see: x").splitlines()
    report = examined(tmp_path, raised + "".join(f"{prefix}{one}\n" for one in rows))
    assert rank_of(report, 11).exception == "ValueError: batch 3 is empty"


def test_the_table_of_one_host_does_not_name_the_ranks_of_another(
    tmp_path: Path,
) -> None:
    raised = RAISED.format(p="0: [default3]:", file="data.py", line=77)
    rows = table().splitlines()
    report = examined(tmp_path, raised + "".join(f"1: {one}\n" for one in rows))
    assert rank_of(report, 11).exception is None


def test_what_the_launcher_has_ended_was_alive(tmp_path: Path) -> None:
    ended = table(-15, " (SIGTERM)", "Signal 15 (SIGTERM) received by PID 811")
    gave_up = GLOO.format(p="[rank12]: ", file="train.py", line=88)
    (verdict,) = examined(tmp_path, gave_up + ended).verdicts
    assert verdict.culprits == ()
    assert "; rank 11 lived until the launcher ended it" in verdict.text


def test_a_rank_that_never_joined(tmp_path: Path) -> None:
    """Before the group is there, no line has a rank; the key that is awaited has it."""
    text = GLOO.format(p="", file="train.py", line=9)
    start = text.index("RuntimeError")
    key = "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: "
    text = f"{text[:start]}{key}/default_pg/0//cpu//0/11\n"
    ended = table(-15, " (SIGTERM)", "Signal 15 (SIGTERM) received by PID 811")
    report = examined(tmp_path, text * 2 + ended.replace("-6 (pid", "1 (pid"))
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (11,))
    assert verdict.text == (
        "rank 11 has not joined the group of all ranks; others gave up waiting at "
        "train.py:9 in all_reduce of torch.distributed; rank 11 lived "
        "until the launcher ended it"
    )


def test_ranks_that_gave_up_at_different_lines(tmp_path: Path) -> None:
    other = GLOO.format(p="[rank2]: ", file="train.py", line=90)
    (verdict,) = examined(tmp_path, of_gloo((0, 1)) + "\n" + other).verdicts
    assert "ranks 0–1 gave up waiting at train.py:88 in" in verdict.text
    assert "; rank 2 gave up waiting at train.py:90 in" in verdict.text


def test_who_was_killed_while_nobody_gave_up(tmp_path: Path) -> None:
    (verdict,) = examined(tmp_path, table().replace("-6 (pid", "-15 (pid")).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (11,))
    assert verdict.text.startswith("rank 11 was killed by signal 9 (SIGKILL)")


@pytest.mark.parametrize("pid", [811, 4711])
def test_a_rank_that_linux_killed_for_its_memory(pid: int, tmp_path: Path) -> None:
    """The container's log has the kernel's line; it may be of another process."""
    killed = (
        f"[1234.5] Memory cgroup out of memory: Killed process {pid} (python) "
        "total-vm:98765432kB, anon-rss:87654321kB, oom_score_adj:0\n"
    )
    ended = table().replace("-6 (pid", "-15 (pid")
    report = examined(tmp_path, killed + ended)
    reason = ": Linux had no memory left for it" if pid == 811 else ""
    death = f"rank 11 was killed by signal 9 (SIGKILL){reason}"
    assert rank_of(report, 11).death == death
    assert report.verdicts[0].culprits == (11,)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "[Fri Nov 27 07:43:41 2026] Out of memory: Killed process 811 (python) "
            "total-vm:98765432kB",
            "it",
        ),
        ("kernel: Out of memory: Kill process 811 (python) score 900", "it"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0. Some of "
            "the step tasks have been OOM Killed.",
            "a process of Slurm's step 1234.0",
        ),
        (
            "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=77.batch. Some "
            "of your processes may have been killed by the cgroup out-of-memory "
            "handler.",
            "a process of Slurm's step 77.batch",
        ),
    ],
)
def test_another_file_says_why_a_rank_was_killed(
    said: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "dmesg.txt").write_text(f"{said}\n")
    report = examined(tmp_path, table())
    assert rank_of(report, 11).death == (
        "rank 11 was killed by signal 9 (SIGKILL): Linux had no memory left for "
        f"{reason}"
    )
    report = examined(tmp_path, table(-11, " (SIGSEGV)"))
    assert rank_of(report, 11).death == "rank 11 was killed by signal 11 (SIGSEGV)"


@pytest.mark.parametrize(
    ("said", "death"),
    [
        ("79, pid=811, name=python, GPU has fallen off the bus.", True),
        ("79, pid='811', GPU has fallen off the bus.", True),
        ("79, pid=4711, name=python, GPU has fallen off the bus.", False),
        ("45, pid=811, name=python, Ch 00000010", None),
        ("79, GPU has fallen off the bus.", None),
    ],
)
def test_the_driver_of_a_gpu_names_a_process(
    said: str, death: bool | None, tmp_path: Path
) -> None:
    """The watchdog ends that rank with SIGABRT, as it does those that waited."""
    (tmp_path / "dmesg.txt").write_text(f"[1.5] NVRM: Xid (PCI:0000:3b:00): {said}\n")
    gave_up = "".join(
        GLOO.format(p=f"[rank{rank}]: ", file="train.py", line=88) for rank in (11, 12)
    )
    log = table(-6, " (SIGABRT)")
    report = examined(tmp_path, gave_up + log if death else log)
    error = "an error of its GPU: Xid 79, GPU has fallen off the bus"
    if death:
        assert rank_of(report, 11).death == f"rank 11 ended with {error}"
        assert report.verdicts[0].culprits == (11,)
        return
    assert rank_of(report, 11).death == "rank 11 was killed by signal 6 (SIGABRT)"
    told = any(f"process 4711 had {error}" in one.problem for one in report.files)
    assert told == (death is False)


LIGHTNING = (
    "[rank: {local}] Child process with PID 811 terminated with code {code}. "
    "Forcefully terminating all other processes to avoid zombies 🧟"
)


def test_lightning_names_a_process_of_its_host(tmp_path: Path) -> None:
    killed = LIGHTNING.format(local=1, code=-9)
    (verdict,) = examined(tmp_path, [killed]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (1,))
    oom = "Out of memory: Killed process 811 (python) total-vm:98765432kB"
    (verdict,) = examined(tmp_path, [killed], [oom]).verdicts
    assert verdict.text.startswith(
        "rank 1 was killed by signal 9 (SIGKILL): Linux had no memory left for it"
    )
    members = [
        f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/8"
        for rank in (5, 4, 6, 7)
    ]
    report = examined(tmp_path, [*members, killed], [])
    assert (report.verdicts[0].culprits, report.world_size) == ((5,), 8)
    devices = [
        f"LOCAL_RANK: {local} - CUDA_VISIBLE_DEVICES: [0,1,2,3]" for local in range(4)
    ]
    report = examined(tmp_path, [*devices, *members, killed], [])
    assert report.verdicts[0].culprits == (5,)
    report = examined(tmp_path, [*devices, *devices, *members, killed], [])
    assert report.verdicts == ()
    assert report.files[0].problem.endswith(
        "rank 1 of a host, pid 811, was killed by signal 9 (SIGKILL): the log is of "
        "several hosts, and it does not say on which one"
    )
    ended = LIGHTNING.format(local=2, code=-6)
    report = examined(tmp_path, [*hung(), ended], [])
    assert [one.culprits for one in report.verdicts] == [(2,)]
    assert not rank_of(report, 2).death


def test_what_slurm_ends_has_not_ended_by_itself(tmp_path: Path) -> None:
    why = "Slurm ended job 4711 at 2026-11-27T10:00:00: TIME LIMIT"
    said = (
        "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-27T10:00:00 DUE TO "
        "TIME LIMIT ***"
    )
    killed = (
        "mpirun noticed that process rank 3 with PID 4711 on node n1 exited on signal "
        "9 (Killed).\nsrun: error: n1: task 2: Killed"
    )
    report = examined(tmp_path, [said, killed])
    assert (report.verdicts, report.files[0].problem) == ((), why)
    report = examined(tmp_path, [*hung(), said])
    assert report.verdicts[0].culprits == (2,)
    assert report.files[0].problem == why


@pytest.mark.parametrize("between", [" ", "\n"])
def test_mpirun_names_a_rank(tmp_path: Path, between: str) -> None:
    said = (
        "mpirun noticed that process rank 3 with PID 4711 on node n1 exited on"
        f"{between}signal 11 (Segmentation fault).\n"
    )
    report = examined(tmp_path, said)
    assert rank_of(report, 3).death == "rank 3 was killed by signal 11 (SIGSEGV)"


@pytest.mark.parametrize(
    "why",
    [
        "Worker group FAILED. 2/3 attempts left",
        "Detected 1 new nodes from group_rank=0",
    ],
)
def test_the_last_attempt_counts(tmp_path: Path, why: str) -> None:
    restart = (
        "I1206 torch/distributed/elastic/agent/server/api.py:945] [default] "
        f"{why}; will restart worker group"
    )
    raised = RAISED.format(p="[rank1]: ", file="data.py", line=77).splitlines()
    report = examined(tmp_path, [*raised, *hung(late=1), restart, *hung(late=2)])
    assert report.verdicts[0].culprits == (2,)
    assert rank_of(report, 1).exception is None


def test_stacks_of_faulthandler_in_a_log(tmp_path: Path) -> None:
    stack = (
        "Timeout (0:10:00)!\n"
        "Thread 0x00007ff8a2ca9b80 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 331 in wait\n'
        '  File "/job/data.py", line 77 in next_batch\n'
    )
    own = "\n".join(f"[default2]:{line}" for line in stack.splitlines())
    report = examined(tmp_path, "\n".join([*hung(prefix="tee"), own]))
    assert str(rank_of(report, 2).location) == "data.py:77"
    assert report.verdicts[0].fault is Fault.RANK_BUSY_ELSEWHERE


def test_a_file_of_one_rank(tmp_path: Path) -> None:
    for n in (0, 1, 3):
        text = GLOO.format(p="", file="train.py", line=88)
        (tmp_path / f"rank{n}.err").write_text(text)
    raised = RAISED.format(p="", file="data.py", line=77)
    (tmp_path / "rank2.err").write_text(raised)
    report = examine([tmp_path])
    assert report.verdicts[0].culprits == (2,)


# -- lines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "rank", "local", "text"),
    [
        ("[rank13]: x", 13, None, "x"),
        ("[default3]:[rank13]:x", 13, "default3", "x"),
        ("[trainer3]: x", None, "trainer3", " x"),
        ("  3: [rank13]: x", 13, None, "x"),
        ("10%|# |\r[rank2]:[E] x", 2, None, "[E] x"),
        ("\x1b[31m[rank2]:\x1b[0m x", 2, None, "x"),
        ("x", None, None, "x"),
        ("y" * 400 + "[rank2]: x", None, None, "y" * 400 + "[rank2]: x"),
    ],
)
def test_prefixes(line: str, rank: int | None, local: str | None, text: str) -> None:
    source, rest = split_line(line + "\r\n")
    assert (source.rank, source.local, rest) == (rank, local, text)


def test_no_work_yet() -> None:
    line = group_line(STATUS["2.7"].format(place=0, seq=-1, done=-1))
    assert line is not None
    assert (line.enqueued, line.completed) == (-1, -1)
    assert work_line("WorkNCCL(SeqNum=1") is None


def test_damaged_logs(tmp_path: Path) -> None:
    text = ("\n".join(hung()) + "\n" + of_gloo((0, 1)) + table()).encode()
    chance = random.Random(31)
    for number in range(60):
        data = bytearray(text)
        for _ in range(chance.randrange(1, 40)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        start = chance.randrange(len(data))
        (tmp_path / "x.log").write_bytes(bytes(data[start:] + data[: start // 2]))
        assert len(examine([tmp_path]).files) == 1, number


@pytest.mark.parametrize(
    "line",
    [
        "[rank{n}]: x",
        "[rank0]: [PG ID 0 PG GUID 0(default_pg) Rank {n}] last enqueued work: {n}, "
        "last completed work: {n}",
        WORK.replace("{place}", "{n}").replace("{seq}", "{n}").replace("{op}", "X"),
        "global_world_sizes=[{n}]",
        "  rank      : {n} (local_rank: {n})",
        "noticed that process rank {n} with PID {n} on node x exited on signal {n} (K)",
    ],
)
def test_numbers_without_end(tmp_path: Path, line: str) -> None:
    for digits in (7, 19, 5000):
        text = line.replace("{n}", "9" * digits)
        report = examined(tmp_path, f"[rank0]: x\n{text}\n")
        assert report.verdicts == ()


def test_a_line_that_was_made_to_take_long(tmp_path: Path) -> None:
    # The test's timeout would be exceeded, if patterns saw the whole line.
    examined(tmp_path, "[PG 0 Rank 0]" * 100_000 + "\n" + "[rank0]: [PG 0(" * 100_000)


def test_a_large_log_is_cut_down_to_what_tells() -> None:
    other = b"step 1 loss 0.3\n" * 100_000
    log = io.BytesIO(other + "\n".join(hung()).encode() + b"\n" + other)
    kept = extract(log, 1 << 20)
    assert kept.count(b"[rank") >= len(hung())
    assert len(kept) < 20_000
    endless = io.BytesIO(b"x" * 10_000_000)
    assert extract(endless, 1 << 20) == b""


def reported(*lines: str, rank: int = 0, group: str = "0(default_pg)") -> list[str]:
    """Return the report that TORCH_NCCL_DESYNC_DEBUG has a rank write."""
    start = f"[rank{rank}]:[E1206 18:44:12.715 ProcessGroupNCCL.cpp:632] "
    return [f"{start}[PG ID 0 PG GUID {group} Rank {rank}] ", *lines]


DESYNC = (
    "\t - [0] Timeout at collective: ALLREDUCE, #13",
    "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the "
    "desync are:",
    "\t     [2] finished collective #12, but didn't join collective #13 (count from 1)",
    "\t - Snapshot of ranks' latest states:",
    "\t   #12 finished ranks:",
    "\t     [2] finished ALLREDUCE",
    "\t   #13 started ranks:",
    "\t     [0, 1, 3] started ALLREDUCE",
)


@pytest.mark.parametrize("tee", ["", "[default0]:"])
def test_one_ranks_desync_report_tells_how_far_all_came(
    tmp_path: Path, tee: str
) -> None:
    own = hung(range(1))
    log = [tee + line for line in [*own, *reported(*DESYNC), "and so on"]]
    (verdict,) = examined(tmp_path, log).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (2,))
    assert (verdict.op, verdict.seq) == ("all_reduce", 13)
    assert verdict.group.ranks == (0, 1, 2, 3)
    assert "left no records" not in verdict.text


def test_a_desync_report_of_ranks_that_never_came(tmp_path: Path) -> None:
    told = (
        "\t - [0] Timeout at collective: ALLREDUCE, #1",
        "\t - To our best knowledge, ranks [2] are the lagging ranks that caused this "
        "timeout. They never joined any collectives",
    )
    lines = [
        line.replace("SeqNum=13", "SeqNum=1")
        .replace("id: 13", "id: 1")
        .replace("enqueued work: 13", "enqueued work: 1")
        .replace("completed work: 12", "completed work: 0")
        for line in hung()
        if "[rank2]" not in line
    ]
    (verdict,) = examined(tmp_path, [*lines, *reported(*told)]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (2,))
    assert "left no records" not in verdict.text


def test_a_desync_report_in_which_all_have_joined(tmp_path: Path) -> None:
    told = (
        DESYNC[0],
        DESYNC[1],
        "\t   - [0, 1, 2, 3] joined but didn't finish collective #13 (count from 1)",
        DESYNC[3],
        "\t   #13 started ranks:",
        "\t     [0, 1, 2, 3] started ALLREDUCE",
    )
    (verdict,) = examined(tmp_path, [*hung(range(1)), *reported(*told)]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.EXECUTION_HANG, (0, 1, 2, 3))


def test_a_desync_report_of_another_op(tmp_path: Path) -> None:
    told = (
        *DESYNC[:2],
        *(DESYNC[3], "\t   #13 started ranks:"),
        *("\t     [0, 1, 3] started ALLREDUCE", "\t     [2] started BROADCAST"),
    )
    (verdict,) = examined(tmp_path, [*hung(range(1)), *reported(*told)]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.OP_MISMATCH, (2,))


def test_the_ranks_of_a_desync_report_are_the_groups(tmp_path: Path) -> None:
    """Of a group whose ranks no line tells, the places are not global ranks."""
    start = "[rank4]:[E1206 18:44:12.715 X.cpp:632] "
    own = [
        start
        + line.replace("0(default_pg)", "7(tp)").format(
            place=0, seq=13, done=12, op="ALLREDUCE"
        )
        for line in (WORK, STATUS["2.7"])
    ]
    report = examined(tmp_path, [*own, *reported(*DESYNC, rank=4, group="7(tp)")])
    assert [one.culprits for one in report.verdicts] == [()]


#: Gloo's words of a monitored barrier, of the group's first rank and of another one.
BARRIER = (
    "[Rank 0]: Rank{late} failed to pass monitoredBarrier in 4000 ms",
    "Rank {n} successfully reached monitoredBarrier, but received errors while waiting "
    "for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
)


def at_barrier(late: str, *places: tuple[int, int]) -> str:
    """Return the errors of ranks, each with its place in the group."""
    text = ""
    for rank, place in places:
        error = GLOO.format(p=f"[rank{rank}]: ", file="train.py", line=9)
        said = BARRIER[place > 0].format(late=late, n=place)
        text += f"{error[: error.index('RuntimeError')]}RuntimeError: {said}\n"
    return text


@pytest.mark.parametrize(
    ("late", "places", "culprits"),
    [
        (" 1", [(0, 0), (2, 2), (3, 3)], (1,)),
        ("s 1, 2", [(0, 0), (3, 3)], (1, 2)),
        # Ranks 0, 2, 4 may be the group, and rank 1 of it is not that of the world.
        (" 1", [(0, 0), (4, 2)], ()),
        # It may be any rank above 1.
        (" 2", [(0, 0), (1, 1)], ()),
    ],
)
def test_a_monitored_barrier_names_who_is_late(
    tmp_path: Path, late: str, places: list[tuple[int, int]], culprits: tuple[int, ...]
) -> None:
    (verdict,) = examined(tmp_path, at_barrier(late, *places)).verdicts
    assert verdict.culprits == culprits
    assert ("not come to the barrier" in verdict.text) == bool(culprits)
    assert verdict.fault is (Fault.MISSING_RANKS if culprits else Fault.UNDECIDED)


def test_a_rank_that_gloo_ended_is_not_the_one_of_another_size(tmp_path: Path) -> None:
    """It has received more than its own op takes: another rank's may be right."""
    words = (
        "[default3]:terminate called after throwing an instance of "
        "'gloo::EnforceNotMet'\n"
        "[default3]:  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] "
        "op.preamble.length <= op.nbytes. 28 vs 16. Received data size doesn't match\n"
    )
    ended = table(-6, " (SIGABRT)", "Signal 6 (SIGABRT) received by PID 811")
    gave_up = of_gloo((9, 12))
    (verdict,) = examined(tmp_path, words + gave_up + "\n" + ended).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.SIZE_MISMATCH, ())
    assert (
        "rank 11 was killed by signal 6 (SIGABRT): gloo received 28 bytes, and "
        "expected 16; ranks 9, 12 gave up waiting at train.py:88" in verdict.text
    )


SEGFAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007fc8bea55040 (most recent call first):
  File "/job/train.py", line 17 in main
"""
TOO_LONG = "  what():  [enforce fail] op.preamble.length <= op.nbytes. 28 vs 16. Is\n"


@pytest.mark.parametrize(
    ("words", "fault", "culprits", "told"),
    [
        (SEGFAULT, Fault.RANK_DEAD, (9,), "a fatal error: Segmentation fault;"),
        (TOO_LONG, Fault.SIZE_MISMATCH, (), "gloo received 28 bytes, and expected 16"),
    ],
)
def test_the_rank_of_a_local_rank_follows_from_another_one_of_its_host(
    tmp_path: Path, words: str, fault: Fault, culprits: tuple[int, ...], told: str
) -> None:
    for rank in (8, 9, 10):
        folder = tmp_path / "none_x" / "attempt_0" / str(rank - 8)
        folder.mkdir(parents=True)
        text = GLOO.format(p=f"[rank{rank}]: ", file="train.py", line=9)
        (folder / "stderr.log").write_text(words if rank == 9 else text)
    report = examine([tmp_path])
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (fault, culprits)
    assert (
        f"rank 9 ended with {'a fatal error: ' * (not culprits)}{told}" in verdict.text
    )
    assert "ranks 8, 10 gave up waiting at train.py:9" in verdict.text


def test_a_local_rank_of_two_hosts_in_one_folder_is_no_rank(tmp_path: Path) -> None:
    for rank, local in (8, 0), (3, 2):
        folder = tmp_path / "attempt_0" / str(local)
        folder.mkdir(parents=True)
        text = GLOO.format(p=f"[rank{rank}]: ", file="train.py", line=9)
        (folder / "stderr.log").write_text(text)
    (tmp_path / "attempt_0" / "1").mkdir()
    (tmp_path / "attempt_0" / "1" / "stderr.log").write_text(SEGFAULT)
    (verdict,) = examine([tmp_path]).verdicts
    assert verdict.culprits == ()


def timed_out(
    rank: int, group: str, place: int, op: str, size: int, last: tuple[int, int]
) -> list[str]:
    """Return the two lines of the watchdog of one group, whose op #13 timed out."""
    work = WORK.replace("4096", str(size))
    status = STATUS["2.7"].replace("0(default_pg)", group)
    facts = {"place": place, "op": op, "seq": 13, "done": last[1]}
    status = status.replace("enqueued work: {seq}", f"enqueued work: {last[0]}")
    start = PREFIXES["none"].format(rank=rank)
    return [start + line.format(**facts) for line in (work, status)]


@pytest.mark.parametrize("mixed", [False, True])
def test_ops_of_two_groups_may_have_one_number(tmp_path: Path, mixed: bool) -> None:
    """Of lines that mix, which op is whose is not known: that none is there is."""
    lines = []
    for rank in (0, 1, 3):
        one = timed_out(rank, "0(default_pg)", rank, "ALLREDUCE", 2, (13, 12))
        other = timed_out(rank, f"{7 + rank}(tp)", rank, "BROADCAST", 8, (13, 12))
        both = [*one, *other]
        lines += [both[n] for n in (0, 2, 1, 3)] if mixed else both
    late = PREFIXES["none"].format(rank=2) + DUMP.format(place=2, done=12)
    (verdict,) = examined(tmp_path, [*lines, late]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (2,))
    assert verdict.op == ("" if mixed else "all_reduce")


def test_lines_of_old_releases_name_ranks_of_a_group_alone(tmp_path: Path) -> None:
    """As torch 2.1 writes them: which ranks of the job these are is not known."""
    lines = [
        f"[E ProcessGroupNCCL.cpp:474] [Rank {rank}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=13, OpType=ALLREDUCE, NumelIn=8, "
        "NumelOut=8, Timeout(ms)=1800000) ran for 1800213 milliseconds before timing"
        for rank in (0, 2, 3)
    ]
    report = examined(tmp_path, lines)
    assert report.verdicts == ()
    assert [one.problem for one in report.files] == [
        "ranks 0, 2–3 gave up all_reduce #13: these are ranks in a group, which it "
        "does not name"
    ]


def test_groups_of_a_split_share_a_name(tmp_path: Path) -> None:
    """Ranks 0, 2 and ranks 1, 3: nothing tells whose peers are whose."""
    counts = {0: (13, 12), 2: (13, 12), 1: (13, 13), 3: (13, 13)}
    lines = [
        line
        for rank, last in counts.items()
        for line in timed_out(rank, "0:split:3(half)", rank // 2, "ALLREDUCE", 8, last)
    ]
    assert [one.culprits for one in examined(tmp_path, lines).verdicts] == [()]


def test_a_log_does_not_say_for_whom_a_send_waits(tmp_path: Path) -> None:
    """Rank 0 comes not to its group's op because of another rank, maybe rank 2."""
    lines = [
        *timed_out(0, "5(pp)", 0, "SEND", 8, (13, 12)),
        *timed_out(1, "6(tp)", 1, "ALLREDUCE", 8, (13, 12)),
    ]
    lines.append(
        PREFIXES["none"].format(rank=0)
        + DUMP.format(place=0, done=12).replace("0(default_pg)", "6(tp)")
    )
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert "a log does not say which rank is on the other side" in verdict.text


def test_counters_of_sends_show_no_rank_ahead(tmp_path: Path) -> None:
    """More are over than were issued: these are the numbers of different things."""
    lines = []
    for rank in (2, 3):
        lines += timed_out(rank, "0(default_pg)", rank, "ALLREDUCE", 8, (13, 19))
    for rank in (0, 1):
        start = PREFIXES["none"].format(rank=rank)
        lines.append(start + DUMP.format(place=rank, done=18))
    (verdict,) = examined(tmp_path, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (0, 1))


def test_what_the_job_said_itself(tmp_path: Path) -> None:
    said = "rank 1 is dead: its process has ended; the report is rankscope-report/a"
    lines = [
        f"[default0]:(Pdb) rankscope: {said}",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/job/train.py", line 8, in <module>',
        "[rank0]: RuntimeError: Connection closed by peer [::1]:1 gloo",
        f"[rank0]: Why, as the ranks' records tell: {said}",
    ]
    for part in lines, lines[:1], lines[1:]:
        (verdict,) = examined(tmp_path, part).verdicts
        assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
        assert verdict.text == f"the job itself said: {said}"
        gave_up = "rank 0 gave up waiting at train.py:8"
        assert verdict.consequences == ((gave_up,) if len(part) > 1 else ())
    # Without a report, what the errors say differs.
    reason = "all_reduce: rank 1 sent 8 bytes where 288 were expected: the sizes differ"
    error = f"E: all_reduce #1: the group was aborted: {reason} between ranks (at 10:1)"
    lines = [*lines[1:3], f"[rank0]: rankscope.backends.errors.DistAbortedError{error}"]
    (verdict,) = examined(tmp_path, lines).verdicts
    assert verdict.text == f"the job itself said: {reason} between ranks"
    assert verdict.consequences == (gave_up,)
    # A report tells more, whichever line comes first.
    (verdict,) = examined(tmp_path, [*lines, f"rankscope: {said}"]).verdicts
    assert verdict.text == f"the job itself said: {said}"
    (verdict,) = examined(tmp_path, [f"rankscope: {said}", *lines]).verdicts
    assert verdict.text == f"the job itself said: {said}"
    # What the log tells, too, has a kind and its ranks.
    table = ["  rank      : 1 (local_rank: 1)", "  exitcode  : -9 (pid: 7)"]
    said = "rank 1 was killed by signal 9 (SIGKILL); ranks 0, 2 wait; the report is x"
    (verdict,) = examined(tmp_path, [f"rankscope: {said}", *table]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (1,))


def test_the_launchers_own_exception_is_no_ranks(tmp_path: Path) -> None:
    """Its output is in the folder of a run that is called after a rank."""
    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/job/train.py", line 8, in <module>',
        "[rank1]: KeyError: 'lr'",
        "Traceback (most recent call last):",
        '  File "/opt/bin/torchrun", line 8, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ]
    folder = tmp_path / "eval_on_rank0"
    folder.mkdir()
    (verdict,) = examined(folder, lines).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (1,))


SRUN = """\
 0: starting
 3: Traceback (most recent call last):
 0: Traceback (most recent call last):
 3:   File "/job/train.py", line 31, in main
 0:   File "/job/train.py", line 90, in <module>
 3:     raise ValueError("bad sample")
 3: ValueError: bad sample
 0: RuntimeError: gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1
srun: error: node1: task 3: Exited with exit code 1
srun: error: node2: tasks 1-2: Killed
srun: Terminating StepId=4711.0
srun: error: node2: task 5: Killed
"""


def test_the_tasks_of_srun_are_ranks_unless_torchrun_has_started_them(
    tmp_path: Path,
) -> None:
    (verdict,) = examined(tmp_path, SRUN).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (1, 2, 3))
    for said in (
        "rank 3 ended with ValueError: bad sample at train.py:31",
        "ranks 1–2 were killed by signal 9 (SIGKILL)",
        "rank 0 gave up waiting at train.py:90",
    ):
        assert said in verdict.text
    stack = (
        '3: Thread 0x07 (most recent call first):\n3:   File "/job/a.py", line 7 in f\n'
    )
    report = examined(tmp_path, stack)
    assert str(rank_of(report, 3).location) == "a.py:7"
    # A task of srun is a host of torchrun.
    lines = (
        "0: [rank4]: Traceback (most recent call last):\n0: [rank4]: KeyError: 'lr'\n"
    )
    report = examined(tmp_path, SRUN + lines)
    assert [one.culprits for one in report.verdicts] == [(4,)]
    table = "0:   rank      : 4 (local_rank: 0)\n0:   exitcode  : 1 (pid: 7)\n"
    assert 3 not in examined(tmp_path, SRUN + table).evidence.ranks
