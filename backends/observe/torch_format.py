"""Flight-recorder records in the form that PyTorch's trace analyser reads.

PyTorch's processes dump their records as a pickled dict, one file per rank
(``FlightRecorder::dump`` in c10d, version 2.10 of the format; here without
``thread_id`` and ``thread_name``, which our recorder does not keep).
``torchfrtrace`` (``torch.distributed.flight_recorder.fr_trace``) reads the files
of all ranks and reports the collective that did not match. The format lacks some
of our concepts, which are mapped like this:

- Groups may share a name, so the name of a process group is the id of our group
  (``tp/8dd1a2e0``), and its description our name. The default group is ``default``.
- A rebuilt group restarts its sequence numbers, so each generation of a group is
  a process group of its own. The sends and receives of a generation are another
  one: the analyser treats neighbours in a process group that have the same number
  as a coalesced batch, and collectives and sends are counted separately.
- An op that failed, timed out or was aborted is ``retired`` but not
  ``completed``, as are PyTorch's own timeouts.
- One array per rank (all_gather's outputs, say) counts as one stacked array,
  as in ProcessGroupGloo: the analyser compares the first entry's elements.
  Where sizes differ from rank to rank, all_gather and reduce_scatter are the
  analyser's ``_v`` ops. The analyser requires the inputs and outputs of those
  to be equal on all ranks, so both list the parts of all ranks.
- What is no collective, send or receive is left out: groups of torch that are being
  made. The analyser exits at an op that it does not know.
- Ops of one kind in a coalesced batch are one entry with the arrays of all of
  them, as in PyTorch's fused batches. (The analyser matches several entries
  with one number only if it lists the files in order.)
- The analyser exits at an unknown communication library, which is therefore
  written as ``nccl``. The key ``backend``, which the analyser ignores, has the
  real name.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..groups.world import DEFAULT
from ..rank_sets import group_by
from ..work.op_type import OpType, spec_of
from .records import Record, common_numbers, sequence_number, splits_of, tag_of

__all__ = ["DTYPES", "ITEMSIZES", "OPS", "flight_recorder"]

VERSION = "2.10"

# Library names that the analyser accepts and that are names of our backends.
_LIBRARIES = ("gloo", "nccl")

#: c10::toString of the dtypes whose numpy name differs.
DTYPES = {
    "bool": "Bool",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
#: Of dtypes, in bytes. numpy itself has no bfloat16.
ITEMSIZES = {"bfloat16": 2} | {
    name: np.dtype(name).itemsize for name in DTYPES if name != "bfloat16"
}

#: Torch's name in a ``profiling_name``, without the library → op.
OPS = {
    name: op
    for op in OpType
    for name in (
        op.value,
        op.spec.torch_name,
        op.spec.torch_coalesced,
        op.spec.torch_uneven,
    )
    if name
}
OPS.update(
    {
        "all_to_all": OpType.ALL_TO_ALL,
        "all_reduce_barrier": OpType.BARRIER,
        "_broadcast_oop": OpType.BROADCAST,
        "_reduce_oop": OpType.REDUCE,
        "sparse_all_reduce": OpType.ALL_REDUCE,
        "all_reduce_sparse": OpType.ALL_REDUCE,
        "allreduce": OpType.ALL_REDUCE,
        "allgather_into_tensor_coalesced": OpType.ALL_GATHER_INTO_TENSOR,
        "all_gather_single": OpType.ALL_GATHER_INTO_TENSOR,
        "reduce_scatter_single": OpType.REDUCE_SCATTER_TENSOR,
        "all_to_all_v_single": OpType.ALL_TO_ALL_SINGLE,
        "gather_single": OpType.GATHER,
    }
)

#: The newest records: an op that is over on this rank may not be on another one.
_RECENT = 32
_BAD_ENDS = ("failed", "timed_out", "aborted")

#: The shape and dtype of each array.
Arrays = list[tuple[list[int], str]]


def flight_recorder(
    rank: int, groups: Mapping[str, Mapping[str, Any]], records: Sequence[Record]
) -> dict[str, Any]:
    """Return PyTorch's Flight Recorder dump (version 2.10) of one rank's records.

    `groups` maps the ids of groups to their names and global ranks, as `local_dump`
    returns them; `records` are `Record.as_dict`, oldest first. Times
    remain ``time.time_ns``. A group without an op is named, too: who does not come to
    an op of it is known only then.
    """
    records = _without_equal_numbers(filter(_has_form, records))
    recent = {id(record) for record in records[-_RECENT:]}
    batches = Counter(_number(record) for record in records)
    config: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    entries = []
    for run in _runs(records):
        first = run[0]
        name, description = _process_group(
            first["group_id"], first["group"], first["generation"]
        )
        if first["is_p2p"]:
            name += " p2p"
        ranks = list(groups[first["group_id"]]["ranks"])
        if name not in config:
            config[name] = _configured(name, description, ranks)
        pg_id = list(config).index(name)
        _note(status.setdefault(str(pg_id), {}), run[-1])
        inputs, outputs, op = _arrays(run, batches[_number(first)] > 1)
        library = first["backend"] if first["backend"] in _LIBRARIES else "nccl"
        entries.append(
            {
                "pg_id": pg_id,
                "process_group": (name, description),
                "profiling_name": f"{library}:{op}{_path(first, rank, ranks)}",
                "input_sizes": [shape for shape, _ in inputs],
                "input_dtypes": [dtype for _, dtype in inputs],
                "output_sizes": [shape for shape, _ in outputs],
                "output_dtypes": [dtype for _, dtype in outputs],
                **_course(run),
                **_agreements(first, ranks, id(first) in recent),
            }
        )
    for group_id, group in groups.items():
        if "unused" in group:
            name, description = _process_group(group_id, group["name"], group["unused"])
            config[name] = _configured(name, description, group["ranks"])
    return {
        "version": VERSION,
        "pg_config": config,
        "comm_lib_version": "rankscope",
        "host": socket.gethostname(),
        "pg_status": status,
        "entries": entries,
    }


def _has_form(record: Record) -> bool:
    """Return whether the analyser knows the op of `record`, under whatever name."""
    try:
        return OpType(record["op"]) is not OpType.UNKNOWN
    except ValueError:
        return False


def _without_equal_numbers(records: Iterable[Record]) -> list[Record]:
    """Return `records` with numbers of collectives by which no two are one batch.

    Their own ones are in ``number`` where those are others.
    """
    records = list(records)
    groups = group_by(range(len(records)), lambda place: _number(records[place])[:2])
    for places in groups.values():
        numbers = common_numbers(records[place] for place in places)
        for place, number in zip(places, numbers, strict=True):
            one = records[place]
            if number != sequence_number(one):
                own = {"number": one["collective_seq_id"], "collective_seq_id": number}
                records[place] = {**one, **own}
    return records


def _number(record: Record) -> tuple[str, int, bool, int]:
    """Return a key that is equal for the ops of one coalesced batch."""
    kind = "p2p_seq_id" if record["is_p2p"] else "collective_seq_id"
    return record["group_id"], record["generation"], record["is_p2p"], record[kind]


def _runs(records: Iterable[Record]) -> list[list[Record]]:
    """Return the records in lists of neighbours of one batch with the same op."""
    found: list[list[Record]] = []
    latest: dict[tuple[str, int, bool, int], list[Record]] = {}
    for record in records:
        run = latest.get(_number(record))
        if run is None or record["is_p2p"] or run[0]["op"] != record["op"]:
            run = latest[_number(record)] = []
            found.append(run)
        run.append(record)
    return found


def _process_group(group_id: str, group: str, generation: int) -> tuple[str, str]:
    """Return the name, which is the id, and the description of a group."""
    if group == DEFAULT:
        # PyTorch's name of the default group, which some of its tools search for.
        group_id, group = DEFAULT, "default_pg"
    return group_id + (f" (generation {generation})" if generation else ""), group


def _configured(name: str, description: str, ranks: Iterable[int]) -> dict[str, str]:
    return {"name": name, "desc": description, "ranks": str(list(ranks))}


def _path(record: Record, rank: int, ranks: list[int]) -> str:
    """Return `` 0->1`` or `` 1<-0``, ranks in the group; -1: any rank."""
    if not record["is_p2p"]:
        return ""
    peer = -1 if record["peer"] is None else record["peer"]
    return f" {ranks.index(rank)}{'->' if record['op'] == 'send' else '<-'}{peer}"


def _course(run: Sequence[Record]) -> dict[str, Any]:
    """Return numbers, source line, times and state; a run ends as its last op."""
    first, last = run[0], run[-1]
    state = last["state"]
    completed = state == "completed"
    if state in _BAD_ENDS:
        state = "started" if last["time_started_ns"] else "scheduled"
    found = {
        "frames": [_frame(one) for one in (first["frame"], *first.get("callers", ()))],
        "record_id": first["record_id"],
        "collective_seq_id": first["collective_seq_id"],
        "p2p_seq_id": first["p2p_seq_id"],
        "op_id": last["op_id"],
        "time_created_ns": first["time_created_ns"],
        "time_discovered_started_ns": first["time_started_ns"] or None,
        "time_discovered_completed_ns": (
            last["time_ended_ns"] or None if completed else None
        ),
        "state": state,
        "retired": completed or last["state"] in _BAD_ENDS,
        "timeout_ms": round(first["timeout"] * 1000),
        "is_p2p": first["is_p2p"],
        # Additional keys for human readers: the analyser ignores unknown keys.
        "backend": first["backend"],
        "op": first["op"],
        "error": last["error"],
        "splits": first.get("splits"),
        "time_waited_ns": first.get("time_waited_ns"),
        "number": first.get("number"),
        "uncounted_id": first.get("uncounted_id"),
    }
    if completed and last["duration_ns"] is not None:
        found["duration_ms"] = last["duration_ns"] / 1e6
    return found


def _agreements(
    record: Record, ranks: Sequence[int], is_recent: bool
) -> dict[str, Any]:
    """Return what the ranks of an op have to agree on and the format has no key for."""
    peer = record["peer"]
    found = {
        "root": None if record["is_p2p"] or peer is None else ranks[peer],
        "reduce_op": record["reduce_op"],
        "tag": tag_of(record) if record["is_p2p"] else None,
    }
    if record["state"] != "completed" or is_recent:
        # Else it is over on all ranks. Not `splits`: that is what the caller gave.
        found["parts"] = splits_of(record, len(ranks))
    return {key: value for key, value in found.items() if value is not None}


def _frame(frame: Mapping[str, Any]) -> dict[str, Any]:
    function, file = frame["function"], frame["file"]
    if frame["source"] != f"{Path(file).name}:{frame['line']}":
        # A cell: the name of its file is meaningless.
        function = f"{function} ({frame['source']})"
    return {"name": function, "filename": file, "line": frame["line"]}


def _note(status: dict[str, int], record: Record) -> None:
    """Update a process group's ``pg_status`` with `record`, its latest record."""
    happened = {
        "enqueued": True,
        "started": record["time_started_ns"] > 0,
        "completed": record["state"] == "completed",
    }
    for what, yes in happened.items():
        key = f"last_{what}_collective"
        status[key] = _number(record)[-1] if yes else status.get(key, -1)


