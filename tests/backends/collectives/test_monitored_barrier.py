"""monitored_barrier: its patience is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.groups.world import world
from tests.backends.manual import Manual


def test_who_waits_for_the_verdict_is_not_timed_out(tmp_path: Path) -> None:
    # Rank 1 waits twice as long as the barrier's timeout: rank 0 may come last.
    dist.Backend.register_backend("manual", Manual, devices="cpu")
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group(
        "cpu:manual", store=store, rank=1, world_size=2, wait_for_workers=False
    )
    seen: list[tuple[str, str, int]] = []
    hook = dist.add_op_hook(
        lambda record: seen.append(("pre", record.op_type.value, record.seq)),
        lambda record, work: seen.append(("post", work.state.value, record.seq)),
    )
    try:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 did not reach it"):
            dist.monitored_barrier(timeout=0.2)
        assert [one[:2] for one in seen] == [
            ("pre", "monitored_barrier"),
            ("post", "failed"),
        ]
        assert seen[1][2] == 1
        assert world.get_group().aborted is None
    finally:
        hook.remove()
        world.destroy()
        store.close()
        del dist.Backend.registry["manual"]
        Manual.made.clear()
