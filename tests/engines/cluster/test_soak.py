"""Random faults in a row: after each the group comes back, and nothing is left.

``RANKSCOPE_SOAK_FAULTS`` sets how many faults (30), ``RANKSCOPE_SOAK_SEED`` the
seed, which is printed: the same faults come again with it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import pytest

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, Execution
from tests.engines.cluster.faults import HANG, SUM, WAIT, all_in_flight, stop

FAULTS = int(os.environ.get("RANKSCOPE_SOAK_FAULTS", "30"))

pytestmark = [
    pytest.mark.processes,
    # A fault takes one second, or four where an engine is started again.
    pytest.mark.timeout(60 + 12 * FAULTS),
]

#: All ranks are busy with collectives, until somebody ends it.
STREAM = """
x = np.ones(2000, np.float32)
while True:
    dist.all_reduce(x)
    x[:] = 1
"""
RAISE = """
if rank == {victim}:
    raise ValueError("a fault on purpose")
dist.all_reduce(np.ones(10))
"""
MISMATCH = """
if rank == {victim}:
    dist.broadcast(np.ones(10), 0)
dist.all_reduce(np.ones(10))
"""

#: Seconds that a cell may still run once its group was aborted.
RELEASE = 30
#: What an engine may have more than at the start: threads and descriptors that
#: come with the first abort, and garbage of the interpreter.
MORE_DESCRIPTORS, MORE_THREADS, MORE_MEMORY = 8, 3, 60 << 20


@dataclass
class Usage:
    """What a process has by now."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)

    def surplus(self, before: Usage) -> list[str]:
        """What is more than `before`, beyond what may be."""
        pairs = (
            ("descriptors", self.descriptors, before.descriptors, MORE_DESCRIPTORS),
            ("threads", self.threads, before.threads, MORE_THREADS),
            ("bytes", self.memory, before.memory, MORE_MEMORY),
        )
        return [
            f"{now} {what}, {then} at the start"
            for what, now, then, more in pairs
            if now > then + more
        ]