def _arrays(run: Sequence[Record], coalesced: bool) -> tuple[Arrays, Arrays, str]:
    """Return inputs and outputs of a run, and the analyser's name of its op."""
    op: str = run[0]["op"]
    spec = spec_of(op)
    sides = [_inputs_outputs(record) for record in run]
    if spec.torch_uneven:
        lists = [inputs if len(inputs) > 1 else outputs for inputs, outputs in sides]
        if any(len({math.prod(shape) for shape, _ in parts}) > 1 for parts in lists):
            everybody = [part for parts in lists for part in parts]
            return everybody, everybody, spec.torch_uneven
    inputs = [array for side, _ in sides for array in _stacked(side)]
    outputs = [array for _, side in sides for array in _stacked(side)]
    name = spec.torch_name or op
    if coalesced:
        name = spec.torch_coalesced or name
    return inputs, outputs, name


def _inputs_outputs(record: Record) -> tuple[Arrays, Arrays]:
    arrays = [
        (list(shape), DTYPES.get(dtype, dtype))
        for shape, dtype in zip(record["sizes"], record["dtypes"], strict=True)
    ]
    spec = spec_of(record["op"])
    if spec.in_place:
        return arrays, arrays
    split = spec.inputs(len(arrays))
    return arrays[:split], arrays[split:]


def _stacked(arrays: Arrays) -> Arrays:
    if len(arrays) < 2:
        return arrays
    shape, dtype = arrays[0]
    if all(other == shape for other, _ in arrays):
        return [([len(arrays), *shape], dtype)]
    return [([sum(math.prod(other) for other, _ in arrays)], dtype)]
