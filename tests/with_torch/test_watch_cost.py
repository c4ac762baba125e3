"""What the watch costs: CPU time of its thread against the steps of a DDP model."""

from __future__ import annotations

from tests.with_torch.ranks import Ranks

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
            "for _ in range(4): model(x).sum().backward()\n"
        )
        ranks.run(
            f"began, spent = time.perf_counter(), {SPENT}\n"
            "for _ in range(12): model(x).sum().backward()\n"
            f"share = ({SPENT} - spent) / (time.perf_counter() - began)\n"
        )
        for rank in range(2):
            assert 0 < ranks.ask(rank, "share") < 0.01
            # The gradients were read meanwhile.
            records = ranks.ask(rank, "local_dump()")["records"]
            assert {one["op"] for one in records} >= {"all_reduce"}
