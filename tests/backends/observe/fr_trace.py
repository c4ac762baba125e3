"""Runs in the environment that has PyTorch: its trace analyser on folders of dumps.

    python fr_trace.py FOLDER...

Prints one JSON object: what PyTorch's own dump of a process looks like
(``reference``), the ops that the analyser knows (``collectives``), and for each
folder its verdict.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components.types import COLLECTIVES


def reference() -> dict[str, Any]:
    """The types in PyTorch's own dump of one all_reduce."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    dist.destroy_process_group()

    def types(found: dict[str, Any]) -> dict[str, str]:
        return {key: type(value).__name__ for key, value in found.items()}

    (group,), (status,) = dump["pg_config"].values(), dump["pg_status"].values()
    (entry,) = dump["entries"]
    return {
        "version": dump["version"],
        "dump": types(dump),
        "pg_config": types(group),
        "pg_status": types(status),
        "entry": types(entry),
        "frame": types(entry["frames"][0]),
    }


def verdict(folder: str) -> list[dict[str, Any]]:
    """Each collective that the analyser found, in its order."""
    output = os.path.join(folder, os.pardir, f"{os.path.basename(folder)}.pickle")
    fr_trace.main([folder, "--output", output])
    with open(output, "rb") as file:
        _, found = pickle.load(file)
    matched: dict[int, int] = {}
    for call in found.ncclcalls:
        matched[call.collective_id] = matched.get(call.collective_id, 0) + 1
    return [
        {
            "group": one.group_id,
            "op": one.collective_name,
            "seq": one.collective_seq_id,
            # On every rank of the group, and nothing about them differed.
            "matched": matched.get(one.id, 0) >= len(one.expected_ranks),
            "missing": sorted(one.missing_ranks or ()),
            "culprits": {
                rank: str(other.type_of_mismatch)
                for rank, other in (one.mismatch_collectives or {}).items()
            },
        }
        for one in found.collectives
    ]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "reference": reference(),
                "collectives": sorted(COLLECTIVES),
                **{os.path.basename(f): verdict(f) for f in sys.argv[1:]},
            }
        )
    )