@dataclass
class Soak:
    """A cluster, and what its ranks are to have in their variables."""

    cluster: Cluster
    random: random.Random
    #: Rank → the value of `mine` there.
    mine: dict[int, int] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def give(self, ranks: list[int]) -> None:
        """Set `mine` on ranks that have a new engine."""
        for rank in ranks:
            self.mine[rank] = self.random.randrange(1 << 30)
            self.cluster.push({"mine": self.mine[rank]}, rank, timeout=WAIT)

    # -- what runs when a fault strikes ------------------------------------

    def victim(self) -> int:
        return self.random.randrange(self.cluster.n)

    def busy(self, victim: int) -> Execution | None:
        """Nothing, a hang that `victim` causes, or a stream of collectives."""
        what = self.random.choice(["idle", "hang", "stream"])
        self.told[-1] += f" ({what})"
        if what == "idle":
            return None
        code = STREAM if what == "stream" else HANG.format(absent=victim)
        cell = self.cluster.execute(code)
        others = [rank for rank in self.cluster.ranks if rank != victim]
        if what == "hang":
            until(lambda: all_in_flight(self.cluster, others), WAIT, "the hang")
        else:
            until(self.streaming, WAIT, "the stream of collectives")
        return cell

    def streaming(self) -> bool:
        groups = [one.group("default") for one in self.cluster.status().ranks]
        return all(one is not None and (one.issued or 0) > 5 for one in groups)

    # -- the faults --------------------------------------------------------

    def kill(self) -> None:
        victim = self.victim()
        cell = self.busy(victim)
        os.kill(self.cluster.pids[victim], signal.SIGKILL)
        until(lambda: self.cluster.status().dead == [victim], WAIT, "the death")
        self.release(cell)
        self.cluster.restart([victim])
        self.give([victim])

    def stop_and_continue(self) -> None:
        victim = self.victim()
        cell = self.busy(victim)
        pid = self.cluster.pids[victim]
        stop(pid)
        with pytest.raises(ClusterError, match=rf"rank {victim}: no answer within"):
            self.cluster.abort(reason="a rank was stopped")
        if cell is not None:
            # The others are free, whatever the stopped one does.
            until(lambda: set(cell.ranks_running) <= {victim}, WAIT, "the others")
        if self.random.random() < 0.7:
            os.kill(pid, signal.SIGCONT)
            self.release(cell)
        else:
            self.told[-1] += ", restarted"
            self.cluster.restart([victim])
            self.release(cell)
            self.give([victim])

    def exception(self) -> None:
        victim = self.victim()
        cell = self.cluster.execute(RAISE.format(victim=victim))
        until(lambda: victim in cell.errors, WAIT, "the error")
        assert cell.errors[victim].ename == "ValueError"
        self.release(cell)

    def mismatch(self) -> None:
        cell = self.cluster.execute(MISMATCH.format(victim=self.victim()))
        self.release(cell)

    def interrupt(self) -> None:
        cell = self.busy(self.victim())
        self.cluster.interrupt()
        self.release(cell)

    # -- the way back ------------------------------------------------------

    def release(self, cell: Execution | None) -> None:
        """Abort and interrupt, as a person does, until the cell has ended."""
        self.cluster.abort(reason="the soak releases it")
        if cell is None:
            return
        deadline = time.monotonic() + RELEASE
        while not cell.wait(0.2):
            # Whoever was not in a collective is where only this reaches.
            self.cluster.interrupt(cell.ranks_running or None)
            assert time.monotonic() < deadline, f"{cell}: {self.cluster.where()}"

    def check(self) -> None:
        """Everything works, and nobody alive has lost a variable."""
        self.cluster.rebuild()
        self.cluster.execute(SUM).result(WAIT)
        assert self.cluster.pull("mine", timeout=WAIT) == self.mine
        assert self.cluster.status(fresh=True).dead == []

    def strike(self, number: int) -> None:
        """One fault, and the way back from it."""
        name, fault = self.random.choice(list(self.faults().items()))
        self.told.append(f"#{number} {name}")
        began = time.monotonic()
        fault()
        self.check()
        self.told[-1] += f" {time.monotonic() - began:.2f} s"

    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "kill": self.kill,
            "stop": self.stop_and_continue,
            "exception": self.exception,
            "mismatch": self.mismatch,
            "interrupt": self.interrupt,
        }

    # -- what is left ------------------------------------------------------

    def usage(self) -> dict[str, Usage]:
        """What each engine and this process have."""
        self.cluster.execute("import gc\ngc.collect()").result(WAIT)
        used = {f"rank {r}": Usage.of(pid) for r, pid in self.cluster.pids.items()}
        return {"notebook": Usage.of(os.getpid()), **used}

    def processes(self) -> int:
        """How many living processes the cluster has: controller, engines, all.

        Except fork servers: there is one for all ranks first, and one more for each
        rank that was restarted alone and lives.
        """
        launched = self.cluster._launched
        assert launched is not None
        servers = [one for one in launched.fork_servers() if lives(one)]
        return len([one for one in launched.processes() if lives(one)]) - len(servers)


@pytest.fixture
def soak(cluster: Cluster) -> Iterator[Soak]:
    seed = int(
        os.environ.get("RANKSCOPE_SOAK_SEED")
        or random.SystemRandom().randrange(1 << 32)
    )
    print(f"RANKSCOPE_SOAK_SEED={seed}")
    one = Soak(cluster, random.Random(seed))
    yield one
    print("\n".join(one.told))


@pytest.mark.soak
def test_faults_in_a_row(soak: Soak) -> None:
    soak.give(soak.cluster.ranks)
    soak.check()
    # What comes with the first fault of each kind, and stays, is no leak.
    for name, fault in soak.faults().items():
        soak.told.append(f"first {name}")
        fault()
        soak.check()
    processes, before = soak.processes(), soak.usage()
    for number in range(FAULTS):
        soak.strike(number)

    def left() -> list[str]:
        now = soak.usage()
        told = [f"{who}: {x}" for who in now for x in now[who].surplus(before[who])]
        if (count := soak.processes()) > processes:
            told.append(f"{count} processes, {processes} at the start")
        return told

    soak.told += [f"{who}: {before[who]} -> {now}" for who, now in soak.usage().items()]
    deadline = time.monotonic() + WAIT
    while (surplus := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not surplus
