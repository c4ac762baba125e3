"""What the watch costs: CPU time of its thread against the steps of a DDP model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.with_torch.ranks import Ranks
from tests.with_torch.scripts import Torchrun, until

#: Seconds of CPU time of the watch's thread so far.
SPENT = (
    "int(open(f'/proc/self/task/{watch()._thread.native_id}/schedstat')"
    ".read().split()[0]) / 1e9"
)


def test_the_thread_takes_less_than_a_hundredth_of_a_step() -> None:
    with Ranks(2) as ranks:
        ranks.init()
        ranks.run(
            "layers = [torch.nn.Linear(1000, 1000) for _ in range(25)]\n"
            "model = torch.nn.parallel.DistributedDataParallel(\n"
            "    torch.nn.Sequential(*layers))\n"
            "x = torch.ones(8, 1000)\n"
            "for _ in range(2): model(x).sum().backward()\n"
        )
        ranks.run(
            f"began, spent = time.perf_counter(), {SPENT}\n"
            "for _ in range(6): model(x).sum().backward()\n"
            f"share = ({SPENT} - spent) / (time.perf_counter() - began)\n"
        )
        for rank in range(2):
            assert 0 < ranks.ask(rank, "share") < 0.01
            # The gradients were read meanwhile.
            records = ranks.ask(rank, "local_dump()")["records"]
            assert {one["op"] for one in records} >= {"all_reduce"}


#: A DDP model of 25 million parameters; each rank notes the part of its time that the
#: threads of Rankscope and of its sockets took, while a notebook is attached.
STEPS = """
import json, threading
def spent():
    names = {one.native_id: one.name for one in threading.enumerate()}
    total = 0.0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                name = names.get(int(task), file.read())
            if name.startswith(("rankscope", "ZMQ")):
                with open(f"/proc/self/task/{task}/schedstat") as file:
                    total += int(file.read().split()[0]) / 1e9
        except FileNotFoundError:
            continue
    return total
layers = [torch.nn.Linear(1000, 1000) for _ in range(25)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
x = torch.ones(8, 1000)
def steps(count):
    for _ in range(count):
        model(x).sum().backward()
steps(2)
shares = {}
for attached in (False, True):
    if attached:
        note(f"ready.{rank}")
        wait("attached")
        steps(1)
    began, before = time.perf_counter(), spent()
    steps(8)
    shares[str(attached)] = (spent() - before) / (time.perf_counter() - began)
note(f"shares.{rank}", json.dumps(shares))
wait("go")
"""


def test_a_script_pays_little_for_its_board(
    tmp_path: Path,
) -> None:
    with Torchrun(2, STEPS, tmp_path) as script:
        for rank in range(2):
            script.read(f"ready.{rank}")
        with script.attach() as job:
            seen: set[int] = set()
            job.subscribe(lambda rank, summary: seen.add(rank))
            script.let("attached")
            shares = [json.loads(script.read(f"shares.{rank}")) for rank in range(2)]
            until(lambda: seen == {0, 1}, script)
            script.let("go")
            assert script.finish() == 0, script.output
    for share in shares:
        assert 0 < share["False"] < 0.01, shares
        # Rank 0 serves the notebook: 0.8 % on two busy cores, the other rank 0.7 %.
        assert 0 < share["True"] < 0.0125, shares
