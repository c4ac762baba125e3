"""Writes what a simulated job leaves behind, in the form of torch's recorder."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from typing import Any

from tests.backends.post_mortem.simulation import Issued, Simulation
from tests.backends.post_mortem.training_job import Group

__all__ = ["Form", "dump_files"]

_START_NS = 1_795_000_000_000_000_000
_LIBRARY = "/opt/env/lib/python3.12/site-packages/torch/distributed/"
_GLOO_NAMES = {
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "all_reduce",
    "all_reduce_barrier": "barrier",
}


@dataclass(frozen=True)
class Form:
    """How the dumps are written."""

    #: "full", "active" (of a timeout: only what has not retired), "json" or "gloo".
    kind: str = "full"
    version: str = "2.10"
    #: File names, `{rank}` and `{host}` filled in.
    names: str = "nccl_trace_rank_{rank}"
    frames: bool = True
    library_frames: bool = False
    #: TORCH_NCCL_ENABLE_TIMING: the recorder knows what has started.
    timing: bool = True
    #: The status of a group counts sends and receives too, as NCCL's does.
    p2p_in_status: bool = True
    #: Entries that the ring of the recorder holds (TORCH_FR_BUFFER_SIZE).
    ring: int = 2000
    #: A batch's closing entry has sizes ``[[]]``, or none.
    empty_sizes: bool = False
    #: By host: how much its clock differs, in ns.
    clocks: tuple[int, ...] = (0,)
    #: By rank: the ns since the start of the job at which it is dumped.
    cuts: dict[int, int] = field(default_factory=dict)

    def host(self, rank: int) -> int:
        return rank // 8

    def file_name(self, rank: int) -> str:
        return self.names.format(rank=rank, host=f"node{self.host(rank):02d}")


def dump_files(
    simulation: Simulation, form: Form, absent: set[int]
) -> dict[str, bytes]:
    """Return the files by name, of all ranks that are not `absent`."""
    files = {}
    for rank in range(len(simulation.programs)):
        if rank not in absent:
            dump = _Dump(simulation, form, rank).content()
            data = (
                json.dumps(dump).encode()
                if form.kind == "json"
                else pickle.dumps(dump, 2)
            )
            files[form.file_name(rank)] = data
    return files


class _Dump:
    """The dump of one rank."""

    def __init__(self, simulation: Simulation, form: Form, rank: int) -> None:
        self.form, self.rank = form, rank
        self.groups = simulation.job.of(rank)
        self.ids = {group.uid: number for number, group in enumerate(self.groups)}
        self.cut = form.cuts.get(rank, 1 << 62)
        self.issued = [
            one for one in simulation.issued[rank] if one.created <= self.cut
        ]
        self.clock = _START_NS + form.clocks[form.host(rank) % len(form.clocks)]
        self.op_ids = dict.fromkeys(self.ids, 0)
        #: A GPU that has stopped runs this one for ever, and none after it.
        self.stuck = next((one for one in self.issued if one.hidden), None)
        self.entries: list[dict[str, Any]] = []

    def content(self) -> dict[str, Any]:
        form = self.form
        for one in self.issued:
            self.record(one)
        entries = self.entries[-form.ring :]
        if form.kind == "active":
            entries = [e for e in entries if e["time_discovered_completed_ns"] is None]
        if form.kind == "json":
            for entry in entries:
                entry["process_group"] = [*entry["process_group"]]
                if form.version == "2.10":  # JSON has no "not yet"
                    for key in (
                        "time_discovered_started_ns",
                        "time_discovered_completed_ns",
                    ):
                        entry[key] = entry[key] or 0
        config = {
            group.name: {
                "name": group.name,
                "desc": group.desc,
                "ranks": str([*group.ranks]),
            }
            for group in sorted(self.groups, key=self.in_config)
        }
        if form.kind == "gloo":
            ranks = [] if len(self.groups) > 1 else [*self.groups[0].ranks]
            config = {"": {"name": "", "desc": "", "ranks": str(ranks)}}
        library = "nccl_version" if form.version == "2.4" else "comm_lib_version"
        return {
            "version": form.version,
            "pg_config": config,
            library: "" if form.kind == "gloo" else "2.27.3",
            "pg_status": self.status(),
            "entries": entries,
        }

    def done(self, one: Issued) -> bool:
        return one.seen_complete and (one.completed or 0) <= self.cut

    def in_config(self, group: Group) -> str | int:
        """Return what the recorder sorts groups by: the name, as a string."""
        return group.name if self.form.version == "2.9" else self.ids[group.uid]

    def started(self, one: Issued) -> bool:
        if one.started is None or (one.hidden and one is not self.stuck):
            return False
        return one.started <= self.cut

    def status(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        convert = (
            str if self.form.kind == "json" and self.form.version == "2.10" else int
        )
        for group in self.groups:
            mine = [one for one in self.issued if one.op.group is group]
            if self.form.kind == "gloo" or not self.form.p2p_in_status:
                mine = [one for one in mine if not one.op.parts]
            if not any(one.op.group is group for one in self.issued):
                continue
            started = [one for one in mine if self.started(one)]
            done = [one for one in mine if self.done(one)]
            timing = self.form.timing and self.form.kind != "gloo"
            found[str(self.ids[group.uid])] = {
                f"last_{what}_collective": convert(_number(ones[-1]) if ones else -1)
                for what, ones in (
                    ("enqueued", mine),
                    ("started", started if timing else []),
                    ("completed", sorted(done, key=lambda one: one.completed or 0)),
                )
            }
        return found

    def record(self, one: Issued) -> None:
        """Append the entries of an op: one, or the parts of a batch and its end."""
        ranks = one.op.group.ranks
        for part in one.op.parts:
            way = "->" if part.kind == "send" else "<-"
            name = f"{part.kind} {ranks.index(self.rank)}{way}{ranks.index(part.peer)}"
            self.add(one, name, ([part.numel], [part.numel]), member=one.op.batch)
        if not one.op.parts:
            self.add(one, one.op.name, one.op.sizes)
        elif one.op.batch:
            self.add(one, one.op.name, None)

    def add(
        self,
        one: Issued,
        name: str,
        sizes: tuple[list[int], list[int]] | None,
        member: bool = False,
    ) -> None:
        form, op, group = self.form, one.op, one.op.group
        # The entry that ends a batch is no op of its own.
        self.op_ids[group.uid] += sizes is not None
        if form.kind == "gloo":
            if op.parts:
                return  # gloo records no sends and receives
            name = _GLOO_NAMES.get(name, name)
        done = self.done(one) and not member
        started = done or self.started(one)
        timing = form.timing and form.kind != "gloo" and not member
        state = "started" if started and timing else "scheduled"
        if done and form.kind != "gloo":
            state = "completed"
        no_sizes: list[list[int]] = [[]] if form.empty_sizes else []
        entry: dict[str, Any] = {
            "record_id": len(self.entries),
            "pg_id": self.ids[group.uid],
            # Gloo has no split_group: a group of its own has a name of its own.
            "process_group": (
                str(group.uid) if form.kind == "gloo" else group.name,
                group.desc,
            ),
            "thread_name": "pt_main",
            "thread_id": "140",
            "collective_seq_id": one.seq,
            "p2p_seq_id": 0 if form.kind == "gloo" else one.p2p_seq,
            "op_id": self.op_ids[group.uid],
            "profiling_name": f"{'gloo' if form.kind == 'gloo' else 'nccl'}:{name}",
            "time_created_ns": self.clock + one.created,
            "input_sizes": no_sizes if sizes is None else [sizes[0]],
            "input_dtypes": [op.dtype] if sizes else [],
            "output_sizes": no_sizes if sizes is None else [sizes[1]],
            "output_dtypes": [op.dtype] if sizes else [],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": done,
            "timeout_ms": 600_000,
            "is_p2p": bool(op.parts),
        }
        if name == "barrier":
            for way in "input", "output":
                entry[f"{way}_sizes"], entry[f"{way}_dtypes"] = [], []
        if state == "started" or (state == "completed" and timing):
            entry["time_discovered_started_ns"] = self.clock + (one.started or 0)
        if state == "completed":
            entry["time_discovered_completed_ns"] = self.clock + (one.completed or 0)
            if timing:
                entry["duration_ms"] = 0.03
        if form.version == "2.4":
            del entry["thread_name"], entry["thread_id"]
        if form.frames:
            entry["frames"] = self.frames(name, one)
        self.entries.append(entry)

    def frames(self, name: str, one: Issued) -> list[dict[str, Any]]:
        """Return the stack, innermost frame first."""
        own = [
            ("step", f"/job/{one.op.file}", one.op.line),
            ("main", "/job/train.py", 140),
        ]
        if self.form.library_frames:
            function = name.split()[0].lstrip("_").replace("_base", "_into_tensor")
            library = [
                (function, f"{_LIBRARY}distributed_c10d.py", 2900),
                ("wrapper", f"{_LIBRARY}c10d_logger.py", 83),
            ]
            own = library + own
        keys = ("name", "filename", "line")
        return [dict(zip(keys, frame, strict=True)) for frame in own]


def _number(one: Issued) -> int:
    return one.p2p_seq if one.op.parts else one.seq
